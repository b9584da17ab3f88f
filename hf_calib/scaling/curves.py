"""Calibrators of probabilities: bins, isotonic regression, splines, and mixtures of softmaxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import make_interp_spline
from scipy.optimize import LinearConstraint, minimize
from sklearn.isotonic import IsotonicRegression
from sklearn.utils.validation import check_is_fitted

from hf_calib._errors import check
from hf_calib.metrics.checks import (
    FloatArray,
    check_choice,
    check_integer,
    check_n_bins,
)
from hf_calib.metrics.sums import quantile_edges, uniform_edges
from hf_calib.scaling._base import (
    N_CLASSES,
    Scaler,
    as_fitted_logits,
    blocks,
    softmax_in_place,
)
from hf_calib.scaling.rows import Rows
from hf_calib.scaling.saved_map import BOUNDS, Fitted, Parameters, check_parameters
from hf_calib.scaling.temperature import FARTHEST, ScaledLoss, brier_temperature

Binning = Literal["uniform", "equal_mass"]
Multiclass = Literal["one_vs_rest", "joint"]

# The share of the model's probability, which breaks ties (Zhang et al. 2020).
_OWN_SHARE = 1e-9
# One number in [0, 1] for each knot or score of a curve.
_SHARES = Fitted(("S",), 0, 1)


class ClassProbabilityScaling(Scaler):
    """A calibrator of the probability of each class; `predict_proba` makes the rows sum to 1."""

    # It fits to probs, hits and weights.
    _fit_curves: Callable[[FloatArray, FloatArray, FloatArray], None]
    # It maps probs (N, C).
    _recalibrated: Callable[[FloatArray], FloatArray]

    def fit(
        self,
        logits: ArrayLike,
        labels: ArrayLike,
        sample_weight: ArrayLike | None = None,
    ) -> Any:
        """Fit the curves. Equal-mass bins have equal numbers of examples, whatever the weights."""
        self._check_settings()
        rows = Rows.checked(logits, labels, sample_weight)
        self.n_classes_ = rows.logits.shape[1]
        probs = softmax_in_place(rows.logits.astype(np.float64))
        is_label = rows.labels[:, None] == np.arange(self.n_classes_)
        hits = is_label.astype(np.float64)
        self._fit_curves(probs, hits, rows.shares)
        return self

    def class_scores(self, logits: ArrayLike) -> FloatArray:
        """Return each class's frequency alone; rows do not sum to 1, and a masked class has 0."""
        return self._scores_and_probs(logits)[0]

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        """Return `class_scores`, scaled so that rows sum to 1; in the logits' shape, float64."""
        scores, probs = self._scores_and_probs(logits)
        # All frequencies of a row may be 0, and equal ones would be ranked by position.
        scores += _OWN_SHARE * probs
        return scores / scores.sum(axis=-1, keepdims=True)

    def _scores_and_probs(self, logits: ArrayLike) -> tuple[FloatArray, FloatArray]:
        check_is_fitted(self, "n_classes_")
        wide = as_fitted_logits(logits, self.n_classes_)
        masked = np.isneginf(wide)
        probs = softmax_in_place(wide)
        found = self._recalibrated(probs.reshape(-1, self.n_classes_))
        scores = found.reshape(probs.shape)
        # The lowest bin may have a frequency above 0.
        scores[masked] = 0
        return scores, probs


