"""The configs of the recipes: each is read, each loss has a gradient. `test_recipes.py` trains tasks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from papers.networks import IMAGE_NETWORKS, network_config
from papers.newsgroups import StudyDataArguments
from transformers import ResNetConfig

from hf_calib import CalibrationTrainingArguments
from hf_calib.experiments import parse_arguments
from hf_calib.losses import LOSSES, make_loss
from tests.helpers.places import ROOT

CONFIGS = ROOT / "recipes" / "configs"
LOSS_FILES = sorted((CONFIGS / "losses").glob("*.yaml"))
TASK_FILES = sorted(CONFIGS.glob("*.yaml"))
RECIPES = (
    "image_classification",
    "language_model",
    "text_classification",
    "token_classification",
)


def arguments(path: Path, output: Path, *more: str) -> CalibrationTrainingArguments:
    own = ["--output_dir", str(output), "--report_to", "none", "--use_cpu", "true"]
    (args,) = parse_arguments(
        (CalibrationTrainingArguments,), ["--config", str(path), *own, *more]
    )
    return args


@pytest.mark.parametrize("path", LOSS_FILES, ids=lambda path: path.stem)
def test_each_loss_is_the_one_that_its_file_names(path: Path, tmp_path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    loss = arguments(path, tmp_path).make_loss()
    meant = make_loss(config["loss"], **config.get("loss_kwargs", {}))
    assert (loss.name, loss.hyperparameters) == (meant.name, meant.hyperparameters)
    logits = torch.randn(
        12, 4, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    loss(logits, torch.arange(12) % 4).backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    assert bool(logits.grad.any())


def test_each_loss_has_a_config() -> None:
    with_config = {yaml.safe_load(path.read_text())["loss"] for path in LOSS_FILES}
    assert set(LOSSES) - with_config == {"soft_ece"}  # no paper here trains with it


@pytest.mark.parametrize("path", TASK_FILES, ids=lambda path: path.stem)
def test_each_task_parses(path: Path, tmp_path: Path) -> None:
    """Without the scripts' own arguments, so that a misspelt name is found."""
    scripts = (ROOT / "recipes" / f"{name}.py" for name in RECIPES)
    of_models = {
        name
        for each in scripts
        for name in re.findall(r"(?m)^    (\w+): .*HfArg\(", each.read_text())
    }
    config = {
        key: value
        for key, value in yaml.safe_load(path.read_text()).items()
        if key not in of_models
    }
    stripped = tmp_path / "config.yaml"
    stripped.write_text(yaml.safe_dump(config))
    argv = ["--config", str(stripped), "--use_cpu", "true"]
    data, training = parse_arguments(
        (StudyDataArguments, CalibrationTrainingArguments), argv
    )
    assert (data.dataset is None) != (data.train_file is None)
    assert training.calibration_method == (
        "per_label_temperature" if data.multi_label else "temperature"
    )
    assert training.output_dir == f"outputs/{path.stem}"


@pytest.mark.parametrize(
    "path", sorted((CONFIGS / "networks").glob("*.yaml")), ids=lambda path: path.stem
)
def test_each_network_is_there(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    if config["model"] in IMAGE_NETWORKS:
        network_config(
            IMAGE_NETWORKS[config["model"]].config_class,
            json.dumps(config["model_kwargs"]),
        )
        assert set(config) <= {
            "model",
            "model_kwargs",
            "image_size",
            "image_mean",
            "image_std",
        }
    else:
        own = config.pop("model_kwargs", {})
        assert config == {"model": "microsoft/resnet-50", "from_scratch": True}
        assert set(own) <= set(ResNetConfig().to_dict())
