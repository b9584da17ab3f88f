"""Cross-calibration: no row is predicted by a model that has seen it, and a second call does what is missing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from scipy.special import softmax
from transformers import BertConfig, BertForSequenceClassification

from hf_calib import CalibrationTrainer, cross_calibrate
from hf_calib.metrics import expected_calibration_error, negative_log_likelihood
from hf_calib.scaling import TemperatureScaling, VectorScaling
from hf_calib.trainer.cross_calibration import _predicted
from tests.helpers.killed_cross_calibration import N_FOLDS, N_ROWS
from tests.helpers.places import ROOT
from tests.helpers.tiny import TEXT, arguments, assert_same, sequences, tagged, tiny_bert, weights

Made = Callable[[Any, str], CalibrationTrainer]


def maker(model: Any = tiny_bert, seen: list[tuple[str, Any]] | None = None, **settings: Any) -> Made:
    """A make_trainer that notes what it was called with."""

    def make_trainer(train_dataset: Any, output_dir: str) -> CalibrationTrainer:
        if seen is not None:
            seen.append((Path(output_dir).name, train_dataset))
        args = arguments(output_dir, **{"calibration_method": "temperature", **settings})
        return CalibrationTrainer(model(), args, train_dataset=train_dataset)

    return make_trainer


def ids(rows: Any) -> set[tuple[int, ...]]:
    return {tuple(row["input_ids"]) for row in rows}


@pytest.mark.parametrize("settings", [{}, {"max_steps": 3}, {"gradient_accumulation_steps": 3}])
@pytest.mark.deep
def test_all_trainings_take_the_same_number_of_steps(settings: dict[str, Any], tmp_path: Path) -> None:
    made: list[CalibrationTrainer] = []

    def make_trainer(train_dataset: Any, output_dir: str) -> CalibrationTrainer:
        made.append(maker(**settings)(train_dataset, output_dir))
        return made[-1]

    cross_calibrate(make_trainer, sequences(tiny_bert(), 26), 2, output_dir=tmp_path)
    steps = [trainer.state.global_step for trainer in made[1:]]
    assert steps == [made[-1].state.max_steps] * 3
    assert made[1].args.max_steps == settings.get("max_steps", -1)  # as it was


@pytest.mark.deep
def test_each_row_is_predicted_by_the_training_that_did_not_see_it(tmp_path: Path) -> None:
    """Held to trainings of its own, fold by fold."""
    rows, seen = sequences(tiny_bert(), 26), []
    found = cross_calibrate(maker(seen=seen), rows, 3, output_dir=tmp_path)
    assert [name for name, _ in seen] == ["final", "fold_0", "fold_1", "fold_2", "final"]
    assert seen[-1][1] is rows
    start = 0
    held_out_so_far: set[tuple[int, ...]] = set()
    for _, train in seen[1:4]:
        seen_rows = ids(train)
        held_out = rows.select([i for i, row in enumerate(rows) if tuple(row["input_ids"]) not in seen_rows])
        assert len(train) + len(held_out) == len(rows)
        assert not held_out_so_far & ids(held_out)
        held_out_so_far |= ids(held_out)
        as_many = {"max_steps": found.trainer.state.max_steps}  # as the training on all rows
        alone = maker(temperature_criterion="none", **as_many)(train, str(tmp_path / "alone"))
        alone.train()
        predicted = alone.predict(held_out)
        end = start + len(held_out)
        assert np.array_equal(found.logits[start:end], predicted.predictions)
        assert np.array_equal(found.labels[start:end], predicted.label_ids)
        start = end
    assert start == len(rows)

    scaler = TemperatureScaling().fit(found.logits, found.labels)
    assert found.scaler.temperature_ == scaler.temperature_ == found.trainer.temperature
    record = found.trainer.model.config.calibration
    assert (record["split"], record["n_examples"], record["folded"]) == ("out-of-fold", 26, False)
    for suffix, probs in (
        ("", softmax(found.logits, axis=1)),
        ("_calibrated", scaler.predict_proba(found.logits)),
    ):
        for name, metric in (("nll", negative_log_likelihood), ("ece", expected_calibration_error)):
            by_hand = metric(probs, found.labels)
            assert found.metrics[f"out_of_fold_{name}{suffix}"] == pytest.approx(by_hand, abs=1e-6)
    alone = maker(temperature_criterion="none")(rows, str(tmp_path / "alone"))
    alone.train()
    assert_same(weights(found.trainer.model), weights(alone.model))

    found.trainer.save_calibrated_model(tmp_path / "calibrated")
    served = BertForSequenceClassification.from_pretrained(tmp_path / "calibrated")
    with torch.no_grad():
        logits = served(torch.tensor(rows["input_ids"][:])).logits.numpy()
    assert logits == pytest.approx(
        found.trainer.predict(rows).predictions / found.scaler.temperature_, abs=1e-5
    )


@pytest.mark.deep
def test_folds_are_stratified_where_rows_have_one_label(tmp_path: Path) -> None:
    rows = sequences(tiny_bert(), 30)
    labels = np.bincount(rows["label"][:], minlength=4)
    cross_calibrate(maker(max_steps=1), rows, 3, output_dir=tmp_path)
    counts = [
        np.bincount(load_file(tmp_path / f"fold_{fold}" / "out_of_fold.safetensors")["labels"], minlength=4)
        for fold in range(3)
    ]
    assert np.ptp(counts, axis=0).max() <= 1
    assert np.ptp(np.sum(counts, axis=1)) <= 1
    assert np.sum(counts, axis=0).tolist() == labels.tolist()


@pytest.mark.parametrize("kind", ["list", "tokens", "multi-label", "torch"])
@pytest.mark.deep
def test_other_rows(kind: str, tmp_path: Path) -> None:
    config = {"problem_type": "multi_label_classification"} if kind == "multi-label" else {}

    def model() -> Any:
        return tiny_bert("Token" if kind == "tokens" else "Sequence", **config)

    rows: Any = (tagged if kind == "tokens" else sequences)(model(), 12)
    if kind in ("list", "torch"):
        rows = [dict(row) for row in rows]
    if kind == "torch":
        rows = torch.utils.data.Subset(rows, range(12))
    found = cross_calibrate(maker(model), rows, 2, output_dir=tmp_path)
    n_labels = sum(label != -100 for row in rows for label in row["labels"]) if kind == "tokens" else 12
    assert found.logits.shape == (n_labels, 4)
    assert found.labels.shape == ((12, 4) if kind == "multi-label" else (n_labels,))
    assert found.trainer.temperature == found.scaler.temperature_
    assert found.scaler.multi_label is (kind == "multi-label")


@pytest.mark.deep
def test_a_map_with_a_bias(tmp_path: Path) -> None:
    rows = sequences(tiny_bert(), 120)
    found = cross_calibrate(maker(calibration_method="vector"), rows, 2, output_dir=tmp_path / "out")
    assert isinstance(found.scaler, VectorScaling)
    assert found.trainer.calibration_map is found.scaler
    found.trainer.save_calibrated_model(tmp_path / "calibrated")
    served = BertForSequenceClassification.from_pretrained(tmp_path / "calibrated")
    with torch.no_grad():
        logits = served(torch.tensor(rows["input_ids"][:])).logits.numpy()
    scaled = found.scaler.transform(found.trainer.predict(rows).predictions)
    assert logits == pytest.approx(scaled, abs=1e-5 * np.abs(scaled).max())


@pytest.mark.deep
def test_fresh_heads_start_alike(tmp_path: Path) -> None:
    """As from_pretrained makes them, with random weights of the moment."""

    def model() -> Any:
        return BertForSequenceClassification(BertConfig(num_labels=4, **TEXT))

    found = cross_calibrate(maker(model), sequences(tiny_bert(), 12), 2, output_dir=tmp_path)
    assert np.isfinite(found.logits).all()


@pytest.mark.deep
def test_killed_and_called_again(tmp_path: Path) -> None:
    """A fold and the last training die between checkpoints; nothing is different in the end."""
    command = [sys.executable, "-W", "error", "-m", "tests.helpers.killed_cross_calibration", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT)
    died = -signal.SIGKILL
    assert json.loads((tmp_path / "endings.json").read_text()) == [died, died, 0, 0]
    whole, broken, again = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "not at all", "again")
    )
    assert whole["trained"] == [*(f"fold_{fold}" for fold in range(N_FOLDS)), "final"]
    assert broken["trained"] == again["trained"] == ["final"]
    assert len(whole["rows"]["labels"]) == N_ROWS
    for other in (broken, again):
        assert_same(whole["weights"], other["weights"])
        assert_same(whole["rows"], other["rows"])
        assert whole["metrics"] == other["metrics"]
        assert whole["temperature"] == other["temperature"]


@pytest.mark.deep
def test_a_fold_that_was_cut_short_is_named(tmp_path: Path) -> None:
    (tmp_path / "out_of_fold.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(
        ValueError, match=r"out_of_fold.safetensors to be as it was written, got .*; remove it: its"
    ):
        _predicted(tmp_path / "out_of_fold.safetensors")


@pytest.mark.deep
def test_a_folder_of_another_cross_calibration_is_refused(tmp_path: Path) -> None:
    rows = sequences(tiny_bert(), 12)

    def call(made: Made, dataset: Any = rows, n_folds: int = 2, **kwargs: Any) -> Any:
        return cross_calibrate(made, dataset, n_folds, output_dir=tmp_path, **kwargs)

    first = call(maker())
    changed: list[tuple[str, Callable[[], Any]]] = [
        ("learning_rate", lambda: call(maker(learning_rate=0.1))),
        ("loss", lambda: call(maker(loss="focal"))),
        ("n_folds", lambda: call(maker(), n_folds=3)),
        ("seed_of_folds", lambda: call(maker(), seed=1)),
        ("data", lambda: call(maker(), rows.map(lambda row: {"input_ids": row["input_ids"][::-1]}))),
        ("data, rows", lambda: call(maker(), rows.select(range(11)))),
        ("weights", lambda: call(maker(lambda: tiny_bert(seed=1)))),
    ]
    for name, again in changed:
        with pytest.raises(ValueError, match=f"made with other {name}; name a new folder"):
            again()
    # What changes no logits may change; another map is fitted on those that are there.
    seen: list[tuple[str, Any]] = []
    second = call(maker(seen=seen, temperature_criterion="ece", logging_steps=7))
    assert [name for name, _ in seen] == ["final", "final"]
    assert np.array_equal(first.logits, second.logits)
    assert second.scaler.criterion == "ece"


def test_refused_before_any_training(tmp_path: Path) -> None:
    model, rows = tiny_bert(), sequences(tiny_bert(), 8)

    def refused(
        message: str, made: Any, dataset: Any = rows, n_folds: Any = 2, error: type = ValueError
    ) -> None:
        with pytest.raises(error, match=message):
            cross_calibrate(made, dataset, n_folds, output_dir=tmp_path / "out")
        assert not list(tmp_path.glob("**/checkpoint-*"))
        assert not list(tmp_path.glob("**/*.safetensors"))

    def with_sets(**sets: Any) -> Made:
        def make_trainer(train_dataset: Any, output_dir: str) -> CalibrationTrainer:
            return CalibrationTrainer(
                tiny_bert(), arguments(output_dir), **{"train_dataset": train_dataset, **sets}
            )

        return make_trainer

    for n_folds in (1, 9, 2.0, True):
        refused("n_folds to be a whole number from 2 to the 8 rows", maker(), n_folds=n_folds)
    refused(
        "dataset to have rows, a length and an index, got a IterableDataset",
        maker(),
        rows.to_iterable_dataset(),
    )
    refused("dataset to have rows, a length and an index", maker(), [])
    refused("to return a CalibrationTrainer, got NoneType", lambda *_: None, error=TypeError)
    refused("have output_dir", lambda rows, _: maker()(rows, str(tmp_path / "mine")))
    refused("to train on the 8 rows, got NoneType", with_sets(train_dataset=None))
    refused("to train on the 4 rows, got 8 rows", with_sets(train_dataset=rows))
    refused("to have no calibration_dataset, got one", with_sets(calibration_dataset=rows))
    refused("no held-out predictions while it trains, got 'adafocal'", maker(loss="adafocal"))
    refused("have a calibration map to fit, got none", maker(temperature_criterion="none"))
    refused("return a fresh model each time, got the same model again", maker(lambda: model))
    wrong = rows.map(lambda row, i: {"label": 9 if i == 3 else row["label"]}, with_indices=True)
    refused(r"labels of the training split to be in \[0, 4\), got 9 in row 3", maker(), wrong)


def test_a_model_that_is_handed_on_is_found_out(tmp_path: Path) -> None:
    """A copy of a model that has been trained: all rows of fold 1 but some were seen."""
    last: list[CalibrationTrainer] = []

    def make_trainer(train_dataset: Any, output_dir: str) -> CalibrationTrainer:
        model = tiny_bert()
        if last:
            model.load_state_dict(last[-1].model.state_dict())
        last.append(maker(lambda: model)(train_dataset, output_dir))
        return last[-1]

    with pytest.raises(
        ValueError, match="fresh model each time, got one with other weights than in the first call"
    ):
        cross_calibrate(make_trainer, sequences(tiny_bert(), 8), 2, output_dir=tmp_path)
    assert not (tmp_path / "fold_1").exists() or not list((tmp_path / "fold_1").glob("*.safetensors"))
