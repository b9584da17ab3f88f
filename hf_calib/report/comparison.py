"""Several saved reports side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_calib._errors import InputValueError, check, expected
from hf_calib._records import (
    check_record,
    count,
    fits,
    number,
    or_none,
    read_json,
    share,
)
from hf_calib.metrics.checks import check_integer, check_n_bins, check_type
from hf_calib.metrics.sums import BinSums, Interval, add_to, uniform_bins
from hf_calib.plots.binned import reliability_of_sums
from hf_calib.report.document import (
    Bullets,
    Cells,
    Document,
    Figures,
    Table,
    columns,
    draw,
    p_cell,
    table_of,
)
from hf_calib.report.measured import ECE_INTERVALS

_INTERVAL = dict.fromkeys(Interval._fields, or_none(number))
_METRIC = {"title": str, **_INTERVAL}
_OVERALL = {
    **dict.fromkeys(("gap", "low", "high"), or_none(number)),
    **dict.fromkeys(("confidence", "accuracy"), or_none(number)),
    "p_value": or_none(share),
    "n_examples": count,
    "verdict": str,
}
_BIN = dict.fromkeys(("lower?", "upper?", "gap?", "contribution?", "p_value?"), number)
_STATE = {
    "metrics": dict,
    "bins": [_BIN],
    "overall?": _OVERALL,
    "gap?": _INTERVAL,
    "consistency_test?": dict.fromkeys(("value", "p_value", "expected"), number),
    "classes?": [dict],
    "labels?": [dict],
}
_KINDS = {
    "name": str,
    "verdict": str,
    "confidence_level": share,
    "n_resamples": count,
    "seed": int,
    "before": _STATE,
    "after": or_none(_STATE),
    "nll_change?": _INTERVAL,
    "diagnosis?": [str],
    "warnings?": [str],
    "out_of_distribution?": [dict],
    "slices?": [dict],
    **dict.fromkeys(("decisions?", "soft_labels?", "entities?", "about?"), dict),
}
_ROUNDING = 1e-9
_WAY_OUT = "pass a report.json of hf-calib evaluate or calibrate"


@dataclass(frozen=True)
class Comparison:
    """Several reports with the same bins, by name, as `to_dict` gives them; a column for each set of probabilities."""

    reports: Mapping[str, Mapping[str, Any]]

    def __post_init__(self) -> None:
        n_bins = sorted({report["n_bins"] for report in self.reports.values()})
        way_out, got = (
            "make the reports again with the same --n-bins",
            " and ".join(map(str, n_bins)),
        )
        check(
            len(n_bins) == 1,
            "the reports to have the same number of bins",
            got,
            way_out,
        )

    @property
    def columns(self) -> dict[str, Mapping[str, Any]]:
        """The measured sets by name; a report on a calibration has two, before and after."""
        found = {}
        for name, report in self.reports.items():
            for state, column in columns(report["before"], report["after"]).items():
                found[name if state == "value" else f"{name}, {state}"] = column
        return found

    @property
    def metrics(self) -> dict[str, dict[str, Interval]]:
        """The metrics of each column that have a value."""
        found = {}
        for name, column in self.columns.items():
            known = {
                key: each
                for key, each in column["metrics"].items()
                if each["value"] is not None
            }
            found[name] = {
                key: Interval(*map(each.get, Interval._fields))
                for key, each in known.items()
            }
        return found

    @property
    def bins(self) -> dict[str, BinSums]:
        """The sums (M,) of each column; the mean confidence of a report's bin says which bin it is."""
        size = next(iter(self.reports.values()))["n_bins"]
        found = {name: BinSums(*np.zeros((3, size))) for name in self.columns}
        for name, column in self.columns.items():
            rows = [
                [row["count"], row["confidence"], row["accuracy"]]
                for row in column["bins"]
            ]
            counts, confidence, accuracy = np.array(rows, dtype=np.float64).T
            terms: Any = counts, counts * confidence, counts * accuracy
            add_to(found[name], uniform_bins(confidence, size), terms)  # type: ignore[arg-type]
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats of the comparison."""
        notes = (
            [ECE_INTERVALS]
            if any("ece" in found for found in self.metrics.values())
            else []
        )
        sizes = {name: report["n_examples"] for name, report in self.reports.items()}
        if len(set(sizes.values())) > 1:
            counts = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
            notes.insert(
                0,
                f"The examples are not the same ({counts}): the data may differ, not the models.",
            )
        return tuple(notes)

    def table(self) -> Cells:
        """A header, and a row for each metric that any column has."""
        found = self.columns.values()
        titles = {
            key: each["title"]
            for column in found
            for key, each in column["metrics"].items()
        }
        tests = [
            column.get("consistency_test") for column in found
        ]  # Multi-label reports have none.
        header, rows = table_of("metric", titles, self.metrics)
        if any(tests):
            cells = ["" if test is None else p_cell(test["p_value"]) for test in tests]
            rows.append(["Consistency test of the ECE (p)", *cells])
        return header, rows

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison in JSON types."""
        return {"reports": dict(self.reports), "notes": list(self.notes)}

    def document(self) -> Document:
        """The verdicts, the notes, the table, and the reliability diagrams side by side."""
        captions = {"reliability": "Reliability in bins: accuracy against confidence."}
        table = Table(
            "Metrics with their intervals", *self.table(), title="Calibration compared"
        )
        figures = Figures(
            {"reliability": draw(reliability_of_sums({"": self.bins}))}, captions
        )
        verdicts = Bullets(
            [f"{name}: {report['verdict']}" for name, report in self.reports.items()]
        )
        return Document(
            "Calibration compared", [verdicts, Bullets(self.notes), table, figures]
        )


