"""Grad-CAM: against its definition, on networks of convolutions, and with what must stay as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from papers.grad_cam import class_activation_map, grad_cam
from papers.networks.resnet import CifarResNetConfig
from PIL import Image
from scipy.special import softmax
from torch import nn
from transformers import AutoModelForImageClassification, ViTImageProcessorPil
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

from hf_calib.scaling import TemperatureScaling
from tests.helpers.pictures import overlapping, written

PROCESSOR = ViTImageProcessorPil(size={"height": 32, "width": 32})
RESNET = CifarResNetConfig(depth=8, num_labels=3)


class Known(nn.Module):
    """Two maps of one convolution; each class reads the means of both."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Conv2d(3, 2, 3, padding=1)
        self.head = nn.Linear(2, 2, bias=False)

    def forward(
        self, pixel_values: torch.Tensor
    ) -> ImageClassifierOutputWithNoAttention:
        means = self.maps(pixel_values).mean(dim=(2, 3))
        return ImageClassifierOutputWithNoAttention(logits=self.head(means))


def make(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForImageClassification.from_config(config).eval()


def test_the_map_is_the_papers() -> None:
    torch.manual_seed(0)
    model, pixels = Known(), torch.randn(1, 3, 8, 8)
    for label in (0, 1):
        heat, logits, chosen = class_activation_map(model, pixels, label)
        maps = model.maps(pixels)[0].detach()
        expected = (
            (model.head.weight[label, :, None, None] * maps).sum(dim=0).relu().detach()
        )
        np.testing.assert_allclose(
            heat, expected / expected.max(), rtol=1e-5, atol=1e-6
        )
        assert chosen == label
        np.testing.assert_allclose(logits, model(pixels).logits[0].detach(), rtol=1e-6)
    assert class_activation_map(model, pixels)[2] == int(logits.argmax())


def test_the_figure_shows_confidence_before_and_after() -> None:
    model = make(RESNET)
    model.config.id2label = {0: "cat", 1: "dog $x$", 2: "eel"}
    scaler = TemperatureScaling(grid=[2.0]).fit([[1.0, 0.0, 0.0]] * 3, [0, 0, 1])
    image = Image.new("RGB", (40, 30), (200, 10, 10))
    figure = grad_cam(model, image, 1, processor=PROCESSOR, scaler=scaler)
    _, found, _ = class_activation_map(
        model, PROCESSOR(images=image, return_tensors="pt")["pixel_values"], 1
    )
    before, after = softmax(found)[1], softmax(found / 2)[1]
    assert f"dog $x$: {before:.2f} before calibration, {after:.2f} after" in written(
        figure
    )
    assert not overlapping(figure)
    with pytest.raises(ValueError, match=r"label to lie in 0\.\.2, got 3"):
        grad_cam(model, image, 3, processor=PROCESSOR)
