"""The Hugging Face Trainer with a calibration loss, its arguments and its callbacks."""

from hf_calib.trainer.arguments import CalibrationTrainingArguments
from hf_calib.trainer.callbacks import AdaFocalCallback, CalibrationMapCallback, TemperatureScalingCallback
from hf_calib.trainer.trainer import CalibrationTrainer
from hf_calib.trainer.training_trace import TrainingTrace

__all__ = [
    "AdaFocalCallback",
    "CalibrationMapCallback",
    "CalibrationTrainer",
    "CalibrationTrainingArguments",
    "TemperatureScalingCallback",
    "TrainingTrace",
]
