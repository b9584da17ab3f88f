"""The rows of a report, scored in one pass over their probabilities: what every metric and table is computed from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.scores import BrierDecomposition
from hf_calib.metrics.state import RowScores, add_class_bins, score_chunks
from hf_calib.metrics.sums import (
    Binning,
    BinSums,
    TopLabel,
    bin_sums,
    binned_rows,
    equal_shares,
    uniform_bins,
)
from hf_calib.report.chance import Coins

# Resamples of more rows, or of more probabilities, would take minutes.
MOST_RESAMPLED = 200_000
MOST_NUMBERS_RESAMPLED = 2**26

# The first row of a block, its probabilities (n, C), labels (n,) and weights (n,), if any.
Block = tuple[int, NDArray[Any], NDArray[Any], FloatArray | None]


def are_few(n_rows: int, n_classes: int) -> bool:
    """Whether rows with one label each can be resampled in seconds."""
    return n_rows <= MOST_RESAMPLED and n_rows * n_classes <= MOST_NUMBERS_RESAMPLED


class ClassRows(NamedTuple):
    """The classes of rows, and sums over their probabilities of all classes."""

    labels: IntArray  # (N,)
    predicted: IntArray  # (N,)
    bins: BinSums  # (C, M), in bins of each class's probability
    coins: Coins  # (C,), one for each probability


@dataclass(frozen=True)
class Rows:
    """N scored rows; a weight says how many rows one stands for relative to others."""

    scores: RowScores
    n_bins: int
    # None if only the confidence of the predicted class is known.
    classes: ClassRows | None = None
    # None if the rows are too many to sort the probabilities of each.
    brier_parts: BrierDecomposition | None = None

    @classmethod
    def of_blocks(
        cls,
        blocks: Iterable[Block],
        shape: tuple[int, int],
        n_bins: int,
        brier_parts: BrierDecomposition | None = None,
    ) -> Rows:
        """Score blocks of checked rows; shape is the numbers of all rows and of classes."""
        n_rows, n_classes = shape
        confidence, correct, nll, brier = np.empty((4, n_rows))
        labels = np.empty(n_rows, np.intp)
        predicted = np.empty(n_rows, np.intp)
        weights: list[FloatArray] = []
        class_bins = np.zeros((3, n_classes, n_bins))
        coins = Coins.none(n_classes)
        for first, probs, own_labels, own_weights in blocks:
            for chunk in score_chunks(probs, own_labels, own_weights):
                place = slice(first + chunk.place.start, first + chunk.place.stop)
                confidence[place] = chunk.rows.confidence
                correct[place] = chunk.rows.correct
                nll[place] = chunk.rows.nll
                brier[place] = chunk.rows.brier
                labels[place] = chunk.labels
                predicted[place] = chunk.predicted
                add_class_bins(class_bins, chunk)
                own = Coins.of_columns(chunk.columns, chunk.rows.weights)
                coins = coins.plus(own)
            if own_weights is not None:
                weights.append(own_weights)
        mass = np.concatenate(weights) if weights else None
        of_classes = ClassRows(labels, predicted, BinSums(*class_bins), coins)
        scores = RowScores(confidence, correct, nll, brier, mass)
        return cls(scores, n_bins, of_classes, brier_parts)

    def __len__(self) -> int:
        return len(self.scores.confidence)

    @property
    def weights(self) -> FloatArray | None:
        """The weights (N,), if there are any."""
        return self.scores.weights

    @property
    def top(self) -> TopLabel:
        """The confidences (N,) and the correctness (N,)."""
        return TopLabel(self.scores.confidence, self.scores.correct)

    @cached_property
    def are_resampled(self) -> bool:
        """Whether intervals of means are from resamples; otherwise they are normal ones."""
        n_classes = 1 if self.classes is None else len(self.classes.bins.counts)
        return self.weights is None and are_few(len(self), n_classes)

    @cached_property
    def total(self) -> float:
        """The number of rows, or the sum of their weights."""
        return float(len(self) if self.weights is None else self.weights.sum())

    @cached_property
    def effective(self) -> float:
        """The number of rows; for rows with weights, the effective sample size (Kish 1965)."""
        if self.weights is None:
            return float(len(self))
        return self.total**2 / float(self.weights @ self.weights)

    @property
    def scale(self) -> float:
        """The effective rows of a weight of 1."""
        return self.effective / self.total

    @cached_property
    def places(self) -> IntArray:
        """The equal-width bin (N,) of each row."""
        return uniform_bins(self.scores.confidence, self.n_bins)

    @cached_property
    def ranked(self) -> TopLabel:
        """The rows by rising confidence: what sorts them again takes a fraction of the time."""
        return self.top.part(np.argsort(self.scores.confidence, kind="stable"))

    def bins(self, binning: Binning) -> BinSums:
        """The sums (M,) of the rows of each bin; with weights of equal-width and "quantile" bins."""
        if binning == "uniform":
            return self._uniform
        if self.weights is None:
            return bin_sums(self.ranked, self.n_bins, binning)
        return equal_shares(self.by_confidence(), self.n_bins, weighted=True)

    @cached_property
    def _uniform(self) -> BinSums:
        if self.weights is None:
            return bin_sums(self.top, self.n_bins)
        return BinSums(*binned_rows(self.top, self.n_bins)(self.weights))

    def by_confidence(self) -> FloatArray:
        """The sums (3, K) of rows, confidences and correct rows with each of K confidences, the least first."""
        different, slots = np.unique(self.scores.confidence, return_inverse=True)
        mass = np.ones(len(self)) if self.weights is None else self.weights
        terms = (mass, mass * self.scores.confidence, mass * self.scores.correct)
        sums = [np.bincount(slots, term, len(different)) for term in terms]
        return np.stack(sums)
