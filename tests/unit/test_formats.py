"""Weight formats against the reference `gguf` package, and quantisation against its error."""

from __future__ import annotations

import tracemalloc

import gguf
import numpy as np
import pytest

from forerun.errors import LoadError
from forerun.ops import formats
from forerun.ops.base import Weight
from forerun.ops.formats import FORMATS, dequantize, quantize, requantize, row_bytes
from tests.helpers.blocks import HALVES, Scales, random_weight

KINDS = {name: gguf.GGMLQuantizationType[name.upper()] for name in FORMATS}
USUAL_TYPES = "f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q3_k q4_k q5_k q6_k iq4_nl iq4_xs mxfp4"


def reference(weight: Weight) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(weight.data.reshape(weight.shape[0], -1), KINDS[weight.format])


def test_the_usual_types_are_known() -> None:
    assert " ".join(FORMATS) == USUAL_TYPES


@pytest.mark.parametrize("fmt", FORMATS)
def test_block_sizes_are_those_of_the_file_format(fmt: str) -> None:
    block = FORMATS[fmt]
    assert (block.block_len, block.block_bytes) == gguf.GGML_QUANT_SIZES[KINDS[fmt]]
    assert formats.CHUNK_WEIGHTS % block.block_len == 0


@pytest.mark.parametrize("scales", ["usual", "any"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantize_gives_the_bits_of_the_reference(fmt: str, scales: Scales, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "CHUNK_WEIGHTS", 512)  # many chunks, the last one short
    weight = random_weight(fmt, scales=scales)
    found = dequantize(weight)
    assert found.dtype == np.float32
    assert found.shape == weight.shape
    np.testing.assert_array_equal(found.view(np.uint32), reference(weight).view(np.uint32))


@pytest.mark.parametrize("fmt", HALVES)
@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E00])  # infinities and NaN
def test_scales_that_are_no_numbers_pass_without_warnings(fmt: str, half: int) -> None:
    weight = random_weight(fmt, num_rows=4)
    blocks = weight.data.reshape(-1, FORMATS[fmt].block_bytes)
    for offset in HALVES[fmt]:
        blocks[::2, offset : offset + 2] = np.array([half], "<u2").view(np.uint8)
    found = dequantize(weight)
    assert not np.isfinite(found).all()
    np.testing.assert_array_equal(found, reference(weight))


@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantize_reads_bytes_at_any_address_and_returns_a_new_array(fmt: str) -> None:
    weight = random_weight(fmt)
    shifted = np.concatenate([np.zeros(1, np.uint8), weight.data])[1:]
    shifted.flags.writeable = False
    found = dequantize(Weight("w", fmt, weight.shape, shifted))
    np.testing.assert_array_equal(found, dequantize(weight))
    assert found.flags.writeable
    assert not np.shares_memory(found, shifted)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(1, 2**21), (2**13, 256)])
def test_temporaries_do_not_grow_with_the_matrix(fmt: str, shape: tuple[int, int]) -> None:
    weight = random_weight(fmt, *shape)
    tracemalloc.start()
    try:
        dequantize(weight)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**21 + 2 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("fmt", ["q8_0", "q4_1"])
@pytest.mark.parametrize("law", ["normal", "heavy", "shifted"])
def test_quantize_beats_the_reference_quantiser(fmt: str, law: str) -> None:
    rng = np.random.default_rng(1)
    values = {
        "normal": rng.standard_normal((64, 256)),
        "heavy": rng.standard_t(3, (64, 256)),
        "shifted": rng.standard_normal((64, 256)) + 5,
    }[law].astype(np.float32)
    theirs = gguf.quants.dequantize(gguf.quants.quantize(values, KINDS[fmt]), KINDS[fmt])
    ours = dequantize(quantize(values, fmt, "w"))
    # The search over ranges is worth 5 % or more; 8 bits gain a little from codes that fit the rounded scale.
    bound = 0.97 if fmt == "q4_1" else 1.0
    assert np.sum((ours - values) ** 2) <= bound * np.sum((theirs - values) ** 2)


