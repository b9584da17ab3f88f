"""Row statistics of a large logits matrix with a hand-written backward, block by block of rows.

Forward keeps the logits, O(N) numbers and, where the gradient will stand, the probabilities. Backward is, for
every statistic, a sum of the same few terms:

    dL/dz = p * (alpha + beta * p^(power - 1) [k != y] + eta * log p)  +  entries per row  +  (rarely) a dense term

with coefficients per row, so the gradient is written once. The gradient of each statistic in z:

    -log p_y     p - e_y                       others S     b p_k (p_k^(b-1) [k != y] - S), b the power
    rival q      share_k p_k - q p             entropy H    -p (log p + H)
    mean log p   1/C - p                       log p_max    e_max - p
    norm         sign(z) (|z| / norm)^(b-1)    soft rank    p (r - <r, p>), r the slopes of the sigmoids

The softmax kernels are used as they are: they are fused, and cost less than an exponential by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from hf_calib.losses.statistics.direct import (
    IGNORE_INDEX,
    LOG_ZERO,
    Statistics,
    Wanted,
    rank_terms,
    rivals_below,
    row_norm,
    tiny,
)

# A block of this many elements stays in a core's cache; on an accelerator it only bounds the scratch memory.
CPU_BLOCK_ELEMENTS = 2**18
DEVICE_BLOCK_ELEMENTS = 2**24

_NAMES = [field.name for field in fields(Statistics)]
Rows = dict[str, Tensor]  # named numbers per row, (N,) or (N, k)


class ChunkedStatistics(torch.autograd.Function):
    """`Statistics` of logits (N, C) and labels (N,), with 1x the logits' memory in all: the gradient.

    Its buffer holds the probabilities first, from the forward on, which saves the backward a softmax. 16-bit
    logits have no room for that: a probability rounded to 16 bits would make the gradient less accurate.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, wanted: Wanted) -> tuple[Tensor | None, ...]:
        valid = labels != IGNORE_INDEX
        column = torch.where(valid, labels, 0)[:, None]
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        size = _rows_per_block(logits)
        keep = ctx.needs_input_grad[0] and logits.dtype == dtype
        probs = torch.empty_like(logits, memory_format=torch.contiguous_format) if keep else None
        parts = (_in_dtype(logits, dtype, size), column.split(size), _targets(probs, logits, dtype, size))
        blocks = [_forward_block(z, c, wanted, target) for z, c, target in zip(*parts, strict=True)]
        rows = {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
        values = {name: rows[name].where(valid, rows[name].new_zeros(())) for name in _NAMES if name in rows}
        ctx.wanted, ctx.row_names, ctx.dtype, ctx.probs = wanted, list(rows), dtype, probs
        ctx.save_for_backward(logits, column, valid, *rows.values())
        ctx.set_materialize_grads(False)
        if wanted.top:
            ctx.mark_non_differentiable(values["correct"])
        return tuple(values.get(name) for name in _NAMES)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outer: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, column, valid, *saved = ctx.saved_tensors
        rows = dict(zip(ctx.row_names, saved, strict=True))
        slopes = {n: g.where(valid, 0) for n, g in zip(_NAMES, outer, strict=True) if g is not None}
        coefficients = _coefficients(rows, slopes, ctx.wanted)
        probs, ctx.probs = ctx.probs, None  # they become the gradient; a second backward starts afresh
        gradient = torch.empty_like(logits) if probs is None else probs
        size = _rows_per_block(logits)
        parts = (
            gradient.split(size),
            _in_dtype(logits, ctx.dtype, size),
            column.split(size),
            _split(coefficients, size),
            _targets(probs, logits, ctx.dtype, size),
        )
        for target, z, c, block, block_probs in zip(*parts, strict=True):
            if probs is None:
                torch._softmax(z, 1, False, out=block_probs)
            _backward_block(block_probs, z, c, block, ctx.wanted)
            if probs is None:
                target.copy_(block_probs)
        return gradient, None, None


def _rows_per_block(logits: Tensor) -> int:
    elements = CPU_BLOCK_ELEMENTS if logits.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
    return min(len(logits), max(1, elements // logits.shape[1]))


def _in_dtype(logits: Tensor, dtype: torch.dtype, size: int) -> Iterator[Tensor]:
    """The logits block by block; those of another dtype are converted, in a buffer that the next one reuses."""
    if logits.dtype == dtype:
        yield from logits.split(size)
        return
    buffer = torch.empty(size, logits.shape[1], dtype=dtype, device=logits.device)
    for block in logits.split(size):
        yield buffer[: len(block)].copy_(block)


def _targets(probs: Tensor | None, logits: Tensor, dtype: torch.dtype, size: int) -> Iterator[Tensor]:
    """Where the probabilities of each block go: into `probs`, or all into one buffer."""
    if probs is not None:
        yield from probs.split(size)
        return
    buffer = torch.empty(size, logits.shape[1], dtype=dtype, device=logits.device)
    for block in logits.split(size):
        yield buffer[: len(block)]


def _split(rows: Rows, size: int) -> Iterator[Rows]:
    for parts in zip(*(values.split(size) for values in rows.values()), strict=True):
        yield dict(zip(rows, parts, strict=True))


def _forward_block(z: Tensor, column: Tensor, wanted: Wanted, probs: Tensor) -> Rows:
    """The statistics of one block, and what the backward needs beside them; fills `probs`."""
    rows: Rows = {}
    if wanted.top:
        z_max, predicted = z.max(1)
        rows |= {"predicted": predicted[:, None], "correct": predicted == column.squeeze(1)}
    else:
        z_max = z.amax(1)
    torch._softmax(z, 1, False, out=probs)
    log_p_max = probs.amax(1).log()
    rows["cross_entropy"] = z_max - z.gather(1, column).squeeze(1) - log_p_max
    if wanted.top:
        rows["log_max"] = log_p_max
    if wanted.norm is not None:
        rows["norm"] = row_norm(z, wanted.norm)
    if wanted.mean_log_p:
        finite = _finite(z)
        rows["finite"] = finite.sum(1)
        log_ratio = (z - z_max[:, None]).clamp_min_(torch.finfo(z.dtype).min)  # times 0, it is 0
        rows["mean_log_p"] = torch.linalg.vecdot(log_ratio, finite) / rows["finite"] + log_p_max
    if wanted.entropy:
        log_ratio = (z - z_max[:, None]).clamp_min_(LOG_ZERO)
        rows["entropy"] = -torch.linalg.vecdot(probs, log_ratio) - log_p_max
        rows |= {"z_max": z_max, "log_p_max": log_p_max}
    if wanted.rival is not None:
        index, share = rivals_below(z, column, wanted.rival)
        rows |= {"rival_index": index, "rival_probs": probs.gather(1, index) * share}
        rows["rival"] = rows["rival_probs"].sum(1)
    if wanted.rank_sharpness is not None:
        rows["soft_rank"] = rank_terms(probs, column, wanted.rank_sharpness).sum(1)
    if wanted.power is not None:
        # Without the label's own, so that nothing cancels when it has nearly all the mass.
        at_label = probs.gather(1, column)
        probs.scatter_(1, column, 0)
        rows["others"] = torch.linalg.vector_norm(probs, wanted.power, dim=1).pow(wanted.power)
        probs.scatter_(1, column, at_label)
    return rows


def _finite(z: Tensor) -> Tensor:
    """1.0 for each class that is not masked (-inf): a float mask is several times faster than a bool one."""
    return torch.gt(z, -torch.inf, out=torch.empty_like(z))


def _coefficients(rows: Rows, slopes: Rows, wanted: Wanted) -> Rows:
    """Fold the outer derivatives into the per-row coefficients that the blocks apply."""
    found: Rows = {}
    alpha = at_label = torch.zeros_like(rows["cross_entropy"])
    if (slope := slopes.get("cross_entropy")) is not None:
        alpha, at_label = alpha + slope, at_label - slope
    if (slope := slopes.get("others")) is not None and wanted.power is not None:
        found["beta"] = slope * wanted.power
        alpha = alpha - found["beta"] * rows["others"]
    if (slope := slopes.get("rival")) is not None:
        found |= {"rival_index": rows["rival_index"], "at_rival": slope[:, None] * rows["rival_probs"]}
        alpha = alpha - slope * rows["rival"]
    if (slope := slopes.get("entropy")) is not None:
        found |= {"eta": -slope, "z_max": rows["z_max"]}
        alpha = alpha - slope * (rows["entropy"] + rows["log_p_max"])
    if (slope := slopes.get("mean_log_p")) is not None:
        found["at_finite"] = slope / rows["finite"]
        alpha = alpha - slope
    if (slope := slopes.get("log_max")) is not None:
        found |= {"predicted": rows["predicted"], "at_predicted": slope}
        alpha = alpha - slope
    if (slope := slopes.get("norm")) is not None:
        found |= {"norm": rows["norm"], "norm_slope": slope}
    if (slope := slopes.get("soft_rank")) is not None:
        found["rank_slope"] = slope
    found |= {"alpha": alpha, "at_label": at_label}
    return {name: values if values.dim() == 2 else values[:, None] for name, values in found.items()}


def _backward_block(probs: Tensor, z: Tensor, column: Tensor, rows: Rows, wanted: Wanted) -> None:
    """Turn the probabilities of one block into its gradient, in place; all `rows` are (n, k)."""
    factor = rows["alpha"]
    if "beta" in rows and wanted.power is not None:
        powers = probs if wanted.power == 2 else probs.pow(wanted.power - 1)
        factor = (powers * rows["beta"]).scatter_(1, column, 0).add_(factor)
    if "eta" in rows:
        log_ratio = (z - rows["z_max"]).clamp_min_(LOG_ZERO)
        factor = log_ratio.mul_(rows["eta"]).add_(factor)
    if "rank_slope" in rows:
        factor = factor + rows["rank_slope"] * _rank_factor(probs, column, wanted.rank_sharpness or 0.0)
    gradient = probs.mul_(factor)
    gradient.scatter_add_(1, column, rows["at_label"])
    if "at_rival" in rows:
        gradient.scatter_add_(1, rows["rival_index"], rows["at_rival"])
    if "at_predicted" in rows:
        gradient.scatter_add_(1, rows["predicted"], rows["at_predicted"])
    if "at_finite" in rows:
        gradient += _finite(z).mul_(rows["at_finite"])
    if "norm_slope" in rows:
        gradient += rows["norm_slope"] * _norm_gradient(z, rows["norm"], wanted.norm or 1.0)


def _rank_factor(probs: Tensor, column: Tensor, sharpness: float) -> Tensor:
    """r - <r, p>, with r the derivative of the soft rank in the probabilities."""
    terms = rank_terms(probs, column, sharpness)
    r = sharpness * terms * (1 - terms)
    r.scatter_(1, column, -r.sum(1, keepdim=True))
    return r - torch.linalg.vecdot(r, probs)[:, None]


def _norm_gradient(z: Tensor, norm: Tensor, order: float) -> Tensor:
    finite = z.where(z > -torch.inf, 0)
    if order == 1:
        return finite.sign()
    return finite.sign() * (finite.abs() / norm.clamp_min(tiny(z))).pow(order - 1)
