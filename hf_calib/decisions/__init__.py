"""Decisions from probabilities: when to answer, at what cost, which labels, which set of classes."""

from hf_calib.decisions.rules import AbstainRule, CostRule, LabelThresholds, PredictionSets
from hf_calib.decisions.saved import Decisions

__all__ = ["AbstainRule", "CostRule", "Decisions", "LabelThresholds", "PredictionSets"]
