"""Whether rows can have the sums of a state, which come from others as bytes.

Sums w x of values x in [a, b], with weights w >= 0 of the sum W, lie between a W and b W. The sum
of squares, w x^2, is least if all values are the same, and largest if each is a or b, because (x -
a)(b - x) >= 0:

    S^2 / W  <=  sum w x^2  <=  (a + b) S - a b W,    S = sum w x.

The NLL is convex in the probability of the label, which is at most the confidence. So its mean is
at least -log of the mean confidence. The Brier score of a row is at least the square of its gap,
the confidence minus the correctness, which is one of the differences that it adds up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib.metrics.checks import FloatArray, row_sum_tolerance
from hf_calib.metrics.sums import uniform_edges

# Per row: probabilities may be off by 1e-6, and float32 has 24 bits.
_SLACK = 2e-6
# The relative difference of sums of the same terms in another order.
_SAME = 1e-7
# A difference of two logits in float32.
_MOST_NATS = 1e39
# Larger numbers of rows are not exact in float64.
_MOST_ROWS = 2**53


class _Totals(NamedTuple):
    """The sums over all bins."""

    rows: float
    mass: float
    stated: float
    squares: float
    right: float


# The sums may be any numbers.
@np.errstate(all="ignore")
def impossible_sums(sums: dict[str, FloatArray], cell_edges: FloatArray) -> str | None:
    """The name of the first sums that no rows can have, if any.

    Comparisons are False for NaN, so each states what has to hold.
    """
    rows, mass, stated, squares, right = sums["bins"]
    n_bins = rows.shape[1]
    edges = uniform_edges(n_bins)
    low = edges[:-1]
    high = edges[1:]
    totals = _Totals(*sums["bins"].sum(axis=(1, 2)))
    are_finite = [np.isfinite(each).all() for each in sums.values()]
    are_whole = (rows >= 0) & (rows == np.floor(rows))
    # A bin without rows has no weight.
    have_rows = (mass == 0) | (rows >= 1)
    holds: dict[str, Any] = {
        "numbers": all(are_finite),
        "rows": are_whole & (totals.rows < _MOST_ROWS),
        "weights": (mass >= 0) & have_rows,
        "confidences": _can_be(mass, stated, low, high, squares),
        "correct rows": _is_part(right, mass),
    }
    holds |= _cells_hold(sums["cells"], cell_edges, totals)
    holds |= _scores_hold(sums["scores"][:, 0], totals)
    if "class_bins" in sums:
        holds |= _classes_hold(sums["class_bins"], totals.mass, low, high)
    wrong = (name for name, each in holds.items() if not np.all(each))
    return next(wrong, None)


def _cells_hold(
    cells: FloatArray, edges: FloatArray, totals: _Totals
) -> dict[str, Any]:
    mass, stated, right = cells
    are_cells = (mass >= 0) & _is_part(right, mass)
    are_cells &= _can_be(mass, stated, edges[:-1], edges[1:])
    of_bins = np.array([totals.mass, totals.stated, totals.right])
    return {
        "cells": are_cells,
        "sums of cells": _is_same(cells.sum(axis=1), of_bins, totals.mass),
    }


def _scores_hold(scores: FloatArray, totals: _Totals) -> dict[str, Any]:
    weights_squared, nll, nll_squares, brier, brier_squares, gap, gap_squares = scores
    mass = totals.mass
    slack = _SLACK * mass
    # Of weights with this sum, the sum of squares is largest if one has all of it.
    most_squared = mass**2 * (1 + _SAME)
    least_squared = mass**2 * (1 - _SAME)
    are_weights = weights_squared <= most_squared
    are_weights &= weights_squared * totals.rows >= least_squared
    least_nll = -mass * np.log(totals.stated / mass) if mass > 0 else 0.0
    is_nll = (nll >= least_nll - slack) & (nll <= _MOST_NATS * mass)
    least_squares = nll**2 * (1 - _SAME) - slack * mass
    is_nll &= nll_squares * mass >= least_squares
    is_nll &= nll_squares <= _MOST_NATS * (nll + slack)
    is_brier = _can_be(mass, brier, 0, 2, brier_squares)
    is_difference = _is_same(gap, totals.stated - totals.right, mass)
    return {
        "squared weights": are_weights,
        "NLL": is_nll,
        "Brier score": is_brier & (brier >= gap_squares - slack),
        "gaps": is_difference & _can_be(mass, gap, -1, 1, gap_squares),
    }


def _classes_hold(
    class_bins: FloatArray, total: float, low: FloatArray, high: FloatArray
) -> dict[str, Any]:
    mass, probabilities, true = class_bins
    n_classes = len(mass)
    by_class = mass.sum(axis=1)
    # Each row counts in every class or, of independent labels, each decision in its own class.
    is_softmax = bool(_is_same(by_class, total, total).all())
    of_rows = _is_same(by_class.sum(), total, total)
    if is_softmax and n_classes > 1:
        # Each row has one label, or shares of it, and probabilities that sum to 1.
        off = np.abs(probabilities.sum() - total)
        tolerance = row_sum_tolerance(n_classes) + _SLACK
        of_rows = _is_same(true.sum(), total, total)
        of_rows &= off <= tolerance * total
    return {
        "rows of classes": (mass >= 0) & of_rows,
        "true rows of classes": _is_part(true, mass),
        "probabilities of classes": _can_be(mass, probabilities, low, high),
    }


def _can_be(
    mass: Any, first: Any, low: Any, high: Any, second: Any = None
) -> NDArray[np.bool_]:
    """Whether values in [low, high] can have these sums, and sums of squares if they are given."""
    slack = _SLACK * mass
    found = first >= low * mass - slack
    found &= first <= high * mass + slack
    if second is not None:
        mean = first / np.where(mass > 0, mass, 1)
        most = (low + high) * first - low * high * mass
        found &= second >= first * mean - slack
        found &= second <= most + slack
    return np.asarray(found)


def _is_part(part: FloatArray, whole: FloatArray) -> NDArray[np.bool_]:
    """Whether some of the rows can have these sums of weights, where all have others."""
    return np.asarray((part >= 0) & (part <= whole * (1 + _SAME)))


def _is_same(ours: Any, theirs: Any, scale: Any) -> NDArray[np.bool_]:
    return np.asarray(np.abs(ours - theirs) <= _SAME * scale)
