"""Everything that can be checked before data are touched is checked in the arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import HfArgumentParser

from hf_calib import CalibrationTrainingArguments
from hf_calib.scaling import AutoScaling, TemperatureScaling, VectorScaling
from hf_calib.trainer.config import CALIBRATION_METHODS, CalibrationConfig
from tests.helpers.tiny import arguments, tiny_trainer


@pytest.mark.parametrize(
    ("loss", "given", "kept"),
    [
        ("adafocal", '{"gamma_max": Infinity}', {"gamma_max": "inf"}),
        ("adafocal", '{"gamma_max": "inf"}', {"gamma_max": "inf"}),
        ("adafocal", {"gamma_max": np.float32("inf")}, {"gamma_max": "inf"}),
        ("dual_focal", '{"rival": 0.1}', {"rival": 0.1}),
        ("dual_focal", '{"rival": "mean2"}', {"rival": "mean2"}),
    ],
)
def test_hyperparameters_are_kept_as_strict_json(
    loss: str, given: Any, kept: dict[str, Any], tmp_path: Path
) -> None:
    args = arguments(tmp_path, loss=loss, loss_kwargs=given)
    assert args.loss_kwargs == kept
    assert (
        json.loads(args.to_json_string(), parse_constant=pytest.fail)["loss_kwargs"]
        == kept
    )
    record = json.dumps(args.make_loss().hyperparameters, allow_nan=False)
    again = arguments(tmp_path, loss=loss, loss_kwargs=record)
    assert again.make_loss().hyperparameters == args.make_loss().hyperparameters


def test_a_number_in_quotes_is_not_a_hyperparameter(tmp_path: Path) -> None:
    for loss, given in (
        ("dual_focal", '{"rival": "0.1"}'),
        ("focal", '{"gamma": "2"}'),
    ):
        with pytest.raises(ValueError, match=r"of loss '.*' to be .*, got '(0\.1|2)'"):
            arguments(tmp_path, loss=loss, loss_kwargs=given)


@pytest.mark.parametrize(
    ("settings", "scaler"),
    [
        ({}, AutoScaling),
        ({"temperature_criterion": "ece"}, TemperatureScaling),
        ({"temperature_criterion": "none"}, type(None)),
        ({"calibration_method": "none"}, type(None)),
        ({"calibration_method": "vector"}, VectorScaling),
    ],
)
def test_the_map_is_chosen_unless_the_arguments_say_which(
    settings: dict[str, Any], scaler: type, tmp_path: Path
) -> None:
    args = arguments(tmp_path, **{"calibration_method": None, **settings})
    assert type(args.make_scaler()) is scaler


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"loss": "focl"},
            "expected loss to be a name in LOSSES, got 'focl'; did you mean 'focal'",
        ),
        (
            {"loss": "focal", "loss_kwargs": {"gama": 1.0}},
            "'gama'.*did you mean 'gamma'",
        ),
        (
            {"loss": "focal", "loss_kwargs": {"gamma": -1.0}},
            "gamma of loss 'focal' to be a finite number and >= 0",
        ),
        ({"loss": "focal", "loss_kwargs": {"gamma": "3"}}, "got '3'"),
        (
            {"loss": "focal", "loss_kwargs": '{"gamma": 1, "gamma": 2}'},
            "JSON to have each name once, got gamma twice; leave one out",
        ),
        (
            {"loss": "focal", "loss_kwargs": {1: 2}},
            r"loss_kwargs to be a mapping of hyperparameters, .*, got \{1: 2\}",
        ),
        (
            {"loss": "focal", "loss_kwargs": {"class_weights": [1.0, 2.0]}},
            "loss_kwargs to have hyperparameters of the loss only, got class_weights",
        ),
        (
            {"loss": "focal", "loss_kwargs": {"name": "a", "problem_type": "b"}},
            "loss_kwargs to have hyperparameters of .*, got name, problem_type; class",
        ),
        (
            {"loss": "focal", "loss_kwargs": [3.0]},
            r"loss_kwargs to be a mapping of hyperparameters, or JSON of one, got \[3.0\]",
        ),
        (
            {"loss": "focal", "loss_kwargs": "gamma=3"},
            "got 'gamma=3'; write '{\"name\": value}'",
        ),
        (
            {"loss": "focal", "loss_kwargs": "[3]"},
            "to be a mapping of hyperparameters, or JSON of one",
        ),
        ({"class_weights": [1.0, 0.0]}, "class_weights to be .* positive numbers"),
        (
            {"class_weights": [1.0, float("nan")]},
            "class_weights to be .* positive numbers",
        ),
        ({"n_bins": 0}, "n_bins to be a whole number, at least 1, at most \\d+, got 0"),
        (
            {"n_bins": 2.5},
            "n_bins to be a whole number, at least 1, at most 10000, got 2.5",
        ),
        (
            {"gamma_update_steps": 0},
            "gamma_update_steps to be a whole number, at least 1, at most \\d+, got 0",
        ),
        (
            {"gamma_update_samples": 10},
            "gamma_update_samples to be used with gamma_update_steps or gamma_update_schedule, got neither",
        ),
        (
            {
                "loss": "adafocal",
                "gamma_update_schedule": {25: 100},
                "gamma_update_steps": 5,
            },
            "gamma_update_schedule to be used without gamma_update_steps, got gamma_update_steps=5; leave one",
        ),
        (
            {"temperature_criterion": "acc"},
            "temperature_criterion to be one of .*got 'acc'",
        ),
        (
            {"calibration_strategy": "evaluation"},
            "got 'evaluation'; did you mean 'evaluate'",
        ),
        (
            {"calibration_method": "vectors"},
            "calibration_method to be one of .*got 'vectors'; did you mean 'vector'",
        ),
        (
            {"calibration_method": "isotonic"},
            "calibration_method to be one of .*got 'isotonic'",
        ),
        (
            {"calibration_method": "vector", "temperature_criterion": "ece"},
            "be given with calibration_method='temperature' only, got 'ece' with .*'vector'; leave it out",
        ),
        (
            {"calibration_method": "vector", "temperature_criterion": "none"},
            "got 'none' with .*'vector'; set calibration_method='none' for no calibrator",
        ),
        (
            {"loss": "focal", "label_smoothing_factor": 0.1},
            "label smoothing to be used with cross entropy, got label_smoothing_factor=0.1 with loss='focal'; "
            "use loss='label_smoothing', loss_kwargs={'smoothing': 0.1} alone",
        ),
    ],
)
def test_what_is_wrong_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **settings)


NUMBERS = [
    {40: 1, 25: 100},
    {25: 100, "25": 1},
    {-1: 5},
    {"-1": 5},
    {25: 0},
    {25: 1.5},
    {25: True},
    {0.5: 10},
]
OTHERS = [
    {25: None},
    {"twenty": 5},
    {},
    [25, 100],
    25,
    "",
    "25:100",
    '{"25": 100',
    '{"40": 1, "25": 100}',
]


def test_the_docstring_is_the_help_and_names_every_map() -> None:
    help_of = {
        name: field.metadata.get("help", "")
        for name, field in CalibrationConfig.__dataclass_fields__.items()
    }
    assert all(help_of.values())
    assert all(
        method in help_of["calibration_method"] for method in CALIBRATION_METHODS
    )
    assert (
        "temperature use only these"
        in HfArgumentParser(CalibrationTrainingArguments).format_help()
    )


def test_they_parse_from_the_command_line(tmp_path: Path) -> None:
    words = [
        "--output_dir",
        str(tmp_path),
        *["--use_cpu", "--report_to", "none", "--gather_batch", "--n_bins", "10"],
    ]
    words += [
        "--loss",
        "adafocal",
        "--loss_kwargs",
        '{"gamma_max": 2.5}',
        "--class_weights",
        "1",
        "2.5",
    ]
    words += ["--temperature-criterion", "ece", "--gamma_update_steps", "5"]
    (args,) = HfArgumentParser(
        CalibrationTrainingArguments
    ).parse_args_into_dataclasses(words)
    assert args.loss_kwargs == {"gamma_max": 2.5}
    assert args.class_weights == [1.0, 2.5]
    assert (args.n_bins, args.gamma_update_steps) == (10, 5)
    assert args.gather_batch is True
    assert args.temperature_criterion == "ece"


ERRORS = [
    "eval_ece",
    "adaptive_ece",
    "eval_classwise_ece_calibrated",
    "mce",
    "nll",
    "eval_b_brier",
    "eval_loss",
]
SCORES = ["accuracy", "eval_accuracy_calibrated", "f1", "eval_piece"]
SCORES += ["neg_nll", "eval_negative_ece", "one_minus_mce", "eval_b_inverse_brier"]


@pytest.mark.parametrize(
    ("metric", "greater"), [*((e, False) for e in ERRORS), *((s, True) for s in SCORES)]
)
def test_the_best_model_is_the_one_of_the_smaller_error(
    metric: str, greater: bool, tmp_path: Path
) -> None:
    settings = {"metric_for_best_model": metric, "calibration_strategy": "evaluate"}
    assert arguments(tmp_path, **settings).greater_is_better is greater
    assert (
        arguments(tmp_path, **settings, greater_is_better=True).greater_is_better
        is True
    )


@pytest.mark.parametrize("loss", ["adafocal", "ada_dual_focal", "calfocal", "ece_ce"])
def test_the_best_model_of_an_adaptive_loss_is_the_one_with_the_smallest_nll(
    loss: str, tmp_path: Path
) -> None:
    best = {
        "load_best_model_at_end": True,
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
    }
    args = arguments(tmp_path, loss=loss, **best)
    assert (args.metric_for_best_model, args.greater_is_better) == ("nll", False)
    args = arguments(
        tmp_path,
        loss=loss,
        lr_scheduler_type="reduce_lr_on_plateau",
        eval_strategy="epoch",
    )
    assert (args.metric_for_best_model, args.greater_is_better) == ("nll", False)
    assert (
        arguments(
            tmp_path, loss=loss, metric_for_best_model="loss", **best
        ).metric_for_best_model
        == "loss"
    )
    assert arguments(tmp_path, loss="focal", **best).metric_for_best_model == "loss"
    assert arguments(tmp_path, loss=loss).metric_for_best_model is None


def test_the_token_is_not_shown(tmp_path: Path) -> None:
    args = arguments(tmp_path, hub_token="hf_secret", loss="focal")
    for text in (repr(args), str(args), f"{args}", args.to_json_string()):
        assert "hf_secret" not in text
    assert "hub_token=<HUB_TOKEN>" in repr(args)


def test_arguments_saved_with_a_model_have_no_token(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, hub_token="hf_secret", save_strategy="epoch")
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    for folder in ("checkpoint-4", "saved"):
        path = tmp_path / folder / "training_args.bin"
        assert b"hf_secret" not in path.read_bytes()
        loaded = torch.load(path, weights_only=False)
        assert (loaded.hub_token, loaded.num_train_epochs) == (None, 1)
    assert trainer.args.hub_token == "hf_secret"


@pytest.mark.parametrize("name", ["seed", "data_seed"])
@pytest.mark.parametrize("value", ["a", 1.5, -1, 2**63, True])
def test_seeds_are_whole_numbers(name: str, value: Any, tmp_path: Path) -> None:
    message = f"{name} to be a whole number, at least 0, at most .*, got"
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **{name: value})


def test_the_number_of_bins_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"n_bins to be a whole number, .*got None"):
        arguments(tmp_path, n_bins=None)
