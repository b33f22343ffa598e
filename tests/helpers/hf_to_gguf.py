"""Writes transformers models as GGUF files, with the layout and the keys llama.cpp's own converter gives them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
# By transformers' model_type; the rest have their own name.
_ARCHITECTURES = {"gemma3_text": "gemma3", "mistral": "llama", "olmo3": "olmo2"}
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Where there are norms after attention and feed-forward part, this name means the one after attention.
_POST_NORMED = ("gemma3", "olmo2")


def interleave_heads(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders the rows of q or k within each head, so that RoPE pairs i and i + D/2 become neighbours."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def write_hf_gguf(
    model: PreTrainedModel,
    path: Path,
    format_name: str = "f32",
    *,
    writes_head: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model; matrices in the format named, norms and biases in float32.

    Args:
        model: the model.
        path: the file to write.
        format_name: `f32`, `f16` or `q8_0`.
        writes_head: whether `output.weight` is written; a tied model needs none.
        extra: further keys, without the architecture's name, which replace those of the model.
    """
    architecture = architecture_of(model)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata_of(model) | dict(extra or {})).items():
        _add_value(writer, f"{architecture}.{key}", value)
    for name, array in tensors_of(model, writes_head).items():
        kind = _TYPES[format_name] if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def architecture_of(model: PreTrainedModel) -> str:
    return _ARCHITECTURES.get(model.config.model_type, model.config.model_type)


def metadata_of(model: PreTrainedModel) -> dict[str, Any]:
    """Sizes and constants by key, without the architecture's name."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
    }
    if getattr(config, "sliding_window", None) is not None:
        values["attention.sliding_window"] = config.sliding_window
    if config.model_type == "olmo3":
        values["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    return values | _rope_metadata(config, _global_rope(config), head_dim)


def _global_rope(config: Any) -> dict[str, Any]:
    """The RoPE of the layers that see everything; the only one most models have."""
    rope = config.rope_parameters
    return rope.get("full_attention", rope)


def _rope_metadata(config: Any, rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] in ("yarn", "longrope"):
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        growth = math.log(config.max_position_embeddings / original) / math.log(original)
        values["rope.scaling.attn_factor"] = math.sqrt(1 + growth)
    names = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    given = {ours: rope[theirs] for theirs, ours in names.items() if rope.get(theirs) is not None}
    return values | {f"rope.scaling.{name}": float(value) for name, value in given.items()}


def tensors_of(model: PreTrainedModel, writes_head: bool) -> dict[str, np.ndarray]:
    """float32 arrays by name in the file."""
    architecture, config = architecture_of(model), model.config
    num_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    out = {}
    for name, tensor in model.state_dict().items():
        ours = _name_in_file(name, architecture)
        if ours == "output.weight" and not writes_head:
            continue
        array = tensor.float().numpy()
        part = ours.split(".")[-2]
        if architecture == "llama" and part in num_heads:
            array = interleave_heads(array, num_heads[part])
        out[ours] = array + 1 if architecture == "gemma3" and ours.endswith("norm.weight") else array
    return out | dict(_rope_tensors(config))


def _name_in_file(name: str, architecture: str) -> str:
    known = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in known:
        return known[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    ours = _LAYER_NAMES[module]
    if module == "post_attention_layernorm" and architecture in _POST_NORMED:
        ours = "post_attention_norm"
    return f"blk.{layer}.{ours}.{kind}"


def _rope_tensors(config: Any) -> Iterator[tuple[str, np.ndarray]]:
    rope = _global_rope(config)
    if rope["rope_type"] == "longrope":
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32)
    if rope["rope_type"] == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, 2 * len(scaled), 2) / (2 * len(scaled)))
        yield "rope_freqs.weight", (plain / scaled).float().numpy()


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)
