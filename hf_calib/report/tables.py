"""The rows of a report: what each confidence bin and each class shows, and whether chance can explain it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.sums import TopLabel, bin_sums, uniform_bins, uniform_edges
from hf_calib.report.coins import Coins


@dataclass(frozen=True)
class BinRow:
    """The examples of one confidence bin, or of a run of them."""

    lower: float
    upper: float
    count: int
    confidence: float  # mean confidence
    accuracy: float
    gap: float  # confidence - accuracy: above 0 is over-confident
    contribution: float  # |gap| count / N: these add up to the ECE
    p_value: float  # of such a gap, either way, if the confidences were right


@dataclass(frozen=True)
class ClassRow:
    """One class: how often it occurs, how likely it was said to be, and how far its predictions hold."""

    index: int
    name: str
    support: int  # examples of the class
    frequency: float  # support / N
    mean_probability: float  # over all N examples; equals the frequency if calibrated
    class_gap: float  # the class's term of the classwise calibration error
    predicted: int  # examples for which it is the most probable class
    precision: float | None  # how often it is right then; None if it is never predicted
    confidence: float | None  # mean confidence then
    p_value: float  # of confidence - precision, if the confidences were right
    frequency_p_value: float  # of frequency - mean_probability, if the probabilities were right


def bin_rows(confidences: FloatArray, correct: FloatArray, n_bins: int) -> tuple[BinRow, ...]:
    """The equal-width bins that hold examples, from the lowest.

    >>> row = bin_rows(np.array([0.9, 0.95]), np.array([1.0, 0.0]), 2)[0]
    >>> round(row.gap, 3), row.lower, row.count
    (0.425, 0.5, 2)
    """
    numbers = uniform_bins(confidences, n_bins)
    sums = bin_sums(TopLabel(confidences, correct), n_bins)
    coins = Coins.of(confidences, numbers, n_bins)
    edges = uniform_edges(n_bins)
    n_examples = len(correct)
    return tuple(
        row_of_sums(
            float(edges[m]),
            float(edges[m + 1]),
            count=int(sums.counts[m]),
            confidence=float(sums.confidence[m]),
            right=float(sums.correct[m]),
            p_value=coins.group(m).p_value(float(sums.correct[m])),
            n_examples=n_examples,
        )
        for m in range(n_bins)
        if sums.counts[m]
    )


def row_of_sums(
    lower: float,
    upper: float,
    *,
    count: int,
    confidence: float,
    right: float,
    p_value: float,
    n_examples: int,
) -> BinRow:
    """The row of the examples between two edges, from the sums of their confidences and right ones."""
    gap = (confidence - right) / count
    return BinRow(
        lower=lower,
        upper=upper,
        count=count,
        confidence=confidence / count,
        accuracy=right / count,
        gap=gap,
        contribution=abs(gap) * count / n_examples,
        p_value=p_value,
    )


def p_cell(p_value: float) -> str:
    """A p-value as tables show it: none below the least that 1,000 resamples can give.

    >>> p_cell(0.6543), p_cell(1 / 1001)
    ('0.65', '< 0.001')
    """
    return "< 0.001" if p_value < 0.001 else f"{p_value:.2g}"


def p_in_words(p_value: float) -> str:
    """A p-value as sentences state it.

    >>> p_in_words(0.0071), p_in_words(1e-9)
    ('p = 0.0071', 'p < 0.001')
    """
    cell = p_cell(p_value)
    return f"p {cell}" if cell.startswith("<") else f"p = {cell}"


def worst_bins(rows: tuple[BinRow, ...], limit: int = 5) -> tuple[BinRow, ...]:
    """The bins that add most to the ECE, worst first.

    Not those with the largest gap, which are the emptiest ones.
    """
    return tuple(sorted(rows, key=lambda row: (-row.contribution, row.lower))[:limit])


def class_rows(
    probs: NDArray[Any],
    labels: NDArray[np.int64],
    *,
    gaps: FloatArray,
    names: tuple[str, ...],
) -> tuple[ClassRow, ...]:
    """One row for each column of probs (N, C); `gaps` (C,) are the classwise calibration errors."""
    n_examples, n_classes = probs.shape
    predicted = probs.argmax(axis=1)
    confidences = probs[np.arange(n_examples), predicted].astype(np.float64)
    support = np.bincount(labels, minlength=n_classes)
    means, coins = probs.mean(axis=0, dtype=np.float64), Coins.of_columns(probs)
    of_right = Coins.of(confidences, predicted, n_classes)
    sums = _sums_by_prediction(predicted, confidences, predicted == labels, n_classes)
    return tuple(
        _class_row(
            *(c, names[c], int(support[c]), n_examples, float(means[c]), float(gaps[c]), sums[:, c]),
            p_value=of_right.group(c).p_value(float(sums[2, c])),
            frequency_p_value=coins.group(c).p_value(float(support[c])),
        )
        for c in range(n_classes)
    )


def _sums_by_prediction(
    predicted: IntArray, confidences: FloatArray, right: NDArray[np.bool_], n_classes: int
) -> FloatArray:
    """Count, confidence and right ones (3, C) of the predictions of each class."""
    weights = (np.ones_like(confidences), confidences, right.astype(np.float64))
    return np.stack([np.bincount(predicted, weight, minlength=n_classes) for weight in weights])


def _class_row(
    index: int,
    name: str,
    support: int,
    n_examples: int,
    mean_probability: float,
    class_gap: float,
    sums: FloatArray,
    *,
    p_value: float,
    frequency_p_value: float,
) -> ClassRow:
    count, confidence, right = map(float, sums)
    return ClassRow(
        index=index,
        name=name,
        support=support,
        frequency=support / n_examples,
        mean_probability=mean_probability,
        class_gap=class_gap,
        predicted=int(count),
        precision=right / count if count else None,
        confidence=confidence / count if count else None,
        p_value=p_value,
        frequency_p_value=frequency_p_value,
    )
