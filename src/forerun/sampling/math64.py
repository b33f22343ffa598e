"""exp, log and sums in float64 whose every bit is defined here.

They use + - * / and bit operations in one written order, never libm or a fused multiply-add, so the native code equals
them with ==. Both are accurate to about one unit in the last place.
"""

from __future__ import annotations

import numpy as np

from forerun.types import Float64Array

NUM_LANES = 16
EXP_ZERO = -708.0  # exp below it is 0, so no result is subnormal

_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # 21 trailing zero bits: its multiples by an exponent are exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_ROUNDER = 1.5 * 2.0**52  # adding it rounds to the nearest integer, which the low bits then hold
_SQRT2 = float.fromhex("0x1.6a09e667f3bcdp+0")
# 1 / n!, from n = 13 down to 2: the Taylor series of exp, whose rest is below 2^-57 for |r| <= ln(2) / 2.
_EXP_SERIES = (
    1.0 / 6227020800.0,
    1.0 / 479001600.0,
    1.0 / 39916800.0,
    1.0 / 3628800.0,
    1.0 / 362880.0,
    1.0 / 40320.0,
    1.0 / 5040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
)


def exp(x: Float64Array) -> Float64Array:
    """exp(x) for x <= 0, elementwise; 0 below -708, so exp(-inf) = 0, and exp(0) = 1.

    x = n ln 2 + r; exp(r) = 1 + r + r^2 (1/2 + r (1/6 + ...)); n is added to the exponent field.
    """
    clamped = np.maximum(x, EXP_ZERO)
    rounded = clamped * _LOG2_E + _ROUNDER
    n = rounded - _ROUNDER
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    tail = np.full_like(r, _EXP_SERIES[0])
    for coefficient in _EXP_SERIES[1:]:
        tail = tail * r + coefficient
    series = (r * r) * tail + r + 1.0
    scaled = (series.view(np.uint64) + (rounded.view(np.uint64) << np.uint64(52))).view(np.float64)
    return np.where(x < EXP_ZERO, 0.0, scaled)


def log(x: Float64Array) -> Float64Array:
    """log(x) for x > 0 and not subnormal, elementwise.

    x = 2^k m with m in [sqrt(1/2), sqrt(2)), f = m - 1, s = f / (2 + f), z = s^2:
    log m = 2 artanh(s) = f - s (f - 2 z (1/3 + z/5 + ... + z^9/21)). Near x = 1 the relative error stays small.
    """
    bits = x.view(np.int64)
    k = ((bits >> 52) - 1023).astype(np.float64)
    m = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(np.float64)
    is_high = m >= _SQRT2
    m = np.where(is_high, m * 0.5, m)
    k = np.where(is_high, k + 1.0, k)
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    series = np.full_like(z, 1.0 / 21.0)
    for odd in range(19, 1, -2):
        series = series * z + 1.0 / odd
    correction = s * (f - 2.0 * (z * series))
    return k * _LN2_HIGH + (f - (correction - k * _LN2_LOW))


def lane_sum(values: Float64Array) -> float:
    """The sum in 16 fixed lanes: lane j adds the values at indices j mod 16 in order, then j and j + 8, 4, 2, 1."""
    num_rows = -(-len(values) // NUM_LANES)
    padded = np.zeros((max(num_rows, 1), NUM_LANES), values.dtype)
    padded.reshape(-1)[: len(values)] = values
    lanes = np.add.accumulate(padded, axis=0)[-1]  # accumulate adds row by row, in order
    half = NUM_LANES // 2
    while half:
        lanes = lanes[:half] + lanes[half : 2 * half]
        half //= 2
    total: float = lanes.item(0)
    return total
