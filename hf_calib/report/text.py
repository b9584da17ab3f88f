"""The words and tables that every form of a report shares, before they are escaped and laid out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

from hf_calib.metrics.sums import Interval
from hf_calib.report.labels import TITLES
from hf_calib.report.measures import MAX_EXAMPLES_FOR_KDE, MEASURES
from hf_calib.report.tables import ClassRow, p_cell, worst_bins

if TYPE_CHECKING:
    from hf_calib.report._report import CalibrationReport
    from hf_calib.report.any_report import AnyReport

T = TypeVar("T")

# A header, and rows of cells.
Table = tuple[list[str], list[list[str]]]

_MOST_CLASSES = 30
_LABEL_FOOTNOTES = (
    "Macro: the mean over the labels for which a metric is defined. Micro: of all decisions together, one for each row "
    "and label.",
    "ECE and maximum calibration error compare the probability of a label with how often it applies, in bins of equal "
    "width over [0, 1]. Noise makes both larger, and a resample adds that noise again: they have no interval.",
    "The labels of a row stay together in a resample.",
)


def columns(before: T, after: T | None) -> dict[str, T]:
    """Values before and after calibration, by the name of their table column."""
    return {"value": before} if after is None else {"before": before, "after": after}


def summary(report: CalibrationReport) -> str:
    """One line on what was measured."""
    about = (report.about.get(key) for key in ("name", "split", "part"))
    rows = ", ".join(str(word) for word in about if word)
    of = f"{rows}: " if rows else ""
    if report.multi_label:
        return (
            f"{of}{report.n_examples:,} examples, {report.n_classes:,} labels, {report.n_decisions:,} decisions, "
            f"{report.n_bins} bins; intervals of {100 * report.confidence_level:g}% from {report.n_resamples:,} "
            f"resamples, seed {report.seed}."
        )
    return (
        f"{of}{report.n_examples:,} examples, {report.n_classes:,} classes, {report.n_bins} bins; "
        f"intervals of {100 * report.confidence_level:g}% from {report.n_resamples:,} resamples, seed {report.seed}."
    )


def made_with() -> str:
    """When and by which version a report is written."""
    return f"Written on {datetime.now(timezone.utc).date().isoformat()} by hf_calib {version('hf_calib')}."


def final_state(report: AnyReport) -> str:
    """Which probabilities the tables of bins and classes are about, to follow their titles."""
    return "" if report.after is None else ", after calibration"


def metric_table(report: CalibrationReport) -> Table:
    """Every metric, with its interval, before and after."""
    states = columns(report.before, report.after)
    titles = _label_titles(report) if report.multi_label else {key: m.title for key, m in MEASURES.items()}
    rows = [
        [title, *(_cell(state.metrics[key]) for state in states.values())]
        for key, title in titles.items()
        if key in report.before.metrics
    ]
    tests = [each.consistency for each in states.values() if each.consistency is not None]
    if tests:
        rows.append(["Consistency test of the ECE (p)", *(p_cell(test.p_value) for test in tests)])
    return ["metric", *states], rows


def _label_titles(report: CalibrationReport) -> dict[str, str]:
    titles = dict(TITLES)
    if report.n_decisions == report.n_examples * report.n_classes:
        for key in ("brier", "nll"):  # means of decisions: where all are known, the two averages are the same
            titles[f"macro_{key}"] += " and micro"
            del titles[f"micro_{key}"]
    return titles


def with_interval(value: float, low: float | None, high: float | None, form: str = ".4f") -> str:
    """A metric as the tables show it.

    >>> with_interval(0.05, 0.04, 0.061), with_interval(0.05, None, None)
    ('0.0500 [0.0400, 0.0610]', '0.0500')
    """
    shown = format(value, form)
    return shown if low is None or high is None else f"{shown} [{low:{form}}, {high:{form}}]"


def outside_intervals(states: Iterable[Mapping[str, tuple[float, Any, Any]]]) -> list[str]:
    """A note on the errors whose value lies outside their interval, if there are any.

    Args:
        states: for each set of probabilities key -> (value, low, high), see `MEASURES`.
    """
    outside = [
        measure.title
        for key, measure in MEASURES.items()
        if measure.interval == "inversion"
        and any(
            not low <= value <= high for value, low, high in (state[key] for state in states if key in state)
        )
    ]
    if not outside:
        return []
    return [
        f"Outside its interval: {', '.join(outside)}. Noise makes the value of such an error larger; the interval is "
        "of the error without noise."
    ]


def _cell(found: Interval, form: str = ".4f") -> str:
    return "not defined" if math.isnan(found.value) else with_interval(*found, form)


def bin_table(report: AnyReport) -> Table:
    """The worst bins of the final probabilities."""
    rows = [
        [
            f"{row.lower:.3f} to {row.upper:.3f}",
            f"{row.count:,}",
            f"{row.confidence:.3f}",
            f"{row.accuracy:.3f}",
            f"{row.gap:+.3f}",
            f"{row.contribution:.4f}",
            p_cell(row.p_value),
        ]
        for row in worst_bins(report.final.bins)
    ]
    return ["confidence", "examples", "mean confidence", "accuracy", "gap", "part of ECE", "p"], rows


def class_table(report: AnyReport) -> Table:
    """The classes of the final probabilities, those with the largest calibration error first."""
    header = [
        "class",
        "examples",
        "frequency",
        "mean probability",
        "class gap",
        "predicted",
        "precision",
        "confidence",
    ]
    return header, [_class_cells(row) for row in shown_classes(report)]


def shown_classes(report: AnyReport) -> list[ClassRow]:
    """The rows that a table has room for."""
    rows = report.final.classes
    return sorted(rows, key=lambda row: (-row.class_gap, row.index))[:_MOST_CLASSES]


def _class_cells(row: ClassRow) -> list[str]:
    return [
        row.name,
        f"{row.support:,}",
        f"{row.frequency:.4f}",
        f"{row.mean_probability:.4f}",
        f"{row.class_gap:.4f}",
        f"{row.predicted:,}",
        "" if row.precision is None else f"{row.precision:.3f}",
        "" if row.confidence is None else f"{row.confidence:.3f}",
    ]


def label_table(report: CalibrationReport) -> Table:
    """Every label with its metrics, and where there is a calibration its errors before it, too."""
    header = [
        "label",
        "prevalence",
        "mean probability",
        "AUROC",
        "average precision",
        "ECE",
        "maximum",
        "Brier",
    ]
    before = [] if report.after is None else ["ECE before", "Brier before"]
    rows = []
    for label, raw in zip(report.final.labels, report.before.labels, strict=True):
        keys = ("prevalence", "auroc", "average_precision", "ece", "mce", "brier")
        prevalence, *others = [_cell(label.metrics[key], ".3f") for key in keys]
        cells = [label.name, prevalence, f"{label.mean_probability:.3f}", *others]
        rows.append(cells + [_cell(raw.metrics[key], ".3f") for key in ("ece", "brier") if before])
    return header + before, rows


def footnotes(report: CalibrationReport) -> list[str]:
    """How to read the tables, and what they leave out."""
    if report.multi_label:
        return list(_LABEL_FOOTNOTES)
    notes = [
        "Noise makes every calibration error larger, the more so the fewer examples. The interval of an ECE is of the "
        "error without it, in the same bins (by test inversion): a plain ECE may lie above its own. The other errors "
        "have no interval, as a resample would add the noise again. All else: bootstrap intervals.",
        "A gap is confidence minus accuracy: above 0 is over-confident. p is the chance of a gap at least as large "
        "if the confidences were right.",
    ]
    notes += _fewer_resamples(report)
    if "kde_ece" not in report.before.metrics:
        notes.append(f"The kernel ECE is computed for 2 to {MAX_EXAMPLES_FOR_KDE:,} examples only.")
    if report.n_classes > _MOST_CLASSES:
        notes.append(
            f"Of {report.n_classes:,} classes, the {_MOST_CLASSES} with the largest class gap are in the table."
        )
    return notes


def _fewer_resamples(report: CalibrationReport) -> list[str]:
    """Which metrics have fewer resamples than asked for, because they are slow, or no interval at all."""
    slow: dict[int, list[str]] = {}
    for key, n_resamples in report.before.n_resamples.items():
        if n_resamples < report.n_resamples and MEASURES[key].interval != "none":
            slow.setdefault(n_resamples, []).append(MEASURES[key].title)
    return [
        f"{f'Intervals from {count:,} resamples' if count else 'No interval'}, because resampling is slow: "
        f"{'; '.join(titles)}."
        for count, titles in slow.items()
    ]
