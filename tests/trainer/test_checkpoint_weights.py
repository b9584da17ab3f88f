"""The weights that come back from a checkpoint are those that went in, whatever names the file gives them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback

from hf_calib import CalibrationTrainer
from tests.helpers.architectures import ARCHITECTURES, build, some_inputs
from tests.helpers.tiny import arguments, assert_same, weights

STEPS = 3
NAMES = list(ARCHITECTURES)
EVERY_NAME = [
    name if name in ("ViT", "T5") else pytest.param(name, marks=pytest.mark.slow)
    for name in NAMES
]


def rows(model: Any) -> list[dict[str, Any]]:
    """Enough for the steps of a training; token ids one row a step, which needs no padding token."""
    inputs = some_inputs(model)
    label = {"pixel_values": lambda i: i % 5}.get(
        model.main_input_name, lambda i: (2 * i) % 5
    )
    per_step = 2 if model.main_input_name == "pixel_values" else 1
    made = []
    for i in range(STEPS * per_step):
        shifted = {key: value[i % len(value)].clone() for key, value in inputs.items()}
        for value in shifted.values():
            value[1:2] = value[2:3] if i % 2 else value[0:1]
        made.append({**shifted, "labels": label(i)})
    return made


class Kept(TrainerCallback):
    """Keeps the weights after the last step, before the best model replaces them."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEPS:
            self.weights = weights(kwargs["model"])


def make_trainer(
    model: Any,
    folder: Path,
    *,
    kind: type[Trainer] = CalibrationTrainer,
    **changes: Any,
) -> Any:
    """A training whose first checkpoint is the "best", because the metric falls and the largest is asked for."""
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": len(rows(model)) // STEPS,
        "per_device_eval_batch_size": 1,
        "optim": "sgd",
        "learning_rate": 0.02,
        "max_grad_norm": 1.0,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "nll",
        "greater_is_better": True,
        "temperature_criterion": "none",
        "remove_unused_columns": False,
    }
    args = arguments(folder, **{**settings, **changes})
    return kind(
        model,
        args,
        train_dataset=rows(model),
        eval_dataset=rows(model),
        callbacks=[kept := Kept()],
    ), kept


def zeroed(model: Any) -> Any:
    """The same model with nothing in it, so that every weight has to come from the checkpoint."""
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    return model


@pytest.mark.parametrize("name", EVERY_NAME)
def test_training_resumes_and_the_best_model_is_loaded(
    name: str, tmp_path: Path
) -> None:
    whole, kept = make_trainer(build(name), tmp_path)
    whole.train()
    best = Path(whole.state.best_model_checkpoint)
    assert best.name != f"checkpoint-{STEPS}"
    logged = {
        entry["step"]: entry["eval_nll"]
        for entry in whole.state.log_history
        if "eval_nll" in entry
    }
    assert whole.state.best_metric == max(logged.values()) > logged[STEPS]
    assert whole.evaluate()["eval_nll"] == whole.state.best_metric

    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    resumed, again = make_trainer(zeroed(build(name)), tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert_same(again.weights, kept.weights)
    assert_same(weights(resumed.model), weights(whole.model))


def with_adapters() -> Any:
    torch.manual_seed(0)
    settings = {
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": ["classifier"],
    }
    return get_peft_model(build("ViT"), LoraConfig(**settings, init_lora_weights=False))


def adapter_trainer(folder: Path) -> tuple[Any, Kept]:
    model = with_adapters()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(0.9 if (folder / "checkpoint-1").exists() else 1)
    model.main_input_name = "pixel_values"
    return make_trainer(model, folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
def test_adapters_resume_and_the_best_ones_are_loaded(tmp_path: Path) -> None:
    whole, kept = adapter_trainer(tmp_path)
    whole.train()
    assert Path(whole.state.best_model_checkpoint).name != f"checkpoint-{STEPS}"
    assert whole.evaluate()["eval_nll"] == whole.state.best_metric
    resumed, again = adapter_trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS - 1}"))
    assert_same(again.weights, kept.weights)
    assert_same(weights(resumed.model), weights(whole.model))
