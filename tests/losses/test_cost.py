"""What a loss costs, and what can be done with it: operations, all kinds of derivatives, copies, odd labels."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from hf_calib.losses import LOSSES, cross_entropy, focal, make_loss
from tests.helpers.loss_cases import make_variant, random_batch, value_and_gradient

# Of few logits, which take plain operations, and of many, which take blocks.
SIZES = [(6, 5), (40, 9000)]
SOME = ["cross_entropy", "focal", "dual_focal", "bsce_gra", "focal_calibration", "adafocal", "power"]


class Operations(TorchDispatchMode):
    """Count PyTorch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "most"), [("cross_entropy", 10), ("focal", 16), ("focal_gra", 32)])
def test_operations_of_a_small_batch(name: str, most: int) -> None:
    """Forward and backward; `F.cross_entropy` takes 8. Each costs microseconds, of few rows more than the numbers."""
    loss = make_loss(name)
    logits, labels = random_batch(32, 4)
    leaf = logits.float().requires_grad_()
    with Operations() as operations:
        loss(leaf, labels).backward()
    assert operations.count <= most


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SOME)
def test_second_derivatives_at_every_size(name: str, size: tuple[int, int]) -> None:
    """A Hessian times a vector, by a double backward: against differences of gradients, where the loss is its own."""
    loss = make_variant((name, {}), size[1])
    logits, labels = random_batch(*size)
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, labels), leaf, create_graph=True)
    (product,) = torch.autograd.grad(gradient, leaf, direction)
    step = 1e-6
    ends = [value_and_gradient(loss, logits + sign * step * direction, labels)[1] for sign in (1, -1)]
    if name != "bsce_gra":  # whose gradient is not that of its value
        assert_close(product, (ends[0] - ends[1]) / (2 * step), rtol=1e-4, atol=1e-7)
    assert_close(gradient.detach(), value_and_gradient(loss, logits, labels)[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SOME)
def test_torch_func_at_every_size(name: str, size: tuple[int, int]) -> None:
    loss = make_variant((name, {}), size[1])
    logits, labels = random_batch(*size)
    wanted = value_and_gradient(loss, logits, labels, reduction="sum")[1]
    of_batch = torch.func.grad(lambda z: loss(z, labels, reduction="sum"))(logits)
    assert_close(of_batch, wanted, rtol=1e-10, atol=1e-12)

    def of_row(row: Tensor, label: Tensor) -> Tensor:
        return loss(row[None], label[None])

    assert_close(torch.vmap(torch.func.grad(of_row))(logits, labels), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_copies(name: str) -> None:
    """By pickle, `copy.deepcopy` and `torch.save`: another module with the same values."""
    loss = make_variant((name, {}), 5, class_weights=[1.0, 2.0, 0.5, 1.0, 3.0])
    file = io.BytesIO()
    torch.save(loss, file)
    file.seek(0)
    copies = [pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss), torch.load(file, weights_only=False)]
    batch = random_batch(9, 5)
    for each in copies:
        assert each is not loss
        assert repr(each) == repr(loss)
        assert torch.equal(each(*batch), loss(*batch))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [name for name in LOSSES if not make_loss(name).couples_batch])
def test_a_masked_label(name: str, size: tuple[int, int]) -> None:
    """Its row has a finite gradient, at most that of cross entropy times the weight; the others' are as without it."""
    loss = make_variant((name, {}), size[1])
    logits, labels = random_batch(*size)
    logits[1, labels[1]] = -torch.inf
    value, gradient = value_and_gradient(loss, logits, labels, reduction="sum")
    assert not value.isnan()
    assert gradient.isfinite().all()
    if name != "ece_ce":  # which goes by the rank within the batch
        rest = torch.arange(size[0]) != 1
        alone = value_and_gradient(loss, logits[rest], labels[rest], reduction="sum")[1]
        assert_close(gradient[rest], alone, rtol=1e-10, atol=1e-12)


class TestSoftLabels:
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.5, 0.0, -1.0]])
    shares = torch.tensor([[0.7, 0.1, 0.2], [0.2, 0.3, 0.5]])

    def test_of_one_softmax_are_refused(self) -> None:
        message = (
            "rows that sum to 1; F.cross_entropy takes probabilities of one softmax; for a sigmoid per class"
        )
        for loss in (cross_entropy(), focal()):
            with pytest.raises(ValueError, match=message):
                loss(self.logits, self.shares)

    def test_of_sigmoids_are_named_by_the_problem_type(self) -> None:
        loss = cross_entropy(problem_type="multi_label_classification")
        wanted = F.binary_cross_entropy_with_logits(self.logits, self.shares)
        assert_close(loss(self.logits, self.shares), wanted)

    def test_rows_with_one_label_each_are_multi_label(self) -> None:
        hot = torch.eye(3)[:2]
        wanted = F.binary_cross_entropy_with_logits(self.logits, hot)
        assert_close(cross_entropy()(self.logits, hot), wanted)
