"""What distinguishes one family of decoders from another, and how a file of one becomes a `ModelConfig`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forerun.errors import shown
from forerun.models.config import HEAD, Keys, ModelConfig, read_heads, read_vocab_size
from forerun.models.gguf import GgufFile
from forerun.models.rope import Rope, read_rope
from forerun.models.sizes import MAX_HIDDEN_SIZE, MAX_INTERMEDIATE_SIZE, MAX_LAYERS, check_widths
from forerun.ops.base import Activation, AttentionSpec, RopeStyle

# From the keys of a file, what all layers would have if they were alike, and the trained context length.
ReadAttentions = Callable[[Keys, AttentionSpec, int], Sequence[AttentionSpec]]


@dataclass(frozen=True, slots=True)
class Family:
    """One family of decoders; `decoder` computes what the fields say.

    Attributes:
        attentions: heads, RoPE and window of each layer, from what they have in common.
        rope_style: how RoPE pairs lie in its GGUF files.
        layer_norms: the norms of a layer over the hidden size, by name in the file.
        head_norms: whether q and k are normed, and whether each head or all heads together are.
        qkv_bias: whether q, k and v have biases.
        may_have_output_bias: whether the output of attention may have one.
        is_fused: q, k and v lie in one tensor of the file, gate and up in another.
        rotates_partly: RoPE may turn less than a whole head.
        rope_tensors: tensors of RoPE factors that a file may hold.
        own_keys: keys that `attentions` reads and that are refused elsewhere.
        activation: of the gated feed-forward part.
        scales_embedding: rows of the embedding are multiplied by the square root of the hidden size.
    """

    attentions: ReadAttentions
    rope_style: RopeStyle = "neox"
    layer_norms: tuple[str, ...] = ("attn_norm", "ffn_norm")
    head_norms: Literal["none", "each", "all"] = "none"
    qkv_bias: Literal["none", "optional", "required"] = "none"
    may_have_output_bias: bool = False
    is_fused: bool = False
    rotates_partly: bool = False
    rope_tensors: tuple[str, ...] = ()
    own_keys: tuple[str, ...] = ()
    activation: Activation = "silu"
    scales_embedding: bool = False


def read_config(file: GgufFile, family: Family, max_len: int | None = None) -> ModelConfig:
    """The config of a GGUF file, whose `general.architecture` names the prefix of its keys.

    Args:
        file: an open file.
        family: what its architecture is.
        max_len: the longest text the model will run on; None is its whole context.

    Raises:
        LoadError: a key is missing, has the wrong type or an impossible value, or asks for something not supported.
    """
    keys = Keys(file)
    keys.require_neutral(family.own_keys)
    hidden_size = keys.dimension("embedding_length", MAX_HIDDEN_SIZE)
    intermediate_size = keys.dimension("feed_forward_length", MAX_INTERMEDIATE_SIZE)
    heads = read_heads(keys, hidden_size, family.rotates_partly)
    check_widths(str(file.path), hidden_size, heads.num_heads * heads.head_dim, intermediate_size)
    context_length = keys.size("context_length")
    rope = read_rope(keys, heads.rotary_dim, context_length, min(max_len or context_length, context_length))
    alike = AttentionSpec(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        scale=heads.head_dim**-0.5,
        rope_style=family.rope_style,
        inv_freq=rope.inv_freq,
        rope_magnitude=rope.magnitude,
    )
    return ModelConfig(
        architecture=keys.architecture,
        num_layers=num_layers(keys),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        vocab_size=read_vocab_size(keys),
        context_length=context_length,
        rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
        is_tied=HEAD not in file.tensors,
        attentions=tuple(family.attentions(keys, alike, context_length)),
        activation=family.activation,
        embedding_scale=math.sqrt(hidden_size) if family.scales_embedding else 1.0,
    )


def num_layers(keys: Keys) -> int:
    """Transformer layers of a file; it can't have more than tensors, which bounds what is built for them."""
    return keys.size("block_count", limit=min(len(keys.file.tensors), MAX_LAYERS))


def full_attentions(keys: Keys, alike: AttentionSpec, context_length: int) -> Sequence[AttentionSpec]:
    """Layers that all see everything.

    Raises:
        LoadError: the file has a window shorter than its context.
    """
    window = keys.window(context_length)
    if window is not None:
        raise keys.fail("attention.sliding_window", f"is {window}, but a {keys.architecture} window is not supported")
    return [alike] * num_layers(keys)


def windowed_attentions(keys: Keys, alike: AttentionSpec, context_length: int) -> Sequence[AttentionSpec]:
    """Layers that all have the window of the file, if it has one."""
    return [replace(alike, window=keys.window(context_length))] * num_layers(keys)


def alternating_attentions(
    keys: Keys, alike: AttentionSpec, context_length: int, *, period: int, local_rope: Rope
) -> Sequence[AttentionSpec]:
    """Layers with a window and a rotation of their own, and among them some that see everything.

    Args:
        keys: of the file. `attention.sliding_window_pattern` is a period, of which the last layer sees everything, or
            a list that says of each layer whether it has the window.
        alike: the layers that see everything.
        context_length: positions the model was trained for.
        period: where the file names none.
        local_rope: of the layers that have the window.
    """
    local = replace(
        alike,
        window=keys.window(context_length),
        inv_freq=local_rope.inv_freq,
        rope_magnitude=local_rope.magnitude,
    )
    return [local if is_local else alike for is_local in _window_pattern(keys, period)]


def _window_pattern(keys: Keys, period: int) -> list[bool]:
    count, suffix = num_layers(keys), "attention.sliding_window_pattern"
    stated = keys.get(suffix)
    if not isinstance(stated, list):
        period = keys.size(suffix, default=period)
        return [(layer + 1) % period != 0 for layer in range(count)]
    if len(stated) != count or any(type(entry) is not bool for entry in stated):
        raise keys.fail(suffix, f"is {shown(stated)}, but must be a number or {count} booleans")
    return [bool(entry) for entry in stated]
