"""Gradients against finite differences, and the three paths through the code against one another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hf_calib.losses import CalibrationLoss, make_loss
from tests.helpers.loss_cases import (
    INTERPRETED,
    KERNELS,
    ONE_OF_EACH,
    PATHS,
    VARIANTS,
    Variant,
    make_variant,
    random_batch,
    take_path,
    value_and_gradient,
    variant_id,
)

EXACT = {"rtol": 1e-12, "atol": 1e-12}
CLASS_WEIGHTS = [0.5, 2.0, 1.0, 3.0, 0.1]


# Whose gradient is not that of the value: the weight, or the gamma, is a constant to it.
DETACHED = [v for v in VARIANTS if v[0].endswith("_gra") or v[0] == "dft" or "per_sample" in v[1]]


def reductions(loss: CalibrationLoss) -> tuple[str, ...]:
    every = ("mean", "sum") if loss.couples_batch else ("mean", "sum", "none")
    return every[-1:] if INTERPRETED else every


@pytest.mark.skipif(
    INTERPRETED, reason="minutes; the kernels' gradients are compared with those that are checked here"
)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in DETACHED], ids=variant_id)
def test_gradient_is_that_of_the_value(variant: Variant) -> None:
    """With class weights, on token-level logits, one row of which is ignored."""
    loss = make_variant(variant, 5, class_weights=CLASS_WEIGHTS)
    logits, labels = random_batch(6, 5)
    labels[4] = -100
    logits, labels = logits.view(2, 3, 5).requires_grad_(), labels.view(2, 3)
    reduction = reductions(loss)[-1]
    assert torch.autograd.gradcheck(
        lambda z: loss(z, labels, reduction=reduction), logits, atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("variant", [v for v in DETACHED if v[0] != "calfocal"], ids=variant_id)
def test_a_detached_weight_scales_the_gradient_of_cross_entropy(variant: Variant) -> None:
    loss = make_variant(variant, 5)
    logits, labels = random_batch(8, 5)
    cross_entropy = make_loss("cross_entropy")(logits, labels, reduction="none")
    weights = loss(logits, labels, reduction="none") / cross_entropy
    assert weights.std() > 0.1
    _, gradient = value_and_gradient(loss, logits, labels, reduction="sum")
    _, plain = value_and_gradient(make_loss("cross_entropy"), logits, labels, reduction="sum")
    assert_close(gradient, weights[:, None] * plain, **EXACT)


def awkward_batch() -> tuple[Tensor, Tensor]:
    """Ignored rows, masked classes, saturated rows right and wrong, and a label that is the lowest."""
    logits, labels = random_batch(37, 5)
    labels[[3, 20, 36]] = -100
    logits[5:9, 4] = -torch.inf
    labels[5:9] = 2
    logits[10] = torch.tensor([60.0, 0.0, 1.0, 2.0, 3.0])
    labels[10], labels[11] = 0, logits[11].argmin()
    logits[12], labels[12] = logits[10], 1
    return logits, labels


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_all_paths_agree(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = awkward_batch()
    every = reductions(make_variant(variant, 5))
    for reduction in every:
        weights = CLASS_WEIGHTS if reduction == every[-1] else None
        loss = make_variant(variant, 5, class_weights=weights)
        results = []
        for path in (*PATHS, *(("plain",) if KERNELS else ())):
            take_path(monkeypatch, path)
            results.append(value_and_gradient(loss, logits, labels, reduction=reduction))
        assert results[0][0].isfinite().all()
        assert results[0][1].isfinite().all()
        for result in results[1:]:
            assert_close(result, results[0], **EXACT)


@pytest.mark.parametrize("variant", ONE_OF_EACH, ids=variant_id)
def test_gradients_of_gradients_and_transforms(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the plain operations, however large the logits are."""
    loss = make_variant(variant, 5)
    logits, labels = random_batch(6, 5)
    labels[4] = -100
    direction = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def second(path: str) -> Tensor:
        take_path(monkeypatch, path)
        leaf = logits.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(leaf, labels), leaf, create_graph=True)
        return torch.autograd.grad((slope * direction).sum(), leaf)[0]

    want = second("plain" if KERNELS else "direct")
    assert_close(second(PATHS[-1]), want, **EXACT)
    _, product = torch.func.jvp(torch.func.grad(lambda z: loss(z, labels)), (logits,), (direction,))
    assert_close(product, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_backward_gives_the_same_gradient(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one turns the saved probabilities into the gradient, in place."""
    take_path(monkeypatch, "blocks")
    logits, labels = random_batch(9, 5)
    logits = logits.to(dtype).requires_grad_()
    value = make_loss("focal_calibration")(logits, labels)
    (first,) = torch.autograd.grad(value, logits, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(value, logits)
    assert torch.equal(first, kept)
    assert_close(second, first)


@pytest.mark.parametrize("path", PATHS)
def test_logits_need_not_be_contiguous(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_path(monkeypatch, path)
    logits, labels = random_batch(8, 5)
    loss = make_loss("focal_calibration")
    result = value_and_gradient(loss, logits.T.contiguous().T, labels)
    assert_close(result, value_and_gradient(loss, logits, labels), **EXACT)
    strided = logits.repeat_interleave(2, dim=1)[:, ::2]
    assert_close(value_and_gradient(loss, strided, labels), result, **EXACT)
    expanded = logits[:1].expand(8, 5)
    want = value_and_gradient(loss, expanded.contiguous(), labels)
    leaf = logits[:1].clone().requires_grad_()
    value = loss(leaf.expand(8, 5), labels)
    value.backward()
    assert_close((value.detach(), leaf.grad), (want[0], want[1].sum(0, keepdim=True)), **EXACT)
