"""`linear_calibration_loss`: the loss of logits that are never there, with all its gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_calib.losses import AdaptiveLoss, cross_entropy, focal, linear_calibration_loss, make_loss
from tests.helpers.loss_cases import VARIANTS, variant_id
from tests.helpers.tiny import tiny_bert  # noqa: F401, one thread

SEPARABLE = [variant for variant in VARIANTS if not make_loss(variant[0], **variant[1]).couples_batch]
N, H, V = 12, 5, 37


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, generator=generator, dtype=dtype, requires_grad=True)
    bias = torch.randn(V, generator=generator, dtype=dtype, requires_grad=True)
    labels = torch.randint(V, (N,), generator=generator)
    labels[[0, 4, 5, 11]] = -100
    return hidden, weight, bias, labels


def made(variant: Any) -> Any:
    loss = make_loss(variant[0], **variant[1])
    if isinstance(loss, AdaptiveLoss):
        confidences = torch.linspace(0.01, 0.99, 99)
        loss.update(confidences, torch.arange(99) % 2, class_gaps=torch.full((V,), 0.1), progress=0.5)
    return loss


def results(value: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [value.detach(), *torch.autograd.grad(value, leaves)]


@pytest.mark.parametrize("variant", SEPARABLE, ids=variant_id)
def test_it_is_the_loss_of_the_logits(variant: Any) -> None:
    hidden, weight, bias, labels = batch()
    loss = made(variant)
    ours = results(linear_calibration_loss(hidden, weight, labels, loss, bias=bias), hidden, weight, bias)
    theirs = results(loss(hidden @ weight.T + bias, labels), hidden, weight, bias)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", [300, 3000])
def test_in_chunks(n: int) -> None:
    """Of a large vocabulary: more logits than are made at once; the last chunk is a part of one."""
    vocabulary = 9_000_000 // n
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, 2, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, 2, generator=generator, requires_grad=True)
    labels = torch.randint(vocabulary, (n,), generator=generator)
    labels[::7] = -100
    loss = cross_entropy()
    ours = results(linear_calibration_loss(hidden, weight, labels, loss), hidden, weight)
    theirs = results(loss(hidden @ weight.T, labels), hidden, weight)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "settings", [{"reduction": "sum"}, {"num_items_in_batch": 17}, {"num_items_in_batch": torch.tensor(5)}]
)
def test_the_denominator(settings: dict[str, Any]) -> None:
    hidden, weight, _, labels = batch()
    loss = focal(gamma=2.0, class_weights=torch.linspace(0.5, 2, V))
    ours = results(linear_calibration_loss(hidden, weight, labels, loss, **settings), hidden, weight)
    theirs = results(loss(hidden @ weight.T, labels, **settings), hidden, weight)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)


def test_softcap_and_temperature_have_their_gradients() -> None:
    hidden, weight, bias, labels = batch()
    t = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)

    def ours(h: Tensor, w: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        return linear_calibration_loss(h, w, labels, focal(gamma=2.0), bias=b, softcap=3.0, temperature=scale)

    def theirs(h: Tensor, w: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        return focal(gamma=2.0)(3 * torch.tanh((h @ w.T + b) / 3) / scale, labels)

    leaves = (hidden, weight, bias, t)
    for own, other in zip(results(ours(*leaves), *leaves), results(theirs(*leaves), *leaves), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)
    slopes = results(ours(*leaves), *leaves)[1:]
    for i, slope in enumerate(slopes):  # gradcheck hands the gradients out twice
        step = 1e-6 * torch.randn(slope.shape, generator=torch.Generator().manual_seed(i), dtype=slope.dtype)
        up, down = ([*leaves[:i], leaves[i] + sign * step, *leaves[i + 1 :]] for sign in (1, -1))
        numeric = (ours(*up) - ours(*down)).detach() / 2
        torch.testing.assert_close(numeric, (slope * step).sum(), rtol=1e-6, atol=1e-12)
    number = linear_calibration_loss(hidden, weight, labels, focal(), temperature=1.7)
    torch.testing.assert_close(number, focal()(hidden @ weight.T / 1.7, labels))


@pytest.mark.parametrize("frozen", ["hidden", "weight", "all"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    hidden, weight, _, labels = batch()
    for name, tensor in {"hidden": hidden, "weight": weight}.items():
        tensor.requires_grad_(frozen not in (name, "all"))
    value = linear_calibration_loss(hidden, weight, labels, focal())
    torch.testing.assert_close(value.detach(), focal()(hidden @ weight.T, labels).detach())
    if frozen == "all":
        assert not value.requires_grad
        return
    value.backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")
    with torch.no_grad():
        assert not linear_calibration_loss(hidden, weight, labels, focal()).requires_grad


def test_sequences_and_checkpointing() -> None:
    hidden, weight, _, labels = batch()
    states = hidden.detach().view(2, 6, H).requires_grad_()
    theirs = results(linear_calibration_loss(hidden, weight, labels, focal()), hidden, weight)
    ours = results(linear_calibration_loss(states, weight, labels.view(2, 6), focal()), states, weight)
    checkpointed = torch.utils.checkpoint.checkpoint(
        lambda h: linear_calibration_loss(h, weight, labels, focal()), hidden, use_reentrant=False
    )
    again = results(checkpointed, hidden, weight)
    for own, other, third in zip(ours, theirs, again, strict=True):
        torch.testing.assert_close(own.view_as(other), other)
        torch.testing.assert_close(third, other)


def test_the_gradients_are_handed_out_once_and_have_none() -> None:
    hidden, weight, _, labels = batch()
    value = linear_calibration_loss(hidden, weight, labels, focal())
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"handed out by an earlier backward pass. Call it again"):
        value.backward()
    value = linear_calibration_loss(hidden, weight, labels, focal())
    with pytest.raises(RuntimeError, match="has no gradients of gradients"):
        torch.autograd.grad(value, hidden, create_graph=True)


def test_accumulated_micro_batches_are_one() -> None:
    hidden, weight, _, labels = batch()
    items = (labels != -100).sum()
    for rows in (slice(0, 7), slice(7, N)):
        linear_calibration_loss(
            hidden[rows], weight, labels[rows], focal(), num_items_in_batch=items
        ).backward()
    ours = [hidden.grad, weight.grad]
    theirs = results(focal()(hidden @ weight.T, labels), hidden, weight)[1:]
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)


def test_16_bits_are_no_worse_than_the_logits_way() -> None:
    """The weight's gradient is summed in float32: nearer to the truth than one product in 16 bits, or as near."""
    hidden, weight, _, labels = batch(torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    truth = results(focal()(exact[0] @ exact[1].T, labels), *exact)
    ours = results(linear_calibration_loss(hidden, weight, labels, focal()), hidden, weight)
    theirs = results(focal()(hidden @ weight.T, labels), hidden, weight)
    assert ours[0].dtype == torch.float32
    assert [each.dtype for each in ours[1:]] == [torch.bfloat16] * 2
    for own, other, true in zip(ours, theirs, truth, strict=True):
        assert (own.double() - true).norm() <= 1.2 * (other.double() - true).norm() + 1e-6 * true.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    """The hidden states come in autocast's dtype from a layer before, the weight is that of a float32 model."""
    _, weight, _, labels = batch(torch.float32)
    hidden = batch(torch.float32)[0].detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = results(linear_calibration_loss(hidden, weight, labels, focal()), hidden, weight)
        theirs = results(focal()(torch.nn.functional.linear(hidden, weight), labels), hidden, weight)
    assert [each.dtype for each in ours] == [torch.float32, dtype, torch.float32]
    for own, other in zip(ours, theirs, strict=True):
        assert float((own - other).norm() / other.norm()) < 0.02


def test_edges() -> None:
    hidden, weight, _, labels = batch()
    empty = linear_calibration_loss(hidden[:0], weight, labels[:0], focal())
    assert float(empty.detach()) == 0
    ignored = results(
        linear_calibration_loss(hidden, weight, torch.full((N,), -100), focal()), hidden, weight
    )
    assert all(float(each.abs().sum()) == 0 for each in ignored)
    poisoned = hidden.detach().clone()
    poisoned[labels == -100] = torch.nan  # padding may hold anything
    poisoned.requires_grad_()
    value, slope = results(linear_calibration_loss(poisoned, weight, labels, focal()), poisoned)
    torch.testing.assert_close(value, focal()(hidden @ weight.T, labels).detach())
    assert float(slope[labels == -100].abs().sum()) == 0
    two = linear_calibration_loss(hidden, weight[:2], labels.clamp(max=1), cross_entropy())
    assert torch.isfinite(two)
    frozen = copy.deepcopy(weight.detach()).T.contiguous().T  # not contiguous
    strided = linear_calibration_loss(hidden, frozen, labels, focal())
    torch.testing.assert_close(strided, focal()(hidden @ weight.T, labels))


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a name": ({"loss": "focal"}, TypeError, "loss to be a CalibrationLoss, got 'focal'"),
    "MMCE": (
        {"loss": make_loss("mmce")},
        ValueError,
        "loss to have a value per row, got 'mmce', which couples",
    ),
    "soft ECE": ({"loss": make_loss("soft_ece")}, ValueError, "value per row, got 'soft_ece'"),
    "KDE": ({"loss": make_loss("kde_ece")}, ValueError, "value per row, got 'kde_ece'"),
    "multi-label": (
        {"loss": focal(problem_type="multi_label_classification")},
        ValueError,
        "loss to be single-label, got a multi-label 'focal'",
    ),
    "rows": ({"reduction": "none"}, ValueError, "reduction to be 'mean' or 'sum', got 'none'"),
    "dtypes": (
        {"weight": torch.zeros(V, H)},
        TypeError,
        "weight to have the float dtype of hidden, got torch.float32",
    ),
    "width": (
        {"weight": torch.zeros(V, H + 1, dtype=torch.float64)},
        ValueError,
        r"got \(12, 5\) and \(37, 6\)",
    ),
    "bias": ({"bias": torch.zeros(V + 1, dtype=torch.float64)}, ValueError, r"of a bias, \(V,\), got"),
    "labels": (
        {"labels": torch.zeros(N - 1, dtype=torch.long)},
        ValueError,
        r"integers of shape \(12,\), got \(11,\)",
    ),
    "float labels": ({"labels": torch.zeros(N)}, ValueError, "got .* torch.float32"),
    "label": ({"labels": torch.full((N,), V)}, ValueError, r"in \[0, 37\) or -100, got 37 in row 0"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap to be above 0, got 0.0"),
    "temperature": ({"temperature": -1.0}, ValueError, "temperature to be above 0, got -1.0"),
    "temperature 0": ({"temperature": torch.zeros(1)}, ValueError, "temperature to be above 0, got 0.0"),
    "two temperatures": ({"temperature": torch.ones(2)}, ValueError, r"be one number, got shape \(2,\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    changed, kind, message = BAD[case]
    hidden, weight, _, labels = batch()
    given = {"hidden": hidden, "weight": weight, "labels": labels, "loss": focal(), **changed}
    with pytest.raises(kind, match=message):
        linear_calibration_loss(**given)
