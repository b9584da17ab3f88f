"""Maps z -> W z + b of the logits z, by penalised maximum likelihood: presets of one affine fit.

They differ in W, a vector or a matrix, in its features, and in the ridges, which draw W to 1 / T. Newton's method finds
the minimum from T, that of `TemperatureScaling`, until a step would gain less than 1e-7 nats per example. A ridge of
1e-6 (|T W - I|^2 + |b|^2) bounds what data do not determine: a class that is absent, or separated from the others.
"""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_softmax
from sklearn.utils.validation import check_is_fitted

from hf_calib._errors import check
from hf_calib.metrics.checks import FloatArray
from hf_calib.scaling._base import LogitScaling, as_fitted_logits, refuse_masks
from hf_calib.scaling.affine import AffineMap, AffineScaling
from hf_calib.scaling.newton import Ridges, Rows, fit_affine
from hf_calib.scaling.temperature import BOUNDS, ScaledLoss

if TYPE_CHECKING:
    from typing_extensions import Self

RIDGE = 1e-6  # of parameters without a penalty, which data may not determine


class LinearFit(LogitScaling):
    """What the presets share: Newton's method from the best temperature, under the ridges that each of them says."""

    weight_: FloatArray
    bias_: FloatArray
    _mixes: ClassVar[bool] = False  # whether the weight is a matrix
    _from_temperature: ClassVar[bool] = False  # also where that is at a bound

    def fit(self, logits: ArrayLike, labels: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Find the weights and the biases; N in a default penalty is Kish's, (sum of weights)^2 / (sum of squares)."""
        return self._fit(logits, labels, sample_weight)

    def solve(self, rows: Rows, temperature: float, *fit: Any) -> AffineMap:
        """The map of checked rows, from their temperature; further arguments are those of `fit_affine`."""
        return fit_affine(rows, self._unit(rows, temperature), self._ridges(rows), *fit)

    def _fit(self, logits: ArrayLike, labels: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        rows = Rows.checked(logits, labels, sample_weight, self.multi_label)
        if self._mixes:
            refuse_masks(rows.logits)
        loss = ScaledLoss(rows)
        temperature = loss.best_temperature()
        self.weight_, self.bias_ = self.solve(rows, temperature)  # type: ignore[assignment]
        if self._unit(rows, temperature) == temperature:  # else the map does not start from it
            loss.warn(temperature, stacklevel=4)
        return self

    def _unit(self, rows: Rows, temperature: float) -> float:
        """The scale of the logits in the fit: the temperature or, where that is at a bound, their spread."""
        if self._from_temperature or BOUNDS[0] * 1.001 < temperature < BOUNDS[1] / 1.001:
            return temperature
        loss = ScaledLoss(rows)
        spread = loss.shortfall - loss.drift  # the largest logit of a row less the average one
        return spread if spread > 1e-150 else 1.0

    def _ridges(self, rows: Rows) -> Ridges:
        return Ridges(RIDGE, RIDGE)


class VectorScaling(AffineScaling, LinearFit):
    r"""Give each class its own scale and offset (Guo et al. 2017, section 4.2).

    With few examples of a class `StructuredVectorScaling` is safer.

    $$\hat p = \mathrm{softmax}(w \odot z + b)$$

    >>> logits = np.array([[3.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 3.0]] * 3)
    >>> labels = np.array([0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1])  # more often class 1 than the logits say
    >>> VectorScaling().fit(logits, labels).predict_proba(logits).mean(axis=0).round(4)  # as often as the labels
    array([0.3333, 0.6667])
    """


class PenalisedMatrixFit(LinearFit):
    """A full matrix over features of the logits, with ODIR penalties."""

    _mixes = True

    def __init__(
        self, *, off_diagonal_penalty: float | None = None, bias_penalty: float | None = None
    ) -> None:
        self.off_diagonal_penalty = off_diagonal_penalty
        self.bias_penalty = bias_penalty

    def _ridges(self, rows: Rows) -> Ridges:
        way_out = "None takes a default that follows the numbers of classes and examples"
        for name, value in self.get_params().items():
            holds = value is None or (isinstance(value, Real) and 0 <= float(value) < np.inf)
            check(holds, f"{name} to be a finite number of at least 0", repr(value), way_out)
        n, c = rows.logits.shape
        size = n if rows.weights is None else n**2 / np.square(rows.weights).sum()
        between, bias = self.off_diagonal_penalty, self.bias_penalty
        between = 10 * c / size if between is None else between / (c * (c - 1))
        bias = 1 / (2 * size) if bias is None else bias / c
        return Ridges(RIDGE, max(bias, RIDGE), max(between, RIDGE))


class MatrixScaling(AffineScaling, PenalisedMatrixFit):
    r"""Map the logits by a full matrix and an offset, for a model that confuses certain pairs of classes.

    The C (C + 1) parameters are penalised (ODIR: Kull et al. 2019, section 3, with w for T w).

    $$\hat p = \mathrm{softmax}(W z + b), \qquad \min_{W, b} \mathrm{NLL}
      + \frac{\lambda}{C (C - 1)} \sum_{i \ne j} (T w_{ij})^2 + \frac{\mu}{C} \sum_j b_j^2$$

    Args:
        off_diagonal_penalty: λ >= 0. None: 10 C^2 (C - 1) / N, a normal prior of variance 1 / (20 C) for each T w_{ij}.
        bias_penalty: \mu >= 0. None: C / (2 N), a standard normal prior for each bias, in nats.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(2000, 3))
    >>> mixed = logits @ [[1, 0, 0], [0, 1, 0], [0, 1, 1]]  # the third logit counts for the second class too
    >>> scaler = MatrixScaling().fit(logits, (mixed + rng.gumbel(size=(2000, 3))).argmax(axis=1))
    >>> (scaler.weight_[1] - scaler.weight_[0]).round(1)  # near -1, 1, 1
    array([-1.1,  0.9,  0.8])
    """


class DirichletScaling(PenalisedMatrixFit):
    r"""Map the log-probabilities by a full matrix and an offset (Kull et al. 2019, section 2).

    `MatrixScaling`, with its arguments, where a model's logits are not at hand: pass log-probabilities.

    $$\hat p = \mathrm{softmax}(W \ln \mathrm{softmax}(z) + b)$$

    >>> logits = [[3.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 3.0]]
    >>> scaler = DirichletScaling().fit(logits, [0, 1, 1, 1])
    >>> np.allclose(scaler.predict_proba(logits), scaler.predict_proba(np.add(logits, 100)))
    True
    """

    def transform(self, logits: ArrayLike) -> FloatArray:
        """Return the mapped log-probabilities in float64; logits of any shape that ends in C."""
        check_is_fitted(self)
        rows = as_fitted_logits(logits, len(self.bias_))
        refuse_masks(rows)
        return AffineMap(self.weight_, self.bias_)(log_softmax(rows, axis=-1))

    def solve(self, rows: Rows, temperature: float, *fit: Any) -> AffineMap:
        log_probs = log_softmax(rows.logits.astype(np.float64), axis=1)
        return super().solve(rows.with_logits(log_probs), temperature, *fit)


class StructuredVectorScaling(AffineScaling, LinearFit):
    r"""`VectorScaling` with a ridge (Berta et al. 2026, SVS), safe with few examples of a class, or none.

    $$\hat p = \mathrm{softmax}((1 + v) \odot z / T + b), \qquad \min_{v, b} \mathrm{NLL}
      + \lambda \frac{C}{N} (|v|^2 + |b|^2)$$

    Args:
        penalty: λ > 0, a multiple of the paper's strength.
        multi_label: sigmoid((1 + v) z / T + b), label by label, with one T for all of them. Here, as for two classes,
            it is Platt's map of z, or z_1 - z_0, with the ridge λ (4 v^2 + b^2) / N.

    >>> scaler = StructuredVectorScaling().fit(3 * np.eye(3)[[0, 1, 2, 2] * 15], [0, 1, 2, 0] * 15)
    >>> scaler.predict_proba(3 * np.eye(3)).diagonal().round(2)  # class 2: right every other time
    array([0.93, 0.85, 0.53])
    """

    _from_temperature = True

    def __init__(self, penalty: float = 1.0, *, multi_label: bool = False) -> None:
        self.penalty = penalty
        self.multi_label = multi_label

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> Self:  # type: ignore[override]  # no weights
        """Find the temperature, then the weights and the biases."""
        return self._fit(logits, labels)

    def solve(self, rows: Rows, temperature: float, *fit: Any) -> AffineMap:
        n_classes = rows.logits.shape[1]
        if rows.sigmoid:
            columns = (rows.two_classes(label) for label in range(n_classes))
            maps = [self.solve(column, temperature, None, *fit[1:]) for column in columns]
            return AffineMap(*np.array([[found.weight[0], 2 * found(np.zeros(2))[1]] for found in maps]).T)
        if n_classes > 2:
            return super().solve(rows, temperature, *fit)
        # The map of the difference of the logits; a row with a masked class tells nothing.
        rows = rows[np.isfinite(rows.logits).all(axis=1)]
        half = (rows.logits[:, 1:].astype(np.float64) - rows.logits[:, :1]) / 2
        found = AffineMap(np.full(2, 1 / temperature), np.zeros(2))
        if len(rows):
            ridge = self._ridges(rows)._replace(between=None)
            halves = rows.with_logits(np.hstack([-half, half]))
            found = fit_affine(halves, temperature, ridge, None, *fit[1:])
        return found._replace(weight=np.diag(found.weight)) if self._mixes else found

    def _ridges(self, rows: Rows) -> Ridges:
        holds = isinstance(self.penalty, Real) and 0 < float(self.penalty) < np.inf
        way_out = "1 is the strength of the paper; a smaller one trusts the data more"
        check(holds, "penalty to be a finite number above 0", repr(self.penalty), way_out)
        n, c = rows.logits.shape
        own = self.penalty * c / n
        return Ridges(own, own, own * (c - 1) if self._mixes else None)


class StructuredMatrixScaling(StructuredVectorScaling):
    r"""`StructuredVectorScaling` with weights M between classes, diagonal 0 (SMS); safer than `MatrixScaling`.

    Two classes get the map of `StructuredVectorScaling`.

    $$\hat p = \mathrm{softmax}((I + \mathrm{diag}(v) + M) z / T + b), \qquad \min_{v, M, b} \mathrm{NLL}
      + \lambda \frac{C}{N} (|v|^2 + |b|^2) + \lambda \frac{C (C - 1)}{N} |M|^2$$

    >>> scaler = StructuredMatrixScaling().fit(3 * np.eye(3)[[0, 1, 2, 2] * 15], [0, 1, 2, 1] * 15)
    >>> scaler.predict_proba(3 * np.eye(3)).round(2)[2]  # class 2: every other time 1
    array([0.07, 0.42, 0.51])
    """

    _mixes = True

    def __init__(self, penalty: float = 1.0) -> None:
        self.penalty = penalty
