"""Saving a calibrated model: a plain copy, the temperature folded in, the whole directory or nothing."""

from __future__ import annotations

import copy
import os
from collections.abc import Container, Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi

from hf_calib._errors import InputTypeError, expected
from hf_calib._files import replace_files, whole_folder
from hf_calib.export.fold import fold_temperature

_WEIGHTS = (
    "adapter_config.json",
    "adapter_model.*",
    "model.safetensors*",
    "model-*-of-*.safetensors",
    "pytorch_model.bin*",
    "pytorch_model-*-of-*.bin",
)


def standalone_copy(model: Any, state_dict: Mapping[str, torch.Tensor] | None = None) -> Any:
    """A float32 copy on the CPU that owes nothing to the training: no adapters, autocast or sharding.

    Args:
        model: the unwrapped model.
        state_dict: its full weights, where the model itself holds only a shard.

    Raises:
        TypeError: if the model cannot be saved for a pipeline.
    """
    if not hasattr(model, "save_pretrained"):
        way_out = "wrap the network in a transformers.PreTrainedModel"
        raise InputTypeError(expected("the model", "have save_pretrained", type(model).__name__, way_out))
    if state_dict is not None:
        plain = type(model)(copy.deepcopy(model.config))
        plain.load_state_dict(state_dict)
    else:
        plain = copy.deepcopy(model)
    if hasattr(plain, "merge_and_unload"):
        plain = plain.merge_and_unload()
    plain.config.return_dict = True  # pipelines expect it
    return plain.cpu().float().eval()


def save_folded(
    plain: Any, temperature: float, output_dir: str | os.PathLike[str], *, batch: Any, processing_class: Any
) -> None:
    """Fold the temperature into a standalone copy, check it on the batch, and save it.

    A new directory appears whole. In one that exists already, files are replaced one by one, config.json,
    which says that the temperature is folded in, last.
    """
    fold_temperature(plain, temperature, batch=batch)
    with whole_folder(Path(output_dir), replace_model) as folder:
        plain.save_pretrained(folder)
        if processing_class is not None:
            processing_class.save_pretrained(folder)


def replace_model(made: Path, target: Path) -> None:
    """Put a finished model in its place, and remove what another one left there of its weights."""
    new = {path.name for path in made.iterdir()}
    replace_files(made, target)
    for name in _weights_but_for({path.name for path in target.iterdir()}, new):
        (target / name).unlink()


def remove_other_weights(repo_id: str, folder: str, *, token: str | None, revision: str | None) -> None:
    """Remove weights that the folder does not have from the repository; uploading only adds files."""
    api = HfApi(token=token)
    here = {path.name for path in Path(folder).iterdir()}
    stale = _weights_but_for(api.list_repo_files(repo_id, revision=revision), here)
    if stale:
        message = "Remove weights from before the calibration"
        api.delete_files(repo_id, stale, revision=revision, commit_message=message)


def _weights_but_for(names: Iterable[str], new: Container[str]) -> list[str]:
    """Adapters, shards and the like that would be loaded instead of the new weights, or on top of them."""
    forms = [name for name in names for form in _WEIGHTS if "/" not in name and fnmatch(name, form)]
    return [name for name in forms if name not in new]
