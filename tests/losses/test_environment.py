"""The losses where they are used: compiled, under autocast, checkpointed, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from hf_calib.losses import LOSSES, make_loss
from tests.helpers.loss_cases import (
    BOTH_ENDS,
    VARIANTS,
    Variant,
    make_variant,
    random_batch,
    take_path,
    value_and_gradient,
    variant_id,
)

EXACT = {"rtol": 1e-12, "atol": 1e-12}


# One loss of each kind of weight, penalty and table.
COMPILED = {
    "focal",
    "dual_focal",
    "bsce_gra",
    "entropy_regularized",
    "ece_ce",
    "mmce",
    "soft_ece",
    "kde_ece",
    "mbls",
}


class TestCompile:
    """Traced as one graph; without code generation, which takes minutes on two cores."""

    @pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=pytest.mark.slow if name in COMPILED else pytest.mark.deep)
            for name in LOSSES
        ],
    )
    def test_one_graph_same_result(self, name: str) -> None:
        torch.compiler.reset()
        loss = make_variant((name, {}), 5)
        logits, labels = random_batch(12, 5)
        labels[3] = -100
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        want = value_and_gradient(loss, logits, labels)
        assert_close(value_and_gradient(compiled, logits, labels), want, **EXACT)

    @pytest.mark.slow
    def test_the_compiled_loss_follows_an_update(self) -> None:
        torch.compiler.reset()
        loss = make_loss("adafocal")
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        logits, labels = random_batch(12, 5)
        for _ in range(3):
            loss.update(torch.linspace(0.01, 0.99, 50), torch.zeros(50))
            assert_close(compiled(logits, labels), loss(logits, labels), **EXACT)


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_autocast_changes_nothing(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    take_path(monkeypatch, BOTH_ENDS[-1])
    loss = make_variant(variant, 5)
    logits, labels = random_batch(12, 5)
    logits = logits.to(torch.bfloat16)
    want = value_and_gradient(loss, logits, labels)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(value_and_gradient(loss, logits, labels), want, rtol=1e-6, atol=1e-6)


def test_autocast_of_the_model_is_left_on() -> None:
    layer = nn.Linear(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = make_loss("mmce")(layer(torch.randn(5, 4)), torch.tensor([0, 1, 2, 0, 1]))
        assert torch.is_autocast_enabled("cpu")
    loss.backward()
    assert loss.dtype == torch.float32
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("path", BOTH_ENDS)
@pytest.mark.parametrize("name", ["focal", "dual_focal", "mmce"])
def test_checkpointed(name: str, path: str, use_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    take_path(monkeypatch, path)
    loss = make_loss(name)
    logits, labels = random_batch(12, 5)

    def checkpointed(logits: Tensor, labels: Tensor) -> Tensor:
        return checkpoint(lambda z: loss(2 * z, labels), logits, use_reentrant=use_reentrant)

    want = value_and_gradient(lambda z, y: loss(2 * z, y), logits, labels)
    assert_close(value_and_gradient(checkpointed, logits, labels), want, **EXACT)


def peak_memory(run: Callable[[], None]) -> int:
    """Most bytes that PyTorch holds at once on the CPU while the function runs, beside what it holds before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        run()
    sizes = [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return int(torch.tensor(sizes).cumsum(0).max())


def backward_memory(name: str, n: int, c: int, dtype: torch.dtype, **hyperparameters: str) -> float:
    """Peak memory of forward and backward, in units of the logits'."""
    logits = torch.randn(n, c, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    labels = torch.arange(n) % c
    loss = make_loss(name, **hyperparameters)
    return peak_memory(lambda: loss(logits, labels).backward()) / logits.nbytes


class TestMemory:
    @pytest.mark.parametrize(
        ("name", "dtype"),
        [
            *((name, torch.float32) for name in ("focal", "dual_focal", "focal_calibration", "mmce")),
            ("focal_calibration", torch.bfloat16),
        ],
    )
    def test_large_logits_need_their_gradient_only(self, name: str, dtype: torch.dtype) -> None:
        """And buffers of a block or two: of 2^18 float32, here 3% of the logits, or 6% of 16-bit ones."""
        limit = 1.05 if dtype == torch.float32 else 1.25
        assert 1.0 <= backward_memory(name, 2048, 4000, dtype) < limit

    def test_what_it_is_measured_against(self) -> None:
        logits = torch.randn(2048, 4000, requires_grad=True)
        labels = torch.zeros(2048, dtype=torch.long)
        peak = peak_memory(lambda: nn.functional.cross_entropy(logits, labels).backward())
        assert peak / logits.nbytes == pytest.approx(3.0, abs=0.01)

    def test_a_kernel_density_looks_at_pairs_of_confidences(self) -> None:
        """A few (N, N) matrices, never (N, N, C)."""
        n, c = 256, 200
        in_pairs = backward_memory("kde_ece", n, c, torch.float32) * c / n
        assert in_pairs < 6

    def test_a_canonical_kernel_density_adds_matrices_like_the_logits(self) -> None:
        n, c = 256, 200
        of_logits = backward_memory("kde_ece", n, c, torch.float32, kind="canonical")
        assert of_logits < 6 * n / c + 12
