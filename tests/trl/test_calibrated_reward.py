"""TRL's reward models with a calibration loss over the pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_calib._errors import InputTypeError, InputValueError
from hf_calib.losses import LOSSES, AdaptiveLoss, make_loss
from tests.helpers.tiny import logged, tokenizer

trl = pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trl")

from hf_calib.trl import CalibrationRewardConfig, CalibrationRewardTrainer  # noqa: E402, TRL may be missing
from hf_calib.trl.reward import _pairs  # noqa: E402
from tests.trl.test_reward import arguments, model, pairs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")

ADAPT = [name for name, entry in LOSSES.items() if isinstance(entry.constructor(), AdaptiveLoss)]


def trained(folder: Path, kind: Any, **more: Any) -> Any:
    stock = arguments(folder)
    if kind is CalibrationRewardTrainer:
        names = (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "num_train_epochs",
            "learning_rate",
        )
        same = {name: getattr(stock, name) for name in names}
        stock = CalibrationRewardConfig(
            output_dir=str(folder),
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            disable_dropout=True,
            gradient_checkpointing=False,
            **same,
            **more,
        )
    made = kind(model(), args=stock, train_dataset=pairs(16), processing_class=tokenizer())
    made.train()
    return made


def test_cross_entropy_is_the_stock_trainer(tmp_path: Path) -> None:
    ours, theirs = trained(tmp_path, CalibrationRewardTrainer), trained(tmp_path, trl.RewardTrainer)
    for value, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(value, other)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ADAPT])
def test_the_first_loss_is_that_of_the_pairs(name: str, tmp_path: Path) -> None:
    made = CalibrationRewardTrainer(
        model(),
        args=CalibrationRewardConfig(
            output_dir=str(tmp_path),
            report_to="none",
            use_cpu=True,
            bf16=False,
            loss=name,
            disable_dropout=True,
            gradient_checkpointing=False,
        ),
        train_dataset=pairs(8),
        processing_class=tokenizer(),
    )
    batch = next(iter(made.get_train_dataloader()))
    found = made.compute_loss(made.model, dict(batch))
    with torch.no_grad():
        rewards = made.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logits = _pairs(rewards, None)
    wanted = make_loss(name)(logits, torch.zeros(len(logits), dtype=torch.long))
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-4, atol=1e-5)
    found.backward()
    assert all(value.grad is None or value.grad.isfinite().all() for value in made.model.parameters())


def test_focal_trains_and_trls_metrics_stay(tmp_path: Path) -> None:
    made = trained(tmp_path, CalibrationRewardTrainer, loss="focal", loss_kwargs={"gamma": 2.0})
    assert len(logged(made, "accuracy")) == len(logged(made, "loss")) > 1


def test_margins_are_taken_off_the_chosen_reward() -> None:
    found = _pairs(torch.tensor([[3.0], [1.0], [0.5], [2.0]]), torch.tensor([1.0, 0.0]))
    assert found.tolist() == [[2.0, 0.5], [1.0, 2.0]]


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputTypeError, match=r"args to be a CalibrationRewardConfig, got RewardConfig"):
        CalibrationRewardTrainer(model(), args=arguments(tmp_path))
    with pytest.raises(InputValueError, match=r"train without held-out predictions, got 'adafocal'"):
        CalibrationRewardConfig(output_dir=str(tmp_path), loss="adafocal", use_cpu=True, bf16=False)
