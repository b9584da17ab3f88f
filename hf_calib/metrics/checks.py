"""Checks of the arguments that metrics, calibrators and rules share; types of their arrays."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import (
    InputTypeError,
    InputValueError,
    check,
    did_you_mean,
    expected,
    message_of,
)

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

RANGE_TOLERANCE = 1e-6
# A number with three decimals is off by up to this.
_ROUNDED = 0.0005
# The largest tolerance refuses logits and sigmoid outputs of any number of classes.
_SUM_TOLERANCES = (1e-3, 1e-2)
_FLOAT_NOISE = 1e-6

# The sum of its squares is finite for any number of rows.
LARGEST_WEIGHT = 1e100

# A chunk of float64 and its temporaries fit in the cache.
CHUNK_ELEMENTS = 2**16

# What to do about probabilities that are none.
_SHAPE_WAY_OUT = (
    "pass probs first, then labels; for one positive probability p, "
    "np.stack([1 - p, p], axis=1)"
)
_FINITE_WAY_OUT = (
    "drop these rows, or find their cause, such as a model that has diverged"
)
_RANGE_WAY_OUT = (
    "these look like logits, or like overflow: "
    "pass scipy.special.softmax(logits, axis=1)"
)
_SUM_WAY_OUT = (
    "pass softmax probabilities in float32 or wider, divide rows of rounded numbers by their "
    "sums, or for one sigmoid output p pass np.hstack([1 - p, p]); several independent labels "
    "are not one distribution"
)


def row_chunks(
    n_rows: int, n_columns: int = 1, *, elements: int | None = None
) -> Iterator[slice]:
    """Cut rows into chunks of about `elements` numbers, `CHUNK_ELEMENTS` unless told otherwise."""
    step = max(1, (elements or CHUNK_ELEMENTS) // n_columns)
    return (slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step))


def row_sum_tolerance(n_classes: int) -> float:
    """How far from 1 the sum of a distribution may be, as in float16 or with three decimals."""
    # It is called for each chunk of rows, and `np.clip` of one number is slow.
    least, most = _SUM_TOLERANCES
    return min(max(_ROUNDED * n_classes, least), most) + _FLOAT_NOISE


def as_array(argument: str, values: ArrayLike) -> NDArray[Any]:
    """Return values as a numpy array; a torch tensor, known by its methods, is moved to the CPU."""
    if np.ma.is_masked(values):
        got = f"{np.ma.count_masked(values)} masked of {np.size(values)}"
        way_out = "drop the masked rows first"
        check(False, f"{argument} to have no masked values", got, way_out)
    tensor: Any = values
    try:
        if not hasattr(tensor, "detach"):
            return np.asarray(values)
        tensor = tensor.detach().cpu()
        if tensor.is_floating_point() and tensor.element_size() < 4:
            # Numpy has no bfloat16.
            tensor = tensor.float()
        return np.asarray(tensor)
    except (TypeError, RuntimeError, ValueError) as error:
        # Rows may have different lengths, or be tensors.
        kind = InputValueError if isinstance(error, ValueError) else InputTypeError
        got = str(error).splitlines()[0].rstrip(".")
        way_out = "pass one array of numbers"
        raise kind(expected(argument, "be a numpy array", got, way_out)) from error


def as_floats(argument: str, values: ArrayLike) -> FloatArray:
    """Return real numbers as a float64 array."""
    array = as_array(argument, values)
    check_kind(
        array, "biuf", f"{argument} to hold real numbers", "pass an array of floats"
    )
    return array.astype(np.float64, copy=False)


def check_type(holds: bool, requirement: str, got: object, way_out: str) -> None:
    """Raise like `check`, with a TypeError."""
    if not holds:
        raise InputTypeError(message_of(requirement, got, way_out))


def check_names(argument: str, names: object) -> None:
    """Raise for names that are not in a list: a text would be split into its letters."""
    is_list = isinstance(names, Iterable)
    is_list = is_list and not isinstance(names, str | bytes | Mapping | Set)
    way_out = "write ['first', 'second']"
    check_type(
        names is None or is_list, f"{argument} to be a list", repr(names), way_out
    )


def check_kind(array: NDArray[Any], kinds: str, requirement: str, way_out: str) -> None:
    """Raise a TypeError unless the kind of the dtype is one of these."""
    # Formatting a dtype takes longer than the check.
    if array.dtype.kind in kinds:
        return
    # A list with None becomes an array of objects.
    missing = [place for place, value in enumerate(array.flat) if value is None]
    if missing:
        row = missing[0] * len(array) // array.size
        check_type(False, requirement, f"None in row {row:,}", "drop rows with None")
    check_type(False, requirement, f"dtype {array.dtype}", way_out)


def check_shape(
    argument: str, array: NDArray[Any], shape: tuple[int, ...], way_out: str
) -> None:
    """Raise unless the array has this shape."""
    check(
        array.shape == shape,
        f"{argument} to have shape {shape}",
        f"shape {array.shape}",
        way_out,
    )


def check_integer(
    argument: str, value: Any, least: int, way_out: str, *, most: int = 2**63 - 1
) -> int:
    """Return an integer from least to most as an int; raise otherwise."""
    is_bool = isinstance(value, bool)
    check_type(not is_bool, f"{argument} to be an integer", value, way_out)
    try:
        number = operator.index(value)
    except TypeError:
        message = expected(argument, "be an integer", repr(value), way_out)
        raise InputTypeError(message) from None
    check(number >= least, f"{argument} to be at least {least}", number, way_out)
    check(number <= most, f"{argument} to be at most {most:,}", number, way_out)
    return number


def check_n_bins(n_bins: int) -> int:
    """Return the number of bins as an int, at most 10,000, because more bins have no examples."""
    return check_integer("n_bins", n_bins, 1, "the papers use n_bins=15", most=10_000)


def check_real(argument: str, value: Any, way_out: str) -> None:
    """Raise unless the value is a number; True is none."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    check_type(real, f"{argument} to be a number", repr(value), way_out)


