"""Errors and warnings about data before a training starts."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from transformers import TrainingArguments

from hf_calib import CalibrationTrainer
from hf_calib.losses import make_loss
from hf_calib.trainer.checks import warn_of_split_batches
from tests.helpers.tiny import (
    N_LABELS,
    arguments,
    assert_same,
    sequences,
    tiny_bert,
    tiny_trainer,
    weights,
)

NO_TEMPERATURE = {"temperature_criterion": "none"}


def warned(function: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in caught]


def trainer_of(roles: str, folder: Path, **settings: Any) -> CalibrationTrainer:
    """Roles: which of the data sets a, b, c trains, calibrates and evaluates; - for none, * for {"x": b, "y": c}."""
    model = tiny_bert()
    sets: dict[str, Any] = {
        name: sequences(model, 24, seed=seed) for seed, name in enumerate("abc")
    }
    sets |= {"-": None, "*": {"x": sets["b"], "y": sets["c"]}}
    train, calibration, evaluation = (sets[role] for role in roles)
    args = arguments(folder, max_steps=1, **settings)
    return CalibrationTrainer(
        model,
        args,
        train_dataset=train,
        calibration_dataset=calibration,
        eval_dataset=evaluation,
    )


NO_DATA = r"There is no calibration_dataset, and {}\. Temperature scaling will not be fitted.* Pass calibration_dataset"
TWICE = r"The {} split is also the calibration split\. Temperature scaling will follow .* Hold some examples out"
REPORTED = r"The training split is also the evaluation split\. The reported .* Hold some examples out"
ROLES = {
    **dict.fromkeys(("abc", "ab-"), None),
    "a--": NO_DATA.format("no evaluation set either"),
    "a-*": NO_DATA.format("several evaluation sets"),
    **dict.fromkeys(("a-b", "abb", "ab*"), TWICE.format("evaluation")),
    **dict.fromkeys(("aac", "aaa", "a-a", "aa*"), TWICE.format("training")),
    "aba": REPORTED,
}


@pytest.mark.parametrize("roles", ROLES)
def test_one_warning_where_a_split_plays_two_roles(roles: str, tmp_path: Path) -> None:
    trainer = trainer_of(roles, tmp_path)
    found, wanted = warned(lambda: trainer._check_data()), ROLES[roles]
    assert len(found) == (wanted is not None)
    assert wanted is None or re.match(wanted, found[0])


@pytest.mark.parametrize(
    ("roles", "got"), [("a--", "none"), ("a-*", "several evaluation sets")]
)
def test_an_adaptive_loss_needs_held_out_data(
    roles: str, got: str, tmp_path: Path
) -> None:
    trainer = trainer_of(roles, tmp_path, loss="adafocal")
    before = weights(trainer.model)
    with pytest.raises(
        ValueError,
        match=f"expected calibration_dataset to be given for loss 'adafocal'.*got {got}",
    ):
        trainer.train()
    assert_same(weights(trainer.model), before)


def test_a_stream_can_calibrate_but_has_no_subset(tmp_path: Path) -> None:
    for samples in (None, 4):
        trainer = tiny_trainer(
            tmp_path,
            loss="adafocal",
            gamma_update_steps=1,
            gamma_update_samples=samples,
        )
        rows = trainer.calibration_dataset
        trainer.calibration_dataset = IterableDataset.from_generator(
            lambda rows=rows: iter(rows.to_list())
        )
        if samples is None:
            trainer.train()
            assert trainer.model.config.calibration["n_examples"] == 40
        else:
            with pytest.raises(TypeError, match="has no len"):
                trainer.train()


@pytest.mark.parametrize("split", ["training", "calibration", "evaluation", "y"])
@pytest.mark.parametrize("label", [N_LABELS, -1])
def test_labels_out_of_range_are_refused(
    split: str, label: int, tmp_path: Path
) -> None:
    model = tiny_bert()
    sets: dict[str, Any] = {
        name: sequences(model, 24, seed=4)
        for name in ("training", "calibration", "x", split)
    }
    sets[split] = sets[split].map(
        lambda row, i: {"label": label if i in (5, 9) else row["label"]},
        with_indices=True,
    )
    sets[split] = sets[split].select(range(2, 24))  # a view, whose row 3 was row 5
    evaluation = (
        sets["evaluation"]
        if split == "evaluation"
        else {"x": sets["x"], "y": sets.get("y", sets["x"])}
    )
    trainer = CalibrationTrainer(
        model,
        arguments(tmp_path, loss="focal"),
        train_dataset=sets["training"],
        calibration_dataset=sets["calibration"],
        eval_dataset=evaluation,
    )
    message = rf"labels of the {split} split to be in \[0, 4\), got {label} in row 3 \(2 such rows\)"
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_labels_that_are_names_are_refused_as_such(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    names = [f"c{label}" for label in trainer.train_dataset["label"]]
    trainer.train_dataset = trainer.train_dataset.remove_columns("label").add_column(
        "label", names
    )
    message = r"labels of the training split to be class indices, got 'c\d' in row 0; number them alike in all splits"
    with pytest.raises(ValueError, match=message):
        trainer.train()


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.full((8,), 7 + index), "labels": torch.tensor(index)}


def test_models_that_do_not_fit_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="a classifier with at least 2 labels, got 1; load it with num_labels=2",
    ):
        CalibrationTrainer(tiny_bert(num_labels=1), arguments(tmp_path))
    multi_label = tiny_bert(problem_type="multi_label_classification")
    with pytest.raises(
        ValueError,
        match=r"loss to have a multi-label form, got 'dual_focal'.*use one of .*focal",
    ):
        CalibrationTrainer(multi_label, arguments(tmp_path, loss="dual_focal"))
    with pytest.raises(
        ValueError, match=r"expected problem_type to be one of .*got 'regression'"
    ):
        CalibrationTrainer(tiny_bert(problem_type="regression"), arguments(tmp_path))


def test_arguments_that_do_not_fit_are_refused_at_once(tmp_path: Path) -> None:
    stock = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(
        TypeError,
        match="expected args to be CalibrationTrainingArguments, got TrainingArguments",
    ):
        CalibrationTrainer(tiny_bert(), stock)

    def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs.logits.sum()

    message = (
        "expected the loss to be given once, got compute_loss_func and loss='focal'"
    )
    focal = arguments(tmp_path, loss="focal")
    with pytest.raises(ValueError, match=message):
        CalibrationTrainer(tiny_bert(), focal, compute_loss_func=own_loss)
    with pytest.raises(ValueError, match=message):
        CalibrationTrainer(tiny_bert(), focal, None, None, None, None, None, own_loss)


def test_a_penalty_that_depends_on_the_batch_says_so_once(tmp_path: Path) -> None:
    (found,) = warned(
        trainer_of("abc", tmp_path, loss="mmce", gradient_accumulation_steps=2).train
    )
    assert found.startswith(
        "The penalty of loss 'mmce' depends on the batch, and is computed on micro-batches of 4 of the 8"
    )
    for settings in (
        {"loss": "mmce"},
        {"loss": "ece_ce"},
        {"loss": "focal", "gradient_accumulation_steps": 2},
    ):
        trainer = trainer_of("abc", tmp_path, **settings)
        assert warned(lambda: trainer._check_data()) == []  # noqa: B023


@pytest.mark.parametrize("gathers", [False, True])
def test_a_penalty_is_on_the_part_of_each_process_unless_they_gather(
    gathers: bool,
) -> None:
    args = SimpleNamespace(
        train_batch_size=4, world_size=2, gradient_accumulation_steps=1
    )
    said = warned(
        lambda: warn_of_split_batches(make_loss("mmce"), args, gathers=gathers)
    )
    assert ["micro-batches of 4 of the 8 examples" in each for each in said] == (
        [] if gathers else [True]
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"loss": "ece_ce", "gradient_accumulation_steps": 2},
            "The weights of loss 'ece_ce' depend on the batch, and are computed on micro-batches of 4 of the 8",
        ),
        (
            {"loss": "focal", "gather_batch": True},
            "gather_batch=True has no effect: loss 'focal' has no penalty that couples the batch. Leave it out.",
        ),
        (
            {"loss": "mmce", "gather_batch": True},
            "gather_batch=True has no effect: the training has one process. Leave it out.",
        ),
    ],
)
def test_what_divides_or_does_not_gather_a_batch_is_said(
    settings: dict[str, Any], text: str, tmp_path: Path
) -> None:
    trainer = trainer_of("abc", tmp_path, **settings)
    (found,) = warned(lambda: trainer._check_data())
    assert found.startswith(text)
