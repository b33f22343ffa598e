"""Weight formats against the reference `gguf` package, and quantisation against its error."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from forerun.errors import LoadError
from forerun.ops import formats
from forerun.ops.base import Weight
from forerun.ops.formats import FORMATS, dequantize, quantize, requantize, row_bytes

KINDS = {name: gguf.GGMLQuantizationType[name.upper()] for name in FORMATS}


def random_weight(fmt: str, num_rows: int = 37, row_len: int = 96, seed: int = 0) -> Weight:
    """Arbitrary codes (so also ones a quantiser would never choose) with sensible scales."""
    rng = np.random.default_rng(seed)
    block = FORMATS[fmt]
    data = rng.integers(0, 256, num_rows * row_bytes("w", fmt, row_len), dtype=np.uint8)
    if fmt in ("f32", "f16"):
        data = rng.standard_normal(num_rows * row_len).astype(f"<f{block.block_bytes}").view(np.uint8)
    else:
        scales = rng.standard_normal((data.size // block.block_bytes, 2)).astype("<f2").view(np.uint8)
        num_scale_bytes = 4 if fmt == "q4_1" else 2
        data.reshape(-1, block.block_bytes)[:, :num_scale_bytes] = scales[:, :num_scale_bytes]
    return Weight("w", fmt, (num_rows, row_len), data)


@pytest.mark.parametrize("fmt", FORMATS)
def test_block_sizes_are_those_of_the_file_format(fmt: str) -> None:
    assert (FORMATS[fmt].block_len, FORMATS[fmt].block_bytes) == gguf.GGML_QUANT_SIZES[KINDS[fmt]]


@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantize_gives_the_bits_of_the_reference(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "CHUNK_WEIGHTS", 500)  # several chunks, the last one short
    weight = random_weight(fmt)
    expected = gguf.quants.dequantize(weight.data.reshape(weight.shape[0], -1), KINDS[fmt])
    found = dequantize(weight)
    assert found.dtype == np.float32
    assert found.shape == weight.shape
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantize_reads_bytes_at_any_address_and_returns_a_new_array(fmt: str) -> None:
    weight = random_weight(fmt)
    shifted = np.concatenate([np.zeros(1, np.uint8), weight.data])[1:]
    shifted.flags.writeable = False
    found = dequantize(Weight("w", fmt, weight.shape, shifted))
    np.testing.assert_array_equal(found, dequantize(weight))
    assert found.flags.writeable
    assert not np.shares_memory(found, shifted)


@pytest.mark.parametrize("fmt", ["q8_0", "q4_1"])
@pytest.mark.parametrize("law", ["normal", "heavy", "shifted"])
def test_quantize_beats_the_reference_quantiser(fmt: str, law: str) -> None:
    rng = np.random.default_rng(1)
    values = {
        "normal": rng.standard_normal((64, 256)),
        "heavy": rng.standard_t(3, (64, 256)),
        "shifted": rng.standard_normal((64, 256)) + 5,
    }[law].astype(np.float32)
    reference = gguf.quants.dequantize(gguf.quants.quantize(values, KINDS[fmt]), KINDS[fmt])
    ours = dequantize(quantize(values, fmt, "w"))
    # The search over ranges is worth 5 % or more; 8 bits gain a little from codes that fit the rounded scale.
    bound = 0.97 if fmt == "q4_1" else 1.0
    assert np.sum((ours - values) ** 2) <= bound * np.sum((reference - values) ** 2)


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


@pytest.mark.parametrize("fmt", ["f32", "q8_0", "q4_1"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_quantize_refuses_what_is_not_a_number(fmt: str, bad: float) -> None:
    values = np.zeros((2, 32), np.float32)
    values[1, 7] = bad
    with pytest.raises(LoadError, match=r"tensor blk\.3\.x holds a value that is not a finite number"):
        quantize(values, fmt, "blk.3.x")  # type: ignore[arg-type]


@pytest.mark.parametrize(("fmt", "big"), [("q8_0", 1e8), ("q4_1", 7e4), ("q4_1", -3e38)])
def test_quantize_refuses_what_fp16_scales_cannot_hold(fmt: str, big: float) -> None:
    values = np.zeros((1, 32), np.float32)
    values[0, 0] = big
    with pytest.raises(LoadError, match=r"tensor w holds .* too large"):
        quantize(values, fmt, "w")  # type: ignore[arg-type]


@pytest.mark.parametrize("fmt", ["q8_0", "q4_1"])
def test_rows_that_are_no_whole_number_of_blocks_are_refused_by_name(fmt: str) -> None:
    with pytest.raises(LoadError, match=r"tensor blk\.0\.y has rows of 48 weights.*multiple of 32"):
        quantize(np.zeros((2, 48), np.float32), fmt, "blk.0.y")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("quant", "is_head", "expected"),
    [
        (None, False, {"f32": "f32", "f16": "f16", "q4_0": "q4_0", "q4_1": "q4_1", "q8_0": "q8_0"}),
        ("f32", False, dict.fromkeys(FORMATS, "f32")),
        ("q8", False, dict.fromkeys(FORMATS, "q8_0")),
        ("q8", True, dict.fromkeys(FORMATS, "q8_0")),
        ("q4", False, {"f32": "q4_1", "f16": "q4_1", "q4_0": "q4_0", "q4_1": "q4_1", "q8_0": "q4_1"}),
        ("q4", True, {"f32": "q8_0", "f16": "q8_0", "q4_0": "q4_0", "q4_1": "q4_1", "q8_0": "q8_0"}),
    ],
)
def test_requantize_follows_the_choice(quant: str | None, is_head: bool, expected: dict[str, str]) -> None:
    for fmt, target in expected.items():
        weight = random_weight(fmt)
        made = requantize(weight, quant, is_head=is_head)  # type: ignore[arg-type]
        assert made.format == target
        assert made.shape == weight.shape
        assert made.data.size == weight.shape[0] * row_bytes("w", target, weight.shape[1])
        assert (made is weight) == (fmt == target)


def test_requantize_in_chunks_equals_quantize_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight("f16")
    whole = quantize(dequantize(weight), "q4_1", "w")
    monkeypatch.setattr(formats, "CHUNK_WEIGHTS", 500)
    np.testing.assert_array_equal(requantize(weight, "q4", is_head=False).data, whole.data)


def test_eight_bits_hold_four_bit_codes_closely() -> None:
    weight = random_weight("q4_0")
    made = dequantize(requantize(weight, "q8", is_head=False))
    # 8 codes on either side of 0 within 127 steps: off by half a step of max/127 at most.
    assert np.abs(made - dequantize(weight)).max() <= np.abs(dequantize(weight)).max() / 127 / 2 * 1.01
