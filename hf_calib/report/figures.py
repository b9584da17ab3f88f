"""The figures of a report on one class a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_calib import plots
from hf_calib.plots.binned import reliability_of_sums
from hf_calib.plots.classes import classes_of_sums
from hf_calib.plots.curves import risk_coverage_of_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_calib.report.report import CalibrationReport

_MOST_CLASSES_DRAWN = 10_000


def draw_rows(report: CalibrationReport) -> dict[str, Figure]:
    """By name, of rows that are held."""
    panels = {name: (each.confidences, each.correct) for name, each in report.panels.items()}
    level, seed, names = report.confidence_level, report.settings.seed, report.class_names
    probs, labels, n_bins = report.final.probs, report.labels, report.n_bins
    assert labels is not None
    return {
        "reliability": plots.reliability_diagram(panels, n_bins=n_bins),
        "smooth_reliability": plots.smooth_reliability_diagram(panels, confidence_level=level, seed=seed),
        "corp": plots.corp_diagram(panels, seed=seed),
        "confidence_histogram": plots.confidence_histogram(panels),
        "risk_coverage": plots.risk_coverage_diagram(panels),
        "classwise": plots.class_reliability_grid(probs, labels, class_names=names, n_bins=n_bins),
    }


def draw_states(report: CalibrationReport) -> dict[str, Figure]:
    """By name, of rows that were summed."""
    states = {name: each.state for name, each in report.panels.items() if each.state is not None}
    bins = {"": {name: state.bins for name, state in states.items()}}
    curves = {name: state.risk_coverage() for name, state in states.items()}
    found = {
        "reliability": reliability_of_sums(
            bins, n_rows={name: state.n_rows for name, state in states.items()}
        ),
        "risk_coverage": risk_coverage_of_curves(curves),
    }
    if report.n_classes <= _MOST_CLASSES_DRAWN:
        (*_, final) = states.values()
        found["classwise"] = classes_of_sums(final.class_bins(), report.class_names)
    return found
