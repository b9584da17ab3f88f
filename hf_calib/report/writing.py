"""A calibration report as a folder of files."""

from __future__ import annotations

import json
from pathlib import Path

from hf_calib._files import whole_folder
from hf_calib.plots import save_figure
from hf_calib.report._report import CalibrationReport
from hf_calib.report.multi_label import MultiLabelReport


def write_report(report: CalibrationReport | MultiLabelReport, folder: Path) -> None:
    """Write report.md, report.html, report.json and the figures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(report.to_markdown(), encoding="utf-8")
    (folder / "report.html").write_text(report.to_html(), encoding="utf-8")
    record = json.dumps(report.to_dict(), indent=2, allow_nan=False)
    (folder / "report.json").write_text(record + "\n", encoding="utf-8")
    for name, figure in report.figures().items():
        save_figure(figure, folder / "figures" / f"{name}.png")


def write_to(output: Path | None, report: CalibrationReport | MultiLabelReport) -> None:
    if output is not None:
        with whole_folder(output) as folder:
            write_report(report, folder)
