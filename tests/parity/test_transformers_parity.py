"""The torch backend and the GGUF reader against transformers, on the same weights."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from forerun.batch import Batch
from forerun.models.loader import LoadedModel, load_model
from forerun.ops import ExecutorConfig, create_executor
from forerun.types import PAGE_TOKENS
from tests.helpers.hf_to_gguf import write_hf_gguf
from tests.helpers.toy_llama import chain_batch, pages_for

NUM_TOKENS = 200
VOCAB = 96
DEMO = Path.home() / ".cache" / "forerun" / "models" / "smollm2-135m-instruct-q4_1.gguf"
# "name": (hidden, heads, kv heads, head size)
SHAPES = {
    "grouped heads": (64, 4, 2, 16),
    "a KV head per head": (64, 4, 4, 16),
    "one KV head": (64, 4, 1, 16),
    "head size not hidden / heads": (64, 4, 2, 24),
}


@pytest.fixture(autouse=True)
def _quiet_transformers() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def random_llama(shape: tuple[int, int, int, int], is_tied: bool, seed: int = 0) -> LlamaForCausalLM:
    hidden, heads, kv_heads, head_dim = shape
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=is_tied,
        initializer_range=0.15,  # logits of order one to ten, attention far from uniform
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def random_tokens(count: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(11).integers(0, vocab_size, count).tolist()


def reference_logits(model: LlamaForCausalLM, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def executor_config(model: LoadedModel) -> ExecutorConfig:
    config = model.config
    pages = -(-NUM_TOKENS // PAGE_TOKENS)
    sizes = config.vocab_size, config.hidden_size, config.num_layers
    return ExecutorConfig(*sizes, model.attentions, NUM_TOKENS, pages, kv_type="f32")


def our_logits(path: Path, batches: list[Batch], quant: str = "auto") -> np.ndarray:
    model = load_model(path, quant)
    target = create_executor("torch", executor_config(model), model.forward)
    return np.concatenate([target.forward(batch).logits for batch in batches])


def one_piece(tokens: list[int]) -> list[Batch]:
    return [chain_batch(tokens, pages_for(NUM_TOKENS))]


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_f057_logits_equal_transformers(shape: tuple[int, int, int, int], is_tied: bool, tmp_path: Path) -> None:
    model, tokens = random_llama(shape, is_tied), random_tokens(NUM_TOKENS, VOCAB)
    write_hf_gguf(model, tmp_path / "model.gguf", writes_head=not is_tied)
    expected = reference_logits(model, tokens)
    got = our_logits(tmp_path / "model.gguf", one_piece(tokens))
    assert expected.std() > 0.5, "logits this small would pass any tolerance"
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    print(f"largest logit difference: {np.abs(got - expected).max():.1e}")


def test_f057_chunks_equal_transformers(tmp_path: Path) -> None:
    model, tokens = random_llama(SHAPES["grouped heads"], is_tied=True), random_tokens(NUM_TOKENS, VOCAB)
    write_hf_gguf(model, tmp_path / "model.gguf", writes_head=False)
    table, cuts = pages_for(NUM_TOKENS), [0, 37, 150, *range(190, NUM_TOKENS + 1)]
    batches = [chain_batch(tokens[a:b], table, a) for a, b in pairwise(cuts)]
    got = our_logits(tmp_path / "model.gguf", batches)
    np.testing.assert_allclose(got, reference_logits(model, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_f057_a_float16_file_is_close(shape: tuple[int, int, int, int], tmp_path: Path) -> None:
    model, tokens = random_llama(shape, is_tied=False), random_tokens(NUM_TOKENS, VOCAB)
    write_hf_gguf(model, tmp_path / "model.gguf", "f16")
    got = our_logits(tmp_path / "model.gguf", one_piece(tokens))
    np.testing.assert_allclose(got, reference_logits(model, tokens), rtol=0, atol=5e-2)


def test_f055_a_tied_model_whose_file_holds_the_head_too(tmp_path: Path) -> None:
    model, tokens = random_llama(SHAPES["grouped heads"], is_tied=True), random_tokens(NUM_TOKENS, VOCAB)
    write_hf_gguf(model, tmp_path / "model.gguf", writes_head=True)
    got = our_logits(tmp_path / "model.gguf", one_piece(tokens))
    np.testing.assert_allclose(got, reference_logits(model, tokens), rtol=0, atol=1e-4)


@pytest.mark.real_model
def test_the_demo_model_equals_transformers() -> None:
    if not DEMO.exists():
        pytest.skip(f"the demo model is not in the cache ({DEMO}); `forerun pull demo` fetches it")
    tokens = random_tokens(100, 49152)
    reference = AutoModelForCausalLM.from_pretrained(DEMO.parent, gguf_file=DEMO.name, dtype=torch.float32)
    expected = reference_logits(reference.eval(), tokens)
    got = our_logits(DEMO, one_piece(tokens))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-3)
    np.testing.assert_array_equal(got.argmax(axis=1), expected.argmax(axis=1))
    print(f"largest logit difference: {np.abs(got - expected).max():.1e}")
