"""Linear maps of the logits by penalised maximum likelihood: presets of one affine fit."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, log_softmax
from sklearn.utils.validation import check_is_fitted

from hf_calib._errors import check
from hf_calib.scaling._base import LogitScaling, as_fitted_logits, refuse_masks, softmax_in_place
from hf_calib.scaling._inputs import FloatArray
from hf_calib.scaling.affine import AffineMap
from hf_calib.scaling.newton import LEFT_TO_GAIN, Ridges, Rows, fit_affine
from hf_calib.scaling.temperature import BOUNDS, ScaledLoss

if TYPE_CHECKING:
    from typing_extensions import Self

RIDGE = 1e-6  # of parameters without a penalty, which data may not determine


IDENTITY = AffineMap(np.array(1.0))


class Solution(NamedTuple):
    """What a fit has found; its temperature and parameters are a start for the next fit to the same rows."""

    temperature: float
    map: AffineMap = IDENTITY
    theta: FloatArray | None = None


class LinearScaling(LogitScaling):
    """A scaler that is an affine map of the logits, or of features of them, once it is fitted."""

    weight_: FloatArray
    bias_: FloatArray
    multi_label = False
    _mixes: ClassVar[bool] = False  # whether the weight is a matrix

    def _check(self) -> None:
        """Refuse settings."""

    def transform(self, logits: ArrayLike) -> FloatArray:
        """Return the mapped logits in float64; logits of any shape that ends in C."""
        check_is_fitted(self, "weight_")
        rows = as_fitted_logits(logits, len(self.bias_))
        if self.weight_.ndim == 2:
            refuse_masks(rows)
        return AffineMap(self.weight_, self.bias_)(self._features(rows))

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        """Return the calibrated probabilities: the softmax of `transform`, or the sigmoid with multi_label."""
        scaled = self.transform(logits)
        return expit(scaled, out=scaled) if self.multi_label else softmax_in_place(scaled)

    def solve(self, rows: Rows, near: Solution | None = None, left_to_gain: float = LEFT_TO_GAIN) -> Solution:
        """The map of checked rows, perhaps from what another fit to them has found."""
        near = Solution(ScaledLoss(rows).best_temperature()) if near is None else near
        unit = self._unit(rows, near.temperature)
        theta = fit_affine(rows, unit, self._ridges(rows), near.theta, left_to_gain)
        weight = theta[0] if len(theta) == 2 else theta[2:].T + np.diag(theta[0])
        return Solution(near.temperature, AffineMap(weight / unit, theta[1] - theta[1].mean()), theta)

    def _fit(self, rows: Rows) -> Self:
        if self._mixes:
            refuse_masks(rows.logits)
        loss = ScaledLoss(rows)
        temperature = loss.best_temperature()
        if self._unit(rows, temperature) == temperature:  # else the map does not start from it
            loss.warn(temperature, stacklevel=4)
        found = self.solve(rows, Solution(temperature)).map
        self.weight_ = found.weight
        self.bias_ = np.zeros(rows.logits.shape[1]) if found.bias is None else found.bias
        return self

    def _features(self, logits: FloatArray) -> FloatArray:
        return logits

    def _unit(self, rows: Rows, temperature: float) -> float:
        """The scale of the logits in the fit: the temperature or, where that is at a bound, their spread."""
        if BOUNDS[0] * 1.001 < temperature < BOUNDS[1] / 1.001:
            return temperature
        total = sum(np.square(z - z.mean(axis=1, keepdims=True)).sum() for _, z, *_ in rows.features(1.0))
        spread = float(np.sqrt(total / rows.logits.size))
        return spread if spread > 1e-150 else 1.0  # the squares of less are 0

    def _ridges(self, rows: Rows) -> Ridges:
        return Ridges(RIDGE, RIDGE)


class AffineScaling(LinearScaling):
    """A scaler that is an affine map of the logits themselves, which folds into a head."""

    def affine_map(self) -> AffineMap:
        """The affine map that `fold` writes into a classification head."""
        check_is_fitted(self, "weight_")
        return AffineMap(self.weight_, self.bias_)


class WeightedScaling(LinearScaling):
    """A scaler whose rows may have weights."""

    def fit(self, logits: ArrayLike, labels: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Find the weights and the biases.

        Args:
            logits: (N, C), any real dtype, read in float64; a vector map takes -inf, which masks a class that is not
                the label.
            labels: (N,) int in [0, C), without -100.
            sample_weight: (N,) of at least 0; None counts every example once. Default penalties follow Kish's number of
                rows, (sum of w)^2 / (sum of w^2), which is smaller than that of repeated rows.

        Returns:
            self, with `weight_` and `bias_`.
        """
        self._check()
        return self._fit(Rows.checked(logits, labels, sample_weight))


