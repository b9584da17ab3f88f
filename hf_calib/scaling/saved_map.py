"""Fitted calibrators as files: calibration.json, in a folder or on the Hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from sklearn.utils.validation import check_is_fitted

from hf_calib._errors import (
    InputTypeError,
    InputValueError,
    check,
    did_you_mean,
    expected,
    few,
    printable,
)
from hf_calib._files import whole_file
from hf_calib._records import (
    MOST_BYTES_OF_A_MAP,
    check_record,
    count,
    digest,
    number,
    or_none,
    parse_json,
    read_file,
)
from hf_calib.metrics.checks import as_array, check_type
from hf_calib.scaling import FOLDABLE_SCALERS, SCALERS

MAP_NAME = "calibration.json"
# The last commits that read the files of calibrators which have left the library.
_LAST_WITH = {"grouped": "ea73cc2d", "inverse_link": "ea73cc2d"}
# The entry with the result of `pooler_config`.
POOLER_CONFIG = "vllm_pooler_config"
# The entry of a calibrator of pairs of rewards.
OF_PAIRS = {"of": "pairs"}
# Their versions are saved.
PACKAGES = ("hf_calib", "transformers", "torch", "scikit-learn")
_OWN = {"method", "settings", "parameters", "weight", "bias", "date", "versions"}
Criterion = Literal["nll", "ece", "adaptive_ece"]
# Cosine similarities need a T near 0.01, and raw scores of 10,000 a T near 10,000. With a larger
# T the probabilities would be so equal that float32 no longer ranks them.
BOUNDS = (1e-5, 1e5)
# Beyond it the logits are lost in a head of float32.
LARGEST_NUMBER = 1e12
# The relative error of numbers that were written and read, or computed in another order.
_ROUNDING = 1e-9


class Fitted(NamedTuple):
    """The kind, the shape and the range of numbers in any calibrator that a fit can find.

    Each of `axes` is a shape, a letter for each axis: C classes, or sizes that parameters share. ""
    is a number.
    """

    axes: tuple[str, ...] = ("",)
    low: float = -LARGEST_NUMBER
    high: float = LARGEST_NUMBER
    # Along the last axis.
    rises: bool = False
    kind: type = float

    def checked(
        self,
        name: str,
        value: Any,
        sizes: dict[str, int],
        way_out: str = "take the file unchanged, or fit it again",
    ) -> Any:
        """Return the value in its own type; raise unless it fits, also to the sizes before it."""
        shapes = " or ".join(f"({', '.join(axes)})" for axes in self.axes)
        order = "rising " if self.rises else ""
        numbers = f"{order}{self.kind.__name__} in [{self.low:g}, {self.high:g}]"
        requirement = f"{name} to be {numbers} of shape {shapes}"
        array = as_array(name, value)
        is_number = array.dtype.kind in ("iu" if self.kind is int else "fiu")
        # An array turns true among numbers into a number.
        if isinstance(value, list):
            entries = np.array(value, dtype=object).ravel()
            is_number = is_number and bool not in set(map(type, entries))
        fits = is_number and array.size > 0 and self._has_shape(array.shape, sizes)
        check(fits, requirement, f"{array.dtype} of shape {array.shape}", way_out)
        # Rounding may lead to 1 + 1e-16.
        low = self.low - _ROUNDING * abs(self.low)
        high = self.high + _ROUNDING * abs(self.high)
        is_inside = (array >= low) & (array <= high)
        others = few(array[~is_inside].tolist())
        check(bool(is_inside.all()), requirement, others, way_out)
        falls = self.rises and (np.diff(array) < 0).any()
        check(not falls, requirement, "numbers that fall", way_out)
        # A plain number, not one of NumPy, whose repr would differ.
        if self.axes == ("",):
            return self.kind(value)
        return array.astype(np.float64 if self.kind is float else np.int64, copy=False)

    def _has_shape(self, shape: tuple[int, ...], sizes: dict[str, int]) -> bool:
        """Whether this is one of the shapes, whose letters get their sizes."""
        for axes in self.axes:
            # A shape that does not fit must not leave its sizes behind.
            found = sizes.copy()
            pairs = list(zip(axes, shape, strict=False))
            same = [found.setdefault(axis, size) == size for axis, size in pairs]
            if len(axes) == len(shape) and all(same):
                sizes.update(found)
                return True
        return False


# None is for what is not a number; the calibrator's `_is_sound` decides about it.
Parameters = Mapping[str, Fitted | None]


def _temperature(value: Any) -> bool:
    least = BOUNDS[0] * (1 - _ROUNDING)
    most = BOUNDS[1] * (1 + _ROUNDING)
    return number(value) and least <= value <= most


def _criterion(value: Any) -> bool:
    return value in get_args(Criterion)


# The entries about one set of rows, such as those of a fit or of a report.
ROWS_KINDS = {
    **dict.fromkeys(("name?", "split?", "part?", "autocast?", "fingerprint?"), str),
    **dict.fromkeys(("n?", "seen?", "n_bins?", "cut_at?"), count),
    "options?": [str],
}
# The entries about a calibrator that are read from calibration.json and from a model's config;
# others are free.
RECORD_KINDS = {
    **dict.fromkeys(("method?", "choice?", "split?", "date?"), str),
    **dict.fromkeys(("loss?", "base_model?", "scaler?"), str),
    **dict.fromkeys(("fingerprint?", "sha256?"), digest),
    "criterion?": _criterion,
    "head?": [str],
    "class_names?": [str],
    "folded?": bool,
    "n_examples?": count,
    "temperature?": _temperature,
    "temperatures?": [_temperature],
    "parameters?": dict,
    "loss_kwargs?": dict,
    "versions?": {str: str},
    "vllm_pooler_config?": {str: number},
    "data?": {str: ROWS_KINDS},
    "metrics?": {
        **ROWS_KINDS,
        "before?": {str: or_none(number)},
        "after?": {str: or_none(number)},
    },
}


class SavedMap(NamedTuple):
    """The result of `load_map`: the calibrator, bit for bit, and the facts given to `save_map`."""

    scaler: Any
    about: dict[str, Any]


def save_map(
    scaler: Any, path: str | os.PathLike[str], about: Mapping[str, Any] | None = None
) -> None:
    """Write a fitted calibrator and facts about it to a JSON file, completely or not at all.

    The file has "method" (its name in `SCALERS`), "settings" (constructor arguments), "parameters"
    (fitted values), "date", "versions" of the packages and, if the calibrator can be folded,
    "weight" and "bias" (or null).

    Args:
        path: the file, or an existing folder for a calibration.json.
        about: further entries in JSON types, such as the rows that it was fitted to.

    >>> import tempfile
    >>> from hf_calib.scaling import PriorCorrection
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_map(PriorCorrection([0.5, 0.5], [0.9, 0.1]), folder, {"n_examples": 4})
    ...     load_map(folder).about
    {'n_examples': 4}
    """
    facts = {} if about is None else about
    is_mapping = isinstance(facts, Mapping)
    way_out = "pass a dict of JSON types"
    check_type(is_mapping, "about to be a mapping", type(about).__name__, way_out)
    own = sorted(_OWN & facts.keys())
    requirement = f"about to leave {', '.join(own)} to the calibrator"
    check(not own, requirement, few(own), "choose other names")
    record = {**_as_record(scaler), **facts}
    record["versions"] = {name: version(name) for name in PACKAGES}
    record["date"] = datetime.now(timezone.utc).date().isoformat()
    try:
        text = json.dumps(record, allow_nan=False, default=_as_number)
    except (TypeError, ValueError, RecursionError) as error:
        requirement = "hold finite numbers, texts, and lists and dicts of them"
        raise InputValueError(
            expected("about", requirement, error, "convert what it holds")
        ) from error
    content = f"{text}\n".encode()
    # A file that cannot be loaded would be noticed when the calibrator is gone.
    _parsed(content)
    with whole_file(_file(path)) as unfinished:
        unfinished.write_bytes(content)


def load_map(path: str | os.PathLike[str]) -> SavedMap:
    """Load a calibrator from a file of `save_map`, or from the calibration.json of a folder.

    Raises:
        ValueError: if the file does not hold a fitted calibrator.
    """
    try:
        return _parsed(read_file(_file(path), MOST_BYTES_OF_A_MAP))
    except Exception as error:
        # A damaged or foreign file may cause any error.
        cause = f"{type(error).__name__}: {printable(error)[:300]}"
        got = f"a file that cannot be read ({cause})"
        way_out = (
            "save the calibrator again with hf_calib.scaling.save_map, or fit it again"
        )
        raise InputValueError(
            expected(str(_file(path)), "hold a fitted calibrator", got, way_out)
        ) from error


def _parsed(content: bytes) -> SavedMap:
    """The calibrator in the content of a file; any other content raises some error."""
    record = parse_json(MAP_NAME, content, RECORD_KINDS, MOST_BYTES_OF_A_MAP)
    about = {key: value for key, value in record.items() if key not in _OWN}
    return SavedMap(_from_record(record), about)


def _as_number(value: Any) -> Any:
    """A scalar of NumPy in JSON types."""
    if not isinstance(value, np.generic):
        raise TypeError(f"an object of type {type(value).__name__}")
    return value.item()


def load_pretrained(name: str | os.PathLike[str], **where: Any) -> SavedMap:
    """Load the calibrator in a folder, or in a repository on the Hub."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return load_map(name) if os.path.isdir(name) else download(str(name), **where)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        requirement = f"be a folder, or a repository on the Hub, with {MAP_NAME}"
        got = f"{str(name)!r} ({printable(error)[:300]})"
        way_out = "check its spelling, the revision and the token"
        raise InputValueError(expected("name", requirement, got, way_out)) from error


