"""Affine calibrators by maximum likelihood, which can be folded into a classification head.

The calibrators W z + b differ in W (a vector or a matrix), in the features, and in the ridges,
which shrink W to 1 / T. Newton's method starts at T and stops when a step would gain less than 1e-7
nats per example. A ridge of 1e-6 (|T W - I|^2 + |b|^2) bounds parameters that the data do not
determine, of absent or perfectly separated classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, log_softmax
from sklearn.utils.validation import check_is_fitted

from hf_calib._errors import check, few
from hf_calib.metrics.checks import FloatArray, check_choice, check_n_bins
from hf_calib.scaling._base import AffineMap as AffineMap
from hf_calib.scaling._base import (
    Scaler,
    as_fitted_logits,
    as_logits,
    refuse_masks,
    softmax_in_place,
)
from hf_calib.scaling.newton import Ridges, Start, fit_affine
from hf_calib.scaling.rows import Rows
from hf_calib.scaling.saved_map import (
    BOUNDS,
    Criterion,
    Fitted,
    Parameters,
    check_parameters,
)
from hf_calib.scaling.temperature import ScaledLoss, warn_undetermined

if TYPE_CHECKING:
    from typing_extensions import Self

# That of Mukhoti et al. 2020.
PAPERS_GRID = np.arange(1, 101) / 10
_VECTOR = {"weight_": Fitted(("C",)), "bias_": Fitted(("C",))}
_MATRIX = {"weight_": Fitted(("CC",)), "bias_": Fitted(("C",))}
# The products of a larger penalty with a curvature might not be finite.
_MOST_PENALTY: Any = 1e100
# Of parameters without a penalty. The data may not determine them, and the ridge moves those that
# they do determine by less than the last step of the fit.
RIDGE = 1e-6


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


class LogitScaling(Scaler, ABC):
    """A calibrator whose probabilities are the softmax of mapped logits, or their sigmoids."""

    weight_: FloatArray
    bias_: FloatArray

    @abstractmethod
    def transform(self, logits: ArrayLike) -> FloatArray:
        """Return the mapped logits in float64; logits of any shape that ends in C."""

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        """Return the calibrated probabilities, of the shape of the logits, in float64."""
        scaled = self.transform(logits)
        if self.multi_label:
            return expit(scaled, out=scaled)
        return softmax_in_place(scaled)


class Solvable(LogitScaling):
    """A calibrator whose map can be found for any rows, such as folds of a cross-validation."""

    @abstractmethod
    def solve(self, rows: Rows, start: Start) -> AffineMap:
        """Return the affine map of the rows by these settings; the calibrator itself stays.

        `fit` checks and warns, calls `solve` with the best temperature of its rows, and keeps the
        result. `AutoScaling` calls it for each fold: near the map of the penalty before, and only
        as exactly as a comparison needs it.

        Args:
            rows: checked rows, with masks only if the map does not mix the classes.
            start: their best temperature, where to begin, and how exact the result has to be.
        """


class AffineScaling(LogitScaling):
    """A calibrator that can be folded into a head, because it maps the logits themselves."""

    def affine_map(self) -> AffineMap:
        """The affine map that `fold` writes into a classification head."""
        check_is_fitted(self)
        return AffineMap(self.weight_, self.bias_)

    def transform(self, logits: ArrayLike) -> FloatArray:
        """Return the mapped logits in float64; logits of any shape that ends in C."""
        mapping = self.affine_map()
        classes = getattr(self, "classes_", None)
        # A temperature from a file goes with any number of classes.
        if classes is None:
            return mapping(as_logits(logits).astype(np.float64))
        return mapping(as_fitted_logits(logits, len(classes)))


class TemperatureScaling(AffineScaling, Solvable):
    r"""Divide the logits by a temperature: T > 1 for over-confident models, T < 1 for the opposite.

    $$\hat p = \mathrm{softmax}(z / T)$$

    `fit` warns if the data do not determine T. If every label is ranked first, "nll" smooths the
    labels by 1 / (N + 1). If labels score no better than the average class, T is the upper bound.
    If all logits of a row are equal, T is 1.

    Args:
        criterion: "nll", the negative log-likelihood, solved exactly (Guo et al. 2017), or the
            noisier calibration error with equal-width ("ece") or equal-mass bins ("adaptive_ece")
            on a grid, as in Mukhoti et al. 2020.
        grid: (G,) temperatures in [1e-5, 1e5], of which the first best is selected; None: 0.1, 0.2,
            ..., 10, but no grid for "nll".
        n_bins: number of bins of the calibration errors.

    Attributes:
        temperature_: T, a float, in [1e-5, 1e5].

    >>> logits = np.array([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    >>> scaler = TemperatureScaling().fit(logits, [0, 0, 0, 0])
    >>> round(scaler.temperature_, 4)  # 3 of 4 are correct, and p = 3/4 needs z / T = log 3.
    3.641
    """

    _fitted: ClassVar[Parameters] = {
        "temperature_": Fitted(low=BOUNDS[0], high=BOUNDS[1])
    }

    def __init__(
        self,
        criterion: Criterion = "nll",
        *,
        grid: Any = None,
        n_bins: int = 15,
        multi_label: bool = False,
    ) -> None:
        self.criterion = criterion
        self.grid = grid
        self.n_bins = n_bins
        self.multi_label = multi_label

    def fit(
        self,
        logits: ArrayLike,
        labels: ArrayLike,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Find the temperature; weights (N,) are allowed for "nll" and one label per row."""
        self._check_settings()
        takes_weights = self.criterion == "nll" and not self.multi_label
        check(
            sample_weight is None or takes_weights,
            "sample_weight to be used with criterion 'nll' and one label per row",
            got="multi_label=True" if self.multi_label else repr(self.criterion),
            way_out="leave the weights out",
        )
        rows = Rows.checked(logits, labels, sample_weight, self.multi_label)
        self._n_seen = rows.logits.shape[1]
        loss = ScaledLoss(rows)
        needs_no_grid = self.criterion == "nll" and self.grid is None
        # Where no temperature changes the probabilities, all of a grid are as good as 1.
        if loss.is_constant or needs_no_grid:
            self.temperature_ = loss.best_temperature()
        else:
            grid = self._checked_grid()
            self.temperature_ = loss.best_of(grid, self.criterion, self.n_bins)
        loss.warn(self.temperature_)
        return self

    def _check_settings(self) -> None:
        super()._check_settings()
        check_choice("criterion", self.criterion, get_args(Criterion))
        check_n_bins(self.n_bins)
        self._checked_grid()

    def _checked_grid(self) -> FloatArray:
        given = PAPERS_GRID if self.grid is None else self.grid
        way_out = "use for example numpy.arange(1, 101) / 10"
        return Fitted(("G",), *BOUNDS).checked("grid", given, {}, way_out)

    def affine_map(self) -> AffineMap:
        """The affine map z / T that `fold` writes into a classification head."""
        check_parameters(self, "temperature_")
        return _division_by(self.temperature_)

    def solve(self, rows: Rows, start: Start) -> AffineMap:
        return _division_by(start.temperature)


def _division_by(temperature: float) -> AffineMap:
    return AffineMap(np.array(1 / temperature))


class PerLabelTemperatureScaling(AffineScaling, Solvable):
    r"""Divide each label's logit by its own temperature, if labels need different corrections.

    With few examples per label, `TemperatureScaling(multi_label=True)` is less noisy. Decisions at
    1/2 do not change.

    $$\hat p_c = \sigma(z_c / T_c)$$

    Attributes:
        temperatures_: T, (C,), in [1e-5, 1e5], each fitted alone as in `TemperatureScaling`.
        shared_temperature_: the best single temperature, a float, used for labels without examples
            of both kinds.

    >>> logits = np.array([[4.0, 1.0], [4.0, -1.0], [4.0, 1.0], [-4.0, -1.0]])
    >>> scaler = PerLabelTemperatureScaling().fit(logits, [[1, 1], [0, 0], [1, 0], [0, 0]])
    >>> scaler.temperatures_.round(3)  # 3 of 4 are correct, and p = 3/4 needs z / T = log 3.
    array([3.641, 0.91 ])
    """

    multi_label = True
    _fitted: ClassVar[Parameters] = {
        "temperatures_": Fitted(("C",), *BOUNDS),
        "shared_temperature_": Fitted(("",), *BOUNDS),
    }

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> PerLabelTemperatureScaling:
        """Find the temperatures."""
        rows = Rows.checked(logits, labels, multi_label=True)
        self.shared_temperature_ = ScaledLoss(rows).best_temperature()
        self.temperatures_, open_ones = temperatures_by_label(
            rows, self.shared_temperature_
        )
        warn_of_labels(open_ones)
        return self

    def affine_map(self) -> AffineMap:
        """The affine map z / T, label by label, that `fold` writes into a classification head."""
        check_parameters(self, "temperatures_")
        return AffineMap(1 / self.temperatures_)

    def solve(self, rows: Rows, start: Start) -> AffineMap:
        temperatures, _ = temperatures_by_label(rows, start.temperature)
        return AffineMap(1 / temperatures)


def temperatures_by_label(rows: Rows, shared: float) -> tuple[FloatArray, list[int]]:
    """The temperature of each label, or the shared one, and the undetermined labels."""
    found = np.full(rows.logits.shape[1], shared)
    undetermined = []
    for label in range(len(found)):
        column = rows.two_classes(label)
        has_both_values = 0 < column.labels.sum() < len(column)
        if not has_both_values:
            undetermined.append(label)
            continue
        loss = ScaledLoss(column)
        # Its best temperature would be 1, which the other labels may know better.
        if not loss.is_constant:
            found[label] = loss.best_temperature()
        if loss.problem(found[label]):
            undetermined.append(label)
    return found, undetermined


def warn_of_labels(undetermined: list[int]) -> None:
    """Warn of labels without a temperature of their own; the caller is a method `fit`."""
    if undetermined:
        problem = (
            "there is one value only, or all logits have the right sign, "
            "or they are no better than chance"
        )
        label = "label" if len(undetermined) == 1 else "labels"
        what = f"the temperature of {label} {few(undetermined)}: {problem}"
        warn_undetermined(what, stacklevel=4)


class LinearFit(Solvable):
    """Base class of the affine fits, from the best temperature, with the ridges of the subclass."""

    # Whether the weight is a matrix.
    _mixes: ClassVar[bool] = False
    # Whether the paper's ridges shrink to the temperature, even if it is a bound.
    _from_temperature: ClassVar[bool] = False

    def fit(
        self,
        logits: ArrayLike,
        labels: ArrayLike,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Find weights and biases; the N of a default penalty is Kish's number of weighted rows."""
        self._check_settings()
        return self._fit(Rows.checked(logits, labels, sample_weight))

    def solve(self, rows: Rows, start: Start) -> AffineMap:
        # A bound is not the scale of the logits, which the ridges need to have an effect.
        if not self._from_temperature and start.temperature in BOUNDS:
            loss = ScaledLoss(rows)
            largest_minus_average = loss.shortfall - loss.drift
            # It is 0 if the logits of each row are equal.
            start = replace(start, temperature=largest_minus_average or 1.0)
        return fit_affine(rows, self._ridges(rows), start)

    def _fit(self, rows: Rows) -> Self:
        # Before any time is spent.
        if self._mixes:
            refuse_masks(rows.logits)
        loss = ScaledLoss(rows)
        temperature = loss.best_temperature()
        found = self.solve(rows, Start(temperature))
        self.weight_ = found.weight
        self.bias_ = found.bias  # type: ignore[assignment]
        # The other fits do not begin at a bound, so it says nothing about their result.
        if self._from_temperature or temperature not in BOUNDS:
            loss.warn(temperature, stacklevel=4)
        # The ridges of the structured maps keep a class without rows near the temperature.
        if self._from_temperature:
            return self
        counts = np.bincount(rows.labels, minlength=rows.logits.shape[1])
        absent = np.flatnonzero(counts == 0)
        if len(absent):
            classes = "class" if len(absent) == 1 else "classes"
            what = f"the parameters of {classes} {few(absent.tolist())}"
            warn_undetermined(f"{what}: no row has this label", stacklevel=4)
        return self

    def _ridges(self, rows: Rows) -> Ridges:
        return Ridges(RIDGE, RIDGE)


class VectorScaling(AffineScaling, LinearFit):
    r"""Give each class its own scale and offset (Guo et al. 2017, section 4.2).

    With few examples per class, `StructuredVectorScaling` is safer.

    $$\hat p = \mathrm{softmax}(w \odot z + b)$$

    >>> logits = np.array([[3.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 3.0]] * 3)
    >>> labels = np.array([0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1])  # class 1 is too improbable
    >>> scaler = VectorScaling().fit(logits, labels)
    >>> scaler.predict_proba(logits).mean(axis=0).round(4)  # the class frequencies
    array([0.3333, 0.6667])
    """

    _fitted: ClassVar[Parameters] = _VECTOR


class PenalisedMatrixFit(LinearFit):
    """Base class of full matrices over features of the logits, with ODIR penalties."""

    _mixes = True

    def __init__(
        self,
        *,
        off_diagonal_penalty: float | None = None,
        bias_penalty: float | None = None,
    ) -> None:
        self.off_diagonal_penalty = off_diagonal_penalty
        self.bias_penalty = bias_penalty

    def _check_settings(self) -> None:
        super()._check_settings()
        for name, value in self.get_params().items():
            is_penalty = _is_number(value) and 0 <= value <= _MOST_PENALTY
            check(
                value is None or is_penalty,
                f"{name} to be a finite number of at least 0",
                got=repr(value),
                way_out="None uses a default that depends on the numbers of classes and examples",
            )

    def _ridges(self, rows: Rows) -> Ridges:
        n, c = rows.logits.shape
        # Kish's number of rows, (sum of weights)^2 / (sum of squared weights): as many rows without
        # weights would tell as much.
        size = n if rows.weights is None else n**2 / np.square(rows.weights).sum()
        between = 10 * c / size
        bias = 1 / (2 * size)
        if self.off_diagonal_penalty is not None:
            between = self.off_diagonal_penalty / (c * (c - 1))
        if self.bias_penalty is not None:
            bias = self.bias_penalty / c
        return Ridges(own=RIDGE, bias=max(bias, RIDGE), between=max(between, RIDGE))


class MatrixScaling(AffineScaling, PenalisedMatrixFit):
    r"""Map the logits by a full matrix and an offset, for a model that confuses pairs of classes.

    The C (C + 1) parameters have the ODIR penalty of Kull et al. 2019, section 3, with w replaced
    by T w.

    $$\hat p = \mathrm{softmax}(W z + b), \qquad \min_{W, b} \mathrm{NLL}
      + \frac{\lambda}{C (C - 1)} \sum_{i \ne j} (T w_{ij})^2 + \frac{\mu}{C} \sum_j b_j^2$$

    Args:
        off_diagonal_penalty: λ >= 0. None: 10 C^2 (C - 1) / N, a normal prior of variance
            1 / (20 C) for each T w_{ij}.
        bias_penalty: μ >= 0. None: C / (2 N), a standard normal prior for each bias, in nats.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(2000, 3))
    >>> # The third logit also raises the second class.
    >>> mixed = logits @ [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    >>> scaler = MatrixScaling().fit(logits, (mixed + rng.gumbel(size=(2000, 3))).argmax(axis=1))
    >>> (scaler.weight_[1] - scaler.weight_[0]).round(1)  # near -1, 1, 1
    array([-1.1,  0.9,  0.8])
    """

    _fitted: ClassVar[Parameters] = _MATRIX


class DirichletScaling(PenalisedMatrixFit):
    r"""Map the log-probabilities by a full matrix and an offset (Kull et al. 2019, section 2).

    It has the arguments of `MatrixScaling`. Use it if the logits are not available, and pass
    log-probabilities.

    $$\hat p = \mathrm{softmax}(W \ln \mathrm{softmax}(z) + b)$$

    >>> logits = [[3.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 3.0]]
    >>> scaler = DirichletScaling().fit(logits, [0, 1, 1, 1])
    >>> np.allclose(scaler.predict_proba(logits), scaler.predict_proba(np.add(logits, 100)))
    True
    """

    _fitted: ClassVar[Parameters] = _MATRIX

    def transform(self, logits: ArrayLike) -> FloatArray:
        """Return the mapped log-probabilities in float64; logits of any shape that ends in C."""
        check_is_fitted(self)
        given = as_fitted_logits(logits, len(self.bias_))
        # The logarithm would turn a row without any class into NaN.
        refuse_masks(given)
        log_probs = log_softmax(given, axis=-1)
        return AffineMap(self.weight_, self.bias_)(log_probs)

    def solve(self, rows: Rows, start: Start) -> AffineMap:
        log_probs = log_softmax(rows.logits.astype(np.float64), axis=1)
        return super().solve(rows.with_logits(log_probs), start)


class StructuredVectorScaling(AffineScaling, LinearFit):
    r"""`VectorScaling` with a ridge (Berta et al. 2026, SVS), safe with few examples of a class.

    $$\hat p = \mathrm{softmax}((1 + v) \odot z / T + b), \qquad \min_{v, b} \mathrm{NLL}
      + \lambda \frac{C}{N} (|v|^2 + |b|^2)$$

    Args:
        penalty: λ > 0, a multiple of the paper's penalty.
        multi_label: if True, the calibrator is sigmoid((1 + v) z / T + b) for each label, with one
            T. As for two classes, this is Platt scaling of z, or of z_1 - z_0, with the ridge
            λ (4 v^2 + b^2) / N.

    >>> scaler = StructuredVectorScaling().fit(3 * np.eye(3)[[0, 1, 2, 2] * 15], [0, 1, 2, 0] * 15)
    >>> # Class 2 is correct in half of its rows.
    >>> scaler.predict_proba(3 * np.eye(3)).diagonal().round(2)
    array([0.93, 0.85, 0.53])
    """

    _from_temperature = True
    _fitted: ClassVar[Parameters] = _VECTOR

    def __init__(self, penalty: float = 1.0, *, multi_label: bool = False) -> None:
        self.penalty = penalty
        self.multi_label = multi_label

    # It takes no weights, because its ridges count rows.
    def fit(self, logits: ArrayLike, labels: ArrayLike) -> Self:  # type: ignore[override]
        """Find the temperature, then the weights and biases."""
        self._check_settings()
        return self._fit(Rows.checked(logits, labels, multi_label=self.multi_label))

    def solve(self, rows: Rows, start: Start) -> AffineMap:
        if rows.sigmoid:
            return self._solve_by_label(rows, start)
        if rows.logits.shape[1] == 2:
            return self._solve_two_classes(rows, start)
        return super().solve(rows, start)

    def _solve_by_label(self, rows: Rows, start: Start) -> AffineMap:
        """The map of each label, as of two classes with the logits -z/2 and z/2."""
        n_labels = rows.logits.shape[1]
        weight = np.empty(n_labels)
        bias = np.empty(n_labels)
        for label in range(n_labels):
            found = self._solve_two_classes(rows.two_classes(label), start)
            weight[label] = found.weight[0]
            bias[label] = 2 * found(np.zeros(2))[1]
        return AffineMap(weight, bias)

    def _solve_two_classes(self, rows: Rows, start: Start) -> AffineMap:
        """The map of the difference of the two logits."""
        # The probabilities of a row with a masked class are 0 and 1 by any map.
        rows = rows[np.isfinite(rows.logits).all(axis=1)]
        if len(rows):
            half = (rows.logits[:, 1:].astype(np.float64) - rows.logits[:, :1]) / 2
            halves = rows.with_logits(np.hstack([-half, half]))
            # The difference has one weight.
            ridges = self._ridges(rows)._replace(between=None)
            # A map of the differences is not one of the logits, which `near` may be.
            found = fit_affine(halves, ridges, replace(start, near=None))
        else:
            found = AffineMap(np.full(2, 1 / start.temperature), np.zeros(2))
        if self._mixes:
            return found._replace(weight=np.diag(found.weight))
        return found

    def _check_settings(self) -> None:
        super()._check_settings()
        check(
            _is_number(self.penalty) and 0 < self.penalty <= _MOST_PENALTY,
            "penalty to be a finite number above 0",
            got=repr(self.penalty),
            way_out="1 is the paper's penalty; a smaller one trusts the data more",
        )

    def _ridges(self, rows: Rows) -> Ridges:
        n, c = rows.logits.shape
        own = self.penalty * c / n
        between = own * (c - 1) if self._mixes else None
        return Ridges(own=own, bias=own, between=between)


class StructuredMatrixScaling(StructuredVectorScaling):
    r"""`StructuredVectorScaling` with weights M between classes (SMS); safer than `MatrixScaling`.

    The diagonal of M is 0. For two classes it equals `StructuredVectorScaling`.

    $$\hat p = \mathrm{softmax}((I + \mathrm{diag}(v) + M) z / T + b), \qquad
      \min_{v, M, b} \mathrm{NLL} + \lambda \frac{C}{N} (|v|^2 + |b|^2)
      + \lambda \frac{C (C - 1)}{N} |M|^2$$

    >>> scaler = StructuredMatrixScaling().fit(3 * np.eye(3)[[0, 1, 2, 2] * 15], [0, 1, 2, 1] * 15)
    >>> scaler.predict_proba(3 * np.eye(3)).round(2)[2]  # Half of class 2 is class 1.
    array([0.07, 0.42, 0.51])
    """

    _mixes = True
    _fitted: ClassVar[Parameters] = _MATRIX

    def __init__(self, penalty: float = 1.0) -> None:
        self.penalty = penalty
