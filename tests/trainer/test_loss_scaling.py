"""The loss of an optimizer step is the mean over its global batch, however it is cut (in one process)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer

from hf_calib import CalibrationTrainer
from tests.helpers.runs import (
    CLASS_WEIGHTS,
    GLOBAL_BATCH,
    LOGGED,
    TOLERANCE,
    assert_equal_runs,
    make_trainer,
    run,
)
from tests.helpers.tiny import assert_same, differences, logged, tiny_trainer, weights


@pytest.mark.parametrize(
    "name",
    [
        "focal weighted",
        "tokens adafocal weighted",
        "soft cross_entropy weighted",
        "several pos_weight",
    ],
)
def test_accumulation_changes_nothing(name: str, tmp_path: Path) -> None:
    n = 2 * GLOBAL_BATCH + 6  # the last step has 6 rows, which are a mean too
    whole = run(name, tmp_path, 8, 1, n=n)
    assert len(whole["loss"]) == 3
    assert_equal_runs(run(name, tmp_path, 4, 2, n=n), whole)
    assert_equal_runs(run(name, tmp_path, 1, 8, n=n), whole)


@pytest.mark.parametrize(
    "name",
    [
        "cross_entropy",
        "tokens cross_entropy weighted",
        "soft cross_entropy weighted",
    ],
)
def test_the_training_is_the_one_done_by_hand(name: str, tmp_path: Path) -> None:
    trainer = make_trainer(name, tmp_path, 2, 4)
    model = copy.deepcopy(trainer.model)
    whole = make_trainer(name, tmp_path, 8, 1)
    torch.manual_seed(whole.args.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=trainer.args.learning_rate)
    class_weights = torch.tensor(CLASS_WEIGHTS).double() if "weighted" in name else None
    losses, norms = [], []
    for batch in whole.get_train_dataloader():
        logits, labels = model(input_ids=batch["input_ids"]).logits, batch["labels"]
        if labels.is_floating_point():
            labels = labels.to(logits.dtype)
        else:
            labels = labels.reshape(-1)
        loss = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            labels,
            weight=class_weights,
        )
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        norms.append(torch.stack(gradients).norm().item())
        optimizer.step()
        losses.append(loss.item())
    trainer.train()
    assert logged(trainer, "loss") == pytest.approx(losses, rel=LOGGED)
    assert logged(trainer, "grad_norm") == pytest.approx(norms, rel=TOLERANCE)
    largest, drift = differences(weights(trainer.model), weights(model))
    assert largest < TOLERANCE
    assert drift < TOLERANCE / 10


def test_cross_entropy_is_the_stock_trainer_where_that_is_right(tmp_path: Path) -> None:
    ours = make_trainer("cross_entropy", tmp_path, 8, 1)
    model = copy.deepcopy(ours.model)
    stock = Trainer(model, ours.args, train_dataset=ours.train_dataset)
    ours.train()
    stock.train()
    assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), rel=LOGGED)
    assert differences(weights(ours.model), weights(stock.model))[0] < 1e-14


def test_label_smoothing_factor_is_the_loss_of_that_name(tmp_path: Path) -> None:
    by_factor = tiny_trainer(
        tmp_path, label_smoothing_factor=0.1, temperature_criterion="none"
    )
    by_name = tiny_trainer(
        tmp_path,
        loss="label_smoothing",
        loss_kwargs={"smoothing": 0.1},
        temperature_criterion="none",
    )
    for trainer in (by_factor, by_name):
        trainer.train()
    assert_same(weights(by_factor.model), weights(by_name.model))
    assert by_factor.calibration_loss.name == "label_smoothing"


class OwnLoss(CalibrationTrainer):
    """The mean over the micro-batch, as transformers' documentation shows it."""

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


class NormalisedLoss(CalibrationTrainer):
    """A sum over the micro-batch, normalised over the whole batch; it says so."""

    loss_is_scaled_for_ga = True

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        total = F.cross_entropy(outputs.logits, labels, reduction="sum")
        loss = total / (
            len(labels) if num_items_in_batch is None else num_items_in_batch
        )
        return (loss, outputs) if return_outputs else loss


class ExtendedMean(CalibrationTrainer):
    """Ours as a mean over the micro-batch, since the count is not passed on."""

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        return super().compute_loss(model, inputs, return_outputs)


@pytest.mark.parametrize("kind", [OwnLoss, NormalisedLoss, ExtendedMean])
def test_a_loss_of_ones_own_is_a_mean_over_the_step(
    kind: type[CalibrationTrainer], tmp_path: Path
) -> None:
    if kind is NormalisedLoss and not hasattr(Trainer, "loss_is_scaled_for_ga"):
        pytest.skip("the flag came with transformers 5.19")
    made = make_trainer("cross_entropy", tmp_path, 2, 4)
    cut = kind(made.model, made.args, train_dataset=made.train_dataset)
    cut.train()
    whole = make_trainer("cross_entropy", tmp_path, 8, 1)
    whole.train()
    assert logged(cut, "loss") == pytest.approx(logged(whole, "loss"), rel=LOGGED)
    assert logged(cut, "grad_norm") == pytest.approx(
        logged(whole, "grad_norm"), rel=TOLERANCE
    )
    assert differences(weights(cut.model), weights(whole.model))[0] < TOLERANCE


@pytest.mark.skipif(
    not hasattr(Trainer, "loss_is_scaled_for_ga"), reason="came with transformers 5.19"
)
def test_what_a_trainer_is_told_of_its_scaling_holds(tmp_path: Path) -> None:
    """Of this trainer alone, not of its class; and after a training as before it."""
    made = make_trainer("cross_entropy", tmp_path, 2, 4)
    told = type("Told", (NormalisedLoss,), {"loss_is_scaled_for_ga": None})
    cut = told(made.model, made.args, train_dataset=made.train_dataset)
    cut.loss_is_scaled_for_ga = True
    cut.train()
    whole = make_trainer("cross_entropy", tmp_path, 8, 1)
    whole.train()
    assert logged(cut, "loss") == pytest.approx(logged(whole, "loss"), rel=LOGGED)
    assert (cut.loss_is_scaled_for_ga, cut.model_accepts_loss_kwargs) == (True, False)
    assert (whole.loss_is_scaled_for_ga, whole.model_accepts_loss_kwargs) == (
        None,
        False,
    )
