"""Maps that cross-validation chooses: the affine map that suits the data, and maps of groups of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted

from hf_calib._errors import check, few
from hf_calib.metrics.checks import FloatArray, IntArray, check_choice, check_draws, check_integer
from hf_calib.scaling import SCALERS, affine
from hf_calib.scaling._base import LogitScaling, as_fitted_logits, n_masked, softmax_in_place
from hf_calib.scaling.affine import AffineMap, AffineScaling
from hf_calib.scaling.newton import LEFT_TO_GAIN, Ridges, Rows, ScaledLoss, fit_affine
from hf_calib.scaling.saved_map import method_of

_MATRIX_COST = 5e8  # N C^2, above which each fit of a matrix would take seconds
_CHOSEN_ON = 20_000  # rows that choose: enough to tell a thousandth of a nat
_ROUGHLY = 1e-5  # nats per row, short of the minimum, that the fits on parts of the rows may be
# With few rows the freer of a dozen candidates look best where they fail, and standard errors miss the rare row that is
# wrong with high confidence. By benchmarks/choice_rules.py no setting ends more than .002 nats above the temperature.
_STANDARD_ERRORS, _OF_FREE_MAPS = 2, 3
_MANY = 1000  # rows, from which on freer maps need no more than the others
_ENOUGH = 300  # rows, from which on the logits may stay
_FIRM = "(penalty=1)"  # maps with this penalty are never far from a temperature
_CLEARLY_WORSE = 2  # standard errors: maps that are freer still are then worse too
_FEWEST_WRONG = 5  # rows: on 50 right ones a free map ended .47 nats above the temperature
_PENALTIES = (1.0, 0.1, 0.01, 0.001)  # from the simplest map to the freest
_BASES = ("temperature", "structured_vector", "vector")  # maps that do not mix the classes
_OF_GROUPS = (np.inf, 100.0, 10.0, 1.0, 0.1)  # from one map for all to the freest


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
        numbers = [number for each in losses for number in _mean_and_error(each)]
        names = ("nll", "standard_error", "difference", "difference_standard_error")
        about = {"method": self.method, "penalty": self.penalty, "n_parameters": self.n_parameters}
        found = dict(zip_longest(names, numbers))
        return {**about, **found, "chosen": self.name == choice, "left_out": self.left_out}


class AutoScaling(AffineScaling):
    r"""Choose the affine map of the logits that suits the data, by cross-validation, and fit it.

    It compares the logits as they are with a temperature, vectors and matrices, structured ones with several penalties;
    of several labels a row with `PerLabelTemperatureScaling`, and no matrix. Each is judged, and used, with a
    temperature on top, fitted on rows held out. The page of reference has the rule.

    Args:
        n_folds: random parts of the cross-validation, at least 2; with fewer rows, one part per row.
        random_state: seed of the parts.

    Attributes:
        choice_: the chosen method, a key of `SCALERS` or "identity", such as "structured_matrix(penalty=0.1)".
        results_: a dict per candidate: "method", "penalty", "n_parameters", "nll" (cross-validated, nats a row),
            "standard_error", "difference" to the temperature, "difference_standard_error", "chosen", and "left_out",
            why it was not tried, or None.

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
        sample = rng.choice(n, _CHOSEN_ON, replace=False) if n > _CHOSEN_ON else slice(None)
        families = _candidates(rows)
        _cross_validate(families, rows[sample], folds[sample])
        candidates = {each.name: each for family in families for each in family}
        losses = {name: each.losses for name, each in candidates.items() if each.losses is not None}
        self.choice_ = choose(losses)
        self.results_ = [each.judged(losses["temperature"], self.choice_) for each in candidates.values()]
        chosen = candidates[self.choice_]
        if n > _CHOSEN_ON:  # fits of all rows need less of a temperature on top than those of the sample
            _cross_validate([[chosen]], rows, folds)
        loss = ScaledLoss(rows)
        temperature = loss.best_temperature()
        loss.warn(temperature)
        found = chosen.solve(rows, temperature, None, LEFT_TO_GAIN)
        on_top = AffineMap(np.array(1 / chosen.on_top), np.zeros(rows.logits.shape[1]))
        self.weight_, self.bias_ = found.then(on_top)  # type: ignore[assignment]
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
    splits = list(_parts(folds))
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
                near[fold] = found = candidate.solve(rows[train], temperatures[fold], near[fold], _ROUGHLY)
                mapped[held_out] = found(rows.logits[held_out])
            scales = np.ones((len(rows), 1))
            if candidate.method not in ("identity", "temperature"):
                mapped_rows = rows.with_logits(mapped)
                for train, held_out in splits:
                    scales[held_out] = ScaledLoss(mapped_rows[train]).best_temperature(1.0)
                candidate.on_top = ScaledLoss(mapped_rows).best_temperature(1.0)
            candidate.losses = rows.losses(mapped / scales)
            if last is not None:
                difference, error = _mean_and_error(candidate.losses - last)
                if difference > _CLEARLY_WORSE * error:
                    worse = f"{candidate.name} was clearly worse than with a larger penalty"
            last = candidate.losses


