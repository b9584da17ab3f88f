"""Checkpoints: which ones are whole, the model's weights in them, and the table of an adaptive loss."""

from __future__ import annotations

import json
import os
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from hf_calib._compat import with_names_in_memory
from hf_calib._errors import InputValueError, expected, few
from hf_calib._files import whole_file
from hf_calib.export.hub import LOSS_STATE_NAME, PUSHED_LOSS_STATE
from hf_calib.losses import AdaptiveLoss

# What the Trainer writes with torch.save, as zip archives.
_ARCHIVES = ("optimizer.*", "scheduler.pt", "scaler.pt", "rng_state*.pth", "pytorch_model*.bin")
_WAY_OUT = "resume from another checkpoint, or train without resume_from_checkpoint"


# ---- The table of an adaptive loss ----


def save_loss_state(loss: AdaptiveLoss, directory: str | os.PathLike[str]) -> None:
    """Write the loss's table into the directory, with the loss's name and hyperparameters: all of it or nothing."""
    table = {name: value.contiguous() for name, value in loss.state_dict().items()}
    metadata = {"loss": loss.name, "hyperparameters": json.dumps(loss.hyperparameters)}
    with whole_file(Path(directory) / LOSS_STATE_NAME) as unfinished:
        save_file(table, unfinished, metadata)


def load_loss_state(loss: AdaptiveLoss, directory: str | os.PathLike[str]) -> None:
    """Restore the table that `save_loss_state` wrote, here or where a push puts it.

    Raises:
        ValueError: if it is missing or unreadable, of another loss or other hyperparameters, or not finite.
    """
    names = (LOSS_STATE_NAME, PUSHED_LOSS_STATE)
    path = next((p for name in names if (p := Path(directory) / name).is_file()), None)
    if path is None:
        got = "no such file, without which the loss would start over"
        raise InputValueError(expected(f"checkpoint {directory}", f"hold {LOSS_STATE_NAME}", got, _WAY_OUT))
    requirement = f"hold the table of loss {loss.name!r} with {loss.hyperparameters}"
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            table = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        got = f"a file that cannot be read ({error})"
        raise InputValueError(expected(str(path), requirement, got, _WAY_OUT)) from error
    if "loss" in metadata:
        _check_same_loss(loss, metadata, path, requirement)
    # The accuracy of a bin that no example fell into is NaN.
    infinite = sorted(k for k, v in table.items() if k != "accuracies" and not bool(v.isfinite().all()))
    if infinite:
        got = f"NaN or infinity in {few(infinite)}"
        raise InputValueError(expected(str(path), requirement, got, _WAY_OUT))
    try:
        loss.load_state_dict(table)
    except (RuntimeError, InputValueError) as error:
        got = " ".join(str(error).split())
        raise InputValueError(expected(str(path), requirement, got, _WAY_OUT)) from error
    if "loss" not in metadata:
        warnings.warn(
            f"{path} does not record its loss; earlier versions did not. It was loaded because its shapes fit loss "
            f"{loss.name!r}. Make sure that the checkpoint was trained with that loss and these hyperparameters.",
            stacklevel=2,
        )


def _check_same_loss(loss: AdaptiveLoss, metadata: Mapping[str, str], path: Path, requirement: str) -> None:
    """Compare the recorded hyperparameters; one that the file does not have was added after it was written."""
    ours = json.loads(json.dumps(loss.hyperparameters))
    recorded = json.loads(metadata["hyperparameters"])
    if metadata["loss"] != loss.name or any(ours.get(name) != value for name, value in recorded.items()):
        got = f"the table of loss {metadata['loss']!r} with {recorded}"
        way_out = "train with that loss and those hyperparameters, or without resume_from_checkpoint"
        raise InputValueError(expected(str(path), requirement, got, way_out))


# ---- The weights of the model ----


def load_weights(model: nn.Module, directory: str | os.PathLike[str]) -> bool:
    """Load a checkpoint's weights in place; all of the model's weights must be there, and no others.

    A model with a `load_state_dict` of its own decides that itself; it may resize its buffers, for example.
    The files are those that `Trainer` writes: whole or in shards, safetensors or `torch.save`, with the names
    of the parameters in memory or those that `save_pretrained` gives them.

    Returns:
        Whether the directory has weights of a whole model.

    Raises:
        ValueError: naming the weights that are missing, unknown or of another shape.
    """
    saved = _saved_weights(Path(directory))
    if saved is None:
        return False
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        model.load_state_dict(saved, strict=False)
        return True
    own: dict[str, Tensor] = model.state_dict(keep_vars=True)
    if isinstance(model, PreTrainedModel):
        weights, unknown, misshapen = with_names_in_memory(model, saved)
        ignored = "|".join(model._keys_to_ignore_on_load_unexpected or ()) or "(?!)"
        unknown = [name for name in unknown if not re.search(ignored, name)]
        not_saved = set(model._keys_to_ignore_on_save or ())
    else:
        weights = {name: value for name, value in saved.items() if name in own}
        unknown = sorted(saved.keys() - own.keys())
        misshapen = sorted(name for name, value in weights.items() if value.shape != own[name].shape)
        not_saved = set()
    # Tied weights are saved under one of their names.
    arrived = {id(own[name]) for name in (*weights, *misshapen)}
    missing = [name for name, value in own.items() if id(value) not in arrived and name not in not_saved]
    problems = {"missing": missing, "unknown": unknown, "of another shape": misshapen}
    way_out = "resume with the architecture that the checkpoint was trained with"
    _check_all_arrived(problems, directory, f"the {type(model).__name__}", way_out)
    model.load_state_dict(weights, strict=False)
    return True


