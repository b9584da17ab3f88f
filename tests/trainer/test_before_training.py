"""Rows, metrics' names and settings that would fail late or mislead are refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
import transformers
from datasets import ClassLabel, Dataset
from transformers import TrainerCallback, TrainingArguments, default_data_collator

from hf_calib import CalibrationTrainer, TemperatureScalingCallback
from hf_calib.scaling import (
    AutoScaling,
    MatrixScaling,
    TemperatureScaling,
    VectorScaling,
)
from hf_calib.trainer import CalibrationConfig, CalibrationMixin
from tests.helpers.tiny import TEXT, arguments, sequences, tiny_bert, tiny_trainer
from tests.helpers.trained import Network, images

BEST: dict[str, Any] = {
    "load_best_model_at_end": True,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
}


def refuses_to_train(trainer: Any, message: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


# ---- Rows ----


def with_none(index: int, column: str) -> Callable[[Dataset], Any]:
    def changed(rows: Dataset) -> Dataset:
        values = rows.to_list()
        values[index] = {**values[index], column: None}
        return Dataset.from_list(values)

    return changed


def as_list(change: Callable[[Dataset], Any]) -> Callable[[Dataset], Any]:
    return lambda rows: change(rows).to_list()


def as_stream(change: Callable[[Dataset], Any]) -> Callable[[Dataset], Any]:
    return lambda rows: change(rows).to_iterable_dataset()


def without_labels(rows: Dataset) -> Dataset:
    return rows.remove_columns("label")


def all_ignored(rows: Dataset) -> Dataset:
    return rows.map(lambda row: {"label": -100})


def one_float_per_class(rows: Dataset) -> Dataset:
    several = [[1.0, 0.0, 0.0, 0.0]] * len(rows)
    return rows.remove_columns("label").add_column("label", several)


NO_LABELS = "expected the calibration split to have labels, got batches of input_ids"
NO_INPUT = (
    "calibration split to have a value for 'input_ids' in every row, got None in row 30"
)
NO_BATCH = "the first rows of the calibration split to be made a batch, got"
IGNORED = "labels of the calibration split to be given, got -100 in every row"
KIND = "labels of the calibration split to be class indices, for a single-label model"
ROWS: dict[str, tuple[Callable[[Dataset], Any], str]] = {
    "no labels": (without_labels, NO_LABELS),
    "no labels, list": (as_list(without_labels), NO_LABELS),
    "no labels, stream": (as_stream(without_labels), NO_LABELS),
    "None in the inputs": (with_none(30, "input_ids"), NO_INPUT),
    "None in the inputs, list": (as_list(with_none(30, "input_ids")), NO_INPUT),
    "None in the inputs, stream": (as_stream(with_none(3, "input_ids")), NO_BATCH),
    "None in the labels, list": (
        as_list(with_none(30, "label")),
        r"given in every row, got None in row 30 \(1 such row\)",
    ),
    "all ignored": (all_ignored, IGNORED),
    "all ignored, list": (as_list(all_ignored), IGNORED),
    "another kind": (one_float_per_class, KIND),
    "another kind, stream": (as_stream(one_float_per_class), KIND),
    "out of range, list": (
        lambda rows: [{**row, "label": 7} for row in rows],
        r"labels of the calibration split to be in \[0, 4\), got 7 in row 0 \(40 such",
    ),
    "empty": (lambda rows: rows.select([]), "calibration split to have examples"),
    "empty list": (lambda rows: [], "calibration split to have examples, got none"),
}


@pytest.mark.parametrize("case", ROWS)
def test_calibration_rows_that_cannot_be_fitted_to_are_refused(
    case: str, tmp_path: Path
) -> None:
    change, message = ROWS[case]
    trainer = tiny_trainer(tmp_path, calibration_method="temperature")
    trainer.calibration_dataset = change(trainer.calibration_dataset)
    refuses_to_train(trainer, message, ValueError)


@pytest.mark.parametrize("form", [all_ignored, as_list(all_ignored)])
@pytest.mark.parametrize("role", ["training", "evaluation", "b"])
def test_a_split_in_which_all_rows_are_ignored_is_refused(
    role: str, form: Callable[[Dataset], Any], tmp_path: Path
) -> None:
    trainer = tiny_trainer(tmp_path)
    rows = trainer.eval_dataset
    if role == "training":
        trainer.train_dataset = form(trainer.train_dataset)
    elif role == "evaluation":
        trainer.eval_dataset = form(rows)
    else:
        trainer.eval_dataset = {"a": rows, "b": form(rows)}
    message = f"labels of the {role} split to be given, got -100 in every row; check"
    refuses_to_train(trainer, message, ValueError)


@pytest.mark.parametrize("role", ["train_dataset", "eval_dataset"])
def test_classes_in_another_order_than_the_models_are_refused(
    role: str, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tmp_path)
    own = list(trainer.model.config.id2label.values())
    rows = getattr(trainer, role)
    for names in (own, [f"class {name}" for name in own]):
        setattr(trainer, role, rows.cast_column("label", ClassLabel(names=names)))
        trainer._check_data()
    other = rows.cast_column("label", ClassLabel(names=own[::-1]))
    setattr(trainer, role, other)
    message = rf"in the model's order \({', '.join(own)}\), got {', '.join(own[::-1])};"
    refuses_to_train(trainer, message, ValueError)
    # Labels that change on their way say nothing of the column's names.
    setattr(trainer, role, other.with_transform(lambda batch: batch))
    trainer._check_data()


OWN = ["ant", "bee", "cat", "2"]


def with_names(rows: Dataset, names: list[str]) -> Dataset:
    small = rows.map(lambda row: {"label": min(row["label"], len(names) - 1)})
    return small.cast_column("label", ClassLabel(names=names))


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize(
    "as_given",
    [
        lambda rows: rows,
        pytest.param(Dataset.to_iterable_dataset, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("names", [["ant", "cat"], ["CAT", "Ant"], ["ant", "2.0"]])
def test_a_split_that_was_numbered_by_itself_is_refused(
    names: list[str], as_given: Callable[[Any], Any], is_named: bool, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tmp_path)
    if is_named:
        trainer.model.config.id2label = dict(enumerate(OWN))
    else:
        trainer.train_dataset = with_names(trainer.train_dataset, OWN)
    for same in (OWN, OWN[:2], ["ANT", "Bee", "cat", "2.0"], ["x", "y"]):
        rows = with_names(trainer.calibration_dataset, same)
        trainer.calibration_dataset = rows
        trainer._check_data()
    trainer.calibration_dataset = as_given(with_names(rows, names))
    message = (
        "the classes of the calibration split to be .*, got .*; call dataset.align"
    )
    refuses_to_train(trainer, message, ValueError)


def test_rows_are_not_read_for_a_fit_that_there_is_not(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, calibration_method="none", max_steps=1)
    trainer.calibration_dataset = without_labels(trainer.calibration_dataset)
    trainer.train()


@pytest.mark.parametrize(
    "given", [3, "train", {"first": [1]}, iter([1]), (row for row in [1]), {1}]
)
def test_a_calibration_dataset_that_is_none_is_refused(
    given: Any, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.calibration_dataset = given
    message = f"calibration_dataset to be one dataset, .* got {type(given).__name__};"
    refuses_to_train(trainer, message, TypeError)
    with pytest.raises(TypeError, match=message):
        TemperatureScalingCallback(trainer=trainer, calibration_dataset=given)


NEVER: list[tuple[dict[str, Any], int]] = [
    ({"gamma_update_steps": 5}, 5),
    ({"gamma_update_steps": 4}, 4),
    ({"gamma_update_schedule": {0: 9, 1: 7}}, 7),
    ({"gamma_update_schedule": {1: 2}}, 4),
    # By default it is at the end of each epoch, or at each evaluation.
    ({}, 4),
    ({"eval_strategy": "epoch"}, 4),
    ({"eval_strategy": "steps", "eval_steps": 3, "eval_delay": 4}, 4),
]


@pytest.mark.parametrize(("settings", "steps"), NEVER)
def test_updates_that_come_after_the_last_step_are_named(
    settings: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tmp_path, loss="adafocal", **settings)
    message = f"never adapt: .* after {steps} steps, and the training has 4. Set"
    with pytest.warns(UserWarning, match=message):
        trainer.train()
    if steps > 4:
        assert trainer.calibration_loss.gammas.eq(1).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"gamma_update_steps": 3},
        {"gamma_update_schedule": {0: 3}},
        {"num_train_epochs": 2, "gamma_update_schedule": {5: 1}},
        {"num_train_epochs": 1.5},
        {"eval_strategy": "steps", "eval_steps": 0.75},
        {"eval_strategy": "epoch", "eval_on_start": True},
    ],
)
def test_updates_before_the_last_step_are_not_warned_of(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    tiny_trainer(tmp_path, loss="adafocal", **settings).train()


@pytest.mark.parametrize(
    "settings", [{"gamma_update_steps": 2}, {"gamma_update_schedule": {0: 1}}]
)
def test_updates_of_a_loss_that_does_not_adapt_are_refused(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    (name,) = settings
    message = f"{name} to be used with a loss that adapts, got loss='focal'; leave"
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, loss="focal", **settings)


def test_a_random_subset_of_a_stream_is_refused(tmp_path: Path) -> None:
    updates = {"gamma_update_steps": 1, "gamma_update_samples": 4}
    trainer = tiny_trainer(tmp_path, loss="adafocal", **updates)
    trainer.calibration_dataset = trainer.calibration_dataset.to_iterable_dataset()
    message = "rows by their index for gamma_update_samples, got IterableDataset, .*leave gamma_update_samples out"
    refuses_to_train(trainer, message, TypeError)


def test_looking_at_the_rows_changes_nothing_of_the_training(tmp_path: Path) -> None:
    def augmented(rows: dict[str, Any]) -> dict[str, Any]:
        torch.rand(1)
        np.random.rand(1)
        return rows

    trainer = tiny_trainer(tmp_path, max_steps=1)
    trainer.calibration_dataset.set_transform(augmented)
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    trainer._check_data()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # type: ignore[index]


def renumbered(rows: Any) -> Any:
    batch = default_data_collator(rows)
    batch["labels"] = (batch["labels"] + 1) % 4
    return batch


def merged(rows: Any) -> Any:
    batch = default_data_collator(rows)
    batch["labels"][batch["labels"] == 3] = 2
    return batch


def test_labels_that_the_collator_brings_into_range_are_not_refused(
    tmp_path: Path,
) -> None:
    def from_one(rows: Any) -> Any:
        batch = default_data_collator(rows)
        batch["labels"] -= 1
        return batch

    model = tiny_bert()
    rows = sequences(model, 8).map(lambda row: {"label": row["label"] + 1})
    settings = {"calibration_method": "none", "max_steps": 1}
    for collate in (from_one, renumbered):
        args = arguments(tmp_path, **settings)
        CalibrationTrainer(
            model, args, train_dataset=rows, data_collator=collate
        ).train()
    trainer = CalibrationTrainer(
        model,
        arguments(tmp_path, **settings),
        train_dataset=rows,
        data_collator=lambda rows: default_data_collator(rows),
    )
    message = r"labels of the training split to be in \[0, 4\), got 4 in row"
    refuses_to_train(trainer, message, ValueError)


# ---- Class weights ----


def balanced(folder: Path, rows: Any = None, collate: Any = None) -> Any:
    model = tiny_bert()
    return CalibrationTrainer(
        model,
        arguments(folder, class_weights="balanced", calibration_method="none"),
        train_dataset=sequences(model, 40) if rows is None else rows,
        data_collator=collate,
    )


CHANGED = "class_weights to be given as numbers where a transform or collator changes"


def test_balanced_weights_of_labels_that_change_are_refused(tmp_path: Path) -> None:
    rows = sequences(tiny_bert(), 40)

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "label": [3 - label for label in batch["label"]]}

    with pytest.raises(ValueError, match=CHANGED):
        balanced(tmp_path, collate=renumbered)
    with pytest.raises(ValueError, match=CHANGED):
        balanced(tmp_path, collate=merged)
    with pytest.raises(ValueError, match=CHANGED):
        balanced(tmp_path, rows.with_transform(transform))
    same = balanced(tmp_path, collate=lambda rows: default_data_collator(rows))
    found = same.calibration_loss.class_weights
    n_of_class = torch.tensor(rows["label"]).bincount()
    torch.testing.assert_close(found, 40 / (4 * n_of_class.float()))
    of_list = balanced(tmp_path, rows.to_list())
    torch.testing.assert_close(of_list.calibration_loss.class_weights, found)


def test_balanced_weights_follow_a_change_of_collator_or_rows(tmp_path: Path) -> None:
    trainer = balanced(tmp_path)
    trainer.data_collator = renumbered
    refuses_to_train(trainer, CHANGED, ValueError)
    trainer = balanced(tmp_path)
    trainer.args.max_steps = 1
    others = sequences(trainer.model, 60, seed=5)
    trainer.train_dataset = others
    trainer.train()
    n_of_class = torch.tensor(others["label"]).bincount()
    found = trainer.calibration_loss.class_weights
    torch.testing.assert_close(found, 60 / (4 * n_of_class.float()))


def test_balanced_weights_need_as_many_classes_as_the_model(tmp_path: Path) -> None:
    rows = sequences(tiny_bert(), 40).map(lambda row: {"label": row["label"] + 1})
    message = r"'balanced' over labels in \[0, 4\), got label 4 in the training split"
    with pytest.raises(ValueError, match=message):
        balanced(tmp_path, rows)


@pytest.mark.parametrize("weights", [[1, 2], [1.0] * 5])
def test_another_number_of_class_weights_is_named_as_such(
    weights: list[float], tmp_path: Path
) -> None:
    message = f"class_weights to have one entry for each of the 4 classes, got {len(weights)}; "
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, class_weights=weights)


@pytest.mark.parametrize(
    "weights",
    [
        [1, "a", 1],
        ["balanced", "1"],
        [1, None, 1],
        [1, True, 1],
        [[1, 2], [3, 4]],
        {0: 1.0},
        "[1, 2]",
        "1",
        3,
        [],
    ],
)
def test_class_weights_that_are_not_numbers_are_named_as_such(
    weights: Any, tmp_path: Path
) -> None:
    message = "expected class_weights to be numbers, or 'balanced', got .*; give one number per class"
    with pytest.raises(ValueError, match=message):
        CalibrationConfig(class_weights=weights)
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, class_weights=weights)


def test_balanced_of_the_command_line_goes_with_the_best_model(tmp_path: Path) -> None:
    words = ["balanced"]
    assert arguments(tmp_path, class_weights=words, **BEST).class_weights == "balanced"


# ---- Models ----


def test_span_models_are_refused_at_construction(tmp_path: Path) -> None:
    model = transformers.BertForQuestionAnswering(transformers.BertConfig(**TEXT))
    message = (
        "got BertForQuestionAnswering, which answers with the start and end of a span"
    )
    with pytest.raises(ValueError, match=message):
        CalibrationTrainer(model, arguments(tmp_path))


# ---- Label smoothing ----


SMOOTHING = r"label smoothing to be used with cross entropy, got label_smoothing_factor=0\.1 with loss='focal'"


def test_smoothing_that_is_set_later_does_not_replace_the_loss(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, loss="focal")
    trainer.args.label_smoothing_factor = 0.1
    refuses_to_train(trainer, SMOOTHING, ValueError)
    trainer = tiny_trainer(tmp_path, label_smoothing_factor=0.1)
    trainer.args.loss = "focal"
    refuses_to_train(trainer, SMOOTHING, ValueError)


def test_smoothing_of_several_labels_is_not_said_to_be_disabled(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """As the stock Trainer does, which cannot smooth them."""
    trainer = CalibrationTrainer(
        tiny_bert(problem_type="multi_label_classification"),
        arguments(tmp_path, label_smoothing_factor=0.1),
    )
    assert trainer.calibration_loss.hyperparameters == {"smoothing": 0.1}
    assert [each for each in recwarn if "smoothing" in str(each.message)] == []


def test_smoothing_of_arguments_beside_a_configuration_is_refused(
    tmp_path: Path,
) -> None:
    class Mine(CalibrationMixin, transformers.Trainer):
        pass

    args = TrainingArguments(
        str(tmp_path), report_to="none", use_cpu=True, label_smoothing_factor=0.1
    )
    message = r"label_smoothing_factor to be 0 with calibration=Cal.*, got 0\.1; use loss='label_smoothing'"
    with pytest.raises(ValueError, match=message):
        Mine(tiny_bert(), args, calibration=CalibrationConfig())


# ---- Names of metrics ----


def evaluating(folder: Path, *, sets: bool = False, **given: Any) -> Any:
    model = tiny_bert()
    rows = sequences(model, 8)
    callbacks = given.pop("callbacks", None)
    compute_metrics = given.pop("compute_metrics", None)
    return CalibrationTrainer(
        model,
        arguments(folder, **{**BEST, **given}),
        train_dataset=sequences(model, 4),
        eval_dataset={"a": rows, "a_b": rows} if sets else rows,
        calibration_dataset=sequences(model, 12, seed=2),
        compute_metrics=compute_metrics,
        callbacks=callbacks,
    )


@pytest.mark.parametrize(
    ("metric", "sets", "message"),
    [
        ("nnl", False, "got 'eval_nnl'; did you mean 'eval_nll'"),
        ("f1", False, "metric_for_best_model to be a metric of each evaluation"),
        ("a_nll", False, "got 'eval_a_nll'"),
        ("nll_calibrated", False, "set calibration_strategy='evaluate', or metric_for"),
        (None, True, r"name of an evaluation set \(a, a_b\), got 'eval_loss'"),
        ("nll", True, "got 'eval_nll'; set it to 'eval_a_nll', for example"),
        ("b_nll", True, "to begin with the name of an evaluation set"),
        ("a_b_nnl", True, "to be a metric of each evaluation, got 'eval_a_b_nnl'"),
        ("a_b_nll_calibrated", True, "or metric_for_best_model='eval_a_b_nll'"),
    ],
)
def test_a_metric_that_no_evaluation_has_cannot_select_the_model(
    metric: str | None, sets: bool, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        evaluating(tmp_path, metric_for_best_model=metric, sets=sets)
    later = evaluating(
        tmp_path, metric_for_best_model="a_nll" if sets else "nll", sets=sets
    )
    later.args.metric_for_best_model = metric or "loss"
    refuses_to_train(later, message, ValueError)


def test_the_default_metric_of_an_adaptive_loss_needs_one_evaluation_set(
    tmp_path: Path,
) -> None:
    message = "name of an evaluation set .*, got 'eval_nll'; set it to 'eval_a_nll'"
    with pytest.raises(ValueError, match=message):
        evaluating(tmp_path, loss="adafocal", sets=True)
    evaluating(tmp_path, loss="adafocal", sets=True, metric_for_best_model="a_nll")


@pytest.mark.parametrize(
    "settings",
    [
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
        # The Trainer looks for it after each evaluation.
        {"eval_strategy": "epoch"},
        {"save_strategy": "best", "eval_strategy": "epoch"},
    ],
)
def test_other_readers_of_the_metric_are_known(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    unused = {"load_best_model_at_end": False, "save_strategy": "no"}
    unused |= {"metric_for_best_model": "nnl", "eval_strategy": "no"}
    evaluating(tmp_path, **unused)
    with pytest.raises(ValueError, match="did you mean 'eval_nll'"):
        evaluating(tmp_path, **{**unused, **settings})


def test_metrics_of_the_user_are_not_refused(tmp_path: Path) -> None:
    class Adds(TrainerCallback):
        def on_evaluate(self, *given: Any, metrics: Any = None, **kwargs: Any) -> None:
            metrics["eval_f1"] = 1.0

    found = {"metric_for_best_model": "f1"}
    by_callback = evaluating(tmp_path, callbacks=[Adds()], **found)
    by_function = evaluating(tmp_path, compute_metrics=lambda _: {"f1": 1.0}, **found)
    for trainer in (by_callback, by_function):
        trainer.train()
        assert trainer.state.best_metric == 1.0


@pytest.mark.parametrize("form", [without_labels, as_list(without_labels)])
@pytest.mark.parametrize("metric", ["loss", "nll", "ece_calibrated"])
def test_a_metric_that_selects_the_model_needs_labels(
    metric: str, form: Callable[[Dataset], Any], tmp_path: Path
) -> None:
    strategy = {"calibration_strategy": "evaluate"}
    trainer = evaluating(tmp_path, metric_for_best_model=metric, **strategy)
    trainer.eval_dataset = form(trainer.eval_dataset)
    message = f"the evaluation split to have labels for metric_for_best_model, got 'eval_{metric}', and"
    refuses_to_train(trainer, message, ValueError)
    several = evaluating(
        tmp_path, metric_for_best_model=f"a_b_{metric}", sets=True, **strategy
    )
    labelled = several.eval_dataset["a"]
    several.eval_dataset = {"a": labelled, "a_b": form(labelled)}
    refuses_to_train(several, "the a_b split to have labels for metric", ValueError)
    several.eval_dataset = {"a": form(labelled), "a_b": labelled}
    several._check_data()


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("per_label_temperature", "single"),
        ("matrix", "multi"),
        ("vector", "multi"),
        ("structured_matrix", "multi"),
    ],
)
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_calibrator_of_another_kind_than_the_rows_is_refused(
    method: str, kind: str, is_stream: bool, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tmp_path, calibration_method=method)
    several = {"problem_type": "multi_label_classification"}
    rows = sequences(tiny_bert(**several) if kind == "multi" else tiny_bert(), 12)
    trainer.train_dataset = rows
    trainer.eval_dataset = rows
    trainer.calibration_dataset = rows.to_iterable_dataset() if is_stream else rows
    message = f"method to be used with a {kind}-label problem, got '{method}'; choose"
    refuses_to_train(trainer, message, ValueError)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"eval_strategy": "no"}, "there is no evaluation during training"),
        (
            {"eval_strategy": "epoch", "calibration_method": "none"},
            "there is no calibrator",
        ),
        ({"eval_strategy": "epoch"}, None),
        ({"eval_strategy": "no", "eval_on_start": True}, None),
    ],
)
def test_fits_at_evaluations_that_there_are_not_are_warned_of(
    given: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tmp_path, calibration_strategy="evaluate", **given)
    if reason is None:
        trainer._check_data()
        return
    with pytest.warns(UserWarning, match=f"'evaluate' has no effect: {reason}"):
        trainer._check_data()


def test_an_evaluation_set_may_be_named_like_a_sign(tmp_path: Path) -> None:
    model = tiny_bert()
    rows = sequences(model, 8)

    def direction(metric: str, **given: Any) -> Any:
        args = arguments(tmp_path, **BEST, metric_for_best_model=metric, **given)
        held_out = {"neg": rows, "b": rows}
        CalibrationTrainer(model, args, train_dataset=rows, eval_dataset=held_out)
        return args.greater_is_better

    assert direction("neg_nll") is False
    assert direction("eval_neg_ece") is False
    assert direction("neg_accuracy") is True
    assert direction("neg_nll", greater_is_better=True) is True


def search(folder: Path, objective: Any, space: Any = None, **given: Any) -> Any:
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    direction = given.pop("direction", "minimize")
    callbacks = given.pop("callbacks", None)
    model = tiny_bert()
    rows = sequences(model, 8)
    sets = {"a": rows, "b": rows}
    trainer = CalibrationTrainer(
        model_init=lambda: tiny_bert(),
        args=arguments(folder, **{"eval_strategy": "epoch", "max_steps": 1, **given}),
        train_dataset=sequences(model, 4),
        eval_dataset=sets if objective == "of sets" else rows,
        calibration_dataset=sequences(model, 12, seed=2),
        callbacks=callbacks,
    )
    return trainer.hyperparameter_search(
        space or (lambda trial: {}),
        None if objective == "of sets" else objective,
        n_trials=1,
        backend="optuna",
        direction=direction,
    )


@pytest.mark.parametrize(
    ("objective", "given", "message"),
    [
        ("eval_accuracy", {}, "direction to be 'maximize' for eval_accuracy, got 'min"),
        ("eval_nll", {"direction": "maximize"}, "direction to be 'minimize' for eval_"),
        ("eval_loss", {"direction": "maximize"}, "direction to be 'minimize'"),
        ("eval_nll_calibrated", {}, "set calibration_strategy='evaluate', or compute_"),
        (
            "eval_nll_calibrated",
            {"calibration_method": "none", "eval_strategy": "no"},
            "if there is a calibrator",
        ),
        ("of sets", {}, r"evaluation set \(a, b\), got 'eval_nll'"),
    ],
)
def test_an_objective_that_makes_no_sense_is_refused(
    objective: str, given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        search(tmp_path, objective, **given)


def test_an_objective_that_the_evaluation_does_not_have_is_named(
    tmp_path: Path,
) -> None:
    """A callback that adds metrics may not add this one."""

    class Adds(TrainerCallback):
        def on_evaluate(self, *given: Any, metrics: Any = None, **kwargs: Any) -> None:
            metrics["eval_f1"] = 1.0

    message = "the name of one, got 'eval_f2'; the evaluation has .*eval_accuracy, "
    with pytest.raises(ValueError, match=message):
        search(tmp_path, "eval_f2", callbacks=[Adds()])


def test_objectives_in_their_direction_are_searched(tmp_path: Path) -> None:
    class Adds(TrainerCallback):
        def on_evaluate(self, *given: Any, metrics: Any = None, **kwargs: Any) -> None:
            metrics["eval_neg_nll"] = -metrics["eval_nll"]

    turned = {"callbacks": [Adds()], "direction": "maximize"}
    assert search(tmp_path, "eval_neg_nll", **turned).objective < 0
    best = search(tmp_path, "eval_accuracy", direction="maximize")
    assert 0 <= best.objective <= 1
    by_a_function = search(tmp_path, lambda metrics: metrics["eval_accuracy"])
    assert by_a_function.objective == best.objective


def test_a_trial_that_sets_smoothing_does_not_replace_the_loss(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=SMOOTHING):
        search(tmp_path, None, lambda _: {"label_smoothing_factor": 0.1}, loss="focal")


# ---- Calibrators from elsewhere ----


RNG = np.random.default_rng(0)
FOUR = RNG.normal(size=(60, 4))
FIVE = RNG.normal(size=(60, 5))
CLASSES = RNG.integers(4, size=60)
DECISIONS = RNG.integers(2, size=(60, 4))


@pytest.mark.parametrize("kind", [VectorScaling, MatrixScaling])
def test_a_calibrator_of_other_classes_is_refused(kind: Any, tmp_path: Path) -> None:
    scaler = kind().fit(FIVE, np.arange(60) % 5)
    message = "expected scaler to be fitted on 4 classes, got 5"
    trainer = tiny_trainer(tmp_path)
    with pytest.raises(ValueError, match=message):
        trainer.use_calibration_map(scaler, split="a", n_examples=60)
    # A network that does not say its classes.
    other = CalibrationTrainer(Network(), arguments(tmp_path), eval_dataset=images(4))
    other.use_calibration_map(scaler, split="a", n_examples=60)
    with pytest.raises(ValueError, match=message):
        other.evaluate()


@pytest.mark.parametrize("kind", [TemperatureScaling, AutoScaling])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_calibrator_of_another_kind_of_labels_is_refused(
    kind: Any, is_known: bool, tmp_path: Path
) -> None:
    of_several = kind(multi_label=True).fit(FOUR, DECISIONS)
    of_one = kind().fit(FOUR, CLASSES)
    several = {"problem_type": "multi_label_classification"}
    one = {"problem_type": "single_label_classification"}
    for labels, scaler, got in ((several, of_one, False), (one, of_several, True)):
        rows = sequences(tiny_bert(**labels), 8)
        model = tiny_bert(**labels) if is_known else tiny_bert()
        trainer = CalibrationTrainer(model, arguments(tmp_path), eval_dataset=rows)
        message = (
            f"scaler to be fitted with multi_label={not got}, got multi_label={got}"
        )
        with pytest.raises(ValueError, match=message):
            trainer.use_calibration_map(scaler, split="a", n_examples=60)
        assert trainer.calibration_map is None


@pytest.mark.parametrize("second", ["labels", "label_ids"])
@pytest.mark.parametrize("split", ["train_dataset", "calibration_dataset"])
def test_two_label_columns_that_differ_are_refused(
    second: str, split: str, tmp_path: Path
) -> None:
    """Collators take one of them, and checks and metrics would read the other."""
    trainer = tiny_trainer(tmp_path, max_steps=1)
    rows = getattr(trainer, split)
    same = [{**row, second: row["label"]} for row in rows]
    other = [{**row, second: 3 - row["label"]} for row in rows]
    message = r"one label column, got label.* and label.*, whose values differ; remove"
    for wrong in (other, Dataset.from_list(other)):
        refused = tiny_trainer(tmp_path, max_steps=1)
        setattr(refused, split, wrong)
        refuses_to_train(refused, message, ValueError)
        with pytest.raises(ValueError, match=message):
            trainer.evaluate(wrong)
    setattr(trainer, split, same)
    trainer.train()
    assert trainer.state.global_step == 1
