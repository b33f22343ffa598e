"""A small random Llama for tests of the backends: float32 weights, its forward pass, and the same in plain float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun.batch import Batch
from forerun.ops.base import AttentionSpec, ExecutorConfig, KvType, RopeStyle, Weight
from forerun.types import PAGE_TOKENS

EPS = 1e-5


def f32_weight(name: str, matrix: np.ndarray) -> Weight:
    data = np.ascontiguousarray(matrix, dtype=np.float32)
    return Weight(name, "f32", (data.shape[0], data.shape[1]), data.reshape(-1).view(np.uint8))


def rms_norm(x: np.ndarray, norm: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * norm


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def rope(heads: np.ndarray, positions: np.ndarray, spec: AttentionSpec) -> np.ndarray:
    """heads [M, heads, D] as complex numbers, each pair multiplied by exp(i position frequency)."""
    turn = np.exp(1j * positions[:, None, None] * np.asarray(spec.inv_freq))
    half = spec.head_dim // 2
    real, imag = (
        (np.s_[..., 0::2], np.s_[..., 1::2])
        if spec.rope_style == "interleaved"
        else (np.s_[..., :half], np.s_[..., half:])
    )
    turned = (heads[real] + 1j * heads[imag]) * turn
    out = np.empty_like(heads)
    out[real], out[imag] = turned.real, turned.imag
    return out


def causal_attention(qkv: np.ndarray, spec: AttentionSpec, kv_type: KvType) -> np.ndarray:
    """One sequence from position 0, row by row and head by head: [M, num_heads * D]."""
    rows, heads, kv_heads, dim = qkv.shape[0], spec.num_heads, spec.num_kv_heads, spec.head_dim
    positions = np.arange(rows, dtype=np.float64)
    q, k, v = np.split(qkv.reshape(rows, -1, dim), [heads, heads + kv_heads], axis=1)
    q, k = rope(q, positions, spec), rope(k, positions, spec)
    if kv_type == "f16":
        k, v = (x.astype(np.float32).astype(np.float16).astype(np.float64) for x in (k, v))
    out = np.empty((rows, heads, dim))
    for row in range(rows):
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = k[: row + 1, kv_head] @ q[row, head] * spec.scale
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ v[: row + 1, kv_head] / weights.sum()
    return out.reshape(rows, -1)


@dataclass(frozen=True)
class ToyLlama:
    vocab_size: int = 61
    hidden_size: int = 32
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 12
    ffn_size: int = 40
    rope_style: RopeStyle = "interleaved"
    is_tied: bool = False
    seed: int = 0
    weights: dict[str, Weight] = field(default_factory=dict)
    norms: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes = {"embed": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            self.norms[f"{layer}.attn"] = rng.uniform(0.5, 1.5, self.hidden_size).astype(np.float32)
            self.norms[f"{layer}.ffn"] = rng.uniform(0.5, 1.5, self.hidden_size).astype(np.float32)
            shapes |= {
                f"{layer}.q": (q_size, self.hidden_size),
                f"{layer}.k": (kv_size, self.hidden_size),
                f"{layer}.v": (kv_size, self.hidden_size),
                f"{layer}.o": (self.hidden_size, q_size),
                f"{layer}.gate": (self.ffn_size, self.hidden_size),
                f"{layer}.up": (self.ffn_size, self.hidden_size),
                f"{layer}.down": (self.hidden_size, self.ffn_size),
            }
        self.norms["final"] = rng.uniform(0.5, 1.5, self.hidden_size).astype(np.float32)
        if not self.is_tied:
            shapes["head"] = (self.vocab_size, self.hidden_size)
        for name, shape in shapes.items():
            self.weights[name] = f32_weight(name, rng.normal(0.0, shape[1] ** -0.5, shape))
        if self.is_tied:
            self.weights["head"] = self.weights["embed"]

    @property
    def attention(self) -> AttentionSpec:
        inv_freq = tuple(10000.0 ** (-2.0 * i / self.head_dim) for i in range(self.head_dim // 2))
        return AttentionSpec(
            self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5, self.rope_style, inv_freq
        )

    def config(self, kv_type: KvType = "f32", num_pages: int = 24, max_rows: int = 256) -> ExecutorConfig:
        layers = max(self.num_layers, 1)  # without a layer it still has a cache, which nothing reads
        return ExecutorConfig(
            self.vocab_size, self.hidden_size, layers, (self.attention,) * layers, max_rows, num_pages, kv_type
        )

    def build(self, ops: Any) -> Any:
        w, norms, spec = self.weights, self.norms, self.attention
        x = ops.embed(w["embed"])
        for n in range(self.num_layers):
            qkv = ops.norm_linear(x, norms[f"{n}.attn"], EPS, (w[f"{n}.q"], w[f"{n}.k"], w[f"{n}.v"]))
            x = ops.linear_add(ops.attention(qkv, n, spec), w[f"{n}.o"], x)
            x = ops.linear_add(
                ops.norm_gated(x, norms[f"{n}.ffn"], EPS, w[f"{n}.gate"], w[f"{n}.up"], "silu"), w[f"{n}.down"], x
            )
        return ops.logits(x, norms["final"], EPS, w["head"])

    def matrix(self, name: str) -> np.ndarray:
        weight = self.weights[name]
        return weight.data.view(np.float32).reshape(weight.shape).astype(np.float64)

    def reference(self, token_ids: Sequence[int], kv_type: KvType = "f32") -> np.ndarray:
        """Logits [M, V] float64 of every position of one sequence, by the plain formulas."""
        x = self.matrix("embed")[list(token_ids)]
        for n in range(self.num_layers):
            h = rms_norm(x, self.norms[f"{n}.attn"])
            qkv = np.concatenate([h @ self.matrix(f"{n}.{part}").T for part in "qkv"], axis=1)
            x = x + causal_attention(qkv, self.attention, kv_type) @ self.matrix(f"{n}.o").T
            h = rms_norm(x, self.norms[f"{n}.ffn"])
            x = x + (silu(h @ self.matrix(f"{n}.gate").T) * (h @ self.matrix(f"{n}.up").T)) @ self.matrix(f"{n}.down").T
        return rms_norm(x, self.norms["final"]) @ self.matrix("head").T


def pages_for(num_slots: int, first_page: int = 0) -> np.ndarray:
    """A page table [P] of consecutive pages."""
    return np.arange(first_page, first_page - (-num_slots // PAGE_TOKENS), dtype=np.int32)


def chain_batch(
    token_ids: Sequence[int], page_table: np.ndarray, start: int = 0, wanted: Sequence[int] | None = None
) -> Batch:
    """Rows of one sequence from slot start on, as a prompt chunk has them; every row's logits unless told."""
    rows = len(token_ids)
    slots = np.arange(start, start + rows, dtype=np.int32)
    return Batch(
        np.asarray(token_ids, dtype=np.int32),
        slots,
        slots,
        slots + np.int32(1),
        np.zeros(rows, dtype=np.int32),
        np.zeros(rows, dtype=np.uint64),
        np.zeros(rows, dtype=np.int32),
        page_table[None],
        np.asarray(range(rows) if wanted is None else wanted, dtype=np.int32),
    )


