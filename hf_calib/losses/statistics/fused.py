"""Statistics by two Triton kernels, which read the logits once forward, and once to write their gradient.

They are used for logits on a GPU if Triton is installed, as with PyTorch's CUDA builds. This file defines which numbers
a statistic reads from the kernels and passes to them for the gradient; `definitions` has the formulas.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_calib._errors import printable
from hf_calib.losses.statistics import definitions as defined
from hf_calib.losses.statistics.definitions import (
    CROSS_ENTROPY,
    RIVALS,
    Numbers,
    Rival,
    Statistic,
    Terms,
)

SWITCH = "HF_CALIB_TRITON"  # With "0" the kernels are never used.
_INTERPRETED = (
    os.environ.get("TRITON_INTERPRET") == "1"
)  # Triton reads it at its import.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LONGEST_BLOCK = 8192  # The most columns that a program holds at once.
_BLOCK_OF_LONG_ROWS = 4096


def takes(logits: Tensor, statistics: Sequence[Statistic]) -> bool:
    """Whether the kernels can compute these statistics of these logits."""
    if not (logits.is_cuda or _INTERPRETED):
        return False
    kinds = [type(statistic) for statistic in statistics]
    return (
        logits.dtype in _DTYPES
        and len(logits) > 0
        and os.environ.get(SWITCH) != "0"
        and all(kind in _NUMBERS for kind in kinds)
        and len(set(kinds)) == len(kinds)
        and _works_on(logits.device)
    )


@cache
def _works_on(device: torch.device) -> bool:
    """Whether Triton is installed and runs; it compiles at the first call, for which it needs a C compiler."""
    if find_spec("triton") is None:
        return False
    try:
        labels = torch.zeros(1, dtype=torch.int64, device=device)
        _found(torch.zeros(1, 2, device=device), labels, (CROSS_ENTROPY,))
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


def numbers(
    logits: Tensor, labels: Tensor, statistics: Sequence[Statistic], has_gradient: bool
) -> tuple[Numbers, list[Numbers], None]:
    """The numbers of every row, and those of each statistic."""
    found = _found(logits, labels.contiguous(), statistics)
    of_rows = {"z_max": found.z_max, "log_p_max": -found.log_sum}
    return (
        of_rows,
        [_NUMBERS[type(statistic)](statistic, found) for statistic in statistics],
        None,
    )


def gradient(
    logits: Tensor, labels: Tensor, of_rows: Numbers, terms: Terms, _: None
) -> Tensor:
    """The gradient (N, C) for these coefficients, (N, k) each."""
    from hf_calib.losses.statistics.kernels import backward_kernel

    alpha = of_rows["alpha"]
    found = {"at_label": torch.zeros_like(alpha)}
    for _statistic, coefficients in terms:
        found |= {name: each.contiguous() for name, each in coefficients.items()}
    of_row = [
        found.get(name, alpha) for name in _OF_ROW
    ]  # Without its flag an entry is not read.
    whole = torch.empty_like(logits, memory_format=torch.contiguous_format)
    with _on_device(logits):
        backward_kernel[(len(logits),)](
            whole, logits, *logits.stride(), labels.contiguous(), logits.shape[1],
            of_rows["z_max"], -of_rows["log_p_max"], alpha, *of_row,
            **_flags([statistic for statistic, _ in terms], logits, backward=True),
        )  # fmt: skip
    return whole


# The outputs of the forward kernel per row, in its order, and the flag that requests each.
_FOUND = {
    "z_max": "", "log_sum": "", "z_label": "", "predicted": "PREDICTED", "powers": "POWER", "log_ratios": "ENTROPY",
    "mean": "MEAN", "count": "MEAN", "norm": "NORM", "rivals": "RIVALS", "rival_index": "RIVALS", "below": "BELOW",
    "below_count": "BELOW",
}  # fmt: skip


def _found(
    logits: Tensor, labels: Tensor, statistics: Sequence[Statistic]
) -> SimpleNamespace:
    """The numbers that the forward kernel writes, (N,) or (N, k); those of ignored rows are undefined."""
    from hf_calib.losses.statistics.kernels import forward_kernel

    flags = _flags(statistics, logits)
    n = len(logits)
    found = {}
    for name, flag in _FOUND.items():
        shape = (n, flags[flag]) if flag == "RIVALS" else (n,)
        dtype = torch.int64 if name in ("predicted", "rival_index") else torch.float32
        found[name] = logits.new_empty(
            shape if flag == "" or flags[flag] else (1,), dtype=dtype
        )
    with _on_device(logits):
        forward_kernel[(n,)](
            logits, *logits.stride(), labels, logits.shape[1], *found.values(), **flags
        )
    return SimpleNamespace(labels=labels, **found)


def _flags(
    statistics: Sequence[Statistic], logits: Tensor, *, backward: bool = False
) -> dict[str, Any]:
    """The compile-time constants of a kernel."""
    import triton.language as tl

    by_kind: dict[type[Statistic], Any] = {
        type(statistic): statistic for statistic in statistics
    }
    rival = by_kind.get(Rival)
    first, last = (rival and RIVALS[rival.rank]) or (0, 0)
    block = 1 << max(logits.shape[1] - 1, 1).bit_length()
    if block > _LONGEST_BLOCK:  # Shorter rows are one block.
        block = _BLOCK_OF_LONG_ROWS
    return {
        "POWER": float(by_kind[defined.OtherPowers].power)
        if defined.OtherPowers in by_kind
        else 0.0,
        "ENTROPY": defined.Entropy in by_kind,
        "MEAN": defined.MeanLogProb in by_kind,
        "NORM": float(by_kind[defined.LogitNorm].order)
        if defined.LogitNorm in by_kind
        else 0.0,
        "PREDICTED": defined.LogConfidence in by_kind or defined.Correct in by_kind,
        "RIVALS": last - first if backward else last,
        "BELOW": rival is not None and last == 0,
        "BLOCK": block,
        "WIDE": tl.float32,
        "num_warps": min(16, max(1, block // 512)),
    }


def _of_rival(statistic: Rival, found: SimpleNamespace) -> Numbers:
    ranks = RIVALS[statistic.rank]
    if ranks is None:
        count = found.below_count.clamp_min(1)
        return {"value": found.below / count, "count": count}
    values, index = found.rivals[:, ranks[0] :], found.rival_index[:, ranks[0] :]
    exists = values > -torch.inf
    share = exists / exists.sum(1, keepdim=True).clamp_min(1).to(values.dtype)
    probs = torch.exp((values - found.z_max[:, None]) - found.log_sum[:, None]) * share
    return {"value": probs.sum(1), "index": index.where(exists, 0), "probs": probs}


# The `numbers` of each statistic, from the outputs of the forward kernel.
_NUMBERS: dict[type[Statistic], Callable[[Any, Any], Numbers]] = {
    defined.CrossEntropy: lambda _, f: {"value": (f.z_max - f.z_label) + f.log_sum},
    Rival: _of_rival,
    defined.OtherPowers: lambda _, f: {"value": f.powers},
    defined.Entropy: lambda _, f: {"value": f.log_sum - f.log_ratios},
    defined.MeanLogProb: lambda _, f: {
        "value": f.mean - f.log_sum,
        "count": f.count.clamp_min(1),
    },
    defined.LogConfidence: lambda _, f: {"value": -f.log_sum, "predicted": f.predicted},
    defined.LogitNorm: lambda _, f: {"value": f.norm},
    defined.Correct: lambda _, f: {
        "value": (f.predicted == f.labels).to(f.z_max.dtype)
    },
}
# The coefficients that the backward kernel reads, in its order.
_OF_ROW = (
    "at_label", "beta", "eta", "at_finite", "norm", "at_norm",
    "predicted", "at_predicted", "index", "at_rival", "at_below",
)  # fmt: skip


def _on_device(logits: Tensor) -> Any:
    """A context in which Triton launches on the device of the logits."""
    return torch.cuda.device(logits.device) if logits.is_cuda else nullcontext()
