"""A report as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hf_calib._markdown import escape
from hf_calib.report.diagnosis import diagnose, warnings_about_data
from hf_calib.report.text import bin_table, class_table, final_state, footnotes, metric_table, summary

if TYPE_CHECKING:
    from hf_calib.report._report import CalibrationReport


def to_markdown(report: CalibrationReport) -> str:
    """What `CalibrationReport.to_markdown` returns."""
    lines = [f"# Calibration of {escape(report.name)}", "", summary(report), ""]
    lines += ["## Diagnosis", "", *_bullets(diagnose(report, escape))]
    warnings = warnings_about_data(report, escape)
    if warnings:
        lines += ["", "Mind:", "", *_bullets(warnings)]
    lines += ["", "## Metrics", "", *_table(*metric_table(report)), "", *_bullets(footnotes(report))]
    for title, (header, rows) in (
        ("Bins that add most to the calibration error", bin_table(report)),
        ("Classes", class_table(report, escape)),
    ):
        lines += ["", f"## {title}{final_state(report)}", "", *_table(header, rows)]
    return "\n".join(lines) + "\n"


def _bullets(sentences: Iterable[str]) -> list[str]:
    return [f"- {sentence}" for sentence in sentences]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Numbers, which is all but the first column, stand to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]
