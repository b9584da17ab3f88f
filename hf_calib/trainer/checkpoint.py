"""The adaptive loss in checkpoints, and which checkpoint is whole."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_calib._errors import InputValueError, expected
from hf_calib._files import whole_file
from hf_calib.losses import AdaptiveLoss

LOSS_STATE_NAME = "calibration_loss.safetensors"


def save_loss_state(loss: AdaptiveLoss, directory: str | os.PathLike[str]) -> None:
    """Write the loss's table into the directory: the whole file or none."""
    path = Path(directory) / LOSS_STATE_NAME
    with whole_file(path) as unfinished:
        save_file({name: value.contiguous() for name, value in loss.state_dict().items()}, unfinished)


def load_loss_state(loss: AdaptiveLoss, directory: str | os.PathLike[str]) -> None:
    """Restore the table that `save_loss_state` wrote.

    Raises:
        ValueError: if it is missing, unreadable, or of a loss with other hyperparameters.
    """
    path = Path(directory) / LOSS_STATE_NAME
    way_out = "resume from another checkpoint, or start afresh: without its table the loss would begin anew"
    if not path.is_file():
        raise InputValueError(expected(f"checkpoint {directory}", f"hold {LOSS_STATE_NAME}", "none", way_out))
    try:
        loss.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError, OSError) as error:
        requirement = f"be the table of loss {loss.name!r} with {loss.hyperparameters}"
        got = " ".join(str(error).split())
        raise InputValueError(expected(str(path), requirement, got, way_out)) from error


def last_complete_checkpoint(output_dir: str | os.PathLike[str], processes: int) -> str:
    """The newest checkpoint that was written to its end; those cut short by a crash are passed over.

    Raises:
        ValueError: if there is none.
    """
    pattern = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)$")
    directory = Path(output_dir)
    found = [path for path in directory.iterdir() if pattern.match(path.name)] if directory.is_dir() else []
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        if _is_complete(path, processes):
            return str(path)
        warnings.warn(f"{path} was not written to its end, and is passed over", stacklevel=3)
    way_out = "name a checkpoint, or train without resume_from_checkpoint"
    raise InputValueError(expected("output_dir", "hold a complete checkpoint", output_dir, way_out))


def _is_complete(checkpoint: Path, processes: int) -> bool:
    """The trainer's state is written last, by the first process; the others write their random states."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if processes == 1 or not (checkpoint / "optimizer.pt").exists():
        return True
    if (checkpoint / "rng_state.pth").exists():  # of a training by one process
        return True
    return all((checkpoint / f"rng_state_{i}.pth").exists() for i in range(processes))
