"""Checks of the arguments that metrics, maps and rules share, and the types of their arrays."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import InputTypeError, InputValueError, check, did_you_mean, expected

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

# Wide enough for float16 rows and for probabilities written to a file with three decimals;
# far too narrow for logits or sigmoid outputs to slip through.
ROW_SUM_TOLERANCE = 1e-3
RANGE_TOLERANCE = 1e-6

# More bins than these hold no examples, and their sums, one for each class and bin, outgrow memory.
MOST_BINS = 10_000
MOST_RESAMPLES = 1_000_000

CHUNK_ELEMENTS = 2**16  # a chunk of float64 and its temporaries stay in cache


def row_chunks(n_rows: int, n_columns: int = 1, *, elements: int | None = None) -> Iterator[slice]:
    """Cut rows into chunks of about `elements` numbers, `CHUNK_ELEMENTS` unless told otherwise.

    >>> list(row_chunks(5, 10, elements=20))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, (elements or CHUNK_ELEMENTS) // n_columns)
    return (slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step))


def as_array(argument: str, values: ArrayLike) -> NDArray[Any]:
    """Return values as a numpy array; a torch tensor loses its gradient and comes to the CPU.

    torch is not imported: a tensor is known by its methods. Narrow floats are widened to float32, since
    numpy has no bfloat16.
    """
    if isinstance(values, np.ma.MaskedArray):
        got = f"{np.ma.count_masked(values)} masked of {values.size}"
        check(
            not np.ma.is_masked(values),
            f"{argument} to have no masked values",
            got,
            "drop the masked rows first",
        )
    tensor: Any = values
    try:
        if hasattr(tensor, "detach"):
            tensor = tensor.detach().cpu()
            narrow = tensor.is_floating_point() and tensor.element_size() < 4
            return np.asarray(tensor.float() if narrow else tensor)
        return np.asarray(values)
    except (TypeError, RuntimeError, ValueError) as error:  # rows of different lengths, lists of tensors, ...
        kind = InputValueError if isinstance(error, ValueError) else InputTypeError
        got = str(error).splitlines()[0].rstrip(".")
        raise kind(expected(argument, "be a numpy array", got, "pass one array of numbers")) from error


def as_floats(argument: str, values: ArrayLike) -> FloatArray:
    """Return real numbers as a float64 array."""
    array = as_array(argument, values)
    _check_type(
        array.dtype.kind in "biuf",
        argument,
        "hold real numbers",
        f"dtype {array.dtype}",
        "pass an array of floats",
    )
    return array.astype(np.float64, copy=False)


# Numbers and choices


def _check_type(holds: bool, argument: str, requirement: str, got: object, way_out: str) -> None:
    if not holds:
        raise InputTypeError(expected(argument, requirement, got, way_out))


def check_integer(argument: str, value: Any, least: int, way_out: str, *, most: int = 2**63 - 1) -> int:
    """Return a whole number in least..most as an int."""
    _check_type(not isinstance(value, bool), argument, "be an integer", value, way_out)
    try:
        number = operator.index(value)
    except TypeError:
        raise InputTypeError(expected(argument, "be an integer", repr(value), way_out)) from None
    # Python refuses to print very long integers.
    got = number if abs(number) < 2**64 else f"an integer of {number.bit_length()} bits"
    check(number >= least, f"{argument} to be at least {least}", got, way_out)
    requirement = f"be at most {most:,}" if most < 2**64 else f"have at most {most.bit_length()} bits"
    check(number <= most, f"{argument} to {requirement}", got, way_out)
    return number


def check_n_bins(n_bins: int) -> int:
    """Return the number of bins as an int; raise unless it lies in 1..`MOST_BINS`."""
    return check_integer("n_bins", n_bins, 1, "the papers use n_bins=15", most=MOST_BINS)


def check_n_resamples(n_resamples: int) -> int:
    """Return the number of resamples as an int; raise unless it lies in 1..`MOST_RESAMPLES`."""
    return check_integer("n_resamples", n_resamples, 1, "1000 is usual", most=MOST_RESAMPLES)


def check_seed(seed: int, argument: str = "seed") -> int:
    """Return the seed of a random generator as an int of at most 128 bits, as `numpy.random` makes them."""
    return check_integer(argument, seed, 0, f"{argument}=0 is the default", most=2**128 - 1)


