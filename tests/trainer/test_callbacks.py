"""The gammas follow the calibration split, and a temperature is fitted on it; the training is left as found."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_callback import ProgressCallback

from hf_calib import AdaFocalCallback, CalibrationTrainer, TemperatureScalingCallback
from hf_calib.losses import make_loss
from hf_calib.plots import gamma_dynamics
from hf_calib.scaling import TemperatureScaling
from tests.helpers.evaluations import NAMES, assert_reports, one_shot
from tests.helpers.tiny import (
    arguments,
    assert_same,
    last_evaluation,
    logged,
    sequences,
    tagged,
    tiny_bert,
    tiny_trainer,
    weights,
)

BY_STEPS = {"eval_strategy": "steps", "eval_steps": 2}
NO_TEMPERATURE = {"temperature_criterion": "none"}


def update_steps(trainer: CalibrationTrainer) -> list[int]:
    return [
        entry["step"]
        for entry in trainer.state.log_history
        if "calibration_gap_00" in entry
    ]


def predictions(
    trainer: CalibrationTrainer, dataset: Any
) -> tuple[np.ndarray, np.ndarray]:
    """(confidences, correct) by the stock Trainer."""
    found = Trainer(trainer.model, arguments(trainer.args.output_dir)).predict(dataset)
    probs = softmax(found.predictions.astype(np.float64), axis=1)
    return probs.max(1), probs.argmax(1) == found.label_ids


# ---- Gammas ----


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"eval_strategy": "steps", "eval_steps": 2}, [2, 4, 6, 8]),
        ({"eval_strategy": "no"}, [4, 8]),
        (
            {
                "gamma_update_steps": 3,
                "gamma_update_samples": 12,
                "eval_strategy": "epoch",
            },
            [3, 6],
        ),
        ({"eval_on_start": True, "eval_strategy": "epoch"}, [0, 4, 8]),
        # Epochs end at steps 4, 8 and 12: the first is as by default, with evaluations or without.
        (
            {
                "gamma_update_schedule": {1: 2, 2: 1},
                "num_train_epochs": 3,
                "eval_strategy": "epoch",
            },
            [4, 6, 8, 9, 10, 11, 12],
        ),
        (
            {"gamma_update_schedule": {1: 1}, "gradient_accumulation_steps": 3},
            [2, 3, 4],
        ),
        # Step 4 is the last one of epoch 0, which has no schedule yet.
        (
            {
                "gamma_update_schedule": {1: 1},
                "eval_strategy": "steps",
                "eval_steps": 3,
            },
            [3, 5, 6, 7, 8],
        ),
        *(
            pytest.param(*case, marks=pytest.mark.deep)
            for case in (
                ({"gamma_update_steps": 1}, [1, 2, 3, 4, 5, 6, 7, 8]),
                (
                    {"gamma_update_schedule": {2: 3}, "num_train_epochs": 4},
                    [4, 8, 9, 12, 15],
                ),
                (
                    {
                        "gamma_update_schedule": {1: 4},
                        "eval_strategy": "steps",
                        "eval_steps": 3,
                    },
                    [3, 8],
                ),
                (
                    {
                        "gamma_update_schedule": {0: 3},
                        "eval_on_start": True,
                        "eval_strategy": "epoch",
                    },
                    [3, 6],
                ),
                (
                    {
                        "gamma_update_schedule": {1: 1},
                        "eval_on_start": True,
                        "eval_strategy": "epoch",
                    },
                    [0, 4, 5, 6, 7, 8],
                ),
                ({"gamma_update_schedule": {2: 1}}, [4, 8]),
            )
        ),
    ],
)
def test_when_the_gammas_are_updated(
    settings: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    trainer = tiny_trainer(
        tmp_path, loss="adafocal", **{"num_train_epochs": 2, **settings}
    )
    trainer.train()
    assert update_steps(trainer) == steps
    # Each step is logged still, and the final evaluation is no occasion to update.
    assert [e["step"] for e in trainer.state.log_history if "loss" in e] == [
        *range(1, trainer.state.max_steps + 1)
    ]
    assert "eval_ece_calibrated" in last_evaluation(trainer)


class Tracker(TrainerCallback):
    """Keeps what a tracker is sent, with its step."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, dict[str, Any]]] = []

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        self.sent.append((state.global_step, dict(logs)))


