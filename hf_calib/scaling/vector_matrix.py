"""Vector and matrix scaling: a linear map of the logits, fitted by maximum likelihood."""

from __future__ import annotations

import warnings
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted

from hf_calib._errors import InputValueError, expected
from hf_calib.scaling._base import LogitScaling, as_fitted_logits, listed, refuse_masks
from hf_calib.scaling._inputs import as_class_labels, as_matrix, without_zero_weights
from hf_calib.scaling._linear import (
    LEFT_TO_GAIN,
    FloatArray,
    Linear,
    LinearProblem,
    Near,
    fit_matrix,
    fit_vector,
)
from hf_calib.scaling._solver import SMOOTHED
from hf_calib.scaling.affine import AffineMap

if TYPE_CHECKING:
    from typing_extensions import Self

_RUNAWAY = 100  # times the weight 1 / T of the best temperature: no class needs as much


class LinearScaling(LogitScaling):
    """A linear map of the logits; where the data do not determine it, the labels are smoothed."""

    weight_: FloatArray
    bias_: FloatArray
    _left_to_gain = LEFT_TO_GAIN
    _near: Near | None = None  # a structured map of the same rows

    def _fit(self, logits: NDArray[Any], labels: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        rows, targets, weights = without_zero_weights(logits, as_class_labels(labels, logits), sample_weight)
        problem = LinearProblem(rows, targets, self._features, weights)
        if self._near is None:
            problem.unit = problem.typical_unit()
        else:
            problem.unit, problem.start = problem.typical_unit(self._near.temperature), self._near.solution
        problem.left_to_gain = self._left_to_gain
        reason = _undetermined_classes(problem, free_bias=self._has_free_bias())
        problem.smoothing = 1 / (problem.effective_size + 1) if reason else 0.0
        (weight, bias), converged = self._solve(problem)
        if not reason and (reason := self._unbounded(problem, weight, bias)):
            problem.smoothing = 1 / (problem.effective_size + 1)
            (weight, bias), converged = self._solve(problem)
        self.weight_, self.bias_ = weight / problem.unit, bias
        if reason:
            message = (
                f"{reason}, so the data do not determine the parameters. {SMOOTHED}Fit on more examples, or a "
                "scaler with fewer parameters."
            )
            warnings.warn(message, UserWarning, stacklevel=3)
        if not converged:
            message = (
                "The fit did not converge: more than 1e-7 nats per example are left to gain, and the parameters may "
                "be far from the best ones. Check the scale of the logits, or raise the penalties."
            )
            warnings.warn(message, UserWarning, stacklevel=3)

    def _unbounded(self, problem: LinearProblem, weight: FloatArray, bias: FloatArray) -> str | None:
        """Say why the parameters of a fitted map have no finite best value, if they have none."""
        if problem.is_separated_by(*self._unpenalised(weight, bias)):
            return f"All {problem.size} labels are ranked first by the fitted map"
        own = weight if weight.ndim == 1 else weight.diagonal()
        runaway = np.flatnonzero(np.abs(own) > _RUNAWAY)
        if len(runaway):
            return _separated(runaway, "almost perfectly separated")
        return None

    def _features(self, block: FloatArray) -> FloatArray:
        return block

    def _solve(self, problem: LinearProblem) -> tuple[Linear, bool]:
        raise NotImplementedError

    def _has_free_bias(self) -> bool:
        return True

    def _unpenalised(self, weight: FloatArray, bias: FloatArray) -> Linear:
        return weight, bias


class PenalisedMatrixScaling(LinearScaling):
    """A full matrix over features of the logits, with ODIR penalties."""

    def __init__(
        self, *, off_diagonal_penalty: float | None = None, bias_penalty: float | None = None
    ) -> None:
        self.off_diagonal_penalty = off_diagonal_penalty
        self.bias_penalty = bias_penalty

    def fit(self, logits: ArrayLike, labels: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Find the matrix and the biases.

        Args:
            logits: (N, C), any real dtype, read in float64; finite.
            labels: (N,) int in [0, C), without -100.
            sample_weight: (N,) of at least 0; None counts every example once. Whole numbers are the same as repeated
                rows only where both penalties are given: the default ones, and smoothed labels, follow Kish's number
                of rows, (sum of w)^2 / (sum of w^2), which is smaller.

        Returns:
            self, with `weight_` and `bias_`.

        Raises:
            TypeError: if a dtype is wrong.
            ValueError: if a parameter, a shape or a value is wrong.
        """
        for name in ("off_diagonal_penalty", "bias_penalty"):
            _check_penalty(name, getattr(self, name))
        matrix = as_matrix(logits, least_columns=2)
        refuse_masks(matrix)
        self._fit(matrix, labels, sample_weight)
        return self

    def transform(self, logits: ArrayLike) -> FloatArray:
        """Return features @ weight.T + bias in float64; logits of any shape that ends in C."""
        check_is_fitted(self, "weight_")
        features = as_fitted_logits(logits, len(self.bias_))
        refuse_masks(features)
        scaled = self._features(features) @ self.weight_.T
        scaled += self.bias_
        return scaled

    def _solve(self, problem: LinearProblem) -> tuple[Linear, bool]:
        off_diagonal, bias = self.off_diagonal_penalty, self.bias_penalty
        n, c = problem.effective_size, problem.n_classes
        if off_diagonal is None:
            off_diagonal = 10 * c**2 * (c - 1) / n
        if bias is None:
            bias = c / (2 * n)
        return fit_matrix(problem, off_diagonal / (c * (c - 1)), bias / c)

    def _has_free_bias(self) -> bool:
        return self.bias_penalty == 0

    def _unpenalised(self, weight: FloatArray, bias: FloatArray) -> Linear:
        free_weight = weight if self.off_diagonal_penalty == 0 else weight.diagonal()
        return free_weight, bias if self._has_free_bias() else np.zeros_like(bias)


class VectorScaling(LinearScaling):
    r"""Give each class its own scale and offset, fitted on held-out predictions.

    For a model whose classes are not all over- or under-confident in the same way, or whose training set had
    other class frequencies. It has 2 C parameters, so it needs some examples of each class;
    `TemperatureScaling` needs few, `MatrixScaling` also mixes the classes. It can change the predicted class.

    $$\hat p = \mathrm{softmax}(w \odot z + b)$$

    Attributes:
        weight_: w, (C,).
        bias_: b, (C,), which sum to 0.

    Notes:
        The negative log-likelihood is convex in w and b. Newton's method in float64, its steps solved by
        conjugate gradients, finds its minimum, from the identity at the fitted temperature, and stops when
        the next step would gain less than 1e-7 nats per example; `fit` warns if it does not get there. It
        reads the rows block by block, and no second (N, C) array is made.

        Some data do not determine the parameters: a class is absent, a class's own logit separates it from
        all others, or the fitted map ranks every label first. Larger parameters then always look better.
        `fit` warns, and smooths each label by 1 / (N + 1), as if one more example had an unknown label.

        A class masked by -inf in a row stays masked there. w follows the logits as they are, so unlike a
        temperature it is not blind to an offset that all logits of a row share.

    References:
        Guo et al. 2017, "On calibration of modern neural networks", section 4.2.

    >>> logits = np.array([[3.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 3.0]] * 3)
    >>> labels = np.array([0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1])  # more often class 1 than the logits say
    >>> scaler = VectorScaling().fit(logits, labels)
    >>> scaler.predict_proba(logits).mean(axis=0).round(6)  # the frequencies of the labels
    array([0.333333, 0.666667])
    """

    def fit(
        self, logits: ArrayLike, labels: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> VectorScaling:
        """Find the weights and the biases.

        Args:
            logits: (N, C), any real dtype, read in float64; -inf masks a class that is not the label.
            labels: (N,) int in [0, C), without -100.
            sample_weight: (N,) of at least 0; None counts every example once. Whole numbers are the same as repeated
                rows unless labels are smoothed, which is by Kish's number of rows, (sum of w)^2 / (sum of w^2).

        Returns:
            self, with `weight_` and `bias_`.

        Raises:
            TypeError: if a dtype is wrong.
            ValueError: if a shape or a value is wrong.
        """
        self._fit(as_matrix(logits, least_columns=2), labels, sample_weight)
        return self

    def transform(self, logits: ArrayLike) -> FloatArray:
        """Return weight * logits + bias in float64; logits of any shape that ends in C."""
        mapping = self.affine_map()
        return mapping(as_fitted_logits(logits, len(self.bias_)))

    def affine_map(self) -> AffineMap:
        """The affine map that `fold` writes into a classification head."""
        check_is_fitted(self, "weight_")
        return AffineMap(self.weight_, self.bias_)

    def _solve(self, problem: LinearProblem) -> tuple[Linear, bool]:
        return fit_vector(problem)


class MatrixScaling(PenalisedMatrixScaling):
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
        T is the fitted temperature. Kull et al. penalise w instead of T w, which depends on the scale of the
        logits; for T = 1 the two are the same. The fit, and what it does and says where data do not
        determine the parameters that are not penalised, is as in `VectorScaling`, but that the probabilities
        (N, C) are kept. A logit of -inf would mask all classes, so it is refused.

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

    def affine_map(self) -> AffineMap:
        """The affine map that `fold` writes into a classification head."""
        check_is_fitted(self, "weight_")
        return AffineMap(self.weight_, self.bias_)


def _undetermined_classes(problem: LinearProblem, *, free_bias: bool) -> str | None:
    """Name the classes whose likelihood has no maximum."""
    counts = np.bincount(problem.labels, minlength=problem.n_classes)
    absent = np.flatnonzero(counts == 0)
    if len(absent):
        return f"There is no example of {listed(absent, 'class', 'classes')}"
    separated = np.flatnonzero(problem.separated_classes(free_bias=free_bias))
    if len(separated):
        return _separated(separated, "perfectly separated")
    return None


def _separated(classes: NDArray[np.int64], how: str) -> str:
    named = listed(classes, "Class", "classes")
    verb, own = ("is", "its own logit") if len(classes) == 1 else ("are", "their own logits")
    return f"{named} {verb} {how} from the others by {own}"


def _check_penalty(name: str, penalty: float | None) -> None:
    if penalty is not None and not (isinstance(penalty, Real) and 0 <= penalty < np.inf):
        way_out = "None takes a default that follows the numbers of classes and examples"
        raise InputValueError(expected(name, "be a finite number of at least 0", repr(penalty), way_out))
