"""The rows of one pass of a model: pieces of prompts, and last tokens with drafts behind them.

    prompt piece     token i sits in slot i, has position i and sees the slots [0, i + 1)
    last token       the same, with i = root
    chain node d     the same, with i = root + 1 + d
    tree node        slot root + 1 + node, position root + depth, sees [0, root + 1) and the slots of its ancestors and
                     itself, one bit each

Shape legend: M rows of a pass, R rows whose logits are wanted, S sequences of a pass, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from forerun.types import CHAIN_PARENTS, MAX_DRAFT_NODES, Int32Array, UInt64Array


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one target pass. Set by the engine, read by `ops`.

    A row sees the slots [0, visible_len) of its sequence, then the slots tail_base + i for each set bit i of tail_mask.
    A prompt row or a chain node needs no mask: its visible_len is its own slot + 1.

    Attributes:
        token_ids: [M] int32.
        positions: [M] int32, RoPE positions.
        slots: [M] int32, where the row's keys and values are written, counted within its sequence.
        visible_len: [M] int32.
        tail_base: [M] int32.
        tail_mask: [M] uint64; holds the row's own bit when it is not 0.
        seq_ids: [M] int32, rows of page_tables; rows of one sequence are contiguous.
        page_tables: [S, P] int32 page ids.
        logit_rows: [R] int32, the rows whose logits are wanted, ascending.
    """

    token_ids: Int32Array
    positions: Int32Array
    slots: Int32Array
    visible_len: Int32Array
    tail_base: Int32Array
    tail_mask: UInt64Array
    seq_ids: Int32Array
    page_tables: Int32Array
    logit_rows: Int32Array

    @staticmethod
    def chain(token_ids: Int32Array, start: int, page_table: Int32Array, logit_rows: Int32Array) -> Batch:
        """Rows of one sequence in the slots from start on, each of which sees everything up to itself.

        Args:
            token_ids: [M] int32.
            start: slot and position of the first row.
            page_table: [P] int32, of the sequence.
            logit_rows: [R] int32.
        """
        num_rows = len(token_ids)
        slots, visible_len = _slots(start, start + num_rows), _slots(start + 1, start + num_rows + 1)
        return Batch(
            token_ids=token_ids,
            positions=slots,
            slots=slots,
            visible_len=visible_len,
            tail_base=visible_len,
            tail_mask=_NO_TAIL[:num_rows] if num_rows <= len(_NO_TAIL) else np.zeros(num_rows, np.uint64),
            seq_ids=_SEQUENCE_0[:num_rows] if num_rows <= len(_SEQUENCE_0) else np.zeros(num_rows, np.int32),
            page_tables=page_table.reshape(1, -1),
            logit_rows=logit_rows,
        )


class PromptPiece(NamedTuple):
    """Consecutive tokens of a sequence.

    Attributes:
        token_ids: the tokens, at least one.
        start: slot and position of the first.
        page_table: [P] int32, of the sequence.
        num_logits: after so many of its last tokens logits are wanted.
    """

    token_ids: Sequence[int]
    start: int
    page_table: Int32Array
    num_logits: int

    @property
    def num_rows(self) -> int:
        """Rows of the piece."""
        return len(self.token_ids)

    def spelled_out(self) -> Batch:
        """As a batch of its own."""
        n = len(self.token_ids)
        logit_rows = np.arange(n - self.num_logits, n, dtype=np.int32)
        return Batch.chain(np.array(self.token_ids, np.int32), self.start, self.page_table, logit_rows)


