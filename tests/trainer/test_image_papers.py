"""Training as the image papers do: summed losses, clipped gradients, momentum, a learning rate with milestones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments
from hf_calib.experiments import parse_arguments
from tests.helpers.tiny import arguments, assert_same, differences, logged, sequences, tiny_bert, weights

SGD = {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.01, "loss": "cross_entropy"}


def make_trainer(folder: Path, n: int = 16, **overrides: Any) -> CalibrationTrainer:
    model = tiny_bert().double()
    args = arguments(folder, **{**SGD, "calibration_method": "none", **overrides})
    return CalibrationTrainer(model, args, train_dataset=sequences(model, n))


def test_a_training_is_the_papers_loop(tmp_path: Path) -> None:
    settings = {"weight_decay": 5e-4, "max_grad_norm": 2.0, "loss_reduction": "sum", "num_train_epochs": 4}
    trainer = make_trainer(tmp_path, lr_milestones=[1, 3], **settings)
    model = copy.deepcopy(trainer.model)
    others = [weight for name, weight in model.named_parameters() if name.endswith("bias") or "Norm" in name]
    decayed = [weight for weight in model.parameters() if not any(weight is other for other in others)]
    groups = [
        {"params": decayed, "weight_decay": 5e-4},
        {"params": others},
    ]  # biases are not decayed by the Trainer
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.1)
    torch.manual_seed(trainer.args.seed)
    loader, rates, losses = make_trainer(tmp_path).get_train_dataloader(), [], []
    for epoch in range(4):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = F.cross_entropy(
                model(input_ids=batch["input_ids"]).logits, batch["labels"], reduction="sum"
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            losses.append(loss.item())
            rates.append(schedule.get_last_lr()[0])
        schedule.step()
    trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx(rates)
    assert logged(trainer, "loss") == pytest.approx(losses, rel=1e-3)  # the log rounds
    assert max(logged(trainer, "grad_norm")) > 2.0  # something was clipped
    assert differences(weights(trainer.model), weights(model))[0] < 1e-12


def test_a_sum_is_the_mean_times_the_rows_of_the_step(tmp_path: Path) -> None:
    mean = make_trainer(tmp_path, optim_args=None)
    mean.train()
    # 8 rows a step, in micro-batches of 2.
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    summed = make_trainer(tmp_path, optim_args=None, loss_reduction="sum", learning_rate=0.01 / 4, **cut)
    summed.train()
    assert logged(summed, "loss") == pytest.approx([4 * loss for loss in logged(mean, "loss")], rel=1e-3)
    assert differences(weights(summed.model), weights(mean.model))[0] < 1e-12
    assert summed.evaluate(sequences(tiny_bert(), 8))["eval_loss"] == pytest.approx(
        mean.evaluate(sequences(tiny_bert(), 8))["eval_loss"], rel=1e-6
    )  # of an evaluation it is the mean


@pytest.mark.deep
@pytest.mark.parametrize("cut", [(4, 1), (2, 2)])
def test_milestones_are_epochs_however_a_batch_is_cut(cut: tuple[int, int], tmp_path: Path) -> None:
    micro, accumulation = cut
    trainer = make_trainer(
        tmp_path,
        n=18,  # 5 steps an epoch, the last of them smaller
        num_train_epochs=3,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        lr_milestones=[1, 1.6],
        lr_decay=0.5,
    )
    trainer.train()
    expected = [0.01] * 5 + [0.005] * 3 + [0.0025] * 7
    assert logged(trainer, "learning_rate") == pytest.approx(expected)


@pytest.mark.deep
def test_the_rate_rises_before_the_first_milestone(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, num_train_epochs=2, warmup_steps=4, lr_milestones=[1])
    trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx([0, 0.0025, 0.005, 0.0075] + [0.001] * 4)


@pytest.mark.deep
def test_milestones_that_are_never_reached_are_said(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, num_train_epochs=2, lr_milestones=[1, 2, 150])
    with pytest.warns(UserWarning, match=r"The milestones \[2, 150\] lie at or after the end of 2 epochs"):
        trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx([0.01] * 4 + [0.001] * 4)


@pytest.mark.deep
def test_the_schedule_resumes(tmp_path: Path) -> None:
    settings = {"num_train_epochs": 3, "lr_milestones": [1, 2], "save_strategy": "steps", "save_steps": 5}
    whole = make_trainer(tmp_path / "a", **settings)
    whole.train()
    resumed = make_trainer(tmp_path / "b", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-5"))
    assert logged(resumed, "learning_rate") == logged(whole, "learning_rate")
    assert logged(resumed, "learning_rate")[-4:] == pytest.approx([1e-4] * 4)
    assert_same(weights(resumed.model), weights(whole.model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_reduction": "summ"}, r"expected loss_reduction to be one of .*'summ'; did you mean 'sum'"),
        ({"lr_milestones": [3, 2]}, "expected lr_milestones to be epochs that rise, from above 0"),
        ({"lr_milestones": []}, "expected lr_milestones to be epochs that rise"),
        ({"lr_milestones": ["1,x"]}, "expected lr_milestones to be epochs that rise"),
        ({"lr_milestones": 0}, "expected lr_milestones to be epochs that rise"),
        ({"lr_milestones": [0, 2]}, "expected lr_milestones to be epochs that rise"),
        ({"lr_milestones": [1], "lr_decay": 1.0}, r"expected lr_decay to be in \(0, 1\), got 1.0"),
        (
            {"lr_milestones": [1], "lr_scheduler_type": "cosine"},
            "got lr_scheduler_type='cosine'; leave one of",
        ),
        ({"lr_milestones": [1], "max_steps": 9}, "got max_steps=9; set num_train_epochs instead"),
    ],
)
def test_wrong_schedules_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        CalibrationTrainingArguments(str(tmp_path), report_to="none", **settings)


@pytest.mark.deep
@pytest.mark.parametrize("written", [["150", "250"], ["150,250"], "150,250", [150, 250], (150.0, 250)])
def test_milestones_are_written_with_spaces_or_commas(written: Any, tmp_path: Path) -> None:
    assert CalibrationTrainingArguments(str(tmp_path), lr_milestones=written).lr_milestones == [150, 250]


def test_milestones_are_read_from_the_command_line(tmp_path: Path) -> None:
    typed = ["--output_dir", str(tmp_path), "--lr_milestones", "150,250"]
    (args,) = parse_arguments([CalibrationTrainingArguments], typed)
    assert args.lr_milestones == [150, 250]
