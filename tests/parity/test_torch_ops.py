"""Each operation of the torch backend against its formula in float64.

Tolerance: float32 has a unit roundoff of 6e-8; sums here have under a hundred terms of order one, so 1e-5 is generous
and still a hundred times smaller than any wrong formula would show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
from torch import Tensor

from forerun.batch import Batch
from forerun.errors import EngineFault
from forerun.ops.base import AttentionSpec, ExecutorConfig, KvType, RopeStyle, Weight
from forerun.ops.torch import TorchExecutor
from tests.helpers.toy_llama import (
    EPS,
    ToyLlama,
    causal_attention,
    chain_batch,
    f32_weight,
    pages_for,
    rms_norm,
    silu,
)

TOLERANCE = 1e-5
ROWS = 37


def attention_spec(
    heads: int = 4, kv_heads: int = 2, head_dim: int = 8, style: RopeStyle = "interleaved"
) -> AttentionSpec:
    inv_freq = tuple(10000.0 ** (-2.0 * i / head_dim) for i in range(head_dim // 2))
    return AttentionSpec(heads, kv_heads, head_dim, 0.3, style, inv_freq)


def compute(
    op: Callable[[Any, Any], Any],
    x: np.ndarray,
    spec: AttentionSpec | None = None,
    kv_type: KvType = "f32",
    batch: Batch | None = None,
) -> np.ndarray:
    """What one operation gives for the input rows x [M, H]: they are the embedding of the ids 0 to M - 1."""
    rows, hidden = x.shape
    table = f32_weight("table", x)
    head = f32_weight("head", np.eye(rows, hidden))
    norm = np.ones(hidden, dtype=np.float32)
    seen: list[Any] = []

    def build(ops: Any) -> Any:
        embedded = ops.embed(table)
        seen.append(op(ops, embedded))
        return ops.logits(embedded, norm, EPS, head)

    config = ExecutorConfig(rows, hidden, 1, (spec or attention_spec(),), rows, 8, kv_type)
    TorchExecutor(config, build).forward(batch or chain_batch(range(rows), pages_for(rows)))
    result = seen[-1]
    assert isinstance(result, Tensor)
    return result.numpy()


def rows_of(rng: np.random.Generator, hidden: int) -> np.ndarray:
    return rng.normal(size=(ROWS, hidden)).astype(np.float32)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_embed_returns_the_rows_themselves(rng: np.random.Generator) -> None:
    x = rows_of(rng, 24)
    batch = replace(chain_batch(range(ROWS), pages_for(ROWS)), token_ids=np.arange(ROWS, dtype=np.int32)[::-1].copy())
    np.testing.assert_array_equal(compute(lambda ops, x: x, x, batch=batch), x[::-1])


@pytest.mark.parametrize("scale", [8.0, 33.941125497])  # sqrt(1152) is no float32
def test_embed_multiplies_once_in_float32(scale: float, rng: np.random.Generator) -> None:
    x = rows_of(rng, 24)
    table, head, norm = f32_weight("table", x), f32_weight("head", np.eye(ROWS, 24)), np.ones(24, dtype=np.float32)
    seen: list[Any] = []

    def build(ops: Any) -> Any:
        seen.append(ops.embed(table, scale))
        return ops.logits(seen[-1], norm, EPS, head)

    config = ExecutorConfig(ROWS, 24, 1, (attention_spec(),), ROWS, 8, "f32")
    TorchExecutor(config, build).forward(chain_batch(range(ROWS), pages_for(ROWS)))
    np.testing.assert_array_equal(seen[-1].numpy(), x * np.float32(scale))


def test_norm_linear_puts_its_maps_side_by_side(rng: np.random.Generator) -> None:
    x, norm = rows_of(rng, 24), rng.uniform(0.5, 1.5, 24).astype(np.float32)
    first, second = rng.normal(size=(5, 24)), rng.normal(size=(9, 24))
    weights = (f32_weight("first", first), f32_weight("second", second))
    got = compute(lambda ops, x: ops.norm_linear(x, norm, EPS, weights), x)
    expected = rms_norm(x.astype(np.float64), norm) @ np.concatenate([first, second]).astype(np.float32).T
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_linear_maps_without_a_norm_and_with_a_bias(rng: np.random.Generator) -> None:
    x, bias = rows_of(rng, 24), rng.normal(size=14).astype(np.float32)
    first, second = (rng.normal(size=(n, 24)).astype(np.float32) for n in (5, 9))
    weights = (f32_weight("first", first), f32_weight("second", second))
    product = x.astype(np.float64) @ np.concatenate([first, second]).T
    got = compute(lambda ops, x: ops.norm_linear(x, None, EPS, weights), x)
    np.testing.assert_allclose(got, product, rtol=TOLERANCE, atol=TOLERANCE)
    got = compute(lambda ops, x: ops.norm_linear(x, None, EPS, weights, bias), x)
    np.testing.assert_allclose(got, product + bias, rtol=TOLERANCE, atol=TOLERANCE)


def test_norm_adds_epsilon_to_the_mean_square(rng: np.random.Generator) -> None:
    x, norm = np.full((1, 24), 1e-4, dtype=np.float32), np.ones(24, dtype=np.float32)
    eye = f32_weight("eye", np.eye(24))
    got = compute(lambda ops, x: ops.norm_linear(x, norm, 3e-8, (eye,)), x)
    np.testing.assert_allclose(got, np.full((1, 24), 0.5), rtol=TOLERANCE)


def test_linear_add_adds_the_residual(rng: np.random.Generator) -> None:
    x, matrix = rows_of(rng, 24), rng.normal(size=(24, 24)).astype(np.float32)
    weight = f32_weight("w", matrix)
    got = compute(lambda ops, x: ops.linear_add(x, weight, x), x)
    np.testing.assert_allclose(got, x + x.astype(np.float64) @ matrix.T, rtol=TOLERANCE, atol=TOLERANCE)


def test_linear_add_adds_a_bias(rng: np.random.Generator) -> None:
    x, matrix, bias = rows_of(rng, 24), rng.normal(size=(24, 24)).astype(np.float32), rng.normal(size=24)
    weight, bias = f32_weight("w", matrix), bias.astype(np.float32)
    got = compute(lambda ops, x: ops.linear_add(x, weight, x, bias), x)
    np.testing.assert_allclose(got, x + x.astype(np.float64) @ matrix.T + bias, rtol=TOLERANCE, atol=TOLERANCE)


def test_norm_add_norms_what_is_added_and_not_the_residual(rng: np.random.Generator) -> None:
    x, norm = rows_of(rng, 24), rng.uniform(0.5, 1.5, 24).astype(np.float32)
    got = compute(lambda ops, x: ops.norm_add(x, norm, EPS, x), x)
    np.testing.assert_allclose(got, x + rms_norm(x.astype(np.float64), norm), rtol=TOLERANCE, atol=TOLERANCE)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(("act", "formula"), [("silu", silu), ("gelu_tanh", gelu_tanh)])
def test_a_gated_part_without_a_norm(
    act: str, formula: Callable[[np.ndarray], np.ndarray], rng: np.random.Generator
) -> None:
    x = rows_of(rng, 24)
    gate, up = (rng.normal(size=(11, 24)).astype(np.float32) for _ in range(2))
    weights = f32_weight("gate", gate), f32_weight("up", up)
    got = compute(lambda ops, x: ops.norm_gated(x, None, EPS, *weights, act), x)
    x64 = x.astype(np.float64)
    np.testing.assert_allclose(got, formula(x64 @ gate.T) * (x64 @ up.T), rtol=TOLERANCE, atol=TOLERANCE)


def test_norm_gated_activates_the_gate_and_not_the_other(rng: np.random.Generator) -> None:
    x, norm = rows_of(rng, 24), rng.uniform(0.5, 1.5, 24).astype(np.float32)
    gate, up = (rng.normal(size=(11, 24)).astype(np.float32) for _ in range(2))
    weights = f32_weight("gate", gate), f32_weight("up", up)
    got = compute(lambda ops, x: ops.norm_gated(x, norm, EPS, *weights, "silu"), x)
    normed = rms_norm(x.astype(np.float64), norm)
    np.testing.assert_allclose(got, silu(normed @ gate.T) * (normed @ up.T), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("format_name", ["q4_0", "q4_1", "q8_0", "f16"])
def test_a_quantised_matrix_acts_as_its_dequantised_values(format_name: str, rng: np.random.Generator) -> None:
    kind = gguf.GGMLQuantizationType[format_name.upper()]
    raw = gguf.quants.quantize(rng.normal(size=(64, 64)).astype(np.float32), kind)
    weight = Weight("w", format_name, (64, 64), raw.view(np.uint8).reshape(-1))
    x = rows_of(rng, 64)
    got = compute(lambda ops, x: ops.linear_add(x, weight, x), x)
    matrix = gguf.quants.dequantize(raw, kind).astype(np.float64)
    np.testing.assert_allclose(got, x + x @ matrix.T, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("style", ["interleaved", "neox"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 8), (4, 2, 8), (6, 2, 10), (3, 1, 64)])
def test_attention(style: RopeStyle, heads: int, kv_heads: int, head_dim: int, rng: np.random.Generator) -> None:
    spec = attention_spec(heads, kv_heads, head_dim, style)
    qkv = rows_of(rng, (heads + 2 * kv_heads) * head_dim)
    got = compute(lambda ops, x: ops.attention(x, 0, spec), qkv, spec)
    expected = causal_attention(qkv.astype(np.float64), spec, "f32")
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_rope_keeps_its_angle_at_a_far_position(rng: np.random.Generator) -> None:
    # Neither the angle, 13107.1 rad with steps of 0.001 in float32, nor the frequency may be rounded to float32.
    spec = replace(attention_spec(1, 1, 2), inv_freq=(0.1,), scale=1.0)
    far = np.int32(131071)
    qkv = np.array([[1, 0, 1, 0, 1, 0], [1, 0, 1, 0, 0, 1]], dtype=np.float32)
    batch = replace(chain_batch(range(2), pages_for(2)), positions=np.array([0, far], dtype=np.int32))
    got = compute(lambda ops, x: ops.attention(x, 0, spec), qkv, spec, batch=batch)
    weights = np.exp([np.cos(float(far) * 0.1), 1.0])
    np.testing.assert_allclose(got[1], weights / weights.sum(), rtol=1e-6)


@pytest.mark.parametrize("style", ["interleaved", "neox"])
def test_rope_turns_the_first_numbers_of_a_head_and_stretches_them(style: RopeStyle) -> None:
    # Two positions, one head, values that tell them apart: the weights give q . k. The third and fourth pair of
    # numbers do not turn, the first two turn by 0.3 and 0.1 a position and are stretched by 1.5 in q and in k.
    spec = AttentionSpec(1, 1, 8, 0.5, style, (0.3, 0.1), rope_magnitude=1.5)
    q, k = np.arange(1.0, 9.0), np.array([0.5, -1.0, 0.25, 2.0, 1.0, -0.5, 0.75, 0.1])
    first, second = ((0, 2), (1, 3)) if style == "interleaved" else ((0, 1), (2, 3))
    turn = np.exp(1j * np.array([0.3, 0.1]))
    turned = (q[list(first)] + 1j * q[list(second)]) * turn  # q at position 1, k of position 0
    near, far = k[list(first)] + 1j * k[list(second)], q[4:] @ k[4:]
    scores = [1.5**2 * (turned * near.conj()).real.sum() + far]
    scores.append(1.5**2 * q[:4] @ k[:4] + far)
    values = np.zeros((2, 8))
    values[0, 0] = values[1, 1] = 1
    qkv = np.concatenate([np.stack([q, q]), np.stack([k, k]), values], axis=1).astype(np.float32)
    got = compute(lambda ops, x: ops.attention(x, 0, spec), qkv, spec)
    weights = np.exp(0.5 * np.array(scores))
    np.testing.assert_allclose(got[1, :2], weights / weights.sum(), rtol=TOLERANCE)


@pytest.mark.parametrize("window", [1, 2, 7, ROWS, ROWS + 5])
def test_a_row_sees_its_window(window: int, rng: np.random.Generator) -> None:
    spec = replace(attention_spec(), window=window)
    qkv = rows_of(rng, 8 * 8)
    got = compute(lambda ops, x: ops.attention(x, 0, spec), qkv, spec)
    for row in range(ROWS):
        # RoPE depends on distances alone, so a row's window may be looked at as a text of its own.
        seen = qkv[max(row + 1 - window, 0) : row + 1].astype(np.float64)
        expected = causal_attention(seen, spec, "f32")[-1]
        np.testing.assert_allclose(got[row], expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("is_each", [True, False])
def test_heads_are_normed_before_they_turn(is_each: bool, rng: np.random.Generator) -> None:
    spec, eps = attention_spec(), 0.1
    qkv = rows_of(rng, 8 * 8)
    q_norm, k_norm = (rng.uniform(0.5, 1.5, 8 if is_each else heads * 8).astype(np.float32) for heads in (4, 2))
    q, k, v = np.split(qkv.astype(np.float64), [32, 48], axis=1)

    def normed(flat: np.ndarray, norm: np.ndarray) -> np.ndarray:
        parts = flat.reshape(ROWS, -1, norm.size)
        return (parts / np.sqrt((parts**2).mean(axis=2, keepdims=True) + eps) * norm).reshape(ROWS, -1)

    got = compute(lambda ops, x: ops.attention(x, 0, spec, q_norm, k_norm, eps), qkv, spec)
    expected = causal_attention(np.concatenate([normed(q, q_norm), normed(k, k_norm), v], axis=1), spec, "f32")
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_norm_that_fits_no_heads_is_a_fault(rng: np.random.Generator) -> None:
    norm = np.ones(16, dtype=np.float32)
    with pytest.raises(EngineFault, match="a norm of 16 numbers fits neither one head of 8 nor all 4"):
        compute(lambda ops, x: ops.attention(x, 0, attention_spec(), norm), rows_of(rng, 64))


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ((), "1 layers with a cache can't have 0 attentions"),
        ((attention_spec(),) * 2, "1 layers with a cache can't have 2 attentions"),
        ((replace(attention_spec(), head_dim=6),), "attention 0 rotates 8 of 6 numbers"),
        ((replace(attention_spec(), window=0),), "attention 0 has a window of 0"),
    ],
)
def test_attentions_that_make_no_sense_are_a_fault(specs: tuple[AttentionSpec, ...], message: str) -> None:
    with pytest.raises(EngineFault, match=message):
        ExecutorConfig(10, 24, 1, specs, 4, 8, "f32")


def test_layers_must_have_equal_heads() -> None:
    specs = (attention_spec(), attention_spec(kv_heads=1))
    with pytest.raises(EngineFault, match="equal heads"):
        ExecutorConfig(10, 24, 2, specs, 4, 8, "f32")


def test_a_row_reads_its_own_key_and_value_after_rounding() -> None:
    spec = attention_spec(1, 1, 2)
    value = np.float32(1.0 + 2.0**-12)  # halfway steps of float16 are 2^-11 here, so it rounds to 1
    qkv = np.array([[0, 0, 0, 0, value, -value]], dtype=np.float32)
    for kv_type, expected in (("f16", np.float32(1.0)), ("f32", value)):
        got = compute(lambda ops, x: ops.attention(x, 0, spec), qkv, spec, kv_type)  # type: ignore[arg-type]
        np.testing.assert_array_equal(got, [[expected, -expected]])


def test_logits_are_those_of_the_wanted_rows(rng: np.random.Generator) -> None:
    toy = ToyLlama(num_layers=0)
    tokens = rng.integers(0, toy.vocab_size, ROWS)
    out = TorchExecutor(toy.config(), toy.build).forward(chain_batch(tokens, pages_for(ROWS), wanted=[0, 3, 36]))
    expected = toy.reference(tokens)[[0, 3, 36]]
    np.testing.assert_allclose(out.logits, expected, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_array_equal(out.argmax, expected.argmax(axis=1))
    assert out.logits.dtype == np.float32
    assert out.argmax.dtype == np.int32


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize("style", ["interleaved", "neox"])
def test_a_whole_model(kv_type: KvType, style: RopeStyle, rng: np.random.Generator) -> None:
    toy = ToyLlama(rope_style=style)
    tokens = rng.integers(0, toy.vocab_size, 70)
    out = TorchExecutor(toy.config(kv_type), toy.build).forward(chain_batch(tokens, pages_for(70)))
    # A key within float32 rounding of the middle of two float16 values may round the other way in the reference.
    tolerance = 3e-5 if kv_type == "f32" else 1e-3
    np.testing.assert_allclose(out.logits, toy.reference(tokens, kv_type), rtol=tolerance, atol=tolerance)
