"""The reference backend: every operation computed at once in float32, on a CPU or a GPU.

Slow and obvious on purpose. Weights are dequantised when a model is bound, keys and values are rounded to their storage
type when they are appended and read back after it. The rounding of a row depends on the shapes it is computed in, so
equality of bits across shapes is not promised here. Knows no architecture and no engine.

Shape legend: M rows, B query rows of a block, L slots of a sequence, J KV heads, G heads per KV head, D head size,
H hidden size, N output size of a linear map, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from forerun.errors import ConfigError, EngineFault
from forerun.ops.base import Activation, AttentionSpec, ExecutorConfig, Ops, Weight
from forerun.ops.checks import check_batch, physical_slots, row_ends, tail_bits
from forerun.ops.formats import dequantize
from forerun.types import MAX_DRAFT_NODES, PAGE_TOKENS, Batch, Float32Array, ForwardOutput

# Query rows that attend together. Scratch is this many scores per head and visible slot, so it grows with the context
# and not with its square.
QUERY_ROWS = 128

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": functional.silu}
_KV_TYPES = {"f16": torch.float16, "f32": torch.float32}


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
        self._parameters = _Parameters(self._device)
        build(self._parameters)
        self._kv = _KvStorage(config, self._device)

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


class _Parameters:
    """The model's weights as float32 tensors, gathered by one run of its forward pass. Is an `Ops[None]` for that run.

    A matrix is known by its name, so a tied one is held once; a norm by the array itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._matrices: dict[str, tuple[Weight, Tensor]] = {}
        self._norms: dict[int, tuple[Float32Array, Tensor]] = {}
        self._read: set[str] = set()

    def matrix(self, weight: Weight) -> Tensor:
        """[N, K] float32."""
        bound = self._matrices.get(weight.name)
        if bound is None:
            raise EngineFault(f"weight {weight.name} was not there when the model was bound")
        return bound[1]

    def norm(self, norm: Float32Array) -> Tensor:
        """[H] float32."""
        bound = self._norms.get(id(norm))
        if bound is None:
            raise EngineFault("a norm array was not there when the model was bound")
        return bound[1]

    @property
    def read_bytes(self) -> int:
        matrices = (self._matrices[name][1] for name in self._read)
        norms = (tensor for _, tensor in self._norms.values())
        return sum(tensor.nbytes for tensor in (*matrices, *norms))

    def embed(self, table: Weight) -> None:
        self._bind(table)

    def norm_linear(self, x: None, norm: Float32Array, eps: float, weights: tuple[Weight, ...]) -> None:
        self._bind_norm(norm)
        self._bind_linear(*weights)

    def attention(self, qkv: None, layer: int, spec: AttentionSpec) -> None:
        """Has no weights."""

    def linear_add(self, x: None, weight: Weight, residual: None) -> None:
        self._bind_linear(weight)

    def norm_gated(self, x: None, norm: Float32Array, eps: float, gate: Weight, up: Weight, act: Activation) -> None:
        self._bind_norm(norm)
        self._bind_linear(gate, up)

    def logits(self, x: None, norm: Float32Array, eps: float, head: Weight) -> None:
        self._bind_norm(norm)
        self._bind_linear(head)

    def _bind_linear(self, *weights: Weight) -> None:
        for weight in weights:
            self._bind(weight)
            self._read.add(weight.name)

    def _bind(self, weight: Weight) -> None:
        bound = self._matrices.get(weight.name)
        if bound is None:
            self._matrices[weight.name] = (weight, self._to_tensor(dequantize(weight)))
        elif not np.may_share_memory(bound[0].data, weight.data):
            raise EngineFault(f"two different weights are named {weight.name}")

    def _bind_norm(self, norm: Float32Array) -> None:
        # The array is kept beside its tensor: its id names it only while it lives.
        self._norms.setdefault(id(norm), (norm, self._to_tensor(norm)))

    def _to_tensor(self, array: Float32Array) -> Tensor:
        # A view of a mapped file can't be written, which PyTorch refuses to wrap.
        owned = array if array.flags.writeable else array.copy()
        return torch.from_numpy(owned).to(self._device)


