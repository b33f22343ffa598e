"""Which sequence owns which page of the KV cache, and which pages are kept for texts that begin alike.

Plain bookkeeping over page ids: nothing here knows a tensor, a layer or a byte. A page holds the keys and values of
`PAGE_TOKENS` consecutive slots, in every layer; a sequence's page table lists its pages in slot order.

Each page is in one state at a time:

    free  --extend-->  in one page table  --publish-->  published: in one or several page tables
      ^                        |                            |        ^
      +---------free-----------+                     free   v        |   open with the same prefix
      +---------evicted when no page is free-------------  idle  ----+

What a page holds depends on all tokens up to its end, so a published page is known by a digest of that whole prefix.
Only full pages are published, and nobody writes into a full page again: a sequence writes behind what it has in the
cache. So pages are shared without being copied. Of idle pages the least recently used is evicted first, and of one text
the last page before the one in front of it, without which it could not be found.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from forerun.errors import ConfigError, EngineFault, RequestError
from forerun.types import PAGE_TOKENS


def num_pages_for(num_slots: int) -> int:
    """Pages that hold so many slots.

    >>> num_pages_for(0), num_pages_for(16), num_pages_for(17)
    (0, 1, 2)
    """
    return -(-num_slots // PAGE_TOKENS)


class PrefixDigests:
    """The digests of a text's prefixes, one per full page; each names all tokens up to the page's end.

    Args:
        salt: texts of different salts have different digests, so that they share nothing.
    """

    def __init__(self, salt: str = "") -> None:
        self._digests: list[bytes] = []
        self._last = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest() if salt else b""

    def of(self, token_ids: Sequence[int], num_tokens: int) -> Sequence[bytes]:
        """Those of the full pages of the first tokens of the text, of the shortest prefix first.

        Args:
            token_ids: the text, which begins as it did in earlier calls.
            num_tokens: how many of them.
        """
        num_pages = num_tokens // PAGE_TOKENS
        while len(self._digests) < num_pages:
            start = len(self._digests) * PAGE_TOKENS
            page_ids = np.array(token_ids[start : start + PAGE_TOKENS], "<i4").tobytes()
            self._last = hashlib.blake2b(self._last + page_ids, digest_size=16).digest()
            self._digests.append(self._last)
        return self._digests[:num_pages]


class PageManager:
    """Hands out page ids [0, num_pages) to sequences and takes them back.

    Args:
        num_pages: how many there are.
        keeps_prefixes: whether pages are published at all.

    Raises:
        ConfigError: num_pages is less than 1.
    """

    def __init__(self, num_pages: int, *, keeps_prefixes: bool = True) -> None:
        if num_pages < 1:
            raise ConfigError(f"the KV cache has {num_pages} pages, but must have at least 1")
        self.num_pages = num_pages
        self._keeps_prefixes = keeps_prefixes
        # A stack with the lowest id on top: freshly started engines fill the cache from its beginning.
        self._free = list(range(num_pages - 1, -1, -1))
        self._tables: dict[int, list[int]] = {}
        self._num_users = [0] * num_pages  # page tables that a page is in
        self._page_of: dict[bytes, int] = {}  # the published pages by their prefix
        self._prefix_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # published pages without users, the first to go in front

    @property
    def num_free(self) -> int:
        """Pages that a sequence may get, those that are kept without being in use among them."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages in the tables of open sequences."""
        return self.num_pages - self.num_free

    @property
    def num_kept(self) -> int:
        """Pages that are not in use and kept for texts that begin alike."""
        return len(self._idle)

    def num_known(self, digests: Sequence[bytes]) -> int:
        """How many pages of a text's beginning are published.

        Args:
            digests: of its full pages, the shortest prefix first.
        """
        for i, digest in enumerate(digests):
            if digest not in self._page_of:
                return i
        return len(digests)

    def open(self, sequence_id: int, digests: Sequence[bytes] = ()) -> int:
        """Starts a sequence with the pages of what is known of its beginning.

        Args:
            sequence_id: a name that no open sequence has.
            digests: of the full pages that it may have, the shortest prefix first; none starts with an empty table.

        Returns:
            Slots that its pages hold already, a multiple of `PAGE_TOKENS`.

        Raises:
            EngineFault: the sequence is open already.
        """
        if sequence_id in self._tables:
            raise EngineFault(f"sequence {sequence_id} has pages already")
        table = self._tables[sequence_id] = []
        for digest in digests[: self.num_known(digests)]:
            page = self._page_of[digest]
            self._idle.pop(page, None)
            self._num_users[page] += 1
            table.append(page)
        return len(table) * PAGE_TOKENS

    def extend(self, sequence_id: int, num_slots: int) -> list[int]:
        """Grows a sequence's table until it holds `num_slots` slots; a table that holds them is left as it is.

        Returns:
            The pages that were added, in slot order.

        Raises:
            RequestError: too few pages are free; the table is then unchanged.
            EngineFault: the sequence is not open.
        """
        table = self._table(sequence_id)
        missing = num_pages_for(num_slots) - len(table)
        if missing <= 0:
            return []
        if missing > self.num_free:
            raise RequestError(
                f"{num_slots} tokens need {missing} more pages of the KV cache, but {self.num_free} "
                f"of its {self.num_pages} pages are free"
            )
        added = [self._take() for _ in range(missing)]
        table.extend(added)
        return added

    def publish(self, sequence_id: int, digests: Sequence[bytes]) -> None:
        """Lets sequences that begin alike use a sequence's full pages.

        Args:
            sequence_id: of an open sequence.
            digests: of the pages that the cache holds in full, the shortest prefix first.

        Raises:
            EngineFault: the sequence is not open.
        """
        table = self._table(sequence_id)
        if not self._keeps_prefixes:
            return
        for page, digest in zip(table, digests, strict=False):
            if digest not in self._page_of and page not in self._prefix_of:
                self._page_of[digest] = page
                self._prefix_of[page] = digest

    def page_table(self, sequence_id: int) -> tuple[int, ...]:
        """A sequence's pages in slot order.

        Raises:
            EngineFault: the sequence is not open.
        """
        return tuple(self._table(sequence_id))

    def free(self, sequence_id: int) -> None:
        """Ends a sequence and takes its pages back; published ones are kept as long as they are not needed.

        Raises:
            EngineFault: the sequence is not open, so its pages would be freed twice.
        """
        table = self._table(sequence_id)
        del self._tables[sequence_id]
        for page in reversed(table):
            self._num_users[page] -= 1
            if self._num_users[page]:
                continue
            if page in self._prefix_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def forget(self) -> None:
        """Publishes nothing any more of what was published."""
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self._page_of.clear()
        self._prefix_of.clear()

    def check_integrity(self) -> None:
        """Raises EngineFault unless every page is where it should be, and nowhere else."""
        num_tables = [0] * self.num_pages
        num_places = [0] * self.num_pages
        for place in (self._free, self._idle):
            for page in place:
                self._check_page(page)
                num_places[page] += 1
        for table in self._tables.values():
            for page in table:
                self._check_page(page)
                num_tables[page] += 1
            if len(set(table)) != len(table):
                raise EngineFault("a page table lists a page twice")
        for page, count in enumerate(num_tables):
            num_places[page] += min(count, 1)
            if num_places[page] != 1:
                raise EngineFault(f"page {page} is in {num_places[page]} places, but must be in exactly one")
            if count != self._num_users[page]:
                raise EngineFault(f"page {page} counts {self._num_users[page]} users, but has {count}")
        if {page: digest for digest, page in self._page_of.items()} != self._prefix_of:
            raise EngineFault("pages and prefixes don't match")
        if not self._idle.keys() <= self._prefix_of.keys() or self._prefix_of.keys() & set(self._free):
            raise EngineFault("an idle page is not published, or a free one is")

    def _check_page(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise EngineFault(f"page {page} is outside the cache's {self.num_pages} pages")

    def _take(self) -> int:
        """A page for one sequence, which counts as its user."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._prefix_of.pop(page)]
        self._num_users[page] = 1
        return page

    def _table(self, sequence_id: int) -> list[int]:
        try:
            return self._tables[sequence_id]
        except KeyError:
            raise EngineFault(f"sequence {sequence_id} has no pages: it was never opened or is freed") from None
