"""What a whole pass of a model costs for 1 to 16 rows at a context: the cost curve V(m) of verification."""

from __future__ import annotations

from functools import partial

import numpy as np

from forerun.bench.fidelity import text_token_ids
from forerun.bench.rows import bind, run_batch
from forerun.bench.timing import median_seconds
from forerun.errors import RequestError
from forerun.models.loader import LoadedModel
from forerun.ops.base import Executor, KvType
from forerun.types import Int32Array

_PREFILL_ROWS = 64


def step_seconds(
    model: LoadedModel, context: int, num_rows: tuple[int, ...], repeats: int, kv_type: KvType, num_threads: int
) -> dict[int, float]:
    """Median seconds of one pass by number of rows, logits of every row included.

    The rows follow a context of so many tokens, as a last token and its draft do.

    Raises:
        RequestError: context and rows exceed the model's context length.
    """
    num_slots = context + max(num_rows)
    if num_slots > model.config.context_length:
        raise RequestError(
            f"context is {context}, but with {max(num_rows)} rows it must stay within the model's "
            f"{model.config.context_length} tokens",
            "context",
        )
    tokens = np.resize(np.array(text_token_ids(model), np.int32), num_slots)
    executor = bind(model, num_slots, max(_PREFILL_ROWS, *num_rows), kv_type, num_threads)
    _prefill(executor, tokens, context)
    arms = {
        rows: partial(executor.forward, run_batch(tokens[context : context + rows], context, rows, num_slots))
        for rows in num_rows
    }
    return median_seconds(arms, repeats)


def _prefill(executor: Executor, tokens: Int32Array, context: int) -> None:
    for start in range(0, context, _PREFILL_ROWS):
        chunk = tokens[start : min(start + _PREFILL_ROWS, context)]
        executor.forward(run_batch(chunk, start, 0, len(tokens)))
