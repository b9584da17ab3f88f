"""The calibration map of a training: whether it goes with the model, one fit for all processes, its checkpoints."""

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
from hf_calib.scaling import FOLDABLE_SCALERS, AutoScaling, TemperatureScaling, saved_map
from hf_calib.scaling.saved_map import SavedMap, has_bias, load_map, map_title, method_of

# Entries of calibration.json that a model's config does without.
_BESIDE_THE_CONFIG = ("class_names", "base_model", "data", "fingerprint", "metrics")
Array = NDArray[Any]


def scaler_of(trainer: Any) -> Any:
    """What a trainer's arguments say; for "auto" a temperature where a bias would be lost."""
    config, model = trainer.calibration_config, trainer.unwrapped_model
    scaler = config.make_scaler()
    if model is None or not isinstance(scaler, AutoScaling):
        return scaler
    options = trainer.answers is not None
    if config.calibration_method is None and is_causal(model) and not options:
        return None  # of a vocabulary it would take minutes and gigabytes that nobody has asked for
    return TemperatureScaling() if options or head_loses_bias(model, trainer.n_classes) else scaler


# ---- What goes with what ----


def check_goes_with(scaler: Any, trainer: Any) -> None:
    """Refuse a scaler that does not go with the problem or the model's head; "auto" is judged once it is fitted."""
    check_problem(scaler, trainer.calibration_loss.multi_label)
    method, model, n_classes = method_of(scaler, folds=True), trainer.unwrapped_model, trainer.n_classes
    title, way_out = map_title(method), "use calibration_method='temperature'"
    loses = (FOLDABLE_SCALERS[method].bias or has_bias(scaler)) and head_loses_bias(model, n_classes)
    got = f"{type(model).__name__}, which makes none when it is loaded"
    requirement = f"the model to have a bias in its head for {title}"
    check(not loses, requirement, got, f"{way_out}, or a model whose head has a bias")
    plain = without_adapters(model)
    tied, got = has_tied_head(plain), f"{type(plain).__name__}, whose head is its embedding"
    own_head = method == "temperature" or not (tied or trainer.answers is not None)
    check(own_head, f"the model to have a head of its own for {title}", got, way_out)
    requirement = "the model to have a layer that a temperature can be folded into"
    way_out = "set calibration_method='none', and divide the logits where the model is used"
    folds = not tied or bool(norms_of_hidden_size(plain))
    check(folds, requirement, f"{got}, and whose norms have no weights", way_out)


def check_problem(scaler: Any, multi_label: bool | None) -> None:
    """Refuse a scaler that does not go with the labels, as far as it is known whether a row has several."""

    def goes(other: Any) -> bool:
        return "multi_label" in other.get_params() or other.multi_label == multi_label

    if multi_label is not None and not goes(scaler):
        fitted = [key for key, entry in FOLDABLE_SCALERS.items() if entry.needs != "priors"]
        others = ", ".join(key for key in fitted if goes(FOLDABLE_SCALERS[key].load()()))
        kind = "multi" if multi_label else "single"
        requirement = f"the calibration method to go with a {kind}-label problem"
        check(False, requirement, repr(method_of(scaler, folds=True)), f"choose one of {others}")


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
            outcome = [vars(scaler.fit(logits, labels))]
        except Exception as error:
            failure, outcome = error, [f"{type(error).__name__}: {error}"]
    broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    if isinstance(outcome[0], str):
        raise RuntimeError(f"The fit on the first process failed: {outcome[0]}")
    vars(scaler).update(outcome[0])


# ---- What is recorded ----


def take(trainer: Any, fitted: SavedMap | None) -> None:
    """Let it be the trainer's map, which the model's config records; or forget the one that was."""
    trainer.fitted_map, config = fitted, trainer.model_config
    if fitted is not None and config is not None:
        about = {key: value for key, value in fitted.about.items() if key not in _BESIDE_THE_CONFIG}
        config.calibration = {**_record(fitted.scaler), **about}
    elif hasattr(config, "calibration"):
        del config.calibration


def is_in(fitted: SavedMap | None, path: Path) -> bool:
    """Whether a calibration.json holds this map."""
    try:
        found = load_map(path).scaler
    except ValueError:
        return False
    folds = fitted is not None and method_of(found) in FOLDABLE_SCALERS
    return folds and _record(found) == _record(fitted.scaler)  # type: ignore[union-attr]


def _record(scaler: Any) -> dict[str, Any]:
    return {"method": method_of(scaler, folds=True), **saved_map.config_record(scaler)}


def map_of_checkpoint(checkpoint: str | os.PathLike[str], scaler: Any) -> SavedMap | None:
    """The map that was saved with a checkpoint, if there is one of this scaler's method."""
    file = Path(checkpoint) / saved_map.MAP_NAME
    if not file.is_file():
        return None
    saved = load_map(file)
    return saved if method_of(saved.scaler) == method_of(scaler, folds=True) else None


def in_words(scaler: Any) -> str:
    """The map's title, with its temperature where it has one: "auto scaling (temperature), T = 1.234"."""
    temperature = saved_map.temperature_of(scaler)
    return saved_map.title_of(scaler) + ("" if temperature is None else f", T = {temperature:.3f}")
