"""Small random transformers models, one per form of decoder that forerun runs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 96
CONTEXT = 512

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,  # logits of order one to ten, attention far from uniform
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 5000.0}


def small_llama(rope: dict[str, Any] = PLAIN_ROPE, **changes: Any) -> PreTrainedModel:
    return _randomise(LlamaForCausalLM(LlamaConfig(**_SIZES | {"rope_parameters": rope} | changes)))


def small_mistral(rope: dict[str, Any] = PLAIN_ROPE, **changes: Any) -> PreTrainedModel:
    return _randomise(MistralForCausalLM(MistralConfig(**_SIZES | {"rope_parameters": rope} | changes)))


def small_qwen2(rope: dict[str, Any] = PLAIN_ROPE, **changes: Any) -> PreTrainedModel:
    return _randomise(Qwen2ForCausalLM(Qwen2Config(**_SIZES | {"rope_parameters": rope} | changes)))


def small_qwen3(rope: dict[str, Any] = PLAIN_ROPE, **changes: Any) -> PreTrainedModel:
    changes = {"head_dim": 24, "rope_parameters": rope} | changes
    return _randomise(Qwen3ForCausalLM(Qwen3Config(**_SIZES | changes)))


def small_phi3(rope: dict[str, Any] = PLAIN_ROPE, **changes: Any) -> PreTrainedModel:
    return _randomise(Phi3ForCausalLM(Phi3Config(**_SIZES | {"rope_parameters": dict(rope)} | changes)))


def small_gemma3(rope: dict[str, Any] = PLAIN_ROPE, **changes: Any) -> PreTrainedModel:
    """Its window is 11; layer 6 of 7 sees everything."""
    ropes = {"full_attention": dict(rope), "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    changes = {
        "num_hidden_layers": 7,
        "head_dim": 24,
        "query_pre_attn_scalar": 24,
        "sliding_window": 11,
        "tie_word_embeddings": True,
        "rope_parameters": ropes,
    } | changes
    return _randomise(Gemma3ForCausalLM(Gemma3TextConfig(**_SIZES | changes)))


def small_olmo2(rope: dict[str, Any] = PLAIN_ROPE, **changes: Any) -> PreTrainedModel:
    return _randomise(Olmo2ForCausalLM(Olmo2Config(**_SIZES | {"rope_parameters": rope} | changes)))


def small_olmo3(rope: dict[str, Any] = PLAIN_ROPE, **changes: Any) -> PreTrainedModel:
    """Its window is 11; layer 4 of 5 sees everything."""
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    ropes = {"full_attention": dict(rope), "sliding_attention": plain}
    changes = {"num_hidden_layers": 5, "sliding_window": 11, "rope_parameters": ropes} | changes
    return _randomise(Olmo3ForCausalLM(Olmo3Config(**_SIZES | changes)))


def _randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Weights from a fixed seed; norms and biases too, which start as ones and zeros."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(*((-0.5, 0.5) if model.config.model_type == "gemma3_text" else (0.5, 1.5)))
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            else:
                # Gemma multiplies embeddings by 8 on the way in and adds normed parts: a small one lets those speak.
                is_large = name.endswith("embed_tokens.weight") and model.config.model_type == "gemma3_text"
                parameter.normal_(0.0, 0.1 if is_large else 0.15)
    return model.eval()