class HistogramBinning(ClassProbabilityScaling):
    r"""Replace each probability by the frequency of its class in its bin (Guo et al. 2017, 4.2).

    $$\hat p_{ik} \propto m_k(p_{ik}) + 10^{-9} p_{ik}, \qquad
      m_k(p) = \sum_i [y_i = k]\,[p_{ik} \in b(p)]\ /\ \sum_i [p_{ik} \in b(p)]$$

    Args:
        n_bins: M, the number of bins per class. An empty bin keeps its midpoint.
        binning: "uniform" for equal-width bins; "equal_mass" for the quantiles of each class,
            better with many classes.

    Attributes:
        edges_: (C, M + 1) edges of the bins (lower, upper]; the first and the last bin have no
            outer limit.
        frequencies_: (C, M) m in [0, 1], which `class_scores` returns.

    >>> logits = np.log([[0.9, 0.1], [0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    >>> scaler = HistogramBinning(n_bins=2).fit(logits, np.array([0, 0, 1, 1]))
    >>> scaler.predict_proba(logits[:1]).round(4)  # Class 0 is correct in 2 of 3.
    array([[0.6667, 0.3333]])
    """

    _fitted: ClassVar[Parameters] = {
        "n_classes_": N_CLASSES,
        "edges_": Fitted(("CE",), 0, 1, rises=True),
        "frequencies_": Fitted(("CM",), 0, 1),
    }

    def __init__(self, n_bins: int = 15, *, binning: Binning = "uniform") -> None:
        self.n_bins = n_bins
        self.binning = binning

    def _check_settings(self) -> None:
        super()._check_settings()
        check_n_bins(self.n_bins)
        check_choice("binning", self.binning, get_args(Binning))

    def _is_sound(self) -> bool:
        return self.edges_.shape[1] == self.frequencies_.shape[1] + 1

    def _fit_curves(
        self, probs: FloatArray, hits: FloatArray, weights: FloatArray
    ) -> None:
        n_classes = probs.shape[1]
        if self.binning == "equal_mass":
            edges = [quantile_edges(np.sort(column), self.n_bins) for column in probs.T]
        else:
            edges = [uniform_edges(self.n_bins)] * n_classes
        self.edges_ = np.stack(edges)
        midpoints = (self.edges_[:, :-1] + self.edges_[:, 1:]) / 2
        # The bins of a class follow those of the class before it, so that one count serves all.
        first_bins = self.n_bins * np.arange(n_classes)
        slots = (first_bins + self._bins(probs)).ravel()
        of_hits = (weights[:, None] * hits).ravel()
        of_all = np.repeat(weights, n_classes)
        right = np.bincount(slots, of_hits, midpoints.size).reshape(midpoints.shape)
        mass = np.bincount(slots, of_all, midpoints.size).reshape(midpoints.shape)
        # An empty bin has no frequency, and keeps its midpoint.
        self.frequencies_ = np.divide(right, mass, out=midpoints, where=mass > 0)

    def _bins(self, probs: FloatArray) -> NDArray[np.int64]:
        """The bin (N, C) of each probability among those of its class."""
        # Without the outer edges, the first and the last bin have no outer limit.
        columns = zip(self.edges_[:, 1:-1], probs.T, strict=True)
        return np.stack([np.searchsorted(*column) for column in columns], axis=1)

    def _recalibrated(self, probs: FloatArray) -> FloatArray:
        return np.take_along_axis(self.frequencies_.T, self._bins(probs), axis=0)


class IsotonicScaling(ClassProbabilityScaling):
    r"""Map probabilities to frequencies by a rising curve (Zadrozny & Elkan 2002).

    It needs about a thousand rows: with few rows the ends of the curve are 0 and 1, and one error
    there costs 20 nats or more.

    $$\hat p_{ik} \propto m(p_{ik}) + 10^{-9} p_{ik}, \qquad
      m = \arg\min_{m\ \mathrm{rising}} \sum_i (m(p_{ik}) - [y_i = k])^2$$

    Args:
        multiclass: "one_vs_rest" for a curve per class. "joint" (Zhang et al. 2020) for one curve
            of all N C probabilities, which needs fewer examples and keeps the classes' ranking.

    Attributes:
        sizes_: (K,) int, the number of knots of each curve: C curves, or 1 if "joint".
        knots_, frequencies_: (S,) the knots and m there, curve after curve; linear between them,
            constant beyond.

    >>> logits = np.log([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
    >>> scaler = IsotonicScaling("joint").fit(logits, np.array([0, 1, 0, 1]))
    >>> scaler.class_scores(logits[:1]).round(4)  # 3 of 0.6, 0.8, 0.9, 0.9 are correct.
    array([[0.75, 0.25]])
    """

    _fitted: ClassVar[Parameters] = {
        "n_classes_": N_CLASSES,
        "sizes_": Fitted(("K",), 1, kind=int),
        "knots_": _SHARES,
        "frequencies_": _SHARES,
    }

    def __init__(self, multiclass: Multiclass = "one_vs_rest") -> None:
        self.multiclass = multiclass

    def _check_settings(self) -> None:
        super()._check_settings()
        check_choice("multiclass", self.multiclass, get_args(Multiclass))

    def _is_sound(self) -> bool:
        n_curves = 1 if self.multiclass == "joint" else self.n_classes_
        if len(self.sizes_) != n_curves or self.sizes_.sum() != len(self.knots_):
            return False
        # The numbers of different curves stand one after the other, and each curve rises alone.
        rises = [
            (np.diff(numbers) >= 0).all()
            for curve in self._curves()
            for numbers in curve
        ]
        return all(rises)

    def _curves(self) -> Iterator[tuple[FloatArray, FloatArray]]:
        """Iterate over the knots of each curve and its frequencies there."""
        ends = np.cumsum(self.sizes_)[:-1]
        frequencies = np.split(self.frequencies_, ends)
        return zip(np.split(self.knots_, ends), frequencies, strict=True)

    def _columns(self, numbers: FloatArray) -> FloatArray:
        """The numbers (N, C) of each curve: (C, N), or (1, N C) if all classes share it."""
        return numbers.reshape(1, -1) if self.multiclass == "joint" else numbers.T

    def _fit_curves(
        self, probs: FloatArray, hits: FloatArray, weights: FloatArray
    ) -> None:
        # Each row has a probability of every class on the one curve.
        if self.multiclass == "joint":
            weights = np.repeat(weights, probs.shape[1])
        columns = zip(self._columns(probs), self._columns(hits), strict=True)
        curves = [IsotonicRegression().fit(*column, weights) for column in columns]
        self.knots_ = np.concatenate([curve.X_thresholds_ for curve in curves])
        self.frequencies_ = np.concatenate([curve.y_thresholds_ for curve in curves])
        self.sizes_ = np.array([len(curve.X_thresholds_) for curve in curves])

    def _recalibrated(self, probs: FloatArray) -> FloatArray:
        columns = zip(self._columns(probs), self._curves(), strict=True)
        return np.stack([np.interp(p, *curve) for p, curve in columns], axis=1)


