"""Every architecture and every kind of RoPE scaling against transformers, on the same random weights.

Tolerance: float32 over a handful of layers of width 64 differs by 3e-5 at most on logits of order one. The mildest
mistake tried, the slowest RoPE frequency off by a tenth, shows as more than 2e-4, a window one too long as more than 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from forerun.models.loader import load_model
from forerun.ops.base import Executor, ExecutorConfig
from forerun.ops.torch import TorchExecutor
from forerun.types import PAGE_TOKENS
from tests.helpers import hf_models as hf
from tests.helpers.hf_to_gguf import write_hf_gguf
from tests.helpers.toy_llama import chain_batch, pages_for, tree_batch

NUM_TOKENS = 100  # longer than every window and every original context here
TOLERANCE = 1e-4
ORIGINAL = 32  # positions before a context was stretched
THETA = 5000.0

Build = Callable[[], PreTrainedModel]

FORMS: dict[str, Build] = {
    "llama": hf.small_llama,
    "llama with biases": lambda: hf.small_llama(attention_bias=True),
    "llama tied": lambda: hf.small_llama(tie_word_embeddings=True),
    "mistral with a window": lambda: hf.small_mistral(sliding_window=7),
    "qwen2": hf.small_qwen2,
    "qwen2 tied": lambda: hf.small_qwen2(tie_word_embeddings=True),
    "qwen3": hf.small_qwen3,
    "qwen3 tied": lambda: hf.small_qwen3(tie_word_embeddings=True),
    "gemma3": hf.small_gemma3,
    "phi3": hf.small_phi3,
    "phi3 with a window": lambda: hf.small_phi3(sliding_window=7),
    "phi3 tied, three quarters of a head rotated": lambda: hf.small_phi3(
        hf.PLAIN_ROPE | {"partial_rotary_factor": 0.75}, hidden_size=128, tie_word_embeddings=True
    ),
    "olmo2": hf.small_olmo2,
    "olmo3": hf.small_olmo3,
}


def scaled(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": THETA} | settings


def longrope(pairs: int = 8) -> dict[str, Any]:
    """Factors that differ from pair to pair and between short and long."""
    short, long = np.linspace(1.0, 1.5, pairs), np.linspace(1.1, 12.0, pairs)
    return scaled(
        "longrope",
        short_factor=short.tolist(),
        long_factor=long.tolist(),
        original_max_position_embeddings=ORIGINAL,
        partial_rotary_factor=1.0,
    )


LINEAR = scaled("linear", factor=4.0)
YARN = scaled("yarn", factor=8.0, original_max_position_embeddings=ORIGINAL)
LLAMA3 = scaled(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL
)
SCALINGS: dict[str, Build] = {
    "llama, linear": lambda: hf.small_llama(LINEAR),
    "llama, as in Llama 3.1": lambda: hf.small_llama(LLAMA3),
    "llama, yarn": lambda: hf.small_llama(YARN),
    "llama, yarn with every setting": lambda: hf.small_llama(
        YARN | {"beta_fast": 8.0, "beta_slow": 0.5, "attention_factor": 0.8}
    ),
    "mistral with a window, yarn": lambda: hf.small_mistral(YARN, sliding_window=7),
    "qwen2, yarn": lambda: hf.small_qwen2(YARN),
    "qwen3, yarn": lambda: hf.small_qwen3(YARN),
    "gemma3, linear": lambda: hf.small_gemma3(LINEAR),
    "olmo2, yarn": lambda: hf.small_olmo2(YARN),
    "olmo3, yarn": lambda: hf.small_olmo3(YARN),
}


@pytest.fixture(autouse=True)
def _quiet_transformers() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def tokens_of(count: int = NUM_TOKENS) -> list[int]:
    return np.random.default_rng(11).integers(0, hf.VOCAB, count).tolist()


def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    assert logits.std() > 0.5, "logits this small would pass any tolerance"
    return logits


def executor(path: Path, max_len: int | None = None) -> Executor:
    model = load_model(path, max_len=max_len)
    sizes = model.config
    config = ExecutorConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        attentions=model.attentions,
        max_rows=NUM_TOKENS,
        num_pages=-(-2 * NUM_TOKENS // PAGE_TOKENS),
        kv_type="f32",
        num_threads=1,  # products this small take longer when they are shared out
    )
    return TorchExecutor(config, model.forward)


def logits_in_pieces(target: Executor, tokens: Sequence[int], cuts: Sequence[int]) -> np.ndarray:
    table = pages_for(len(tokens))
    return np.concatenate([target.forward(chain_batch(tokens[a:b], table, a)).logits for a, b in pairwise(cuts)])


def assert_equal_in_any_pieces(model: PreTrainedModel, path: Path, tokens: Sequence[int], max_len: int | None) -> None:
    expected = reference_logits(model, tokens)
    target, count = executor(path, max_len), len(tokens)
    for what, cuts in (
        ("one pass", [0, count]),
        ("chunks", [*range(0, count, 13), count]),
        ("one row at a time", range(count + 1)),
    ):
        got = logits_in_pieces(target, tokens, cuts)
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE, err_msg=what)


@pytest.mark.parametrize("build", FORMS.values(), ids=FORMS.keys())
def test_f057_logits_equal_transformers(build: Build, tmp_path: Path) -> None:
    model, path = build(), tmp_path / "model.gguf"
    write_hf_gguf(model, path, writes_head=not model.config.tie_word_embeddings)
    assert_equal_in_any_pieces(model, path, tokens_of(), None)


@pytest.mark.parametrize("build", SCALINGS.values(), ids=SCALINGS.keys())
def test_f058_scaled_rope_equals_transformers(build: Build, tmp_path: Path) -> None:
    model, path = build(), tmp_path / "model.gguf"
    write_hf_gguf(model, path, writes_head=not model.config.tie_word_embeddings)
    assert_equal_in_any_pieces(model, path, tokens_of(), None)


@pytest.mark.parametrize(
    ("num_tokens", "max_len"), [(ORIGINAL, ORIGINAL), (NUM_TOKENS, ORIGINAL + 1), (NUM_TOKENS, None)]
)
@pytest.mark.parametrize("rotated", [1.0, 0.75])
def test_f058_longrope_takes_its_factors_by_the_length_limit(
    num_tokens: int, max_len: int | None, rotated: float, tmp_path: Path
) -> None:
    # transformers takes the short factors for texts within the original context and the long ones for others.
    rope = longrope(int(16 * rotated)) | {"partial_rotary_factor": rotated}
    model = hf.small_phi3(rope, hidden_size=128, original_max_position_embeddings=ORIGINAL)
    path = tmp_path / "model.gguf"
    write_hf_gguf(model, path)
    assert_equal_in_any_pieces(model, path, tokens_of(num_tokens), max_len)


@pytest.mark.parametrize("name", ["gemma3", "phi3 with a window", "olmo3", "qwen2"])
def test_f055_a_tied_file_that_holds_the_head_too(name: str, tmp_path: Path) -> None:
    model, path = FORMS[name](), tmp_path / "model.gguf"
    write_hf_gguf(model, path, writes_head=True)
    got = logits_in_pieces(executor(path), tokens_of(), [0, NUM_TOKENS])
    np.testing.assert_allclose(got, reference_logits(model, tokens_of()), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", FORMS)
def test_f057_a_float16_file_is_close(name: str, tmp_path: Path) -> None:
    model, path = FORMS[name](), tmp_path / "model.gguf"
    write_hf_gguf(model, path, "f16", writes_head=not model.config.tie_word_embeddings)
    got = logits_in_pieces(executor(path), tokens_of(), [0, NUM_TOKENS])
    np.testing.assert_allclose(got, reference_logits(model, tokens_of()), rtol=0, atol=5e-2)


@pytest.mark.parametrize("name", ["mistral with a window", "gemma3", "olmo3"])
def test_f025_a_window_follows_each_path_of_a_tree(name: str, tmp_path: Path) -> None:
    model, path, tokens = FORMS[name](), tmp_path / "model.gguf", tokens_of()
    write_hf_gguf(model, path, writes_head=not model.config.tie_word_embeddings)
    target, table, committed = executor(path), pages_for(2 * NUM_TOKENS), 20
    target.forward(chain_batch(tokens[:committed], table))
    # Two chains of 12 nodes, longer than a window, taking turns: a path's slots lie apart from each other.
    parents = [-1, -1, *range(22)]
    nodes = tokens[40 : 40 + len(parents)]
    got = target.forward(tree_batch(nodes, parents, table, committed)).logits
    for first in (0, 1):
        expected = reference_logits(model, tokens[:committed] + nodes[first::2])[committed:]
        np.testing.assert_allclose(got[first::2], expected, rtol=0, atol=TOLERANCE)
