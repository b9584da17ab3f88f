"""Saving a calibrated model: a plain copy, the temperature folded in, the whole directory or nothing."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Container, Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi

from hf_calib._checks import expected
from hf_calib.folding import fold_temperature

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
        raise TypeError(expected("the model", "have save_pretrained", type(model).__name__, way_out))
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
    target = Path(output_dir)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, or in it where it exists (it may be a mount): on the same file system.
    home = target if target.exists() else target.parent
    with tempfile.TemporaryDirectory(prefix="_saving-", dir=home) as scratch:
        made = Path(scratch, "model")
        made.mkdir()
        plain.save_pretrained(made)
        if processing_class is not None:
            processing_class.save_pretrained(made)
        _move_into_place(made, target)


def _move_into_place(made: Path, target: Path) -> None:
    if not target.exists():
        made.rename(target)
        return
    new = {path.name for path in made.iterdir()}
    for path in sorted(made.iterdir(), key=lambda path: path.name == "config.json"):
        if path.is_dir() and (target / path.name).is_dir():
            shutil.rmtree(target / path.name)
        os.replace(path, target / path.name)
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
