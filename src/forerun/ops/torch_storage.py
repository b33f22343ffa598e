"""What the reference backend keeps between passes: a model's weights in float32, and keys and values in pages.

Shape legend: M rows, L slots of a sequence, J KV heads, D head size, H hidden size, N output size of a linear map.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forerun.errors import EngineFault
from forerun.ops.base import Activation, AttentionSpec, ExecutorConfig, Weight
from forerun.ops.formats import dequantize
from forerun.types import PAGE_TOKENS, Float32Array

_KV_TYPES = {"f16": torch.float16, "f32": torch.float32}


class Parameters:
    """The model's weights as float32 tensors, gathered by one run of its forward pass. Is an `Ops[None]` for that run.

    A matrix is known by its name, so a tied one is held once; a norm or bias by the array itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._matrices: dict[str, tuple[Weight, Tensor]] = {}
        self._vectors: dict[int, tuple[Float32Array, Tensor]] = {}
        self._is_complete = False  # nothing may be bound that isn't there
        self._read: set[str] = set()
        self._read_vectors: set[int] = set()

    def variant(self) -> Parameters:
        """The same tensors for another forward pass, which may read no others."""
        other = Parameters(self._device)
        other._matrices, other._vectors, other._is_complete = self._matrices, self._vectors, True
        return other

    def matrix(self, weight: Weight) -> Tensor:
        """[N, K] float32."""
        bound = self._matrices.get(weight.name)
        if bound is None:
            raise EngineFault(f"weight {weight.name} was not there when the model was bound")
        return bound[1]

    def vector(self, values: Float32Array) -> Tensor:
        """A norm or a bias: [K] float32."""
        bound = self._vectors.get(id(values))
        if bound is None:
            raise EngineFault("a norm or bias array was not there when the model was bound")
        return bound[1]

    @property
    def read_bytes(self) -> int:
        """Bytes of all but the matrices that are only looked up."""
        matrices = (self._matrices[name][1] for name in self._read)
        vectors = (self._vectors[key][1] for key in self._read_vectors)
        return sum(tensor.nbytes for tensor in (*matrices, *vectors))

    def embed(self, table: Weight, scale: float = 1.0) -> None:
        """See `Ops.embed`."""
        self._bind(table)

    def norm_linear(
        self,
        x: None,
        norm: Float32Array | None,
        eps: float,
        weights: tuple[Weight, ...],
        bias: Float32Array | None = None,
    ) -> None:
        """See `Ops.norm_linear`."""
        self._bind_vectors(norm, bias)
        self._bind_linear(*weights)

    def attention(
        self,
        qkv: None,
        layer: int,
        spec: AttentionSpec,
        q_norm: Float32Array | None = None,
        k_norm: Float32Array | None = None,
        eps: float = 0.0,
    ) -> None:
        """See `Ops.attention`.

        Raises:
            EngineFault: a norm is neither for one head nor for all.
        """
        for norm, heads in ((q_norm, spec.num_heads), (k_norm, spec.num_kv_heads)):
            if norm is not None and norm.size not in (spec.head_dim, heads * spec.head_dim):
                raise EngineFault(
                    f"a norm of {norm.size} numbers fits neither one head of {spec.head_dim} nor all {heads}"
                )
        self._bind_vectors(q_norm, k_norm)

    def linear_add(self, x: None, weight: Weight, residual: None, bias: Float32Array | None = None) -> None:
        """See `Ops.linear_add`."""
        self._bind_vectors(bias)
        self._bind_linear(weight)

    def norm_add(self, x: None, norm: Float32Array, eps: float, residual: None) -> None:
        """See `Ops.norm_add`."""
        self._bind_vectors(norm)

    def norm_gated(
        self, x: None, norm: Float32Array | None, eps: float, gate: Weight, up: Weight, act: Activation
    ) -> None:
        """See `Ops.norm_gated`."""
        self._bind_vectors(norm)
        self._bind_linear(gate, up)

    def logits(self, x: None, norm: Float32Array, eps: float, head: Weight) -> None:
        """See `Ops.logits`."""
        self._bind_vectors(norm)
        self._bind_linear(head)

    def _bind_linear(self, *weights: Weight) -> None:
        for weight in weights:
            self._bind(weight)
            self._read.add(weight.name)

    def _bind(self, weight: Weight) -> None:
        if self._is_complete:
            self.matrix(weight)
            return
        bound = self._matrices.get(weight.name)
        if bound is None:
            self._matrices[weight.name] = (weight, self._to_tensor(dequantize(weight)))
        elif not np.may_share_memory(bound[0].data, weight.data):
            raise EngineFault(f"two different weights are named {weight.name}")

    def _bind_vectors(self, *arrays: Float32Array | None) -> None:
        for array in arrays:
            if array is None:
                continue
            if self._is_complete:
                self.vector(array)
            else:
                # The array is kept beside its tensor: its id names it only while it lives.
                self._vectors.setdefault(id(array), (array, self._to_tensor(array)))
            self._read_vectors.add(id(array))

    def _to_tensor(self, array: Float32Array) -> Tensor:
        # A view of a mapped file can't be written, which PyTorch refuses to wrap.
        owned = array if array.flags.writeable else array.copy()
        return torch.from_numpy(owned).to(self._device)


class KvStorage:
    """Keys and values of every layer: two lists of [num_pages, J, 16, D] tensors in the storage type."""

    def __init__(self, config: ExecutorConfig, device: torch.device) -> None:
        spec = config.attentions[0]
        shape = (config.num_pages, spec.num_kv_heads, PAGE_TOKENS, spec.head_dim)
        dtype = _KV_TYPES[config.kv_type]
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
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
