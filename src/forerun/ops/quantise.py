"""Writers of weight blocks: from float32 to the bytes of a format.

Knows no tensor but its name, for messages; `ops.formats` says what is converted to what.

Shape legend: B blocks.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from forerun.errors import LoadError
from forerun.types import Float32Array

UInt8Array = npt.NDArray[np.uint8]
QuantFormat = Literal["f32", "bf16", "q4_1", "q8_0"]

# Ranges tried for a 4-bit block, relative to its full one: giving up the extremes makes every step finer.
RANGE_SHRINKS = (1.0, 0.92, 0.85)
FP16_MAX = 65504.0
FP16_TINY = 2.0**-25  # rounds to 0 in fp16, half the smallest number above it


def encode_blocks(values: Float32Array, fmt: QuantFormat, name: str) -> UInt8Array:
    """A run of weights as blocks; errors are as small as a cheap search makes them.

    `bf16` rounds to nearest, ties to even. `q8_0` uses d = max |w| / 127. `q4_1` tries a few ranges per block, fits d
    and m to the codes by least squares and keeps the least squared error. Codes are chosen for the fp16 d and m that
    are stored, not for their exact values.

    Args:
        values: [B * block length] float32.
        fmt: the format to make.
        name: the tensor's name, for messages.
    Returns:
        [B * block bytes] uint8.
    Raises:
        LoadError: a value is not finite, or too large for bf16 or an fp16 scale.
    """
    if not np.isfinite(values).all():
        raise LoadError(f"tensor {name} holds a value that is not a finite number")
    if fmt == "f32":
        return np.ascontiguousarray(values, "<f4").view(np.uint8)
    if fmt == "bf16":
        return _encode_bf16(values, name)
    blocks = values.reshape(-1, 32)
    return (_encode_q8_0(blocks, name) if fmt == "q8_0" else _encode_q4_1(blocks, name)).reshape(-1)


def _encode_bf16(values: Float32Array, name: str) -> UInt8Array:
    bits = np.ascontiguousarray(values).view(np.uint32)
    # Adding half of the last kept bit, less one where that bit is 0, carries exactly when the value rounds up.
    rounded = ((bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16).astype("<u2")
    if ((rounded & 0x7F80) == 0x7F80).any():
        raise LoadError(f"tensor {name} holds {np.abs(values).max():.3g}, too large for bf16")
    return rounded.view(np.uint8)


def _encode_q8_0(blocks: Float32Array, name: str) -> UInt8Array:
    amax = np.abs(blocks).max(axis=1, keepdims=True)
    _require_at_most(amax, FP16_MAX * 127, name)
    d = (amax / np.float32(127)).astype("<f2")
    codes = np.rint(blocks * _reciprocal(d.astype(np.float32))).clip(-127, 127)
    return np.concatenate([d.view(np.uint8), codes.astype(np.int8).view(np.uint8)], axis=1)


def _encode_q4_1(blocks: Float32Array, name: str) -> UInt8Array:
    low = blocks.min(axis=1, keepdims=True)
    high = blocks.max(axis=1, keepdims=True)
    _require_at_most(np.maximum(-low, high), FP16_MAX, name)
    mean = blocks.mean(axis=1, keepdims=True)
    centred = blocks - mean
    d, m = ((high - low) / np.float32(15)).astype("<f2"), low.astype("<f2")
    codes, error = _codes_q4_1(blocks, d, m)
    for shrink in RANGE_SHRINKS:
        # Shrink towards the middle of the block, then fit d and m to the codes that follow.
        step = (high - low) * np.float32(shrink / 15)
        fit = blocks - (high + low - step * np.float32(15)) * np.float32(0.5)
        fit *= _reciprocal(step)
        np.rint(fit, out=fit)
        np.clip(fit, 0, 15, out=fit)
        fit_mean = fit.mean(axis=1, keepdims=True)
        fit -= fit_mean
        slope = _row_dot(fit, centred) * _reciprocal(_row_dot(fit, fit))
        new_d = slope.clip(0, FP16_MAX).astype("<f2")
        new_m = (mean - slope * fit_mean).clip(-FP16_MAX, FP16_MAX).astype("<f2")
        new_codes, new_error = _codes_q4_1(blocks, new_d, new_m)
        better = (new_error < error)[:, 0]
        d[better], m[better] = new_d[better], new_m[better]
        codes[better], error[better] = new_codes[better], new_error[better]
    packed = codes[:, :16] | (codes[:, 16:] << 4)
    return np.concatenate([d.view(np.uint8), m.view(np.uint8), packed], axis=1)


def _codes_q4_1(
    blocks: Float32Array, d: npt.NDArray[np.float16], m: npt.NDArray[np.float16]
) -> tuple[UInt8Array, Float32Array]:
    """The nearest codes [B, 32] uint8 for given d and m [B, 1], and the squared error [B, 1]."""
    d32, m32 = d.astype(np.float32), m.astype(np.float32)
    off = blocks - m32
    codes = off * _reciprocal(d32)
    np.rint(codes, out=codes)
    np.clip(codes, 0, 15, out=codes)
    off -= codes * d32
    return codes.astype(np.uint8), _row_dot(off, off)


def _row_dot(a: Float32Array, b: Float32Array) -> Float32Array:
    """Dot products of the rows of a and b: [B, 1]."""
    dots: Float32Array = np.einsum("bk,bk->b", a, b)
    return dots[:, None]


def _reciprocal(values: Float32Array) -> Float32Array:
    """1 / x, and 0 where x would be 0 as an fp16 scale."""
    return np.divide(1, values, out=np.zeros_like(values), where=np.abs(values) > FP16_TINY)


def _require_at_most(amax: Float32Array, limit: float, name: str) -> None:
    if amax.max() > limit:
        raise LoadError(f"tensor {name} holds {amax.max():.3g}, too large for the fp16 scale of a quantised block")
