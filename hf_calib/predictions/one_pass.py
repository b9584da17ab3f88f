"""One pass over predictions that do not fit in memory: sums, samples by hashes, and slices of columns."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import check
from hf_calib.metrics import CalibrationState
from hf_calib.metrics.state import SliceSums, score_chunks
from hf_calib.predictions.columns import Batch, codes_of
from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.table import Part, Table

MOST_WORKERS = 8
MOST_SAMPLED = 200_000
_MOST_NUMBERS = 20  # Up to this many different numbers are slices of their own.
_RANGES = 5
_NO_VALUE = "(none)"
_EMPTY = "(empty)"

# It is called with the number of rows just read, and that of all rows or None.
OnRows = Callable[[int, int | None], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


def ignore_rows(n_rows: int, n_all: int | None) -> None:
    """Do nothing; for a caller without progress."""


def over_parts(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None
) -> Iterator[Result]:
    """Yield the results of work on each item, in order, by several threads; numpy and pyarrow release the GIL."""
    available = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    pool = ThreadPoolExecutor(workers or min(available, MOST_WORKERS))
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)


# ---- Sums ----


@dataclass(frozen=True)
class Slicing:
    """The slices of a column: ranges between edges, or one slice per value."""

    column: str
    edges: tuple[float, ...] | None = None

    def names(self, values: Sequence[Any]) -> list[str]:
        """Return the slice of each value.

        >>> Slicing("length", (12.0, 40.0)).names([3, 12, 41])
        ['length up to 12', 'length up to 12', 'length above 40']
        """
        if self.edges is None:
            titles: dict[Any, str] = {None: _NO_VALUE, "": _EMPTY, "-0.0": "0.0"}
            texts = [None if value is None else str(value) for value in values]
            return [titles.get(text, str(text)) for text in texts]
        between = [f"{low:g} to {high:g}" for low, high in pairwise(self.edges)]
        ranges = [f"up to {self.edges[0]:g}", *between, f"above {self.edges[-1]:g}"]
        found = [_number(value) for value in values]
        numbers = [math.nan if each is None else each for each in found]
        places = zip(numbers, np.searchsorted(self.edges, numbers), strict=True)
        return [
            _NO_VALUE if math.isnan(each) else f"{self.column} {ranges[i]}"
            for each, i in places
        ]


@dataclass
class Tally:
    """Sums over rows."""

    states: dict[str, CalibrationState] = field(
        default_factory=dict
    )  # "before", "after"
    slices: dict[str, SliceSums] = field(default_factory=dict)  # by column
    n_rows: int = 0

    def merge(self, other: Tally) -> None:
        """Add the sums of another tally."""
        self.n_rows += other.n_rows
        sums: Any = ((self.states, other.states), (self.slices, other.slices))
        for own, more in sums:
            for name, each in more.items():
                if own.setdefault(name, each) is not each:
                    own[name].merge(each)


def empty_tally(n_classes: int, slicings: Sequence[Slicing], n_bins: int) -> Tally:
    """Return a tally without rows."""
    state = CalibrationState(n_classes=n_classes, n_bins=n_bins)
    return Tally(
        {"before": state},
        {each.column: SliceSums(each.column, n_bins) for each in slicings},
    )


def add_rows(tally: Tally, batch: Batch, slicings: Sequence[Slicing]) -> None:
    """Add rows to the sums of all rows and of slices; columns of slices are in the order of the slicings."""
    by = zip(slicings, batch.by, strict=True)
    named = [(codes, slicing.names(values)) for slicing, (codes, values) in by]
    for part, scores in score_chunks(batch.probs, batch.labels, batch.weights):
        tally.states["before"].add_scores(scores)
        for sums, (codes, names) in zip(tally.slices.values(), named, strict=True):
            sums.add(scores, codes[part], names)
    tally.n_rows += len(batch.labels)


def measure_in_one_pass(
    table: Table,
    n_bins: int,
    slicings: Sequence[Slicing] = (),
    *,
    workers: int | None = None,
    on_rows: OnRows = ignore_rows,
) -> Tally:
    """Return the sums of all rows, computed by `workers` threads; errors name the row and its file."""

    def measure(part: Part) -> Tally:
        tally = empty_tally(len(table.class_names), slicings, n_bins)
        for _, batch in table.batches(part):
            add_rows(tally, batch, slicings)
        return tally

    found = Tally()
    for tally in over_parts(measure, table.parts, workers):
        found.merge(tally)
        on_rows(tally.n_rows, table.n_rows)
    return found


# ---- Samples ----


def _smallest(rows: Sequence[Sequence[NDArray[Any]]], most: int) -> list[NDArray[Any]]:
    """The rows with the smallest hashes (the first array), a sample that does not depend on the division into parts."""
    arrays = [np.concatenate(each) for each in zip(*rows, strict=True)]
    if len(arrays[0]) <= most:
        return arrays
    kept = np.argpartition(arrays[0], most)[:most]
    return [array[kept] for array in arrays]


def draw_sample(
    table: Table,
    *,
    most: int = MOST_SAMPLED,
    half: int | None = None,
    workers: int | None = None,
) -> Predictions:
    """Return at most this many rows, of all or of one half (0 or 1, see `half_of`), in the order of their hashes."""

    def draw(part: Part) -> list[list[NDArray[Any]]]:
        found: list[list[NDArray[Any]]] = []
        for first, batch in table.batches(part):
            hashes = part.hashes(first, len(batch.labels))
            chosen = slice(None) if half is None else half_of(hashes) == half
            weights = (
                np.ones(len(batch.labels)) if batch.weights is None else batch.weights
            )
            rows = [
                each[chosen]
                for each in (
                    hashes,
                    batch.labels,
                    batch.scores.astype(np.float64),
                    weights,
                )
            ]
            found = [_smallest([*found, rows], most)]
        return found

    parts = [rows for found in over_parts(draw, table.parts, workers) for rows in found]
    is_any = any(len(hashes) for hashes, *_ in parts)
    check(
        is_any,
        "the predictions to have rows",
        f"none in {table.name}",
        "write them below the header",
    )
    hashes, *rows = _smallest(parts, most)
    labels, scores, weights = (array[np.argsort(hashes)] for array in rows)
    return table.predictions(
        labels, scores, None if table.columns.weight is None else weights
    )


def half_of(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the half, 0 or 1, of rows with these hashes, by a bit that does not affect the order of samples."""
    return (hashes & np.uint64(1)).astype(np.int64)


