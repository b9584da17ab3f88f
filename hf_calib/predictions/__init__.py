"""Predictions with their labels: from files, by running a classifier, or of a training."""

from hf_calib.predictions.logs import LogOptions, load_log
from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.table import Table, load_predictions, open_predictions, save_predictions

__all__ = [
    "LogOptions",
    "Predictions",
    "Table",
    "load_log",
    "load_predictions",
    "open_predictions",
    "save_predictions",
]