@pytest.mark.parametrize(
    "logging_steps", [3, pytest.param(500, marks=pytest.mark.deep)]
)
def test_each_update_is_logged_once_whatever_logging_steps_says(
    logging_steps: int, tmp_path: Path
) -> None:
    trainer = tiny_trainer(
        tmp_path,
        loss="adafocal",
        gamma_update_steps=2,
        logging_steps=logging_steps,
        num_train_epochs=2,
    )
    tracker = Tracker()
    trainer.add_callback(tracker)
    trainer.train()
    assert [e["step"] for e in trainer.state.log_history if "loss" in e] == [
        step for step in range(1, 9) if step % logging_steps == 0
    ]
    assert update_steps(trainer) == [2, 4, 6, 8]
    tables = [e for e in trainer.state.log_history if "gamma_00" in e]
    sent = [
        (step, logs["gamma_max"]) for step, logs in tracker.sent if "gamma_max" in logs
    ]
    assert sent == [
        (table["step"], max(table[f"gamma_{i:02d}"] for i in range(15)))
        for table in tables
    ]
    for name, size in (
        ("gamma", 15),
        ("calibration_gap", 15),
        ("edge", 16),
        ("count", 15),
    ):
        assert {key for key in tables[-1] if key.startswith(name)} == {
            f"{name}_{i:02d}" for i in range(size)
        }
    table = trainer.calibration_loss
    assert [tables[-1][f"edge_{i:02d}"] for i in range(16)] == table.edges.tolist()
    assert (
        sum(tables[-1][f"count_{i:02d}"] for i in range(15)) == table.counts.sum() == 39
    )  # all but the lowest
    assert len({axes.get_title() for axes in gamma_dynamics(tables).axes[::3]}) == 15


@pytest.mark.parametrize(
    ("loss", "held_out"),
    [
        ("adafocal", "calibration"),
        ("calfocal", "evaluation"),
        pytest.param("ada_dual_focal", "calibration", marks=pytest.mark.deep),
    ],
)
def test_the_gammas_come_from_the_held_out_predictions(
    loss: str, held_out: str, tmp_path: Path
) -> None:
    model = tiny_bert()
    split, other = sequences(model, 45, seed=2), sequences(model, 20, seed=3)
    args = arguments(
        tmp_path,
        loss=loss,
        learning_rate=0.0,
        eval_strategy="steps",
        eval_steps=1,
        **NO_TEMPERATURE,
    )
    sets = (
        {"eval_dataset": split}
        if held_out == "evaluation"
        else {"calibration_dataset": split, "eval_dataset": other}
    )
    trainer = CalibrationTrainer(
        model, args, train_dataset=sequences(model, 12), **sets
    )
    if held_out == "evaluation":
        with pytest.warns(
            UserWarning, match="The evaluation split is also the calibration split"
        ):
            trainer.train()
    else:
        trainer.train()
    confidences, correct = predictions(trainer, split)
    expected = make_loss(loss)
    for _ in range(3):  # steps; the weights stand still
        expected.update(confidences, correct)
    for name in ("edges", "gammas", "gaps"):
        found, wanted = (
            trainer.calibration_loss.get_buffer(name),
            expected.get_buffer(name),
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=name)
    last = [entry for entry in trainer.state.log_history if "gamma_00" in entry][-1]
    assert [
        last[f"gamma_{i:02d}"] for i in range(15)
    ] == trainer.calibration_loss.gammas.tolist()
    assert [
        last[f"calibration_gap_{i:02d}"] for i in range(15)
    ] == trainer.calibration_loss.gaps.tolist()


