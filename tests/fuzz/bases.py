"""Small whole models from which the mutants are made: every architecture, tensor type, vocabulary and kind of file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.models.config import ModelConfig
from forerun.models.decoder import tensor_shapes
from forerun.models.hf_config import MODEL_TYPES
from forerun.models.registry import ARCHITECTURES
from forerun.ops.base import AttentionSpec
from forerun.ops.formats import FORMATS
from tests.fuzz.image import ARRAY, BOOL, F32, STRING, TYPE_IDS, U32, Array, Entry, Image, Tensor
from tests.fuzz.vocabularies import gguf_vocabulary, json_vocabulary
from tests.helpers.blocks import HALVES, random_weight
from tests.helpers.gguf_files import CHAT_TEMPLATE
from tests.helpers.hf_folders import header_of

CONTEXT = 128
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass
class Json:
    """A JSON file as a tree."""

    tree: Any


@dataclass
class Safetensors:
    """A safetensors file; `stated_len` is what it says of its header's length, None the truth."""

    header: dict[str, Any]
    data: bytes
    stated_len: int | None = None


@dataclass
class Source:
    """A chat template."""

    text: str


Part = Image | Json | Safetensors | Source


@dataclass
class Base:
    """A model: its files by name, and which one is opened; "" opens the folder."""

    name: str
    parts: dict[str, Part]
    entry: str


@dataclass(frozen=True)
class Sizes:
    """Of a decoder."""

    hidden: int = 32
    inner: int = 48
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8


# By architecture: what a file may hold beside the tensors that it must.
_OPTIONAL = {
    "llama": {"blk.0.attn_q.bias", "blk.0.attn_output.bias", "rope_freqs.weight"},
    "phi3": {"rope_factors_long.weight", "rope_factors_short.weight"},
}
_MORE_KEYS: Mapping[str, dict[str, Any]] = {
    "gemma3": {"attention.sliding_window": 16, "rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    "llama": {"attention.sliding_window": 24},
    "olmo2": {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, False]},
    "phi3": {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.2},
    "qwen3": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_beta_fast": 32.0,
    },
}
_GGUF_VOCABULARIES = {"gemma3": "gemma4", "llama": "smollm", "olmo2": "bert", "phi3": "llama", "qwen2": "qwen2"}
# Whole blocks of every type.
_BLOCKY = Sizes(hidden=64, inner=96, layers=1, heads=4, kv_heads=2, dim=16)
_SUPER_BLOCKY = Sizes(hidden=256, inner=256, layers=1, heads=8, kv_heads=4, dim=32)


def all_bases() -> list[Base]:
    """Every base; the same in every process."""
    return [*_gguf_bases(), *_folder_bases()]


def _gguf_bases() -> Iterator[Base]:
    for architecture in ARCHITECTURES:
        image = gguf_model(architecture, _GGUF_VOCABULARIES.get(architecture, "llama-bpe"))
        yield Base(f"gguf {architecture}", {"m.gguf": image}, "m.gguf")
    for fmt, block in FORMATS.items():
        sizes = _SUPER_BLOCKY if block.block_len == 256 else _BLOCKY
        image = gguf_model("llama", "llama" if fmt == "q8_0" else "smollm", fmt, sizes)
        yield Base(f"gguf {fmt}", {"m.gguf": image}, "m.gguf")
    for fmt, count in (("f32", 3), ("q4_0", 2)):
        parts = split(gguf_model("llama", "smollm", fmt, _BLOCKY if fmt == "q4_0" else Sizes()), count)
        yield Base(f"gguf {fmt} in {count} parts", dict(parts), next(iter(parts)))


def gguf_model(architecture: str, vocabulary: str, fmt: str = "f32", sizes: Sizes = Sizes()) -> Image:
    """A whole model in one file, its matrices in one format."""
    tokens = gguf_vocabulary(vocabulary)
    vocab_size = len(tokens["tokenizer.ggml.tokens"])
    keys = {
        "block_count": sizes.layers,
        "context_length": CONTEXT,
        "embedding_length": sizes.hidden,
        "feed_forward_length": sizes.inner,
        "attention.head_count": sizes.heads,
        "attention.head_count_kv": sizes.kv_heads,
        "attention.key_length": sizes.dim,
        "attention.value_length": sizes.dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": sizes.dim,
        "rope.freq_base": 10000.0,
        "vocab_size": vocab_size,
    } | _MORE_KEYS.get(architecture, {})
    metadata = {"general.architecture": architecture, "general.name": "tiny", "general.alignment": 32}
    metadata |= {f"{architecture}.{key}": value for key, value in keys.items()}
    shapes = tensor_shapes(
        ARCHITECTURES[architecture], _config(architecture, sizes, vocab_size), _OPTIONAL.get(architecture, set())
    )
    return Image(
        [entry(key, value) for key, value in (metadata | tokens).items()],
        [_tensor(name, shape, fmt, seed) for seed, (name, shape) in enumerate(shapes.items())],
    )


