"""Readers of weight blocks: from the bytes of a file to float32, one short function per format.

A reader takes [B, block bytes] uint8 and returns [B, block length] float32. The layouts and the order of roundings are
ggml's (`dequantize_row_*` in ggml-quants.c): each product and each sum below is one float32 operation. Every format is
a code per weight, a scale per group of codes and, in some, an offset per group; what differs is how they are packed.

Knows no tensor and no row: `ops.formats` says how many blocks a matrix has.

Shape legend: B blocks, G groups per block, W weights per block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from forerun.types import Float32Array

UInt8Array = npt.NDArray[np.uint8]
Int8Array = npt.NDArray[np.int8]

# The 16 values that IQ4_NL and IQ4_XS codes stand for, and those of FP4 (E2M1) doubled, as MXFP4's halved scale needs.
_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_FP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
# Half of an E8M0 scale, 2^(byte - 127); the smallest two are float32 subnormals.
_HALF_E8M0 = np.ldexp(np.float32(1), np.arange(256) - 128)


def decode_blocks(fmt: str, blocks: UInt8Array) -> Float32Array:
    """The weights of a run of blocks, bit for bit what the format's definition says.

    A scale that is no number, or one so large that a product leaves the range of float32, gives weights that are not
    finite, without a warning: whoever needs finite ones must look.

    Args:
        fmt: a key of `ops.formats.FORMATS`.
        blocks: [B, block bytes] uint8, at any address.
    Returns:
        [B, W] float32, a new array.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return _READERS[fmt](blocks)


def _f32(blocks: UInt8Array) -> Float32Array:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: UInt8Array) -> Float32Array:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: UInt8Array) -> Float32Array:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: UInt8Array) -> Float32Array:
    """fp16 d, 16 bytes of codes: d * (code - 8)."""
    return _scaled(_less(_codes(blocks[:, 2:], 16, 4), 8), _half(blocks, 0))


def _q4_1(blocks: UInt8Array) -> Float32Array:
    """fp16 d, fp16 m, 16 bytes of codes: d * code + m."""
    return _scaled(_codes(blocks[:, 4:], 16, 4), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: UInt8Array) -> Float32Array:
    """fp16 d, 4 bytes of fifth bits, 16 bytes of codes: d * (code - 16)."""
    return _scaled(_less(_five_bit_codes(blocks[:, 2:]), 16), _half(blocks, 0))


