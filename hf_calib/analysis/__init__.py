"""Numbers behind the papers' figures, for a user's own model and training.

The names here are loaded when they are first used: some need torch, and most do not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_calib.analysis.dynamics import (
        Trace,
        TracedSet,
        learned_epoch,
        learned_groups,
        moving_average,
    )

__all__ = [
    "Trace",
    "TracedSet",
    "learned_epoch",
    "learned_groups",
    "moving_average",
]

_HOMES = {
    "Trace": "hf_calib.analysis.dynamics",
    "TracedSet": "hf_calib.analysis.dynamics",
    "learned_epoch": "hf_calib.analysis.dynamics",
    "learned_groups": "hf_calib.analysis.dynamics",
    "moving_average": "hf_calib.analysis.dynamics",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
