"""Passes over one sequence without a scheduler: tokens in consecutive slots, pages in order."""

from __future__ import annotations

import numpy as np

from forerun.batch import Batch
from forerun.kv.pages import num_pages_for
from forerun.models.loader import LoadedModel
from forerun.ops import create_executor
from forerun.ops.base import Executor, ExecutorConfig, KvType
from forerun.types import Int32Array


def bind(model: LoadedModel, num_slots: int, max_rows: int, kv_type: KvType, num_threads: int | None) -> Executor:
    """The model on the native backend with room for one sequence of num_slots tokens."""
    config = ExecutorConfig(
        vocab_size=model.config.vocab_size,
        hidden_size=model.config.hidden_size,
        num_layers=model.config.num_layers,
        attentions=model.attentions,
        max_rows=max_rows,
        num_pages=num_pages_for(num_slots),
        kv_type=kv_type,
        num_threads=num_threads,
    )
    return create_executor("native", config, model.forward)


def run_batch(token_ids: Int32Array, start: int, num_logit_rows: int, num_slots: int) -> Batch:
    """Rows for the tokens of slots start and on, each of which sees everything up to itself.

    Args:
        token_ids: [M] int32.
        start: slot and position of the first row.
        num_logit_rows: how many of the last rows want logits.
        num_slots: what the sequence may grow to, as given to `bind`.
    """
    rows = len(token_ids)
    page_table = np.arange(num_pages_for(num_slots), dtype=np.int32)
    return Batch.chain(token_ids, start, page_table, np.arange(rows - num_logit_rows, rows, dtype=np.int32))
