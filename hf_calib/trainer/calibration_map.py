"""The calibrator of a run: its checks, the fit on one process for all, and its checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from numpy.typing import NDArray

from hf_calib._errors import check, few
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
from hf_calib.trainer.labels import Problem

# Entries of calibration.json that a model's config does not have.
_BESIDE_THE_CONFIG = ("class_names", "base_model", "data", "fingerprint", "metrics")

Array = NDArray[Any]


def scaler_for(problem: Problem, scaler: Any, *, is_default: bool) -> Any:
    """The configured calibrator or None; a temperature for "auto" if a bias would be lost."""
    if problem.model is None or not isinstance(scaler, AutoScaling):
        return scaler
    # The logits of a few options are rows of a shared head, which can only be divided.
    if problem.answers is not None:
        return TemperatureScaling()
    if is_default and is_causal(problem.model):
        return None  # For a vocabulary it would take minutes and gigabytes.
    if head_loses_bias(problem.model, problem.n_classes):
        return TemperatureScaling()
    return scaler


# ---- Checks ----


def check_goes_with(scaler: Any, problem: Problem) -> None:
    """Raise if a calibrator does not fit the problem or the model's head; "auto" is checked after
    its fit.
    """
    method = method_of(scaler, folds=True)
    check_problem(scaler, problem.multi_label)
    title = map_title(method)
    use_a_temperature = "use calibration_method='temperature'"

    needs_bias = FOLDABLE_SCALERS[method].bias or has_bias(scaler)
    check(
        not (needs_bias and head_loses_bias(problem.model, problem.n_classes)),
        f"the model to have a bias in its head for {title}",
        got=f"{type(problem.model).__name__}, which makes none when it is loaded",
        way_out=f"{use_a_temperature}, or a model whose head has a bias",
    )

    plain = without_adapters(problem.model)
    is_tied = has_tied_head(plain)
    tied = f"{type(plain).__name__}, whose head is its embedding"
    # Another row of an embedding or of a vocabulary's head would change other texts, too.
    has_own_head = not is_tied and problem.answers is None
    check(
        method == "temperature" or has_own_head,
        f"the model to have a head of its own for {title}",
        got=tied,
        way_out=use_a_temperature,
    )
    # The last norm before a tied head is divided instead of the head.
    check(
        not is_tied or bool(norms_of_hidden_size(plain)),
        "the model to have a layer that a temperature can be folded into",
        got=f"{tied}, and whose norms have no weights",
        way_out="set calibration_method='none', and divide the logits by a temperature when using "
        "the model",
    )


def check_has_hard_labels(*, are_soft: bool) -> None:
    """Raise for soft labels of the rows that a calibrator is fitted to."""
    check(
        not are_soft,
        "the calibration split to have one class index per row for a calibrator",
        got="soft labels",
        way_out="pass a calibration_dataset with class indices, or set calibration_method='none'",
    )


def check_fitted(scaler: Any, problem: Problem) -> None:
    """Raise for a calibrator that was fitted to other labels or classes than the problem's, or has
    NaN.
    """
    saved_map.check_finite(scaler)
    multi_label = problem.multi_label
    check(
        multi_label is None or scaler.multi_label == multi_label,
        f"scaler to be fitted with multi_label={multi_label}",
        got=f"multi_label={scaler.multi_label}",
        way_out="fit it to the labels of this problem",
    )
    if problem.n_classes is not None:
        check_size(scaler, problem.n_classes)


def check_size(scaler: Any, n_classes: int) -> None:
    """Raise for a calibrator that was fitted to logits of another number of classes."""
    arrays = [array for array in scaler.affine_map() if array is not None]
    sizes = {size for array in arrays for size in array.shape}
    check(
        sizes <= {n_classes},
        f"scaler to be fitted on {n_classes} classes",
        got=few(sorted(sizes)),
        way_out="fit it to the logits of this model",
    )


def check_problem(scaler: Any, multi_label: bool | None) -> None:
    """Raise if a calibrator does not fit the labels, if it is known whether a row has several."""
    if multi_label is None or _goes_with_labels(scaler, multi_label=multi_label):
        return
    others = [
        name
        for name, entry in FOLDABLE_SCALERS.items()
        # Class priors are given, and not fitted.
        if entry.needs != "priors"
        and _goes_with_labels(entry.load()(), multi_label=multi_label)
    ]
    kind = "multi" if multi_label else "single"
    check(
        False,
        f"the calibration method to be used with a {kind}-label problem",
        got=repr(method_of(scaler, folds=True)),
        way_out=f"choose one of {', '.join(others)}",
    )


def _goes_with_labels(scaler: Any, *, multi_label: bool) -> bool:
    # Calibrators with this parameter are for both kinds of labels.
    return "multi_label" in scaler.get_params() or scaler.multi_label == multi_label


# ---- Fits ----


def fit_once(
    accelerator: Accelerator, scaler: Any, logits: Array, labels: Array
) -> None:
    """Fit on the first process and copy the numbers to the others, so that the calibrator is
    identical everywhere.

    An error of the fit there is a RuntimeError on the other processes.
    """
    if "multi_label" in scaler.get_params():
        scaler.set_params(multi_label=labels.ndim == 2)
    numbers: dict[str, Any] | None = None
    failure: Exception | None = None
    if accelerator.is_main_process:
        try:
            numbers = vars(scaler.fit(logits, labels))
        except Exception as error:  # It is raised once the other processes know of it.
            failure = error
    reason = None if failure is None else f"{type(failure).__name__}: {failure}"
    outcome: list[Any] = [numbers, reason]
    broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    numbers_of_first, reason_of_first = outcome
    if reason_of_first is not None:
        raise RuntimeError(f"The fit on the first process failed: {reason_of_first}")
    vars(scaler).update(numbers_of_first)


# ---- Records ----


def record_in_config(config: Any, fitted: SavedMap | None) -> None:
    """Record a calibrator in a model's config, so that a saved model says how it was calibrated;
    None removes it.
    """
    if config is None:
        return
    if fitted is not None:
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
    if fitted is None:
        return False
    try:
        found = load_map(path).scaler
    except ValueError:
        return False
    if method_of(found) not in FOLDABLE_SCALERS:  # Others have no record to compare.
        return False
    return _record(found) == _record(fitted.scaler)


def _record(scaler: Any) -> dict[str, Any]:
    return {"method": method_of(scaler, folds=True), **saved_map.config_record(scaler)}


def map_of_checkpoint(
    checkpoint: str | os.PathLike[str], scaler: Any
) -> SavedMap | None:
    """The calibrator saved with a checkpoint, if there is one with this method."""
    file = Path(checkpoint) / saved_map.MAP_NAME
    if not os.path.lexists(file):
        return None
    saved = load_map(file)
    if method_of(saved.scaler) != method_of(scaler, folds=True):
        return None  # The method has been changed since.
    # Its copies are saved next to other weights, such as those with it in the head.
    about = {name: saved.about[name] for name in saved.about if name != "fingerprint"}
    return saved._replace(about=about)


def in_words(scaler: Any) -> str:
    """The calibrator's name, with its temperature if it has one: "auto scaling (temperature), T =
    1.234".
    """
    title = saved_map.title_of(scaler)
    temperature = saved_map.temperature_of(scaler)
    return title if temperature is None else f"{title}, T = {temperature:.3f}"
