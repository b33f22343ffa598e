"""The reference backend: every operation computed at once in float32, on a CPU or a GPU.

Slow and obvious on purpose. Weights are dequantised when a model is bound, keys and values are rounded to their storage
type when they are appended and read back after it. The rounding of a row depends on the shapes it is computed in, so
equality of bits across shapes is not promised here. Knows no architecture and no engine.

Shape legend: M rows, B query rows of a block, L slots of a sequence, J KV heads, G heads per KV head, D head size,
H hidden size, N output size of a linear map, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from forerun.batch import Batch
from forerun.errors import ConfigError, EngineFault
from forerun.machine import cpu_model
from forerun.ops.base import Activation, AttentionSpec, ExecutorConfig, Ops, Weight
from forerun.ops.checks import check_batch, physical_slots, row_ends, tail_bits
from forerun.ops.torch_storage import KvStorage, Parameters
from forerun.types import MAX_DRAFT_NODES, PAGE_TOKENS, Float32Array, ForwardOutput

# Query rows that attend together. Scratch is this many scores per head and visible slot, so it grows with the context
# and not with its square.
QUERY_ROWS = 128

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class TorchExecutor:
    """A model on PyTorch, with its KV storage.

    Args:
        config: sizes, KV storage, threads and device. `num_threads` sets PyTorch's own, for the whole process.
        build: the forward pass. It runs once here to bind weights, then once per pass, and must pass the same norm
            arrays each time.

    Raises:
        ConfigError: the device is unknown or missing.
    """

    def __init__(self, config: ExecutorConfig, build: Callable[[Ops[Any]], Any]) -> None:
        self.vocab_size = config.vocab_size
        self._config = config
        self._build = build
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._device = _open_device(config.device)
        self._parameters = Parameters(self._device)
        build(self._parameters)
        self._kv = KvStorage(config, self._device)
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else cpu_model()
        self.fingerprint = f"torch {torch.__version__}, {name}, {torch.get_num_threads()} threads"

    def forward(self, batch: Batch) -> ForwardOutput:
        """One pass over the batch's rows; appends their keys and values to the cache.

        Raises:
            EngineFault: the batch breaks a promise of `types.Batch`, or a wanted row's logits are not finite.
        """
        check_batch(batch, self._config)
        with torch.inference_mode():
            handle: Tensor = self._build(_Pass(batch, self._parameters, self._kv, self._device))
            logits: Float32Array = handle.cpu().numpy()  # [R, V]
        expected = (batch.logit_rows.size, self.vocab_size)
        if logits.shape != expected:
            raise EngineFault(f"the pass returned logits of shape {logits.shape}, but must return {expected}")
        _check_finite(logits, batch)
        # NumPy promises the first of equal maxima; torch.argmax does not.
        return ForwardOutput(logits, np.argmax(logits, axis=1).astype(np.int32))

    def variant(self, build: Callable[[Ops[Any]], Any]) -> TorchExecutor:
        """See `Executor.variant`."""
        other = copy.copy(self)
        other._build = build
        other._parameters = self._parameters.variant()
        build(other._parameters)
        return other

    def move_slots(self, page_table: np.ndarray, src: np.ndarray, dst: np.ndarray) -> None:
        """Copies keys and values of slots src [n] to slots dst [n] of one sequence, in order, every layer.

        Raises:
            EngineFault: src and dst differ in length, or a slot or its page is not there.
        """
        if src.shape != dst.shape:
            raise EngineFault(f"{src.size} slots can't be moved to {dst.size} slots")
        # In order means that a copy may read what an earlier one wrote. Following each slot back to where its value
        # lay before the first copy lets all of them be made at once.
        origin: dict[int, int] = {}
        for source, target in zip(src.tolist(), dst.tolist(), strict=True):
            origin[target] = origin.get(source, source)
        if origin:
            self._kv.copy(self._locate(page_table, list(origin.values())), self._locate(page_table, list(origin)))

    def _locate(self, page_table: np.ndarray, slots: list[int]) -> tuple[Tensor, Tensor]:
        """Pages and offsets of a sequence's slots."""
        capacity = page_table.size * PAGE_TOKENS
        for slot in slots:
            if not 0 <= slot < capacity:
                raise EngineFault(f"slot {slot} is outside 0 to {capacity - 1}")
        page_index, offsets = np.divmod(np.asarray(slots, dtype=np.int64), PAGE_TOKENS)
        pages = page_table[page_index].astype(np.int64)
        bad = pages[(pages < 0) | (pages >= self._config.num_pages)]
        if bad.size:
            raise EngineFault(f"page {bad[0]} is outside 0 to {self._config.num_pages - 1}")
        return torch.from_numpy(pages).to(self._device), torch.from_numpy(offsets).to(self._device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights one pass over a few rows reads: all but an embedding table that is not the head too."""
        return self._parameters.read_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV storage that are reserved."""
        return self._kv.num_bytes


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence's part of a pass.

    Attributes:
        start, stop: its rows.
        pages: page ids that hold the slots its rows see.
        length: L, one past the last slot that any of them sees.
        seen: [L] bool, the slots that at least one of them sees.
    """

    start: int
    stop: int
    pages: Tensor
    length: int
    seen: Tensor


class _Pass:
    """The operations over one batch. Is an `Ops[Tensor]`."""

    def __init__(self, batch: Batch, parameters: Parameters, kv: KvStorage, device: torch.device) -> None:
        self._parameters = parameters
        self._kv = kv
        self._device = device
        self._positions = batch.positions.astype(np.float64)
        self._token_ids = self._tensor(batch.token_ids)
        self._logit_rows = self._tensor(batch.logit_rows)
        pages, offsets = physical_slots(batch)
        self._pages, self._offsets = self._tensor(pages), self._tensor(offsets)
        self._ends = row_ends(batch)
        self._visible_len = self._tensor(batch.visible_len)
        self._tail_base = self._tensor(batch.tail_base)
        self._tail_bits = torch.from_numpy(tail_bits(batch)).to(device) if batch.tail_mask.any() else None
        self._sequences = self._split(batch)
        self._rotations: dict[AttentionSpec, tuple[Tensor, Tensor]] = {}

    def embed(self, table: Weight, scale: float = 1.0) -> Tensor:
        return self._parameters.matrix(table)[self._token_ids] * np.float32(scale).item()

    def norm_linear(
        self,
        x: Tensor,
        norm: Float32Array | None,
        eps: float,
        weights: tuple[Weight, ...],
        bias: Float32Array | None = None,
    ) -> Tensor:
        normed = self._rms_norm(x, norm, eps)
        product = torch.cat([functional.linear(normed, self._parameters.matrix(weight)) for weight in weights], dim=-1)
        return self._plus(product, bias)

    def attention(
        self,
        qkv: Tensor,
        layer: int,
        spec: AttentionSpec,
        q_norm: Float32Array | None = None,
        k_norm: Float32Array | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        rows, dim, groups = qkv.shape[0], spec.head_dim, spec.num_heads // spec.num_kv_heads
        heads = qkv.view(rows, -1, dim)  # [M, num_heads + 2 J, D]
        query, key, value = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        query, key = self._norm_heads(query, q_norm, eps), self._norm_heads(key, k_norm, eps)
        query = self._rotate(query, spec).reshape(rows, spec.num_kv_heads, groups, dim)  # [M, J, G, D]
        self._kv.append(layer, self._pages, self._offsets, self._rotate(key, spec), value)
        out = torch.empty_like(query)
        for sequence in self._sequences:
            keys, values = self._kv.read(layer, sequence.pages, sequence.length)
            # What lies in a slot nobody sees may not even be finite, and 0 * NaN is NaN.
            values = values.masked_fill(~sequence.seen[:, None], 0.0)
            for start in range(sequence.start, sequence.stop, QUERY_ROWS):
                stop = min(start + QUERY_ROWS, sequence.stop)
                end = int(self._ends[start:stop].max())
                visible = self._visible(start, stop, end, spec.window)
                out[start:stop] = _attend(query[start:stop] * spec.scale, keys[:, :end], values[:, :end], visible)
        return out.flatten(1)

    def linear_add(self, x: Tensor, weight: Weight, residual: Tensor, bias: Float32Array | None = None) -> Tensor:
        return residual + self._plus(functional.linear(x, self._parameters.matrix(weight)), bias)

    def norm_add(self, x: Tensor, norm: Float32Array, eps: float, residual: Tensor) -> Tensor:
        return residual + self._rms_norm(x, norm, eps)

    def norm_gated(
        self, x: Tensor, norm: Float32Array | None, eps: float, gate: Weight, up: Weight, act: Activation
    ) -> Tensor:
        normed = self._rms_norm(x, norm, eps)
        gated = _ACTIVATIONS[act](functional.linear(normed, self._parameters.matrix(gate)))
        return gated * functional.linear(normed, self._parameters.matrix(up))

    def logits(self, x: Tensor, norm: Float32Array, eps: float, head: Weight) -> Tensor:
        return functional.linear(self._rms_norm(x[self._logit_rows], norm, eps), self._parameters.matrix(head))

    def _tensor(self, indices: np.ndarray) -> Tensor:
        return torch.from_numpy(indices.astype(np.int64)).to(self._device)

    def _plus(self, x: Tensor, bias: Float32Array | None) -> Tensor:
        return x if bias is None else x + self._parameters.vector(bias)

    def _rms_norm(self, x: Tensor, norm: Float32Array | None, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * norm (Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4); without norm x."""
        if norm is None:
            return x
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
        return x * scale * self._parameters.vector(norm)

    def _norm_heads(self, heads: Tensor, norm: Float32Array | None, eps: float) -> Tensor:
        """RMSNorm on [M, heads, D]: of each head when norm has D numbers, else of all heads together."""
        if norm is None or norm.size == heads.shape[-1]:
            return self._rms_norm(heads, norm, eps)
        return self._rms_norm(heads.flatten(1), norm, eps).view(heads.shape)

    def _rotate(self, heads: Tensor, spec: AttentionSpec) -> Tensor:
        """RoPE on [M, heads, D]: each pair turns by position * inv_freq (Su et al. 2021, arXiv 2104.09864, eq. 34)."""
        if spec not in self._rotations:
            angles = self._positions[:, None] * np.asarray(spec.inv_freq)  # [M, pairs] float64
            cos, sin = (spec.rope_magnitude * f(angles) for f in (np.cos, np.sin))
            self._rotations[spec] = self._column(cos), self._column(sin)
        cos, sin = self._rotations[spec]
        turning, rest = heads.tensor_split([2 * len(spec.inv_freq)], dim=-1)
        if spec.rope_style == "interleaved":
            first, second = turning[..., 0::2], turning[..., 1::2]
            turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)
        else:
            first, second = turning.chunk(2, dim=-1)
            turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
        return torch.cat((turned, rest), dim=-1)

    def _column(self, values: np.ndarray) -> Tensor:
        """[M, pairs] as [M, 1, pairs] float32, which all heads of a row share."""
        return torch.from_numpy(values.astype(np.float32)).to(self._device)[:, None]

    def _split(self, batch: Batch) -> tuple[_Sequence, ...]:
        starts = [0, *(np.flatnonzero(np.diff(batch.seq_ids)) + 1).tolist(), batch.seq_ids.size]
        sequences = []
        for start, stop in pairwise(starts):
            length = int(self._ends[start:stop].max())
            pages = batch.page_tables[batch.seq_ids[start], : -(-length // PAGE_TOKENS)]
            seen = np.arange(length) < batch.visible_len[start:stop].max()
            rows, bits = np.nonzero(tail_bits(batch)[start:stop])
            seen[batch.tail_base[start + rows] + bits] = True
            seen_on_device = torch.from_numpy(seen).to(self._device)
            sequences.append(_Sequence(start, stop, self._tensor(pages), length, seen_on_device))
        return tuple(sequences)

    def _visible(self, start: int, stop: int, end: int, window: int | None) -> Tensor:
        """Which of the slots [0, end) the rows [start, stop) see: [B, end] bool."""
        slots = torch.arange(end, device=self._device)
        visible = slots < self._visible_len[start:stop, None]
        if self._tail_bits is not None:
            bit = slots - self._tail_base[start:stop, None]
            is_tail = (bit >= 0) & (bit < MAX_DRAFT_NODES)
            ancestors = self._tail_bits[start:stop].gather(1, bit.clamp(0, MAX_DRAFT_NODES - 1))
            visible = visible | (is_tail & ancestors)
        if window is None:
            return visible
        # A path's slots ascend with its positions, so its k-th slot from the front is its logical position k.
        position = visible.cumsum(dim=-1) - 1
        return visible & (position > position[:, -1:] - window)


def _attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """softmax(q k^T) v over the visible slots (Vaswani et al. 2017, arXiv 1706.03762, eq. 1); q is already scaled.

    Args:
        query: [B, J, G, D].
        keys, values: [J, L, D].
        visible: [B, L] bool, at least one per row.

    Returns:
        [B, J, G, D].
    """
    rows, kv_heads, groups, dim = query.shape
    grouped = query.permute(1, 2, 0, 3).reshape(kv_heads, groups * rows, dim)  # a KV head serves G heads at once
    scores = torch.bmm(grouped, keys.transpose(1, 2)).view(kv_heads, groups, rows, -1)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)  # [J, G, B, L]
    mixed = torch.bmm(weights.view(kv_heads, groups * rows, -1), values)
    return mixed.view(kv_heads, groups, rows, dim).permute(2, 0, 1, 3)


def _check_finite(logits: Float32Array, batch: Batch) -> None:
    bad = np.flatnonzero(~np.isfinite(logits).all(axis=1))
    if bad.size:
        row = int(batch.logit_rows[bad[0]])
        where = f"sequence {batch.seq_ids[row]}, position {batch.positions[row]}"
        raise EngineFault(f"logits of row {row} ({where}) are not finite")


def _open_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown; the torch backend runs on cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(f"device {name!r} is not supported; the torch backend runs on cpu, cuda or cuda:N")
    found = torch.cuda.device_count()
    if (device.index or 0) >= found:
        raise ConfigError(
            f"device {name!r} is not there: PyTorch finds {found} CUDA devices; choose cpu or another one"
        )
    return device
