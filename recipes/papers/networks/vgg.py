"""VGG networks with batch norm for small images."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from .image_classifier import ImageClassifier

# Convolutions of the five stages, each followed by a pooling; and their channels.
_STAGES = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
_CHANNELS = (64, 128, 256, 512, 512)


class VGGConfig(PreTrainedConfig):
    """Depth of a `VGGForImageClassification`: 11, 13, 16 or 19; the comparison study's is 16."""

    model_type = "vgg"

    depth: int = 16

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.depth not in _STAGES:
            raise ValueError(
                f"expected depth to be one of {', '.join(map(str, _STAGES))}, got {self.depth}"
            )


class VGGForImageClassification(ImageClassifier):
    """Classify small images by 3x3 convolutions with batch norm, halved five times, and one linear layer.

    The form that is usual for CIFAR: the features of Simonyan, Zisserman, Very Deep Convolutional
    Networks for Large-Scale Image Recognition, 2015, without the two layers of 4,096, which images
    of 32 pixels do not need. The comparison study says no more than "VGG16". The parameters of
    `features` have torchvision's names.
    """

    config_class = VGGConfig
    base_model_prefix = "vgg"

    def __init__(self, config: VGGConfig) -> None:
        super().__init__(config)
        layers: list[nn.Module] = []
        n_in = 3
        for n_convolutions, n_out in zip(_STAGES[config.depth], _CHANNELS, strict=True):
            for _ in range(n_convolutions):
                layers += [
                    nn.Conv2d(n_in, n_out, 3, padding=1),
                    nn.BatchNorm2d(n_out),
                    nn.ReLU(),
                ]
                n_in = n_out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(n_in, config.num_labels)
        self.post_init()
