"""Calibrated fine-tuning for the Hugging Face Trainer: losses, adaptive gammas,
calibrators folded into the model.

The names here are loaded when they are first used: `import hf_calib` loads neither torch nor
transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_calib._errors import InputError as InputError
    from hf_calib.commands.options import calibrate as calibrate
    from hf_calib.commands.options import decide as decide
    from hf_calib.commands.options import evaluate as evaluate
    from hf_calib.export import fold as fold
    from hf_calib.export import fold_temperature as fold_temperature
    from hf_calib.export import unfold as unfold
    from hf_calib.models.pipeline import pipeline as pipeline
    from hf_calib.trainer import AdaFocalCallback as AdaFocalCallback
    from hf_calib.trainer import CalibrationMapCallback as CalibrationMapCallback
    from hf_calib.trainer import CalibrationTrainer as CalibrationTrainer
    from hf_calib.trainer import (
        CalibrationTrainingArguments as CalibrationTrainingArguments,
    )
    from hf_calib.trainer import (
        TemperatureScalingCallback as TemperatureScalingCallback,
    )

__version__ = "0.2.0"

_HOMES = {
    "AdaFocalCallback": "hf_calib.trainer",
    "CalibrationMapCallback": "hf_calib.trainer",
    "CalibrationTrainer": "hf_calib.trainer",
    "CalibrationTrainingArguments": "hf_calib.trainer",
    "InputError": "hf_calib._errors",
    "TemperatureScalingCallback": "hf_calib.trainer",
    "calibrate": "hf_calib.commands.options",
    "decide": "hf_calib.commands.options",
    "evaluate": "hf_calib.commands.options",
    "fold": "hf_calib.export",
    "fold_temperature": "hf_calib.export",
    "pipeline": "hf_calib.models.pipeline",
    "unfold": "hf_calib.export",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