def check_number(argument: str, value: Any, way_out: str) -> float:
    """Return a real number as a float; raise for what is none."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    _check_type(real, argument, "be a number", repr(value), way_out)
    return float(value)


def check_share(argument: str, value: Any, way_out: str) -> float:
    """Return a number in (0, 1) as a float."""
    number = check_number(argument, value, way_out)
    check(0 < number < 1, f"{argument} to lie in (0, 1)", value, way_out)
    return number


def check_confidence_level(confidence_level: float) -> None:
    """Raise unless the level is a number in (0, 1)."""
    check_share("confidence_level", confidence_level, "use 0.95 for a 95% interval")


def check_choice(argument: str, value: str, choices: Sequence[str]) -> None:
    """Raise unless the value is one of the choices."""
    requirement = f"{argument} to be one of {', '.join(map(repr, choices))}"
    check(value in choices, requirement, repr(value), did_you_mean(value, choices))


def check_flag(argument: str, value: Any) -> None:
    """Raise unless it is True or False: any text, "no" too, would count as true."""
    is_flag = isinstance(value, bool | np.bool_)
    _check_type(is_flag, argument, "be True or False", repr(value), "write it without quotes")


# Weights, probabilities and labels


def check_weights(sample_weight: ArrayLike | None, n_examples: int) -> FloatArray | None:
    """Return weights (N,) as float64, or None where there are none."""
    if sample_weight is None:
        return None
    weights = as_floats("sample_weight", sample_weight)
    requirement, way_out = f"sample_weight to have shape ({n_examples},)", "pass one for each row of probs"
    check(weights.shape == (n_examples,), requirement, f"shape {weights.shape}", way_out)
    wrong = np.flatnonzero(~((weights >= 0) & (weights < np.inf)))
    if len(wrong):
        got, way_out = f"{weights[wrong[0]]} in row {wrong[0]}", "give each row a weight; 0 leaves it out"
        raise InputValueError(expected("sample_weight", "be finite and at least 0", got, way_out))
    check(bool(weights.any()), "sample_weight to hold a weight above 0", "zeros", "leave it out")
    return weights


def check_probs(probs: ArrayLike, *, argument: str = "probs") -> NDArray[Any]:
    """Return probs (N, C) in their own float dtype: whoever reduces the matrix does so in float64."""
    return _check_distributions(argument, as_array(argument, probs))


def check_probs_and_labels(probs: ArrayLike, labels: ArrayLike) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return probs (N, C) in their own float dtype and labels (N,) as int64."""
    checked = check_probs(probs)
    return checked, _check_labels(as_array("labels", labels), *checked.shape)


