"""Trainings that die by SIGKILL and are resumed, each in a process that is forked from the test's own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

import hf_calib.trainer.saving
from hf_calib import CalibrationTrainer
from tests.helpers.gloo_pair import forked
from tests.helpers.tiny import arguments, sequences, tiny_bert, weights

STEPS_OF_EPOCH, STEPS = 3, 6
BASE: dict[str, Any] = {"loss": "adafocal", "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2}
BY_STEPS = {"eval_strategy": "steps", "eval_steps": 1}
BY_EPOCHS = {"save_steps": 3, "kill": 4}
QUICK: dict[str, dict[str, Any]] = {
    "amid the state": {**BY_STEPS, "kill": "state"},
    "every 2 steps": {"gamma_update_steps": 2, "gamma_update_samples": 16, **BY_EPOCHS},
    "by a schedule": {"gamma_update_schedule": {1: 2}, "gradient_accumulation_steps": 2, **BY_EPOCHS},
    "ece_ce, with a temperature": {
        **{**BY_STEPS, "eval_steps": 2, "kill": 5},
        **{"loss": "ece_ce", "calibration_strategy": "evaluate"},
    },
}
SLOW: dict[str, dict[str, Any]] = {
    "amid the table": {**BY_STEPS, "kill": "table"},
    "before the optimizer": {**BY_STEPS, "kill": "optimizer"},
    "evaluated on start": {**BY_STEPS, "eval_steps": 3, "eval_on_start": True, "kill": 5},
    "evaluated, no checkpoint of its own": {**BY_STEPS, "kill": 5, "calibration": False},
    "each epoch, saved by epochs": {"save_strategy": "epoch", "kill": 4},
}
CASES = {**QUICK, **SLOW}


def make_trainer(folder: Path, case: dict[str, Any]) -> CalibrationTrainer:
    settings = {**BASE, **{k: v for k, v in case.items() if k not in ("kill", "calibration")}}
    model = tiny_bert(dropout=0.1)
    held_out = {"eval_dataset": sequences(model, 13, seed=3)}
    if case.get("calibration", True):
        held_out["calibration_dataset"] = sequences(model, 21, seed=2)
    rows = 4 * STEPS_OF_EPOCH * case.get("gradient_accumulation_steps", 1) - 1
    return CalibrationTrainer(
        model, arguments(folder, **settings), train_dataset=sequences(model, rows), **held_out
    )


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DieAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            die()


def arm(trainer: CalibrationTrainer, kill: int | str) -> None:
    """Let the training die at the start of step `kill` + 1, or while its second checkpoint is written."""
    if isinstance(kill, int):
        trainer.add_callback(DieAt(kill))
        return
    second = 2 * BASE["save_steps"]

    def when_second(action: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (action if trainer.state.global_step == second else otherwise)(*args)

    if kill == "optimizer":
        trainer._save_optimizer_and_scheduler = when_second(die, trainer._save_optimizer_and_scheduler)  # type: ignore[method-assign]
    elif kill == "table":
        hf_calib.trainer.saving.os.replace = when_second(die, os.replace)  # type: ignore[assignment]
    else:
        TrainerState.save_to_json = when_second(half_written, TrainerState.save_to_json)  # type: ignore[method-assign]


def half_written(state: TrainerState, path: str) -> None:
    text = json.dumps({"log_history": state.log_history})
    Path(path).write_text(text[: len(text) // 2])
    die()


def train(folder: Path, case: dict[str, Any], *, kill: int | str | None = None, resume: bool = False) -> None:
    trainer = make_trainer(folder, case)
    if kill is not None:
        arm(trainer, kill)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=resume)
    timed = ("time", "per_second")
    torch.save(
        {
            "weights": weights(trainer.model),
            "table": dict(trainer.calibration_loss.named_buffers()),
            "temperature": trainer.temperature,
            "log": [
                {k: v for k, v in entry.items() if not k.endswith(timed)}
                for entry in trainer.state.log_history
                if "train_loss" not in entry  # the mean since the resumption
            ],
            "warnings": [str(warning.message) for warning in caught],
        },
        folder / "result.pt",
    )


def in_a_child(function: Callable[..., None], *args: Any, **kwargs: Any) -> int:
    """Call the function in a forked process; return how that ended: 0, 1, or minus a signal."""
    child = forked(partial(function, *args, **kwargs))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(folder: Path, name: str) -> list[int]:
    """The case's training as it is meant to be, killed, and resumed; how each ended."""
    case, whole, broken = CASES[name], folder / "whole", folder / "broken"
    endings = [in_a_child(train, whole, case), in_a_child(train, broken, case, kill=case["kill"])]
    shutil.copytree(broken, folder / "as_left")
    return [*endings, in_a_child(train, broken, case, resume=True)]