@pytest.mark.parametrize("fmt", ["q8_0", "q4_1"])
def test_quantize_is_near_in_every_weight(fmt: str) -> None:
    values = np.random.default_rng(2).uniform(-1, 1, (16, 64)).astype(np.float32)
    # One step of a block that spans at most 2: 2/254 at 8 bits, 2/15 at 4; narrowed ranges cost the extremes a step.
    limit = 2 / 254 if fmt == "q8_0" else 2 / 15
    assert np.abs(dequantize(quantize(values, fmt, "w")) - values).max() <= limit


@pytest.mark.parametrize("fmt", ["q8_0", "q4_1"])
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 1e-30, -1e-30])
def test_quantize_keeps_constant_blocks(fmt: str, value: float) -> None:
    values = np.full((2, 32), value, np.float32)
    # fp16 scales carry 11 bits.
    np.testing.assert_allclose(dequantize(quantize(values, fmt, "w")), values, rtol=2**-11, atol=1e-7)


@pytest.mark.parametrize("fmt", ["q8_0", "q4_1"])
def test_quantize_survives_tiny_and_large_values_without_warnings(fmt: str) -> None:
    rng = np.random.default_rng(3)
    for scale in (1e-42, 1e-12, 1e-6, 1e4):
        values = (rng.uniform(-1, 1, (4, 64)) * scale).astype(np.float32)
        found = dequantize(quantize(values, fmt, "w"))
        assert np.isfinite(found).all()
        assert np.abs(found - values).max() <= max(2 / 15 * scale, 1e-6)


def test_bf16_rounds_to_nearest_and_ties_to_even() -> None:
    one, step = 1.0, 2.0**-7
    cases = {
        one + step / 2: one,  # a tie; the code of 1 is even
        one + step * 1.5: one + 2 * step,  # a tie; the code of 1 + step is odd
        one + step / 2 + 2.0**-23: one + step,
        one + step / 2 - 2.0**-23: one,
        -one - step * 1.5: -one - 2 * step,
        1.9999999: 2.0,
        -0.0: -0.0,
        1e-45: 0.0,
    }
    found = dequantize(quantize(np.array([list(cases)], np.float32), "bf16", "w"))
    np.testing.assert_array_equal(found.view(np.uint32), np.array([list(cases.values())], np.float32).view(np.uint32))


def test_bf16_gives_the_bits_of_the_reference() -> None:
    values = dequantize(random_weight("f32", 64, 256, scales="any"))
    values[np.abs(values) > 3e38] = 0
    expected = gguf.quants.quantize(values, KINDS["bf16"])
    np.testing.assert_array_equal(quantize(values, "bf16", "w").data, expected.reshape(-1).view(np.uint8))


def test_bf16_keeps_what_is_bf16() -> None:
    weight = random_weight("bf16", scales="any")
    np.testing.assert_array_equal(quantize(dequantize(weight), "bf16", "w").data, weight.data)


