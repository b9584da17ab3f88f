"""The folder of a study: which trainings it compares, and what each of them has left."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_calib._errors import InputValueError, expected
from hf_calib._files import check_output, whole_file
from hf_calib.predictions.training import PREDICTIONS
from hf_calib.study.grid import Cell, content_hash

STUDY, CELLS = "study.json", "cells"
CELL, RESULTS, LOG, FAILED = "cell.json", "results.json", "log.txt", "failed.json"
_LAST_LINES = 12
MODELS = ("calibrated", "uncalibrated")


def write_plan(
    study: Path,
    cells: Sequence[Cell],
    methods: Sequence[str],
    base: Mapping[str, Any],
    script: Path | None = None,
) -> dict[Cell, Path]:
    """Write study.json, and cell.json of each cell; return the cells' folders.

    Cells that the study has already stay in it where the base is the same, so that losses and seeds can be added.

    Args:
        study: the folder, new or of a study.
        cells: of this grid.
        methods: post-hoc maps.
        base: the resolved configuration, without what differs between the cells.
        script: that trains them, whose content is recorded; or None.

    Raises:
        ValueError: if the folder cannot be written, or is full of something else.
    """
    check_output(study)
    if study.is_dir() and any(study.iterdir()) and not (study / STUDY).is_file():
        way_out = "name a new folder"
        raise InputValueError(
            expected("output", f"be new, or have a {STUDY}", f"{study}, which has none", way_out)
        )
    before = read_plan(study) if (study / STUDY).is_file() else {"base": None, "cells": {}}
    base = json.loads(json.dumps(base))  # as it is read again: names of classes have text as keys
    listed = _of_the_same_losses(study, before["cells"], cells) if before["base"] == base else {}
    listed |= {cell.name: {"loss": cell.variant.label, "seed": cell.seed} for cell in cells}
    folders = {cell: study / CELLS / cell.name for cell in cells}
    version = None if script is None else content_hash(script)
    for cell, folder in folders.items():
        if not is_finished(folder):
            record = {"key": cell.key, "loss": cell.variant.label, "script": version}
            _write(folder / CELL, {**record, "arguments": dict(cell.arguments)})
    plan: dict[str, Any] = {
        "losses": list(dict.fromkeys(entry["loss"] for entry in listed.values())),
        "seeds": sorted({entry["seed"] for entry in listed.values()}),
        "methods": list(methods),
        "base": dict(base),
        "cells": listed,
    }
    _write(study / STUDY, plan)
    return folders


def _of_the_same_losses(study: Path, listed: Mapping[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """The listed cells without those of a loss that has the name of one of this grid, and another configuration.

    Its file was changed. A mean over seeds is over trainings of one configuration.
    """
    now = {cell.variant.label: _without_seed(cell.arguments) for cell in cells}
    return {
        name: entry
        for name, entry in listed.items()
        if entry["loss"] not in now or _configuration(study, name) == now[entry["loss"]]
    }


def _configuration(study: Path, name: str) -> str | None:
    """The configuration of a cell but for its seed; None where it cannot be read."""
    try:
        cell = json.loads((study / CELLS / name / CELL).read_text(encoding="utf-8"))
        return _without_seed(cell["arguments"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _without_seed(arguments: Mapping[str, Any]) -> str:
    return json.dumps({**arguments, "seed": None}, sort_keys=True)


def read_plan(study: Path) -> dict[str, Any]:
    """The plan in study.json.

    Raises:
        ValueError: if there is none, or it is not of a study.
    """
    path = study / STUDY
    way_out = "pass the --output folder of an earlier hf-calib compare"
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        entries = plan["cells"].items()
        cells: dict[str, dict[str, Any]] = {
            name: {"loss": str(entry["loss"]), "seed": int(entry["seed"])} for name, entry in entries
        }
        plan["cells"] = cells
        whole = isinstance(plan["methods"], list) and "base" in plan
        plan["losses"] = list(dict.fromkeys(entry["loss"] for entry in cells.values()))
        plan["seeds"] = sorted({entry["seed"] for entry in cells.values()})
    except (
        OSError,
        ArithmeticError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        got = f"{path} ({error})"
        raise InputValueError(expected("the study", "be readable", got, way_out)) from error
    outside = [name for name in cells if os.path.basename(name) != name or name in ("", ".", "..")]
    if not whole or outside:
        got = f"{path} with cells {outside}" if outside else f"{path}, which lacks some of its entries"
        raise InputValueError(expected("the study", "be as hf-calib compare wrote it", got, way_out))
    return dict(plan)


def is_finished(folder: Path) -> bool:
    """Whether a training has left its results; they are written last."""
    return (folder / RESULTS).is_file() and (folder / PREDICTIONS).is_file()


def trained_by_another_version(folder: Path, version: str) -> bool:
    """Whether a script, of which the version is the `content_hash`, was another when it trained a cell."""
    try:
        recorded = json.loads((folder / CELL).read_text(encoding="utf-8"))["script"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return recorded not in (None, version)


def problem(folder: Path) -> str:
    """Why a training is not finished."""
    try:
        return str(json.loads((folder / FAILED).read_text(encoding="utf-8"))["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return "not finished"


def mark_failed(folder: Path, reason: str) -> None:
    """Keep why a training failed, for the report; where the disk is full, the other trainings go on all the same."""
    with suppress(OSError):
        _write(folder / FAILED, {"reason": reason})


def last_lines(folder: Path) -> str:
    """The end of a training's output; of a progress bar, what it showed last."""
    try:
        with open(folder / LOG, "rb") as file:
            file.seek(max(0, os.path.getsize(folder / LOG) - 2**14))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n")]
    return "\n".join([line for line in lines if line][-_LAST_LINES:])


def clean_up(folder: Path, *, keep_model: bool) -> None:
    """Remove the checkpoints of a finished training, and unless it is kept the model."""
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path, ignore_errors=True)
    for name in () if keep_model else MODELS:
        shutil.rmtree(folder / name, ignore_errors=True)
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


def resume_words(folder: Path) -> list[str]:
    """What lets a training go on from its newest complete checkpoint, if it has one."""
    checkpoint = newest_checkpoint(folder)
    return [] if checkpoint is None else ["--resume_from_checkpoint", checkpoint]


def _write(path: Path, record: Mapping[str, Any]) -> None:
    with whole_file(path) as unfinished:
        unfinished.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
