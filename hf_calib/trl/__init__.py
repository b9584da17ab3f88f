"""TRL's trainers with the calibration losses: `pip install "hf_calib[trl]"`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_calib.trl.reward import CalibrationRewardConfig, CalibrationRewardTrainer
    from hf_calib.trl.sft import CalibrationSFTConfig, CalibrationSFTTrainer

__all__ = [
    "CalibrationRewardConfig",
    "CalibrationRewardTrainer",
    "CalibrationSFTConfig",
    "CalibrationSFTTrainer",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # TRL is optional, so its trainers are imported when one is first asked for.
    try:
        return getattr(
            import_module(f"hf_calib.trl.{'reward' if 'Reward' in name else 'sft'}"),
            name,
        )
    except ModuleNotFoundError as error:
        # Another module that is missing is no reason to install TRL.
        if error.name != "trl":
            raise
        message = f"hf_calib.trl.{name} needs TRL; pip install 'hf_calib[trl]'"
        raise ModuleNotFoundError(message, name="trl") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
