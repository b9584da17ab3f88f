"""Isotonic calibration: a rising step curve from probabilities to frequencies."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from sklearn.isotonic import IsotonicRegression

from hf_calib.metrics.checks import check_choice
from hf_calib.scaling._inputs import without_zero_weights
from hf_calib.scaling._probabilities import ClassProbabilityScaling, FloatArray, checked_probs
from hf_calib.scaling.scaler import Fitted, are_shares, is_rising

Multiclass = Literal["one_vs_rest", "joint"]


class IsotonicScaling(ClassProbabilityScaling):
    r"""Map probabilities to frequencies by a curve that only has to rise, fitted on held-out predictions.

    The most flexible map that keeps the order of the examples; it takes about a thousand examples not to
    over-fit (a temperature, tens). `HistogramBinning` has steps at fixed places and may fall.

    $$m = \arg\min_{m\ \mathrm{rising}} \sum_i (m(p_{ik}) - [y_i = k])^2, \qquad
      \hat p_{ik} \propto m(p_{ik})$$

    Args:
        multiclass: "one_vs_rest": a curve for each class, fitted on that class's probabilities. It can
            correct classes that are wrong in different ways, and can change the predicted class.
            "joint": one curve for all classes, fitted on all N C probabilities. It needs fewer examples, and
            it keeps the ranking of the classes, hence the accuracy.

    Attributes:
        sizes_: (K,) int, how many knots each curve has: C curves, or 1 if "joint".
        knots_: (S,) the probabilities between which m is linear, curve after curve, rising in each.
        frequencies_: (S,) m at each of them, in [0, 1].
        n_classes_: C.

    Notes:
        The curve is interpolated linearly between the probabilities that were seen, and is constant beyond
        them. `class_scores` gives m(p), whose rows do not sum to 1; the authors of "joint" compare those.
        As in their code 1e-9 of the model's own probability is added before rows are scaled: it orders
        classes to which the curve gives the same, and keeps above 0 what was above 0. Two classes of a row
        whose probabilities differ by less than 1e-7 may still end up equal.

        A class without examples gets (almost) no probability from "one_vs_rest". With few examples the
        curve's ends are 0 and 1, so that one surprise costs 20 nats or more: look at the negative
        log-likelihood beside the calibration error.

    References:
        Zadrozny & Elkan 2002, "Transforming classifier scores into accurate multiclass probability estimates"
        (one-vs-rest); Zhang et al. 2020, "Mix-n-Match", multi-class isotonic regression (joint).

    >>> logits = np.log([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
    >>> scaler = IsotonicScaling("joint").fit(logits, np.array([0, 1, 0, 1]))
    >>> scaler.class_scores(logits[:1]).round(4)  # of 0.6, 0.8, 0.9, 0.9 three were right
    array([[0.75, 0.25]])
    """

    _fitted = (
        Fitted("sizes_", "K", int),
        Fitted("knots_", "S"),
        Fitted("frequencies_", "S"),
        Fitted("n_classes_", kind=int),
    )

    def __init__(self, multiclass: Multiclass = "one_vs_rest") -> None:
        self.multiclass = multiclass

    def fit(
        self, logits: ArrayLike, labels: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> IsotonicScaling:
        """Fit the curves.

        Args:
            logits: (N, C), any real dtype, read in float64; -inf masks a class that is not the label.
            labels: (N,) int in [0, C), without -100.
            sample_weight: (N,) of at least 0; None counts every example once.

        Returns:
            self, with `knots_` and `frequencies_`.

        Raises:
            TypeError: if a dtype is wrong.
            ValueError: if a parameter, a shape or a value is wrong.
        """
        check_choice("multiclass", self.multiclass, get_args(Multiclass))
        probs, labels = checked_probs(logits, labels)
        probs, labels, weights = without_zero_weights(probs, labels, sample_weight)
        n_classes = probs.shape[1]
        is_label = labels[:, None] == np.arange(n_classes)
        if self.multiclass == "joint":
            of_each = None if weights is None else np.repeat(weights, n_classes)
            curves = [_fit(probs.ravel(), is_label.ravel(), of_each)]
        else:
            curves = [_fit(*column, weights) for column in zip(probs.T, is_label.T, strict=True)]
        self.sizes_ = np.array([len(knots) for knots, _ in curves])
        self.knots_, self.frequencies_ = (np.concatenate(parts) for parts in zip(*curves, strict=True))
        self.n_classes_ = probs.shape[1]
        return self

    def _recalibrated(self, probs: FloatArray) -> FloatArray:
        curves = list(zip(*self._curves(), strict=True))
        if len(curves) == 1:
            return np.interp(probs, *curves[0])
        columns = zip(probs.T, curves, strict=True)
        return np.stack([np.interp(column, *curve) for column, curve in columns], axis=1)

    def _curves(self) -> tuple[list[FloatArray], list[FloatArray]]:
        """The knots and the frequencies of each curve."""
        ends = np.cumsum(self.sizes_)[:-1]
        return np.split(self.knots_, ends), np.split(self.frequencies_, ends)

    def _is_sound(self) -> bool:
        sizes = self.sizes_
        if len(sizes) not in (1, self.n_classes_) or sizes.min() < 1 or sizes.max() > len(self.knots_):
            return False
        if sizes.sum() != len(self.knots_):
            return False
        rising = all(is_rising(values) for parts in self._curves() for values in parts)
        return rising and are_shares(self.frequencies_)


def _fit(
    probs: FloatArray, is_label: np.ndarray, weights: FloatArray | None
) -> tuple[FloatArray, FloatArray]:
    curve = IsotonicRegression(out_of_bounds="clip").fit(probs, is_label.astype(np.float64), weights)
    return curve.X_thresholds_, curve.y_thresholds_