def download(repo_id: str, **where: Any) -> SavedMap:
    """Download the calibrator of a repository; raise like `hf_hub_download` if there is none."""
    from huggingface_hub import hf_hub_download

    return load_map(hf_hub_download(repo_id, MAP_NAME, **where))


def _as_record(scaler: Any) -> Any:
    """A fitted calibrator in JSON types."""
    method = method_of(scaler)
    check_finite(scaler)
    affine = scaler.affine_map()._asdict() if method in FOLDABLE_SCALERS else {}
    parameters = {}
    for name, value in vars(scaler).items():
        key = name.removesuffix("_")
        if key != name:
            # The numbers of the map stand in the record once.
            parameters[key] = None if key in affine else value
    settings = scaler.get_params(deep=False)
    if settings.get("scaler") is not None:
        settings["scaler"] = _as_record(settings["scaler"])
    record = {
        "method": method,
        "settings": settings,
        "parameters": parameters,
        **affine,
    }
    whole = json.dumps(record, default=lambda each: as_array("it", each).tolist())
    # Some numbers about a fit may not be finite, such as the errors of a single row.
    return json.loads(whole, parse_constant=lambda _: None)


def _from_record(record: dict[str, Any]) -> Any:
    """The calibrator of a record of `_as_record`; any other record raises some error."""
    method: Any = record.get("method")
    if method in _LAST_WITH:
        commit = _LAST_WITH[method]
        way_out = f"it has left hf_calib, whose commit {commit} reads the file"
    else:
        way_out = did_you_mean(method, SCALERS)
    check(method in SCALERS, "method to be a scaler", repr(method), way_out)
    kind = SCALERS[method].load()
    settings = {**record["settings"]}
    if settings.get("scaler") is not None:
        settings["scaler"] = _from_record(settings["scaler"])
    # A setting that the class does not have is refused by the call.
    scaler = kind(**settings)
    scaler._check_settings()
    parameters = {**record["parameters"]}
    wanted = [name[:-1] for name in kind._fitted]
    requirement = f"parameters to be {', '.join(wanted) or 'none'}"
    is_whole = parameters.keys() == set(wanted)
    check(is_whole, requirement, few([*parameters]), "take the file unchanged")
    for key, value in parameters.items():
        is_of_map = value is None and key in ("weight", "bias")
        setattr(scaler, f"{key}_", record[key] if is_of_map else value)
    check_finite(scaler)
    if method in FOLDABLE_SCALERS:
        _check_map(scaler.affine_map(), record)
    return scaler


