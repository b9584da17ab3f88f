"""The rows of a report, scored in one pass: what every metric and table is computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib.metrics.checks import FloatArray, IntArray, row_chunks
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
from hf_calib.report.chance import coins_in_groups, coins_of_columns

# Resamples of more rows, or of more probabilities, would take minutes.
MOST_RESAMPLED = 200_000
MOST_NUMBERS_RESAMPLED = 2**26
# Sorting more rows, several times, would take many times their memory.
MOST_SORTED = 1_000_000

# The probabilities of a block of rows (n, C), their labels (n,) and their weights (n,), if any.
Block = tuple[NDArray[Any], NDArray[Any], FloatArray | None]


def are_few(n_rows: int, n_classes: int) -> bool:
    """Whether rows with one label each can be resampled in seconds."""
    return n_rows <= MOST_RESAMPLED and n_rows * n_classes <= MOST_NUMBERS_RESAMPLED


class Group(GroupSums):
    """The sums of one group of rows, which may be all rows; only ratios of weights count."""

    @classmethod
    def of(cls, sums: GroupSums, *members: int) -> Group:
        """The rows of the given groups, or of all of them, together."""
        chosen: Any = list(members) or slice(None)
        parts = [part[:, chosen].sum(axis=1, keepdims=True) for part in sums]
        return cls(*parts)

    @property
    def total(self) -> float:
        """The number of rows, or the sum of their weights."""
        return float(self.bins[1].sum())

    @property
    def effective(self) -> float:
        """The number of rows; for rows with weights, the effective sample size (Kish 1965)."""
        return float(self.effective_rows()[0])

    @property
    def scale(self) -> float:
        """The effective rows of a weight of 1."""
        return self.effective / self.total

    @property
    def uniform(self) -> BinSums:
        """The sums (M,) of the equal-width bins."""
        return BinSums(*(part[0] for part in self.bin_sums()))

    def scaled(self, sums: BinSums) -> BinSums:
        """Sums in bins of the group, as if of its effective rows."""
        # Weights are no rows: times 100, they would make every interval a tenth as wide.
        return BinSums(*(part * self.scale for part in sums))

    def mean_and_error(self, name: str) -> tuple[float, float]:
        """The mean "nll", "brier", "gap" or "accuracy", and its standard error."""
        mean, error = self.mean(name)
        return float(mean[0]), float(error[0])


class ClassSums(NamedTuple):
    """Sums over the probabilities of all classes, in each of the C classes."""

    # (C, M), in bins of the class's probability.
    bins: BinSums
    # (5, C), a coin for each probability.
    coins: FloatArray
    # (5, C), a coin for each confidence of a prediction of the class.
    predicted: FloatArray


@dataclass(frozen=True)
class Rows:
    """N scored rows; a weight says how many rows one stands for relative to others."""

    scores: RowScores
    groups: GroupSums  # by the predicted class, or in one group if that is unknown
    coins: FloatArray  # (5, M), a coin for each confidence, in its bin
    # The `ClassSums`; None if only the confidence of the predicted class is known.
    classes: Any = None
    # The `BrierDecomposition`; None if the rows are too many to sort the probabilities of each.
    brier_parts: Any = None

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
        brier_parts: Any = None,
    ) -> Rows:
        """Score blocks of checked rows; shape is the numbers of all rows and of classes."""
        n_rows, n_classes = shape
        # Sums over classes are added up block by block, as the probabilities are not all held.
        # The four numbers of each row are held, because resamples and sorting need them.
        columns = np.empty((4, n_rows))
        mass: list[FloatArray] = []
        groups = GroupSums.empty(n_classes, n_bins)
        class_bins = np.zeros((3, n_classes, n_bins))
        coins = np.zeros((5, n_bins))
        of_classes = np.zeros((5, n_classes))
        of_predicted = np.zeros((5, n_classes))
        n_scored = 0
        for block in blocks:
            for chunk in score_chunks(*block):
                rows = chunk.rows
                *four, weights = rows
                first = n_scored
                n_scored += len(chunk.labels)
                columns[:, first:n_scored] = four
                if weights is not None:
                    mass.append(weights)
                groups.add(rows, chunk.predicted)
                add_class_bins(class_bins, chunk)
                coins += _coins_in_bins(rows, n_bins)
                of_classes += coins_of_columns(chunk.columns, weights)
                of_predicted += coins_in_groups(
                    rows.confidence, chunk.predicted, n_classes, weights
                )
        all_mass = np.concatenate(mass) if mass else None
        classes = ClassSums(BinSums(*class_bins), of_classes, of_predicted)
        confidence, correct, nll, brier = columns
        scores = RowScores(confidence, correct, nll, brier, all_mass)
        return cls(scores, groups, coins, classes, brier_parts)

    def __len__(self) -> int:
        return len(self.scores.confidence)

    @property
    def n_bins(self) -> int:
        """M, the number of bins."""
        return self.coins.shape[1]

    @property
    def weights(self) -> FloatArray | None:
        """The weights (N,), if there are any."""
        return self.scores.weights

    @property
    def top(self) -> TopLabel:
        """The confidences (N,) and the correctness (N,)."""
        return TopLabel(self.scores.confidence, self.scores.correct)

    @cached_property
    def together(self) -> Group:
        """The sums of all rows as one group."""
        return Group.of(self.groups)

    # Cached, so that the words of a report agree with the intervals that it has.
    @cached_property
    def are_resampled(self) -> bool:
        """Whether intervals of means are from resamples; otherwise they are normal ones."""
        return self.weights is None and are_few(len(self), self.groups.bins.shape[1])

    @property
    def are_sorted(self) -> bool:
        """Whether metrics sort the rows; otherwise they read `by_confidence`."""
        return self.weights is None and len(self) <= MOST_SORTED

    def bins(self, binning: Binning) -> BinSums:
        """The sums (M,) of each bin; with weights of equal-width and "quantile" bins."""
        if binning == "uniform":
            return self.together.uniform
        if self.are_sorted:
            return bin_sums(self.top, self.n_bins, binning)
        is_weighted = self.weights is not None
        return equal_shares(self.by_confidence(), self.n_bins, weighted=is_weighted)

    def by_confidence(self) -> FloatArray:
        """The sums (3, K) of weights, confidences and correct rows of K rising confidences.

        Of many rows, those within a cell count as rows of one confidence.
        """
        # A table of different confidences may be as long as the rows; cells are of a fixed number.
        find_slots: Callable[[FloatArray], IntArray] = cells_of
        n_slots = N_CELLS
        if len(self) <= MOST_SORTED:
            different = np.unique(self.scores.confidence)
            find_slots = different.searchsorted
            n_slots = len(different)
        sums = np.zeros((3, n_slots))
        # The terms of all rows at once would take several times their memory.
        for part in row_chunks(len(self)):
            rows = self.scores.part(part)
            in_bin, _ = rows.terms()
            _, mass, stated, _, right = in_bin
            add_to(sums, find_slots(rows.confidence), [mass, stated, right])
        return sums


def _coins_in_bins(rows: RowScores, n_bins: int) -> FloatArray:
    """A coin for each confidence, in its equal-width bin."""
    places = uniform_bins(rows.confidence, n_bins)
    return coins_in_groups(rows.confidence, places, n_bins, rows.weights)
