"""Trainings that die by SIGKILL and are resumed, each in a process that is forked from the test's own."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

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


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DieAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            die()


_save_state = TrainerState.save_to_json


def half_written(state: TrainerState, path: str) -> None:
    """Die amid the state of the second checkpoint."""
    _save_state(state, path)
    if state.global_step == 2 * BASE["save_steps"]:
        text = Path(path).read_text()
        Path(path).write_text(text[: len(text) // 2])
        die()


def train(folder: Path, case: dict[str, Any], *, kill: int | str | None = None, resume: bool = False) -> None:
    trainer = make_trainer(folder, case)
    if kill == "state":
        TrainerState.save_to_json = half_written  # type: ignore[method-assign]
    elif kill is not None:
        trainer.add_callback(DieAt(int(kill)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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
        },
        folder / "result.pt",
    )


def run(folder: Path, name: str) -> list[int]:
    """The case's training as it is meant to be, killed, and resumed; how each ended."""
    case, whole, broken = CASES[name], folder / "whole", folder / "broken"
    endings = []
    for train_it in (
        partial(train, whole, case),
        partial(train, broken, case, kill=case["kill"]),
        partial(train, broken, case, resume=True),
    ):
        if len(endings) == 2:
            shutil.copytree(broken, folder / "as_left")
        endings.append(os.waitstatus_to_exitcode(os.waitpid(forked(train_it), 0)[1]))
    return endings