def _saved_weights(directory: Path) -> dict[str, Tensor] | None:
    """The tensors of a checkpoint on the CPU, in the Trainer's order of preference; None if there are none."""
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        if (directory / name).is_file():
            return _tensors(directory / name)
    for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        if (directory / name).is_file():
            return {k: v for shard in _shards(directory / name) for k, v in _tensors(shard).items()}
    return None


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise InputValueError(expected(str(path), "hold weights", f"{error}", _WAY_OUT)) from error


def _shards(index: Path) -> list[Path]:
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [index.parent / name for name in sorted(set(names))]


def load_adapter(model: Any, directory: str | os.PathLike[str], *, is_trainable: bool) -> bool:
    """Load a PEFT adapter in place of the active one; all of its weights must be there, and no others.

    Returns:
        Whether the directory has one adapter; several lie in folders of their own.

    Raises:
        ValueError: naming the weights that are missing or unknown.
    """
    found = {path.parent for path in Path(directory).glob("**/adapter_model.*")}
    if found != {Path(directory)}:
        return False
    try:
        loaded = model.load_adapter(directory, model.active_adapters[0], is_trainable=is_trainable)
        # Of prompts peft reports what it has loaded by another way as unknown.
        by_prompts = any(config.is_prompt_learning for config in model.peft_config.values())
        unknown = [key for key in loaded.unexpected_keys if not (by_prompts and key == "prompt_embeddings")]
        problems = {"missing": loaded.missing_keys, "unknown": unknown}
    except KeyError as error:  # a layer that was to be saved whole
        problems = {"missing": [error.args[0]]}
    way_out = "resume with the versions of transformers and peft that the checkpoint was trained with"
    _check_all_arrived(problems, directory, "the adapter", way_out)
    return True


def _check_all_arrived(
    problems: Mapping[str, list[str]], directory: str | os.PathLike[str], owner: str, way_out: str
) -> None:
    """Raise if a kind of problem, such as "missing", has names of weights."""
    got = "; ".join(f"{len(names)} {what}: {few(names)}" for what, names in problems.items() if names)
    if got:
        requirement = f"hold every weight of {owner} and no other"
        raise InputValueError(expected(f"checkpoint {directory}", requirement, got, way_out))


# ---- Which checkpoint is whole ----


def last_complete_checkpoint(output_dir: str | os.PathLike[str], processes: int) -> str:
    """The newest checkpoint that is whole, with a warning that names newer ones.

    Raises:
        ValueError: if there is none.
    """
    incomplete: dict[Path, str] = {}
    for path in _checkpoints(Path(output_dir)):
        problem = _problem(path, processes)
        if problem is None:
            if incomplete:
                names = ", ".join(f"{other} ({why})" for other, why in incomplete.items())
                warnings.warn(
                    f"Incomplete: {names}. Training resumes from {path}, the newest complete checkpoint, and "
                    "repeats the steps since. Pass resume_from_checkpoint=FOLDER to choose another one.",
                    stacklevel=3,
                )
            return str(path)
        incomplete[path] = problem
    got = f"{output_dir} with none"
    if incomplete:
        got = "only " + few([f"{path} ({problem})" for path, problem in incomplete.items()])
    way_out = "pass resume_from_checkpoint=FOLDER, or train without it"
    raise InputValueError(expected("output_dir", "hold a complete checkpoint", got, way_out))


def check_complete(checkpoint: str | os.PathLike[str]) -> None:
    """Raise if a checkpoint was not written to its end or was cut short since, and name the one before it.

    Raises:
        ValueError: saying which file is missing or damaged.
    """
    path = Path(checkpoint)
    problem = _problem(path) if path.is_dir() else "no such folder"
    if problem is None:
        return
    siblings = _checkpoints(path.parent)
    before = siblings[siblings.index(path) + 1 :] if path in siblings else []
    whole = next((other for other in before if _problem(other) is None), None)
    way_out = f"resume from {whole}, the complete checkpoint before it" if whole else _WAY_OUT
    got = f"{path} ({problem})"
    raise InputValueError(expected("resume_from_checkpoint", "be a complete checkpoint", got, way_out))


def _checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first: by the number of their step, not by their name."""
    pattern = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
    found = {path: pattern.fullmatch(path.name) for path in directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    steps = {path: int(match[1]) for path, match in found.items() if match}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def _problem(checkpoint: Path, processes: int = 1) -> str | None:
    """The reason why a checkpoint is incomplete; None for a complete one.

    The first process writes the Trainer's state last. The others write their random states at any time.
    """
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        return f"{TRAINER_STATE_NAME} is missing"
    damaged = [path.name for path in sorted(checkpoint.iterdir()) if _is_damaged(path)]
    if damaged:
        return f"{few(damaged)} cut short or damaged"
    for index in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        shards = _shards(checkpoint / index) if (checkpoint / index).is_file() else []
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            return f"{few(missing)} missing"
    one_state = not (checkpoint / "optimizer.pt").exists() or (checkpoint / "rng_state.pth").exists()
    ranks = [] if processes == 1 or one_state else range(processes)
    if not all((checkpoint / f"rng_state_{rank}.pth").exists() for rank in ranks):
        return "the random state of a process is missing"
    return None


def _is_damaged(path: Path) -> bool:
    """Whether a file that the Trainer wrote cannot be read; from its head or its end only."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt"):  # compares the length of the file with its header
                pass
        elif any(path.match(pattern) for pattern in _ARCHIVES):
            return path.is_file() and not zipfile.is_zipfile(path)
    except (OSError, ValueError, SafetensorError):
        return True
    return False
