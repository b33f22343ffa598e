"""Quantised matrices as other tools write them: the packings of GPTQ, AWQ and compressed-tensors, code by code.

A matrix is a `Codes`; `values_of` is what it means, in plain float32, and a `pack_*` function its tensors. The loops
follow the libraries' own packers one code at a time (GPTQModel, AutoAWQ, compressed-tensors), not our reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# The output that each code of a word belongs to, from the lowest bits up.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Codes:
    """codes [N, K], zeros [N, G] and scales [N, G], and the group of each input [K]."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    group_of: np.ndarray
    num_bits: int = 4


def random_codes(
    num_rows: int,
    row_len: int,
    group_size: int | None = 128,
    *,
    num_bits: int = 4,
    is_symmetric: bool = False,
    has_order: bool = False,
    scale: float = 0.02,
    seed: int = 0,
) -> Codes:
    """Any codes and zero points; has_order scatters the groups over the row, by the seed and K alone."""
    rng = np.random.default_rng(seed)
    size = group_size or row_len
    num_groups = -(-row_len // size)
    group_of = (np.arange(row_len) // size).astype(np.int32)
    middle = 1 << (num_bits - 1)
    zeros = rng.integers(0, 1 << num_bits, (num_rows, num_groups))
    return Codes(
        codes=rng.integers(0, 1 << num_bits, (num_rows, row_len)),
        zeros=np.full_like(zeros, middle) if is_symmetric else zeros,
        scales=(rng.uniform(0.5, 2.0, (num_rows, num_groups)) * scale).astype(np.float16),
        group_of=np.random.default_rng((seed, 1)).permutation(group_of) if has_order else group_of,
        num_bits=num_bits,
    )


def quantised(values: np.ndarray, group_size: int | None = 32, **how: Any) -> Codes:
    """Values [N, K] rounded to the codes that are nearest to them, group by group."""
    made = random_codes(*values.shape, group_size, **how)
    num_groups, middle, top = made.zeros.shape[1], 1 << (made.num_bits - 1), (1 << made.num_bits) - 1
    scales, zeros = np.empty_like(made.scales), np.empty_like(made.zeros)
    for g in range(num_groups):
        members = values[:, made.group_of == g]
        low, high = np.minimum(members.min(axis=1), 0), np.maximum(members.max(axis=1), 0)
        is_symmetric = how.get("is_symmetric", False)
        step = np.maximum(-low, high) / (middle - 1) if is_symmetric else (high - low) / top
        scales[:, g] = step
        zeros[:, g] = middle if is_symmetric else np.clip(np.rint(-low / scales[:, g]), 0, top)
    codes = np.rint(values / scales[:, made.group_of].astype(np.float32)) + zeros[:, made.group_of]
    return Codes(np.clip(codes, 0, top).astype(np.int64), zeros, scales, made.group_of, made.num_bits)


def values_of(made: Codes) -> np.ndarray:
    """[N, K] float32, by the formula that all of these methods share."""
    differences = made.codes - made.zeros[:, made.group_of]
    return made.scales.astype(np.float32)[:, made.group_of] * differences.astype(np.float32)


def words_along_rows(codes: np.ndarray, num_bits: int) -> np.ndarray:
    """[A, B] codes to [A / P, B] int32 words, P codes in each, the first in the lowest bits."""
    per_word = 32 // num_bits
    words = np.zeros((codes.shape[0] // per_word, codes.shape[1]), np.uint32)
    for row in range(codes.shape[0]):
        words[row // per_word] |= codes[row].astype(np.uint32) << np.uint32(num_bits * (row % per_word))
    return words.view(np.int32)


def words_along_columns(codes: np.ndarray, num_bits: int) -> np.ndarray:
    """[A, B] codes to [A, B / P] int32 words."""
    return np.ascontiguousarray(words_along_rows(codes.T, num_bits).T)


def pack_gptq(made: Codes, checkpoint_format: str = "gptq", *, writes_order: bool = True) -> dict[str, np.ndarray]:
    """Tensors by the end of their names. GPTQModel takes one from the zero points by taking ones from whole words."""
    zeros = words_along_columns(made.zeros.T, made.num_bits)
    if checkpoint_format == "gptq":
        ones = {4: 0x11111111, 8: 0x01010101}[made.num_bits]
        zeros = (zeros.view(np.uint32) - np.uint32(ones)).view(np.int32)
    tensors = {
        "qweight": words_along_rows(made.codes.T, made.num_bits),
        "qzeros": zeros,
        "scales": np.ascontiguousarray(made.scales.T),
    }
    return tensors | ({"g_idx": made.group_of.astype(np.int32)} if writes_order else {})


def pack_awq(made: Codes) -> dict[str, np.ndarray]:
    def interleaved(codes: np.ndarray) -> np.ndarray:  # [A, N] to [A, N / 8]
        words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
        for column in range(words.shape[1]):
            for i, output in enumerate(AWQ_ORDER):
                words[:, column] |= codes[:, column * 8 + output].astype(np.uint32) << np.uint32(4 * i)
        return words.view(np.int32)

    return {
        "qweight": interleaved(made.codes.T),
        "qzeros": interleaved(made.zeros.T),
        "scales": np.ascontiguousarray(made.scales.T),
    }


def pack_compressed(made: Codes, *, is_symmetric: bool = False, writes_order: bool = False) -> dict[str, np.ndarray]:
    tensors = {
        "weight_packed": words_along_columns(made.codes, made.num_bits),
        "weight_scale": made.scales,
        "weight_shape": np.array(made.codes.shape, np.int64),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = words_along_rows(made.zeros, made.num_bits)
    return tensors | ({"weight_g_idx": made.group_of.astype(np.int32)} if writes_order else {})


def named(module: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{module}.{name}": array for name, array in tensors.items()}


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def compressed_config(
    num_bits: int = 4, group_size: int | None = 128, is_symmetric: bool = False, **changes: Any
) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it."""
    weights = {
        "num_bits": num_bits,
        "type": "int",
        "symmetric": is_symmetric,
        "strategy": "group" if group_size else "channel",
        "group_size": group_size,
        "actorder": None,
        "dynamic": False,
        "observer": "minmax",
    }
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
    } | changes


def gptq_tensors(tensors: Mapping[str, np.ndarray], group_size: int = 32) -> dict[str, np.ndarray]:
    """A folder's tensors with the linear maps of the layers as GPTQ, asymmetric, in act-order where that shows."""
    out: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        if ".layers." in name and values.ndim == 2:
            out |= named(name.removesuffix(".weight"), pack_gptq(quantised(values, group_size, has_order=True)))
        else:
            out[name] = values
    return out
