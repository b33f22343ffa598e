"""Which sequence owns which page of the KV cache.

Plain bookkeeping over page ids: nothing here knows a tensor, a layer or a byte. A page holds the keys and values of
`PAGE_TOKENS` consecutive slots of one sequence, in every layer; a sequence's page table lists its pages in slot order.

Each page is in exactly one place at a time:

    free list  --extend-->  one sequence's page table  --free-->  free list
"""

from __future__ import annotations

from forerun.errors import ConfigError, EngineFault, RequestError
from forerun.types import PAGE_TOKENS


def num_pages_for(num_slots: int) -> int:
    """Pages that hold so many slots.

    >>> num_pages_for(0), num_pages_for(16), num_pages_for(17)
    (0, 1, 2)
    """
    return -(-num_slots // PAGE_TOKENS)


class PageManager:
    """Hands out page ids [0, num_pages) to sequences and takes them back.

    Raises:
        ConfigError: num_pages is less than 1.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ConfigError(f"the KV cache has {num_pages} pages, but must have at least 1")
        self.num_pages = num_pages
        # A stack with the lowest id on top: freshly started engines fill the cache from its beginning.
        self._free = list(range(num_pages - 1, -1, -1))
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def open(self, sequence_id: int) -> None:
        """Starts a sequence with an empty page table.

        Raises:
            EngineFault: the sequence is open already.
        """
        if sequence_id in self._tables:
            raise EngineFault(f"sequence {sequence_id} has pages already")
        self._tables[sequence_id] = []

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
        if missing > len(self._free):
            raise RequestError(
                f"{num_slots} tokens need {missing} more pages of the KV cache, but {len(self._free)} "
                f"of its {self.num_pages} pages are free"
            )
        added = [self._free.pop() for _ in range(missing)]
        table.extend(added)
        return added

    def page_table(self, sequence_id: int) -> tuple[int, ...]:
        """A sequence's pages in slot order.

        Raises:
            EngineFault: the sequence is not open.
        """
        return tuple(self._table(sequence_id))

    def free(self, sequence_id: int) -> None:
        """Ends a sequence and takes its pages back.

        Raises:
            EngineFault: the sequence is not open, so its pages would be freed twice.
        """
        table = self._table(sequence_id)
        del self._tables[sequence_id]
        self._free.extend(reversed(table))

    def check_integrity(self) -> None:
        """Raises EngineFault unless every page is in exactly one place: the free list or one table."""
        seen = [0] * self.num_pages
        for place in (self._free, *self._tables.values()):
            for page in place:
                if not 0 <= page < self.num_pages:
                    raise EngineFault(f"page {page} is outside the cache's {self.num_pages} pages")
                seen[page] += 1
        for page, count in enumerate(seen):
            if count != 1:
                raise EngineFault(f"page {page} is in {count} places, but must be in exactly one")

    def _table(self, sequence_id: int) -> list[int]:
        try:
            return self._tables[sequence_id]
        except KeyError:
            raise EngineFault(f"sequence {sequence_id} has no pages: it was never opened or is freed") from None
