"""Predictions with their labels: from files, by running a classifier, or of a training."""

from hf_calib.predictions.formats import save_predictions
from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.table import Table, load_predictions, open_predictions

__all__ = ["Predictions", "Table", "load_predictions", "open_predictions", "save_predictions"]
