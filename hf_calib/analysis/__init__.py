"""What the papers argue with besides tables, as numbers: gradient factors, toys with a known posterior, intervals."""

from hf_calib.analysis.gradient_factors import (
    ConfidenceRegions,
    confidence_regions,
    gradient_factors,
    reversed_range,
    simplex_grid,
    uncertainty_weights,
)
from hf_calib.analysis.intervals import mean_interval
from hf_calib.analysis.toys import gaussian_posteriors, two_moons_posteriors

__all__ = [
    "ConfidenceRegions",
    "confidence_regions",
    "gaussian_posteriors",
    "gradient_factors",
    "mean_interval",
    "reversed_range",
    "simplex_grid",
    "two_moons_posteriors",
    "uncertainty_weights",
]
