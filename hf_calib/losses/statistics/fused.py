"""Blocks of rows by Triton kernels, on a GPU if Triton is installed, as with PyTorch's CUDA builds.

A loss that is a formula of single rows needs one launch for value and gradient: its source is compiled into the kernel,
with Triton's arithmetic in place of `arithmetic`. Other losses compute their slopes between two launches.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_calib._errors import printable
from hf_calib.losses.arithmetic import Table, look_up, power_of
from hf_calib.losses.statistics import definitions as defined
from hf_calib.losses.statistics.blocks import Slopes
from hf_calib.losses.statistics.definitions import (
    IGNORE_INDEX,
    RIVALS,
    Statistic,
)
from hf_calib.losses.statistics.in_triton import in_triton

if TYPE_CHECKING:
    from hf_calib.losses.loss import CalibrationLoss

SWITCH = "HF_CALIB_TRITON"  # With "0" the kernels are never used.
# Triton reads it at its import.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Up to this many logits PyTorch's operations are used. It is the estimate for two launches: measure it again.
LEAST_ELEMENTS = 0 if _INTERPRETED else 2**22
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST_BLOCK = 8192  # The most columns that a program holds at once.
_BLOCK_OF_LONG_ROWS = 4096
# The statistics that the kernels know. Of those that have a name there a kernel computes at most one.
_KINDS: dict[type[Statistic], str] = {
    defined.OtherPowers: "powers",
    defined.Entropy: "entropy",
    defined.MeanLogProb: "mean",
    defined.LogitNorm: "norm",
    defined.Rival: "rivals",
    defined.Constant: "",
    defined.Labels: "",
    defined.Counts: "",
    defined.Confidence: "",
    defined.Correct: "",
}
# The columns of what the forward kernel keeps for the backward kernel.
_LOG_SUM = 1
_CE = 2
_NUMBER = 3
_SLOPES = slice(5, 7)
_PREDICTED = 7
_N_KEPT = 11  # as `kernels.KEPT`


def takes(
    logits: Tensor, statistics: Sequence[Statistic], class_weights: Tensor | None
) -> bool:
    """Whether the kernels can compute these statistics of these logits."""
    if not (logits.is_cuda or _INTERPRETED):
        return False
    kinds = [_KINDS.get(type(statistic)) for statistic in statistics]
    has_weighted_mean = class_weights is not None and "mean" in kinds
    return (
        logits.dtype in _DTYPES
        and logits.numel() > LEAST_ELEMENTS
        and os.environ.get(SWITCH) != "0"
        and None not in kinds
        and len([kind for kind in kinds if kind]) <= 1
        and not has_weighted_mean
        and _works_on(logits.device)
    )


@cache
def _works_on(device: torch.device) -> bool:
    """Whether Triton is installed and runs; it compiles at the first call, for which it needs a C compiler."""
    if find_spec("triton") is None:
        return False
    try:
        zeros = torch.zeros(2, 2, device=device)
        KernelBlock(zeros, zeros[0].long(), ())._forward(
            shares=zeros, edges=zeros, bins=zeros, n_edges=1, KEEPS=True,
            values=torch.empty_like(zeros), gradient=torch.empty_like(zeros),
            FORMULA=in_triton(_example, ()), HAS_NUMBER=False, GRADIENT=True,
        )  # fmt: skip
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


class KernelBlock:
    """Rows of logits (n, C) with labels (n,), as `Block`."""

    def __init__(
        self, logits: Tensor, labels: Tensor, reads: tuple[Statistic, ...]
    ) -> None:
        self.logits = logits
        self.labels = labels.contiguous()
        self.reads = reads
        self._constants = constants_of(reads, logits.shape[1])

    def numbers(self) -> list[Any]:
        """As `Block.numbers`; the statistics of an ignored row mean nothing."""
        # The kernel neither reads nor writes what it is not asked for.
        unused = self.labels
        self._forward(
            shares=unused, edges=unused, bins=unused, n_edges=0, values=unused,
            gradient=unused, KEEPS=True, FORMULA=None, HAS_NUMBER=False, GRADIENT=False,
        )  # fmt: skip
        kept = self._kept.t()
        numbers: list[Any] = [kept[_CE]]
        for statistic in self.reads:
            if isinstance(statistic, defined.Constant):
                numbers.append(statistic.number)
            elif isinstance(statistic, defined.Labels):
                numbers.append(self.labels.clamp_min(0))
            elif isinstance(statistic, defined.Counts):
                numbers.append((self.labels >= 0).float())
            elif isinstance(statistic, defined.Correct):
                numbers.append((kept[_PREDICTED] == self.labels).float())
            elif isinstance(statistic, defined.Confidence):
                numbers.append(torch.exp(-kept[_LOG_SUM]))
            else:
                numbers.append(kept[_NUMBER])
        return numbers

    def values(
        self,
        loss: CalibrationLoss,
        shares: Tensor,
        gradient: Tensor | None,
        keeps: bool,
    ) -> Tensor:
        """The values (n,) of a formula of single rows, times the shares.

        Their gradient is written to `gradient` if it is given. With `keeps` the method `gradient` can make it later,
        from `self.slopes`.
        """
        given = loss.arguments(shares)
        formula, has_number = formula_of(loss, given)
        table = given.get("table")
        values = torch.empty_like(shares)
        self._forward(
            shares=shares,
            edges=shares if table is None else table.edges,
            bins=shares if table is None else table.values,
            n_edges=0 if table is None else len(table.edges),
            values=values,
            gradient=values if gradient is None else gradient,
            KEEPS=keeps,
            FORMULA=formula,
            HAS_NUMBER=has_number,
            GRADIENT=gradient is not None,
        )
        return values

    def _forward(self, **given: Any) -> None:
        """Launch the forward kernel."""
        from hf_calib.losses.statistics.kernels import forward_kernel

        n, n_classes = self.logits.shape
        is_right = self.labels.new_ones(1)
        kept = is_right
        if given["KEEPS"]:
            kept = self.logits.new_empty(n, _N_KEPT, dtype=torch.float32)
            self._kept = kept
            self.slopes = kept.t()[_SLOPES]
        with _on_device(self.logits):
            forward_kernel[(n,)](
                self.logits, *self.logits.stride(), self.labels, n_classes,
                is_right=is_right, kept=kept, **given, **self._constants,
            )  # fmt: skip
        # A GPU asserts without being waited for; on the CPU the caller of the loss is told which label it is.
        requirement = f"labels to be in [0, {n_classes}) or {IGNORE_INDEX}"
        torch._assert_async(is_right, f"expected {requirement}")

    def gradient(self, slopes: Slopes, scale: Tensor) -> Tensor:
        """The gradient (n, C) of the sum of slope * number over numbers and rows, times the scale, () or (n,)."""
        from hf_calib.losses.statistics.kernels import backward_kernel

        by_ce, *others = slopes
        assert by_ce is not None
        flags = {**self._constants, "KIND": "", "PREDICTED": False}
        by_number = by_ce
        by_confidence = by_ce
        for statistic, slope in zip(self.reads, others, strict=False):
            if slope is None or not statistic.has_derivative:
                continue
            if isinstance(statistic, defined.Confidence):
                by_confidence = slope
                flags["PREDICTED"] = True
            else:
                by_number = slope
                flags["KIND"] = self._constants["KIND"]
        del flags["FIRST"], flags["LAST"]
        vectors = []
        for vector in (by_ce, by_number, by_confidence, scale):
            # The one stride of (n,), and 0 of ().
            vectors += [vector, sum(vector.stride())]
        whole = torch.empty_like(self.logits, memory_format=torch.contiguous_format)
        with _on_device(self.logits):
            backward_kernel[(len(whole),)](
                self.logits, *self.logits.stride(), self.labels, self.logits.shape[1],
                whole, self._kept, *vectors, **flags,
            )  # fmt: skip
        return whole


def formula_of(loss: CalibrationLoss, given: Mapping[str, Any]) -> tuple[Any, bool]:
    """The formula of a loss as a function for kernels, and whether it reads a statistic."""
    formula = loss.row_formula
    assert formula is not None
    constants = {name: each for name, each in given.items() if name != "table"}
    numbers = formula.__code__.co_varnames[1 : formula.__code__.co_argcount]
    for name, statistic in zip(numbers, loss.reads, strict=True):
        if isinstance(statistic, defined.Constant):
            constants[name] = statistic.number
    return in_triton(formula, tuple(constants.items())), bool(numbers)


@cache
def constants_of(reads: tuple[Statistic, ...], n_classes: int) -> dict[str, Any]:
    """The compile-time constants of a kernel."""
    kind = ""
    order = 0.0
    first = 0
    last = 0
    for statistic in reads:
        kind = _KINDS[type(statistic)] or kind
        if isinstance(statistic, defined.OtherPowers):
            order = float(statistic.power)
        elif isinstance(statistic, defined.LogitNorm):
            order = float(statistic.order)
        elif isinstance(statistic, defined.Rival):
            ranks = RIVALS[statistic.rank]
            if ranks is None:
                kind = "all below"
            else:
                first, last = ranks
    kinds = [type(statistic) for statistic in reads]
    block = 1 << max(n_classes - 1, 1).bit_length()
    if n_classes > LONGEST_BLOCK:
        block = _BLOCK_OF_LONG_ROWS
    return {
        "KIND": kind,
        "ORDER": order,
        "FIRST": first,
        "LAST": last,
        "PREDICTED": defined.Confidence in kinds or defined.Correct in kinds,
        "BLOCK": block,
        "num_warps": min(16, max(1, block // 512)),
    }


def _on_device(logits: Tensor) -> Any:
    """A context in which Triton launches on the device of the logits."""
    return torch.cuda.device(logits.device) if logits.is_cuda else nullcontext()
