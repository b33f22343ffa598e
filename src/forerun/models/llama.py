"""Llama and its relatives in the same form (SmolLM2, TinyLlama, Mistral without a window).

Pre-norm decoder: RMSNorm, attention with RoPE and grouped heads, RMSNorm, SiLU-gated feed-forward, no biases.

A GGUF file of this family holds the rows of q and k in the order that turns neighbours (2i, 2i + 1) into RoPE pairs,
so the weights are used as they are and RoPE is `interleaved`.

Shape legend: H hidden size, I intermediate size, V vocabulary, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forerun.models.config import ModelConfig
from forerun.models.weights import WeightSource
from forerun.ops.base import AttentionSpec, Ops, T, Weight
from forerun.types import Float32Array


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Weights of one layer; the names are those of the file, without `blk.N.` and `.weight`."""

    attn_norm: Float32Array  # [H]
    attn_q: Weight  # [num_heads * D, H]
    attn_k: Weight  # [num_kv_heads * D, H]
    attn_v: Weight  # [num_kv_heads * D, H]
    attn_output: Weight  # [H, num_heads * D]
    ffn_norm: Float32Array  # [H]
    ffn_gate: Weight  # [I, H]
    ffn_up: Weight  # [I, H]
    ffn_down: Weight  # [H, I]


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """Weights of a model. In a tied model `head` is the same object as `embedding`."""

    embedding: Weight  # [V, H]
    layers: tuple[LlamaLayer, ...]
    output_norm: Float32Array  # [H]
    head: Weight  # [V, H]

    def matrices(self) -> Iterator[Weight]:
        """Every matrix once."""
        yield self.embedding
        for layer in self.layers:
            yield from (getattr(layer, name) for name in LAYER_MATRICES)
        if self.head is not self.embedding:
            yield self.head

    def norms(self) -> Iterator[Float32Array]:
        """Every norm vector."""
        for layer in self.layers:
            yield from (getattr(layer, name) for name in LAYER_NORMS)
        yield self.output_norm


LAYER_NORMS = ("attn_norm", "ffn_norm")
LAYER_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def forward(ops: Ops[T], weights: LlamaWeights, config: ModelConfig) -> T:
    """The raw logits of a pass: [R, V]."""
    spec = attention_spec(config)
    eps = config.rms_eps
    x = ops.embed(weights.embedding)
    for index, layer in enumerate(weights.layers):
        qkv = ops.norm_linear(x, layer.attn_norm, eps, (layer.attn_q, layer.attn_k, layer.attn_v))
        attended = ops.attention(qkv, index, spec)
        x = ops.linear_add(attended, layer.attn_output, x)
        gated = ops.norm_gated(x, layer.ffn_norm, eps, layer.ffn_gate, layer.ffn_up, "silu")
        x = ops.linear_add(gated, layer.ffn_down, x)
    return ops.logits(x, weights.output_norm, eps, weights.head)


def attention_spec(config: ModelConfig) -> AttentionSpec:
    """RoPE frequencies theta ** (-2 i / D) in float64 (Su et al. 2021, section 3.2.2) and the scale 1 / sqrt(D)."""
    dim = config.head_dim
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        rope_style="interleaved",
        inv_freq=tuple(config.rope_theta ** (-2 * i / dim) for i in range(dim // 2)),
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The tensors a file must hold, (N, K) by name."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "attn_norm": (1, hidden),
        "attn_q": (q_size, hidden),
        "attn_k": (kv_size, hidden),
        "attn_v": (kv_size, hidden),
        "attn_output": (hidden, q_size),
        "ffn_norm": (1, hidden),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    shapes = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (1, hidden)}
    if not config.is_tied:
        shapes["output.weight"] = (vocab, hidden)
    for index in range(config.num_layers):
        shapes |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def build_weights(source: WeightSource, config: ModelConfig) -> LlamaWeights:
    """The weights of a model whose tensors have the shapes `tensor_shapes` names."""
    embedding = source.head("token_embd.weight")
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(_build_layer(source, f"blk.{index}.") for index in range(config.num_layers)),
        output_norm=source.norm("output_norm.weight"),
        head=embedding if config.is_tied else source.head("output.weight"),
    )


def _build_layer(source: WeightSource, prefix: str) -> LlamaLayer:
    tensors: dict[str, Any] = {name: source.norm(f"{prefix}{name}.weight") for name in LAYER_NORMS}
    tensors |= {name: source.matrix(f"{prefix}{name}.weight") for name in LAYER_MATRICES}
    return LlamaLayer(**tensors)
