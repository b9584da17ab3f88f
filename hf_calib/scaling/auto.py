"""An affine calibrator that is selected by cross-validation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit
from sklearn.base import BaseEstimator

from hf_calib._errors import few
from hf_calib._records import fits
from hf_calib.metrics.checks import (
    FloatArray,
    check_draws,
    check_integer,
)
from hf_calib.scaling import affine
from hf_calib.scaling._base import (
    blocks,
    n_masked,
    softmax_in_place,
)
from hf_calib.scaling.affine import AffineMap, AffineScaling
from hf_calib.scaling.newton import Start
from hf_calib.scaling.rows import Rows
from hf_calib.scaling.saved_map import Fitted, Parameters, method_of
from hf_calib.scaling.temperature import ScaledLoss, warn_undetermined

# The time of a fit of a matrix grows with N C^2, and above this number takes seconds.
_MATRIX_COST = 5e8
# The most rows in the cross-validation: enough to detect 0.001 nats.
_CHOSEN_ON = 20_000
# The distance to the minimum of the fits in folds, in nats per row, far below their noise.
_ROUGHLY = 1e-5
# With few rows, candidates with many parameters look best by chance, and standard errors miss the
# rare row that is wrong with high confidence. By benchmarks/choice_rules.py no setting ends more
# than .002 nats above the temperature.
_STANDARD_ERRORS = 2
_OF_FREE_MAPS = 3
# From this number of rows, all candidates need the same margin.
_MANY = 1000
# From this number of rows, the logits may stay uncalibrated.
_ENOUGH = 300
# The end of the names of candidates with the paper's penalty, whose fits are never far from a
# temperature.
_FIRM = "(penalty=1)"
# In standard errors; candidates with smaller penalties are then worse too.
_CLEARLY_WORSE = 2
# Wrong rows; with none of 50, one fit ended .47 nats above the temperature.
_FEWEST_WRONG = 5
# Of a class with fewer rows, cross-validation hardly notices that its probability goes to 0.
_FEWEST_OF_CLASS = 3
# A class expected this many times as often is missing.
_TIMES_EXPECTED = 10
# The choice of a saved calibrator, which titles and cards show.
_NAME = re.compile(r"[a-z_][a-z0-9_=.()+-]{0,100}")
# From the most to the least regularised.
_PENALTIES = (1.0, 0.1, 0.01, 0.001)


def _is_simple(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str)


@dataclass
class _Candidate:
    """A candidate and its results in the cross-validation."""

    # It can be folded; None means no calibration.
    scaler: affine.Solvable | None
    n_parameters: int
    left_out: str | None = None
    # The loss (N,) of each row, from a map that was fitted to others.
    losses: FloatArray | None = None
    # The temperature of the mapped rows.
    on_top: float = 1.0

    def __post_init__(self) -> None:
        self.method = "identity" if self.scaler is None else method_of(self.scaler)
        self.penalty = getattr(self.scaler, "penalty", None)
        self.name = self.method
        if self.penalty is not None:
            self.name += f"(penalty={self.penalty:g})"

    def solve(self, rows: Rows, start: Start) -> AffineMap:
        if self.scaler is None:
            return AffineMap(np.array(1.0))
        return self.scaler.solve(rows, start)

    def judged(self, of_temperature: FloatArray, choice: str) -> dict[str, Any]:
        """The candidate's entry in `results_`."""
        # A candidate that was not tried has no numbers.
        nll: tuple[Any, Any] = (None, None)
        difference: tuple[Any, Any] = (None, None)
        if self.losses is not None:
            nll = _mean_and_error(self.losses)
            difference = _mean_and_error(self.losses - of_temperature)
        judged = {
            "method": self.method,
            "penalty": self.penalty,
            "n_parameters": self.n_parameters,
        }
        judged["nll"], judged["standard_error"] = nll
        judged["difference"], judged["difference_standard_error"] = difference
        return {**judged, "chosen": self.name == choice, "left_out": self.left_out}


