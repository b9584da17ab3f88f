"""Temperature scaling: one number that makes a classifier's confidence match its accuracy, or one for each label."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from math import isclose
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from hf_calib._errors import check, few
from hf_calib.metrics.checks import FloatArray, as_floats, check_choice, check_n_bins, row_chunks
from hf_calib.metrics.sums import top_label_sums
from hf_calib.scaling._base import blocks
from hf_calib.scaling.affine import AffineMap, AffineScaling
from hf_calib.scaling.newton import Rows

Criterion = Literal["nll", "ece", "adaptive_ece"]

# Cosine similarities need a T near 0.01, raw scores of 10,000 one near 10,000. A larger T would make
# probabilities so equal that float32 no longer ranks them.
BOUNDS = (1e-5, 1e5)
PAPERS_GRID = np.arange(1, 101) / 10
_SMALL_STEP = 1e-5  # of Newton's method, in log T: after it twice as many digits are right
_FAR = np.log(4)  # of bisection
_MAX_STEPS = 100  # bisection alone would need about 40
_SAMPLE_STEP = 16  # of many rows, every 16th gives the first guess
_MANY_CLASSES = 32  # for which exponentials are most of the time
_MASSES = 2**20  # in memory at once
_MASKED = -1e150  # stands for -inf, whose product with a weight of 0 would be NaN


class TemperatureScaling(AffineScaling):
    r"""Divide the logits by one temperature: T > 1 softens an over-confident model, T < 1 sharpens another.

    $$\hat p = \mathrm{softmax}(z / T)$$

    `fit` warns where data do not determine T: where every label is ranked first, "nll" smooths the labels by
    1 / (N + 1); where labels score no better than the average class, T is the upper bound; of equal logits 1.

    Args:
        criterion: "nll", the negative log-likelihood, solved exactly (Guo et al. 2017), or the noisier calibration
            error with equal-width ("ece") or equal-mass bins ("adaptive_ece") on a grid, as in Mukhoti et al. 2020.
        grid: temperatures (G,) > 0, the first of the best of which is taken; None: 0.1, 0.2, ..., 10, for "nll" none.
        n_bins: bins of the calibration errors.

    Attributes:
        temperature_: T, a float, in [1e-5, 1e5] unless a grid says otherwise.

    >>> logits = np.array([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    >>> scaler = TemperatureScaling().fit(logits, [0, 0, 0, 0])
    >>> round(scaler.temperature_, 4)  # right three times in four: p = 3/4 needs z / T = log 3
    3.641
    """

    def __init__(
        self,
        criterion: Criterion = "nll",
        *,
        grid: ArrayLike | None = None,
        n_bins: int = 15,
        multi_label: bool = False,
    ) -> None:
        self.criterion = criterion
        self.grid = grid
        self.n_bins = n_bins
        self.multi_label = multi_label

    def fit(
        self, logits: ArrayLike, labels: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> TemperatureScaling:
        """Choose the temperature; weights (N,) are for "nll" and one label a row."""
        check_choice("criterion", self.criterion, get_args(Criterion))
        check_n_bins(self.n_bins)
        grid = as_floats("grid", PAPERS_GRID if self.grid is None else self.grid)
        holds = grid.ndim == 1 and grid.size > 0 and bool(((grid > 0) & (grid < np.inf)).all())
        way_out = "use for example numpy.arange(1, 101) / 10"
        check(holds, "grid to be a sequence of finite temperatures > 0", self.grid, way_out)
        holds = sample_weight is None or (self.criterion == "nll" and not self.multi_label)
        requirement = "sample_weight to go with criterion 'nll' and one label a row"
        got = "several labels a row" if self.multi_label else repr(self.criterion)
        check(holds, requirement, got, "leave the weights out")
        rows = Rows.checked(logits, labels, sample_weight, self.multi_label)
        self._n_seen = rows.logits.shape[1]
        loss = ScaledLoss(rows)
        exact = loss.is_constant or (self.criterion == "nll" and self.grid is None)
        self.temperature_ = loss.best_temperature() if exact else self._best_of(grid, loss)
        loss.warn(self.temperature_)
        return self

    def affine_map(self) -> AffineMap:
        """The affine map z / T that `fold` writes into a classification head."""
        check_is_fitted(self)
        return AffineMap(np.array(1 / self.temperature_))

    def _best_of(self, grid: FloatArray, loss: ScaledLoss) -> float:
        """The first of the best temperatures; of a large search, only the finalists are scored exactly."""
        if self.criterion == "nll":
            return float(min(grid, key=lambda temperature: loss.at(1 / temperature)[0]))
        n, c = loss.rows.logits.shape
        error = top_label_sums(self.n_bins, "uniform" if self.criterion == "ece" else "quantile")
        octaves = int(np.ceil(np.log2(grid.max() / grid.min())))
        if c >= _MANY_CLASSES and octaves <= min(8, len(grid) / 5):
            near = np.array([error(1 / each, loss.correct) for each in loss.near_masses(1 / grid, octaves)])
            # A confidence on the edge of a bin may change sides: each moves a score by up to 2 / N.
            grid = grid[near <= near.min() + 1e-6 + 8 / n]
        scores: list[float] = []
        for part in row_chunks(len(grid), n, elements=_MASSES):
            masses = loss.masses(1 / grid[part])
            scores += [error(1 / masses[beta], loss.correct) for beta in 1 / grid[part]]
        return float(grid[np.argmin(scores)])


class PerLabelTemperatureScaling(AffineScaling):
    r"""Divide each label's logit by its own temperature: sigmoid outputs, not all over- or under-confident alike.

    With few examples of a label `TemperatureScaling(multi_label=True)` is steadier. Decisions at 1/2 stay.

    $$\hat p_c = \sigma(z_c / T_c)$$

    Attributes:
        temperatures_: T, (C,), in [1e-5, 1e5], each fitted alone, as by `TemperatureScaling`.
        shared_temperature_: the best single temperature, a float: that of labels without examples of both kinds.

    >>> logits = np.array([[4.0, 1.0], [4.0, -1.0], [4.0, 1.0], [-4.0, -1.0]])
    >>> scaler = PerLabelTemperatureScaling().fit(logits, [[1, 1], [0, 0], [1, 0], [0, 0]])
    >>> scaler.temperatures_.round(3)  # right three times in four: p = 3/4 needs z / T = log 3
    array([3.641, 0.91 ])
    """

    multi_label = True

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> PerLabelTemperatureScaling:
        """Choose the temperatures."""
        rows = Rows.checked(logits, labels, multi_label=True)
        self.shared_temperature_ = ScaledLoss(rows).best_temperature()
        self.temperatures_, open_ones = temperatures_by_label(rows, self.shared_temperature_)
        if open_ones:
            problem = "there is one value only, or all logits have the right sign, or they are no better than chance"
            which = f"label{'s' * (len(open_ones) > 1)} {few(open_ones)}"
            _warn_undetermined(f"the temperature of {which}: {problem}", stacklevel=3)
        return self

    def affine_map(self) -> AffineMap:
        """The affine map z / T, label by label, that `fold` writes into a classification head."""
        check_is_fitted(self)
        return AffineMap(1 / self.temperatures_)


def temperatures_by_label(rows: Rows, shared: float) -> tuple[FloatArray, list[int]]:
    """The temperature of each label of sigmoids, the shared one where there is none, and the undetermined labels."""
    found, undetermined = np.full(rows.logits.shape[1], shared), []
    for label in range(len(found)):
        column = rows.two_classes(label)
        loss = ScaledLoss(column) if 0 < column.labels.sum() < len(column) else None
        if loss is not None and not loss.is_constant:
            found[label] = loss.best_temperature()
        if loss is None or loss.problem(found[label]):
            undetermined.append(label)
    return found, undetermined


def _warn_undetermined(what: str, stacklevel: int) -> None:
    way_out = (
        "Fit on more or harder examples, and check that labels number the columns of logits, and their scale."
    )
    warnings.warn(f"The data do not determine {what}. {way_out}", UserWarning, stacklevel)


class ScaledLoss:
    """The mean NLL of rows as a function of beta = 1 / T; its slopes for 0 and infinity are `drift` and `shortfall`."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows = rows.two_classes() if rows.sigmoid else rows
        self.largest, self.correct, own, mean = np.empty((4, len(rows)))
        for part, block in blocks(rows.logits):
            each, labels = np.arange(len(block)), rows.labels[part]
            predicted = block.argmax(axis=1)
            self.correct[part] = predicted == labels
            self.largest[part] = block[each, predicted]
            block -= self.largest[part, None]
            own[part] = block[each, labels]
            masks, c = block.min() == -np.inf, block.shape[1]
            mean[part] = block.mean(axis=1, where=np.isfinite(block)) if masks else block @ np.full(c, 1 / c)
        self.drift = float(np.average(mean - own, weights=rows.weights))
        self.shortfall = float(np.average(-own, weights=rows.weights))
        self.is_constant = self.drift == 0 == self.shortfall

    def problem(self, temperature: float) -> str | None:
        """Why the data do not determine the best temperature, if they do not."""
        if self.is_constant:
            return "the logits of each row are equal"
        if self.shortfall == 0:
            return f"all {len(self.rows)} labels are ranked first"
        if self.drift >= 0:
            return "labels score no better than the average class"
        return f"the best one is out of {BOUNDS}" if np.isclose(temperature, BOUNDS).any() else None

    def warn(self, temperature: float, stacklevel: int = 3) -> None:
        """Say what the data do not determine; `stacklevel` 3 is the caller of the method that calls this one."""
        problem = self.problem(temperature)
        if problem:
            _warn_undetermined(f"the temperature: {problem}. It is {temperature:g}", stacklevel + 1)

    def _gaps(self) -> Iterator[tuple[slice, FloatArray]]:
        """The logits, less the largest of their rows."""
        for part, block in blocks(self.rows.logits):
            block -= self.largest[part, None]
            if block.min() < _MASKED:
                np.maximum(block, _MASKED, out=block)
            yield part, block

    def at(self, beta: float) -> tuple[float, float, float]:
        """Value, slope and curvature."""
        totals = np.zeros(3)
        for part, gaps in self._gaps():
            terms = gaps * beta
            np.exp(terms, out=terms)
            ones = np.ones(gaps.shape[1])
            mass = terms @ ones
            terms *= gaps
            mean = (terms @ ones) / mass
            terms *= gaps
            moments = np.stack([np.log(mass), mean, (terms @ ones) / mass - mean**2])
            totals += moments.sum(axis=1) if self.rows.weights is None else moments @ self.rows.weights[part]
        value, slope, curvature = (totals / len(self.rows)).tolist()
        return value + beta * self.shortfall, slope + self.shortfall, curvature

    def masses(self, betas: FloatArray) -> dict[float, FloatArray]:
        """The softmax denominators (N,) at each beta: the largest probability of a row is 1 / mass."""
        found = {beta: np.empty(len(self.rows)) for beta in betas.tolist()}
        roots = [beta for beta in found if beta / 2 not in found]  # of others, exponentials are squares
        for part, gaps in self._gaps():
            ones, powers = np.ones(gaps.shape[1]), np.empty_like(gaps)
            for beta in roots:
                np.exp(np.multiply(gaps, beta, out=powers), out=powers)
                np.dot(powers, ones, out=found[beta][part])
                while (beta := 2 * beta) in found:
                    powers *= powers
                    np.dot(powers, ones, out=found[beta][part])
        return found

    def near_masses(self, betas: FloatArray, octaves: int) -> Iterator[FloatArray]:
        """The same in the order of the betas, to 1e-9 of each exponential, from four exponentials and their squares."""
        # At all gaps alike exp(beta gap) is a sum, by least squares, of its values at four betas an octave.
        roots = betas.min() * 2.0 ** (np.arange(4) / 4 - 1)
        nodes = np.outer(2.0 ** np.arange(octaves + 3), roots).ravel()
        samples = -np.append(0, np.geomspace(1e-3, 50, 200)) / betas.min()
        at_nodes, at_betas = (np.exp(np.outer(samples, numbers)) for numbers in (nodes, betas))
        weights = np.linalg.lstsq(at_nodes, at_betas, rcond=1e-13)[0]
        masses = np.stack([*self.masses(nodes).values()])
        return (row @ masses for row in weights.T)

    def best_temperature(self, guess: float | None = None) -> float:
        """The T within `BOUNDS` of the least value; 1 where no T changes it."""
        if self.is_constant:
            return 1.0
        if self.drift >= 0:
            return BOUNDS[1]
        if guess is None and len(self.rows) >= 100 * _SAMPLE_STEP:
            guess = ScaledLoss(self.rows[::_SAMPLE_STEP]).best_temperature()
        # As if one more example had an unknown label, where each label is ranked first.
        smoothing = -self.drift / (len(self.rows) + 1) if self.shortfall == 0 else 0.0
        target = self.shortfall + smoothing
        low, high = -np.log(BOUNDS[::-1])
        # Where a sample does not tell more, labels stand out by about 3 nats.
        unknown = guess is None or guess == BOUNDS[1]
        log_beta, step = float(np.clip(np.log(-3 / self.drift if unknown else 1 / guess), low, high)), np.inf
        for _ in range(_MAX_STEPS):
            beta = np.exp(log_beta)
            _, slope, curvature = self.at(beta)
            gap = self.shortfall - slope  # falls to the target
            low, high = (low, log_beta) if gap < target else (log_beta, high)
            # Newton's step between logarithms, as the gap's is nearly straight, or bisection where it does not shrink.
            newton = np.log(gap / target) * gap / (beta * curvature) if min(gap, curvature) > 0 else np.inf
            pays = low < log_beta + newton < high and abs(newton) < abs(step) / 2
            step = newton if pays else np.clip((low + high) / 2 - log_beta, -_FAR, _FAR)
            log_beta += step
            if abs(step) <= _SMALL_STEP:
                break
        found = float(np.exp(-log_beta))
        return next((bound for bound in BOUNDS if isclose(found, bound, rel_tol=10 * _SMALL_STEP)), found)