def check_share(argument: str, value: Any, way_out: str) -> float:
    """Return a number in (0, 1) as a float."""
    check_real(argument, value, way_out)
    check(0 < value < 1, f"{argument} to lie in (0, 1)", value, way_out)
    return float(value)


def check_draws(
    n_resamples: int,
    seed: int,
    confidence_level: float = 0.95,
    *,
    seed_name: str = "seed",
) -> np.random.Generator:
    """Check the arguments of resamples and return the generator; a seed has at most 128 bits."""
    check_integer("n_resamples", n_resamples, 1, "1000 is usual", most=1_000_000)
    check_share("confidence_level", confidence_level, "use 0.95 for a 95% interval")
    way_out = f"{seed_name}=0 is the default"
    checked = check_integer(seed_name, seed, 0, way_out, most=2**128 - 1)
    return np.random.default_rng(checked)


def check_choice(argument: str, value: str, choices: Sequence[str]) -> None:
    """Raise unless the value is one of the choices."""
    # Finding the nearest name is slower than a metric of few rows.
    if value not in choices:
        requirement = f"{argument} to be one of {', '.join(map(repr, choices))}"
        check(False, requirement, repr(value), did_you_mean(value, choices))


def check_flag(argument: str, value: Any) -> None:
    """Raise unless the value is True or False, because any text, even "no", would count as true."""
    is_flag = isinstance(value, bool | np.bool_)
    way_out = "write it without quotes"
    check_type(is_flag, f"{argument} to be True or False", repr(value), way_out)


class RowError(InputValueError):
    """The number of a row that has no valid probabilities, label or weight, and the message."""

    def __str__(self) -> str:
        return self._of_row(0, "")

    def at(self, place: str, first: int) -> InputValueError:
        """Return the error of a file in which the rows of this array start at `first`."""
        return InputValueError(self._of_row(first, f" of {place}"))

    def _of_row(self, first: int, where: str) -> str:
        row, argument, requirement, value, way_out = self.args
        got = f"{value} in row {first + row:,}{where}"
        return expected(argument, requirement, got, way_out)


def check_rows(
    probs: NDArray[Any],
    labels: NDArray[Any],
    weights: NDArray[Any] | None,
    n_classes: int,
) -> None:
    """Raise unless probs has shape (N, C) with this number of classes; N may be 0."""
    fits = probs.ndim == 2 and probs.shape[1] == n_classes
    requirement = f"probs to have shape (N, {n_classes})"
    way_out = "use one state for each set of classes"
    check(fits, requirement, f"shape {probs.shape}", way_out)
    if len(probs):
        check_probs(probs)
    check_labels(labels, *probs.shape)
    if weights is not None:
        check_row_weights("weights", weights, len(probs))


def check_weights(
    sample_weight: ArrayLike | None, n_examples: int
) -> FloatArray | None:
    """Return weights (N,) as float64, or None if there are none."""
    if sample_weight is None:
        return None
    weights = as_floats("sample_weight", sample_weight)
    check_row_weights("sample_weight", weights, n_examples)
    largest = weights.max()
    requirement = "sample_weight to hold a weight above 0"
    check(largest > 0, requirement, "zeros", "leave it out")
    least = 1 / LARGEST_WEIGHT
    requirement = f"sample_weight to hold a weight of at least {least:g}"
    way_out = "divide them all by the largest"
    check(largest >= least, requirement, f"{largest:g}", way_out)
    return weights


