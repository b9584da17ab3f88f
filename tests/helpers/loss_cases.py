"""Every named loss: its variants, its formula in plain operations, and batches to feed both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_calib.losses import LOSSES, AdaptiveLoss, CalibrationLoss, make_loss

torch.set_num_threads(1)  # the batches are tiny, and the cores are shared

EXACT = {"rtol": 1e-10, "atol": 1e-12}
Variant = tuple[str, dict[str, Any]]

_BESIDE_THE_DEFAULT: dict[str, list[dict[str, Any]]] = {
    "label_smoothing": [{"smoothing": 0}, {"smoothing": 0.3}],
    "focal": [{"gamma": 0}, {"gamma": 0.5}, {"gamma": 1}],
    "flsd": [{"thresholds": (0.1, 0.2, 0.5), "gammas": (7, 5, 3, 2)}],
    "inverse_focal": [{"gamma": 0.5}],
    "dual_focal": [
        {"rival": each}
        for each in ("second", "third", "mean2", "mean3", "mean_all", 0.1)
    ],
    "bsce": [{"norm": 1}, {"norm": 1.5}, {"gamma": 4, "norm": 3}, {"gamma": 0.5}],
    "bsce_gra": [{"norm": 1}],
    "focal_calibration": [{"distance": "l1"}],
    "calfocal": [{"per_sample": True}],
    "logit_norm": [{"norm_weight": 0}, {"p": 1.5}, {"p": 2}, {"p": 3}],
    "mmce": [{"variant": "plain"}],
    "soft_ece": [{"variant": "dece"}],
    "kde_ece": [{"kind": "canonical"}],
    "mbls": [
        {"margin": 1.0},
        {"margin": 0.0, "margin_weight": 0.5},
        {"margin_weight": 0},
    ],
    "mdca": [{"gamma": 2.0}],
    "power": [{"exponent": 0.3}, {"exponent": 5.0}],
}
VARIANTS: list[Variant] = [
    (name, given)
    for name in LOSSES
    for given in ({}, *_BESIDE_THE_DEFAULT.get(name, ()))
]
# Numbers of classes: few logits take plain operations, many (of 8 rows and more) blocks, of 30 rows two and more.
WIDTHS = (5, 9000)


def variant_id(variant: Variant) -> str:
    return "-".join(
        [variant[0], *(f"{key}={value}" for key, value in variant[1].items())]
    )


every_width = pytest.mark.parametrize("width", WIDTHS)
# The wide rows are most of the time of the losses' tests; values and gradients are tested at each change.
wide_when_slow = pytest.mark.parametrize(
    "width", [WIDTHS[0], pytest.param(WIDTHS[1], marks=pytest.mark.slow)]
)
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)


def make_variant(variant: Variant, n_classes: int, **kwargs: Any) -> CalibrationLoss:
    """The loss; if it adapts, with a table of an over- and under-confident model, near neither limit."""
    name, hyperparameters = variant
    loss = make_loss(name, **kwargs, **hyperparameters)
    generator = torch.Generator().manual_seed(0)
    confidences = torch.rand(400, generator=generator, dtype=torch.float64)
    correct = (
        torch.rand(400, generator=generator, dtype=torch.float64)
        < 0.2 + 0.4 * confidences
    )
    if isinstance(loss, AdaptiveLoss):
        for progress in (0.3, 0.6):
            class_gaps = torch.linspace(0.05, 0.4, n_classes)
            loss.update(confidences, correct, class_gaps=class_gaps, progress=progress)
    return loss


def random_batch(
    n_examples: int, n_classes: int, *, scale: float = 2.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits (N, C), float64, and labels (N,), every third of which is the predicted class."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(
        n_examples, n_classes, generator=generator, dtype=torch.float64
    )
    labels = torch.randint(n_classes, (n_examples,), generator=generator)
    labels[::3] = logits[::3].argmax(1)
    return logits, labels


def widened(logits: Tensor, width: int) -> Tensor:
    """The same logits with masked classes beside them, to this width."""
    return F.pad(logits, (0, max(0, width - logits.shape[1])), value=-torch.inf)


def value_and_gradient(
    loss: Any, logits: Tensor, labels: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """The loss, detached, and the gradient of its sum in the logits, which are left as they were."""
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, labels, **kwargs)
    value.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.detach().nan_to_num(), logits.nan_to_num())
    return value.detach(), leaf.grad


class Row:
    """What the formulas read of logits (N, C) and labels (N,), none ignored: plain operations, in their dtype."""

    def __init__(
        self, logits: Tensor, labels: Tensor, table: Any = None, weights: Any = None
    ) -> None:
        self.z, self.column, self.table = logits, labels[:, None], table
        ones = logits.new_ones(logits.shape[1])
        self.weights = ones if weights is None else weights.to(logits)
        self.log_p = logits.log_softmax(1)
        self.p = self.log_p.exp()
        self.truth = F.one_hot(labels, logits.shape[1]).to(logits)
        self.ce = -self.log_p.gather(1, self.column).squeeze(1)
        self.p_y = self.p.gather(1, self.column).squeeze(1)
        self.brier = (self.p - self.truth).square().sum(1)
        self.confidence, predicted = self.p.max(1)
        self.correct = (predicted == labels).to(logits)

    def rival(self, rank: Any) -> Tensor | float:
        """The mean of the probabilities at these ranks below the label's, 0 where nothing is there; or a constant."""
        if not isinstance(rank, str):
            return float(rank)
        ends = {
            "next": (0, 1),
            "second": (1, 2),
            "third": (2, 3),
            "mean2": (0, 2),
            "mean3": (0, 3),
        }
        first, last = ends.get(rank, (0, self.z.shape[1]))
        below = self.z < self.z.gather(
            1, self.column
        )  # the softmax of two logits that tie may differ
        ranked = (
            (self.p * below)
            .sort(dim=1, descending=True, stable=True)
            .values[:, first:last]
        )
        return ranked.sum(1) / (below.sum(1) - first).clamp(1, max(1, ranked.shape[1]))

    def of_bins(self, values: Tensor, position: Tensor) -> Tensor:
        """The table's values in the bins of its edges, [low, high)."""
        inside = sum(
            (position.detach() >= edge).long() for edge in self.table.edges[1:-1]
        )
        return values[inside].to(self.z)


