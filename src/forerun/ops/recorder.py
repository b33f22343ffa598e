"""Records a model's forward pass as instructions and gives its values buffers. Knows no kernel and no architecture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.errors import LoadError
from forerun.ops.base import Activation, AttentionSpec, Weight
from forerun.types import Float32Array

OP_NAMES = ("embed", "linear", "attention", "linear_add", "gated", "logits", "norm_add")


@dataclass(frozen=True, slots=True)
class Value:
    """A recorded [M, width] value."""

    index: int
    width: int


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of q and k before RoPE; see `Ops.attention`."""

    q: Float32Array | None
    k: Float32Array | None
    eps: float


@dataclass(frozen=True, slots=True)
class Instr:
    """One instruction of a program.

    Attributes:
        op: one of `OP_NAMES`.
        out: the value it makes; the logits have none.
        x: the value it reads; an embedding reads none.
        residual: the value that `linear_add` and `norm_add` add to.
        weights: matrices whose outputs lie side by side; `gated` has gate and up.
        norm: RMSNorm weight applied to x before the matrices; of `norm_add` to x itself.
        eps: of the norm.
        bias: added to what the matrices give.
        act: of `gated`.
        scale: of `embed`.
        layer: of `attention`, and of the `linear` whose output it reads.
        spec: likewise.
        head_norms: of that `linear`.
    """

    op: str
    out: Value | None
    x: Value | None = None
    residual: Value | None = None
    weights: tuple[Weight, ...] = ()
    norm: Float32Array | None = None
    eps: float = 0.0
    bias: Float32Array | None = None
    act: Activation = "silu"
    scale: float = 1.0
    layer: int = -1
    spec: AttentionSpec | None = None
    head_norms: HeadNorms | None = None


class Recorder:
    """Implements `ops.base.Ops` by appending instructions; a value is a number."""

    def __init__(self) -> None:
        self.instrs: list[Instr] = []
        self.num_values = 0

    def _append(self, width: int, op: str, **fields: Any) -> Value:
        """Appends an instruction that makes a new value."""
        out = Value(self.num_values, width)
        self.num_values += 1
        self.instrs.append(Instr(op, out, **fields))
        return out

    def embed(self, table: Weight, scale: float = 1.0) -> Value:
        """See `Ops.embed`."""
        return self._append(table.shape[1], "embed", weights=(table,), scale=scale)

    def norm_linear(
        self,
        x: Value,
        norm: Float32Array | None,
        eps: float,
        weights: tuple[Weight, ...],
        bias: Float32Array | None = None,
    ) -> Value:
        """See `Ops.norm_linear`."""
        width = sum(weight.shape[0] for weight in weights)
        return self._append(width, "linear", x=x, weights=weights, norm=norm, eps=eps, bias=bias)

    def attention(
        self,
        qkv: Value,
        layer: int,
        spec: AttentionSpec,
        q_norm: Float32Array | None = None,
        k_norm: Float32Array | None = None,
        eps: float = 0.0,
    ) -> Value:
        """See `Ops.attention`. The map that made `qkv` learns of it: its threads rotate and store what they make."""
        for i, instr in enumerate(self.instrs):
            if instr.out is qkv:
                if instr.op != "linear" or len(instr.weights) != 3 or instr.layer >= 0:
                    raise LoadError("attention must read one linear map of q, k and v")
                norms = HeadNorms(q_norm, k_norm, eps)
                self.instrs[i] = replace(instr, layer=layer, spec=spec, head_norms=norms)
        return self._append(spec.num_heads * spec.head_dim, "attention", x=qkv, layer=layer, spec=spec)

    def linear_add(self, x: Value, weight: Weight, residual: Value, bias: Float32Array | None = None) -> Value:
        """See `Ops.linear_add`."""
        return self._append(weight.shape[0], "linear_add", x=x, residual=residual, weights=(weight,), bias=bias)

    def norm_add(self, x: Value, norm: Float32Array, eps: float, residual: Value) -> Value:
        """See `Ops.norm_add`."""
        return self._append(x.width, "norm_add", x=x, residual=residual, norm=norm, eps=eps)

    def norm_gated(
        self, x: Value, norm: Float32Array | None, eps: float, gate: Weight, up: Weight, act: Activation
    ) -> Value:
        """See `Ops.norm_gated`."""
        return self._append(gate.shape[0], "gated", x=x, weights=(gate, up), norm=norm, eps=eps, act=act)

    def logits(self, x: Value, norm: Float32Array, eps: float, head: Weight) -> Value:
        """See `Ops.logits`; the logits live outside the buffers."""
        self.instrs.append(Instr("logits", None, x, weights=(head,), norm=norm, eps=eps))
        return Value(-1, head.shape[0])


def assign_buffers(instrs: Sequence[Instr]) -> tuple[list[int], dict[int, int]]:
    """Gives each value a buffer, using a buffer again once its value is dead.

    A `linear_add` or `norm_add` may write over its residual, element by element; nothing writes over what it reads
    as x.

    Returns:
        The width of each buffer, and the buffer of each value by its index.
    """
    last_use: dict[int, int] = {}
    for i, instr in enumerate(instrs):
        for value in (instr.x, instr.residual):
            if value is not None:
                last_use[value.index] = i
    widths: list[int] = []
    buffer_of: dict[int, int] = {}
    free: dict[int, list[int]] = defaultdict(list)
    for i, instr in enumerate(instrs):
        dying = {v.index: v for v in (instr.x, instr.residual) if v is not None and last_use[v.index] == i}
        residual = instr.residual
        if instr.out is not None:
            if residual is not None and residual.index in dying and residual is not instr.x:
                buffer_of[instr.out.index] = buffer_of[residual.index]
                del dying[residual.index]
            elif free[instr.out.width]:
                buffer_of[instr.out.index] = free[instr.out.width].pop()
            else:
                buffer_of[instr.out.index] = len(widths)
                widths.append(instr.out.width)
        for index, value in dying.items():
            free[value.width].append(buffer_of[index])
    return widths, buffer_of
