"""Soft labels of one softmax: rows whose label is a distribution q over the classes.

Their loss is the expectation of the loss over the labels, sum_k q_k L(z, k). So every class of a
row is its label once, and q_k the share of that value. Autograd differentiates the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_calib._errors import InputValueError
from hf_calib.losses.arithmetic import tiny, wide
from hf_calib.losses.statistics.blocks import Block
from hf_calib.losses.statistics.definitions import (
    IGNORE_INDEX,
    Constant,
    Entropy,
    LogitNorm,
    MeanLogProb,
    OtherPowers,
    Statistic,
)

# Others, such as the rival of a label, would need another (N, C) matrix for every class.
KNOWN_OF_EVERY_CLASS = (Constant, Entropy, LogitNorm, MeanLogProb, OtherPowers)
# Of the sum of a row: probabilities that were rounded to bfloat16 are off by up to 0.002.
SUM_TOLERANCE = 5e-3


def look_soft(labels: Tensor) -> tuple[bool, bool]:
    """Whether float labels (N, C) have fractions, and whether they could be probabilities of the
    classes as well."""
    rows = labels.float()
    has_fractions = ((rows > 0) & (rows < 1)).any()
    sum_to_1 = ((rows.sum(1) - 1).abs() < 1e-3) & (rows >= 0).all(1)
    are_soft = has_fractions & sum_to_1.all() & (rows.shape[1] > 1)
    # The device is waited for once.
    found = torch.stack([has_fractions, are_soft]).tolist()
    return found[0], found[1]


class SoftLabels:
    """Every class of the logits (..., C) as the label of its row,
    with its share in the labels (..., C).

    `numbers` are the cross entropy (N, C) and the statistics, (N, C), or (N, 1) if they are the
    same for every label. `shares` (N, C) are the labels, 0 in an ignored row.
    """

    def __init__(
        self,
        logits: Tensor,
        labels: Tensor,
        reads: Sequence[Statistic],
        class_weights: Tensor | None,
    ) -> None:
        z = logits.to(wide(logits)).flatten(0, -2)
        if class_weights is not None:
            class_weights = class_weights.to(z)
        self._class_weights = class_weights
        # Only the numbers of an ignored row are negative.
        self.shares = labels.to(z.dtype).flatten(0, -2).clamp_min(0)
        of_rows = [each for each in reads if not isinstance(each, OtherPowers)]
        first_class = torch.zeros(len(z), dtype=torch.long, device=z.device)
        block = Block(z, first_class, of_rows, class_weights)
        found = dict(zip(of_rows, block.numbers[1:], strict=True))
        # A class without a share counts like an ignored row, as certain: 0 times its cross entropy
        # may be NaN.
        cross_entropy = block.log_probs.neg().masked_fill(self.shares == 0, 0)
        self.numbers: list[Any] = [cross_entropy]
        for statistic in reads:
            if isinstance(statistic, OtherPowers):
                number: Any = _other_powers(block.probs, statistic.power)
            elif isinstance(statistic, Constant):
                number = statistic.number
            else:
                number = found[statistic][:, None]
            if isinstance(statistic, MeanLogProb) and class_weights is not None:
                # It is relative to the weight of the label.
                number = number * (class_weights[0] / class_weights)
            self.numbers.append(number)

    def expected(self, values: Tensor) -> Tensor:
        """The sum of the values of all classes of each row, by their shares and the weights of the
        classes."""
        shares = self.shares
        if self._class_weights is not None:
            shares = shares * self._class_weights
        return torch.linalg.vecdot(values, shares)


def _other_powers(probs: Tensor, power: float) -> Tensor:
    """The sum of p_j^power over the classes other than each one, (N, C)."""
    powers = probs if power == 1 else probs.clamp_min(tiny(probs)).pow(power)
    top = probs.detach().argmax(1, keepdim=True)
    # Subtraction would be inaccurate for the most probable class, which may have nearly all of the
    # sum.
    others_of_top = powers.scatter(1, top, 0.0).sum(1, keepdim=True)
    total = others_of_top + powers.gather(1, top)
    return (total - powers).scatter(1, top, others_of_top)


def are_ignored(labels: Tensor) -> Tensor:
    """Whether each row of checked soft labels (..., C) is ignored: it has -100 for every class, or
    else for none."""
    return labels[..., 0] == IGNORE_INDEX


def are_valid(labels: Tensor) -> Tensor:
    """Whether each row of soft labels (..., C) has shares of at least 0 that sum to 1, or is
    ignored; False for NaN."""
    sums = labels.sum(-1, dtype=wide(labels))
    least = labels.amin(-1)
    are_shares = ((sums - 1).abs() <= SUM_TOLERANCE) & (least >= 0)
    is_ignored = (least == labels.amax(-1)) & (least == IGNORE_INDEX)
    return are_shares | is_ignored


def check_soft_labels(labels: Tensor) -> None:
    """Raise for a row of soft labels (..., C) that is neither ignored nor shares; a GPU is not
    waited for."""
    rows = labels.detach().flatten(0, -2)
    if not len(rows):
        return
    fits = are_valid(rows)
    requirement = "soft labels to be shares of at least 0 whose rows sum to 1"
    if not rows.is_cpu:
        torch._assert_async(fits.all(), f"expected {requirement}")
    elif not fits.all():
        row = int(fits.int().argmin())
        total = float(rows[row].double().sum())
        got = f"a row {row} from {rows[row].min():.4g} to {rows[row].max():.4g} with sum {total:.4g}"
        way_out = "divide each row by its sum, and give -100 for every class to ignore it; for several labels per row "
        way_out += "set problem_type='multi_label_classification'"
        raise InputValueError(f"expected {requirement}, got {got}; {way_out}")
