"""Sums over the rows of groups: their confidence bins, and their proper scores."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_calib.metrics._exact_sums import ExactSums, WeightedSums
from hf_calib.metrics._row_scores import RowScores
from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.sums import BinSums, uniform_bins

_LARGEST_BRIER = 2.0


class GroupedSums:
    """Arrays whose first axis runs over groups of rows; more groups may come.

    Args:
        n_groups: G.
        weighted: whether rows have weights.
        widths: name -> numbers of a group.
        counts: name -> the same for plain counts of rows.
    """

    def __init__(
        self, n_groups: int, *, weighted: bool, widths: dict[str, int], counts: dict[str, int]
    ) -> None:
        self.n_groups, self.weighted = n_groups, weighted
        self._widths = widths | counts
        kind = WeightedSums if weighted else ExactSums
        self.sums: dict[str, Any] = {name: kind(n_groups * width) for name, width in widths.items()}
        self.counts = {name: np.zeros(n_groups * width, np.int64) for name, width in counts.items()}

    def merge(self, other: GroupedSums, groups: IntArray | None = None) -> None:
        """Add other rows, whose groups are these here, each once."""
        own = np.arange(other.n_groups) if groups is None else groups
        places = {
            name: (own[:, None] * width + np.arange(width)).ravel() for name, width in self._widths.items()
        }
        for name, counts in self.counts.items():
            counts[places[name]] += other.counts[name]
        for name, sums in self.sums.items():
            sums.merge(other.sums[name], places[name])

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Everything, by name."""
        parts = {
            f"{name}.{part}": getattr(sums, part) for name, sums in self.sums.items() for part in sums.fields
        }
        return self.counts | parts


class ConfidenceBins(GroupedSums):
    """The confidence bins of G groups of rows: rows, confidences and their squares, of wrong and right predictions.

    Args:
        n_bins: M.
        weighted: whether rows have weights.
        n_groups: G.
    """

    def __init__(self, n_bins: int, *, weighted: bool, n_groups: int) -> None:
        width = 2 * n_bins
        names = ["confidence", "confidence_squared"] + ["weight"] * weighted
        super().__init__(
            n_groups, weighted=weighted, widths=dict.fromkeys(names, width), counts={"rows": width}
        )
        self.n_bins = n_bins

    def add(self, scores: RowScores, groups: IntArray) -> None:
        """Add a chunk of n rows of these groups (n,)."""
        bins = uniform_bins(scores.confidences, self.n_bins)
        slots = (groups * self.n_bins + bins) * 2 + scores.correct
        self.counts["rows"] += np.bincount(slots, minlength=len(self.counts["rows"]))
        confidences, weights = scores.confidences, scores.weights
        own = confidences if weights is None else confidences * weights
        self.sums["confidence"].add_fractions(slots, own)
        self.sums["confidence_squared"].add_fractions(slots, own * confidences)
        if weights is not None:
            self.sums["weight"].add_fractions(slots, weights)

    def rows(self) -> NDArray[np.int64]:
        """Rows (G, M)."""
        return self.counts["rows"].reshape(self.n_groups, self.n_bins, 2).sum(axis=2)

    def masses(self) -> FloatArray:
        """Rows, or their weight: (G, M, 2), wrong and right."""
        return self.of("weight") if self.weighted else self._shaped(self.counts["rows"].astype(np.float64))

    def of(self, name: str) -> FloatArray:
        """One of the sums: (G, M, 2), of wrong and right predictions."""
        return self._shaped(self.sums[name].values())

    def bins(self) -> BinSums:
        """The sums (G, M) of the bins."""
        masses = self.masses()
        return BinSums(masses.sum(axis=2), self.of("confidence").sum(axis=2), masses[:, :, 1])

    def _shaped(self, values: FloatArray) -> FloatArray:
        return values.reshape(self.n_groups, self.n_bins, 2)


