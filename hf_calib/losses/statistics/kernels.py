# mypy: disable-error-code="no-untyped-def"
"""Kernels of `fused`: one program for each row of logits.

The arithmetic of formulas comes first, then what a program does: it reads its row for the numbers, evaluates the
formula, and reads the row again for the gradient. The second reading of a row of one block is from the cache.

Compile-time constants are in capitals. KIND is the statistic of the row in addition to the cross entropy, of which
there is at most one; ORDER is its power or order, and FIRST and LAST are the ranks of the rivals. Rows longer than a
block are read in blocks, relative to a running maximum. Everything is computed in float32.
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
def _insert(value, index, v1, i1, v2, i2, v3, i3):
    """Insert a value into three descending values."""
    first = value > v1
    second = value > v2
    third = value > v3
    n3 = tl.where(second, v2, tl.where(third, value, v3))
    j3 = tl.where(second, i2, tl.where(third, index, i3))
    n2 = tl.where(first, v1, tl.where(second, value, v2))
    j2 = tl.where(first, i1, tl.where(second, index, i2))
    return tl.where(first, value, v1), tl.where(first, index, i1), n2, j2, n3, j3


@triton.jit
def _rival(log_p, index, is_wanted):
    """The probability of a class, the number 1, and its index; 0, 0 and -1 if it is not wanted or there is none."""
    exists = (log_p > NEG_INF) & is_wanted
    p = tl.where(exists, tl.exp(log_p), 0.0)
    return p, exists.to(tl.float32), tl.where(exists, index, -1)


@triton.jit
def _numbers_of(
    start_of_row, stride_c, label, n_cols,
    KIND: tl.constexpr, ORDER: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    PREDICTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum, log sum, cross entropy and statistic of a row, the number of classes of which the statistic is a mean,
    the index of the predicted class, and those of the rivals, -1 for none."""
    z_label = tl.load(start_of_row + label * stride_c).to(tl.float32)
    zero = tl.full([], 0.0, tl.float32)
    total = zero
    found = zero
    count = zero
    largest = zero
    z_max = tl.full([], NEG_INF, tl.float32)
    v1 = z_max
    v2 = z_max
    v3 = z_max
    predicted = tl.full([], 0, tl.int32)
    i1 = predicted
    i2 = predicted
    i3 = predicted
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < n_cols
        at = start_of_row + cols.to(tl.int64) * stride_c
        z = tl.load(at, mask=inside, other=NEG_INF).to(tl.float32)
        block_max = tl.max(z, 0)
        if PREDICTED:
            argmax = tl.min(tl.where(z == block_max, cols, n_cols), 0)
            predicted = tl.where(block_max > z_max, argmax, predicted)
        new_max = tl.maximum(z_max, block_max)
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
            size = tl.where(is_unmasked, tl.abs(z), 0.0)
            if ORDER == 1:
                found += tl.sum(size, 0)
            else:
                new_largest = tl.maximum(largest, tl.max(size, 0))
                relative = tl.maximum(new_largest, TINY)
                powers = tl.where(size > 0, power_of(size / relative, ORDER), 0.0)
                found = found * power_of(largest / relative, ORDER) + tl.sum(powers, 0)
                largest = new_largest
        if KIND == "rivals":
            rest = tl.where(inside & (z < z_label), z, NEG_INF)
            for _ in tl.static_range(LAST):
                value = tl.max(rest, 0)
                index = tl.min(tl.where(rest == value, cols, n_cols), 0)
                v1, i1, v2, i2, v3, i3 = _insert(value, index, v1, i1, v2, i2, v3, i3)
                rest = tl.where(cols == index, NEG_INF, rest)
        if KIND == "all below":
            is_below = is_unmasked & (z < z_label)
            found = found * scale + tl.sum(tl.where(is_below, e, 0.0), 0)
            count += tl.sum(is_below.to(tl.float32), 0)
        total = total * scale + tl.sum(e, 0)
        z_max = new_max
    log_sum = tl.log(total)
    if KIND == "entropy":
        found = log_sum - found / total
    if KIND == "powers":
        found *= tl.exp(-ORDER * log_sum)
    if KIND == "mean":
        found = found / count - log_sum
    if KIND == "norm" and ORDER != 1:
        found = power_of(found, 1 / ORDER) * tl.maximum(largest, TINY)
    if KIND == "rivals":
        p1, n1, i1 = _rival(v1 - z_max - log_sum, i1, FIRST <= 0)
        p2, n2, i2 = _rival(v2 - z_max - log_sum, i2, FIRST <= 1 and LAST >= 2)
        p3, n3, i3 = _rival(v3 - z_max - log_sum, i3, LAST >= 3)
        count = n1 + n2 + n3
        found = (p1 + p2 + p3) / tl.maximum(count, 1.0)
    if KIND == "all below":
        found /= total * tl.maximum(count, 1.0)
    return (
        z_max,
        log_sum,
        z_max - z_label + log_sum,
        found,
        count,
        predicted,
        i1,
        i2,
        i3,
    )