def focal(t: Row, gamma: Any = 3.0) -> Tensor:
    return (1 - t.p_y) ** gamma * t.ce


def flsd(t: Row, thresholds: Any = (0.2,), gammas: Any = (5.0, 3.0)) -> Tensor:
    steps = [sum(p >= threshold for threshold in thresholds) for p in t.p_y.tolist()]
    return focal(t, t.z.new_tensor([gammas[step] for step in steps]))


def focal_calibration(
    t: Row, gamma: float = 3.0, brier_weight: float = 0.5, distance: str = "l2"
) -> Tensor:
    return focal(t, gamma) + brier_weight * (
        t.brier if distance == "l2" else (t.p - t.truth).abs().sum(1)
    )


def adafocal(t: Row) -> Tensor:
    gamma = t.of_bins(t.table.gammas, t.p_y)
    return torch.where(gamma >= 0, 1 - t.p_y, 1 + t.p_y) ** gamma.abs() * t.ce


def ada_dual_focal(t: Row) -> Tensor:
    lead = t.p_y - t.rival("next")
    return (1 - lead) ** t.of_bins(t.table.gammas, lead) * t.ce


def calfocal(t: Row, per_sample: bool = False) -> Tensor:
    gap = t.p_y.detach() - t.of_bins(t.table.accuracies, t.p_y)
    return focal(
        t, (10.0 * gap).exp() if per_sample else t.of_bins(t.table.gammas, t.p_y)
    )


def label_smoothing(t: Row, smoothing: float = 0.05) -> Tensor:
    """As in PyTorch, the weight of a class stands before its own log-probability, here over the label's."""
    relative = t.weights / t.weights[t.column]
    return (1 - smoothing) * t.ce - smoothing * (relative * t.log_p).mean(1)


def mbls(t: Row, margin_weight: float = 0.1, margin: float = 10.0) -> Tensor:
    return t.ce + margin_weight * (
        t.z.amax(1, keepdim=True) - t.z - margin
    ).relu().mean(1)


# A value per row, (N,).
FORMULAS: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": lambda t: t.ce,
    "label_smoothing": label_smoothing,
    "brier": lambda t: t.brier,
    "focal": focal,
    "flsd": flsd,
    "inverse_focal": lambda t, gamma=2.0: (1 + t.p_y) ** gamma * t.ce,
    "dual_focal": lambda t, gamma=5.0, rival="next": (
        (1 - t.p_y + t.rival(rival)) ** gamma * t.ce
    ),
    "bsce": lambda t, gamma=2, norm=2: (
        (t.p - t.truth).abs().pow(norm).sum(1) ** (gamma / norm) * t.ce
    ),
    "focal_calibration": focal_calibration,
    "adafocal": adafocal,
    "ada_dual_focal": ada_dual_focal,
    "calfocal": calfocal,
    "ece_ce": lambda t: (
        t.table.weight(t.p_y.detach(), t.column.squeeze(1), torch.ones_like(t.p_y))
        * t.ce
    ),
    "entropy_regularized": lambda t, entropy_weight=0.1: (
        t.ce + entropy_weight * (t.p * t.log_p).sum(1)
    ),
    "logit_norm": lambda t, norm_weight=0.01, p=1: (
        t.ce + norm_weight * t.z.abs().pow(p).sum(1).pow(1 / p)
    ),
    "mbls": mbls,
    "dft": lambda t: t.p_y.detach() * t.ce,
    "power": lambda t, exponent=1.0: (1 - t.p_y**exponent) / exponent,
    "mdca": lambda t, gamma=0.0: focal(t, gamma),
    **dict.fromkeys(("mmce", "soft_ece", "kde_ece", "avuc"), lambda t, **_: t.ce),
}


