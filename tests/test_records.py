"""Records in JSON files: only regular files of a limited size are read, and each entry is of its kind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_calib._errors import InputError, InputValueError
from hf_calib._records import count, number, or_none, parse_json, read_json, wrong_entry
from hf_calib.decisions import Decisions
from hf_calib.scaling import load_map


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


NO_FILES: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "device": link_to("/dev/zero"),
    "folder": Path.mkdir,
    "link to nothing": link_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path),
}
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "record": ("record.json", lambda path: read_json(path, {})),
    "calibrator": ("calibration.json", load_map),
    "folder of a calibrator": ("calibration.json", lambda path: load_map(path.parent)),
    "decisions": (
        "decisions.json",
        lambda path: Decisions.from_pretrained(path.parent),
    ),
}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_not_read(kind: str, reader: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    NO_FILES[kind](tmp_path / name)
    with pytest.raises(InputError, match=r"^expected .*; ") as found:
        read(tmp_path / name)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan"), float("inf")])
def test_what_is_beyond_a_float_is_no_number(value: Any) -> None:
    assert not number(value)
    assert not count(value)


def test_null_is_of_no_kind_but_where_an_entry_may_be_missing_or_null() -> None:
    kinds = {"a": int, "b?": int, "c": or_none(int)}
    assert wrong_entry({"a": 1, "b": None, "c": None}, kinds) is None
    assert wrong_entry({"a": 1, "c": 2}, kinds) is None
    assert wrong_entry({"a": None, "c": 2}, kinds) == "a"
    assert wrong_entry({"a": 1}, kinds) == "c"
    assert wrong_entry({"a": 1, "b": "2", "c": None}, kinds) == "b"


def test_true_is_no_integer_and_names_may_end_in_a_question_mark() -> None:
    assert wrong_entry({"a": True}, {"a": int}) == "a"
    assert wrong_entry({"why?": "x"}, {str: int}) == "why?"


def test_a_name_that_is_there_twice_is_refused() -> None:
    """Readers take the last one, others the first."""
    with pytest.raises(
        InputValueError, match=r"the file: .* each name once, got a twice"
    ):
        parse_json("the file", b'{"a": 1, "b": 2, "a": 3}', {})
