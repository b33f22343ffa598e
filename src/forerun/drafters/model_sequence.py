"""One request's tokens in a draft model: what its cache holds, and how far that may be trusted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.batch import Batch
from forerun.errors import RequestError
from forerun.kv.pages import PageManager
from forerun.models.bound import BoundModel
from forerun.types import ForwardOutput, Int32Array

_NO_ROWS: Int32Array = np.empty(0, np.int32)
_ROW_0: Int32Array = np.zeros(1, np.int32)


class ModelSequence:
    """The committed tokens of a request, and guesses behind them, in the cache of a draft model.

    Slots [0, cached_len) hold what this model computed for `token_ids`, guesses included. Tokens that turn out wrong
    are cut off; their slots are written anew.

    Args:
        model: the draft model.
        pages: of its cache.
        sequence_id: a name that no open sequence has.
        chunk: rows per pass at most when the model catches up.
    """

    def __init__(self, model: BoundModel, pages: PageManager, sequence_id: int, chunk: int) -> None:
        self._model = model
        self._pages = pages
        self._id = sequence_id
        self._chunk = chunk
        self._page_table: list[int] = []
        self.token_ids: list[int] = []
        self.cached_len = 0
        pages.open(sequence_id)

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self._model.max_len - len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens; nothing is computed."""
        self.token_ids.extend(token_ids)

    def truncate(self, num_tokens: int) -> None:
        """Forgets all tokens but the first so many, and what the cache holds of the others."""
        del self.token_ids[num_tokens:]
        self.cached_len = min(self.cached_len, num_tokens)

    def try_reserve(self) -> bool:
        """Whether all tokens have a place in the cache, which `run` needs; other requests may hold too much of it."""
        try:
            self._page_table += self._pages.extend(self._id, len(self.token_ids))
        except RequestError:
            return False
        return True

    def run(self) -> ForwardOutput:
        """Computes what the cache lacks; at least the last token is run, whose row is the only one returned.

        Raises:
            EngineFault: the pass failed.
        """
        end = len(self.token_ids)
        start = min(self.cached_len, end - 1)
        while True:
            stop = min(start + self._chunk, end)
            is_last = stop == end
            batch = Batch.chain(
                np.array(self.token_ids[start:stop], np.int32),
                start,
                np.array(self._page_table, np.int32),
                _ROW_0 + np.int32(stop - start - 1) if is_last else _NO_ROWS,
            )
            rows = self._model.executor.forward(batch)
            self.cached_len = start = stop
            if is_last:
                return rows

    def close(self) -> None:
        """Gives the pages back; call it once."""
        self._pages.free(self._id)
