"""Checks of the arguments that metrics, calibrators and rules share, and the types of their arrays."""

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

LARGEST_WEIGHT = 1e100  # The sum of its squares is finite for any number of rows.

CHUNK_ELEMENTS = 2**16  # A chunk of float64 and its temporaries fit in the cache.


def row_chunks(
    n_rows: int, n_columns: int = 1, *, elements: int | None = None
) -> Iterator[slice]:
    """Cut rows into chunks of about `elements` numbers, `CHUNK_ELEMENTS` unless told otherwise."""
    step = max(1, (elements or CHUNK_ELEMENTS) // n_columns)
    return (slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step))


def row_sum_tolerance(n_classes: int) -> float:
    """How far from 1 the sum of a distribution may be, as in float16 or with three decimals in a file."""
    return float(np.clip(_ROUNDED * n_classes, *_SUM_TOLERANCES)) + _FLOAT_NOISE


def as_array(argument: str, values: ArrayLike) -> NDArray[Any]:
    """Return values as a numpy array; a torch tensor, known by its methods, is detached and moved to the CPU."""
    if np.ma.is_masked(values):
        got = f"{np.ma.count_masked(values)} masked of {np.size(values)}"
        check(
            False,
            f"{argument} to have no masked values",
            got,
            "drop the masked rows first",
        )
    tensor: Any = values
    try:
        if hasattr(tensor, "detach"):
            tensor = tensor.detach().cpu()
            narrow = tensor.is_floating_point() and tensor.element_size() < 4
            return np.asarray(
                tensor.float() if narrow else tensor
            )  # Numpy has no bfloat16.
        return np.asarray(values)
    except (
        TypeError,
        RuntimeError,
        ValueError,
    ) as error:  # Rows may have different lengths, or be tensors.
        kind = InputValueError if isinstance(error, ValueError) else InputTypeError
        got = str(error).splitlines()[0].rstrip(".")
        raise kind(
            expected(argument, "be a numpy array", got, "pass one array of numbers")
        ) from error


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
    """Raise for names that are not in a list; a text would be split into its letters. None is no names."""
    is_list = isinstance(names, Iterable)
    is_list = is_list and not isinstance(names, str | bytes | Mapping | Set)
    way_out = "write ['first', 'second']"
    check_type(
        names is None or is_list, f"{argument} to be a list", repr(names), way_out
    )


def check_kind(array: NDArray[Any], kinds: str, requirement: str, way_out: str) -> None:
    """Raise a TypeError unless the kind of the dtype is one of these."""
    if array.dtype.kind in kinds:  # Formatting a dtype takes longer than the check.
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
    check_type(
        not isinstance(value, bool), f"{argument} to be an integer", value, way_out
    )
    try:
        number = operator.index(value)
    except TypeError:
        raise InputTypeError(
            expected(argument, "be an integer", repr(value), way_out)
        ) from None
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
    """Check the number of resamples and return the generator; a seed has at most 128 bits, as in `numpy.random`."""
    check_integer("n_resamples", n_resamples, 1, "1000 is usual", most=1_000_000)
    check_share("confidence_level", confidence_level, "use 0.95 for a 95% interval")
    way_out = f"{seed_name}=0 is the default"
    return np.random.default_rng(
        check_integer(seed_name, seed, 0, way_out, most=2**128 - 1)
    )


def check_choice(argument: str, value: str, choices: Sequence[str]) -> None:
    """Raise unless the value is one of the choices."""
    if (
        value not in choices
    ):  # Finding the nearest name is slower than a metric of few rows.
        requirement = f"be one of {', '.join(map(repr, choices))}"
        raise InputValueError(
            expected(argument, requirement, repr(value), did_you_mean(value, choices))
        )


def check_flag(argument: str, value: Any) -> None:
    """Raise unless the value is True or False, because any text, even "no", would count as true."""
    is_flag = isinstance(value, bool | np.bool_)
    check_type(
        is_flag,
        f"{argument} to be True or False",
        repr(value),
        "write it without quotes",
    )


class RowError(InputValueError):
    """A row that is no distribution, or has no valid label or weight: its number and the message of `expected`."""

    def __str__(self) -> str:
        return self._of_row(0, "")

    def at(self, place: str, first: int) -> InputValueError:
        """Return the error with the row number of a file in which the rows of this array start at `first`."""
        return InputValueError(self._of_row(first, f" of {place}"))

    def _of_row(self, first: int, where: str) -> str:
        row, argument, requirement, got, way_out = self.args
        return expected(
            argument, requirement, f"{got} in row {first + row:,}{where}", way_out
        )


def check_rows(
    probs: NDArray[Any],
    labels: NDArray[Any],
    weights: NDArray[Any] | None,
    n_classes: int,
) -> None:
    """Raise unless probs has shape (N, C) with this number of classes; N may be 0."""
    fits = probs.ndim == 2 and probs.shape[1] == n_classes
    way_out = "use one state for each set of classes"
    check(
        fits, f"probs to have shape (N, {n_classes})", f"shape {probs.shape}", way_out
    )
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
    check(
        largest > 0, "sample_weight to hold a weight above 0", "zeros", "leave it out"
    )
    check(
        largest >= 1 / LARGEST_WEIGHT,
        f"sample_weight to hold a weight of at least {1 / LARGEST_WEIGHT:g}",
        f"{largest:g}",
        "divide them all by the largest",
    )
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
    """Return probs (N, C) and labels: (N,) int64, or soft labels (N, C) float64 if they are a float matrix."""
    checked, targets = check_probs(probs), as_array("labels", labels)
    if targets.ndim == 2 and targets.dtype.kind == "f":
        return checked, check_soft_labels(targets, checked.shape, argument="labels")
    return checked, check_labels(targets, *checked.shape, or_soft=True)


