"""Densely connected networks: the papers' DenseNet-121 for small images, and that of CheXNet for 224 pixels."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hf_calib._errors import InputValueError, expected
from hf_calib.papers.networks.config import PaperNetworkConfig
from hf_calib.papers.networks.image_classifier import ImageClassifier

# Layers of the blocks, and how many channels each layer adds.
_BLOCKS = {
    40: (12, 12, 12),
    121: (6, 12, 24, 16),
    161: (6, 12, 36, 24),
    169: (6, 12, 32, 32),
    201: (6, 12, 48, 32),
}
_GROWTH = {40: 12, 121: 32, 161: 48, 169: 32, 201: 32}


class DenseNetConfig(PaperNetworkConfig):
    """Depth and stem of a `DenseNetForImageClassification`.

    Args:
        depth: 121, 161, 169 or 201; or 40, Huang's smallest network for CIFAR, with growth 12, neither bottlenecks nor
            compression, and the small stem.
        stem: "small" for images of 32 or 64 pixels: a 3x3 convolution; "large" for 224 pixels: 7x7 with stride 2, and a
            pooling.

    Raises:
        ValueError: for another depth or stem.

    >>> DenseNetConfig(num_labels=14, stem="large").depth
    121
    """

    model_type = "densenet"

    depth: int = 121
    stem: str = "small"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for name, known in (("depth", tuple(_BLOCKS)), ("stem", ("small", "large"))):
            got = getattr(self, name)
            if got not in known:
                requirement, way_out = f"be one of {', '.join(map(str, known))}", "see DenseNetConfig"
                raise InputValueError(expected(name, requirement, repr(got), way_out))
        if self.depth == 40 and self.stem == "large":
            raise InputValueError(expected("stem of depth 40", "be small", "'large'", "see DenseNetConfig"))


class DenseNetForImageClassification(ImageClassifier):
    """Classify images by a network in which every layer of a block reads all before it.

    Args:
        config: a `DenseNetConfig`, with `num_labels` or `id2label`.

    Notes:
        The parameters have torchvision's names. With the large stem, weights that were trained on ImageNet with
        torchvision or timm load as they are, and a head for other classes is new:
        `from_pretrained("timm/densenet121.tv_in1k", config=DenseNetConfig(stem="large", num_labels=14),
        ignore_mismatched_sizes=True)`.

    References:
        Huang, Liu, van der Maaten, Weinberger, Densely Connected Convolutional Networks, 2017; the code of Mukhoti et
        al., Calibrating Deep Neural Networks using Focal Loss, 2020 (small stem); Rajpurkar et al., CheXNet, 2017.

    >>> model = DenseNetForImageClassification(DenseNetConfig(num_labels=10)).eval()
    >>> model(torch.zeros(1, 3, 32, 32)).logits.shape
    torch.Size([1, 10])
    """

    config_class = DenseNetConfig
    base_model_prefix = "densenet"

    def __init__(self, config: DenseNetConfig) -> None:
        super().__init__(config)
        self.num_labels: int = len(config.id2label or {})
        self.he_initialization = (
            config.stem == "large"
        )  # as in torchvision; the papers' code has torch's default
        growth = _GROWTH[config.depth]
        plain = config.depth == 40
        channels = 16 if plain else 2 * growth
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if config.stem == "small":
            layers["conv0"] = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        else:
            layers["conv0"] = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
            layers["norm0"] = nn.BatchNorm2d(channels)
            layers["relu0"] = nn.ReLU()
            layers["pool0"] = nn.MaxPool2d(3, stride=2, padding=1)
        for number, n_layers in enumerate(_BLOCKS[config.depth], 1):
            if number > 1:
                n_out = channels if plain else channels // 2
                layers[f"transition{number - 1}"] = _transition(channels, n_out)
                channels = n_out
            dense_layer = _PlainDenseLayer if plain else _DenseLayer
            layers[f"denseblock{number}"] = nn.Sequential(
                OrderedDict(
                    (f"denselayer{layer + 1}", dense_layer(channels + layer * growth, growth))
                    for layer in range(n_layers)
                )
            )
            channels += n_layers * growth
        layers["norm5"] = nn.BatchNorm2d(channels)
        layers["relu5"] = nn.ReLU()
        self.features = nn.Sequential(layers)
        self.classifier = nn.Linear(channels, self.num_labels)
        self.post_init()


class _DenseLayer(nn.Module):
    """Adds channels to those that it reads."""

    def __init__(self, n_in: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(n_in)
        self.conv1 = nn.Conv2d(n_in, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.conv1(F.relu(self.norm1(features)))
        return torch.cat([features, self.conv2(F.relu(self.norm2(hidden)))], dim=1)


class _PlainDenseLayer(nn.Module):
    """Adds channels to those that it reads, without a bottleneck."""

    def __init__(self, n_in: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(n_in)
        self.conv1 = nn.Conv2d(n_in, growth, 3, padding=1, bias=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.cat([features, self.conv1(F.relu(self.norm1(features)))], dim=1)


def _transition(n_in: int, n_out: int) -> nn.Sequential:
    """Other channels, half of the size."""
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            norm=nn.BatchNorm2d(n_in),
            relu=nn.ReLU(),
            conv=nn.Conv2d(n_in, n_out, 1, bias=False),
            pool=nn.AvgPool2d(2),
        )
    )
