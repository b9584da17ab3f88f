"""Sums over the rows of groups: their confidence bins, and their proper scores."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_calib.metrics._exact_sums import ExactSums, WeightedSums
from hf_calib.metrics._row_scores import RowScores
from hf_calib.metrics.binning import BinSums, FloatArray, IntArray, uniform_bins

_BY_BIN = ("confidence", "confidence_squared", "weight")  # the others are by group


class TopLabelSums:
    """What the metrics of the top label and the proper scores need of G groups of rows, in O(G M) numbers.

    Args:
        n_bins: M.
        weighted: whether rows have weights.
        n_groups: G; `grow` makes room for more.
    """

    def __init__(self, n_bins: int, *, weighted: bool, n_groups: int = 1) -> None:
        self.n_bins, self.weighted, self.n_groups = n_bins, weighted, n_groups
        # Rows by bin, wrong and right.
        self.rows = np.zeros(n_groups * 2 * n_bins, np.int64)
        kind = WeightedSums if weighted else ExactSums
        by_bin = {"confidence": kind(len(self.rows)), "confidence_squared": kind(len(self.rows))}
        if weighted:
            by_bin["weight"] = kind(len(self.rows))
        names = ["nll", "nll_squared", "brier", "brier_squared"] + ["weight_squared"] * weighted
        self.sums: dict[str, Any] = {**by_bin, **{name: kind(n_groups) for name in names}}

    def add(self, scores: RowScores, groups: IntArray | None = None) -> None:
        """Add a chunk of rows, and their groups (n,) where there are several."""
        bins = uniform_bins(scores.confidences, self.n_bins)
        slots = (bins if groups is None else groups * self.n_bins + bins) * 2 + scores.correct
        self.rows += np.bincount(slots, minlength=len(self.rows))
        confidences, weights = scores.confidences, scores.weights
        nll, brier = scores.negative_logs(), scores.squared_distances()

        def weighed(values: FloatArray) -> FloatArray:
            return values if weights is None else values * weights

        self.sums["confidence"].add_fractions(slots, weighed(confidences))
        self.sums["confidence_squared"].add_fractions(slots, weighed(confidences**2))
        for name, values in (("nll", nll), ("brier", brier)):
            self.sums[name].add(groups, weighed(values))
            self.sums[f"{name}_squared"].add(groups, weighed(values**2))
        if weights is not None:
            self.sums["weight"].add(slots, weights)
            self.sums["weight_squared"].add(groups, weights**2)

    def grow(self, n_groups: int) -> None:
        """Make room for more groups."""
        larger = TopLabelSums(self.n_bins, weighted=self.weighted, n_groups=n_groups)
        larger.merge(self, np.arange(self.n_groups))
        self.__dict__.update(larger.__dict__)

    def merge(self, other: TopLabelSums, groups: NDArray[np.intp] | None = None) -> None:
        """Add other rows, whose groups are these here."""
        own = np.arange(other.n_groups) if groups is None else groups
        width = 2 * self.n_bins
        by_bin = (own[:, None] * width + np.arange(width)).ravel()
        self.rows[by_bin] += other.rows
        for name, sums in self.sums.items():
            sums.merge(other.sums[name], by_bin if name in _BY_BIN else own)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Everything, by name."""
        parts = {
            f"{name}.{part}": getattr(sums, part) for name, sums in self.sums.items() for part in sums.fields
        }
        return {"rows": self.rows, **parts}

    def n_rows(self) -> NDArray[np.int64]:
        """Rows (G,)."""
        return self.rows.reshape(self.n_groups, -1).sum(axis=1)

    def masses(self) -> FloatArray:
        """Rows, or their weight: (G, M, 2), wrong and right."""
        found = self.sums["weight"].values() if self.weighted else self.rows.astype(np.float64)
        return found.reshape(self.n_groups, self.n_bins, 2)

    def by_bin(self, name: str) -> FloatArray:
        """One of the sums by bin: (G, M, 2), wrong and right."""
        return self.sums[name].values().reshape(self.n_groups, self.n_bins, 2)

    def bins(self) -> BinSums:
        """The sums (G, M) of the bins."""
        masses = self.masses()
        return BinSums(masses.sum(axis=2), self.by_bin("confidence").sum(axis=2), masses[:, :, 1])

    def effective_rows(self) -> FloatArray:
        """Rows (G,); of rows with weights as many as would tell as much (Kish 1965)."""
        if not self.weighted:
            return self.n_rows().astype(np.float64)
        weights, squares = self.masses().sum(axis=(1, 2)), self.sums["weight_squared"].values()
        return np.divide(weights**2, squares, out=np.zeros(self.n_groups), where=squares > 0)

    def mean(self, name: str) -> FloatArray:
        """The mean (G,) of a proper score."""
        return self._mean_of(self.sums[name].values())

    def standard_error(self, name: str) -> FloatArray:
        """The standard error (G,) of that mean."""
        return self._error_of(self.mean(name), self._mean_of(self.sums[f"{name}_squared"].values()))

    def gaps(self) -> tuple[FloatArray, FloatArray]:
        """Mean confidence minus accuracy (G,), and its standard error."""
        masses, stated = self.masses(), self.by_bin("confidence")
        squares = self.by_bin("confidence_squared").sum(axis=(1, 2))
        squares += (masses - 2 * stated)[:, :, 1].sum(axis=1)  # of confidence - 1 where it is right
        gaps = self._mean_of(stated.sum(axis=(1, 2)) - masses[:, :, 1].sum(axis=1))
        return gaps, self._error_of(gaps, self._mean_of(squares))

    def accuracies(self) -> tuple[FloatArray, FloatArray]:
        """The accuracy (G,), and its standard error."""
        found = self._mean_of(self.masses()[:, :, 1].sum(axis=1))
        return found, self._error_of(found, found)

    def _mean_of(self, sums: FloatArray) -> FloatArray:
        masses = self.masses().sum(axis=(1, 2))
        return np.divide(sums, masses, out=np.full(self.n_groups, np.nan), where=masses > 0)

    def _error_of(self, means: FloatArray, squares: FloatArray) -> FloatArray:
        effective = np.maximum(self.effective_rows() - 1, 1)
        return np.sqrt(np.maximum(squares - means**2, 0) / effective)
