"""The words and tables that every form of a report shares, before they are escaped and laid out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_calib.report.measures import MAX_EXAMPLES_FOR_KDE, MEASURES, Measurement
from hf_calib.report.tables import ClassRow, worst_bins

if TYPE_CHECKING:
    from hf_calib.report._report import Assessment, CalibrationReport

# A header, and rows of cells.
Table = tuple[list[str], list[list[str]]]

_MOST_CLASSES = 30


def summary(report: CalibrationReport) -> str:
    """One line on what was measured."""
    return (
        f"{report.n_examples:,} examples, {report.n_classes:,} classes, {report.n_bins} bins; "
        f"intervals of {100 * report.confidence_level:g}% from {report.n_resamples:,} bootstrap resamples, "
        f"seed {report.seed}."
    )


def states(report: CalibrationReport) -> dict[str, Assessment]:
    """The sets of probabilities by the name that tables and figures give them."""
    if report.after is None:
        return {"value": report.before}
    return {"before": report.before, "after": report.after}


def final_state(report: CalibrationReport) -> str:
    """Which probabilities the tables of bins and classes are about, to follow their titles."""
    return "" if report.after is None else ", after calibration"


def metric_table(report: CalibrationReport) -> Table:
    """Every metric, with its interval, before and after."""
    columns = states(report)
    rows = [
        [MEASURES[key].title, *(_cell(column.metrics[key]) for column in columns.values())]
        for key in report.before.metrics
    ]
    tests = [f"{column.consistency.p_value:.2g}" for column in columns.values()]
    rows.append(["Consistency test of the ECE (p)", *tests])
    return ["metric", *columns], rows


def with_interval(value: float, low: float | None, high: float | None, form: str = ".4f") -> str:
    """A metric as the tables show it.

    >>> with_interval(0.05, 0.04, 0.061), with_interval(0.05, None, None)
    ('0.0500 [0.0400, 0.0610]', '0.0500')
    """
    shown = format(value, form)
    return shown if low is None or high is None else f"{shown} [{low:{form}}, {high:{form}}]"


def _cell(measurement: Measurement) -> str:
    return with_interval(measurement.value, measurement.low, measurement.high)


def bin_table(report: CalibrationReport) -> Table:
    """The worst bins of the final probabilities."""
    rows = [
        [
            f"{row.lower:.3f} to {row.upper:.3f}",
            f"{row.count:,}",
            f"{row.confidence:.3f}",
            f"{row.accuracy:.3f}",
            f"{row.gap:+.3f}",
            f"{row.contribution:.4f}",
            f"{row.p_value:.2g}",
        ]
        for row in worst_bins((report.after or report.before).bins)
    ]
    return ["confidence", "examples", "mean confidence", "accuracy", "gap", "part of ECE", "p"], rows


def class_table(report: CalibrationReport, quote: Callable[[str], str] = str) -> Table:
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
    return header, [_class_cells(row, quote(row.name)) for row in shown_classes(report)]


def shown_classes(report: CalibrationReport) -> list[ClassRow]:
    """The rows that a table has room for."""
    rows = (report.after or report.before).classes
    return sorted(rows, key=lambda row: (-row.class_gap, row.index))[:_MOST_CLASSES]


def _class_cells(row: ClassRow, name: str) -> list[str]:
    return [
        name,
        f"{row.support:,}",
        f"{row.frequency:.4f}",
        f"{row.mean_probability:.4f}",
        f"{row.class_gap:.4f}",
        f"{row.predicted:,}",
        "" if row.precision is None else f"{row.precision:.3f}",
        "" if row.confidence is None else f"{row.confidence:.3f}",
    ]


def footnotes(report: CalibrationReport) -> list[str]:
    """How to read the tables, and what they leave out."""
    notes = [
        "Binned errors are biased upwards in small samples, and so are their bootstrap intervals, which may even "
        "lie above the value. The debiased error and the consistency test correct for that.",
        "A gap is confidence minus accuracy: above 0 is over-confident. p is the chance of a gap at least as large "
        "if the confidences were right.",
    ]
    notes += _fewer_resamples(report)
    if "kde_ece" in report.before.metrics:
        notes.append(
            "The kernel ECE has no interval: it leaves each example out of its own estimate, which resamples, where "
            "examples repeat, do not allow."
        )
    else:
        notes.append(f"The kernel ECE is computed for 2 to {MAX_EXAMPLES_FOR_KDE:,} examples only.")
    if report.n_classes > _MOST_CLASSES:
        notes.append(
            f"Of {report.n_classes:,} classes, the {_MOST_CLASSES} with the largest class gap are in the table."
        )
    return notes


def _fewer_resamples(report: CalibrationReport) -> list[str]:
    """Which metrics have fewer resamples than asked for, because they are slow, or no interval at all."""
    slow: dict[int, list[str]] = {}
    for key, value in report.before.metrics.items():
        if value.n_resamples < report.n_resamples and MEASURES[key].resampling != "none":
            slow.setdefault(value.n_resamples, []).append(MEASURES[key].title)
    return [
        f"{f'Intervals from {count:,} resamples' if count else 'No interval'}, because resampling is slow: "
        f"{'; '.join(titles)}."
        for count, titles in slow.items()
    ]
