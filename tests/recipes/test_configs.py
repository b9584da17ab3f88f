"""The configs of the recipes: each loss takes a training step. `test_recipes.py` trains each task."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import yaml

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments
from hf_calib.data import DataArguments
from hf_calib.experiments import parse_arguments
from hf_calib.losses import LOSSES, AdaptiveLoss, make_loss
from hf_calib.papers import IMAGE_NETWORKS, network_config
from tests.helpers.marks import others_slow
from tests.helpers.places import ROOT
from tests.helpers.tiny import sequences, tiny_bert

CONFIGS = ROOT / "recipes" / "configs"
LOSS_FILES = sorted((CONFIGS / "losses").glob("*.yaml"))
TASK_FILES = sorted(CONFIGS.glob("*.yaml"))
ROWS = sequences(tiny_bert(), 32)


@pytest.mark.parametrize("path", others_slow(LOSS_FILES, first=10), ids=lambda path: path.stem)
def test_each_loss_takes_training_steps(path: Path, tmp_path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    own = ["--output_dir", str(tmp_path), "--report_to", "none", "--use_cpu", "true", "--save_strategy", "no"]
    four_steps = ["--num_train_epochs", "1", "--logging_steps", "1", "--calibration_method", "none"]
    quiet = ["--disable_tqdm", "true", "--dataloader_pin_memory", "false"]
    argv = ["--config", str(path), *own, *four_steps, *quiet]
    (args,) = parse_arguments((CalibrationTrainingArguments,), argv)
    loss = args.make_loss()
    meant = make_loss(config["loss"], **config.get("loss_kwargs", {}))
    assert (loss.name, loss.hyperparameters) == (meant.name, meant.hyperparameters)
    model = tiny_bert()
    before = model.classifier.weight.detach().clone()
    trainer = CalibrationTrainer(model, args, train_dataset=ROWS, calibration_dataset=ROWS.select(range(24)))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4
    assert all(map(math.isfinite, losses))
    assert not torch.equal(model.classifier.weight, before)
    assert bool(torch.isfinite(model.classifier.weight).all())
    updates = [entry for entry in trainer.state.log_history if "calibration_gap_00" in entry]
    every = args.gamma_update_steps
    assert bool(updates) == (isinstance(loss, AdaptiveLoss) and (every is None or every <= 4))


def test_the_schedule_is_that_of_the_paper(tmp_path: Path) -> None:
    """AdaFocal, Fig. 53; `test_callbacks.py` trains by schedules."""
    path = CONFIGS / "losses" / "adafocal_schedule.yaml"
    argv = ["--config", str(path), "--output_dir", str(tmp_path), "--use_cpu", "true", "--report_to", "none"]
    (args,) = parse_arguments((CalibrationTrainingArguments,), argv)
    assert args.gamma_update_schedule == {25: 100, 40: 1}


def test_each_loss_has_a_config() -> None:
    with_config = {yaml.safe_load(path.read_text())["loss"] for path in LOSS_FILES}
    assert set(LOSSES) - with_config == {"soft_ece"}  # no paper here trains with it


@pytest.mark.parametrize("path", TASK_FILES, ids=lambda path: path.stem)
def test_each_task_parses(path: Path, tmp_path: Path) -> None:
    """With nothing but the recipe's own arguments left out, so that a misspelt name is found."""
    of_models = {
        "model",
        "max_length",
        "eval_max_length",
        "crop",
        "padding",
        "flip",
        "decode_once",
        "ood_noise",
        "ten_crop",
        "from_scratch",
        "model_kwargs",
        "weights",
    }
    of_models |= {"image_size", "image_mean", "image_std", "prompt", "answers", "lora_rank", "lora_alpha"}
    config = {key: value for key, value in yaml.safe_load(path.read_text()).items() if key not in of_models}
    stripped = tmp_path / "config.yaml"
    stripped.write_text(yaml.safe_dump(config))
    argv = ["--config", str(stripped), "--use_cpu", "true"]
    data, training = parse_arguments((DataArguments, CalibrationTrainingArguments), argv)
    assert (data.dataset is None) != (data.train_file is None)
    assert training.calibration_method == ("per_label_temperature" if data.multi_label else "temperature")
    assert training.output_dir == f"outputs/{path.stem}"


@pytest.mark.parametrize("path", sorted((CONFIGS / "networks").glob("*.yaml")), ids=lambda path: path.stem)
def test_each_network_is_there(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    if config["model"] in IMAGE_NETWORKS:
        network_config(IMAGE_NETWORKS[config["model"]].config_class, json.dumps(config["model_kwargs"]))
    else:
        assert config == {"model": "microsoft/resnet-50", "from_scratch": True}
