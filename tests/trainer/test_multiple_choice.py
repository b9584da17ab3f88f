"""Multiple choice: trained like the stock Trainer, measured and calibrated, and not folded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments


def make_model() -> BertForMultipleChoice:
    set_seed(0)
    size: Any = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 50}
    return BertForMultipleChoice(
        BertConfig(**size, num_hidden_layers=1, num_attention_heads=2)
    )


def test_it_trains_like_the_stock_trainer_and_is_calibrated(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 64)
    ids = rng.integers(2, 50, (64, 4, 6))
    ids[np.arange(64), labels, 0] = 1  # what the right choice has
    labels[32::3] = (labels[32::3] + 1) % 4  # not all of the other rows can be right
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})
    settings: Any = {
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.01,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
    }
    stock, ours = make_model(), make_model()
    Trainer(
        stock,
        TrainingArguments(str(tmp_path / "stock"), **settings),
        train_dataset=rows.select(range(32)),
    ).train()
    args = CalibrationTrainingArguments(
        str(tmp_path / "ours"),
        loss="cross_entropy",
        calibration_method="temperature",
        **settings,
    )
    trainer = CalibrationTrainer(
        ours,
        args,
        train_dataset=rows.select(range(32)),
        calibration_dataset=rows.select(range(32, 48)),
        eval_dataset=rows.select(range(48, 64)),
    )
    trainer.train()
    for one, other in zip(stock.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    metrics = trainer.evaluate()
    assert metrics["eval_nll"] == pytest.approx(metrics["eval_loss"], rel=1e-5)
    assert metrics["eval_nll_calibrated"] != metrics["eval_nll"]
    assert metrics["eval_accuracy_calibrated"] == metrics["eval_accuracy"]
    with pytest.raises(ValueError, match="divide the logits outside the model instead"):
        trainer.save_calibrated_model(tmp_path / "calibrated")
    assert not (tmp_path / "calibrated").exists()
