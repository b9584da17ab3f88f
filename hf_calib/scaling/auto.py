"""The affine map that suits the data, chosen by cross-validation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib.metrics.checks import FloatArray, check_draws, check_integer
from hf_calib.scaling import affine
from hf_calib.scaling._base import n_masked
from hf_calib.scaling.affine import AffineMap, AffineScaling
from hf_calib.scaling.newton import LEFT_TO_GAIN, Rows, ScaledLoss
from hf_calib.scaling.saved_map import method_of

_MATRIX_COST = 5e8  # N C^2, above which each fit of a matrix would take seconds
CHOSEN_ON = 20_000  # rows that choose: enough to tell a thousandth of a nat
ROUGHLY = 1e-5  # nats per row, short of the minimum, that the fits on parts of the rows may be
# With few rows the freer of a dozen candidates look best where they fail, and standard errors miss the rare row that is
# wrong with high confidence. By benchmarks/choice_rules.py no setting ends more than .002 nats above the temperature.
_STANDARD_ERRORS, _OF_FREE_MAPS = 2, 3
_MANY = 1000  # rows, from which on freer maps need no more than the others
_ENOUGH = 300  # rows, from which on the logits may stay
_FIRM = "(penalty=1)"  # maps with this penalty are never far from a temperature
_CLEARLY_WORSE = 2  # standard errors: maps that are freer still are then worse too
_FEWEST_WRONG = 5  # rows: on 50 right ones a free map ended .47 nats above the temperature
_PENALTIES = (1.0, 0.1, 0.01, 0.001)  # from the simplest map to the freest


@dataclass
class _Candidate:
    """A map that is compared, and what cross-validation found."""

    scaler: Any  # one that folds, or None for the logits as they are
    n_parameters: int
    left_out: str | None = None
    losses: FloatArray | None = None  # (N,)
    on_top: float = 1.0  # the temperature of the mapped rows

    def __post_init__(self) -> None:
        self.method = "identity" if self.scaler is None else method_of(self.scaler)
        self.penalty = getattr(self.scaler, "penalty", None)
        self.name = self.method if self.penalty is None else f"{self.method}(penalty={self.penalty:g})"

    def solve(self, *fit: Any) -> AffineMap:
        return AffineMap(np.array(1.0)) if self.scaler is None else self.scaler.solve(*fit)

    def judged(self, of_temperature: FloatArray, choice: str) -> dict[str, Any]:
        """Its entry in `results_`."""
        losses = () if self.losses is None else (self.losses, self.losses - of_temperature)
        numbers = [number for each in losses for number in mean_and_error(each)]
        names = ("nll", "standard_error", "difference", "difference_standard_error")
        about = {"method": self.method, "penalty": self.penalty, "n_parameters": self.n_parameters}
        about |= dict(zip_longest(names, numbers))
        return about | {"chosen": self.name == choice, "left_out": self.left_out}


class AutoScaling(AffineScaling):
    r"""Choose the affine map of the logits that suits the data, by cross-validation, and fit it.

    It compares the logits as they are with a temperature, vectors and matrices, structured ones with several penalties;
    of several labels a row with `PerLabelTemperatureScaling`, and no matrix.

    Args:
        n_folds: random parts of the cross-validation, at least 2; with fewer rows, one part per row.
        random_state: seed of the parts.

    Attributes:
        choice_: the chosen method, a key of `SCALERS` or "identity", such as "structured_matrix(penalty=0.1)".
        results_: a dict per candidate: "method", "penalty", "n_parameters", "nll" (cross-validated, nats a row),
            "standard_error", "difference" to the temperature, "difference_standard_error", "chosen", and "left_out",
            why it was not tried, or None.

    Notes:
        Each candidate is judged, and used, with a temperature on top, fitted on rows held out. Chosen is the least
        d + 2 SE(d), where d is the mean difference to the temperature's loss, row by row: the rule of how many rows
        and wrong ones a freer map takes is on the page of reference.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(scale=2, size=(1000, 3))
    >>> labels = (logits + [0, 0, 2] + rng.gumbel(size=(1000, 3))).argmax(axis=1)
    >>> scaler = AutoScaling().fit(2 * logits, labels)
    >>> scaler.choice_, scaler.bias_.round(1)
    ('structured_vector(penalty=1)', array([-0.7, -0.5,  1.3]))
    """

    def __init__(self, n_folds: int = 5, *, multi_label: bool = False, random_state: int = 0) -> None:
        self.n_folds = n_folds
        self.multi_label = multi_label
        self.random_state = random_state

    def __repr__(self, *args: Any) -> str:
        """The settings; once fitted, the choice, and the temperature where the map is one."""
        settings = super().__repr__(*args)
        choice = getattr(self, "choice_", "")
        temperature = f", T = {1 / float(self.weight_):.4g}" if choice == "temperature" else ""
        return f"{settings}: {choice}{temperature}" if choice else settings

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> AutoScaling:
        """Choose the map, and fit it."""
        check_integer("n_folds", self.n_folds, 2, "5 is enough; more folds cost more fits")
        rows = Rows.checked(logits, labels, multi_label=self.multi_label)
        if rows.known is not None:  # a part of rows that tell nothing could not be judged
            rows = rows[rows.known.any(axis=1)]
        n = len(rows)
        # Not stratified by class: parts with the frequencies of the sample would reward a map that learns these,
        # by what it loses on rows whose frequencies are not those of the sample.
        rng = check_draws(1, self.random_state, seed_name="random_state")
        folds = rng.permutation(np.arange(n) % min(self.n_folds, n))
        sample = rng.choice(n, CHOSEN_ON, replace=False) if n > CHOSEN_ON else slice(None)
        families = _candidates(rows)
        _cross_validate(families, rows[sample], folds[sample])
        candidates = {each.name: each for family in families for each in family}
        losses = {name: each.losses for name, each in candidates.items() if each.losses is not None}
        self.choice_ = choose(losses)
        self.results_ = [each.judged(losses["temperature"], self.choice_) for each in candidates.values()]
        chosen = candidates[self.choice_]
        if n > CHOSEN_ON:  # fits of all rows need less of a temperature on top than those of the sample
            _cross_validate([[chosen]], rows, folds)
        loss = ScaledLoss(rows)
        temperature = loss.best_temperature()
        loss.warn(temperature)
        found = chosen.solve(rows, temperature, None, LEFT_TO_GAIN)
        self.weight_, bias = found.then(AffineMap(np.array(1 / chosen.on_top)))
        self.bias_ = np.zeros(rows.logits.shape[1]) if bias is None else bias
        return self


def _candidates(rows: Rows) -> list[list[_Candidate]]:
    """Families of maps, each from the simplest to the freest."""
    n, c = rows.logits.shape
    wrong = (rows.logits > 0 if rows.sigmoid else rows.logits.argmax(axis=1)) != rows.labels
    n_wrong = np.count_nonzero(wrong if rows.known is None else wrong & rows.known)
    why_not = no_matrix = None
    if n == 1:  # a freer map would be judged by the row that it was fitted on
        why_not = "one row does not tell more than a temperature"
    elif n_wrong < _FEWEST_WRONG:
        why_not = f"{n_wrong} wrong rows do not tell more than a temperature"
    elif n_masked(rows.logits):
        no_matrix = "it would mix masked classes with the others"
    elif c == 2:
        no_matrix = "for two classes it is no more than a vector map"
    elif n * c**2 > _MATRIX_COST:
        no_matrix = f"N C^2 = {n * c**2:.1e} is more than {_MATRIX_COST:.0e}: its fits would take too long"
    no_matrix = why_not or no_matrix
    own = 2 if c == 2 and not rows.sigmoid else 2 * c
    families = [[_Candidate(None, 0)], [_Candidate(affine.TemperatureScaling(), 1)]]
    vectors = [_Candidate(affine.StructuredVectorScaling(each), own, why_not) for each in _PENALTIES]
    if rows.sigmoid:
        return [*families, [_Candidate(affine.PerLabelTemperatureScaling(), c, why_not)], vectors]
    vectors.append(_Candidate(affine.VectorScaling(), 2 * c, why_not))
    own = c * (c + 1)
    matrices = [_Candidate(affine.StructuredMatrixScaling(each), own, no_matrix) for each in _PENALTIES]
    return [*families, vectors, matrices, [_Candidate(affine.MatrixScaling(), own, no_matrix)]]


def _cross_validate(families: list[list[_Candidate]], rows: Rows, folds: NDArray[np.int64]) -> None:
    """Find the losses of the maps, and leave out those that are freer than a clearly worse one of their family."""
    splits = list(parts(folds))
    temperatures = [ScaledLoss(rows[train]).best_temperature() for train, _ in splits]
    mapped = np.empty(rows.logits.shape)
    for family in families:
        near: list[AffineMap | None] = [None] * len(splits)
        worse, last = None, None
        for candidate in family:
            candidate.left_out = candidate.left_out or worse
            if candidate.left_out is not None:
                continue
            for fold, (train, held_out) in enumerate(splits):
                near[fold] = found = candidate.solve(rows[train], temperatures[fold], near[fold], ROUGHLY)
                mapped[held_out] = found(rows.logits[held_out])
            scales = np.ones((len(rows), 1))
            if candidate.method not in ("identity", "temperature"):
                mapped_rows = rows.with_logits(mapped)
                for train, held_out in splits:
                    scales[held_out] = ScaledLoss(mapped_rows[train]).best_temperature(1.0)
                candidate.on_top = ScaledLoss(mapped_rows).best_temperature(1.0)
            candidate.losses = rows.losses(mapped / scales)
            if last is not None:
                difference, error = mean_and_error(candidate.losses - last)
                if difference > _CLEARLY_WORSE * error:
                    worse = f"{candidate.name} was clearly worse than with a larger penalty"
            last = candidate.losses


def parts(folds: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """The rows to fit on and to judge by, fold by fold; with one row, that one for both."""
    for fold in range(folds.max() + 1):
        held_out = folds == fold
        yield (held_out if held_out.all() else ~held_out), held_out


def choose(losses: Mapping[str, FloatArray], standard_errors: float | None = None) -> str:
    """Name the map of the least d + k SE(d) by the rule of `AutoScaling`, or with one k, `standard_errors`, for all."""
    n_rows = len(losses["temperature"])

    def upper_end(name: str) -> float:
        difference, error = mean_and_error(losses[name] - losses["temperature"])
        k = _STANDARD_ERRORS if n_rows >= _MANY or name.endswith(_FIRM) else _OF_FREE_MAPS
        return difference + (k if standard_errors is None else standard_errors) * error

    return min((name for name in losses if name != "identity" or n_rows >= _ENOUGH), key=upper_end)


def mean_and_error(values: FloatArray) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
