"""`CalibrationMixin` over trainers that are not ours: their arguments, their batches, their loss."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer, TrainingArguments

from hf_calib import CalibrationTrainer
from hf_calib.trainer import CalibrationConfig, CalibrationMixin
from tests.helpers.tiny import (
    arguments,
    assert_same,
    logged,
    sequences,
    tiny_bert,
    weights,
)


class TheirTrainer(Trainer):
    """A stock subclass with a method of its own and arguments of its own kind."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        self.made_optimizer = True
        return super().create_optimizer(*args, **kwargs)


class Mixed(CalibrationMixin, TheirTrainer):
    pass


def stock_arguments(folder: Path, **overrides: Any) -> TrainingArguments:
    ours = arguments(folder, **overrides)
    names = {each.name for each in fields(TrainingArguments) if each.init} & vars(
        ours
    ).keys()
    return TrainingArguments(
        **{name: getattr(ours, name) for name in names if not name.startswith("_")}
    )


def trained(kind: type, args: Any, **further: Any) -> Any:
    model = tiny_bert()
    rows = {
        "train_dataset": sequences(model, 24),
        "calibration_dataset": sequences(model, 40, seed=2),
        "eval_dataset": sequences(model, 24, seed=3),
    }
    trainer = kind(model, args, **rows, **further)
    trainer.train()
    return trainer


def test_a_subclass_with_stock_arguments_trains_as_ours_does(tmp_path: Path) -> None:
    config: dict[str, Any] = {"loss": "adafocal", "gamma_update_steps": 1}
    config["calibration_method"] = "temperature"
    one = trained(
        CalibrationTrainer,
        arguments(tmp_path / "a", gradient_accumulation_steps=2, **config),
    )
    two = trained(
        Mixed,
        stock_arguments(tmp_path / "b", gradient_accumulation_steps=2),
        calibration=CalibrationConfig(**config),
    )
    assert two.made_optimizer
    assert_same(weights(one.model), weights(two.model))
    assert two.temperature == one.temperature
    assert two.calibration_loss.gammas.tolist() == one.calibration_loss.gammas.tolist()
    for key in ("eval_ece", "eval_ece_calibrated", "eval_nll"):
        assert logged(two, key)[-1] == logged(one, key)[-1]
    two.save_calibrated_model(tmp_path / "calibrated")
    assert (
        json.loads((tmp_path / "calibrated" / "calibration.json").read_text())["method"]
        == "temperature"
    )


def test_arguments_without_a_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError,
        match=r"got TrainingArguments; .* or pass calibration=CalibrationConfig",
    ):
        Mixed(tiny_bert(), stock_arguments(tmp_path))


class Pairs(CalibrationMixin, Trainer):
    """Rewards of pairs: a batch holds the first of each pair, then the second ones."""

    def logits_and_labels(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Any, Any, Tensor]:
        rewards = model(
            **{name: value for name, value in inputs.items() if name != "labels"}
        ).logits[:, 0]
        logits = torch.stack(rewards.chunk(2), dim=1)
        return {"logits": logits}, logits, torch.zeros(len(logits), dtype=torch.long)


def test_a_trainer_that_makes_its_own_logits(tmp_path: Path) -> None:
    """Pairs of rewards are a problem of two classes: the loss is -log sigmoid of their difference."""
    model = tiny_bert(num_labels=2)
    rows = sequences(model, 16)
    config = CalibrationConfig(calibration_method="none")
    args = stock_arguments(tmp_path, learning_rate=0.0, num_train_epochs=1)
    trainer = Pairs(
        model, args, train_dataset=rows, eval_dataset=rows, calibration=config
    )
    found = trainer.evaluate()
    batch = trainer.data_collator(
        [rows[i] for i in range(args.per_device_eval_batch_size)]
    )
    _, logits, _ = trainer.logits_and_labels(model.eval(), dict(batch))
    first = -F.logsigmoid(logits[:, 0] - logits[:, 1]).mean()
    assert trainer.compute_loss(model, batch).item() == pytest.approx(
        first.item(), abs=1e-6
    )
    assert trainer.last_evaluation.raw is not None
    assert len(trainer.last_evaluation.raw.top_label_rows.confidence) == 8
    assert 0 <= found["eval_ece"] <= 1


def test_a_loss_function_of_the_users_is_scaled_as_the_stock_trainer_does(
    tmp_path: Path,
) -> None:
    def half(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        total = F.cross_entropy(outputs.logits, labels, reduction="sum")
        return total / (
            2 * (len(labels) if num_items_in_batch is None else num_items_in_batch)
        )

    settings = {
        "gradient_accumulation_steps": 2,
        "save_strategy": "no",
        "num_train_epochs": 1,
    }
    ours = trained(
        CalibrationTrainer,
        arguments(tmp_path / "a", **settings),
        compute_loss_func=half,
    )
    model = tiny_bert()
    stock = Trainer(
        model,
        stock_arguments(tmp_path / "b", **settings),
        train_dataset=sequences(model, 24),
        compute_loss_func=half,
    )
    stock.train()
    assert_same(weights(ours.model), weights(stock.model))
    assert 0 <= logged(ours, "eval_ece")[-1] <= 1
    assert ours.temperature is not None or ours.calibration_map is not None


class Doubled(CalibrationTrainer):
    """A compute_loss that builds on ours."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(*args, **kwargs)
        return (2 * found[0], found[1]) if isinstance(found, tuple) else 2 * found


def test_a_compute_loss_that_builds_on_ours_counts_each_row_once(
    tmp_path: Path,
) -> None:
    trainer = trained(Doubled, arguments(tmp_path, num_train_epochs=1))
    metrics = trainer.evaluate()
    assert len(trainer.last_evaluation.raw.top_label_rows.confidence) == 24
    assert metrics["eval_loss"] == pytest.approx(2 * metrics["eval_nll"], rel=1e-4)
