# mypy: disable-error-code="no-untyped-def"
"""Kernels of `fused`: one program for each row of logits, which reads the row once.

The flags are compile-time constants, so that statistics which a loss does not read cost nothing. Rows longer than a
block are read in blocks, relative to a running maximum. Everything is computed in WIDE: float32 or float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG_ZERO = tl.constexpr(-1e4)  # as `definitions.LOG_ZERO`
TINY = tl.constexpr(1.1754943508222875e-38)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def _power(x, exponent: tl.constexpr):
    """x ** exponent for x >= 0; a floor keeps the logarithm finite."""
    if exponent == 0:
        return x * 0 + 1
    elif exponent == 1:
        return x
    elif exponent == 2:
        return x * x
    else:
        return tl.exp(exponent * tl.log(tl.maximum(x, TINY)))


@triton.jit
def _insert(value, index, v1, i1, v2, i2, v3, i3):
    """Insert a value into three descending values."""
    first, second, third = value > v1, value > v2, value > v3
    n3 = tl.where(second, v2, tl.where(third, value, v3))
    j3 = tl.where(second, i2, tl.where(third, index, i3))
    n2 = tl.where(first, v1, tl.where(second, value, v2))
    j2 = tl.where(first, i1, tl.where(second, index, i2))
    return tl.where(first, value, v1), tl.where(first, index, i1), n2, j2, n3, j3


@triton.jit
def forward_kernel(
    logits, stride_n, stride_c, labels, n_cols,
    z_max_out, log_sum_out, z_label_out, predicted_out,
    powers_out, log_ratios_out, mean_out, count_out, norm_out,
    rivals_out, rival_index_out, below_out, below_count_out,
    POWER: tl.constexpr, ENTROPY: tl.constexpr, MEAN: tl.constexpr, NORM: tl.constexpr,
    PREDICTED: tl.constexpr, RIVALS: tl.constexpr, BELOW: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    if label >= 0:
        start_of_row = logits + row * stride_n
        z_label = tl.load(start_of_row + label * stride_c).to(WIDE)
        zero = tl.full([], 0.0, WIDE)
        total, powers, log_ratios, finite_sum, finite_count = (
            zero,
            zero,
            zero,
            zero,
            zero,
        )
        largest, norm, below, below_count = zero, zero, zero, zero
        z_max = tl.full([], NEG_INF, WIDE)
        v1, v2, v3 = z_max, z_max, z_max
        first = label * 0
        predicted, i1, i2, i3 = first, first, first, first
        for start in range(0, n_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            inside = cols < n_cols
            at = start_of_row + cols.to(tl.int64) * stride_c
            z = tl.load(at, mask=inside, other=NEG_INF).to(WIDE)
            block_max = tl.max(z, 0)
            if PREDICTED:
                argmax = tl.min(tl.where(z == block_max, cols, n_cols), 0)
                predicted = tl.where(block_max > z_max, argmax.to(tl.int64), predicted)
            new_max = tl.maximum(z_max, block_max)
            # If all columns so far are masked, the maximum is -inf and must not be subtracted.
            shift = tl.where(new_max == NEG_INF, 0.0, new_max)
            drop = tl.where(z_max == NEG_INF, LOG_ZERO, z_max - shift)
            e = tl.exp(z - shift)
            scale = tl.exp(drop)
            if ENTROPY:
                ratio = tl.maximum(z - shift, LOG_ZERO)
                log_ratios = scale * (log_ratios + total * drop) + tl.sum(
                    tl.where(inside, e * ratio, 0.0), 0
                )
            total = total * scale + tl.sum(e, 0)
            if POWER > 0:
                others = tl.where(
                    inside & (cols != label), tl.exp(POWER * (z - shift)), 0.0
                )
                powers = powers * tl.exp(POWER * drop) + tl.sum(others, 0)
            if MEAN:
                is_finite = inside & (z > NEG_INF)
                finite_sum += finite_count * drop + tl.sum(
                    tl.where(is_finite, z - shift, 0.0), 0
                )
                finite_count += tl.sum(is_finite.to(WIDE), 0)
            if NORM > 0:
                size = tl.where(inside & (z > NEG_INF), tl.abs(z), 0.0)
                if NORM == 1:
                    norm += tl.sum(size, 0)
                else:
                    new_largest = tl.maximum(largest, tl.max(size, 0))
                    relative = tl.maximum(new_largest, TINY)
                    norm = norm * _power(largest / relative, NORM)
                    norm += tl.sum(
                        tl.where(size > 0, _power(size / relative, NORM), 0.0), 0
                    )
                    largest = new_largest
            if RIVALS > 0:
                rest = tl.where(inside & (z < z_label), z, NEG_INF)
                for _ in tl.static_range(RIVALS):
                    value = tl.max(rest, 0)
                    index = tl.min(tl.where(rest == value, cols, n_cols), 0)
                    v1, i1, v2, i2, v3, i3 = _insert(
                        value, index.to(tl.int64), v1, i1, v2, i2, v3, i3
                    )
                    rest = tl.where(cols == index, NEG_INF, rest)
            if BELOW:
                is_below = inside & (z < z_label) & (z > NEG_INF)
                below = below * scale + tl.sum(tl.where(is_below, e, 0.0), 0)
                below_count += tl.sum(is_below.to(WIDE), 0)
            z_max = new_max
        log_sum = tl.log(total)
        tl.store(z_max_out + row, z_max)
        tl.store(log_sum_out + row, log_sum)
        tl.store(z_label_out + row, z_label)
        if PREDICTED:
            tl.store(predicted_out + row, predicted)
        if POWER > 0:
            tl.store(powers_out + row, powers * tl.exp(-POWER * log_sum))
        if ENTROPY:
            tl.store(log_ratios_out + row, log_ratios / total)
        if MEAN:
            tl.store(mean_out + row, finite_sum / finite_count)
            tl.store(count_out + row, finite_count)
        if NORM == 1:
            tl.store(norm_out + row, norm)
        elif NORM > 0:
            tl.store(norm_out + row, _power(norm, 1 / NORM) * tl.maximum(largest, TINY))
        if RIVALS > 0:
            at = rivals_out + row * RIVALS
            index_at = rival_index_out + row * RIVALS
            tl.store(at, v1)
            tl.store(index_at, i1)
            if RIVALS > 1:
                tl.store(at + 1, v2)
                tl.store(index_at + 1, i2)
            if RIVALS > 2:
                tl.store(at + 2, v3)
                tl.store(index_at + 2, i3)
        if BELOW:
            tl.store(below_out + row, below / total)
            tl.store(below_count_out + row, below_count)


@triton.jit
def backward_kernel(
    gradient, logits, stride_n, stride_c, labels, n_cols, z_max_in, log_sum_in,
    alpha_in, at_label_in, beta_in, eta_in, at_finite_in, norm_in, at_norm_in,
    predicted_in, at_predicted_in, rival_index_in, at_rival_in, at_below_in,
    POWER: tl.constexpr, ENTROPY: tl.constexpr, MEAN: tl.constexpr, NORM: tl.constexpr,
    PREDICTED: tl.constexpr, RIVALS: tl.constexpr, BELOW: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    start_of_row = logits + row * stride_n
    target = gradient + row * n_cols
    if label < 0:
        for start in range(0, n_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            tl.store(target + cols, tl.zeros([BLOCK], dtype=WIDE), mask=cols < n_cols)
    else:
        z_max = tl.load(z_max_in + row)
        log_sum = tl.load(log_sum_in + row)
        alpha = tl.load(alpha_in + row)
        at_label = tl.load(at_label_in + row)
        z_label = tl.load(start_of_row + label * stride_c).to(WIDE)
        for start in range(0, n_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            inside = cols < n_cols
            at = start_of_row + cols.to(tl.int64) * stride_c
            z = tl.load(at, mask=inside, other=NEG_INF).to(WIDE)
            is_label = cols == label
            distance = z - z_max
            log_p = distance - log_sum
            p = tl.exp(log_p)
            factor = p * 0 + alpha
            if POWER > 0:
                if POWER == 2:
                    power = p
                else:
                    power = tl.exp((POWER - 1) * tl.maximum(log_p, LOG_ZERO))
                factor += tl.where(is_label, 0.0, tl.load(beta_in + row) * power)
            if ENTROPY:
                factor += tl.load(eta_in + row) * tl.maximum(distance, LOG_ZERO)
            slope = p * factor + tl.where(is_label, at_label, 0.0)
            if MEAN:
                slope += tl.where(z > NEG_INF, tl.load(at_finite_in + row), 0.0)
            if NORM > 0:
                own = tl.where(z > 0, 1.0, tl.where(z < 0, -1.0, 0.0))
                own = tl.where(z > NEG_INF, own, 0.0)
                if NORM != 1:
                    size = tl.where(z > NEG_INF, tl.abs(z), 0.0)
                    size = size / tl.maximum(tl.load(norm_in + row), TINY)
                    own *= tl.where(size > 0, _power(size, NORM - 1), 0.0)
                slope += tl.load(at_norm_in + row) * own
            if PREDICTED:
                slope += tl.where(
                    cols == tl.load(predicted_in + row),
                    tl.load(at_predicted_in + row),
                    0.0,
                )
            for k in tl.static_range(RIVALS):
                is_rival = cols == tl.load(rival_index_in + row * RIVALS + k)
                slope += tl.where(
                    is_rival, tl.load(at_rival_in + row * RIVALS + k), 0.0
                )
            if BELOW:
                slope += tl.where(z < z_label, tl.load(at_below_in + row) * p, 0.0)
            tl.store(target + cols, slope, mask=inside)