def choose_slicings(table: Table) -> tuple[Slicing, ...]:
    """Return the slicings: columns of over 20 different numbers are cut into fifths of a sample of rows."""

    def sampled(name: str) -> NDArray[Any]:
        found: list[Any] = []
        for part in table.parts:
            for first, batch in table.tables(part, [name]):
                codes, values = codes_of(batch.column(0))
                hashes = part.hashes(first, len(codes))
                found.append((hashes, np.array(values, object)[codes]))
            found = [_smallest(found, MOST_SAMPLED)]
        return np.asarray(found[0][1])

    return tuple(Slicing(name, edges_of(sampled(name))) for name in table.columns.by)


def edges_of(values: Sequence[Any] | NDArray[Any]) -> tuple[float, ...] | None:
    """Return the edges between fifths of a column's values; None for texts or few numbers."""
    found = [_number(value) for value in values if value not in (None, "")]
    numbers = np.array([each for each in found if each is not None])
    # Infinite numbers lie in the outer ranges, and a row with NaN in none.
    numbers = numbers[np.isfinite(numbers)]
    if None in found or len(np.unique(numbers)) <= _MOST_NUMBERS:
        return None
    inner = np.arange(1, _RANGES) / _RANGES
    return tuple(np.unique(np.quantile(numbers, inner, method="inverted_cdf")).tolist())


def _number(value: Any) -> float | None:
    """A value as a number, or None if it is not a number; True and False are not numbers."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
