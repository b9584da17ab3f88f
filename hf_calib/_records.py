"""JSON records that may come from anywhere: read within bounds of size, with entries of the kinds that readers use."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_calib._errors import InputOSError, check, expected, printable

# JSON of this size takes less than 100 MB in memory.
_MOST_BYTES = 2**24
_MOST_CONTAINERS = 300_000
_SAVE_AGAIN = "save it again with the program that wrote it"


def number(value: Any) -> bool:
    """Whether a value is a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def positive(value: Any) -> bool:
    """Whether a value is a finite number above 0."""
    return number(value) and value > 0


def count(value: Any) -> bool:
    """Whether a value is an integer of at least 0."""
    return isinstance(value, int) and number(value) and value >= 0


def digest(value: Any) -> bool:
    """Whether a value is a SHA-256 in hexadecimal digits."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON is of a kind, which looks like the value.

    A kind is a type, a function that decides, [kind of each], {str: kind of each}, or a dict with the kinds of known
    entries. Such an entry may be null, and with a "?" at the end of its name it may be missing; others are free.

    >>> kind = {"n": count, "names?": [str]}
    >>> fits({"n": 3, "names": ["a"], "more": 1}, kind), fits({"n": None}, kind), fits({}, kind), fits({"n": -1}, kind)
    (True, True, False, False)
    """
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(each, kind[0]) for each in value)
    if isinstance(kind, Mapping):
        return isinstance(value, Mapping) and wrong_entry(value, kind) is None
    return isinstance(value, kind) if isinstance(kind, type) else kind(value)


def wrong_entry(record: Mapping[str, Any], kinds: Mapping[Any, Any]) -> str | None:
    """The name of the first entry that is missing or of another kind."""
    if str in kinds:
        kinds = dict.fromkeys(record, kinds[str])
    for key, kind in kinds.items():
        name = key.removesuffix("?")
        value = record.get(name)
        is_there = name in record or name != key
        if not is_there or not (value is None or fits(value, kind)):
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


def read_json(path: Path, kinds: Mapping[Any, Any]) -> dict[str, Any]:
    """Read a JSON object; raise ValueError if it is damaged, too large, or has entries of other kinds."""
    try:
        n_bytes = path.stat().st_size
        content = path.read_bytes() if n_bytes <= _MOST_BYTES else b""
        n_containers = content.count(b"[") + content.count(b"{")
        is_small = n_bytes <= _MOST_BYTES and n_containers <= _MOST_CONTAINERS
        record = json.loads(content.decode("utf-8")) if is_small else {}
        reason = "" if is_small else f"one of {n_bytes:,} bytes"
    except OSError as error:
        got = error.strerror or error
        raise InputOSError(
            expected(str(path), "be readable", got, "repair it")
        ) from error
    except (ValueError, RecursionError) as error:
        record = {}
        reason = f"{type(error).__name__}: {printable(error)[:200]}"
    check(not reason, f"{path} to hold a JSON object", reason, _SAVE_AGAIN)
    check_record(str(path), record, kinds)
    return record
