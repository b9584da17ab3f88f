"""Predictions with their labels: from files, or from a classifier run over texts."""

from hf_calib.predictions.files import Predictions, load_predictions, save_predictions

__all__ = ["Predictions", "load_predictions", "save_predictions"]
