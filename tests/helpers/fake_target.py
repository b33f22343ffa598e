"""A target without weights whose logits are a function of exactly what a row may see.

Its cache holds the token and the position that were written to each slot. A row gathers what it sees through the page
table, its visible prefix and its tail mask, and hashes that list into its logits. So a wrong slot, page, position or
mask, a rejected draft's slot that is still looked at, or a tree node left in its provisional place changes the logits
of that row and of every later one. Unwritten slots hold garbage.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from forerun.batch import Batch
from forerun.types import PAGE_TOKENS, Float32Array, ForwardOutput, Int32Array

VOCAB_SIZE = 32


def fake_logits(seen: Sequence[tuple[int, int]], vocab_size: int = VOCAB_SIZE) -> Float32Array:
    """Logits [V] float32 after a list of (token id, position).

    The last token sets most of it, so that texts repeat themselves and lookup has something to find. Two of the
    logits are always equal, so that ties happen.
    """
    return _logits(tuple(seen), vocab_size).copy()


@functools.lru_cache(maxsize=20_000)
def _logits(seen: tuple[tuple[int, int], ...], vocab_size: int) -> Float32Array:
    digest = hashlib.blake2b(np.array(seen, np.int64).tobytes(), digest_size=8).digest()
    whole = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little"))).standard_normal(vocab_size)
    last = np.random.Generator(np.random.PCG64(seen[-1][0])).standard_normal(vocab_size)
    logits = (2.5 * last + 0.7 * whole).astype(np.float32)
    logits[vocab_size // 2] = logits[vocab_size // 3]
    return logits


def prefix_logits(token_ids: Sequence[int], vocab_size: int = VOCAB_SIZE) -> Float32Array:
    """What the logits after a plain prefix must be."""
    return fake_logits([(token_id, position) for position, token_id in enumerate(token_ids)], vocab_size)


class FakeTarget:
    """An executor over `fake_logits`."""

    def __init__(self, num_pages: int, vocab_size: int = VOCAB_SIZE) -> None:
        self.vocab_size = vocab_size
        self.passes: list[Batch] = []
        rng = np.random.default_rng(5)
        self._cache = rng.integers(0, 1000, (num_pages * PAGE_TOKENS, 2))

    @property
    def weight_bytes(self) -> int:
        return 0

    @property
    def kv_bytes(self) -> int:
        return self._cache.nbytes

    def forward(self, batch: Batch) -> ForwardOutput:
        self.passes.append(batch)
        for row, slot in enumerate(batch.slots):
            table = batch.page_tables[batch.seq_ids[row]]
            self._cache[_place(table, slot)] = batch.token_ids[row], batch.positions[row]
        logits = np.empty((len(batch.logit_rows), self.vocab_size), np.float32)
        for out, row in enumerate(batch.logit_rows):
            logits[out] = fake_logits(self._seen_by(batch, int(row)), self.vocab_size)
        return ForwardOutput(logits, logits.argmax(axis=1).astype(np.int32))

    def move_slots(self, page_table: Int32Array, src: Int32Array, dst: Int32Array) -> None:
        assert page_table.ndim == 1
        for s, d in zip(src, dst, strict=True):
            self._cache[_place(page_table, d)] = self._cache[_place(page_table, s)]

    def _seen_by(self, batch: Batch, row: int) -> list[tuple[int, int]]:
        table = batch.page_tables[batch.seq_ids[row]]
        slots = list(range(batch.visible_len[row]))
        mask = int(batch.tail_mask[row])
        slots += [int(batch.tail_base[row]) + bit for bit in range(64) if mask >> bit & 1]
        return [tuple(self._cache[_place(table, slot)].tolist()) for slot in slots]


def _place(page_table: Int32Array, slot: int) -> int:
    return int(page_table[slot // PAGE_TOKENS]) * PAGE_TOKENS + int(slot) % PAGE_TOKENS
