"""A study's report as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hf_calib._markdown import escape, markdown_table
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
    printable,
    what_was_trained,
)


def to_markdown(results: StudyResults, figures: Sequence[str]) -> str:
    """The whole report; the figures, which are named, lie in a folder beside it."""
    lines = [f"# {TITLE}", "", headline(results), "", "## Advice", "", *_bullets(results.advice)]
    lines += ["", "## What was trained", "", *_bullets(what_was_trained(results))]
    if results.means:
        lines += ["", "## Accuracy, NLL and ECE", "", *_table(main_table(results, escape))]
        lines += ["", *_bullets(how_to_read_the_main_table(results))]
    if results.differences:
        lines += ["", "## Differences to the baseline", ""]
        lines += [*_table(difference_table(results, list(MAIN_METRICS), escape)), ""]
        lines += _bullets([how_to_read_differences(results)])
    if figures:
        lines += ["", "## Figures"]
        alts = alt_texts(results)
        for name in figures:
            lines += ["", f"![{escape(alts[name])}](figures/{name}.png)", "", CAPTIONS[name]]
    if results.means:
        lines += ["", "## Other metrics"]
    for metric in other_metrics(results) if results.means else ():
        lines += ["", f"### {escape(results.metrics[metric])}", ""]
        lines += _table(metric_table(results, metric, escape))
        if any(key[2] == metric for key in results.differences):
            lines += ["", *_table(difference_table(results, [metric], escape))]
    if results.notes:
        lines += ["", "## Notes", "", *_bullets(results.notes)]
    return "\n".join(lines) + "\n"


def _bullets(sentences: Iterable[str]) -> list[str]:
    return [f"- {escape(printable(sentence))}" for sentence in sentences]


def _table(table: Table) -> list[str]:
    header, rows = table
    return markdown_table([cell.replace("\n", " ") for cell in header], rows)
