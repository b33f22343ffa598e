"""Writes matrices that come as codes, zero points and scales of groups of inputs as blocks that hold the same numbers.

A weight is scale * (code - zero), of which the difference is a small whole number. Q4_0, Q5_0 and Q8_0 are just that:
an fp16 scale times whole numbers from -8 to 7, -16 to 15 or -128 to 127, in blocks of 32. So a group of any multiple of
32 inputs becomes blocks of equal scales, bit for bit. Where the inputs of a group are scattered over the row, the row
is sorted by group and the matrix says so in `Weight.columns`. What fits none of the three is expanded to float32.

Shape legend: N rows, K inputs, G groups of a row, R rows of a band, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.ops.base import Weight
from forerun.ops.dequantise import UInt8Array
from forerun.ops.formats import row_bytes
from forerun.types import Float32Array, Int32Array

Float16Array = npt.NDArray[np.float16]

BAND_ROWS = 64  # converted at a time; a multiple of how many rows any packing interleaves
_BLOCK = 32
# The whole number that a block's code 0 stands for is minus this.
_OFFSETS = {"q4_0": 8, "q5_0": 16, "q8_0": 128}
# Q4_0 is kept with the offset -8 d in fp16 beside d, which must not overflow.
_Q4_0_MAX_SCALE = 8188.0


@dataclass(frozen=True, slots=True)
class Grouped:
    """A matrix of N rows of K inputs: weight[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g]) with g = group_of[k].

    Attributes:
        name: for messages, and of the weight that is made.
        num_bits: of a code, at most 8.
        scales: [N, G] float32, finite.
        zeros: [N, G] uint8.
        group_of: [K] int32, each from 0 to G - 1.
        codes: gives the rows [start, stop) as [R, K] uint8; start is a multiple of `BAND_ROWS`.
    """

    name: str
    num_bits: int
    scales: Float32Array
    zeros: UInt8Array
    group_of: Int32Array
    codes: Callable[[int, int], UInt8Array]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.scales.shape[0], self.group_of.size


def regroup(matrix: Grouped) -> Weight:
    """The matrix in the smallest format that has its very values.

    Returns:
        q4_0, q5_0 or q8_0; f32 when a scale is no fp16 number, groups can't be cut into 32 inputs each, or zero points
        make differences that no format has.
    """
    columns = np.argsort(matrix.group_of, kind="stable").astype(np.int32)
    groups = matrix.group_of[columns]
    fmt = _fitting(matrix)
    if fmt is None or groups.size % _BLOCK or (groups.reshape(-1, _BLOCK) != groups[::_BLOCK, None]).any():
        return _expanded(matrix)
    is_sorted = np.array_equal(columns, np.arange(columns.size))
    return _blocks(matrix, fmt, groups[::_BLOCK], None if is_sorted else columns)


def _fitting(matrix: Grouped) -> str | None:
    """The smallest format that has the scales and the differences."""
    with np.errstate(over="ignore"):
        is_half = np.array_equal(matrix.scales.astype(np.float16).astype(np.float32), matrix.scales)
    if not is_half:
        return None
    lowest, highest = -int(matrix.zeros.max()), (1 << matrix.num_bits) - 1 - int(matrix.zeros.min())
    for fmt, offset in _OFFSETS.items():
        is_large = fmt == "q4_0" and np.abs(matrix.scales).max() > _Q4_0_MAX_SCALE
        if -offset <= lowest and highest < offset and not is_large:
            return fmt
    return None


def _blocks(matrix: Grouped, fmt: str, groups: Int32Array, columns: Int32Array | None) -> Weight:
    """The matrix in blocks, of which the b-th of a row belongs to group groups[b]."""
    num_rows, row_len = matrix.shape
    data = np.empty((num_rows, groups.size, row_bytes(matrix.name, fmt, _BLOCK)), np.uint8)
    scales = matrix.scales.astype("<f2")[:, groups]
    shifts = np.uint8(_OFFSETS[fmt]) - matrix.zeros[:, groups]  # modulo 256, as are the sums below
    for start in range(0, num_rows, BAND_ROWS):
        band = slice(start, min(start + BAND_ROWS, num_rows))
        codes = matrix.codes(band.start, band.stop)
        codes = codes if columns is None else codes[:, columns]
        shifted = codes.reshape(len(codes), -1, _BLOCK) + shifts[band, :, None]
        _write_blocks(fmt, scales[band], shifted, data[band])
    return Weight(matrix.name, fmt, (num_rows, row_len), data.reshape(-1), columns)


def _write_blocks(fmt: str, scales: Float16Array, codes: UInt8Array, out: UInt8Array) -> None:
    """Blocks [R, B, bytes] of scales [R, B] and codes [R, B, 32]; their layouts are in `ops.dequantise`."""
    out[:, :, :2] = scales[:, :, None].view(np.uint8)
    if fmt == "q8_0":
        np.bitwise_xor(codes, 0x80, out=out[:, :, 2:])  # code - 128 as a signed byte
        return
    if fmt == "q5_0":
        out[:, :, 2:6] = np.packbits(codes.reshape(-1) >> 4, bitorder="little").reshape(*codes.shape[:2], 4)
        codes = codes & np.uint8(15)
    half = _BLOCK // 2
    np.bitwise_or(codes[:, :, :half], codes[:, :, half:] << 4, out=out[:, :, -half:])


def _expanded(matrix: Grouped) -> Weight:
    """The matrix in float32. The differences are whole numbers, so each product is one rounding at most."""
    out = np.empty(matrix.shape, np.float32)
    for start in range(0, len(out), BAND_ROWS):
        band = slice(start, min(start + BAND_ROWS, len(out)))
        zeros = matrix.zeros[band][:, matrix.group_of].astype(np.int16)
        differences = (matrix.codes(band.start, band.stop) - zeros).astype(np.float32)
        np.multiply(differences, matrix.scales[band][:, matrix.group_of], out=out[band])
    return Weight(matrix.name, "f32", matrix.shape, out.reshape(-1).view(np.uint8))
