"""The post-processing gap: how much a smooth recalibration could still improve a score.

The best recalibration is a convex problem over its values at the N confidences, in which only neighbours are
tied to each other: an interior-point method solves it in O(N) an iteration, to a proven distance from the best.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import solve_banded
from scipy.special import expit

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.checks import FloatArray, check_choice, check_probs_and_any_labels
from hf_calib.metrics.sums import top_label

GapMetric = Literal["brier", "nll"]
SmoothPart = Literal["update", "map"]

_ACCURACY = 1e-10  # of the result
_MOST_ITERATIONS = 200  # 10 to 60 are usual
_RESOLUTION = 1e-6  # confidences (or their logits) that are this near are treated as one
_MARGIN = 2.0**-53  # between the largest float64 below 1, and 1


class _Score(NamedTuple):
    """A score of predictions at positions on a line, given how often each is right."""

    largest_update: float
    position: Callable[[FloatArray], FloatArray]  # of a confidence
    loss: Callable[[FloatArray, FloatArray], FloatArray]  # up to what no update changes
    slope: Callable[[FloatArray, FloatArray], FloatArray]
    curvature: Callable[[FloatArray], FloatArray]


class _Groups(NamedTuple):
    """Examples of one confidence each, by increasing position: (G,) arrays."""

    position: FloatArray
    accuracy: FloatArray
    weight: FloatArray  # shares of all examples
    start: FloatArray  # what the update is added to: the position, or 0 where it is the map itself


def post_processing_gap(
    probs: ArrayLike, labels: ArrayLike, *, metric: GapMetric = "brier", smooth: SmoothPart = "update"
) -> float:
    r"""Post-processing gap: a score of the top label minus its best value after a smooth recalibration.

    What miscalibration costs, in the units of the score, as far as a smooth map of the confidence can
    remove it; 0 says that no recalibration of that kind will help. The calibration errors
    (`smooth_calibration_error`) say how far the confidences are off, not what that costs.

    $$\frac{1}{N} \sum_i \ell(c_i, a_i) - \min_\kappa \frac{1}{N} \sum_i \ell(\kappa(c_i), a_i), \qquad
    \kappa(v) = v + \eta(v)$$

    with $c_i$ the confidence and $a_i$ whether it is right. The minimum is over all updates $\eta$ that
    change by no more than v does (1-Lipschitz), with $\kappa$ in [0, 1]. For the NLL, v is the logit of the
    confidence and $|\eta| \le 4$.

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C), or (N, C) label distributions, of which the share of the top label counts.
        metric: "brier", the squared error of the confidence, $(c - a)^2$; or "nll", the log loss of the event
            that the prediction is right.
        smooth: what is 1-Lipschitz: the "update" $\eta$, so that the map may stretch the confidences too, as
            in Blasiok et al.; or the "map" $\kappa$ itself, as the paper on focal calibration loss has it (with
            the Brier score only). Neither gap is always the larger one.

    Returns:
        Brier: a number in [0, 1]. NLL: nats in [0, 4].

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are not probabilities, labels do not fit, or the metric is unknown or has no such map.
        RuntimeError: if the solver does not converge, which is not known to happen.

    Notes:
        The result is within 1e-10 of the exact value, but where confidences (NLL: logits) are less than 1e-6
        apart: they are treated as one, which moves it by less than 4e-6. The map is fitted to the examples it
        is judged by, so a small sample shows a gap by chance, as every plug-in calibration error does.
        For the Brier score, the gap over updates lies between smCE^2 and 2 smCE; for the NLL, a quarter of the gap lies
        between smCE^2 / 2 and smCE; smCE is the largest mean of $\eta(v) (a - c)$ over updates of size at
        most 1 (`smooth_calibration_error_dual`; for the NLL with slopes up to 1/4 in the logit).

    References:
        Blasiok et al. 2023, When does optimizing a proper loss yield calibration? Focal calibration loss,
        Definition 2.3.

    >>> probs = [[0.9, 0.1], [0.9, 0.1], [0.3, 0.7]]
    >>> round(post_processing_gap(probs, [0, 1, 1]), 6)
    0.081111
    """
    checked, targets = check_probs_and_any_labels(probs, labels)
    check_choice("metric", metric, tuple(_SCORES))
    check_choice("smooth", smooth, ("update", "map"))
    if smooth == "map" and metric != "brier":
        way_out = "the other one has its update in the logit: smooth='update'"
        raise InputValueError(expected("metric", "be 'brier' where the map is smooth", repr(metric), way_out))
    score = _SCORES[metric]
    confidences, correct = top_label(checked, targets)
    groups = _merge(score.position(confidences), correct)
    if smooth == "map":
        groups = groups._replace(start=np.zeros_like(groups.position))
    after = score.loss(groups.start + best_update(score, groups), groups.accuracy)
    saved = groups.weight @ (score.loss(groups.position, groups.accuracy) - after)
    return max(0.0, float(saved))


def best_update(score: _Score, groups: _Groups) -> FloatArray:
    """The update (G,) of each position that gives the least mean loss.

    It is bounded in size, and neighbours' updates differ by no more than their positions do. A primal-dual
    interior-point method with Mehrotra's corrector: `slack` is what is left of each bound,
    `multiplier` its Lagrange multiplier.
    """
    limits = _limits(score, groups)
    update, slack, multiplier = np.zeros_like(groups.position), limits, 1 / (len(limits) * limits)
    for _ in range(_MOST_ITERATIONS):
        slope = groups.weight * score.slope(groups.start + update, groups.accuracy)
        imbalance = np.abs(slope + _gradient_of_bounds(multiplier)).sum()
        distance = slack @ multiplier
        # By convexity, the loss is no further than this from the least one.
        if distance + 2 * score.largest_update * imbalance < _ACCURACY:
            return update
        curvature = groups.weight * score.curvature(groups.start + update)
        direction = _Direction(slope, curvature, slack, multiplier)
        _, tightened, pressed = direction(np.zeros_like(slack))
        length = min(1.0, direction.longest(tightened, pressed))
        reachable = (slack - length * tightened) @ (multiplier + length * pressed)
        centre = distance / len(slack) * (reachable / distance) ** 3
        step, tightened, pressed = direction(centre + tightened * pressed)
        length = min(1.0, 0.99 * direction.longest(tightened, pressed))
        update = update + length * step
        slack, multiplier = slack - length * tightened, multiplier + length * pressed
    got = f"a distance of {distance:.1g} from the least score"
    way_out = "please report these predictions as a bug"
    raise RuntimeError(expected("the recalibration", "converge", got, way_out))


class _Direction:
    """Newton's steps of one iteration."""

    def __init__(
        self, slope: FloatArray, curvature: FloatArray, slack: FloatArray, multiplier: FloatArray
    ) -> None:
        self._slope, self._slack, self._multiplier = slope, slack, multiplier
        self._stiffness = multiplier / slack
        rising, falling, above, below = _parts(self._stiffness)
        self._ties = rising + falling
        self._own = curvature + above + below

    def __call__(self, products: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The step towards slack * multiplier = products, and by how much slacks fall and multipliers rise."""
        target = products / self._slack
        step, change = self._solve(-(self._slope + _gradient_of_bounds(target)))
        tightened = np.concatenate([change, -change, step, -step])
        return step, tightened, target - self._multiplier + self._stiffness * tightened

    def longest(self, tightened: FloatArray, pressed: FloatArray) -> float:
        """How many times the step fits before a slack or a multiplier is 0."""
        fraction = max((tightened / self._slack).max(), (-pressed / self._multiplier).max())
        return 1 / max(float(fraction), 1e-300)

    def _solve(self, descent: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The step (G,), and its differences between neighbours (G - 1,).

        The unknowns alternate, step and multiplier between neighbours: a tridiagonal system that stays accurate
        when a tie is nearly rigid, where the difference of two steps would be rounding.
        """
        size = 2 * len(descent) - 1
        bands, right = np.zeros((3, size)), np.zeros(size)
        bands[1, ::2], bands[1, 1::2] = self._own, -1 / self._ties
        bands[0, 1::2] = bands[2, 0:-1:2] = -1
        bands[0, 2::2] = bands[2, 1:-1:2] = 1
        right[::2] = descent
        if size == 1:
            return right / bands[1], np.empty(0)
        solution = solve_banded((1, 1), bands, right, check_finite=False)
        return solution[::2], solution[1::2] / self._ties


def _limits(score: _Score, groups: _Groups) -> FloatArray:
    """(4G - 2,) bounds: of each rise to the next update, of each fall, of each update, of its negative."""
    # Neighbouring groups can end up at nearly equal means; a distance of 0 would leave no room to start.
    distances = np.maximum(np.diff(groups.position), 1e-3 * _RESOLUTION)
    sizes = np.full(2 * len(groups.position), score.largest_update)
    return np.concatenate([distances, distances, sizes])


def _parts(values: FloatArray) -> list[FloatArray]:
    """Cut (4G - 2,) into what belongs to rises, falls, updates and their negatives."""
    n_groups = (len(values) + 2) // 4
    return np.split(values, [n_groups - 1, 2 * n_groups - 2, 3 * n_groups - 2])


def _gradient_of_bounds(multipliers: FloatArray) -> FloatArray:
    """The gradient (G,) in the updates of all bounds, weighted by their multipliers (4G - 2,)."""
    rising, falling, above, below = _parts(multipliers)
    return -np.diff(rising - falling, prepend=0.0, append=0.0) + above - below


def _merge(positions: FloatArray, correct: FloatArray) -> _Groups:
    """Sort, and take together what is nearer than the resolution."""
    cells, counts = np.unique(np.floor(positions / _RESOLUTION), return_inverse=True, return_counts=True)[1:]
    position = np.bincount(cells, positions) / counts
    return _Groups(
        position=position,
        accuracy=np.bincount(cells, correct) / counts,
        weight=counts / len(positions),
        start=position,
    )


def _logit(confidences: FloatArray) -> FloatArray:
    inside = confidences.clip(_MARGIN, 1 - _MARGIN)
    return np.log(inside) - np.log1p(-inside)


_SCORES: dict[str, _Score] = {
    # The optimum keeps the confidence in [0, 1] by itself: to clip an update to that range keeps it 1-Lipschitz.
    "brier": _Score(
        largest_update=1.0,
        position=lambda confidences: confidences,
        loss=lambda at, accuracy: at * at - 2 * accuracy * at,
        slope=lambda at, accuracy: 2 * (at - accuracy),
        curvature=lambda at: np.full_like(at, 2.0),
    ),
    "nll": _Score(
        largest_update=4.0,
        position=_logit,
        loss=lambda at, accuracy: np.logaddexp(0, at) - accuracy * at,
        slope=lambda at, accuracy: expit(at) - accuracy,
        curvature=lambda at: expit(at) * expit(-at),
    ),
}
