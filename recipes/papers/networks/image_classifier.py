"""The base class of the papers' image networks, from pixels to logits and loss."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention


class ImageClassifier(PreTrainedModel):
    """A convolutional network, `features`, whose channels are averaged over the image and read by `classifier`."""

    main_input_name = "pixel_values"
    input_modalities = "image"
    # Of the convolutions, He et al. 2015 by outgoing connections; else torch's default.
    he_initialization = False
    features: nn.Module
    classifier: nn.Linear

    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
    ) -> ImageClassifierOutputWithNoAttention | tuple[torch.Tensor, ...]:
        """Logits (N, C) of pixels (N, 3, H, W), and the mean loss in nats where labels are given."""
        side = getattr(self.config, "pooled_size", 1)
        pooled = F.adaptive_avg_pool2d(self.features(pixel_values), side)
        logits = self.classifier(pooled.flatten(1))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels, logits, self.config)
        output = ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)
        return output if return_dict in (None, True) else output.to_tuple()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d) and self.he_initialization:
            init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, (nn.Conv2d, nn.Linear)):
            init.kaiming_uniform_(module.weight, a=math.sqrt(5))
        else:
            super()._init_weights(module)
            return
        if module.bias is not None:
            bound = 1 / math.sqrt(module.weight[0].numel())
            init.uniform_(module.bias, -bound, bound)
