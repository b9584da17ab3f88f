"""What the papers argue with besides tables, as numbers, for a user's own model and training too."""

from hf_calib.analysis.dynamics import Trace, TracedSet, learned_epoch, learned_groups, moving_average
from hf_calib.analysis.gradient_factors import (
    ConfidenceRegions,
    confidence_regions,
    gradient_factors,
    reversed_range,
    simplex_grid,
    uncertainty_weights,
)
from hf_calib.analysis.intervals import mean_interval
from hf_calib.analysis.last_layer_gradients import last_layer_gradient_norms
from hf_calib.analysis.toys import gaussian_posteriors, two_moons_posteriors

__all__ = [
    "ConfidenceRegions",
    "Trace",
    "TracedSet",
    "confidence_regions",
    "gaussian_posteriors",
    "gradient_factors",
    "last_layer_gradient_norms",
    "learned_epoch",
    "learned_groups",
    "mean_interval",
    "moving_average",
    "reversed_range",
    "simplex_grid",
    "two_moons_posteriors",
    "uncertainty_weights",
]