def _check_map(found: Any, record: Mapping[str, Any]) -> None:
    """Raise unless the affine map is that of the file's weight and bias."""
    requirement = "weight and bias to be those of the parameters"
    way_out = "take the file unchanged, or fit it again"
    for key, ours in found._asdict().items():
        stated = record[key]
        is_same = ours is None and stated is None
        if ours is not None and np.shape(stated) == ours.shape:
            is_same = np.allclose(stated, ours, rtol=_ROUNDING, atol=_ROUNDING)
        check(is_same, requirement, f"another {key}", way_out)


def method_of(scaler: Any, folds: bool = False) -> str:
    """The method name of a calibrator or of its base class; TypeError for any other object."""
    entries = FOLDABLE_SCALERS if folds else SCALERS
    # A class of a user that is derived from a calibrator is saved as that calibrator.
    for kind in type(scaler).__mro__:
        for method, entry in entries.items():
            module = f"hf_calib.scaling.{entry.module}"
            if kind.__name__ == entry.name and kind.__module__ == module:
                return method
    if folds:
        way_out = (
            "save the scaler with the model by its save_pretrained, "
            "for hf_calib.pipeline"
        )
    else:
        way_out = "pass a scaler of hf_calib.scaling, or of a class derived from one"
    names = ", ".join(entry.name for entry in entries.values())
    raise InputTypeError(
        expected("scaler", f"be one of {names}", type(scaler).__name__, way_out)
    )


