"""`transformers.Trainer(compute_loss_func=loss)`: the same training however the batch is accumulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_calib.losses import CalibrationLoss, make_loss


class Sentences(Dataset[dict[str, Any]]):
    """Eight random sentences."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.words = torch.randint(30, (8, 6), generator=generator)
        self.labels = torch.randint(3, (8,), generator=generator)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.words[i], "labels": self.labels[i]}


class FirstStep(TrainerCallback):
    """Keeps the gradient that the first optimizer step takes."""

    gradient: torch.Tensor

    def on_pre_optimizer_step(self, *args: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        self.gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def tiny_bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def first_step(loss: CalibrationLoss, batch_size: int, folder: Path) -> tuple[float, torch.Tensor]:
    """Loss and gradient of a step over all eight sentences, in micro-batches of this size."""
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=8 // batch_size,
        max_steps=1,
        max_grad_norm=0,  # clipping would hide a wrong scale
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    first = FirstStep()
    trainer = Trainer(tiny_bert(), args, train_dataset=Sentences(), compute_loss_func=loss, callbacks=[first])
    trainer.train()
    return trainer.state.log_history[0]["loss"], first.gradient


@pytest.mark.parametrize("name", ["focal", "adafocal"])
@pytest.mark.slow
def test_accumulation_changes_nothing(name: str, tmp_path: Path) -> None:
    model, data = tiny_bert(), Sentences()
    value = make_loss(name)(model(input_ids=data.words), data.labels)
    value.backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    for batch_size in (8, 2):
        loss, gradient = first_step(make_loss(name), batch_size, tmp_path)
        assert loss == pytest.approx(value.item(), abs=1e-6)
        assert gradient.norm().item() == pytest.approx(want.norm().item(), rel=1e-6)
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("outputs", ["object", "mapping", "tuple"])
def test_any_output_of_a_model(outputs: str) -> None:
    model, data = tiny_bert(), Sentences()
    full = model(input_ids=data.words)
    given = {"object": full, "mapping": {"logits": full.logits}, "tuple": (full.logits, None)}[outputs]
    loss = make_loss("focal")
    assert loss(given, data.labels) == loss(full.logits, data.labels)
