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
from forerun.types import Batch, Draft, DraftBatch

_NO_ROWS = np.zeros(0, np.int32)


def prompt_batch(sequence: Sequence, end: int) -> Batch:
    """Rows of the prompt tokens [cached_len, end); logits are wanted after the prompt's last token only."""
    start = sequence.cached_len
    token_ids = np.array(sequence.token_ids[start:end], np.int32)
    is_last = end == sequence.committed_len
    logit_rows = np.array([end - start - 1], np.int32) if is_last else _NO_ROWS
    return Batch.chain(token_ids, start, sequence.page_table, logit_rows)


def decode_batch(sequence: Sequence, draft: Draft) -> DraftBatch:
    """Rows of the last token and of the draft's nodes, in that order; logits are wanted after each of them."""
    return DraftBatch(
        last_id=sequence.token_ids[-1],
        node_ids=draft.token_ids,
        parents=draft.parents,
        root=sequence.committed_len - 1,
        page_table=sequence.page_table,
    )
