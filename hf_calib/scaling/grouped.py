"""A map for each group of rows, such as the types of questions to a judge, drawn to the map of all of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_softmax

from hf_calib._errors import InputValueError, expected, few
from hf_calib.metrics.checks import check_choice, check_seed
from hf_calib.metrics.scores import expected_calibration_error
from hf_calib.scaling._base import LogitScaling, as_fitted_logits, softmax_in_place
from hf_calib.scaling._inputs import FloatArray, as_class_labels, as_matrix
from hf_calib.scaling._linear import LinearProblem, fit_vector
from hf_calib.scaling.affine import AffineMap
from hf_calib.scaling.auto import choose
from hf_calib.scaling.methods import SCALERS

BASES = ("temperature", "structured_vector", "vector")  # maps that do not mix the classes
_VECTOR = "structured_vector(penalty=1)"
_PENALTIES = (np.inf, 100.0, 10.0, 1.0, 0.1)  # from one map for all to the freest
_CHOSEN_ON = 20_000  # rows of the cross-validation
_ROUGHLY = 1e-5  # nats per row, short of the minimum, that the fits of the cross-validation may be


class GroupedScaling(LogitScaling):
    r"""Give each group of rows its own scale and offset of each class, drawn to the map of all rows.

    For a judge or an exam model that is asked several types of questions, for tenants, languages or sites: the base
    rates of their answers differ, and so does the confidence that is right. One map for all is wrong for each; a map of
    its own is wrong for a group of few rows. A ridge, chosen by cross-validation, lies between the two: a group of 20
    rows stays near the common map.

    $$\hat p = \mathrm{softmax}((1 + v_g) \odot m(z) + b_g), \qquad \min_{v_g, b_g} \mathrm{NLL}_g
      + \lambda \frac{C}{N_g} (|v_g|^2 + |b_g|^2)$$

    with m the common map.

    Args:
        base: the common map m: "temperature", "structured_vector" or "vector". "auto" lets cross-validation take one of
            the first two: what is wrong with a class in all groups is not for each group to learn anew.
        n_folds: random parts of the cross-validation, at least 2.
        random_state: seed of the parts.

    Attributes:
        groups_: the names of the groups, in order.
        sizes_: (G,) rows of each.
        weights_: (G + 1, C), which multiply the logits: of all rows, then of each group.
        biases_: (G + 1, C).
        choice_: λ, "penalty=1", or "one map for all"; with "auto" the common map first: "structured_vector, penalty=1".

    Notes:
        "auto" takes the structured vector where its loss, less the temperature's, is below 0 by two standard errors.

        λ is the largest of infinity, 100, 10, 1 and .1 whose loss, cross-validated on at most 20,000 rows, is within
        one standard error of the best, those of the differences row by row. Rows of a group that was not seen in
        `fit`, or without groups, get the common map. It is not folded, as a model does not know the groups:
        `save_pretrained` puts it beside the model, and `hf_calib.pipeline(...)(texts, group="law")` applies it.

    References:
        The ridge is that of Berta, Holzmüller, Jordan, Bach 2026, "Structured matrix scaling for multi-class
        calibration", around the common map.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(scale=2, size=(4000, 3))
    >>> groups = np.repeat(["art", "law"], 2000)
    >>> offsets = np.where(groups[:, None] == "law", [0, 0, 1.5], 0)  # the third answer is right more often
    >>> labels = (logits / 2 + offsets + rng.gumbel(size=(4000, 3))).argmax(axis=1)
    >>> scaler = GroupedScaling().fit(logits, labels, groups=groups)
    >>> scaler.groups_, round(float(scaler.biases_[2, 2]), 1)
    (['art', 'law'], 1.0)
    >>> scaler.predict_proba(logits[:2], groups=["law", "biology"]).shape
    (2, 3)
    """

    groups_: list[str]
    sizes_: NDArray[np.int64]
    weights_: FloatArray
    biases_: FloatArray
    choice_: str

    def __init__(self, base: str = "auto", *, n_folds: int = 5, random_state: int = 0) -> None:
        self.base = base
        self.n_folds = n_folds
        self.random_state = random_state

    def fit(self, logits: ArrayLike, labels: ArrayLike, *, groups: ArrayLike) -> GroupedScaling:
        """Fit the common map, choose the ridge, and fit each group's.

        Args:
            logits: (N, C), any real dtype, read in float64; -inf masks a class that is not the label.
            labels: (N,) int in [0, C), without -100.
            groups: (N,) names of the groups: words or integers.

        Returns:
            self.

        Raises:
            TypeError: if a dtype is wrong.
            ValueError: if a parameter, a shape or a value is wrong.
        """
        check_choice("base", self.base, ("auto", *BASES))
        if not (isinstance(self.n_folds, Integral) and self.n_folds >= 2):
            way_out = "5 is enough; more folds cost more fits"
            raise InputValueError(
                expected("n_folds", "be an integer of at least 2", repr(self.n_folds), way_out)
            )
        matrix = as_matrix(logits, least_columns=2)
        classes = as_class_labels(labels, matrix)
        names = _as_groups(groups, len(matrix))
        self.groups_, numbers, sizes = _numbered(names)
        self.sizes_ = sizes
        base, penalty = self._chosen(matrix, classes, numbers)
        choice = "one map for all" if penalty == np.inf else f"penalty={penalty:g}"
        self.choice_ = f"{base}, {choice}" if self.base == "auto" else choice
        common = _common(base, matrix, classes)
        maps = self._maps(matrix, classes, numbers, penalty, len(self.groups_), common)
        self.weights_, self.biases_ = (np.array(parts) for parts in zip(*maps, strict=True))
        return self

    def transform(self, logits: ArrayLike, *, groups: ArrayLike | None = None) -> FloatArray:
        """Return the mapped logits in float64; logits of any shape that ends in C.

        Args:
            logits: (N, ..., C).
            groups: (N,) names; None, and a name that was not in `fit`, stand for the common map.
        """
        self._check_is_fitted()
        rows = as_fitted_logits(logits, self.weights_.shape[1])
        if groups is None:
            return AffineMap(self.weights_[0], self.biases_[0])(rows)
        names = _as_groups(groups, len(rows))
        known = {name: number for number, name in enumerate(self.groups_, 1)}
        numbers = np.array([known.get(name, 0) for name in names.tolist()], dtype=np.int64)
        for number in np.unique(numbers):
            own = numbers == number
            rows[own] = AffineMap(self.weights_[number], self.biases_[number])(rows[own])
        return rows

    def predict_proba(self, logits: ArrayLike, *, groups: ArrayLike | None = None) -> FloatArray:
        """Return the calibrated probabilities, of the shape of the logits, in float64; arguments as of `transform`."""
        return softmax_in_place(self.transform(logits, groups=groups))

    def by_group(self, logits: ArrayLike, labels: ArrayLike, *, groups: ArrayLike) -> list[dict[str, Any]]:
        """Measure each group's rows, which should not be those of `fit`.

        Args:
            logits: (N, C); labels (N,) and groups (N,), as of `fit`.
            labels: of the rows.
            groups: of the rows.

        Returns:
            A row per group in the order of their names: "group", "n", "accuracy", and "nll" (nats) and "ece" of the
            logits as they are, with the common map (`_common`), and with the group's (`_grouped`).

        >>> rng = np.random.default_rng(0)
        >>> logits, groups = rng.normal(scale=2, size=(600, 3)), np.repeat(["art", "law"], 300)
        >>> offsets = np.where(groups[:, None] == "law", [0, 0, 1.5], 0)
        >>> labels = (logits / 2 + offsets + rng.gumbel(size=(600, 3))).argmax(axis=1)
        >>> scaler = GroupedScaling().fit(logits[::2], labels[::2], groups=groups[::2])
        >>> art, law = scaler.by_group(logits[1::2], labels[1::2], groups=groups[1::2])
        >>> law["group"], law["n"], round(law["nll_common"], 2), round(law["nll_grouped"], 2)
        ('law', 150, 0.79, 0.75)
        """
        matrix = as_matrix(logits, least_columns=2)
        classes = as_class_labels(labels, matrix)
        names = _as_groups(groups, len(matrix))
        found = []
        for name in np.unique(names).tolist():
            own = names == name
            rows, truth = matrix[own].astype(np.float64), classes[own]
            mapped = {
                "": rows,
                "_common": self.transform(rows),
                "_grouped": self.transform(rows, groups=names[own]),
            }
            row: dict[str, Any] = {"group": name, "n": len(truth)}
            row["accuracy"] = float((rows.argmax(axis=1) == truth).mean())
            for suffix, scores in mapped.items():
                row[f"nll{suffix}"] = float(_losses(scores, truth).mean())
                row[f"ece{suffix}"] = expected_calibration_error(softmax_in_place(scores.copy()), truth)
            found.append(row)
        return found

    @property
    def classes_(self) -> NDArray[np.int64]:
        """The numbers of the classes, 0..C-1, once it is fitted."""
        self._check_is_fitted()
        return np.arange(self.weights_.shape[1])

    def _check_is_fitted(self) -> None:
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self, "weights_")

    def _maps(
        self,
        logits: NDArray[Any],
        labels: NDArray[np.int64],
        numbers: NDArray[np.int64],
        penalty: float,
        n_groups: int,
        common: AffineMap,
        left_to_gain: float | None = None,
    ) -> Iterator[tuple[FloatArray, FloatArray]]:
        """Weight and bias (C,) of the common map, and of each group's."""
        assert common.bias is not None
        yield common.weight, common.bias
        mapped = common(logits.astype(np.float64))
        c = logits.shape[1]
        for number in range(n_groups):
            own = numbers == number
            n = int(np.count_nonzero(own))
            if penalty == np.inf or n == 0:
                yield common.weight, common.bias
                continue
            problem = LinearProblem(mapped[own], labels[own], lambda block: block)
            if left_to_gain is not None:
                problem.left_to_gain = left_to_gain
            (weight, bias), _ = fit_vector(problem, penalty * c / n, penalty * c / n)
            yield weight * common.weight, weight * common.bias + bias

    def _chosen(
        self, logits: NDArray[Any], labels: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> tuple[str, float]:
        """The common map's method, and the penalty."""
        bases = BASES[:2] if self.base == "auto" else (self.base,)
        n_groups = int(numbers.max()) + 1
        rng = np.random.default_rng(check_seed(self.random_state, "random_state"))
        if len(logits) > _CHOSEN_ON:  # λ weighs the offsets of groups, not rows: a sample tells it, too
            sample = rng.choice(len(logits), _CHOSEN_ON, replace=False)
            logits, labels, numbers = logits[sample], labels[sample], numbers[sample]
        n = len(logits)
        if n < 2:
            return bases[0], np.inf
        folds = rng.permutation(np.arange(n) % min(self.n_folds, n))
        splits = [(folds == fold, folds != fold) for fold in range(folds.max() + 1)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the fit on all rows says it
            commons = {
                base: [_common(base, logits[train], labels[train]) for _, train in splits] for base in bases
            }
        base = bases[0]
        if len(bases) > 1:
            common_losses = np.empty((len(bases), n))
            for losses_of, fitted in zip(common_losses, commons.values(), strict=True):
                for (test, _), common in zip(splits, fitted, strict=True):
                    losses_of[test] = _losses(common(logits[test]), labels[test])
            base = bases[choose({"temperature": common_losses[0], _VECTOR: common_losses[1]}) == _VECTOR]
        if n_groups == 1:
            return base, np.inf
        losses = np.empty((len(_PENALTIES), n))
        for (test, train), common in zip(splits, commons[base], strict=True):
            for losses_of, penalty in zip(losses, _PENALTIES, strict=True):
                maps = self._maps(
                    logits[train], labels[train], numbers[train], penalty, n_groups, common, _ROUGHLY
                )
                weights, biases = (np.array(parts) for parts in zip(*maps, strict=True))
                own = numbers[test] + 1
                scores = _times(logits[test].astype(np.float64), weights[own]) + biases[own]
                losses_of[test] = _losses(scores, labels[test])
        best = losses[int(np.argmin(losses.mean(axis=1)))]
        for losses_of, penalty in zip(losses, _PENALTIES, strict=True):
            difference = losses_of - best
            if difference.mean() <= difference.std(ddof=1) / np.sqrt(n):
                return base, penalty
        raise AssertionError("the best is within its own standard error")


def _common(base: str, logits: NDArray[Any], labels: NDArray[np.int64]) -> AffineMap:
    """The map of all rows, with a weight and a bias for each class."""
    mapping = SCALERS[base].load()().fit(logits, labels).affine_map()
    c = logits.shape[1]
    bias = np.zeros(c) if mapping.bias is None else mapping.bias
    return AffineMap(np.broadcast_to(mapping.weight, (c,)).copy(), bias)


def _as_groups(groups: ArrayLike, n: int) -> NDArray[np.str_]:
    names = np.asarray(groups)
    if names.shape != (n,):
        way_out = "give one name for each row of the logits"
        raise InputValueError(expected("groups", f"have shape ({n},)", f"shape {names.shape}", way_out))
    if names.dtype.kind == "O":
        others = [type(name).__name__ for name in names.tolist() if not isinstance(name, str | int)]
        if others:
            raise InputValueError(
                expected("groups", "hold words or integers", few(sorted(set(others))), "name each group")
            )
    elif names.dtype.kind not in "Uiu":
        raise InputValueError(
            expected("groups", "hold words or integers", f"dtype {names.dtype}", "name each group")
        )
    return names.astype(str)


def _numbered(names: NDArray[np.str_]) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64]]:
    """The names in order, the number of each row's, and how many rows each has."""
    found, numbers, sizes = np.unique(names, return_inverse=True, return_counts=True)
    return found.tolist(), numbers.astype(np.int64), sizes.astype(np.int64)


def _times(logits: FloatArray, weights: FloatArray) -> FloatArray:
    """Row by row; what is masked by -inf stays so, whatever its weight."""
    masked = np.isneginf(logits)
    product = np.where(masked, 0, logits) * weights
    product[masked] = -np.inf
    return product


def _losses(logits: FloatArray, labels: NDArray[np.int64]) -> FloatArray:
    """Negative log-likelihood of each row, (N,)."""
    found: FloatArray = -log_softmax(logits, axis=1)[np.arange(len(labels)), labels]
    return found
