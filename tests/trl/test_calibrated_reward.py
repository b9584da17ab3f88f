"""TRL's reward models with a calibration loss over the pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

import hf_calib
from hf_calib._errors import InputTypeError, InputValueError
from hf_calib.losses import make_loss
from hf_calib.metrics import expected_calibration_error
from hf_calib.scaling import TemperatureScaling
from tests.helpers.tiny import logged, tokenizer

trl = pytest.importorskip(
    "trl", reason="TRL has an environment of its own: make test-trainers"
)

from hf_calib.trl import CalibrationRewardConfig, CalibrationRewardTrainer  # noqa: E402, TRL may be missing
from hf_calib.trl.reward import pairs_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing` is deprecated:FutureWarning"
)


def model() -> Any:
    torch.manual_seed(0)
    size = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    words = tokenizer()
    settings = LlamaConfig(
        vocab_size=len(words), num_labels=1, pad_token_id=words.pad_token_id, **size
    )
    return LlamaForSequenceClassification(settings)


def pairs(n: int) -> Dataset:
    drawn = torch.randint(
        5, 30, (n, 2, 4), generator=torch.Generator().manual_seed(0)
    ).tolist()
    return Dataset.from_list(
        [{"chosen_ids": chosen, "rejected_ids": rejected} for chosen, rejected in drawn]
    )


def arguments(folder: Path, kind: Any = trl.RewardConfig, **more: Any) -> Any:
    settings: dict[str, Any] = {
        **{
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 2,
        },
        **{
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
        },
        **{
            "save_strategy": "no",
            "disable_dropout": True,
            "gradient_checkpointing": False,
        },
    }
    return kind(output_dir=str(folder), **{**settings, **more})


def config(folder: Path, **more: Any) -> CalibrationRewardConfig:
    return arguments(
        folder, CalibrationRewardConfig, **{"calibration_method": "none", **more}
    )


def trainer(
    folder: Path, rows: Any = None, *, splits: dict[str, Any] | None = None, **more: Any
) -> Any:
    rows = pairs(16) if rows is None else rows
    return CalibrationRewardTrainer(
        model(),
        args=config(folder, **more),
        train_dataset=rows,
        processing_class=tokenizer(),
        **(splits or {}),
    )


def trained(folder: Path, **more: Any) -> Any:
    made = trainer(folder, **more)
    made.train()
    return made


def test_cross_entropy_is_the_stock_trainer(tmp_path: Path) -> None:
    """With margins, and the centring term, which stays with another loss: gamma 0 is the cross entropy."""
    rows, centred = (
        pairs(16).add_column("margin", [i / 8 for i in range(16)]),
        {"center_rewards_coefficient": 0.1},
    )
    ours = trained(tmp_path, rows=rows, **centred)
    args = arguments(tmp_path, **centred)
    theirs = trl.RewardTrainer(
        model(), args=args, train_dataset=rows, processing_class=tokenizer()
    )
    theirs.train()
    for value, other in zip(
        ours.model.parameters(), theirs.model.parameters(), strict=True
    ):
        assert torch.equal(value, other)
    for name in ("loss", "accuracy", "margin", "mean_reward"):
        assert logged(ours, name) == logged(theirs, name)
    focal = trained(
        tmp_path, rows=rows, loss="focal", loss_kwargs={"gamma": 0.0}, **centred
    )
    assert logged(focal, "loss") == pytest.approx(logged(theirs, "loss"), rel=1e-4)


@pytest.mark.parametrize("name", ["dual_focal", "brier", "mmce"])
def test_the_first_loss_is_that_of_the_pairs(name: str, tmp_path: Path) -> None:
    made = trainer(tmp_path, pairs(8), loss=name)
    batch = next(iter(made.get_train_dataloader()))
    found = made.compute_loss(made.model, dict(batch))
    with torch.no_grad():
        rewards = made.model(
            batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits
    logits = pairs_of(rewards, None)
    wanted = make_loss(name)(logits, torch.zeros(len(logits), dtype=torch.long))
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-4, atol=1e-5)
    found.backward()
    assert all(
        value.grad is None or value.grad.isfinite().all()
        for value in made.model.parameters()
    )


def test_margins_are_taken_off_the_chosen_reward() -> None:
    found = pairs_of(
        torch.tensor([[3.0], [1.0], [0.5], [2.0]]), torch.tensor([1.0, 0.0])
    )
    assert found.tolist() == [[2.0, 0.5], [1.0, 2.0]]


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(
        InputTypeError, match=r"args to be a CalibrationRewardConfig, got RewardConfig"
    ):
        CalibrationRewardTrainer(model(), args=arguments(tmp_path))
    with pytest.raises(
        InputValueError,
        match=r"calibration_method to be 'temperature' or 'none' for rewards",
    ):
        config(tmp_path, calibration_method="vector")
    with pytest.raises(InputValueError, match=r"class_weights to be None for rewards"):
        config(tmp_path, class_weights=[1.0, 2.0])
    with pytest.raises(InputValueError, match=r"pos_weight to be None for rewards"):
        config(tmp_path, pos_weight=2.0)
    with pytest.raises(InputValueError, match=r"loss_reduction to be 'mean' for rew"):
        config(tmp_path, loss_reduction="sum")
    with pytest.raises(
        InputValueError, match=r"loss to be a name in LOSSES, got 'focl'"
    ):
        config(tmp_path, loss="focl")


# Calibration


def reward_difference(model: Any, rows: Any) -> torch.Tensor:
    """Of chosen and rejected, (N,) float64."""
    model.eval()

    def reward(ids: list[int]) -> float:
        return float(model(torch.tensor([ids])).logits)

    with torch.no_grad():
        gaps = [reward(row["chosen_ids"]) - reward(row["rejected_ids"]) for row in rows]
    return torch.tensor(gaps, dtype=torch.float64)


def noisy_pairs(n: int) -> Any:
    """Pairs of which a third are the wrong way round for the model."""
    rows, judge = pairs(n), model()
    gaps = reward_difference(judge, rows)
    wrong = torch.rand(n, generator=torch.Generator().manual_seed(1)) < 1 / 3
    swap = (gaps < 0) ^ wrong
    return rows.map(
        lambda row, i: (
            {"chosen_ids": row["rejected_ids"], "rejected_ids": row["chosen_ids"]}
            if swap[i]
            else row
        ),
        with_indices=True,
    )


def test_evaluations_measure_pairs_and_the_temperature_goes_with_the_model(
    tmp_path: Path,
) -> None:
    held_out = noisy_pairs(60)
    made = trained(
        tmp_path / "run",
        splits={"calibration_dataset": held_out, "eval_dataset": pairs(12)},
        calibration_method="temperature",
    )
    gaps = reward_difference(made.model, held_out)
    logits = torch.stack([gaps, torch.zeros_like(gaps)], dim=1).numpy()
    wanted = TemperatureScaling().fit(logits, [0] * 60).temperature_
    assert made.temperature == pytest.approx(wanted, rel=1e-3)
    found = made.evaluate()
    gaps = reward_difference(made.model, made.eval_dataset)
    p = gaps.sigmoid().numpy()
    probs = np.stack([p, 1 - p], axis=1)
    zeros = np.zeros(12, dtype=int)
    assert found["eval_ece"] == pytest.approx(
        expected_calibration_error(probs, zeros), abs=1e-6
    )
    assert found["eval_nll"] == pytest.approx(-np.log(p).mean(), abs=1e-6)
    assert found["eval_accuracy"] == pytest.approx(float((gaps > 0).double().mean()))
    assert found["eval_nll_calibrated"] == pytest.approx(
        -float((gaps / made.temperature).sigmoid().log().mean()), abs=1e-6
    )
    made.save_calibrated_model(tmp_path / "calibrated")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "calibrated")
    gaps = reward_difference(made.model, held_out)
    torch.testing.assert_close(
        reward_difference(loaded, held_out),
        gaps / made.temperature,
        rtol=1e-5,
        atol=1e-7,
    )
    record = json.loads((tmp_path / "calibrated" / "calibration.json").read_text())
    assert (record["of"], record["n_examples"], record["folded"]) == ("pairs", 60, True)
    hf_calib.unfold(loaded)
    assert torch.equal(reward_difference(loaded, held_out), gaps)


def test_pairs_as_texts_are_tokenized_for_the_calibration_too(tmp_path: Path) -> None:
    texts = Dataset.from_list(
        [{"chosen": f"w{i} w2", "rejected": f"w3 w{i}"} for i in range(6, 14)]
    )
    words = tokenizer()
    words.eos_token = "w57"
    made = CalibrationRewardTrainer(
        model(),
        args=config(tmp_path, calibration_method=None),
        train_dataset=texts,
        calibration_dataset=texts,
        processing_class=words,
    )
    made.train()
    assert made.temperature > 0
    assert "chosen_ids" in made.calibration_dataset.column_names


def test_a_held_out_pass_leaves_trls_metrics(tmp_path: Path) -> None:
    rows = noisy_pairs(24)
    made = trained(
        tmp_path, splits={"calibration_dataset": rows, "eval_dataset": pairs(12)}
    )
    alone = made.evaluate()
    logged_alone = made.state.log_history[-1]
    made.held_out_pass()
    assert made.evaluate().keys() == alone.keys()
    for name in ("eval_mean_reward", "eval_margin", "eval_accuracy"):
        assert made.state.log_history[-1][name] == logged_alone[name]


@pytest.mark.filterwarnings("ignore:The weights of loss 'ece_ce' depend")
@pytest.mark.parametrize("name", ["adafocal", "ece_ce"])
def test_adaptive_losses_are_updated_and_resume_where_they_were(
    name: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "loss": name,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "num_train_epochs": 3,
    }
    splits = {"calibration_dataset": noisy_pairs(30), "eval_dataset": pairs(8)}
    whole = trained(tmp_path / "whole", splits=splits, **settings)
    resumed = trainer(tmp_path / "resumed", splits=splits, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    for key, value in whole.calibration_loss.state_dict().items():
        assert torch.equal(value, resumed.calibration_loss.state_dict()[key]), key
    for value, other in zip(
        whole.model.parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(value, other)
