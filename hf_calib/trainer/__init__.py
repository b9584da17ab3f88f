"""The Hugging Face Trainer with a calibration loss, its arguments and its callbacks.

Methods of `Trainer` that `CalibrationMixin` overrides, the reason, and the test that fails if
upstream changes them:

    | name | why | test |
    | --- | --- | --- |
    | `compute_loss` | the calibration loss, without the model computing its own | test_loss_scaling.py |
    | `get_batch_samples` | the normalizer of the global batch; rows that accelerate repeats | test_loss_scaling.py |
    | `train` | checks of data and checkpoint; changed arguments | test_training_again.py |
    | `evaluate` | a fit before it, nested evaluations, the name of the dataset | test_evaluation.py |
    | `evaluation_loop` | the calibration sums of the pass, by the result of `prediction_step` | test_evaluation.py |
    | `save_model` | the gammas and the calibrator next to the model | test_calibration_map.py |
    | `push_to_hub` | the calibrated model in one commit | ../export/test_hub.py |
    | `create_model_card` | the section on calibration | ../cards/test_card.py |
"""

from hf_calib.trainer.callbacks import (
    AdaFocalCallback,
    CalibrationMapCallback,
    TemperatureScalingCallback,
)
from hf_calib.trainer.config import CalibrationConfig, CalibrationTrainingArguments
from hf_calib.trainer.trainer import CalibrationMixin, CalibrationTrainer

__all__ = [
    "AdaFocalCallback",
    "CalibrationConfig",
    "CalibrationMapCallback",
    "CalibrationMixin",
    "CalibrationTrainer",
    "CalibrationTrainingArguments",
    "TemperatureScalingCallback",
]