@triton.jit
def _write_gradient(
    target, start_of_row, stride_c, label, n_cols,
    z_max, log_sum, number, count, predicted, i1, i2, i3, by_ce, by_number, by_confidence,
    KIND: tl.constexpr, ORDER: tl.constexpr, PREDICTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient m - p * sum(m) of slopes by the numbers of a row; `definitions` has the derivatives m."""
    of_p = by_ce
    if KIND == "powers":
        of_p -= ORDER * by_number * number
    if KIND == "entropy" or KIND == "rivals" or KIND == "all below":
        of_p -= by_number * number
    if KIND == "mean":
        of_p -= by_number
    if KIND != "" and KIND != "powers":
        of_class = by_number / tl.maximum(count, 1.0)
    if PREDICTED:
        at_predicted = by_confidence * tl.exp(-log_sum)
        of_p -= at_predicted
    z_label = tl.load(start_of_row + label * stride_c).to(tl.float32)
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
            found += tl.where(z > NEG_INF, of_class, 0.0)
        if KIND == "norm":
            own = tl.where(z > 0, 1.0, tl.where(z < 0, -1.0, 0.0))
            own = tl.where(z > NEG_INF, own, 0.0)
            if ORDER != 1:
                size = tl.where(z > NEG_INF, tl.abs(z), 0.0) / tl.maximum(number, TINY)
                own *= tl.where(size > 0, power_of(size, ORDER - 1), 0.0)
            found += by_number * own
        if KIND == "rivals":
            is_rival = (cols == i1) | (cols == i2) | (cols == i3)
            found += tl.where(is_rival, of_class * p, 0.0)
        if KIND == "all below":
            found += tl.where(z < z_label, of_class * p, 0.0)
        if PREDICTED:
            found += tl.where(cols == predicted, at_predicted, 0.0)
        tl.store(target + cols, found, mask=inside)


@triton.jit
def _write_zeros(target, n_cols, BLOCK: tl.constexpr):
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        tl.store(target + cols, tl.zeros([BLOCK], tl.float32), mask=cols < n_cols)


# ---- The kernels ----

# What is kept of a row: its maximum, log sum, cross entropy, statistic and count, the slopes by the cross entropy and
# the statistic, and the indices of the predicted class and of three rivals, which float32 holds up to 2^24 classes.
KEPT = tl.constexpr(11)


@triton.jit
def forward_kernel(
    logits, stride_n, stride_c, labels, n_cols, is_right, kept,
    shares, edges, bins, n_edges, values, gradient,
    FORMULA: tl.constexpr, HAS_NUMBER: tl.constexpr, GRADIENT: tl.constexpr, KEEPS: tl.constexpr,
    KIND: tl.constexpr, ORDER: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    PREDICTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the values of the formula and their gradient, or keep the numbers of the rows and the slopes by them.

    `is_right` becomes 0 if a label is neither a class nor ignored.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    target = gradient + row * n_cols
    keep = kept + row * KEPT
    if (label >= 0) & (label < n_cols):
        start_of_row = logits + row * stride_n
        z_max, log_sum, ce, number, count, predicted, i1, i2, i3 = _numbers_of(
            start_of_row, stride_c, label, n_cols, KIND, ORDER, FIRST, LAST, PREDICTED,
            BLOCK,
        )  # fmt: skip
        if FORMULA is not None:
            share = tl.load(shares + row)
            if HAS_NUMBER:
                value, by_ce, by_number = FORMULA(ce, number, edges, bins, n_edges)
            else:
                value, by_ce = FORMULA(ce, edges, bins, n_edges)
                by_number = 0.0
            by_ce *= share
            by_number *= share
            tl.store(values + row, value * share)
            if KEEPS:
                tl.store(keep + 5, by_ce)
                tl.store(keep + 6, by_number)
            if GRADIENT:
                _write_gradient(
                    target, start_of_row, stride_c, label, n_cols, z_max, log_sum, number,
                    count, predicted, i1, i2, i3, by_ce, by_number, 0.0, KIND, ORDER,
                    PREDICTED, BLOCK,
                )  # fmt: skip
        if KEEPS:
            tl.store(keep, z_max)
            tl.store(keep + 1, log_sum)
            tl.store(keep + 2, ce)
            tl.store(keep + 3, number)
            tl.store(keep + 4, count)
            tl.store(keep + 7, predicted)
            tl.store(keep + 8, i1)
            tl.store(keep + 9, i2)
            tl.store(keep + 10, i3)
    else:
        if label != IGNORED:
            tl.store(is_right, 0)
        if FORMULA is not None:
            tl.store(values + row, 0.0)
        if GRADIENT:
            _write_zeros(target, n_cols, BLOCK)
        if KEEPS:
            for i in tl.static_range(KEPT):
                tl.store(keep + i, 0.0)


@triton.jit
def backward_kernel(
    logits, stride_n, stride_c, labels, n_cols, gradient, kept,
    by_ce, stride_ce, by_number, stride_number, by_confidence, stride_confidence, scale, stride_scale,
    KIND: tl.constexpr, ORDER: tl.constexpr, PREDICTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient for slopes by the numbers that the forward kernel has kept, times the scale."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    target = gradient + row * n_cols
    keep = kept + row * KEPT
    slope = tl.load(scale + row * stride_scale)
    if (label >= 0) & (label < n_cols):
        _write_gradient(
            target, logits + row * stride_n, stride_c, label, n_cols,
            tl.load(keep), tl.load(keep + 1), tl.load(keep + 3),
            tl.load(keep + 4), tl.load(keep + 7),
            tl.load(keep + 8), tl.load(keep + 9),
            tl.load(keep + 10), slope * tl.load(by_ce + row * stride_ce),
            slope * tl.load(by_number + row * stride_number),
            slope * tl.load(by_confidence + row * stride_confidence),
            KIND, ORDER, PREDICTED, BLOCK,
        )  # fmt: skip
    else:
        _write_zeros(target, n_cols, BLOCK)
