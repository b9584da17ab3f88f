"""The statistics of multi-label problems, where every (example, label) decision is a sigmoid of its own.

Each decision is a two-outcome problem, "the label applies" with probability sigmoid(z) and "it does not", so its
statistics are those of a row without other classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_calib.losses.statistics.definitions import IGNORE_INDEX, Statistic


def decision_statistics(
    logits: Tensor, labels: Tensor, statistics: Sequence[Statistic]
) -> tuple[list[Tensor], Tensor]:
    """The values of the statistics, each (2 * N * C,), of both outcomes of logits and labels (N, C) in [0, 1].

    The second result is the share that the label gives to each: a soft label is the mean of its outcomes, an
    ignored one has none.
    """
    z = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32).reshape(-1)
    z = z.clamp(-1e30, 1e30)  # a masked label (-inf) must not become 0 * inf
    target = labels.to(z.dtype).reshape(-1)
    share = torch.stack([target, 1 - target]).masked_fill(target == IGNORE_INDEX, 0).reshape(-1)
    cross_entropy = -F.logsigmoid(torch.stack([z, -z]))
    return [statistic.multi_label(cross_entropy).reshape(-1) for statistic in statistics], share