def check_soft_labels(
    soft_labels: ArrayLike, shape: tuple[int, ...], *, argument: str = "soft_labels"
) -> FloatArray:
    """Return soft labels (N, C) as float64; raise unless they are shares with this number of rows and classes."""
    array = as_array(argument, soft_labels)
    check_shape(
        argument,
        array,
        shape,
        "pass a share for each example and class, in their order",
    )
    way_out = "divide each row by its sum: soft labels are shares"
    return check_probs(array, argument=argument, way_out=way_out).astype(
        np.float64, copy=False
    )


def check_probs(
    probs: ArrayLike, *, argument: str = "probs", way_out: str = ""
) -> NDArray[Any]:
    """Return distributions (N, C) in their own float dtype, for sums in float64; they are checked in one pass."""
    rows = as_array(argument, probs)
    requirement = f"{argument} to hold at least one value, in shape (N, C)"
    shape_way = "pass probs first, then labels; for one positive probability p, np.stack([1 - p, p], axis=1)"
    check(
        rows.ndim == 2 and rows.size > 0, requirement, f"shape {rows.shape}", shape_way
    )
    check_kind(
        rows,
        "f",
        f"{argument} to be a float array",
        way_out or f"pass {argument}.astype(float)",
    )
    range_way = "these look like logits, or like overflow: pass scipy.special.softmax(logits, axis=1)"
    sum_way = (
        "pass softmax probabilities in float32 or wider, divide rows of rounded numbers by their sums, or for one "
        "sigmoid output p pass np.hstack([1 - p, p]); several independent labels are not one distribution"
    )
    # Narrow floats have no fast matrix product, and float32 sums are accurate enough for the tolerance.
    dtype = np.promote_types(rows.dtype, np.float32)
    ones = np.ones(rows.shape[1], dtype)
    tolerance = row_sum_tolerance(rows.shape[1])
    for part in row_chunks(*rows.shape):
        chunk = rows[part].astype(dtype, copy=False)
        with np.errstate(over="ignore", invalid="ignore"):
            sums = chunk @ ones
            off = np.abs(sums - 1)
        in_range = (
            chunk.min() >= -RANGE_TOLERANCE and chunk.max() <= 1 + RANGE_TOLERANCE
        )  # NaN is not
        if not (in_range and off.max() <= tolerance):
            low, high = chunk.min(axis=1), chunk.max(axis=1)
            farthest = np.where(-low > high - 1, low, high)
            finite_way = "drop these rows, or find their cause, such as a model that has diverged"
            refuse(
                ~np.isfinite(farthest),
                argument,
                "be finite",
                farthest,
                finite_way,
                part.start,
            )
            outside = np.abs(farthest - 0.5) > 0.5 + RANGE_TOLERANCE
            refuse(
                outside,
                argument,
                "lie in [0, 1]",
                farthest,
                way_out or range_way,
                part.start,
            )
            wrong = off > tolerance
            refuse(
                wrong,
                f"each row of {argument}",
                "sum to 1",
                sums,
                way_out or sum_way,
                part.start,
            )
    return rows


def check_labels(
    labels: NDArray[Any], n_examples: int, n_classes: int, *, or_soft: bool = False
) -> NDArray[np.int64]:
    """Return labels (N,) as int64; raise unless each is a class index."""
    soft_way = "label distributions as a float (N, C) matrix"
    hard_way = "labels.argmax(axis=1) of one-hot rows or label distributions"
    way_out = (
        f"pass one class index per row of probs, or {soft_way if or_soft else hard_way}"
    )
    check_shape("labels", labels, (n_examples,), way_out)
    by_name = "number them by the columns: [names.index(label) for label in labels]"
    way_out = (
        by_name
        if labels.dtype.kind in "USO"
        else "pass class indices, labels.astype(int)"
    )
    check_kind(labels, "iu", "labels to be integers", way_out)
    outside = (labels < 0) | (labels >= n_classes)
    way_out = "number the columns; drop ignored rows first: keep = labels != -100"
    refuse(outside, "labels", f"lie in 0..{n_classes - 1}", labels, way_out)
    return labels.astype(np.int64, copy=False)


def check_row_weights(argument: str, weights: NDArray[Any], n_examples: int) -> None:
    """Raise unless each row has a weight from 0 to the largest one."""
    check_shape(argument, weights, (n_examples,), "pass one for each row of probs")
    wrong = ~((weights >= 0) & (weights < np.inf))
    refuse(
        wrong,
        argument,
        "be finite and at least 0",
        weights,
        "give each row a weight; 0 leaves it out",
    )
    refuse(
        weights > LARGEST_WEIGHT,
        argument,
        f"be at most {LARGEST_WEIGHT:g}",
        weights,
        "divide them all by the largest",
    )


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
