"""Calibrated fine-tuning for the Hugging Face Trainer: losses, adaptive gammas, folded temperatures.

The names here are loaded when they are first used: `import hf_calib` brings in neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_calib.callbacks import AdaFocalCallback, TemperatureScalingCallback
    from hf_calib.folding import fold, fold_temperature
    from hf_calib.trainer import CalibrationTrainer
    from hf_calib.training_args import CalibrationTrainingArguments

__version__ = "0.1.0"

__all__ = [
    "AdaFocalCallback",
    "CalibrationTrainer",
    "CalibrationTrainingArguments",
    "TemperatureScalingCallback",
    "fold",
    "fold_temperature",
]

_HOMES = {
    "AdaFocalCallback": "hf_calib.callbacks",
    "CalibrationTrainer": "hf_calib.trainer",
    "CalibrationTrainingArguments": "hf_calib.training_args",
    "TemperatureScalingCallback": "hf_calib.callbacks",
    "fold": "hf_calib.folding",
    "fold_temperature": "hf_calib.folding",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
