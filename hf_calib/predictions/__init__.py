"""Predictions with their labels, from files, from a classifier, or from a training run."""

from hf_calib.predictions.formats import save_predictions
from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.table import Table, load_predictions, open_predictions

__all__ = [
    "Predictions",
    "Table",
    "load_predictions",
    "open_predictions",
    "save_predictions",
]
