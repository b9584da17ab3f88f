"""Saved reports: a report.json read back, and checked before any of it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_calib._errors import InputValueError, expected

MULTI_LABEL = "multi_label"  # the kind of a record of several labels a row
_WAY_OUT = "pass a report.json as hf-calib evaluate or calibrate wrote it"


def read_report(path: Path) -> dict[str, Any]:
    """The record that `CalibrationReport.to_dict` made.

    Raises:
        ValueError: if the file is unreadable, or anything that a comparison of reports shows is missing or
            impossible in it; the message names the entry.
    """
    try:
        text = path.read_text(encoding="utf-8")
        record = json.loads(text, parse_constant=_finite_number, parse_float=_finite_number)
    except (OSError, ValueError, RecursionError) as error:
        got = f"{path} ({error})"
        raise InputValueError(expected("the report", "be readable as JSON", got, _WAY_OUT)) from error
    check = _Checker(path)
    check.is_a(record, Mapping, "")
    check.text(record, "name")
    n_examples = check.count(record, "n_examples")
    n_bins = check.count(record, "n_bins")
    multi_label = record.get("kind") == MULTI_LABEL
    if multi_label:
        n_examples = check.count(record, "n_decisions")  # what is in the bins
    check.entry(record, "before")
    check.entry(record, "after")
    for state in ("before", "after"):
        if state == "before" or record["after"] is not None:
            found = check.is_a(record[state], Mapping, state)
            _check_state(check, found, state, n_examples, n_bins)
            if not multi_label:
                _check_test(check, found, state)
    return dict(record)


def _check_state(check: _Checker, state: Mapping[str, Any], where: str, n_examples: int, n_bins: int) -> None:
    metrics = check.is_a(check.entry(state, "metrics", where), Mapping, f"{where}.metrics")
    for key, metric in metrics.items():
        place = f"{where}.metrics.{key}"
        check.is_a(metric, Mapping, place)
        check.text(metric, "title", place)
        for name in ("value", "low", "high"):
            check.number(metric, name, place, optional=True)
    bins = check.is_a(check.entry(state, "bins", where), list, f"{where}.bins")
    counted = 0
    for i, row in enumerate(bins):
        place = f"{where}.bins[{i}]"
        check.is_a(row, Mapping, place)
        counted += check.count(row, "count", place)
        check.number(row, "confidence", place, low=0, high=1)
        check.number(row, "accuracy", place, low=0, high=1)
    check.that(len(bins) <= n_bins, f"{where}.bins", f"be at most n_bins = {n_bins}", len(bins))
    what = "decisions of n_decisions" if "labels" in state else "examples of n_examples"
    requirement = f"count the {n_examples} {what}"
    check.that(counted == n_examples, f"{where}.bins", requirement, counted)


def _check_test(check: _Checker, state: Mapping[str, Any], where: str) -> None:
    test = check.is_a(check.entry(state, "consistency_test", where), Mapping, f"{where}.consistency_test")
    check.number(test, "p_value", f"{where}.consistency_test", low=0, high=1)


class _Checker:
    """Refusals that name the file and the entry."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def that(self, holds: bool, place: str, requirement: str, got: object) -> None:
        if not holds:
            shown = f"{str(got)[:60]} in {self.path}"
            argument = f"the report's {place}" if place else "the report"
            raise InputValueError(expected(argument, requirement, shown, _WAY_OUT))

    def is_a(self, value: Any, kind: type, place: str) -> Any:
        name = "a list" if kind is list else "an object"
        self.that(isinstance(value, kind), place, f"be {name}", value)
        return value

    def entry(self, record: Mapping[str, Any], name: str, where: str = "") -> Any:
        self.that(name in record, f"{where}.{name}".lstrip("."), "be there", "nothing")
        return record[name]

    def text(self, record: Mapping[str, Any], name: str, where: str = "") -> None:
        value = self.entry(record, name, where)
        self.that(isinstance(value, str), f"{where}.{name}".lstrip("."), "be a text", value)

    def count(self, record: Mapping[str, Any], name: str, where: str = "") -> int:
        value = self.entry(record, name, where)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        self.that(is_count, f"{where}.{name}".lstrip("."), "be an integer of at least 1", value)
        return int(value)

    def number(
        self,
        record: Mapping[str, Any],
        name: str,
        where: str,
        *,
        low: float = float("-inf"),
        high: float = float("inf"),
        optional: bool = False,
    ) -> None:
        value = self.entry(record, name, where)
        if value is None and optional:
            return
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        requirement = "be a number" if high == float("inf") else f"be a number from {low:g} to {high:g}"
        self.that(is_number and low <= value <= high, f"{where}.{name}", requirement, value)


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number
