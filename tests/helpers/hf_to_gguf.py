"""Writes a transformers Llama as a GGUF file, with the layout llama.cpp's own converter gives it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from transformers import LlamaForCausalLM

_TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave_heads(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders the rows of q or k within each head, so that RoPE pairs i and i + D/2 become neighbours."""
    halves = rows.reshape(num_heads, 2, -1, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def write_llama_gguf(model: LlamaForCausalLM, path: Path, format_name: str = "f32", writes_head: bool = True) -> None:
    """Writes a model; matrices in the format named, norms in float32.

    Args:
        model: the model.
        path: the file to write.
        format_name: `f32`, `f16` or `q8_0`.
        writes_head: whether `output.weight` is written; a tied model needs none.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for name, array in _tensors(model, writes_head):
        kind = _TYPES[format_name] if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: LlamaForCausalLM, writes_head: bool) -> list[tuple[str, np.ndarray]]:
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    num_heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    out = [
        ("token_embd.weight", state["model.embed_tokens.weight"]),
        ("output_norm.weight", state["model.norm.weight"]),
    ]
    if writes_head:
        out.append(("output.weight", state["lm_head.weight"]))
    for layer in range(model.config.num_hidden_layers):
        for theirs, ours in _LAYER_NAMES.items():
            array = state[f"model.layers.{layer}.{theirs}.weight"]
            if ours in num_heads:
                array = interleave_heads(array, num_heads[ours])
            out.append((f"blk.{layer}.{ours}.weight", array))
    return out
