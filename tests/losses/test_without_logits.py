"""Losses without logits: of hidden states and a head's weight, and of what a fused head has kept of the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hf_calib.losses import (
    LOSSES,
    brier,
    bsce_gra,
    cross_entropy,
    focal,
    linear_calibration_loss,
    make_loss,
)
from tests.helpers.loss_cases import VARIANTS, make_variant, variant_id

SEPARABLE = [
    variant for variant in VARIANTS if make_loss(variant[0]).entry.is_of_single_rows
]
N, H, V = 12, 5, 37


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and labels, four of which are ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True)
        for shape in ((N, H), (V, H), (V,))
    )
    labels = torch.randint(V, (N,), generator=generator)
    labels[[0, 4, 5, 11]] = -100
    return hidden, weight, bias, labels


def results(value: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def assert_same(
    ours: Tensor,
    theirs: Tensor,
    *leaves: Tensor,
    rtol: float = 1e-9,
    atol: float = 1e-12,
) -> None:
    assert_close(results(ours, *leaves), results(theirs, *leaves), rtol=rtol, atol=atol)


class TestLinear:
    @pytest.mark.parametrize("variant", SEPARABLE, ids=variant_id)
    def test_it_is_the_loss_of_the_logits(self, variant: Any) -> None:
        hidden, weight, bias, labels = batch()
        loss = make_variant(variant, V, class_weights=torch.linspace(0.5, 2, V))
        for given in (
            {},
            {"reduction": "sum"},
            {"num_items_in_batch": torch.tensor(5)},
        ):
            ours = linear_calibration_loss(
                hidden, weight, labels, loss, bias=bias, **given
            )
            assert_same(
                ours,
                loss(hidden @ weight.T + bias, labels, **given),
                hidden,
                weight,
                bias,
            )

    @pytest.mark.parametrize("n", [300, 3000])
    def test_in_chunks(self, n: int) -> None:
        """Of a large vocabulary: more logits than are made at once; the last chunk is a part of one."""
        vocabulary = 9_000_000 // n
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(n, 2, generator=generator, requires_grad=True)
        weight = torch.randn(vocabulary, 2, generator=generator, requires_grad=True)
        labels = torch.randint(vocabulary, (n,), generator=generator)
        labels[::7] = -100
        ours = linear_calibration_loss(hidden, weight, labels, cross_entropy())
        theirs = cross_entropy()(hidden @ weight.T, labels)
        assert_same(ours, theirs, hidden, weight, rtol=1e-4, atol=1e-6)

    def test_softcap_and_temperature_have_their_gradients(self) -> None:
        hidden, weight, bias, labels = batch()
        t = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
        ours = linear_calibration_loss(
            hidden, weight, labels, focal(), bias=bias, softcap=3.0, temperature=t
        )
        theirs = focal()(3 * torch.tanh((hidden @ weight.T + bias) / 3) / t, labels)
        assert_same(ours, theirs, hidden, weight, bias, t)
        number = linear_calibration_loss(
            hidden, weight, labels, focal(), temperature=1.7
        )
        assert_close(number, focal()(hidden @ weight.T / 1.7, labels))

    def test_sequences_checkpointing_and_accumulated_micro_batches(self) -> None:
        hidden, weight, _, labels = batch()

        def ours(h: Tensor, y: Tensor, **given: Any) -> Tensor:
            return linear_calibration_loss(h, weight, y, focal(), **given)

        theirs = focal()(hidden @ weight.T, labels)
        wanted = results(theirs, hidden, weight)
        items = (labels != -100).sum()
        found = {
            "sequences": ours(hidden.view(2, 6, H), labels.view(2, 6)),
            "checkpointed": torch.utils.checkpoint.checkpoint(
                ours, hidden, labels, use_reentrant=False
            ),
            "two": ours(hidden[:7], labels[:7], num_items_in_batch=items)
            + ours(hidden[7:], labels[7:], num_items_in_batch=items),
        }
        for value in found.values():
            assert_close(results(value, hidden, weight), wanted, rtol=1e-9, atol=1e-12)

    def test_16_bits_are_no_worse_than_the_logits_way(self) -> None:
        """The weight's gradient is summed in float32: as near to the truth as one product in 16 bits, or nearer."""
        hidden, weight, _, labels = batch(torch.bfloat16)
        exact = [
            tensor.detach().double().requires_grad_() for tensor in (hidden, weight)
        ]
        truth = results(focal()(exact[0] @ exact[1].T, labels), *exact)
        ours = results(
            linear_calibration_loss(hidden, weight, labels, focal()), hidden, weight
        )
        theirs = results(focal()(hidden @ weight.T, labels), hidden, weight)
        assert [each.dtype for each in ours] == [
            torch.float32,
            torch.bfloat16,
            torch.bfloat16,
        ]
        for own, other, true in zip(ours, theirs, truth, strict=True):
            assert (own.double() - true).norm() <= 1.2 * (
                other.double() - true
            ).norm() + 1e-6 * true.norm()

    def test_ignored_rows_may_hold_anything(self) -> None:
        hidden, weight, _, labels = batch()
        assert linear_calibration_loss(hidden[:0], weight, labels[:0], focal()) == 0
        ignored = linear_calibration_loss(
            hidden, weight, torch.full((N,), -100), focal()
        )
        assert not any(each.any() for each in results(ignored, hidden, weight))
        poisoned = hidden.detach().clone()
        poisoned[labels == -100] = torch.nan
        poisoned.requires_grad_()
        strided = weight.T.contiguous().T
        value, slope = results(
            linear_calibration_loss(poisoned, strided, labels, focal()), poisoned
        )
        assert_close(value, focal()(hidden @ weight.T, labels).detach())
        assert not slope[labels == -100].any()