def fitted_numbers(scaler: Any) -> dict[str, Any]:
    """The fitted parameters, if these are at most one number per class."""
    found = {}
    for name, value in vars(scaler).items():
        array = np.asarray(value)
        if name.endswith("_") and array.ndim <= 1 and array.dtype.kind in "fiu":
            found[name[:-1]] = array.tolist()
    return found


def check_finite(scaler: Any) -> None:
    """Raise unless the parameters of a calibrator are those of one fit; lists become arrays."""
    sizes = check_parameters(scaler, *scaler._fitted)
    # The softmax of a single class is 1 for any logit.
    has_classes = scaler.multi_label or sizes.get("C") != 1
    is_sound = scaler._is_sound() and has_classes
    names = ", ".join(name[:-1] for name in scaler._fitted)
    check(is_sound, f"{names} to be those of one fit", "others", "fit it again")


def check_parameters(scaler: Any, *names: str) -> dict[str, int]:
    """Raise unless parameters are fitted, of their kind, shape and range; return the sizes."""
    check_is_fitted(scaler)
    sizes: dict[str, int] = {}
    for name in names:
        fitted = scaler._fitted[name]
        if fitted is None:
            continue
        value = fitted.checked(name[:-1], getattr(scaler, name, None), sizes)
        setattr(scaler, name, value)
        if name == "n_classes_":
            sizes["C"] = value
    return sizes


def recorded_in(config: Any) -> dict[str, Any]:
    """A copy of the calibrator's record in a model's config (object or dict), or an empty one."""
    if isinstance(config, Mapping):
        found = config.get("calibration")
    else:
        found = getattr(config, "calibration", None)
    record = dict(found) if isinstance(found, Mapping) else {}
    check_record("calibration in the model's config", record, RECORD_KINDS)
    return record


