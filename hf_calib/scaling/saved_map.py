"""Fitted scalers as files: calibration.json, with the arrays of those that do not fold beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

from hf_calib._errors import InputValueError, did_you_mean, expected, few
from hf_calib._files import own_subfolder, whole_file
from hf_calib.scaling.inverse_link import loss_of_record, loss_record
from hf_calib.scaling.methods import FOLDABLE_SCALERS, SCALERS, foldable_method, method_of
from hf_calib.scaling.prior_correction import as_prior

MAP_NAME = "calibration.json"
POOLER_CONFIG = "vllm_pooler_config"  # a key of it, of what `pooler_config` returns
ARRAYS_NAME = (
    "calibration/scaler.safetensors"  # not in the root, where vLLM takes every such file for weights
)

OF_PAIRS = {"of": "pairs"}  # an entry: of the two rewards of a pair, which one logit makes

LARGEST_NUMBER = 1e12  # of a fitted map: beyond, float32 heads and logits are lost
_LARGEST = 2**30  # bytes of a file; a matrix for 5,000 classes has half of it
PACKAGES = ("hf_calib", "transformers", "torch", "scikit-learn")  # those with a part in a map
# What a file says by itself; "hf_calib" was the version, before there were "versions".
_OWN = {"method", "settings", "parameters", "weight", "bias", "arrays", "date", "versions", "hf_calib"}

Arrays = dict[str, NDArray[Any]]


class SavedMap(NamedTuple):
    """Result of `load_map`.

    Args:
        scaler: as it was fitted, bit for bit.
        about: what `save_map` was told about it.
    """

    scaler: Any
    about: dict[str, Any]


def save_map(scaler: Any, path: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> None:
    """Write a fitted scaler as JSON, with what is known about it: all of it or nothing.

    The file holds "method" (its name in `SCALERS`), "settings" (constructor arguments), "parameters" (fitted
    numbers and words), "date" (day, UTC) and "versions" of the packages; of a scaler that folds "weight" and "bias"
    (the map z -> weight z + bias, as numbers; bias may be null), of another one "arrays", the SHA-256 of
    calibration/scaler.safetensors, which holds its arrays. `Scaler.save_pretrained` does the same without `about`.

    Args:
        scaler: fitted; of a class in `SCALERS`.
        path: of an existing folder for its calibration.json, or of the file, which has that name unless the scaler
            folds.
        about: further entries, such as which rows it was fitted on; of JSON's own types.

    Raises:
        TypeError: if it is not a scaler of `SCALERS`.
        ValueError: if it has numbers that are not finite.
        sklearn.exceptions.NotFittedError: if it is not fitted.

    >>> import tempfile
    >>> from hf_calib.scaling import TemperatureScaling
    >>> scaler = TemperatureScaling().fit([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [0.0, 4.0]], [0, 0, 0, 0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_map(scaler, folder, {"n_examples": 4})
    ...     loaded = load_map(folder)
    >>> loaded.scaler.temperature_ == scaler.temperature_, loaded.about
    (True, {'n_examples': 4})
    """
    file = _file(path)
    arrays: Arrays = {}
    record = _as_record(scaler, arrays)
    content = b""
    if arrays:
        if file.name != MAP_NAME:
            way_out = "the arrays of a scaler that does not fold have one place beside it"
            raise InputValueError(expected("path", f"be a folder or {MAP_NAME}", file, way_out))
        own_subfolder(file.parent, Path(ARRAYS_NAME).parts[0])
        content = safetensors.numpy.save(arrays)
        record["arrays"] = sha256(content).hexdigest()
    written = {"date": datetime.now(timezone.utc).date().isoformat(), "versions": _versions()}
    text = json.dumps({**record, **(about or {}), **written}, default=_plain, allow_nan=False)
    if arrays:  # first: a JSON file that belongs to other arrays is refused, whichever of the two is new
        with whole_file(file.parent / ARRAYS_NAME) as unfinished:
            unfinished.write_bytes(content)
    with whole_file(file) as unfinished:
        unfinished.write_text(text + "\n", encoding="utf-8")
    before = file.parent / ARRAYS_NAME
    if not arrays and file.name == MAP_NAME and before.is_file() and not before.parent.is_symlink():
        before.unlink()  # of the scaler before


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
    return read_map(file, lambda: file.parent / ARRAYS_NAME)


def read_map(file: Path, fetch_arrays: Callable[[], Path]) -> SavedMap:
    """Read what `save_map` wrote; `fetch_arrays` returns where the arrays are, if there have to be some."""
    way_out = "save the map again with hf_calib.scaling.save_map, or fit it again"

    def wrong(got: str) -> InputValueError:
        return InputValueError(expected(str(file), "hold a fitted map", got, way_out))

    try:
        record = json.loads(_content(file).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise wrong(f"a file that cannot be read ({error})") from error
    if not isinstance(record, dict):
        raise wrong("something else than a JSON object")
    method = record.get("method")
    if not isinstance(method, str) or method not in SCALERS:
        raise wrong(f"method {method!r} ({did_you_mean(method, SCALERS)})")
    arrays: Arrays = {}
    if "arrays" in record and method not in FOLDABLE_SCALERS:
        try:
            content = _content(fetch_arrays())
            arrays = safetensors.numpy.load(content)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise wrong(f"{ARRAYS_NAME} that cannot be read ({error})") from error
        if sha256(content).hexdigest() != record["arrays"]:
            raise wrong(f"{ARRAYS_NAME} of another scaler beside it")
    try:
        scaler = _from_record(record, arrays)
        is_whole = True
        if method in FOLDABLE_SCALERS:
            weight, bias = scaler.affine_map()
            is_whole = _same(weight, _floats(record["weight"])) and _same(bias, _floats(record["bias"]))
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise wrong(f"{method!r} with entries missing or of another kind ({error!r})") from error
    if not is_whole:
        raise wrong(f"parameters of {method!r} that are not those of its weight and bias")
    return SavedMap(scaler, {key: value for key, value in record.items() if key not in _OWN})


def _as_record(scaler: Any, arrays: Arrays) -> dict[str, Any]:
    """A fitted scaler as JSON holds it; what else there is of one that does not fold is added to the arrays."""
    method = method_of(scaler)
    check_is_fitted(scaler, [fitted.name for fitted in scaler._fitted])
    _check_fitted(scaler)
    folds = method in FOLDABLE_SCALERS
    parameters: dict[str, Any] = {}
    for fitted in scaler._fitted:
        key, value = fitted.name.rstrip("_"), getattr(scaler, fitted.name)
        if folds and key in ("weight", "bias"):
            continue
        if folds or not fitted.shape:
            parameters[key] = value
        else:
            arrays[key] = np.ascontiguousarray(value)
    settings = scaler.get_params(deep=False)
    if settings.get("scaler") is not None:
        settings["scaler"] = _as_record(settings["scaler"], arrays)
    if method == "inverse_link":
        settings["loss"] = loss_record(settings["loss"], arrays)
    return {
        "method": method,
        "settings": settings,
        # Of what a scaler says about its fit, some may not be finite.
        "parameters": json.loads(json.dumps(parameters, default=_plain), parse_constant=lambda _: None),
        **(scaler.affine_map()._asdict() if folds else {}),
    }


def _from_record(record: dict[str, Any], arrays: Arrays) -> Any:
    """The scaler that `_as_record` was given."""
    entry = SCALERS[record["method"]]
    settings = dict(record["settings"])
    for name, value in settings.items():
        if name == "scaler" and value is not None:
            settings[name] = _from_record(value, {})
        elif name == "loss":
            settings[name] = loss_of_record(value, arrays)
        else:
            _check_setting(name, value)
    scaler = entry.load()(**settings)
    found: dict[str, Any] = {name: _restored(value) for name, value in record["parameters"].items()}
    wanted = {fitted.name.rstrip("_") for fitted in scaler._fitted}
    if entry.foldable:  # where it keeps the map itself, the file holds it once
        found |= {key: _floats(record[key]) for key in wanted & {"weight", "bias"}}
    found |= arrays
    if found.keys() != wanted:
        requirement = f"be {', '.join(sorted(wanted)) or 'none'}"
        way_out = "take the file as it was written"
        raise InputValueError(expected("parameters", requirement, few(sorted(found)) or "none", way_out))
    for name, value in found.items():
        setattr(scaler, f"{name}_", value)
    _check_fitted(scaler)
    if entry.foldable:
        weight, bias = scaler.affine_map()
        scaler.predict_proba(np.zeros((1, len(weight) if weight.ndim else 2 if bias is None else len(bias))))
    return scaler


def _check_fitted(scaler: Any) -> None:
    """Raise unless the fitted attributes of a scaler have the kinds, shapes and values that a fit gives them.

    Raises:
        ValueError: if one is missing, or of another kind, shape or range.
    """
    sizes: dict[str, int] = {}
    for fitted in scaler._fitted:
        value = getattr(scaler, fitted.name)
        if fitted.shape:
            fits = isinstance(value, np.ndarray) and value.dtype == fitted.kind and value.size > 0
            fits = fits and (fitted.shape == "*" or value.ndim == len(fitted.shape))
            fits = fits and all(
                sizes.setdefault(axis, size) == size
                for axis, size in zip(fitted.shape.strip("*"), value.shape, strict=False)
            )
        else:
            fits = isinstance(value, Real if fitted.kind is float else fitted.kind)
            fits = fits and not isinstance(value, bool) and (fitted.kind is not int or value > 1)
        if fits and fitted.name == "n_classes_":
            fits = sizes.setdefault("C", value) == value
        if not fits:
            axes = f" of shape ({', '.join(fitted.shape)})" if fitted.shape else ""
            got = f"{value.dtype}, {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
            raise InputValueError(
                expected(fitted.name, f"be {fitted.kind.__name__}{axes}", got, "fit it again")
            )
        if fitted.kind is float and not np.isfinite(value).all():
            way_out = "fit it again, on finite logits"
            raise InputValueError(expected("scaler", "have finite numbers", "NaN or infinity", way_out))
    if method_of(scaler) in FOLDABLE_SCALERS:
        check_finite(scaler)
        largest = max(float(np.abs(part).max()) for part in scaler.affine_map() if part is not None)
        if largest > LARGEST_NUMBER:
            way_out = "fit it again"
            raise InputValueError(
                expected("scaler", f"have numbers up to {LARGEST_NUMBER:g}", largest, way_out)
            )
    if not scaler._is_sound():
        got = f"others in {' or '.join(fitted.name for fitted in scaler._fitted)}"
        raise InputValueError(expected("scaler", "have numbers that a fit can find", got, "fit it again"))


def _check_setting(name: str, value: Any) -> None:
    """Raise for a constructor's argument that is not a number, word, or sequence of numbers."""
    numbers = isinstance(value, list) and all(isinstance(each, int | float) for each in value)
    fits = value is None or isinstance(value, str | int | float) or numbers
    requirement = "be a number, a word or a list of numbers"
    if name == "multi_label":
        fits = isinstance(value, bool)
        requirement = "be true or false"
    if not fits:
        way_out = "take the file as it was written"
        raise InputValueError(expected(f"setting {name}", requirement, type(value).__name__, way_out))


def recorded_in(config: Any) -> dict[str, Any]:
    """The record of a map in a model's config (object, or dict of a config.json): a copy, empty if there is none."""
    found = config.get("calibration") if isinstance(config, Mapping) else getattr(config, "calibration", None)
    return dict(found) if isinstance(found, Mapping) else {}


def has_bias(scaler: Any) -> bool:
    """Whether a scaler is fitted, and its map adds something to the logits."""
    if not hasattr(scaler, "affine_map"):
        return False
    try:
        bias = scaler.affine_map().bias
    except NotFittedError:
        return False
    return bias is not None and bool(bias.any())


def pooler_config(scaler: Any) -> dict[str, float] | None:
    """What `vllm serve --pooler-config` takes: sigmoid((logit - mean) / sigma) is then what the scaler gives.

    Returns:
        "logit_mean" and "logit_sigma"; None for a map that is not a slope and an offset of one logit, as vLLM has one
        of each for all logits.

    >>> from hf_calib.scaling import StructuredVectorScaling
    >>> scaler = StructuredVectorScaling(multi_label=True).fit([[-1.0], [1.0], [2.0], [3.0]], [[0], [1], [0], [1]])
    >>> told = pooler_config(scaler)
    >>> logit = 0.7
    >>> p = 1 / (1 + np.exp(-(logit - told["logit_mean"]) / told["logit_sigma"]))
    >>> abs(p - scaler.predict_proba([[logit]]).item()) < 1e-12
    np.True_
    """
    if method_of(scaler) not in FOLDABLE_SCALERS:
        return None
    weight, bias = scaler.affine_map()
    if weight.size != 1 or bias is None or bias.size != 1 or not weight.any():
        return None
    slope, offset = float(weight.item()), float(bias.item())
    return {"logit_mean": -offset / slope, "logit_sigma": 1 / slope}


def check_finite(scaler: Any) -> None:
    """Raise if a fitted map has NaN or infinity in its weight or bias.

    Raises:
        ValueError: if it has.
    """
    if not all(np.isfinite(part).all() for part in scaler.affine_map() if part is not None):
        way_out = "fit it again, on finite logits"
        raise InputValueError(expected("scaler", "have finite numbers", "NaN or infinity", way_out))


def config_record(scaler: Any) -> dict[str, Any]:
    """The record of a fitted map for a model's config; a C x C map is recorded by a hash."""
    if foldable_method(scaler) == "prior_correction":
        first = scaler.scaler
        recorded = {} if first is None else {"scaler": foldable_method(first), **config_record(first)}
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
        return {
            **chosen,
            "sha256": sha256(weight.tobytes() + (b"" if bias is None else bias.tobytes())).hexdigest(),
        }
    return {**chosen, "weight": weight.tolist(), **({} if bias is None else {"bias": bias.tolist()})}


def temperature_of(scaler: Any) -> float | None:
    """T of a fitted map that divides all logits by one number; None for any other map."""
    if foldable_method(scaler) == "temperature":
        return float(scaler.temperature_)
    weight, bias = scaler.affine_map()
    return 1 / float(weight) if weight.ndim == 0 and (bias is None or not bias.any()) else None


def is_multi_label(scaler: Any) -> bool:
    """Whether a scaler's probabilities are sigmoids of the logits, not their softmax."""
    per_label = SCALERS[method_of(scaler)].needs == "label_matrix"
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
    return map_title(method_of(scaler), getattr(scaler, "choice_", None))


def _versions() -> dict[str, str]:
    """Of the packages that have a part in a map, as far as they are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _content(file: Path) -> bytes:
    if file.stat().st_size > _LARGEST:
        raise OSError(f"it has more than {_LARGEST:,} bytes")
    return file.read_bytes()


def _floats(value: Any) -> NDArray[np.float64] | None:
    return None if value is None else np.array(value, dtype=np.float64)


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