class SplineScaling(Scaler):
    r"""Map the confidence to the accuracy by a spline (Gupta et al. 2021).

    It needs a few hundred rows or more.

    $$h(i / N) = \frac{1}{N} \sum_{k \le i} (c_k - s_k), \qquad r(s_i) = s_i + h'(i / N)$$

    where s_1 <= ... <= s_N are the confidences, c_i is the correctness of the i-th, and h' is the
    derivative of the natural cubic spline nearest to h. r is linear between the s_i, constant
    beyond them, and clipped to [0, 1]. The predicted class gets r, or more if it would not stay
    first; the other classes share the rest in proportion.

    Args:
        n_knots: number of knots, at equal steps of i / N, at least 4.

    Attributes:
        scores_, accuracies_: (S,) the different confidences of the calibration rows, rising, and r
            there.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(2000, 3))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    >>> scaler = SplineScaling().fit(3 * logits, labels)  # The logits are 3 times too large.
    >>> scaler.predict_proba(np.array([[3.0, 0.0, 0.0]])).round(2)  # softmax gives 0.91
    array([[0.62, 0.19, 0.19]])
    """

    _fitted: ClassVar[Parameters] = {
        "n_classes_": N_CLASSES,
        "scores_": Fitted(("S",), 0, 1, rises=True),
        "accuracies_": _SHARES,
    }

    def __init__(self, *, n_knots: int = 6) -> None:
        self.n_knots = n_knots

    def _check_settings(self) -> None:
        super()._check_settings()
        check_integer("n_knots", self.n_knots, 4, "the paper uses 6")

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> SplineScaling:
        """Fit the curve to at least `n_knots` rows."""
        self._check_settings()
        rows = Rows.checked(logits, labels)
        n = len(rows)
        requirement = f"logits to hold at least n_knots={self.n_knots} rows"
        check(n >= self.n_knots, requirement, n, "use TemperatureScaling")
        confidences = [softmax_in_place(z).max(axis=1) for _, z in blocks(rows.logits)]
        levels, level, sizes = np.unique(
            np.concatenate(confidences), return_inverse=True, return_counts=True
        )
        is_correct = rows.logits.argmax(axis=1) == rows.labels
        # Equal confidences share their mean accuracy, and the mean slope; their order is chance.
        accuracies = np.bincount(level, is_correct.astype(np.float64)) / sizes
        gaps = accuracies - levels
        cumulated = np.cumsum(np.repeat(gaps, sizes)) / n
        # A spline is a weighted sum of one spline per knot, which is 1 there and 0 at the others,
        # so the nearest one is a linear least-squares problem in the heights at the knots.
        knots = np.linspace(0, 1, self.n_knots)
        basis = make_interp_spline(knots, np.eye(self.n_knots), bc_type="natural")
        steps = np.linspace(0, 1, n)
        heights = np.linalg.lstsq(basis(steps), cumulated, rcond=None)[0]
        slopes = basis.derivative()(steps) @ heights
        mean_slopes = np.bincount(np.sort(level), slopes) / sizes
        self.scores_ = levels
        self.accuracies_ = np.clip(levels + mean_slopes, 0, 1)
        self.n_classes_ = rows.logits.shape[1]
        return self

    def predict_confidence(self, logits: ArrayLike) -> FloatArray:
        """Return r, the confidence (...) in [0, 1] of the predicted class of logits (..., C)."""
        check_is_fitted(self, "scores_")
        probs = softmax_in_place(as_fitted_logits(logits, self.n_classes_))
        return np.interp(probs.max(axis=-1), self.scores_, self.accuracies_)

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        """Return the probabilities in the shape of the logits, float64; rows sum to 1."""
        confidence = self.predict_confidence(logits).reshape(-1)
        rows = as_fitted_logits(logits, self.n_classes_).reshape(-1, self.n_classes_)
        predicted = np.arange(len(rows)), rows.argmax(axis=1)
        # The softmax of the others is how they share the rest.
        rows[predicted] = -np.inf
        # Where all other classes are masked, they share nothing, equally.
        is_alone = np.isneginf(rows.max(axis=1))
        rows[is_alone] = 0
        confidence[is_alone] = 1
        softmax_in_place(rows)
        # The predicted class is at least as probable as the next one.
        rows[predicted] = 0
        runner_up = rows.max(axis=1)
        confidence = np.maximum(confidence, runner_up / (1 + runner_up))
        rows *= (1 - confidence)[:, None]
        # Rounding must not make the next one more probable.
        just_above = np.nextafter(rows.max(axis=1), 1)
        rows[predicted] = np.maximum(confidence, just_above)
        return rows.reshape(np.shape(logits))


