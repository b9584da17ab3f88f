"""The section of a report on soft labels: the probabilities against what many annotators say, not one label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import entr

import hf_calib.metrics as metrics
from hf_calib.metrics.checks import FloatArray
from hf_calib.metrics.intervals import percentile_intervals
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.metrics.sums import Interval
from hf_calib.report.measures import Settings
from hf_calib.report.text import Table, columns, with_interval


class SoftMeasure(NamedTuple):
    """A metric of `hf_calib.metrics` that takes soft labels, and what it is called."""

    title: str
    metric: str
    options: Mapping[str, Any] = {}
    binned: bool = False  # takes the report's number of bins, and has no interval: noise makes it larger


_ECE = "expected_calibration_error"

#: The metrics against the labels of several annotators: key -> measure.
SOFT_MEASURES: dict[str, SoftMeasure] = {
    "accuracy": SoftMeasure("Mean share of the predicted class", "accuracy"),
    "ece": SoftMeasure(LOGGED_METRICS["ece"], _ECE, binned=True),
    "adaptive_ece": SoftMeasure(LOGGED_METRICS["adaptive_ece"], _ECE, {"binning": "quantile"}, binned=True),
    "classwise_ece": SoftMeasure(LOGGED_METRICS["classwise_ece"], "classwise_calibration_error", binned=True),
    "true_calibration_error": SoftMeasure("True calibration error, by example", "true_calibration_error"),
    "brier": SoftMeasure(LOGGED_METRICS["brier"], "brier_score"),
    "nll": SoftMeasure(LOGGED_METRICS["nll"], "negative_log_likelihood"),
}
_LIKELY_SAME_ORDER = 0.5  # of the rows


@dataclass(frozen=True)
class SoftLabelSection:
    """The probabilities of a report against soft labels of its rows.

    Args:
        n_examples: N.
        agreement: the share of rows whose label has the largest share of the soft label.
        entropy: of the soft labels, mean, in nats.
        before: key -> value with interval, see `SOFT_MEASURES`.
        after: the same after calibration, or None.
    """

    n_examples: int
    agreement: float
    entropy: float
    before: Mapping[str, Interval]
    after: Mapping[str, Interval] | None = None

    def sentences(self) -> list[str]:
        """The source of the soft labels, and how to read the table."""
        said = [
            f"{self.n_examples:,} soft labels: each class's share among an example's annotators. In the binned errors "
            "the share of the predicted class stands where being right does above, so that a hard example is no "
            "wrong prediction.",
            "The true calibration error is the mean distance of an example's probabilities from its shares, in which "
            "nothing cancels. Shares of few annotators scatter, and that is part of it.",
            f"The shares have an entropy of {self.entropy:.4f} nats, below which no model's negative log-likelihood "
            f"can be. The largest share is the label's in {self.agreement:.1%} of the rows.",
        ]
        if self.agreement < _LIKELY_SAME_ORDER:
            said.append(
                "That is few. Check that rows and classes are in the same order as the labels and the model's."
            )
        return said

    def table(self) -> Table:
        """Every measure with its interval, before and after calibration."""
        states = columns(self.before, self.after)
        rows = [
            [
                SOFT_MEASURES[key].title,
                *(with_interval(*found[key]) for found in states.values()),
            ]
            for key in self.before
        ]
        return ["against soft labels", *states], rows

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        return {
            "n_examples": self.n_examples,
            "agreement": self.agreement,
            "entropy": self.entropy,
            **{
                state: None
                if found is None
                else {
                    key: {"title": SOFT_MEASURES[key].title, **value._asdict()}
                    for key, value in found.items()
                }
                for state, found in (("before", self.before), ("after", self.after))
            },
        }


def soft_label_section(
    soft_labels: FloatArray,
    labels: NDArray[np.int64],
    before: NDArray[Any],
    after: NDArray[Any] | None,
    settings: Settings,
) -> SoftLabelSection:
    """Measure probabilities (N, C) against soft labels (N, C) of `check_soft_labels`."""
    found = [None if probs is None else _measure(probs, soft_labels, settings) for probs in (before, after)]
    assert found[0] is not None
    return SoftLabelSection(
        n_examples=len(labels),
        agreement=float((soft_labels.argmax(axis=1) == labels).mean()),
        entropy=float(entr(np.clip(soft_labels, 0, 1)).sum(axis=1).mean()),
        before=found[0],
        after=found[1],
    )


def _measure(probs: NDArray[Any], soft_labels: FloatArray, settings: Settings) -> dict[str, Interval]:
    resampled = {key: measure for key, measure in SOFT_MEASURES.items() if not measure.binned}
    intervals = percentile_intervals(
        [(measure.metric, dict(measure.options)) for measure in resampled.values()],
        probs,
        soft_labels,
        n_resamples=settings.n_resamples,
        confidence_level=settings.confidence_level,
        seed=settings.seed,
    )
    found = dict(zip(resampled, intervals, strict=True))
    for key in SOFT_MEASURES.keys() - found.keys():
        measure = SOFT_MEASURES[key]
        function = getattr(metrics, measure.metric)
        found[key] = Interval(float(function(probs, soft_labels, n_bins=settings.n_bins, **measure.options)))
    return {key: found[key] for key in SOFT_MEASURES}
