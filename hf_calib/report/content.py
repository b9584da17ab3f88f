"""The blocks of a report, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_calib.report.document import Block, Bullets, Document, Figures, Lead, Section, Table, draw
from hf_calib.report.text import bin_table, class_table, final_state, label_table, made_with

if TYPE_CHECKING:
    from hf_calib.report._report import CalibrationReport
    from hf_calib.report.any_report import AnyReport


def document_of(report: AnyReport, *, with_figures: bool) -> Document:
    """The blocks of a report.

    Args:
        report: of any kind.
        with_figures: whether to draw them, which takes longer than all else.
    """
    title = f"Calibration report: {report.name}"
    level = f"{100 * report.confidence_level:g}%"
    metrics = Table(f"Metrics with their {level} intervals", *report.metric_table(), title=title)
    images = {name: draw(figure) for name, figure in report.figures().items()} if with_figures else {}
    captions, alt_texts = report.captions(), report.alt_texts() if images else {}
    for each in report.slices:
        name = f"slices_{each.column}"
        captions[name] = f"Confidence minus accuracy by {each.column}, with {level} intervals."
        alt_texts[name] = each.alt_text()
    figures = Figures(images, captions, alt_texts)
    blocks = [
        Lead(report.summary()),
        Section("Diagnosis", [Bullets(report.diagnosis)]),
        *([Section("Caveats", [Bullets(report.warnings, label="Note: ")])] if report.warnings else []),
        *([Section("Figures", [figures])] if images else []),
        *report.sections(level),
        Section("Metrics", [metrics, Bullets(report.footnotes(), faint=True)]),
        *report.sections_after_the_metrics(level),
        *_slices(report, level),
        *_rows(report, level),
        Bullets([made_with()], faint=True),
    ]
    return Document(title, blocks)


def sections(report: CalibrationReport, level: str) -> list[Block]:
    """The sections after the metrics: decisions, entities, out-of-distribution inputs."""
    found: list[Block] = []
    if report.decisions is not None:
        rule = Table("What the rule does, with 95% intervals", *report.decisions.table())
        found.append(Section("Decisions", [rule, Bullets(report.decisions.sentences(), faint=True)]))
    if report.entities is not None:
        caption = f"Entities, with {level} intervals over sentences"
        scores = Table(caption, *report.entities.table(), title="Entities")
        found.append(Section("Entities", [scores, Bullets(report.entities.sentences(), faint=True)]))
    for each in report.out_of_distribution:
        caption = f"Inputs from elsewhere, with {level} intervals"
        rates = Table(caption, *each.table(), title=f"Separated from {each.name}")
        sentences = Bullets(each.sentences(), faint=True)
        found.append(Section(f"Out of distribution: {each.name}", [rates, sentences]))
    return found


def against_shares(report: CalibrationReport, level: str) -> list[Block]:
    if report.soft_labels is None:
        return []
    caption = f"Metrics against soft labels, with {level} intervals"
    shares = Table(caption, *report.soft_labels.table(), title="Against soft labels")
    how_to_read, found = report.soft_labels.sentences()[:2], report.soft_labels.sentences()[2:]
    return [Section("Against soft labels", [shares, Bullets(how_to_read, faint=True), Bullets(found)])]


def _slices(report: AnyReport, level: str) -> list[Block]:
    found: list[Block] = []
    for each in report.slices:
        rows = Table(f"Slices, with {level} intervals", *each.table(), title=f"By {each.column}")
        notes = Bullets(each.footnotes(), faint=True)
        found.append(Section(f"By {each.column}{final_state(report)}", [rows, notes]))
    return found


def _rows(report: AnyReport, level: str) -> list[Block]:
    """The tables of single bins and classes, or labels."""
    state = final_state(report)
    if report.final.overall is None:  # of several labels a row
        labels = Table(f"Labels with their {level} intervals", *label_table(report))  # type: ignore[arg-type]
        return [Section(f"Labels{state}", [labels])]
    bins = Table("Bins, those that add most to the ECE first", *bin_table(report))
    classes = Table("Classes, those with the largest class gap first", *class_table(report))
    return [
        Section(f"Bins that add most to the calibration error{state}", [bins]),
        Section(f"Classes{state}", [classes]),
    ]
