"""Weight formats: what a block holds, how to read it, how to make one from floats.

A row of K weights is a run of blocks. A block of the 4-bit formats keeps weight i in the low and weight i + 16 in the
high half of byte i. Everything here is plain numpy and works on a few rows at a time, so that the temporary arrays
stay in the processor's cache and memory use does not grow with the matrix.

Shape legend: N rows, K weights per row, B blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from forerun.errors import LoadError
from forerun.ops.base import Quant, Weight
from forerun.types import Float32Array

UInt8Array = npt.NDArray[np.uint8]
QuantFormat = Literal["f32", "q4_1", "q8_0"]

CHUNK_WEIGHTS = 1 << 16  # 256 KiB of float32: a handful of temporaries stay near the core
# Ranges tried for a 4-bit block, relative to its full one: giving up the extremes makes every step finer.
RANGE_SHRINKS = (1.0, 0.92, 0.85)
FP16_MAX = 65504.0
FP16_TINY = 2.0**-25  # rounds to 0 in fp16, half the smallest number above it


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a format lays out a row.

    Attributes:
        block_len: weights per block.
        block_bytes: bytes per block.
    """

    block_len: int
    block_bytes: int


FORMATS: Mapping[str, BlockFormat] = {
    "f32": BlockFormat(1, 4),
    "f16": BlockFormat(1, 2),
    "q4_0": BlockFormat(32, 18),  # fp16 d, 16 bytes of codes:          w = d * (code - 8)
    "q4_1": BlockFormat(32, 20),  # fp16 d, fp16 m, 16 bytes of codes:  w = d * code + m
    "q8_0": BlockFormat(32, 34),  # fp16 d, 32 signed codes:            w = d * code
}

# What each choice of `--quant` makes of a matrix, and the formats that are left as they are because converting them
# could only lose. The embedding and the LM head stay at 8 bits under `q4`: they hurt most and are read least.
_MATRIX_TARGET: Mapping[Quant, QuantFormat] = {"f32": "f32", "q8": "q8_0", "q4": "q4_1"}
_HEAD_TARGET: Mapping[Quant, QuantFormat] = {"f32": "f32", "q8": "q8_0", "q4": "q8_0"}
_KEPT: Mapping[Quant, frozenset[str]] = {
    "f32": frozenset({"f32"}),
    "q8": frozenset({"q8_0"}),
    "q4": frozenset({"q4_0", "q4_1"}),
}


def row_bytes(name: str, fmt: str, row_len: int) -> int:
    """Bytes of a row of row_len weights in `fmt`.

    Raises:
        LoadError: row_len is no whole number of blocks; the message names the tensor.
    """
    block = FORMATS[fmt]
    if row_len % block.block_len:
        raise LoadError(
            f"tensor {name} has rows of {row_len} weights, but format {fmt} needs a multiple of {block.block_len}"
        )
    return row_len // block.block_len * block.block_bytes


def dequantize(weight: Weight) -> Float32Array:
    """The matrix in float32, bit for bit what the format's definition says.

    Returns:
        [N, K] float32, a new array.
    Raises:
        LoadError: K is no multiple of the format's block.
    """
    rows = _rows(weight)
    out = np.empty(weight.shape, np.float32)
    for chunk in _row_chunks(weight.shape):
        out[chunk] = _decode(rows[chunk], weight.format)
    return out


def quantize(values: Float32Array, fmt: QuantFormat, name: str) -> Weight:
    """A matrix of floats in another format; errors are as small as a cheap search makes them.

    `q8_0` uses d = max |w| / 127. `q4_1` tries a few ranges per block, fits d and m to the codes by least squares and
    keeps the least squared error. Codes are chosen for the fp16 d and m that are stored, not for their exact values.

    Args:
        values: [N, K] float32, finite.
        fmt: the format to make.
        name: the tensor's name, for messages.
    Raises:
        LoadError: K is no multiple of the block, or a value is not finite or too large for an fp16 scale.
    """
    num_rows, row_len = values.shape
    data = np.empty((num_rows, row_bytes(name, fmt, row_len)), np.uint8)
    for chunk in _row_chunks(values.shape):
        data[chunk] = _encode(values[chunk], fmt, name)
    return Weight(name, fmt, (num_rows, row_len), data.reshape(-1))


def requantize(weight: Weight, quant: Quant | None, *, is_head: bool) -> Weight:
    """The matrix in the format a user's choice of `quant` means.

    Args:
        weight: one matrix as the file holds it.
        quant: None keeps the file's format. `f32` is f32. `q8` is q8_0. `q4` is q4_1, or q4_0 where the file has it.
        is_head: an embedding or LM head: `q4` makes it q8_0, and leaves it alone where it is quantised already.
    Returns:
        The same object where nothing has to change.
    Raises:
        LoadError: as `quantize`.
    """
    if quant is None or weight.format in _KEPT[quant]:
        return weight
    fmt = (_HEAD_TARGET if is_head else _MATRIX_TARGET)[quant]
    if weight.format == fmt:
        return weight
    rows = _rows(weight)
    data = np.empty((weight.shape[0], row_bytes(weight.name, fmt, weight.shape[1])), np.uint8)
    for chunk in _row_chunks(weight.shape):
        data[chunk] = _encode(_decode(rows[chunk], weight.format), fmt, weight.name)
    return Weight(weight.name, fmt, weight.shape, data.reshape(-1))


def _rows(weight: Weight) -> UInt8Array:
    num_rows, row_len = weight.shape
    return weight.data.reshape(num_rows, row_bytes(weight.name, weight.format, row_len))


def _row_chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    num_rows, row_len = shape
    step = max(1, CHUNK_WEIGHTS // row_len)
    return (slice(start, start + step) for start in range(0, num_rows, step))


def _decode(rows: UInt8Array, fmt: str) -> Float32Array:
    """[n, row bytes] uint8 to [n, K] float32."""
    num_rows = rows.shape[0]
    if fmt in ("f32", "f16"):
        # The file may start anywhere, so copy before the bytes are read as numbers.
        return np.ascontiguousarray(rows).view("<f4" if fmt == "f32" else "<f2").astype(np.float32, copy=False)
    blocks = rows.reshape(-1, FORMATS[fmt].block_bytes)
    d = _halves(blocks, 0)
    if fmt == "q8_0":
        values = d * blocks[:, 2:].view(np.int8).astype(np.float32)
    elif fmt == "q4_0":
        values = d * (_nibbles(blocks[:, 2:]) - np.float32(8))
    else:
        values = d * _nibbles(blocks[:, 4:]) + _halves(blocks, 2)
    return values.reshape(num_rows, -1)


def _halves(blocks: UInt8Array, offset: int) -> Float32Array:
    """The fp16 at a byte offset of each block: [B, 1] float32."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _nibbles(codes: UInt8Array) -> Float32Array:
    """[B, 16] bytes to [B, 32] codes 0 to 15 as float32."""
    out = np.empty((codes.shape[0], 32), np.float32)
    out[:, :16] = codes & 15
    out[:, 16:] = codes >> 4
    return out


def _encode(values: Float32Array, fmt: QuantFormat, name: str) -> UInt8Array:
    """[n, K] float32 to [n, row bytes] uint8."""
    if not np.isfinite(values).all():
        raise LoadError(f"tensor {name} holds a value that is not a finite number")
    if fmt == "f32":
        return np.ascontiguousarray(values, "<f4").view(np.uint8)
    blocks = values.reshape(-1, 32)
    encoded = _encode_q8_0(blocks, name) if fmt == "q8_0" else _encode_q4_1(blocks, name)
    return encoded.reshape(values.shape[0], -1)


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
