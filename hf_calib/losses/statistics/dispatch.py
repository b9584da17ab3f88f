"""The one door to the logits: a few numbers per row, and their gradient.

No loss in this package needs the (N, C) probabilities, only a handful of numbers per example: the cross
entropy, the probability of the label's rival, the power sum of the other probabilities, the entropy, ...
`softmax_statistics` reads the logits once and returns those as (N,) vectors, so that every loss is a scalar
formula which autograd differentiates.

Two implementations stand behind it. Large matrices go through `ChunkedStatistics`, which works on blocks of
rows that fit in the cache and needs no memory beside the logits but for their gradient. Small ones, and
everything under `torch.compile`, take a few plain PyTorch operations: there overhead counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_calib.losses.statistics.chunked import ChunkedStatistics
from hf_calib.losses.statistics.direct import Statistics, Wanted, direct_statistics

# Matrices up to this many elements take the direct path.
DIRECT_ELEMENTS = 2**15


def softmax_statistics(logits: Tensor, labels: Tensor, wanted: Wanted) -> Statistics:
    """Reduce logits (N, C) with labels (N,) to the wanted statistics.

    Raises:
        IndexError: for a label outside [0, C) that is not -100 (on a GPU: a device-side assertion).
    """
    if torch.compiler.is_compiling() or logits.numel() <= DIRECT_ELEMENTS:
        return direct_statistics(logits if logits.dtype == torch.float64 else logits.float(), labels, wanted)
    return Statistics(*ChunkedStatistics.apply(logits, labels, wanted))