class ProperScores(GroupedSums):
    """The proper scores of G groups of rows, with what their standard errors need.

    Args:
        weighted: whether rows have weights.
        n_groups: G.
    """

    def __init__(self, *, weighted: bool, n_groups: int) -> None:
        names = ["nll", "nll_squared", "brier", "brier_squared"] + ["weight_squared"] * weighted
        super().__init__(n_groups, weighted=weighted, widths=dict.fromkeys(names, 1), counts={})

    def add(self, scores: RowScores, groups: IntArray | None) -> None:
        """Add a chunk of n rows of these groups (n,), or of the only one."""
        weights = scores.weights

        def weighed(values: FloatArray) -> FloatArray:
            return values if weights is None else values * weights

        nll, half = scores.negative_logs(), scores.squared_distances() / _LARGEST_BRIER
        self.sums["nll"].add(groups, weighed(nll))
        self.sums["nll_squared"].add(groups, weighed(nll * nll))
        self.sums["brier"].add_fractions(groups, weighed(half))
        self.sums["brier_squared"].add_fractions(groups, weighed(half * half))
        if weights is not None:
            self.sums["weight_squared"].add(groups, weights * weights)

    def total(self, name: str) -> FloatArray:
        """The sum (G,) of one of them, "nll", "nll_squared", ..., or of squared weights."""
        scale = {"brier": _LARGEST_BRIER, "brier_squared": _LARGEST_BRIER**2}.get(name, 1.0)
        return np.asarray(scale * self.sums[name].values(), dtype=np.float64)


class GroupSums:
    """What the metrics of the top label and the proper scores need of G groups of rows, in O(G M) numbers.

    Args:
        bins: of the groups.
        scores: of the groups.
    """

    def __init__(self, bins: ConfidenceBins, scores: ProperScores) -> None:
        self.sums, self.scores = bins, scores
        self._masses = bins.masses()
        self._mass = self._masses.sum(axis=(1, 2))

    @classmethod
    def of_all(cls, bins: ConfidenceBins, scores: ProperScores) -> GroupSums:
        """Of all groups of the bins together, whose scores are of one group."""
        total = ConfidenceBins(bins.n_bins, weighted=bins.weighted, n_groups=1)
        for name, counts in bins.counts.items():
            total.counts[name] += counts.reshape(bins.n_groups, -1).sum(axis=0)
        for name, sums in bins.sums.items():
            total.sums[name].merge_all(sums, bins.n_groups)
        return cls(total, scores)

    def n_rows(self) -> NDArray[np.int64]:
        """Rows (G,)."""
        return self.sums.rows().sum(axis=1)

    def bins(self) -> BinSums:
        """The sums (G, M) of the bins."""
        return self.sums.bins()

    def effective_rows(self) -> FloatArray:
        """Rows (G,); of rows with weights as many as would tell as much (Kish 1965)."""
        if not self.sums.weighted:
            return self.n_rows().astype(np.float64)
        squares = self.scores.total("weight_squared")
        return np.divide(self._mass**2, squares, out=np.zeros_like(self._mass), where=squares > 0)

    def mean(self, name: str) -> FloatArray:
        """The mean (G,) of a proper score."""
        return self._mean_of(self.scores.total(name))

    def standard_error(self, name: str) -> FloatArray:
        """The standard error (G,) of that mean."""
        return self._error_of(self.mean(name), self._mean_of(self.scores.total(f"{name}_squared")))

    def gaps(self) -> tuple[FloatArray, FloatArray]:
        """Mean confidence minus accuracy (G,), and its standard error."""
        stated = self.sums.of("confidence")
        squares = self.sums.of("confidence_squared").sum(axis=(1, 2))
        squares += (self._masses - 2 * stated)[:, :, 1].sum(axis=1)  # of confidence - 1 where it is right
        gaps = self._mean_of(stated.sum(axis=(1, 2)) - self._masses[:, :, 1].sum(axis=1))
        return gaps, self._error_of(gaps, self._mean_of(squares))

    def accuracies(self) -> tuple[FloatArray, FloatArray]:
        """The accuracy (G,), and its standard error."""
        found = self._mean_of(self._masses[:, :, 1].sum(axis=1))
        return found, self._error_of(found, found)

    def _mean_of(self, sums: FloatArray) -> FloatArray:
        return np.divide(sums, self._mass, out=np.full_like(self._mass, np.nan), where=self._mass > 0)

    def _error_of(self, means: FloatArray, squares: FloatArray) -> FloatArray:
        effective = np.maximum(self.effective_rows() - 1, 1)
        return np.sqrt(np.maximum(squares - means**2, 0) / effective)
