"""Calibrated fine-tuning for the Hugging Face Trainer: losses, adaptive gammas, calibration maps folded into the model.

The names here are loaded when they are first used: `import hf_calib` brings in neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_calib._errors import InputError
    from hf_calib.commands.calls import calibrate, decide, evaluate
    from hf_calib.export import fold, fold_temperature, unfold
    from hf_calib.models.pipeline import pipeline
    from hf_calib.study import compare
    from hf_calib.trainer import (
        AdaFocalCallback,
        CalibrationMapCallback,
        CalibrationTrainer,
        CalibrationTrainingArguments,
        TemperatureScalingCallback,
    )

__version__ = "0.2.0"

__all__ = [
    "AdaFocalCallback",
    "CalibrationMapCallback",
    "CalibrationTrainer",
    "CalibrationTrainingArguments",
    "InputError",
    "TemperatureScalingCallback",
    "calibrate",
    "compare",
    "decide",
    "evaluate",
    "fold",
    "fold_temperature",
    "pipeline",
    "unfold",
]

# The homes of those that are not in hf_calib.trainer.
_HOMES = dict.fromkeys(("fold", "fold_temperature", "unfold"), "hf_calib.export") | {
    "InputError": "hf_calib._errors",
    "calibrate": "hf_calib.commands.calls",
    "compare": "hf_calib.study",
    "decide": "hf_calib.commands.calls",
    "evaluate": "hf_calib.commands.calls",
    "pipeline": "hf_calib.models.pipeline",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "hf_calib.trainer")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
