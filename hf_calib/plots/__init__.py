"""Figures of calibration.

matplotlib is imported when one is drawn, and pyplot never, so that no global state changes.
"""

from hf_calib.plots._common import save_figure
from hf_calib.plots.binned import reliability_diagram, reliability_grid
from hf_calib.plots.classes import class_reliability_grid
from hf_calib.plots.corp import corp_diagram
from hf_calib.plots.decisions import promise_diagram
from hf_calib.plots.detection import roc_diagram
from hf_calib.plots.gammas import gamma_dynamics
from hf_calib.plots.labels import label_reliability_grid
from hf_calib.plots.selective import confidence_histogram, risk_coverage_diagram
from hf_calib.plots.smooth import smooth_reliability_diagram
from hf_calib.plots.study import difference_diagram

__all__ = [
    "class_reliability_grid",
    "confidence_histogram",
    "corp_diagram",
    "difference_diagram",
    "gamma_dynamics",
    "label_reliability_grid",
    "promise_diagram",
    "reliability_diagram",
    "reliability_grid",
    "risk_coverage_diagram",
    "roc_diagram",
    "save_figure",
    "smooth_reliability_diagram",
]
