"""The row statistics, each declared once: its value on every path, and its gradient's terms.

A path is a way from the logits to the statistics: `direct` (plain operations, differentiated by autograd), `chunked`
(blocks of rows, with a gradient of its own) and `multi_label` (a sigmoid per decision). On the chunked path the
gradient of all statistics is one sum, so that it is written once:

    dL/dz = p * (alpha + what each `factor` adds)  +  what each `add_to` adds

with coefficients per row: `coefficients` makes them of the saved rows and of the slope dL/d(statistic).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from hf_calib.losses.statistics.chunked import Block, ForwardBlock
    from hf_calib.losses.statistics.direct import LabelledRows

IGNORE_INDEX = -100
# exp() of this is 0 in every dtype: it stands in for -inf where -inf * 0 would give NaN.
LOG_ZERO = -1e4

RivalRank = Literal["next", "second", "third", "mean2", "mean3", "mean_all"]
# Which of the classes ranked below the label are its rivals: [first, last) of the ranks; None: all of them.
RIVALS: dict[RivalRank, tuple[int, int] | None] = {
    "next": (0, 1),
    "second": (1, 2),
    "third": (2, 3),
    "mean2": (0, 2),
    "mean3": (0, 3),
    "mean_all": None,
}

Numbers = dict[str, Tensor]  # named numbers per row: (n,) or (n, k)


def of_valid(values: Tensor, valid: Tensor) -> Tensor:
    """Values per row, (n,) or (n, k), 0 where the row (n,) is ignored."""
    return values.where(valid if values.dim() == 1 else valid[:, None], values.new_zeros(()))


class Statistic:
    """A number per row of logits z with label y (a row of C numbers: `LogProbs`), made of p = softmax(z)."""

    differentiable: ClassVar[bool] = True
    reads_prediction: ClassVar[bool] = False  # which class is predicted, which costs the chunked path more

    def direct(self, rows: LabelledRows) -> Tensor:
        """The value (n,), by differentiable operations; of ignored rows it is not read."""
        raise NotImplementedError

    def chunked(self, block: ForwardBlock) -> Numbers:
        """`value` (n,), and beside it what `coefficients` reads. `block.probs` must be left as it was."""
        raise NotImplementedError

    def multi_label(self, cross_entropy: Tensor) -> Tensor:
        """The values (2, D) of decisions whose outcomes, yes and no, have this cross entropy (2, D)."""
        raise NotImplementedError

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        """The coefficients that `alpha` gets, (N,), and that `factor` and `add_to` read."""
        raise NotImplementedError

    def factor(self, block: Block, coefficients: Numbers) -> Tensor | None:
        """The term to add to alpha, (n, C), which the caller may overwrite; coefficients come as (n, k)."""
        return None

    def add_to(self, gradient: Tensor, block: Block, coefficients: Numbers) -> None:
        """Add to the gradient (n, C), in place, what is no multiple of p; `block.probs` is gone by then."""


@dataclass(frozen=True)
class CrossEntropy(Statistic):
    """-log p_y, in nats. Gradient: p - e_y."""

    def direct(self, rows: LabelledRows) -> Tensor:
        return F.nll_loss(rows.log_probs, rows.labels, reduction="none", ignore_index=IGNORE_INDEX)

    def chunked(self, block: ForwardBlock) -> Numbers:
        at_label = block.z.gather(1, block.column).squeeze(1)
        return {"value": block.z_max - at_label - block.log_p_max}

    def multi_label(self, cross_entropy: Tensor) -> Tensor:
        return cross_entropy

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        return {"alpha": slope, "at_label": -slope}

    def add_to(self, gradient: Tensor, block: Block, coefficients: Numbers) -> None:
        gradient.scatter_add_(1, block.column, coefficients["at_label"])


CROSS_ENTROPY = CrossEntropy()


@dataclass(frozen=True)
class Rival(Statistic):
    """q, the probability of the label's rival, or the mean of several. Gradient: share_k p_k - q p."""

    rank: RivalRank

    def direct(self, rows: LabelledRows) -> Tensor:
        index, share = self._below(rows.logits.detach(), rows.column)
        return (rows.log_probs.gather(1, index).exp() * share).sum(1)

    def chunked(self, block: ForwardBlock) -> Numbers:
        index, share = self._below(block.z, block.column)
        probs = block.probs.gather(1, index) * share
        return {"value": probs.sum(1), "index": index, "probs": probs}

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        at_rival = slope[:, None] * rows["probs"]
        return {"alpha": -slope * rows["value"], "index": rows["index"], "at_rival": at_rival}

    def add_to(self, gradient: Tensor, block: Block, coefficients: Numbers) -> None:
        gradient.scatter_add_(1, coefficients["index"], coefficients["at_rival"])

    def _below(self, logits: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Columns (n, k) of the rivals, and the share (n, k) of each in their mean; 0 where there is none.

        Logits are compared, not probabilities: small probabilities underflow to equal zeros.
        """
        first, last = RIVALS[self.rank] or (0, logits.shape[1])
        # 1 / (z_j - z_y) is negative for the classes below the label, and lowest for the nearest of them:
        # this finds the maximum over a mask, far faster than masking does. (-0 - 0 is -0, whose reciprocal
        # is -inf as if it lay below; -0 + (0 - 0) is 0.)
        distance = (logits + (0 - logits.gather(1, column))).reciprocal_()
        if last == 1:
            nearest, index = distance.min(1, keepdim=True)
            return index, (nearest < 0).to(logits.dtype)
        count = min(last, logits.shape[1])
        nearest, index = distance.topk(count, dim=1, largest=False)
        skipped = min(first, count - 1)
        exists = nearest[:, skipped:] < 0
        return index[:, skipped:], exists / exists.sum(1, keepdim=True).clamp_min(1).to(logits.dtype)


@dataclass(frozen=True)
class OtherPowers(Statistic):
    """S = sum of p_j^b over the classes j != y, with b the power. Gradient: b p_k (p_k^(b-1) [k != y] - S)."""

    power: float

    def direct(self, rows: LabelledRows) -> Tensor:
        others = rows.probs.scatter(1, rows.column, 0)
        powers = others.square() if self.power == 2 else others.clamp_min(tiny(others)).pow(self.power)
        return powers.sum(1)

    def chunked(self, block: ForwardBlock) -> Numbers:
        # Without the label's own, so that nothing cancels when it has nearly all the mass.
        at_label = block.probs.gather(1, block.column)
        block.probs.scatter_(1, block.column, 0)
        norm = torch.linalg.vector_norm(block.probs, self.power, dim=1)
        block.probs.scatter_(1, block.column, at_label)
        return {"value": norm.pow(self.power)}

    def multi_label(self, cross_entropy: Tensor) -> Tensor:
        return torch.zeros_like(cross_entropy)  # there is no other class

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        beta = slope * self.power
        return {"alpha": -beta * rows["value"], "beta": beta}

    def factor(self, block: Block, coefficients: Numbers) -> Tensor:
        powers = block.probs if self.power == 2 else block.probs.pow(self.power - 1)
        return (powers * coefficients["beta"]).scatter_(1, block.column, 0)


@dataclass(frozen=True)
class Entropy(Statistic):
    """H = -sum of p_j log p_j, in nats. Gradient: -p (log p + H)."""

    def direct(self, rows: LabelledRows) -> Tensor:
        return -(rows.probs * rows.log_probs.clamp_min(LOG_ZERO)).sum(1)

    def chunked(self, block: ForwardBlock) -> Numbers:
        log_ratio = (block.z - block.z_max[:, None]).clamp_min_(LOG_ZERO)
        value = -torch.linalg.vecdot(block.probs, log_ratio) - block.log_p_max
        return {"value": value, "z_max": block.z_max, "log_p_max": block.log_p_max}

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        alpha = -slope * (rows["value"] + rows["log_p_max"])
        return {"alpha": alpha, "eta": -slope, "z_max": rows["z_max"]}

    def factor(self, block: Block, coefficients: Numbers) -> Tensor:
        log_ratio = (block.z - coefficients["z_max"]).clamp_min_(LOG_ZERO)
        return log_ratio.mul_(coefficients["eta"])


@dataclass(frozen=True)
class MeanLogProb(Statistic):
    """The mean of log p_j over the classes that are not masked. Gradient: 1 / C - p."""

    def direct(self, rows: LabelledRows) -> Tensor:
        finite = rows.logits > -torch.inf
        return rows.log_probs.where(finite, 0).sum(1) / finite.sum(1)

    def chunked(self, block: ForwardBlock) -> Numbers:
        finite = _finite(block.z)
        count = finite.sum(1)
        log_ratio = (block.z - block.z_max[:, None]).clamp_min_(torch.finfo(finite.dtype).min)  # times 0: 0
        return {"value": torch.linalg.vecdot(log_ratio, finite) / count + block.log_p_max, "count": count}

    def multi_label(self, cross_entropy: Tensor) -> Tensor:
        return -cross_entropy.mean(0).expand(2, -1)

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        return {"alpha": -slope, "at_finite": slope / rows["count"]}

    def add_to(self, gradient: Tensor, block: Block, coefficients: Numbers) -> None:
        gradient += _finite(block.z).mul_(coefficients["at_finite"])


@dataclass(frozen=True)
class LogConfidence(Statistic):
    """log p of the predicted class. Gradient: e_predicted - p."""

    reads_prediction = True

    def direct(self, rows: LabelledRows) -> Tensor:
        return rows.log_probs.gather(1, rows.predicted[:, None]).squeeze(1)

    def chunked(self, block: ForwardBlock) -> Numbers:
        return {"value": block.log_p_max, "predicted": block.predicted}

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        return {"alpha": -slope, "predicted": rows["predicted"], "at_predicted": slope}

    def add_to(self, gradient: Tensor, block: Block, coefficients: Numbers) -> None:
        gradient.scatter_add_(1, coefficients["predicted"], coefficients["at_predicted"])


@dataclass(frozen=True)
class LogProbs(Statistic):
    """log p of every class, (N, C): the one statistic that is a matrix. Gradient, for slopes s: s - p sum(s)."""

    def direct(self, rows: LabelledRows) -> Tensor:
        return rows.log_probs

    def chunked(self, block: ForwardBlock) -> Numbers:
        return {"value": block.z - (block.z_max - block.log_p_max)[:, None]}

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        return {"alpha": -slope.sum(1), "slope": slope}

    def add_to(self, gradient: Tensor, block: Block, coefficients: Numbers) -> None:
        gradient += coefficients["slope"]


@dataclass(frozen=True)
class Label(Statistic):
    """The label itself, as a number, for a penalty that is computed on the rows of all processes. No gradient."""

    differentiable = False

    def direct(self, rows: LabelledRows) -> Tensor:
        return rows.column.squeeze(1).to(rows.logits.dtype)

    def chunked(self, block: ForwardBlock) -> Numbers:
        return {"value": block.column.squeeze(1).to(block.z.dtype)}


@dataclass(frozen=True)
class Correct(Statistic):
    """1 where the predicted class is the label, otherwise 0. No gradient."""

    differentiable = False
    reads_prediction = True

    def direct(self, rows: LabelledRows) -> Tensor:
        return (rows.predicted == rows.labels).to(rows.logits.dtype)

    def chunked(self, block: ForwardBlock) -> Numbers:
        return {"value": (block.predicted == block.column.squeeze(1)).to(block.z.dtype)}


@dataclass(frozen=True)
class LogitNorm(Statistic):
    """||z||_order of the logits, in which a masked class (-inf) is 0. Gradient: sign(z) (|z| / norm)^(order-1)."""

    order: float

    def direct(self, rows: LabelledRows) -> Tensor:
        return self._norm(rows.logits)

    def chunked(self, block: ForwardBlock) -> Numbers:
        return {"value": self._norm(block.z)}

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        return {"alpha": torch.zeros_like(slope), "norm": rows["value"], "slope": slope}

    def add_to(self, gradient: Tensor, block: Block, coefficients: Numbers) -> None:
        finite = block.z.where(block.z > -torch.inf, 0)
        own = finite.sign()
        if self.order != 1:
            own *= (finite.abs() / coefficients["norm"].clamp_min(tiny(finite))).pow(self.order - 1)
        gradient += coefficients["slope"] * own

    def _norm(self, logits: Tensor) -> Tensor:
        magnitude = logits.where(logits > -torch.inf, 0).abs()
        if self.order == 1:
            return magnitude.sum(1)
        # Relative to the largest, so that its power does not overflow.
        largest = magnitude.detach().amax(1, keepdim=True).clamp_min(tiny(magnitude))
        powers = (magnitude / largest).clamp_min(tiny(magnitude)).pow(self.order)
        return powers.sum(1).pow(1 / self.order) * largest.squeeze(1)


@dataclass(frozen=True)
class SoftRank(Statistic):
    """Sum over j != y of sigmoid(sharpness (p_j - p_y)): how many classes are ahead of the label.

    Gradient: p (r - <r, p>), with r the derivative in p.
    """

    sharpness: float

    def direct(self, rows: LabelledRows) -> Tensor:
        return self._ahead(rows.probs, rows.column).sum(1)

    def chunked(self, block: ForwardBlock) -> Numbers:
        return {"value": self._ahead(block.probs, block.column).sum(1)}

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        return {"alpha": torch.zeros_like(slope), "slope": slope}

    def factor(self, block: Block, coefficients: Numbers) -> Tensor:
        ahead = self._ahead(block.probs, block.column)
        r = self.sharpness * ahead * (1 - ahead)
        r.scatter_(1, block.column, -r.sum(1, keepdim=True))
        return coefficients["slope"] * (r - torch.linalg.vecdot(r, block.probs)[:, None])

    def _ahead(self, probs: Tensor, column: Tensor) -> Tensor:
        return torch.sigmoid(self.sharpness * (probs - probs.gather(1, column))).scatter(1, column, 0)


def tiny(tensor: Tensor) -> float:
    """Smallest normal number: a floor below which a power has gradient 0 instead of infinity."""
    return torch.finfo(tensor.dtype).tiny


def _finite(z: Tensor) -> Tensor:
    """1.0 for each class that is not masked (-inf): a float mask is several times faster than a bool one."""
    return torch.gt(z, -torch.inf, out=torch.empty_like(z))
