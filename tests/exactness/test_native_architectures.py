"""Every architecture on the native backend: torch's logits in float32, and one set of bits however a text is run."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

import forerun._native as _native
from tests.helpers.hf_to_gguf import write_hf_gguf
from tests.helpers.native import assert_same_bits, native, text_logits
from tests.helpers.toy_llama import pages_for, tree_batch
from tests.parity.test_architectures import FORMS, NUM_TOKENS, SCALINGS, TOLERANCE, Build, executor, tokens_of

ISAS = _native.available_isas()
BEST = ISAS[-1]
TABLE = pages_for(2 * NUM_TOKENS)
WINDOWED = ["mistral with a window", "phi3 with a window", "gemma3", "olmo3"]
# Threads and passes: one row at a time, one pass, and passes that end within windows, pages and blocks.
RUNS = ((1, [1]), (2, [NUM_TOKENS]), (3, [7, 1, 17, 33]))


def written(build: Build, path: Path, fmt: str = "f32") -> Path:
    model = build()
    write_hf_gguf(model, path, fmt, writes_head=not model.config.tie_word_embeddings)
    return path


@pytest.mark.parametrize("build", (FORMS | SCALINGS).values(), ids=(FORMS | SCALINGS).keys())
def test_float_logits_equal_torch_and_have_one_set_of_bits(build: Build, tmp_path: Path) -> None:
    path, tokens = written(build, tmp_path / "model.gguf"), tokens_of()
    expected = text_logits(executor(path), tokens, TABLE, [NUM_TOKENS])
    want = text_logits(native(path, "scalar", kv_type="f32", max_rows=NUM_TOKENS), tokens, TABLE, [NUM_TOKENS])
    np.testing.assert_allclose(want, expected, rtol=0, atol=TOLERANCE)
    for isa, (threads, sizes) in product(ISAS, RUNS):
        target = native(path, isa, threads, "f32", max_rows=NUM_TOKENS)
        assert_same_bits(text_logits(target, tokens, TABLE, sizes), want, (isa, threads, sizes))


@pytest.mark.parametrize("name", FORMS)
def test_quantised_weights_have_one_set_of_bits(name: str, tmp_path: Path) -> None:
    path, tokens = written(FORMS[name], tmp_path / "model.gguf", "q8_0"), tokens_of()
    want = text_logits(native(path, "scalar", max_rows=NUM_TOKENS), tokens, TABLE, [NUM_TOKENS])
    for isa, (threads, sizes) in product(ISAS, RUNS):
        target = native(path, isa, threads, max_rows=NUM_TOKENS)
        assert_same_bits(text_logits(target, tokens, TABLE, sizes), want, (isa, threads, sizes))


@pytest.mark.parametrize("name", WINDOWED)
def test_f025_a_tree_path_under_a_window_has_the_bits_of_a_chain(name: str, tmp_path: Path) -> None:
    path, tokens, committed = written(FORMS[name], tmp_path / "model.gguf", "q8_0"), tokens_of(), 20
    # Two chains of 12 nodes, longer than a window, taking turns: a path's slots lie apart from each other.
    parents = [-1, -1, *range(22)]
    nodes = tokens[40 : 40 + len(parents)]
    for isa in ISAS:
        target = native(path, isa, 2, max_rows=NUM_TOKENS)
        text_logits(target, tokens[:committed], TABLE, [committed])
        got = target.forward(tree_batch(nodes, parents, TABLE, committed)).logits.copy()
        for first in (0, 1):
            chain = tokens[:committed] + nodes[first::2]
            want = text_logits(native(path, BEST, max_rows=NUM_TOKENS), chain, TABLE, [5])[committed:]
            assert_same_bits(got[first::2], want, (isa, first))
