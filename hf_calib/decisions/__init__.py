"""Decisions from probabilities: when to answer, at what cost, which labels, which set of classes."""

from hf_calib.decisions.abstain import AbstainRule
from hf_calib.decisions.costs import CostRule
from hf_calib.decisions.saved import Decisions
from hf_calib.decisions.sets import PredictionSets
from hf_calib.decisions.thresholds import LabelThresholds

__all__ = ["AbstainRule", "CostRule", "Decisions", "LabelThresholds", "PredictionSets"]
