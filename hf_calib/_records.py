"""JSON records that may come from anywhere: read within bounds of size,
with entries of the kinds that readers use.
"""

from __future__ import annotations

import json
import re
import stat
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_calib._errors import (
    InputOSError,
    InputValueError,
    check,
    expected,
    few,
    printable,
)

# JSON of this size takes less than 100 MB in memory.
_MOST_BYTES = 2**24
# A matrix for 3,600 classes.
MOST_BYTES_OF_A_MAP = 2**28
# A container takes up to 30 times the memory of its text,
# and a matrix of numbers has only one for each row.
_MOST_CONTAINERS = 300_000
_SAVE_AGAIN = "save it again with the program that wrote it"


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping of JSON; raise for a name that is there twice, of which one would be lost."""
    times = Counter(name for name, _ in pairs)
    twice = sorted(name for name in times if times[name] > 1)
    requirement = "JSON to have each name once"
    check(not twice, requirement, f"{few(twice)} twice", "leave one out")
    return dict(pairs)


def number(value: Any) -> bool:
    """Whether a value is a finite number, which a float can hold."""
    # True is an int for Python, but no number for JSON.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def positive(value: Any) -> bool:
    """Whether a value is a finite number above 0."""
    return number(value) and value > 0


def share(value: Any) -> bool:
    """Whether a value is a number in [0, 1]."""
    return number(value) and 0 <= value <= 1


def count(value: Any) -> bool:
    """Whether a value is an integer of at least 0, and of at most 63 bits."""
    return fits(value, int) and 0 <= value <= 2**63 - 1


def digest(value: Any) -> bool:
    """Whether a value is a SHA-256 in hexadecimal digits."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def or_none(kind: Any) -> Callable[[Any], bool]:
    """The kind of an entry that must be there, and may be null."""
    return lambda value: value is None or fits(value, kind)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON is of a kind, which looks like the value.

    A kind is a type, a function that decides, [kind of each], {str: kind of each}, or a dict with
    the kinds of known entries. With a "?" at the end of its name such an entry may be missing or
    null; others are free.

    >>> kind = {"n": count, "names?": [str]}
    >>> fits({"n": 3, "names": ["a"], "more": 1}, kind), fits({"n": 3, "names": None}, kind), fits({"n": None}, kind)
    (True, True, False)
    """
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(each, kind[0]) for each in value)
    if isinstance(kind, Mapping):
        return isinstance(value, Mapping) and wrong_entry(value, kind) is None
    if isinstance(kind, type):
        is_other = isinstance(value, bool) and kind is not bool
        return isinstance(value, kind) and not is_other
    return kind(value)


def wrong_entry(record: Mapping[str, Any], kinds: Mapping[Any, Any]) -> str | None:
    """The name of the first entry that is missing or of another kind."""
    if str in kinds:
        wrong = (name for name, value in record.items() if not fits(value, kinds[str]))
        return next(wrong, None)
    for key, kind in kinds.items():
        name = key.removesuffix("?")
        value = record.get(name)
        may_be_missing = name != key and value is None
        if not may_be_missing and not (name in record and fits(value, kind)):
            return name
    return None


def check_record(what: str, record: Any, kinds: Mapping[Any, Any]) -> None:
    """Raise ValueError unless this is a record with entries of these kinds."""
    is_record = isinstance(record, Mapping)
    check(
        is_record, f"{what} to hold a JSON object", type(record).__name__, _SAVE_AGAIN
    )
    wrong = wrong_entry(record, kinds)
    got = "" if wrong is None else f"{record.get(wrong)!r:.100}"
    check(wrong is None, f"{what} to hold a valid {wrong!r}", got, _SAVE_AGAIN)


def check_same_weights(
    what: str, named: str | None, weights: str | None, got: str, way_out: str
) -> None:
    """Raise if a file names the fingerprint of other weights than the model's; None is unknown."""
    is_same = named is None or weights is None or named == weights
    check(is_same, f"{what} to be for the weights of the model", got, way_out)


def read_file(path: Path, most_bytes: int) -> bytes:
    """Read a regular file of a limited size; a pipe or a device could be read without end."""
    try:
        found = path.stat()
        is_file = stat.S_ISREG(found.st_mode)
        got = "a folder, a pipe or a device"
        check(is_file, f"{path} to be a file", got, "write a file in its place")
        requirement = f"{path} to have at most {most_bytes:,} bytes"
        is_small = found.st_size <= most_bytes
        check(is_small, requirement, f"{found.st_size:,}", _SAVE_AGAIN)
        with path.open("rb") as file:
            # A file that grows in the meantime is read up to the size that was checked.
            return file.read(found.st_size)
    except OSError as error:
        got = error.strerror or str(error)
        raise InputOSError(
            expected(str(path), "be readable", got, "repair it")
        ) from error


def parse_json(
    what: str,
    content: bytes,
    kinds: Mapping[Any, Any],
    most_bytes: int = _MOST_BYTES,
) -> dict[str, Any]:
    """Return a JSON object; raise ValueError if it is damaged, too large,
    or has entries of other kinds.
    """
    n_containers = content.count(b"[") + content.count(b"{")
    is_small = len(content) <= most_bytes and n_containers <= _MOST_CONTAINERS
    requirement = f"{what} to be small enough to read"
    got = f"{len(content):,} bytes with {n_containers:,} lists and objects"
    check(is_small, requirement, got, "keep less in it")
    try:
        record = json.loads(content.decode("utf-8"), object_pairs_hook=each_once)
    except InputValueError as error:
        raise InputValueError(f"{what}: {error}") from error
    # Lists within thousands of lists exceed Python's stack.
    except (ValueError, RecursionError) as error:
        got = f"{type(error).__name__}: {printable(error)[:200]}"
        raise InputValueError(
            expected(what, "hold a JSON object", got, _SAVE_AGAIN)
        ) from error
    check_record(what, record, kinds)
    return record


def read_json(
    path: Path, kinds: Mapping[Any, Any], most_bytes: int = _MOST_BYTES
) -> dict[str, Any]:
    """Read a JSON object as `parse_json` does, from a regular file only."""
    return parse_json(str(path), read_file(path, most_bytes), kinds, most_bytes)
