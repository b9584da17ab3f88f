"""Temperature scaling: one number that makes a classifier's confidence match its accuracy."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit
from sklearn.utils.validation import check_is_fitted

from hf_calib._errors import InputTypeError, InputValueError, expected
from hf_calib.metrics.checks import as_floats, check_choice, check_flag, check_n_bins
from hf_calib.metrics.sums import Binning, TopLabel, top_label_error
from hf_calib.scaling._base import Scaler, as_fitted_logits, softmax_in_place
from hf_calib.scaling._inputs import (
    as_binary_labels,
    as_class_labels,
    as_logits,
    as_matrix,
    without_zero_weights,
)
from hf_calib.scaling._interpolation import interpolation
from hf_calib.scaling._objectives import Objective, SigmoidObjective, SoftmaxObjective
from hf_calib.scaling._solver import best_temperature, undetermined
from hf_calib.scaling.affine import AffineMap

Criterion = Literal["nll", "ece", "adaptive_ece"]

PAPERS_GRID = np.arange(1, 101) / 10

_MANY_CLASSES = 128  # for which interpolated confidences pay, and are small beside the logits
_CONFIDENCES = 2**20  # held at once in any case; more, if they take a fraction of the logits


class TemperatureScaling(Scaler):
    r"""Divide the logits by one temperature, fitted on held-out predictions.

    The first thing to try after training, and the baseline of every calibration paper. It leaves the ranking
    of the classes, hence the accuracy, as it is. The temperature can be folded into the model with
    `hf_calib.fold_temperature`.

    $$\hat p = \mathrm{softmax}(z / T)$$

    T > 1 softens an over-confident model, T < 1 sharpens an under-confident one.

    Args:
        criterion: what T minimises on the data it is fitted on.
            "nll": negative log-likelihood, a proper score: solved exactly, and the least noisy choice.
            "ece": expected calibration error with equal-width bins, searched on a grid as in the papers.
            "adaptive_ece": the same with equal-mass bins.
        grid: temperatures to choose from, (G,) > 0; the first of equally good ones is taken. None means
            0.1, 0.2, ..., 10 for the calibration errors, and no grid at all for "nll".
        n_bins: bins of the calibration errors.
        multi_label: True for sigmoid outputs with a 0/1 label per logit. The calibration errors then treat
            every logit as a two-class example.

    Attributes:
        temperature_: T, a float, in [1e-5, 1e5] unless a grid says otherwise.

    Notes:
        With β = 1/T the negative log-likelihood is convex (a log-sum-exp of linear functions), so a
        safeguarded Newton iteration in float64 finds its one minimum. It reads the rows block by block: no
        second (N, C) array is made.

        Some data do not determine T, and `fit` warns of them. Where every label is ranked first, a smaller T
        always looks better: "nll" then smooths the labels by 1 / (N + 1), as if one more example had an
        unknown label, so that N limits the sharpness. Where labels score no better than the average class,
        "nll" takes the upper bound, which gives uniform probabilities. Where each row's logits are equal, T
        is 1 whatever the criterion.

        A calibration error jumps as T moves examples between bins, so its best T depends on few examples.
        The papers choose by "ece"; "nll" is the default here because it does not have this noise.

    References:
        Guo et al. 2017, "On calibration of modern neural networks"; the grid: Mukhoti et al. 2020.

    >>> logits = np.array([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    >>> labels = np.array([0, 0, 0, 0])
    >>> scaler = TemperatureScaling().fit(logits, labels)
    >>> round(scaler.temperature_, 4)  # right three times in four: p = 3/4 needs z / T = log 3
    3.641
    >>> scaler.predict_proba(logits[:1]).round(4)
    array([[0.75, 0.25]])
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
        """Choose the temperature.

        Args:
            logits: (N, C), any real dtype, read in float64; -inf masks a class that is not the label.
            labels: (N,) int in [0, C), without -100; with multi_label, (N, C) of 0 and 1, and -100 where a
                label is not known.
            sample_weight: (N,) of at least 0, for "nll" and one label a row; None counts every example once.

        Returns:
            self, with `temperature_`.

        Raises:
            TypeError: if a dtype is wrong.
            ValueError: if a parameter, a shape or a value is wrong.
        """
        if hasattr(self.criterion, "fit"):
            got = f"a {type(self.criterion).__name__}"
            way_out = "a scaler wraps no model: fit it on the model's logits"
            raise InputTypeError(expected("criterion", "be a name", got, way_out))
        check_choice("criterion", self.criterion, get_args(Criterion))
        check_n_bins(self.n_bins)
        grid = self._checked_grid()
        objective = self._objective(logits, labels, sample_weight)
        self._n_seen = objective.logits.shape[1]
        if objective.is_constant:
            self.temperature_ = 1.0
        elif grid is None:
            self.temperature_ = best_temperature(objective)
        else:
            self.temperature_ = self._best_on(grid, objective)
        problem = undetermined(objective, self.temperature_, smoothed=grid is None)
        if problem:
            warnings.warn(problem, UserWarning, stacklevel=2)
        return self

    def transform(self, logits: ArrayLike) -> NDArray[np.float64]:
        """Return logits / T in float64; logits of any shape that ends in C."""
        check_is_fitted(self, "temperature_")
        if hasattr(self, "_n_seen"):  # a file holds the temperature alone
            return as_fitted_logits(logits, self._n_seen) / self.temperature_
        return as_logits(logits).astype(np.float64) / self.temperature_

    def predict_proba(self, logits: ArrayLike) -> NDArray[np.float64]:
        """Return the calibrated probabilities, softmax(logits / T), or the sigmoid with multi_label."""
        scaled = self.transform(logits)
        if self.multi_label:
            return expit(scaled, out=scaled)
        return softmax_in_place(scaled)

    def affine_map(self) -> AffineMap:
        """The affine map z / T that `fold` writes into a classification head."""
        check_is_fitted(self, "temperature_")
        return AffineMap(np.array(1 / self.temperature_))

    def _checked_grid(self) -> NDArray[np.float64] | None:
        if self.grid is None:
            return None if self.criterion == "nll" else PAPERS_GRID
        grid = as_floats("grid", self.grid)
        if grid.ndim != 1 or grid.size == 0 or not (np.isfinite(grid) & (grid > 0)).all():
            way_out = "use for example numpy.arange(1, 101) / 10"
            raise InputValueError(
                expected("grid", "be a sequence of finite temperatures > 0", self.grid, way_out)
            )
        return grid

    def _objective(
        self, logits: ArrayLike, labels: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> Objective:
        check_flag("multi_label", self.multi_label)
        if sample_weight is not None and (self.multi_label or self.criterion != "nll"):
            got = "several labels a row" if self.multi_label else repr(self.criterion)
            way_out = "leave the weights out"
            raise InputValueError(
                expected("sample_weight", "go with criterion 'nll' and one label a row", got, way_out)
            )
        matrix = as_matrix(logits, least_columns=1 if self.multi_label else 2)
        if self.multi_label:
            return SigmoidObjective(matrix, *as_binary_labels(labels, matrix))
        found = without_zero_weights(matrix, as_class_labels(labels, matrix), sample_weight)
        return SoftmaxObjective(*found)

    def _best_on(self, grid: NDArray[np.float64], objective: Objective) -> float:
        """The first of the best temperatures. Of a large search the finalists only are scored exactly."""
        found = interpolation(1 / grid) if self.criterion != "nll" else None
        if found is None or objective.logits.shape[1] < _MANY_CLASSES or self.multi_label:
            return float(grid[np.argmin(self._scores(objective, grid))])
        nodes, coefficients = found
        masses = 1 / objective.confidences_at(nodes)
        scores = [self._error(1 / (row @ masses), objective.correct) for row in coefficients]
        # A confidence on the edge of a bin may change sides: each moves a score by up to 2 / N.
        finalists = grid[np.array(scores) <= min(scores) + 1e-6 + 8 / objective.size]
        return float(finalists[np.argmin(self._scores(objective, finalists))])

    def _scores(self, objective: Objective, grid: NDArray[np.float64]) -> list[float]:
        """The criterion at each temperature."""
        if self.criterion == "nll":
            return [objective.nll(1 / temperature).value for temperature in grid]
        correct = objective.correct
        together = max(1, max(_CONFIDENCES, objective.logits.size // 8) // len(correct))
        scores = []
        for first in range(0, len(grid), together):
            rows = objective.confidences_at((1 / grid[first : first + together]).tolist())
            scores += [self._error(confidences, correct) for confidences in rows]
        return scores

    def _error(self, confidences: NDArray[np.float64], correct: NDArray[np.float64]) -> float:
        binning: Binning = "uniform" if self.criterion == "ece" else "quantile"
        return top_label_error(TopLabel(confidences, correct), n_bins=self.n_bins, binning=binning)
