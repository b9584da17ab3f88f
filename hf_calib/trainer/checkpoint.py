"""What a checkpoint has of ours, the table of an adaptive loss; and which checkpoint is the newest whole one."""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_calib._errors import InputValueError, check, expected
from hf_calib._files import whole_file
from hf_calib.export.folder import LOSS_STATE_NAME, PUSHED_LOSS_STATE
from hf_calib.losses import AdaptiveLoss


def save_loss_state(loss: AdaptiveLoss, directory: str | os.PathLike[str]) -> None:
    """Write the loss's table into the directory, with the loss's name and hyperparameters: all of it or nothing."""
    table = {name: value.contiguous() for name, value in loss.state_dict().items()}
    metadata = {"loss": loss.name, "hyperparameters": json.dumps(loss.hyperparameters)}
    with whole_file(Path(directory) / LOSS_STATE_NAME) as unfinished:
        save_file(table, unfinished, metadata)


def load_loss_state(loss: AdaptiveLoss, directory: str | os.PathLike[str]) -> None:
    """Restore the table that `save_loss_state` wrote, here or where a push puts it, if it is of this very loss."""
    found = [
        path for name in (LOSS_STATE_NAME, PUSHED_LOSS_STATE) if (path := Path(directory) / name).is_file()
    ]
    got = "no such file, without which the loss would start over"
    way_out = "resume from another checkpoint, or train without resume_from_checkpoint"
    check(bool(found), f"checkpoint {directory} to hold {LOSS_STATE_NAME}", got, way_out)
    requirement = f"hold the table of loss {loss.name!r} with {loss.hyperparameters}"
    try:
        with safe_open(found[0], "pt") as file:
            recorded = file.metadata() or {}
            table = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        ours, theirs = json.loads(json.dumps(loss.hyperparameters)), json.loads(recorded["hyperparameters"])
        # One that the file does not have was added after it was written.
        if recorded["loss"] != loss.name or any(ours.get(name) != value for name, value in theirs.items()):
            raise ValueError(f"the table of loss {recorded['loss']!r} with {theirs}")
        loss.load_state_dict(table)
    except (SafetensorError, OSError, TypeError, KeyError, RuntimeError, ValueError) as error:
        got = " ".join(str(error).split())
        raise InputValueError(expected(str(found[0]), requirement, got, way_out)) from error


def newest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint that was written to its end, the Trainer's state; None if there is none."""
    states = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")
    steps = {path: path.parent.name.rpartition("-")[2] for path in states}
    for path in sorted((p for p in steps if steps[p].isdecimal()), key=lambda p: -int(steps[p])):
        try:
            json.loads(path.read_text(encoding="utf-8"))
            return str(path.parent)
        except ValueError:  # cut short
            continue
    return None
