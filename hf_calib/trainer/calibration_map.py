"""The calibration map of a training: whether it goes with the model, one fit for all processes, its checkpoints."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from numpy.typing import NDArray

from hf_calib._errors import check
from hf_calib.export.heads import has_tied_head, head_loses_bias, norms_of_hidden_size
from hf_calib.scaling import FOLDABLE_SCALERS, AutoScaling, TemperatureScaling, saved_map
from hf_calib.scaling.saved_map import (
    has_bias,
    load_map,
    map_title,
    method_of,
    temperature_of,
    title_of,
)
from hf_calib.trainer.labels import predicts_next_token, without_adapters

# Entries of calibration.json that a model's config does without.
_BESIDE_THE_CONFIG = ("class_names", "base_model", "data", "fingerprint", "metrics")
Array = NDArray[Any]


@dataclass(frozen=True)
class FittedMap:
    """A fitted scaler that folds, and further entries of calibration.json: the loss, the rows that it was fitted on."""

    scaler: Any
    about: Mapping[str, Any]

    def config_record(self) -> dict[str, Any]:
        """The record of the map for the model's config."""
        about = {key: value for key, value in self.about.items() if key not in _BESIDE_THE_CONFIG}
        return {**_record(self.scaler), **about}

    def save(self, path: Path) -> None:
        """Write calibration.json into a folder, or as this file."""
        saved_map.save_map(self.scaler, path, self.about)

    def is_in(self, path: Path) -> bool:
        """Whether a calibration.json holds this map."""
        try:
            found = load_map(path).scaler
        except ValueError:
            return False
        return method_of(found) in FOLDABLE_SCALERS and _record(found) == _record(self.scaler)


def _record(scaler: Any) -> dict[str, Any]:
    return {"method": method_of(scaler, folds=True), **saved_map.config_record(scaler)}


def scaler_of(trainer: Any) -> Any:
    """What a trainer's arguments say; by default a temperature where a bias would be lost, none of a vocabulary."""
    config, model = trainer.calibration_config, trainer.unwrapped_model
    scaler = config.make_scaler()
    is_default = config.calibration_method is None and isinstance(scaler, AutoScaling)
    if not is_default or model is None:
        return scaler
    if trainer.answers is None and predicts_next_token(
        model
    ):  # minutes and gigabytes that nobody has asked for
        return None
    keeps_bias = trainer.answers is None and not head_loses_bias(model, trainer.n_classes)
    return scaler if keeps_bias else TemperatureScaling()


# ---- What goes with what ----


def check_goes_with(scaler: Any, trainer: Any) -> None:
    """Refuse a scaler, fitted or not, that does not go with the problem or the model's head."""
    check_problem(scaler, trainer.calibration_loss.multi_label)
    _check_head(scaler, trainer.unwrapped_model, trainer.n_classes)


def check_problem(scaler: Any, multi_label: bool | None) -> None:
    """Refuse a scaler that does not go with the labels, as far as it is known whether a row has several."""

    def goes(other: Any) -> bool:
        return "multi_label" in other.get_params() or other.multi_label == multi_label

    method = method_of(scaler, folds=True)
    if multi_label is None or goes(scaler):
        return
    fitted = [key for key, entry in FOLDABLE_SCALERS.items() if entry.needs != "priors"]
    others = ", ".join(key for key in fitted if goes(FOLDABLE_SCALERS[key].load()()))
    requirement = f"the calibration method to go with a {'multi' if multi_label else 'single'}-label problem"
    check(False, requirement, repr(method), f"choose one of {others}")


def _check_head(scaler: Any, model: Any, n_classes: int | None) -> None:
    """Refuse a map with a bias where the model's head loses it; "auto" is judged once it is fitted."""
    method = method_of(scaler, folds=True)
    title, is_temperature = map_title(method), method == "temperature"
    loses = (FOLDABLE_SCALERS[method].bias or has_bias(scaler)) and head_loses_bias(model, n_classes)
    got = f"{type(model).__name__}, which makes none when it is loaded"
    way_out = "use calibration_method='temperature', or a model whose head has a bias"
    check(not loses, f"the model to have a bias in its head for {title}", got, way_out)
    plain = without_adapters(model)
    tied, got = has_tied_head(plain), f"{type(plain).__name__}, whose head is its embedding"
    way_out = "use calibration_method='temperature'"
    check(not tied or is_temperature, f"the model to have a head of its own for {title}", got, way_out)
    way_out = "set calibration_method='none', and divide the logits where the model is used"
    requirement = "the model to have a layer that a temperature can be folded into"
    folds = not tied or bool(norms_of_hidden_size(plain))
    check(folds, requirement, f"{got}, and whose norms have no weights", way_out)


def check_fitted(scaler: Any, multi_label: bool | None, n_classes: int | None) -> None:
    """Refuse a scaler that is not fitted, or not on this model's logits."""
    saved_map.check_finite(scaler)
    sizes = {size for part in scaler.affine_map() if part is not None for size in part.shape}
    fits, got = n_classes is None or sizes <= {n_classes}, max(sizes, default=0)
    check(fits, f"scaler to be fitted on {n_classes} classes", got, "fit it on this model's logits")
    same, got = multi_label in (None, scaler.multi_label), f"multi_label={scaler.multi_label}"
    requirement = f"scaler to be fitted with multi_label={multi_label}"
    check(same, requirement, got, "fit it with the labels of this problem")


# ---- Fits ----


def fit_once(accelerator: Accelerator, scaler: Any, logits: Array, labels: Array) -> None:
    """Fit on the first process, whose numbers the others take: the map is the same everywhere, bit for bit.

    What the fit raises there is a RuntimeError on the other processes.
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
            failure, outcome = error, [f"{type(error).__name__}: {error}"]
    broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    if isinstance(outcome[0], str):
        raise RuntimeError(f"The fit on the first process failed: {outcome[0]}")
    vars(scaler).update(outcome[0])


def fit_for_head(trainer: Any, scaler: Any, logits: Array, labels: Array) -> Any:
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


def take(trainer: Any, fitted: FittedMap | None) -> None:
    """Let it be the trainer's map, which the model's config records; or forget the one that was."""
    trainer.fitted_map, config = fitted, trainer.model_config
    if fitted is not None and config is not None:
        config.calibration = fitted.config_record()
    elif hasattr(config, "calibration"):
        del config.calibration


def map_of_checkpoint(checkpoint: str | os.PathLike[str], scaler: Any) -> FittedMap | None:
    """The map that was saved with a checkpoint, if there is one of this scaler's method."""
    file = Path(checkpoint) / saved_map.MAP_NAME
    if not file.is_file():
        return None
    saved = load_map(file)
    method, way_out = (
        method_of(saved.scaler),
        "a training writes none other: remove that file from the checkpoint",
    )
    check(method in FOLDABLE_SCALERS, f"{file} to hold a map that folds", f"method {method!r}", way_out)
    return FittedMap(saved.scaler, saved.about) if method == method_of(scaler, folds=True) else None


def in_words(scaler: Any) -> str:
    """The map's title, with its temperature where it has one: "auto scaling (temperature), T = 1.234"."""
    temperature = temperature_of(scaler)
    return title_of(scaler) + ("" if temperature is None else f", T = {temperature:.3f}")
