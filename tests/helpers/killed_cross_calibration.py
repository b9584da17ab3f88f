"""A cross-calibration that dies by SIGKILL twice and is called again: `python -m tests.helpers.killed_cross_calibration
FOLDER`.

Each call that may die is a process of its own, forked from this one after a call of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from hf_calib import CalibrationTrainer, cross_calibrate
from tests.helpers.killed_training import DieAt, in_a_child
from tests.helpers.tiny import arguments, sequences, tiny_bert, weights

N_FOLDS, N_ROWS = 3, 24
KILLS = {"in a fold": ("fold_1", 5), "in the last training": ("final", 7), "not at all": ("", 0)}


def call(folder: Path, result: Path, kill: tuple[str, int] = ("", 0)) -> None:
    """Training `kill[0]` dies at the start of step `kill[1]` + 1; checkpoints are written every 2 steps."""
    trained: list[str] = []

    def make_trainer(train_dataset: Any, output_dir: str) -> CalibrationTrainer:
        settings = {"loss": "focal", "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2}
        settings |= {"calibration_method": "temperature"}
        trainer = CalibrationTrainer(
            tiny_bert(dropout=0.1), arguments(output_dir, **settings), train_dataset=train_dataset
        )
        trained.append(Path(output_dir).name)
        if Path(output_dir).name == kill[0]:
            trainer.add_callback(DieAt(kill[1]))
        return trainer

    found = cross_calibrate(make_trainer, sequences(tiny_bert(), N_ROWS), N_FOLDS, output_dir=folder)
    torch.save(
        {
            "weights": weights(found.trainer.model),
            "rows": {"logits": torch.from_numpy(found.logits), "labels": torch.from_numpy(found.labels)},
            "metrics": found.metrics,
            "temperature": found.trainer.temperature,
            "trained": trained[1:],  # the first call of make_trainer is for the checks
        },
        result,
    )


def main(folder: Path) -> None:
    call(folder / "whole", folder / "whole.pt")  # what is imported late is then there for the children
    endings = []
    for name, kill in KILLS.items():
        endings.append(in_a_child(call, folder / "broken", folder / f"{name}.pt", kill))
    endings.append(in_a_child(call, folder / "broken", folder / "again.pt"))
    (folder / "endings.json").write_text(json.dumps(endings))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
