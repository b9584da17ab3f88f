"""Unfolding: restoring a model's classification head from before a fold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers.utils import cached_file

from hf_calib._errors import check
from hf_calib.export.fold import OF_THE_MAP, check_is_plain, classifier_of
from hf_calib.export.folder import KEPT_HEAD, read_kept_head
from hf_calib.export.heads import (
    has_tied_head,
    norms_of_hidden_size,
    restore,
    tensors_of,
)
from hf_calib.scaling.saved_map import recorded_in

_Model = TypeVar("_Model", bound=nn.Module)


def unfold(model: _Model, *, revision: str | None = None) -> _Model:
    r"""Undo `fold`, in place and bit for bit, so that the model returns the logits that the
    calibrator was fitted to.

    Use it for further training, to fit another calibrator, or to compare logits.
    `hf-calib unfold MODEL OUT` does the same for a folder or a name on the Hub.

    The head from before the fold is read from where the model was loaded, a folder or the Hub:
    `save_calibrated_model` and `hf-calib calibrate` keep it next to the model, with a hash of these
    weights.

    Args:
        model: a folded model in float32 or float64, or a `sentence_transformers.CrossEncoder`.
        revision: revision of a model on the Hub that was not loaded from the main branch.

    Returns:
        The same model. `model.config.calibration` keeps entries that are not about the calibrator,
        such as the loss.

    Raises:
        TypeError: if model has the wrong type.
        ValueError: if no calibrator is folded into the model, the model has PEFT layers or 16-bit
            weights, or the head from before the fold was not kept for these weights; in the last
            case load the original model again.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> from hf_calib import fold_temperature
    >>> config = BertConfig(
    ...     vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    ... )
    >>> unfold(fold_temperature(BertForSequenceClassification(config), 1.5))
    Traceback (most recent call last):
    ...
    hf_calib._errors.InputValueError: expected the head from before the fold to be kept with the model, ...
    """
    check_is_plain(model)
    config = classifier_of(model).config
    recorded = recorded_in(config)
    way_out = "there is nothing to undo"
    check(
        bool(recorded.get("folded")),
        "model to have a calibrator folded into its head",
        "none",
        way_out,
    )
    heads, kept = _heads_and_kept(model, revision)
    restore(heads, kept)
    config.calibration = {
        key: value for key, value in recorded.items() if key not in OF_THE_MAP
    }
    if not config.calibration:
        del config.calibration
    return model


def _heads_and_kept(
    model: Any, revision: str | None
) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """The folded layers by name, and their tensors from before the fold."""
    classifier = classifier_of(model)
    modules = dict(classifier.named_modules())
    heads = {
        name: modules.get(name)
        for name in recorded_in(classifier.config).get("head") or ()
    }
    norms = norms_of_hidden_size(classifier) if has_tied_head(classifier) else {}
    fits = heads and all(
        isinstance(head, nn.Linear) or name in norms for name, head in heads.items()
    )
    got = f"{sorted(heads) or 'none'}, which are not all heads of the model"
    way_out = "load the model again; if its head was replaced, set model.config.calibration = None"
    check(
        bool(fits),
        "model to have the layers that config.calibration names",
        got,
        way_out,
    )
    source = getattr(classifier, "name_or_path", None) or ""
    raises = ("gated_repo", "missing_entries", "connection_errors")
    # A file that cannot be fetched is None then, and no error.
    quiet = {f"_raise_exceptions_for_{reason}": False for reason in raises}
    kept = None
    try:
        file = cached_file(source, KEPT_HEAD.as_posix(), revision=revision, **quiet)
        kept = None if file is None else read_kept_head(file, tensors_of(heads))  # type: ignore[arg-type]
    # The folder or repository may no longer exist.
    except (OSError, TypeError, ValueError):
        pass
    got = f"none for these weights in {source or 'a model that was not saved'}"
    way_out = "load the model that was folded again; hf-calib calibrate and save_calibrated_model keep its head"
    requirement = f"the head from before the fold to be kept with the model, in {KEPT_HEAD.as_posix()}"
    check(kept is not None, requirement, got, way_out)
    return heads, kept or {}
