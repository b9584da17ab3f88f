"""Saving a calibrated model: a plain copy, the fitted map folded in, the whole directory or nothing."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from hf_calib._errors import InputTypeError, InputValueError, expected
from hf_calib._files import move_files, whole_folder
from hf_calib.export.fingerprint import fingerprint
from hf_calib.export.fold import fold_and_return_head
from hf_calib.export.kept_head import FILE as KEPT_HEAD
from hf_calib.export.kept_head import keep_head
from hf_calib.scaling.saved_map import MAP_NAME, save_map

# Names of weights, in the order in which they are removed and written. At each step, what can be loaded is the
# old model, nothing, or the new model: a file that makes others loadable comes after them.
_WEIGHTS = (
    "adapter_model.*",
    "model-*-of-*.safetensors",
    "pytorch_model-*-of-*.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "model.safetensors.index.json",
    "model.safetensors",
    "adapter_config.json",
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


def check_overwrites_no_original(
    output_dir: str | os.PathLike[str], originals: Iterable[str | os.PathLike[str]]
) -> None:
    """Raise where saving would replace what folding and merging start from.

    Folding can be undone, merging cannot; and a process that is killed while it replaces a model leaves neither.

    Args:
        output_dir: where a folded model is to be saved.
        originals: folders, or names on the Hub, that it was loaded from; see `loaded_from`.

    Raises:
        ValueError: if it is one of these folders, or holds adapters.
    """
    folder = Path(output_dir)
    if folder.exists() and folder.resolve() in {Path(name).resolve() for name in originals}:
        way_out = "name a new folder, so that this one stays as it is"
        raise InputValueError(expected("output", "be another folder than the model's", folder, way_out))
    if (folder / "adapter_config.json").exists():
        way_out = "merging cannot be undone: name a new folder, or delete the adapters first"
        raise InputValueError(expected("output", "hold no adapters", folder, way_out))


def loaded_from(model: Any) -> set[str]:
    """Where a model, and the base model of its adapters, were loaded from; empty for one made from a config.

    Folders by their whole paths: a process may change its folder before it saves.
    """
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
    output_dir: str | os.PathLike[str],
    *,
    batch: Any,
    processing_class: Any,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Save a standalone copy with a fitted scaler folded in, as `write_folded` does: the whole directory or nothing.

    A new directory appears whole; for one that exists already, see `replace_model`. Arguments are those of
    `write_folded`.
    """
    with whole_folder(Path(output_dir), replace_model) as folder:
        write_folded(plain, scaler, folder, batch=batch, processing_class=processing_class, about=about)


def write_folded(
    plain: Any,
    scaler: Any,
    folder: Path,
    *,
    batch: Any,
    processing_class: Any,
    about: Mapping[str, Any] | None = None,
) -> str:
    """Fold a fitted scaler into a standalone copy, check it on the batch, and write it with its calibration.json.

    The head from before the fold is written beside it, for `unfold`.

    Args:
        plain: see `standalone_copy`.
        scaler: any that `fold` takes.
        folder: an empty one.
        batch: as for `fold`.
        processing_class: a tokenizer or image processor, which is saved too; or None.
        about: what calibration.json says of the map besides its numbers.

    Returns:
        The fingerprint of the folded weights.
    """
    before = fold_and_return_head(plain, scaler, batch)
    plain.save_pretrained(folder)
    state = plain.state_dict()
    names = [f"{head}.{part}" for head in plain.config.calibration["head"] for part in ("weight", "bias")]
    keep_head(folder, before, {name: state[name] for name in names if name in state})
    weights = fingerprint(plain)
    folded = {"folded": True, "head": plain.config.calibration["head"], "fingerprint": weights}
    save_map(scaler, folder, {**(about or {}), **folded})
    if processing_class is not None:
        processing_class.save_pretrained(folder)
    return weights


def replace_model(made: Path, target: Path) -> None:
    """Move a finished model into a folder, and remove what another one left there of its weights and of its map.

    The old weights go before anything else changes, and the new ones come last. A process that is killed in
    between leaves a folder that cannot be loaded, not folded weights beside a config that denies it.
    """
    for path in sorted(target.iterdir(), key=_turn):
        if _turn(path) > 0:
            path.unlink()
    for name in (KEPT_HEAD, MAP_NAME):
        its_own = not (target / name).parent.is_symlink() or (target / name).parent == target
        if its_own and not (made / name).exists():  # that of the old model
            (target / name).unlink(missing_ok=True)
    move_files(made, target, order=_turn)


def _turn(path: Path) -> int:
    """When a file is removed or written; 0, before all weights, for what is none."""
    return next((i for i, form in enumerate(_WEIGHTS, 1) if fnmatch(path.name, form)), 0)
