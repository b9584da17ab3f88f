"""The rows of a report, scored in one pass over their probabilities: what every metric and table is computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib.metrics.checks import FloatArray, IntArray, row_chunks
from hf_calib.metrics.scores import BrierDecomposition
from hf_calib.metrics.state import (
    N_CELLS,
    GroupSums,
    RowScores,
    add_class_bins,
    cells_of,
    score_chunks,
)
from hf_calib.metrics.sums import (
    Binning,
    BinSums,
    TopLabel,
    add_to,
    bin_sums,
    equal_shares,
    uniform_bins,
)
from hf_calib.report.chance import Coins

# Resamples of more rows, or of more probabilities, would take minutes.
MOST_RESAMPLED = 200_000
MOST_NUMBERS_RESAMPLED = 2**26
# Sorting more rows, several times, would take many times their memory.
MOST_SORTED = 1_000_000

# The first row of a block, its probabilities (n, C), labels (n,) and weights (n,), if any.
Block = tuple[int, NDArray[Any], NDArray[Any], FloatArray | None]


def are_few(n_rows: int, n_classes: int) -> bool:
    """Whether rows with one label each can be resampled in seconds."""
    return n_rows <= MOST_RESAMPLED and n_rows * n_classes <= MOST_NUMBERS_RESAMPLED


class ClassSums(NamedTuple):
    """Sums over the probabilities of all classes, in each of the C classes."""

    bins: BinSums  # (C, M), in bins of the class's probability
    coins: Coins  # (C,), one for each probability
    predicted: Coins  # (C,), one for each confidence of a prediction of the class


@dataclass(frozen=True)
class Rows:
    """N scored rows; a weight says how many rows one stands for relative to others."""

    scores: RowScores
    groups: GroupSums  # by the predicted class, or in one group if that is unknown
    coins: Coins  # (M,), one for each confidence, in its bin
    # None if only the confidence of the predicted class is known.
    classes: ClassSums | None = None
    # None if the rows are too many to sort the probabilities of each.
    brier_parts: BrierDecomposition | None = None

    @classmethod
    def of_top(cls, scores: RowScores, n_bins: int) -> Rows:
        """Rows of which only the top label is known."""
        groups = GroupSums.empty(1, n_bins)
        groups.add(scores, np.zeros(len(scores.confidence), np.intp))
        return cls(scores, groups, _coins_in_bins(scores, n_bins))

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
        mass: list[FloatArray] = []
        groups = GroupSums.empty(n_classes, n_bins)
        class_bins = np.zeros((3, n_classes, n_bins))
        coins = Coins.none(n_bins)
        of_classes = Coins.none(n_classes)
        of_predicted = Coins.none(n_classes)
        for first, probs, labels, weights in blocks:
            for chunk in score_chunks(probs, labels, weights):
                rows = chunk.rows
                place = slice(first + chunk.place.start, first + chunk.place.stop)
                confidence[place] = rows.confidence
                correct[place] = rows.correct
                nll[place] = rows.nll
                brier[place] = rows.brier
                groups.add(rows, chunk.predicted)
                add_class_bins(class_bins, chunk)
                coins = coins.plus(_coins_in_bins(rows, n_bins))
                own = Coins.of_columns(chunk.columns, rows.weights)
                of_classes = of_classes.plus(own)
                own = Coins.of(
                    rows.confidence, chunk.predicted, n_classes, rows.weights
                )
                of_predicted = of_predicted.plus(own)
            if weights is not None:
                mass.append(weights)
        all_mass = np.concatenate(mass) if mass else None
        scores = RowScores(confidence, correct, nll, brier, all_mass)
        classes = ClassSums(BinSums(*class_bins), of_classes, of_predicted)
        return cls(scores, groups, coins, classes, brier_parts)

    def __len__(self) -> int:
        return len(self.scores.confidence)

    @property
    def n_bins(self) -> int:
        """M, the number of bins."""
        return self.groups.bins.shape[2]

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
        return self.weights is None and are_few(len(self), len(self.groups.scores[0]))

    @cached_property
    def together(self) -> GroupSums:
        """The sums of all rows as one group."""
        bins = self.groups.bins.sum(axis=1, keepdims=True)
        return GroupSums(bins, self.groups.scores.sum(axis=1, keepdims=True))

    @property
    def total(self) -> float:
        """The number of rows, or the sum of their weights."""
        return float(self.together.bins[1].sum())

    @property
    def effective(self) -> float:
        """The number of rows; for rows with weights, the effective sample size (Kish 1965)."""
        return float(self.together.effective_rows()[0])

    @property
    def scale(self) -> float:
        """The effective rows of a weight of 1."""
        return self.effective / self.total

    def mean(self, name: str) -> float:
        """The mean "nll", "brier", "gap" or "accuracy"."""
        return float(self.together.mean(name)[0][0])

    def bins(self, binning: Binning) -> BinSums:
        """The sums (M,) of the rows of each bin; with weights of equal-width and "quantile" bins."""
        if binning == "uniform":
            return BinSums(*(sums[0] for sums in self.together.bin_sums()))
        if self.are_sorted:
            return bin_sums(self.top, self.n_bins, binning)
        is_weighted = self.weights is not None
        return equal_shares(self.by_confidence(), self.n_bins, weighted=is_weighted)

    @property
    def are_sorted(self) -> bool:
        """Whether metrics sort the rows; otherwise they read `by_confidence`."""
        return self.weights is None and len(self) <= MOST_SORTED

    def by_confidence(self) -> FloatArray:
        """The sums (3, K) of weights, confidences and correct rows with each of K confidences, the least first.

        Of many rows, those within a cell count as rows of one confidence.
        """
        find_slots: Callable[[FloatArray], IntArray] = cells_of
        n_slots = N_CELLS
        if len(self) <= MOST_SORTED:
            different = np.unique(self.scores.confidence)
            find_slots = different.searchsorted
            n_slots = len(different)
        sums = np.zeros((3, n_slots))
        for part in row_chunks(len(self)):
            rows = self.scores.part(part)
            in_bin, _ = rows.terms()
            _, mass, stated, _, right = in_bin
            add_to(sums, find_slots(rows.confidence), [mass, stated, right])
        return sums


def _coins_in_bins(rows: RowScores, n_bins: int) -> Coins:
    """A coin for each confidence, in its equal-width bin."""
    places = uniform_bins(rows.confidence, n_bins)
    return Coins.of(rows.confidence, places, n_bins, rows.weights)
