"""Spline calibration: a smooth curve from the confidence to the accuracy, without bins."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import make_interp_spline
from sklearn.utils.validation import check_is_fitted

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.checks import check_choice
from hf_calib.scaling._base import as_fitted_logits, softmax_in_place
from hf_calib.scaling._inputs import FloatArray, as_class_labels, as_matrix
from hf_calib.scaling._objectives import SoftmaxObjective
from hf_calib.scaling.scaler import Fitted, Scaler, are_shares, is_rising

Spline = Literal["natural", "parabolic", "cubic"]

_LEAST_KNOTS = 4  # fewer leave no cubic spline to choose


class SplineScaling(Scaler):
    r"""Map the confidence to the accuracy by a spline, fitted on held-out predictions.

    For a model whose confidence is wrong in a way that one temperature cannot correct, and for a few hundred
    examples or more: the curve is not tied to a form, nor to bins as in `HistogramBinning`. It recalibrates
    the predicted class only; the others share what is left in proportion to their probabilities. The
    predicted class, hence the accuracy, stays as it is.

    With the confidences of the predicted classes sorted, s_1 <= ... <= s_N, and c_i whether the i-th is right,

    $$h(i / N) = \frac{1}{N} \sum_{k \le i} (c_k - s_k), \qquad r(s_i) = s_i + h'(i / N)$$

    where the derivative is that of the cubic spline through `n_knots` knots that is nearest to h by least
    squares. Between the s_i, r is interpolated linearly, beyond them it is constant, and it is cut to [0, 1].

    Args:
        spline: what the spline does at its ends: "natural", second derivative 0, as in the paper; "parabolic",
            third derivative 0 in the first and last interval; "cubic", third derivative continuous there.
        n_knots: knots, at equal steps of i / N; the paper takes 6. At least 4.

    Attributes:
        scores_: (S,) the different confidences that were seen, rising.
        accuracies_: (S,) r at each of them, in [0, 1].
        n_classes_: C.

    Notes:
        Nothing makes r rise: a higher confidence may get a lower one. r may also put the predicted class below
        another one, for two classes wherever r < 1/2. It then gets the least probability that keeps it first;
        `predict_confidence` gives r itself.

        Differences from the authors' code: it interpolates between the s_i with the two weights swapped, and
        divides by zero where confidences are equal. Here equal confidences share their mean accuracy, so that
        the order of the examples makes no difference.

    References:
        Gupta et al. 2021, "Calibration of neural networks using splines".

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(2000, 3))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    >>> scaler = SplineScaling().fit(3 * logits, labels)  # three times over-confident
    >>> scaler.predict_proba(np.array([[3.0, 0.0, 0.0]])).round(2)  # softmax gives 0.91
    array([[0.62, 0.19, 0.19]])
    """

    _fitted = (Fitted("scores_", "S"), Fitted("accuracies_", "S"), Fitted("n_classes_", kind=int))

    def __init__(self, spline: Spline = "natural", *, n_knots: int = 6) -> None:
        self.spline = spline
        self.n_knots = n_knots

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> SplineScaling:
        """Fit the curve.

        Args:
            logits: (N, C), any real dtype, read in float64; -inf masks a class that is not the label. N must
                be at least `n_knots`.
            labels: (N,) int in [0, C), without -100.

        Returns:
            self, with `scores_` and `accuracies_`.

        Raises:
            TypeError: if a dtype is wrong.
            ValueError: if a parameter, a shape or a value is wrong, or there are fewer examples than knots.
        """
        check_choice("spline", self.spline, get_args(Spline))
        if not isinstance(self.n_knots, int | np.integer) or self.n_knots < _LEAST_KNOTS:
            requirement, way_out = f"be an integer of at least {_LEAST_KNOTS}", "the paper takes 6"
            raise InputValueError(expected("n_knots", requirement, self.n_knots, way_out))
        matrix = as_matrix(logits, least_columns=2)
        objective = SoftmaxObjective(matrix, as_class_labels(labels, matrix))
        if objective.size < self.n_knots:
            got, way_out = f"{objective.size} examples", "use TemperatureScaling, which has one parameter"
            raise InputValueError(
                expected("logits", f"hold at least n_knots={self.n_knots} rows", got, way_out)
            )
        self.n_classes_ = matrix.shape[1]
        self.scores_, self.accuracies_ = self._curve(objective.confidences(1.0), objective.correct)
        return self

    def predict_confidence(self, logits: ArrayLike) -> FloatArray:
        """Return r, how often the predicted class is right, for logits (..., C): shape (...), in [0, 1]."""
        check_is_fitted(self, "scores_")
        confidences = softmax_in_place(as_fitted_logits(logits, self.n_classes_)).max(axis=-1)
        return np.interp(confidences, self.scores_, self.accuracies_)

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        """Return the probabilities, of the shape of the logits, in float64; rows sum to 1.

        The predicted class gets `predict_confidence`, or the least that keeps it first if that is more.
        """
        target = self.predict_confidence(logits).reshape(-1)
        checked = as_fitted_logits(logits, self.n_classes_)
        rows = checked.reshape(-1, self.n_classes_)
        each, predicted = np.arange(len(rows)), rows.argmax(axis=1)
        rows[each, predicted] = -np.inf
        alone = np.isneginf(rows.max(axis=1))  # all other classes are masked
        rows[~alone] = softmax_in_place(rows[~alone])
        rows[alone], target[alone] = 0.0, 1.0
        runner_up = rows.max(axis=1)
        confidence = np.maximum(target, runner_up / (1 + runner_up))  # at least on a level
        rows *= (1 - confidence)[:, None]
        rows[each, predicted] = np.maximum(confidence, np.nextafter(rows.max(axis=1), 1))  # and ahead of it
        return rows.reshape(checked.shape)

    def _is_sound(self) -> bool:
        return is_rising(self.scores_) and are_shares(self.accuracies_)

    def _curve(self, scores: FloatArray, correct: FloatArray) -> tuple[FloatArray, FloatArray]:
        levels, level, sizes = np.unique(scores, return_inverse=True, return_counts=True)
        gaps = np.bincount(level, correct) / sizes - levels
        accumulated = np.cumsum(np.repeat(gaps, sizes)) / len(scores)
        slopes = self._smooth_slopes(accumulated)
        means = np.bincount(np.repeat(np.arange(len(levels)), sizes), slopes) / sizes
        return levels, np.clip(levels + means, 0, 1)

    def _smooth_slopes(self, values: FloatArray) -> FloatArray:
        """Return the derivative, at equal steps from 0 to 1, of the spline that is nearest to the values."""
        flat = np.zeros(self.n_knots)
        ends = {
            "natural": ([(2, flat)], [(2, flat)]),
            "parabolic": ([(3, flat)], [(3, flat)]),
            "cubic": "not-a-knot",
        }
        steps, knots = np.linspace(0, 1, len(values)), np.linspace(0, 1, self.n_knots)
        # One spline for each knot, 1 there and 0 at the others: all splines are their weighted sums.
        basis = make_interp_spline(knots, np.eye(self.n_knots), k=3, bc_type=ends[self.spline])
        heights = np.linalg.lstsq(basis(steps), values, rcond=None)[0]
        return basis.derivative()(steps) @ heights
