"""Minimiser of convex functions of many parameters: Newton's steps, each solved by conjugate gradients.

It stops by what is left to gain: the decrease of the quadratic model, which is known with each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hf_calib.scaling._inputs import FloatArray

_MAX_STEPS = 200
_MAX_PRODUCTS = 250  # with the Hessian, for one step
_LEAST_STEP = 1e-8  # of Newton's: if not even that is better, rounding is all there is


class Point(NamedTuple):
    """A function at some parameters: its value and gradient, and two linear maps of a direction.

    `product` multiplies by the Hessian; what `preconditioner` makes divides by something like it.
    """

    value: float
    gradient: FloatArray
    product: Callable[[FloatArray], FloatArray]
    preconditioner: Callable[[], Callable[[FloatArray], FloatArray]]


def minimise(
    evaluate: Callable[[FloatArray], Point],
    start: FloatArray,
    left_to_gain: float,
    stop_below: float = -np.inf,
) -> tuple[FloatArray, bool]:
    """Return parameters whose value is within about `left_to_gain` of the least, and whether they are.

    A value below `stop_below` is good enough: it says that there is no least one.
    """
    parameters, point = start, evaluate(start)
    for _ in range(_MAX_STEPS):
        if point.value < stop_below:
            return parameters, True
        step, gain = _newton_step(point, left_to_gain)
        size = 1.0
        while (trial := evaluate(parameters + size * step)).value > point.value - 1e-4 * size * gain:
            if gain <= left_to_gain:
                return parameters, True  # rounding is all there is
            # The minimum of the parabola through both values and the slope, which is -2 gain.
            excess = trial.value - point.value + 2 * gain * size
            parabola = gain * size / excess if np.isfinite(excess) else 0.0
            size *= min(max(parabola, 0.1), 0.5)
            if size < _LEAST_STEP:
                return parameters, False
        parameters, point = parameters + size * step, trial
        if gain <= left_to_gain:
            return parameters, True
    return parameters, False


def _newton_step(point: Point, left_to_gain: float) -> tuple[FloatArray, float]:
    """Newton's step, the more exact the nearer it ends, and by how much it lowers the quadratic model."""
    step = np.zeros_like(point.gradient)
    residual = -point.gradient
    precondition = point.preconditioner()
    direction = precondition(residual)
    size = float(np.vdot(residual, direction))
    # An inexact end of the step costs about its square.
    enough = max(size * min(0.1, size), 10 * left_to_gain**2)
    for _ in range(_MAX_PRODUCTS):
        if size <= enough:
            break
        product = point.product(direction)
        curvature = float(np.vdot(direction, product))
        if curvature <= 0:  # flat, up to rounding
            break
        length = size / curvature
        step += length * direction
        residual -= length * product
        preconditioned = precondition(residual)
        last, size = size, float(np.vdot(residual, preconditioned))
        direction = preconditioned + size / last * direction
    return step, -float(np.vdot(point.gradient, step)) / 2
