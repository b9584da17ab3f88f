"""Figures of calibration.

matplotlib is imported when one is drawn, and pyplot never, so that no global state changes.
"""

from hf_calib.plots._common import save_figure
from hf_calib.plots.binned import reliability_diagram, reliability_grid
from hf_calib.plots.classes import class_reliability_grid
from hf_calib.plots.decisions import promise_diagram
from hf_calib.plots.detection import roc_diagram
from hf_calib.plots.dynamics import group_boxes, small_multiples, spread_by_epoch
from hf_calib.plots.gammas import gamma_dynamics
from hf_calib.plots.grad_cam import grad_cam
from hf_calib.plots.gradient_factors import confidence_region_diagram, gradient_factor_diagram
from hf_calib.plots.labels import label_reliability_grid
from hf_calib.plots.selective import confidence_histogram, risk_coverage_diagram
from hf_calib.plots.simplex import simplex_surfaces
from hf_calib.plots.smooth import reliability_comparison, smooth_reliability_diagram
from hf_calib.plots.study import difference_diagram, rank_diagram, reliability_panels

__all__ = [
    "class_reliability_grid",
    "confidence_histogram",
    "confidence_region_diagram",
    "difference_diagram",
    "gamma_dynamics",
    "grad_cam",
    "gradient_factor_diagram",
    "group_boxes",
    "label_reliability_grid",
    "promise_diagram",
    "rank_diagram",
    "reliability_comparison",
    "reliability_diagram",
    "reliability_grid",
    "reliability_panels",
    "risk_coverage_diagram",
    "roc_diagram",
    "save_figure",
    "simplex_surfaces",
    "small_multiples",
    "smooth_reliability_diagram",
    "spread_by_epoch",
]
