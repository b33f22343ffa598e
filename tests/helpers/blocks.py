"""Random weight blocks of every format, raw, and files of them.

The codes are arbitrary, so also ones that a quantiser would never choose. The reference `gguf` package writes the
files, so a test that reads them also tests our reader against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import gguf
import numpy as np

from forerun.ops.base import Weight
from forerun.ops.formats import FORMATS, row_bytes

Scales = Literal["usual", "any"]

# Bytes at which a block holds an fp16 scale or offset.
HALVES: Mapping[str, tuple[int, ...]] = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
}
# Zeros, the smallest and largest subnormals, the smallest normals, one, the largest, of both signs.
EDGES = np.array([0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF], "<u2")
EDGES = np.concatenate([EDGES, EDGES | 0x8000])


def random_weight(
    fmt: str, num_rows: int = 37, row_len: int = 768, *, scales: Scales = "usual", seed: int = 0, name: str = "w"
) -> Weight:
    """One matrix.

    Args:
        fmt: any format.
        num_rows: N.
        row_len: K, a multiple of the format's block.
        scales: `usual` ones give weights that are finite and below 65504 in size. `any` draws finite fp16 numbers by
            their bits (for floats, finite numbers of the format), a quarter of them zeros, subnormals or the largest.
        seed: of everything.
        name: the tensor's name.
    """
    rng = np.random.default_rng(seed)
    num_bytes = num_rows * row_bytes(name, fmt, row_len)
    if fmt in ("f32", "f16", "bf16"):
        return Weight(name, fmt, (num_rows, row_len), _floats(fmt, num_rows * row_len, scales, rng))
    blocks = rng.integers(0, 256, (num_bytes // FORMATS[fmt].block_bytes, FORMATS[fmt].block_bytes), dtype=np.uint8)
    if fmt == "mxfp4":
        low, high = (0, 256) if scales == "any" else (110, 135)
        blocks[:, 0] = rng.integers(low, high, len(blocks))
    for offset in HALVES.get(fmt, ()):
        blocks[:, offset : offset + 2] = _halves(len(blocks), scales, rng)[:, None].view(np.uint8)
    return Weight(name, fmt, (num_rows, row_len), blocks.reshape(-1))


def _floats(fmt: str, count: int, scales: Scales, rng: np.random.Generator) -> np.ndarray:
    if fmt == "f16":
        return _halves(count, scales, rng).view(np.uint8)
    values = rng.standard_normal(count).astype("<f4").view("<u4")
    if scales == "any":
        values = rng.integers(0, 2**32, count, dtype="<u4")
        values[values & 0x7F800000 == 0x7F800000] &= 0x807FFFFF  # neither infinite nor NaN, but subnormal
    return values.view(np.uint8) if fmt == "f32" else (values >> 16).astype("<u2").view(np.uint8)


def _halves(count: int, scales: Scales, rng: np.random.Generator) -> np.ndarray:
    """[count] <u2, bits of fp16 numbers."""
    if scales == "usual":
        return rng.standard_normal(count).astype("<f2").view("<u2")
    halves = rng.integers(0, 0x7C00, count, dtype="<u2") | (rng.integers(0, 2, count, dtype="<u2") << 15)
    edges = rng.random(count) < 0.25
    halves[edges] = rng.choice(EDGES, int(edges.sum()))
    return halves


def write_weights(
    path: Path,
    weights: Iterable[Weight],
    metadata: Mapping[str, str | int | list[str] | list[int]] | None = None,
    *,
    max_tensors: int = 0,
) -> list[Path]:
    """Writes raw matrices by the reference package; with max_tensors in parts, as gguf-split does.

    Returns:
        The files, NAME-00001-of-00003.gguf and so on for a path NAME.gguf if they are parts.
    """
    writer = gguf.GGUFWriter(path, "blocks", split_max_tensors=max_tensors)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    for weight in weights:
        kind = gguf.GGMLQuantizationType[weight.format.upper()]
        writer.add_tensor(weight.name, weight.data.reshape(weight.shape[0], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [path] if path.exists() else sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))
