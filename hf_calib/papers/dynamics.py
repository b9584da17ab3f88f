"""Calibration as a training goes on: the record that `TrainingTrace` writes, as arrays, and what figures make of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.checks import FloatArray, IntArray, as_floats, check_number

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class TracedSet:
    """One set of rows at T evaluations: M bins of its predictions, and R rows followed one by one.

    NaN stands for the mean of an empty bin, and for the rows' own numbers at an evaluation of other rows (see
    `TrainingTrace`).

    Attributes:
        steps: (T,) optimizer steps.
        epochs: (T,) epochs done, with fractions.
        n: (T,) predictions in all.
        accuracy: (T,).
        ece: (T,) of equal-width bins.
        adaptive_ece: (T,) of equal-mass bins.
        edges: (T, M + 1) of the bins below: the evaluation set's, also where this is the training set.
        counts: (T, M) predictions in each bin of the confidence.
        bin_confidence: (T, M) their mean confidence, AdaFocal's C_val.
        bin_accuracy: (T, M) their accuracy, A_val.
        label_counts: (T, M) rows in each bin of the label's probability.
        label_probability: (T, M) its mean, AdaFocal's C_train where this is the training set.
        rows: (R,) which rows are followed: their numbers in the dataset. Where labels are of tokens, or some rows have
            none, their places among those that have one, of training rows among those of the sample.
        row_confidence: (T, R) probability of the predicted class.
        row_correct: (T, R) 1 where it is right.
        row_label_probability: (T, R).
        row_rival_probability: (T, R) the largest probability below the label's; 0 where there is none.
        row_max_logit: (T, R).
    """

    steps: FloatArray
    epochs: FloatArray
    n: FloatArray
    accuracy: FloatArray
    ece: FloatArray
    adaptive_ece: FloatArray
    edges: FloatArray
    counts: FloatArray
    bin_confidence: FloatArray
    bin_accuracy: FloatArray
    label_counts: FloatArray
    label_probability: FloatArray
    rows: IntArray
    row_confidence: FloatArray
    row_correct: FloatArray
    row_label_probability: FloatArray
    row_rival_probability: FloatArray
    row_max_logit: FloatArray

    @property
    def gaps(self) -> FloatArray:
        """(T, M) confidence minus accuracy of each bin, above 0 where it is over-confident; NaN in an empty one."""
        return self.bin_confidence - self.bin_accuracy


@dataclass(frozen=True)
class Trace:
    """A record of `hf_calib.TrainingTrace`.

    Attributes:
        loss: the name of the loss.
        sets: "training" and the evaluation sets ("eval" where there is one); each with its own evaluations.
        steps: (T,) the steps at which the gammas are.
        gammas_before: (T, M) each bin's gamma up to the evaluation; (0, 0) for a loss without a table.
        gammas_after: (T, M) after it.
    """

    loss: str
    sets: Mapping[str, TracedSet]
    steps: FloatArray
    gammas_before: FloatArray
    gammas_after: FloatArray

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read `training_trace.json`.

        Args:
            path: the file, or the folder of the training that holds it.

        Raises:
            ValueError: if there is no such file, or it is none that `TrainingTrace` wrote.
        """
        path = Path(path)
        path = path / "training_trace.json" if path.is_dir() else path
        requirement, way_out = "be a file of TrainingTrace", "train with callbacks=[TrainingTrace()]"
        if not path.is_file():
            raise InputValueError(expected(str(path), requirement, "no such file", way_out))
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            if saved["version"] != 1:
                got = f"version {saved['version']}"
                way_out = "read it with the version of hf_calib that wrote it"
                raise InputValueError(expected(str(path), "have version 1", got, way_out))
            return _from_json(saved)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputValueError):
                raise
            got = f"something else ({type(error).__name__}: {error})"
            raise InputValueError(expected(str(path), requirement, got, way_out)) from error


def moving_average(values: ArrayLike, *, factor: float = 0.5) -> FloatArray:
    """Exponential moving average over the first axis: `s_t = factor * s_(t-1) + (1 - factor) * x_t`, from `s_0 = x_0`.

    Args:
        values: (T,) or (T, ...), T at least 1.
        factor: weight of the past, in [0, 1); dual focal loss's figure 4a has 0.5.

    Returns:
        An array like values.

    Raises:
        TypeError: if the factor is not a number.
        ValueError: for a factor out of range, or no values.

    References:
        Tao et al. 2023, "Dual focal loss for calibration", figure 4a.

    >>> moving_average([0.4, 0.2, 0.2])
    array([0.4 , 0.3 , 0.25])
    """
    way_out = "the paper's is 0.5"
    if not 0 <= check_number("factor", factor, way_out) < 1:
        raise InputValueError(expected("factor", "be in [0, 1)", factor, way_out))
    smoothed = as_floats("values", values).copy()
    if smoothed.ndim == 0 or not len(smoothed):
        raise InputValueError(expected("values", "be at least one", smoothed.shape, "pass one per epoch"))
    for t in range(1, len(smoothed)):
        smoothed[t] = factor * smoothed[t - 1] + (1 - factor) * smoothed[t]
    return smoothed


