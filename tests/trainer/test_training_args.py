"""Everything that can be checked before data are touched is checked in the arguments."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import HfArgumentParser

from hf_calib import CalibrationTrainingArguments
from hf_calib.losses import LOSSES
from tests.helpers.tiny import arguments


def test_the_defaults_are_those_that_are_documented(tmp_path: Path) -> None:
    args = CalibrationTrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    names = ("loss", "loss_kwargs", "class_weights", "n_bins", "gamma_update_steps", "gamma_update_samples")
    names += ("temperature_criterion", "temperature_strategy", "gather_batch")
    found = {name: getattr(args, name) for name in names}
    assert found == {
        "loss": "cross_entropy",
        "loss_kwargs": None,
        "class_weights": None,
        "n_bins": 15,
        "gamma_update_steps": None,
        "gamma_update_samples": None,
        "temperature_criterion": "nll",
        "temperature_strategy": "end",
        "gather_batch": False,
    }


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_can_be_named(name: str, tmp_path: Path) -> None:
    loss = arguments(tmp_path, loss=name).make_loss()
    assert loss.name == name
    assert loss.hyperparameters == {key: h.default for key, h in LOSSES[name].hyperparameters.items()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "focl"}, "expected loss to be a name in LOSSES, got 'focl'; did you mean 'focal'"),
        ({"loss": "focal", "loss_kwargs": {"gama": 1.0}}, "'gama'.*did you mean 'gamma'"),
        (
            {"loss": "focal", "loss_kwargs": {"gamma": -1.0}},
            "gamma of loss 'focal' to be a finite number and >= 0",
        ),
        ({"loss": "focal", "loss_kwargs": {"gamma": "3"}}, "got '3'"),
        (
            {"loss": "focal", "loss_kwargs": [3.0]},
            r"loss_kwargs to be a mapping, or JSON of one, got \[3.0\]",
        ),
        ({"loss": "focal", "loss_kwargs": "gamma=3"}, "got 'gamma=3' .*write '{\"name\": value}'"),
        ({"loss": "focal", "loss_kwargs": "[3]"}, "to be a mapping, or JSON of one"),
        ({"class_weights": [1.0, 0.0]}, "class_weights to be .* positive numbers"),
        ({"class_weights": [1.0, float("nan")]}, "class_weights to be .* positive numbers"),
        ({"n_bins": 0}, "n_bins to be a whole number, at least 1, got 0"),
        ({"n_bins": 2.5}, "n_bins to be a whole number, at least 1, got 2.5"),
        ({"gamma_update_steps": 0}, "gamma_update_steps to be a whole number, at least 1, got 0"),
        ({"gamma_update_samples": 10}, "gamma_update_samples to go with gamma_update_steps"),
        ({"temperature_criterion": "acc"}, "temperature_criterion to be one of .*got 'acc'"),
        ({"temperature_strategy": "evaluation"}, "got 'evaluation'; did you mean 'evaluate'"),
        (
            {"loss": "focal", "label_smoothing_factor": 0.1},
            "label smoothing to go with cross entropy, got label_smoothing_factor=0.1 with loss='focal'; "
            "use loss='label_smoothing', loss_kwargs={'smoothing': 0.1} alone",
        ),
    ],
)
def test_what_is_wrong_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **settings)


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_class_weights_come_in_any_form(make: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path, class_weights=make([0.5, 2.0, 1.0]))
    assert args.class_weights == [0.5, 2.0, 1.0]
    assert json.loads(args.to_json_string())["class_weights"] == [0.5, 2.0, 1.0]


def test_they_parse_from_the_command_line(tmp_path: Path) -> None:
    words = [
        "--output_dir",
        str(tmp_path),
        "--use_cpu",
        "--report_to",
        "none",
        "--gather_batch",
        "--n_bins",
        "10",
    ]
    words += ["--loss", "focal", "--loss_kwargs", '{"gamma": 2.5}', "--class_weights", "1", "2.5"]
    words += ["--temperature-criterion", "ece", "--gamma_update_steps", "5"]
    (args,) = HfArgumentParser(CalibrationTrainingArguments).parse_args_into_dataclasses(words)
    assert args.loss_kwargs == {"gamma": 2.5}
    assert args.class_weights == [1.0, 2.5]
    assert (args.n_bins, args.gamma_update_steps) == (10, 5)
    assert args.gather_batch is True
    assert args.temperature_criterion == "ece"


def test_the_help_names_every_field() -> None:
    text = HfArgumentParser(CalibrationTrainingArguments).format_help()
    for name in ("--loss_kwargs", "--gamma_update_samples", "--temperature_strategy", "--gather_batch"):
        assert name in text


@pytest.mark.parametrize(
    ("metric", "greater"),
    [
        ("eval_ece", False),
        ("adaptive_ece", False),
        ("eval_classwise_ece_calibrated", False),
        ("mce", False),
        ("nll", False),
        ("eval_b_brier", False),
        ("eval_loss", False),
        ("accuracy", True),
        ("eval_accuracy_calibrated", True),
        ("f1", True),
        ("eval_piece", True),
    ],
)
def test_the_best_model_is_the_one_of_the_smaller_error(metric: str, greater: bool, tmp_path: Path) -> None:
    args = arguments(tmp_path, metric_for_best_model=metric)
    assert args.greater_is_better is greater
    assert arguments(tmp_path, metric_for_best_model=metric, greater_is_better=True).greater_is_better is True


def test_they_are_saved_without_the_token(tmp_path: Path) -> None:
    args = arguments(tmp_path, hub_token="hf_secret", loss="focal")
    torch.save(args, tmp_path / "training_args.bin")
    assert b"hf_secret" not in (tmp_path / "training_args.bin").read_bytes()
    assert "hf_secret" not in args.to_json_string()
    again = pickle.loads(pickle.dumps(args))
    assert (again.loss, again.hub_token, args.hub_token) == ("focal", None, "hf_secret")
