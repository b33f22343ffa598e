"""Weight formats: how each lays out a row, and what a matrix becomes when it is loaded.

A row of K weights is a run of blocks, so a matrix is one as well. Everything here is plain numpy and works on a few
blocks at a time: the temporary arrays stay in the processor's cache, and memory use does not grow with the matrix.
`ops.dequantise` reads the blocks, `ops.quantise` writes them.

Shape legend: N rows, K weights per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.errors import LoadError
from forerun.ops.base import Quant, Weight
from forerun.ops.dequantise import UInt8Array, decode_blocks
from forerun.ops.quantise import QuantFormat, encode_blocks
from forerun.types import Float32Array

CHUNK_WEIGHTS = 1 << 16  # 256 KiB of float32; a multiple of every block length


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a format lays out a row.

    Attributes:
        block_len: weights per block.
        block_bytes: bytes per block.
    """

    block_len: int
    block_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Scales and offsets included.

        >>> FORMATS["q6_k"].bits_per_weight
        6.5625
        """
        return 8 * self.block_bytes / self.block_len


# The formats of matrices in a GGUF file, by the lower-case names of their types; `ops.dequantise` says what is in a
# block.
FORMATS: Mapping[str, BlockFormat] = {
    "f32": BlockFormat(1, 4),
    "f16": BlockFormat(1, 2),
    "bf16": BlockFormat(1, 2),
    "q4_0": BlockFormat(32, 18),
    "q4_1": BlockFormat(32, 20),
    "q5_0": BlockFormat(32, 22),
    "q5_1": BlockFormat(32, 24),
    "q8_0": BlockFormat(32, 34),
    "q2_k": BlockFormat(256, 84),
    "q3_k": BlockFormat(256, 110),
    "q4_k": BlockFormat(256, 144),
    "q5_k": BlockFormat(256, 176),
    "q6_k": BlockFormat(256, 210),
    "iq4_nl": BlockFormat(32, 18),
    "iq4_xs": BlockFormat(256, 136),
    "mxfp4": BlockFormat(32, 17),
}

# What each choice of `--quant` makes of a matrix of a layer, and of the embedding and the LM head. These stay at 8 bits
# under `q4`: they hurt most and are read least.
_MATRIX_TARGET: Mapping[Quant, QuantFormat] = {"f32": "f32", "bf16": "bf16", "q8": "q8_0", "q4": "q4_1"}
_HEAD_TARGET: Mapping[Quant, QuantFormat] = {**_MATRIX_TARGET, "q4": "q8_0"}


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


def in_one_order(weights: Sequence[Weight]) -> bool:
    """Whether matrices read their inputs in the same order, so that they can share them; see `Weight.columns`."""
    orders = [np.arange(weight.shape[1]) if weight.columns is None else weight.columns for weight in weights]
    return all(np.array_equal(order, orders[0]) for order in orders)


def dequantize(weight: Weight) -> Float32Array:
    """The matrix in float32, bit for bit what the format's definition says; see `ops.dequantise.decode_blocks`.

    Returns:
        [N, K] float32, a new array; input k is column k, whatever order the weight is stored in.
    Raises:
        LoadError: K is no multiple of the format's block.
    """
    out = np.empty(weight.shape, np.float32)
    flat = out.reshape(-1)
    start = 0
    for values in _decoded(weight):
        flat[start : start + values.size] = values
        start += values.size
    if weight.columns is None:
        return out
    plain = np.empty_like(out)
    plain[:, weight.columns] = out
    return plain


def quantize(values: Float32Array, fmt: QuantFormat, name: str) -> Weight:
    """A matrix of floats in another format; see `ops.quantise.encode_blocks`.

    Args:
        values: [N, K] float32, finite.
        fmt: the format to make.
        name: the tensor's name, for messages.
    Raises:
        LoadError: K is no multiple of the block, or a value is not finite or too large for the format.
    """
    flat = values.reshape(-1)
    chunks = (flat[start : start + CHUNK_WEIGHTS] for start in range(0, flat.size, CHUNK_WEIGHTS))
    return Weight(name, fmt, (values.shape[0], values.shape[1]), _encoded(chunks, values.shape, fmt, name))


def target_format(quant: Quant, *, is_head: bool) -> QuantFormat:
    """The format that a user's choice of `quant` stands for, of an embedding or LM head or of any other matrix."""
    return (_HEAD_TARGET if is_head else _MATRIX_TARGET)[quant]


def requantize(weight: Weight, quant: Quant | None, *, is_head: bool) -> Weight:
    """The matrix in the format a user's choice of `quant` means, where `converts` says that it is converted.

    Args:
        weight: one matrix as the file holds it.
        quant: None keeps the file's format. `f32` and `bf16` are what they say, `q8` is q8_0, `q4` is q4_1.
        is_head: an embedding or LM head, which `q4` makes q8_0.
    Returns:
        The same object where nothing has to change.
    Raises:
        LoadError: a value is not finite or too large for the format.
    """
    if quant is None or not converts(weight, quant, is_head=is_head):
        return weight
    fmt = target_format(quant, is_head=is_head)
    return replace(weight, format=fmt, data=_encoded(_decoded(weight), weight.shape, fmt, weight.name))


def converts(weight: Weight, quant: Quant, *, is_head: bool) -> bool:
    """Whether a choice of `quant` changes the matrix.

    `f32` expands every format, which loses nothing. The other choices take floats of any kind. What is quantised
    already they take only if it becomes smaller, because otherwise a second rounding could only lose. Rows that are no
    whole number of the target's blocks stay as they are.
    """
    fmt = target_format(quant, is_head=is_head)
    source, target = FORMATS[weight.format], FORMATS[fmt]
    is_float = source.block_len == 1
    if weight.format == fmt or (fmt != "f32" and weight.shape[1] % target.block_len):
        return False
    return fmt == "f32" or is_float or source.bits_per_weight > target.bits_per_weight


def _decoded(weight: Weight) -> Iterator[Float32Array]:
    """The weights of a matrix in order, in flat runs of at most `CHUNK_WEIGHTS`."""
    num_rows, row_len = weight.shape
    block = FORMATS[weight.format]
    num_bytes = num_rows * row_bytes(weight.name, weight.format, row_len)
    blocks = weight.data.reshape(num_bytes // block.block_bytes, block.block_bytes)
    step = CHUNK_WEIGHTS // block.block_len
    for start in range(0, len(blocks), step):
        yield decode_blocks(weight.format, blocks[start : start + step]).reshape(-1)


def _encoded(chunks: Iterator[Float32Array], shape: tuple[int, ...], fmt: QuantFormat, name: str) -> UInt8Array:
    """The bytes of a matrix from flat runs of its weights, each but the last of `CHUNK_WEIGHTS`."""
    num_rows, row_len = shape
    data = np.empty(num_rows * row_bytes(name, fmt, row_len), np.uint8)
    start = 0
    for values in chunks:
        encoded = encode_blocks(values, fmt, name)
        data[start : start + encoded.size] = encoded
        start += encoded.size
    return data
