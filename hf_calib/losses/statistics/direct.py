"""Statistics of rows of logits: what they are, and how to take them with plain PyTorch operations.

An ignored row (label -100) has every statistic 0, with gradient 0. It looks like a row whose label has
probability 1, so every loss formula gives exactly 0 for it, without a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100

# exp() of this is 0 in every dtype: it stands in for -inf where -inf * 0 would give NaN.
LOG_ZERO = -1e4

# Which of the classes ranked below the label are its rivals: [first, last) of the ranks; None: all of them.
RIVALS = {
    "next": (0, 1),
    "second": (1, 2),
    "third": (2, 3),
    "mean2": (0, 2),
    "mean3": (0, 3),
    "mean_all": None,
}


@dataclass(frozen=True)
class Wanted:
    """Which statistics a loss reads beside the cross entropy. The parts of a loss are merged with `|`."""

    rival: str | None = None  # one of RIVALS
    power: float | None = None  # exponent of the sum over the other classes
    entropy: bool = False
    mean_log_p: bool = False
    top: bool = False  # log-probability of the predicted class, and whether it is the label
    norm: float | None = None  # order of the norm of the logits
    rank_sharpness: float | None = None  # sharpness of the soft rank of the label

    def __or__(self, other: Wanted) -> Wanted:
        return Wanted(*(getattr(self, f.name) or getattr(other, f.name) for f in fields(Wanted)))


NOTHING = Wanted()


@dataclass
class Statistics:
    """Per-example numbers, each (N,), float32 (float64 for float64 logits)."""

    cross_entropy: Tensor  # -log p_y, nats
    rival: Tensor | None = None  # q, probability of the rival(s) ranked below the label
    others: Tensor | None = None  # sum over j != y of p_j ** power
    entropy: Tensor | None = None  # nats
    mean_log_p: Tensor | None = None  # mean over the classes that are not masked
    log_max: Tensor | None = None  # log-probability of the predicted class
    norm: Tensor | None = None  # of the logits, masked classes left out
    soft_rank: Tensor | None = None  # sum over j != y of sigmoid(sharpness * (p_j - p_y))
    correct: Tensor | None = None  # bool: the predicted class is the label

    @property
    def p(self) -> Tensor:
        """Probability of the label."""
        return torch.exp(-self.cross_entropy)

    @property
    def one_minus_p(self) -> Tensor:
        """1 - p_y, exact also where p_y is nearly 1."""
        return -torch.expm1(-self.cross_entropy)


def direct_statistics(logits: Tensor, labels: Tensor, wanted: Wanted) -> Statistics:
    """All statistics by plain differentiable operations, on float32 or float64 logits."""
    log_probs = F.log_softmax(logits, dim=1)
    stats = Statistics(F.nll_loss(log_probs, labels, reduction="none", ignore_index=IGNORE_INDEX))
    if wanted == NOTHING:
        return stats
    valid = labels != IGNORE_INDEX
    column = torch.where(valid, labels, 0)[:, None]
    if wanted.mean_log_p:
        finite = logits > -torch.inf
        stats.mean_log_p = (log_probs.where(finite, 0).sum(1) / finite.sum(1)).where(valid, 0)
    if wanted.top:
        # Of the logits, not of the probabilities: those underflow into ties.
        predicted = logits.argmax(1)
        stats.log_max = log_probs.gather(1, predicted[:, None]).squeeze(1).where(valid, 0)
        stats.correct = predicted == labels
    if wanted.norm is not None:
        stats.norm = row_norm(logits, wanted.norm).where(valid, 0)
    if wanted.rival is not None:
        index, share = rivals_below(logits.detach(), column, wanted.rival)
        stats.rival = (log_probs.gather(1, index).exp() * share.where(valid[:, None], 0)).sum(1)
    if not (wanted.entropy or wanted.power or wanted.rank_sharpness):
        return stats
    probs = log_probs.exp()
    if wanted.entropy:
        stats.entropy = -(probs * log_probs.clamp_min(LOG_ZERO)).sum(1).where(valid, 0)
    if wanted.power is not None:
        others = probs.scatter(1, column, 0)
        powers = others.square() if wanted.power == 2 else others.clamp_min(tiny(others)).pow(wanted.power)
        stats.others = powers.sum(1).where(valid, 0)
    if wanted.rank_sharpness is not None:
        stats.soft_rank = rank_terms(probs, column, wanted.rank_sharpness).sum(1).where(valid, 0)
    return stats


def tiny(tensor: Tensor) -> float:
    """Smallest normal number: a floor below which a power has gradient 0 instead of infinity."""
    return torch.finfo(tensor.dtype).tiny


def rivals_below(logits: Tensor, column: Tensor, rival: str) -> tuple[Tensor, Tensor]:
    """Columns (N, k) of the rivals, and the share (N, k) of each in their mean; 0 where there is none.

    Logits are compared, not probabilities: small probabilities underflow to equal zeros.
    """
    ranks = RIVALS[rival]
    first, last = ranks or (0, logits.shape[1])
    # 1 / (z_j - z_y) is negative for the classes below the label, and lowest for the nearest of them: this
    # finds the maximum over a mask, far faster than masking does. (-0 - 0 is -0, whose reciprocal is -inf as
    # if it lay below; -0 + (0 - 0) is 0.)
    distance = (logits + (0 - logits.gather(1, column))).reciprocal_()
    if last == 1:
        nearest, index = distance.min(1, keepdim=True)
        return index, (nearest < 0).to(logits.dtype)
    count = min(last, logits.shape[1])
    nearest, index = (t[:, min(first, count - 1) :] for t in distance.topk(count, dim=1, largest=False))
    exists = nearest < 0
    return index, exists / exists.sum(1, keepdim=True).clamp_min(1).to(logits.dtype)


def rank_terms(probs: Tensor, column: Tensor, sharpness: float) -> Tensor:
    """sigmoid(sharpness * (p_j - p_y)) for the other classes, 0 for the label."""
    return torch.sigmoid(sharpness * (probs - probs.gather(1, column))).scatter(1, column, 0)


def row_norm(logits: Tensor, order: float) -> Tensor:
    """L_p norm of each row; a masked class (-inf) counts as 0, and so does the gradient at 0."""
    magnitude = logits.where(logits > -torch.inf, 0).abs()
    if order == 1:
        return magnitude.sum(1)
    largest = magnitude.detach().amax(1, keepdim=True).clamp_min(tiny(magnitude))  # no overflow in the power
    powers = (magnitude / largest).clamp_min(tiny(magnitude)).pow(order)
    return powers.sum(1).pow(1 / order) * largest.squeeze(1)


def sigmoid_statistics(logits: Tensor, labels: Tensor, wanted: Wanted) -> tuple[Statistics, Tensor]:
    """Statistics of every (example, label) decision of multi-label logits and labels (N, C) in [0, 1].

    Each decision is a two-outcome problem, "the label applies" with probability sigmoid(z) and "it does not",
    so its statistics are those of a row without other classes. Both outcomes are returned, (2 * N * C,), with
    the share that the label gives to each: a soft label is the mean of its outcomes, an ignored one has none.
    """
    z = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32).reshape(-1)
    z = z.clamp(-1e30, 1e30)  # a masked label (-inf) must not become 0 * inf
    target = labels.to(z.dtype).reshape(-1)
    share = torch.stack([target, 1 - target]).masked_fill(target == IGNORE_INDEX, 0).reshape(-1)
    cross_entropy = -F.logsigmoid(torch.stack([z, -z]))
    mean_log_p = -cross_entropy.mean(0).expand(2, -1).reshape(-1) if wanted.mean_log_p else None
    cross_entropy = cross_entropy.reshape(-1)
    return Statistics(cross_entropy, others=torch.zeros_like(cross_entropy), mean_log_p=mean_log_p), share
