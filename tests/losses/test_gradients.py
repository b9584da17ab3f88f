"""Gradients by finite differences, of gradients, by torch.func; `test_special_cases` has the formulas'."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hf_calib.losses import make_loss
from tests.helpers.loss_cases import (
    EXACT,
    VARIANTS,
    WIDTHS,
    Variant,
    every_variant,
    make_variant,
    random_batch,
    value_and_gradient,
    variant_id,
    wide_when_slow,
)

# Whose gradient is not that of the value: the weight, or the gamma, is a constant to it.
DETACHED = [
    v
    for v in VARIANTS
    if v[0].endswith("_gra") or v[0] == "dft" or "per_sample" in v[1]
]


@pytest.mark.parametrize(
    "variant", [v for v in VARIANTS if v not in DETACHED], ids=variant_id
)
def test_gradient_is_that_of_the_value(variant: Variant) -> None:
    """With class weights, on token-level logits, one row of which is ignored."""
    loss = make_variant(variant, 5, class_weights=[0.5, 2.0, 1.0, 3.0, 0.1])
    logits, labels = random_batch(6, 5)
    labels[4] = -100
    logits, labels = logits.view(2, 3, 5).requires_grad_(), labels.view(2, 3)
    reduction = "sum" if loss.couples_batch else "none"
    assert torch.autograd.gradcheck(
        lambda z: loss(z, labels, reduction=reduction), logits, atol=1e-6, rtol=1e-5
    )


SOME = (
    "cross_entropy",
    "focal",
    "dual_focal",
    "bsce_gra",
    "focal_calibration",
    "adafocal",
    "power",
    "logit_norm",
    "mbls",
)


@wide_when_slow
@pytest.mark.parametrize("name", [*SOME, "mmce", "entropy_regularized"])
def test_gradients_of_gradients(name: str, width: int) -> None:
    """A Hessian times a vector, by a double backward: against differences of gradients, where the loss is its own."""
    loss = make_variant((name, {}), width)
    logits, labels = random_batch(30, width)
    direction = torch.randn(
        logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, labels), leaf, create_graph=True)
    (product,) = torch.autograd.grad(gradient, leaf, direction)
    step = 1e-6
    ends = [
        value_and_gradient(loss, logits + sign * step * direction, labels)[1]
        for sign in (1, -1)
    ]
    if name != "bsce_gra":  # whose gradient is not that of its value
        assert_close(product, (ends[0] - ends[1]) / (2 * step), rtol=1e-4, atol=1e-7)
    assert_close(
        gradient.detach(), value_and_gradient(loss, logits, labels)[1], **EXACT
    )


@wide_when_slow
@pytest.mark.parametrize("name", SOME)
def test_torch_func(name: str, width: int) -> None:
    loss = make_variant((name, {}), width)
    logits, labels = random_batch(30, width)
    wanted = value_and_gradient(loss, logits, labels, reduction="sum")[1]
    of_batch = torch.func.grad(lambda z: loss(z, labels, reduction="sum"))(logits)
    assert_close(of_batch, wanted, **EXACT)

    def of_row(row: Tensor, label: Tensor) -> Tensor:
        return loss(row[None], label[None])

    assert_close(torch.vmap(torch.func.grad(of_row))(logits, labels), wanted, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_backward_gives_the_same_gradient(dtype: torch.dtype) -> None:
    """The first one turns the saved probabilities into the gradient, in place."""
    logits, labels = random_batch(40, WIDTHS[-1])
    logits = logits.to(dtype).requires_grad_()
    value = make_loss("focal_calibration")(logits, labels)
    (first,) = torch.autograd.grad(value, logits, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(value, logits)
    assert torch.equal(first, kept)
    assert_close(second, first)


@wide_when_slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", [*SOME, "mmce"])
def test_many_slopes_at_once(name: str, dtype: torch.dtype, width: int) -> None:
    """The gradients of a batch of slopes are those of its slopes."""
    loss = make_variant((name, {}), width)
    logits, labels = random_batch(30, width)
    labels[4] = -100
    logits = logits.to(dtype).requires_grad_()
    for reduction in ("sum",) if loss.couples_batch else ("sum", "none"):
        value = loss(logits, labels, reduction=reduction)
        slopes = torch.randn(
            3, *value.shape, generator=torch.Generator().manual_seed(0)
        ).to(value.dtype)
        (found,) = torch.autograd.grad(
            value, logits, slopes, is_grads_batched=True, retain_graph=True
        )
        wanted = [
            torch.autograd.grad(value, logits, slope, retain_graph=True)[0]
            for slope in slopes
        ]
        assert_close(found, torch.stack(wanted))


@wide_when_slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_variant
def test_ignored_rows_may_contain_anything(
    variant: Variant, dtype: torch.dtype, width: int
) -> None:
    """NaN, or nothing but masked classes, on every path; padding may."""
    loss = make_variant(variant, width)
    logits, labels = random_batch(30, width)
    logits = logits.to(dtype)
    labels[4], labels[17] = -100, -100
    wanted_value, wanted = value_and_gradient(loss, logits, labels)
    assert not wanted[[4, 17]].any()
    logits[4], logits[17] = torch.nan, -torch.inf
    value, gradient = value_and_gradient(loss, logits, labels)
    assert_close(value, wanted_value)
    assert_close(gradient, wanted)
    leaf = logits.requires_grad_()
    value = loss(leaf, labels)
    (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
    assert gradient.isfinite().all()
    assert not gradient[[4, 17]].any()
