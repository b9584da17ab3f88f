"""The affine map that suits the data, chosen by cross-validation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, log_expit, log_softmax

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.checks import check_flag, check_seed
from hf_calib.scaling._base import AffineScaling, n_masked, softmax_in_place
from hf_calib.scaling._inputs import FloatArray, as_binary_labels, as_class_labels, as_matrix
from hf_calib.scaling._linear import Near
from hf_calib.scaling._objectives import Objective, SigmoidObjective, SoftmaxObjective
from hf_calib.scaling._solver import best_temperature
from hf_calib.scaling.affine import AffineMap
from hf_calib.scaling.per_label_temperature import PerLabelTemperatureScaling
from hf_calib.scaling.structured import StructuredMatrixScaling, StructuredVectorScaling
from hf_calib.scaling.temperature import TemperatureScaling
from hf_calib.scaling.vector_matrix import MatrixScaling, VectorScaling

_MATRIX_COST = 5e8  # N C^2, above which a matrix is not tried: each of its fits would take seconds
_CHOSEN_ON = 20_000  # rows at most: enough to tell a thousandth of a nat
# That a map's gain over the temperature has to exceed: a dozen candidates make the best one look better than it is, and
# with few rows the freer ones look best where they fail. By benchmarks/choice_rules.py, in which no setting then ends
# more than .002 nats above the temperature.
_STANDARD_ERRORS, _OF_FREE_MAPS = 2, 3
_MANY = 1000  # rows, from which on freer maps need no more than the others
_FIRM = "(penalty=1)"  # of the maps that are never far from a temperature
_CLEARLY_WORSE = 2  # standard errors: maps that are freer still are then worse too
# Rows from which on the logits may stay as they are: with fewer, standard errors miss the rare row that is wrong with
# high confidence, and a network's loss ended up to .13 nats above the temperature's (benchmarks/choice_rules.py).
_ENOUGH = 300
# Where next to all rows are right, being surer of everything looks good on each part, and a free map is the surest:
# on 50 right rows of scikit-learn's digits one ended .47 nats above the temperature.
_FEWEST_WRONG = 5
_ROUGHLY = 1e-5  # nats per row, short of the minimum, that the fits on parts of the rows may be
_PENALTIES = (1.0, 0.1, 0.01, 0.001)  # from the simplest map to the freest


_Fits = dict[tuple[str, int], Near]


class _Candidate(NamedTuple):
    method: str
    penalty: float | None
    make: Callable[[], Any] | None  # None: the logits as they are
    n_parameters: int
    left_out: str | None = None

    @property
    def name(self) -> str:
        return self.method if self.penalty is None else f"{self.method}(penalty={self.penalty:g})"


class _Trial(NamedTuple):
    """By name, the cross-validated loss of each row and, if all rows were in it, the temperature on top."""

    candidates: list[_Candidate]
    losses: dict[str, FloatArray]
    folds: NDArray[np.int64]
    temperatures: dict[str, float]


class AutoScaling(AffineScaling):
    r"""Choose the affine map of the logits that suits the data, by cross-validation, and fit it.

    For when you do not know whether your data carry more than a temperature. It compares the logits as they
    are, `TemperatureScaling`, `StructuredVectorScaling`, `VectorScaling`, `StructuredMatrixScaling` and
    `MatrixScaling`, the structured ones with several penalties, and takes the one that gains
    most over the temperature, less the noise of its gain. It can change the predicted class.

    Args:
        n_folds: random parts of the cross-validation, at least 2; with fewer rows, one part per row. One row alone
            gets a temperature.
        multi_label: True for sigmoid outputs with a 0/1 label per logit. Compared are then the logits, one
            temperature, `PerLabelTemperatureScaling` and `StructuredVectorScaling`.
        random_state: seed of the parts.

    Attributes:
        choice_: the chosen method, a key of `SCALERS` or "identity", with its penalty:
            "structured_matrix(penalty=0.1)".
        results_: a dict per candidate: "method", "penalty", "n_parameters", "nll" (cross-validated, nats per
            row), "standard_error", "difference" to the temperature and "difference_standard_error",
            "chosen", and "left_out": why it was not tried, or None.
        weight_: () or (C,), which multiplies the logits, or (C, C), which mixes them.
        bias_: (C,).

    Notes:
        Each candidate is fitted on all parts but one, and maps the rows of that one. A map that is right for
        the rows it was fitted on is over-confident for others, so a temperature is then fitted on the mapped
        rows of the other parts, and the loss of the rows judged with it. Chosen is the least d + 2 SE(d), where
        d is the mean difference to the temperature's loss, row by row; with fewer than 1,000 rows the least
        d + 3 SE(d) for maps that are freer than those with a penalty of 1, and for the logits as they are, which may
        win on at least 300 rows. Once a smaller penalty is worse by two standard errors, freer maps of the kind are not
        tried. The chosen map is fitted again on all rows, with the temperature of all mapped rows on top: one
        affine map in the end. Only this fit warns. Of more than 20,000 rows, a random 20,000 choose, and all are
        fitted.

        Nothing freer than a temperature is tried where fewer than 5 rows (or decisions) are wrong.

        A matrix is not tried where a class is masked, where there are two classes (`StructuredVectorScaling`
        is then as good) or where N C^2 is above 5e8, as its fits would take too long.

        Rows count as independent. The tokens of one text, which end in different parts, are not quite: a freer
        map is then chosen a little too easily.

    References:
        The maps: see their classes. The rule is ours; benchmarks/choice_rules.py compares it with others.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(scale=2, size=(1000, 3))
    >>> labels = (logits + [0, 0, 2] + rng.gumbel(size=(1000, 3))).argmax(axis=1)
    >>> scaler = AutoScaling().fit(2 * logits, labels)
    >>> scaler.choice_, scaler.bias_.round(1)
    ('structured_vector(penalty=1)', array([-0.7, -0.5,  1.3]))
    """

    choice_: str
    results_: list[dict[str, Any]]

    def __init__(self, n_folds: int = 5, *, multi_label: bool = False, random_state: int = 0) -> None:
        self.n_folds = n_folds
        self.multi_label = multi_label
        self.random_state = random_state

    def __repr__(self, *args: Any) -> str:
        """The settings; once fitted, the choice, and the temperature where the map is one."""
        settings = super().__repr__(*args)
        if not hasattr(self, "choice_"):
            return settings
        temperature = f", T = {1 / float(self.weight_):.4g}" if self.choice_ == "temperature" else ""
        return f"{settings}: {self.choice_}{temperature}"

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> AutoScaling:
        """Choose the map, and fit it.

        Args:
            logits: (N, C), any real dtype, read in float64; -inf masks a class that is not the label.
            labels: (N,) int in [0, C), without -100; with multi_label, (N, C) of 0 and 1, and -100 where a
                label is not known.

        Returns:
            self, with `weight_`, `bias_`, `choice_` and `results_`.

        Raises:
            TypeError: if a dtype is wrong.
            ValueError: if a parameter, a shape or a value is wrong.
        """
        matrix, targets = self._checked(logits, labels)
        trial = self._tried(matrix, targets)
        self._take(choose(trial.losses), trial, matrix, targets)
        self.results_ = []
        for candidate in trial.candidates:
            score = dict.fromkeys(("nll", "standard_error", "difference", "difference_standard_error"))
            if candidate.left_out is None:
                loss = trial.losses[candidate.name]
                numbers = (*_mean(loss), *_mean(loss - trial.losses["temperature"]))
                score = dict(zip(score, numbers, strict=True))
            self.results_.append(
                {
                    "method": candidate.method,
                    "penalty": candidate.penalty,
                    "n_parameters": candidate.n_parameters,
                    **score,
                    "chosen": candidate.name == self.choice_,
                    "left_out": candidate.left_out,
                }
            )
        return self

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        """Return the calibrated probabilities: the softmax of `transform`, or the sigmoid with multi_label."""
        scaled = self.transform(logits)
        return expit(scaled, out=scaled) if self.multi_label else softmax_in_place(scaled)

    def _checked(self, logits: ArrayLike, labels: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
        if not (isinstance(self.n_folds, Integral) and self.n_folds >= 2):
            way_out = "5 is enough; more folds cost more fits"
            raise InputValueError(
                expected("n_folds", "be an integer of at least 2", repr(self.n_folds), way_out)
            )
        check_flag("multi_label", self.multi_label)
        matrix = as_matrix(logits, least_columns=1 if self.multi_label else 2)
        if self.multi_label:
            _, known = as_binary_labels(labels, matrix)
            targets: NDArray[Any] = np.asarray(labels)
            if known is not None:  # a part of rows that tell nothing could not be judged
                matrix, targets = matrix[known.any(axis=1)], targets[known.any(axis=1)]
        else:
            targets = as_class_labels(labels, matrix)
        self._objective(matrix, targets)  # refuses a masked label
        return matrix, targets

    def _tried(self, matrix: NDArray[Any], targets: NDArray[Any]) -> _Trial:
        """Cross-validate what the rows can tell of."""
        candidates = list(self._candidates(matrix))
        why_not = None
        if len(matrix) == 1:  # a freer map would be judged by the row that it was fitted on
            why_not = "one row does not tell more than a temperature"
        elif (n_wrong := self._n_wrong(matrix, targets)) < _FEWEST_WRONG:
            why_not = f"{n_wrong} wrong rows do not tell more than a temperature"
        if why_not is not None:
            candidates[2:] = [candidate._replace(left_out=why_not) for candidate in candidates[2:]]
        # Not stratified by class: parts with the frequencies of the sample would reward a map that learns these,
        # by what it loses on rows whose frequencies are not those of the sample.
        folds = np.arange(len(matrix)) % min(self.n_folds, len(matrix))
        rng = np.random.default_rng(check_seed(self.random_state, "random_state"))
        folds = rng.permutation(folds)
        sample = np.arange(len(matrix))
        if len(matrix) > _CHOSEN_ON:
            sample = rng.choice(len(matrix), _CHOSEN_ON, replace=False)
        scored = self._scored(candidates, matrix[sample], targets[sample], folds[sample])
        losses = {name: loss for name, (loss, _) in scored.items()}
        # Of a sample they would be too large: fits of all rows need less of it.
        whole = len(sample) == len(matrix)
        temperatures = {name: temperature for name, (_, temperature) in scored.items()} if whole else {}
        return _Trial(candidates, losses, folds, temperatures)

    def _take(self, name: str, trial: _Trial, matrix: NDArray[Any], targets: NDArray[Any]) -> None:
        """Fit the candidate of a name on all rows, with the temperature of its mapped rows on top."""
        candidate = next(candidate for candidate in trial.candidates if candidate.name == name)
        temperature = trial.temperatures.get(name)
        if temperature is None:
            temperature = self._cross_validated(candidate, matrix, targets, trial.folds, {})[1]
        mapping = _fitted(candidate, matrix, targets).then(AffineMap(np.array(1 / temperature)))
        self.choice_ = name
        self.weight_ = mapping.weight
        self.bias_ = np.zeros(matrix.shape[1]) if mapping.bias is None else mapping.bias

    def _n_wrong(self, logits: NDArray[Any], labels: NDArray[Any]) -> int:
        """Rows, or decisions, that the logits have wrong."""
        if not self.multi_label:
            return int(np.count_nonzero(logits.argmax(axis=1) != labels))
        positive, known = as_binary_labels(labels, logits)
        wrong = (logits > 0) != positive
        return int(np.count_nonzero(wrong if known is None else wrong & known))

    def _objective(self, logits: NDArray[Any], labels: NDArray[Any]) -> Objective:
        if self.multi_label:
            return SigmoidObjective(logits, *as_binary_labels(labels, logits))
        return SoftmaxObjective(logits, labels)

    def _candidates(self, logits: NDArray[Any]) -> Iterator[_Candidate]:
        """From the simplest to the freest."""
        n, c = logits.shape
        multi_label = self.multi_label
        yield _Candidate("identity", None, None, 0)
        yield _Candidate("temperature", None, partial(TemperatureScaling, multi_label=multi_label), 1)
        if multi_label:
            yield _Candidate("per_label_temperature", None, PerLabelTemperatureScaling, c)
        for penalty in _PENALTIES:
            yield _Candidate(
                "structured_vector",
                penalty,
                partial(StructuredVectorScaling, penalty, multi_label=multi_label),
                2 if c == 2 and not multi_label else 2 * c,
            )
        if multi_label:
            return
        yield _Candidate("vector", None, VectorScaling, 2 * c)
        why_not = None
        if n_masked(logits):
            why_not = "it would mix masked classes with the others"
        elif c == 2:
            why_not = "for two classes it is no more than a vector map"
        elif n * c**2 > _MATRIX_COST:
            why_not = f"N C^2 = {n * c**2:.1e} is more than {_MATRIX_COST:.0e}: its fits would take too long"
        for penalty in _PENALTIES:
            yield _Candidate(
                "structured_matrix",
                penalty,
                partial(StructuredMatrixScaling, penalty),
                c * (c + 1),
                why_not,
            )
        yield _Candidate("matrix", None, MatrixScaling, c * (c + 1), why_not)

    def _scored(
        self,
        candidates: list[_Candidate],
        logits: NDArray[Any],
        labels: NDArray[Any],
        folds: NDArray[np.int64],
    ) -> dict[str, tuple[FloatArray, float]]:
        """By name, the loss of each row and the temperature on top; `candidates` are told which are left out."""
        scored: dict[str, tuple[FloatArray, float]] = {}
        fitted: _Fits = {}
        last: dict[str, FloatArray] = {}  # of each method, its last loss
        worse: dict[str, str] = {}  # methods that became worse on the way to freer maps, and where
        for position, candidate in enumerate(candidates):
            # Without a penalty a vector is the end of the structured ones.
            method = "structured_vector" if candidate.method == "vector" else candidate.method
            if method in worse and candidate.left_out is None:
                candidates[position] = candidate = candidate._replace(left_out=worse[method])
            if candidate.left_out is not None:
                continue
            scored[candidate.name] = self._cross_validated(candidate, logits, labels, folds, fitted)
            loss = scored[candidate.name][0]
            if method in last:
                difference, error = _mean(loss - last[method])
                if difference > _CLEARLY_WORSE * error:
                    worse[method] = f"{candidate.name} was clearly worse than with a larger penalty"
            last[method] = loss
        return scored

    def _cross_validated(
        self,
        candidate: _Candidate,
        logits: NDArray[Any],
        labels: NDArray[Any],
        folds: NDArray[np.int64],
        fitted: _Fits,
    ) -> tuple[FloatArray, float]:
        """The loss of each row (N,), and the temperature on top; `fitted` has the last fit of each kind, by fold."""
        if candidate.make is None:
            return self._losses(logits.astype(np.float64), labels), 1.0
        mapped = np.empty(logits.shape)
        kind = candidate.method.removeprefix("structured_")
        for fold, (train, held_out) in enumerate(_parts(folds)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scaler = candidate.make()
                scaler._left_to_gain = _ROUGHLY
                scaler._near = fitted.get((kind, fold), fitted.get(("temperature", fold)))
                mapped[held_out] = scaler.fit(logits[train], labels[train]).affine_map()(logits[held_out])
                if kind == "temperature":
                    fitted[kind, fold] = Near(scaler.temperature_)
                elif candidate.penalty is not None:
                    fitted[kind, fold] = scaler._found
        if candidate.method == "temperature":
            return self._losses(mapped, labels), 1.0
        losses = np.empty(len(labels))
        for train, held_out in _parts(folds):
            temperature = self._temperature(mapped[train], labels[train])
            losses[held_out] = self._losses(mapped[held_out] / temperature, labels[held_out])
        return losses, self._temperature(mapped, labels)

    def _temperature(self, logits: FloatArray, labels: NDArray[Any]) -> float:
        objective = self._objective(logits, labels)
        return 1.0 if objective.is_constant else best_temperature(objective, guess=1.0)  # of fitted maps

    def _losses(self, logits: FloatArray, labels: NDArray[Any]) -> FloatArray:
        """Negative log-likelihood of each row, (N,)."""
        if self.multi_label:
            positive, known = as_binary_labels(labels, logits)
            losses = -log_expit(np.where(positive, logits, -logits))
            return losses.sum(axis=1, where=True if known is None else known)
        return -log_softmax(logits, axis=1)[np.arange(len(labels)), labels]


def _parts(folds: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """The rows to fit on and those to judge by, fold by fold; with one row, that one for both."""
    for fold in range(folds.max() + 1):
        held_out = folds == fold
        yield (held_out if held_out.all() else ~held_out), held_out


def _fitted(candidate: _Candidate, logits: NDArray[Any], labels: NDArray[Any]) -> AffineMap:
    if candidate.make is None:
        return AffineMap(np.array(1.0))
    return candidate.make().fit(logits, labels).affine_map()


def choose(losses: Mapping[str, FloatArray], standard_errors: float | None = None) -> str:
    """Name the map to take, by the cross-validated loss of each row under each map.

    That of the least d + k SE(d), where d is the mean difference to the temperature, row by row: a freer map has to
    gain more than its noise. k is 2 for penalties of 1, and for all maps from 1,000 rows on, else 3; or
    `standard_errors` for all. The logits as they are may win from `_ENOUGH` rows on.
    """
    n_rows = len(losses["temperature"])

    def upper_end(name: str) -> float:
        difference, error = _mean(losses[name] - losses["temperature"])
        k = _STANDARD_ERRORS if n_rows >= _MANY or name.endswith(_FIRM) else _OF_FREE_MAPS
        return difference + (k if standard_errors is None else standard_errors) * error

    return min((name for name in losses if name != "identity" or n_rows >= _ENOUGH), key=upper_end)


def _mean(values: FloatArray) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