@pytest.mark.parametrize("fmt", ["f32", "bf16", "q8_0", "q4_1"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_quantize_refuses_what_is_not_a_number(fmt: str, bad: float) -> None:
    values = np.zeros((2, 32), np.float32)
    values[1, 7] = bad
    with pytest.raises(LoadError, match=r"tensor blk\.3\.x holds a value that is not a finite number"):
        quantize(values, fmt, "blk.3.x")  # type: ignore[arg-type]


@pytest.mark.parametrize(("fmt", "big"), [("q8_0", 1e8), ("q4_1", 7e4), ("q4_1", -3e38), ("bf16", -3.4e38)])
def test_quantize_refuses_what_the_format_cannot_hold(fmt: str, big: float) -> None:
    values = np.zeros((1, 32), np.float32)
    values[0, 0] = big
    with pytest.raises(LoadError, match=r"tensor w holds .* too large"):
        quantize(values, fmt, "w")  # type: ignore[arg-type]


@pytest.mark.parametrize("fmt", ["q8_0", "q4_1"])
def test_rows_that_are_no_whole_number_of_blocks_are_refused_by_name(fmt: str) -> None:
    with pytest.raises(LoadError, match=r"tensor blk\.0\.y has rows of 48 weights.*multiple of 32"):
        quantize(np.zeros((2, 48), np.float32), fmt, "blk.0.y")  # type: ignore[arg-type]


# What is converted: floats, and codes of more bits per weight than the target. The others could only lose, and stay.
TO_BF16 = ("f32", "f16")
TO_Q8 = ("f32", "f16", "bf16")
TO_Q4 = (*TO_Q8, "q8_0", "q6_k", "q5_0", "q5_1", "q5_k")


@pytest.mark.parametrize(
    ("quant", "is_head", "converted", "target"),
    [
        (None, False, (), None),
        (None, True, (), None),
        ("f32", False, [fmt for fmt in FORMATS if fmt != "f32"], "f32"),
        ("f32", True, [fmt for fmt in FORMATS if fmt != "f32"], "f32"),
        ("bf16", False, TO_BF16, "bf16"),
        ("bf16", True, TO_BF16, "bf16"),
        ("q8", False, TO_Q8, "q8_0"),
        ("q8", True, TO_Q8, "q8_0"),
        ("q4", False, TO_Q4, "q4_1"),
        ("q4", True, TO_Q8, "q8_0"),
    ],
)
def test_requantize_follows_the_choice(
    quant: str | None, is_head: bool, converted: tuple[str, ...], target: str | None
) -> None:
    for fmt in FORMATS:
        weight = random_weight(fmt, num_rows=3)
        made = requantize(weight, quant, is_head=is_head)  # type: ignore[arg-type]
        if fmt not in converted:
            assert made is weight
            continue
        assert made.name == "w"
        assert made.format == target
        assert made.shape == weight.shape
        np.testing.assert_array_equal(made.data, quantize(dequantize(weight), target, "w").data)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_head", [False, True])
@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16"])
def test_rows_that_do_not_fit_the_choice_stay_as_they_are(fmt: str, is_head: bool) -> None:
    weight = random_weight(fmt, num_rows=3, row_len=100)
    assert requantize(weight, "q8", is_head=is_head) is weight
    assert requantize(weight, "q4", is_head=is_head) is weight
    assert requantize(weight, "f32", is_head=is_head).format == "f32"
    assert requantize(weight, "bf16", is_head=is_head).format == "bf16"


@pytest.mark.parametrize("fmt", ["f16", "q6_k"])
def test_requantize_in_chunks_equals_quantize_of_the_whole(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(fmt)
    whole = quantize(dequantize(weight), "q4_1", "w")
    monkeypatch.setattr(formats, "CHUNK_WEIGHTS", 512)
    made = requantize(weight, "q4", is_head=False)
    np.testing.assert_array_equal(made.data, whole.data)
    assert made.data.size == weight.shape[0] * row_bytes("w", "q4_1", weight.shape[1])


def test_requantize_refuses_what_is_not_finite() -> None:
    weight = random_weight("q6_k", name="blk.1.z")
    weight.data[208:210] = 255  # NaN
    with pytest.raises(LoadError, match=r"tensor blk\.1\.z holds a value that is not a finite number"):
        requantize(weight, "q4", is_head=False)


def test_eight_bits_hold_four_bit_codes_closely() -> None:
    values = dequantize(random_weight("q4_0"))
    made = dequantize(quantize(values, "q8_0", "w"))
    # 8 codes on either side of 0 within 127 steps: off by half a step of max/127 at most.
    assert np.abs(made - values).max() <= np.abs(values).max() / 127 / 2 * 1.01
