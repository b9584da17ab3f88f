"""The papers' wide residual network for small images, Wide-ResNet-26-10."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_calib._errors import InputValueError, expected
from hf_calib.papers.networks.config import PaperNetworkConfig
from hf_calib.papers.networks.image_classifier import ImageClassifier
from hf_calib.papers.networks.residual_blocks import basic_block, convolution


class WideResNetConfig(PaperNetworkConfig):
    """Depth and width of a `WideResNetForImageClassification`.

    Args:
        depth: 6n + 2, with n blocks in each of the three stages.
        width: the stages have 16, 32 and 64 times so many channels.

    Raises:
        ValueError: if there is no network of this depth, or the width is no positive number.

    >>> WideResNetConfig(num_labels=10).depth
    26
    """

    model_type = "wide_resnet"

    depth: int = 26
    width: int = 10

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.depth < 8 or (self.depth - 2) % 6:
            raise InputValueError(expected("depth", "be 6n + 2", self.depth, "the papers' is 26"))
        if self.width < 1:
            raise InputValueError(expected("width", "be at least 1", self.width, "the papers' is 10"))


class WideResNetForImageClassification(ImageClassifier):
    """Classify small images by a residual network with few, wide layers.

    Args:
        config: a `WideResNetConfig`, with `num_labels` or `id2label`.

    Notes:
        The papers' code has batch norm and ReLU after each convolution, and counts depth as 6n + 2; Zagoruyko and
        Komodakis have them before it, and 6n + 4. This is the papers' network.

    References:
        Zagoruyko, Komodakis, Wide Residual Networks, 2016; the code of Mukhoti et al., Calibrating Deep Neural Networks
        using Focal Loss, 2020, which later papers took.

    >>> import torch
    >>> model = WideResNetForImageClassification(WideResNetConfig(depth=8, width=1, num_labels=10))
    >>> model(torch.zeros(2, 3, 32, 32)).logits.shape
    torch.Size([2, 10])
    """

    config_class = WideResNetConfig
    base_model_prefix = "wide_resnet"
    he_initialization = True

    def __init__(self, config: WideResNetConfig) -> None:
        super().__init__(config)
        self.num_labels: int = len(config.id2label or {})
        n_blocks, width = (config.depth - 2) // 6, 16 * config.width
        blocks = [
            basic_block(n_in if block == 0 else n_out, n_out, stride if block == 0 else 1)
            for n_in, n_out, stride in ((16, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2))
            for block in range(n_blocks)
        ]
        self.features = nn.Sequential(*convolution(3, 16, 3), nn.ReLU(), *blocks)
        self.classifier = nn.Linear(4 * width, self.num_labels)
        self.post_init()
