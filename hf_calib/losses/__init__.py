"""Calibration losses: a weight times cross entropy, plus penalties.

    loss_i = w(p_i, y_i; gamma_i) * CE_i  +  sum_k lambda_k * penalty_k

Each loss has a constructor, such as `focal(gamma=2.0)`, whose docstring defines the loss and says
when to use it. `LOSSES` is the table of all losses. `make_loss` makes one by its name and describes
the common arguments and results.
"""

from __future__ import annotations

# The order of the imports is that of the table: the simplest losses first.
# isort: off
# fmt: off
from hf_calib.losses.pointwise import (
    brier, bsce, bsce_gra, cross_entropy, dft, dual_focal, dual_focal_gra, entropy_regularized, flsd, flsd_gra, focal,
    focal_calibration, focal_gra, inverse_focal, label_smoothing, logit_norm, mbls, power,
)
from hf_calib.losses.adaptive import AdaptiveLoss, ada_dual_focal, adafocal, calfocal, ece_ce
from hf_calib.losses.batch import all_gather_rows, avuc, kde_ece, mdca, mmce, soft_ece
from hf_calib.losses.loss import LOSSES, CalibrationLoss, LossEntry, logits_of, make_loss
from hf_calib.losses.without_logits import for_cross_encoder, linear_calibration_loss

__all__ = [
    "LOSSES", "AdaptiveLoss", "CalibrationLoss", "LossEntry", "ada_dual_focal", "adafocal", "all_gather_rows", "avuc",
    "brier", "bsce", "bsce_gra", "calfocal", "cross_entropy", "dft", "dual_focal", "dual_focal_gra", "ece_ce",
    "entropy_regularized", "flsd", "flsd_gra", "focal", "focal_calibration", "focal_gra", "for_cross_encoder",
    "inverse_focal", "kde_ece", "label_smoothing", "linear_calibration_loss", "logit_norm", "logits_of", "make_loss",
    "mbls", "mdca", "mmce", "power", "soft_ece",
]
