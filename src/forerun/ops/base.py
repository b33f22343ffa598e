"""The operations a model is written in.

A model file calls these about ten fused operations once; what happens then depends on the backend. `ops.torch`
computes at once, `ops.native` records an instruction of a program that is replayed at each step. Neither knows which
architecture is running, and a model file does not know which backend it runs on.

Shape legend: M rows, H hidden size, N output size of a linear map, V vocabulary, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np

from forerun.types import Batch, Float32Array, ForwardOutput

T = TypeVar("T")

Activation = Literal["silu"]
Quant = Literal["f32", "q8", "q4"]
KvType = Literal["f16", "f32"]
# How the two halves of a RoPE pair lie in a head: `neox` pairs i with i + D/2, `interleaved` pairs 2i with 2i + 1.
RopeStyle = Literal["neox", "interleaved"]


@dataclass(frozen=True, slots=True)
class Weight:
    """One matrix as the file holds it; a backend packs or dequantises it when a model binds it.

    Attributes:
        name: the tensor's name in the file, for messages.
        format: `f32`, `f16`, `q4_0`, `q4_1` or `q8_0`.
        shape: (N, K), N output rows of K inputs.
        data: the raw bytes [N * bytes per row] uint8, a view of the mapped file.
    """

    name: str
    format: str
    shape: tuple[int, int]
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What attention needs to know about an architecture.

    Attributes:
        num_heads, num_kv_heads, head_dim: the usual; num_heads is a multiple of num_kv_heads.
        scale: multiplies q . k.
        rope_style: how RoPE pairs lie.
        inv_freq: [head_dim / 2] float64, RoPE frequencies.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope_style: RopeStyle
    inv_freq: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """What a backend must know before a model is bound to it. Set by the engine when it loads a model.

    Attributes:
        vocab_size: V, columns of the logits.
        hidden_size: H.
        num_layers: layers that have a KV cache.
        attention: heads and RoPE of every layer.
        max_rows: the most rows that one pass may have.
        num_pages: KV pages to reserve, of `PAGE_TOKENS` slots each.
        kv_type: how keys and values are stored.
        num_threads: threads to compute with; None leaves it to the backend.
        device: `cpu`, or for the torch backend also `cuda` or `cuda:N`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    attention: AttentionSpec
    max_rows: int
    num_pages: int
    kv_type: KvType
    num_threads: int | None = None
    device: str = "cpu"


class Ops(Protocol[T]):
    """The operation set; T is a backend's handle of an [M, *] float32 value."""

    def embed(self, table: Weight) -> T:
        """Rows of the embedding for the batch's token ids: [M, H]."""

    def norm_linear(self, x: T, norm: Float32Array, eps: float, weights: tuple[Weight, ...]) -> T:
        """RMSNorm, then linear maps side by side: [M, sum N]."""

    def attention(self, qkv: T, layer: int, spec: AttentionSpec) -> T:
        """RoPE on q and k, append k and v to the cache, attend: [M, num_heads * D]."""

    def linear_add(self, x: T, weight: Weight, residual: T) -> T:
        """residual + x W^T: [M, N]."""

    def norm_gated(self, x: T, norm: Float32Array, eps: float, gate: Weight, up: Weight, act: Activation) -> T:
        """RMSNorm, then act(x gate^T) * (x up^T): [M, N]."""

    def logits(self, x: T, norm: Float32Array, eps: float, head: Weight) -> T:
        """Final RMSNorm and LM head on the batch's logit rows: [R, V]."""


class Executor(Protocol):
    """A model bound to a backend, with its KV storage. One pass at a time."""

    vocab_size: int

    def forward(self, batch: Batch) -> ForwardOutput:
        """One pass over the batch's rows; appends their keys and values to the cache."""

    def move_slots(self, page_table: np.ndarray, src: np.ndarray, dst: np.ndarray) -> None:
        """Copies keys and values of slots src to slots dst of one sequence, in order, every layer."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights one pass over a few rows reads."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV storage that are reserved."""
