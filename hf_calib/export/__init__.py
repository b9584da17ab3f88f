"""Calibrated models on disk and on the Hub: folding, saving, model cards."""

from hf_calib.export.fold import fold, fold_temperature
from hf_calib.export.saving import save_folded, standalone_copy

__all__ = ["fold", "fold_temperature", "save_folded", "standalone_copy"]
