"""The report of a study as files and on a terminal: its text, tables and figures."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_calib._errors import printable
from hf_calib._files import whole_folder
from hf_calib._text import counted
from hf_calib.report.document import (
    Block,
    Bullets,
    Document,
    Lead,
    Section,
    Table,
    p_cell,
    with_interval,
)
from hf_calib.study.advice import MAIN_METRICS, UNSCALED, map_name, of_metric, pair_name
from hf_calib.study.results import StudyResults
from hf_calib.study.statistics import LEVEL

if TYPE_CHECKING:
    pass

HIGHER_IS_BETTER = frozenset(
    {"accuracy"}
)  # Smaller values of other metrics are better.
_NONE = "-"
_REASON = 400  # The most characters of the reason for a missing run.

Rows = tuple[list[str], list[list[str]]]  # A header and rows of cells.


def write_study_report(results: StudyResults, folder: Path) -> None:
    """Write report.md, report.html, report.json, and results.csv to a study's folder, or nothing.

    An earlier report in it is replaced; all other files are unchanged.
    """
    with whole_folder(folder) as made:
        document_of(results).write(made, results.to_dict())
        results.results().to_csv(made / "results.csv", index=False)


def document_of(results: StudyResults) -> Document:
    """Return the blocks of a report."""
    blocks: list[Block] = [
        Lead(headline(results)),
        Section("Advice", [Bullets(results.advice)]),
        Section(
            "Runs", [Bullets([printable(line) for line in what_was_trained(results)])]
        ),
    ]
    if results.baseline is not None:
        title = "Accuracy, NLL and ECE"
        columns = _accuracies(results)
        for metric, short in MAIN_METRICS.items():
            columns |= {
                (method, metric): f"{short}\n{map_name(method)}"
                for method in results.methods
            }
        names = ", ".join(results.metrics[key] for key in ("accuracy", *MAIN_METRICS))
        caption = f"{names}: means over the seeds"
        means = Table(caption, *mean_table(results, columns), title=title, stacked=True)
        loss = results.baseline[0]
        alike = f"Differences to {loss} with the same calibrator"
        own = f"of its other calibrators to {pair_name(*results.baseline)}"
        differences = Table(
            f"{alike}, {own}", *difference_table(results, [*MAIN_METRICS])
        )
        blocks.append(
            Section(title, [means, *([differences] if differences.rows else [])])
        )
        others = [
            _of_metric(results, key)
            for key in results.metrics
            if key not in MAIN_METRICS
        ]
        blocks.append(Section("Other metrics", others))
    if results.notes:
        blocks.append(
            Section(
                "Notes",
                [Bullets([printable(note) for note in results.notes], faint=True)],
            )
        )
    return Document("Which loss?", blocks)


def _accuracies(results: StudyResults) -> dict[tuple[str, str], str]:
    """The columns of the accuracy: one, unless a calibrator changes predictions."""
    by_method = of_metric(results.means, "accuracy")["value"].unstack("method")
    if not by_method.sub(by_method.get(UNSCALED), axis=0).abs().gt(0).any(axis=None):
        return {(UNSCALED, "accuracy"): "accuracy"}
    return {
        (method, "accuracy"): f"accuracy\n{map_name(method)}"
        for method in results.methods
    }


def _of_metric(results: StudyResults, metric: str) -> Section:
    """The table of a metric and of its differences."""
    title = results.metrics[metric]
    columns = {(method, metric): map_name(method) for method in results.methods}
    means = Table(title, *mean_table(results, columns))
    header, rows = difference_table(results, [metric])
    differences = Table(f"Differences in {title}", header, rows, folded=True)
    return Section(title, [means, *([differences] if rows else [])])


def headline(results: StudyResults) -> str:
    """Return a line on what was trained and measured."""
    n_losses, n_seeds = len(results.losses), len(results.seeds)
    losses, seeds = counted(n_losses, "loss"), counted(n_seeds, "seed")
    if not results.n_test:
        return f"{losses} x {seeds}; no run is finished."
    rows, classes = results.counted
    return (
        f"{losses} x {seeds}, measured on {results.n_test:,} {rows} with {results.n_classes:,} {classes}; post-hoc "
        f"calibrators fitted on {results.n_calibration:,} calibration {rows.removeprefix('test ')}."
    )


def what_was_trained(results: StudyResults) -> list[str]:
    """Return lines on losses, seeds and calibrators, and on missing runs with their reasons."""
    lines = [
        f"Losses: {', '.join(results.losses)}.",
        f"Seeds: {', '.join(map(str, results.seeds))}.",
        f"Post-hoc calibrators: {', '.join(results.methods[1:]) or 'none'}.",
    ]
    for (loss, seed), reason in results.missing.items():
        short = textwrap.shorten(printable(reason), _REASON, placeholder=" …")
        lines.append(f"{loss}, seed {seed}, is missing: {short}")
    return lines


def best_first(results: StudyResults) -> list[str]:
    """Return the losses by their lowest mean NLL with any calibrator, and then those without a value."""
    best = of_metric(results.means, "nll")["value"].groupby("loss").min()
    return sorted(results.losses, key=lambda loss: best.get(loss, math.inf))


def mean_table(results: StudyResults, columns: Mapping[tuple[str, str], str]) -> Rows:
    """Return a table with a row of means for each loss, with columns of (method, metric) and their headers."""
    cells, losses = _cells(results.means), best_first(results)
    rows = [
        [loss, *(cells.get((loss, *key), _NONE) for key in columns)] for loss in losses
    ]
    return ["loss", *columns.values()], rows


def difference_table(results: StudyResults, metrics: Sequence[str]) -> Rows:
    """Return a table of paired differences with corrected p, a row for each loss and calibrator.

    A word marks differences that are beyond chance.
    """
    cells, p_values = _cells(results.differences, "+.4f"), {}
    for row in results.differences.dropna(subset="p_corrected").itertuples():
        p = p_cell(row.p_corrected)
        better = (row.value > 0) == (row.Index[2] in HIGHER_IS_BETTER)
        p_values[row.Index] = (
            p if row.p_corrected >= LEVEL else f"{p} {'better' if better else 'worse'}"
        )
    header = ["loss and calibrator"]
    for metric in metrics:
        header += [
            f"difference in\n{MAIN_METRICS.get(metric, results.metrics[metric])}",
            "corrected p",
        ]
    rows = []
    for loss in best_first(results):
        for method in results.methods:
            keys = [(loss, method, metric) for metric in metrics]
            if any(key in cells for key in keys):
                found = [
                    cell
                    for key in keys
                    for cell in (cells.get(key, _NONE), p_values.get(key, _NONE))
                ]
                rows.append([pair_name(loss, method), *found])
    return header, rows


def _cells(table: Any, form: str = ".4f") -> dict[tuple[str, str, str], str]:
    """Values with their intervals, if any, by loss, method and metric."""
    return {
        row.Index: with_interval(row.value, _number(row.low), _number(row.high), form)
        for row in table.itertuples()
        if math.isfinite(row.value)
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