for _name in (
    "focal",
    "flsd",
    "dual_focal",
    "bsce",
):  # the weight is a constant to the gradient
    FORMULAS[f"{_name}_gra"] = lambda t, formula=FORMULAS[_name], **given: (
        (formula(t, **given) / t.ce).detach() * t.ce
    )


def mmce(t: Row, mmce_weight: float = 0.5, variant: str = "weighted") -> Tensor:
    """Over pairs of rows: of all, or of the right and the wrong ones apart."""
    error, right = t.correct - t.confidence, t.correct == 1
    pairs = (
        error[:, None]
        * error
        * torch.exp(-(t.confidence[:, None] - t.confidence).abs() / 0.4)
    )
    if variant == "plain":
        return mmce_weight * pairs.mean().sqrt()
    squared = (
        pairs[right][:, right].mean()
        + pairs[~right][:, ~right].mean()
        + 2 * pairs[right][:, ~right].mean()
    )
    return mmce_weight * squared.sqrt()


def soft_ece(t: Row, variant: str = "sb_ece") -> Tensor:
    """sb_ece: bins by the distance to their centres, L2. dece: a soft decision tree and a soft rank, L1."""
    index = torch.arange(15).to(t.z)
    if variant == "sb_ece":
        members = torch.softmax(
            -((t.confidence[:, None] - (index + 0.5) / 15) ** 2) / 0.01, dim=1
        )
        gaps = members.T @ (t.correct - t.confidence) / members.sum(0)
        return (members.mean(0) * gaps.square()).sum().sqrt()
    members = torch.softmax(
        (t.confidence[:, None] * (index + 1) - (index / 15).cumsum(0)) / 0.01, dim=1
    )
    members = (members + 1e-6) / (1 + 16e-6)
    ahead = torch.sigmoid(100 * (t.p - t.p_y[:, None])).sum(1) - 0.5
    return (members.T @ ((1 - ahead).clamp_min(0) - t.confidence)).abs().sum() / len(
        t.p
    )


def kde_ece(
    t: Row, kde_weight: float = 0.5, bandwidth: float = 0.1, kind: str = "top_label"
) -> Tensor:
    """The outcomes of the other rows, weighted by the density of Dirichlet(p_j / h + 1) at p_i, against p_i."""
    stated, outcomes = t.p, t.truth
    if kind == "top_label":
        stated = torch.stack([t.confidence, 1 - t.confidence], 1)
        outcomes = torch.stack([t.correct, 1 - t.correct], 1)
    points = stated.clamp(1e-6, 1 - 1e-6)
    alpha = points / bandwidth + 1
    log_kernel = (
        points.log() @ (alpha - 1).T
        + torch.lgamma(alpha.sum(1))
        - torch.lgamma(alpha).sum(1)
    )
    log_kernel = log_kernel.masked_fill(
        torch.eye(len(points), dtype=torch.bool), -torch.inf
    )
    gaps = (log_kernel.softmax(1) @ outcomes - stated).abs()
    return kde_weight * (gaps[:, 0] if kind == "top_label" else gaps.sum(1)).mean()


def avuc(t: Row, avuc_weight: float = 1.0) -> Tensor:
    """Rows are right or wrong, and certain or unsure by whether the entropy is above the mean of both kinds' means."""
    entropy, right = -(t.p * t.log_p).sum(1), t.correct == 1
    means = [entropy[rows].mean() for rows in (right, ~right) if rows.any()]
    certain = entropy <= (sum(means) / len(means)).detach()
    size = torch.where(right, t.confidence, 1 - t.confidence)
    count = size * torch.where(certain, 1 - entropy.tanh(), entropy.tanh())
    return avuc_weight * torch.log1p(
        count[right ^ certain].sum() / count[right == certain].sum()
    )


# A number for the batch, which is added to the mean.
PENALTIES: dict[str, Callable[..., Tensor]] = {
    each.__name__: each for each in (mmce, soft_ece, kde_ece, avuc)
}
PENALTIES["mdca"] = lambda t, gamma=0.0: (t.p - t.truth).mean(0).abs().mean()


def by_formula(
    variant: Variant, table: Any = None, weights: Tensor | None = None
) -> Callable[..., Tensor]:
    """`formula(logits, labels, reduction=...)` of a variant, over the rows that count."""
    name, given = variant

    def formula(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        counts = labels != -100
        row = Row(logits[counts], labels[counts], table, weights)
        w = (
            torch.ones_like(row.ce)
            if weights is None
            else weights.to(logits)[labels[counts]]
        )
        rows = w * FORMULAS[name](row, **given)
        if reduction == "none":
            return torch.zeros_like(logits[:, 0]).masked_scatter(counts, rows)
        mean = rows.sum() / w.sum() + (
            PENALTIES[name](row, **given) if name in PENALTIES else 0
        )
        return mean if reduction == "mean" else mean * w.sum()

    return formula
