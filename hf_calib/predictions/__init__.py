"""Predictions with their labels, from files, from a classifier, or from a training run."""

from hf_calib.predictions.formats import save_predictions
from hf_calib.predictions.predictions import Predictions, TopLabels
from hf_calib.predictions.reading import Read, load_predictions, read_predictions

__all__ = [
    "Predictions",
    "Read",
    "TopLabels",
    "load_predictions",
    "read_predictions",
    "save_predictions",
]
