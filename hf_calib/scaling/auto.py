"""The affine map that suits the data, chosen by cross-validation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import check
from hf_calib.metrics.checks import check_seed
from hf_calib.scaling._base import n_masked
from hf_calib.scaling._inputs import FloatArray
from hf_calib.scaling.affine import AffineMap, AffineScaling
from hf_calib.scaling.linear import (
    MatrixScaling,
    Solution,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    VectorScaling,
)
from hf_calib.scaling.newton import LEFT_TO_GAIN, Rows
from hf_calib.scaling.temperature import ScaledLoss, temperatures_by_label

_MATRIX_COST = 5e8  # N C^2, above which each fit of a matrix would take seconds
CHOSEN_ON = 20_000  # rows that choose: enough to tell a thousandth of a nat
ROUGHLY = 1e-5  # nats per row, short of the minimum, that the fits on parts of the rows may be
# A dozen candidates make the best one look better than it is, and with few rows the freer ones look best where they
# fail. By benchmarks/choice_rules.py no setting then ends more than .002 nats above the temperature, but where the
# logits may stay as they are with fewer rows: standard errors miss the rare row that is wrong with high confidence.
_STANDARD_ERRORS, _OF_FREE_MAPS = 2, 3
_MANY, _ENOUGH = (
    1000,
    300,
)  # rows, from which on freer maps need no more than the others, and the logits may stay
_FIRM = "(penalty=1)"  # maps with this penalty are never far from a temperature
_CLEARLY_WORSE = 2  # standard errors: maps that are freer still are then worse too
# Where next to all rows are right, a free map is the surest of everything: on 50 right rows of scikit-learn's digits
# one ended .47 nats above the temperature.
_FEWEST_WRONG = 5
_PENALTIES = (1.0, 0.1, 0.01, 0.001)  # from the simplest map to the freest


@dataclass
class _Candidate:
    """A map that is compared, and what cross-validation found."""

    method: str
    penalty: float | None
    n_parameters: int
    left_out: str | None
    solve: Callable[[Rows, Solution | None, float], Solution]
    losses: FloatArray | None = None  # (N,)
    on_top: float = 1.0  # the temperature of the mapped rows

    @property
    def name(self) -> str:
        return self.method if self.penalty is None else f"{self.method}(penalty={self.penalty:g})"

    @property
    def kind(self) -> str:
        """Maps of one kind differ in their penalties; each is fitted from the one before."""
        return self.method.removeprefix("structured_")

    def result(self, of_temperature: FloatArray, choice: str) -> dict[str, Any]:
        """A row of `results_`."""
        row: dict[str, Any] = {
            "method": self.method,
            "penalty": self.penalty,
            "n_parameters": self.n_parameters,
        }
        row |= dict.fromkeys(("nll", "standard_error", "difference", "difference_standard_error"))
        if self.losses is not None:
            row["nll"], row["standard_error"] = mean_and_error(self.losses)
            row["difference"], row["difference_standard_error"] = mean_and_error(self.losses - of_temperature)
        return row | {"chosen": self.name == choice, "left_out": self.left_out}


class AutoScaling(AffineScaling):
    r"""Choose the affine map of the logits that suits the data, by cross-validation, and fit it.

    For when you do not know whether your data carry more than a temperature. It compares the logits as they are,
    `TemperatureScaling`, `VectorScaling`, `MatrixScaling`, and `StructuredVectorScaling` and `StructuredMatrixScaling`
    with several penalties. It can change the predicted class.

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
        Each candidate is fitted on all parts but one, and maps the rows of that one. As a map is over-confident for
        rows that it was not fitted on, a temperature is then fitted on the mapped rows of the other parts, and the loss
        of the rows judged with it. Chosen is the least d + 2 SE(d), where d is the mean difference to the temperature's
        loss, row by row; with fewer than 1,000 rows the least d + 3 SE(d) for maps that are freer than those with a
        penalty of 1, and for the logits as they are, which may win on at least 300 rows. Of more than 20,000 rows, a
        random 20,000 choose. The chosen map is fitted again on all rows, with the temperature of all mapped rows on
        top: one affine map in the end. Only this fit warns.

        Not tried are: anything freer than a temperature where fewer than 5 rows (or decisions) are wrong; freer maps
        of a kind once a smaller penalty is worse by two standard errors; a matrix where a class is masked, where
        there are two classes (`StructuredVectorScaling` is then as good) or where N C^2 is above 5e8.

        Rows count as independent. The tokens of one text are not quite: a freer map is then chosen a little too easily.

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
        """Choose the map, and fit it."""
        check_folds(self.n_folds)
        rows = Rows.checked(logits, labels, multi_label=self.multi_label)
        if rows.known is not None:  # a part of rows that tell nothing could not be judged
            rows = rows[rows.known.any(axis=1)]
        n = len(rows)
        candidates = _candidates(rows)
        # Not stratified by class: parts with the frequencies of the sample would reward a map that learns these,
        # by what it loses on rows whose frequencies are not those of the sample.
        rng = np.random.default_rng(check_seed(self.random_state, "random_state"))
        folds = rng.permutation(np.arange(n) % min(self.n_folds, n))
        sample = rng.choice(n, CHOSEN_ON, replace=False) if n > CHOSEN_ON else slice(None)
        _try_all(candidates, rows[sample], folds[sample])
        losses = {each.name: each.losses for each in candidates if each.losses is not None}
        self.choice_ = choose(losses)
        self.results_ = [each.result(losses["temperature"], self.choice_) for each in candidates]
        chosen = next(each for each in candidates if each.name == self.choice_)
        if n > CHOSEN_ON:  # fits of all rows need less of a temperature on top than those of the sample
            chosen.on_top = _cross_validated(chosen, rows, folds, {})[1]
        loss = ScaledLoss(rows)
        temperature = loss.best_temperature()
        loss.warn(temperature)
        found = chosen.solve(rows, Solution(temperature), LEFT_TO_GAIN).map
        self.weight_, bias = found.then(AffineMap(np.array(1 / chosen.on_top)))
        self.bias_ = np.zeros(rows.logits.shape[1]) if bias is None else bias
        return self


