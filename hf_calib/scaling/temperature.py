"""The best temperature of rows, by three criteria that each need a search of their own.

The likelihood is solved exactly. With beta = 1 / T, largest logits m_n, gaps g_nc = z_nc - m_n <=
0, labels y_n and weights a_n, the mean loss is

    L(beta) = 1/N sum_n a_n log sum_c exp(beta g_nc) + beta shortfall,
    L'(beta) = shortfall - gap(beta),    gap(beta) = -1/N sum_n a_n sum_c p_nc g_nc,
    shortfall = 1/N sum_n a_n (m_n - z_n,y_n).

L is convex, so the gap between the largest logit and the mean under p falls with beta, to 0. The
best beta is where the gap has fallen to the shortfall of the labels. At beta = 0 all p are equal,
and L' is the drift: from the label's logit to the mean logit of the row. So there is a best beta if
the drift is below 0 (labels score better than the average class) and the shortfall above 0 (some
label is not first).

The calibration error jumps where a confidence changes its bin, so it is compared on a grid. The
Brier score is smooth but may have several minima, so the best point of a grid is where its search
begins.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from math import isclose
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar

from hf_calib.metrics.checks import FloatArray, row_chunks
from hf_calib.metrics.sums import top_label_sums
from hf_calib.scaling._base import blocks, softmax_in_place
from hf_calib.scaling.rows import Rows, at_labels
from hf_calib.scaling.saved_map import BOUNDS, Criterion

# In log T. Newton's method doubles the correct digits, so that the step after this one is beyond
# the digits that matter.
_SMALL_STEP = 1e-5
# The farthest step of bisection, as the bounds are many orders of magnitude away.
_FAR = np.log(4)
# Bisection alone would need about 40.
_MOST_STEPS = 100
# With many rows, every 16th row gives the first guess.
_SAMPLE_STEP = 16
# It replaces -inf, whose product with a weight of 0 would be NaN.
_MASKED = -1e150
# From here on, the exponentials of a search by calibration error take most of its time.
_MANY_CLASSES = 32
# The most softmax denominators in memory at the same time.
_MASSES = 2**20
# The largest factor between the temperatures of the Brier score and of the likelihood.
FARTHEST = 30


def warn_undetermined(what: str, stacklevel: int) -> None:
    way_out = (
        "Fit on more or harder examples; check that labels number the columns, "
        "and the logits' scale."
    )
    message = f"The data do not determine {what}. {way_out}"
    warnings.warn(message, UserWarning, stacklevel)


class Derivatives(NamedTuple):
    """The value of a function of one number, its slope and its curvature."""

    value: float
    slope: float
    curvature: float


class ScaledLoss:
    """The mean NLL of rows as a function of beta = 1 / T, with its slopes at 0 and at infinity."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows.two_classes() if rows.sigmoid else rows
        n = len(self.rows)
        logits = self.rows.logits
        self.weights = self.rows.shares
        self.largest = logits.max(axis=1).astype(np.float64)
        gap_of_label = at_labels(logits, self.rows.labels) - self.largest
        # Differences come before the mean, so that equal logits have no drift at all.
        mean_gaps = [
            _mean_of_finite(block - self.largest[part, None])
            for part, block in blocks(logits)
        ]
        drifts = np.concatenate(mean_gaps) - gap_of_label
        self.drift = float(drifts @ self.weights) / n
        self.shortfall = float(-gap_of_label @ self.weights) / n
        self.is_constant = self.drift == 0 == self.shortfall

    def problem(self, temperature: float) -> str | None:
        """The reason why the data do not determine the best temperature, or nothing."""
        if self.is_constant:
            return "the logits of each row are equal"
        if self.shortfall == 0:
            return "every label is ranked first"
        if self.drift >= 0:
            return "labels score no better than the average class"
        if temperature in BOUNDS:
            return f"the best one is out of {BOUNDS}"
        return None

    def warn(self, temperature: float, stacklevel: int = 3) -> None:
        """Warn if the data do not determine T; by default where the caller's method is called."""
        problem = self.problem(temperature)
        if problem:
            what = f"the temperature: {problem}. It is {temperature:g}"
            warn_undetermined(what, stacklevel + 1)

    def _gaps(self) -> Iterator[tuple[slice, FloatArray]]:
        """The logits minus the largest logit of the row, block by block."""
        for part, block in blocks(self.rows.logits):
            block -= self.largest[part, None]
            # A comparison costs less than a copy, and most models mask nothing.
            if block.min() < _MASKED:
                np.maximum(block, _MASKED, out=block)
            yield part, block

    def at(self, beta: float) -> Derivatives:
        """The value, the slope and the curvature at beta."""
        value = 0.0
        slope = 0.0
        curvature = 0.0
        for part, gaps in self._gaps():
            weights = self.weights[part]
            # A product with ones is faster than a sum over rows.
            ones = np.ones(gaps.shape[1])
            terms = gaps * beta
            np.exp(terms, out=terms)
            mass = terms @ ones
            terms *= gaps
            mean = (terms @ ones) / mass
            terms *= gaps
            variance = (terms @ ones) / mass - mean**2
            value += float(np.log(mass) @ weights)
            slope += float(mean @ weights)
            curvature += float(variance @ weights)
        n = len(self.rows)
        return Derivatives(
            value=value / n + beta * self.shortfall,
            slope=slope / n + self.shortfall,
            curvature=curvature / n,
        )

    def best_temperature(self) -> float:
        """The T within `BOUNDS` with the lowest value; 1 if the value does not depend on T."""
        if self.is_constant:
            return 1.0
        # The loss only rises with beta.
        if self.drift >= 0:
            return BOUNDS[1]
        # If each label is ranked first, one more example with an unknown label is added.
        target = self.shortfall or -self.drift / (len(self.rows) + 1)
        least = -np.log(BOUNDS[1])
        most = -np.log(BOUNDS[0])
        log_beta = np.log(self._first_guess()).clip(least, most)
        step = np.inf
        for _ in range(_MOST_STEPS):
            beta = np.exp(log_beta)
            here = self.at(beta)
            gap = self.shortfall - here.slope
            if gap < target:
                most = log_beta
            else:
                least = log_beta
            # Newton's method for log gap = log target as a function of log beta, which is nearly
            # linear, or bisection where its steps do not shrink or leave the bracket.
            newton = np.inf
            if gap > 0 and here.curvature > 0:
                newton = np.log(gap / target) * gap / (beta * here.curvature)
            stays_within = least < log_beta + newton < most
            if stays_within and abs(newton) < abs(step) / 2:
                step = newton
            else:
                step = np.clip((least + most) / 2 - log_beta, -_FAR, _FAR)
            log_beta += step
            if abs(step) <= _SMALL_STEP:
                break
        found = float(np.exp(-log_beta))
        # Bisection only comes close to a bound, and a warning compares T with it.
        for bound in BOUNDS:
            if isclose(found, bound, rel_tol=10 * _SMALL_STEP):
                return bound
        return found

    def _first_guess(self) -> float:
        """The beta at which the search begins."""
        # A sample of few rows could have all labels first, far from the best beta of all rows.
        if len(self.rows) >= 100 * _SAMPLE_STEP:
            sample = self.rows[::_SAMPLE_STEP]
            return 1 / ScaledLoss(sample).best_temperature()
        # Labels are assumed to be about 3 nats ahead of the average class.
        return -3 / self.drift

    def best_of(self, grid: FloatArray, criterion: Criterion, n_bins: int) -> float:
        """The first of the best temperatures of a grid."""
        if criterion == "nll":
            scores = [self.at(1 / temperature).value for temperature in grid]
        else:
            binning: Any = "uniform" if criterion == "ece" else "quantile"
            error = top_label_sums(n_bins, binning)
            is_correct = self.rows.logits.argmax(axis=1) == self.rows.labels
            correct = is_correct.astype(np.float64)
            grid = self._finalists(grid, error, correct)
            scores = []
            for part in row_chunks(len(grid), len(self.rows), elements=_MASSES):
                betas = 1 / grid[part]
                masses = self._masses(betas)
                scores += [error(1 / masses[beta], correct) for beta in betas]
        return float(grid[np.argmin(scores)])

    def _finalists(
        self, grid: FloatArray, error: Any, correct: FloatArray
    ) -> FloatArray:
        """The temperatures of a large search that may be the best one; a small grid unchanged."""
        n, n_classes = self.rows.logits.shape
        octaves = int(np.ceil(np.log2(grid.max() / grid.min())))
        if n_classes < _MANY_CLASSES or octaves > min(8, len(grid) / 5):
            return grid
        near_masses = self._near_masses(1 / grid, octaves)
        scores = np.array([error(1 / mass, correct) for mass in near_masses])
        # A confidence on the edge of a bin may change its bin, and a score by up to 2 / N.
        return grid[scores <= scores.min() + 1e-6 + 8 / n]

    def _masses(self, betas: FloatArray) -> dict[float, FloatArray]:
        """The softmax denominators (N,) at each beta: a row's largest probability is 1 / mass."""
        found = {beta: np.empty(len(self.rows)) for beta in betas.tolist()}
        # The exponentials of twice a beta are the squares of its own, which cost much less.
        roots = [beta for beta in found if beta / 2 not in found]
        for part, gaps in self._gaps():
            ones = np.ones(gaps.shape[1])
            powers = np.empty_like(gaps)
            for root in roots:
                np.multiply(gaps, root, out=powers)
                np.exp(powers, out=powers)
                np.dot(powers, ones, out=found[root][part])
                beta = 2 * root
                while beta in found:
                    powers *= powers
                    np.dot(powers, ones, out=found[beta][part])
                    beta *= 2
        return found

    def _near_masses(self, betas: FloatArray, octaves: int) -> Iterator[FloatArray]:
        """The `_masses` of each beta in turn, to 1e-9, from few exponentials and their squares."""
        # For all gaps, exp(beta gap) is a least-squares sum of its values at four betas per octave.
        roots = betas.min() * 2.0 ** (np.arange(4) / 4 - 1)
        nodes = np.outer(2.0 ** np.arange(octaves + 3), roots).ravel()
        samples = -np.append(0, np.geomspace(1e-3, 50, 200)) / betas.min()
        at_nodes = np.exp(np.outer(samples, nodes))
        at_betas = np.exp(np.outer(samples, betas))
        weights = np.linalg.lstsq(at_nodes, at_betas, rcond=1e-13)[0]
        masses = np.stack([*self._masses(nodes).values()])
        return (row @ masses for row in weights.T)