class VectorScaling(AffineScaling, WeightedScaling):
    r"""Give each class its own scale and offset, fitted on held-out predictions.

    For a model whose classes are not all over- or under-confident in the same way, or whose training set had
    other class frequencies. It has 2 C parameters, so it needs some examples of each class;
    `TemperatureScaling` needs few, `MatrixScaling` also mixes the classes. It can change the predicted class.

    $$\hat p = \mathrm{softmax}(w \odot z + b)$$

    Attributes:
        weight_: w, (C,).
        bias_: b, (C,), which sum to 0.

    Notes:
        The negative log-likelihood is convex. Newton's method in float64 finds its minimum, from the temperature T of
        `TemperatureScaling` (with its warning), until the next step would gain less than 1e-7 nats per example. It
        reads the rows block by block, and no second (N, C) array is made.

        A ridge of 1e-6 (|T w - 1|^2 + |b|^2) bounds what the data do not determine, where a class is absent or
        separated from the others. `StructuredVectorScaling` is the safer choice there.

        A class masked by -inf in a row stays masked there. w follows the logits as they are, so unlike a
        temperature it is not blind to an offset that all logits of a row share.

    References:
        Guo et al. 2017, "On calibration of modern neural networks", section 4.2.

    >>> logits = np.array([[3.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 3.0]] * 3)
    >>> labels = np.array([0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1])  # more often class 1 than the logits say
    >>> scaler = VectorScaling().fit(logits, labels)
    >>> scaler.predict_proba(logits).mean(axis=0).round(4)  # the frequencies of the labels
    array([0.3333, 0.6667])
    """


class PenalisedMatrixScaling(WeightedScaling):
    """A full matrix over features of the logits, with ODIR penalties."""

    _mixes = True

    def __init__(
        self, *, off_diagonal_penalty: float | None = None, bias_penalty: float | None = None
    ) -> None:
        self.off_diagonal_penalty = off_diagonal_penalty
        self.bias_penalty = bias_penalty

    def solve(self, rows: Rows, near: Solution | None = None, left_to_gain: float = LEFT_TO_GAIN) -> Solution:
        rows = rows.with_logits(self._features(rows.logits.astype(np.float64)))
        return super().solve(rows, near, left_to_gain)

    def _check(self) -> None:
        for name in ("off_diagonal_penalty", "bias_penalty"):
            value = getattr(self, name)
            way_out = "None takes a default that follows the numbers of classes and examples"
            holds = value is None or (isinstance(value, Real) and 0 <= float(value) < np.inf)
            check(holds, f"{name} to be a finite number of at least 0", repr(value), way_out)

    def _ridges(self, rows: Rows) -> Ridges:
        n, c = rows.effective_size, rows.logits.shape[1]
        between, bias = self.off_diagonal_penalty, self.bias_penalty
        between = 10 * c / n if between is None else between / (c * (c - 1))
        bias = 1 / (2 * n) if bias is None else bias / c
        return Ridges(RIDGE, max(bias, RIDGE), max(between, RIDGE))


class MatrixScaling(AffineScaling, PenalisedMatrixScaling):
    r"""Map the logits by a full matrix and an offset, fitted on held-out predictions.

    For a model that confuses certain pairs of classes in a way that more data would show. It has C (C + 1)
    parameters: without penalties it over-fits unless N is many times that, so the weights between classes and
    the biases are drawn to 0 (ODIR). `VectorScaling` has the diagonal only; `DirichletScaling` does the same
    with log-probabilities. It can change the predicted class.

    $$\hat p = \mathrm{softmax}(W z + b), \qquad \min_{W, b} \mathrm{NLL}
      + \frac{\lambda}{C (C - 1)} \sum_{i \ne j} (T w_{ij})^2 + \frac{\mu}{C} \sum_j b_j^2$$

    Args:
        off_diagonal_penalty: λ >= 0. None takes 10 C^2 (C - 1) / N, a normal prior for each T w_{ij}
            of variance 1 / (20 C): together they move a logit by about a fifth of the logits' spread.
        bias_penalty: \mu >= 0. None takes C / (2 N), a standard normal prior for each bias, in nats.

    Attributes:
        weight_: W, (C, C); `transform` is logits @ weight_.T + bias_.
        bias_: b, (C,), which sum to 0.

    Notes:
        T is the fitted temperature. Kull et al. penalise w instead of T w, which depends on the scale of the logits.
        The fit is as in `VectorScaling`, with its ridge where there is no penalty, but that the probabilities (N, C)
        are kept. A logit of -inf would mask all classes, so it is refused.

    References:
        Guo et al. 2017, section 4.2; Kull et al. 2019, "Beyond temperature scaling: obtaining well-calibrated
        multi-class probabilities with Dirichlet calibration", section 3 (ODIR).

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(2000, 3))
    >>> mixed = logits @ [[1, 0, 0], [0, 1, 0], [0, 1, 1]]  # the third logit counts for the second class too
    >>> labels = (mixed + rng.gumbel(size=(2000, 3))).argmax(axis=1)
    >>> scaler = MatrixScaling().fit(logits, labels)
    >>> (scaler.weight_[1] - scaler.weight_[0]).round(1)  # near -1, 1, 1
    array([-1.1,  0.9,  0.8])
    """


