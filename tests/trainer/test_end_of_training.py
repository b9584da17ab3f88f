"""The end of a training: the temperature comes before trackers close, and no failure there costs the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import (
    BertForSequenceClassification,
    HfArgumentParser,
    TrainerCallback,
)

from hf_calib import (
    AdaFocalCallback,
    CalibrationTrainer,
    CalibrationTrainingArguments,
    TemperatureScalingCallback,
)
from hf_calib.decisions import CostRule, Decisions
from tests.helpers.tiny import (
    N_LABELS,
    arguments,
    assert_same,
    last_evaluation,
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

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        self.open = True
        self.opened += 1

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        if not self.open:  # as TensorBoard does, which then writes a second file
            self.on_train_begin(args, state, control)
        self.received.append(dict(logs))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.open = False


@pytest.mark.parametrize("added", ["at first", "later"])
def test_trackers_receive_the_final_metrics_before_they_close(
    added: str, tmp_path: Path
) -> None:
    tracker, model = Tracker(), tiny_bert()
    trainer = CalibrationTrainer(
        model,
        arguments(
            tmp_path, loss="adafocal", gamma_update_steps=1, logging_strategy="no"
        ),
        train_dataset=sequences(model, 16),
        calibration_dataset=sequences(model, 40, seed=2),
        eval_dataset=sequences(model, 24, seed=3),
        callbacks=[tracker] if added == "at first" else None,
    )
    if added == "later":
        trainer.add_callback(tracker)
    trainer.train()
    assert (tracker.opened, tracker.open) == (1, False)
    assert [
        entry["temperature"]
        for entry in tracker.received
        if "eval_ece_calibrated" in entry
    ] == [trainer.temperature]
    assert any("gamma_max" in entry for entry in tracker.received)


def failing_rows(n: int) -> list[dict[str, Any]]:
    """Rows of which the last one has fewer tokens than the rest, so that no batch can be made of it."""
    rows = sequences(tiny_bert(), n, seed=9).to_list()
    rows[-1]["input_ids"] = rows[-1]["input_ids"][:-1]
    return rows


@pytest.mark.parametrize("split", ["calibration", "evaluation"])
def test_a_failure_after_the_last_step_keeps_the_model(
    split: str, tmp_path: Path
) -> None:
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


# ---- Callbacks that are passed ----


@pytest.mark.parametrize("later", [False, True])
def test_of_two_callbacks_of_one_kind_the_last_acts(
    later: bool, tmp_path: Path
) -> None:
    class Mine(AdaFocalCallback):
        pass

    model = tiny_bert()
    ours = [AdaFocalCallback(every_n_steps=1), Mine(every_n_steps=2)]
    temperatures = [
        TemperatureScalingCallback(criterion="ece"),
        TemperatureScalingCallback(),
    ]
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
    acting = [
        c for c in trainer.callback_handler.callbacks if c in [*ours, *temperatures]
    ]
    assert acting == [ours[1], temperatures[1]]
    steps = [
        entry["step"]
        for entry in trainer.state.log_history
        if "calibration_gap_00" in entry
    ]
    assert steps == [2, 4]
    assert trainer.model.config.calibration["criterion"] == "nll"


# ---- Saving ----


def test_saving_the_uncalibrated_model_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = tiny_trainer(tmp_path, save_strategy="epoch")
    trainer.save_model(str(tmp_path / "before"))
    trainer.train()
    assert (
        "save_model" not in caplog.text
    )  # neither before there is a temperature, nor for checkpoints
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


def test_balanced_class_weights_come_from_the_training_split(tmp_path: Path) -> None:
    model, labels = tiny_bert(), [0, 0, 0, 0, 0, 1, 1, 2, 3, 3, -100]
    rows = sequences(model, 11).remove_columns("label").add_column("label", labels)
    wanted = [10 / (N_LABELS * count) for count in (5, 2, 1, 2)]
    args = arguments(
        tmp_path, class_weights="balanced", loss="focal", calibration_method="none"
    )
    trainer = CalibrationTrainer(model, args, train_dataset=rows)
    assert trainer.calibration_loss.class_weights is not None
    assert trainer.calibration_loss.class_weights.tolist() == pytest.approx(wanted)
    for dataset, message in (
        (rows.select(range(7)), "got no examples of class 2, 3; give one"),
        (None, "numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            CalibrationTrainer(model, args, train_dataset=dataset)


@pytest.mark.parametrize(
    ("words", "found"), [(["0.5", "2"], [0.5, 2.0]), (["balanced"], "balanced")]
)
def test_class_weights_are_numbers_or_balanced_on_the_command_line(
    words: list[str], found: object, tmp_path: Path
) -> None:
    given = [
        "--output_dir",
        str(tmp_path),
        "--class_weights",
        *words,
        "--report_to",
        "none",
    ]
    (args,) = HfArgumentParser(
        CalibrationTrainingArguments
    ).parse_args_into_dataclasses(given)
    assert args.class_weights == found


class Average(TrainerCallback):
    """Leaves the mean of the weights of all steps, as stochastic weight averaging does."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.kept.append({k: v.clone() for k, v in model.state_dict().items()})

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        first, *others = self.kept
        mean = {k: sum((o[k] for o in others), first[k]) for k in first}
        model.load_state_dict({k: v / len(self.kept) for k, v in mean.items()})


