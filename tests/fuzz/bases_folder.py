"""Small whole Hugging Face folders: every model_type, type of weights and vocabulary, sharded and quantised ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun.models.decoder import tensor_shapes
from forerun.models.hf_config import MODEL_TYPES
from forerun.models.registry import ARCHITECTURES
from tests.fuzz.parts import CONTEXT, SMALL, Base, Json, Part, Safetensors, Sizes, Source, decoder_config
from tests.fuzz.vocabularies import json_vocabulary
from tests.helpers.gguf_files import CHAT_TEMPLATE
from tests.helpers.hf_folders import header_of
from tests.helpers.packers import (
    AWQ,
    GPTQ,
    Codes,
    compressed_config,
    named,
    pack_awq,
    pack_compressed,
    pack_gptq,
    quantised,
)

_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}

_LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_KINDS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_TYPES = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class _Folder:
    """What is special about a folder.

    Attributes:
        model_type: of its config.json.
        changes: more of config.json.
        dtype: of the weights.
        num_shards: files of weights.
        vocabulary: of its tokenizer.json.
        sizes: of the decoder.
        packer: tensors of a quantised matrix; None for plain ones.
    """

    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "F32"
    num_shards: int = 1
    vocabulary: str = "byte-level"
    sizes: Sizes = SMALL
    packer: Callable[[Codes], dict[str, np.ndarray]] | None = None


_WIDE = Sizes(hidden=64, inner=96, layers=1, heads=4, kv_heads=2, dim=16)  # whole groups
_FOLDERS = [
    _Folder("llama", {"rope_scaling": _LLAMA3, "mlp_bias": False}),
    _Folder("mistral", {"sliding_window": 16, "rope_scaling": _YARN}, "BF16", 3, "llama"),
    _Folder("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "F16", 1, "metaspace"),
    _Folder("qwen3", {"attention_bias": True, "tie_word_embeddings": True}, "F32", 2, "wordpiece"),
    _Folder(
        "gemma3_text",
        {"rope_parameters": _KINDS, "layer_types": _TYPES, "sliding_window": 16, "query_pre_attn_scalar": 8},
        vocabulary="llama",
    ),
    _Folder("gemma3", {"sliding_window": 16}, "BF16"),
    _Folder("phi3", {"rope_scaling": _LONGROPE, "original_max_position_embeddings": 64}, vocabulary="metaspace"),
    _Folder("olmo2", {}, "F16", 2),
    _Folder("olmo3", {"sliding_window": 16, "layer_types": _TYPES}),
    _Folder("llama", {"quantization_config": GPTQ | {"group_size": 32}}, sizes=_WIDE, packer=pack_gptq),
    _Folder("qwen2", {"quantization_config": AWQ | {"group_size": 32}}, "F16", 2, sizes=_WIDE, packer=pack_awq),
    _Folder("llama", {"quantization_config": compressed_config(4, 32)}, "BF16", sizes=_WIDE, packer=pack_compressed),
]


def folder_bases() -> Iterator[Base]:
    """Every one; the same in every process."""
    for what in _FOLDERS:
        name = f"folder {what.model_type}" + (f" {what.packer.__name__}" if what.packer else "")
        yield Base(name, _folder(what), "")


def _folder(what: _Folder) -> dict[str, Part]:
    tokens = json_vocabulary(what.vocabulary)
    vocab_size = len(tokens["model"]["vocab"]) + 4
    config = _json_config(what, vocab_size)
    has_file = what.model_type in ("mistral", "qwen2")
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
    return parts | _shards(_arrays(what, vocab_size), what.num_shards)


def _json_config(what: _Folder, vocab_size: int) -> dict[str, Any]:
    sizes = what.sizes
    config = {
        "model_type": what.model_type,
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
    } | dict(what.changes)
    if what.model_type != "gemma3":
        return config
    return {"model_type": "gemma3", "text_config": config | {"model_type": "gemma3_text"}, "vision_config": {}}


def _arrays(what: _Folder, vocab_size: int) -> dict[str, np.ndarray]:
    """The tensors of the folder by their names there."""
    architecture = MODEL_TYPES["gemma3_text" if what.model_type == "gemma3" else what.model_type].architecture
    prefix = "language_model.model." if what.model_type == "gemma3" else "model."
    rng = np.random.default_rng(0)
    arrays = {}
    for ours, shape in _shapes(what, architecture, vocab_size).items():
        values = rng.normal(0.0, 0.3, shape).astype(np.float32)
        name = _hf_name(ours, architecture, prefix)
        if what.packer is not None and ".layers." in name and shape[0] > 1:
            arrays |= named(
                name.removesuffix(".weight"), what.packer(quantised(values, 32, has_order=what.packer is pack_gptq))
            )
        else:
            stored = _stored(values, what.dtype)
            arrays[name] = stored[0] if shape[0] == 1 else stored
    return arrays | ({"vision_tower.blob": np.zeros((2, 2), np.float32)} if what.model_type == "gemma3" else {})


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "BF16" else values.astype(_DTYPES[dtype])


def _shapes(what: _Folder, architecture: str, vocab_size: int) -> dict[str, tuple[int, int]]:
    sizes = what.sizes
    config = decoder_config(architecture, sizes, vocab_size, is_tied=bool(what.changes.get("tie_word_embeddings")))
    shapes = tensor_shapes(ARCHITECTURES[architecture], config, ())
    if what.changes.get("attention_bias"):
        kv_size = sizes.kv_heads * sizes.dim
        widths = {"attn_q": sizes.heads * sizes.dim, "attn_k": kv_size, "attn_v": kv_size, "attn_output": sizes.hidden}
        for layer in range(sizes.layers):
            shapes |= {f"blk.{layer}.{name}.bias": (1, width) for name, width in widths.items()}
    return shapes


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


def _shards(arrays: dict[str, np.ndarray], count: int) -> dict[str, Part]:
    names = list(arrays)
    step = -(-len(names) // count)
    parts: dict[str, Part] = {}
    owners = {}
    for number in range(count):
        own = {name: arrays[name] for name in names[number * step : (number + 1) * step]}
        file_name = "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"
        parts[file_name] = Safetensors(header_of(own), b"".join(array.tobytes() for array in own.values()))
        owners |= dict.fromkeys(own, file_name)
    if count > 1:
        parts["model.safetensors.index.json"] = Json({"metadata": {"total_size": 1}, "weight_map": owners})
    return parts