class DirichletScaling(PenalisedMatrixScaling):
    r"""Map the log-probabilities by a full matrix and an offset, fitted on held-out predictions.

    Like `MatrixScaling`, and for the same need, but it sees the probabilities only: an offset that all logits
    of a row share has no influence. Take it where a model's logits are not at hand (pass log-probabilities),
    or where their offset means nothing. It can change the predicted class, and as the logarithm of the sum
    comes in, it cannot be folded into a linear head.

    $$\hat p = \mathrm{softmax}(W \ln \mathrm{softmax}(z) + b), \qquad \min_{W, b} \mathrm{NLL}
      + \frac{\lambda}{C (C - 1)} \sum_{i \ne j} (T w_{ij})^2 + \frac{\mu}{C} \sum_j b_j^2$$

    Args:
        off_diagonal_penalty: λ >= 0; None as in `MatrixScaling`.
        bias_penalty: \mu >= 0; None as in `MatrixScaling`.

    Attributes:
        weight_: W, (C, C).
        bias_: b, (C,), which sum to 0.

    Notes:
        If each class's probability vectors follow a Dirichlet distribution, this is the exact recalibration map. The
        fit and T are as in `MatrixScaling`. A probability of 0 (a logit of -inf) has no logarithm, so it is refused.

    References:
        Kull et al. 2019, "Beyond temperature scaling: obtaining well-calibrated multi-class probabilities
        with Dirichlet calibration", sections 2 and 3.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(5000, 3))
    >>> labels = (logits + rng.gumbel(size=(5000, 3))).argmax(axis=1)
    >>> scaler = DirichletScaling().fit(3 * logits, labels)
    >>> np.allclose(scaler.predict_proba(3 * logits), scaler.predict_proba(3 * logits + 100))
    True
    """

    def _features(self, logits: FloatArray) -> FloatArray:
        found: FloatArray = log_softmax(logits, axis=-1)
        return found


class StructuredScaling(AffineScaling):
    """A temperature and, with a ridge each, the parameters of an affine map."""

    def __init__(self, penalty: float = 1.0) -> None:
        self.penalty = penalty

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> Self:
        """Find the temperature, then the weights and the biases.

        Args:
            logits: (N, C), any real dtype, read in float64; a vector map takes -inf, which masks a class that is not
                the label.
            labels: (N,) int in [0, C), without -100; with multi_label, (N, C) of 0 and 1, and -100 where a
                label is not known.

        Returns:
            self, with `weight_` and `bias_`.
        """
        self._check()
        return self._fit(Rows.checked(logits, labels, multi_label=self.multi_label))

    def _check(self) -> None:
        holds = isinstance(self.penalty, Real) and 0 < float(self.penalty) < np.inf
        way_out = "1 is the strength of the paper; a smaller one trusts the data more"
        check(holds, "penalty to be a finite number above 0", repr(self.penalty), way_out)

    def solve(self, rows: Rows, near: Solution | None = None, left_to_gain: float = LEFT_TO_GAIN) -> Solution:
        n_classes = rows.logits.shape[1]
        if not rows.sigmoid and n_classes > 2:
            return super().solve(rows, near, left_to_gain)
        near = Solution(ScaledLoss(rows).best_temperature()) if near is None else near
        if rows.sigmoid:
            columns = [rows.two_classes(column) for column in range(n_classes)]
        else:  # the map of the difference of the logits; a row with a masked class tells nothing
            difference = rows.logits[:, 1:].astype(np.float64) - rows.logits[:, :1]
            columns = [Rows(difference, rows.labels[:, None], None, np.isfinite(difference)).two_classes()]
        slopes, offsets = np.full(len(columns), 1 / near.temperature), np.zeros(len(columns))
        for place, column in enumerate(columns):
            if len(column):
                ridge = 2 * self.penalty / len(column)
                theta = fit_affine(column, near.temperature, Ridges(ridge, ridge), None, left_to_gain)
                slopes[place] = theta[0, 0] / near.temperature
                offsets[place] = theta[1, 1] - theta[1, 0]
        if rows.sigmoid:
            return Solution(near.temperature, AffineMap(slopes, offsets))
        weight = np.full(2, slopes[0])
        weight = np.diag(weight) if self._mixes else weight
        return Solution(near.temperature, AffineMap(weight, np.array([-0.5, 0.5]) * offsets))

    def _unit(self, rows: Rows, temperature: float) -> float:
        return temperature

    def _ridges(self, rows: Rows) -> Ridges:
        n, c = rows.logits.shape
        own, between = self.penalty * c / n, self.penalty * c * (c - 1) / n
        if not self._mixes:
            return Ridges(own, own)
        # Together with the ridge of the matrix, the first one makes that of its diagonal.
        return Ridges(own * between / (between - own), own, between)


