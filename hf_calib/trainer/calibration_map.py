"""The calibration map of a training: whether it goes with the model, one fit for all processes, its checkpoints."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from numpy.typing import NDArray

from hf_calib._errors import InputValueError, expected
from hf_calib.export.heads import has_tied_head, head_loses_bias, norms_of_hidden_size
from hf_calib.scaling import AutoScaling, TemperatureScaling
from hf_calib.scaling.methods import FOLDABLE_SCALERS, foldable_method, is_multi_label, method_of
from hf_calib.scaling.saved_map import (
    MAP_NAME,
    check_finite,
    config_record,
    has_bias,
    load_map,
    map_title,
    save_map,
    temperature_of,
    title_of,
)
from hf_calib.trainer.labels import predicts_next_token

# Entries of calibration.json that a model's config does without.
_BESIDE_THE_CONFIG = ("class_names", "base_model", "data", "fingerprint", "metrics")


@dataclass(frozen=True)
class FittedMap:
    """A calibration map, and what is known about it.

    Args:
        scaler: fitted; any of `SCALERS` that folds.
        about: further entries of calibration.json: the loss, the rows that it was fitted on, and so on.
    """

    scaler: Any
    about: Mapping[str, Any]

    def config_record(self) -> dict[str, Any]:
        """The record of the map for the model's config."""
        return {
            "method": foldable_method(self.scaler),
            **config_record(self.scaler),
            **{key: value for key, value in self.about.items() if key not in _BESIDE_THE_CONFIG},
        }

    def save(self, path: Path) -> None:
        """Write calibration.json into a folder, or as this file."""
        save_map(self.scaler, path, self.about)

    def is_in(self, path: Path) -> bool:
        """Whether a calibration.json holds this map."""
        try:
            found = load_map(path).scaler
        except ValueError:
            return False
        if method_of(found) not in FOLDABLE_SCALERS:
            return False
        pairs = zip(self.scaler.affine_map(), found.affine_map(), strict=True)
        return all(np.array_equal(ours, theirs) for ours, theirs in pairs if not ours is theirs is None)


def check_problem(scaler: Any, multi_label: bool | None) -> None:
    """Refuse a scaler, fitted or not, that does not go with the labels.

    Args:
        scaler: one that folds.
        multi_label: what the problem is; None if it is not known yet.

    Raises:
        TypeError: if it is not a scaler that folds.
        ValueError: naming the methods that go with them.
    """
    method = foldable_method(scaler)
    if multi_label is None or multi_label in _kinds(scaler):
        return
    kind = "multi" if multi_label else "single"
    fitted = {key: entry for key, entry in FOLDABLE_SCALERS.items() if entry.needs != "priors"}
    others = [key for key, entry in fitted.items() if multi_label in _kinds(entry.load()())]
    requirement = f"go with a {kind}-label problem"
    way_out = f"choose one of {', '.join(others)}"
    raise InputValueError(expected("the calibration method", requirement, repr(method), way_out))


def _kinds(scaler: Any) -> tuple[bool, ...]:
    """The values that `multi_label` of the problem may have."""
    if "multi_label" in scaler.get_params():
        return False, True
    return (is_multi_label(scaler),)


def check_head(scaler: Any, model: Any, n_classes: int | None) -> None:
    """Refuse a map with a bias where the model's head loses it; "auto" is judged once it is fitted.

    Raises:
        ValueError: naming the way out.
    """
    method = foldable_method(scaler)
    if (FOLDABLE_SCALERS[method].bias or has_bias(scaler)) and head_loses_bias(model, n_classes):
        requirement = f"have a bias in its head for {map_title(method)}"
        got = f"{type(model).__name__}, which makes none when it is loaded"
        way_out = "use calibration_method='temperature', or a model whose head has a bias"
        raise InputValueError(expected("the model", requirement, got, way_out))
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    if has_tied_head(plain) and not (method == "temperature" and norms_of_hidden_size(plain)):
        requirement = f"have a head of its own for {map_title(method)}"
        got = f"{type(plain).__name__}, whose head is its embedding"
        way_out = "use calibration_method='temperature'"
        if method == "temperature":
            requirement = "have a layer that a temperature can be folded into"
            got += ", and whose norms have no weights"
            way_out = "set calibration_method='none', and divide the logits where the model is used"
        raise InputValueError(expected("the model", requirement, got, way_out))


