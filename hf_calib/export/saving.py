"""Saving a calibrated model: a plain copy, the fitted map folded in, the whole directory or nothing."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hf_calib._errors import check
from hf_calib._files import whole_folder
from hf_calib.export.fold import fold_and_return_head
from hf_calib.export.folder import ADAPTER_CONFIG, fingerprint, keep_head, replace_model
from hf_calib.metrics.checks import check_type
from hf_calib.scaling.saved_map import save_map

Place = str | os.PathLike[str]


def standalone_copy(model: Any, state_dict: Mapping[str, torch.Tensor] | None = None) -> Any:
    """A float32 copy on the CPU that owes nothing to the training: no adapters, autocast or sharding.

    Args:
        model: the unwrapped model.
        state_dict: its full weights, where the model itself holds only a shard.

    Raises:
        TypeError: if the model cannot be saved for a pipeline.
    """
    way_out = "wrap the network in a transformers.PreTrainedModel"
    can_be_saved = hasattr(model, "save_pretrained")
    check_type(can_be_saved, "the model to have save_pretrained", type(model).__name__, way_out)
    if state_dict is not None:
        plain = type(model)(copy.deepcopy(model.config))
        plain.load_state_dict(state_dict)
    else:
        plain = copy.deepcopy(model)
    if hasattr(plain, "merge_and_unload"):
        plain = plain.merge_and_unload()
    plain.config.return_dict = True  # pipelines expect it
    return plain.cpu().float().eval()


def check_overwrites_no_original(output_dir: Place, originals: Iterable[Place]) -> None:
    """Raise where saving would replace what folding and merging start from: the folders that `loaded_from` names.

    Folding can be undone, merging cannot; and a process that is killed while it replaces a model leaves neither.
    """
    folder = Path(output_dir)
    is_original = folder.exists() and folder.resolve() in {Path(name).resolve() for name in originals}
    way_out = "name a new folder, so that this one stays as it is"
    check(not is_original, "output to be another folder than the model's", folder, way_out)
    way_out = "merging cannot be undone: name a new folder, or delete the adapters first"
    check(not (folder / ADAPTER_CONFIG).exists(), "output to hold no adapters", folder, way_out)


def loaded_from(model: Any) -> set[str]:
    """Where a model, and the base model of its adapters, were loaded from: whole paths, or names on the Hub."""
    adapters = getattr(model, "peft_config", None) or {}
    names = {
        getattr(model, "name_or_path", None),
        getattr(getattr(model, "config", None), "_name_or_path", None),
        *(adapter.base_model_name_or_path for adapter in adapters.values()),
    }
    return {os.path.abspath(name) if os.path.exists(name) else name for name in names if name}


def save_folded(
    plain: Any,
    scaler: Any,
    output_dir: Place,
    *,
    batch: Any,
    processing_class: Any,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Save a standalone copy with a fitted scaler folded in, and its calibration.json: the whole directory or nothing.

    In a directory that exists, weights and the map of another model are replaced; all other files stay. The head from
    before the fold is kept in it, for `unfold`.

    Args:
        plain: what `standalone_copy` returns.
        scaler: any that `fold` takes.
        output_dir: the folder; a new one appears whole.
        batch: as for `fold`.
        processing_class: a tokenizer or image processor, which is saved too; or None.
        about: what calibration.json says of the map besides its numbers.

    Raises:
        ValueError: if `fold` refuses the model or the scaler.
        OSError: if the directory cannot be written; it is as it was then.
    """
    with whole_folder(Path(output_dir), replace_model) as folder:
        write_folded(plain, scaler, folder, batch=batch, processing_class=processing_class, about=about)


def write_folded(
    plain: Any, scaler: Any, folder: Path, *, batch: Any, processing_class: Any, about: Any = None
) -> str:
    """Do what `save_folded` does in an empty folder; return the fingerprint of the folded weights."""
    before = fold_and_return_head(plain, scaler, batch)
    plain.save_pretrained(folder)
    head, state = plain.config.calibration["head"], plain.state_dict()
    keep_head(folder, before, {name: state[name] for name in state if name.rpartition(".")[0] in head})
    weights = fingerprint(plain)
    save_map(scaler, folder, {**(about or {}), "folded": True, "head": head, "fingerprint": weights})
    if processing_class is not None:
        processing_class.save_pretrained(folder)
    return weights
