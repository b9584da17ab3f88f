"""Metrics of several labels per row, each a problem with two outcomes, for resamples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import check
from hf_calib.metrics.checks import (
    RANGE_TOLERANCE,
    FloatArray,
    as_array,
    check_kind,
    check_shape,
    refuse,
)
from hf_calib.metrics.ranking import area_under_roc, average_precision, tally
from hf_calib.metrics.scores import nats_of
from hf_calib.metrics.sums import BinSums, in_bins, uniform_bins

# An unknown label, whose decision is left out.
UNKNOWN = -100


class Decisions(NamedTuple):
    """Probabilities (N, C), their labels (N, C) bool, and the mask (N, C) of known labels."""

    probs: FloatArray
    true: NDArray[np.bool_]
    known: NDArray[np.bool_]


def check_label_probs(probs: ArrayLike, *, argument: str = "probs") -> FloatArray:
    """Return probabilities (N, C) of independent labels as float64 in [0, 1]."""
    rows = as_array(argument, probs)
    way_out = f"pass {argument}.astype(float)"
    check_kind(rows, "f", f"{argument} to be a float array", way_out)
    are_rows = rows.ndim == 2 and rows.size > 0
    requirement = f"{argument} to have shape (N, C), N and C at least 1"
    way_out = "pass one row per example and one column per label"
    check(are_rows, requirement, f"shape {rows.shape}", way_out)
    # This is False for NaN.
    inside = (rows >= -RANGE_TOLERANCE) & (rows <= 1 + RANGE_TOLERANCE)
    refuse(~inside, argument, "lie in [0, 1]", rows, "pass sigmoid(logits)")
    return np.clip(rows.astype(np.float64), 0, 1)


def check_decisions(
    probs: ArrayLike, labels: ArrayLike, *, argument: str = "probs"
) -> Decisions:
    """Check probabilities (N, C) in [0, 1] and labels (N, C) of 0 and 1, or -100 if unknown."""
    rows = check_label_probs(probs, argument=argument)
    targets = as_array("labels", labels)
    way_out = f"pass 0 or 1 for each column of {argument}"
    check_shape("labels", targets, rows.shape, way_out)
    wrong = ~np.isin(targets, (0, 1, UNKNOWN))
    refuse(wrong, "labels", "be 0 or 1", targets, "leave a decision out with -100")
    known = targets != UNKNOWN
    requirement = "labels to be known somewhere"
    check(known.any(), requirement, "-100 only", "pass labelled rows")
    return Decisions(rows, targets == 1, known)


def label_bins(decisions: Decisions, n_bins: int) -> BinSums:
    """The sums (C, M) of the probabilities and outcomes of each label in equal-width bins."""
    every = np.ones(len(decisions.probs))
    sizes, gaps, true, _, _ = LabelMetrics(decisions, n_bins).sums(every)
    return BinSums(sizes, gaps + true, true)


def negative_logs_of_decisions(decisions: Decisions) -> FloatArray:
    """The mean negative log-likelihood (N,) of each row's known labels; 0 for a row without one."""
    nats = _nats(decisions.probs, decisions.true)
    sums = np.where(decisions.known, nats, 0).sum(axis=1)
    n_known = decisions.known.sum(axis=1)
    return np.asarray(sums / np.maximum(n_known, 1))


def _nats(probs: FloatArray, true: NDArray[np.bool_]) -> FloatArray:
    """The negative log-likelihoods (...) of decisions (...)."""
    return nats_of(np.where(true, probs, 1 - probs))


class LabelMetrics:
    """Metrics of each label and of all decisions together, for resamples of N fixed rows."""

    def __init__(self, decisions: Decisions, n_bins: int) -> None:
        n_labels = decisions.probs.shape[1]
        self._rows, labels = np.nonzero(decisions.known)
        probs = decisions.probs[decisions.known]
        true = decisions.true[decisions.known]
        gaps = probs - true
        slots = labels * n_bins + uniform_bins(probs, n_bins)
        nats = _nats(probs, true)
        columns = (1.0, gaps, true.astype(np.float64), gaps**2, nats)
        self._add = in_bins(slots, n_labels * n_bins, *columns)
        self._shape = (len(columns), n_labels, n_bins)
        # The decisions of each label, and at last those of all.
        members = [np.flatnonzero(labels == c) for c in range(n_labels)]
        members.append(np.arange(len(labels)))
        # They are sorted once; a resample only counts them.
        self._ranked = []
        for each in members:
            tallied = tally(probs[each], true[each])
            self._ranked.append((self._rows[each], tallied))

    def sums(self, counts: FloatArray) -> FloatArray:
        """Sums (5, C, M) in bins: decisions, gaps, true decisions, squared errors and nats."""
        return self._add(counts[self._rows]).reshape(self._shape)

    def evaluate(self, counts: NDArray[Any]) -> dict[str, FloatArray]:
        """Each metric (R, C + 1) for counts (R, N) of rows, at last of all decisions; or NaN."""
        found = [self._of_sample(each.astype(np.float64)) for each in counts]
        return {name: np.stack([each[name] for each in found]) for name in found[0]}

    def _of_sample(self, counts: FloatArray) -> dict[str, FloatArray]:
        by_label = self.sums(counts)
        both = np.concatenate([by_label, by_label.sum(axis=1, keepdims=True)], axis=1)
        sizes, gaps, true, squared, nats = both
        # A label that no drawn row knows has no metrics.
        known = sizes.sum(axis=-1)
        known[known == 0] = np.nan
        means = {"prevalence": true, "brier": squared, "nll": nats, "ece": np.abs(gaps)}
        found = {name: sums.sum(axis=-1) / known for name, sums in means.items()}
        worst = (np.abs(gaps) / np.maximum(sizes, 1)).max(axis=-1)
        found["mce"] = np.where(np.isnan(known), np.nan, worst)
        ranked = [tallied(counts[rows]) for rows, tallied in self._ranked]
        found["auroc"] = np.array([area_under_roc(*each) for each in ranked])
        precisions = [average_precision(*each) for each in ranked]
        found["average_precision"] = np.array(precisions)
        return found


def macro(by_label: Mapping[str, NDArray[Any]]) -> dict[str, FloatArray]:
    """The mean (R,) of each metric (R, C + 1) over the labels that have it; NaN if none has."""
    means = {}
    for name, values in by_label.items():
        of_labels = values[:, :-1]
        n_defined = (~np.isnan(of_labels)).sum(axis=1)
        divisor = np.where(n_defined > 0, n_defined, np.nan)
        means[name] = np.nansum(of_labels, axis=1) / divisor
    return means