def _parts(folds: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """The rows to fit on and to judge by, fold by fold; with one row, that one for both."""
    for fold in range(folds.max() + 1):
        held_out = folds == fold
        yield (held_out if held_out.all() else ~held_out), held_out


def choose(losses: Mapping[str, FloatArray], standard_errors: float | None = None) -> str:
    """Name the map of the least d + k SE(d) by the rule of `AutoScaling`, or with one k, `standard_errors`, for all."""
    n_rows = len(losses["temperature"])

    def upper_end(name: str) -> float:
        difference, error = _mean_and_error(losses[name] - losses["temperature"])
        k = _STANDARD_ERRORS if n_rows >= _MANY or name.endswith(_FIRM) else _OF_FREE_MAPS
        return difference + (k if standard_errors is None else standard_errors) * error

    return min((name for name in losses if name != "identity" or n_rows >= _ENOUGH), key=upper_end)


def _mean_and_error(values: FloatArray) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


class GroupedScaling(LogitScaling):
    r"""Give each group of rows its own scale and offset of each class, drawn to the map of all rows.

    $$\hat p = \mathrm{softmax}((1 + v_g) \odot m(z) + b_g), \qquad \min_{v_g, b_g} \mathrm{NLL}_g
      + \lambda \frac{C}{N_g} (|v_g|^2 + |b_g|^2)$$

    Args:
        base: the common map m: "temperature", "structured_vector", "vector", or "auto": the second rather than the
            first where its cross-validated loss is less by two standard errors.
        n_folds, random_state: as of `AutoScaling`.

    Attributes:
        groups_, sizes_: (G,) the names of the groups, in order, and the rows of each.
        weights_, biases_: (G + 1, C), of all rows, then of each group.
        choice_: λ, "penalty=1", or "one map for all"; with "auto" the common map first: "structured_vector, penalty=1".
            It is the largest of infinity, 100, 10, 1, .1 whose cross-validated loss is within a standard error.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(scale=2, size=(4000, 3))
    >>> groups = np.repeat(["art", "law"], 2000)
    >>> offsets = np.where(groups[:, None] == "law", [0, 0, 1.5], 0)  # the third answer is right more often
    >>> labels = (logits / 2 + offsets + rng.gumbel(size=(4000, 3))).argmax(axis=1)
    >>> scaler = GroupedScaling().fit(logits, labels, groups=groups)
    >>> scaler.groups_, round(float(scaler.biases_[2, 2]), 1)
    (['art', 'law'], 1.0)
    """

    def __init__(self, base: str = "auto", *, n_folds: int = 5, random_state: int = 0) -> None:
        self.base = base
        self.n_folds = n_folds
        self.random_state = random_state

    def fit(self, logits: ArrayLike, labels: ArrayLike, *, groups: ArrayLike) -> GroupedScaling:
        """Fit the common map, choose the ridge, and fit each group's; groups (N,) are words or integers."""
        check_choice("base", self.base, ("auto", *_BASES))
        check_integer("n_folds", self.n_folds, 2, "5 is enough; more folds cost more fits")
        rows = Rows.checked(logits, labels)
        names = _as_groups(groups, len(rows))
        names, numbers, self.sizes_ = np.unique(names, return_inverse=True, return_counts=True)
        self.groups_, self.n_classes_ = names.tolist(), rows.logits.shape[1]
        base, penalty = self._chosen(rows, numbers + 1)
        choice = "one map for all" if penalty == np.inf else f"penalty={penalty:g}"
        self.choice_ = f"{base}, {choice}" if self.base == "auto" else choice
        maps = self._maps(rows, numbers + 1, penalty, _common(base, rows), LEFT_TO_GAIN)
        self.weights_, self.biases_ = (np.stack(each) for each in zip(*maps, strict=True))
        return self

    def transform(self, logits: ArrayLike, *, groups: ArrayLike | None = None) -> FloatArray:
        """Return the mapped logits (N, ..., C) in float64; unknown groups (N,), or none, get the common map."""
        check_is_fitted(self, "weights_")
        rows = as_fitted_logits(logits, self.n_classes_)
        maps = list(map(AffineMap, self.weights_, self.biases_))
        if groups is None:
            return maps[0](rows)
        known = {name: number for number, name in enumerate(self.groups_, 1)}
        numbers = np.array([known.get(name, 0) for name in _as_groups(groups, len(rows)).tolist()], np.intp)
        return _mapped(rows, numbers, maps)

    def predict_proba(self, logits: ArrayLike, *, groups: ArrayLike | None = None) -> FloatArray:
        """Return the calibrated probabilities in float64; arguments as of `transform`."""
        return softmax_in_place(self.transform(logits, groups=groups))

    def _chosen(self, rows: Rows, numbers: IntArray) -> tuple[str, float]:
        """The common map's method, and the penalty."""
        rng = check_draws(1, self.random_state, seed_name="random_state")
        if len(rows) > _CHOSEN_ON:  # λ weighs the offsets of groups, not rows: a sample tells it, too
            sample = rng.choice(len(rows), _CHOSEN_ON, replace=False)
            rows, numbers = rows[sample], numbers[sample]
        bases, n = _BASES[:2] if self.base == "auto" else (self.base,), len(rows)
        if n < 2:
            return bases[0], np.inf
        splits = list(_parts(rng.permutation(np.arange(n) % min(self.n_folds, n))))
        commons = {base: [_common(base, rows[train]) for train, _ in splits] for base in bases}

        def held_out(base: str, penalty: float) -> FloatArray:
            """The loss of each row under the maps of the other parts (N,)."""
            losses = np.empty(n)
            for (train, test), common in zip(splits, commons[base], strict=True):
                maps = self._maps(rows[train], numbers[train], penalty, common, _ROUGHLY)
                losses[test] = rows[test].losses(_mapped(rows.logits[test], numbers[test], maps))
            return losses

        base = bases[0]
        if self.base == "auto":
            gain, error = _mean_and_error(held_out(base, np.inf) - held_out(_BASES[1], np.inf))
            base = _BASES[gain > 2 * error]
        if len(self.groups_) == 1:
            return base, np.inf
        losses = np.stack([held_out(base, penalty) for penalty in _OF_GROUPS])
        best = losses[losses.mean(axis=1).argmin()]
        within = [difference <= error for difference, error in map(_mean_and_error, losses - best)]
        return base, _OF_GROUPS[within.index(True)]

    def _maps(
        self, rows: Rows, numbers: IntArray, penalty: float, common: AffineMap, nats: float
    ) -> list[AffineMap]:
        """The common map, and that of each group, whose numbers start at 1; of groups without rows the common one."""
        maps = [common] * (len(self.groups_) + 1)
        mapped = rows.with_logits(common(rows.logits))
        for number in np.unique(numbers) if penalty < np.inf else ():
            own = mapped[numbers == number]
            ridge = penalty * self.n_classes_ / len(own)
            maps[number] = common.then(fit_affine(own, 1.0, Ridges(ridge, ridge), nats=nats))
        return maps


def _common(base: str, rows: Rows) -> AffineMap:
    """The map of all rows, with a weight and a bias for each class."""
    found = SCALERS[base].load()().solve(rows, ScaledLoss(rows).best_temperature())
    c = rows.logits.shape[1]
    return found.then(AffineMap(np.ones(c), np.zeros(c)))


def _mapped(logits: NDArray[Any], numbers: IntArray, maps: list[AffineMap]) -> FloatArray:
    """The logits of each row under the map of its number."""
    mapped = np.empty(logits.shape)
    for number in np.unique(numbers):
        own = numbers == number
        mapped[own] = maps[number](logits[own])
    return mapped


def _as_groups(groups: ArrayLike, n: int) -> NDArray[np.str_]:
    names = np.asarray(groups)
    way_out = "give one name for each row of the logits"
    check(names.shape == (n,), f"groups to have shape ({n},)", f"shape {names.shape}", way_out)
    got = f"dtype {names.dtype}" * (names.dtype.kind not in "Uiu")
    if names.dtype.kind == "O":
        got = few(sorted({type(name).__name__ for name in names if not isinstance(name, str | int)}))
    check(not got, "groups to hold words or integers", got, "name each group")
    return names.astype(str)
