"""The decoder all families share: its tensors, its weights and its forward pass, written once in `ops`.

RMSNorm, attention with RoPE and grouped heads, RMSNorm, gated feed-forward part, each part added to the residual
stream. What a family adds to this or leaves out is in its `Family`; here it shows as a norm or bias that is None.

Shape legend: H hidden size, I intermediate size, V vocabulary, D head size, Q = num_heads * D, J = num_kv_heads * D.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from forerun.models.config import EMBEDDING, HEAD, ModelConfig
from forerun.models.family import Family
from forerun.models.weights import WeightSource, split_rows
from forerun.ops.base import Ops, T, Weight
from forerun.types import Float32Array

_OUTPUT_NORM = "output_norm.weight"
_QKV_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_OUTPUT_BIAS = "attn_output.bias"


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; the names are those of the file, without `blk.N.` and `.weight`."""

    attn_q: Weight  # [Q, H]
    attn_k: Weight  # [J, H]
    attn_v: Weight  # [J, H]
    attn_output: Weight  # [H, Q]
    ffn_gate: Weight  # [I, H]
    ffn_up: Weight  # [I, H]
    ffn_down: Weight  # [H, I]
    attn_norm: Float32Array | None = None  # [H], before attention
    attn_q_norm: Float32Array | None = None  # [D] or [Q]
    attn_k_norm: Float32Array | None = None  # [D] or [J]
    post_attention_norm: Float32Array | None = None  # [H], on what attention adds
    ffn_norm: Float32Array | None = None  # [H], before the feed-forward part
    post_ffw_norm: Float32Array | None = None  # [H], on what the feed-forward part adds
    qkv_bias: Float32Array | None = None  # [Q + 2 J]
    attn_output_bias: Float32Array | None = None  # [H]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of a model. In a tied model `head` is the same object as `embedding`."""

    embedding: Weight  # [V, H]
    layers: tuple[Layer, ...]
    output_norm: Float32Array  # [H]
    head: Weight  # [V, H]

    def matrices(self) -> Iterator[Weight]:
        """Every matrix once."""
        yield self.embedding
        for layer in self.layers:
            yield from (part for part in _parts(layer) if isinstance(part, Weight))
        if self.head is not self.embedding:
            yield self.head

    def without_data(self) -> DecoderWeights:
        """The same with no bytes of any matrix, for whoever needs to know the weights of a bound model by name only."""
        embedding = _emptied(self.embedding)
        head = embedding if self.head is self.embedding else _emptied(self.head)
        return replace(self, embedding=embedding, layers=tuple(map(_without_data, self.layers)), head=head)

    def vectors(self) -> Iterator[Float32Array]:
        """Every norm and bias."""
        for layer in self.layers:
            yield from (part for part in _parts(layer) if isinstance(part, np.ndarray))
        yield self.output_norm


def _parts(layer: Layer) -> Iterator[Weight | Float32Array | None]:
    return (getattr(layer, field.name) for field in fields(layer))


def _without_data(layer: Layer) -> Layer:
    emptied: Any = {
        field.name: _emptied(part) for field in fields(layer) if isinstance(part := getattr(layer, field.name), Weight)
    }
    return replace(layer, **emptied)


def _emptied(weight: Weight) -> Weight:
    return replace(weight, data=np.empty(0, np.uint8))


def forward(ops: Ops[T], weights: DecoderWeights, config: ModelConfig, chosen: Sequence[int] | None = None) -> T:
    """The raw logits of a pass: [R, V].

    Args:
        ops: what computes or records it.
        weights, config: of the model.
        chosen: the layers that run, ascending; each reads and writes the keys and values of its own number. None is
            all of them.
    """
    eps = config.rms_eps
    x = ops.embed(weights.embedding, config.embedding_scale)
    for index in range(config.num_layers) if chosen is None else chosen:
        layer, spec = weights.layers[index], config.attentions[index]
        qkv = ops.norm_linear(x, layer.attn_norm, eps, (layer.attn_q, layer.attn_k, layer.attn_v), layer.qkv_bias)
        attended = ops.attention(qkv, index, spec, layer.attn_q_norm, layer.attn_k_norm, eps)
        x = _add(ops, x, attended, layer.attn_output, layer.attn_output_bias, layer.post_attention_norm, eps)
        gated = ops.norm_gated(x, layer.ffn_norm, eps, layer.ffn_gate, layer.ffn_up, config.activation)
        x = _add(ops, x, gated, layer.ffn_down, None, layer.post_ffw_norm, eps)
    return ops.logits(x, weights.output_norm, eps, weights.head)


def _add(
    ops: Ops[T],
    residual: T,
    x: T,
    weight: Weight,
    bias: Float32Array | None,
    post_norm: Float32Array | None,
    eps: float,
) -> T:
    """The residual stream after one part of a layer, whose last linear map and norm after it are given."""
    if post_norm is None:
        return ops.linear_add(x, weight, residual, bias)
    return ops.norm_add(ops.norm_linear(x, None, eps, (weight,), bias), post_norm, eps, residual)


