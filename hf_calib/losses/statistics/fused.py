"""The statistics by two Triton kernels: logits are read once forward, and once to write their gradient.

For logits on a GPU where Triton is installed, as it is with PyTorch's CUDA builds. Which numbers a statistic takes of
the kernels, and which it gives them for the gradient, stands here; its formula in `definitions`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hf_calib._errors import printable
from hf_calib.losses.statistics.definitions import (
    CROSS_ENTROPY,
    IGNORE_INDEX,
    RIVALS,
    Correct,
    CrossEntropy,
    Entropy,
    Label,
    LogConfidence,
    LogitNorm,
    MeanLogProb,
    Numbers,
    OtherPowers,
    Rival,
    Statistic,
    of_valid,
)
from hf_calib.losses.statistics.direct import differentiable_gradient

SWITCH = "HF_CALIB_TRITON"  # "0": never
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # which Triton reads at its import, too
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LONGEST_BLOCK = 8192  # columns that a program holds at once
_BLOCK_OF_LONG_ROWS = 4096


def takes(logits: Tensor, statistics: Sequence[Statistic]) -> bool:
    """Whether the kernels compute these statistics of these logits."""
    if not (logits.is_cuda or _INTERPRETED):
        return False
    kinds = [type(statistic) for statistic in statistics]
    return (
        logits.dtype in _DTYPES
        and len(logits) > 0
        and os.environ.get(SWITCH) != "0"
        and all(kind in _ROWS for kind in kinds)
        and len(set(kinds)) == len(kinds)
        and _works_on(logits.device)
    )


@cache
def _works_on(device: torch.device) -> bool:
    """Whether Triton is there and runs: it compiles at the first call, for which it needs a C compiler."""
    if find_spec("triton") is None:
        return False
    try:
        labels = torch.zeros(1, dtype=torch.int64, device=device)
        FusedStatistics.apply(torch.zeros(1, 2, device=device), labels, (CROSS_ENTROPY,))
    except torch.OutOfMemoryError:
        raise  # which says nothing of Triton
    except Exception as error:
        warnings.warn(
            f"Triton's kernels do not run on {device} ({type(error).__name__}: {printable(str(error))[:200]}). "
            f"The losses take PyTorch's operations, which are slower there. Set {SWITCH}=0 if that is meant.",
            UserWarning,
            stacklevel=2,
        )
        return False
    return True


class FusedStatistics(torch.autograd.Function):
    """The statistics of logits (N, C) and labels (N,); beside the logits there is only their gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, statistics: Sequence[Statistic]
    ) -> tuple[Tensor, ...]:
        labels = labels.contiguous()
        _check_labels(labels, logits.shape[1])
        valid = labels != IGNORE_INDEX
        found = _Found(logits, labels, statistics)
        rows = [_ROWS[type(statistic)](statistic, found) for statistic in statistics]
        values = [of_valid(own["value"], valid) for own in rows]
        ctx.statistics, ctx.row_names = statistics, [list(own) for own in rows]
        saved = (tensor for own in rows for tensor in own.values())
        ctx.save_for_backward(logits, labels, valid, found.z_max, found.log_sum, *saved)
        ctx.set_materialize_grads(False)
        fixed = (v for v, s in zip(values, statistics, strict=True) if not s.differentiable)
        ctx.mark_non_differentiable(*fixed)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        from hf_calib.losses.statistics.kernels import backward_kernel

        logits, labels, valid, z_max, log_sum, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return differentiable_gradient(logits, labels, ctx.statistics, slopes), None, None
        tensors = iter(saved)
        rows = [{name: next(tensors) for name in names} for names in ctx.row_names]
        used: list[Statistic] = []
        alpha = torch.zeros_like(z_max)
        terms: dict[str, Tensor] = {}
        for statistic, own, slope in zip(ctx.statistics, rows, slopes, strict=True):
            if slope is not None and statistic.differentiable:
                coefficients = _coefficients(statistic, own, of_valid(slope, valid))
                alpha = alpha + coefficients.pop("alpha")
                names = _NAMES.get(type(statistic), {})
                terms |= {names.get(name, name): t.contiguous() for name, t in coefficients.items()}
                used.append(statistic)
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
        terms.setdefault("at_label", torch.zeros_like(alpha))
        of_row = [terms.get(name, alpha) for name in _OF_ROW]  # what no flag asks for is not read
        with _on_device(logits):
            backward_kernel[(len(logits),)](
                gradient, logits, *logits.stride(), labels, logits.shape[1], z_max, log_sum, alpha, *of_row,
                **_flags(used, logits, backward=True),
            )  # fmt: skip
        return gradient, None, None


