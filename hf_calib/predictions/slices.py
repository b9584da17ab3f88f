"""The slices that a column of any values defines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hf_calib._errors import check
from hf_calib.metrics.checks import FloatArray, IntArray

# More different texts are ids of rows rather than names of groups.
_MOST_SLICES = 1_000
# Up to this many different numbers are slices of their own.
_MOST_NUMBERS = 20
_RANGES = 5
_NO_VALUE = "(none)"
# Zeros of both signs are equal, and one slice.
_TITLES = {None: _NO_VALUE, "": "(empty)", "-0.0": "0.0"}


def slices_of(column: str, values: Sequence[Any]) -> tuple[list[str], IntArray]:
    """Return the names of the slices, and the slice (N,) of each row: its value,
    or its fifth of many numbers.

    >>> slices_of("country", ["de", None, "de"])
    (['de', '(none)'], array([0, 1, 0]))
    """
    distinct = list(dict.fromkeys(values))
    places = {value: place for place, value in enumerate(distinct)}
    codes = np.array([places[value] for value in values], np.intp)
    numbers = _numbers(distinct)
    edges = None if numbers is None else _edges(numbers[codes])
    if numbers is None or edges is None:
        texts = [None if value is None else str(value) for value in distinct]
        named = [_TITLES.get(text, str(text)) for text in texts]
    else:
        shown = _shown(edges)
        titles = [f"{column} up to {shown[0]}"]
        titles += [f"{column} {low} to {high}" for low, high in pairwise(shown)]
        titles += [f"{column} above {shown[-1]}", _NO_VALUE]
        ranges = np.searchsorted(edges, numbers)
        # `searchsorted` places NaN behind the last edge.
        ranges[np.isnan(numbers)] = len(titles) - 1
        named = [titles[place] for place in ranges]
    names = list(dict.fromkeys(named))
    requirement = f"column {column!r} to have at most {_MOST_SLICES:,} different values"
    way_out = "group them in a column of their own"
    check(len(names) <= _MOST_SLICES, requirement, f"{len(names):,}", way_out)
    numbers_of_names = {name: place for place, name in enumerate(names)}
    of_value = np.array([numbers_of_names[name] for name in named], np.intp)
    return names, of_value[codes]


def _numbers(values: Sequence[Any]) -> FloatArray | None:
    """Values as numbers, NaN for missing ones; None if one is a text, True or False."""
    numbers = []
    for value in values:
        # float(True) is 1, but the slice is named True.
        if isinstance(value, bool):
            return None
        try:
            numbers.append(math.nan if value in (None, "") else float(value))
        except (TypeError, ValueError):
            return None
    return np.array(numbers)


def _edges(numbers: FloatArray) -> list[float] | None:
    """The edges between fifths of the rows; None for few different numbers."""
    # Infinite numbers lie in the outer ranges, and a row with NaN in none.
    finite = numbers[np.isfinite(numbers)]
    if len(np.unique(finite)) <= _MOST_NUMBERS:
        return None
    inner = np.arange(1, _RANGES) / _RANGES
    # The method gives values of the column itself: between integers, edges are
    # integers. A frequent value may be several of the edges.
    edges = np.quantile(finite, inner, method="inverted_cdf")
    return np.unique(edges).tolist()


def _shown(edges: Sequence[float]) -> list[str]:
    """The edges as texts that differ, as ranges with one name would become one slice."""
    # Dates and times are large numbers, whose last digits matter.
    n_whole = len(str(int(max(map(abs, edges)))))
    digits = min(max(n_whole, 6), 15)
    while True:
        shown = [f"{edge:.{digits}g}" for edge in edges]
        # Different numbers differ in 17 digits.
        if len(set(shown)) == len(edges):
            return shown
        digits += 1
