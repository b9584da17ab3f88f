"""Unfolding: the model as it was before a scaler was folded into its classification head."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils import cached_file

from hf_calib._errors import InputValueError, expected
from hf_calib.export.fold import OF_THE_MAP, PARAMETERS, affine_map_of, check_is_plain
from hf_calib.export.heads import as_float64, has_tied_head, norms_of_hidden_size, transform
from hf_calib.export.kept_head import FILE, read_kept_head
from hf_calib.export.rerankers import classifier_of
from hf_calib.scaling.affine import AffineMap
from hf_calib.scaling.methods import foldable_method
from hf_calib.scaling.saved_map import MAP_NAME, config_record, load_map, recorded_in

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator

_Model = TypeVar("_Model", bound=nn.Module)

# Of the largest weight. Beyond, it would be the rounding of 16-bit weights, which `fold` does not take either.
_LARGEST_ERROR = 1e-4
_LARGEST_NUMBER = 1e12  # of a map: beyond, float32 heads and logits are lost
_WITHIN = "unfolded_within"


@dataclass(frozen=True)
class Unfolded(Generic[_Model]):
    """Result of `unfold`.

    Args:
        model: the model that was passed, as it was before the fold.
        exact: whether its weights are those from before the fold, bit for bit.
        largest_difference: the rounding of the fold and of its inverse in a weight or bias of the head, at most; 0
            if exact. What else has changed the weights since the fold is not in it.
    """

    model: _Model
    exact: bool
    largest_difference: float

    def sentence(self) -> str:
        """How exactly it is the model from before the fold, in words."""
        if self.exact:
            return "Its weights are those from before the fold, bit for bit."
        return (
            "The head from before the fold was not kept for these weights, so the map was inverted: rounding changes "
            f"no weight by more than {self.largest_difference:.1g}. What else has changed them since the fold "
            "(training, 16 bits) stays."
        )


def unfold(
    model: _Model, scaler: BaseEstimator | None = None, *, revision: str | None = None
) -> Unfolded[_Model]:
    r"""Undo `fold`, in place: the model returns the logits that the scaler was fitted on.

    Use it to train on, to fit another map, or to compare the logits. `hf-calib unfold MODEL OUT` does it for a
    folder or a name on the Hub.

    $$A^{-1} (A W) h + A^{-1} ((A b + c) - c) = W h + b$$

    The head from before the fold is taken where it was kept: `save_calibrated_model` and `hf-calib calibrate`
    write it beside the model, and a hash tells whether it belongs to these weights. It is looked for where
    the model was loaded from, a folder or the Hub. Else the map is inverted in float64, as
    `model.config.calibration` or calibration.json has it. On any failure the model is as it was.

    Args:
        model: a folded one, in float32 or float64; or a `sentence_transformers.CrossEncoder`.
        scaler: that was folded, where it is written down nowhere: a matrix that was folded in memory.
        revision: of a model on the Hub that was not loaded from the main branch.

    Returns:
        The same model, whether it is exact, and else what rounding may have changed in its head.
        `model.config.calibration` keeps what is not about the map, such as the loss; "unfolded_within" is that
        difference, if there is any.

    Raises:
        TypeError: if model or scaler is of the wrong type.
        ValueError: if no map is folded into the model; if it holds PEFT layers or 16-bit weights; if its map is
            not known; or if that map is singular or too badly conditioned to be inverted.

    Notes:
        Of a head that had no bias before the fold, the added one is removed where the head was kept; otherwise
        it stays, with values within rounding of 0. A model that was trained since it was folded keeps what the
        training has done: the map of then is taken off it.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> from hf_calib import fold_temperature
    >>> config = BertConfig(
    ...     vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    ... )
    >>> unfolded = unfold(fold_temperature(BertForSequenceClassification(config), 1.5))
    >>> unfolded.exact, unfolded.largest_difference < 1e-7
    (False, True)
    """
    check_is_plain(model)
    classifier: Any = classifier_of(model)
    recorded = recorded_in(classifier.config)
    if not recorded.get("folded"):
        way_out = "it returns the logits that its head was trained for"
        raise InputValueError(expected("model", "have a map folded into its head", "none", way_out))
    heads = _recorded_heads(classifier, recorded)
    folded = {
        f"{name}.{part}": parameter.detach()
        for name, head in heads.items()
        for part, parameter in head.named_parameters(recurse=False)
    }
    known_map = None if scaler is None else _checked(scaler, recorded)
    kept_file = _saved_beside(classifier, FILE.as_posix(), revision)
    kept = None if kept_file is None else read_kept_head(kept_file, folded)
    if kept is not None:
        _restore(heads, kept)
        difference = 0.0
    else:
        mapping = known_map or _recorded_map(recorded) or _map_beside(classifier, recorded, revision)
        inverse = _inverse(mapping, heads)
        difference = _largest_difference(mapping, inverse, folded)
        with torch.no_grad():
            transform(heads, inverse)
    difference += float(recorded.get(_WITHIN, 0.0))  # of a model that was inverted before it was folded again
    rest = {key: value for key, value in recorded.items() if key not in (*OF_THE_MAP, _WITHIN)}
    classifier.config.calibration = rest | ({_WITHIN: difference} if difference else {})
    if not classifier.config.calibration:
        del classifier.config.calibration
    return Unfolded(model, difference == 0, difference)


def _saved_beside(model: Any, file: str, revision: str | None) -> str | None:
    """A file of the folder, or of the repository on the Hub, that a model was loaded from; None without it."""
    source = getattr(model, "name_or_path", None)
    if not source:
        return None
    try:
        return cached_file(
            source,
            file,
            revision=revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:  # there is no such folder or repository, or no longer
        return None


def _recorded_heads(model: nn.Module, recorded: Mapping[str, Any]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    heads = {name: modules.get(name) for name in recorded.get("head") or ()}
    norms = norms_of_hidden_size(model) if has_tied_head(model) else {}
    if not heads or not all(isinstance(head, nn.Linear) or name in norms for name, head in heads.items()):
        got = f"{sorted(heads) or 'none'}, which are not all heads of the model"
        way_out = "load the model again; if its head was replaced, set model.config.calibration = None"
        raise InputValueError(
            expected("model", "have the layers that config.calibration names", got, way_out)
        )
    return heads  # type: ignore[return-value]


def _checked(scaler: Any, recorded: Mapping[str, Any]) -> AffineMap:
    """The map of a scaler, which the record must not contradict."""
    wanted = {key: recorded[key] for key in ("method", *PARAMETERS) if key in recorded}
    found = {"method": foldable_method(scaler), **config_record(scaler)}
    if {key: found.get(key) for key in wanted} != wanted:  # version 0.1 recorded no hash of a matrix
        requirement = "be the one that was folded into the model, as config.calibration records it"
        way_out = "pass that one, or none to have it looked for"
        raise InputValueError(expected("scaler", requirement, _in_short(found), way_out))
    return affine_map_of(scaler)


def _in_short(parameters: Mapping[str, Any]) -> str:
    text = str(dict(parameters))
    return text if len(text) <= 200 else f"{text[:197]}..."


def _recorded_map(recorded: Mapping[str, Any]) -> AffineMap | None:
    """The map that the config's numbers give; None of one that mixes the classes, which is not among them.

    Raises:
        ValueError: if they are damaged.
    """
    try:
        with np.errstate(all="ignore"):  # what is not finite then is refused
            known = _affine_map_of(recorded)
        if known is None:
            return None
        if not all((np.abs(part) <= _LARGEST_NUMBER).all() for part in known if part is not None):
            raise ValueError("numbers that are not finite, or so large as no fit finds")
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        way_out = "pass the scaler that was folded: unfold(model, scaler)"
        got = f"a damaged record ({error!r})"
        raise InputValueError(
            expected("config.calibration", "hold the folded map's numbers", got, way_out)
        ) from error
    return known


def _affine_map_of(recorded: Mapping[str, Any]) -> AffineMap | None:
    known: AffineMap | None = None
    if "temperature" in recorded:
        known = AffineMap(1 / _above_0(recorded["temperature"]))
    elif "temperatures" in recorded:
        known = AffineMap(1 / _above_0(recorded["temperatures"]))
    elif "weight" in recorded:
        bias = recorded.get("bias")
        known = AffineMap(
            np.array(recorded["weight"], dtype=np.float64),
            None if bias is None else np.array(bias, dtype=np.float64),
        )
    if recorded.get("method") == "prior_correction":
        shift = np.log(recorded["target_prior"]) - np.log(recorded["train_prior"])
        if "scaler" not in recorded:
            known = AffineMap(np.ones(len(shift)))
        known = None if known is None else known.then(AffineMap(np.ones(len(shift)), shift))
    return known


def _above_0(temperatures: Any) -> Any:
    values = np.array(temperatures, dtype=np.float64)
    if not (values > 0).all():
        raise ValueError("a temperature that is not above 0")
    return values


def _map_beside(model: Any, recorded: Mapping[str, Any], revision: str | None) -> AffineMap:
    """The map of the calibration.json that was saved with the model."""
    file = _saved_beside(model, MAP_NAME, revision)
    way_out = "pass the scaler that was folded: unfold(model, scaler)"
    if file is None:
        got = f"{recorded.get('method')} with no numbers in config.calibration, and no {MAP_NAME} beside it"
        raise InputValueError(expected("model", "have its map written down", got, way_out))
    try:
        return _checked(load_map(file).scaler, recorded)
    except InputValueError as error:
        got = f"{os.fspath(file)}, which holds another one ({error})"
        raise InputValueError(expected("model", "have its map written down", got, way_out)) from error


def _inverse(mapping: AffineMap, heads: Mapping[str, nn.Module]) -> AffineMap:
    """z -> A^-1 (z - c)."""
    weight = mapping.weight
    sizes = {head.out_features for head in heads.values() if isinstance(head, nn.Linear)}
    n_classes = len(weight) if weight.ndim else max(sizes, default=0)
    if sizes - {n_classes}:
        got = f"{sorted(sizes)} outputs"
        way_out = "load the model again; if its head was replaced, set model.config.calibration = None"
        raise InputValueError(
            expected("model", f"have a head of the map's {n_classes} classes", got, way_out)
        )
    try:
        with np.errstate(divide="ignore"):
            inverted = np.linalg.inv(weight).astype(np.float64) if weight.ndim == 2 else 1 / weight
    except np.linalg.LinAlgError:
        inverted = np.full_like(weight, np.inf)
    if not (np.abs(inverted) <= _LARGEST_NUMBER).all():  # NaN compares false
        raise _not_invertible("is singular: different logits are mapped to the same ones")
    bare = AffineMap(inverted)
    return AffineMap(inverted, None if mapping.bias is None else -bare(mapping.bias))


def _not_invertible(why: str) -> InputValueError:
    way_out = "take the model that was folded, or one that was saved with its head kept in " + FILE.as_posix()
    return InputValueError(expected("the folded map", "be invertible", f"one that {why}", way_out))


def _largest_difference(mapping: AffineMap, inverse: AffineMap, folded: Mapping[str, Tensor]) -> float:
    r"""A bound on what the rounding of the fold and of its inverse change, over all weights and biases.

    With u half the spacing at 1 of the weights' dtype and e that of float64, |A^-1| (u |A W|) + u |W|, and
    8 C e |A^-1| (|A| |W| + |c|) for the arithmetic in float64.
    """
    shrunk, grown = AffineMap(np.abs(mapping.weight)), AffineMap(np.abs(inverse.weight))
    undone = AffineMap(inverse.weight)
    offset = 0.0 if mapping.bias is None else np.abs(mapping.bias)
    largest = 0.0
    for name, parameter in folded.items():
        is_bias = name.endswith(".bias")
        after = as_float64(parameter.T if parameter.ndim == 2 else parameter)
        before = inverse(after) if is_bias else undone(after)
        u = torch.finfo(parameter.dtype).eps / 2
        in_float64 = 8 * after.shape[-1] * np.finfo(np.float64).eps
        error = grown(u * np.abs(after)) + u * np.abs(before)
        error += in_float64 * grown(shrunk(np.abs(before)) + (offset if is_bias else 0.0))
        if not is_bias and not error.max() <= _LARGEST_ERROR * np.abs(before).max():
            share = float(error.max() / np.abs(before).max())
            raise _not_invertible(f"is badly conditioned: weights may be wrong by {share:.1g} of the largest")
        largest = max(largest, float(error.max()))
    return largest


@torch.no_grad()
def _restore(heads: Mapping[str, Any], kept: Mapping[str, Tensor]) -> None:
    for name, head in heads.items():
        head.weight.copy_(kept[f"{name}.weight"])
        if f"{name}.bias" in kept and head.bias is not None:
            head.bias.copy_(kept[f"{name}.bias"])
        elif isinstance(head, nn.Linear):
            head.register_parameter("bias", None)
