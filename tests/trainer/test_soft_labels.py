"""Soft labels of one softmax in a training, its evaluations and its calibration split; weights of positives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy.special import softmax
from transformers import (
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    default_data_collator,
)

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments
from hf_calib.losses import adafocal
from hf_calib.metrics import (
    accuracy,
    brier_score,
    expected_calibration_error,
    negative_log_likelihood,
)
from hf_calib.trainer import AdaFocalCallback
from tests.helpers.tiny import (
    N_LABELS,
    arguments,
    assert_same,
    sequences,
    shared,
    tiny_bert,
    tokenizer,
    weights,
)

SINGLE = {"problem_type": "single_label_classification"}
SEVERAL = {"problem_type": "multi_label_classification"}


def soft_trainer(
    folder: Path, rows: Any = None, *, model: Any = None, **settings: Any
) -> CalibrationTrainer:
    """Training rows with soft labels, and hard ones to calibrate."""
    model = model or tiny_bert(**SINGLE)
    sets = {
        "train_dataset": shared(model, 16) if rows is None else rows,
        "calibration_dataset": sequences(model, 40, seed=2),
        "eval_dataset": shared(model, 24, seed=3),
    }
    return CalibrationTrainer(model, arguments(folder, **settings), **sets)


def changed(rows: Dataset, row: int, label: Any) -> Dataset:
    listed = rows.to_list()
    listed[row]["label"] = label
    return Dataset.from_list(listed)


def test_an_evaluation_has_the_metrics_of_the_shares(tmp_path: Path) -> None:
    trainer = soft_trainer(tmp_path, per_device_eval_batch_size=10)
    trainer.train()
    found = trainer.evaluate(keep_logits=True)
    assert trainer.last_evaluation is not None
    logits, labels = trainer.last_evaluation.logits_and_labels()
    np.testing.assert_allclose(labels, trainer.eval_dataset["label"][:], rtol=1e-6)
    labels = labels / labels.sum(axis=1, keepdims=True)  # Their float32 is rounded.
    probs = softmax(logits.astype(np.float64), axis=1)
    calibrated = softmax(logits / trainer.temperature, axis=1)
    for name, each in (("", probs), ("_calibrated", calibrated)):
        nll = negative_log_likelihood(each, labels)
        assert found[f"eval_nll{name}"] == pytest.approx(nll, rel=1e-5)
        assert found[f"eval_brier{name}"] == pytest.approx(
            brier_score(each, labels), rel=1e-5
        )
        right = accuracy(each, labels)
        assert found[f"eval_accuracy{name}"] == pytest.approx(right, rel=1e-6)
        ece = expected_calibration_error(each, labels)
        assert found[f"eval_ece{name}"] == pytest.approx(ece, rel=1e-5)
    assert found["eval_loss"] == pytest.approx(found["eval_nll"], rel=1e-6)
    assert trainer.last_evaluation.predictions({}).labels.ndim == 1
    trainer.save_calibrated_model(tmp_path / "calibrated")


@pytest.mark.parametrize("collator", ["padding", "default"])
def test_one_hot_rows_train_as_class_indices(collator: str, tmp_path: Path) -> None:
    ends = []
    for is_soft in (True, False):
        model = tiny_bert(**SINGLE)
        rows = sequences(model, 16)
        if is_soft:
            hot = np.eye(N_LABELS)[rows["label"][:]].tolist()
            rows = rows.remove_columns("label").add_column("label", hot)
        made = default_data_collator
        if collator == "padding":
            made = DataCollatorWithPadding(tokenizer())
        args = arguments(tmp_path, loss="focal", calibration_method="none")
        trainer = CalibrationTrainer(
            model, args, train_dataset=rows, data_collator=made
        )
        trainer.train()
        ends.append(weights(model))
    for name, ours in ends[0].items():
        torch.testing.assert_close(ours, ends[1][name])


def test_resumed_predicted_and_with_metrics_of_the_user(tmp_path: Path) -> None:
    seen: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.label_ids)
        return {"rows": float(len(prediction.label_ids))}

    settings = {"save_strategy": "steps", "save_steps": 2}
    whole = soft_trainer(tmp_path, **settings)
    whole.train()
    resumed = soft_trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(weights(resumed.model), weights(whole.model))
    resumed.compute_metrics = metrics
    rows = changed(shared(resumed.model, 24, seed=3), 3, [-100.0] * N_LABELS)
    assert resumed.evaluate(rows)["eval_rows"] == 24
    found = resumed.predict(rows)
    assert found.metrics["test_nll"] > 0
    assert seen[0].shape == (24, N_LABELS)
    last = resumed.last_evaluation
    assert last is not None
    assert last.raw is not None
    assert last.raw.n_rows == 23


@pytest.mark.parametrize(
    ("label", "got"),
    [
        ([0.5, 0.2, 0.1, 0.1], r"sum to 1, got 0.5, 0.2, 0.1, 0.1 in row 5"),
        ([1.2, -0.2, 0.0, 0.0], r"sum to 1, got 1.2, -0.2, 0.0, 0.0 in row 5"),
        ([0.5, 0.5], "one share for each of the 4 classes, got 0.5, 0.5"),
    ],
)
@pytest.mark.parametrize("kind", ["dataset", "list"])
def test_rows_that_are_no_shares_are_found_before_the_training(
    label: list[float], got: str, kind: str, tmp_path: Path
) -> None:
    model = tiny_bert(**SINGLE)
    rows: Any = changed(shared(model, 16), 5, label)
    if kind == "list":
        rows = rows.to_list()
    message = rf"labels of the training split to be .*{got}.*\(1 such row\); divide"
    with pytest.raises(ValueError, match=message):
        soft_trainer(tmp_path, rows, model=model).train()


def test_rows_that_are_not_in_memory_are_found_in_their_batch(tmp_path: Path) -> None:
    model = tiny_bert(**SINGLE)
    rows = changed(shared(model, 16), 5, [0.5, 0.2, 0.1, 0.1])
    others = torch.utils.data.Subset(rows, range(16))
    with pytest.raises(ValueError, match="whose rows sum to 1, got a row"):
        soft_trainer(tmp_path, others, model=model).train()


def test_soft_labels_that_a_collator_divides_are_trained(tmp_path: Path) -> None:
    model = tiny_bert(**SINGLE)
    votes = np.array(shared(model, 16)["label"][:]) * 7
    rows = shared(model, 16).remove_columns("label").add_column("label", votes.tolist())

    def divided(listed: Any) -> Any:
        batch = default_data_collator(listed)
        batch["labels"] = batch["labels"] / batch["labels"].sum(1, keepdim=True)
        return batch

    args = arguments(tmp_path, calibration_method="none")
    CalibrationTrainer(model, args, train_dataset=rows, data_collator=divided).train()


@pytest.mark.parametrize("settings", [{"loss": "mmce"}, {"loss": "dual_focal"}])
def test_losses_without_a_form_are_refused_before_the_training(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    trainer = soft_trainer(tmp_path, **settings)
    before = weights(trainer.model)
    with pytest.raises(ValueError, match=f"soft labels, got '{settings['loss']}'"):
        trainer.train()
    assert_same(weights(trainer.model), before)


def test_a_calibrator_is_not_fitted_to_soft_labels(tmp_path: Path) -> None:
    message = "one class index per row for a calibrator, got soft labels; pass a"
    trainer = soft_trainer(tmp_path)
    trainer.calibration_dataset = shared(trainer.model, 20, seed=2)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    with pytest.raises(ValueError, match=message):
        trainer.fit_temperature()


@pytest.mark.parametrize("loss", ["adafocal", "calfocal"])
def test_gammas_follow_the_shares(loss: str, tmp_path: Path) -> None:
    """As of rows that are there four times, a share of 1/4 with each label."""
    tables = []
    for is_soft in (True, False):
        model = tiny_bert(**SINGLE)
        settings = {"loss": loss, "gamma_update_steps": 2, "max_steps": 3}
        inputs = shared(model, 45, seed=2)["input_ids"][:]
        drawn = np.random.default_rng(0).integers(0, N_LABELS, (45, 4))
        shares = np.eye(N_LABELS)[drawn].mean(axis=1)
        columns = {"input_ids": inputs, "label": shares.tolist()}
        if not is_soft:
            repeated = [ids for ids in inputs for _ in range(4)]
            columns = {"input_ids": repeated, "label": drawn.ravel().tolist()}
        held_out = Dataset.from_dict(columns)
        trainer = CalibrationTrainer(
            model,
            arguments(tmp_path, calibration_method="none", **settings),
            train_dataset=shared(model, 16),
            calibration_dataset=held_out,
        )
        trainer.train()
        table = dict(trainer.calibration_loss.named_buffers())
        table.pop("counts", None)
        tables.append(table)
    torch.testing.assert_close(*tables)
    assert tables[0]["gammas"].unique().numel() > 2


def test_a_stock_trainer_adapts_to_soft_labels(tmp_path: Path) -> None:
    model = tiny_bert(**SINGLE)
    loss = adafocal(**SINGLE)
    trainer = Trainer(
        model,
        arguments(tmp_path),
        train_dataset=shared(model, 16),
        compute_loss_func=lambda outputs, labels, **_: loss(outputs, labels),
    )
    trainer.compute_loss_func = loss
    rows = shared(model, 40, seed=2)
    callback = AdaFocalCallback(
        every_n_steps=2, trainer=trainer, calibration_dataset=rows
    )
    trainer.add_callback(callback)
    trainer.train()
    assert loss.gammas.unique().numel() > 2


# Weights of positives


def test_balanced_pos_weight_is_negatives_over_positives(tmp_path: Path) -> None:
    model = tiny_bert(**SEVERAL)
    rows = changed(sequences(model, 30), 4, [-100.0, 1.0, 0.0, 0.0])
    settings = {"pos_weight": "balanced", "calibration_method": "none"}
    trainer = CalibrationTrainer(
        model, arguments(tmp_path, **settings), train_dataset=rows
    )
    trainer.train()
    labels = np.array(rows["label"][:])
    wanted = (labels == 0).sum(axis=0) / (labels == 1).sum(axis=0)
    found = trainer.calibration_loss.pos_weight
    assert found is not None
    assert found.tolist() == pytest.approx(wanted.tolist())
    record = trainer.state.stateful_callbacks["CalibrationLoss"]
    assert record["pos_weight"] == found.tolist()
    of_list = CalibrationTrainer(
        model, arguments(tmp_path, **settings), train_dataset=rows.to_list()
    )
    torch.testing.assert_close(of_list.calibration_loss.pos_weight, found)


def test_balanced_pos_weight_of_fractions(tmp_path: Path) -> None:
    """They are rounded on their way into a batch, which is no change of the labels."""
    rows = sequences(tiny_bert(**SEVERAL), 12).to_list()
    for i, row in enumerate(rows):
        row["label"] = [0.1 + 0.05 * i, 0.3, 1.0 - i % 2, 0.7]
    args = arguments(tmp_path, pos_weight="balanced", calibration_method="none")
    trainer = CalibrationTrainer(
        tiny_bert(**SEVERAL), args, train_dataset=Dataset.from_list(rows)
    )
    labels = np.array([row["label"] for row in rows])
    wanted = (1 - labels).sum(axis=0) / labels.sum(axis=0)
    found = trainer.calibration_loss.pos_weight
    assert found is not None
    assert found.tolist() == pytest.approx(wanted.tolist())


def test_balanced_pos_weight_of_soft_labels_is_refused_for_what_they_are(
    tmp_path: Path,
) -> None:
    rows = sequences(tiny_bert(**SINGLE), 12).to_list()
    for row in rows:
        row["label"] = [0.1, 0.2, 0.3, 0.4]
    args = arguments(tmp_path, pos_weight="balanced", calibration_method="none")
    with pytest.raises(
        ValueError, match="pos_weight to be used with several labels per row"
    ):
        CalibrationTrainer(
            tiny_bert(**SINGLE), args, train_dataset=Dataset.from_list(rows)
        )


def without(value: float) -> Any:
    """Rows of which the second label has no such decision."""
    rows = sequences(tiny_bert(**SEVERAL), 12).to_list()
    for row in rows:
        row["label"][1] = 1 - value
    return Dataset.from_list(rows)


def negated(rows: Any) -> Any:
    batch = default_data_collator(rows)
    batch["labels"] = 1 - batch["labels"]
    return batch


@pytest.mark.parametrize(
    ("rows", "given", "message"),
    [
        (without(1.0), {}, "have a positive in the training split, got no .* label 1;"),
        (without(0.0), {}, "have a negative in the training split, got no .* label 1;"),
        (
            sequences(tiny_bert(), 12),
            {},
            "as numbers where the rows of the training split do not have 0 or 1",
        ),
        (
            sequences(tiny_bert(**SEVERAL), 12),
            {"data_collator": negated},
            "pos_weight to be given as numbers where a transform or collator changes",
        ),
    ],
)
def test_pos_weight_that_cannot_be_balanced(
    rows: Any, given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    args = arguments(tmp_path, pos_weight="balanced", calibration_method="none")
    with pytest.raises(ValueError, match=message):
        CalibrationTrainer(tiny_bert(**SEVERAL), args, train_dataset=rows, **given)


@pytest.mark.parametrize("problem", [{}, SINGLE])
def test_pos_weight_of_one_label_per_row_is_refused(
    problem: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_bert(**problem)
    args = arguments(tmp_path, pos_weight=2.0, calibration_method="none")
    with pytest.raises(ValueError, match="pos_weight to be used with several labels"):
        CalibrationTrainer(model, args, train_dataset=sequences(model, 8)).train()


def test_the_number_of_pos_weights_is_that_of_the_labels(tmp_path: Path) -> None:
    message = "pos_weight to have one entry for each of the 4 classes, got 3"
    with pytest.raises(ValueError, match=message):
        CalibrationTrainer(
            tiny_bert(**SEVERAL), arguments(tmp_path, pos_weight=[1, 2, 3])
        )
    with pytest.raises(ValueError, match="multi-label form, got 'mmce'"):
        arguments(tmp_path, loss="mmce", pos_weight="balanced")
    with pytest.raises(ValueError, match="pos_weight to be numbers, or 'balanced'"):
        arguments(tmp_path, pos_weight="3x")


@pytest.mark.parametrize(
    ("words", "found"),
    [(["3"], [3.0]), (["0.5", "2"], [0.5, 2.0]), (["balanced"], "balanced")],
)
def test_pos_weight_on_the_command_line(
    words: list[str], found: Any, tmp_path: Path
) -> None:
    parser = HfArgumentParser(CalibrationTrainingArguments)  # type: ignore[arg-type]
    given = ["--output_dir", str(tmp_path), "--report_to", "none"]
    (args,) = parser.parse_args_into_dataclasses([*given, "--pos_weight", *words])
    assert args.pos_weight == found


def test_a_checkpoint_knows_its_pos_weight(tmp_path: Path) -> None:
    model = tiny_bert(**SEVERAL)
    settings: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 2,
        "calibration_method": "none",
    }
    rows = sequences(model, 8)
    first = arguments(tmp_path, pos_weight=3.0, **settings)
    CalibrationTrainer(model, first, train_dataset=rows).train()
    other = arguments(tmp_path, pos_weight=[2.0], **settings)
    with pytest.raises(ValueError, match=r"pos_weight=2.0, got .* pos_weight=3.0; "):
        CalibrationTrainer(model, other, train_dataset=rows).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-1")
        )
