"""`for_cross_encoder`: sentence-transformers' trainer with our losses trains as a plain loop does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from hf_calib.losses import cross_entropy, focal, for_cross_encoder, make_loss
from tests.helpers.tiny import tiny_bert, tokenizer

PAIRS = {
    "query": ["w1 w2", "w3", "w9 w4"] * 8,
    "answer": ["w4 w5", "w6 w7 w8", "w1"] * 8,
}


def cross_encoder(folder: Path, num_labels: int) -> Any:
    from sentence_transformers import CrossEncoder

    tiny_bert(num_labels=num_labels).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return CrossEncoder(str(folder), num_labels=num_labels, device="cpu")


def trained(
    model: Any, loss: Any, labels: list[int], folder: Path
) -> dict[str, torch.Tensor]:
    from sentence_transformers import CrossEncoderTrainer, CrossEncoderTrainingArguments

    args = CrossEncoderTrainingArguments(
        str(folder), num_train_epochs=1, per_device_train_batch_size=4, report_to="none", use_cpu=True, seed=0,
        save_strategy="no", disable_tqdm=True, learning_rate=1e-3,
    )  # fmt: skip
    rows = Dataset.from_dict({**PAIRS, "label": labels})
    CrossEncoderTrainer(model=model, args=args, train_dataset=rows, loss=loss).train()
    return dict(model.model.state_dict())


@pytest.mark.parametrize("num_labels", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_cross_entropy_trains_as_theirs(num_labels: int, tmp_path: Path) -> None:
    from sentence_transformers.cross_encoder.losses import (
        BinaryCrossEntropyLoss,
        CrossEntropyLoss,
    )

    model = cross_encoder(tmp_path / "model", num_labels)
    labels = [i % max(2, num_labels) for i in range(24)]
    other = copy.deepcopy(model)
    theirs = (BinaryCrossEntropyLoss if num_labels == 1 else CrossEntropyLoss)(other)
    ours = trained(
        model, for_cross_encoder(model, cross_entropy()), labels, tmp_path / "ours"
    )
    for name, wanted in trained(other, theirs, labels, tmp_path / "theirs").items():
        torch.testing.assert_close(ours[name], wanted, rtol=0, atol=1e-6)


def test_bad_input(tmp_path: Path) -> None:
    model = cross_encoder(tmp_path, 1)
    with pytest.raises(
        TypeError, match="model to be a CrossEncoder, got BertForSequenceClassification"
    ):
        for_cross_encoder(tiny_bert(), focal())
    with pytest.raises(TypeError, match="loss to be a CalibrationLoss, got 'focal'"):
        for_cross_encoder(model, "focal")
    with pytest.raises(ValueError, match="dual_focal"):
        for_cross_encoder(model, make_loss("dual_focal"))
