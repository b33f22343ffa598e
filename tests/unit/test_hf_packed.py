"""The packings of GPTQ, AWQ and compressed-tensors, read against the packers' own loops; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.errors import LoadError
from forerun.models.hf_packed import PackedModule, packed_modules
from forerun.models.hf_quant import Packing
from forerun.models.safetensors import read_safetensors
from forerun.ops.base import Weight
from forerun.ops.formats import dequantize
from forerun.ops.regroup import BAND_ROWS
from tests.helpers.hf_folders import write_safetensors
from tests.helpers.packers import (
    Codes,
    named,
    pack_awq,
    pack_compressed,
    pack_gptq,
    random_codes,
    values_of,
    words_along_columns,
)

MODULE = "model.layers.0.mlp.down_proj"
ROWS, INPUTS = BAND_ROWS + 24, 256


def module_of(tmp_path: Path, tensors: dict[str, np.ndarray], packing: Packing) -> PackedModule:
    path = write_safetensors(tmp_path / "model.safetensors", named(MODULE, tensors))
    return packed_modules(tmp_path, read_safetensors(path), packing)[f"{MODULE}.weight"]


def read(tmp_path: Path, made: Codes, tensors: dict[str, np.ndarray], packing: Packing) -> Weight:
    """The matrix, which must have the very values of the codes, and every tensor accounted for."""
    module = module_of(tmp_path, tensors, packing)
    weight = module.weight(made.codes.shape)
    assert module.tensor_names == {f"{MODULE}.{name}" for name in tensors}
    assert (weight.name, weight.shape) == (f"{MODULE}.weight", made.codes.shape)
    np.testing.assert_array_equal(dequantize(weight).view(np.uint32), values_of(made).view(np.uint32))
    return weight


@pytest.mark.parametrize("has_order", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
def test_gptq(
    tmp_path: Path, checkpoint_format: str, num_bits: int, is_symmetric: bool, group_size: int | None, has_order: bool
) -> None:
    made = random_codes(ROWS, INPUTS, group_size, num_bits=num_bits, is_symmetric=is_symmetric, has_order=has_order)
    packing = Packing("gptq", num_bits, group_size, is_symmetric, is_less_one=checkpoint_format == "gptq")
    weight = read(tmp_path, made, pack_gptq(made, checkpoint_format), packing)
    smallest = ({True: "q4_0", False: "q5_0"}, {True: "q8_0", False: "f32"})[num_bits == 8][is_symmetric]
    assert weight.format == smallest
    if not has_order:
        assert read(tmp_path, made, pack_gptq(made, checkpoint_format, writes_order=False), packing).columns is None


@pytest.mark.parametrize("group_size", [32, 64, 128, None])
def test_awq(tmp_path: Path, group_size: int | None) -> None:
    made = random_codes(ROWS, INPUTS, group_size)
    weight = read(tmp_path, made, pack_awq(made), Packing("awq", 4, group_size, False))
    assert (weight.format, weight.columns) == ("q5_0", None)


@pytest.mark.parametrize("has_order", [False, True])
@pytest.mark.parametrize("group_size", [32, 128, None])
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_compressed_tensors(
    tmp_path: Path, num_bits: int, is_symmetric: bool, group_size: int | None, has_order: bool
) -> None:
    made = random_codes(ROWS, INPUTS, group_size, num_bits=num_bits, is_symmetric=is_symmetric, has_order=has_order)
    tensors = pack_compressed(made, is_symmetric=is_symmetric, writes_order=has_order)
    read(tmp_path, made, tensors, Packing("compressed-tensors", num_bits, group_size, is_symmetric))


# ---- the zero points of GPTQ's first format --------------------------------------------------------------------------


def test_a_zero_point_of_zero_survives_being_stored_less_one(tmp_path: Path) -> None:
    """The writer takes ones from whole words, so the code after a 0 lends it one. Code by code it would be lost."""
    made = random_codes(16, 64, 32)
    made = replace(made, zeros=np.tile([0, 0, 5, 0, 15, 7, 0, 0], 4).reshape(16, 2))
    read(tmp_path, made, pack_gptq(made), Packing("gptq", 4, 32, False, True))


def test_zero_points_less_one_code_by_code_are_the_same_where_none_is_zero(tmp_path: Path) -> None:
    made = random_codes(16, 64, 32)
    made = replace(made, zeros=np.maximum(made.zeros, 1))
    tensors = pack_gptq(made) | {"qzeros": words_along_columns(made.zeros.T - 1, 4)}
    read(tmp_path, made, tensors, Packing("gptq", 4, 32, False, True))


@pytest.mark.parametrize("num_bits", [4, 8])
def test_symmetric_zero_points_that_were_not_lessened_show(tmp_path: Path, num_bits: int) -> None:
    """Symmetric files of the first format exist that store the middle code itself."""
    made = random_codes(16, 64, 32, num_bits=num_bits, is_symmetric=True)
    read(tmp_path, made, pack_gptq(made, "gptq_v2"), Packing("gptq", num_bits, 32, True, True))
    shifted = replace(made, zeros=made.zeros + 1)  # where symmetry is not promised, the same tensors mean one more
    read(tmp_path, shifted, pack_gptq(made, "gptq_v2"), Packing("gptq", num_bits, 32, False, True))


# ---- the order of the inputs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [0, -1])
def test_a_group_index_that_was_never_filled_in_is_the_plain_order(tmp_path: Path, fill: int) -> None:
    made = random_codes(ROWS, INPUTS, 64)
    tensors = pack_gptq(made) | {"g_idx": np.full(INPUTS, fill, np.int32)}
    assert read(tmp_path, made, tensors, Packing("gptq", 4, 64, False, True)).columns is None


def test_the_last_group_may_be_smaller(tmp_path: Path) -> None:
    made = random_codes(ROWS, 160, 64)
    assert made.zeros.shape[1] == 3
    assert read(tmp_path, made, pack_gptq(made), Packing("gptq", 4, 64, False, True)).format == "q5_0"


def test_columns_are_a_stable_sort_by_group(tmp_path: Path) -> None:
    made = random_codes(ROWS, INPUTS, 64, has_order=True)
    weight = read(tmp_path, made, pack_gptq(made), Packing("gptq", 4, 64, False, True))
    assert weight.columns is not None
    assert weight.columns.dtype == np.int32
    np.testing.assert_array_equal(weight.columns, np.argsort(made.group_of, kind="stable"))


# ---- types of scales, biases -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "fmt"), [("bf16", "q5_0"), ("f32 that are halves", "q5_0"), ("f32", "f32")])
def test_scales_of_other_types(tmp_path: Path, dtype: str, fmt: str) -> None:
    made = random_codes(ROWS, INPUTS, 128)
    scales = made.scales.astype(np.float32)
    if dtype == "bf16":
        bits = scales.view(np.uint32) & 0xFFFF0000
        scales, stored = bits.view(np.float32), (bits >> 16).astype(np.uint16)
    else:
        scales = scales if dtype == "f32 that are halves" else scales * np.float32(1.0001)
        stored = scales
    made = replace(made, scales=scales)
    tensors = pack_gptq(made) | {"scales": np.ascontiguousarray(stored.T)}
    assert read(tmp_path, made, tensors, Packing("gptq", 4, 128, False, True)).format == fmt


@pytest.mark.parametrize(("value", "is_known"), [(0.0, True), (-0.0, True), (0.5, False)])
def test_a_bias_that_adds_nothing_is_accounted_for(tmp_path: Path, value: float, is_known: bool) -> None:
    made = random_codes(ROWS, INPUTS)
    bias = np.zeros(ROWS, np.float16)
    bias[3] = value
    module = module_of(tmp_path, pack_gptq(made) | {"bias": bias}, Packing("gptq", 4, 128, False, True))
    assert (f"{MODULE}.bias" in module.tensor_names) == is_known


# ---- what is refused -------------------------------------------------------------------------------------------------

GPTQ = Packing("gptq", 4, 64, False, True)
MADE = random_codes(16, 128, 64)


def changed(**changes: np.ndarray | None) -> dict[str, np.ndarray]:
    return {name: array for name, array in (pack_gptq(MADE) | changes).items() if array is not None}


@pytest.mark.parametrize(
    ("tensors", "shape", "problem"),
    [
        (changed(qzeros=None), (16, 128), f"tensor {MODULE}.qzeros is missing"),
        (changed(scales=None), (16, 128), f"tensor {MODULE}.scales is missing"),
        (changed(), (24, 128), "qweight has shape (16, 16), but for gptq, 4 bits, groups of 64 must be (16, 24)"),
        (changed(), (16, 64), "qweight has shape (16, 16), but for gptq, 4 bits, groups of 64 must be (8, 16)"),
        (changed(qzeros=np.zeros((4, 2), np.int32)), (16, 128), "qzeros has shape (4, 2), but for gptq"),
        (changed(scales=np.ones((2, 17), np.float16)), (16, 128), "scales has shape (2, 17), but for gptq"),
        (changed(g_idx=np.zeros(127, np.int32)), (16, 128), "g_idx has shape (127,), but for gptq"),
        (changed(g_idx=np.arange(128, dtype=np.int32) // 63), (16, 128), "g_idx names group 0 to 2, but there are 2"),
        (changed(g_idx=np.arange(-1, 127, dtype=np.int32) // 64), (16, 128), "g_idx names group -1 to 1, but there"),
        (changed(g_idx=np.zeros(128, np.int64)), (16, 128), "g_idx has dtype I64, but must be I32"),
        (changed(qweight=np.zeros((16, 16), np.float32)), (16, 128), "qweight has dtype F32, but must be I32"),
        (changed(scales=np.ones((2, 16), np.int32)), (16, 128), "scales has dtype I32, but must be F32, F16 or BF16"),
        (
            changed(scales=np.full((2, 16), np.inf, np.float16)),
            (16, 128),
            "scales has a scale that is not a finite",
        ),
        (changed(), (12, 128), f"{MODULE} has 12 outputs, but must have a multiple of 8"),
        (changed(), (16, 100), f"{MODULE} has 100 inputs, but must have a multiple of 8"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, tensors: dict[str, np.ndarray], shape: tuple[int, int], problem: str
) -> None:
    with pytest.raises(LoadError) as caught:
        module_of(tmp_path, tensors, GPTQ).weight(shape)
    assert problem in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pack", "packing", "name"),
    [
        (pack_awq, Packing("awq", 4, 128, False), "qweight"),
        (pack_compressed, Packing("compressed-tensors", 4, 128, False), "weight_packed"),
        (pack_compressed, Packing("compressed-tensors", 4, 128, False), "weight_zero_point"),
        (pack_compressed, Packing("compressed-tensors", 4, 128, False), "weight_scale"),
        (pack_compressed, Packing("compressed-tensors", 4, 64, False), "weight_zero_point"),
    ],
)
def test_every_shape_is_checked(tmp_path: Path, pack: Any, packing: Packing, name: str) -> None:
    made = random_codes(64, 512)
    tensors = pack(made)
    if packing.group_size == 128:
        tensors[name] = np.ascontiguousarray(tensors[name][:, :-1])
    with pytest.raises(LoadError, match=rf"tensor {MODULE}\.{name} has shape .*, but for {packing.method}, 4 bits"):
        module_of(tmp_path, tensors, packing).weight((64, 512))


def test_the_stated_shape_of_compressed_tensors_must_be_the_models(tmp_path: Path) -> None:
    made = random_codes(64, 512)
    packing = Packing("compressed-tensors", 4, 128, False)
    tensors = pack_compressed(made) | {"weight_shape": np.array([64, 511], np.int64)}
    with pytest.raises(LoadError, match=r"weight_shape says \(64, 511\), but .*config\.json asks for \(64, 512\)"):
        module_of(tmp_path, tensors, packing).weight((64, 512))
