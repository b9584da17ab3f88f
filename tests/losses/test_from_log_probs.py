"""The loss of what a fused head keeps of the logits is the loss of the logits, and so is its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hf_calib.losses import LOSSES, brier, bsce_gra, focal, make_loss
from tests.helpers.loss_cases import make_variant

REFUSED = {
    "label_smoothing": "reads ",
    "dual_focal": "reads ",
    "dual_focal_gra": "reads ",
    "ada_dual_focal": "reads ",
    "logit_norm": "reads ",
    "mbls": "reads ",
    "ece_ce": "reads the labels",
    **dict.fromkeys(("mmce", "soft_ece", "kde_ece", "mdca", "avuc"), "couples the batch"),
}


def rows() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 5, 7, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 7, (4, 5), generator=generator)
    mask = torch.rand(4, 5, generator=generator) < 0.7
    return logits.requires_grad_(), labels, mask


def kept(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    log_probs = logits.log_softmax(dim=-1)
    return {
        "log_probs": log_probs.gather(-1, labels[..., None]).squeeze(-1),
        "entropy": -(log_probs.exp() * log_probs).sum(dim=-1),
        "log_sum_sq_probs": (2 * log_probs).logsumexp(dim=-1),
    }


def assert_same(found: Tensor, wanted: Tensor, logits: Tensor) -> None:
    slopes = [torch.autograd.grad(each.sum(), logits)[0] for each in (found, wanted)]
    assert_close(found, wanted)
    assert_close(*slopes)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in REFUSED])
def test_value_and_gradient(name: str, reduction: str) -> None:
    logits, labels, mask = rows()
    loss = make_variant((name, {}), 7)
    wanted = loss(logits, labels.where(mask, -100), reduction=reduction)
    numbers = kept(logits, labels)
    assert_same(loss.from_log_probs(mask=mask, reduction=reduction, **numbers), wanted, logits)
    if reduction == "sum":
        parts = [
            loss.from_log_probs(
                mask=mask[i], num_items_in_batch=9, **{key: values[i] for key, values in numbers.items()}
            )
            for i in range(4)
        ]
        assert_close(sum(parts), wanted / 9)


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name(name: str) -> None:
    logits, labels, _ = rows()
    with pytest.raises(ValueError, match=rf"got '{name}', which {REFUSED[name]}"):
        make_loss(name).from_log_probs(**kept(logits, labels))


def test_a_number_without_the_gradient_that_a_loss_needs_is_refused() -> None:
    """TRL's log_sum_sq_probs is such a one: brier would train on a part of its gradient, without a word."""
    logits, labels, mask = rows()
    numbers = kept(logits, labels)
    numbers["log_sum_sq_probs"] = numbers["log_sum_sq_probs"].detach()
    with pytest.raises(ValueError, match=r"log_sum_sq_probs to have a gradient for loss 'brier'.*bsce_gra"):
        brier().from_log_probs(**numbers)
    wanted = bsce_gra()(logits, labels.where(mask, -100))  # its weight is a constant to the gradient
    assert_same(bsce_gra().from_log_probs(mask=mask, **numbers), wanted, logits)
    with torch.no_grad():
        brier().from_log_probs(**{name: values.detach() for name, values in numbers.items()})


def test_rows_that_do_not_count_may_hold_anything() -> None:
    logits, labels, mask = rows()
    log_probs = kept(logits.detach(), labels)["log_probs"].where(mask, torch.nan).requires_grad_()
    found = focal().from_log_probs(log_probs, mask=mask)
    (gradient,) = torch.autograd.grad(found, log_probs)
    assert found.isfinite()
    assert gradient.isfinite().all()
    assert not gradient[~mask].any()
    assert focal().from_log_probs(log_probs, mask=torch.zeros_like(mask)) == 0
    assert focal().from_log_probs(log_probs.bfloat16()).dtype == torch.float32


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (make_loss("entropy_regularized"), {}, "entropy to be given for loss 'entropy_regularized', got None"),
    (focal(), {"mask": torch.ones(4, 4)}, r"mask to have the shape of log_probs, got \(4, 4\) for \(4, 5\)"),
    (focal(class_weights=[1.0, 2.0]), {}, "which has class weights"),
    (focal(problem_type="multi_label_classification"), {}, "which is multi-label"),
    (focal(), {"reduction": "all"}, "reduction to be one of"),
]


@pytest.mark.parametrize(("loss", "given", "message"), BAD, ids=[message for *_, message in BAD])
def test_bad_input(loss: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss.from_log_probs(-torch.ones(4, 5), **given)
