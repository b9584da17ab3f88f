"""The Triton kernels: what takes them, edge shapes, memory around them, and that they compile for GPUs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_calib.losses import focal, linear_calibration_loss, make_loss, use_triton
from hf_calib.losses.statistics import definitions, fused
from hf_calib.losses.statistics.direct import direct_statistics
from tests.helpers.loss_cases import (
    INTERPRETED,
    KERNELS,
    VARIANTS,
    make_variant,
    random_batch,
    value_and_gradient,
    variant_id,
)
from tests.helpers.places import ROOT

pytest.importorskip("triton", reason="Triton has an environment of its own: make test-kernels")
if not KERNELS:
    pytest.skip("run by make test-kernels, or on a GPU by make test-gpu", allow_module_level=True)

CE = definitions.CROSS_ENTROPY
READ_TOGETHER = (
    CE,
    definitions.Rival("mean3"),
    definitions.OtherPowers(2.0),
    definitions.Entropy(),
    definitions.MeanLogProb(),
    definitions.LogConfidence(),
    definitions.Correct(),
    definitions.Label(),
    definitions.LogitNorm(1.5),
)
# The two that need the probabilities of a row twice: the other path's.
NOT_FUSED = {
    "soft_ece-variant=dece",
    "kde_ece-kind=canonical",
    "mbls-margin=1.0",
    "mbls-margin=0.0-margin_weight=0.5",
    "mdca",
    "mdca-gamma=2.0",
}


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_which_losses_take_them(variant: Any) -> None:
    loss = make_variant(variant, 5)
    logits, _ = random_batch(4, 5)
    assert fused.takes(logits.float(), loss._reads) == (variant_id(variant) not in NOT_FUSED)


def test_they_are_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(4, 5)
    with use_triton(False):
        assert not fused.takes(logits, (CE,))
        with use_triton(True):
            assert fused.takes(logits, (CE,))
    assert fused.takes(logits, (CE,))
    assert not fused.takes(logits[:0], (CE,))
    monkeypatch.setenv("HF_CALIB_TRITON", "0")
    assert not fused.takes(logits, (CE,))


def test_where_they_do_not_run_the_other_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    logits, labels = random_batch(4, 5)
    wanted = value_and_gradient(focal(), logits.float(), labels)
    fused._works_on.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(fused, "_Found", fails)
        with pytest.warns(
            UserWarning, match=r"do not run on \w+.* \(RuntimeError: Failed to find C compiler"
        ):
            ours = value_and_gradient(focal(), logits.float(), labels)
        value_and_gradient(focal(), logits.float(), labels)  # said once
    fused._works_on.cache_clear()
    for own, want in zip(ours, wanted, strict=True):
        torch.testing.assert_close(own, want)


def test_a_full_gpu_does_not_turn_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    logits, labels = random_batch(4, 5)
    fused._works_on.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(fused, "_Found", fails)
        with pytest.raises(torch.OutOfMemoryError):
            focal()(logits, labels)
    assert fused.takes(logits, (CE,))


def compare(logits: Tensor, labels: Tensor, *, atol: float) -> None:
    """All statistics at once, and their gradients, with the plain operations in float64."""
    statistics = READ_TOGETHER
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    values = fused.FusedStatistics.apply(ours, labels, statistics)
    wanted = direct_statistics(theirs, labels, statistics)
    for statistic, value, want in zip(statistics, values, wanted, strict=True):
        torch.testing.assert_close(
            value.double(), want, rtol=1e-5, atol=atol, msg=lambda m, s=statistic: f"{s}: {m}"
        )
    generator = torch.Generator().manual_seed(1)
    total, other = 0, 0
    for statistic, value, want in zip(statistics, values, wanted, strict=True):
        if statistic.differentiable:
            slope = torch.randn(len(labels), generator=generator, dtype=torch.float64)
            total = total + (value.double() * slope).sum()
            other = other + (want * slope).sum()
    (gradient,) = torch.autograd.grad(total, ours)
    (true,) = torch.autograd.grad(other, theirs)
    assert gradient.dtype == logits.dtype
    coarse = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(logits.dtype, 1e-5)
    torch.testing.assert_close(gradient.double(), true, rtol=coarse, atol=atol * 10)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.float32) for shape in [(1, 2), (3, 2), (1, 3), (4, 1000), (2, 32001)]),
        *(((5, 7), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    ],
)
def test_shapes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits, labels = random_batch(*shape)
    compare(logits.to(dtype), labels, atol=1e-5)


def test_ties_masks_and_large_logits() -> None:
    logits, labels = random_batch(12, 9)
    logits = logits.float()
    logits[0] = 0
    logits[1, [0, 3]] = float(logits[1, 5])
    logits[2, [1, 2, 4]] = -torch.inf
    labels[2] = 0
    logits[3] = torch.tensor([1e4, -1e4, 0, 1, 2, 3, 4, 5, 6])
    labels[3] = 0
    logits[4] = logits[3]
    labels[4] = 1
    labels[[6, 7]] = -100
    logits[8, 1:] = -torch.inf
    labels[8] = 0
    for variant in VARIANTS:
        if variant_id(variant) in NOT_FUSED or variant[0] in (
            "mmce",
            "soft_ece",
            "kde_ece",
            "avuc",
            "logit_norm",
        ):
            continue
        loss = make_variant(variant, 9)
        value, gradient = value_and_gradient(loss, logits, labels, reduction="none")
        want, true = value_and_gradient(loss, logits.double(), labels, reduction="none")
        torch.testing.assert_close(value.double(), want, rtol=2e-5, atol=1e-5, msg=variant_id(variant))
        assert torch.isfinite(gradient).all(), variant_id(variant)
        # Ties share a subgradient out in their own ways; where a loss is 2e4, float32 is as coarse on every path.
        with use_triton(False):
            _, plain = value_and_gradient(loss, logits, labels, reduction="none")
        counted = labels != -100
        error, theirs = ((each.sum(1).double() - true.sum(1)).abs()[counted] for each in (gradient, plain))
        assert (error <= 2 * theirs + 1e-4).all(), variant_id(variant)


def test_ignored_rows_may_hold_anything_and_get_zeros() -> None:
    logits, labels = random_batch(6, 5)
    logits, labels[[1, 4]] = logits.float(), -100
    poisoned = logits.clone()
    poisoned[[1, 4]] = torch.nan
    for name in ("cross_entropy", "dual_focal", "brier", "entropy_regularized", "label_smoothing", "mmce"):
        value, gradient = value_and_gradient(make_loss(name), poisoned, labels)
        want, true = value_and_gradient(make_loss(name), logits, labels)
        torch.testing.assert_close(value, want)
        torch.testing.assert_close(gradient, true)
        assert not gradient[[1, 4]].any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_nan_and_infinity_are_seen() -> None:
    logits, labels = random_batch(3, 5)
    logits = logits.float()
    logits[0, 2], logits[1, 2] = torch.nan, torch.inf
    labels[1] = 0
    values = focal()(logits, labels, reduction="none")
    assert not torch.isfinite(values[:2]).any()
    assert torch.isfinite(values[2])


@pytest.mark.parametrize("label", [5, -1, -99])
def test_a_label_that_is_no_class_has_the_other_paths_error(label: int) -> None:
    logits, labels = random_batch(6, 5)
    labels[3] = label
    with pytest.raises(ValueError, match=rf"labels to be in \[0, 5\) or -100, got {label} in row 3"):
        focal()(logits.float(), labels)


def test_runs_are_the_same_to_the_bit() -> None:
    logits, labels = random_batch(8, 50)
    for name in ("focal", "dual_focal", "brier"):
        first, again = (value_and_gradient(make_loss(name), logits.float(), labels) for _ in range(2))
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_the_gradient_of_a_statistic_alone() -> None:
    """Without a slope for the cross entropy, which every loss has."""
    logits, labels = random_batch(6, 5)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    statistics = (CE, definitions.Entropy())
    fused.FusedStatistics.apply(ours, labels, statistics)[1].sum().backward()
    direct_statistics(theirs, labels, statistics)[1].sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_nothing_else_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each buffer lies between guards of a number that nothing computes."""
    guards: list[Tensor] = []

    def guarded(size: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
        n = torch.Size(size).numel()
        whole = torch.full((n + 128,), 77, dtype=dtype, device=device)
        guards.append(whole)
        return whole[64 : 64 + n].view(size)

    def new_empty(self: Tensor, size: Any, dtype: Any = None, device: Any = None) -> Tensor:
        shape = (size,) if isinstance(size, int) else tuple(size)
        return guarded(shape, dtype or self.dtype, device or self.device)

    def empty_like(like: Tensor, **_: Any) -> Tensor:
        return guarded(tuple(like.shape), like.dtype, like.device)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty_like", empty_like)
    logits, labels = random_batch(5, 37)
    labels[2] = -100
    leaf = logits.float().requires_grad_()
    values = fused.FusedStatistics.apply(leaf, labels, READ_TOGETHER)
    torch.autograd.grad(sum(value.sum() for value in values if value.requires_grad), leaf)
    assert len(guards) > 10
    for whole in guards:
        assert (whole[:64] == 77).all()
        assert (whole[-64:] == 77).all()


@pytest.mark.skipif(
    not INTERPRETED, reason="its storage is on the CPU, and a GPU's would be 4 GiB of real memory"
)
def test_rows_and_columns_beyond_2_31_elements() -> None:
    """Of a storage of which nothing but the few numbers that are read is ever touched."""
    whole = torch.empty(2**31 + 2**29, dtype=torch.bfloat16)
    far_rows = whole.as_strided((2, 5), (2**31 + 7, 1))
    far_columns = whole.as_strided((3, 6), (1, 2**29 - 1))
    for logits in (far_rows, far_columns):
        generator = torch.Generator().manual_seed(0)
        logits.copy_(torch.randn(logits.shape, generator=generator))
        labels = torch.arange(len(logits))
        own = value_and_gradient(make_loss("dual_focal"), logits.contiguous(), labels)
        leaf = logits.detach().requires_grad_()
        value = make_loss("dual_focal")(leaf, labels)
        (gradient,) = torch.autograd.grad(value, leaf)
        assert torch.equal(value.detach(), own[0])
        assert torch.equal(gradient, own[1])


def test_the_linear_loss_takes_them() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, generator=generator, requires_grad=True) for n in (9, 31))
    labels = torch.randint(31, (9,), generator=generator)
    ours = linear_calibration_loss(hidden, weight, labels, focal())
    slopes = torch.autograd.grad(ours, (hidden, weight))
    with use_triton(False):
        theirs = linear_calibration_loss(hidden, weight, labels, focal())
        wanted = torch.autograd.grad(theirs, (hidden, weight))
    for own, other in zip((ours, *slopes), (theirs, *wanted), strict=True):
        torch.testing.assert_close(own, other)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_calib.losses.statistics import kernels
