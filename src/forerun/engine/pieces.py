"""The rows that a sequence brings into a pass."""

from __future__ import annotations

from forerun.batch import DraftPiece, PromptPiece
from forerun.engine.sequence import Sequence
from forerun.types import Draft


def prompt_piece(sequence: Sequence, end: int, num_logits: int) -> PromptPiece:
    """The tokens [cached_len, end); logits are wanted after so many of the last of them."""
    start = sequence.cached_len
    return PromptPiece(sequence.token_ids[start:end], start, sequence.page_table, num_logits)


def draft_piece(sequence: Sequence, draft: Draft) -> DraftPiece:
    """The last token and the draft's nodes."""
    root = sequence.committed_len - 1
    return DraftPiece(sequence.token_ids[root], draft.token_ids, draft.parents, root, sequence.page_table)
