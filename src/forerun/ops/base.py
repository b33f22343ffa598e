"""The operations a model is written in.

A model file calls these seven fused operations; what happens then depends on the backend. `ops.torch`
computes at once, `ops.native` records an instruction of a program that is replayed at each step. Neither knows which
architecture is running, and a model file does not know which backend it runs on.

Shape legend: M rows, H hidden size, N output size of a linear map, V vocabulary, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from forerun.batch import Batch
from forerun.errors import EngineFault
from forerun.types import Float32Array, ForwardOutput, Int32Array

T = TypeVar("T")

# `gelu_tanh` is the tanh form of GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415).
Activation = Literal["silu", "gelu_tanh"]
Quant = Literal["f32", "bf16", "q8", "q4"]
KvType = Literal["f16", "f32"]
# How the two halves of a RoPE pair lie in the rotated part of a head, of R numbers: `neox` pairs i with i + R/2,
# `interleaved` pairs 2i with 2i + 1.
RopeStyle = Literal["neox", "interleaved"]


@dataclass(frozen=True, slots=True)
class Weight:
    """One matrix as the file holds it; a backend packs or dequantises it when a model binds it.

    Attributes:
        name: the tensor's name in the file, for messages.
        format: a key of `ops.formats.FORMATS`: `f32`, `f16`, `bf16`, `q4_0`, `q4_1`, `q5_0`, `q5_1`, `q8_0`, `q2_k`,
            `q3_k`, `q4_k`, `q5_k`, `q6_k`, `iq4_nl`, `iq4_xs` or `mxfp4`.
        shape: (N, K), N output rows of K inputs.
        data: the raw bytes [N * bytes per row] uint8, a view of the mapped file where it holds them like this.
        columns: [K] int32, a permutation: the k-th weight of a row as stored multiplies input columns[k]. None is the
            plain order. `ops.formats.dequantize` undoes it.
    """

    name: str
    format: str
    shape: tuple[int, int]
    data: np.ndarray
    columns: Int32Array | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What attention in one layer needs to know about an architecture.

    Attributes:
        num_heads, num_kv_heads, head_dim: the usual; num_heads is a multiple of num_kv_heads.
        scale: multiplies q . k.
        rope_style: how RoPE pairs lie.
        inv_freq: RoPE frequencies in float64, one per pair. The first 2 * len(inv_freq) numbers of a head rotate, the
            rest pass through.
        rope_magnitude: multiplies cos and sin (YaRN, LongRoPE).
        window: a row at position p sees only positions > p - window of its own path; None sees all. Positions are
            logical ones: the prefix, then the row's own ancestors in a tree.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope_style: RopeStyle
    inv_freq: tuple[float, ...]
    rope_magnitude: float = 1.0
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """What a backend must know before a model is bound to it. Set by the engine when it loads a model.

    Attributes:
        vocab_size: V, columns of the logits.
        hidden_size: H.
        num_layers: layers that have a KV cache.
        attentions: heads, RoPE and window of each layer; head counts and head_dim are the same in all.
        max_rows: the most rows that one pass may have.
        num_pages: KV pages to reserve, of `PAGE_TOKENS` slots each.
        kv_type: how keys and values are stored.
        num_threads: threads to compute with; None leaves it to the backend.
        max_len: positions of a sequence are below this; None allows as many as the cache has slots.
        device: `cpu`, or for the torch backend also `cuda` or `cuda:N`.

    Raises:
        EngineFault: attentions are not one per layer, differ in their heads, or rotate more than a head.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    attentions: tuple[AttentionSpec, ...]
    max_rows: int
    num_pages: int
    kv_type: KvType
    num_threads: int | None = None
    max_len: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not len(self.attentions) == self.num_layers > 0:
            raise EngineFault(f"{self.num_layers} layers with a cache can't have {len(self.attentions)} attentions")
        shapes = {(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in self.attentions}
        if len(shapes) > 1:
            raise EngineFault(f"the layers' attentions must have equal heads, but have {sorted(shapes)}")
        for layer, spec in enumerate(self.attentions):
            if 2 * len(spec.inv_freq) > spec.head_dim:
                raise EngineFault(f"attention {layer} rotates {2 * len(spec.inv_freq)} of {spec.head_dim} numbers")
            if spec.window is not None and spec.window < 1:
                raise EngineFault(f"attention {layer} has a window of {spec.window}, so a row would not see itself")


class Ops(Protocol[T]):
    """The operation set; T is a backend's handle of an [M, *] float32 value. RMSNorm weights and biases are float32."""

    def embed(self, table: Weight, scale: float = 1.0) -> T:
        """Rows of the embedding for the batch's token ids, each number times scale rounded to float32: [M, H]."""

    def norm_linear(
        self,
        x: T,
        norm: Float32Array | None,
        eps: float,
        weights: tuple[Weight, ...],
        bias: Float32Array | None = None,
    ) -> T:
        """RMSNorm unless norm is None, then linear maps side by side, then plus bias [sum N]: [M, sum N]."""

    def attention(
        self,
        qkv: T,
        layer: int,
        spec: AttentionSpec,
        q_norm: Float32Array | None = None,
        k_norm: Float32Array | None = None,
        eps: float = 0.0,
    ) -> T:
        """RMSNorm and RoPE on q and k, append k and v to the cache, attend: [M, num_heads * D].

        A norm of D numbers is applied to each head, one of num_heads * D (k: num_kv_heads * D) to all heads together.
        """

    def linear_add(self, x: T, weight: Weight, residual: T, bias: Float32Array | None = None) -> T:
        """residual + (x W^T + bias): [M, N]."""

    def norm_add(self, x: T, norm: Float32Array, eps: float, residual: T) -> T:
        """residual + RMSNorm(x): [M, H]."""

    def norm_gated(self, x: T, norm: Float32Array | None, eps: float, gate: Weight, up: Weight, act: Activation) -> T:
        """RMSNorm unless norm is None, then act(x gate^T) * (x up^T): [M, N]."""

    def logits(self, x: T, norm: Float32Array, eps: float, head: Weight) -> T:
        """Final RMSNorm and LM head on the batch's logit rows: [R, V]."""


class Executor(Protocol):
    """A model bound to a backend, with its KV storage. One pass at a time."""

    vocab_size: int

    def forward(self, batch: Batch) -> ForwardOutput:
        """One pass over the batch's rows; appends their keys and values to the cache."""

    def move_slots(self, page_table: np.ndarray, src: np.ndarray, dst: np.ndarray) -> None:
        """Copies keys and values of slots src to slots dst of one sequence, in order, every layer."""

    def variant(self, build: Callable[[Ops[Any]], Any]) -> Executor:
        """Another forward pass over the weights that are bound and over this cache; nothing is held a second time.

        A pass of it is one of this executor: it overwrites what the last pass of either returned.

        Args:
            build: writes the pass in `Ops` calls. Its matrices are known by their names, whatever data they have by
                then; norms and biases are the arrays that were bound.

        Raises:
            EngineFault: it reads a weight that is not bound.
        """

    @property
    def fingerprint(self) -> str:
        """What the time of a pass depends on besides the model: backend, build, device, instruction set, threads."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights one pass over a few rows reads."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV storage that are reserved."""