def tensor_shapes(family: Family, config: ModelConfig, present: Collection[str]) -> dict[str, tuple[int, int]]:
    """The tensors a file must hold, (N, K) by name; vectors are (1, K).

    Args:
        family: of the model.
        config: its sizes.
        present: names of the tensors the file holds. Of what is optional, that which it has in the first layer is
            asked for in every one.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes = {EMBEDDING: (vocab, hidden), _OUTPUT_NORM: (1, hidden)}
    if not config.is_tied:
        shapes[HEAD] = (vocab, hidden)
    pairs = len(config.attentions[0].inv_freq)
    shapes |= {name: (1, pairs) for name in family.rope_tensors if name in present}
    layer = _layer_shapes(
        family, config, {name.removeprefix("blk.0.") for name in present if name.startswith("blk.0.")}
    )
    for index in range(config.num_layers):
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _layer_shapes(family: Family, config: ModelConfig, present: Collection[str]) -> dict[str, tuple[int, int]]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    if family.is_fused:
        shapes = {"attn_qkv.weight": (q_size + 2 * kv_size, hidden), "ffn_up.weight": (2 * inner, hidden)}
    else:
        shapes = {
            f"attn_{part}.weight": (size, hidden) for part, size in zip("qkv", (q_size, kv_size, kv_size), strict=True)
        }
        shapes |= {"ffn_gate.weight": (inner, hidden), "ffn_up.weight": (inner, hidden)}
    shapes |= {"attn_output.weight": (hidden, q_size), "ffn_down.weight": (hidden, inner)}
    shapes |= {f"{name}.weight": (1, hidden) for name in family.layer_norms}
    if family.head_norms != "none":
        is_each = family.head_norms == "each"
        shapes["attn_q_norm.weight"] = (1, dim if is_each else q_size)
        shapes["attn_k_norm.weight"] = (1, dim if is_each else kv_size)
    has_some = any(name in present for name in _QKV_BIASES)
    if family.qkv_bias == "required" or (family.qkv_bias == "optional" and has_some):
        shapes |= {name: (1, size) for name, size in zip(_QKV_BIASES, (q_size, kv_size, kv_size), strict=True)}
    if family.may_have_output_bias and _OUTPUT_BIAS in present:
        shapes[_OUTPUT_BIAS] = (1, hidden)
    return shapes


def build_weights(source: WeightSource, family: Family, config: ModelConfig) -> DecoderWeights:
    """The weights of a model whose tensors have the shapes `tensor_shapes` names."""
    embedding = source.head(EMBEDDING)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_build_layer(source, family, config, f"blk.{index}.") for index in range(config.num_layers)),
        output_norm=source.vector(_OUTPUT_NORM),
        head=embedding if config.is_tied else source.head(HEAD),
    )


def _build_layer(source: WeightSource, family: Family, config: ModelConfig, prefix: str) -> Layer:
    def matrix(name: str) -> Weight:
        return source.matrix(f"{prefix}{name}.weight")

    def vector(name: str) -> Float32Array | None:
        return source.vector(prefix + name) if prefix + name in source.tensors else None

    if family.is_fused:
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = {f"{prefix}attn_{part}.weight": size for part, size in (("q", q_size), ("k", kv_size), ("v", kv_size))}
        attn_q, attn_k, attn_v = split_rows(matrix("attn_qkv"), sizes)
        inner = config.intermediate_size
        ffn_gate, ffn_up = split_rows(
            matrix("ffn_up"), {f"{prefix}ffn_gate.weight": inner, f"{prefix}ffn_up.weight": inner}
        )
    else:
        attn_q, attn_k, attn_v = matrix("attn_q"), matrix("attn_k"), matrix("attn_v")
        ffn_gate, ffn_up = matrix("ffn_gate"), matrix("ffn_up")
    biases = [bias for bias in map(vector, _QKV_BIASES) if bias is not None]
    return Layer(
        attn_q=attn_q,
        attn_k=attn_k,
        attn_v=attn_v,
        attn_output=matrix("attn_output"),
        ffn_gate=ffn_gate,
        ffn_up=ffn_up,
        ffn_down=matrix("ffn_down"),
        attn_norm=vector("attn_norm.weight"),
        attn_q_norm=vector("attn_q_norm.weight"),
        attn_k_norm=vector("attn_k_norm.weight"),
        post_attention_norm=vector("post_attention_norm.weight"),
        ffn_norm=vector("ffn_norm.weight"),
        post_ffw_norm=vector("post_ffw_norm.weight"),
        qkv_bias=np.concatenate(biases) if biases else None,
        attn_output_bias=vector(_OUTPUT_BIAS),
    )
