"""The figures of a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_calib.plots import (
    class_reliability_grid,
    confidence_histogram,
    reliability_diagram,
    risk_coverage_diagram,
    smooth_reliability_diagram,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_calib.report._report import CalibrationReport

CAPTIONS = {
    "reliability": "Reliability in bins: accuracy against confidence, and the share of examples in each bin.",
    "smooth_reliability": "Reliability without bins: smoothed accuracy, thick where confidences are frequent, "
    "with a bootstrap band.",
    "confidence_histogram": "Confidences of right predictions (up) and of wrong ones (down).",
    "risk_coverage": "Error rate among the most confident predictions, against the share of them that is kept.",
    "classwise": "How often a class is true against its probability, in bins with 95% Wilson intervals.",
}


def draw_figures(report: CalibrationReport) -> dict[str, Figure]:
    """What `CalibrationReport.figures` returns."""
    columns = {report.name: report.before}
    if report.after is not None:
        columns = {"before": report.before, "after calibration": report.after}
    panels = {name: (column.confidences, column.correct) for name, column in columns.items()}
    final = report.after or report.before
    return {
        "reliability": reliability_diagram(panels, n_bins=report.n_bins),
        "smooth_reliability": smooth_reliability_diagram(
            panels, confidence_level=report.confidence_level, seed=report.seed
        ),
        "confidence_histogram": confidence_histogram(panels),
        "risk_coverage": risk_coverage_diagram(panels),
        "classwise": class_reliability_grid(
            final.probs, report.labels, class_names=report.class_names, n_bins=report.n_bins
        ),
    }
