"""A search that dies by SIGKILL and is started again, and two at once: `python -m tests.helpers.killed_search FOLDER`.

Each is a process of its own, forked from this one, which has only imported.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import optuna
from transformers import TrainerCallback

from hf_calib import CalibrationTrainer
from tests.helpers.killed_training import die, in_a_child
from tests.helpers.tiny import arguments, sequences, tiny_bert


class DieInTrial(TrainerCallback):
    """Dies after the first step of the training after `n` others."""

    def __init__(self, n: int) -> None:
        self.left = n

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.left -= 1

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.left == 0:
            die()


def search(folder: Path, study: str, n_trials: int, *, seed: int, die_after: int | None = None) -> None:
    model = tiny_bert()
    trainer = CalibrationTrainer(
        model_init=lambda: tiny_bert(),
        args=arguments(folder / study, loss="focal"),
        train_dataset=sequences(model, 16, seed=1),
        calibration_dataset=sequences(model, 40, seed=2),
        callbacks=[] if die_after is None else [DieInTrial(die_after)],
    )
    best = trainer.hyperparameter_search(
        lambda trial: {"loss_gamma": trial.suggest_float("loss_gamma", 0.5, 5.0)},
        n_trials=n_trials,
        backend="optuna",
        sampler=optuna.samplers.RandomSampler(seed=seed),
        storage=f"sqlite:///{folder}/{study}.db",
        study_name=study,
        load_if_exists=True,
    )
    found = {
        "best": {"objective": best.objective, **best.hyperparameters},
        "args": trainer.args.loss_gamma,
    }
    (folder / f"{study}.json").write_text(json.dumps(found))


def trials_of(folder: Path, study: str) -> list[dict[str, Any]]:
    trials = optuna.load_study(study_name=study, storage=f"sqlite:///{folder}/{study}.db").trials
    return [{"state": each.state.name, "value": each.value, "params": each.params} for each in trials]


def main(folder: Path) -> None:
    endings = [in_a_child(search, folder, "s", 4, seed=0, die_after=2)]
    found: dict[str, Any] = {"killed": trials_of(folder, "s")}
    endings.append(in_a_child(search, folder, "s", 2, seed=1))
    found["resumed"] = trials_of(folder, "s")
    found |= json.loads((folder / "s.json").read_text())
    optuna.create_study(study_name="t", storage=f"sqlite:///{folder}/t.db")
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        os._exit(in_a_child(search, folder, "t", 2, seed=0))
    endings.append(in_a_child(search, folder, "t", 2, seed=1))
    endings.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    found["shared"] = trials_of(folder, "t")
    (folder / "found.json").write_text(json.dumps({**found, "endings": endings}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
