"""Saved reports, read back and checked before any of them is used, and several of them side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hf_calib._errors import InputValueError, check, expected
from hf_calib.metrics.sums import BinSums, Interval, add_to, uniform_bins
from hf_calib.plots.binned import reliability_of_sums
from hf_calib.report.diagnosis import outside_intervals
from hf_calib.report.document import Bullets, Document, Figures, Table, draw
from hf_calib.report.report import MULTI_LABEL
from hf_calib.report.rows import Cells, p_cell, table_of

_WAY_OUT = "pass a report.json as hf-calib evaluate or calibrate wrote it"


@dataclass(frozen=True)
class Comparison:
    """Several reports by name, as `CalibrationReport.to_dict` gives them; one column for each set of probabilities.

    Raises:
        ValueError: if the reports have different numbers of bins.
    """

    reports: Mapping[str, Mapping[str, Any]]

    def __post_init__(self) -> None:
        n_bins = sorted({report["n_bins"] for report in self.reports.values()})
        way_out, got = "make the reports again with the same --n-bins", " and ".join(map(str, n_bins))
        check(len(n_bins) == 1, "the reports to have the same number of bins", got, way_out)

    @property
    def columns(self) -> dict[str, Mapping[str, Any]]:
        """The measured sets by name; a report on a calibration has two, before and after."""
        found = {}
        for name, report in self.reports.items():
            if report["after"] is None:
                found[name] = report["before"]
            else:
                found |= {f"{name}, {state}": report[state] for state in ("before", "after")}
        return found

    @property
    def metrics(self) -> dict[str, dict[str, Interval]]:
        """Those of each column that have a value."""
        return {
            name: {
                key: Interval(*(each[part] for part in Interval._fields))
                for key, each in column["metrics"].items()
                if each["value"] is not None
            }
            for name, column in self.columns.items()
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats of the comparison."""
        notes = outside_intervals(list(self.metrics.values()))
        sizes = {name: report["n_examples"] for name, report in self.reports.items()}
        if len(set(sizes.values())) > 1:
            counts = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
            same = f"These are not the same examples ({counts}): the data may differ, not the models."
            notes = [same, *notes]
        return tuple(notes)

    def table(self) -> Cells:
        """A header, and a row for each metric that any of them has."""
        found = self.columns.values()
        titles = {key: each["title"] for column in found for key, each in column["metrics"].items()}
        header, rows = table_of("metric", titles, self.metrics)
        tests = [column.get("consistency_test") for column in found]  # none of several labels a row
        if any(tests):
            cells = ["" if test is None else p_cell(test["p_value"]) for test in tests]
            rows.append(["Consistency test of the ECE (p)", *cells])
        return header, rows

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        return {"reports": dict(self.reports), "notes": list(self.notes)}

    def document(self) -> Document:
        """The notes, the table, and the reliability diagrams side by side."""
        images = {"reliability": draw(self.figure())}
        figures = Figures(images, {"reliability": "Reliability in bins: accuracy against confidence."})
        table = Table("Metrics with their intervals", *self.table(), title="Calibration compared")
        notes = [Bullets(self.notes)] if self.notes else []
        return Document("Calibration compared", [*notes, table, figures])

    def figure(self) -> Figure:
        """Reliability diagrams side by side; the bins of a saved report are known by their mean confidence."""
        size = next(iter(self.reports.values()))["n_bins"]
        found = {}
        for name, column in self.columns.items():
            rows = [[row["count"], row["confidence"], row["accuracy"]] for row in column["bins"]]
            counts, confidence, accuracy = np.array(rows, dtype=np.float64).T
            sums = BinSums(*np.zeros((3, size)))
            terms = counts, counts * confidence, counts * accuracy
            add_to(sums, uniform_bins(confidence, size), terms)  # type: ignore[arg-type]
            found[name] = sums
        return reliability_of_sums({"": found})

    def write(self, folder: Path) -> None:
        """Write comparison.md, .html and .json, and the figure, into a folder."""
        self.document().write(folder, self.to_dict(), "comparison")


def _is_number(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


# What an entry of a report has to be, in words, and whether a value is that.
_KINDS = {
    "an object": lambda value: isinstance(value, dict),
    "a list": lambda value: isinstance(value, list),
    "a text": lambda value: isinstance(value, str),
    "an integer of at least 1": lambda value: _is_number(value, 1) and isinstance(value, int),
    "a number": lambda value: value is None or _is_number(value),
    "a number from 0 to 1": lambda value: _is_number(value, 0, 1),
}
_COUNT, _SHARE = "an integer of at least 1", "a number from 0 to 1"
_METRIC = {"title": "a text", **dict.fromkeys(("value", "low", "high"), "a number")}
# The entries that a comparison reads; "*" stands for every name.
_STATE = {"metrics": {"*": _METRIC}, "bins": [{"count": _COUNT, "confidence": _SHARE, "accuracy": _SHARE}]}


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
    several = isinstance(record, dict) and record.get("kind") == MULTI_LABEL
    n_rows = "n_decisions" if several else "n_examples"
    state = _STATE if several else {**_STATE, "consistency_test": {"p_value": _SHARE}}
    of_report = {"name": "a text", "n_examples": _COUNT, n_rows: _COUNT, "n_bins": _COUNT, "before": state}
    is_alone = isinstance(record, dict) and record.get("after", "") is None
    _check_entry(record, of_report if is_alone else {**of_report, "after": state}, "", path)
    for name in ("before",) if is_alone else ("before", "after"):
        bins = record[name]["bins"]
        counted, place = sum(row["count"] for row in bins), f"the report's {name}.bins"
        fits, most = len(bins) <= record["n_bins"], f"{place} to be at most n_bins = {record['n_bins']}"
        check(fits, most, f"{len(bins)} in {path}", _WAY_OUT)
        rows = f"{record[n_rows]} {n_rows.removeprefix('n_')} of {n_rows}"
        check(counted == record[n_rows], f"{place} to count the {rows}", f"{counted} in {path}", _WAY_OUT)
    return dict(record)


def _check_entry(value: Any, kind: Any, place: str, path: Path) -> None:
    """Raise unless a value is of a kind of `_KINDS`, or holds entries of such."""
    word = kind if isinstance(kind, str) else "a list" if isinstance(kind, list) else "an object"
    where = f"the report's {place}" if place else "the report"
    check(_KINDS[word](value), f"{where} to be {word}", f"{str(value)[:60]} in {path}", _WAY_OUT)
    if isinstance(kind, list):
        for i, each in enumerate(value):
            _check_entry(each, kind[0], f"{place}[{i}]", path)
    elif isinstance(kind, dict):
        for name in value if "*" in kind else kind:
            inside = f"{place}.{name}".lstrip(".")
            check(name in value, f"the report's {inside} to be there", f"nothing in {path}", _WAY_OUT)
            _check_entry(value[name], kind.get("*", kind.get(name)), inside, path)


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number
