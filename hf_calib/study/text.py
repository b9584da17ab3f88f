"""The words and tables that every form of a study's report shares, before they are escaped and laid out."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from hf_calib._errors import printable
from hf_calib.report.text import Table, with_interval
from hf_calib.study.results import (
    CONFIDENCE_LEVEL,
    HIGHER_IS_BETTER,
    LEVEL,
    UNSCALED,
    Difference,
    Estimate,
    StudyResults,
)

TITLE = "Which loss?"
# By metric, short: for the headers of tables and the axes of figures.
MAIN_METRICS = {"nll": "NLL", "ece": "ECE"}

_NONE = "-"
_WIDTH = 110  # of the summary
_NAME = 20  # the least width of a loss's name in it
_METHOD = 11  # the most letters of a map's name in it
_SHOWN = 0.00005  # the least difference in a table
_REASON = 400  # letters of why a training is missing


def map_name(method: str) -> str:
    """A post-hoc map as tables and figures name it."""
    return "no map" if method == UNSCALED else method


def pair_name(loss: str, method: str) -> str:
    """A loss with its map.

    >>> pair_name("focal", "temperature"), pair_name("focal", "none")
    ('focal with temperature', 'focal without a map')
    """
    return f"{loss} without a map" if method == UNSCALED else f"{loss} with {method}"


def headline(results: StudyResults) -> str:
    """One line on what was trained and measured."""
    losses, seeds = len(results.losses), len(results.seeds)
    trained = f"{losses} {_plural('loss', losses)} x {seeds} {_plural('seed', seeds)}"
    if not results.n_test:
        return f"{trained}; no training is finished."
    rows, classes = results.counted
    return (
        f"{trained}, measured on {results.n_test:,} {rows} with {results.n_classes:,} {classes}; post-hoc maps fitted "
        f"on {results.n_calibration:,} calibration {rows.removeprefix('test ')}."
    )


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}es" if word.endswith("s") else f"{word}s"


def what_was_trained(results: StudyResults) -> list[str]:
    """Losses, seeds, maps, and which trainings are missing and why."""
    maps = [method for method in results.methods if method != UNSCALED]
    lines = [
        f"Losses: {', '.join(results.losses)}.",
        f"Seeds: {', '.join(map(str, results.seeds))}.",
        f"Post-hoc maps: {', '.join(maps) or 'none'}.",
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
    best = {
        loss: min(
            (
                mean.value
                for (name, _, metric), mean in results.means.items()
                if (name, metric) == (loss, "nll") and math.isfinite(mean.value)
            ),
            default=math.inf,
        )
        for loss in results.losses
    }
    return sorted(results.losses, key=best.__getitem__)


def main_table(results: StudyResults) -> Table:
    """A row for each loss: accuracy, NLL and ECE with each map."""
    changed = _maps_that_change_accuracy(results)
    header = ["loss", "accuracy", *(f"accuracy\n{map_name(method)}" for method in changed)]
    header += [f"{short}\n{map_name(m)}" for short in MAIN_METRICS.values() for m in results.methods]
    rows = []
    for loss in best_first(results):
        keys = [(loss, m, "accuracy") for m in (results.methods[0], *changed)]
        keys += [(loss, m, metric) for metric in MAIN_METRICS for m in results.methods]
        numbers = [results.means.get(key) for key in keys]
        rows.append([loss, *map(_cell, numbers)])
    if results.missing:
        header.insert(1, "seeds")
        for loss, row in zip(best_first(results), rows, strict=True):
            done = sum((loss, seed) not in results.missing for seed in results.seeds)
            row.insert(1, f"{done} of {len(results.seeds)}")
    return header, rows


def _maps_that_change_accuracy(results: StudyResults) -> list[str]:
    """The maps with which a loss has another accuracy than without one, as an affine map may give it."""

    def differs(loss: str, method: str) -> bool:
        own, plain = (results.means.get((loss, each, "accuracy")) for each in (method, results.methods[0]))
        return own is not None and plain is not None and abs(own.value - plain.value) >= _SHOWN

    return [method for method in results.methods[1:] if any(differs(loss, method) for loss in results.losses)]


def how_to_read_the_main_table(results: StudyResults) -> list[str]:
    """Footnotes of the main table."""
    lines = [
        f"Means over seeds with {100 * CONFIDENCE_LEVEL:g}% intervals ({results.n_resamples:,} resamples); losses "
        "in the order of their smallest NLL with any map. Intervals of two losses that overlap do not say that the two "
        "are equal: the differences below are paired, and answer that."
    ]
    lines.append("; ".join(f"{short}: {results.metrics[key]}" for key, short in MAIN_METRICS.items()) + ".")
    if any(method != UNSCALED for method in results.methods):
        lines.append(
            "Accuracy is that without a map, and with the maps that change it; a temperature does not."
        )
    return lines


def metric_table(results: StudyResults, metric: str) -> Table:
    """A row for each loss: one metric with each map."""
    rows = [
        [loss, *(_cell(results.means.get((loss, method, metric))) for method in results.methods)]
        for loss in best_first(results)
    ]
    return ["loss", *(map_name(method) for method in results.methods)], rows


def difference_table(results: StudyResults, metrics: Sequence[str]) -> Table:
    """A row for each loss and map: the paired difference to the baseline in some metrics, and its corrected p."""
    header = ["loss and map"]
    for metric in metrics:
        header += [f"difference in\n{MAIN_METRICS.get(metric, results.metrics[metric])}", "corrected p"]
    rows = []
    for loss in best_first(results):
        for method in results.methods:
            found = {metric: results.differences.get((loss, method, metric)) for metric in metrics}
            if any(found.values()):
                row = [pair_name(loss, method)]
                for metric, d in found.items():
                    row += [_cell(d, "+.4f"), _verdict(metric, d)]
                rows.append(row)
    return header, rows


def how_to_read_differences(results: StudyResults) -> str:
    """A footnote of every table of differences."""
    if results.baseline is None:
        return "There is no baseline."
    return (
        f"Differences are to {pair_name(*results.baseline)}, on the same seeds and {results.counted[0]}. p is "
        f"corrected by Holm within its metric, intervals are not; where p is below {LEVEL:g}, a word says whether the "
        "loss with its map is better or worse than the baseline. No word: the study cannot tell them apart; "
        f"{_NONE}: they were not compared."
    )


def other_metrics(results: StudyResults) -> list[str]:
    """Those that are not in the main table; the accuracy, which is there without maps, is one."""
    return [metric for metric in results.metrics if metric not in MAIN_METRICS]


def summary(results: StudyResults) -> str:
    """The main table without intervals and the advice, for a terminal: lines of at most 110 columns."""
    lines = textwrap.wrap(headline(results), _WIDTH)
    if results.means:
        lines += ["", *_narrow_table(results)]
    for sentence in results.advice:
        lines += ["", *textwrap.wrap(printable(sentence), _WIDTH)]
    if results.missing:
        cells = ", ".join(f"{loss} seed {seed}" for loss, seed in results.missing)
        text = f"Missing, for the reasons in report.md: {cells}."
        lines += ["", *textwrap.wrap(textwrap.shorten(printable(text), 3 * _WIDTH, placeholder=" …"), _WIDTH)]
    return "\n".join(lines)


def _narrow_table(results: StudyResults) -> list[str]:
    """The main table without its intervals; of the maps, as many as there is room for."""
    names = ["loss", *map(printable, best_first(results))]
    for n_methods in range(len(results.methods), 0, -1):
        columns = _columns(results, results.methods[:n_methods])
        widths = [max(map(len, column)) for column in columns]
        room = _WIDTH - sum(widths) - 2 * len(widths)
        if room >= _NAME:
            break
    width = min(max(map(len, names)), room)
    lines = []
    for row, name in enumerate(["", *names]):
        numbers = [column[row].rjust(size) for column, size in zip(columns, widths, strict=True)]
        lines.append("  ".join([_cut(name, width).ljust(width), *numbers]))
    if n_methods < len(results.methods):
        left_out = ", ".join(map(printable, results.methods[n_methods:]))
        lines += textwrap.wrap(f"Also measured, and in report.md: {left_out}.", _WIDTH)
    return lines


def _columns(results: StudyResults, methods: Sequence[str]) -> list[list[str]]:
    """The numbers of the narrow table, each column below two lines of header."""
    losses = best_first(results)

    def column(top: str, below: str, estimates: list[Estimate | None]) -> list[str]:
        return [top, below, *(_cell(estimate).partition(" [")[0] for estimate in estimates)]

    def of(method: str, metric: str) -> list[Estimate | None]:
        return [results.means.get((loss, method, metric)) for loss in losses]

    return [
        column("", "accuracy", of(methods[0], "accuracy")),
        *(
            column(short if method == methods[0] else "", _cut(map_name(method), _METHOD), of(method, metric))
            for metric, short in MAIN_METRICS.items()
            for method in methods
        ),
    ]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _cell(estimate: Estimate | Difference | None, form: str = ".4f") -> str:
    if estimate is None or not math.isfinite(estimate.value):
        return _NONE
    return with_interval(estimate.value, estimate.low, estimate.high, form)


def _verdict(metric: str, difference: Difference | None) -> str:
    if difference is None or difference.p_corrected is None or not math.isfinite(difference.p_corrected):
        return _NONE
    p = f"{difference.p_corrected:.2g}" if difference.p_corrected >= 0.001 else "< 0.001"
    if difference.p_corrected >= LEVEL:
        return p
    better = (difference.value > 0) == (metric in HIGHER_IS_BETTER)
    return f"{p} {'better' if better else 'worse'}"
