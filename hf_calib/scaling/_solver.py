"""Solver for the temperature of the least negative log-likelihood, which is convex in beta = 1 / T."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from hf_calib.scaling._objectives import Objective, SigmoidObjective

# Cosine similarities need a T near 0.01, raw scores of 10,000 one near 10,000. A larger T would make
# probabilities so equal that float32 no longer ranks them.
BOUNDS = (1e-5, 1e5)

# The sentence of a warning that says what was done about labels that any smaller temperature fits better.
SMOOTHED = "The labels were smoothed by 1 / (N + 1). "

_SMALL_STEP = 1e-6  # relative; Newton doubles the number of right digits, so after this one 12 are right
_MAX_STEPS = 100  # bisection alone would need about 40
_SAMPLE_STEP, _SAMPLE_ROWS = 16, 400


class _Point(NamedTuple):
    beta: float
    slope: float
    curvature: float


def best_temperature(objective: Objective, guess: float | None = None) -> float:
    """Return the T within `BOUNDS` at which the negative log-likelihood is least, perhaps near a guess.

    Where every label is ranked first that would be T = 0. The labels are then smoothed by 1 / (N + 1), which
    adds a constant to the slope in beta.
    """
    if objective.is_no_better_than_chance:
        return BOUNDS[1]
    smoothing_slope = -objective.drift / (objective.size + 1) if objective.is_separable else 0.0

    def slope_and_curvature(beta: float) -> tuple[float, float]:
        curve = objective.nll(beta)
        return curve.slope + smoothing_slope, curve.curvature

    return 1 / _root(slope_and_curvature, start=_first_guess(objective) if guess is None else 1 / guess)


def undetermined(objective: Objective, temperature: float, *, smoothed: bool) -> str | None:
    """Say why the data do not determine a temperature, if they don't; `smoothed` is for separable labels."""
    if objective.is_constant:
        return (
            "The logits of each row are equal, so no temperature changes their probabilities. The temperature "
            "was set to 1. Check the model's output."
        )
    if objective.is_separable:
        return (
            f"All {objective.size} labels are ranked first, so the data do not determine a temperature: they "
            f"only show that a smaller one is better. {SMOOTHED if smoothed else ''}Fit on more or harder "
            "examples."
        )
    if objective.is_no_better_than_chance and isinstance(objective, SigmoidObjective):
        return (
            "The logits are on average on the wrong side for their labels, so probabilities of 1/2 fit best, and the "
            "largest temperature was taken. Check that labels and logits have the same columns."
        )
    if objective.is_no_better_than_chance:
        return (
            f"The labels' logits are on average {objective.drift:.3g} below the mean logit of their rows, so "
            "uniform probabilities fit best, and the largest temperature was taken. Check that labels number "
            "the columns of logits."
        )
    if any(math.isclose(temperature, bound) for bound in BOUNDS):
        return (
            f"The best temperature, {temperature:g}, is at the end of the range that is searched, {BOUNDS}. A "
            "better one may lie beyond it. Check the scale of the logits."
        )
    return None


def _first_guess(objective: Objective) -> float:
    """Solve a large problem for a sample of its rows first: that saves half of the passes over all."""
    scale = -3 / objective.drift  # where labels stand out by about 3 nats
    if len(objective.logits) < _SAMPLE_STEP * _SAMPLE_ROWS:
        return scale
    sample = objective.every(_SAMPLE_STEP)
    undetermined = sample.is_separable or sample.is_no_better_than_chance
    return scale if undetermined else 1 / best_temperature(sample)


def _root(slope_and_curvature: Callable[[float], tuple[float, float]], start: float) -> float:
    """Return the beta at which a rising slope is 0: interpolation, with bisection wherever it does not pay."""
    floor, ceiling = 1 / BOUNDS[1], 1 / BOUNDS[0]
    low, high, beta = floor, ceiling, min(max(start, floor), ceiling)
    last: _Point | None = None
    for _ in range(_MAX_STEPS):
        point = _Point(beta, *slope_and_curvature(beta))
        low, high = (low, beta) if point.slope > 0 else (beta, high)
        step = _step(point, last)
        if abs(step) <= _SMALL_STEP * beta:
            return min(max(beta + step, floor), ceiling)
        if high <= low * (1 + _SMALL_STEP):
            break
        pays = low < beta + step < high and (last is None or abs(point.slope) <= abs(last.slope) / 2)
        middle = min(max(math.sqrt(low * high), beta / 4), beta * 4)
        beta, last = (beta + step if pays else middle), point
    return floor if low == floor else ceiling if high == ceiling else math.sqrt(low * high)


def _step(point: _Point, last: _Point | None) -> float:
    """The step to the root: Newton's, or that of the cubic beta(slope) through this point and the last.

    The cubic meets value and derivative at both, which costs nothing and makes up for one evaluation.
    """
    if point.curvature <= 0:
        return math.inf
    newton = -point.slope / point.curvature
    if last is None or last.curvature <= 0 or abs(point.slope) > abs(last.slope) / 2:
        return newton
    width = last.slope - point.slope
    part = -point.slope / width
    gap = last.beta - point.beta
    cubic = part * part * (3 - 2 * part) * gap + part * (1 - part) * width * (
        (1 - part) / point.curvature - part / last.curvature
    )
    return cubic if newton / 2 < cubic < newton * 2 or newton * 2 < cubic < newton / 2 else newton
