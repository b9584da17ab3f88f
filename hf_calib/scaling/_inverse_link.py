"""The posterior eta at which sum_y eta_y dL(z, y)/dz = 0, for each loss that has one.

Every function here takes a block of predictions and returns log eta (B, C), up to a number per row. With
a gradient a_y (p - e_y) for label y the equation reads eta_k a_k = p_k sum_y eta_y a_y, so eta_k is proportional
to p_k / a_k; further terms of the gradient add one or two unknown sums, which sum_k eta_k = 1 determines.

A class whose posterior would be negative, because no eta leads to these p, gets 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp
from sklearn.isotonic import isotonic_regression

from hf_calib.scaling._base import FloatArray, softmax_in_place

Gamma = float | FloatArray

# Stands for the log of 0, whose product with 0 would be NaN.
_LOG_ZERO = -1e300
# Stands for a gradient factor that is not above 0: the class gets all of the mass.
_FLOOR = 1e-12
_TINY = 1e-300
_ROUNDING = 1e-12
_TRACE = 1e-9

# Which of the classes below the label are its rivals in the dual focal loss: [first, last) of their ranks.
_RIVALS = {
    "next": (0, 1),
    "second": (1, 2),
    "third": (2, 3),
    "mean2": (0, 2),
    "mean3": (0, 3),
    "mean_all": (0, None),
}


class ProbabilityBlock(NamedTuple):
    """A block of probabilities (B, C), with logs that are exact where they are near 0 or 1, too."""

    p: FloatArray
    log_p: FloatArray
    log_rest: FloatArray  # log(1 - p)
    allowed: NDArray[np.bool_]  # not masked by -inf

    @classmethod
    def of(cls, logits: FloatArray) -> ProbabilityBlock:
        p = softmax_in_place(logits.copy())  # refuses rows without a class
        shifted = np.maximum(logits - logits.max(axis=1, keepdims=True), _LOG_ZERO)
        others, total = _log_sum_of_others(shifted)
        return cls(
            p=p,
            log_p=shifted - total,
            log_rest=np.maximum(others - total, _LOG_ZERO),
            allowed=~np.isneginf(logits),
        )

    @property
    def log_loss(self) -> FloatArray:
        """log(-log p); -log p is 1 - p, to first order, where that is too small for a float."""
        with np.errstate(divide="ignore"):
            return np.where(self.log_rest > np.log(_TINY), np.log(-self.log_p), self.log_rest)


def modulated(
    predictions: ProbabilityBlock,
    gamma: Gamma | Callable[[FloatArray], Gamma],
    *,
    detached: bool = False,
    rival: str | float = 0.0,
) -> FloatArray:
    """(1 - m)^gamma CE, or (1 + m)^|gamma| CE for a negative gamma, of the margin m = p - q, q a rival or a constant.

    Gamma may be a function of the margin, (B, C). It is a constant to the gradient.
    The gradient for label y, relative to the weight, is (1 + multiplier_y)(p - e_y) and, through a rival j,
    multiplier_y q / p_y (e_j - p): what class y takes from its rival is passed down the ranking.
    """
    p, log_p, log_rest, _ = predictions
    ranking = _Ranking.of(predictions, rival) if isinstance(rival, str) else None
    log_q = np.full_like(p, np.log(rival) if rival else _LOG_ZERO) if ranking is None else ranking.log_rival
    if callable(gamma):
        gamma = gamma(p - np.exp(log_q))
    held_back, pushed = np.logaddexp(log_rest, log_q), np.log1p(np.maximum(p - np.exp(log_q), 0))
    log_base = np.where(np.asarray(gamma) >= 0, held_back, pushed)
    log_eta = log_p - np.abs(gamma) * log_base
    if detached:
        return log_eta
    multiplier = gamma * np.exp(predictions.log_loss + log_p - log_base)
    factor = np.maximum(1 + multiplier, _FLOOR)
    log_eta -= np.log(factor)
    return log_eta if ranking is None else log_eta + _log(ranking.received(multiplier / factor))


def brier_norm(
    predictions: ProbabilityBlock, gamma: float, norm: float, *, detached: bool = False
) -> FloatArray:
    """V^(gamma / norm) CE with V_y = ||p - e_y||_norm^norm."""
    p, log_p, log_rest, _ = predictions
    if gamma == 0:
        return log_p
    log_v = np.logaddexp(norm * log_rest, _log_sum_of_others(norm * log_p)[0])
    if detached:
        return log_p - gamma / norm * log_v
    # The gradient for label y is b_y (p^norm - d_y e_y + a_y p), with b = -log p gamma V^(gamma / norm - 1),
    # so eta_k b_k d_k = p_k s + p_k^norm t, and t = sum_k eta_k b_k gives the ratio s : t.
    powers = np.exp(norm * log_p)
    rest = np.exp(log_v - predictions.log_loss - np.log(gamma)) + np.exp((norm - 1) * log_rest) * p
    d = np.maximum(rest + powers, _TINY)
    shares = powers / d
    each, top = np.arange(len(p)), p.argmax(axis=1)
    first = (rest / d)[each, top]  # 1 - its share, without cancellation
    shares[each, top] = 0
    s, t = first - shares.sum(axis=1), (p / d).sum(axis=1)
    mass = s[:, None] + t[:, None] * np.exp((norm - 1) * log_p)
    log_weight = predictions.log_loss + (gamma / norm - 1) * log_v
    return log_p + _log(mass) - log_weight - np.log(d)


def focal_calibration(
    predictions: ProbabilityBlock, gamma: float, brier_weight: float, distance: str
) -> FloatArray:
    """Focal + brier_weight * (||p - e_y||_2^2, or ||p - e_y||_1 = 2 (1 - p))."""
    p, log_p, _, _ = predictions
    focal = modulated(predictions, gamma)
    if brier_weight == 0:
        return focal
    a, brier = np.exp(log_p - focal), 2 * brier_weight * p
    if distance == "l1":
        return log_p - np.log(a + brier)
    # eta_k (a_k + 2 lambda p_k) = p_k (t + 2 lambda p_k)
    t = (p * a / (a + brier)).sum(axis=1) / (p / (a + brier)).sum(axis=1)
    return log_p + _log(t[:, None] + brier) - np.log(a + brier)


def label_smoothing(predictions: ProbabilityBlock, smoothing: float) -> FloatArray:
    """p = (1 - smoothing) eta + smoothing / C."""
    return _log(predictions.p - smoothing / predictions.allowed.sum(axis=1, keepdims=True))


def entropy_regularized(predictions: ProbabilityBlock, entropy_weight: float) -> FloatArray:
    """eta = p (1 + entropy_weight (log p + H))."""
    p, log_p, _, _ = predictions
    entropy = -(p * log_p).sum(axis=1, keepdims=True)
    return log_p + _log(1 + entropy_weight * (log_p + entropy))


def in_order_of(log_p: FloatArray, log_eta: FloatArray) -> FloatArray:
    """Return log eta, rows that sum to 1, with classes that rank otherwise than in p pooled with their betters.

    The global minimum ranks the classes as eta does; where it jumps as eta moves through a tie, what lies in
    the jump belongs to the tie. A trace of p keeps the order of classes that are pooled.
    """
    log_eta = log_eta - log_eta.max(axis=1, keepdims=True)
    log_eta -= logsumexp(log_eta, axis=1, keepdims=True)
    order = np.argsort(-log_p, axis=1, kind="stable")
    ranked = np.take_along_axis(log_eta, order, axis=1)
    for row in np.flatnonzero((ranked[:, 1:] > ranked[:, :-1] + _ROUNDING).any(axis=1)):
        pooled = isotonic_regression(np.exp(ranked[row]), increasing=False)
        p = np.exp(log_p[row, order[row]])
        log_eta[row, order[row]] = _log((1 - _TRACE) * pooled + _TRACE * p)
    return log_eta


class _Ranking(NamedTuple):
    """The classes of each row from the most probable down, and where in that order the rivals of each lie."""

    order: NDArray[np.intp]  # (B, C) columns by falling probability
    first: NDArray[np.intp]  # (B, C) of the class in the i-th place: its rivals lie in [first, last)
    last: NDArray[np.intp]
    next_level: NDArray[np.intp]  # (B, C) the place after the classes that tie with the i-th
    log_rival: FloatArray  # (B, C) by column: log q

    @classmethod
    def of(cls, predictions: ProbabilityBlock, rival: str) -> _Ranking:
        order = np.argsort(-predictions.log_p, axis=1, kind="stable")
        ranked = np.take_along_axis(predictions.log_p, order, axis=1)
        n_classes = ranked.shape[1]
        ends = np.full(ranked.shape, n_classes)
        ends[:, :-1] = np.where(ranked[:, :-1] > ranked[:, 1:], np.arange(1, n_classes), n_classes)
        next_level = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
        size = predictions.allowed.sum(axis=1, keepdims=True)
        skip, stop = _RIVALS[rival]
        first = np.minimum(next_level + skip, size)
        last = np.broadcast_to(size, first.shape) if stop is None else np.minimum(next_level + stop, size)
        log_rival = np.empty_like(ranked)
        np.put_along_axis(log_rival, order, _log_means(ranked, first, last), axis=1)
        return cls(order, first, last, next_level, log_rival)

    def received(self, passed: FloatArray) -> FloatArray:
        """Return 1 + what the classes above pass to each class, if class y passes on `passed` of its own."""
        passed = np.take_along_axis(passed, self.order, axis=1) / np.maximum(self.last - self.first, 1)
        passed[self.first == self.last] = 0
        rows, n_classes = np.arange(len(passed)), passed.shape[1]
        own, changes = np.empty_like(passed), np.zeros((len(passed), n_classes + 1))
        level = np.ones(len(passed))
        for place in range(n_classes):
            level += changes[:, place]
            own[:, place] = level
            share = level * passed[:, place]
            changes[rows, self.first[:, place]] += share
            changes[rows, self.last[:, place]] -= share
        received = np.empty_like(own)
        np.put_along_axis(received, self.order, self._mean_of_ties(own), axis=1)
        return received

    def _mean_of_ties(self, values: FloatArray) -> FloatArray:
        """Of classes that tie any one can be the rival: each gets the mean."""
        sums = np.zeros((len(values), values.shape[1] + 1))
        np.cumsum(values, axis=1, out=sums[:, 1:])
        places = np.arange(values.shape[1])
        begins = np.zeros_like(self.next_level)
        begins[:, 1:] = np.where(self.next_level[:, :-1] == places[1:], places[1:], 0)
        begins = np.maximum.accumulate(begins, axis=1)
        total = np.take_along_axis(sums, self.next_level, 1) - np.take_along_axis(sums, begins, 1)
        return np.where(self.next_level - begins == 1, values, total / (self.next_level - begins))


def _log_means(ranked: FloatArray, first: NDArray[np.intp], last: NDArray[np.intp]) -> FloatArray:
    """Return the log of the mean of exp(ranked) over the places [first, last); of 0 where there is none."""
    # Sums from the smallest up: what lies from `first` on, less what lies from `last` on.
    padded = np.pad(ranked, ((0, 0), (0, 1)), constant_values=_LOG_ZERO)
    tails = np.logaddexp.accumulate(padded[:, ::-1], axis=1)[:, ::-1]
    whole, beyond = (np.take_along_axis(tails, place, axis=1) for place in (first, last))
    count = last - first
    single = np.take_along_axis(padded, first, axis=1)
    several = whole + np.log1p(-np.exp(np.where(count > 1, beyond - whole, _LOG_ZERO)))
    means = np.where(count > 1, several, single) - np.log(np.maximum(count, 1))
    return np.where(count > 0, np.maximum(means, _LOG_ZERO), _LOG_ZERO)


def _log_sum_of_others(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return log sum_{j != k} exp(v_j) for each k (B, C), and log sum_j exp(v_j) (B, 1)."""
    each, top = np.arange(len(values)), values.argmax(axis=1)
    rest = values.copy()
    rest[each, top] = _LOG_ZERO
    without_top = logsumexp(rest, axis=1)
    total = np.logaddexp(without_top, values[each, top])[:, None]
    # The others are at most half of the sum, so nothing cancels; the largest one is left out above.
    others = total + np.log1p(-np.exp(rest - total))
    others[each, top] = without_top
    return others, total


def _log(values: FloatArray) -> FloatArray:
    """log, and -inf for what is not above 0."""
    return np.log(values, out=np.full_like(values, -np.inf), where=values > 0)
