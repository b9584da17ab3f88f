"""Histogram binning: a bin's probability becomes the frequency that was seen in it."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from hf_calib.metrics.checks import check_choice, check_n_bins
from hf_calib.metrics.sums import quantile_edges, uniform_edges
from hf_calib.scaling._inputs import without_zero_weights
from hf_calib.scaling._probabilities import ClassProbabilityScaling, FloatArray, checked_probs
from hf_calib.scaling.scaler import Fitted, are_shares, is_rising

Binning = Literal["uniform", "equal_mass"]


class HistogramBinning(ClassProbabilityScaling):
    r"""Replace each class's probability by the frequency of that class in its bin, seen on held-out data.

    The simplest map without a form, and the baseline of the binning methods. It gives at most M different
    probabilities per class; `IsotonicScaling` chooses its steps by the data and keeps the order of the
    examples, `SplineScaling` is smooth.

    $$m_k(b) = \frac{\sum_i [y_i = k]\,[p_{ik} \in b]}{\sum_i [p_{ik} \in b]}, \qquad
      \hat p_{ik} \propto m_k(b(p_{ik}))$$

    Args:
        n_bins: M, bins per class.
        binning: "uniform": equal-width bins, the same for all classes. "equal_mass": bins with about equal
            numbers of examples, for each class its own; with many classes, most of whose probabilities are
            near 0, the better choice.

    Attributes:
        edges_: (C, M + 1) of the bins, which are (lower, upper]; the first and last also take what lies
            beyond.
        frequencies_: (C, M) in [0, 1].
        n_classes_: C.

    Notes:
        A bin in which nothing was seen keeps its midpoint: with no evidence the probability is left as it is,
        to the width of the bin. (The neighbour's frequency would move it for no reason that lies in the bin.)
        A class without examples gets (almost) no probability. Bins of equal mass have the edges of the metrics'
        "quantile" binning, so that a new probability has its bin too; equal probabilities share a bin.

        `class_scores` gives m, whose rows do not sum to 1. 1e-9 of the model's own probability is added
        before rows are scaled: it orders classes that were given the same, and it is all that is left of a
        row in which every class was given 0. The predicted class can change.

    References:
        Zadrozny & Elkan 2001, "Obtaining calibrated probability estimates from decision trees and naive
        Bayesian classifiers"; one-vs-rest: Guo et al. 2017, section 4.2.

    >>> logits = np.log([[0.9, 0.1], [0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    >>> scaler = HistogramBinning(n_bins=2).fit(logits, np.array([0, 0, 1, 1]))
    >>> scaler.frequencies_.round(4)  # class 0 was right in 2 of 3, class 1 in 1 of 1
    array([[0.    , 0.6667],
           [0.3333, 1.    ]])
    >>> scaler.predict_proba(logits[:1]).round(4)
    array([[0.6667, 0.3333]])
    """

    _fitted = (Fitted("edges_", "CE"), Fitted("frequencies_", "CM"), Fitted("n_classes_", kind=int))

    def __init__(self, n_bins: int = 15, *, binning: Binning = "uniform") -> None:
        self.n_bins = n_bins
        self.binning = binning

    def fit(
        self, logits: ArrayLike, labels: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> HistogramBinning:
        """Count the labels in each bin.

        Args:
            logits: (N, C), any real dtype, read in float64; -inf masks a class that is not the label.
            labels: (N,) int in [0, C), without -100.
            sample_weight: (N,) of at least 0; None counts every example once. Bins of equal mass hold equal numbers
                of examples all the same.

        Returns:
            self, with `edges_` and `frequencies_`.

        Raises:
            TypeError: if a dtype is wrong.
            ValueError: if a parameter, a shape or a value is wrong.
        """
        n_bins = check_n_bins(self.n_bins)
        check_choice("binning", self.binning, get_args(Binning))
        probs, labels = checked_probs(logits, labels)
        probs, labels, weights = without_zero_weights(probs, labels, sample_weight)
        columns = [
            self._fit_class(column, labels == number, weights, n_bins)
            for number, column in enumerate(probs.T)
        ]
        self.edges_, self.frequencies_ = (np.stack(arrays) for arrays in zip(*columns, strict=True))
        self.n_classes_ = probs.shape[1]
        return self

    def _fit_class(
        self, probs: FloatArray, is_label: np.ndarray, weights: FloatArray | None, n_bins: int
    ) -> tuple[FloatArray, FloatArray]:
        edges = uniform_edges(n_bins) if self.binning == "uniform" else quantile_edges(probs, n_bins)
        bins, own = _bins(probs, edges), np.ones(len(probs)) if weights is None else weights
        masses, hits = (np.bincount(bins, each, minlength=n_bins) for each in (own, own * is_label))
        midpoints = (edges[:-1] + edges[1:]) / 2
        seen = masses > 0
        return edges, np.where(seen, hits / np.where(seen, masses, 1), midpoints)

    def _recalibrated(self, probs: FloatArray) -> FloatArray:
        columns = zip(probs.T, self.edges_, self.frequencies_, strict=True)
        return np.stack([frequencies[_bins(column, edges)] for column, edges, frequencies in columns], axis=1)

    def _is_sound(self) -> bool:
        one_more_edge = self.edges_.shape[1] == self.frequencies_.shape[1] + 1
        return one_more_edge and is_rising(self.edges_) and are_shares(self.frequencies_)


def _bins(probs: FloatArray, edges: FloatArray) -> np.ndarray:
    return np.searchsorted(edges[1:-1], probs, side="left")
