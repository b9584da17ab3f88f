"""Grad-CAM: against its definition, on every kind of network, and with what must stay as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from papers.grad_cam import class_activation_map, grad_cam
from papers.networks.densenet import DenseNetConfig
from papers.networks.resnet import CifarResNetConfig
from papers.networks.vgg import VGGConfig
from PIL import Image
from scipy.stats import binomtest
from torch import nn
from transformers import (
    AutoModelForImageClassification,
    MobileViTConfig,
    ResNetConfig,
    SwinConfig,
    ViTConfig,
    ViTImageProcessorPil,
)
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

from hf_calib.scaling import TemperatureScaling
from tests.helpers.mosaics import mosaics
from tests.helpers.pictures import overlapping, written

PROCESSOR = ViTImageProcessorPil(size={"height": 32, "width": 32})
VIT = {"image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [1, 2],
    "window_size": 4,
}
NETWORKS = {
    "cifar_resnet": CifarResNetConfig(depth=8, num_labels=3),
    "densenet": DenseNetConfig(num_labels=3),
    "vgg": VGGConfig(depth=11, num_labels=3),
    "resnet": ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=3),
    "vit": ViTConfig(**VIT, intermediate_size=16, num_labels=3),
    "swin": SwinConfig(**SWIN, num_labels=3),
    "mobilevit": MobileViTConfig(
        hidden_sizes=[8, 8, 8], neck_hidden_sizes=[8] * 7, num_attention_heads=2, num_labels=3
    ),
}


class Known(nn.Module):
    """Two maps of one convolution; each class reads the means of both."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Conv2d(3, 2, 3, padding=1)
        self.head = nn.Linear(2, 2, bias=False)

    def forward(self, pixel_values: torch.Tensor) -> ImageClassifierOutputWithNoAttention:
        return ImageClassifierOutputWithNoAttention(
            logits=self.head(self.maps(pixel_values).mean(dim=(2, 3)))
        )


def make(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForImageClassification.from_config(NETWORKS[name]).eval()


def test_the_map_is_the_papers() -> None:
    torch.manual_seed(0)
    model, pixels = Known(), torch.randn(1, 3, 8, 8)
    for label in (0, 1):
        heat, logits, chosen = class_activation_map(model, pixels, label)
        maps = model.maps(pixels)[0].detach()
        expected = (model.head.weight[label, :, None, None] * maps).sum(dim=0).relu().detach()
        np.testing.assert_allclose(heat, expected / expected.max(), rtol=1e-5, atol=1e-6)
        assert chosen == label
        np.testing.assert_allclose(logits, model(pixels).logits[0].detach(), rtol=1e-6)
    assert class_activation_map(model, pixels)[2] == int(logits.argmax())


@pytest.mark.parametrize("name", NETWORKS)
def test_every_kind_of_network_has_a_map(name: str) -> None:
    model = make(name)
    heat, logits, chosen = class_activation_map(model, torch.randn(1, 3, 32, 32), 2)
    assert heat.ndim == 2
    assert min(heat.shape) > 1
    assert (heat >= 0).all()
    assert heat.max() == 1 or not heat.any()
    assert logits.shape == (3,)
    assert chosen == 2


def test_the_model_stays_as_it_was() -> None:
    model = make("cifar_resnet").train()
    model.features.stage1.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        class_activation_map(model, torch.randn(1, 3, 32, 32), 0)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_the_figure_shows_confidence_before_and_after() -> None:
    model = make("cifar_resnet")
    model.config.id2label = {0: "cat", 1: "dog $x$", 2: "eel"}
    logits = np.random.default_rng(0).standard_normal((50, 3))
    labels = logits.argmax(axis=1)
    labels[::3] = 0
    scaler = TemperatureScaling().fit(logits, labels)
    image = Image.new("RGB", (40, 30), (200, 10, 10))
    figure = grad_cam(model, image, "dog $x$", processor=PROCESSOR, scaler=scaler)
    _, found, _ = class_activation_map(model, PROCESSOR(images=image, return_tensors="pt")["pixel_values"], 1)
    before, after = np.exp(found[1]) / np.exp(found).sum(), scaler.predict_proba(found[None])[0, 1]
    assert f"dog $x$: {before:.2f} before calibration, {after:.2f} after" in written(figure)
    assert not overlapping(figure)
    array = np.asarray(image)
    assert written(grad_cam(model, array, 1, processor=PROCESSOR))[-1] == f"dog $x$: {before:.2f}"
    model.config.problem_type = "multi_label_classification"
    assert f"dog $x$: {1 / (1 + np.exp(-found[1])):.2f}" in written(
        grad_cam(model, array, 1, processor=PROCESSOR)
    )


@pytest.mark.deep  # trains a network for minutes
def test_the_map_is_where_the_object_is(shared_data: Path) -> None:
    """Of digits that a network finds on a canvas of two, the warmest quarter is that of the digit far above chance.

    How far is the training's affair, which rounds differently from one kind of processor to the next.
    """
    pixels, labels = mosaics(shared_data / "mnist" / "train.parquet", 3000, seed=0).tensors()
    test = mosaics(shared_data / "mnist" / "test.parquet", 60, seed=1)
    torch.manual_seed(0)
    config = CifarResNetConfig(depth=8, num_labels=10, problem_type="multi_label_classification")
    model = AutoModelForImageClassification.from_config(config)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(4):
        for rows in torch.randperm(len(pixels)).split(64):
            loss = model(pixels[rows], labels=labels[rows]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    inputs, _ = test.tensors()
    with torch.no_grad():
        found = model(inputs).logits > 0
    hits = []
    for i, label in zip(*np.nonzero(found.numpy() & (test.labels == 1)), strict=True):
        heat, _, _ = class_activation_map(model, inputs[i : i + 1], int(label))
        half = len(heat) // 2
        quarters = [heat[:half, :half], heat[:half, half:], heat[half:, :half], heat[half:, half:]]
        hits.append(test.places[i, np.argmax([quarter.sum() for quarter in quarters])] == label)
    assert len(hits) >= 20
    assert binomtest(sum(hits), len(hits), 1 / 4, alternative="greater").pvalue < 1e-6
