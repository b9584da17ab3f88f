"""A report as one HTML file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_calib.report.figures import CAPTIONS, alt_texts
from hf_calib.report.page import bullets, draw, figures, lead, page, section, table
from hf_calib.report.text import bin_table, class_table, final_state, footnotes, metric_table, summary

if TYPE_CHECKING:
    from hf_calib.report._report import CalibrationReport
    from hf_calib.report.decisions import DecisionSection
    from hf_calib.report.entities import EntitySection
    from hf_calib.report.out_of_distribution import OodSection
    from hf_calib.report.soft_labels import SoftLabelSection


def to_html(report: CalibrationReport) -> str:
    """What `CalibrationReport.to_html` returns."""
    state = final_state(report)
    level = f"{100 * report.confidence_level:g}%"
    bins = table("Bins, those that add most to the ECE first", *bin_table(report))
    classes = table("Classes, those with the largest class gap first", *class_table(report))
    metrics = table(f"Metrics with their {level} bootstrap intervals", *metric_table(report))
    images = {name: draw(figure) for name, figure in report.figures().items()}
    parts = [
        lead(summary(report)),
        section("Diagnosis", bullets(report.diagnosis)),
        section("Caveats", bullets(report.warnings)) if report.warnings else "",
        _decisions(report.decisions) if report.decisions is not None else "",
        _entities(report.entities, level) if report.entities is not None else "",
        *(_elsewhere(found, level) for found in report.out_of_distribution),
        section("Metrics", metrics, bullets(footnotes(report), "notes")),
        _against_shares(report.soft_labels, level) if report.soft_labels is not None else "",
        section("Figures", figures(images, CAPTIONS, alt_texts(report))),
        section(f"Bins that add most to the calibration error{state}", bins),
        section(f"Classes{state}", classes),
    ]
    return page(f"Calibration of {report.name}", parts)


def _decisions(decisions: DecisionSection) -> str:
    rule = table("What the rule does, with 95% intervals", *decisions.table())
    return section("Decisions", rule, bullets(decisions.sentences(), "notes"))


def _entities(entities: EntitySection, level: str) -> str:
    scores = table(f"Entities, with {level} intervals over sentences", *entities.table())
    return section("Entities", scores, bullets(entities.sentences(), "notes"))


def _elsewhere(found: OodSection, level: str) -> str:
    rates = table(f"Inputs from elsewhere, with {level} intervals", *found.table())
    return section(f"Out of distribution: {found.name}", rates, bullets(found.sentences(), "notes"))


def _against_shares(found: SoftLabelSection, level: str) -> str:
    shares = table(f"Metrics against soft labels, with {level} bootstrap intervals", *found.table())
    return section("Against soft labels", shares, bullets(found.sentences(), "notes"))
