"""Modules that moved in 0.2: the old paths go on working, with a DeprecationWarning, until 0.4."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Old module -> where its names are now; the first home that has a name gives it.
HOMES: dict[str, tuple[str, ...]] = {
    "hf_calib.callbacks": ("hf_calib.trainer",),
    "hf_calib.comparison": ("hf_calib.commands.report",),
    "hf_calib.config_file": ("hf_calib.experiments",),
    "hf_calib.demo": ("hf_calib.commands.demo",),
    "hf_calib.folding": ("hf_calib.export.fold",),
    "hf_calib.inference": ("hf_calib.predictions.texts",),
    "hf_calib.posthoc": (
        "hf_calib.commands.evaluate",
        "hf_calib.commands.calibrate",
        "hf_calib.predictions.texts",
    ),
    "hf_calib.posthoc_models": (
        "hf_calib.commands.evaluate",
        "hf_calib.commands.calibrate",
        "hf_calib.predictions.texts",
    ),
    "hf_calib.recipe": (
        "hf_calib.experiments",
        "hf_calib.data",
        "hf_calib.data.arguments",
        "hf_calib.experiments.reported_training",
    ),
    "hf_calib.saving": ("hf_calib.export.saving",),
    "hf_calib.training_args": ("hf_calib.trainer",),
}
RENAMED = {"Rows": "LabelledTexts", "compare": "compare_reports", "run": "train_and_report"}


class _MovedFinder:
    """Finds the old paths, and nothing else."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, _MovedLoader()) if name in HOMES else None  # type: ignore[arg-type]


class _MovedLoader:
    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        homes = HOMES[module.__name__]
        message = f"{module.__name__} has moved. Import its names from {' or '.join(homes)}."
        warnings.warn(message, DeprecationWarning, stacklevel=2)

        def find(name: str) -> Any:
            new = RENAMED.get(name, name)
            # The import system asks for names such as __path__: no home is imported for these.
            for home in map(import_module, () if name.startswith("_") else homes):
                if hasattr(home, new):
                    return getattr(home, new)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__getattr__ = find  # type: ignore[method-assign]


sys.meta_path.append(_MovedFinder)
