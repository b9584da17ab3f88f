"""Trainings that must not depend on how their global batch is cut; run by tests in one process and in two."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_calib import CalibrationTrainer
from tests.helpers.tiny import (
    arguments,
    differences,
    logged,
    sequences,
    shared,
    tagged,
    tiny_bert,
    weights,
)

GLOBAL_BATCH = 8
CLASS_WEIGHTS = [0.5, 2.0, 1.0, 4.0]
UPDATED = {"gamma_update_steps": 1, "temperature_criterion": "none"}
CASES: dict[str, dict[str, Any]] = {
    "cross_entropy": {"loss": "cross_entropy"},
    "focal weighted": {"loss": "focal", "class_weights": CLASS_WEIGHTS},
    "focal summed": {"loss": "focal", "loss_reduction": "sum", "learning_rate": 2e-4},
    "adafocal": {"loss": "adafocal", "loss_kwargs": {"n_bins": 5}, **UPDATED},
    "soft cross_entropy weighted": {
        "loss": "cross_entropy",
        "class_weights": CLASS_WEIGHTS,
    },
    "several pos_weight": {"loss": "focal", "pos_weight": CLASS_WEIGHTS},
    "dispatched": {"accelerator_config": {"dispatch_batches": True}},
    "stream": {"max_steps": 4},
    "tokens cross_entropy weighted": {
        "loss": "cross_entropy",
        "class_weights": CLASS_WEIGHTS,
    },
    "tokens dual_focal": {"loss": "dual_focal"},
    "tokens adafocal weighted": {
        "loss": "adafocal",
        "class_weights": CLASS_WEIGHTS,
        **UPDATED,
    },
}
BATCH_CASES: dict[str, dict[str, Any]] = {
    "mmce": {"loss": "mmce", "gather_batch": True},
    "tokens mmce": {"loss": "mmce", "gather_batch": True},
}

# The last of 4 steps has 5 rows, which two processes do not share evenly: accelerate repeats rows for it.
RAGGED_ROWS = 3 * GLOBAL_BATCH + 5


def make_trainer(
    name: str, folder: Path, micro: int, accumulation: int, *, n: int = 3 * GLOBAL_BATCH
) -> Any:
    """In float64, so that only rounding in the 15th digit may differ."""
    kind, data = (
        ("Token", tagged) if name.startswith("tokens") else ("Sequence", sequences)
    )
    given = {}
    if name.startswith("soft"):
        data = shared
        given = {"problem_type": "single_label_classification"}
    elif name.startswith("several"):
        given = {"problem_type": "multi_label_classification"}
    model = tiny_bert(kind, **given).double()
    settings = {
        "optim": "sgd",
        "learning_rate": 2e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,  # clips nothing; with 0, early versions do not log the norm
        "temperature_criterion": "none",
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        **CASES.get(name, {}),
        **BATCH_CASES.get(name, {}),
    }
    held_out = (
        {"calibration_dataset": data(model, 12, seed=2)}
        if settings.get("loss") == "adafocal"
        else {}
    )
    rows = data(model, n)
    if name == "stream":
        rows = rows.to_iterable_dataset()
    args = arguments(folder, **settings)
    return CalibrationTrainer(model, args, train_dataset=rows, **held_out)


def run(
    name: str, folder: Path, micro: int, accumulation: int, *, n: int = 3 * GLOBAL_BATCH
) -> dict[str, Any]:
    """Train; return what must not depend on micro and accumulation."""
    trainer = make_trainer(name, folder, micro, accumulation, n=n)
    trainer.train()
    return {
        "weights": weights(trainer.model),
        "loss": torch.tensor(logged(trainer, "loss"), dtype=torch.float64),
        "grad_norm": torch.tensor(logged(trainer, "grad_norm"), dtype=torch.float64),
        "table": dict(trainer.calibration_loss.named_buffers()),
    }


def evaluate(
    kind: str, folder: Path, n: int
) -> tuple[dict[str, float], dict[str, float], Any]:
    """Evaluate n rows, fit a temperature on n + 2 others, evaluate again; return both and the trainer.

    A "Stream" has sequences that come without their number. "Soft" ones are evaluated with soft labels.
    """
    given = {}
    if kind == "Soft":
        given = {"problem_type": "single_label_classification"}
    model = tiny_bert("Token" if kind == "Token" else "Sequence", **given)
    data = tagged if kind == "Token" else sequences
    sets = [data(model, size, seed=size) for size in (n, n + 2)]
    if kind == "Soft":
        sets[0] = shared(model, n, seed=n)
    evaluation, calibration = (
        s.to_iterable_dataset() if kind == "Stream" else s for s in sets
    )
    trainer = CalibrationTrainer(
        model,
        arguments(folder, per_device_eval_batch_size=4),
        eval_dataset=evaluation,
        calibration_dataset=calibration,
    )
    before = trainer.evaluate()
    trainer.fit_temperature()
    return before, trainer.evaluate(), trainer


def resume(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The end of a training of 4 steps, the last with rows left over, and of the same one resumed after 2 of them."""
    # transformers 5.17 cannot load tensors of an optimizer on the CPU of several processes; SGD has none.
    settings = {
        "loss": "adafocal",
        "gamma_update_steps": 1,
        "optim": "sgd",
        "learning_rate": 2e-3,
    }
    ends = []
    for resumed in (False, True):
        model = tiny_bert(dropout=0.1)
        args = arguments(folder, **settings, save_strategy="steps", save_steps=2)
        sets = {
            "train_dataset": sequences(model, 29),
            "calibration_dataset": sequences(model, 21, seed=2),
        }
        trainer = CalibrationTrainer(model, args, **sets)
        if resumed and trainer.is_world_process_zero():
            shutil.rmtree(folder / "checkpoint-4")
        trainer.accelerator.wait_for_everyone()
        trainer.train(resume_from_checkpoint=resumed)
        ends.append(
            {**weights(trainer.model), **dict(trainer.calibration_loss.named_buffers())}
        )
    return ends[0], ends[1]


TOLERANCE = 1e-12  # of weights and gradients, float64
LOGGED = 5e-7  # the Trainer adds up the losses that it logs in float32


def assert_equal_runs(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for key in ("weights", "table"):
        largest, drift = (
            differences(ours[key], theirs[key]) if ours[key] else (0.0, 0.0)
        )
        assert largest < TOLERANCE, key
        assert drift < TOLERANCE / 10, key
    for key, rtol in (("loss", LOGGED), ("grad_norm", TOLERANCE)):
        assert ours[key].tolist() == pytest.approx(theirs[key].tolist(), rel=rtol), key