def _q5_1(blocks: UInt8Array) -> Float32Array:
    """fp16 d, fp16 m, 4 bytes of fifth bits, 16 bytes of codes: d * code + m."""
    return _scaled(_five_bit_codes(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: UInt8Array) -> Float32Array:
    """fp16 d, 32 signed codes: d * code."""
    return _scaled(blocks[:, 2:].view(np.int8), _half(blocks, 0))


def _q2_k(blocks: UInt8Array) -> Float32Array:
    """16 bytes of two 4-bit factors, 64 of codes, fp16 d, fp16 dmin: (d * low) * code - dmin * high, groups of 16."""
    factors = blocks[:, :16]
    return _scaled(
        _codes(blocks[:, 16:80], 32, 2), _half(blocks, 80) * (factors & 15), -(_half(blocks, 82) * (factors >> 4))
    )


def _q3_k(blocks: UInt8Array) -> Float32Array:
    """32 bytes of third bits, 64 of codes, 12 of 6-bit factors, fp16 d: (d * (factor - 32)) * (code - 4)."""
    factors = _joined(_codes(blocks[:, 96:104], 8, 4), _codes(blocks[:, 104:108], 4, 2), 4)
    codes = _joined(_codes(blocks[:, 32:96], 32, 2), _codes(blocks[:, :32], 32, 1), 2)
    return _scaled(_less(codes, 4), _half(blocks, 108) * _less(factors, 32))


def _q4_k(blocks: UInt8Array) -> Float32Array:
    """fp16 d, fp16 dmin, 12 bytes of 6-bit factors, 128 of codes: (d * factor) * code - dmin * other, groups of 32."""
    scale, offset = _scale_and_offset(blocks)
    return _scaled(_codes(blocks[:, 16:], 32, 4), scale, offset)


def _q5_k(blocks: UInt8Array) -> Float32Array:
    """As Q4_K, with 32 bytes of fifth bits before the codes."""
    scale, offset = _scale_and_offset(blocks)
    codes = _joined(_codes(blocks[:, 48:], 32, 4), _codes(blocks[:, 16:48], 32, 1), 4)
    return _scaled(codes, scale, offset)


def _q6_k(blocks: UInt8Array) -> Float32Array:
    """128 bytes of low, 64 of high code bits, 16 signed factors, fp16 d: (d * factor) * (code - 32), groups of 16."""
    codes = _joined(_codes(blocks[:, :128], 64, 4), _codes(blocks[:, 128:192], 32, 2), 4)
    return _scaled(_less(codes, 32), _half(blocks, 208) * blocks[:, 192:208].view(np.int8))


def _iq4_nl(blocks: UInt8Array) -> Float32Array:
    """fp16 d, 16 bytes of codes: d * value[code]."""
    return _scaled(_IQ4_VALUES.take(_codes(blocks[:, 2:], 16, 4)), _half(blocks, 0))


def _iq4_xs(blocks: UInt8Array) -> Float32Array:
    """fp16 d, 2 bytes of high, 4 of low factor bits, 128 of codes: (d * (factor - 32)) * value[code], groups of 32."""
    factors = _joined(_codes(blocks[:, 4:8], 1, 4), _codes(blocks[:, 2:4], 1, 2), 4)
    return _scaled(_IQ4_VALUES.take(_codes(blocks[:, 8:], 16, 4)), _half(blocks, 0) * _less(factors, 32))


def _mxfp4(blocks: UInt8Array) -> Float32Array:
    """E8M0 scale, 16 bytes of FP4 codes: scale * value."""
    return _scaled(_FP4_VALUES.take(_codes(blocks[:, 1:], 16, 4)), _HALF_E8M0.take(blocks[:, :1]))


_READERS: Mapping[str, Callable[[UInt8Array], Float32Array]] = {
    "f32": _f32,
    "f16": _f16,
    "bf16": _bf16,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
}


def _half(blocks: UInt8Array, offset: int) -> Float32Array:
    """The fp16 at a byte offset of each block: [B, 1] float32."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _codes(packed: UInt8Array, run: int, bits: int) -> UInt8Array:
    """Unpacks codes of 1, 2 or 4 bits.

    The bytes come in runs. Such a run holds 8 / bits runs of codes, the first in the lowest bits of its bytes.

    Args:
        packed: [B, n] uint8.
        run: bytes per run, a divisor of n.
        bits: bits per code.
    Returns:
        [B, n * 8 / bits] uint8.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = packed.reshape(len(packed), -1, 1, run) >> shifts
    codes &= np.uint8((1 << bits) - 1)
    return codes.reshape(len(packed), -1)


def _joined(low: UInt8Array, high: UInt8Array, low_bits: int) -> UInt8Array:
    """Codes whose bits are stored in two places."""
    return low | (high << np.uint8(low_bits))


def _five_bit_codes(packed: UInt8Array) -> UInt8Array:
    """[B, 4 bytes of fifth bits and 16 of low bits] to [B, 32] codes 0 to 31."""
    return _joined(_codes(packed[:, 4:], 16, 4), np.unpackbits(packed[:, :4], axis=1, bitorder="little"), 4)


def _less(codes: UInt8Array, zero: int) -> Int8Array:
    """Codes (at most 63) minus the one that stands for 0."""
    return codes.view(np.int8) - np.int8(zero)


def _scale_and_offset(blocks: UInt8Array) -> tuple[Float32Array, Float32Array]:
    """[B, 8] scales and offsets of Q4_K or Q5_K blocks: d and dmin times factors of 6 bits.

    Factors 0 to 3 of the scales, then of the offsets, are the low bits of 8 bytes. Factors 4 to 7 have four bits in the
    4 bytes after them (scales low, offsets high) and two more in the top of those 8 bytes.
    """
    lower = blocks[:, 4:12] & np.uint8(63)
    upper = _joined(_codes(blocks[:, 12:16], 4, 4), blocks[:, 4:12] >> np.uint8(6), 4)
    scale = np.concatenate([lower[:, :4], upper[:, :4]], axis=1)
    offset = np.concatenate([lower[:, 4:], upper[:, 4:]], axis=1)
    return _half(blocks, 0) * scale, -(_half(blocks, 2) * offset)


def _scaled(
    codes: UInt8Array | Int8Array | Float32Array, scale: Float32Array, offset: Float32Array | None = None
) -> Float32Array:
    """codes * scale + offset, with scale and offset [B, G] for equal groups of the codes [B, W]."""
    num_blocks, num_groups = scale.shape
    values = codes.astype(np.float32, copy=False).reshape(num_blocks, num_groups, -1)
    values *= scale[:, :, None]
    if offset is not None:
        values += offset[:, :, None]
    return values.reshape(num_blocks, -1)
