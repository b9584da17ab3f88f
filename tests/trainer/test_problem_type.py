"""The problem type is decided once, before the training, and every split is held to it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import pipeline

from hf_calib import CalibrationTrainer
from hf_calib.scaling import TemperatureScaling
from tests.helpers.tiny import (
    N_LABELS,
    TRUE_TEMPERATURE,
    arguments,
    assert_same,
    sequences,
    tiny_bert,
    tokenizer,
    weights,
)


def one_hot(rows: Dataset) -> Dataset:
    hot = [np.eye(N_LABELS)[label].tolist() for label in rows["label"]]
    return rows.remove_columns("label").add_column("label", hot)


def trainer_of(model: Any, folder: Path, **sets: Any) -> CalibrationTrainer:
    return CalibrationTrainer(model, arguments(folder), **sets)


def test_one_hot_labels_met_in_an_evaluation_are_refused(tmp_path: Path) -> None:
    model = tiny_bert()
    trainer = trainer_of(model, tmp_path, eval_dataset=sequences(model, 8))
    trainer.evaluate()
    with pytest.raises(ValueError, match=r"expected labels to have shape \(8,\)"):
        trainer.evaluate(one_hot(sequences(model, 8)))
    assert model.config.problem_type is None


@pytest.mark.parametrize("n_one_hot", [0, 7])
def test_soft_labels_of_one_softmax_are_not_trained_as_sigmoids(
    n_one_hot: int, tmp_path: Path
) -> None:
    rows = sequences(tiny_bert(), 8)
    labels = [[1.0, 0.0, 0.0, 0.0]] * n_one_hot
    labels += [[0.7, 0.2, 0.1, 0.0]] * (8 - n_one_hot)
    soft = rows.remove_columns("label").add_column("label", labels)
    model = tiny_bert()
    trainer = trainer_of(model, tmp_path, train_dataset=soft)
    with pytest.raises(ValueError, match=r"got rows that sum to 1; .*'multi_label_"):
        trainer.train()
    assert model.config.problem_type is None
    model = tiny_bert(problem_type="multi_label_classification")
    args = arguments(tmp_path, calibration_method="none", max_steps=1)
    CalibrationTrainer(model, args, train_dataset=soft).train()


@pytest.mark.parametrize("value", [math.nan, 1.5, -1.0])
@pytest.mark.parametrize("kind", ["dataset", "another"])
def test_decisions_outside_0_and_1_are_refused(
    value: float, kind: str, tmp_path: Path
) -> None:
    model = tiny_bert(problem_type="multi_label_classification")
    rows = sequences(model, 8).to_list()
    rows[3]["label"][1] = value
    sets = {
        "dataset": Dataset.from_list(rows),
        "another": torch.utils.data.Subset(rows, range(8)),
    }
    args = arguments(tmp_path, temperature_criterion="none")
    trainer = CalibrationTrainer(model, args, train_dataset=sets[kind])
    where = (
        "labels of the training split" if kind != "another" else "multi-label labels"
    )
    with pytest.raises(ValueError, match=rf"{where} to be in \[0, 1\], got {value}"):
        trainer.train()


def test_soft_decisions_train_but_do_not_calibrate(tmp_path: Path) -> None:
    model = tiny_bert(problem_type="multi_label_classification")
    rows = sequences(model, 8).to_list()
    rows[3]["label"][1] = 0.5
    soft = Dataset.from_list(rows)
    trainer_of(
        model, tmp_path, train_dataset=soft, calibration_dataset=sequences(model, 20)
    ).train()
    trainer = trainer_of(
        model, tmp_path, train_dataset=sequences(model, 8), calibration_dataset=soft
    )
    with pytest.raises(
        ValueError,
        match=r"labels of the calibration split to be 0 or 1, got 0\.5 in row 3",
    ):
        trainer.train()


def test_an_ignored_decision_does_not_drop_its_row_from_the_fit(tmp_path: Path) -> None:
    model = tiny_bert(problem_type="multi_label_classification")
    rows = sequences(model, 60, seed=2).to_list()
    for number, row in enumerate(rows):
        row["label"][number % N_LABELS] = -100.0  # one in each row
    rows[0]["label"] = [-100.0] * N_LABELS
    trainer = trainer_of(model, tmp_path, calibration_dataset=Dataset.from_list(rows))
    trainer.fit_temperature()
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor([row["input_ids"] for row in rows])
        ).logits.numpy()
    labels = np.array([row["label"] for row in rows])
    decided = labels != -100
    scaling = TemperatureScaling(multi_label=True)
    wanted = scaling.fit(
        logits[decided][:, None], labels[decided][:, None]
    ).temperature_
    assert trainer.temperature == pytest.approx(wanted, rel=1e-5)
    assert abs(wanted - TRUE_TEMPERATURE) < 1  # or the test would show nothing
    assert model.config.calibration["n_examples"] == 59


def test_rows_without_a_label_are_found_before_the_training(tmp_path: Path) -> None:
    model = tiny_bert()
    rows = sequences(model, 20, seed=2).to_list()
    rows[7]["label"] = rows[9]["label"] = None
    calibration = Dataset.from_list(rows).select(range(2, 20))
    trainer = trainer_of(
        model,
        tmp_path,
        train_dataset=sequences(model, 8),
        calibration_dataset=calibration,
    )
    before = weights(model)
    with pytest.raises(
        ValueError, match=r"the calibration split to be given.*None in row 5"
    ):
        trainer.train()
    assert_same(weights(model), before)


@pytest.mark.parametrize("loss", ["focal", "adafocal"])
def test_one_sigmoid_is_trained_calibrated_and_served(
    loss: str, tmp_path: Path
) -> None:
    model = tiny_bert(num_labels=1, problem_type="multi_label_classification")
    train, calibration, evaluation = (
        sequences(model, n, seed=n) for n in (32, 200, 100)
    )
    trainer = CalibrationTrainer(
        model,
        arguments(tmp_path, loss=loss, num_train_epochs=2),
        train_dataset=train,
        calibration_dataset=calibration,
        eval_dataset=evaluation,
        processing_class=tokenizer(),
    )
    trainer.train()
    trainer.save_calibrated_model(tmp_path / "calibrated")
    served = pipeline("text-classification", tmp_path / "calibrated")("w1 w2 w3")[0][
        "score"
    ]
    model.eval()
    logit = model(**tokenizer()("w1 w2 w3", return_tensors="pt")).logits[0, 0]
    assert served == pytest.approx(
        torch.sigmoid(logit / trainer.temperature).item(), abs=1e-5
    )
