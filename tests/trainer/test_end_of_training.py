"""The end of a training: the temperature comes before trackers close, and no failure there costs the model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback

from hf_calib import AdaFocalCallback, CalibrationTrainer, TemperatureScalingCallback
from tests.helpers.tiny import (
    N_LABELS,
    arguments,
    assert_same,
    last_evaluation,
    logged,
    sequences,
    tiny_bert,
    tiny_trainer,
    weights,
)


class Tracker(TrainerCallback):
    """Like those of MLflow and TensorBoard: opens with the training, closes in `on_train_end`."""

    def __init__(self) -> None:
        self.received: list[dict[str, float]] = []
        self.opened = 0
        self.open = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.open = True
        self.opened += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not self.open:  # as TensorBoard does, which then writes a second file
            self.on_train_begin(args, state, control)
        self.received.append(dict(logs))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.open = False


@pytest.mark.parametrize("added", ["at first", "later"])
def test_trackers_receive_the_final_metrics_before_they_close(added: str, tmp_path: Path) -> None:
    tracker, model = Tracker(), tiny_bert()
    trainer = CalibrationTrainer(
        model,
        arguments(tmp_path, loss="adafocal", gamma_update_steps=1, logging_strategy="no"),
        train_dataset=sequences(model, 16),
        calibration_dataset=sequences(model, 40, seed=2),
        eval_dataset=sequences(model, 24, seed=3),
        callbacks=[tracker] if added == "at first" else None,
    )
    if added == "later":
        trainer.add_callback(tracker)
    trainer.train()
    assert (tracker.opened, tracker.open) == (1, False)
    assert [entry["temperature"] for entry in tracker.received if "eval_ece_calibrated" in entry] == [
        trainer.temperature
    ]
    assert any("gamma_max" in entry for entry in tracker.received)


def test_no_callback_of_ours_stands_among_the_users_where_nothing_is_calibrated(tmp_path: Path) -> None:
    stock = Trainer(tiny_bert(), arguments(tmp_path))
    ours = CalibrationTrainer(tiny_bert(), arguments(tmp_path, calibration_method="none"))
    kinds = [[type(callback) for callback in trainer.callback_handler.callbacks] for trainer in (ours, stock)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("criterion", ["nll", "none"])
def test_the_log_ends_with_the_summary_of_the_training(criterion: str, tmp_path: Path) -> None:
    settings = {"gamma_update_steps": 1, "logging_strategy": "no", "temperature_criterion": criterion}
    trainer = tiny_trainer(tmp_path, loss="adafocal", **settings)
    summary = trainer.train().metrics
    last = trainer.state.log_history[-1]
    assert last["train_loss"] == summary["train_loss"]
    assert len(logged(trainer, "train_runtime")) == 1
    trainer.train()
    assert "train_runtime" in trainer.state.log_history[-1]


def test_tensorboard_writes_one_file_with_the_final_metrics(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = tiny_trainer(tmp_path / "out", report_to="tensorboard")
    trainer.train()
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = tensorboard.EventAccumulator(str(file)).Reload()
    assert "eval/ece_calibrated" in events.Tags()["scalars"]


def failing_rows(n: int) -> list[dict[str, Any]]:
    """Rows of which the last one has fewer tokens than the rest, so that no batch can be made of it."""
    rows = sequences(tiny_bert(), n, seed=9).to_list()
    rows[-1]["input_ids"] = rows[-1]["input_ids"][:-1]
    return rows


@pytest.mark.parametrize("split", ["calibration", "evaluation"])
def test_a_failure_after_the_last_step_keeps_the_model(split: str, tmp_path: Path) -> None:
    trainer, whole = tiny_trainer(tmp_path), tiny_trainer(tmp_path)
    whole.train()
    if split == "calibration":
        trainer.calibration_dataset = failing_rows(20)
        message = r"Temperature scaling was not fitted: ValueError: .*is kept.*call fit_calibration_map\(\)"
    else:
        trainer.eval_dataset = failing_rows(20)
        message = r"The evaluation after the training failed: ValueError: .*The trained model is kept"
    with pytest.warns(UserWarning, match=message):
        output = trainer.train()
    assert output.global_step == 4
    assert_same(weights(trainer.model), weights(whole.model))
    assert not trainer.is_in_train
    if split == "calibration":
        assert trainer.temperature is None
        assert "eval_ece" in last_evaluation(trainer)
        trainer.calibration_dataset = whole.calibration_dataset
        assert trainer.fit_temperature() == whole.temperature
    else:
        assert trainer.temperature == whole.temperature
        trainer.save_calibrated_model(tmp_path / "calibrated")


def test_a_fit_that_fails_leaves_no_stale_temperature(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.train()
    assert trainer.model.config.calibration["temperature"] == trainer.temperature
    with torch.no_grad():
        trainer.model.classifier.bias.fill_(math.nan)
    with pytest.raises(ValueError, match="NaN"):
        trainer.fit_temperature()
    assert trainer.temperature is None
    assert not hasattr(trainer.model.config, "calibration")
    with pytest.raises(ValueError, match="expected the calibration map to be fitted"):
        trainer.save_calibrated_model(tmp_path / "calibrated")


def test_a_refit_that_fails_during_the_training_leaves_no_stale_temperature(tmp_path: Path) -> None:
    trainer = tiny_trainer(
        tmp_path, calibration_strategy="evaluate", eval_strategy="steps", eval_steps=2, learning_rate=1e-3
    )
    seen: list[float | None] = []

    class Diverge(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(trainer.temperature)
            with torch.no_grad():
                trainer.model.classifier.bias.fill_(math.nan)

    trainer.add_callback(Diverge())
    with (
        pytest.warns(UserWarning, match="Temperature scaling was not fitted"),
        pytest.warns(UserWarning, match="no calibration metrics"),
    ):
        trainer.train()
    assert seen[0] is not None
    assert seen[1:] == [None, None]
    assert not hasattr(trainer.model.config, "calibration")


def test_a_usage_error_does_not_cost_the_temperature(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    found = trainer.fit_temperature()
    trainer.calibration_dataset = trainer.eval_dataset = None
    with pytest.raises(ValueError, match="expected calibration_dataset to be given"):
        trainer.fit_temperature()
    assert trainer.temperature == found


# ---- Callbacks that are passed ----


@pytest.mark.parametrize("later", [False, True])
def test_of_two_callbacks_of_one_kind_the_last_acts(later: bool, tmp_path: Path) -> None:
    class Mine(AdaFocalCallback):
        pass

    model = tiny_bert()
    ours = [AdaFocalCallback(every_n_steps=1), Mine(every_n_steps=2)]
    temperatures = [TemperatureScalingCallback(criterion="ece"), TemperatureScalingCallback()]
    trainer = CalibrationTrainer(
        model,
        arguments(tmp_path, loss="adafocal"),
        train_dataset=sequences(model, 16),
        calibration_dataset=sequences(model, 40, seed=2),
        callbacks=None if later else [*ours, *temperatures],
    )
    for callback in [*ours, *temperatures] if later else []:
        trainer.add_callback(callback)
    trainer.train()
    acting = [c for c in trainer.callback_handler.callbacks if c in [*ours, *temperatures]]
    assert acting == [ours[1], temperatures[1]]
    steps = [entry["step"] for entry in trainer.state.log_history if "calibration_gap_00" in entry]
    assert steps == [2, 4]
    assert trainer.model.config.calibration["criterion"] == "nll"


def test_callbacks_refuse_values_of_the_wrong_type_at_once() -> None:
    with pytest.raises(TypeError, match=r"expected every_n_steps to be an integer, got 2\.0"):
        AdaFocalCallback(every_n_steps=2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected n_samples to be an integer, got True"):
        AdaFocalCallback(every_n_steps=2, n_samples=True)
    with pytest.raises(ValueError, match=r"expected criterion to be one of .*got 'aec'"):
        TemperatureScalingCallback(criterion="aec")


# ---- Saving ----


def test_saving_the_uncalibrated_model_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = tiny_trainer(tmp_path, save_strategy="epoch")
    trainer.save_model(str(tmp_path / "before"))
    trainer.train()
    assert "save_model" not in caplog.text  # neither before there is a temperature, nor for checkpoints
    for name in ("one", "two"):
        trainer.save_model(str(tmp_path / name))
    assert (
        caplog.text.count(
            "save_model writes the model as trained, without its temperature scaling: a pipeline"
        )
        == 1
    )
    assert "Use save_calibrated_model" in caplog.text
    saved = tiny_bert().from_pretrained(tmp_path / "one")
    assert_same(weights(saved), weights(trainer.model))


def test_saving_a_calibrated_model_without_class_names_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = dict(enumerate(["art", "law", "film", "sport"]))
    for model, warnings in ((tiny_bert(), 1), (tiny_bert(id2label=names), 0)):
        caplog.clear()
        trainer = CalibrationTrainer(
            model, arguments(tmp_path / "run"), calibration_dataset=sequences(model, 40, seed=2)
        )
        trainer.fit_temperature()
        trainer.save_calibrated_model(tmp_path / "calibrated")
        assert caplog.text.count("saved as LABEL_0 to LABEL_3: pipelines answer with these") == warnings


# ---- Class weights ----


def test_balanced_class_weights_come_from_the_training_split(tmp_path: Path) -> None:
    model = tiny_bert()
    rows = sequences(model, 10).to_list()
    for row, label in zip(rows, [0, 0, 0, 0, 0, 1, 1, 2, 3, 3], strict=True):
        row["label"] = label
    wanted = [10 / (N_LABELS * count) for count in (5, 2, 1, 2)]
    for dataset in (Dataset.from_list(rows), rows):
        trainer = CalibrationTrainer(
            model,
            arguments(tmp_path, class_weights="balanced", loss="focal"),
            train_dataset=dataset,
            calibration_dataset=sequences(model, 40, seed=2),
        )
        assert trainer.calibration_loss.class_weights is not None
        assert trainer.calibration_loss.class_weights.tolist() == pytest.approx(wanted)
    trainer.train()
    assert trainer.model.config.calibration["class_weights"] == pytest.approx(wanted)


def test_rows_without_a_label_have_no_part_in_balanced_class_weights(tmp_path: Path) -> None:
    rows = sequences(tiny_bert(), 10).to_list()
    for row, label in zip(rows, [0, 0, 0, 1, 1, 2, 3, 3, -100, -100], strict=True):
        row["label"] = label
    args = arguments(tmp_path, class_weights="balanced", calibration_method="none")
    loss = CalibrationTrainer(tiny_bert(), args, train_dataset=Dataset.from_list(rows)).calibration_loss
    assert loss.class_weights.tolist() == pytest.approx([8 / (4 * count) for count in (3, 2, 1, 2)])


def test_balanced_class_weights_need_every_class(tmp_path: Path) -> None:
    model = tiny_bert()
    args = arguments(tmp_path, class_weights="balanced")
    absent = sequences(model, 8).map(lambda row: {"label": row["label"] % 2})
    with pytest.raises(ValueError, match=r"got no examples of class 2, 3; give one number per class"):
        CalibrationTrainer(model, args, train_dataset=absent)
    args = arguments(tmp_path, class_weights="balanced", max_steps=2)
    for dataset in (None, absent.to_iterable_dataset()):
        with pytest.raises(ValueError, match=r"class_weights to be given as numbers where .*got 'balanced'"):
            CalibrationTrainer(model, args, train_dataset=dataset)


def test_balanced_class_weights_count_what_the_model_gets(tmp_path: Path) -> None:
    def reversed_labels(rows: list[dict[str, Any]]) -> dict[str, Any]:
        ids = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": torch.tensor([N_LABELS - 1 - row["label"] for row in rows])}

    rows = sequences(tiny_bert(), 24)
    args = arguments(tmp_path, class_weights="balanced")
    message = (
        r"where a transform or collator changes the labels, got 'balanced', and a row \d+ that arrives as"
    )
    with pytest.raises(ValueError, match=message):
        CalibrationTrainer(tiny_bert(), args, train_dataset=rows, data_collator=reversed_labels)
