"""Residual networks for small images: the papers' ResNets and Wide-ResNet-26-10, and He's of depth 6n + 2."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from .image_classifier import ImageClassifier

# Blocks of the four stages. 110 is that of the papers' code; He et al. 2016 have none of bottlenecks at that depth.
_FOUR_STAGES: dict[str, dict[int, tuple[int, ...]]] = {
    "basic": {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)},
    "bottleneck": {
        50: (3, 4, 6, 3),
        101: (3, 4, 23, 3),
        110: (3, 4, 26, 3),
        152: (3, 8, 36, 3),
    },
}


class CifarResNetConfig(PreTrainedConfig):
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
            self.block = (
                "bottleneck" if self.depth in _FOUR_STAGES["bottleneck"] else "basic"
            )
        if self.block not in _FOUR_STAGES:
            raise ValueError(
                f"expected block to be basic or bottleneck, got {self.block!r}"
            )
        if not self.stages:
            depths = ", ".join(map(str, _FOUR_STAGES[self.block])) + " or 6n + 2" * (
                self.block == "basic"
            )
            raise ValueError(
                f"expected depth with {self.block} blocks to be one of {depths}, got {self.depth}"
            )
        if self.he_initialization is None:
            self.he_initialization = len(self.stages) == 3
        if self.pooled_size < 1:
            raise ValueError(
                f"expected pooled_size to be at least 1, got {self.pooled_size}"
            )
        if not 0 <= self.stochastic_depth < 1:
            raise ValueError(
                f"expected stochastic_depth to be in [0, 1), got {self.stochastic_depth}"
            )

    @property
    def stages(self) -> tuple[int, ...]:
        """How many blocks each stage has; none for a depth that there is not."""
        thirds, rest = divmod(self.depth - 2, 6)
        by_thirds = (
            (thirds,) * 3 if self.block == "basic" and rest == 0 and thirds > 0 else ()
        )
        return _FOUR_STAGES[str(self.block)].get(self.depth, by_thirds)


class CifarResNetForImageClassification(ImageClassifier):
    """Classify small images, of 32 pixels (CIFAR) or 64 (Tiny-ImageNet), by a residual network.

        3x3 convolution, no pooling -> stages of blocks, each but the first halves the image -> mean -> classifier

    With four stages the shortcuts that change the size are convolutions, as in the papers' code. With depth 6n + 2
    they have no parameters: every second pixel, and zeros for the new channels (He's option A).

    References:
        He, Zhang, Ren, Sun, Deep Residual Learning for Image Recognition, 2016, 4.2; the code of Mukhoti et al.,
        Calibrating Deep Neural Networks using Focal Loss, 2020, which later papers took; Huang, Sun, Liu, Sedra,
        Weinberger, Deep Networks with Stochastic Depth, 2016.
    """

    config_class = CifarResNetConfig
    base_model_prefix = "cifar_resnet"

    def __init__(self, config: CifarResNetConfig) -> None:
        super().__init__(config)
        self.he_initialization = bool(config.he_initialization)
        stages = config.stages
        width = 64 if len(stages) == 4 else 16
        bottleneck, padded = config.block == "bottleneck", len(stages) == 3
        channels = [
            width,
            *(
                width * 2**stage * (4 if bottleneck else 1)
                for stage in range(len(stages))
            ),
        ]
        layers = OrderedDict[str, nn.Module](
            stem=nn.Sequential(*_convolution(3, width, 3), nn.ReLU())
        )
        blocks: list[_ResidualBlock] = []
        for number, ((n_in, n_out), n_blocks) in enumerate(
            zip(pairwise(channels), stages, strict=True)
        ):
            first = _ResidualBlock(
                n_in, n_out, 2 if number else 1, bottleneck=bottleneck, padded=padded
            )
            others = [
                _ResidualBlock(n_out, n_out, bottleneck=bottleneck)
                for _ in range(n_blocks - 1)
            ]
            layers[f"stage{number + 1}"] = nn.Sequential(first, *others)
            blocks += [first, *others]
        self.features = nn.Sequential(layers)
        for number, block in enumerate(blocks, 1):
            block.drop = config.stochastic_depth * number / len(blocks)
        self.classifier = nn.Linear(
            channels[-1] * config.pooled_size**2, config.num_labels
        )
        self.post_init()


class WideResNetConfig(PreTrainedConfig):
    """Depth and width of a `WideResNetForImageClassification`.

    The depth is 6n + 2, with n blocks in each of the three stages, which have 16, 32 and 64 times `width` channels.
    """

    model_type = "wide_resnet"

    depth: int = 26
    width: int = 10

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.depth < 8 or (self.depth - 2) % 6:
            raise ValueError(
                f"expected depth to be 6n + 2, got {self.depth}; the papers' is 26"
            )
        if self.width < 1:
            raise ValueError(
                f"expected width to be at least 1, got {self.width}; the papers' is 10"
            )


class WideResNetForImageClassification(ImageClassifier):
    """Classify small images by a residual network with few, wide layers.

    The papers' code has batch norm and ReLU after each convolution, and counts depth as 6n + 2; Zagoruyko and
    Komodakis, Wide Residual Networks, 2016, have them before it, and 6n + 4. This is the papers' network.
    """

    config_class = WideResNetConfig
    base_model_prefix = "wide_resnet"
    he_initialization = True

    def __init__(self, config: WideResNetConfig) -> None:
        super().__init__(config)
        width = 16 * config.width
        blocks: list[nn.Module] = []
        for n_in, n_out, stride in (
            (16, width, 1),
            (width, 2 * width, 2),
            (2 * width, 4 * width, 2),
        ):
            others = [
                _ResidualBlock(n_out, n_out) for _ in range((config.depth - 2) // 6 - 1)
            ]
            blocks += [_ResidualBlock(n_in, n_out, stride), *others]
        self.features = nn.Sequential(*_convolution(3, 16, 3), nn.ReLU(), *blocks)
        self.classifier = nn.Linear(4 * width, config.num_labels)
        self.post_init()


class _ResidualBlock(nn.Module):
    """relu(layers(x) + shortcut(x)); the share `drop` of training batches skips the layers, evaluation scales them."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        stride: int = 1,
        *,
        bottleneck: bool = False,
        padded: bool = False,
    ) -> None:
        super().__init__()
        if bottleneck:  # 1x1 to a fourth of the channels, 3x3 with the stride, 1x1 back
            narrow = n_out // 4
            convolutions = [
                (n_in, narrow, 1, 1),
                (narrow, narrow, 3, stride),
                (narrow, n_out, 1, 1),
            ]
        else:
            convolutions = [(n_in, n_out, 3, stride), (n_out, n_out, 3, 1)]
        layers = [
            layer
            for sizes in convolutions
            for layer in (*_convolution(*sizes), nn.ReLU())
        ]
        self.layers = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if padded and n_in != n_out:
            self.shortcut = _PaddedShortcut(n_out - n_in, stride)
        elif stride != 1 or n_in != n_out:
            self.shortcut = nn.Sequential(*_convolution(n_in, n_out, 1, stride))
        self.drop = 0.0

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        shortcut = self.shortcut(pixels)
        if self.drop and self.training:
            return F.relu(
                shortcut
                if torch.rand(()) < self.drop
                else self.layers(pixels) + shortcut
            )
        layers = self.layers(pixels)
        return F.relu((layers * (1 - self.drop) if self.drop else layers) + shortcut)


class _PaddedShortcut(nn.Module):
    """Every second pixel, and zeros for the channels that are new: He's option A, without parameters."""

    def __init__(self, n_new: int, stride: int) -> None:
        super().__init__()
        self.n_new, self.stride = n_new, stride

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        kept = pixels[:, :, :: self.stride, :: self.stride]
        return F.pad(kept, (0, 0, 0, 0, self.n_new // 2, self.n_new - self.n_new // 2))


def _convolution(
    n_in: int, n_out: int, kernel: int, stride: int = 1
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """A convolution that keeps the size but for its stride, and its batch norm."""
    convolution = nn.Conv2d(
        n_in, n_out, kernel, stride=stride, padding=kernel // 2, bias=False
    )
    return convolution, nn.BatchNorm2d(n_out)
