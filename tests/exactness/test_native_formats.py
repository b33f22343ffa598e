"""Every format of a file on the native backend: its weights exactly, packed or expanded, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

import forerun._native as _native
from forerun.ops.base import Weight
from forerun.ops.formats import FORMATS, dequantize
from forerun.ops.native import ISA_VARIABLE, PACKED_FORMATS
from tests.helpers.blocks import random_weight
from tests.helpers.native import assert_same_bits
from tests.helpers.toy_llama import ToyLlama, chain_batch, pages_for
from tests.unit.test_native_backend import toy_executor

ISAS = _native.available_isas()
HIDDEN = 512  # two blocks of the longest formats
VOCAB = 45


def logits_of(embedding: Weight, head: Weight, sizes: list[int]) -> np.ndarray:
    """Logits of all tokens of a model that is an embedding, a norm and a head, in passes of these sizes."""
    toy = ToyLlama(num_layers=0, vocab_size=VOCAB, hidden_size=HIDDEN)
    toy.weights.update(embed=embedding, head=head)
    target = toy_executor(toy, num_layers=1, max_rows=VOCAB)
    out, start = [], 0
    for size in sizes:
        out.append(target.forward(chain_batch(range(start, start + size), pages_for(VOCAB))).logits.copy())
        start += size
    return np.concatenate(out)


def expanded(weight: Weight) -> Weight:
    return Weight(weight.name, "f32", weight.shape, dequantize(weight).reshape(-1).view(np.uint8))


@pytest.mark.parametrize("fmt", FORMATS)
def test_an_embedding_has_the_weights_of_the_file(fmt: str) -> None:
    weight = random_weight(fmt, VOCAB, HIDDEN, seed=3)
    head = random_weight("f32", VOCAB, HIDDEN, seed=4)
    assert_same_bits(logits_of(weight, head, [VOCAB]), logits_of(expanded(weight), head, [VOCAB]), fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_products_have_one_set_of_bits(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, head = random_weight("f32", VOCAB, HIDDEN, seed=5), random_weight(fmt, VOCAB, HIDDEN, seed=6)
    monkeypatch.setenv(ISA_VARIABLE, "scalar")
    want = logits_of(embedding, head, [VOCAB])
    exact = logits_of(embedding, expanded(head), [VOCAB])
    scale = np.abs(exact).max()
    if fmt in PACKED_FORMATS and FORMATS[fmt].block_len > 1:
        assert np.abs(want - exact).max() < 0.02 * scale, "inputs have eight bits"
    else:
        assert_same_bits(want, exact, "floats, packed or expanded")
    for isa in ISAS:
        monkeypatch.setenv(ISA_VARIABLE, isa)
        for sizes in ([VOCAB], [1] * VOCAB, [2, 3, 4, 5, 6, 7, 8, 10], [17, 28]):
            assert_same_bits(logits_of(embedding, head, sizes), want, (fmt, isa, sizes))


def test_the_usual_formats_are_packed_and_not_expanded() -> None:
    assert FORMATS.keys() - PACKED_FORMATS == {"q2_k", "iq4_xs", "mxfp4"}
    assert FORMATS.keys() >= PACKED_FORMATS
    bits_of = {"q4_k": 4.7, "q5_0": 5.6, "q5_k": 5.7, "q6_k": 6.6, "q8_0": 8.6, "q4_1": 5.1, "f16": 16, "bf16": 16}
    for fmt, bits in bits_of.items():
        toy = ToyLlama(num_layers=0, vocab_size=64, hidden_size=HIDDEN)
        toy.weights["head"] = random_weight(fmt, 64, HIDDEN)
        target = toy_executor(toy, num_layers=1)
        assert target.weight_bytes <= bits / 8 * 64 * HIDDEN, fmt
