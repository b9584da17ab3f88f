"""Figures of the papers: gradient factors, weights over the simplex, Grad-CAM, and calibration during training."""

from hf_calib.papers.plots.dynamics import group_boxes, small_multiples, spread_by_epoch
from hf_calib.papers.plots.grad_cam import grad_cam
from hf_calib.papers.plots.gradient_factors import confidence_region_diagram, gradient_factor_diagram
from hf_calib.papers.plots.simplex import simplex_surfaces

__all__ = [
    "confidence_region_diagram",
    "grad_cam",
    "gradient_factor_diagram",
    "group_boxes",
    "simplex_surfaces",
    "small_multiples",
    "spread_by_epoch",
]
