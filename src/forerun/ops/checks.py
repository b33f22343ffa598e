"""What every pass promises about its batch, checked on the arrays alone. Knows no backend and no model."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forerun.batch import Batch
from forerun.errors import EngineFault
from forerun.ops.base import ExecutorConfig
from forerun.types import MAX_DRAFT_NODES, PAGE_TOKENS

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]


def tail_bits(batch: Batch) -> BoolArray:
    """The ancestor words spread out: [M, 64], column i stands for the slot tail_base + i."""
    shifts = np.arange(MAX_DRAFT_NODES, dtype=np.uint64)
    return ((batch.tail_mask[:, None] >> shifts) & np.uint64(1)).astype(np.bool_)


def row_ends(batch: Batch) -> Int64Array:
    """One past the last slot that each row sees: [M]."""
    ends = batch.visible_len.astype(np.int64)
    if batch.tail_mask.any():
        last_bit = MAX_DRAFT_NODES - 1 - np.argmax(tail_bits(batch)[:, ::-1], axis=1)
        ends = np.where(batch.tail_mask != 0, batch.tail_base + last_bit + 1, ends)
    return ends


def physical_slots(batch: Batch) -> tuple[Int64Array, Int64Array]:
    """Where each row's keys and values go: page ids [M] and offsets within the page [M]."""
    page_index, offsets = np.divmod(batch.slots.astype(np.int64), PAGE_TOKENS)
    return batch.page_tables[batch.seq_ids, page_index].astype(np.int64), offsets


def check_batch(batch: Batch, config: ExecutorConfig) -> None:
    """Raises EngineFault unless the batch keeps the promises of `types.Batch` and fits the executor."""
    _check_lengths(batch, config)
    _check_range("token id", batch.token_ids, config.vocab_size)
    _check_range("sequence", batch.seq_ids, batch.page_tables.shape[0])
    if np.count_nonzero(np.diff(batch.seq_ids)) + 1 != np.unique(batch.seq_ids).size:
        raise EngineFault("the rows of one sequence are not contiguous")
    _check_range("logit row", batch.logit_rows, batch.token_ids.size)
    if (np.diff(batch.logit_rows) <= 0).any():
        raise EngineFault("logit rows are not ascending")
    _check_slots(batch, config)


def _check_lengths(batch: Batch, config: ExecutorConfig) -> None:
    rows = batch.token_ids.size
    if not 1 <= rows <= config.max_rows:
        raise EngineFault(f"a pass has {rows} rows, but must have 1 to {config.max_rows}")
    for name in ("positions", "slots", "visible_len", "tail_base", "tail_mask", "seq_ids"):
        shape = getattr(batch, name).shape
        if shape != (rows,):
            raise EngineFault(f"batch.{name} has shape {shape}, but must have ({rows},)")
    if batch.page_tables.ndim != 2:
        raise EngineFault(f"batch.page_tables has {batch.page_tables.ndim} dimensions, but must have 2")


def _check_slots(batch: Batch, config: ExecutorConfig) -> None:
    capacity = batch.page_tables.shape[1] * PAGE_TOKENS
    _check_range("slot", batch.slots, capacity)
    ends = row_ends(batch)
    _check_range("last visible slot", ends - 1, capacity)
    if ((batch.tail_mask != 0) & (batch.tail_base < batch.visible_len)).any():
        raise EngineFault("a row's tail starts before the end of its visible prefix")
    for sequence in np.unique(batch.seq_ids):
        last = max(ends[batch.seq_ids == sequence].max() - 1, batch.slots[batch.seq_ids == sequence].max())
        used = batch.page_tables[sequence, : last // PAGE_TOKENS + 1]
        _check_range(f"page of sequence {sequence}", used, config.num_pages)
    pages, offsets = physical_slots(batch)
    if np.unique(pages * PAGE_TOKENS + offsets).size != pages.size:
        raise EngineFault("two rows of a pass write the same slot")


def _check_range(name: str, values: npt.NDArray[np.integer], size: int) -> None:
    bad = (values < 0) | (values >= size)
    if bad.any():
        raise EngineFault(f"{name} {values[bad][0]} is outside 0 to {size - 1}")
