"""Predictions with their labels: from files, by running a classifier, or of a training."""

from hf_calib.predictions.files import load_predictions, save_predictions
from hf_calib.predictions.logs import LogOptions, load_log
from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.shards import Shards, open_shards

__all__ = [
    "LogOptions",
    "Predictions",
    "Shards",
    "load_log",
    "load_predictions",
    "open_shards",
    "save_predictions",
]
