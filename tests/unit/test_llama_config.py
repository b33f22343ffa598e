"""What a llama file must say, what is refused by name, and which weights a loaded model holds (F055, F057 to F059)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.errors import ConfigError, LoadError
from forerun.models.config import ModelConfig
from forerun.models.decoder import tensor_shapes
from forerun.models.llama import LLAMA
from forerun.models.loader import load_model
from forerun.ops.base import AttentionSpec
from tests.helpers.gguf_files import tiny_llama_tensors, write_gguf, write_tiny_llama

METADATA = {
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def load(tmp_path: Path, tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> ModelConfig:
    """Loads the tiny model with some metadata changed; None leaves a key out."""
    metadata = METADATA | {f"llama.{key}": value for key, value in changes.items()}
    path = write_gguf(
        tmp_path / "model.gguf",
        {key: value for key, value in metadata.items() if value is not None},
        tiny_llama_tensors() if tensors is None else tensors,
    )
    return load_model(path).config


def inv_freq_of(base: float) -> tuple[float, ...]:
    return tuple(base ** (-i / 8) for i in range(8))


def test_config_of_a_plain_file(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config == ModelConfig(
        architecture="llama",
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=320,
        context_length=256,
        rms_eps=pytest.approx(1e-5),
        is_tied=True,
        attentions=(AttentionSpec(4, 2, 16, 0.25, "interleaved", inv_freq_of(1e4)),) * 2,
        activation="silu",
        embedding_scale=1.0,
    )


def test_optional_keys(tmp_path: Path) -> None:
    tensors = tiny_llama_tensors(num_kv_heads=4)
    config = load(tmp_path, tensors, **{"attention.head_count_kv": None, "rope.freq_base": 5e5, "vocab_size": 320})
    assert (config.num_kv_heads, config.attentions[0].inv_freq) == (4, inv_freq_of(5e5))
    neutral = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "expert_count": 0, "attention.causal": True}
    load(tmp_path, **neutral, **{"attention.sliding_window": 256})


def test_head_size_of_its_own(tmp_path: Path) -> None:
    tensors = tiny_llama_tensors()
    for layer in range(2):
        shapes = {"attn_q": (4 * 24, 64), "attn_k": (2 * 24, 64), "attn_v": (2 * 24, 64), "attn_output": (64, 4 * 24)}
        tensors |= {f"blk.{layer}.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    assert load(tmp_path, tensors, **{"attention.key_length": 24, "attention.value_length": 24}).head_dim == 24


@pytest.mark.parametrize("key", [key for key in METADATA if not key.endswith("_kv")])
def test_missing_keys_are_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(LoadError, match=rf"model\.gguf: key {key} is missing"):
        load(tmp_path, **{key.removeprefix("llama."): None})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 0, "key llama.block_count is 0, but must be between 1 and"),
        ("block_count", 2**32 - 1, "key llama.block_count is 4294967295, but must be between 1 and 20"),
        ("block_count", 3, "tensor blk.2.attn_q.weight is missing"),
        ("block_count", 1, "tensor blk.1.attn_norm.weight is not part of"),
        ("embedding_length", 32, r"token_embd.weight has shape \(320, 64\), but the metadata ask for \(320, 32\)"),
        ("embedding_length", 66, "a hidden size of 66 does not divide into 4 heads"),
        ("feed_forward_length", 64, r"blk.0.ffn_gate.weight has shape \(128, 64\)"),
        ("attention.head_count", 2.0, "key llama.attention.head_count is 2.0, but must be one whole number"),
        ("attention.head_count", True, "key llama.attention.head_count is True, but must be one whole number"),
        ("attention.head_count_kv", [2, 2], "head_count_kv is a list of 2, but must be one whole number"),
        ("attention.head_count_kv", 3, "4 heads can't share 3 key and value heads evenly"),
        (
            "attention.head_count_kv",
            1,
            r"blk.0.attn_k.weight has shape \(32, 64\), but the metadata ask for \(16, 64\)",
        ),
        (
            "attention.head_count",
            4096,
            "head_count is 4096, but no tensor of the file has more than 320 rows or columns",
        ),
        ("attention.key_length", 2**31 - 2, "key_length is 2147483646, but must be between 1 and 1024"),
        ("attention.key_length", 1024, "key_length is 1024, but no tensor of the file has more than 320 rows"),
        ("embedding_length", 2**31 - 1, "embedding_length is 2147483647, but must be between 1 and 131072"),
        ("embedding_length", 324, "embedding_length is 324, but no tensor of the file has more than 320 rows"),
        ("feed_forward_length", 2**20, "feed_forward_length is 1048576, but no tensor of the file has more than 320"),
        ("attention.layer_norm_rms_epsilon", 1e20, "must be a number from 1e-13 to"),
        ("attention.value_length", 32, "value_length is 32, but only the head size 16"),
        ("rope.dimension_count", 8, "rope.dimension_count is 8, but only the head size 16"),
        ("attention.layer_norm_rms_epsilon", 0.0, "must be a number from 1e-13 to"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "must be a number from 1e-13 to"),
        ("rope.freq_base", float("inf"), "must be a number from 1e-13 to"),
        ("context_length", 2**31, "key llama.context_length is 2147483648"),
        ("vocab_size", 321, "vocab_size is 321, but tensor token_embd.weight has 320 rows"),
        ("attention.sliding_window", 8.0, "sliding_window is 8.0, but must be one whole number"),
        ("expert_count", 8, "expert_count is 8, which is not supported"),
        ("attention.causal", False, "attention.causal is False, which is not supported"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        load(tmp_path, **{key: value})
    assert "model.gguf" in str(caught.value)


def test_parts_much_wider_than_the_hidden_state(tmp_path: Path) -> None:
    sizes = {
        "embedding_length": 1,
        "attention.head_count": 2,
        "attention.head_count_kv": 2,
        "attention.key_length": 160,
    }
    with pytest.raises(LoadError, match="heads of 320 numbers are not supported with a hidden size of 1, at most 32"):
        load(tmp_path, **sizes | {"attention.value_length": 160, "rope.dimension_count": 160})


def test_odd_head_size(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="a head size of 15 is odd"):
        load(tmp_path, **{"attention.key_length": 15})


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", METADATA, tiny_llama_tensors(), vocab_size=321)
    with pytest.raises(LoadError, match=r"321 tokens, but tensor token_embd\.weight has only 320 rows"):
        load_model(path)


def test_f059_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {}, tiny_llama_tensors(), architecture="mamba9")
    with pytest.raises(LoadError, match=r"model\.gguf: architecture mamba9 is not supported; supported: .*llama"):
        load_model(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "blk.1.attn_q.bias",
            r"tensor blk\.1\.attn_q\.bias is not part of the architecture",
        ),  # F057: in one layer only
        ("blk.0.ffn_down.bias", r"tensor blk\.0\.ffn_down\.bias is not part of the architecture"),
        ("blk.0.attn_q_norm.weight", r"tensor blk\.0\.attn_q_norm\.weight is not part of the architecture"),
        ("blk.2.ffn_up.weight", r"tensor blk\.2\.ffn_up\.weight is not part of the architecture"),
    ],
)
def test_tensors_that_would_be_ignored_are_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        load(tmp_path, tiny_llama_tensors() | {name: np.ones(8, np.float32)})


def test_every_missing_tensor_is_named(tmp_path: Path) -> None:
    for name in tiny_llama_tensors():
        tensors = tiny_llama_tensors()
        del tensors[name]
        with pytest.raises(LoadError, match=f"tensor {name} is missing"):
            load(tmp_path, tensors)


def test_f055_tied_when_the_head_is_absent(tmp_path: Path) -> None:
    model = load_model(write_tiny_llama(tmp_path / "tied.gguf"))
    weights = model.weights
    assert model.config.is_tied
    assert weights.head is weights.embedding


@pytest.mark.parametrize("make_head", [lambda embedding: embedding.copy(), lambda embedding: -embedding])
def test_f055_a_head_that_is_present_is_used(tmp_path: Path, make_head: Callable[[np.ndarray], np.ndarray]) -> None:
    tensors = tiny_llama_tensors()
    tensors["output.weight"] = make_head(tensors["token_embd.weight"])
    model = load_model(write_gguf(tmp_path / "untied.gguf", METADATA, tensors))
    weights = model.weights
    assert not model.config.is_tied
    assert weights.head.name == "output.weight"
    assert weights.head.data.tobytes() == tensors["output.weight"].tobytes()


def test_weights_are_views_of_the_file_unless_converted(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model.gguf", fmt="q4_0", head_fmt="q8_0")
    kept = load_model(path)
    assert kept.tensor_formats == {"q4_0": 14, "f32": 5, "q8_0": 1}
    assert all(not weight.data.flags.owndata and not weight.data.flags.writeable for weight in kept.weights.matrices())
    assert load_model(path, "f32").tensor_formats == {"f32": 20}


def test_four_bits_keep_embedding_and_head_at_eight(tmp_path: Path) -> None:
    model = load_model(write_tiny_llama(tmp_path / "model.gguf", tied=False), "q4")
    formats = {weight.name: weight.format for weight in model.weights.matrices()}
    assert {name for name, fmt in formats.items() if fmt == "q8_0"} == {"token_embd.weight", "output.weight"}
    assert set(formats.values()) == {"q8_0", "q4_1"}


@pytest.mark.parametrize("tied", [True, False])
def test_sizes_count_each_tensor_once(tmp_path: Path, tied: bool) -> None:
    model = load_model(write_tiny_llama(tmp_path / "model.gguf", tied=tied))
    expected = sum(rows * cols for rows, cols in tensor_shapes(LLAMA, model.config, ()).values())
    assert model.num_parameters == expected
    assert model.weight_bytes == 4 * expected


def test_unknown_quant_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quant is 'q5', but must be one of auto, f32, bf16, q8, q4"):
        load_model(tmp_path / "never opened", "q5")


@pytest.mark.real_model
def test_demo_model() -> None:
    path = Path.home() / ".cache/forerun/models/smollm2-135m-instruct-q4_1.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the cache")
    model = load_model(path)
    assert model.tensor_formats == {"q4_1": 210, "f32": 61, "q8_0": 1}
    assert model.num_parameters == 134_515_008
    assert (model.config.num_layers, model.config.head_dim) == (30, 64)
    assert model.attentions[29].inv_freq[16] == pytest.approx(100_000.0**-0.5)
    assert model.config.is_tied
    assert model.read_tokenizer().vocab_size == model.config.vocab_size
