"""Weights of 16 bits on the native backend: the bits of their float32 form, whatever the rows, sizes, threads and sets.

They are read packed, so only half of the bytes; widening them is exact, and the sum is the same chain.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import forerun._native as _native
from forerun.ops.base import Weight
from forerun.ops.formats import dequantize, quantize
from forerun.ops.native import ISA_VARIABLE
from forerun.types import Float32Array
from tests.exactness.test_native_contract import compute, wild_rows
from tests.helpers.blocks import random_weight
from tests.helpers.native import assert_same_bits
from tests.helpers.toy_llama import ToyLlama, chain_batch, f32_weight, pages_for
from tests.unit.test_native_backend import toy_executor

ISAS = _native.available_isas()
NARROW = ("bf16", "f16")
NUM_TOKENS = 60


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(ISA_VARIABLE, request.param)
    return request.param  # type: ignore[no-any-return]


def narrowed(weight: Weight, fmt: str) -> Weight:
    """A float32 matrix rounded to 16 bits."""
    values = dequantize(weight)
    if fmt == "bf16":
        return quantize(values, "bf16", weight.name)
    return Weight(weight.name, "f16", weight.shape, values.astype(np.float16).reshape(-1).view(np.uint8))


def expanded(weight: Weight) -> Weight:
    return f32_weight(weight.name, dequantize(weight))


def bits_weight(fmt: str, bits: np.ndarray) -> Weight:
    """A matrix of 16-bit patterns."""
    data = np.ascontiguousarray(bits, "<u2")
    return Weight("head", fmt, (bits.shape[0], bits.shape[1]), data.reshape(-1).view(np.uint8))


# Odd and even numbers of inputs, less than a tile's row of lanes, and long ones; outputs that leave a tile half empty.
@pytest.mark.parametrize("inputs", [1, 2, 7, 33, 64, 203, 577])
@pytest.mark.parametrize("fmt", NARROW)
def test_products_have_the_bits_of_their_float32_form(isa: str, fmt: str, inputs: int) -> None:
    rng = np.random.default_rng(inputs)
    x, norm = wild_rows(rng, 40, inputs), rng.uniform(0.5, 1.5, inputs).astype(np.float32)
    for outputs in (40, 171):
        head = random_weight(fmt, outputs, inputs, seed=inputs)
        for rows in (*range(1, 18), 24, 33, 40):
            got, want = (compute(x[:rows], norm, weight) for weight in (head, expanded(head)))
            assert_same_bits(got, want, (outputs, rows))


@pytest.mark.parametrize("rows", [1, 3, 8, 11, 40])
@pytest.mark.parametrize("fmt", NARROW)
def test_extremes_have_the_bits_of_their_float32_form(isa: str, fmt: str, rows: int) -> None:
    """Zeros of both signs, subnormals, the largest; the large ones stand alone in their row, so sums stay finite."""
    inputs = 38
    x = wild_rows(np.random.default_rng(rows), rows, inputs)
    largest, one, lowest = (0x7F7F, 0x3F80, 0x0080) if fmt == "bf16" else (0x7BFF, 0x3C00, 0x0400)
    bits = np.random.default_rng(1).integers(0, lowest + 3, (40, inputs)).astype(np.uint16)  # zeros and subnormals
    bits[:, ::3] |= 0x8000
    bits[0::4, 5] = largest
    bits[1::4, 6] = largest | 0x8000
    bits[2::4, 7] = one
    head, norm = bits_weight(fmt, bits), np.full(inputs, 1e-3, np.float32)
    got, want = (compute(x, norm, weight) for weight in (head, expanded(head)))
    assert np.isfinite(want).all()
    assert_same_bits(got, want)


def test_subnormals_count_as_their_float32_form_does(isa: str) -> None:
    """A subnormal half is an ordinary float32. One of bfloat16 is a subnormal float32 too, which a product flushes."""
    x, norm = np.ones((9, 32), np.float32), np.full(32, 2.0, np.float32)
    for fmt, want in (("f16", np.float32(32 * 2.0 * 2.0**-24)), ("bf16", np.float32(0))):
        got = compute(x, norm, bits_weight(fmt, np.full((20, 32), 1, np.uint16)))
        np.testing.assert_allclose(got, want, rtol=1e-4)
        assert (got == 0).all() == (fmt == "bf16")


def toy_logits(toy: ToyLlama, threads: int, sizes: list[int]) -> Float32Array:
    target = toy_executor(toy, "f16", num_threads=threads, max_rows=NUM_TOKENS)
    ids = [(7 * i + 3) % toy.vocab_size for i in range(NUM_TOKENS)]
    out, start = [], 0
    for size in sizes:
        batch = chain_batch(ids[start : start + size], pages_for(NUM_TOKENS), start)
        out.append(target.forward(batch).logits.copy())
        start += size
    return np.concatenate(out)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("fmt", NARROW)
def test_models_have_the_bits_of_their_float32_form(isa: str, fmt: str, is_tied: bool) -> None:
    """Every kind of linear map and the embedding, with heads that are whole tiles and heads that are not."""
    for head_dim, ffn_size, hidden in ((16, 96, 64), (12, 41, 36)):
        exact, packed = (
            ToyLlama(head_dim=head_dim, ffn_size=ffn_size, hidden_size=hidden, is_tied=is_tied) for _ in range(2)
        )
        for name, weight in list(exact.weights.items()):
            packed.weights[name] = narrowed(weight, fmt)
            exact.weights[name] = expanded(packed.weights[name])
        if is_tied:
            packed.weights["head"], exact.weights["head"] = packed.weights["embed"], exact.weights["embed"]
        want = toy_logits(exact, 1, [1] * NUM_TOKENS)
        for threads, sizes in ((1, [NUM_TOKENS]), (2, [1, 2, 3, 4, 5, 6, 7, 8, 24]), (3, [17, 9, 34])):
            assert_same_bits(toy_logits(packed, threads, sizes), want, (head_dim, threads))


@pytest.mark.parametrize("fmt", NARROW)
def test_floats_and_codes_side_by_side(isa: str, fmt: str) -> None:
    """One input that a float matrix reads as it is and a quantised one as codes, as in files that keep some floats."""
    mixed, exact = (ToyLlama(head_dim=16, ffn_size=64, hidden_size=64) for _ in range(2))
    for i, (name, weight) in enumerate(list(exact.weights.items())):
        values = dequantize(weight)
        mixed.weights[name] = narrowed(weight, fmt) if i % 2 else quantize(values, "q8_0", name)
        exact.weights[name] = expanded(mixed.weights[name]) if i % 2 else mixed.weights[name]
    want = toy_logits(exact, 1, [1] * NUM_TOKENS)
    for threads, sizes in ((1, [NUM_TOKENS]), (2, [5, 8, 16, 31])):
        assert_same_bits(toy_logits(mixed, threads, sizes), want, threads)
