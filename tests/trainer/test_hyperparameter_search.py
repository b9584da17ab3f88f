"""A search trains what its trials ask for, on the calibration split; and changed arguments are followed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from accelerate import Accelerator
from scipy.special import log_softmax
from torch.utils.data import Dataset
from transformers import TrainerCallback

from hf_calib import AdaFocalCallback, CalibrationTrainer, TemperatureScalingCallback
from hf_calib.losses import AdaptiveLoss
from hf_calib.scaling import TemperatureScaling, VectorScaling
from hf_calib.trainer.search import out_of_fold_metrics
from tests.helpers.tiny import arguments, assert_same, sequences, tiny_bert, tiny_trainer, weights

optuna.logging.disable_default_handler()
SETTINGS: dict[str, Any] = {"eval_strategy": "epoch", "num_train_epochs": 2}
# What a trial asks for, and the hyperparameters that it gives the loss where args have focal's gamma as 2.5.
TRIALS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"loss": "focal", "loss_gamma": 4.0}, {"gamma": 4.0}),
    ({"loss": "adafocal", "loss_n_bins": 5}, {"n_bins": 5}),
    ({"loss": "adafocal", "loss_n_bins": 5}, {"n_bins": 5}),
    ({}, {"gamma": 2.5}),
]


class Rows(Dataset[dict[str, Any]]):
    """Counts how often one of its rows, or their number, is asked for."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.touched = 0

    def __len__(self) -> int:
        self.touched += 1
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.touched += 1
        return self.rows[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.touched += 1
        return iter(self.rows)


class Seen(TrainerCallback):
    """Start and end of each training."""

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


def searching(folder: Path, model_init: Any = None, **settings: Any) -> tuple[CalibrationTrainer, Seen]:
    model, seen = tiny_bert(), Seen()
    train, calibration, evaluation = (sequences(model, n, seed=i + 1) for i, n in enumerate((16, 40, 24)))
    trainer = CalibrationTrainer(
        model_init=model_init or (lambda: tiny_bert()),
        args=arguments(folder, **{**SETTINGS, **settings}),
        train_dataset=train,
        calibration_dataset=calibration,
        eval_dataset=Rows(evaluation),
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
        space,
        n_trials=len(TRIALS),
        backend="optuna",
        sampler=sampler,
        pruner=optuna.pruners.NopPruner(),
        storage=study,
        study_name="s",
    )
    trials = optuna.load_study(study_name="s", storage=study).trials
    assert [trial.value for trial in trials] == seen.nll[1::2]  # the last of two evaluations
    assert best.objective == min(seen.nll[1::2])
    for number, (asked, kwargs) in enumerate(TRIALS):
        settings = {"loss": asked.get("loss", "focal"), "loss_kwargs": kwargs, **trials[number].params}
        alone, found = searching(tmp_path, **settings)
        alone.eval_dataset = sequences(tiny_bert(), 40, seed=2)  # the rows of the calibration split
        alone.train()
        assert found.losses == [seen.losses[number]]
        assert_same(found.weights[0], seen.weights[number])
        assert found.nll == seen.nll[2 * number : 2 * number + 2]


@pytest.mark.slow
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
    assert len(seen.nll) == 2
    # Of the last trial: stopped at its first evaluation, and not evaluated once more with a map.
    assert len([entry for entry in trainer.state.log_history if "eval_nll" in entry]) == 1
    assert trainer.is_in_train is False


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"direction": "maximize"},
            "direction to be 'minimize' for eval_nll, got 'maximize'; pass a function of the metrics",
        ),
        (
            {"compute_objective": "eval_accuracy"},
            "direction to be 'maximize' for eval_accuracy, got 'minimize'",
        ),
        ({"compute_objective": "eval_nnl"}, "the name of one, got 'eval_nnl'; did you mean 'eval_nll'"),
        ({"compute_objective": "nll"}, "the name of one, got 'nll'; known: eval_accuracy"),
    ],
)
def test_the_objective_is_checked_before_any_training(
    asked: dict[str, Any], message: str, tmp_path: Path
) -> None:
    trainer, seen = searching(tmp_path)
    with pytest.raises(ValueError, match=message):
        trainer.hyperparameter_search(space, backend="optuna", **asked)
    assert seen.losses == []


