"""Which ids a request has seen, for the penalties: prompt and output, plus the tree path of one draft node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from forerun.types import Int32Array, SamplingParams

_FIRST_CAPACITY = 64


def uses_history(params: SamplingParams) -> bool:
    """Whether the law of a token depends on which tokens came before it other than through the logits."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class History:
    """The distinct ids of one request's prompt and output, each with its number of occurrences in the output.

    It grows by committed tokens only, so a rejected draft leaves no trace. A request without penalties counts nothing.

    Args:
        params: the request's parameters; they say whether ids are counted at all.
        prompt_ids: the request's prompt.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Iterable[int]) -> None:
        self._is_counting = uses_history(params)
        self._slot_of: dict[int, int] = {}
        self._ids = np.empty(_FIRST_CAPACITY, np.int32)
        self._counts = np.empty(_FIRST_CAPACITY, np.int32)
        self.num_tokens = 0
        for token_id in prompt_ids:
            self._see(token_id, 0)

    def append(self, token_id: int) -> None:
        """Counts one emitted token."""
        self._see(token_id, 1)

    def along(self, path_ids: tuple[int, ...] = ()) -> PathHistory:
        """The history at a draft node: path_ids are the tokens from the root's child down to the node itself."""
        return PathHistory(self, path_ids)

    @property
    def ids(self) -> Int32Array:
        """[N] int32, the distinct ids in the order they were first seen; empty when nothing is counted."""
        return self._ids[: len(self._slot_of)]

    @property
    def output_counts(self) -> Int32Array:
        """[N] int32, occurrences of each of `ids` in the output; 0 for an id of the prompt alone."""
        return self._counts[: len(self._slot_of)]

    @property
    def is_counting(self) -> bool:
        """False when the request has no penalties."""
        return self._is_counting

    def _see(self, token_id: int, num_emitted: int) -> None:
        self.num_tokens += 1
        if not self._is_counting:
            return
        slot = self._slot_of.get(token_id)
        if slot is None:
            slot = self._add(token_id)
        self._counts[slot] += num_emitted

    def _add(self, token_id: int) -> int:
        slot = len(self._slot_of)
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
        self._slot_of[token_id] = slot
        self._ids[slot] = token_id
        self._counts[slot] = 0
        return slot


@dataclass(frozen=True, slots=True)
class PathHistory:
    """A request's history followed by the path to one draft node. Valid until the history grows.

    Attributes:
        base: prompt and output.
        path_ids: the tokens from the root's child down to the node; empty at the root.
    """

    base: History
    path_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens before the one whose law is wanted, which is also its position."""
        return self.base.num_tokens + len(self.path_ids)

    def output_counts(self) -> dict[int, int]:
        """Occurrences of every id seen: in the output and on the path, 0 for ids of the prompt alone."""
        counts = Counter(dict(zip(self.base.ids.tolist(), self.base.output_counts.tolist(), strict=True)))
        if self.base.is_counting:
            counts.update(self.path_ids)
        return dict(counts)
