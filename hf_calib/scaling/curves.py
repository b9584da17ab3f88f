"""Maps of probabilities: histogram binning, isotonic curves, splines, and a mixture with the scaled probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import make_interp_spline
from scipy.optimize import LinearConstraint, minimize, minimize_scalar
from sklearn.isotonic import IsotonicRegression
from sklearn.utils.validation import check_is_fitted

from hf_calib._errors import check
from hf_calib.metrics.checks import FloatArray, check_choice, check_integer, check_n_bins
from hf_calib.metrics.sums import quantile_edges, uniform_edges
from hf_calib.scaling._base import Scaler, as_fitted_logits, blocks, softmax_in_place
from hf_calib.scaling.newton import Rows, ScaledLoss

Binning = Literal["uniform", "equal_mass"]
Multiclass = Literal["one_vs_rest", "joint"]

_OWN_SHARE = 1e-9  # of the model's own probability, which ranks ties (Zhang et al. 2020)
_FURTHEST = np.log(30)  # from the temperature of the likelihood that of the squared error is looked for


class ClassProbabilityScaling(Scaler):
    """A scaler that maps probabilities class by class; `predict_proba` makes the rows sum to 1."""

    _fit_curves: Callable[[FloatArray, FloatArray, FloatArray], None]  # of probs, hits and weights
    _recalibrated: Callable[[FloatArray], FloatArray]  # of probs (N, C)

    def fit(self, logits: ArrayLike, labels: ArrayLike, sample_weight: ArrayLike | None = None) -> Any:
        """Fit the curves. Bins of equal mass hold equal numbers of examples, whatever the weights."""
        rows = Rows.checked(logits, labels, sample_weight)
        self.n_classes_ = rows.logits.shape[1]
        hits = (rows.labels[:, None] == np.arange(self.n_classes_)).astype(np.float64)
        weights = np.ones(len(rows)) if rows.weights is None else rows.weights
        self._fit_curves(softmax_in_place(rows.logits.astype(np.float64)), hits, weights)
        return self

    def class_scores(self, logits: ArrayLike) -> FloatArray:
        """Return how often each class is right, whatever the others say: rows do not sum to 1; a masked class has 0."""
        return self._scores_and_probs(logits)[0]

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        """Return `class_scores` with rows scaled to sum to 1, of the shape of the logits, in float64."""
        scores, probs = self._scores_and_probs(logits)
        scores += _OWN_SHARE * probs
        return scores / scores.sum(axis=-1, keepdims=True)

    def _scores_and_probs(self, logits: ArrayLike) -> tuple[FloatArray, FloatArray]:
        check_is_fitted(self, "n_classes_")
        wide = as_fitted_logits(logits, self.n_classes_)
        masked = np.isneginf(wide)
        probs = softmax_in_place(wide)
        scores = self._recalibrated(probs.reshape(-1, self.n_classes_)).reshape(probs.shape)
        scores[masked] = 0  # the lowest bin may have a frequency above 0
        return scores, probs


class HistogramBinning(ClassProbabilityScaling):
    r"""Replace each class's probability by the frequency of that class in its bin (Guo et al. 2017, 4.2).

    $$\hat p_{ik} \propto m_k(p_{ik}) + 10^{-9} p_{ik}, \qquad
      m_k(p) = \sum_i [y_i = k]\,[p_{ik} \in b(p)]\ /\ \sum_i [p_{ik} \in b(p)]$$

    Args:
        n_bins: M, bins per class. One in which nothing was seen keeps its midpoint.
        binning: "uniform": equal-width bins; "equal_mass": each class's own, better with many classes.

    Attributes:
        edges_: (C, M + 1) of the bins (lower, upper]; the first and last also take what lies beyond.
        frequencies_: (C, M) m in [0, 1], which `class_scores` gives.

    >>> logits = np.log([[0.9, 0.1], [0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    >>> scaler = HistogramBinning(n_bins=2).fit(logits, np.array([0, 0, 1, 1]))
    >>> scaler.predict_proba(logits[:1]).round(4)  # class 0 was right in 2 of 3
    array([[0.6667, 0.3333]])
    """

    def __init__(self, n_bins: int = 15, *, binning: Binning = "uniform") -> None:
        self.n_bins = n_bins
        self.binning = binning

    def _fit_curves(self, probs: FloatArray, hits: FloatArray, weights: FloatArray) -> None:
        check_n_bins(self.n_bins)
        check_choice("binning", self.binning, get_args(Binning))
        self.edges_ = np.tile(uniform_edges(self.n_bins), (probs.shape[1], 1))
        if self.binning == "equal_mass":
            self.edges_ = np.stack([quantile_edges(np.sort(column), self.n_bins) for column in probs.T])
        self.frequencies_ = (self.edges_[:, :-1] + self.edges_[:, 1:]) / 2
        for edges, found, column, hit in zip(self.edges_, self.frequencies_, probs.T, hits.T, strict=True):
            bins = np.searchsorted(edges[1:-1], column)
            mass, right = (np.bincount(bins, w, self.n_bins) for w in (weights, weights * hit))
            np.divide(right, mass, out=found, where=mass > 0)

    def _recalibrated(self, probs: FloatArray) -> FloatArray:
        columns = zip(self.frequencies_, self.edges_, probs.T, strict=True)
        return np.stack([found[np.searchsorted(edges[1:-1], p)] for found, edges, p in columns], axis=1)


class IsotonicScaling(ClassProbabilityScaling):
    r"""Map probabilities to frequencies by a rising curve (Zadrozny & Elkan 2002; joint: Zhang et al. 2020).

    It takes about a thousand rows: with few the curve's ends are 0 and 1, and one surprise costs 20 nats or more.

    $$\hat p_{ik} \propto m(p_{ik}) + 10^{-9} p_{ik}, \qquad
      m = \arg\min_{m\ \mathrm{rising}} \sum_i (m(p_{ik}) - [y_i = k])^2$$

    Args:
        multiclass: "one_vs_rest": a curve for each class. "joint": one curve for all N C probabilities; it needs fewer
            examples, and keeps the ranking of the classes.

    Attributes:
        sizes_: (K,) int, how many knots each curve has: C curves, or 1 if "joint".
        knots_, frequencies_: (S,) the knots and m there, curve after curve; linear between them, constant beyond.

    >>> logits = np.log([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
    >>> scaler = IsotonicScaling("joint").fit(logits, np.array([0, 1, 0, 1]))
    >>> scaler.class_scores(logits[:1]).round(4)  # of 0.6, 0.8, 0.9, 0.9 three were right
    array([[0.75, 0.25]])
    """

    def __init__(self, multiclass: Multiclass = "one_vs_rest") -> None:
        self.multiclass = multiclass

    def _fit_curves(self, probs: FloatArray, hits: FloatArray, weights: FloatArray) -> None:
        check_choice("multiclass", self.multiclass, get_args(Multiclass))
        if self.multiclass == "joint":
            weights = np.repeat(weights, probs.shape[1])
            probs, hits = probs.reshape(-1, 1), hits.reshape(-1, 1)
        columns = zip(probs.T, hits.T, strict=True)
        curves = [IsotonicRegression(out_of_bounds="clip").fit(p, hit, weights) for p, hit in columns]
        self.sizes_ = np.array([len(curve.X_thresholds_) for curve in curves])
        self.knots_ = np.concatenate([curve.X_thresholds_ for curve in curves])
        self.frequencies_ = np.concatenate([curve.y_thresholds_ for curve in curves])

    def _recalibrated(self, probs: FloatArray) -> FloatArray:
        ends = np.cumsum(self.sizes_)[:-1]
        columns = probs.T if len(self.sizes_) > 1 else probs.reshape(1, -1)  # one curve for all probabilities
        curves = zip(columns, np.split(self.knots_, ends), np.split(self.frequencies_, ends), strict=True)
        return np.stack([np.interp(p, knots, found) for p, knots, found in curves], axis=1)


class SplineScaling(Scaler):
    r"""Map the confidence to the accuracy by a spline (Gupta et al. 2021), with a few hundred examples or more.

    $$h(i / N) = \frac{1}{N} \sum_{k \le i} (c_k - s_k), \qquad r(s_i) = s_i + h'(i / N)$$

    with s_1 <= ... <= s_N the confidences, c_i whether the i-th is right, and h' the derivative of the natural cubic
    spline nearest to h. r is linear between the s_i, constant beyond them, and cut to [0, 1]. The predicted class gets
    r, or as much as keeps it first; the others share the rest in proportion.

    Args:
        n_knots: knots, at equal steps of i / N, at least 4.

    Attributes:
        scores_, accuracies_: (S,) the different confidences that were seen, rising, and r there.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(2000, 3))
    >>> labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    >>> scaler = SplineScaling().fit(3 * logits, labels)  # three times over-confident
    >>> scaler.predict_proba(np.array([[3.0, 0.0, 0.0]])).round(2)  # softmax gives 0.91
    array([[0.62, 0.19, 0.19]])
    """

    def __init__(self, *, n_knots: int = 6) -> None:
        self.n_knots = n_knots

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> SplineScaling:
        """Fit the curve, on at least `n_knots` rows."""
        check_integer("n_knots", self.n_knots, 4, "the paper takes 6")
        rows = Rows.checked(logits, labels)
        n, requirement = len(rows), f"logits to hold at least n_knots={self.n_knots} rows"
        check(n >= self.n_knots, requirement, f"{n} examples", "use TemperatureScaling")
        confidences = np.concatenate([softmax_in_place(z).max(axis=1) for _, z in blocks(rows.logits)])
        levels, level, sizes = np.unique(confidences, return_inverse=True, return_counts=True)
        # Equal confidences share their mean accuracy, and the mean slope.
        gaps = np.bincount(level, rows.logits.argmax(axis=1) == rows.labels) / sizes - levels
        # One spline for each knot, 1 there and 0 at the others: all splines are their weighted sums.
        knots = np.linspace(0, 1, self.n_knots)
        basis = make_interp_spline(knots, np.eye(self.n_knots), bc_type="natural")
        steps = np.linspace(0, 1, n)
        heights = np.linalg.lstsq(basis(steps), np.cumsum(np.repeat(gaps, sizes)) / n, rcond=None)[0]
        slopes = np.bincount(np.sort(level), basis.derivative()(steps) @ heights) / sizes
        self.scores_, self.accuracies_ = levels, np.clip(levels + slopes, 0, 1)
        self.n_classes_ = rows.logits.shape[1]
        return self

    def predict_confidence(self, logits: ArrayLike) -> FloatArray:
        """Return r, how often the predicted class is right, for logits (..., C): shape (...), in [0, 1]."""
        check_is_fitted(self, "scores_")
        confidences = softmax_in_place(as_fitted_logits(logits, self.n_classes_)).max(axis=-1)
        return np.interp(confidences, self.scores_, self.accuracies_)

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        """Return the probabilities, of the shape of the logits, in float64; rows sum to 1."""
        confidence = self.predict_confidence(logits).reshape(-1)
        rows = as_fitted_logits(logits, self.n_classes_).reshape(-1, self.n_classes_)
        predicted = np.arange(len(rows)), rows.argmax(axis=1)
        rows[predicted] = -np.inf
        alone = np.isneginf(rows.max(axis=1))  # all other classes are masked
        rows[~alone] = softmax_in_place(rows[~alone])
        rows[alone], confidence[alone] = 0.0, 1.0
        runner_up = rows.max(axis=1)
        confidence = np.maximum(confidence, runner_up / (1 + runner_up))  # at least on a level
        rows *= (1 - confidence)[:, None]
        rows[predicted] = np.maximum(confidence, np.nextafter(rows.max(axis=1), 1))  # and ahead of it
        return rows.reshape(np.shape(logits))


class EnsembleTemperatureScaling(Scaler):
    r"""Mix the temperature-scaled, the plain and the uniform probabilities (Zhang et al. 2020, 3.2).

    The ranking of the classes stays. T alone, and then w, minimise the Brier score.

    $$\hat p = w_1 \, \mathrm{softmax}(z / T) + w_2 \, \mathrm{softmax}(z) + w_3 / C$$

    Attributes:
        temperature_: T, a float, within a factor of 30 of that of the likelihood.
        weights_: w, (3,), of at least 0 with sum 1. In a row with masked classes, w_3 is spread over the others.

    >>> logits = np.array([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    >>> scaler = EnsembleTemperatureScaling().fit(logits, np.array([0, 0, 0, 0]))
    >>> scaler.predict_proba(logits[:1]).round(4)  # right three times in four
    array([[0.75, 0.25]])
    """

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> EnsembleTemperatureScaling:
        """Choose the temperature, then the weights; it warns where data do not determine T."""
        rows = Rows.checked(logits, labels)
        loss = ScaledLoss(rows)
        self.temperature_ = loss.best_temperature()
        loss.warn(self.temperature_)
        if not loss.is_constant:
            self.temperature_ = _least_squares_temperature(rows, self.temperature_)
        products, own = np.zeros((3, 3)), np.zeros(3)
        for part, block in blocks(rows.logits):
            parts = np.stack(_parts(block, self.temperature_))
            products += np.einsum("inc,jnc->ij", parts, parts) / len(rows)
            own += parts[:, np.arange(len(block)), rows.labels[part]].sum(axis=1) / len(rows)

        def error(weights: FloatArray) -> tuple[float, FloatArray]:
            slope = products @ weights - own
            return float(weights @ (slope - own) / 2), slope

        simplex = {"bounds": [(0, 1)] * 3, "constraints": LinearConstraint(np.ones((1, 3)), 1, 1)}
        options = {"ftol": 1e-16, "maxiter": 300}
        found = minimize(error, np.full(3, 1 / 3), jac=True, method="SLSQP", options=options, **simplex)
        self.weights_ = found.x.clip(0) / found.x.clip(0).sum()
        self.n_classes_ = rows.logits.shape[1]
        return self

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        """Return the mixture in float64; logits of any shape that ends in C."""
        check_is_fitted(self, "weights_")
        first, second, third = _parts(as_fitted_logits(logits, self.n_classes_), self.temperature_)
        mixture = self.weights_[0] * first + self.weights_[1] * second + self.weights_[2] * third
        if self.weights_[2] > 1 - _OWN_SHARE:  # the uniform part alone would rank nothing
            mixture += _OWN_SHARE * (second - third)
        return mixture


def _parts(logits: FloatArray, temperature: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The scaled, the plain and the uniform probabilities; the logits are overwritten."""
    allowed = np.isfinite(logits)
    scaled = softmax_in_place(logits / temperature)
    return scaled, softmax_in_place(logits), allowed / allowed.sum(axis=-1, keepdims=True)


def _least_squares_temperature(rows: Rows, likely: float) -> float:
    """A coarse grid around the likely T, as |p|^2 - 2 p_y is not convex, then closely at its best point."""

    def error(log_temperature: float) -> float:
        total = 0.0
        for part, block in blocks(rows.logits):
            probs = softmax_in_place(block / np.exp(log_temperature))
            total += np.vdot(probs, probs) - 2 * probs[np.arange(len(probs)), rows.labels[part]].sum()
        return float(total) / len(rows)

    grid = np.log(likely) + np.linspace(-_FURTHEST, _FURTHEST, 25)
    best = int(np.argmin([error(log_t) for log_t in grid]))
    around = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    found = minimize_scalar(error, bounds=around, options={"xatol": 1e-9}).x
    return float(np.exp(min([found, *around], key=error)))