@pytest.mark.parametrize("own_fit", [True, False])
def test_the_temperature_is_that_of_the_weights_that_a_callback_leaves(
    own_fit: bool, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tmp_path)
    tracker = Tracker()
    fit = [TemperatureScalingCallback()] if own_fit else []
    for callback in (*fit, Average(), tracker):
        trainer.add_callback(callback)
    trainer.train()
    assert any("temperature" in entry for entry in tracker.received)
    logged = last_evaluation(trainer)
    temperature = trainer.temperature
    trainer.save_calibrated_model(tmp_path / "calibrated")
    assert trainer.fit_temperature() == pytest.approx(temperature)
    again = trainer.evaluate()
    for key in ("eval_nll", "eval_nll_calibrated"):
        assert again[key] == pytest.approx(logged[key])


def test_a_calibrator_of_other_weights_is_not_folded(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.train()
    trainer.model.classifier.bias.data += 0.1
    message = r"the weights that the calibrator was fitted to, got weights .* since; call fit_"
    with pytest.raises(ValueError, match=message):
        trainer.save_calibrated_model(tmp_path / "calibrated")
    trainer.fit_calibration_map()
    trainer.save_calibrated_model(tmp_path / "calibrated")


class Logging(Average):
    """An average that also reads the log, so that it may be a tracker and comes last."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass


class OfAUser(BertForSequenceClassification):
    """A class that is loaded by its user's code only."""


def test_weights_that_change_after_the_fit_are_fitted_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.model.__class__ = OfAUser
    trainer.add_callback(Logging())
    trainer.train()
    assert "changed the weights after the calibrator was fitted" in caplog.text
    temperature = trainer.temperature
    logged = last_evaluation(trainer)
    trainer.save_calibrated_model(tmp_path / "calibrated")
    about = json.loads((tmp_path / "calibrated" / "calibration.json").read_text())
    assert about["metrics"]["after"]["nll"] == pytest.approx(
        logged["eval_nll_calibrated"], abs=1e-6
    )
    assert trainer.fit_temperature() == pytest.approx(temperature)


def test_metrics_of_other_weights_are_not_saved_with_a_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as those of an average that is put in for an evaluation."""
    trainer = tiny_trainer(tmp_path)
    trainer.train()
    own = weights(trainer.model)
    trainer.model.classifier.weight.data *= 0.5
    trainer.evaluate()
    assert "not those that the calibrator was fitted to" in caplog.text
    trainer.model.load_state_dict(own)
    trainer.save_calibrated_model(tmp_path / "other")
    about = json.loads((tmp_path / "other" / "calibration.json").read_text())
    assert "metrics" not in about
    trainer.evaluate()
    trainer.save_calibrated_model(tmp_path / "own")
    about = json.loads((tmp_path / "own" / "calibration.json").read_text())
    assert "metrics" in about


def test_a_model_is_saved_without_the_rule_of_another(tmp_path: Path) -> None:
    """Its promise would be printed for the new model."""
    trainer = tiny_trainer(tmp_path / "run")
    trainer.train()
    folder = tmp_path / "model"
    trainer.save_calibrated_model(folder)
    about = json.loads((folder / "calibration.json").read_text())
    rule = CostRule(1 - np.eye(N_LABELS))
    names = tuple(trainer.class_names.values())
    Decisions(rule, names, fingerprint=about["fingerprint"]).save(folder)
    plain = tiny_trainer(tmp_path / "run", calibration_method="none")
    plain.save_model(str(folder))
    assert not (folder / "decisions.json").exists()
