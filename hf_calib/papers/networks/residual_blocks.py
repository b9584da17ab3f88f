"""The blocks of the residual networks: convolutions with a shortcut beside them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class ResidualBlock(nn.Module):
    """relu(layers(x) + shortcut(x)).

    Args:
        layers: convolutions with batch norm, without the last ReLU.
        shortcut: of the same output shape; by default x itself where the shape stays, else a 1x1 convolution.

    Attributes:
        drop: the share of training batches that skip the layers (stochastic depth); evaluation scales them instead.
    """

    def __init__(self, layers: nn.Sequential, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = layers
        self.shortcut = nn.Identity() if shortcut is None else shortcut
        self.drop = 0.0

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """(N, n_in, h, w) -> (N, n_out, h / stride, w / stride)."""
        shortcut = self.shortcut(pixels)
        if self.drop and self.training:
            return F.relu(shortcut if torch.rand(()) < self.drop else self.layers(pixels) + shortcut)
        layers = self.layers(pixels)
        return F.relu((layers * (1 - self.drop) if self.drop else layers) + shortcut)


class PaddedShortcut(nn.Module):
    """Every second pixel, and zeros for the channels that are new: He's option A, without parameters."""

    def __init__(self, n_new: int, stride: int) -> None:
        super().__init__()
        self.n_new, self.stride = n_new, stride

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """(N, n_in, h, w) -> (N, n_in + n_new, h / stride, w / stride)."""
        kept = pixels[:, :, :: self.stride, :: self.stride]
        return F.pad(kept, (0, 0, 0, 0, self.n_new // 2, self.n_new - self.n_new // 2))


def basic_block(n_in: int, n_out: int, stride: int, *, padded: bool = False) -> ResidualBlock:
    """Two 3x3 convolutions; the first has the stride.

    Args:
        n_in: channels.
        n_out: channels.
        stride: 1, or 2 to halve the image.
        padded: a shortcut that changes the shape is a `PaddedShortcut`.
    """
    layers = nn.Sequential(*convolution(n_in, n_out, 3, stride), nn.ReLU(), *convolution(n_out, n_out, 3))
    if stride == 1 and n_in == n_out:
        return ResidualBlock(layers)
    return ResidualBlock(
        layers,
        PaddedShortcut(n_out - n_in, stride)
        if padded
        else nn.Sequential(*convolution(n_in, n_out, 1, stride)),
    )


def bottleneck_block(n_in: int, n_out: int, stride: int) -> ResidualBlock:
    """1x1 to a fourth of the channels, 3x3 with the stride, 1x1 back."""
    width = n_out // 4
    layers = nn.Sequential(
        *convolution(n_in, width, 1),
        nn.ReLU(),
        *convolution(width, width, 3, stride),
        nn.ReLU(),
        *convolution(width, n_out, 1),
    )
    if stride == 1 and n_in == n_out:
        return ResidualBlock(layers)
    return ResidualBlock(layers, nn.Sequential(*convolution(n_in, n_out, 1, stride)))


def convolution(n_in: int, n_out: int, kernel: int, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """A convolution that keeps the size but for its stride, and its batch norm."""
    return (
        nn.Conv2d(n_in, n_out, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(n_out),
    )
