"""Models of every kind train, and are calibrated: tuples, tokens, images, adapters, compiled, 16 bits, your own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    DataCollatorForTokenClassification,
    Trainer,
)

from hf_calib import CalibrationTrainer
from tests.helpers.evaluations import NAMES
from tests.helpers.tiny import (
    N_LABELS,
    TEXT,
    arguments,
    assert_same,
    last_evaluation,
    logged,
    tagged,
    tiny_bert,
    tokenizer,
    weights,
)
from tests.helpers.trained import Network, NetworkWithTuple, images, lora, trained


def assert_calibrated(trainer: CalibrationTrainer) -> None:
    last = last_evaluation(trainer)
    assert all(np.isfinite(logged(trainer, "loss")))
    for name in NAMES:
        assert np.isfinite(last[f"eval_{name}"])
        assert np.isfinite(last[f"eval_{name}_calibrated"])
    assert last["eval_accuracy"] == last["eval_accuracy_calibrated"]


@pytest.mark.slow
def test_multi_label(tmp_path: Path) -> None:
    model = tiny_bert(problem_type="multi_label_classification")
    for loss in ("cross_entropy", "focal"):
        assert_calibrated(trained(tmp_path, model, loss=loss))
    assert_calibrated(trained(tmp_path, model, loss="adafocal", gamma_update_steps=1))


def test_tokens_in_batches_of_different_lengths(tmp_path: Path) -> None:
    model = tiny_bert("Token")
    rows = []
    for row in tagged(model, 40):
        length = 3 + sum(label != -100 for label in row["labels"]) % 5
        rows.append(
            {"input_ids": row["input_ids"][:length], "labels": row["labels"][:length]}
        )
    held_out = Dataset.from_list(rows)
    trainer = CalibrationTrainer(
        model,
        arguments(
            tmp_path,
            loss="adafocal",
            gamma_update_steps=2,
            per_device_eval_batch_size=4,
        ),
        train_dataset=held_out.select(range(16)),
        calibration_dataset=held_out.select(range(16, 40)),
        eval_dataset=held_out.select(range(10, 30)),
        data_collator=DataCollatorForTokenClassification(tokenizer()),
    )
    trainer.train()
    assert_calibrated(trainer)


def test_adapters(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path,
        lora(tiny_bert()),
        save_strategy="epoch",
        loss="adafocal",
        num_train_epochs=2,
    )
    assert_calibrated(trainer)
    assert (
        trainer.model.base_model.model.config.calibration["temperature"]
        == trainer.temperature
    )
    assert (tmp_path / "checkpoint-4" / "adapter_model.safetensors").exists()
    assert (tmp_path / "checkpoint-4" / "calibration_loss.safetensors").exists()


@pytest.mark.slow
def test_compiled(tmp_path: Path) -> None:
    ours = trained(tmp_path, torch_compile=True, torch_compile_backend="aot_eager")
    plain = trained(tmp_path)
    assert_calibrated(ours)
    assert logged(ours, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-5)
    assert ours.temperature == pytest.approx(plain.temperature, rel=1e-4)
    assert ours.model.config.calibration["temperature"] == ours.temperature
    ours.save_calibrated_model(tmp_path / "model")
    assert (
        type(tiny_bert())
        .from_pretrained(tmp_path / "model")
        .config.calibration["folded"]
        is True
    )


def test_sixteen_bits(tmp_path: Path) -> None:
    ours, plain = trained(tmp_path, bf16=True), trained(tmp_path)
    assert_calibrated(ours)
    assert logged(ours, "loss") == pytest.approx(logged(plain, "loss"), rel=0.03)
    assert logged(ours, "loss") != logged(plain, "loss")


def test_the_loss_is_computed_in_float32(tmp_path: Path) -> None:
    trainer = CalibrationTrainer(
        tiny_bert().bfloat16(), arguments(tmp_path, loss="dual_focal")
    )
    batch = {"input_ids": torch.arange(5, 13)[None], "labels": torch.tensor([1])}
    loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert (loss.dtype, outputs.logits.dtype) == (torch.float32, torch.bfloat16)


def test_multiple_choice_trains_as_with_the_stock_trainer(tmp_path: Path) -> None:
    """The choices of a question are its classes; their common head cannot hold a calibrator."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 64, (24, 3, 8), generator=generator)
    labels = torch.randint(3, (24,), generator=generator)
    rows = [
        {"input_ids": row, "labels": label}
        for row, label in zip(ids, labels.tolist(), strict=True)
    ]

    def training(kind: type[Trainer], **given: Any) -> Any:
        torch.manual_seed(0)
        model = BertForMultipleChoice(BertConfig(**TEXT))
        args = arguments(tmp_path, optim="sgd", max_steps=3)
        trainer = kind(model, args, train_dataset=rows[:12], **given)
        trainer.train()
        return trainer

    stock = training(Trainer)
    ours = training(
        CalibrationTrainer, eval_dataset=rows[12:18], calibration_dataset=rows[18:]
    )
    assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), rel=1e-6)
    assert ours.temperature is not None
    assert "eval_nll_calibrated" in ours.evaluate()
    with pytest.raises(
        ValueError, match="linear head whose division divides the logits"
    ):
        ours.save_calibrated_model(tmp_path / "calibrated")


@pytest.mark.parametrize(
    ("kind", "as_dataset"),
    [(NetworkWithTuple, False), pytest.param(Network, True, marks=pytest.mark.slow)],
)
def test_networks_of_ones_own(
    kind: type[nn.Module], as_dataset: bool, tmp_path: Path
) -> None:
    def rows(n: int) -> Any:
        found = [{k: v.tolist() for k, v in row.items()} for row in images(n)]
        return Dataset.from_list(found) if as_dataset else images(n)

    trainer = CalibrationTrainer(
        kind(),
        arguments(
            tmp_path,
            loss="adafocal",
            eval_strategy="epoch",
            save_strategy="epoch",
            num_train_epochs=2,
        ),
        train_dataset=rows(40),
        calibration_dataset=rows(60),
        eval_dataset=rows(30),
    )
    trainer.train()
    assert_calibrated(trainer)
    predicted = trainer.predict(rows(30))
    assert predicted.predictions.shape == (30, N_LABELS)
    with torch.no_grad():
        wanted = trainer.model.head(
            torch.stack([row["pixel_values"] for row in images(30)]).flatten(1)
        )
    np.testing.assert_allclose(predicted.predictions, wanted, rtol=1e-6)
    again = CalibrationTrainer(
        kind(),
        trainer.args,
        train_dataset=rows(40),
        calibration_dataset=rows(60),
        eval_dataset=rows(30),
    )
    again.train(resume_from_checkpoint=True)
    assert_same(weights(again.model), weights(trainer.model))
