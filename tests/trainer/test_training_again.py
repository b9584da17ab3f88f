"""A second `train()` begins anew; the best model brings its table; accumulation and resuming go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_calib.trainer.saving import LOSS_STATE_NAME
from tests.helpers.tiny import assert_same, logged, tiny_trainer, weights


class AtStart(TrainerCallback):
    trainer: Any = None
    seen: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        config = self.trainer.model.config
        self.seen = (
            self.trainer.last_evaluation,
            self.trainer.temperature,
            hasattr(config, "calibration"),
        )


def test_what_was_found_before_is_forgotten(tmp_path: Path) -> None:
    trainer, callback = tiny_trainer(tmp_path), AtStart()
    callback.trainer = trainer
    trainer.add_callback(callback)
    for _ in range(2):
        trainer.train()
        assert callback.seen == (None, None, False)
        assert trainer.last_evaluation is not None
        assert trainer.temperature is not None


@pytest.mark.parametrize("sizes", [(12, 5), (5, 12)])
def test_the_calibration_rows_may_be_others_in_a_later_training(
    sizes: tuple[int, int], tmp_path: Path
) -> None:
    trainer = tiny_trainer(
        tmp_path, loss="adafocal", gamma_update_steps=2, gamma_update_samples=8
    )
    rows = list(trainer.calibration_dataset)
    trainer.calibration_dataset = []
    for size in sizes:
        trainer.calibration_dataset[:] = rows[:size]
        trainer.train()
        used = trainer.calibration_loss.get_buffer("counts").sum()
        # The bins are open below, so the least confidence is in none.
        assert used == min(size, 8) - 1


@pytest.mark.parametrize("loss", ["adafocal", "ece_ce"])
def test_the_best_model_brings_the_table_that_it_was_trained_with(
    loss: str, tmp_path: Path
) -> None:
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    trainer = tiny_trainer(
        tmp_path,
        loss=loss,
        load_best_model_at_end=True,
        temperature_criterion="none",
        **settings,
    )
    trainer.train()
    nll = logged(trainer, "eval_nll")
    assert trainer.state.best_metric == min(nll) < nll[-1]
    assert trainer.state.best_model_checkpoint == str(
        tmp_path / f"checkpoint-{nll.index(min(nll)) + 1}"
    )
    best = Path(trainer.state.best_model_checkpoint)
    assert_same(
        load_file(best / LOSS_STATE_NAME), trainer.calibration_loss.state_dict()
    )
    last = load_file(tmp_path / "checkpoint-4" / LOSS_STATE_NAME)
    assert any(
        not value.equal(load_file(best / LOSS_STATE_NAME)[name])
        for name, value in last.items()
    )
    assert trainer.evaluate()["eval_nll"] == min(nll)


def test_the_best_model_keeps_its_table_if_it_is_not_loaded(tmp_path: Path) -> None:
    each_step: dict[str, Any] = {
        f"{what}_{name}": value
        for what in ("eval", "save")
        for name, value in {"strategy": "steps", "steps": 1}.items()
    }
    best = {"metric_for_best_model": "eval_nll", "greater_is_better": False}
    trainer = tiny_trainer(
        tmp_path,
        loss="adafocal",
        temperature_criterion="none",
        **each_step,
        **best,
    )
    trainer.train()
    last = tmp_path / "checkpoint-4"
    assert trainer.state.best_model_checkpoint not in (None, str(last))
    table = load_file(last / LOSS_STATE_NAME)
    assert_same(table, trainer.calibration_loss.state_dict())


@pytest.mark.slow
def test_a_training_resumes_amid_an_epoch_whose_last_step_accumulates_less(
    tmp_path: Path,
) -> None:
    """9 micro-batches, the last one smaller, are 5 steps: 2 + 2 + 2 + 2 + 1."""
    settings = {
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    settings |= {
        "loss": "adafocal",
        "gamma_update_steps": 1,
        "temperature_criterion": "none",
    }
    whole = tiny_trainer(tmp_path, n=(35, 40, 24), **settings)
    whole.train()
    assert whole.state.global_step == 10
    for step in (3, 5, 8):  # amid an epoch, after its last step, amid the next one
        resumed = tiny_trainer(tmp_path, n=(35, 40, 24), **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert_same(weights(resumed.model), weights(whole.model))
        assert_same(
            resumed.calibration_loss.state_dict(), whole.calibration_loss.state_dict()
        )
        assert logged(resumed, "loss") == logged(whole, "loss")