_TEMPERATURE = Fitted(low=BOUNDS[0] / FARTHEST, high=BOUNDS[1] * FARTHEST)


class EnsembleTemperatureScaling(Scaler):
    r"""Mix temperature-scaled, plain and uniform probabilities (Zhang et al. 2020, 3.2).

    The ranking of the classes does not change. T minimises the Brier score first, and then w does.

    $$\hat p = w_1 \, \mathrm{softmax}(z / T) + w_2 \, \mathrm{softmax}(z) + w_3 / C$$

    Attributes:
        temperature_: T, a float, within a factor of 30 of the temperature of the likelihood.
        weights_: w, (3,), each at least 0, with sum 1. In a row with masked classes, w_3 is spread
            over the others.

    >>> logits = np.array([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    >>> scaler = EnsembleTemperatureScaling().fit(logits, np.array([0, 0, 0, 0]))
    >>> scaler.predict_proba(logits[:1]).round(4)  # 3 of 4 are correct.
    array([[0.75, 0.25]])
    """

    _fitted: ClassVar[Parameters] = {
        "n_classes_": N_CLASSES,
        "temperature_": _TEMPERATURE,
        "weights_": Fitted(("W",), 0, 1),
    }

    def _is_sound(self) -> bool:
        return len(self.weights_) == 3 and bool(np.isclose(self.weights_.sum(), 1))

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> EnsembleTemperatureScaling:
        """Find the temperature, then the weights; warn if the data do not determine T."""
        rows = Rows.checked(logits, labels)
        loss = ScaledLoss(rows)
        self.temperature_ = loss.best_temperature()
        loss.warn(self.temperature_)
        if not loss.is_constant:
            self.temperature_ = brier_temperature(rows, self.temperature_)
        # The Brier score of a mixture is w' products w - 2 own'w, and a constant.
        products = np.zeros((3, 3))
        own = np.zeros(3)
        for part, block in blocks(rows.logits):
            parts = _parts(block, self.temperature_)
            labels = rows.labels[part]
            of_labels = parts[:, np.arange(len(labels)), labels]
            products += np.einsum("inc,jnc->ij", parts, parts) / len(rows)
            own += of_labels.sum(axis=1) / len(rows)
        self.weights_ = _mixture_weights(products, own)
        self.n_classes_ = rows.logits.shape[1]
        return self

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        """Return the mixture in float64; logits of any shape that ends in C."""
        check_parameters(self, "temperature_", "weights_")
        given = as_fitted_logits(logits, self.n_classes_)
        parts = _parts(given, self.temperature_)
        mixture = np.tensordot(self.weights_, parts, axes=1)
        # The uniform part alone would rank nothing.
        if self.weights_[2] > 1 - _OWN_SHARE:
            mixture += _OWN_SHARE * (parts[1] - parts[2])
        return mixture


def _parts(logits: FloatArray, temperature: float) -> FloatArray:
    """The scaled, plain and uniform probabilities (3, ..., C); the logits are overwritten."""
    is_allowed = np.isfinite(logits)
    scaled = softmax_in_place(logits / temperature)
    uniform = is_allowed / is_allowed.sum(axis=-1, keepdims=True)
    return np.stack([scaled, softmax_in_place(logits), uniform])


def _mixture_weights(products: FloatArray, own: FloatArray) -> FloatArray:
    """The w >= 0 with sum 1 that minimise w' products w / 2 - own'w."""

    def error(weights: FloatArray) -> tuple[float, FloatArray]:
        slope = products @ weights - own
        return float(weights @ (slope - own) / 2), slope

    # A mixture: the weights sum to 1.
    simplex = LinearConstraint(np.ones((1, 3)), 1, 1)
    start = np.full(3, 1 / 3)
    found = minimize(
        error,
        start,
        jac=True,
        method="SLSQP",
        bounds=[(0, 1)] * 3,
        constraints=simplex,
        options={"ftol": 1e-16, "maxiter": 300},
    )
    # SLSQP may end outside of its bounds by rounding.
    weights = found.x.clip(0)
    return weights / weights.sum()
