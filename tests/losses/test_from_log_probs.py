"""The loss of what a fused head keeps of the logits is the loss of the logits, and so is its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_calib._errors import InputValueError
from hf_calib.losses import CalibrationLoss, adafocal, brier, bsce_gra, focal, make_loss

BY_LOG_PROBS = [
    "cross_entropy",
    "focal",
    "focal_gra",
    "flsd",
    "flsd_gra",
    "inverse_focal",
    "adafocal",
    "calfocal",
    "dft",
    "power",
]
BY_ENTROPY = ["entropy_regularized"]
BY_SQUARES = ["brier", "bsce", "bsce_gra", "focal_calibration"]
REFUSED = {
    "label_smoothing": "reads MeanLogProb",
    "dual_focal": "reads Rival",
    "dual_focal_gra": "reads Rival",
    "ada_dual_focal": "reads Rival",
    "logit_norm": "reads LogitNorm",
    "ece_ce": "reads the labels",
    "mmce": "couples the batch",
    "soft_ece": "couples the batch",
    "kde_ece": "couples the batch",
    "mbls": "reads LogProbs",
    "mdca": "couples the batch",
    "avuc": "couples the batch",
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


def made(name: str) -> CalibrationLoss:
    loss = make_loss(name)
    if name in ("adafocal", "calfocal"):
        confidences = torch.rand(400, generator=torch.Generator().manual_seed(1))
        loss.update(confidences.tolist(), (confidences > 0.6).tolist())
        assert len(set(loss.gammas.tolist())) > 3
    return loss


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", [*BY_LOG_PROBS, *BY_ENTROPY, *BY_SQUARES])
def test_value_and_gradient(name: str, reduction: str) -> None:
    logits, labels, mask = rows()
    loss = made(name)
    wanted = loss(logits, labels.where(mask, -100), reduction=reduction)
    found = loss.from_log_probs(mask=mask, reduction=reduction, **kept(logits, labels))
    torch.testing.assert_close(found, wanted)
    (ours,) = torch.autograd.grad(found.sum(), logits)
    (theirs,) = torch.autograd.grad(wanted.sum(), logits)
    torch.testing.assert_close(ours, theirs)


def test_every_loss_is_known_to_these_tests() -> None:
    from hf_calib.losses import LOSSES

    assert {*BY_LOG_PROBS, *BY_ENTROPY, *BY_SQUARES, *REFUSED} == set(LOSSES)


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name(name: str) -> None:
    logits, labels, _ = rows()
    with pytest.raises(InputValueError, match=rf"got '{name}', which {REFUSED[name]}"):
        make_loss(name).from_log_probs(**kept(logits, labels))


def test_a_statistic_without_the_gradient_that_a_loss_needs_is_refused() -> None:
    """TRL's log_sum_sq_probs is such a one: brier would train on a part of its gradient, without a word."""
    logits, labels, mask = rows()
    numbers = kept(logits, labels)
    numbers["log_sum_sq_probs"] = numbers["log_sum_sq_probs"].detach()
    with pytest.raises(
        InputValueError, match=r"log_sum_sq_probs to have a gradient for loss 'brier'.*bsce_gra"
    ):
        brier().from_log_probs(**numbers)
    wanted = bsce_gra()(logits, labels.where(mask, -100))
    found = bsce_gra().from_log_probs(mask=mask, **numbers)  # its weight is a constant to the gradient
    torch.testing.assert_close(found, wanted)
    (ours,) = torch.autograd.grad(found, logits)
    (theirs,) = torch.autograd.grad(wanted, logits)
    torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        brier().from_log_probs(**{name: values.detach() for name, values in numbers.items()})


def test_rows_that_do_not_count_may_hold_anything() -> None:
    logits, labels, mask = rows()
    numbers = kept(logits.detach(), labels)
    log_probs = numbers["log_probs"].where(mask, torch.nan).requires_grad_()
    found = focal().from_log_probs(log_probs, mask=mask)
    (gradient,) = torch.autograd.grad(found, log_probs)
    assert found.isfinite()
    assert gradient.isfinite().all()
    assert not gradient[~mask].any()
    assert focal().from_log_probs(log_probs, mask=torch.zeros_like(mask)) == 0


def test_micro_batches_of_one_step_add_up() -> None:
    logits, labels, mask = rows()
    numbers = kept(logits, labels)["log_probs"]
    whole = adafocal().from_log_probs(numbers, mask=mask)
    count = mask.sum()
    parts = [
        adafocal().from_log_probs(part, mask=counts, num_items_in_batch=count)
        for part, counts in zip(numbers.split(1), mask.split(1), strict=True)
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_sixteen_bits_are_widened() -> None:
    logits, labels, _ = rows()
    numbers = kept(logits.detach(), labels)["log_probs"]
    assert focal().from_log_probs(numbers.bfloat16()).dtype == torch.float32


def test_bad_input() -> None:
    logits, labels, mask = rows()
    numbers = kept(logits, labels)
    with pytest.raises(
        InputValueError, match=r"entropy to be given for loss 'entropy_regularized', got None"
    ):
        make_loss("entropy_regularized").from_log_probs(numbers["log_probs"])
    with pytest.raises(
        InputValueError, match=r"mask to have the shape of log_probs, got \(4, 4\) for \(4, 5\)"
    ):
        focal().from_log_probs(numbers["log_probs"], mask=mask[:, 1:])
    with pytest.raises(InputValueError, match=r"which has class weights"):
        focal(class_weights=[1.0, 2.0]).from_log_probs(numbers["log_probs"])
    with pytest.raises(InputValueError, match=r"which is multi-label"):
        focal(problem_type="multi_label_classification").from_log_probs(numbers["log_probs"])
    with pytest.raises(InputValueError, match=r"reduction to be one of"):
        focal().from_log_probs(numbers["log_probs"], reduction="all")
