"""A search trains what its trials ask for, by a metric's name; and changed arguments are followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from transformers import TrainerCallback

from hf_calib import CalibrationTrainer
from tests.helpers.tiny import (
    arguments,
    assert_same,
    logged,
    sequences,
    tiny_bert,
    tiny_trainer,
    weights,
)

optuna.logging.disable_default_handler()
SETTINGS: dict[str, Any] = {"eval_strategy": "epoch", "num_train_epochs": 2}
TRIALS: list[dict[str, Any]] = [
    {"loss": "focal", "loss_kwargs": {"gamma": 4.0}},
    {"loss": "adafocal", "loss_kwargs": {"n_bins": 5}},
    {"loss": "adafocal", "loss_kwargs": {"n_bins": 5}},  # with a table of its own
]


class Ends(TrainerCallback):
    """What each training was and ended with."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.weights: list[dict[str, Any]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            self.losses.append(args.loss)
            self.weights.append(weights(kwargs["model"]))


def searching(folder: Path, **settings: Any) -> tuple[CalibrationTrainer, Ends]:
    model, ends = tiny_bert(), Ends()
    train, calibration, evaluation = (
        sequences(model, n, seed=i + 1) for i, n in enumerate((16, 40, 24))
    )
    trainer = CalibrationTrainer(
        model_init=lambda: tiny_bert(),
        args=arguments(folder, **{**SETTINGS, **settings}),
        train_dataset=train,
        calibration_dataset=calibration,
        eval_dataset=evaluation,
        callbacks=[ends],
    )
    return trainer, ends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "settings"),
    [
        (None, {}),
        ("eval_nll_calibrated", {"calibration_strategy": "evaluate"}),
        ("eval_nll_calibrated", {"eval_strategy": "no"}),
    ],
)
def test_each_trial_is_a_training_of_its_own(
    objective: str | None, settings: dict[str, Any], tmp_path: Path
) -> None:
    trainer, ends = searching(tmp_path, **settings)
    best = trainer.hyperparameter_search(
        lambda trial: {
            "learning_rate": trial.suggest_float("rate", 1e-4, 1e-2),
            **TRIALS[trial.number],
        },
        objective,
        n_trials=len(TRIALS),
        backend="optuna",
        sampler=optuna.samplers.RandomSampler(seed=0),
        storage=f"sqlite:///{tmp_path}/study.db",
        study_name="s",
    )
    trials = optuna.load_study(
        study_name="s", storage=f"sqlite:///{tmp_path}/study.db"
    ).trials
    assert best.objective == min(trial.value for trial in trials)
    for trial, asked, found in zip(trials, TRIALS, ends.weights, strict=True):
        alone, own = searching(
            tmp_path, **settings, **asked, learning_rate=trial.params["rate"]
        )
        alone.train()
        assert_same(own.weights[0], found)
        assert trial.value == pytest.approx(
            logged(alone, objective or "eval_nll")[-1], rel=1e-6
        )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"compute_objective": "eval_nnl"},
            "the name of one, got 'eval_nnl'; did you mean 'eval_nll'",
        ),
        (
            {"compute_objective": "nll"},
            "the name of one, got 'nll'; known: eval_accuracy",
        ),
    ],
)
def test_the_objective_is_checked_before_any_training(
    asked: dict[str, Any], message: str, tmp_path: Path
) -> None:
    trainer, ends = searching(tmp_path)
    with pytest.raises(ValueError, match=message):
        trainer.hyperparameter_search(
            lambda trial: TRIALS[0], backend="optuna", **asked
        )
    assert ends.losses == []


@pytest.mark.slow
def test_a_trial_has_no_settings_of_an_earlier_one(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [
        {"calibration_method": "none", "loss": "focal", "loss_kwargs": {"gamma": 4.0}},
        {"learning_rate": 1e-3},
    ]
    settings: dict[str, Any] = {"eval_strategy": "no", "max_steps": 1}
    trainer, ends = searching(tmp_path, **settings)
    trainer.hyperparameter_search(
        lambda trial: asked[trial.number], n_trials=2, backend="optuna"
    )
    assert ends.losses == ["focal", "cross_entropy"]
    assert trainer.temperature is not None


def test_label_smoothing_that_was_set_since_is_that_of_the_loss(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, loss="cross_entropy", max_steps=1)
    trainer.args.label_smoothing_factor = 0.2
    trainer.train()
    assert trainer.calibration_loss.hyperparameters == {"smoothing": 0.2}


def callbacks(trainer: CalibrationTrainer, kind: type[TrainerCallback]) -> list[Any]:
    return [
        callback
        for callback in trainer.callback_handler.callbacks
        if isinstance(callback, kind)
    ]
