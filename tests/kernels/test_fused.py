"""The Triton kernels: what takes them, values and gradients, edge shapes, memory; that they compile for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hf_calib.losses import focal, make_loss
from hf_calib.losses.statistics import fused
from hf_calib.losses.statistics.definitions import RIVALS
from tests.helpers.loss_cases import (
    VARIANTS,
    Variant,
    by_formula,
    make_variant,
    random_batch,
    value_and_gradient,
    variant_id,
)
from tests.helpers.places import ROOT
from tests.losses.test_environment import Operations
from tests.losses.test_formulas import ALL, extreme_rows

pytest.importorskip(
    "triton", reason="Triton has an environment of its own: make test-kernels"
)
from hf_calib.losses.statistics import kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if os.environ.get("HF_CALIB_TESTS_ON") == "cuda" else "cpu"
if not INTERPRETED and DEVICE == "cpu":
    pytest.skip(
        "run by make test-kernels, or on a GPU by make test-gpu",
        allow_module_level=True,
    )

# These couple the batch: the other path's.
COUPLED = ("mdca", "mmce", "soft_ece", "kde_ece", "avuc", "ece_ce")
# So are statistics that few users read: distances, other rivals than the next one, other norms than the sum.
RARE = [v for v in VARIANTS if v[0] == "mbls" and v[1].get("margin_weight") != 0]
RARE += [("dual_focal", {"rival": rival}) for rival in RIVALS if rival != "next"]
RARE += [("logit_norm", {"p": p}) for p in (1.5, 2, 3)]
FUSED = [v for v in VARIANTS if v[0] not in COUPLED and v not in RARE]
SOME = (
    "cross_entropy",
    "dual_focal",
    "brier",
    "entropy_regularized",
    "label_smoothing",
    "logit_norm",
)


def batch(n: int, c: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Of the same rounded logits whatever the dtype."""
    logits, labels = random_batch(n, c)
    return logits.to(torch.bfloat16).to(DEVICE, dtype), labels.to(DEVICE)


