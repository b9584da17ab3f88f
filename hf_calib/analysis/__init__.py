"""Numbers behind the papers' figures, for a user's own model and training.

The names here are loaded when they are first used: some need torch, and most do not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_calib.analysis.last_layer_gradients import last_layer_gradient_norms

__all__ = ["last_layer_gradient_norms"]

_HOMES = {"last_layer_gradient_norms": "hf_calib.analysis.last_layer_gradients"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
