# mypy: disable-error-code="no-untyped-def"
"""Kernels of `fused`: one program for each row of logits.

The arithmetic of formulas comes first, then what a program does: it reads its row for the numbers,
evaluates the formula, and reads the row again for the gradient. The second reading of a row of one
block is from the cache.

Compile-time constants are in capitals. KIND is the statistic of the row in addition to the cross
entropy, of which there is at most one, and ORDER the power of "powers". Rows longer than a block
are read in blocks, relative to a running maximum. Everything is computed in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

IGNORED = tl.constexpr(-100)
IMPOSSIBLE = tl.constexpr(1e30)  # as `arithmetic.IMPOSSIBLE`
LOG_ZERO = tl.constexpr(-1e4)  # as `definitions.LOG_ZERO`
TINY = tl.constexpr(1.1754943508222875e-38)
NEG_INF = tl.constexpr(float("-inf"))


# ---- The functions of `arithmetic`, by the same names ----


@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def expm1(x):
    # The arguments are at most 0. Near 0 it is Taylor's series to x^8 / 8!.
    near = tl.maximum(x, -0.5)
    series = 1 + near / 7 * (1 + near / 8)
    series = 1 + near / 4 * (1 + near / 5 * (1 + near / 6 * series))
    series = near * (1 + near / 2 * (1 + near / 3 * series))
    return tl.where(x > -0.5, series, tl.exp(x) - 1)


@triton.jit
def abs(x):
    return tl.abs(x)


@triton.jit
def where(condition, x, y):
    return tl.where(condition, x, y)


@triton.jit
def at_most(x, limit):
    return tl.minimum(x, limit)


@triton.jit
def number_or_zero(x):
    return tl.where(x == x, x, 0.0)


@triton.jit
def constant(x):
    return x


@triton.jit
def power_of(base, exponent):
    # Exponents of a table are tensors, all others are compile-time constants.
    if isinstance(exponent, tl.tensor):
        return tl.exp(exponent * tl.log(tl.maximum(base, TINY)))
    elif exponent == 1:
        return base
    elif exponent == 2:
        return base * base
    else:
        return tl.exp(exponent * tl.log(tl.maximum(base, TINY)))


@triton.jit
def two_powers(base, exponent):
    return power_of(base, exponent), power_of(base, exponent - 1)


@triton.jit
def plus_product(x, factor, y, z):
    return x + factor * y * z


@triton.jit
def possible(log_p):
    return tl.where(log_p <= -IMPOSSIBLE, 0.0, log_p)


@triton.jit
def weighted(ce, weight):
    return weight * ce


@triton.jit
def look_up(edges, values, n_edges, position):
    """The table is its two vectors and the length of the first."""
    index = tl.full([], 0, tl.int32)
    for i in range(0, n_edges):
        index += (tl.load(edges + i) <= position).to(tl.int32)
    return tl.load(values + index)


# ---- The parts of a program ----


@triton.jit
def _numbers_of(
    start_of_row, stride_c, label, n_cols,
    KIND: tl.constexpr, ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum, log sum, cross entropy and statistic of a row, the number of classes of which the
    statistic is a mean, and the index of the rival, -1 if there is none."""
    z_label = tl.load(start_of_row + label * stride_c).to(tl.float32)
    zero = tl.full([], 0.0, tl.float32)
    total = zero
    found = zero
    count = zero
    z_max = tl.full([], NEG_INF, tl.float32)
    z_rival = z_max
    rival = tl.full([], -1, tl.int32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < n_cols
        at = start_of_row + cols.to(tl.int64) * stride_c
        z = tl.load(at, mask=inside, other=NEG_INF).to(tl.float32)
        new_max = tl.maximum(z_max, tl.max(z, 0))
        # If all columns so far are masked, the maximum is -inf and must not be subtracted.
        shift = tl.where(new_max == NEG_INF, 0.0, new_max)
        drop = tl.where(z_max == NEG_INF, LOG_ZERO, z_max - shift)
        e = tl.exp(z - shift)
        scale = tl.exp(drop)
        is_unmasked = inside & (z > NEG_INF)
        if KIND == "entropy":
            products = e * tl.maximum(z - shift, LOG_ZERO)
            found = scale * (found + total * drop)
            found += tl.sum(tl.where(inside, products, 0.0), 0)
        if KIND == "powers":
            powers = tl.exp(ORDER * (z - shift))
            others = tl.where(inside & (cols != label), powers, 0.0)
            found = found * tl.exp(ORDER * drop) + tl.sum(others, 0)
        if KIND == "mean":
            found += count * drop + tl.sum(tl.where(is_unmasked, z - shift, 0.0), 0)
            count += tl.sum(is_unmasked.to(tl.float32), 0)
        if KIND == "norm":
            found += tl.sum(tl.where(is_unmasked, tl.abs(z), 0.0), 0)
        if KIND == "rival":
            below = tl.where(inside & (z < z_label), z, NEG_INF)
            nearest = tl.max(below, 0)
            index = tl.min(tl.where(below == nearest, cols, n_cols), 0)
            rival = tl.where(nearest > z_rival, index, rival)
            z_rival = tl.maximum(z_rival, nearest)
        total = total * scale + tl.sum(e, 0)
        z_max = new_max
    log_sum = tl.log(total)
    if KIND == "entropy":
        found = log_sum - found / total
    if KIND == "powers":
        found *= tl.exp(-ORDER * log_sum)
    if KIND == "mean":
        found = found / count - log_sum
    if KIND == "rival":
        # Its probability is 0 if there is none.
        found = tl.where(rival < 0, 0.0, tl.exp(z_rival - z_max - log_sum))
    ce = z_max - z_label + log_sum
    return z_max, log_sum, ce, found, count, rival


@triton.jit
def _write_gradient(
    target, start_of_row, stride_c, label, n_cols,
    z_max, log_sum, number, count, rival, by_ce, by_number,
    KIND: tl.constexpr, ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient m - p * sum(m) of slopes by the numbers of a row; `definitions` has the
    derivatives m."""
    of_p = by_ce
    if KIND == "powers":
        of_p -= ORDER * by_number * number
    if KIND == "entropy" or KIND == "rival":
        of_p -= by_number * number
    if KIND == "mean":
        of_p -= by_number
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < n_cols
        at = start_of_row + cols.to(tl.int64) * stride_c
        z = tl.load(at, mask=inside, other=NEG_INF).to(tl.float32)
        log_p = z - z_max - log_sum
        p = tl.exp(log_p)
        found = p * of_p - tl.where(cols == label, by_ce, 0.0)
        if KIND == "powers":
            power = tl.exp(ORDER * tl.maximum(log_p, LOG_ZERO))
            found += tl.where(cols == label, 0.0, ORDER * by_number * power)
        if KIND == "entropy":
            found -= by_number * p * tl.maximum(log_p, LOG_ZERO)
        if KIND == "mean":
            found += tl.where(z > NEG_INF, by_number / count, 0.0)
        if KIND == "norm":
            sign = tl.where(z > 0, 1.0, tl.where(z < 0, -1.0, 0.0))
            found += tl.where(z > NEG_INF, by_number * sign, 0.0)
        if KIND == "rival":
            found += tl.where(cols == rival, by_number * p, 0.0)
        tl.store(target + cols, found, mask=inside)


@triton.jit
def _write_zeros(target, n_cols, BLOCK: tl.constexpr):
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        tl.store(target + cols, tl.zeros([BLOCK], tl.float32), mask=cols < n_cols)


# ---- The kernels ----

# What is kept of a row: its maximum, log sum, statistic and count, the index of the rival, which
# float32 holds up to 2^24 classes, and the slopes by the cross entropy and the statistic.
KEPT = tl.constexpr(7)


@triton.jit
def forward_kernel(
    logits, stride_n, stride_c, labels, n_cols, is_right, kept,
    shares, edges, bins, n_edges, values, gradient,
    FORMULA: tl.constexpr, HAS_NUMBER: tl.constexpr, GRADIENT: tl.constexpr, KEEPS: tl.constexpr,
    KIND: tl.constexpr, ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the values of the formula, and their gradient,
    or keep the numbers of the rows and the slopes by them.

    `is_right` becomes 0 if a label is neither a class nor ignored.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    target = gradient + row * n_cols
    keep = kept + row * KEPT
    if (label >= 0) & (label < n_cols):
        start_of_row = logits + row * stride_n
        z_max, log_sum, ce, number, count, rival = _numbers_of(
            start_of_row, stride_c, label, n_cols, KIND, ORDER, BLOCK
        )
        share = tl.load(shares + row)
        if HAS_NUMBER:
            value, by_ce, by_number = FORMULA(ce, number, edges, bins, n_edges)
        else:
            value, by_ce = FORMULA(ce, edges, bins, n_edges)
            by_number = 0.0
        by_ce *= share
        by_number *= share
        tl.store(values + row, value * share)
        if GRADIENT:
            _write_gradient(
                target, start_of_row, stride_c, label, n_cols, z_max, log_sum, number,
                count, rival, by_ce, by_number, KIND, ORDER, BLOCK,
            )  # fmt: skip
        if KEEPS:
            tl.store(keep, z_max)
            tl.store(keep + 1, log_sum)
            tl.store(keep + 2, number)
            tl.store(keep + 3, count)
            tl.store(keep + 4, rival)
            tl.store(keep + 5, by_ce)
            tl.store(keep + 6, by_number)
    else:
        if label != IGNORED:
            tl.store(is_right, 0)
        tl.store(values + row, 0.0)
        if GRADIENT:
            _write_zeros(target, n_cols, BLOCK)


@triton.jit
def backward_kernel(
    logits, stride_n, stride_c, labels, n_cols, gradient, kept, slope, stride_slope,
    KIND: tl.constexpr, ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient by what the forward kernel has kept, times the slope."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    target = gradient + row * n_cols
    keep = kept + row * KEPT
    if (label >= 0) & (label < n_cols):
        by_value = tl.load(slope + row * stride_slope)
        _write_gradient(
            target, logits + row * stride_n, stride_c, label, n_cols,
            tl.load(keep), tl.load(keep + 1), tl.load(keep + 2), tl.load(keep + 3),
            tl.load(keep + 4), by_value * tl.load(keep + 5), by_value * tl.load(keep + 6),
            KIND, ORDER, BLOCK,
        )  # fmt: skip
    else:
        _write_zeros(target, n_cols, BLOCK)
