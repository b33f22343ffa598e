"""From the config.json of a Hugging Face folder to the same `ModelConfig` and `Family` that a GGUF file gives.

What keys mean, and what they are where they are absent, is as in transformers' configuration classes. Settings that
would change the computation and that this version does not compute are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from forerun.errors import LoadError, shown
from forerun.models.config import ModelConfig
from forerun.models.family import Family
from forerun.models.hf_json import JsonKeys
from forerun.models.hf_quant import Packing, read_packing
from forerun.models.hf_rope import FULL, SLIDING, hf_rope, rope_settings
from forerun.models.registry import ARCHITECTURES
from forerun.models.sizes import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_INTERMEDIATE_SIZE,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
    check_widths,
)
from forerun.ops.base import Activation, AttentionSpec

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

# Settings of transformers' decoders that change the computation, and the values under which they don't. Absent or null
# is always fine.
_ONLY_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attention_sinks": (False,),
    "attn_logit_softcapping": (),
    "attn_temperature_tuning": (False,),
    "clip_qkv": (),
    "dual_chunk_attention_config": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "kv_lora_rank": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "mlp_bias": (False,),
    "moe_intermediate_size": (),
    "mrope_section": (),
    "n_routed_experts": (0,),
    "no_rope_layer_interval": (),
    "no_rope_layers": (),
    "num_experts": (0,),
    "num_kv_shared_layers": (0,),
    "num_local_experts": (0,),
    "num_nextn_predict_layers": (0,),
    "parallel_attn": (False,),
    "pruned_heads": ({},),
    "q_lora_rank": (),
    "qk_layernorm": (False,),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (False,),
    "rotary_pct": (1.0,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
}


@dataclass(frozen=True, slots=True)
class ModelType:
    """One value of `model_type`.

    Attributes:
        architecture: its family's name in the registry.
        defaults: what absent keys stand for.
        windows: which layers may have one; `some`, where `layer_types` or an older key tells them apart.
        has_local_rope: layers with a window have a RoPE of their own.
        may_have_bias: `attention_bias` puts a bias on q, k, v and the output of attention.
    """

    architecture: str
    defaults: Mapping[str, Any]
    windows: Literal["none", "all", "some"] = "none"
    has_local_rope: bool = False
    may_have_bias: bool = False


_DEFAULTS: Mapping[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
_QWEN = {**_DEFAULTS, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_OLMO = {**_DEFAULTS, "rms_norm_eps": 1e-5}
_GEMMA3 = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "vocab_size": 262208,
}

MODEL_TYPES: Mapping[str, ModelType] = {
    "gemma3_text": ModelType("gemma3", _GEMMA3, "some", has_local_rope=True, may_have_bias=True),
    "llama": ModelType("llama", _DEFAULTS, may_have_bias=True),
    "mistral": ModelType("llama", {**_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096}, "all"),
    "olmo2": ModelType("olmo2", _OLMO, may_have_bias=True),
    "olmo3": ModelType(
        "olmo2",
        {**_OLMO, "rope_theta": 500000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
        "some",
        has_local_rope=True,
        may_have_bias=True,
    ),
    "phi3": ModelType("phi3", {**_OLMO, "original_max_position_embeddings": 4096}, "all"),
    "qwen2": ModelType("qwen2", _QWEN, "some"),
    "qwen3": ModelType("qwen3", {**_QWEN, "head_dim": 128}, "some", may_have_bias=True),
}
# Models whose text part is one of these, described under `text_config`.
_WITH_TEXT_PART: Mapping[str, str] = {"gemma3": "gemma3_text"}


@dataclass(frozen=True, slots=True)
class HfModel:
    """What a config.json says.

    Attributes:
        model_type: a key of `MODEL_TYPES`; of the text part where there are others.
        family: what is computed, as in `decoder.build_weights`.
        config: sizes and constants. `is_tied` is what the file says; whether there is a head shows in the tensors.
        has_output_bias: the output of attention has a bias.
        is_part: the model has other parts, which are not run.
        packing: how its quantised matrices are stored; None where there are none.
    """

    model_type: str
    family: Family
    config: ModelConfig
    has_output_bias: bool
    is_part: bool
    packing: Packing | None


def read_hf_config(where: str, data: Mapping[str, Any], max_len: int | None = None) -> HfModel:
    """Checks the content of a config.json and takes from it what the decoder needs.

    Args:
        where: the file's path, for messages.
        data: its content.
        max_len: the longest text the model will run on, which decides between the frequencies of LongRoPE; None is
            its whole context.
    Raises:
        LoadError: a key is missing, has the wrong type or an impossible value, or asks for something not supported.
    """
    model_type, keys, is_part = _text_part(where, data)
    packing = read_packing(JsonKeys(where, data, {})) or (read_packing(keys) if is_part else None)
    kind = MODEL_TYPES[model_type]
    keys = JsonKeys(keys.where, keys.data, kind.defaults)
    _require_neutral(keys, kind)
    hidden_size = keys.size("hidden_size", limit=MAX_HIDDEN_SIZE)
    intermediate_size = keys.size("intermediate_size", limit=MAX_INTERMEDIATE_SIZE)
    context_length = keys.size("max_position_embeddings")
    alike = _attention(keys, kind, hidden_size, context_length, min(max_len or context_length, context_length))
    check_widths(keys.where, hidden_size, alike.num_heads * alike.head_dim, intermediate_size)
    family = ARCHITECTURES[kind.architecture]
    has_bias = kind.may_have_bias and keys.flag("attention_bias")
    family = replace(family, qkv_bias="required" if has_bias or family.qkv_bias == "required" else "none")
    config = ModelConfig(
        architecture=kind.architecture,
        num_layers=keys.size("num_hidden_layers", limit=MAX_LAYERS),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=alike.num_heads,
        num_kv_heads=alike.num_kv_heads,
        head_dim=alike.head_dim,
        vocab_size=keys.size("vocab_size", limit=MAX_VOCAB_SIZE),
        context_length=context_length,
        rms_eps=keys.number("rms_norm_eps"),
        is_tied=keys.flag("tie_word_embeddings"),
        attentions=_layers(keys, kind, alike, context_length),
        activation=_activation(keys),
        embedding_scale=math.sqrt(hidden_size) if family.scales_embedding else 1.0,
    )
    return HfModel(model_type, family, config, has_bias, is_part, packing)


def _text_part(where: str, data: Mapping[str, Any]) -> tuple[str, JsonKeys, bool]:
    """(model_type of the text part, its keys, whether there are other parts)."""
    keys = JsonKeys(where, data, {})
    model_type = keys.text("model_type")
    is_part = model_type in _WITH_TEXT_PART
    if is_part:
        part = keys.part("text_config")
        if part is None:
            raise keys.fail("text_config", "is missing")
        keys = JsonKeys(part.where, part.data, {"model_type": _WITH_TEXT_PART[model_type]})
        model_type = keys.text("model_type")
    if model_type not in MODEL_TYPES:
        known = ", ".join(sorted([*MODEL_TYPES, *_WITH_TEXT_PART]))
        raise keys.fail("model_type", f"is {shown(model_type)}, which is not supported; supported: {known}")
    return model_type, keys, is_part


def _require_neutral(keys: JsonKeys, kind: ModelType) -> None:
    """Refuses settings that would change the computation."""
    neutral = dict(_ONLY_NEUTRAL)
    if not kind.may_have_bias:
        neutral["attention_bias"] = (False,)
    if kind.windows == "none":
        neutral["sliding_window"] = ()
    if kind.architecture != "gemma3":
        neutral |= dict.fromkeys(("rope_local_base_freq", "query_pre_attn_scalar"), ())
    for key, values in neutral.items():
        value = keys.get(key)
        if value is not None and value not in values:
            raise keys.fail(key, f"is {shown(value)}, which is not supported for this model_type")


def _activation(keys: JsonKeys) -> Activation:
    key = "hidden_activation" if keys.get("hidden_activation") is not None else "hidden_act"
    name = keys.text(key)
    if name not in _ACTIVATIONS:
        raise keys.fail(key, f"is {shown(name)}, but must be one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _attention(keys: JsonKeys, kind: ModelType, hidden_size: int, context_length: int, max_len: int) -> AttentionSpec:
    """What layers that see everything have in common."""
    num_heads = keys.size("num_attention_heads", limit=MAX_HEADS)
    num_kv_heads = keys.size("num_key_value_heads", default=num_heads, limit=MAX_HEADS)
    if num_heads % num_kv_heads:
        raise LoadError(f"{keys.where}: {num_heads} heads can't share {num_kv_heads} key and value heads evenly")
    if keys.get("head_dim") is None and hidden_size % num_heads:
        raise LoadError(f"{keys.where}: a hidden size of {hidden_size} does not divide into {num_heads} heads")
    head_dim = keys.size("head_dim", default=max(hidden_size // num_heads, 1), limit=MAX_HEAD_DIM)
    if head_dim % 2:
        raise LoadError(f"{keys.where}: a head size of {head_dim} is odd, but RoPE turns pairs")
    settings = rope_settings(keys, FULL if kind.has_local_rope else None)
    is_phi3 = kind.architecture == "phi3"
    rope = hf_rope(keys, settings, head_dim, context_length, max_len, is_phi3=is_phi3)
    # Rows of q and k lie in these folders so that pairs are half a head apart, Llama's too.
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=keys.number("query_pre_attn_scalar", default=float(head_dim)) ** -0.5,
        rope_style="neox",
        inv_freq=rope.inv_freq,
        rope_magnitude=rope.magnitude,
    )


def _layers(keys: JsonKeys, kind: ModelType, alike: AttentionSpec, context_length: int) -> tuple[AttentionSpec, ...]:
    """The attention of each layer."""
    num_layers = keys.size("num_hidden_layers", limit=MAX_LAYERS)
    has_window = kind.windows != "none" and keys.get("sliding_window") is not None
    if kind.windows == "some" and "max_window_layers" in kind.defaults and not keys.flag("use_sliding_window"):
        has_window = False
    if not has_window:
        _layer_types(keys, num_layers, [FULL] * num_layers, FULL)
        return (alike,) * num_layers
    window = keys.size("sliding_window")
    local = replace(alike, window=window if window < context_length else None)
    if kind.has_local_rope:
        rope = hf_rope(
            keys, rope_settings(keys, SLIDING), alike.head_dim, context_length, context_length, is_phi3=False
        )
        local = replace(local, inv_freq=rope.inv_freq, rope_magnitude=rope.magnitude)
    if kind.windows == "all":
        _layer_types(keys, num_layers, [SLIDING] * num_layers, SLIDING)
        return (local,) * num_layers
    types = _layer_types(keys, num_layers, _default_layer_types(keys, num_layers))
    return tuple(local if layer_type == SLIDING else alike for layer_type in types)


def _default_layer_types(keys: JsonKeys, num_layers: int) -> list[str]:
    """What the layers of a file from before `layer_types` are."""
    if keys.get("sliding_window_pattern") is None:
        first = keys.get("max_window_layers")
        if type(first) is not int or first < 0:
            raise keys.fail("max_window_layers", f"is {shown(first)}, but must be a whole number from 0")
        return [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    period = keys.size("sliding_window_pattern")
    return [SLIDING if (layer + 1) % period else FULL for layer in range(num_layers)]


def _layer_types(keys: JsonKeys, num_layers: int, default: list[str], only: str | None = None) -> list[str]:
    """The kind of each layer, as `layer_types` says; where it says nothing, the default."""
    stated = keys.get("layer_types")
    if stated is None:
        return default
    if not isinstance(stated, list) or len(stated) != num_layers:
        raise keys.fail("layer_types", f"is {shown(stated)}, but must be a list of {num_layers}")
    for layer_type in stated:
        if layer_type not in ((FULL, SLIDING) if only is None else (only,)):
            raise keys.fail("layer_types", f"has {shown(layer_type)}, which is not supported with the other settings")
    return list(stated)
