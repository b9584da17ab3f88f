"""Fitted maps as plain numbers: the few that a model's config records, and calibration.json, which holds them all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.exceptions import NotFittedError

from hf_calib._errors import InputValueError, did_you_mean, expected
from hf_calib._files import whole_file
from hf_calib.scaling.methods import FOLDABLE_SCALERS, foldable_method
from hf_calib.scaling.prior_correction import as_prior

MAP_NAME = "calibration.json"


class SavedMap(NamedTuple):
    """What `load_map` returns.

    Args:
        scaler: as it was fitted, bit for bit.
        about: what `save_map` was told about it.
    """

    scaler: Any
    about: dict[str, Any]


def save_map(scaler: Any, path: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> None:
    """Write a fitted scaler that folds as JSON: all of it or nothing.

    The file holds "method" (its name in `SCALERS`), "settings" (constructor arguments), "parameters" (fitted
    numbers and words), "weight" and "bias" (the map z -> weight z + bias, as numbers; bias may be null), and
    "hf_calib", the version that wrote it.

    Args:
        scaler: fitted; temperature, vector, matrix, ...: a class of `SCALERS` that folds.
        path: of the file, or of an existing folder for its calibration.json.
        about: further entries, such as which rows it was fitted on; of JSON's own types.

    Raises:
        TypeError: if the scaler is no foldable one.
        ValueError: if it has numbers that are not finite.

    >>> import tempfile
    >>> from hf_calib.scaling import TemperatureScaling
    >>> scaler = TemperatureScaling().fit([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [0.0, 4.0]], [0, 0, 0, 0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_map(scaler, folder, {"n_examples": 4})
    ...     loaded = load_map(folder)
    >>> loaded.scaler.temperature_ == scaler.temperature_, loaded.about
    (True, {'n_examples': 4})
    """
    record = {**_as_record(scaler), **(about or {}), "hf_calib": version("hf_calib")}
    text = json.dumps(record, default=_plain, allow_nan=False)
    with whole_file(_file(path)) as unfinished:
        unfinished.write_text(text + "\n", encoding="utf-8")


def load_map(path: str | os.PathLike[str]) -> SavedMap:
    """Read what `save_map` wrote.

    Args:
        path: of the file, or of the folder that has a calibration.json.

    Returns:
        The fitted scaler, and what was said about it.

    Raises:
        ValueError: if there is no such file, or it does not hold a whole map.
    """
    file = _file(path)
    way_out = "save the map again with hf_calib.scaling.save_map, or fit it again"

    def wrong(got: str) -> InputValueError:
        return InputValueError(expected(str(file), "hold a fitted map", got, way_out))

    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise wrong(f"a file that cannot be read ({error})") from error
    if not isinstance(record, dict):
        raise wrong("something else than a JSON object")
    method = record.get("method")
    if method not in FOLDABLE_SCALERS:
        raise wrong(f"method {method!r} ({did_you_mean(method, FOLDABLE_SCALERS)})")
    try:
        scaler = _from_record(record)
        weight, bias = (
            None if record[key] is None else np.array(record[key], float) for key in ("weight", "bias")
        )
        mapping = scaler.affine_map()
        is_whole = _same(mapping.weight, weight) and _same(mapping.bias, bias)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise wrong(f"{method!r} with entries missing or of another kind ({error!r})") from error
    if not is_whole:
        raise wrong(f"parameters of {method!r} that are not those of its weight and bias")
    own = {"method", "settings", "parameters", "weight", "bias", "hf_calib"}
    return SavedMap(scaler, {key: value for key, value in record.items() if key not in own})


def _as_record(scaler: Any) -> dict[str, Any]:
    """A fitted scaler as `save_map` writes it."""
    method, mapping = foldable_method(scaler), scaler.affine_map()
    check_finite(scaler)
    parameters: dict[str, Any] = {}
    for name, value in vars(scaler).items():
        of_the_map = name in ("weight_", "bias_") and value is getattr(mapping, name.rstrip("_"))
        if name.endswith("_") and not name.startswith("_") and not of_the_map:
            parameters[name.rstrip("_")] = value
    settings = scaler.get_params(deep=False)
    if settings.get("scaler") is not None:
        settings["scaler"] = _as_record(settings["scaler"])
    return {
        "method": method,
        "settings": settings,
        # Of what a scaler says about its fit, some may not be finite.
        "parameters": json.loads(json.dumps(parameters, default=_plain), parse_constant=lambda _: None),
        "weight": mapping.weight,
        "bias": mapping.bias,
    }


def _from_record(record: dict[str, Any]) -> Any:
    """The scaler that `_as_record` was given."""
    settings = dict(record["settings"])
    if settings.get("scaler") is not None:
        settings["scaler"] = _from_record(settings["scaler"])
    scaler = FOLDABLE_SCALERS[record["method"]].load()(**settings)
    weight = np.array(record["weight"], dtype=np.float64)
    bias = None if record["bias"] is None else np.array(record["bias"], dtype=np.float64)
    for name, value in record["parameters"].items():
        if not name.startswith("_"):
            setattr(scaler, f"{name}_", _restored(value))
    try:
        scaler.affine_map()
    except (NotFittedError, AttributeError):  # it keeps the map itself, which the file holds once
        scaler.weight_, scaler.bias_ = weight, bias
    check_finite(scaler)
    n_classes = len(weight) if weight.ndim else 2 if bias is None else len(bias)
    scaler.predict_proba(np.zeros((1, n_classes)))
    return scaler


def check_finite(scaler: Any) -> None:
    """Raise if a fitted map has NaN or infinity in its weight or bias.

    Raises:
        ValueError: then.
    """
    if not all(np.isfinite(part).all() for part in scaler.affine_map() if part is not None):
        way_out = "fit it again, on finite logits"
        raise InputValueError(expected("scaler", "have finite numbers", "NaN or infinity", way_out))


def few_parameters(scaler: Any) -> dict[str, Any]:
    """What a model's config records of a fitted map; not the C x C numbers of one that mixes the classes."""
    if foldable_method(scaler) == "prior_correction":
        first = scaler.scaler
        recorded = {} if first is None else {"scaler": foldable_method(first), **few_parameters(first)}
        priors = ("train_prior", "target_prior")
        return recorded | {name: as_prior(name, getattr(scaler, name)).tolist() for name in priors}
    choice = getattr(scaler, "choice_", None)
    chosen = {} if choice is None else {"choice": str(choice)}
    weight, bias = scaler.affine_map()
    temperature = temperature_of(scaler)
    if temperature is not None:
        return {**chosen, "temperature": temperature}
    if foldable_method(scaler) == "per_label_temperature":
        return {"temperatures": scaler.temperatures_.tolist()}
    if weight.ndim == 2:
        return chosen
    return {**chosen, "weight": weight.tolist(), **({} if bias is None else {"bias": bias.tolist()})}


def temperature_of(scaler: Any) -> float | None:
    """T of a fitted map that divides all logits by one number; None for any other map."""
    if foldable_method(scaler) == "temperature":
        return float(scaler.temperature_)
    weight, bias = scaler.affine_map()
    return 1 / float(weight) if weight.ndim == 0 and (bias is None or not bias.any()) else None


def is_multi_label(scaler: Any) -> bool:
    """Whether a foldable scaler's probabilities are sigmoids of the logits, not their softmax."""
    per_label = FOLDABLE_SCALERS[foldable_method(scaler)].needs == "label_matrix"
    return per_label or bool(getattr(scaler, "multi_label", False))


def map_title(method: str, choice: str | None = None) -> str:
    """A map's name in a sentence.

    >>> map_title("vector"), map_title("auto", "structured_matrix(penalty=0.1)")
    ('vector scaling', 'auto scaling (structured matrix, penalty 0.1)')
    """
    title = method.replace("_", " ") + (" scaling" if method != "prior_correction" else "")
    if choice is None:
        return title
    return f"{title} ({choice.replace('_', ' ').replace('(', ', ').replace('=', ' ').rstrip(')')})"


def title_of(scaler: Any) -> str:
    """The title of a fitted scaler."""
    return map_title(foldable_method(scaler), few_parameters(scaler).get("choice"))


def _file(path: str | os.PathLike[str]) -> Path:
    return Path(path) / MAP_NAME if Path(path).is_dir() else Path(path)


def _same(ours: Any, theirs: Any) -> bool:
    return ours is theirs if ours is None or theirs is None else np.array_equal(ours, theirs)


def _restored(value: Any) -> Any:
    """Lists of numbers are arrays again; what else a scaler says about its fit stays as it is."""
    if not isinstance(value, list):
        return value
    array = np.array(value)
    return array if array.dtype.kind in "fiu" else value


def _plain(value: Any) -> Any:
    """A number of NumPy, or an array of them, as JSON can hold it."""
    return np.asarray(value).tolist()
