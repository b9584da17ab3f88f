"""Residual networks for small images: the papers' ResNet-18, -50 and -110, and He's of depth 6n + 2."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hf_calib._errors import InputValueError, expected
from hf_calib.papers.networks.config import PaperNetworkConfig
from hf_calib.papers.networks.image_classifier import ImageClassifier
from hf_calib.papers.networks.residual_blocks import ResidualBlock, basic_block, bottleneck_block, convolution

_BASIC, _BOTTLENECK = "basic", "bottleneck"
# Blocks of the four stages. 110 is that of the papers' code; He et al. 2016 have none of bottlenecks at that depth.
_FOUR_STAGES = {
    (18, _BASIC): (2, 2, 2, 2),
    (34, _BASIC): (3, 4, 6, 3),
    (50, _BOTTLENECK): (3, 4, 6, 3),
    (101, _BOTTLENECK): (3, 4, 23, 3),
    (110, _BOTTLENECK): (3, 4, 26, 3),
    (152, _BOTTLENECK): (3, 8, 36, 3),
}


class CifarResNetConfig(PaperNetworkConfig):
    """Depth and blocks of a `CifarResNetForImageClassification`.

    Args:
        depth: with bottlenecks 50, 101, 110 or 152; with basic blocks 18 or 34, in four stages from 64 channels; or
            6n + 2, such as 20, 56 or 110, in three stages from 16 channels.
        block: "basic" or "bottleneck"; by default what `depth` goes with, for 110 a bottleneck.
        pooled_size: the features are averaged to so many rows and columns; the papers take 2 for Tiny-ImageNet.
        he_initialization: convolutions start from He's normal distribution, as in the papers' code for Tiny-ImageNet
            and in He's own networks, rather than from torch's default; by default with depth 6n + 2 only.
        stochastic_depth: the share of training batches that skip the last block, in [0, 1); that of earlier blocks
            grows to it linearly. Huang et al. 2016 take 0.5.

    Raises:
        ValueError: if there is no network of this depth and block, or a value is out of range.

    >>> CifarResNetConfig(depth=110).block, CifarResNetConfig(depth=20).block
    ('bottleneck', 'basic')
    """

    model_type = "cifar_resnet"

    depth: int = 50
    block: str | None = None
    pooled_size: int = 1
    he_initialization: bool | None = None
    stochastic_depth: float = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.block is None:
            self.block = _BOTTLENECK if (self.depth, _BOTTLENECK) in _FOUR_STAGES else _BASIC
        if self.stages is None:
            depths = ", ".join(str(depth) for depth, block in _FOUR_STAGES if block == self.block)
            requirement = f"be one of {depths}" + (" or 6n + 2" if self.block == _BASIC else "")
            if self.block not in (_BASIC, _BOTTLENECK):
                way_out = "the other values are of depth"
                raise InputValueError(expected("block", "be basic or bottleneck", repr(self.block), way_out))
            way_out = "see CifarResNetConfig"
            raise InputValueError(
                expected(f"depth with {self.block} blocks", requirement, self.depth, way_out)
            )
        if self.he_initialization is None:
            self.he_initialization = len(self.stages) == 3
        if self.pooled_size < 1:
            raise InputValueError(
                expected("pooled_size", "be at least 1", self.pooled_size, "the default is 1")
            )
        if not 0 <= self.stochastic_depth < 1:
            raise InputValueError(
                expected("stochastic_depth", "be in [0, 1)", self.stochastic_depth, "the default is 0")
            )

    @property
    def stages(self) -> tuple[int, ...] | None:
        """How many blocks each stage has; None for a depth that there is not."""
        found = _FOUR_STAGES.get((self.depth, str(self.block)))
        if found is None and self.block == _BASIC and self.depth >= 8 and (self.depth - 2) % 6 == 0:
            return ((self.depth - 2) // 6,) * 3
        return found


class CifarResNetForImageClassification(ImageClassifier):
    """Classify small images, of 32 pixels (CIFAR) or 64 (Tiny-ImageNet), by a residual network.

        3x3 convolution, no pooling -> stages of blocks, each but the first halves the image -> mean -> classifier

    For the papers' tables, and for training from scratch; on photographs a pretrained ResNet or ViT is more accurate.

    Args:
        config: a `CifarResNetConfig`, with `num_labels` or `id2label`.

    Notes:
        With four stages the shortcuts that change the size are convolutions, as in the papers' code. With depth
        6n + 2 they have no parameters: every second pixel, and zeros for the new channels (He's option A).

    References:
        He, Zhang, Ren, Sun, Deep Residual Learning for Image Recognition, 2016, 4.2; the code of Mukhoti et al.,
        Calibrating Deep Neural Networks using Focal Loss, 2020, which later papers took; Huang, Sun, Liu, Sedra,
        Weinberger, Deep Networks with Stochastic Depth, 2016.

    >>> model = CifarResNetForImageClassification(CifarResNetConfig(depth=20, num_labels=10))
    >>> model(torch.zeros(2, 3, 32, 32)).logits.shape
    torch.Size([2, 10])
    """

    config_class = CifarResNetConfig
    base_model_prefix = "cifar_resnet"

    def __init__(self, config: CifarResNetConfig) -> None:
        super().__init__(config)
        stages = config.stages
        assert stages is not None
        self.num_labels: int = len(config.id2label or {})
        self.he_initialization = bool(config.he_initialization)
        width = 64 if len(stages) == 4 else 16
        expansion = 4 if config.block == _BOTTLENECK else 1
        channels = [width, *(width * 2**stage * expansion for stage in range(len(stages)))]
        layers = OrderedDict[str, nn.Module](stem=nn.Sequential(*convolution(3, width, 3), nn.ReLU()))
        for number, ((n_in, n_out), n_blocks) in enumerate(zip(pairwise(channels), stages, strict=True)):
            first = self._block(n_in, n_out, stride=1 if number == 0 else 2)
            rest = (self._block(n_out, n_out, stride=1) for _ in range(n_blocks - 1))
            layers[f"stage{number + 1}"] = nn.Sequential(first, *rest)
        self.features = nn.Sequential(layers)
        blocks = [module for module in self.features.modules() if isinstance(module, ResidualBlock)]
        for number, block in enumerate(blocks, 1):
            block.drop = config.stochastic_depth * number / len(blocks)
        self.classifier = nn.Linear(channels[-1] * config.pooled_size**2, self.num_labels)
        self.post_init()

    def pool(self, features: torch.Tensor) -> torch.Tensor:
        """(N, channels, h, w) to what the classifier reads."""
        return F.adaptive_avg_pool2d(features, self.config.pooled_size).flatten(1)

    def _block(self, n_in: int, n_out: int, *, stride: int) -> ResidualBlock:
        if self.config.block == _BOTTLENECK:
            return bottleneck_block(n_in, n_out, stride)
        return basic_block(n_in, n_out, stride, padded=len(self.config.stages) == 3)