class StructuredVectorScaling(StructuredScaling):
    r"""Give each class its own scale and offset, drawn to the best temperature (SVS).

    Like `VectorScaling`, for a model whose classes are not all over- or under-confident alike, but with a
    ridge that makes it safe with few examples of a class, or none. `StructuredMatrixScaling` also mixes the
    classes. It can change the predicted class.

    $$\hat p = \mathrm{softmax}((1 + v) \odot z / T + b), \qquad \min_{v, b} \mathrm{NLL}
      + \lambda \frac{C}{N} (|v|^2 + |b|^2)$$

    Args:
        penalty: λ > 0, a multiple of the paper's strength.
        multi_label: True for sigmoid outputs with a 0/1 label per logit: sigmoid((1 + v) z / T + b), label by
            label, with one T for all of them.

    Attributes:
        weight_: (1 + v) / T, (C,).
        bias_: b, (C,), which sum to 0 unless the outputs are sigmoids.

    Notes:
        T is the temperature that `TemperatureScaling` finds, with its warning; it stays while v and b are fitted. The
        penalised likelihood then has one minimum whatever the data, found to 1e-7 nats per example. The authors' code
        takes log-probabilities instead of logits, for which the map is not linear.

        For two classes the map is that of the difference of the logits, sigmoid((1 + v) (z_1 - z_0) / T + b) (Platt
        scaling), with the ridge λ (4 v^2 + b^2) / N, which is the one above for such a map; a label of `multi_label`
        is such a problem, of its known examples. A class masked by -inf in a row stays masked there.

    References:
        Berta, Holzmüller, Jordan, Bach 2026, "Structured matrix scaling for multi-class calibration", with
        ridge penalties.

    >>> logits = np.array([[3.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 3.0]] * 20)
    >>> labels = np.array([0, 1, 2, 0, 1, 0] * 10)  # class 2 is right every other time only
    >>> scaler = StructuredVectorScaling().fit(logits, labels)
    >>> scaler.predict_proba(logits[:3]).diagonal().round(2)
    array([0.96, 0.92, 0.55])
    """

    def __init__(self, penalty: float = 1.0, *, multi_label: bool = False) -> None:
        super().__init__(penalty)
        self.multi_label = multi_label


class StructuredMatrixScaling(StructuredScaling):
    r"""Map the logits by a full matrix and an offset, drawn to the best temperature (SMS).

    The strongest map that folds into a head where classes are confused in a way that more data would show,
    and safer than `MatrixScaling`: every parameter has a ridge, that of the C (C - 1) weights between classes
    being C - 1 times as strong. `AutoScaling` chooses its penalty by cross-validation. It can change the
    predicted class.

    $$\hat p = \mathrm{softmax}((I + \mathrm{diag}(v) + M) z / T + b), \qquad \min_{v, M, b} \mathrm{NLL}
      + \lambda \frac{C}{N} (|v|^2 + |b|^2) + \lambda \frac{C (C - 1)}{N} |M|^2$$

    Args:
        penalty: λ > 0, a multiple of the paper's strength.

    Attributes:
        weight_: (I + diag(v) + M) / T, (C, C); `transform` is logits @ weight_.T + bias_.
        bias_: b, (C,), which sum to 0.

    Notes:
        T, the minimum and the case of two classes, where a matrix says no more than the difference of the
        logits, are as in `StructuredVectorScaling`. A logit of -inf would mask all classes, so it is refused.

    References:
        Berta, Holzmüller, Jordan, Bach 2026, "Structured matrix scaling for multi-class calibration", with
        ridge penalties.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(2000, 3))
    >>> mixed = logits @ [[1, 0, 0], [0, 1, 0], [0, 1, 1]]  # the third logit counts for the second class too
    >>> labels = (mixed + rng.gumbel(size=(2000, 3))).argmax(axis=1)
    >>> scaler = StructuredMatrixScaling().fit(logits, labels)
    >>> (scaler.weight_[1] - scaler.weight_[0]).round(1)  # near -1, 1, 1
    array([-1.1,  0.9,  1. ])
    """

    _mixes = True