def check_fitted(scaler: Any, multi_label: bool | None, n_classes: int | None) -> None:
    """Refuse a fitted scaler that is not for this model's logits.

    Raises:
        ValueError: if its numbers are not finite, or are those of other classes or of the other kind of problem.
        sklearn.exceptions.NotFittedError: if it is not fitted.
    """
    check_finite(scaler)
    weight, bias = scaler.affine_map()
    sizes = {*weight.shape, *(() if bias is None else bias.shape)}
    if n_classes is not None and sizes - {n_classes}:
        way_out = "fit it on this model's logits"
        raise InputValueError(expected("scaler", f"be fitted on {n_classes} classes", max(sizes), way_out))
    if multi_label is not None and is_multi_label(scaler) != multi_label:
        got = f"multi_label={is_multi_label(scaler)}"
        way_out = "fit it with the labels of this problem"
        raise InputValueError(expected("scaler", f"be fitted with multi_label={multi_label}", got, way_out))


def fit_once(accelerator: Accelerator, scaler: Any, logits: NDArray[Any], labels: NDArray[Any]) -> None:
    """Fit on the first process, whose numbers the others take: the map is the same everywhere, bit for bit.

    Raises:
        Exception: whatever the fit raises; a RuntimeError about it on the other processes.
    """
    if "multi_label" in scaler.get_params():
        scaler.set_params(multi_label=labels.ndim == 2)
    outcome: list[Any] = [None]
    failure: Exception | None = None
    if accelerator.is_main_process:
        try:
            scaler.fit(logits, labels)
            outcome = [vars(scaler)]
        except Exception as error:
            failure = error
            outcome = [f"{type(error).__name__}: {error}"]
    broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    if isinstance(outcome[0], str):
        raise RuntimeError(f"The fit on the first process failed: {outcome[0]}")
    vars(scaler).update(outcome[0])


def fit_for_head(trainer: Any, scaler: Any, logits: NDArray[Any], labels: NDArray[Any]) -> Any:
    """The fitted scaler; a temperature where it has found a bias that the model's head would lose."""
    check_problem(scaler, labels.ndim == 2)
    fit_once(trainer.accelerator, scaler, logits, labels)
    model = trainer.unwrapped_model
    if not (has_bias(scaler) and head_loses_bias(model, trainer.n_classes)):
        return scaler
    if trainer.is_world_process_zero():
        warnings.warn(
            f"{title_of(scaler).capitalize()} has a bias, which the head of {type(model).__name__} loses when "
            "it is loaded. A temperature was fitted instead. Use a model whose head has a bias, or set "
            "calibration_method='temperature'.",
            stacklevel=3,
        )
    scaler = TemperatureScaling()
    fit_once(trainer.accelerator, scaler, logits, labels)
    return scaler


def scaler_of(config: Any, trainer: Any) -> Any:
    """The scaler of a configuration; by default a temperature where a bias would be lost, none of a vocabulary."""
    scaler, model = config.make_scaler(), trainer.unwrapped_model
    is_default = config.calibration_method is None and isinstance(scaler, AutoScaling)
    if not is_default or model is None:
        return scaler
    if trainer.answers is None and predicts_next_token(
        model
    ):  # minutes and gigabytes that nobody has asked for
        return None
    keeps_bias = trainer.answers is None and not head_loses_bias(model, trainer.n_classes)
    return scaler if keeps_bias else TemperatureScaling()


def map_of_checkpoint(checkpoint: str | os.PathLike[str], scaler: Any) -> FittedMap | None:
    """The map that was saved with a checkpoint, if there is one of this scaler's method.

    Raises:
        ValueError: if its file is not a whole map, or holds one that does not fold.
    """
    file = Path(checkpoint) / MAP_NAME
    if not file.is_file():
        return None
    saved = load_map(file)
    method = method_of(saved.scaler)
    if method not in FOLDABLE_SCALERS:
        way_out = "a training writes none other: remove that file from the checkpoint"
        raise InputValueError(expected(str(file), "hold a map that folds", f"method {method!r}", way_out))
    return FittedMap(saved.scaler, saved.about) if method == foldable_method(scaler) else None


def in_words(scaler: Any) -> str:
    """The map's title, with its temperature where it has one: "auto scaling (temperature), T = 1.234"."""
    temperature = temperature_of(scaler)
    return title_of(scaler) + ("" if temperature is None else f", T = {temperature:.3f}")
