"""The blocks of a study's report, in order."""

from __future__ import annotations

from collections.abc import Mapping

from hf_calib._errors import printable
from hf_calib.report.document import Block, Bullets, Document, Figures, Folded, Image, Lead, Section, Table
from hf_calib.study.figures import CAPTIONS, alt_texts
from hf_calib.study.results import StudyResults
from hf_calib.study.text import (
    MAIN_METRICS,
    TITLE,
    difference_table,
    headline,
    how_to_read_differences,
    how_to_read_the_main_table,
    main_table,
    metric_table,
    other_metrics,
    what_was_trained,
)


def document_of(results: StudyResults, images: Mapping[str, Image]) -> Document:
    """The blocks of a report, with its figures as drawn."""
    blocks: list[Block] = [
        Lead(headline(results)),
        Section("Advice", [Bullets(results.advice)]),
        Section("What was trained", [Bullets([printable(line) for line in what_was_trained(results)])]),
    ]
    if results.means:
        table = Table("Accuracy, NLL and ECE of each loss", *main_table(results), stacked=True)
        notes = Bullets(how_to_read_the_main_table(results), faint=True)
        blocks.append(Section("Accuracy, NLL and ECE", [table, notes]))
    if results.differences:
        table = Table("Differences in NLL and ECE", *difference_table(results, list(MAIN_METRICS)))
        notes = Bullets([how_to_read_differences(results)], faint=True)
        blocks.append(Section("Differences to the baseline", [table, notes]))
    if images:
        blocks.append(Section("Figures", [Figures(images, CAPTIONS, alt_texts(results))]))
    if results.means:
        of_metrics = [_of_metric(results, key) for key in other_metrics(results)]
        blocks.append(Section("Other metrics", of_metrics))
    if results.notes:
        notes = Bullets([printable(note) for note in results.notes], faint=True)
        blocks.append(Section("Notes", [notes]))
    return Document(TITLE, blocks)


def _of_metric(results: StudyResults, metric: str) -> Section:
    """A metric's table, and its differences behind a line to open."""
    title = results.metrics[metric]
    blocks: list[Block] = [Table(title, *metric_table(results, metric))]
    header, rows = difference_table(results, [metric])
    if rows:
        blocks.append(Folded(f"Differences in {title}", Table(title, header, rows)))
    return Section(title, blocks, level=3)
