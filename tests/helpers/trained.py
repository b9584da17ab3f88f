"""Trainers of tiny models that have been trained, and models of unusual kinds."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch import Tensor, nn

from hf_calib import CalibrationTrainer
from tests.helpers.tiny import N_LABELS, arguments, sequences, tiny_bert, tokenizer

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def trained(
    folder: Path, model: Any = None, *, data: Any = sequences, **settings: Any
) -> CalibrationTrainer:
    """A trained trainer with a temperature; `calibration_dataset` holds what is served later."""
    model = model or tiny_bert()
    teacher = copy.deepcopy(model)
    trainer = CalibrationTrainer(
        model,
        arguments(folder, **{"loss": "focal", "num_train_epochs": 1, **settings}),
        train_dataset=data(teacher, 8),
        calibration_dataset=data(teacher, 40, seed=2),
        eval_dataset=data(teacher, 20, seed=3),
        processing_class=tokenizer(),
    )
    trainer.train()
    assert trainer.temperature != 1
    return trainer


def served_logits(trainer: CalibrationTrainer) -> np.ndarray:
    """z / T by the trainer, in float64."""
    found = trainer.predict(trainer.calibration_dataset).predictions
    return found.astype(np.float64) / trainer.temperature


def tiny_vit(**more: Any) -> Any:
    config = transformers.ViTConfig(
        **SMALL, image_size=16, patch_size=8, num_labels=N_LABELS, **more
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.ViTForImageClassification(config)
    with torch.no_grad():
        model.classifier.weight *= 50
    return model


def lora(model: Any) -> Any:
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    return get_peft_model(model, config)


def images_trainer(folder: Path) -> tuple[CalibrationTrainer, tuple[str, list[str]]]:
    generator = np.random.default_rng(0)
    processor = transformers.ViTImageProcessor(
        size={"height": 16, "width": 16}, do_resize=False
    )
    paths = []
    for i in range(24):
        pixels = generator.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        paths.append(str(folder / f"{i}.png"))
        Image.fromarray(pixels).save(paths[-1])
    values = processor([Image.open(path) for path in paths], return_tensors="pt")[
        "pixel_values"
    ]
    model = tiny_vit()
    with torch.no_grad():
        probs = (model(pixel_values=values).logits / 2).softmax(1)
    labels = torch.multinomial(
        probs, 1, generator=torch.Generator().manual_seed(0)
    ).squeeze(1)
    rows = [
        {"pixel_values": v, "labels": label}
        for v, label in zip(values, labels, strict=True)
    ]
    trainer = CalibrationTrainer(
        model,
        arguments(folder / "out", loss="dual_focal", learning_rate=1e-4),
        train_dataset=rows[:8],
        calibration_dataset=rows,
        processing_class=processor,
    )
    trainer.train()
    return trainer, ("image-classification", paths)


class Network(nn.Module):
    """No transformers model: a Tensor of logits, no config, and no argument for labels."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.head = nn.Linear(12, N_LABELS)

    def forward(self, pixel_values: Tensor) -> Any:
        return self.head(pixel_values.flatten(1))


class NetworkWithTuple(Network):
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is None
        return (super().forward(pixel_values),)


def images(n: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(n)
    pixels = torch.randn(n, 3, 2, 2, generator=generator)
    with torch.no_grad():
        probs = (Network()(pixels) * 2).softmax(1)
    labels = torch.multinomial(probs, 1, generator=generator).squeeze(1)
    return [
        {"pixel_values": p, "labels": label}
        for p, label in zip(pixels, labels, strict=True)
    ]
