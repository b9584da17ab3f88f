"""The callbacks beside the stock Trainer, with the loss as its `compute_loss_func`: as in `CalibrationTrainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_calib import AdaFocalCallback, CalibrationTrainer, TemperatureScalingCallback
from hf_calib.losses import adafocal
from tests.helpers.tiny import (
    arguments,
    assert_same,
    logged,
    sequences,
    tiny_bert,
    weights,
)

SETTINGS: dict[str, Any] = {
    "num_train_epochs": 3,
    "gradient_accumulation_steps": 2,
    "save_strategy": "epoch",
}


def stock(folder: Path, **settings: Any) -> tuple[Trainer, Any]:
    """With AdaFocal and a temperature; and its callback of the temperature."""
    model, ours = tiny_bert(dropout=0.1), arguments(folder, **SETTINGS, **settings)
    names = TrainingArguments.__dataclass_fields__
    args = TrainingArguments(
        **{name: getattr(ours, name) for name in names if names[name].init}
    )
    trainer = Trainer(
        model, args, train_dataset=sequences(model, 32), compute_loss_func=adafocal()
    )
    rows = {"trainer": trainer, "calibration_dataset": sequences(model, 40, seed=2)}
    temperature = TemperatureScalingCallback(**rows)
    trainer.add_callback(
        AdaFocalCallback(**rows, every_n_steps=settings.get("gamma_update_steps"))
    )
    trainer.add_callback(temperature)
    return trainer, temperature


@pytest.mark.slow
@pytest.mark.parametrize("steps", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_gammas_and_temperature_are_those_of_our_trainer(
    steps: int | None, tmp_path: Path
) -> None:
    trainer, callback = stock(
        tmp_path / "stock", loss="adafocal", gamma_update_steps=steps
    )
    trainer.train()
    model = tiny_bert(dropout=0.1)
    args = arguments(
        tmp_path / "ours", **SETTINGS, loss="adafocal", gamma_update_steps=steps
    )
    ours = CalibrationTrainer(
        model,
        args,
        train_dataset=sequences(model, 32),
        calibration_dataset=sequences(model, 40, seed=2),
    )
    ours.train()
    assert_same(
        dict(trainer.compute_loss_func.named_buffers()),
        dict(ours.calibration_loss.named_buffers()),
    )
    assert not trainer.compute_loss_func.gammas.eq(1).all()
    assert_same(weights(trainer.model), weights(model))
    assert callback.fitted.temperature_ == ours.temperature
    assert logged(trainer, "gamma_max") == logged(ours, "gamma_max")


def test_a_resumed_training_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, _ = stock(tmp_path)
    whole.train()
    resumed, _ = stock(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert_same(weights(resumed.model), weights(whole.model))
    assert torch.equal(resumed.compute_loss_func.gammas, whole.compute_loss_func.gammas)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    model = tiny_bert()
    trainer = Trainer(
        model, TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    )
    with pytest.raises(
        ValueError,
        match="trainer and calibration_dataset to be given together, got one of them",
    ):
        AdaFocalCallback(trainer=trainer)
    with pytest.raises(ValueError, match="strategy to be 'end' for a stock Trainer"):
        TemperatureScalingCallback(
            strategy="evaluate",
            trainer=trainer,
            calibration_dataset=sequences(model, 8),
        )
    trainer.train_dataset = sequences(model, 8)
    trainer.add_callback(
        AdaFocalCallback(trainer=trainer, calibration_dataset=sequences(model, 8))
    )
    with pytest.raises(
        ValueError,
        match="compute_loss_func to be a loss that adapts, got None; pass compute",
    ):
        trainer.train()


def test_an_update_at_a_step_does_not_keep_its_loss_out_of_the_log(
    tmp_path: Path,
) -> None:
    trainer, _ = stock(tmp_path, loss="adafocal", gamma_update_steps=1)
    trainer.args.max_steps = 3
    trainer.train()
    log = trainer.state.log_history
    assert [entry["step"] for entry in log if "gamma_00" in entry] == [1, 2, 3]
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3]