class AutoScaling(AffineScaling):
    r"""Select an affine calibrator by cross-validation, and fit it.

    It compares no calibration, a temperature, vectors and matrices, structured ones with several
    penalties. With several labels per row it compares `PerLabelTemperatureScaling` instead of
    matrices. Each candidate is evaluated and used with an additional temperature, fitted to
    held-out rows. `docs/reference/scaling.md` has the rule.

    Args:
        n_folds: number of random folds of the cross-validation, at least 2; with fewer rows, one
            fold per row.
        random_state: seed of the folds.

    Attributes:
        choice_: the selected method, a key of `SCALERS` or "identity", such as
            "structured_matrix(penalty=0.1)".
        results_: a dict per candidate: "method", "penalty", "n_parameters", "nll" (cross-validated,
            nats per row), "standard_error", "difference" to the temperature,
            "difference_standard_error", "chosen", and "left_out", the reason why it was not tried,
            or None.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(scale=2, size=(1000, 3))
    >>> labels = (logits + [0, 0, 2] + rng.gumbel(size=(1000, 3))).argmax(axis=1)
    >>> scaler = AutoScaling().fit(2 * logits, labels)
    >>> scaler.choice_, scaler.bias_.round(1)
    ('structured_vector(penalty=1)', array([-0.7, -0.5,  1.3]))
    """

    _fitted: ClassVar[Parameters] = {
        "choice_": None,
        "results_": None,
        "bias_": Fitted(("C",)),
        "weight_": Fitted(("", "C", "CC")),
    }

    def __init__(
        self, n_folds: int = 5, *, multi_label: bool = False, random_state: int = 0
    ) -> None:
        self.n_folds = n_folds
        self.multi_label = multi_label
        self.random_state = random_state

    def __repr__(self, *args: Any) -> str:
        """Return the settings and, once fitted, the choice, with T if it is a temperature."""
        settings = BaseEstimator.__repr__(self, *args)
        choice = getattr(self, "choice_", None)
        if choice is None:
            return settings
        if choice == "temperature":
            return f"{settings}: {choice}, T = {1 / float(self.weight_):.4g}"
        return f"{settings}: {choice}"

    def _is_sound(self) -> bool:
        """Whether `choice_` is a name, and `results_` are dicts of numbers and words."""
        if not fits(self.results_, [{str: _is_simple}]):
            return False
        return fits(self.choice_, str) and bool(_NAME.fullmatch(self.choice_))

    def _check_settings(self) -> None:
        super()._check_settings()
        check_draws(1, self.random_state, seed_name="random_state")
        way_out = "5 is enough; more folds cost more fits"
        check_integer("n_folds", self.n_folds, 2, way_out)

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> AutoScaling:
        """Select the calibrator and fit it."""
        self._check_settings()
        rows = Rows.checked(logits, labels, multi_label=self.multi_label)
        # Rows without a known label contain no information.
        if rows.known is not None:
            rows = rows[rows.known.any(axis=1)]
        n = len(rows)
        # Folds are not stratified by class. With the frequencies of the sample in each fold, a
        # calibrator that learns these frequencies would look better than it is on other rows.
        rng = np.random.default_rng(self.random_state)
        folds = rng.permutation(np.arange(n) % min(self.n_folds, n))
        sample: Any = slice(None)
        if n > _CHOSEN_ON:
            sample = rng.choice(n, _CHOSEN_ON, replace=False)
        loss = ScaledLoss(rows)
        temperature = loss.best_temperature()
        loss.warn(temperature)
        missing = _missing_classes(rows, temperature)
        if missing:
            warn_undetermined(f"the parameters of {missing}", stacklevel=3)
        families = _candidates(rows, missing)
        _cross_validate(families, rows[sample], folds[sample])

        candidates = [candidate for family in families for candidate in family]
        losses = {
            candidate.name: candidate.losses
            for candidate in candidates
            if candidate.losses is not None
        }
        self.choice_ = choose(losses)
        self.results_ = [
            candidate.judged(losses["temperature"], self.choice_)
            for candidate in candidates
        ]
        (chosen,) = (each for each in candidates if each.name == self.choice_)
        # Fits of all rows need less of an additional temperature.
        if n > _CHOSEN_ON:
            _cross_validate([[chosen]], rows, folds)

        found = chosen.solve(rows, Start(temperature))
        n_classes = rows.logits.shape[1]
        on_top = AffineMap(np.array(1 / chosen.on_top), np.zeros(n_classes))
        both = found.then(on_top)
        self.weight_ = both.weight
        self.bias_ = both.bias  # type: ignore[assignment]
        if chosen.method == "per_label_temperature":
            affine.warn_of_labels(affine.temperatures_by_label(rows, temperature)[1])
        return self


