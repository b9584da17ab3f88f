"""A search trains what its trials ask for, and changed arguments are followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from transformers import TrainerCallback

from hf_calib import AdaFocalCallback, CalibrationTrainer, TemperatureScalingCallback
from hf_calib.losses import AdaptiveLoss
from tests.helpers.tiny import arguments, assert_same, sequences, tiny_bert, tiny_trainer, weights

optuna.logging.disable_default_handler()
SETTINGS: dict[str, Any] = {"eval_strategy": "epoch", "num_train_epochs": 2}
# What a trial asks for, and the hyperparameters that it gives the loss where args have focal's gamma as 2.5.
TRIALS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"loss": "focal", "loss_gamma": 4.0}, {"gamma": 4.0}),
    ({"loss": "adafocal", "loss_n_bins": 5}, {"n_bins": 5}),
    ({"loss": "adafocal", "loss_n_bins": 5}, {"n_bins": 5}),
    ({"loss": "cross_entropy", "loss_gamma": 4.0}, {}),
    ({"loss": "focal"}, {"gamma": 2.5}),
    ({}, {"gamma": 2.5}),
]


class Seen(TrainerCallback):
    """What each training began with and ended with."""

    def __init__(self) -> None:
        self.trainer: CalibrationTrainer
        self.losses: list[tuple[str, dict[str, Any]]] = []
        self.nll: list[float] = []
        self.weights: list[dict[str, Any]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        loss = self.trainer.calibration_loss
        self.losses.append((loss.name, loss.hyperparameters))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            self.weights.append(weights(kwargs["model"]))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        if self.trainer.is_in_train and "eval_nll_calibrated" not in metrics:
            self.nll.append(metrics["eval_nll"])


def searching(folder: Path, **settings: Any) -> tuple[CalibrationTrainer, Seen]:
    model, seen = tiny_bert(), Seen()
    train, calibration, evaluation = (sequences(model, n, seed=i + 1) for i, n in enumerate((16, 40, 24)))
    trainer = CalibrationTrainer(
        model_init=lambda: tiny_bert(),
        args=arguments(folder, **{**SETTINGS, **settings}),
        train_dataset=train,
        calibration_dataset=calibration,
        eval_dataset=evaluation,
        callbacks=[seen],
    )
    seen.trainer = trainer
    return trainer, seen


def space(trial: optuna.Trial) -> dict[str, Any]:
    """The loss does not come first."""
    asked = {**TRIALS[trial.number][0], "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2)}
    return dict(sorted(asked.items(), reverse=True))


@pytest.mark.slow
def test_each_trial_is_a_training_of_its_own(tmp_path: Path) -> None:
    base = {"loss": "focal", "loss_kwargs": {"gamma": 2.5}}
    trainer, seen = searching(tmp_path, **base)
    sampler = optuna.samplers.RandomSampler(seed=0)
    study = f"sqlite:///{tmp_path}/study.db"
    best = trainer.hyperparameter_search(
        space, n_trials=len(TRIALS), backend="optuna", sampler=sampler, storage=study, study_name="s"
    )
    trials = optuna.load_study(study_name="s", storage=study).trials
    assert [trial.value for trial in trials] == seen.nll[1::2]  # the last of two evaluations
    assert best.objective == min(seen.nll[1::2])
    for number, (asked, kwargs) in enumerate(TRIALS):
        settings = {"loss": asked.get("loss", "focal"), "loss_kwargs": kwargs, **trials[number].params}
        alone, found = searching(tmp_path, **settings)
        alone.train()
        assert found.losses == [seen.losses[number]]
        assert_same(found.weights[0], seen.weights[number])
        assert found.nll == seen.nll[2 * number : 2 * number + 2]


def test_pruned_trials_leave_the_next_ones_alone(tmp_path: Path) -> None:
    trainer, seen = searching(tmp_path, loss="adafocal")
    pruner = optuna.pruners.ThresholdPruner(upper=0.0, n_warmup_steps=0)
    with pytest.raises(ValueError, match="No trials are completed"):
        trainer.hyperparameter_search(
            lambda trial: {"loss_n_bins": trial.suggest_int("loss_n_bins", 4, 8)},
            n_trials=2,
            backend="optuna",
            pruner=pruner,
        )
    assert [name for name, _ in seen.losses] == ["adafocal", "adafocal"]
    assert trainer.is_in_train is False


def test_the_objective_is_refused_where_the_nll_is_none(tmp_path: Path) -> None:
    trainer, _ = searching(tmp_path)
    with pytest.raises(
        ValueError, match="to minimise eval_nll, got direction='maximize'; pass compute_objective"
    ):
        trainer.hyperparameter_search(space, direction="maximize", backend="optuna")
    trainer.eval_dataset = {"a": trainer.eval_dataset, "b": trainer.eval_dataset}
    with pytest.raises(
        ValueError, match="eval_dataset to be one dataset, got several; pass compute_objective"
    ):
        trainer.hyperparameter_search(space, backend="optuna")
    trainer.eval_dataset = None
    with pytest.raises(ValueError, match="eval_dataset to be one dataset, got none"):
        trainer.hyperparameter_search(space, backend="optuna")


def test_an_objective_of_the_users_is_taken(tmp_path: Path) -> None:
    trainer, _ = searching(tmp_path)
    best = trainer.hyperparameter_search(
        lambda trial: {"loss_gamma": trial.suggest_float("loss_gamma", 0, 5)} if trial.number else {},
        lambda metrics: metrics["eval_accuracy"],
        2,
        "maximize",
        "optuna",
    )
    assert 0 <= best.objective <= 1


def test_changed_arguments_are_followed(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, **SETTINGS, loss="focal")
    trainer.train()
    focal = trainer.calibration_loss
    trainer.train()
    assert trainer.calibration_loss is focal

    trainer.args.loss = "adafocal"
    trainer.args.loss_n_bins = 5
    trainer.args.gamma_update_steps = 2
    trainer.args.temperature_criterion = "ece"
    trainer.args.class_weights = [1.0, 2.0, 1.0, 1.0]
    trainer.train()
    loss = trainer.calibration_loss
    assert isinstance(loss, AdaptiveLoss)
    assert (loss.name, loss.hyperparameters["n_bins"]) == ("adafocal", 5)
    assert loss.class_weights is not None
    assert loss.class_weights.tolist() == [1.0, 2.0, 1.0, 1.0]
    assert not loss.gammas.eq(1).all()
    assert [c.every_n_steps for c in callbacks(trainer, AdaFocalCallback)] == [2]
    assert [c.scaling.criterion for c in callbacks(trainer, TemperatureScalingCallback)] == ["ece"]
    table = loss.gammas
    trainer.train()
    assert trainer.calibration_loss is loss  # and goes on from its table
    assert not loss.gammas.equal(table)

    trainer.args.loss, trainer.args.loss_kwargs, trainer.args.temperature_criterion = "focal", None, "none"
    trainer.train()
    assert trainer.calibration_loss.name == "focal"
    assert callbacks(trainer, AdaFocalCallback) == callbacks(trainer, TemperatureScalingCallback) == []

    trainer.args.class_weights = [1.0, 2.0]
    with pytest.raises(ValueError, match="class_weights to have 4 entries, got 2"):
        trainer.train()


def test_callbacks_of_the_users_stay_when_arguments_change(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, **SETTINGS, loss="adafocal")
    mine = AdaFocalCallback(every_n_steps=3)
    trainer.add_callback(mine)
    trainer.args.loss_n_bins = 5
    trainer.train()
    assert callbacks(trainer, AdaFocalCallback) == [mine]
    trainer.args.loss, trainer.args.loss_kwargs = "focal", None
    with pytest.raises(ValueError, match="AdaFocalCallback to go with a loss that adapts, got 'focal'"):
        trainer.train()


def callbacks(trainer: CalibrationTrainer, kind: type[TrainerCallback]) -> list[Any]:
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind)]


@pytest.mark.slow
def test_the_best_trial_can_be_set_after_another_one(tmp_path: Path) -> None:
    trainer, _ = searching(tmp_path)

    def values(trial: optuna.Trial) -> dict[str, Any]:
        loss = trial.suggest_categorical("loss", ["focal", "adafocal"])
        if loss == "focal":
            return {"loss": loss, "loss_gamma": trial.suggest_float("loss_gamma", 1, 2)}
        return {"loss": loss, "loss_n_bins": trial.suggest_int("loss_n_bins", 4, 8)}

    losses = []

    def objective(_: dict[str, float]) -> float:  # focal is the best
        losses.append(trainer.args.loss)
        return 0.0 if losses[-1] == "focal" else 1.0

    sampler = optuna.samplers.RandomSampler(seed=1)
    best = trainer.hyperparameter_search(values, objective, n_trials=5, backend="optuna", sampler=sampler)
    assert losses[-1] == "adafocal"
    for name, value in best.hyperparameters.items():
        setattr(trainer.args, name, value)
    trainer.train()
    assert trainer.calibration_loss.name == "focal"
    assert trainer.calibration_loss.hyperparameters == {"gamma": best.hyperparameters["loss_gamma"]}


def test_a_removed_callback_stays_removed_when_arguments_or_models_change(tmp_path: Path) -> None:
    changed = tiny_trainer(tmp_path, **SETTINGS)
    again, _ = searching(tmp_path)
    for trainer in (changed, again):
        trainer.remove_callback(TemperatureScalingCallback)
        for trainer.args.loss in ("focal", "bsce"):  # a new loss each time
            trainer.train()
            assert trainer.temperature is None
