"""Predictions with their labels: files of them, and classifiers run over texts."""

from hf_calib.predictions.files import Predictions, load_predictions, save_predictions

__all__ = ["Predictions", "load_predictions", "save_predictions"]