def test_there_has_to_be_a_split_and_a_map_to_search_by(tmp_path: Path) -> None:
    trainer, _ = searching(tmp_path, calibration_method="none")
    with pytest.raises(ValueError, match="map to be asked for with 'eval_ece_calibrated', got none"):
        trainer.hyperparameter_search(space, "eval_ece_calibrated", backend="optuna")
    trainer.calibration_dataset = None
    trainer.eval_dataset = {"a": trainer.eval_dataset, "b": trainer.eval_dataset}
    with pytest.raises(ValueError, match="calibration_dataset to be given to search on, got several"):
        trainer.hyperparameter_search(space, backend="optuna")
    trainer.eval_dataset = None
    with pytest.raises(ValueError, match="calibration_dataset to be given to search on, got none"):
        trainer.hyperparameter_search(space, backend="optuna")


def learning_rates(*values: float) -> Any:
    """A space of these learning rates, one after the other."""
    return lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", values)}


def in_turn(**names: list[Any]) -> Any:
    return optuna.samplers.GridSampler(names, seed=0)


@pytest.mark.parametrize(
    ("objective", "eval_strategy"),
    [
        pytest.param("eval_nll", "epoch", marks=pytest.mark.slow),
        pytest.param("eval_nll_calibrated", "no", marks=pytest.mark.deep),
    ],
)
def test_the_evaluation_set_is_not_touched_before_the_search_is_over(
    objective: str, eval_strategy: str, tmp_path: Path
) -> None:
    settings = {"loss": "adafocal", "eval_strategy": eval_strategy, "num_train_epochs": 1}
    trainer, _ = searching(tmp_path, **settings)
    held_out: Any = trainer.eval_dataset
    best = trainer.hyperparameter_search(learning_rates(1e-3, 1e-4), objective, n_trials=2, backend="optuna")
    assert held_out.touched == 0
    assert best.objective > 0
    assert trainer.calibration_map is None
    assert trainer.eval_dataset is held_out
    trainer.train()
    assert held_out.touched >= 24
    assert trainer.calibration_map is not None
    assert trainer.evaluate()["eval_nll_calibrated"] > 0


def test_a_search_without_a_calibration_split_is_on_the_evaluation_split_and_says_so(tmp_path: Path) -> None:
    trainer, _ = searching(tmp_path, num_train_epochs=1, loss="adafocal")
    trainer.calibration_dataset = None
    with pytest.warns(UserWarning, match="no calibration_dataset, so the search is on the evaluation split"):
        trainer.hyperparameter_search(learning_rates(1e-3), n_trials=1, backend="optuna")


def test_a_trial_is_scored_by_maps_that_did_not_see_the_row() -> None:
    """Labels that no logit tells of: a map of the same rows would find something."""
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(60, 4)), rng.integers(0, 4, 60)
    found = out_of_fold_metrics(
        Accelerator(cpu=True), VectorScaling(), logits, labels, prefix="eval", n_bins=15
    )
    folds = np.random.default_rng(0).permutation(np.arange(60) % 5)
    losses = np.empty(60)
    for ours in (folds == fold for fold in range(5)):
        mapped = VectorScaling().fit(logits[~ours], labels[~ours]).transform(logits[ours])
        losses[ours] = -log_softmax(mapped, axis=1)[np.arange(ours.sum()), labels[ours]]
    assert found["eval_nll_calibrated"] == pytest.approx(losses.mean(), rel=1e-5)
    assert losses.mean() > np.log(4)


@pytest.mark.deep
def test_the_calibrated_objective_is_out_of_fold(tmp_path: Path) -> None:
    """Against folds and temperatures of this test's own; the temperature of the same rows would look better."""
    trainer, _ = searching(tmp_path, num_train_epochs=1)
    best = trainer.hyperparameter_search(
        learning_rates(1e-3), "eval_nll_calibrated", n_trials=1, backend="optuna"
    )
    alone, _ = searching(tmp_path, num_train_epochs=1, learning_rate=1e-3, calibration_method="none")
    alone.train()
    output = alone.predict(alone.calibration_dataset)
    logits, labels = np.asarray(output.predictions), np.asarray(output.label_ids)
    folds = np.random.default_rng(0).permutation(np.arange(40) % 5)
    losses = np.empty(40)
    for fold in range(5):
        ours = folds == fold
        t = TemperatureScaling().fit(logits[~ours], labels[~ours]).temperature_
        losses[ours] = -log_softmax(logits[ours] / t, axis=1)[np.arange(ours.sum()), labels[ours]]
    assert best.objective == pytest.approx(losses.mean(), rel=1e-6)
    t = TemperatureScaling().fit(logits, labels).temperature_
    in_sample = -log_softmax(logits / t, axis=1)[np.arange(40), labels].mean()
    assert in_sample < best.objective - 1e-4
    assert best.objective < -log_softmax(logits, axis=1)[np.arange(40), labels].mean()


