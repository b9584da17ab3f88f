"""The figure of a loss: the weight of its cross entropy, and the factor of its gradient, by the label's probability."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from papers.gradients import gradient_factors, uncertainty_weights

from hf_calib.losses import LOSSES, AdaptiveLoss, CalibrationLoss, make_loss
from hf_calib.plots.style import line_looks, plain_axes

# The hyperparameter that is varied, where one matters most; else the loss is drawn with its defaults.
VARIED = {
    **dict.fromkeys(
        ("focal", "focal_gra", "inverse_focal", "bsce", "bsce_gra"),
        ("gamma", (1.0, 2.0, 3.0)),
    ),
    **dict.fromkeys(("dual_focal", "dual_focal_gra"), ("gamma", (1.0, 3.0, 5.0))),
    "label_smoothing": ("smoothing", (0.02, 0.05, 0.1)),
    "entropy_regularized": ("entropy_weight", (0.05, 0.1, 0.3)),
    "logit_norm": ("norm_weight", (0.005, 0.01, 0.02)),
    "focal_calibration": ("brier_weight", (0.0, 0.5, 3.0)),
    "mmce": ("mmce_weight", (0.25, 0.5, 1.0)),
    "soft_ece": ("ece_weight", (0.5, 1.0, 2.0)),
    "kde_ece": ("kde_weight", (0.25, 0.5, 1.0)),
    "mdca": ("mdca_weight", (0.5, 1.0, 2.0)),
    "avuc": ("avuc_weight", (0.5, 1.0, 2.0)),
    "mbls": ("margin", (1.0, 3.0, 10.0)),
    "power": ("exponent", (0.3, 1.0, 5.0)),
}
CLASSES = 10
HELD_OUT = 4000  # rows that adaptive losses are fitted to


def draw(name: str, file: Path) -> str:
    """Write the figure of a loss, and return what it shows, for those who cannot see it."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # gammas that push labels down are among what is shown
        losses = variants(name)
        couples = LOSSES[name].constructor().couples_batch
        panels = of_a_batch(losses) if couples else of_one_row(losses)
    width, height = 3.8 * len(panels), 2.7
    figure = Figure(figsize=(width, height))
    # Margins in inches: a layout that measures the texts takes longer than all of the rest.
    figure.subplots_adjust(
        left=0.4 / width,
        right=1 - 0.15 / width,
        bottom=0.45 / height,
        top=1 - 0.3 / height,
    )
    for axes, (title, (across, lines)) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        axes.axhline(1, color="#888888", linewidth=0.8, linestyle=":")
        for (label, values), look in zip(lines.items(), line_looks(), strict=False):
            axes.plot(across, values, linewidth=1.4, label=label, **look)
        low, high = axes.get_ylim()
        axes.set(
            xlim=(0, 1), ylim=(min(low, 0.0) if low < -1e-9 else 0.0, min(high, 8.0))
        )
        axes.set_xlabel("probability of the label", fontsize=8)
        axes.set_title(title, fontsize=9)
        plain_axes(axes)
    figure.axes[0].legend(fontsize=7, frameon=False)
    figure.savefig(file, metadata={"Date": None})
    what = " and ".join(panels)
    return f"{name}: {what}, against the probability of the label, for {', '.join(losses)}."


def variants(name: str) -> dict[str, CalibrationLoss]:
    """The loss at a few values of its hyperparameter, or fitted to two kinds of held-out predictions."""
    if name in VARIED:
        key, values = VARIED[name]
        return {f"{key} {value:g}": make_loss(name, **{key: value}) for value in values}
    if isinstance(make_loss(name), AdaptiveLoss):
        kinds = {"over-confident": 2.0, "under-confident": 0.6}
        return {
            f"{kind} held-out rows": fitted(name, power)
            for kind, power in kinds.items()
        }
    return {"defaults": make_loss(name)}


def fitted(name: str, power: float) -> AdaptiveLoss:
    """An adaptive loss after five updates with rows whose odds are too large, or too small, by a power."""
    loss = make_loss(name)
    rng = np.random.default_rng(0)
    true = rng.uniform(0.5, 0.98, HELD_OUT)
    odds = (true / (1 - true)) ** power
    stated, correct = odds / (1 + odds), rng.random(HELD_OUT) < true
    for _ in range(5):
        loss.update(
            stated,
            correct,
            class_gaps=np.full(CLASSES, abs(stated - true).mean()),
            progress=1.0,
        )
    return loss


Panels = dict[str, tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]]


def of_one_row(losses: dict[str, CalibrationLoss]) -> Panels:
    """Weight and factor of a row of ten classes, whose other nine are even."""
    across = np.linspace(0.002, 0.998, 400)
    probs = np.repeat(((1 - across) / (CLASSES - 1))[:, None], CLASSES, axis=1)
    probs[:, 0] = across
    labels = np.zeros(len(across), dtype=int)
    functions: dict[str, Callable[..., NDArray[np.float64]]] = {
        "weight of the cross entropy": uncertainty_weights,
        "gradient over cross entropy's": gradient_factors,
    }
    return {
        title: (
            across,
            {label: function(loss, probs, labels) for label, loss in losses.items()},
        )
        for title, function in functions.items()
    }


def of_a_batch(losses: dict[str, CalibrationLoss]) -> Panels:
    """The factor within a batch of two classes in which a confident prediction is right less often than it says."""
    across = np.linspace(0.02, 0.98, 97)
    logits = torch.tensor(np.stack([np.log(across), np.log1p(-across)], axis=1))
    # Each row once with the label 0 and once with 1; as often as the odds, halved, say.
    true = across**0.5 / (across**0.5 + (1 - across) ** 0.5)
    copies = np.round(np.stack([true, 1 - true], axis=1) * 12).astype(int)
    rows = np.concatenate(
        [np.repeat(np.arange(len(across)), copies[:, label]) for label in (0, 1)]
    )
    labels = torch.tensor(np.repeat([0, 1], copies.sum(axis=0)))
    lines = {}
    for name, loss in losses.items():
        batch = logits[rows].requires_grad_()
        (gradient,) = torch.autograd.grad(loss(batch, labels), batch)
        of_label = gradient[torch.arange(len(labels)), labels].numpy() * len(labels)
        own = np.where(labels == 0, across[rows], 1 - across[rows])
        factors = -of_label / (1 - own)
        order = np.argsort(own, kind="stable")
        lines[name] = np.interp(across, own[order], factors[order])
    return {
        "gradient over cross entropy's, in an over-confident batch": (across, lines)
    }