class _KvStorage:
    """Keys and values of every layer: two lists of [num_pages, J, 16, D] tensors in the storage type."""

    def __init__(self, config: ExecutorConfig, device: torch.device) -> None:
        spec = config.attention
        shape = (config.num_pages, spec.num_kv_heads, PAGE_TOKENS, spec.head_dim)
        dtype = _KV_TYPES[config.kv_type]
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def append(self, layer: int, pages: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Rounds keys and values [M, J, D] to the storage type and writes them at (pages[M], offsets[M])."""
        for storage, new in ((self.keys[layer], keys), (self.values[layer], values)):
            storage[pages, :, offsets] = new.to(storage.dtype)

    def read(self, layer: int, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence's first slots, as stored: two [J, L, D] float32."""
        keys, values = (
            storage[pages].transpose(0, 1).flatten(1, 2)[:, :length].float()
            for storage in (self.keys[layer], self.values[layer])
        )
        return keys, values

    def copy(self, src: tuple[Tensor, Tensor], dst: tuple[Tensor, Tensor]) -> None:
        """Copies slots, given as (pages, offsets), in every layer byte for byte; all are read before one is written."""
        for storage in (*self.keys, *self.values):
            storage[dst[0], :, dst[1]] = storage[src[0], :, src[1]]


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

    def __init__(self, batch: Batch, parameters: _Parameters, kv: _KvStorage, device: torch.device) -> None:
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

    def embed(self, table: Weight) -> Tensor:
        return self._parameters.matrix(table)[self._token_ids]

    def norm_linear(self, x: Tensor, norm: Float32Array, eps: float, weights: tuple[Weight, ...]) -> Tensor:
        normed = self._rms_norm(x, norm, eps)
        return torch.cat([functional.linear(normed, self._parameters.matrix(weight)) for weight in weights], dim=-1)

    def attention(self, qkv: Tensor, layer: int, spec: AttentionSpec) -> Tensor:
        rows, dim, groups = qkv.shape[0], spec.head_dim, spec.num_heads // spec.num_kv_heads
        heads = qkv.view(rows, -1, dim)  # [M, num_heads + 2 J, D]
        query, key, value = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        query = self._rotate(query, spec).view(rows, spec.num_kv_heads, groups, dim)  # [M, J, G, D]
        self._kv.append(layer, self._pages, self._offsets, self._rotate(key, spec), value)
        out = torch.empty_like(query)
        for sequence in self._sequences:
            keys, values = self._kv.read(layer, sequence.pages, sequence.length)
            # What lies in a slot nobody sees may not even be finite, and 0 * NaN is NaN.
            values = values.masked_fill(~sequence.seen[:, None], 0.0)
            for start in range(sequence.start, sequence.stop, QUERY_ROWS):
                stop = min(start + QUERY_ROWS, sequence.stop)
                end = int(self._ends[start:stop].max())
                visible = self._visible(start, stop, end)
                out[start:stop] = _attend(query[start:stop] * spec.scale, keys[:, :end], values[:, :end], visible)
        return out.flatten(1)

    def linear_add(self, x: Tensor, weight: Weight, residual: Tensor) -> Tensor:
        return residual + functional.linear(x, self._parameters.matrix(weight))

    def norm_gated(
        self, x: Tensor, norm: Float32Array, eps: float, gate: Weight, up: Weight, act: Activation
    ) -> Tensor:
        normed = self._rms_norm(x, norm, eps)
        gated = _ACTIVATIONS[act](functional.linear(normed, self._parameters.matrix(gate)))
        return gated * functional.linear(normed, self._parameters.matrix(up))

    def logits(self, x: Tensor, norm: Float32Array, eps: float, head: Weight) -> Tensor:
        return functional.linear(self._rms_norm(x[self._logit_rows], norm, eps), self._parameters.matrix(head))

    def _tensor(self, indices: np.ndarray) -> Tensor:
        return torch.from_numpy(indices.astype(np.int64)).to(self._device)

    def _rms_norm(self, x: Tensor, norm: Float32Array, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * norm (Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4)."""
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
        return x * scale * self._parameters.norm(norm)

    def _rotate(self, heads: Tensor, spec: AttentionSpec) -> Tensor:
        """RoPE on [M, heads, D]: each pair turns by position * inv_freq (Su et al. 2021, arXiv 2104.09864, eq. 34)."""
        if spec not in self._rotations:
            angles = self._positions[:, None] * np.asarray(spec.inv_freq)  # [M, D / 2] float64
            cos, sin = (torch.from_numpy(f(angles).astype(np.float32)).to(self._device) for f in (np.cos, np.sin))
            self._rotations[spec] = cos[:, None], sin[:, None]
        cos, sin = self._rotations[spec]
        if spec.rope_style == "interleaved":
            first, second = heads[..., 0::2], heads[..., 1::2]
            turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
            return turned.flatten(-2)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)

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

    def _visible(self, start: int, stop: int, end: int) -> Tensor:
        """Which of the slots [0, end) the rows [start, stop) see: [B, end] bool."""
        slots = torch.arange(end, device=self._device)
        visible = slots < self._visible_len[start:stop, None]
        if self._tail_bits is None:
            return visible
        bit = slots - self._tail_base[start:stop, None]
        is_tail = (bit >= 0) & (bit < MAX_DRAFT_NODES)
        ancestors = self._tail_bits[start:stop].gather(1, bit.clamp(0, MAX_DRAFT_NODES - 1))
        return visible | (is_tail & ancestors)


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