def learned_epoch(epochs: ArrayLike, correct: ArrayLike, *, when: str = "last") -> FloatArray:
    """The epoch at which each row is learned.

    Args:
        epochs: (T,) of the evaluations, rising.
        correct: (T, R) whether each row was predicted right. Evaluations at which nothing is known (NaN for all) do
            not count.
        when: "last": from this epoch on it is right until the end; "first": it is right for the first time.

    Returns:
        (R,) epochs; infinity for a row that is never learned (with "last": wrong at the end).

    Raises:
        ValueError: for shapes that do not fit, epochs that do not rise, or another `when`.

    References:
        Wang et al. 2021, "Rethinking calibration of deep neural networks", whose groups AdaFocal's figure 34 shows.

    >>> correct = [[0, 1, 0], [1, 0, 0], [1, 1, 0]]
    >>> learned_epoch([1, 2, 3], correct), learned_epoch([1, 2, 3], correct, when="first")
    (array([ 2.,  3., inf]), array([ 2.,  1., inf]))
    """
    if when not in ("last", "first"):
        raise InputValueError(expected("when", "be 'last' or 'first'", repr(when), "see the docstring"))
    at, found = as_floats("epochs", epochs), as_floats("correct", correct)
    way_out = "pass a TracedSet's epochs and row_correct"
    if at.ndim != 1 or found.ndim != 2 or len(at) != len(found) or not len(at):
        got = f"{at.shape} and {found.shape}"
        raise InputValueError(expected("epochs and correct", "have shapes (T,) and (T, R)", got, way_out))
    if not (np.diff(at) > 0).all():
        raise InputValueError(expected("epochs", "rise", at.tolist(), way_out))
    known = ~np.isnan(found).all(axis=1)
    at, right = at[known], found[known] > 0.5
    if not len(at):
        raise InputValueError(expected("correct", "be known at some evaluation", "NaN alone", way_out))
    if when == "last":
        right = np.logical_and.accumulate(right[::-1])[::-1]  # from here to the end
    return np.where(right.any(axis=0), at[right.argmax(axis=0)], np.inf)


def learned_groups(learned: ArrayLike, boundaries: Sequence[float]) -> dict[str, BoolArray]:
    """Rows by when they were learned: up to the first boundary, between it and the next, and so on; and never.

    Args:
        learned: (R,) of `learned_epoch`.
        boundaries: epochs, rising; a group is (previous, this one].

    Returns:
        Name -> (R,) mask. Each row is in one; a group may be empty.

    Raises:
        TypeError: if a boundary is not a number.
        ValueError: if the boundaries do not rise, or one is not finite.

    >>> groups = learned_groups([1, 3, 7, np.inf], [2, 5])
    >>> {name: mask.tolist() for name, mask in groups.items()}
    {'to 2': [True, False, False, False], '2 to 5': [False, True, False, False],
     'after 5': [False, False, True, False], 'never': [False, False, False, True]}
    """
    epochs = np.asarray(learned, dtype=np.float64)
    way_out = "pass [20, 50] for the groups to 20, 20 to 50, after 50"
    limits = [check_number("a boundary", boundary, way_out) for boundary in boundaries]
    if not limits or sorted(set(limits)) != limits or not np.isfinite(limits).all():
        requirement = "be finite epochs that rise"
        raise InputValueError(expected("boundaries", requirement, list(boundaries), way_out))
    ends = [f"{limit:g}" if float(f"{limit:g}") == limit else repr(limit) for limit in limits]
    never = np.isinf(epochs)
    group = np.searchsorted(limits, epochs, side="left")
    names = [f"to {ends[0]}", *(f"{low} to {high}" for low, high in pairwise(ends)), f"after {ends[-1]}"]
    return {name: (group == k) & ~never for k, name in enumerate(names)} | {"never": never}


def _from_json(saved: dict[str, Any]) -> Trace:
    entries = saved["entries"]
    names = dict.fromkeys(name for entry in entries for name in entry["sets"])
    with_table = [entry for entry in entries if "gammas" in entry]
    before, after = (
        _table([entry["gammas"][key] for entry in with_table]) if with_table else np.empty((0, 0))
        for key in ("before", "after")
    )
    return Trace(
        loss=str(saved["loss"]),
        sets={name: _set_from_json(name, saved) for name in names},
        steps=_table([entry["step"] for entry in with_table]),
        gammas_before=before,
        gammas_after=after,
    )


def _set_from_json(name: str, saved: dict[str, Any]) -> TracedSet:
    entries = [entry for entry in saved["entries"] if name in entry["sets"]]
    found = [entry["sets"][name] for entry in entries]

    def of_bins(key: str) -> FloatArray:
        return _table([each["bins"][key] for each in found])

    def of_rows(key: str) -> FloatArray:
        return _table([each["rows"][key] for each in found])

    return TracedSet(
        steps=_table([entry["step"] for entry in entries]),
        epochs=_table([entry["epoch"] for entry in entries]),
        n=_table([each["n"] for each in found]),
        accuracy=_table([each["accuracy"] for each in found]),
        ece=_table([each["ece"] for each in found]),
        adaptive_ece=_table([each["adaptive_ece"] for each in found]),
        edges=of_bins("edges"),
        counts=of_bins("counts"),
        bin_confidence=of_bins("confidence"),
        bin_accuracy=of_bins("accuracy"),
        label_counts=of_bins("label_counts"),
        label_probability=of_bins("label_probability"),
        rows=np.array(saved["rows"][name], dtype=np.intp),
        row_confidence=of_rows("confidence"),
        row_correct=of_rows("correct"),
        row_label_probability=of_rows("label_probability"),
        row_rival_probability=of_rows("rival_probability"),
        row_max_logit=of_rows("max_logit"),
    )


def _table(values: list[Any]) -> FloatArray:
    """As float64; null is NaN. Rows of unequal lengths are no table."""
    return np.array(values, dtype=np.float64)