class _Found:
    """What the forward kernel writes, (N,) each; what no statistic reads is not there."""

    def __init__(self, logits: Tensor, labels: Tensor, statistics: Sequence[Statistic]) -> None:
        from hf_calib.losses.statistics.kernels import forward_kernel

        self.labels = labels
        flags = _flags(statistics, logits)
        n = len(logits)

        def numbers(is_read: object, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            """Of ignored rows they stay as they are, and are not read."""
            return logits.new_empty((n, *shape) if is_read else (1,), dtype=dtype)

        self.z_max, self.log_sum, self.z_label = numbers(True), numbers(True), numbers(True)
        self.predicted = numbers(flags["PREDICTED"], dtype=torch.int64)
        self.powers = numbers(flags["POWER"])
        self.log_ratios = numbers(flags["ENTROPY"])
        self.mean, self.count = numbers(flags["MEAN"]), numbers(flags["MEAN"])
        self.norm = numbers(flags["NORM"])
        self.rivals = numbers(flags["RIVALS"], flags["RIVALS"])
        self.rival_index = numbers(flags["RIVALS"], flags["RIVALS"], dtype=torch.int64)
        self.below, self.below_count = numbers(flags["BELOW"]), numbers(flags["BELOW"])
        with _on_device(logits):
            forward_kernel[(n,)](
                logits, *logits.stride(), labels, logits.shape[1],
                self.z_max, self.log_sum, self.z_label, self.predicted,
                self.powers, self.log_ratios, self.mean, self.count, self.norm,
                self.rivals, self.rival_index, self.below, self.below_count,
                **flags,
            )  # fmt: skip

    def probs_of(self, logits: Tensor) -> Tensor:
        """The probabilities (N, k) of logits (N, k)."""
        return torch.exp((logits - self.z_max[:, None]) - self.log_sum[:, None])


def _flags(statistics: Sequence[Statistic], logits: Tensor, *, backward: bool = False) -> dict[str, Any]:
    """The compile-time constants of a kernel."""
    by_kind = {type(statistic): statistic for statistic in statistics}
    power, norm, rival = by_kind.get(OtherPowers), by_kind.get(LogitNorm), by_kind.get(Rival)
    first, last = (0, 0) if rival is None else RIVALS[rival.rank] or (0, 0)  # type: ignore[attr-defined]
    reads_prediction = any(
        statistic.reads_prediction and statistic.differentiable >= backward for statistic in statistics
    )
    import triton.language as tl

    block = _block_of(logits.shape[1])
    return {
        "POWER": 0.0 if power is None else float(power.power),  # type: ignore[attr-defined]
        "ENTROPY": Entropy in by_kind,
        "MEAN": MeanLogProb in by_kind,
        "NORM": 0.0 if norm is None else float(norm.order),  # type: ignore[attr-defined]
        "PREDICTED": reads_prediction,
        "RIVALS": last - first if backward else last,
        "BELOW": rival is not None and last == 0,
        "BLOCK": block,
        "WIDE": tl.float32,
        "num_warps": min(16, max(1, block // 512)),
    }


def _block_of(n_classes: int) -> int:
    """How many columns a program takes at once: all of them, unless they are many."""
    whole = 1 << max(n_classes - 1, 1).bit_length()
    return whole if whole <= _LONGEST_BLOCK else _BLOCK_OF_LONG_ROWS


def _of_rival(statistic: Rival, found: _Found) -> Numbers:
    ranks = RIVALS[statistic.rank]
    if ranks is None:
        count = found.below_count.clamp_min(1)
        return {"value": found.below / count, "count": count}
    values, index = found.rivals[:, ranks[0] :], found.rival_index[:, ranks[0] :]
    exists = values > -torch.inf
    share = exists / exists.sum(1, keepdim=True).clamp_min(1).to(values.dtype)
    probs = found.probs_of(values) * share
    return {"value": probs.sum(1), "index": index.where(exists, 0), "probs": probs}


# What `definitions` reads of a statistic's rows, of the numbers that the forward kernel found.
_ROWS: dict[type[Statistic], Callable[[Any, _Found], Numbers]] = {
    CrossEntropy: lambda _, f: {"value": (f.z_max - f.z_label) + f.log_sum},
    Rival: _of_rival,
    OtherPowers: lambda _, f: {"value": f.powers},
    Entropy: lambda _, f: {"value": f.log_sum - f.log_ratios, "z_max": f.z_max, "log_p_max": -f.log_sum},
    MeanLogProb: lambda _, f: {"value": f.mean - f.log_sum, "count": f.count.clamp_min(1)},
    LogConfidence: lambda _, f: {"value": -f.log_sum, "predicted": f.predicted},
    LogitNorm: lambda _, f: {"value": f.norm},
    Label: lambda _, f: {"value": f.labels.clamp_min(0).to(f.z_max.dtype)},
    Correct: lambda _, f: {"value": (f.predicted == f.labels).to(f.z_max.dtype)},
}
# The backward kernel's numbers of a row, in its order, and where they have another name in `definitions`.
_OF_ROW = (
    "at_label", "beta", "eta", "at_finite", "norm", "at_norm",
    "predicted", "at_predicted", "index", "at_rival", "at_below",
)  # fmt: skip
_NAMES: dict[type[Statistic], dict[str, str]] = {LogitNorm: {"slope": "at_norm"}}


def _coefficients(statistic: Statistic, rows: Numbers, slope: Tensor) -> Numbers:
    if isinstance(statistic, Rival) and "index" not in rows:  # the mean of all below: no list of them
        return {"alpha": -slope * rows["value"], "at_below": slope / rows["count"]}
    return statistic.coefficients(rows, slope)


def _check_labels(labels: Tensor, n_classes: int) -> None:
    """Raise for a label that is no class: the kernels would read elsewhere."""
    fine = ((labels >= 0) & (labels < n_classes)) | (labels == IGNORE_INDEX)
    if labels.is_cuda:
        torch._assert_async(fine.all(), f"labels are in [0, {n_classes}) or {IGNORE_INDEX}")
    elif not bool(fine.all()):
        raise IndexError("label out of range")


def _on_device(logits: Tensor) -> Any:
    """Triton launches on the current device."""
    return torch.cuda.device(logits.device) if logits.is_cuda else nullcontext()
