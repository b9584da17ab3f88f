"""The calibrator of a run: its checks, the fit on one process for all, and its checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from numpy.typing import NDArray

from hf_calib._errors import check
from hf_calib.export.heads import has_tied_head, head_loses_bias, norms_of_hidden_size
from hf_calib.language_models.label_tokens import is_causal, without_adapters
from hf_calib.scaling import (
    FOLDABLE_SCALERS,
    AutoScaling,
    TemperatureScaling,
    saved_map,
)
from hf_calib.scaling.saved_map import (
    SavedMap,
    has_bias,
    load_map,
    map_title,
    method_of,
)

# Entries of calibration.json that a model's config does not have.
_BESIDE_THE_CONFIG = ("class_names", "base_model", "data", "fingerprint", "metrics")
Array = NDArray[Any]


def scaler_of(trainer: Any) -> Any:
    """The calibrator of a trainer's arguments; for "auto" a temperature if a bias would be lost."""
    config, model = trainer.calibration_config, trainer.unwrapped_model
    scaler = config.make_scaler()
    if model is None or not isinstance(scaler, AutoScaling):
        return scaler
    options = trainer.answers is not None
    if config.calibration_method is None and is_causal(model) and not options:
        return None  # For a vocabulary it would take minutes and gigabytes.
    return (
        TemperatureScaling()
        if options or head_loses_bias(model, trainer.n_classes)
        else scaler
    )


# ---- Checks ----


def check_goes_with(scaler: Any, trainer: Any) -> None:
    """Raise if a calibrator does not fit the problem or the model's head; "auto" is checked after its fit."""
    check_problem(scaler, trainer.calibration_loss.multi_label)
    method, model, n_classes = (
        method_of(scaler, folds=True),
        trainer.unwrapped_model,
        trainer.n_classes,
    )
    title, way_out = map_title(method), "use calibration_method='temperature'"
    loses = (FOLDABLE_SCALERS[method].bias or has_bias(scaler)) and head_loses_bias(
        model, n_classes
    )
    got = f"{type(model).__name__}, which makes none when it is loaded"
    requirement = f"the model to have a bias in its head for {title}"
    check(not loses, requirement, got, f"{way_out}, or a model whose head has a bias")
    plain = without_adapters(model)
    tied, got = (
        has_tied_head(plain),
        f"{type(plain).__name__}, whose head is its embedding",
    )
    own_head = method == "temperature" or not (tied or trainer.answers is not None)
    check(own_head, f"the model to have a head of its own for {title}", got, way_out)
    requirement = "the model to have a layer that a temperature can be folded into"
    way_out = "set calibration_method='none', and divide the logits by a temperature when using the model"
    folds = not tied or bool(norms_of_hidden_size(plain))
    check(folds, requirement, f"{got}, and whose norms have no weights", way_out)


def check_problem(scaler: Any, multi_label: bool | None) -> None:
    """Raise if a calibrator does not fit the labels, if it is known whether a row has several."""

    def goes(other: Any) -> bool:
        return "multi_label" in other.get_params() or other.multi_label == multi_label

    if multi_label is not None and not goes(scaler):
        fitted = [
            key for key, entry in FOLDABLE_SCALERS.items() if entry.needs != "priors"
        ]
        others = ", ".join(
            key for key in fitted if goes(FOLDABLE_SCALERS[key].load()())
        )
        kind = "multi" if multi_label else "single"
        requirement = f"the calibration method to be used with a {kind}-label problem"
        check(
            False,
            requirement,
            repr(method_of(scaler, folds=True)),
            f"choose one of {others}",
        )


# ---- Fits ----


def fit_once(
    accelerator: Accelerator, scaler: Any, logits: Array, labels: Array
) -> None:
    """Fit on the first process and copy the numbers to the others, so that the calibrator is identical everywhere.

    An error of the fit there is a RuntimeError on the other processes.
    """
    if "multi_label" in scaler.get_params():
        scaler.set_params(multi_label=labels.ndim == 2)
    outcome: list[Any] = [None]
    failure: Exception | None = None
    if accelerator.is_main_process:
        try:
            outcome = [vars(scaler.fit(logits, labels))]
        except Exception as error:
            failure, outcome = error, [f"{type(error).__name__}: {error}"]
    broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    if isinstance(outcome[0], str):
        raise RuntimeError(f"The fit on the first process failed: {outcome[0]}")
    vars(scaler).update(outcome[0])


# ---- Records ----


def take(trainer: Any, fitted: SavedMap | None) -> None:
    """Set the trainer's calibrator and record it in the model's config; None removes it."""
    trainer.fitted_map, config = fitted, trainer.model_config
    if fitted is not None and config is not None:
        about = {
            key: value
            for key, value in fitted.about.items()
            if key not in _BESIDE_THE_CONFIG
        }
        config.calibration = {**_record(fitted.scaler), **about}
    elif hasattr(config, "calibration"):
        del config.calibration


def is_in(fitted: SavedMap | None, path: Path) -> bool:
    """Whether a calibration.json contains this calibrator."""
    try:
        found = load_map(path).scaler
    except ValueError:
        return False
    folds = fitted is not None and method_of(found) in FOLDABLE_SCALERS
    return folds and _record(found) == _record(fitted.scaler)  # type: ignore[union-attr]


def _record(scaler: Any) -> dict[str, Any]:
    return {"method": method_of(scaler, folds=True), **saved_map.config_record(scaler)}


def map_of_checkpoint(
    checkpoint: str | os.PathLike[str], scaler: Any
) -> SavedMap | None:
    """The calibrator saved with a checkpoint, if there is one with this method."""
    file = Path(checkpoint) / saved_map.MAP_NAME
    if not file.is_file():
        return None
    saved = load_map(file)
    return saved if method_of(saved.scaler) == method_of(scaler, folds=True) else None


def in_words(scaler: Any) -> str:
    """The calibrator's name, with its temperature if it has one: "auto scaling (temperature), T = 1.234"."""
    temperature = saved_map.temperature_of(scaler)
    return saved_map.title_of(scaler) + (
        "" if temperature is None else f", T = {temperature:.3f}"
    )
