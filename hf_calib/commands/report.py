"""`hf-calib report`: several reports side by side, in one table and one figure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_calib._errors import InputValueError, expected
from hf_calib._files import check_output, whole_folder
from hf_calib.commands import console
from hf_calib.commands.source import Running, Stages, ignore_stage, name_of
from hf_calib.predictions import open_predictions
from hf_calib.report import Comparison, read_report
from hf_calib.report.making import report_on_table

if TYPE_CHECKING:
    from hf_calib.commands.options import Report

_REPORT = "report.json"


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
    return report_on_table(
        open_predictions(source, label_column=label_column), name_of(source), n_bins
    ).to_dict()