@pytest.mark.filterwarnings("ignore:This evaluation has no calibration metrics")
@pytest.mark.filterwarnings("ignore:The calibration map could not be scored")
@pytest.mark.deep
def test_a_trial_that_diverges_fails_alone(tmp_path: Path) -> None:
    trainer, _ = searching(tmp_path, num_train_epochs=1)
    best = trainer.hyperparameter_search(
        learning_rates(1e30, 1e-3),
        "eval_nll_calibrated",
        n_trials=2,
        backend="optuna",
        sampler=in_turn(learning_rate=[1e30, 1e-3]),
        storage=f"sqlite:///{tmp_path}/s.db",
        study_name="s",
    )
    assert best.hyperparameters == {"learning_rate": 1e-3}
    trials = optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path}/s.db").trials
    assert sorted(trial.state.name for trial in trials) == ["COMPLETE", "FAIL"]


@pytest.mark.deep
def test_trials_start_from_their_seed_and_what_they_do_not_set_is_as_before(tmp_path: Path) -> None:
    """The Trainer alone seeds a trial's model with the trial before's seed."""
    model_init = lambda: tiny_bert(seed=int(torch.randint(2**30, ())))  # noqa: E731
    settings = {"num_train_epochs": 1, "max_steps": 1, "learning_rate": 1e-3, "seed": 3}
    trainer, seen = searching(tmp_path, model_init, **settings)
    asked = [{}, {"learning_rate": 1e-2, "seed": 7}, {}, {"seed": 7}]
    trainer.hyperparameter_search(lambda trial: asked[trial.number], n_trials=4, backend="optuna")
    for values, trained in zip(asked, seen.weights, strict=True):
        without_map = {"calibration_method": "none"}  # the models are not to be used
        alone, found = searching(tmp_path, model_init, **{**settings, **values, **without_map})
        alone.train()
        assert_same(found.weights[0], trained)


@pytest.mark.parametrize("base", [{}, {"loss": "focal", "loss_kwargs": {"gamma": 2.5}}])
@pytest.mark.deep
def test_the_arguments_hold_the_best_trial_with_the_constants_of_its_space(
    base: dict[str, Any], tmp_path: Path
) -> None:
    trainer, seen = searching(tmp_path, num_train_epochs=1, **base)

    def space_with_constants(trial: optuna.Trial) -> dict[str, Any]:
        return {
            "loss_brier_weight": trial.suggest_float("weight", 0.1, 2.0),
            "gradient_accumulation_steps": 2 if trial.number == 0 else 1,
            "loss": "focal_calibration",
        }

    trials = count()  # the first trial is the best
    best = trainer.hyperparameter_search(
        space_with_constants, lambda _: float(next(trials)), n_trials=2, backend="optuna"
    )
    args = trainer.args
    assert args.loss == "focal_calibration"
    assert args.loss_kwargs == {"brier_weight": best.hyperparameters["weight"]}
    assert args.gradient_accumulation_steps == 2
    trainer.train()
    assert_same(seen.weights[2], seen.weights[0])
    assert trainer.temperature is not None


@pytest.mark.deep
def test_several_objectives_leave_the_arguments_as_they_were(tmp_path: Path) -> None:
    trainer, _ = searching(tmp_path, num_train_epochs=1, loss="focal", loss_kwargs={"gamma": 2.5})
    before = trainer.args.to_dict()
    best = trainer.hyperparameter_search(
        lambda trial: {"loss_gamma": trial.suggest_float("loss_gamma", 1, 5)},
        lambda metrics: (metrics["eval_nll"], metrics["eval_accuracy"]),
        n_trials=2,
        direction=["minimize", "maximize"],
        backend="optuna",
    )
    assert isinstance(best, list)
    assert trainer.args.to_dict() == before


