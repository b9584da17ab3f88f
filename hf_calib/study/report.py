"""A study's report as files and on a terminal: its words, tables and figures."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_calib._errors import printable
from hf_calib._files import move_files, whole_folder
from hf_calib.plots import difference_diagram, reliability_grid
from hf_calib.report.document import (
    Block,
    Bullets,
    Document,
    Figures,
    Image,
    Lead,
    Section,
    Table,
    draw,
)
from hf_calib.report.rows import with_interval
from hf_calib.study.advice import MAIN_METRICS, UNSCALED, map_name, pair_name
from hf_calib.study.results import StudyResults
from hf_calib.study.statistics import CONFIDENCE_LEVEL, LEVEL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HIGHER_IS_BETTER = frozenset({"accuracy"})  # of the other metrics the smaller value is better
CAPTIONS = {
    "differences": "Paired differences to the baseline with 95% intervals; below 0 is better than the baseline. Each "
    "panel has a scale of its own.",
    "reliability": "Accuracy against confidence in bins, of up to three losses with the smallest NLL, before and "
    "after the map with the smallest NLL in the mean over losses; predictions of all seeds together, whose ECE is at "
    "most the mean of the seeds' in the tables.",
}
_SIDE_BY_SIDE = 3  # reliability diagrams
_NONE = "-"
_REASON = 400  # letters of why a training is missing

Rows = tuple[list[str], list[list[str]]]  # a header, and rows of cells


def write_study_report(results: StudyResults, folder: Path) -> None:
    """Write report.md, report.html, report.json, results.csv and figures/*.png into a study's folder, or nothing.

    An earlier report in it is replaced, with the figures that this one lacks; all other files stay.
    """
    images = {name: draw(figure) for name, figure in draw_figures(results).items()}
    with whole_folder(folder, merge=_replace_report) as made:
        document_of(results, images).write(made, results.to_dict())
        results.results().to_csv(made / "results.csv", index=False)


def _replace_report(made: Path, folder: Path) -> None:
    """Move a report's files over those of an earlier one, whose other figures go."""
    new = {path.name for path in made.glob("figures/*")}
    move_files(made, folder)
    for name in {f"{name}.png" for name in CAPTIONS} - new:
        (folder / "figures" / name).unlink(missing_ok=True)


def document_of(results: StudyResults, images: Mapping[str, Image]) -> Document:
    """The blocks of a report, with its figures as drawn."""
    blocks: list[Block] = [
        Lead(headline(results)),
        Section("Advice", [Bullets(results.advice)]),
        Section("What was trained", [Bullets([printable(line) for line in what_was_trained(results)])]),
    ]
    if results.baseline is not None:
        columns = {(UNSCALED, "accuracy"): "accuracy"}
        for metric, short in MAIN_METRICS.items():
            columns |= {(method, metric): f"{short}\n{map_name(method)}" for method in results.methods}
        table = mean_table(results, columns)
        title = "Accuracy, NLL and ECE of each loss"
        notes = [
            f"Means over seeds with {100 * CONFIDENCE_LEVEL:g}% intervals ({results.n_resamples:,} resamples); losses "
            "in the order of their smallest NLL with any map. Intervals of two losses that overlap do not say that the "
            "two are equal: the differences below are paired, and answer that.",
            "; ".join(f"{short}: {results.metrics[key]}" for key, short in MAIN_METRICS.items())
            + ". Accuracy is that "
            "without a map; with each map it is among the other metrics.",
        ]
        parts = [Table(title, *table, title=title, stacked=True), Bullets(notes, faint=True)]
        blocks.append(Section("Accuracy, NLL and ECE", parts))
    if results.baseline is not None and len(results.differences):
        note = (
            f"Differences are to {pair_name(*results.baseline)}, on the same seeds and {results.counted[0]}. p is "
            f"corrected by Holm within its metric, intervals are not; where p is below {LEVEL:g}, a word says whether "
            "the loss with its map is better or worse than the baseline. No word: the study cannot tell them apart; "
            f"{_NONE}: they were not compared."
        )
        table = difference_table(results, [*MAIN_METRICS])
        parts = [Table("Differences in NLL and ECE", *table), Bullets([note], faint=True)]
        blocks.append(Section("Differences to the baseline", parts))
    if images:
        blocks.append(Section("Figures", [Figures(images, CAPTIONS)]))
    if results.baseline is not None:
        others = [_of_metric(results, key) for key in results.metrics if key not in MAIN_METRICS]
        blocks.append(Section("Other metrics", others))
    if results.notes:
        blocks.append(Section("Notes", [Bullets([printable(note) for note in results.notes], faint=True)]))
    return Document("Which loss?", blocks)


def _of_metric(results: StudyResults, metric: str) -> Section:
    """A metric's table, and its differences behind a line to open."""
    title = results.metrics[metric]
    columns = {(method, metric): map_name(method) for method in results.methods}
    blocks: list[Block] = [Table(title, *mean_table(results, columns))]
    header, rows = difference_table(results, [metric])
    if rows:
        blocks.append(Table(f"Differences in {title}", header, rows, folded=True))
    return Section(title, blocks)


def headline(results: StudyResults) -> str:
    """One line on what was trained and measured."""
    n_losses, n_seeds = len(results.losses), len(results.seeds)
    losses, seeds = "loss" if n_losses == 1 else "losses", "seed" if n_seeds == 1 else "seeds"
    trained = f"{n_losses} {losses} x {n_seeds} {seeds}"
    if not results.n_test:
        return f"{trained}; no training is finished."
    rows, classes = results.counted
    return (
        f"{trained}, measured on {results.n_test:,} {rows} with {results.n_classes:,} {classes}; post-hoc maps fitted "
        f"on {results.n_calibration:,} calibration {rows.removeprefix('test ')}."
    )


def what_was_trained(results: StudyResults) -> list[str]:
    """Losses, seeds, maps, and which trainings are missing and why."""
    lines = [
        f"Losses: {', '.join(results.losses)}.",
        f"Seeds: {', '.join(map(str, results.seeds))}.",
        f"Post-hoc maps: {', '.join(results.methods[1:]) or 'none'}.",
    ]
    if results.baseline is not None:
        lines.append(f"Baseline of the differences: {pair_name(*results.baseline)}.")
    if results.missing:
        n_cells = len(results.losses) * len(results.seeds)
        lines.append(f"{len(results.missing)} of {n_cells} trainings are missing.")
    for (loss, seed), reason in results.missing.items():
        short = textwrap.shorten(printable(reason), _REASON, placeholder=" …")
        lines.append(f"{loss}, seed {seed}, is missing: {short}")
    return lines


def best_first(results: StudyResults) -> list[str]:
    """The losses by the smallest mean NLL that any map gives them; those without one last, as in the study."""
    means = results.means["value"]
    best = means[means.index.isin(["nll"], level="metric")].groupby("loss").min()
    return sorted(results.losses, key=lambda loss: best.get(loss, math.inf))


def mean_table(results: StudyResults, columns: Mapping[tuple[str, str], str]) -> Rows:
    """A row for each loss: its means, in columns of (method, metric) with their headers."""
    cells, losses = _cells(results.means), best_first(results)
    rows = [[loss, *(cells.get((loss, *key), _NONE) for key in columns)] for loss in losses]
    return ["loss", *columns.values()], rows


def difference_table(results: StudyResults, metrics: Sequence[str]) -> Rows:
    """A row for each loss and map: the paired difference to the baseline in some metrics, and its corrected p."""
    header = ["loss and map"]
    for metric in metrics:
        header += [f"difference in\n{MAIN_METRICS.get(metric, results.metrics[metric])}", "corrected p"]
    cells, p_values = _cells(results.differences, "+.4f"), _verdicts(results)
    rows = []
    for loss in best_first(results):
        for method in results.methods:
            keys = [(loss, method, metric) for metric in metrics]
            if any(key in cells for key in keys):
                found = [cell for key in keys for cell in (cells.get(key, _NONE), p_values.get(key, _NONE))]
                rows.append([pair_name(loss, method), *found])
    return header, rows


def _cells(table: Any, form: str = ".4f") -> dict[tuple[str, str, str], str]:
    """Values with their intervals, where there are any, by loss, method and metric."""
    return {
        row.Index: with_interval(row.value, _number(row.low), _number(row.high), form)
        for row in table.itertuples()
        if math.isfinite(row.value)
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _verdicts(results: StudyResults) -> dict[tuple[str, str, str], str]:
    """The corrected p of each difference, with a word where it is beyond chance."""
    found = {}
    for row in results.differences.dropna(subset="p_corrected").itertuples():
        p = f"{row.p_corrected:.2g}" if row.p_corrected >= 0.001 else "< 0.001"
        better = (row.value > 0) == (row.Index[2] in HIGHER_IS_BETTER)
        word = "" if row.p_corrected >= LEVEL else " better" if better else " worse"
        found[row.Index] = f"{p}{word}"
    return found


def draw_figures(results: StudyResults) -> dict[str, Figure]:
    """By name; without those that there is nothing to show in."""
    figures = {}
    losses, methods = best_first(results), results.methods
    if results.baseline is not None and len(results.differences):
        found = {
            row.Index: (row.value, *map(_number, (row.low, row.high, row.p_corrected)))
            for row in results.differences.itertuples()
        }
        found |= {(*results.baseline, metric): (0.0, None, None, None) for metric in MAIN_METRICS}
        shown = {
            short: {
                loss: {map_name(m): found[loss, m, metric] for m in methods if (loss, m, metric) in found}
                for loss in losses
            }
            for metric, short in MAIN_METRICS.items()
        }
        baseline = pair_name(*results.baseline)
        figures["differences"] = difference_diagram(shown, baseline=baseline, level=LEVEL)
    states = [method for method in (UNSCALED, best_map(results)) if method is not None]
    whole = [loss for loss in losses if all((loss, method) in results.panels for method in states)]
    if whole:
        rows = {
            map_name(method): {loss: results.panels[loss, method] for loss in whole[:_SIDE_BY_SIDE]}
            for method in states
        }
        figures["reliability"] = reliability_grid(rows)
    return figures


def best_map(results: StudyResults) -> str | None:
    """The map with the smallest NLL in the mean over losses; None if there is no map."""
    means = results.means["value"][results.means.index.isin(["nll"], level="metric")]
    found = means.groupby("method").mean().drop(UNSCALED, errors="ignore")
    return found.idxmin() if len(found) else None
