"""Predictions with their labels: from files, by running a classifier, or of a training."""

from hf_calib.predictions.files import load_predictions, save_predictions
from hf_calib.predictions.predictions import Predictions

__all__ = ["Predictions", "load_predictions", "save_predictions"]