COUPLES = "loss to have a value per row, got '{}', which couples the rows"
MULTI_LABEL = focal(problem_type="multi_label_classification")
MISFITS: list[tuple[str, Any, type[Exception], str]] = [
    ("loss", "focal", TypeError, "loss to be a CalibrationLoss, got 'focal'"),
    ("loss", make_loss("mmce"), ValueError, COUPLES.format("mmce")),
    ("loss", make_loss("ece_ce"), ValueError, COUPLES.format("ece_ce")),
    ("loss", MULTI_LABEL, ValueError, "single-label, got a multi-label 'focal'"),
    ("reduction", "none", ValueError, "reduction to be 'mean' or 'sum', got 'none'"),
    (
        "weight",
        torch.zeros(V, H + 1).double(),
        ValueError,
        r"got \(12, 5\) and \(37, 6\)",
    ),
    (
        "labels",
        torch.zeros(N - 1).long(),
        ValueError,
        r"integers of shape \(12,\), got \(11,\)",
    ),
    (
        "labels",
        torch.full((N,), V),
        ValueError,
        r"in \[0, 37\) or -100, got 37 in row 0",
    ),
    ("softcap", 0.0, ValueError, "softcap to be above 0, got 0.0"),
    *(
        ("softcap", value, ValueError, f"softcap to be above 0, got {value}")
        for value in (True, "2", float("inf"), float("nan"), {})
    ),
    *(
        (
            "temperature",
            value,
            ValueError,
            "temperature to be (one number|above 0), got",
        )
        for value in (True, "2", 0, -1.0, float("inf"), float("nan"), [1.0, 2.0])
    ),
]


@pytest.mark.parametrize(("name", "value", "kind", "message"), MISFITS)
def test_what_does_not_fit(
    name: str, value: Any, kind: type[Exception], message: str
) -> None:
    hidden, weight, _, labels = batch()
    given = {
        "hidden": hidden,
        "weight": weight,
        "labels": labels,
        "loss": focal(),
        name: value,
    }
    with pytest.raises(kind, match=message):
        linear_calibration_loss(**given)


READERS = (
    "label_smoothing",
    "dual_focal",
    "dual_focal_gra",
    "ada_dual_focal",
    "logit_norm",
    "mbls",
)
REFUSED = {
    **dict.fromkeys(READERS, "reads "),
    "ece_ce": "reads the labels",
    **dict.fromkeys(
        ("mmce", "soft_ece", "kde_ece", "mdca", "avuc"), "couples the batch"
    ),
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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in REFUSED])
def test_value_and_gradient(name: str, reduction: str) -> None:
    logits, labels, mask = rows()
    loss = make_variant((name, {}), 7)
    wanted = loss(logits, labels.where(mask, -100), reduction=reduction)
    numbers = kept(logits, labels)
    found = loss.from_log_probs(mask=mask, reduction=reduction, **numbers)
    assert_close(found, wanted)
    assert_same(found.sum(), wanted.sum(), logits)
    halves = [
        {key: values[i] for key, values in numbers.items()}
        for i in (slice(2), slice(2, 4))
    ]
    parts = [
        loss.from_log_probs(mask=mask[i], num_items_in_batch=9, **half)
        for i, half in zip((slice(2), slice(2, 4)), halves, strict=True)
    ]
    if reduction == "sum":
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
    with pytest.raises(
        ValueError,
        match=r"log_sum_sq_probs to have a gradient for loss 'brier'.*bsce_gra",
    ):
        brier().from_log_probs(**numbers)
    wanted = bsce_gra()(
        logits, labels.where(mask, -100)
    )  # its weight is a constant to the gradient
    assert_same(bsce_gra().from_log_probs(mask=mask, **numbers), wanted, logits)
    with torch.no_grad():
        brier().from_log_probs(
            **{name: values.detach() for name, values in numbers.items()}
        )


def test_rows_that_do_not_count_may_hold_anything() -> None:
    logits, labels, mask = rows()
    log_probs = (
        kept(logits.detach(), labels)["log_probs"]
        .where(mask, torch.nan)
        .requires_grad_()
    )
    found = focal().from_log_probs(log_probs, mask=mask)
    (gradient,) = torch.autograd.grad(found, log_probs)
    assert found.isfinite()
    assert gradient.isfinite().all()
    assert not gradient[~mask].any()
    assert focal().from_log_probs(log_probs, mask=torch.zeros_like(mask)) == 0
    assert focal().from_log_probs(log_probs.bfloat16()).dtype == torch.float32


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (
        make_loss("entropy_regularized"),
        {},
        "entropy to be given for loss 'entropy_regularized', got None",
    ),
    (
        focal(),
        {"mask": torch.ones(4, 4)},
        r"mask to have the shape of log_probs, got \(4, 4\) for \(4, 5\)",
    ),
    (focal(class_weights=[1.0, 2.0]), {}, "which has class weights"),
    (focal(problem_type="multi_label_classification"), {}, "which is multi-label"),
]


@pytest.mark.parametrize(
    ("loss", "given", "message"), BAD, ids=[message for *_, message in BAD]
)
def test_bad_input(loss: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss.from_log_probs(-torch.ones(4, 5), **given)
