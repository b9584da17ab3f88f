"""A study's report as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping

from hf_calib.report.page import Image, bullets, figures, folded, lead, page, section, table
from hf_calib.report.text import Table
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


def to_html(results: StudyResults, images: Mapping[str, Image]) -> str:
    """The whole report, with the figures in it."""
    parts = [
        lead(headline(results)),
        section("Advice", bullets(results.advice)),
        section("What was trained", bullets(what_was_trained(results))),
    ]
    if results.means:
        shown = table("Accuracy, NLL and ECE of each loss", *_stacked(main_table(results)))
        parts.append(
            section("Accuracy, NLL and ECE", shown, bullets(how_to_read_the_main_table(results), "notes"))
        )
    if results.differences:
        shown = table("Differences in NLL and ECE", *difference_table(results, list(MAIN_METRICS)))
        parts.append(
            section(
                "Differences to the baseline", shown, bullets([how_to_read_differences(results)], "notes")
            )
        )
    if images:
        parts.append(section("Figures", figures(images, CAPTIONS, alt_texts(results))))
    if results.means:
        parts.append(section("Other metrics", *(_of_metric(results, key) for key in other_metrics(results))))
    if results.notes:
        parts.append(section("Notes", bullets(results.notes, "notes")))
    return page(TITLE, parts)


def _of_metric(results: StudyResults, metric: str) -> str:
    """A metric's table, and its differences behind a line to open."""
    title = results.metrics[metric]
    shown = table(title, *metric_table(results, metric))
    header, rows = difference_table(results, [metric])
    return shown + "\n" + folded(f"Differences in {title}", table(title, header, rows)) if rows else shown


def _stacked(wide: Table) -> Table:
    """A table with the intervals below their values."""
    header, rows = wide
    return header, [[name, *(cell.replace(" [", "\n[") for cell in cells)] for name, *cells in rows]
