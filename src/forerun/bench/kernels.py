"""`forerun bench kernels`: what one matrix product costs for 1 to 16 rows, per shape and format of a model.

All matrices of one shape and format run one after another in one pass, as the layers of a model do, so they come from
memory unless the whole group fits a cache. The cost of an empty pass is taken off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from forerun.bench.rows import run_batch
from forerun.bench.timing import median_seconds
from forerun.models.loader import LoadedModel
from forerun.ops import create_executor
from forerun.ops.base import Executor, ExecutorConfig, Ops, Weight
from forerun.types import PAGE_TOKENS

_EPS = 1e-5
_NUM_IDS = 16  # rows of the little embedding that feeds the matrices; one tile of any backend


@dataclass(frozen=True, slots=True)
class MatrixGroup:
    """The matrices of a model that share shape and format.

    Attributes:
        name: their roles, `attn_k/attn_v` for instance.
        weights: all of them, in file order.
    """

    name: str
    weights: tuple[Weight, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of one matrix as the file holds it."""
        return int(self.weights[0].data.nbytes)


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """Seconds of one matrix product by number of rows."""

    group: MatrixGroup
    seconds: dict[int, float]

    def bytes_per_s(self, rows: int) -> float:
        """The rate at which the matrix was read, so fast as it was."""
        return self.group.num_bytes / self.seconds[rows]

    def to_json(self) -> dict[str, Any]:
        """Plain values for a report."""
        weight = self.group.weights[0]
        return {
            "name": self.group.name,
            "shape": list(weight.shape),
            "format": weight.format,
            "count": len(self.group.weights),
            "bytes": self.group.num_bytes,
            "seconds": {str(rows): seconds for rows, seconds in self.seconds.items()},
        }


def matrix_groups(model: LoadedModel) -> list[MatrixGroup]:
    """The model's matrices by shape and format, in file order."""
    groups: dict[tuple[tuple[int, int], str], list[Weight]] = {}
    for weight in model.weights.matrices():
        groups.setdefault((weight.shape, weight.format), []).append(weight)
    return [MatrixGroup(_roles(weights), tuple(weights)) for weights in groups.values()]


def _roles(weights: list[Weight]) -> str:
    """`blk.3.attn_q.weight` plays the role attn_q, `token_embd.weight` token_embd; each role once."""
    return "/".join(dict.fromkeys(weight.name.removesuffix(".weight").split(".")[-1] for weight in weights))


def time_group(
    group: MatrixGroup, model: LoadedModel, num_rows: tuple[int, ...], repeats: int, num_threads: int
) -> KernelTiming:
    """Times a group's product for each number of rows on the native backend."""
    full = _executor(group.weights, model, max(num_rows), num_threads)
    empty = _executor((), model, max(num_rows), num_threads, row_len=group.weights[0].shape[1])
    arms: dict[tuple[str, int], Callable[[], object]] = {}
    for rows in num_rows:
        batch = run_batch(np.arange(rows, dtype=np.int32) % np.int32(_NUM_IDS), 0, 1, PAGE_TOKENS)
        arms["full", rows] = partial(full.forward, batch)
        arms["empty", rows] = partial(empty.forward, batch)
    seconds = median_seconds(arms, repeats)
    count = len(group.weights)
    # Never below a nanosecond: a product too small to see must not divide by zero or less.
    return KernelTiming(
        group, {rows: max((seconds["full", rows] - seconds["empty", rows]) / count, 1e-9) for rows in num_rows}
    )


def _executor(
    weights: tuple[Weight, ...], model: LoadedModel, max_rows: int, num_threads: int, row_len: int | None = None
) -> Executor:
    """An executor that embeds, multiplies by each weight and throws the product away, and gives a few logits."""
    row_len = row_len or weights[0].shape[1]
    rng = np.random.default_rng(0)
    values = rng.standard_normal((_NUM_IDS, row_len)).astype(np.float32)
    table = Weight("bench.table", "f32", values.shape, values.reshape(-1).view(np.uint8))
    norm = np.ones(row_len, np.float32)

    def build(ops: Ops[Any]) -> Any:
        x = ops.embed(table)
        for weight in weights:
            ops.norm_linear(x, norm, _EPS, (weight,))
        return ops.logits(x, norm, _EPS, table)

    config = ExecutorConfig(
        vocab_size=_NUM_IDS,
        hidden_size=row_len,
        num_layers=1,
        attentions=model.attentions[:1],
        max_rows=max_rows,
        num_pages=1,
        kv_type="f16",
        num_threads=num_threads,
    )
    return create_executor("native", config, build)