def _candidates(rows: Rows, missing: str | None) -> list[list[_Candidate]]:
    """Families of candidates, each from the most to the least regularised."""
    c = rows.logits.shape[1]
    too_few = _too_few_rows(rows)
    why_no_vector = too_few or missing
    why_no_matrix = why_no_vector or _no_matrix(rows)
    why_no_free_map = _rare_classes(rows)
    # The softmax of two classes depends on their difference only.
    n_of_vector = 2 if c == 2 and not rows.sigmoid else 2 * c
    n_of_matrix = c * (c + 1)
    vectors = [
        _Candidate(affine.StructuredVectorScaling(penalty), n_of_vector, why_no_vector)
        for penalty in _PENALTIES
    ]
    families = [
        [_Candidate(None, 0)],
        [_Candidate(affine.TemperatureScaling(), 1)],
    ]
    if rows.sigmoid:
        by_label = _Candidate(affine.PerLabelTemperatureScaling(), c, too_few)
        return [*families, [by_label], vectors]
    vector = affine.VectorScaling()
    vectors.append(_Candidate(vector, 2 * c, why_no_vector or why_no_free_map))
    matrices = [
        _Candidate(affine.StructuredMatrixScaling(penalty), n_of_matrix, why_no_matrix)
        for penalty in _PENALTIES
    ]
    matrix = affine.MatrixScaling()
    free = _Candidate(matrix, n_of_matrix, why_no_matrix or why_no_free_map)
    return [*families, vectors, matrices, [free]]


def _too_few_rows(rows: Rows) -> str | None:
    """The reason why nothing but a temperature is tried, or None."""
    predicted = rows.logits > 0 if rows.sigmoid else rows.logits.argmax(axis=1)
    is_wrong = predicted != rows.labels
    if rows.known is not None:
        is_wrong &= rows.known
    n_wrong = np.count_nonzero(is_wrong)
    # A candidate would be evaluated on the row that it was fitted to.
    if len(rows) == 1:
        return "one row does not tell more than a temperature"
    if n_wrong < _FEWEST_WRONG:
        return f"{n_wrong} wrong rows do not tell more than a temperature"
    return None


def _rare_classes(rows: Rows) -> str | None:
    """The reason why no map without a ridge is tried, or None."""
    if rows.sigmoid:
        return None
    counts = np.bincount(rows.labels, minlength=rows.logits.shape[1])
    rare = np.flatnonzero(counts < _FEWEST_OF_CLASS)
    if not len(rare):
        return None
    return f"fewer than {_FEWEST_OF_CLASS} rows have class {few(rare.tolist())}"


def _missing_classes(rows: Rows, temperature: float) -> str | None:
    """The classes with hardly a row and far fewer than the probabilities say, in words, or None.

    The fit of a class would take its probability towards 0, although these rows may just lack it.
    """
    if rows.sigmoid:
        known = np.ones(rows.labels.shape, bool) if rows.known is None else rows.known
        of_ones = np.count_nonzero(rows.labels & known, axis=0)
        counts = np.stack([known.sum(axis=0) - of_ones, of_ones])
    else:
        counts = np.bincount(rows.labels, minlength=rows.logits.shape[1])[None]
    if counts.min() >= _FEWEST_OF_CLASS:
        return None

    expected = np.zeros(counts.shape)
    for part, block in blocks(rows.logits):
        block /= temperature
        if rows.sigmoid:
            both = expit([-block, block])
            expected += both.sum(axis=1, where=known[part])
        else:
            expected += softmax_in_place(block).sum(axis=0)
    is_rare = counts < _FEWEST_OF_CLASS
    is_missing = is_rare & (expected >= _TIMES_EXPECTED * np.maximum(counts, 1))
    found = np.flatnonzero(is_missing.any(axis=0)).tolist()
    if not found:
        return None
    what = "a value of label" if rows.sigmoid else "class"
    return (
        f"{what} {few(found)}: fewer than {_FEWEST_OF_CLASS} rows have it, "
        "far fewer than the probabilities say"
    )