class Watch(TrainerCallback):
    """Looks at everything around a held-out pass in the middle of a training."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.looks: list[tuple[Any, Any]] = []

    def look(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "modes": [module.training for module in trainer.model.modules()],
            "python": random.getstate(),
            "numpy": repr(np.random.get_state()),
            "torch": torch.get_rng_state().tolist(),
            "control": dict(vars(trainer.control)),
            "log": len(trainer.state.log_history),
            "handler": id(trainer.callback_handler),
            "eval_dataloader": id(trainer.callback_handler.eval_dataloader),
            "bars": [
                id(c.prediction_bar)
                for c in trainer.callback_handler.callbacks
                if isinstance(c, ProgressCallback)
            ],
        }

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        trainer.model.bert.embeddings.eval()  # one part in another mode than the rest
        before = self.look()
        trainer.held_out_pass(keep_logits=True)
        self.looks.append((before, self.look()))


def test_a_pass_leaves_everything_as_found(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, disable_tqdm=False)
    watch = Watch()
    watch.trainer = trainer
    trainer.add_callback(watch)
    trainer.train()
    assert len(watch.looks) == 4
    for before, after in watch.looks:
        assert after == before
        assert len(set(before["modes"])) == 2
        assert before["bars"]


def test_a_pass_that_fails_puts_everything_back(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.model.train()
    handler = trainer.callback_handler
    trainer.calibration_dataset = trainer.calibration_dataset.remove_columns(
        "input_ids"
    )
    with pytest.raises(ValueError, match="input_ids"):
        trainer.held_out_pass()
    assert trainer.callback_handler is handler
    assert trainer.model.training
    assert trainer.preprocess_logits_for_metrics is None


def test_callbacks_are_refused_where_they_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"every_n_steps to be a whole number, at least 1, .* got 0"
    ):
        AdaFocalCallback(every_n_steps=0)
    with pytest.raises(
        ValueError,
        match="n_samples to be used with every_n_steps or schedule, got neither",
    ):
        AdaFocalCallback(n_samples=5)
    with pytest.raises(
        ValueError,
        match="schedule to be used without every_n_steps, got every_n_steps=5",
    ):
        AdaFocalCallback(every_n_steps=5, schedule={1: 1})
    with pytest.raises(
        ValueError,
        match=r"schedule to map whole epochs.*, got \{40: 1, 25: 100\}; write",
    ):
        AdaFocalCallback(schedule={40: 1, 25: 100})
    with pytest.raises(
        ValueError, match=r"strategy to be one of 'end', 'evaluate', got 'epoch'"
    ):
        TemperatureScalingCallback(strategy="epoch")
    model = tiny_bert()
    with pytest.raises(
        ValueError,
        match="AdaFocalCallback to be used with a loss that adapts, got 'focal'",
    ):
        CalibrationTrainer(
            model, arguments(tmp_path, loss="focal"), callbacks=[AdaFocalCallback()]
        )
    for callback in (AdaFocalCallback(), TemperatureScalingCallback()):
        stock = Trainer(
            model,
            arguments(tmp_path),
            train_dataset=sequences(model, 4),
            callbacks=[callback],
        )
        with pytest.raises(RuntimeError, match="to be used by a CalibrationTrainer"):
            stock.train()


def test_a_new_model_starts_with_new_gammas(tmp_path: Path) -> None:
    sets = {
        "train_dataset": sequences(tiny_bert(), 16),
        "calibration_dataset": sequences(tiny_bert(), 40, seed=2),
    }
    args = arguments(tmp_path, loss="adafocal", gamma_update_steps=2, **NO_TEMPERATURE)
    trainer = CalibrationTrainer(args=args, model_init=lambda: tiny_bert(), **sets)
    ends = []
    for _ in range(2):
        trainer.train()
        ends.append(
            (weights(trainer.model), dict(trainer.calibration_loss.named_buffers()))
        )
    assert_same(ends[0][0], ends[1][0])
    assert_same(ends[0][1], ends[1][1])


# ---- Temperature ----


def fitted(trainer: CalibrationTrainer, **settings: Any) -> float:
    found = Trainer(trainer.model, arguments(trainer.args.output_dir)).predict(
        trainer.calibration_split
    )
    return float(
        TemperatureScaling(**settings)
        .fit(found.predictions, found.label_ids)
        .temperature_
    )


@pytest.mark.parametrize(
    "criterion", ["adaptive_ece", pytest.param("nll", marks=pytest.mark.deep)]
)
def test_the_temperature_is_fitted_on_the_calibration_split(
    criterion: Any, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tmp_path, loss="focal", temperature_criterion=criterion)
    trainer.train()
    assert trainer.temperature == pytest.approx(
        fitted(trainer, criterion=criterion), rel=1e-6
    )
    assert trainer.model.config.calibration == {
        "method": "temperature",
        "temperature": trainer.temperature,
        "criterion": criterion,
        "split": "calibration",
        "n_examples": 40,
        "loss": "focal",
        "loss_kwargs": {"gamma": 3.0},
        "folded": False,
    }
    last = last_evaluation(trainer)
    found = trainer.predict(trainer.eval_dataset)
    assert_reports(last, one_shot(found.predictions, found.label_ids), "eval")
    assert_reports(
        last,
        one_shot(found.predictions / trainer.temperature, found.label_ids),
        "eval",
        "_calibrated",
    )
    assert last["temperature"] == trainer.temperature
    assert {f"test_{name}_calibrated" for name in NAMES} < set(found.metrics)


def test_it_is_fitted_to_the_best_model(tmp_path: Path) -> None:
    trainer = tiny_trainer(
        tmp_path,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_ece",
        num_train_epochs=2,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name != "checkpoint-8"  # or the test would show nothing
    model: PreTrainedModel = type(trainer.model).from_pretrained(best)
    found = Trainer(model, arguments(tmp_path)).predict(trainer.calibration_dataset)
    wanted = TemperatureScaling().fit(found.predictions, found.label_ids).temperature_
    assert trainer.temperature == pytest.approx(wanted, rel=1e-6)


def test_no_temperature_where_none_is_wanted_or_possible(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, **NO_TEMPERATURE)
    trainer.train()
    model = tiny_bert()
    no_data = CalibrationTrainer(
        model, arguments(tmp_path), train_dataset=sequences(model, 8)
    )
    with pytest.warns(UserWarning, match="Temperature scaling will not be fitted"):
        no_data.train()
    for each in (trainer, no_data):
        assert each.temperature is None
        assert not hasattr(each.model.config, "calibration")
        assert not logged(each, "temperature")
    with pytest.raises(
        ValueError, match="expected calibration_dataset to be given to fit a calibrator"
    ):
        no_data.fit_temperature()


@pytest.mark.parametrize("labels", ["no column", "all ignored"])
def test_a_calibration_split_without_labels_is_refused(
    labels: str, tmp_path: Path
) -> None:
    model = tiny_bert("Token")
    split = tagged(model, 6)
    split = (
        split.remove_columns("labels")
        if labels == "no column"
        else split.map(lambda row: {"labels": [-100] * 8})
    )
    args = arguments(tmp_path, loss="adafocal")
    trainer = CalibrationTrainer(
        model, args, train_dataset=tagged(model, 8), calibration_dataset=split
    )
    with pytest.raises(
        ValueError,
        match="expected the calibration split to have labelled examples, got none",
    ):
        trainer.fit_temperature()
    with pytest.raises(ValueError, match="expected"):
        trainer.train()


def updated_each_step(folder: Path, **settings: Any) -> Any:
    """Tables of 1,001 numbers, of which 9 are kept."""
    model = tiny_bert()
    args = arguments(
        folder,
        loss="adafocal",
        loss_kwargs={"n_bins": 250},
        gamma_update_steps=1,
        max_steps=24,
        calibration_method="none",
        logging_strategy="no",
        save_strategy="steps",
        save_steps=16,
        **settings,
    )
    return CalibrationTrainer(
        model,
        args,
        train_dataset=sequences(model, 4),
        calibration_dataset=sequences(model, 8, seed=2),
    )


@pytest.mark.slow
def test_the_log_of_a_long_training_stays_small(tmp_path: Path) -> None:
    trainer = updated_each_step(tmp_path)
    trainer.train()
    log = trainer.state.log_history
    steps = [entry["step"] for entry in log if "gamma_00" in entry]
    assert len(steps) == 9
    assert (steps[0], steps[-1]) == (1, 24)
    assert np.diff(steps).max() <= 4
    assert [entry["step"] for entry in log if "gamma_mean" in entry] == steps
    n_numbers = 9 * 1003 + 9 * 5
    assert sum(map(len, log)) < n_numbers + 20

    resumed = updated_each_step(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-16"))
    ours, theirs = (
        [entry for entry in each.state.log_history if "gamma_00" in entry]
        for each in (resumed, trainer)
    )
    assert ours == theirs
