"""The promise for every format of a file, every conversion of its weights and both ways to store keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forerun._native as _native
from forerun import LLM, SamplingParams
from forerun.ops.base import KvType
from forerun.types import PAGE_TOKENS
from tests.helpers.engines import right
from tests.helpers.gguf_files import write_tiny_llama
from tests.helpers.scripted import Answer, answer, complete, fork, hole, noise, open_llm, scripted
from tests.helpers.toy_llama import chain_batch, pages_for, tree_batch

ISAS = _native.available_isas()
FORMATS = ("f32", "f16", "bf16", "q4_0", "q4_1", "q8_0")
QUANTS = ("auto", "bf16", "q8", "q4", "f32")
# What would change nothing is refused: tests/unit/test_quant_choice.py.
REFUSED = {("q4_0", "bf16"), ("q4_0", "q8"), ("q4_0", "q4"), ("q4_1", "bf16"), ("q4_1", "q8"), ("q8_0", "bf16")}
KV_TYPES: tuple[KvType, ...] = ("f16", "f32")
VOCAB_SIZE = 320
PROMPT = "the cat and the dog and the cat and the"
PARAMS = SamplingParams(
    max_tokens=20, temperature=0.8, seed=7, top_p=0.95, frequency_penalty=-0.5, ignore_eos=True, logprobs=3
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of each format; q4_1 with an embedding and head of 8 bits, as real files have them."""
    folder = tmp_path_factory.mktemp("weights")
    head_formats = {"q4_1": "q8_0"}
    return {
        fmt: write_tiny_llama(folder / f"{fmt}.gguf", fmt=fmt, head_fmt=head_formats.get(fmt), vocab_size=VOCAB_SIZE)
        for fmt in FORMATS
    }


@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize(
    ("fmt", "quant"), [(fmt, quant) for fmt in FORMATS for quant in QUANTS if (fmt, quant) not in REFUSED]
)
def test_every_format_conversion_and_kv_type(paths: dict[str, Path], fmt: str, quant: str, kv: KvType) -> None:
    options: dict[str, Any] = {"quant": quant, "kv": kv, "threads": 1}
    expected = answer(open_llm(paths[fmt], "scalar", chunk=64, **options), PROMPT, PARAMS)
    for isa in ISAS:
        llm = open_llm(paths[fmt], isa, chunk=7, **options)
        for spec in ("ngram:k=8,policy=fixed", "self:layers=1-1,k=3,policy=fixed"):
            assert answer(llm, PROMPT, PARAMS, spec) == expected
        for plan in (noise(7, VOCAB_SIZE), hole(16, 3, 84), fork(8, VOCAB_SIZE)):
            assert answer(llm, PROMPT, PARAMS, scripted(expected.token_ids, plan, VOCAB_SIZE)) == expected
        own = complete(llm, PROMPT, PARAMS, scripted(expected.token_ids, right(8), VOCAB_SIZE))
        assert Answer.of(own) == expected
        assert own.stats.accepted_tokens == own.stats.drafted_tokens == 16  # two passes of 8, and one token is left


def test_formats_conversions_and_kv_types_differ(paths: dict[str, Path]) -> None:
    """Each is a model of its own: equal answers come from equal arithmetic, not from one that is never used."""
    logprobs = set()
    for quant in QUANTS:
        for kv in KV_TYPES:
            completion = complete(LLM(paths["f32"], quant=quant, kv=kv, threads=1), PROMPT, PARAMS)
            assert completion.logprobs is not None
            logprobs.add(completion.logprobs[3].logprob)
    assert len(logprobs) == 2 * 4  # a file of f32 is `auto` already


@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_f011_logits_of_a_position_are_the_same_however_it_is_reached(
    paths: dict[str, Path], fmt: str, kv: KvType
) -> None:
    """One token at a time, the whole text at once, passes of every number of rows, and branches of a tree."""
    num_tokens = 41
    ids = np.random.default_rng(11).integers(0, VOCAB_SIZE, num_tokens).tolist()
    table = pages_for(num_tokens + 2 * 20)
    expected = None
    for isa in ISAS:
        target = open_llm(paths[fmt], isa, kv=kv, threads=1, max_model_len=PAGE_TOKENS * len(table)).target
        one_by_one = np.concatenate(
            [target.forward(chain_batch([token_id], table, start)).logits.copy() for start, token_id in enumerate(ids)]
        )
        expected = one_by_one if expected is None else expected
        assert np.array_equal(one_by_one, expected)
        for rows in range(2, num_tokens + 1):
            for start in range(0, num_tokens, rows):
                batch = chain_batch(ids[start : start + rows], table, start)
                assert np.array_equal(target.forward(batch).logits, expected[start : start + rows]), (isa, rows, start)
        # Two branches whose nodes take turns: the text from its 21st token on, and anything.
        root, depth = 20, 20
        branch = [token_id for pair in zip(ids[root + 1 :], reversed(ids), strict=False) for token_id in pair]
        parents = [-1, -1, *range(2 * depth - 2)]
        batch = tree_batch(branch, parents, table, root + 1)
        assert np.array_equal(target.forward(batch).logits[::2], expected[root + 1 :])
        assert not np.array_equal(target.forward(batch).logits[1::2], expected[root + 1 :])
