"""`CalibrationMixin` over TRL's RewardTrainer: its data, its collator and its loop, with a calibration loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import LlamaConfig, LlamaForSequenceClassification

from hf_calib.trainer import CalibrationConfig, CalibrationMixin
from tests.helpers.tiny import tokenizer

trl = pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trainers")

# TRL 1.16 sets it in each config; transformers renamed it.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")


class CalibratedRewards(CalibrationMixin, trl.RewardTrainer):
    """A reward model's (chosen, rejected) as two classes, the first of which is right."""

    def logits_and_labels(self, model: Any, inputs: dict[str, Any]) -> tuple[Any, Any, Tensor]:
        rewards = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0]
        logits = torch.stack(rewards.chunk(2), dim=1)
        return {"logits": logits}, logits, torch.zeros(len(logits), dtype=torch.long)


def model() -> Any:
    torch.manual_seed(0)
    words = tokenizer()
    return LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_labels=1,
            pad_token_id=words.pad_token_id,
        )
    )


def pairs(n: int) -> Dataset:
    found = torch.Generator().manual_seed(0)
    drawn = torch.randint(5, 30, (n, 2, 4), generator=found).tolist()
    return Dataset.from_dict(
        {"chosen_ids": [chosen for chosen, _ in drawn], "rejected_ids": [rejected for _, rejected in drawn]}
    )


def arguments(folder: Path) -> Any:
    return trl.RewardConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_dropout=True,
        gradient_checkpointing=False,
    )


def test_cross_entropy_over_pairs_trains_as_the_stock_reward_trainer(tmp_path: Path) -> None:
    """-log sigmoid(r_chosen - r_rejected) is the cross entropy of the two rewards; an evaluation measures the pairs."""
    ends = []
    for kind, more in (
        (trl.RewardTrainer, {}),
        (CalibratedRewards, {"calibration": CalibrationConfig(calibration_method="none")}),
    ):
        trainer = kind(
            model(),
            args=arguments(tmp_path),
            train_dataset=pairs(16),
            eval_dataset=pairs(8),
            processing_class=tokenizer(),
            **more,
        )
        trainer.train()
        ends.append({name: value.detach().clone() for name, value in trainer.model.named_parameters()})
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-5, atol=1e-6)
    assert 0 <= trainer.evaluate()["eval_ece"] <= 1
    assert trainer.last_evaluation is not None
    assert len(trainer.last_evaluation.raw.confidences) == 8
