"""`hf-calib compare-reports`: several reports side by side, in one table and one figure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_calib._errors import check, few
from hf_calib._files import check_output, whole_folder
from hf_calib.commands.source import Running, name_of
from hf_calib.predictions import read_predictions
from hf_calib.report import Comparison, read_report
from hf_calib.report.making import report_on_predictions

if TYPE_CHECKING:
    from hf_calib.commands.options import CompareReports

_FOLDERS = (".", "calibration", "report", "decisions")  # where a report.json may be


def run(options: CompareReports, running: Running) -> Comparison:
    """Compare files of predictions and saved reports."""
    sources, output = options.sources, options.output
    check_output(output)
    check(
        len(set(sources)) == len(sources),
        "the sources to differ",
        few(sources),
        "name each file once",
    )
    saved = {source: _saved_report(source) for source in sources}
    if None not in saved.values():
        options.check_unused("label_column n_bins", "predictions")
    found = {
        source: _measured(source, options, running)
        if path is None
        else read_report(path)
        for source, path in saved.items()
    }
    named = {str(report["name"]): report for report in found.values()}
    comparison = Comparison(named if len(named) == len(found) else found)
    if output is not None:
        with whole_folder(output) as folder:
            comparison.document().write(folder, comparison.to_dict(), "comparison")
    return comparison


def _saved_report(source: str) -> Path | None:
    """The report.json that a source is, or that is in it; None for predictions."""
    inside = [Path(source, folder, "report.json") for folder in _FOLDERS]
    path = next((file for file in inside if os.path.isfile(file)), Path(source))
    return path if path.suffix == ".json" else None


def _measured(
    source: str, options: CompareReports, running: Running
) -> Mapping[str, Any]:
    """The report on predictions."""
    running.stages(f"reading {source}")
    found = read_predictions(source, label_column=options.label_column).predictions
    return report_on_predictions(found, name_of(source), options.n_bins).to_dict()
