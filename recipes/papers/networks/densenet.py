"""Densely connected networks: the papers' DenseNet-121 for small images, and that of CheXNet for 224 pixels."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from .image_classifier import ImageClassifier


class DenseNetConfig(PreTrainedConfig):
    """Depth and stem of a `DenseNetForImageClassification`.

    Args:
        depth: 121; or 40, Huang's smallest network for CIFAR, with growth 12, neither bottlenecks
            nor compression, and the small stem.
        stem: "small" (a 3x3 convolution) for images of 32 or 64 pixels, "large" (7x7 with stride 2,
            a pooling) for 224.
    """

    model_type = "densenet"

    depth: int = 121
    stem: str = "small"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.depth not in (40, 121):
            raise ValueError(f"expected depth to be 40 or 121, got {self.depth!r}")
        stems = ("small",) if self.depth == 40 else ("small", "large")
        if self.stem not in stems:
            raise ValueError(
                f"expected stem to be {' or '.join(stems)}, got {self.stem!r}"
            )


class DenseNetForImageClassification(ImageClassifier):
    """Classify images by a network in which every layer of a block reads all before it.

    The parameters have torchvision's names. With the large stem, weights that were trained on
    ImageNet with torchvision or timm load unchanged, and a head for other classes is new:
    `from_pretrained("timm/densenet121.tv_in1k", config=DenseNetConfig(stem="large", num_labels=14),
    ignore_mismatched_sizes=True)`.

    References:
        Huang, Liu, van der Maaten, Weinberger, Densely Connected Convolutional Networks, 2017; the
        code of Mukhoti et al., Calibrating Deep Neural Networks using Focal Loss, 2020 (small
        stem); Rajpurkar et al., CheXNet, 2017.
    """

    config_class = DenseNetConfig
    base_model_prefix = "densenet"

    def __init__(self, config: DenseNetConfig) -> None:
        super().__init__(config)
        # As in torchvision; the papers' code has torch's default.
        self.he_initialization = config.stem == "large"
        plain = config.depth == 40
        growth = 12 if plain else 32
        channels = 16 if plain else 2 * growth
        small = config.stem == "small"
        kernel, stride = (3, 1) if small else (7, 2)
        layers = OrderedDict[str, nn.Module]()
        layers["conv0"] = nn.Conv2d(
            3, channels, kernel, stride, kernel // 2, bias=False
        )
        if not small:
            layers |= {
                "norm0": nn.BatchNorm2d(channels),
                "relu0": nn.ReLU(),
                "pool0": nn.MaxPool2d(3, 2, 1),
            }
        blocks = (12, 12, 12) if plain else (6, 12, 24, 16)
        for number, n_layers in enumerate(blocks, 1):
            if number > 1:
                n_out = channels if plain else channels // 2
                layers[f"transition{number - 1}"] = _transition(channels, n_out)
                channels = n_out
            block = OrderedDict[str, nn.Module]()
            for layer in range(n_layers):
                block[f"denselayer{layer + 1}"] = _DenseLayer(
                    channels + layer * growth, growth, plain=plain
                )
            layers[f"denseblock{number}"] = nn.Sequential(block)
            channels += n_layers * growth
        layers["norm5"] = nn.BatchNorm2d(channels)
        layers["relu5"] = nn.ReLU()
        self.features = nn.Sequential(layers)
        self.classifier = nn.Linear(channels, config.num_labels)
        self.post_init()


class _DenseLayer(nn.Module):
    """Adds channels to those that it reads, by a bottleneck unless it is plain."""

    def __init__(self, n_in: int, growth: int, *, plain: bool) -> None:
        super().__init__()
        self.plain = plain
        self.norm1 = nn.BatchNorm2d(n_in)
        if plain:
            self.conv1 = nn.Conv2d(n_in, growth, 3, padding=1, bias=False)
        else:
            self.conv1 = nn.Conv2d(n_in, 4 * growth, 1, bias=False)
            self.norm2 = nn.BatchNorm2d(4 * growth)
            self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        new = self.conv1(F.relu(self.norm1(features)))
        if not self.plain:
            new = self.conv2(F.relu(self.norm2(new)))
        return torch.cat([features, new], dim=1)


def _transition(n_in: int, n_out: int) -> nn.Sequential:
    """Other channels, half of the size."""
    layers = OrderedDict[str, nn.Module](norm=nn.BatchNorm2d(n_in), relu=nn.ReLU())
    layers["conv"] = nn.Conv2d(n_in, n_out, 1, bias=False)
    layers["pool"] = nn.AvgPool2d(2)
    return nn.Sequential(layers)