@pytest.mark.deep
def test_a_result_of_another_space_is_kept(tmp_path: Path) -> None:
    """A study that goes on with another space, which does not take the best trial's values."""
    trainer, _ = searching(tmp_path, num_train_epochs=1)
    study = {"storage": f"sqlite:///{tmp_path}/s.db", "study_name": "s", "load_if_exists": True}
    trainer.hyperparameter_search(learning_rates(1e-3), lambda _: 0.0, n_trials=1, backend="optuna", **study)
    with pytest.warns(UserWarning, match="The best trial's arguments were not set: ValueError"):
        best = trainer.hyperparameter_search(
            lambda trial: {
                "loss_smoothing": trial.suggest_float("smoothing", 0, 0.1),
                "loss": "label_smoothing",
            },
            lambda _: 1.0,
            n_trials=1,
            backend="optuna",
            **study,
        )
    assert best.hyperparameters == {"learning_rate": 1e-3}
    assert (trainer.args.loss, trainer.args.loss_kwargs) == ("cross_entropy", None)


@pytest.mark.deep
def test_a_killed_search_goes_on_and_processes_share_a_study(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.helpers.killed_search", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["endings"] == [-signal.SIGKILL, 0, 0, 0]
    killed, resumed = found["killed"], found["resumed"]
    assert [trial["state"] for trial in killed] == ["COMPLETE", "COMPLETE", "RUNNING"]
    # Optuna counts n_trials for each call: these are two more.
    assert [trial["state"] for trial in resumed] == [
        "COMPLETE",
        "COMPLETE",
        "RUNNING",
        "COMPLETE",
        "COMPLETE",
    ]
    assert resumed[:3] == killed
    values = [trial["value"] for trial in resumed if trial["value"] is not None]
    assert len({trial["params"]["loss_gamma"] for trial in resumed}) == 5
    best = resumed[[trial["value"] for trial in resumed].index(min(values))]
    assert found["best"] == {"objective": best["value"], **best["params"]}
    assert found["args"] == best["params"]["loss_gamma"]
    assert [trial["state"] for trial in found["shared"]] == ["COMPLETE"] * 4


@pytest.mark.parametrize(
    "names", [("loss", "loss_gamma", "learning_rate"), ("loss_gamma", "learning_rate", "loss")]
)
def test_the_best_values_are_set_by_name_in_any_order(names: tuple[str, ...], tmp_path: Path) -> None:
    """On arguments that are new, as in a script of its own."""
    best = {"loss": "dual_focal", "loss_gamma": 4.5, "learning_rate": 0.01}
    args = arguments(tmp_path)
    for name in names:
        setattr(args, name, best[name])
    assert args.make_loss().hyperparameters["gamma"] == 4.5
    assert (args.loss, args.loss_kwargs, args.learning_rate) == ("dual_focal", {"gamma": 4.5}, 0.01)


def test_a_hyperparameter_of_another_loss_is_refused_before_the_training(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, loss="focal")
    trainer.args.loss_n_bins = 5
    with pytest.raises(ValueError, match="the hyperparameters of loss 'focal', got 'n_bins'; it has: gamma"):
        trainer.train()


@pytest.mark.deep
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
    without = {"calibration_method": "none"}
    with pytest.raises(ValueError, match="the evaluation to have 'eval_nll_calibrated', got epoch, eval_acc"):
        trainer.hyperparameter_search(lambda _: without, "eval_nll_calibrated", n_trials=1, backend="optuna")
    assert trainer.args.calibration_method == "temperature"
    assert trainer.is_searching is False


@pytest.mark.slow
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


@pytest.mark.deep
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


@pytest.mark.slow
def test_a_removed_callback_stays_removed_when_arguments_or_models_change(tmp_path: Path) -> None:
    changed = tiny_trainer(tmp_path, **SETTINGS)
    again, _ = searching(tmp_path)
    for trainer in (changed, again):
        trainer.remove_callback(TemperatureScalingCallback)
        for trainer.args.loss in ("focal", "bsce"):  # a new loss each time
            trainer.train()
            assert trainer.temperature is None
