"""`hf-calib report`: several reports side by side, in one table and one figure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from hf_calib._errors import InputValueError, expected
from hf_calib._files import check_output, whole_folder
from hf_calib.commands import console
from hf_calib.commands.source import Running, Stages, ignore_stage, name_of
from hf_calib.metrics.checks import FloatArray
from hf_calib.metrics.sums import BinSums, uniform_bins
from hf_calib.plots.binned import reliability_of_sums
from hf_calib.predictions.logs import LogOptions, is_log, load_log
from hf_calib.predictions.table import open_predictions
from hf_calib.report import report_on_predictions
from hf_calib.report.document import Bullets, Document, Figures, Table, draw
from hf_calib.report.of_predictions import report_on_table
from hf_calib.report.saved import read_report
from hf_calib.report.tables import p_cell
from hf_calib.report.text import outside_intervals, with_interval
from hf_calib.report.writing import write_document

if TYPE_CHECKING:
    from hf_calib.commands.options import Report

_REPORT = "report.json"


@dataclass(frozen=True)
class Comparison:
    """Several reports, one column for each set of probabilities.

    Args:
        reports: by name, as `CalibrationReport.to_dict` gives them.
    """

    reports: Mapping[str, Mapping[str, Any]]

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
    def notes(self) -> tuple[str, ...]:
        """Caveats of the comparison."""
        notes = outside_intervals(
            [
                {
                    key: (metric["value"], metric["low"], metric["high"])
                    for key, metric in column["metrics"].items()
                }
                for column in self.columns.values()
            ]
        )
        sizes = {name: report["n_examples"] for name, report in self.reports.items()}
        if len(set(sizes.values())) > 1:
            counts = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
            notes.insert(
                0, f"These are not the same examples ({counts}): the data may differ, not the models."
            )
        return tuple(notes)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """A header, and a row for each metric that any of them has."""
        columns = self.columns
        titles = {
            key: metric["title"] for column in columns.values() for key, metric in column["metrics"].items()
        }
        rows = [
            [title, *(_cell(column["metrics"].get(key)) for column in columns.values())]
            for key, title in titles.items()
        ]
        found = [
            column.get("consistency_test") for column in columns.values()
        ]  # none of several labels a row
        tests = ["" if test is None else p_cell(test["p_value"]) for test in found]
        if any(tests):
            rows.append(["Consistency test of the ECE (p)", *tests])
        return ["metric", *columns], rows

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        return {"reports": dict(self.reports), "notes": list(self.notes)}

    def document(self) -> Document:
        """The notes, the table, and the reliability diagrams side by side."""
        images = {"reliability": draw(self.figure())}
        captions = {"reliability": "Reliability in bins: accuracy against confidence."}
        alt_texts = {"reliability": f"Reliability diagrams of {', '.join(self.columns)}."}
        table = Table("Metrics with their intervals", *self.table(), title="Calibration compared")
        notes = [Bullets(self.notes)] if self.notes else []
        blocks = [*notes, table, Figures(images, captions, alt_texts)]
        return Document("Calibration compared", blocks)

    def figure(self) -> Figure:
        """Reliability diagrams side by side.

        Raises:
            ValueError: if the reports have different numbers of bins.
        """
        n_bins = {report["n_bins"] for report in self.reports.values()}
        if len(n_bins) > 1:
            way_out = "make the reports again with the same --n-bins"
            got = " and ".join(map(str, sorted(n_bins)))
            raise InputValueError(expected("the reports", "have the same number of bins", got, way_out))
        size = n_bins.pop()
        sums = {name: _sums_of(column["bins"], size) for name, column in self.columns.items()}
        return reliability_of_sums({"": sums})

    def write(self, folder: Path) -> None:
        """Write comparison.md, .html and .json, and the figure, into a folder."""
        write_document(self.document(), self.to_dict(), folder, "comparison")


def run(options: Report, running: Running) -> Comparison:
    """Compare, and write where it is asked for."""
    given: Any = {"label_column": options.label_column, "n_bins": options.n_bins, "output": options.output}
    return compare_reports(options.sources, stages=running.stages, **given)


def show(done: Comparison) -> None:
    """The table."""
    console.print_document(done.document())


def compare_reports(
    sources: Sequence[str],
    *,
    label_column: str = "label",
    n_bins: int = 15,
    output: Path | None = None,
    stages: Stages = ignore_stage,
) -> Comparison:
    """Compare files of predictions and saved reports.

    Args:
        sources: files of predictions (see `load_predictions`), reports (report.json), or folders with one.
        label_column: of predictions that are tables.
        n_bins: M, for predictions; saved reports have their own.
        output: a folder for comparison.md, .html and .json and the figure.
        stages: called with the name of each stage as it begins.

    Raises:
        ValueError: if a file is unreadable or not a report, or the reports differ in their bins.
        TypeError: if columns or arrays are of the wrong kind.
    """
    check_output(output)
    if len(set(sources)) < len(sources):
        way_out = "name each file once"
        raise InputValueError(expected("the sources", "be different", ", ".join(sources), way_out))
    found = [(source, _report_of(source, label_column, n_bins, stages)) for source in sources]
    names = [str(report["name"]) for _, report in found]
    all_differ = len(set(names)) == len(names)
    comparison = Comparison(
        {name if all_differ else source: report for name, (source, report) in zip(names, found, strict=True)}
    )
    comparison.figure()  # raises where the reports cannot be compared
    if output is not None:
        with whole_folder(output) as folder:
            comparison.write(folder)
    return comparison


def _report_of(source: str, label_column: str, n_bins: int, stages: Stages) -> Mapping[str, Any]:
    path = Path(source)
    inside = [path / folder / _REPORT for folder in (".", "calibration", "report", "decisions")]
    path = next((file for file in inside if os.path.isfile(file)), path)
    if path.suffix == ".json":
        return read_report(path)
    stages(f"reading {source}")
    if is_log(source):
        found = load_log(source, LogOptions(label_column))
        return report_on_predictions(found, name_of(source), n_bins).to_dict()
    return report_on_table(
        open_predictions(source, label_column=label_column), name_of(source), n_bins
    ).to_dict()


def _cell(metric: Mapping[str, Any] | None) -> str:
    if metric is None or metric["value"] is None:
        return ""
    return with_interval(metric["value"], metric["low"], metric["high"])


def _sums_of(bins: Sequence[Mapping[str, Any]], n_bins: int) -> BinSums:
    """The sums (M,) of saved bins, which are known by their mean confidence."""
    counts, confidence, accuracy = np.array(
        [[row["count"], row["confidence"], row["accuracy"]] for row in bins], dtype=np.float64
    ).T
    slots = uniform_bins(confidence, n_bins)

    def total(weights: FloatArray) -> FloatArray:
        return np.bincount(slots, weights, minlength=n_bins).astype(np.float64, copy=False)

    return BinSums(total(counts), total(counts * confidence), total(counts * accuracy))