class DraftPiece(NamedTuple):
    """A sequence's last token and the nodes of a draft, in that order; logits are wanted after each of them.

    Attributes:
        last_id: the last token.
        node_ids: of the draft's nodes.
        parents: as in `types.Draft`.
        root: the last token's slot and position.
        page_table: [P] int32, of the sequence.
    """

    last_id: int
    node_ids: tuple[int, ...]
    parents: tuple[int, ...]
    root: int
    page_table: Int32Array

    @property
    def num_rows(self) -> int:
        """Rows of the piece."""
        return 1 + len(self.node_ids)

    @property
    def num_logits(self) -> int:
        """Rows whose logits are wanted: all of them."""
        return 1 + len(self.node_ids)

    def spelled_out(self) -> Batch:
        """As a batch of its own."""
        token_ids = np.array((self.last_id, *self.node_ids), np.int32)
        num_rows = len(token_ids)
        chain = Batch.chain(token_ids, self.root, self.page_table, np.arange(num_rows, dtype=np.int32))
        if self.parents == CHAIN_PARENTS[: num_rows - 1]:
            return chain
        positions, masks = [self.root], [0]
        for node, parent in enumerate(self.parents):
            positions.append(positions[1 + parent] + 1)
            masks.append(masks[1 + parent] | 1 << node)
        visible_len = np.full(num_rows, self.root + 1, np.int32)
        return Batch(
            token_ids=token_ids,
            positions=np.array(positions, np.int32),
            slots=chain.slots,
            visible_len=visible_len,
            tail_base=visible_len,
            tail_mask=np.array(masks, np.uint64),
            seq_ids=chain.seq_ids,
            page_tables=chain.page_tables,
            logit_rows=chain.logit_rows,
        )


Piece = PromptPiece | DraftPiece


class StepBatch(Batch):
    """The rows of several sequences, one piece of each, with arrays for those alone who ask for them.

    A step makes one right after a pass that has left nothing else in the processor's caches, where each small array
    takes far longer than its arithmetic. The native backend fills them in where it reads them.

    Args:
        pieces: of different sequences.
    """

    __slots__ = ("pieces",)
    pieces: tuple[Piece, ...]

    def __init__(self, *pieces: Piece) -> None:
        object.__setattr__(self, "pieces", pieces)

    def __getattr__(self, name: str) -> Any:
        # Only for what isn't set: the first array that anybody asks for.
        if name not in Batch.__slots__:
            raise AttributeError(f"a batch has no {name}")
        joined = _joined([piece.spelled_out() for piece in self.pieces])
        for field_name in Batch.__slots__:
            object.__setattr__(self, field_name, getattr(joined, field_name))
        return getattr(joined, name)


def _joined(batches: Sequence[Batch]) -> Batch:
    """Batches of one sequence each as one."""
    if len(batches) == 1:
        return batches[0]
    num_rows = [len(batch.token_ids) for batch in batches]
    first_rows = np.cumsum([0, *num_rows[:-1]]).astype(np.int32)
    tables = np.zeros((len(batches), max(batch.page_tables.shape[1] for batch in batches)), np.int32)
    for i, batch in enumerate(batches):
        tables[i, : batch.page_tables.shape[1]] = batch.page_tables[0]
    return Batch(
        token_ids=np.concatenate([batch.token_ids for batch in batches]),
        positions=np.concatenate([batch.positions for batch in batches]),
        slots=np.concatenate([batch.slots for batch in batches]),
        visible_len=np.concatenate([batch.visible_len for batch in batches]),
        tail_base=np.concatenate([batch.tail_base for batch in batches]),
        tail_mask=np.concatenate([batch.tail_mask for batch in batches]),
        seq_ids=np.repeat(np.arange(len(batches), dtype=np.int32), num_rows),
        page_tables=tables,
        logit_rows=np.concatenate(
            [first + batch.logit_rows for first, batch in zip(first_rows, batches, strict=True)], dtype=np.int32
        ),
    )


def _slots(start: int, end: int) -> Int32Array:
    """[start, end) as an array, for most texts a part of one that is there: steps are many, and each needs a few."""
    return _SLOTS[start:end] if end <= len(_SLOTS) else np.arange(start, end, dtype=np.int32)


def _constant(array: Any) -> Any:
    array.flags.writeable = False
    return array


_SLOTS: Int32Array = _constant(np.arange(1 << 15, dtype=np.int32))
_NO_TAIL: UInt64Array = _constant(np.zeros(MAX_DRAFT_NODES + 1, np.uint64))
_SEQUENCE_0: Int32Array = _constant(np.zeros(MAX_DRAFT_NODES + 1, np.int32))