def _config(architecture: str, sizes: Sizes, vocab_size: int, *, is_tied: bool = False) -> ModelConfig:
    spec = AttentionSpec(sizes.heads, sizes.kv_heads, sizes.dim, 1.0, "neox", (1.0,) * (sizes.dim // 2))
    return ModelConfig(
        architecture=architecture,
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.dim,
        vocab_size=vocab_size,
        context_length=CONTEXT,
        rms_eps=1e-5,
        is_tied=is_tied,
        attentions=(spec,) * sizes.layers,
    )


def entry(key: str, value: Any) -> Entry:
    """A metadata entry as converters write it."""
    kind, packed = _value(value)
    return Entry(key.encode(), kind, packed)


def _value(value: Any) -> tuple[int, Any]:
    if isinstance(value, str):
        return STRING, value.encode("utf-8", "surrogatepass")
    if isinstance(value, list):
        return ARRAY, Array(_value(value[0])[0], [_value(item)[1] for item in value])
    kind = BOOL if isinstance(value, bool) else U32 if isinstance(value, int) else F32
    return kind, value


def _tensor(name: str, shape: tuple[int, int], fmt: str, seed: int) -> Tensor:
    num_rows, row_len = shape
    if num_rows == 1:
        values = np.random.default_rng(seed).uniform(0.5, 1.5, row_len).astype("<f4")
        return Tensor(name.encode(), [row_len], TYPE_IDS["f32"], values.tobytes())
    weight = random_weight(fmt, num_rows, row_len, seed=seed, name=name)
    blocks = weight.data.reshape(-1, FORMATS[fmt].block_bytes)
    for offset in HALVES.get(fmt, ()):
        scales = blocks[:, offset : offset + 2].copy().view("<f2") / 64  # so that activations stay finite
        blocks[:, offset : offset + 2] = scales.astype("<f2").view(np.uint8)
    return Tensor(name.encode(), [row_len, num_rows], TYPE_IDS[fmt], blocks.tobytes())


def split(image: Image, count: int) -> dict[str, Image]:
    """The same model in parts, as gguf-split cuts it: metadata in the first one only."""
    parts = {}
    step = -(-len(image.tensors) // count)
    for number in range(count):
        keys = [("split.no", number), ("split.count", count), ("split.tensors.count", len(image.tensors))]
        own = image.entries if number == 0 else image.entries[:1]
        tensors = image.tensors[number * step : (number + 1) * step]
        name = f"m-{number + 1:05}-of-{count:05}.gguf"
        parts[name] = Image([*own, *(entry(key, value) for key, value in keys)], tensors)
    return parts


# By model_type: more of config.json, type of the weights, number of shards, vocabulary.
_LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_KINDS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_TYPES = ["sliding_attention", "full_attention"]
_FOLDERS: Mapping[str, tuple[dict[str, Any], str, int, str]] = {
    "llama": ({"rope_scaling": _LLAMA3, "mlp_bias": False}, "F32", 1, "byte-level"),
    "mistral": ({"sliding_window": 16, "rope_scaling": _YARN}, "BF16", 3, "llama"),
    "qwen2": ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "F16", 1, "metaspace"),
    "qwen3": ({"attention_bias": True, "tie_word_embeddings": True}, "F32", 2, "wordpiece"),
    "gemma3_text": (
        {"rope_parameters": _KINDS, "layer_types": _TYPES, "sliding_window": 16, "query_pre_attn_scalar": 8},
        "F32",
        1,
        "llama",
    ),
    "gemma3": ({"sliding_window": 16}, "BF16", 1, "byte-level"),
    "phi3": ({"rope_scaling": _LONGROPE, "original_max_position_embeddings": 64}, "F32", 1, "metaspace"),
    "olmo2": ({}, "F16", 2, "byte-level"),
    "olmo3": ({"sliding_window": 16, "layer_types": _TYPES}, "F32", 1, "byte-level"),
}


def _folder_bases() -> Iterator[Base]:
    for model_type, (changes, dtype, num_shards, vocabulary) in _FOLDERS.items():
        yield Base(f"folder {model_type}", hf_folder(model_type, changes, dtype, num_shards, vocabulary), "")


def hf_folder(
    model_type: str, changes: dict[str, Any], dtype: str, num_shards: int, vocabulary: str
) -> dict[str, Part]:
    """The files of a folder."""
    sizes, tokens = Sizes(), json_vocabulary(vocabulary)
    vocab_size = len(tokens["model"]["vocab"]) + 4
    config = _json_config(model_type, sizes, vocab_size, changes)
    is_tied = bool(changes.get("tie_word_embeddings"))
    arrays = _hf_arrays(model_type, config, dtype, sizes, vocab_size, is_tied)
    has_file = model_type in ("mistral", "qwen2")
    roles = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>", "lstrip": False}, "add_bos_token": True}
    parts: dict[str, Part] = {
        "config.json": Json(config),
        "generation_config.json": Json({"bos_token_id": 1, "eos_token_id": [2, 4], "temperature": 0.6}),
        "tokenizer.json": Json(tokens),
        "tokenizer_config.json": Json(roles | ({} if has_file else {"chat_template": CHAT_TEMPLATE})),
        "special_tokens_map.json": Json({"pad_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}),
    }
    if has_file:
        parts["chat_template.jinja"] = Source(CHAT_TEMPLATE)
    return parts | _shards(arrays, dtype, num_shards)


def _json_config(model_type: str, sizes: Sizes, vocab_size: int, changes: dict[str, Any]) -> dict[str, Any]:
    config = {
        "model_type": model_type,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.dim,
        "max_position_embeddings": CONTEXT,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    } | changes
    if model_type != "gemma3":
        return config
    return {"model_type": model_type, "text_config": config | {"model_type": "gemma3_text"}, "vision_config": {}}


def _hf_arrays(
    model_type: str, config: dict[str, Any], dtype: str, sizes: Sizes, vocab_size: int, is_tied: bool
) -> dict[str, np.ndarray]:
    architecture = MODEL_TYPES["gemma3_text" if model_type == "gemma3" else model_type].architecture
    our_config = _config(architecture, sizes, vocab_size, is_tied=is_tied)
    shapes = tensor_shapes(ARCHITECTURES[architecture], our_config, ())
    if config.get("attention_bias"):
        kv_size = sizes.kv_heads * sizes.dim
        widths = {"attn_q": sizes.heads * sizes.dim, "attn_k": kv_size, "attn_v": kv_size, "attn_output": sizes.hidden}
        for layer in range(sizes.layers):
            shapes |= {f"blk.{layer}.{name}.bias": (1, width) for name, width in widths.items()}
    rng = np.random.default_rng(0)
    arrays = {}
    for ours, shape in shapes.items():
        values = rng.normal(0.0, 0.3, shape).astype(np.float32)
        stored = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "BF16" else values.astype(_DTYPES[dtype])
        name = _hf_name(ours, architecture, "language_model.model." if model_type == "gemma3" else "model.")
        arrays[name] = stored[0] if shape[0] == 1 else stored
    if model_type == "gemma3":
        arrays["vision_tower.blob"] = np.zeros((2, 2), _DTYPES[dtype])
    return arrays


_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _hf_name(ours: str, architecture: str, prefix: str) -> str:
    whole = {"token_embd.weight": f"{prefix}embed_tokens.weight", "output_norm.weight": f"{prefix}norm.weight"}
    if ours == "output.weight":
        return f"{prefix.removesuffix('model.')}lm_head.weight"
    if ours in whole:
        return whole[ours]
    _, layer, part, kind = ours.split(".")
    ffn_norm = "pre_feedforward_layernorm" if architecture == "gemma3" else "post_attention_layernorm"
    is_fused = architecture == "phi3" and part == "ffn_up"
    module = "mlp.gate_up_proj" if is_fused else ffn_norm if part == "ffn_norm" else _MODULES[part]
    return f"{prefix}layers.{layer}.{module}.{kind}"


def _shards(arrays: dict[str, np.ndarray], dtype: str, count: int) -> dict[str, Part]:
    names = list(arrays)
    step = -(-len(names) // count)
    parts: dict[str, Part] = {}
    owners = {}
    for number in range(count):
        own = {name: arrays[name] for name in names[number * step : (number + 1) * step]}
        file_name = "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"
        header = header_of(own)
        for name in own:
            header[name]["dtype"] = dtype
        parts[file_name] = Safetensors(header, b"".join(array.tobytes() for array in own.values()))
        owners |= dict.fromkeys(own, file_name)
    if count > 1:
        parts["model.safetensors.index.json"] = Json({"metadata": {"total_size": 1}, "weight_map": owners})
    return parts
