"""Low precision: element by element no worse than the plain PyTorch formula in float32.

Truth is the same formula in float64, on the same rounded logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_calib.losses import make_loss
from tests.helpers.loss_cases import BOTH_ENDS, INTERPRETED, random_batch, take_path, value_and_gradient

# Name and hyperparameters of the loss; its formula of z, log p, p, p_y and the labels' column.
Case = tuple[str, dict[str, Any], Callable[..., Tensor]]


def cross_entropy(log_p: Tensor, column: Tensor) -> Tensor:
    return -log_p.gather(1, column).squeeze(1)


def runner_up(z: Tensor, column: Tensor, p: Tensor) -> Tensor:
    below = z < z.gather(1, column)
    index = z.where(below, -torch.inf).argmax(1, keepdim=True)  # of several that tie the first, as ours
    return (p * below).gather(1, index).squeeze(1)


def brier(p: Tensor, column: Tensor) -> Tensor:
    return (p - torch.zeros_like(p).scatter(1, column, 1)).square().sum(1)


def naive(formula: str, logits: Tensor, labels: Tensor) -> Tensor:
    column = labels[:, None]
    log_p = F.log_softmax(logits, 1)
    p = log_p.exp()
    p_y = p.gather(1, column).squeeze(1)
    return FORMULAS[formula][2](logits, log_p, p, p_y, column)


FORMULAS: dict[str, Case] = {
    "cross_entropy": ("cross_entropy", {}, lambda z, log_p, p, p_y, y: cross_entropy(log_p, y)),
    "label_smoothing": (
        "label_smoothing",
        {"smoothing": 0.1},
        lambda z, log_p, p, p_y, y: 0.9 * cross_entropy(log_p, y) - 0.1 * log_p.mean(1),
    ),
    "brier": ("brier", {}, lambda z, log_p, p, p_y, y: brier(p, y)),
    "focal": (
        "focal",
        {"gamma": 3},
        lambda z, log_p, p, p_y, y: (1 - p_y) ** 3 * cross_entropy(log_p, y),
    ),
    "focal_gra": (
        "focal_gra",
        {"gamma": 3},
        lambda z, log_p, p, p_y, y: ((1 - p_y) ** 3).detach() * cross_entropy(log_p, y),
    ),
    "inverse_focal": (
        "inverse_focal",
        {"gamma": 2},
        lambda z, log_p, p, p_y, y: (1 + p_y) ** 2 * cross_entropy(log_p, y),
    ),
    "dual_focal": (
        "dual_focal",
        {"gamma": 5},
        lambda z, log_p, p, p_y, y: (1 - p_y + runner_up(z, y, p)) ** 5 * cross_entropy(log_p, y),
    ),
    "bsce": (
        "bsce",
        {"gamma": 4},
        lambda z, log_p, p, p_y, y: brier(p, y) ** 2 * cross_entropy(log_p, y),
    ),
    "focal_calibration": (
        "focal_calibration",
        {"gamma": 3, "brier_weight": 0.5},
        lambda z, log_p, p, p_y, y: (1 - p_y) ** 3 * cross_entropy(log_p, y) + 0.5 * brier(p, y),
    ),
    "entropy_regularized": (
        "entropy_regularized",
        {},
        lambda z, log_p, p, p_y, y: cross_entropy(log_p, y) + 0.1 * (p * log_p).sum(1),
    ),
    "logit_norm": (
        "logit_norm",
        {"p": 2},
        lambda z, log_p, p, p_y, y: cross_entropy(log_p, y) + 0.01 * z.square().sum(1).sqrt(),
    ),
}


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
if (
    INTERPRETED
):  # one of each set of statistics, and one kind of 16 bits: `tests/kernels` has all of them together
    FORMULAS = dict(
        {make_loss(case[0], **case[1])._reads: (key, case) for key, case in FORMULAS.items()}.values()
    )
    DTYPES = DTYPES[:2]


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of all kinds: flat, peaked, saturated, far from 0."""
    logits, labels = random_batch(64, 50, scale=1.0)
    logits *= torch.tensor([0.1, 1.0, 4.0, 16.0], dtype=torch.float64).repeat_interleave(16)[:, None]
    logits[::8] += 100
    labels[::2] = logits.argmax(1)[::2]
    return logits.to(dtype), labels


def assert_no_worse(ours: Tensor, naive: Tensor, truth: Tensor, tolerance: Tensor) -> None:
    excess = (ours.double() - truth).abs() - (naive.double() - truth).abs() - tolerance
    assert excess.max() <= 0, f"worse by {excess.max():.1e} at {excess.argmax().item()}"


@pytest.mark.parametrize("path", BOTH_ENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("formula", FORMULAS)
def test_no_worse_than_the_formula(
    formula: str, dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_path(monkeypatch, path)
    name, hyperparameters, _ = FORMULAS[formula]
    logits, labels = batch(dtype)
    ours = value_and_gradient(make_loss(name, **hyperparameters), logits, labels, reduction="none")
    theirs = value_and_gradient(lambda z, y: naive(formula, z.float(), y), logits, labels)
    truth = value_and_gradient(lambda z, y: naive(formula, z, y), logits.double(), labels)
    assert ours[0].dtype == torch.float32
    # A few float32 roundings of the terms of the loss: in 16 bits not even a digit of the gradient.
    tolerance = torch.finfo(torch.float32).eps * truth[0].abs().clamp_min(1)
    assert_no_worse(ours[0], theirs[0], truth[0], 4 * tolerance)
    assert_no_worse(ours[1], theirs[1], truth[1], 16 * tolerance[:, None])
