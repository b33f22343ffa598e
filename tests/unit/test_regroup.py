"""Codes, zero points and scales as blocks: the same values, in the smallest format that has them."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.ops.base import Weight
from forerun.ops.formats import dequantize
from forerun.ops.regroup import BAND_ROWS, Grouped, regroup
from tests.helpers.packers import Codes, random_codes, values_of


def grouped(made: Codes) -> Grouped:
    return Grouped(
        name="m",
        num_bits=made.num_bits,
        scales=made.scales.astype(np.float32),
        zeros=made.zeros.astype(np.uint8),
        group_of=made.group_of.astype(np.int32),
        codes=lambda start, stop: made.codes[start:stop].astype(np.uint8),
    )


def assert_same_values(weight: Weight, made: Codes) -> None:
    np.testing.assert_array_equal(dequantize(weight).view(np.uint32), values_of(made).view(np.uint32))


@pytest.mark.parametrize("has_order", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize(
    ("num_bits", "is_symmetric", "fmt"), [(4, True, "q4_0"), (4, False, "q5_0"), (8, True, "q8_0"), (8, False, "f32")]
)
def test_the_smallest_format_has_the_very_values(
    num_bits: int, is_symmetric: bool, fmt: str, group_size: int | None, has_order: bool
) -> None:
    made = random_codes(
        2 * BAND_ROWS + 24, 256, group_size, num_bits=num_bits, is_symmetric=is_symmetric, has_order=has_order
    )
    weight = regroup(grouped(made))
    assert (weight.name, weight.format, weight.shape) == ("m", fmt, made.codes.shape)
    assert (weight.columns is None) == (fmt == "f32" or group_size is None or not has_order)
    assert_same_values(weight, made)


@pytest.mark.parametrize("num_bits", [2, 3])
def test_fewer_bits_fit_as_well(num_bits: int) -> None:
    made = random_codes(8, 64, 32, num_bits=num_bits)
    weight = regroup(grouped(made))
    assert weight.format == "q4_0"
    assert_same_values(weight, made)


@pytest.mark.parametrize(
    ("lowest", "highest", "fmt"), [(0, 0, "q5_0"), (8, 8, "q4_0"), (7, 8, "q5_0"), (15, 15, "q5_0")]
)
def test_zero_points_decide_the_format(lowest: int, highest: int, fmt: str) -> None:
    made = random_codes(8, 64, 32)
    zeros = np.random.default_rng(1).integers(lowest, highest + 1, made.zeros.shape)
    made = Codes(made.codes, zeros, made.scales, made.group_of)
    weight = regroup(grouped(made))
    assert weight.format == fmt
    assert_same_values(weight, made)


def test_every_code_with_every_zero_point() -> None:
    codes, zeros = np.meshgrid(np.arange(16).repeat(2), np.arange(16))
    made = Codes(codes, zeros[:, :1], np.full((16, 1), 0.375, np.float16), np.zeros(32, np.int32))
    weight = regroup(grouped(made))
    assert weight.format == "q5_0"
    assert_same_values(weight, made)


@pytest.mark.parametrize("group_size", [16, 48, 24])
def test_groups_that_are_no_whole_blocks_are_expanded(group_size: int) -> None:
    made = random_codes(8, 96 if group_size != 16 else 64, group_size)
    weight = regroup(grouped(made))
    assert (weight.format, weight.columns) == ("f32", None)
    assert_same_values(weight, made)


def test_scattered_groups_of_uneven_sizes_are_expanded() -> None:
    made = random_codes(8, 128, 32, has_order=True)
    group_of = made.group_of.copy()
    group_of[np.flatnonzero(group_of == 1)[0]] = 2
    made = Codes(made.codes, made.zeros, made.scales, group_of)
    weight = regroup(grouped(made))
    assert (weight.format, weight.columns) == ("f32", None)
    assert_same_values(weight, made)


def test_rows_of_half_a_block_are_expanded() -> None:
    made = random_codes(8, 48, None)
    weight = regroup(grouped(made))
    assert weight.format == "f32"
    assert_same_values(weight, made)


@pytest.mark.parametrize(
    ("scale", "fmt"),
    [
        (2.0**-24, "q4_0"),  # the smallest fp16 number
        (8184.0, "q4_0"),
        (8192.0, "q5_0"),  # eight of them are no fp16 number
        (65504.0, "q5_0"),
        (65536.0, "f32"),
        (2.0**-25, "f32"),
        (1.0 + 2.0**-11, "f32"),
        (-0.25, "q4_0"),
        (0.0, "q4_0"),
    ],
)
def test_scales_decide_the_format(scale: float, fmt: str) -> None:
    made = random_codes(8, 64, 32, is_symmetric=True)
    scales = made.scales.astype(np.float32)
    scales[3, 1] = scale
    made = Codes(made.codes, made.zeros, scales, made.group_of)
    weight = regroup(grouped(made))
    assert weight.format == fmt
    np.testing.assert_array_equal(dequantize(weight), values_of(made))
