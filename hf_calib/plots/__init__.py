"""Figures of calibration.

matplotlib is imported when a figure is drawn, and pyplot is never imported, so no global state
changes.
"""

from hf_calib.plots.binned import (
    class_reliability_grid,
    confidence_histogram,
    reliability_diagram,
    reliability_grid,
)
from hf_calib.plots.curves import (
    corp_diagram,
    risk_coverage_diagram,
    smooth_reliability_diagram,
)
from hf_calib.plots.gammas import gamma_dynamics
from hf_calib.plots.style import save_figure

__all__ = [
    "class_reliability_grid",
    "confidence_histogram",
    "corp_diagram",
    "gamma_dynamics",
    "reliability_diagram",
    "reliability_grid",
    "risk_coverage_diagram",
    "save_figure",
    "smooth_reliability_diagram",
]