def _mean_of_finite(block: FloatArray) -> FloatArray:
    """The mean (N,) of each row over the classes that are not masked."""
    if block.min() == -np.inf:
        return block.mean(axis=1, where=np.isfinite(block))
    n_classes = block.shape[1]
    # A product with equal shares is faster than a mean.
    return block @ np.full(n_classes, 1 / n_classes)


def brier_temperature(rows: Rows, likely: float) -> float:
    """The T of the least Brier score, within a factor of `FARTHEST` of the likeliest T."""

    def error(log_temperature: float) -> float:
        total = 0.0
        for part, block in blocks(rows.logits):
            probs = softmax_in_place(block / np.exp(log_temperature))
            of_labels = at_labels(probs, rows.labels[part])
            # The square of the one-hot label is 1 at any T, and is left out.
            total += np.vdot(probs, probs) - 2 * of_labels.sum()
        return float(total) / len(rows)

    grid = np.log(likely) + np.log(FARTHEST) * np.linspace(-1, 1, 25)
    best = int(np.argmin([error(log_t) for log_t in grid]))
    low = grid[max(best - 1, 0)]
    high = grid[min(best + 1, len(grid) - 1)]
    found = minimize_scalar(error, bounds=(low, high), options={"xatol": 1e-9}).x
    # The search never tries the ends themselves.
    return float(np.exp(min([found, low, high], key=error)))
