"""The losses where they are used: compiled, under autocast, in bounded memory, of a language model's output."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import CausalLMOutput, TokenClassifierOutput

from hf_calib.losses import LOSSES, make_loss
from tests.helpers.loss_cases import (
    EXACT,
    Variant,
    every_variant,
    make_variant,
    random_batch,
    value_and_gradient,
    wide_when_slow,
)

# One loss of each kind of weight, penalty and table; the others once a week.
COMPILED = {"focal", "dual_focal", "bsce_gra", "entropy_regularized", "ece_ce", "mbls"}
COMPILED |= {"mmce", "soft_ece", "kde_ece"}
MARKED = [
    pytest.param(name, marks=pytest.mark.slow if name in COMPILED else pytest.mark.deep)
    for name in LOSSES
]


@pytest.mark.parametrize("name", MARKED)
def test_one_graph_same_result(name: str) -> None:
    """Traced as one graph; without code generation, which takes minutes on two cores."""
    torch.compiler.reset()
    loss = make_variant((name, {}), 5)
    logits, labels = random_batch(12, 5)
    labels[3] = -100
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    want = value_and_gradient(loss, logits, labels)
    assert_close(value_and_gradient(compiled, logits, labels), want, **EXACT)


@wide_when_slow
@every_variant
def test_autocast_changes_nothing(variant: Variant, width: int) -> None:
    loss = make_variant(variant, width)
    logits, labels = random_batch(12, width)
    logits = logits.to(torch.bfloat16)
    want = value_and_gradient(loss, logits, labels)
    # In a backward pass under autocast, which PyTorch advises against, products of matrices are of 16 bits.
    tolerance = 1e-3 if variant[0] == "kde_ece" else 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(
            value_and_gradient(loss, logits, labels), want, rtol=1e-6, atol=tolerance
        )


def backward_memory(
    name: str, n: int, c: int, dtype: torch.dtype, **hyperparameters: str
) -> float:
    """The most that PyTorch holds at once on the CPU in forward and backward beside the logits, in units of theirs."""
    logits = (
        torch.randn(n, c, generator=torch.Generator().manual_seed(0))
        .to(dtype)
        .requires_grad_()
    )
    loss, labels = make_loss(name, **hyperparameters), torch.arange(n) % c
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=cpu, profile_memory=True, acc_events=True
    ) as profiler:
        loss(logits, labels).backward()
    sizes = [
        e.nbytes()
        for e in profiler.profiler.kineto_results.events()
        if e.name() == "[memory]"
    ]
    return int(torch.tensor(sizes).cumsum(0).max()) / logits.nbytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dual_focal", "focal_calibration", "mmce", "focal_calibration in 16 bits"]
)
def test_large_logits_need_their_gradient_only(name: str) -> None:
    """And buffers of a block or two: of 2^18 float32, here 3% of the logits, or 6% of 16-bit ones.

    Of `F.cross_entropy` it is 3.0 times the logits.
    """
    loss, _, in_16_bits = name.partition(" ")
    dtype, limit = (torch.bfloat16, 1.25) if in_16_bits else (torch.float32, 1.05)
    assert 1.0 <= backward_memory(loss, 2048, 4000, dtype) < limit


LOGITS = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(10).view(2, 5) % 7


def test_labels_of_a_language_model_that_were_not_shifted_are_warned_of() -> None:
    loss = make_loss("focal")
    with pytest.warns(
        UserWarning,
        match=r"learns to copy its input\. Use CalibrationTrainer, which shifts",
    ):
        assert loss(CausalLMOutput(logits=LOGITS), LABELS) == loss(LOGITS, LABELS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(TokenClassifierOutput(logits=LOGITS), LABELS)
        loss(CausalLMOutput(logits=LOGITS).logits[:, :-1], LABELS[:, 1:])


class Operations(TorchDispatchMode):
    """Count PyTorch's operations, or only those that compute: without views, copies of none and new memory."""

    FREE = ("alias", "as_strided", "detach", "empty", "expand", "select", "slice")
    FREE += ("split", "squeeze", "t.", "transpose", "unbind", "unsqueeze", "view")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(function).removeprefix("aten."))
        return function(*args, **(kwargs or {}))

    def computing(self) -> list[str]:
        return [name for name in self.names if not name.startswith(self.FREE)]


@pytest.mark.parametrize(
    ("name", "most"), [("cross_entropy", 11), ("focal", 19), ("focal_gra", 17)]
)
def test_operations_of_a_small_batch(name: str, most: int) -> None:
    """Forward and backward; `F.cross_entropy` takes 8. Each costs microseconds, of few rows more than the numbers."""
    logits, labels = random_batch(32, 4)
    leaf, loss = logits.float().requires_grad_(), make_loss(name)
    with Operations() as operations:
        loss(leaf, labels).backward()
    assert len(operations.names) <= most


MOST = {"cross_entropy": 12, "focal": 22, "dual_focal": 33, "flsd": 27, "brier": 27}
MOST |= {"adafocal": 27, "focal_calibration": 35, "bsce": 35, "mmce": 65}


@pytest.mark.parametrize("name", MOST)
def test_operations_of_a_batch_on_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without looks at numbers, which are cheap on the CPU only. Each is a launch, whose time is that of the loss."""
    monkeypatch.setattr("hf_calib.losses.loss.FEW_ROWS", 0)
    monkeypatch.setattr("hf_calib.losses.engine.is_one", lambda slope: False)
    monkeypatch.setattr("hf_calib.losses.loss.all_count", lambda weights: False)
    logits, labels = random_batch(128, 10)
    leaf, loss = logits.float().requires_grad_(), make_loss(name)
    loss(leaf, labels).backward()
    with Operations() as operations:
        loss(leaf, labels).backward()
    # The gradient is added to the one of the first call.
    computing = operations.computing()
    assert computing.count("add_.Tensor") == 1
    assert len(computing) - 1 <= MOST[name], computing
