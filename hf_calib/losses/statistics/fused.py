"""Blocks of rows by two Triton kernels, which read the logits once forward, and once to write their gradient.

They are used for large matrices on a GPU if Triton is installed, as with PyTorch's CUDA builds. This file defines which
numbers a statistic reads from the kernels and passes to them for the gradient; `definitions` has the formulas.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hf_calib._errors import printable
from hf_calib.losses.statistics import definitions as defined
from hf_calib.losses.statistics.blocks import Slopes, check_labels
from hf_calib.losses.statistics.definitions import RIVALS, Statistic

SWITCH = "HF_CALIB_TRITON"  # With "0" the kernels are never used.
# Triton reads it at its import.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# In smaller matrices the launches cost more time than they save. An estimate.
LEAST_ELEMENTS = 0 if _INTERPRETED else 2**22
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LONGEST_BLOCK = 8192  # The most columns that a program holds at once.
_BLOCK_OF_LONG_ROWS = 4096


def takes(
    logits: Tensor, statistics: Sequence[Statistic], class_weights: Tensor | None
) -> bool:
    """Whether the kernels can compute these statistics of these logits."""
    if not (logits.is_cuda or _INTERPRETED):
        return False
    kinds = [type(statistic) for statistic in statistics]
    has_weighted_mean = class_weights is not None and defined.MeanLogProb in kinds
    return (
        logits.dtype in _DTYPES
        and logits.numel() > LEAST_ELEMENTS
        and os.environ.get(SWITCH) != "0"
        and defined.LogProbs not in kinds
        and not has_weighted_mean
        and _works_on(logits.device)
    )


@cache
def _works_on(device: torch.device) -> bool:
    """Whether Triton is installed and runs; it compiles at the first call, for which it needs a C compiler."""
    if find_spec("triton") is None:
        return False
    try:
        labels = torch.zeros(1, dtype=torch.int64, device=device)
        KernelBlock(torch.zeros(1, 2, device=device), labels, ())
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


# The outputs of the forward kernel per row, in its order, and the flag that requests each.
_FOUND = {
    "z_max": "", "log_sum": "", "z_label": "", "predicted": "PREDICTED", "powers": "POWER", "log_ratios": "ENTROPY",
    "mean": "MEAN", "count": "MEAN", "norm": "NORM", "rivals": "RIVALS", "rival_index": "RIVALS", "below": "BELOW",
    "below_count": "BELOW",
}  # fmt: skip
_INDICES = ("predicted", "rival_index")
# The coefficients that the backward kernel reads, in its order.
_COEFFICIENTS = (
    "at_label", "beta", "eta", "at_finite", "norm", "at_norm",
    "predicted", "at_predicted", "index", "at_rival", "at_below",
)  # fmt: skip


class KernelBlock:
    """Rows of logits (n, C) with labels (n,), as `Block`."""

    def __init__(
        self, logits: Tensor, labels: Tensor, reads: Sequence[Statistic]
    ) -> None:
        # The kernels would read out of bounds.
        check_labels(labels, logits.shape[1])
        self.logits = logits
        self.labels = labels.contiguous()
        self.reads = reads
        self.found = self._launched()
        self._is_ignored = labels < 0
        ce = self.found["z_max"] - self.found["z_label"] + self.found["log_sum"]
        self.numbers: list[Any] = [self._of_counted(ce)]
        # What the backward kernel reads of each statistic for a slope of 1.
        self._kept: list[dict[str, Tensor]] = []
        for statistic in reads:
            value, kept = self._value(statistic)
            self.numbers.append(value)
            self._kept.append(kept)

    def _launched(self) -> dict[str, Tensor]:
        """The numbers that the forward kernel writes, (n,) or (n, k); those of ignored rows are undefined."""
        from hf_calib.losses.statistics.kernels import forward_kernel

        flags = _flags(self.reads, self.logits)
        n = len(self.logits)
        found = {}
        for name, flag in _FOUND.items():
            shape: tuple[int, ...] = (n,)
            if flag == "RIVALS":
                shape = (n, flags[flag])
            if flag and not flags[flag]:
                shape = (1,)
            dtype = torch.int64 if name in _INDICES else torch.float32
            found[name] = self.logits.new_empty(shape, dtype=dtype)
        with _on_device(self.logits):
            forward_kernel[(n,)](
                self.logits, *self.logits.stride(), self.labels, self.logits.shape[1],
                *found.values(), **flags,
            )  # fmt: skip
        return found

    def _of_counted(self, values: Tensor) -> Tensor:
        """The values (n,), 0 if the row is ignored."""
        return values.masked_fill(self._is_ignored, 0)

    def _value(self, statistic: Statistic) -> tuple[Any, dict[str, Tensor]]:
        found = self.found
        kept: dict[str, Tensor] = {}
        if isinstance(statistic, defined.Constant):
            return statistic.number, kept
        if isinstance(statistic, defined.Labels):
            return self.labels.clamp_min(0), kept
        if isinstance(statistic, defined.Counts):
            return (~self._is_ignored).float(), kept
        if isinstance(statistic, defined.Correct):
            return (found["predicted"] == self.labels).float(), kept
        if isinstance(statistic, defined.OtherPowers):
            value = found["powers"]
        elif isinstance(statistic, defined.Entropy):
            value = found["log_sum"] - found["log_ratios"]
        elif isinstance(statistic, defined.MeanLogProb):
            value = found["mean"] - found["log_sum"]
        elif isinstance(statistic, defined.Confidence):
            value = torch.exp(-found["log_sum"])
        elif isinstance(statistic, defined.LogitNorm):
            value = found["norm"]
        else:
            value, kept = self._rival(statistic)
        return self._of_counted(value), kept

    def _rival(self, statistic: Any) -> tuple[Tensor, dict[str, Tensor]]:
        found = self.found
        ranks = RIVALS[statistic.rank]
        if ranks is None:
            # The kernels make no list of all rivals.
            count = found["below_count"].clamp_min(1)
            return found["below"] / count, {"at_below": 1 / count}
        values = found["rivals"][:, ranks[0] :]
        index = found["rival_index"][:, ranks[0] :]
        exists = (values > -torch.inf) & ~self._is_ignored[:, None]
        share = exists / exists.sum(1, keepdim=True).clamp_min(1).to(values.dtype)
        log_p = values - found["z_max"][:, None] - found["log_sum"][:, None]
        probs = torch.exp(log_p.where(exists, 0)) * share
        return probs.sum(1), {"index": index.where(exists, 0), "at_rival": probs}

    def gradient(self, slopes: Slopes) -> Tensor:
        """The gradient (n, C) of the sum of slope * number over numbers and rows."""
        from hf_calib.losses.statistics.kernels import backward_kernel

        by_ce, *others = slopes
        assert by_ce is not None
        alpha = by_ce
        given = {"at_label": -by_ce}
        used = []
        read = zip(self.reads, self.numbers[1:], self._kept, others, strict=True)
        for statistic, value, kept, slope in read:
            if slope is None or not statistic.has_derivative:
                continue
            used.append(statistic)
            # The logarithms of the kernels are relative to the largest logit.
            of_kernel: Any = (None, None, None)
            if isinstance(statistic, defined.Entropy):
                of_kernel = -self._of_counted(self.found["log_sum"])
            alpha = alpha - statistic.total(value, of_kernel, slope)
            if isinstance(statistic, defined.OtherPowers):
                given["beta"] = slope * statistic.power
            elif isinstance(statistic, defined.Entropy):
                given["eta"] = -slope
            elif isinstance(statistic, defined.MeanLogProb):
                given["at_finite"] = slope / self.found["count"]
            elif isinstance(statistic, defined.Confidence):
                given["predicted"] = self.found["predicted"]
                given["at_predicted"] = slope * value
            elif isinstance(statistic, defined.LogitNorm):
                given["norm"] = value
                given["at_norm"] = slope
            elif isinstance(statistic, defined.Rival):
                given |= {
                    name: each if name == "index" else each * _as(slope, each)
                    for name, each in kept.items()
                }
        flags = _flags(used, self.logits, backward=True)
        # Without its flag a coefficient is not read.
        coefficients = [given.get(name, alpha).contiguous() for name in _COEFFICIENTS]
        whole = torch.empty_like(self.logits, memory_format=torch.contiguous_format)
        with _on_device(self.logits):
            backward_kernel[(len(whole),)](
                whole, self.logits, *self.logits.stride(), self.labels, whole.shape[1],
                self.found["z_max"], self.found["log_sum"], alpha.contiguous(), *coefficients,
                **flags,
            )  # fmt: skip
        return whole


def _as(slope: Tensor, kept: Tensor) -> Tensor:
    return slope[:, None] if kept.dim() == 2 else slope


def _flags(
    statistics: Sequence[Statistic], logits: Tensor, *, backward: bool = False
) -> dict[str, Any]:
    """The compile-time constants of a kernel."""
    import triton.language as tl

    by_kind: dict[type[Statistic], Any] = {
        type(statistic): statistic for statistic in statistics
    }
    power = by_kind.get(defined.OtherPowers)
    norm = by_kind.get(defined.LogitNorm)
    rival = by_kind.get(defined.Rival)
    first, last = (rival and RIVALS[rival.rank]) or (0, 0)
    block = 1 << max(logits.shape[1] - 1, 1).bit_length()
    if block > _LONGEST_BLOCK:  # Shorter rows are one block.
        block = _BLOCK_OF_LONG_ROWS
    return {
        "POWER": 0.0 if power is None else float(power.power),
        "ENTROPY": defined.Entropy in by_kind,
        "MEAN": defined.MeanLogProb in by_kind,
        "NORM": 0.0 if norm is None else float(norm.order),
        "PREDICTED": defined.Confidence in by_kind or defined.Correct in by_kind,
        "RIVALS": last - first if backward else last,
        "BELOW": rival is not None and last == 0,
        "BLOCK": block,
        "WIDE": tl.float32,
        "num_warps": min(16, max(1, block // 512)),
    }


def _on_device(logits: Tensor) -> Any:
    """A context in which Triton launches on the device of the logits."""
    return torch.cuda.device(logits.device) if logits.is_cuda else nullcontext()