def check_folds(n_folds: Any) -> None:
    holds = isinstance(n_folds, Integral) and int(n_folds) >= 2
    way_out = "5 is enough; more folds cost more fits"
    check(holds, "n_folds to be an integer of at least 2", repr(n_folds), way_out)


def _candidates(rows: Rows) -> list[_Candidate]:
    """From the simplest to the freest."""
    n, c = rows.logits.shape
    n_wrong, cost = rows.n_wrong, n * c**2
    why_not = no_matrix = None
    if n == 1:  # a freer map would be judged by the row that it was fitted on
        why_not = "one row does not tell more than a temperature"
    elif n_wrong < _FEWEST_WRONG:
        why_not = f"{n_wrong} wrong rows do not tell more than a temperature"
    elif n_masked(rows.logits):
        no_matrix = "it would mix masked classes with the others"
    elif c == 2:
        no_matrix = "for two classes it is no more than a vector map"
    elif cost > _MATRIX_COST:
        no_matrix = f"N C^2 = {cost:.1e} is more than {_MATRIX_COST:.0e}: its fits would take too long"
    found = [
        _Candidate("identity", None, 0, None, lambda *_: Solution(1.0)),
        _Candidate("temperature", None, 1, None, partial(_divided, by_label=False)),
    ]
    if rows.sigmoid:
        found.append(_Candidate("per_label_temperature", None, c, why_not, partial(_divided, by_label=True)))
    own = 2 if c == 2 and not rows.sigmoid else 2 * c
    for penalty in _PENALTIES:
        solve = StructuredVectorScaling(penalty).solve
        found.append(_Candidate("structured_vector", penalty, own, why_not, solve))
    if rows.sigmoid:
        return found
    found.append(_Candidate("vector", None, 2 * c, why_not, VectorScaling().solve))
    between, no_matrix = c * (c + 1), why_not or no_matrix
    for penalty in _PENALTIES:
        solve = StructuredMatrixScaling(penalty).solve
        found.append(_Candidate("structured_matrix", penalty, between, no_matrix, solve))
    return [*found, _Candidate("matrix", None, between, no_matrix, MatrixScaling().solve)]


