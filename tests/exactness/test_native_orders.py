"""Matrices that read their inputs in an order of their own: the bits of the same numbers laid out in that order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import forerun._native as _native
from forerun.errors import EngineFault, LoadError
from forerun.models.column_order import settle_columns
from forerun.ops import create_executor
from forerun.ops.base import Executor, Ops, Weight
from forerun.ops.formats import dequantize, quantize, requantize
from forerun.ops.native import ISA_VARIABLE
from tests.helpers.blocks import random_weight
from tests.helpers.native import assert_same_bits
from tests.helpers.toy_llama import EPS, ToyLlama, chain_batch, f32_weight, pages_for

VOCAB, HIDDEN, INNER = 45, 96, 64
FORMATS = ("f32", "q4_0", "q5_0", "q8_0")
RNG = np.random.default_rng(8)
COLUMNS = RNG.permutation(HIDDEN).astype(np.int32)
# Whole numbers, so that the sum of their squares is exact in whichever order it is taken.
TABLE = RNG.integers(-9, 10, (VOCAB, HIDDEN)).astype(np.float32)
NORM = RNG.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
OTHER = f32_weight("other", RNG.normal(0.0, 1.0, (VOCAB, INNER)))
HEAD = f32_weight("head", RNG.normal(0.0, 0.1, (VOCAB, INNER)))
ONES = np.ones(INNER, np.float32)

# A program around one operation that reads an embedding; `matrix` gives its matrices by name and number of outputs.
Around = Callable[[Ops[Any], Any, np.ndarray, Callable[[str, int], Weight]], Any]
OPERATIONS: dict[str, Around] = {
    "linear": lambda ops, x, norm, matrix: ops.logits(
        ops.norm_linear(x, None, 0.0, (matrix("a", 24), matrix("b", 40))), ONES, EPS, HEAD
    ),
    "linear after a norm": lambda ops, x, norm, matrix: ops.logits(
        ops.norm_linear(x, norm, EPS, (matrix("a", 24), matrix("b", 40))), ONES, EPS, HEAD
    ),
    "linear_add": lambda ops, x, norm, matrix: ops.logits(
        ops.linear_add(x, matrix("a", INNER), ops.embed(OTHER)), ONES, EPS, HEAD
    ),
    "gated": lambda ops, x, norm, matrix: ops.logits(
        ops.norm_gated(x, norm, EPS, matrix("a", INNER), matrix("b", INNER), "silu"), ONES, EPS, HEAD
    ),
    "logits": lambda ops, x, norm, matrix: ops.logits(x, norm, EPS, matrix("a", VOCAB)),
}


def logits_of(operation: str, fmt: str, columns: np.ndarray | None, sizes: list[int]) -> np.ndarray:
    """Of all tokens; with columns None the inputs themselves lie in the order that the matrices are stored in."""
    matrices: dict[str, Weight] = {}

    def matrix(name: str, num_rows: int) -> Weight:
        made = random_weight(fmt, num_rows, HIDDEN, seed=ord(name) + num_rows, name=name)
        return matrices.setdefault(name, replace(made, columns=columns))

    order = COLUMNS if columns is None else np.arange(HIDDEN)
    table, norm = f32_weight("table", TABLE[:, order]), NORM[order]
    config = ToyLlama(num_layers=0, vocab_size=VOCAB, hidden_size=HIDDEN).config(max_rows=VOCAB)
    target = create_executor(
        "native",
        replace(config, num_threads=2),
        lambda ops: OPERATIONS[operation](ops, ops.embed(table), norm, matrix),
    )
    return in_passes(target, sizes)


def in_passes(target: Executor, sizes: list[int]) -> np.ndarray:
    out, start = [], 0
    for size in sizes:
        out.append(target.forward(chain_batch(range(start, start + size), pages_for(VOCAB))).logits.copy())
        start += size
    return np.concatenate(out)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_order_has_the_bits_of_inputs_that_lie_in_it(
    operation: str, fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "scalar")
    want = logits_of(operation, fmt, None, [VOCAB])
    for isa in _native.available_isas():
        monkeypatch.setenv(ISA_VARIABLE, isa)
        for sizes in ([VOCAB], [1] * VOCAB, [2, 3, 4, 5, 6, 7, 8, 10], [17, 28]):
            assert_same_bits(logits_of(operation, fmt, COLUMNS, sizes), want, (operation, fmt, isa, sizes))


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_order_of_down_is_as_good_as_an_order_of_gate_and_up(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = np.random.default_rng(9).permutation(INNER).astype(np.int32)
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    matrices = {
        f"blk.0.ffn_{part}.weight": random_weight(fmt, *shape, seed=seed, name=part)
        for seed, (part, shape) in enumerate(shapes.items())
    }
    matrices["blk.0.ffn_down.weight"] = replace(matrices["blk.0.ffn_down.weight"], columns=columns)
    settled = settle_columns(matrices, 1)
    assert settled["blk.0.ffn_down.weight"].columns is None
    table, head = f32_weight("table", TABLE), random_weight("f32", VOCAB, HIDDEN)

    def logits(parts: Mapping[str, Weight], sizes: list[int]) -> np.ndarray:
        gate, up, down = (parts[f"blk.0.ffn_{part}.weight"] for part in ("gate", "up", "down"))

        def build(ops: Any) -> Any:
            x = ops.embed(table)
            x = ops.linear_add(ops.norm_gated(x, NORM, EPS, gate, up, "silu"), down, x)
            return ops.logits(x, NORM, EPS, head)

        config = ToyLlama(num_layers=0, vocab_size=VOCAB, hidden_size=HIDDEN).config(max_rows=VOCAB)
        return in_passes(create_executor("native", replace(config, num_threads=2), build), sizes)

    monkeypatch.setenv(ISA_VARIABLE, "scalar")
    want = logits(settled, [VOCAB])
    for isa in _native.available_isas():
        monkeypatch.setenv(ISA_VARIABLE, isa)
        for sizes in ([VOCAB], [5, 17, 23], [1] * VOCAB):
            assert_same_bits(logits(matrices, sizes), want, (fmt, isa, sizes))
            assert_same_bits(logits(settled, sizes), want, (fmt, isa, sizes))


@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantize_puts_the_columns_back(fmt: str) -> None:
    weight = random_weight(fmt, 7, HIDDEN)
    ordered = replace(weight, columns=COLUMNS)
    np.testing.assert_array_equal(dequantize(ordered)[:, COLUMNS], dequantize(weight))
    for quant in ("f32", "q8"):
        made = requantize(ordered, quant, is_head=False)  # type: ignore[arg-type]
        assert made.columns is COLUMNS
        np.testing.assert_array_equal(made.data, requantize(weight, quant, is_head=False).data)  # type: ignore[arg-type]
    assert quantize(dequantize(weight), "f32", "w").columns is None


def test_f069_a_fault_leaves_nothing_behind_a_narrower_row() -> None:
    """Rows of 40 floats share scratch with rows of 64, and vectors reach past them."""
    table = np.random.default_rng(3).normal(0.0, 1.0, (VOCAB, 40)).astype(np.float32)
    table[7, 11] = np.nan
    shapes = {"wide": (64, 40), "narrow": (40, 64)}
    parts = {
        name: replace(random_weight("f32", *shape), columns=np.arange(shape[1], dtype=np.int32)[::-1].copy())
        for name, shape in shapes.items()
    }

    def build(ops: Any) -> Any:
        x = ops.embed(f32_weight("table", table))
        y = ops.norm_linear(x, None, 0.0, (parts["wide"],))
        return ops.logits(ops.linear_add(y, parts["narrow"], x), np.ones(40, np.float32), EPS, head)

    head = random_weight("f32", VOCAB, 40)
    config = ToyLlama(num_layers=0, vocab_size=VOCAB, hidden_size=40).config(max_rows=VOCAB)
    target = create_executor("native", config, build)
    good, bad = (chain_batch([token], pages_for(1)) for token in (1, 7))
    want = target.forward(good).logits.copy()
    with pytest.raises(EngineFault, match="non-finite activations in layer 0, row 0"):
        target.forward(bad)
    assert_same_bits(target.forward(good).logits, want)


@pytest.mark.parametrize("other", [None, np.roll(COLUMNS, 1)])
def test_one_input_is_read_in_one_order(other: np.ndarray | None) -> None:
    weights = tuple(
        Weight(name, "f32", (32, HIDDEN), random_weight("f32", 32, HIDDEN).data, columns)
        for name, columns in (("a", COLUMNS), ("b", other))
    )
    config = ToyLlama(num_layers=0, vocab_size=VOCAB, hidden_size=HIDDEN).config()

    def build(ops: Any) -> Any:
        x = ops.norm_linear(ops.embed(f32_weight("table", TABLE)), None, 0.0, weights)
        return ops.logits(x, ONES, EPS, HEAD)

    with pytest.raises(EngineFault, match="a and what lies beside it can't read one input in several orders"):
        create_executor("native", config, build)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (np.arange(HIDDEN) // 2, "an order must name each column once"),
        (np.arange(HIDDEN) - 1, "an order must name each column once"),
        (np.arange(1, HIDDEN + 1), "an order must name each column once"),
        (np.arange(HIDDEN - 1), "order and input differ in width"),
        (np.arange(HIDDEN + 1), "order and input differ in width"),
    ],
)
def test_what_is_no_order_is_refused(columns: np.ndarray, problem: str) -> None:
    head = replace(random_weight("f32", VOCAB, HIDDEN), columns=columns.astype(np.int32))
    config = ToyLlama(num_layers=0, vocab_size=VOCAB, hidden_size=HIDDEN).config()
    with pytest.raises(LoadError, match=problem):
        create_executor("native", config, lambda ops: ops.logits(ops.embed(f32_weight("t", TABLE)), NORM, EPS, head))


def test_an_embedding_has_no_order() -> None:
    table = replace(f32_weight("t", TABLE), columns=COLUMNS)
    head = random_weight("f32", VOCAB, HIDDEN)
    config = ToyLlama(num_layers=0, vocab_size=VOCAB, hidden_size=HIDDEN).config()
    with pytest.raises(LoadError, match="an order that nothing reads in"):
        create_executor("native", config, lambda ops: ops.logits(ops.embed(table), NORM, EPS, head))
