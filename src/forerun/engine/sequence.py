"""One request's tokens and the KV slots that belong to them. Knows pages and lengths, never logits or text."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import numpy as np

from forerun.errors import RequestError
from forerun.kv.pages import PageManager, PrefixDigests, num_pages_for
from forerun.types import PAGE_TOKENS, Int32Array


class Sequence:
    """Tokens, lengths and page table of a running request. Slot i belongs to token i.

    Regions of its slots, all half-open:

        [0, cached_len)               keys and values of committed tokens are in the cache
        [cached_len, committed_len)   committed, but no pass has seen it: the rest of the prompt, later the last token
        [committed_len, drafted_len)  provisional: a draft's nodes during one step, overwritten after it

        0 <= cached_len <= committed_len <= drafted_len <= max_len

    A rollback needs no work: what lies past committed_len is seen by nobody and written anew by the next step. Nor does
    a preemption: a sequence that has given its pages back has cached_len 0, and opens again with what is known of its
    text by then.

    Args:
        sequence_id: its name in `pages`.
        prompt_token_ids: the prompt, not empty.
        max_len: tokens of prompt and output at most; more than the prompt has.
        pages: where the slots come from, between `open` and `close`.
        salt: it shares pages with sequences of the same salt only.
        reuses_prefix: whether it may begin with pages that others have written.

    Attributes:
        token_ids: of prompt and output.
        committed_len: how many they are.
        num_reused_tokens: of the prompt, those that the cache held before it was opened first.
        is_open: whether it has pages.
    """

    def __init__(
        self,
        sequence_id: int,
        prompt_token_ids: Tokens[int],
        max_len: int,
        pages: PageManager,
        salt: str = "",
        *,
        reuses_prefix: bool = True,
    ) -> None:
        assert 0 < len(prompt_token_ids) < max_len
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_len = max_len
        self.committed_len = len(prompt_token_ids)
        self.cached_len = 0
        self.num_reused_tokens: int | None = None
        self.is_open = False
        self._sequence_id = sequence_id
        self._pages = pages
        self._digests = PrefixDigests(salt)
        self._reuses_prefix = reuses_prefix
        self._page_table = np.empty(num_pages_for(max_len), np.int32)
        self._num_pages = self._num_published = 0
        self._used_pages = self._page_table[:0]

    @property
    def digests(self) -> Tokens[bytes]:
        """Of the full pages that others may have written for it: all but the last token's."""
        return self._digests.of(self.token_ids, self.committed_len - 1) if self._reuses_prefix else ()

    def open(self) -> None:
        """Takes the pages of what is known of its text."""
        self.cached_len = self._pages.open(self._sequence_id, self.digests)
        self.is_open = True
        if self.num_reused_tokens is None:
            self.num_reused_tokens = self.cached_len
        known = self._pages.page_table(self._sequence_id)
        self._num_pages = self._num_published = len(known)
        self._page_table[: len(known)] = known
        self._used_pages = self._page_table[: len(known)]

    @property
    def num_output_tokens(self) -> int:
        """Tokens that were emitted."""
        return self.committed_len - self.num_prompt_tokens

    @property
    def remaining_len(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_len - self.committed_len

    @property
    def page_table(self) -> Int32Array:
        """[P] int32, the ids of its pages in slot order."""
        return self._used_pages

    def reserve(self, num_slots: int) -> None:
        """Makes sure that slots [0, num_slots) have pages.

        Raises:
            RequestError: the cache has too few free pages.
        """
        assert num_slots <= self.max_len
        if num_slots <= self._num_pages * PAGE_TOKENS:
            return
        for page in self._pages.extend(self._sequence_id, num_slots):
            self._page_table[self._num_pages] = page
            self._num_pages += 1
        self._used_pages = self._page_table[: self._num_pages]

    def try_reserve(self, num_slots: int) -> bool:
        """Whether slots [0, num_slots) have pages, once those that are missing have been asked for."""
        try:
            if num_slots <= self.max_len:
                self.reserve(num_slots)
        except RequestError:
            return False
        return num_slots <= self.max_len

    def mark_cached(self, cached_len: int) -> None:
        """Says that a pass has written the slots [0, cached_len)."""
        assert self.cached_len <= cached_len <= self.committed_len
        self.cached_len = cached_len

    def publish(self) -> None:
        """Lets sequences that begin alike use its full pages."""
        num_full = self.cached_len // PAGE_TOKENS
        if num_full > self._num_published:
            self._pages.publish(self._sequence_id, self._digests.of(self.token_ids, self.cached_len))
            self._num_published = num_full

    def commit(self, token_ids: Tokens[int], num_cached: int) -> None:
        """Appends emitted tokens; the first num_cached of them have their keys and values in place.

        All tokens before them are in the cache by now, so that the last one is the only one that is not.
        """
        assert self.cached_len == self.committed_len
        assert num_cached <= len(token_ids) <= self.remaining_len
        self.cached_len += num_cached
        self.committed_len += len(token_ids)
        self.token_ids.extend(token_ids)

    def close(self) -> None:
        """Gives the pages back, full ones for the use of texts that begin alike; it may be opened again."""
        self.publish()
        self._pages.free(self._sequence_id)
        self.is_open = False
        self.cached_len = self._num_pages = 0
        self._used_pages = self._page_table[:0]
