"""Residual networks for small images: the papers' ResNets and Wide-ResNet-26-10, and He's of depth 6n + 2."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig

from .image_classifier import ImageClassifier

# Blocks of the four stages. 110 is that of the papers' code; He et al. 2016 have none of
# bottlenecks at that depth.
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
        depth: with bottlenecks 50, 101, 110 or 152; with basic blocks 18 or 34, in four stages from
            64 channels; or 6n + 2, such as 20, 56 or 110, in three stages from 16 channels.
        block: "basic" or "bottleneck"; by default what `depth` goes with, for 110 a bottleneck.
        pooled_size: the features are averaged to so many rows and columns; the papers take 2 for
            Tiny-ImageNet.
        he_initialization: convolutions start from He's normal distribution, as in the papers' code
            for Tiny-ImageNet and in He's own networks, rather than from torch's default; by default
            with depth 6n + 2 only.
        stochastic_depth: the share of training batches that skip the last block, in [0, 1); that of
            earlier blocks grows to it linearly. Huang et al. 2016 take 0.5.
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
            is_bottleneck = self.depth in _FOUR_STAGES["bottleneck"]
            self.block = "bottleneck" if is_bottleneck else "basic"
        if self.block not in _FOUR_STAGES:
            raise ValueError(
                f"expected block to be basic or bottleneck, got {self.block!r}"
            )
        if not self.stages:
            depths = ", ".join(map(str, _FOUR_STAGES[self.block]))
            if self.block == "basic":
                depths += " or 6n + 2"
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
        four = _FOUR_STAGES[str(self.block)].get(self.depth)
        if four is not None:
            return four
        n, rest = divmod(self.depth - 2, 6)
        if self.block == "basic" and rest == 0 and n > 0:
            return (n, n, n)
        return ()


class CifarResNetForImageClassification(ImageClassifier):
    """Classify small images, of 32 pixels (CIFAR) or 64 (Tiny-ImageNet), by a residual network.

        3x3 convolution, no pooling -> stages of blocks, each but the first halves the image -> mean -> classifier

    With four stages the shortcuts that change the size are convolutions, as in the papers' code.
    With depth 6n + 2 they have no parameters: every second pixel, and zeros for the new channels
    (He's option A).

    References:
        He, Zhang, Ren, Sun, Deep Residual Learning for Image Recognition, 2016, 4.2; the code of
        Mukhoti et al., Calibrating Deep Neural Networks using Focal Loss, 2020, which later papers
        took; Huang, Sun, Liu, Sedra, Weinberger, Deep Networks with Stochastic Depth, 2016.
    """

    config_class = CifarResNetConfig
    base_model_prefix = "cifar_resnet"

    def __init__(self, config: CifarResNetConfig) -> None:
        super().__init__(config)
        self.he_initialization = bool(config.he_initialization)
        stages = config.stages
        width = 64 if len(stages) == 4 else 16
        bottleneck = config.block == "bottleneck"
        # Small networks of three stages have shortcuts without parameters.
        padded = len(stages) == 3
        stem = nn.Sequential(*_convolution(3, width, 3), nn.ReLU())
        layers = OrderedDict[str, nn.Module](stem=stem)
        blocks: list[_ResidualBlock] = []
        n_in = width
        n_out = 4 * width if bottleneck else width
        for stage, n_blocks in enumerate(stages, 1):
            kind = {"bottleneck": bottleneck, "padded": padded}
            stride = 1 if stage == 1 else 2
            own = [_ResidualBlock(n_in, n_out, stride, **kind)]
            for _ in range(n_blocks - 1):
                own.append(_ResidualBlock(n_out, n_out, **kind))
            layers[f"stage{stage}"] = nn.Sequential(*own)
            blocks += own
            n_in = n_out
            n_out = 2 * n_out
        self.features = nn.Sequential(layers)
        for number, block in enumerate(blocks, 1):
            block.drop = config.stochastic_depth * number / len(blocks)
        n_features = n_in * config.pooled_size**2
        self.classifier = nn.Linear(n_features, config.num_labels)
        self.post_init()


class WideResNetConfig(PreTrainedConfig):
    """Depth and width of a `WideResNetForImageClassification`.

    The depth is 6n + 2, with n blocks in each of the three stages, which have 16, 32 and 64 times
    `width` channels.
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

    The papers' code has batch norm and ReLU after each convolution, and counts depth as 6n + 2;
    Zagoruyko and Komodakis, Wide Residual Networks, 2016, have them before it, and 6n + 4. This is
    the papers' network.
    """

    config_class = WideResNetConfig
    base_model_prefix = "wide_resnet"
    he_initialization = True

    def __init__(self, config: WideResNetConfig) -> None:
        super().__init__(config)
        layers: list[nn.Module] = [*_convolution(3, 16, 3), nn.ReLU()]
        n_blocks = (config.depth - 2) // 6
        n_in = 16
        for channels, stride in ((16, 1), (32, 2), (64, 2)):
            n_out = channels * config.width
            layers.append(_ResidualBlock(n_in, n_out, stride))
            for _ in range(n_blocks - 1):
                layers.append(_ResidualBlock(n_out, n_out))
            n_in = n_out
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(n_in, config.num_labels)
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
        if bottleneck:
            narrow = n_out // 4
            layers = [*_convolution(n_in, narrow, 1), nn.ReLU()]
            layers += [*_convolution(narrow, narrow, 3, stride), nn.ReLU()]
            layers += _convolution(narrow, n_out, 1)
        else:
            layers = [*_convolution(n_in, n_out, 3, stride), nn.ReLU()]
            layers += _convolution(n_out, n_out, 3)
        self.layers = nn.Sequential(*layers)
        self.shortcut: nn.Module = nn.Identity()
        if padded and n_in != n_out:
            self.shortcut = _PaddedShortcut(n_out - n_in, stride)
        elif stride != 1 or n_in != n_out:
            self.shortcut = nn.Sequential(*_convolution(n_in, n_out, 1, stride))
        self.drop = 0.0

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        shortcut = self.shortcut(pixels)
        if self.drop and self.training and torch.rand(()) < self.drop:
            return F.relu(shortcut)
        layers = self.layers(pixels)
        if self.drop and not self.training:
            layers = layers * (1 - self.drop)
        return F.relu(layers + shortcut)


class _PaddedShortcut(nn.Module):
    """Every second pixel, and zeros for the channels that are new: He's option A, without parameters."""

    def __init__(self, n_new: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = n_new // 2
        self.after = n_new - self.before

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        kept = pixels[:, :, :: self.stride, :: self.stride]
        return F.pad(kept, (0, 0, 0, 0, self.before, self.after))


def _convolution(
    n_in: int, n_out: int, kernel: int, stride: int = 1
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """A convolution that keeps the size but for its stride, and its batch norm."""
    convolution = nn.Conv2d(
        n_in, n_out, kernel, stride=stride, padding=kernel // 2, bias=False
    )
    return convolution, nn.BatchNorm2d(n_out)