def check_probs_and_labels(
    probs: ArrayLike, labels: ArrayLike
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return probs (N, C) in their own float dtype and labels (N,) as int64."""
    checked = check_probs(probs)
    return checked, check_labels(as_array("labels", labels), *checked.shape)


def check_probs_and_any_labels(
    probs: ArrayLike, labels: ArrayLike
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return probs (N, C) and labels: (N,) int64, or (N, C) float64 if they are a float matrix."""
    checked = check_probs(probs)
    targets = as_array("labels", labels)
    if targets.ndim == 2 and targets.dtype.kind == "f":
        return checked, check_soft_labels(targets, checked.shape, argument="labels")
    return checked, check_labels(targets, *checked.shape, or_soft=True)


def check_soft_labels(
    soft_labels: ArrayLike, shape: tuple[int, ...], *, argument: str = "soft_labels"
) -> FloatArray:
    """Return soft labels (N, C) as float64; raise unless they are shares of this shape."""
    array = as_array(argument, soft_labels)
    way_out = "pass a share for each example and class, in their order"
    check_shape(argument, array, shape, way_out)
    way_out = "divide each row by its sum: soft labels are shares"
    shares = check_probs(array, argument=argument, way_out=way_out)
    return shares.astype(np.float64, copy=False)


def check_probs(
    probs: ArrayLike, *, argument: str = "probs", way_out: str = ""
) -> NDArray[Any]:
    """Return distributions (N, C) in their own float dtype; they are checked in one pass."""
    rows = as_array(argument, probs)
    requirement = f"{argument} to hold at least one value, in shape (N, C)"
    are_rows = rows.ndim == 2 and rows.size > 0
    check(are_rows, requirement, f"shape {rows.shape}", _SHAPE_WAY_OUT)
    float_way = way_out or f"pass {argument}.astype(float)"
    check_kind(rows, "f", f"{argument} to be a float array", float_way)
    for part in row_chunks(*rows.shape):
        _check_distributions(rows[part], argument, way_out, part.start)
    return rows


def _check_distributions(
    rows: NDArray[Any], argument: str, way_out: str, first: int
) -> None:
    """Raise for the first row of a chunk that is no distribution; one pass if there is none."""
    # Narrow floats have no fast matrix product, and float32 sums are accurate enough for the
    # tolerance.
    wide = rows.astype(np.promote_types(rows.dtype, np.float32), copy=False)
    n_classes = wide.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):
        sums = wide @ np.ones(n_classes, wide.dtype)
        off = np.abs(sums - 1)
    tolerance = row_sum_tolerance(n_classes)
    # Comparisons with NaN are False.
    in_range = wide.min() >= -RANGE_TOLERANCE and wide.max() <= 1 + RANGE_TOLERANCE
    if in_range and off.max() <= tolerance:
        return
    low = wide.min(axis=1)
    high = wide.max(axis=1)
    farthest = np.where(-low > high - 1, low, high)
    is_outside = np.abs(farthest - 0.5) > 0.5 + RANGE_TOLERANCE
    refuse(
        ~np.isfinite(farthest), argument, "be finite", farthest, _FINITE_WAY_OUT, first
    )
    range_way = way_out or _RANGE_WAY_OUT
    refuse(is_outside, argument, "lie in [0, 1]", farthest, range_way, first)
    sum_way = way_out or _SUM_WAY_OUT
    argument = f"each row of {argument}"
    refuse(off > tolerance, argument, "sum to 1", sums, sum_way, first)


def check_labels(
    labels: NDArray[Any], n_examples: int, n_classes: int, *, or_soft: bool = False
) -> NDArray[np.int64]:
    """Return labels (N,) as int64; raise unless each is a class index."""
    other = "labels.argmax(axis=1) of one-hot rows or label distributions"
    if or_soft:
        other = "label distributions as a float (N, C) matrix"
    way_out = f"pass one class index per row of probs, or {other}"
    check_shape("labels", labels, (n_examples,), way_out)
    way_out = "pass class indices, labels.astype(int)"
    if labels.dtype.kind in "USO":
        way_out = "number them by the columns: [names.index(label) for label in labels]"
    check_kind(labels, "iu", "labels to be integers", way_out)
    outside = (labels < 0) | (labels >= n_classes)
    way_out = "number the columns; drop ignored rows first: keep = labels != -100"
    refuse(outside, "labels", f"lie in 0..{n_classes - 1}", labels, way_out)
    return labels.astype(np.int64, copy=False)


def check_row_weights(argument: str, weights: NDArray[Any], n_examples: int) -> None:
    """Raise unless each row has a weight from 0 to the largest one."""
    check_shape(argument, weights, (n_examples,), "pass one for each row of probs")
    # Comparisons with NaN are False.
    fits = (weights >= 0) & (weights < np.inf)
    way_out = "give each row a weight; 0 leaves it out"
    refuse(~fits, argument, "be finite and at least 0", weights, way_out)
    requirement = f"be at most {LARGEST_WEIGHT:g}"
    way_out = "divide them all by the largest"
    refuse(weights > LARGEST_WEIGHT, argument, requirement, weights, way_out)


def refuse(
    wrong: NDArray[Any],
    argument: str,
    requirement: str,
    values: NDArray[Any],
    way_out: str,
    first: int = 0,
) -> None:
    """Raise for the first of the values (N, ...) where `wrong` (N, ...) is True."""
    if wrong.any():
        place = np.unravel_index(wrong.argmax(), wrong.shape)
        got = f"{values[place]:.6g}" if values.dtype.kind == "f" else f"{values[place]}"
        raise RowError(first + int(place[0]), argument, requirement, got, way_out)