def _no_matrix(rows: Rows) -> str | None:
    """The reason why no matrix is tried, or None."""
    n, c = rows.logits.shape
    if n_masked(rows.logits):
        return "it would mix masked classes with the others"
    if c == 2:
        return "for two classes it is no more than vector scaling"
    cost = n * c**2
    if cost > _MATRIX_COST:
        limit = f"{_MATRIX_COST:.0e}: its fits would take too long"
        return f"N C^2 = {cost:.1e} is more than {limit}"
    return None


class _Split(NamedTuple):
    """A fold: the masks (N,) of the rows to fit to and of the others."""

    train: NDArray[np.bool_]
    held_out: NDArray[np.bool_]


def _cross_validate(
    families: list[list[_Candidate]], rows: Rows, folds: NDArray[np.int64]
) -> None:
    """Find the losses of the candidates on rows that their maps were not fitted to."""
    splits = list(_splits(folds))
    starts = []
    for split in splits:
        temperature = ScaledLoss(rows[split.train]).best_temperature()
        starts.append(Start(temperature, nats=_ROUGHLY))
    for family in families:
        _compare(family, rows, splits, starts)


def _compare(
    family: list[_Candidate], rows: Rows, splits: list[_Split], starts: list[Start]
) -> None:
    """Find the losses of a family, until a candidate is clearly worse than the one before it."""
    nearest = starts.copy()
    last: FloatArray | None = None
    worse: str | None = None
    for candidate in family:
        if worse is not None and candidate.left_out is None:
            candidate.left_out = worse
        if candidate.left_out is not None:
            continue
        mapped = np.empty(rows.logits.shape)
        for fold, split in enumerate(splits):
            found = candidate.solve(rows[split.train], nearest[fold])
            # Candidates of one family differ in the penalty only, so the next map is near.
            nearest[fold] = replace(nearest[fold], near=found)
            mapped[split.held_out] = found(rows.logits[split.held_out])
        # A temperature is found with its own, and no calibration has none.
        if candidate.method not in ("identity", "temperature"):
            held_out = rows.with_logits(mapped)
            candidate.on_top = ScaledLoss(held_out).best_temperature()
            mapped = mapped / _temperatures_on_top(held_out, splits)
        candidate.losses = rows.losses(mapped)
        if last is not None:
            difference, error = _mean_and_error(candidate.losses - last)
            if difference > _CLEARLY_WORSE * error:
                worse = f"{candidate.name} was clearly worse than with a larger penalty"
        last = candidate.losses


def _temperatures_on_top(mapped: Rows, splits: list[_Split]) -> FloatArray:
    """The additional temperature (N, 1) of each row, fitted to the rows of other folds."""
    scales = np.empty((len(mapped), 1))
    for split in splits:
        scales[split.held_out] = ScaledLoss(mapped[split.train]).best_temperature()
    return scales


def _splits(folds: NDArray[np.int64]) -> Iterator[_Split]:
    """The folds; a single row is used for both."""
    for fold in range(folds.max() + 1):
        held_out = folds == fold
        train = held_out if held_out.all() else ~held_out
        yield _Split(train, held_out)


def choose(
    losses: Mapping[str, FloatArray], standard_errors: float | None = None
) -> str:
    """Return the name with the lowest d + k SE(d), k by the rule of `AutoScaling` or as given."""
    n_rows = len(losses["temperature"])

    def upper_end(name: str) -> float:
        difference, error = _mean_and_error(losses[name] - losses["temperature"])
        k = standard_errors
        if k is None:
            is_safe = n_rows >= _MANY or name.endswith(_FIRM)
            k = _STANDARD_ERRORS if is_safe else _OF_FREE_MAPS
        return difference + k * error

    # With few rows, logits that look calibrated may be so by chance.
    names = [name for name in losses if name != "identity" or n_rows >= _ENOUGH]
    return min(names, key=upper_end)


def _mean_and_error(values: FloatArray) -> tuple[float, float]:
    """The mean and its standard error; 0 for one value."""
    mean = float(values.mean())
    if len(values) == 1:
        return mean, 0.0
    return mean, float(values.std(ddof=1) / np.sqrt(len(values)))