def _divided(rows: Rows, near: Solution | None, _: float, *, by_label: bool) -> Solution:
    shared = ScaledLoss(rows).best_temperature() if near is None else near.temperature
    return Solution(
        shared, AffineMap(1 / (temperatures_by_label(rows, shared)[0] if by_label else np.array(shared)))
    )


def _try_all(candidates: list[_Candidate], rows: Rows, folds: NDArray[np.int64]) -> None:
    """Cross-validate the candidates, and leave out those of a kind that a smaller penalty has made worse."""
    found: dict[tuple[str, int], Solution] = {}
    last: dict[str, FloatArray] = {}
    worse: dict[str, str] = {}
    for candidate in candidates:
        if candidate.method != "matrix":  # whose penalties are others
            candidate.left_out = candidate.left_out or worse.get(candidate.kind)
        if candidate.left_out is not None:
            continue
        losses, candidate.on_top = _cross_validated(candidate, rows, folds, found)
        candidate.losses = losses
        if candidate.kind in last:
            difference, error = mean_and_error(losses - last[candidate.kind])
            if difference > _CLEARLY_WORSE * error:
                worse[candidate.kind] = f"{candidate.name} was clearly worse than with a larger penalty"
        last[candidate.kind] = losses


def _cross_validated(
    candidate: _Candidate, rows: Rows, folds: NDArray[np.int64], found: dict[tuple[str, int], Solution]
) -> tuple[FloatArray, float]:
    """The loss of each row (N,), and the temperature on top; `found` has the last fit of each kind, by fold."""
    mapped = np.empty(rows.logits.shape)
    for fold, (train, held_out) in enumerate(parts(folds)):
        near = found.get((candidate.kind, fold), found.get(("temperature", fold)))
        solution = candidate.solve(rows[train], near, ROUGHLY)
        found[candidate.kind, fold] = solution
        mapped[held_out] = solution.map(rows.logits[held_out])
    if candidate.kind in ("identity", "temperature"):
        return rows.losses(mapped), 1.0
    mapped_rows = rows.with_logits(mapped)
    scale = np.empty((len(rows), 1))
    for train, held_out in parts(folds):
        scale[held_out] = ScaledLoss(mapped_rows[train]).best_temperature(1.0)
    return rows.losses(mapped / scale), ScaledLoss(mapped_rows).best_temperature(1.0)


def parts(folds: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """The rows to fit on and those to judge by, fold by fold; with one row, that one for both."""
    for fold in range(folds.max() + 1):
        held_out = folds == fold
        yield (held_out if held_out.all() else ~held_out), held_out


def choose(losses: Mapping[str, FloatArray], standard_errors: float | None = None) -> str:
    """Name the map to take: that of the least d + k SE(d), d being the mean difference to the temperature, row by row.

    k is 2 for penalties of 1, and for all maps from `_MANY` rows on, else 3; or `standard_errors` for all.
    """
    n_rows = len(losses["temperature"])

    def upper_end(name: str) -> float:
        difference, error = mean_and_error(losses[name] - losses["temperature"])
        k = _STANDARD_ERRORS if n_rows >= _MANY or name.endswith(_FIRM) else _OF_FREE_MAPS
        return difference + (k if standard_errors is None else standard_errors) * error

    return min((name for name in losses if name != "identity" or n_rows >= _ENOUGH), key=upper_end)


def mean_and_error(values: FloatArray) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