def by_the_other_path(loss: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_CALIB_TRITON", "0")
        return value_and_gradient(loss, *args, **kwargs)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the losses are told when they ask for the kernels."""
    answers: list[bool] = []
    rule = fused.takes

    def takes(*args: Any) -> bool:
        answers.append(rule(*args))
        return answers[-1]

    monkeypatch.setattr(fused, "takes", takes)
    return answers


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_which_losses_take_them(variant: Variant, asked: list[bool]) -> None:
    loss = make_variant(variant, 5).to(DEVICE)
    loss(*batch(4, 5))
    by_the_other_path(loss, *batch(4, 5))
    assert asked == [variant in FUSED, False]


# Of a row at once, and in blocks of its columns.
@pytest.mark.parametrize("width", [2, 5, 9000])
@pytest.mark.parametrize("variant", FUSED, ids=variant_id)
def test_value_and_gradient_are_those_of_the_formula(
    variant: Variant, width: int
) -> None:
    """Of 16 bits the numbers are those of float32, and the gradient is rounded once."""
    logits, labels = batch(12, width)
    labels[[4, 9]] = -100
    loss = make_variant(variant, width).to(DEVICE)
    value, gradient = value_and_gradient(loss, logits, labels)
    wanted, true = value_and_gradient(
        by_formula(variant, loss), logits.double(), labels
    )
    assert_close(value.double(), wanted, rtol=1e-5, atol=1e-5)
    assert_close(gradient.double(), true, rtol=1e-4, atol=1e-6)
    assert not gradient[[4, 9]].any()
    for dtype in (torch.bfloat16, torch.float16) if width == 5 else ():
        same, rounded = value_and_gradient(loss, logits.to(dtype), labels)
        assert same.dtype == torch.float32
        assert_close(same, value)
        assert_close(
            rounded, gradient.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-7
        )


def test_where_they_do_not_run_the_other_path_is_taken(
    monkeypatch: pytest.MonkeyPatch, asked: list[bool]
) -> None:
    """A full GPU says nothing of Triton, and does not turn them off."""
    wanted = value_and_gradient(focal(), *batch(4, 5))

    def fails(*_: Any) -> Any:
        raise error

    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Failed to find C compiler"),
    ):
        fused._works_on.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(fused, "KernelRows", fails)
            if isinstance(error, torch.OutOfMemoryError):
                with pytest.raises(torch.OutOfMemoryError):
                    focal()(*batch(4, 5))
                continue
            with pytest.warns(
                UserWarning,
                match=r"do not run on \w+.* \(RuntimeError: Failed to find C compiler",
            ):
                assert_close(value_and_gradient(focal(), *batch(4, 5)), wanted)
            assert_close(value_and_gradient(focal(), *batch(4, 5)), wanted)  # said once
    assert asked == [True, False, False]
    fused._works_on.cache_clear()


@pytest.mark.parametrize("variant", FUSED, ids=variant_id)
def test_ties_masks_and_large_logits(variant: Variant) -> None:
    logits, labels = batch(9, 9)
    logits[0] = 0
    logits[1, [0, 3]] = float(logits[1, 5])
    logits[2, [1, 2, 4]] = -torch.inf
    logits[3:5] = torch.tensor([1e4, -1e4, 0, 1, 2, 3, 4, 5, 6])
    logits[8, 1:] = -torch.inf
    labels[[2, 3, 8]], labels[4], labels[[6, 7]] = 0, 1, -100
    loss = make_variant(variant, 9).to(DEVICE)
    value, gradient = value_and_gradient(loss, logits, labels, reduction="none")
    wanted, plain = by_the_other_path(loss, logits, labels, reduction="none")
    assert_close(value, wanted, rtol=2e-5, atol=1e-5)
    assert gradient.isfinite().all()
    # Ties share a subgradient out in their own ways; where a loss is 2e4, float32 is coarse.
    scale = wanted.abs().clamp_min(1)
    assert (((gradient - plain).sum(1)).abs() <= 1e-4 * scale).all()


EXTREME = [v for v in ALL if v in FUSED or (v not in VARIANTS and v[0] != "mdca")]
ONE_LAUNCH = sorted({name for name, _ in EXTREME if (name, {}) in FUSED})


@pytest.mark.parametrize("variant", EXTREME, ids=variant_id)
def test_extreme_rows_are_as_near_to_float64_as_the_other_path(
    variant: Variant,
) -> None:
    """Which of two rivals that tie has the gradient is not defined, so those of a row are sorted."""
    logits, labels = extreme_rows()
    logits, labels = logits.float().to(DEVICE), labels.to(DEVICE)
    loss = make_variant(variant, 5).to(DEVICE)
    own = value_and_gradient(loss, logits, labels, reduction="none")
    other = by_the_other_path(loss, logits, labels, reduction="none")
    wanted = value_and_gradient(loss, logits.double(), labels, reduction="none")
    for found, plain, true in zip(own, other, wanted, strict=True):
        found, plain, true = (
            each.sort(-1)[0].double() for each in (found, plain, true)
        )
        is_infinite = true.isinf()
        assert torch.equal(found[is_infinite], true[is_infinite])
        found, plain, true = (each[~is_infinite] for each in (found, plain, true))
        allowed = 2 * (plain - true).abs() + 1e-5 * (1 + true.abs())
        assert ((found - true).abs() <= allowed).all()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched, and do nothing."""
    names: list[str] = []
    for name in ("forward_kernel", "backward_kernel"):
        grid = defaultdict(lambda name=name: lambda *_, **__: names.append(name))
        monkeypatch.setattr(kernels, name, grid)
    monkeypatch.setattr("hf_calib.losses.loss.FEW_ROWS", 0)
    monkeypatch.setattr("hf_calib.losses.loss.all_count", lambda weights: False)
    monkeypatch.setattr("hf_calib.losses.engine.is_one", lambda slope: False)
    return names


@pytest.mark.parametrize("name", ONE_LAUNCH)
def test_one_launch_and_few_operations(name: str, launches: list[str]) -> None:
    """Without looks at numbers, which are cheap on the CPU only, as on a GPU."""
    for dtype, most in ((torch.float32, 1), (torch.bfloat16, 2)):
        logits, labels = batch(128, 10, dtype)
        leaf, loss = logits.requires_grad_(), make_loss(name).to(DEVICE)
        loss(leaf, labels).backward()
        launches.clear()
        with Operations() as operations:
            loss(leaf, labels).backward()
        # The gradient is added to the one of the first call.
        computing = operations.computing()
        assert computing.count("add_.Tensor") == 1
        memory = computing.count("new_empty.default")
        assert len(computing) - 1 - memory <= 9, computing
        assert len(launches) <= most


def test_a_second_backward_pass_and_parts_of_larger_tensors() -> None:
    """Strided logits, labels and slopes; the kernel makes the gradient again, with the slope in its shares."""
    logits, labels = batch(12, 20)
    for name in SOME:
        for z, y in (
            (logits[::2, ::2], labels[::2] % 10),
            (logits.T, labels[:1].expand(20) % 12),
        ):
            leaf = z.detach().requires_grad_()
            wanted = value_and_gradient(make_loss(name), z.double(), y)
            value = make_loss(name)(leaf, y)
            (first,) = torch.autograd.grad(3 * value, leaf, retain_graph=True)
            (second,) = torch.autograd.grad(3 * value, leaf)
            assert_close(value.double().detach(), wanted[0], rtol=1e-5, atol=1e-6)
            assert_close(first, second)
            assert_close(second.double(), 3 * wanted[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SOME)
def test_ignored_rows_may_hold_anything_and_runs_are_the_same_to_the_bit(
    name: str,
) -> None:
    logits, labels = batch(6, 5)
    labels[[1, 4]] = -100
    poisoned = logits.clone()
    poisoned[[1, 4]] = torch.nan
    one, other = (
        value_and_gradient(make_loss(name), z, labels) for z in (poisoned, logits)
    )
    assert all(map(torch.equal, one, other))
    assert not one[1][[1, 4]].any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_nan_and_infinity_are_seen() -> None:
    logits, labels = batch(3, 5)
    logits[0, 2], logits[1, 2] = torch.nan, torch.inf
    labels[1] = 0
    values = focal()(logits, labels, reduction="none")
    assert values.isfinite().tolist() == [False, False, True]


@pytest.mark.skipif(
    not INTERPRETED, reason="on a GPU an assertion of the device ends the process"
)
@pytest.mark.parametrize("label", [5, -1, -99])
def test_a_label_that_is_no_class_has_the_other_paths_error(label: int) -> None:
    logits, labels = batch(6, 5)
    labels[3] = label
    with pytest.raises(
        ValueError, match=rf"labels to be in \[0, 5\) or -100, got {label} in row 3"
    ):
        focal()(logits, labels)


def test_nothing_else_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each buffer lies between guards of a number that nothing computes."""
    guards: list[Tensor] = []

    def guarded(size: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
        n = torch.Size(size).numel()
        whole = torch.full((n + 128,), 77, dtype=dtype, device=device)
        guards.append(whole)
        return whole[64 : 64 + n].view(size)

    def new_empty(
        self: Tensor, *size: int, dtype: Any = None, device: Any = None
    ) -> Tensor:
        return guarded(size, dtype or self.dtype, device or self.device)

    def empty_like(like: Tensor, **_: Any) -> Tensor:
        return guarded(tuple(like.shape), like.dtype, like.device)

    logits, labels = batch(5, 37)
    labels[2] = -100
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty_like", empty_like)
    for name in SOME:
        for dtype in (torch.float32, torch.bfloat16):
            leaf = logits.to(dtype).requires_grad_()
            torch.autograd.grad(make_loss(name)(leaf, labels), leaf)
    assert len(guards) > 30
    for whole in guards:
        assert (whole[:64] == 77).all()
        assert (whole[-64:] == 77).all()


@pytest.mark.skipif(
    not INTERPRETED,
    reason="its storage is on the CPU, and a GPU's would be 4 GiB of real memory",
)
def test_rows_and_columns_beyond_2_31_elements() -> None:
    """Of a storage of which nothing but the few numbers that are read is ever touched."""
    whole = torch.empty(2**31 + 2**29, dtype=torch.bfloat16)
    far_rows = whole.as_strided((2, 5), (2**31 + 7, 1))
    far_columns = whole.as_strided((3, 6), (1, 2**29 - 1))
    for logits in (far_rows, far_columns):
        logits.copy_(random_batch(*logits.shape)[0])
        labels = torch.arange(len(logits))
        own = value_and_gradient(make_loss("dual_focal"), logits.contiguous(), labels)
        leaf = logits.detach().requires_grad_()
        value = make_loss("dual_focal")(leaf, labels)
        (gradient,) = torch.autograd.grad(value, leaf)
        assert torch.equal(value.detach(), own[0])
        assert torch.equal(gradient, own[1])


COMPILE = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_calib.losses import LOSSES, make_loss
from hf_calib.losses.statistics import kernels
from hf_calib.losses.statistics.fused import constants_of, formula_of, kind_of

TYPES = dict(stride_n="i64", stride_c="i64", labels="*i64", is_right="*i64", n_cols="i32", n_edges="i32")
TYPES |= dict(stride_slope="i64")

def compile(kernel, flags, logits="*fp32"):
    warps = flags["num_warps"]
    flags = {name: flags[name] for name in kernel.arg_names if name in flags}
    types = {**TYPES, **dict.fromkeys(flags, "constexpr"), "logits": logits, "gradient": logits}
    source = ASTSource(
        kernel,
        signature={name: types.get(name, "*fp32") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in flags.items()},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert made.asm["ptx"]
    print(kernel.__name__)

ONE_OF_EACH_KIND = ("cross_entropy", "entropy_regularized", "dual_focal", "label_smoothing", "logit_norm", "bsce")
losses = [make_loss(name) for name in LOSSES]
losses += [make_loss("dual_focal", rival=0.1), make_loss("label_smoothing", smoothing=1.0)]
for loss in losses:
    if loss.row_formula is None or None in map(kind_of, loss.reads): continue
    formula = formula_of(loss.row_formula, loss.reads, loss.arguments(torch.ones(1)))
    own = dict(FORMULA=formula, HAS_NUMBER=bool(loss.reads), GRADIENT=True, KEEPS=False)
    compile(kernels.forward_kernel, {**constants_of(loss.reads, 10), **own})
    if loss.name not in ONE_OF_EACH_KIND: continue
    # Each dtype and each size of a block.
    compile(kernels.backward_kernel, constants_of(loss.reads, 10))
    for logits, width in (("*bf16", 1000), ("*fp16", 100_000)):
        own = dict(FORMULA=formula, HAS_NUMBER=bool(loss.reads), GRADIENT=False, KEEPS=True)
        compile(kernels.forward_kernel, {**constants_of(loss.reads, width), **own}, logits)
        compile(kernels.backward_kernel, constants_of(loss.reads, width), logits)
"""


def test_they_compile_for_a_gpu() -> None:
    """Every formula by the real compiler, which needs none; the interpreter is laxer about types."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": "/tmp"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = done.stdout.split()
    assert made.count("forward_kernel") == len(ONE_LAUNCH) + 2 + 2 * 8
    assert made.count("backward_kernel") == 3 * 8


@pytest.mark.parametrize("name", ["focal", "dual_focal"])
def test_labels_changed_before_the_backward_pass_are_an_error(name: str) -> None:
    """The gradient is made there in 16 bits."""
    logits, labels = batch(6, 5, torch.bfloat16)
    labels = labels.clone()
    value = make_loss(name)(logits.requires_grad_(), labels)
    labels.add_(1).remainder_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
