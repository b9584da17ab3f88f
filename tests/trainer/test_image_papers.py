"""Training as the image papers do: summed losses, clipped gradients, momentum."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hf_calib import CalibrationTrainer
from tests.helpers.tiny import (
    arguments,
    differences,
    logged,
    sequences,
    tiny_bert,
    weights,
)

SGD = {
    "optim": "sgd",
    "optim_args": "momentum=0.9",
    "learning_rate": 0.01,
    "loss": "cross_entropy",
}


def make_trainer(folder: Path, n: int = 16, **overrides: Any) -> CalibrationTrainer:
    model = tiny_bert().double()
    args = arguments(folder, **{**SGD, "calibration_method": "none", **overrides})
    return CalibrationTrainer(model, args, train_dataset=sequences(model, n))


def test_a_training_is_the_papers_loop(tmp_path: Path) -> None:
    settings = {
        "weight_decay": 5e-4,
        "max_grad_norm": 2.0,
        "loss_reduction": "sum",
        "num_train_epochs": 4,
    }
    settings["lr_scheduler_type"] = "constant"
    trainer = make_trainer(tmp_path, **settings)
    model = copy.deepcopy(trainer.model)
    others = [
        weight
        for name, weight in model.named_parameters()
        if name.endswith("bias") or "Norm" in name
    ]
    decayed = [
        weight
        for weight in model.parameters()
        if not any(weight is other for other in others)
    ]
    groups = [
        {"params": decayed, "weight_decay": 5e-4},
        {"params": others},
    ]  # biases are not decayed by the Trainer
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    torch.manual_seed(trainer.args.seed)
    loader, losses = make_trainer(tmp_path).get_train_dataloader(), []
    for epoch in range(4):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = F.cross_entropy(
                model(input_ids=batch["input_ids"]).logits,
                batch["labels"],
                reduction="sum",
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            losses.append(loss.item())
    trainer.train()
    assert logged(trainer, "loss") == pytest.approx(losses, rel=1e-3)  # the log rounds
    assert max(logged(trainer, "grad_norm")) > 2.0  # something was clipped
    assert differences(weights(trainer.model), weights(model))[0] < 1e-12


def test_a_sum_is_the_mean_times_the_rows_of_the_step(tmp_path: Path) -> None:
    mean = make_trainer(tmp_path, optim_args=None)
    mean.train()
    # 8 rows a step, in micro-batches of 2.
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    summed = make_trainer(
        tmp_path, optim_args=None, loss_reduction="sum", learning_rate=0.01 / 4, **cut
    )
    summed.train()
    assert logged(summed, "loss") == pytest.approx(
        [4 * loss for loss in logged(mean, "loss")], rel=1e-3
    )
    assert differences(weights(summed.model), weights(mean.model))[0] < 1e-12
    assert summed.evaluate(sequences(tiny_bert(), 8))["eval_loss"] == pytest.approx(
        mean.evaluate(sequences(tiny_bert(), 8))["eval_loss"], rel=1e-6
    )  # of an evaluation it is the mean
