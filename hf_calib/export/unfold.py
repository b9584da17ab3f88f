"""Unfolding: the model as it was before a scaler was folded into its classification head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import cached_file

from hf_calib._errors import InputValueError, check, expected
from hf_calib.export.fold import OF_THE_MAP, check_is_plain
from hf_calib.export.heads import has_tied_head, norms_of_hidden_size
from hf_calib.export.kept_head import FILE, read_kept_head
from hf_calib.export.rerankers import classifier_of
from hf_calib.scaling.saved_map import recorded_in

_Model = TypeVar("_Model", bound=nn.Module)


def unfold(model: _Model, *, revision: str | None = None) -> _Model:
    r"""Undo `fold`, in place and bit for bit: the model returns the logits that the scaler was fitted on.

    Use it to train on, to fit another map, or to compare the logits. `hf-calib unfold MODEL OUT` does it for a
    folder or a name on the Hub.

    The head from before the fold is taken where it was kept: `save_calibrated_model` and `hf-calib calibrate` write it
    beside the model, and a hash tells whether it belongs to these weights. It is looked for where the model was loaded
    from, a folder or the Hub. On any failure the model is as it was.

    Args:
        model: a folded one, in float32 or float64; or a `sentence_transformers.CrossEncoder`.
        revision: of a model on the Hub that was not loaded from the main branch.

    Returns:
        The same model. `model.config.calibration` keeps what is not about the map, such as the loss.

    Raises:
        TypeError: if model is of the wrong type.
        ValueError: if no map is folded into the model, it holds PEFT layers or 16-bit weights, or the head from before
            the fold was not kept for these weights: load the model that was folded again.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> from hf_calib import fold_temperature
    >>> config = BertConfig(
    ...     vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    ... )
    >>> unfold(fold_temperature(BertForSequenceClassification(config), 1.5))
    Traceback (most recent call last):
    ...
    hf_calib._errors.InputValueError: expected the head from before the fold to be kept beside the model, ...
    """
    check_is_plain(model)
    classifier: Any = classifier_of(model)
    recorded = recorded_in(classifier.config)
    way_out = "it returns the logits that its head was trained for"
    check(bool(recorded.get("folded")), "model to have a map folded into its head", "none", way_out)
    heads = _recorded_heads(classifier, recorded)
    _restore(heads, _kept_head(classifier, heads, revision))
    classifier.config.calibration = {key: value for key, value in recorded.items() if key not in OF_THE_MAP}
    if not classifier.config.calibration:
        del classifier.config.calibration
    return model


def can_be_unfolded(model: Any) -> bool:
    """Whether a folded model's head from before the fold was kept beside it."""
    try:
        return bool(_kept_head(model, _recorded_heads(model, recorded_in(model.config)), None))
    except InputValueError:
        return False


def _kept_head(classifier: Any, heads: Mapping[str, nn.Module], revision: str | None) -> Mapping[str, Tensor]:
    source = getattr(classifier, "name_or_path", None) or ""
    folded = {
        f"{name}.{part}": parameter.detach()
        for name, head in heads.items()
        for part, parameter in head.named_parameters(recurse=False)
    }
    kept = None
    try:
        file = cached_file(
            source,
            FILE.as_posix(),
            revision=revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        kept = None if file is None else read_kept_head(file, folded)
    except (OSError, TypeError, ValueError):  # there is no such folder or repository, or no longer
        pass
    if kept is None:
        got = f"none for these weights in {source or 'a model that was not saved'}"
        way_out = (
            "load the model that was folded again; hf-calib calibrate and save_calibrated_model keep its head"
        )
        requirement = f"be kept beside the model, in {FILE.as_posix()}"
        raise InputValueError(expected("the head from before the fold", requirement, got, way_out))
    return kept


def _recorded_heads(model: nn.Module, recorded: Mapping[str, Any]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    heads = {name: modules.get(name) for name in recorded.get("head") or ()}
    norms = norms_of_hidden_size(model) if has_tied_head(model) else {}
    fits = heads and all(isinstance(head, nn.Linear) or name in norms for name, head in heads.items())
    got = f"{sorted(heads) or 'none'}, which are not all heads of the model"
    way_out = "load the model again; if its head was replaced, set model.config.calibration = None"
    check(bool(fits), "model to have the layers that config.calibration names", got, way_out)
    return heads  # type: ignore[return-value]


@torch.no_grad()
def _restore(heads: Mapping[str, Any], kept: Mapping[str, Tensor]) -> None:
    for name, head in heads.items():
        head.weight.copy_(kept[f"{name}.weight"])
        if f"{name}.bias" in kept and head.bias is not None:
            head.bias.copy_(kept[f"{name}.bias"])
        elif isinstance(head, nn.Linear):
            head.register_parameter("bias", None)
