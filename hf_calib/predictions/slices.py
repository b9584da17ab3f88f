"""The slices that a column of any values defines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hf_calib._errors import check
from hf_calib.metrics.checks import IntArray

_MOST_SLICES = 1_000
_MOST_NUMBERS = 20  # Up to this many different numbers are slices of their own.
_RANGES = 5
_NO_VALUE = "(none)"
_TITLES = {None: _NO_VALUE, "": "(empty)", "-0.0": "0.0"}


def slices_of(column: str, values: Sequence[Any]) -> tuple[list[str], IntArray]:
    """Return the names of the slices, and the slice (N,) of each row: its value, or its fifth of many numbers.

    >>> slices_of("country", ["de", None, "de"])
    (['de', '(none)'], array([0, 1, 0]))
    """
    distinct = list(dict.fromkeys(values))
    places = {value: place for place, value in enumerate(distinct)}
    codes = np.array([places[value] for value in values], np.intp)
    edges = _edges(distinct, codes)
    if edges is None:
        texts = [None if value is None else str(value) for value in distinct]
        named = [_TITLES.get(text, str(text)) for text in texts]
    else:
        named = _ranges_of(column, distinct, edges)
    names = list(dict.fromkeys(named))
    requirement = f"column {column!r} to have at most {_MOST_SLICES:,} different values"
    way_out = "group them in a column of their own"
    check(len(names) <= _MOST_SLICES, requirement, f"{len(names):,}", way_out)
    numbers = {name: place for place, name in enumerate(names)}
    of_value = np.array([numbers[name] for name in named], np.intp)
    return names, of_value[codes]


def _edges(distinct: Sequence[Any], codes: IntArray) -> list[float] | None:
    """The edges between fifths of the rows, which have these codes of values; None for texts or few numbers."""
    numbers = np.full(len(distinct), np.nan)
    for place, value in enumerate(distinct):
        number = _number(value)
        if number is not None:
            numbers[place] = number
        elif value not in (None, ""):
            return None
    # Infinite numbers lie in the outer ranges, and a row with NaN in none.
    if len(np.unique(numbers[np.isfinite(numbers)])) <= _MOST_NUMBERS:
        return None
    of_rows = numbers[codes]
    inner = np.arange(1, _RANGES) / _RANGES
    finite = of_rows[np.isfinite(of_rows)]
    edges = np.quantile(finite, inner, method="inverted_cdf")
    return np.unique(edges).tolist()


def _ranges_of(column: str, values: Sequence[Any], edges: Sequence[float]) -> list[str]:
    """The name of each value's range."""
    between = [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
    ranges = [f"up to {edges[0]:g}", *between, f"above {edges[-1]:g}"]
    named = []
    for value in values:
        number = _number(value)
        if number is None or math.isnan(number):
            named.append(_NO_VALUE)
        else:
            named.append(f"{column} {ranges[np.searchsorted(edges, number)]}")
    return named


def _number(value: Any) -> float | None:
    """A value as a number, or None if it is not a number; True and False are not numbers."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
