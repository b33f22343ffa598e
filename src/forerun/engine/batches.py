"""The rows of a target pass over one sequence: a piece of its prompt, or its last token with a draft.

prompt piece     token i sits in slot i, has position i and sees the slots [0, i + 1)
last token       the same, with i = committed_len - 1
chain node d     the same, with i = committed_len - 1 + d
tree node        slot committed_len + node, position committed_len - 1 + depth, sees [0, committed_len)
                 and the slots of its ancestors and itself, one bit each
"""

from __future__ import annotations

import numpy as np

from forerun.engine.sequence import Sequence
from forerun.types import MAX_DRAFT_NODES, Batch, Draft

_ROWS = np.arange(MAX_DRAFT_NODES + 1, dtype=np.int32)
_NO_ROWS = np.zeros(0, np.int32)


def prompt_batch(sequence: Sequence, end: int) -> Batch:
    """Rows of the prompt tokens [cached_len, end); logits are wanted after the prompt's last token only."""
    start = sequence.cached_len
    token_ids = np.array(sequence.token_ids[start:end], np.int32)
    is_last = end == sequence.committed_len
    logit_rows = np.array([end - start - 1], np.int32) if is_last else _NO_ROWS
    return Batch.chain(token_ids, start, sequence.page_table, logit_rows)


def decode_batch(sequence: Sequence, draft: Draft) -> Batch:
    """Rows of the last token and of the draft's nodes, in that order; logits are wanted after each of them."""
    root = sequence.committed_len - 1
    num_rows = 1 + draft.num_nodes
    token_ids = np.array((sequence.token_ids[-1], *draft.token_ids), np.int32)
    batch = Batch.chain(token_ids, root, sequence.page_table, _ROWS[:num_rows])
    return batch if draft.is_chain else _with_tree(batch, draft, root)


def _with_tree(batch: Batch, draft: Draft, root: int) -> Batch:
    positions, masks = [root], [0]
    for node, parent in enumerate(draft.parents):
        positions.append(positions[1 + parent] + 1)
        masks.append(masks[1 + parent] | 1 << node)
    visible_len = np.full(len(positions), root + 1, np.int32)
    return Batch(
        token_ids=batch.token_ids,
        positions=np.array(positions, np.int32),
        slots=batch.slots,
        visible_len=visible_len,
        tail_base=visible_len,
        tail_mask=np.array(masks, np.uint64),
        seq_ids=batch.seq_ids,
        page_tables=batch.page_tables,
        logit_rows=batch.logit_rows,
    )
