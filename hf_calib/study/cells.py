"""The cells of a study: what each of its trainings has left in its folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_calib._files import whole_file
from hf_calib.predictions.training import PREDICTIONS

CELLS = "cells"
CELL, RESULTS, LOG, FAILED = "cell.json", "results.json", "log.txt", "failed.json"
_MODELS = ("calibrated", "uncalibrated")
_LAST_LINES = 12


def is_finished(folder: Path) -> bool:
    """Whether a training has left its results; they are written last."""
    return (folder / RESULTS).is_file() and (folder / PREDICTIONS).is_file()


def recorded(path: Path, name: str) -> Any:
    """An entry of a JSON file; None where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def problem(folder: Path) -> str:
    """Why a training is not finished."""
    return str(recorded(folder / FAILED, "reason") or "not finished")


def mark_failed(folder: Path, reason: str) -> None:
    """Keep why a training failed, for the report; where the disk is full, the other trainings go on all the same."""
    with suppress(OSError):
        write_json(folder / FAILED, {"reason": reason})


def last_lines(folder: Path) -> str:
    """The end of a training's output; of a progress bar, what it showed last."""
    try:
        text = (folder / LOG).read_bytes()[-(2**14) :].decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n")]
    return "\n".join([line for line in lines if line][-_LAST_LINES:])


def clean_up(folder: Path, *, keep_model: bool) -> None:
    """Remove the checkpoints of a finished training, and unless it is kept the model."""
    for path in (*folder.glob("checkpoint-*"), *(folder / name for name in _MODELS if not keep_model)):
        shutil.rmtree(path, ignore_errors=True)
    (folder / FAILED).unlink(missing_ok=True)


def newest_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint, or None. Only looks: another process may be writing one just now."""
    if not any(folder.glob("checkpoint-*")):
        return None
    from hf_calib.trainer.checkpoint import newest_checkpoint

    return newest_checkpoint(folder)


def remove_cut_short(folder: Path) -> None:
    """Remove checkpoints that a killed training left, where none is complete; for who holds the folder."""
    if newest_checkpoint(folder) is None:
        for path in folder.glob("checkpoint-*"):
            shutil.rmtree(path, ignore_errors=True)


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    with whole_file(path) as unfinished:
        unfinished.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