def check_in_weights(
    saved: SavedMap | None, recorded: Mapping[str, Any], place: str
) -> None:
    """Raise if the file beside a folded model has another foldable calibrator than its config."""
    if saved is None or method_of(saved.scaler) not in FOLDABLE_SCALERS:
        return
    found = {"method": method_of(saved.scaler), **config_record(saved.scaler)}
    others = [
        f"{key} {value}"
        for key, value in found.items()
        if recorded.get(key, value) != value
    ]
    requirement = f"{MAP_NAME} in {place} to be of the calibrator in the weights"
    got = f"{few(others)}, not as in config.json"
    way_out = "remove the file, or save the calibrated model again"
    check(not others, requirement, got, way_out)


def has_bias(scaler: Any) -> bool:
    """Whether a calibrator is fitted and adds a bias to the logits."""
    try:
        bias = scaler.affine_map().bias
    except AttributeError:
        # NotFittedError is one.
        return False
    return bias is not None and bool(bias.any())


def pooler_config(scaler: Any) -> dict[str, float] | None:
    """The value of `vllm serve --pooler-config`, or None with several logits.

    vLLM computes sigmoid((logit - mean) / sigma).
    """
    if method_of(scaler) not in FOLDABLE_SCALERS:
        return None
    weight, bias = scaler.affine_map()
    if bias is None or bias.size != 1 or not weight.any():
        return None
    mean = -bias.item() / weight.item()
    return {"logit_mean": mean, "logit_sigma": 1 / weight.item()}


def config_record(scaler: Any) -> dict[str, Any]:
    """The record of a fitted calibrator for a model's config, with a hash of a C x C weight."""
    method = method_of(scaler, folds=True)
    if method == "prior_correction":
        first = scaler.scaler
        found = {name: prior.tolist() for name, prior in scaler.priors().items()}
        if first is not None:
            found |= {"scaler": method_of(first, folds=True), **config_record(first)}
        return found
    if method == "per_label_temperature":
        return {"temperatures": scaler.temperatures_.tolist()}
    record: dict[str, Any] = {}
    if hasattr(scaler, "choice_"):
        record["choice"] = str(scaler.choice_)
    temperature = temperature_of(scaler)
    if temperature is not None:
        return {**record, "temperature": temperature}
    weight, bias = scaler.affine_map()
    if weight.ndim == 2:
        content = weight.tobytes() + (b"" if bias is None else bias.tobytes())
        return {**record, "sha256": sha256(content).hexdigest()}
    record["weight"] = weight.tolist()
    if bias is not None:
        record["bias"] = bias.tolist()
    return record


def temperature_of(scaler: Any) -> float | None:
    """T of a fitted calibrator that divides all logits by one number; None for any other."""
    if method_of(scaler, folds=True) == "temperature":
        return float(scaler.temperature_)
    weight = scaler.affine_map().weight
    if weight.ndim > 0 or has_bias(scaler):
        return None
    return 1 / float(weight)


def map_title(method: str, choice: str | None = None) -> str:
    """A calibrator's name in a sentence, as "auto scaling (structured matrix, penalty 0.1)"."""
    title = method.replace("_", " ")
    if method != "prior_correction":
        title += " scaling"
    if not choice:
        return title
    # The parentheses of a penalty would be parentheses inside of others.
    chosen = re.sub(r"\((.*)=(.*)\)", r", \1 \2", choice.replace("_", " "))
    return f"{title} ({chosen})"


def title_of(scaler: Any) -> str:
    """The name of a fitted calibrator in a sentence."""
    return map_title(method_of(scaler), getattr(scaler, "choice_", None))


def _file(path: str | os.PathLike[str]) -> Path:
    return Path(path, MAP_NAME) if os.path.isdir(path) else Path(path)
