"""Low precision: element by element no worse than the plain PyTorch formula in float32.

Truth is the same formula in float64, on the same rounded logits.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_calib.losses import make_loss
from tests.helpers.loss_cases import (
    Variant,
    by_formula,
    random_batch,
    value_and_gradient,
    variant_id,
)

CASES: list[Variant] = [
    ("cross_entropy", {}),
    ("label_smoothing", {"smoothing": 0.1}),
    ("brier", {}),
    ("focal", {}),
    ("focal_gra", {}),
    ("inverse_focal", {}),
    ("dual_focal", {}),
    ("bsce", {"gamma": 4}),
    ("focal_calibration", {}),
    ("entropy_regularized", {}),
    ("logit_norm", {"p": 2}),
]


def assert_no_worse(
    ours: Tensor, naive: Tensor, truth: Tensor, tolerance: Tensor
) -> None:
    excess = (ours.double() - truth).abs() - (naive.double() - truth).abs() - tolerance
    assert excess.max() <= 0, f"worse by {excess.max():.1e} at {excess.argmax().item()}"


@pytest.mark.parametrize("width", [50, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", CASES, ids=variant_id)
def test_no_worse_than_the_formula(
    variant: Variant, dtype: torch.dtype, width: int
) -> None:
    # Rows of all kinds: flat, peaked, saturated, far from 0.
    logits, labels = random_batch(64, width, scale=1.0)
    logits *= torch.tensor(
        [0.1, 1.0, 4.0, 16.0], dtype=torch.float64
    ).repeat_interleave(16)[:, None]
    logits[::8] += 100
    labels[::2] = logits.argmax(1)[::2]
    logits = logits.to(dtype)

    name, hyperparameters = variant
    formula = by_formula(variant)
    ours = value_and_gradient(
        make_loss(name, **hyperparameters), logits, labels, reduction="none"
    )
    naive = value_and_gradient(
        lambda z, y: formula(z.float(), y, reduction="none"), logits, labels
    )
    truth = value_and_gradient(formula, logits.double(), labels, reduction="none")
    assert ours[0].dtype == torch.float32
    assert ours[1].dtype == dtype
    # A few float32 roundings of the terms of the loss: in 16 bits not even a digit of the gradient.
    tolerance = torch.finfo(torch.float32).eps * truth[0].abs().clamp_min(1)
    assert_no_worse(ours[0], naive[0], truth[0], 6 * tolerance)
    assert_no_worse(ours[1], naive[1], truth[1], 16 * tolerance[:, None])