def tree_batch(token_ids: Sequence[int], parents: Sequence[int], page_table: np.ndarray, committed_len: int) -> Batch:
    """Rows of draft nodes in the tail slots from committed_len on; parent -1 is the last committed token."""
    rows = len(token_ids)
    words: list[int] = []
    depths: list[int] = []
    for node, parent in enumerate(parents):
        words.append((words[parent] if parent >= 0 else 0) | 1 << node)
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    committed = np.full(rows, committed_len, dtype=np.int32)
    return Batch(
        np.asarray(token_ids, dtype=np.int32),
        committed + np.asarray(depths, dtype=np.int32),
        committed + np.arange(rows, dtype=np.int32),
        committed,
        committed,
        np.asarray(words, dtype=np.uint64),
        np.zeros(rows, dtype=np.int32),
        page_table[None],
        np.arange(rows, dtype=np.int32),
    )


def merge_batches(*batches: Batch) -> Batch:
    """One pass over several sequences; page tables are padded with -1, which nothing may read."""
    width = max(batch.page_tables.shape[1] for batch in batches)
    tables = [
        np.pad(batch.page_tables, ((0, 0), (0, width - batch.page_tables.shape[1])), constant_values=-1)
        for batch in batches
    ]
    rows = np.cumsum([0, *(batch.token_ids.size for batch in batches)])
    per_row = ("token_ids", "positions", "slots", "visible_len", "tail_base", "tail_mask")
    joined = {name: np.concatenate([getattr(batch, name) for batch in batches]) for name in per_row}
    return Batch(
        **joined,
        seq_ids=np.concatenate([batch.seq_ids + np.int32(i) for i, batch in enumerate(batches)]),
        page_tables=np.concatenate(tables),
        logit_rows=np.concatenate([b.logit_rows + np.int32(rows[i]) for i, b in enumerate(batches)]),
    )
