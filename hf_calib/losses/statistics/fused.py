"""Losses of single rows by Triton kernels, on a GPU if Triton is installed,
as with PyTorch's CUDA builds.

One launch gives value and gradient: the source of the loss's formula is compiled into the kernel,
with Triton's arithmetic in place of `arithmetic`. Losses that couple the batch take PyTorch's
operations, as do statistics that few users read: other rivals than the next one, and other norms of
the logits than the sum.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_calib._errors import printable
from hf_calib.losses.arithmetic import Table, look_up, power_of
from hf_calib.losses.statistics import definitions as defined
from hf_calib.losses.statistics.definitions import IGNORE_INDEX, Statistic
from hf_calib.losses.statistics.in_triton import in_triton

if TYPE_CHECKING:
    from hf_calib.losses.loss import CalibrationLoss

SWITCH = "HF_CALIB_TRITON"  # With "0" the kernels are never used.
# Triton reads it at its import.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Up to this many logits PyTorch's operations are used. It is the estimate for two launches: measure
# it again.
LEAST_ELEMENTS = 0 if _INTERPRETED else 2**22
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST_BLOCK = 8192  # The most columns that a program holds at once.
_BLOCK_OF_LONG_ROWS = 4096
# The columns of what the forward kernel keeps of a row for the backward kernel, as `kernels.KEPT`.
_N_KEPT = 7


def takes(logits: Tensor, loss: CalibrationLoss) -> bool:
    """Whether the kernels can compute this loss of these logits."""
    if not (logits.is_cuda or _INTERPRETED):
        return False
    reads = loss.reads
    # The mean of log-probabilities is weighted by class weights.
    is_weighted = loss.class_weights is not None and defined.MeanLogProb() in reads
    return (
        logits.dtype in _DTYPES
        and logits.numel() > LEAST_ELEMENTS
        and os.environ.get(SWITCH) != "0"
        and loss.row_formula is not None
        and len(reads) <= 1
        and all(kind_of(statistic) is not None for statistic in reads)
        and not is_weighted
        and _works_on(logits.device)
    )


def kind_of(statistic: Statistic) -> str | None:
    """The name by which the kernels know a statistic, "" if it needs none; None if they do not
    compute it."""
    if isinstance(statistic, defined.OtherPowers):
        return "powers"
    of_kinds = {
        defined.Entropy(): "entropy",
        defined.MeanLogProb(): "mean",
        defined.LogitNorm(1.0): "norm",
        defined.Rival("next"): "rival",
    }
    return "" if isinstance(statistic, defined.Constant) else of_kinds.get(statistic)


@cache
def _works_on(device: torch.device) -> bool:
    """Whether Triton is installed and runs; it compiles at the first call, for which it needs a C
    compiler."""
    if find_spec("triton") is None:
        return False
    try:
        zeros = torch.zeros(2, 2, device=device)
        table = Table(zeros[0], zeros[0], 0.0)
        rows = KernelRows(zeros, zeros[0].long(), _example, (), {"table": table})
        rows.values(zeros[0], gradient=torch.empty_like(zeros))
    except torch.OutOfMemoryError:
        raise  # This error is not about Triton.
    except Exception as error:
        warnings.warn(
            f"Triton's kernels do not run on {device} ({type(error).__name__}: {printable(str(error))[:200]}). "
            f"The losses use PyTorch's operations, which are slower there. Set {SWITCH}=0 if that is meant.",
            UserWarning,
            stacklevel=2,
        )
        return False
    return True


def _example(ce: Any, *, table: Table) -> Any:
    """A formula of what some version of Triton may not compile."""
    return power_of(ce, look_up(table, ce)), 1.0


class KernelRows:
    """Rows of logits (n, C) with labels (n,), and the formula of their loss with its arguments."""

    def __init__(
        self,
        logits: Tensor,
        labels: Tensor,
        formula: Callable[..., Any],
        reads: Sequence[Statistic],
        arguments: Mapping[str, Any],
    ) -> None:
        self._logits = logits
        self._labels = labels.contiguous()
        self._formula = formula_of(formula, reads, arguments)
        self._has_number = bool(reads)
        self._table = arguments.get("table")
        self._constants = constants_of(tuple(reads), logits.shape[1])

    def values(
        self,
        shares: Tensor,
        gradient: Tensor | None = None,
        keeps_slopes: bool = False,
    ) -> Tensor:
        """The values (n,) times the shares, and their gradient if a matrix for it is given.

        With `keeps_slopes` the method `gradient` can make it later.
        """
        from hf_calib.losses.statistics.kernels import forward_kernel

        n, n_classes = self._logits.shape
        values = torch.empty_like(shares)
        is_right = self._labels.new_ones(1)
        # The kernel neither reads nor writes what it is not asked for.
        self._kept = values
        if keeps_slopes:
            self._kept = torch.empty(
                n, _N_KEPT, dtype=torch.float32, device=shares.device
            )
        table = self._table
        with _on_device(self._logits):
            forward_kernel[(n,)](
                self._logits, *self._logits.stride(), self._labels, n_classes, is_right=is_right,
                kept=self._kept,
                shares=shares,
                edges=shares if table is None else table.edges,
                bins=shares if table is None else table.values,
                n_edges=0 if table is None else len(table.edges),
                values=values,
                gradient=values if gradient is None else gradient,
                FORMULA=self._formula,
                HAS_NUMBER=self._has_number,
                GRADIENT=gradient is not None,
                KEEPS=keeps_slopes,
                **self._constants,
            )  # fmt: skip
        # A GPU asserts without being waited for; on the CPU the caller of the loss is told which
        # label it is.
        requirement = f"labels to be in [0, {n_classes}) or {IGNORE_INDEX}"
        torch._assert_async(is_right, f"expected {requirement}")
        return values

    def gradient(self, slope: Tensor) -> Tensor:
        """The gradient (n, C) times the slope of the value, (), or of the values, (n,)."""
        from hf_calib.losses.statistics.kernels import backward_kernel

        whole = torch.empty_like(self._logits, memory_format=torch.contiguous_format)
        n, n_classes = whole.shape
        # The one stride of (n,), and 0 of ().
        stride = sum(slope.stride())
        with _on_device(self._logits):
            backward_kernel[(n,)](
                self._logits, *self._logits.stride(), self._labels, n_classes, whole,
                self._kept, slope, stride, **self._constants,
            )  # fmt: skip
        return whole


def formula_of(
    formula: Callable[..., Any],
    reads: Sequence[Statistic],
    arguments: Mapping[str, Any],
) -> Any:
    """The formula of a loss as a function for kernels."""
    constants = {name: each for name, each in arguments.items() if name != "table"}
    numbers = formula.__code__.co_varnames[1 : formula.__code__.co_argcount]
    for name, statistic in zip(numbers, reads, strict=True):
        if isinstance(statistic, defined.Constant):
            constants[name] = statistic.number
    return in_triton(formula, tuple(constants.items()))


@cache
def constants_of(reads: tuple[Statistic, ...], n_classes: int) -> dict[str, Any]:
    """The compile-time constants of both kernels."""
    block = 1 << max(n_classes - 1, 1).bit_length()
    if n_classes > LONGEST_BLOCK:
        block = _BLOCK_OF_LONG_ROWS
    constants: dict[str, Any] = {"KIND": "", "ORDER": 0.0}
    for statistic in reads:
        constants["KIND"] = kind_of(statistic)
        if isinstance(statistic, defined.OtherPowers):
            constants["ORDER"] = float(statistic.power)
    return constants | {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def _on_device(logits: Tensor) -> Any:
    """A context in which Triton launches on the device of the logits."""
    return torch.cuda.device(logits.device) if logits.is_cuda else nullcontext()
