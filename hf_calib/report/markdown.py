"""A report as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hf_calib._markdown import escape, markdown_table
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
        lines += ["", "## Caveats", "", *_bullets(warnings)]
    if report.decisions is not None:
        header, rows = report.decisions.table()
        lines += ["", "## Decisions", "", *markdown_table(header, rows)]
        lines += ["", *_bullets(report.decisions.sentences())]
    if report.entities is not None:
        lines += ["", "## Entities", "", *markdown_table(*report.entities.table())]
        lines += ["", *_bullets(report.entities.sentences())]
    for section in report.out_of_distribution:
        lines += [
            "",
            f"## Out of distribution: {escape(section.name)}",
            "",
            *markdown_table(*section.table()),
        ]
        lines += ["", *_bullets(section.sentences(escape))]
    lines += ["", "## Metrics", "", *markdown_table(*metric_table(report)), "", *_bullets(footnotes(report))]
    if report.soft_labels is not None:
        lines += ["", "## Against soft labels", "", *markdown_table(*report.soft_labels.table())]
        lines += ["", *_bullets(report.soft_labels.sentences())]
    for title, (header, rows) in (
        ("Bins that add most to the calibration error", bin_table(report)),
        ("Classes", class_table(report, escape)),
    ):
        lines += ["", f"## {title}{final_state(report)}", "", *markdown_table(header, rows)]
    return "\n".join(lines) + "\n"


def _bullets(sentences: Iterable[str]) -> list[str]:
    return [f"- {sentence}" for sentence in sentences]