def read_report(path: Path) -> dict[str, Any]:
    """Read a report.json, the record of `CalibrationReport.to_dict`.

    Raises:
        ValueError: if the file is not JSON, or lacks something that a comparison of reports shows.
    """
    requirement = "be readable as JSON"
    try:
        record = read_json(path, {})
        json.dumps(record, allow_nan=False)
        requirement = "hold metrics and bins"
        _check_possible(record)
        alone = Comparison({record["name"]: record})
        _ = alone.notes, alone.table(), alone.bins
    except (
        OSError,
        ValueError,
        RecursionError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        got = f"{path} ({type(error).__name__}: {error})"
        raise InputValueError(
            expected("the report", requirement, got, _WAY_OUT)
        ) from error
    return record


def _check_possible(record: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError for values that no report has, such as counts that are not those of its rows."""
    check_record("the report", record, _KINDS)
    several = record.get("kind") == "multi_label"
    n_bins = check_n_bins(record["n_bins"])
    n_examples = check_integer("n_examples", record["n_examples"], 1, _WAY_OUT)
    if several:
        n_examples = check_integer("n_decisions", record["n_decisions"], 1, _WAY_OUT)
    numbers = []
    check_integer("n_classes", record["n_classes"], 1, _WAY_OUT)
    for state in filter(None, (record["before"], record["after"])):
        requirement = "the metrics to be those of a report, each in its range"
        check(are_metrics(state["metrics"]), requirement, "others", _WAY_OUT)
        rows = state["bins"]
        counts = [check_integer("a count", row["count"], 1, _WAY_OUT) for row in rows]
        fits = len(rows) <= n_bins and sum(counts) == n_examples
        check(fits, f"bins to count {n_examples:,} examples", sum(counts), _WAY_OUT)
        shares = [row[name] for row in rows for name in ("confidence", "accuracy")]
        if not several:
            shares.append(state["consistency_test"]["p_value"])
        check(
            all(0 <= each <= 1 for each in shares),
            "shares in [0, 1]",
            "others",
            _WAY_OUT,
        )
        numbers += shares
    kinds = {type(each) for each in numbers}
    check_type(kinds <= {int, float}, "bins to hold numbers", kinds, _WAY_OUT)


def are_metrics(found: Any) -> bool:
    """Whether a value of JSON may be the metrics of a report, each in its range."""
    return fits(found, dict) and all(_is_metric(*each) for each in found.items())


def _is_metric(key: str, metric: Any) -> bool:
    """Whether a value of JSON may be the metric of this key, with an interval or without one."""
    if not fits(metric, _METRIC):
        return False
    value, low, high = map(metric.get, Interval._fields)
    known = [each for each in (value, low, high) if each is not None]
    most = 1.0
    if "brier" in key:
        most = 2.0
    if "nll" in key:
        most = math.inf
    is_inside = all(-_ROUNDING <= each <= most + _ROUNDING for each in known)
    has_ends = None not in (low, high)
    return is_inside and (low <= high if has_ends else low is high)
