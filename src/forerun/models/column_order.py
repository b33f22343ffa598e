"""Matrices whose inputs are stored in an order of their own, as GPTQ's act-order leaves them, made to fit each other.

What reads one input together (q, k and v; gate and up) must read it in one order. What lies between gate, up and down
can lie in any order, so that of down becomes the order of the rows of gate and up, and costs nothing when the model
runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from forerun.ops.base import Weight
from forerun.ops.formats import dequantize, in_one_order
from forerun.types import Int32Array

_SIDE_BY_SIDE = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))


def settle_columns(tensors: Mapping[str, Weight], num_layers: int) -> dict[str, Weight]:
    """A model's tensors with orders that a backend can run.

    Args:
        tensors: by the names that `decoder.tensor_shapes` gives them.
        num_layers: of the model.
    Returns:
        The same tensors; matrices that read one input in different orders are in float32 and in the plain one.
    """
    out = dict(tensors)
    for index in range(num_layers):
        prefix = f"blk.{index}."
        for parts in _SIDE_BY_SIDE:
            names = [f"{prefix}{part}.weight" for part in parts if f"{prefix}{part}.weight" in out]
            if not in_one_order([out[name] for name in names]):
                out |= {name: _plain(out[name]) for name in names}
        down = out[f"{prefix}ffn_down.weight"]
        if down.columns is not None:
            out |= _reorder_between(out, prefix, down, down.columns)
    return out


def _plain(weight: Weight) -> Weight:
    if weight.columns is None:
        return weight
    return replace(weight, format="f32", data=dequantize(weight).reshape(-1).view(np.uint8), columns=None)


def _reorder_between(
    tensors: Mapping[str, Weight], prefix: str, down: Weight, columns: Int32Array
) -> dict[str, Weight]:
    """Gate and up with their rows in the order of down's columns, and down with its columns in the plain one."""
    gate, up = f"{prefix}ffn_gate.weight", f"{prefix}ffn_up.weight"
    if gate in tensors:
        made = {name: _with_rows(tensors[name], columns) for name in (gate, up)}
    else:  # one tensor of both
        made = {up: _with_rows(tensors[up], np.concatenate([columns, columns + np.int32(columns.size)]))}
    return made | {f"{prefix}ffn_down.weight": replace(down, columns=None)}


def _with_rows(weight: Weight, rows: Int32Array) -> Weight:
    data = weight.data.reshape(weight.shape[0], -1)[rows]
    return replace(weight, data=data.reshape(-1))