def check_probs_and_any_labels(probs: ArrayLike, labels: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return probs (N, C) and labels: (N,) int64, or where a float matrix came, soft labels (N, C) float64.

    A metric tells the two apart by ``labels.ndim``.
    """
    targets = as_array("labels", labels)
    if targets.ndim != 2 or not np.issubdtype(targets.dtype, np.floating):
        return check_probs_and_labels(probs, targets)
    return check_probs_and_soft_labels(probs, targets)


def check_probs_and_soft_labels(probs: ArrayLike, labels: ArrayLike) -> tuple[NDArray[Any], FloatArray]:
    """Return probs (N, C) and soft labels (N, C) float64; class indices are refused."""
    checked, targets = check_probs(probs), as_array("labels", labels)
    soft = targets.ndim == 2 and np.issubdtype(targets.dtype, np.floating)
    got = f"shape {targets.shape} and dtype {targets.dtype}"
    way_out = "this compares with label distributions; brier_score takes class indices"
    check(soft, "labels to be a float (N, C) matrix", got, way_out)
    way_out = "give each class of probs its share of the label"
    fits = targets.shape == checked.shape
    check(fits, f"soft labels to have shape {checked.shape}", f"shape {targets.shape}", way_out)
    return checked, _check_distributions("labels", targets).astype(np.float64, copy=False)


def check_soft_labels(soft_labels: ArrayLike, shape: tuple[int, ...]) -> FloatArray:
    """Return soft labels (N, C) as float64; raise where they are not shares, or not of these rows and classes."""
    array = as_array("soft_labels", soft_labels)
    way_out = "divide counts of annotators by their row sums"
    is_float = np.issubdtype(array.dtype, np.floating)
    _check_type(is_float, "soft_labels", "be a float array", f"dtype {array.dtype}", way_out)
    requirement = f"soft_labels to have shape {shape}, a share for each example and class"
    check(
        array.shape == shape,
        requirement,
        f"shape {array.shape}",
        "pass those of the same rows, in their order",
    )
    return _check_distributions("labels", array).astype(np.float64, copy=False)


def _check_distributions(argument: str, rows: NDArray[Any]) -> NDArray[Any]:
    """Raise unless the rows of a matrix are distributions; one pass, chunk by chunk."""
    way_out = f"pass {argument}.astype(float)"
    if rows.ndim == 1:  # labels
        way_out = "pass the probabilities (N, C) first, and the labels second"
    is_float = np.issubdtype(rows.dtype, np.floating)
    _check_type(is_float, argument, "be a float array", f"dtype {rows.dtype}", way_out)
    way_out = "flatten leading axes; for a positive-class probability p pass np.stack([1 - p, p], axis=1)"
    check(rows.ndim == 2, f"{argument} to have shape (N, C)", f"shape {rows.shape}", way_out)
    way_out = "metrics are undefined without examples"
    check(rows.size > 0, f"{argument} to hold at least one value", f"shape {rows.shape}", way_out)
    row_sums, lowest, highest = _sums_and_range(rows)
    # A finite sum needs finite terms, so good input is not read once more.
    if not np.isfinite(row_sums).all() and not np.isfinite(rows).all():
        bad = ~np.isfinite(rows)
        where = np.flatnonzero(bad.any(axis=1))
        got = f"{bad.sum()} NaN or infinite values in {len(where)} of {len(rows)} rows (first in row {where[0]})"
        way_out = "drop these rows" if argument == "labels" else "look for overflow in the model's logits"
        raise InputValueError(expected(argument, "be finite", got, way_out))
    way_out = "these look like logits: pass scipy.special.softmax(logits, axis=1)"
    if argument == "labels":
        way_out = "soft labels are shares of 1: divide counts by their row sums"
    inside = lowest >= -RANGE_TOLERANCE and highest <= 1 + RANGE_TOLERANCE
    check(inside, f"{argument} to lie in [0, 1]", f"values from {lowest:.6g} to {highest:.6g}", way_out)
    _check_row_sums(argument, row_sums, rows.shape[1])
    return rows


def _sums_and_range(rows: NDArray[Any]) -> tuple[FloatArray, float, float]:
    """The sum (N,) of each row, and the smallest and largest value, from one pass over memory."""
    n_rows, n_classes = rows.shape
    row_sums = np.empty(n_rows)
    lows, highs = [], []
    # Narrow floats have no fast matrix product; float32 sums are exact enough for the tolerance.
    dtype = np.promote_types(rows.dtype, np.float32)
    ones = np.ones(n_classes, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for part in row_chunks(n_rows, n_classes):
            chunk = rows[part].astype(dtype, copy=False)
            row_sums[part] = chunk @ ones
            lows.append(chunk.min())
            highs.append(chunk.max())
    return row_sums, float(np.min(lows)), float(np.max(highs))


def _check_row_sums(argument: str, row_sums: FloatArray, n_classes: int) -> None:
    distance = np.abs(row_sums - 1)
    worst = int(distance.argmax())
    way_out = (
        "pass softmax probabilities in float32 or wider; several independent labels are not one distribution"
    )
    if n_classes == 1:
        way_out = "for one sigmoid output p pass np.hstack([1 - p, p])"
    if argument == "labels":
        way_out = "divide each row by its sum"
    got = f"{row_sums[worst]:.6g} in row {worst}"
    check(bool(distance[worst] <= ROW_SUM_TOLERANCE), f"each row of {argument} to sum to 1", got, way_out)


def _check_labels(labels: NDArray[Any], n_examples: int, n_classes: int) -> NDArray[np.int64]:
    way_out = "pass one class index per row of probs, or label distributions as a float (N, C) matrix"
    fits = labels.shape == (n_examples,)
    check(fits, f"labels to have shape ({n_examples},)", f"shape {labels.shape}", way_out)
    whole, way_out = np.issubdtype(labels.dtype, np.integer), "pass class indices, labels.astype(int)"
    _check_type(whole, "labels", "be integers", f"dtype {labels.dtype}", way_out)
    outside = np.flatnonzero((labels < 0) | (labels >= n_classes))
    if len(outside):
        row = outside[0]
        way_out = "check that labels and columns of probs mean the same classes"
        if labels[row] == -100:
            way_out = "drop ignored rows first: keep = labels != -100"
        got = f"{labels[row]} in row {row} ({len(outside)} such rows)"
        raise InputValueError(expected("labels", f"lie in 0..{n_classes - 1}", got, way_out))
    return labels.astype(np.int64, copy=False)
