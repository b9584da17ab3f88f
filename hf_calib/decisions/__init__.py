"""Decisions from probabilities: abstention, costs, thresholds of labels, and prediction sets."""

from hf_calib.decisions.rules import (
    AbstainRule,
    CostRule,
    LabelThresholds,
    PredictionSets,
    TopLabelRule,
)
from hf_calib.decisions.saved import Decisions

__all__ = [
    "AbstainRule",
    "CostRule",
    "Decisions",
    "LabelThresholds",
    "PredictionSets",
    "TopLabelRule",
]