import triton.language as tl

CONSTANTS = ("POWER", "ENTROPY", "MEAN", "NORM", "PREDICTED", "RIVALS", "BELOW", "BLOCK", "WIDE")
INTEGERS = ("labels", "predicted_out", "rival_index_out", "predicted_in", "rival_index_in")

def kind(name, logits, wide):
    if name in CONSTANTS: return "constexpr"
    if name in ("stride_n", "stride_c"): return "i64"
    if name == "n_cols": return "i32"
    if name in INTEGERS: return "*i64"
    return logits if name in ("logits", "gradient") else wide

ALL = dict(POWER=2.0, ENTROPY=True, MEAN=True, NORM=1.5, PREDICTED=True, RIVALS=3, BELOW=True)
NONE = dict(POWER=0.0, ENTROPY=False, MEAN=False, NORM=0.0, PREDICTED=False, RIVALS=0, BELOW=False)
MIXED = dict(POWER=1.5, ENTROPY=False, MEAN=False, NORM=1.0, PREDICTED=False, RIVALS=1, BELOW=False)
# Each dtype, each set of flags and each size of a block, one after the other: all together are half a minute.
CASES = [(logits, ALL, 1024, 2) for logits in ("*fp32", "*bf16", "*fp16", "*fp64")]
CASES += [("*fp32", NONE, 1024, 2), ("*fp32", MIXED, 1024, 2), ("*fp32", ALL, 2, 1), ("*fp64", ALL, 4096, 8)]
n = 0
for logits, flags, block, warps in CASES:
    wide, dtype = ("*fp64", tl.float64) if logits == "*fp64" else ("*fp32", tl.float32)
    for kernel in (kernels.forward_kernel, kernels.backward_kernel):
        given = {**flags, "BLOCK": block, "WIDE": dtype}
        source = ASTSource(
            kernel,
            signature={name: kind(name, logits, wide) for name in kernel.arg_names},
            constexprs={(kernel.arg_names.index(name),): value for name, value in given.items()},
        )
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        assert made.asm["ptx"]
        n += 1
print(n)
"""


def test_they_compile_for_a_gpu() -> None:
    """By the real compiler, which needs none; the interpreter is laxer about types."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": "/tmp"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "16"
