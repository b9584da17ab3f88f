"""Calibrated models on disk and on the Hub: folding, unfolding, saving and pushing."""

from hf_calib.export.fold import fold, fold_temperature
from hf_calib.export.folder import save_folded, standalone_copy
from hf_calib.export.hub import push_folder
from hf_calib.export.unfold import unfold

__all__ = [
    "fold",
    "fold_temperature",
    "push_folder",
    "save_folded",
    "standalone_copy",
    "unfold",
]
