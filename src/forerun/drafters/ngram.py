"""Prompt lookup: proposes what followed the last few tokens when they occurred before. Needs no model.

The end of the text is looked up in the text before it, first `max` tokens of it, then fewer down to `min`, the most
recent occurrence of each length; what followed it is proposed (Saxena 2023, prompt lookup decoding; Yang et al. 2023,
arXiv 2304.04487, copy from a reference text in the same way).

An n-gram enters the index when the token after it is committed, so the text's own end is never its own match, and
every match has a continuation:

    ids    a b c d a b c          suffix "a b c" (n = 3)
    index  ... (a b c) -> 3       continuation starts at position 3: d, a, b, c

A continuation that reaches the end of the text goes on with what it proposes itself: a text of period `length - start`
is continued in that period. After "x x x" the match is one token old, and the proposal is still k times x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from forerun.drafters.base import NOTHING, Budget, DraftContext, DraftTarget, Policy, Proposal, UnsampledOptions
from forerun.errors import ConfigError
from forerun.types import MAX_DRAFT_NODES, Draft, ForwardOutput

MAX_K = MAX_DRAFT_NODES - 1  # a pass of 64 rows holds the last token too
MAX_NGRAM = 16  # longer matches are no better a sign, and each length costs one index entry per token

# Chance that the next token continues a match, by the number of tokens that have matched so far; the last one serves
# all longer matches. Starting values only, until acceptance has been seen.
PRIOR_RATES = (0.35, 0.55, 0.70, 0.80)
MAX_TABLE_DEPTH = 8  # deeper nodes share the cell of this depth


@dataclass(frozen=True, slots=True)
class NgramOptions(UnsampledOptions):
    """Settings of prompt lookup, `ngram:k=8,min=1,max=4,policy=adaptive` in a speculation spec.

    Attributes:
        k: nodes per step at most, 0 to 63; 0 is off.
        min, max: lengths of the n-grams that are looked up, 1 <= min <= max <= 16.
        policy: `adaptive` verifies the nodes that pay; `fixed` always the k proposed.

    Raises:
        ConfigError: a value is out of range; the message names the range.
    """

    name: ClassVar[str] = "ngram"
    summary: ClassVar[str] = "what followed the last few tokens earlier in the text"
    needs: ClassVar[str] = "nothing"

    k: int = 8
    min: int = 1
    max: int = 4
    policy: Policy = "adaptive"

    def __post_init__(self) -> None:
        if not 0 <= self.k <= MAX_K:
            raise ConfigError(f"ngram: k is {self.k}, but must be between 0 (off) and {MAX_K}")
        if not 1 <= self.max <= MAX_NGRAM:
            raise ConfigError(f"ngram: max is {self.max}, but must be between 1 and {MAX_NGRAM}")
        if not 1 <= self.min <= self.max:
            raise ConfigError(f"ngram: min is {self.min}, but must be between 1 and max, which is {self.max}")
        if self.policy not in ("adaptive", "fixed"):
            raise ConfigError(f"ngram: policy is {self.policy!r}, but must be adaptive or fixed")

    def bind(self, target: DraftTarget) -> NgramSource:
        """The drafter for any target."""
        return NgramSource(self)


class NgramSource:
    """Prompt lookup; requests share nothing. A node's cell is (length of its match, depth)."""

    name = "ngram"
    reads_rows = False
    is_free = True
    memory_bytes = 0

    def __init__(self, options: NgramOptions) -> None:
        last = len(PRIOR_RATES) - 1
        self._options = options
        self.policy = options.policy
        # A node at depth d of a match of n tokens has matched n + d - 1.
        self.priors = tuple(
            PRIOR_RATES[min(n + depth, last)] for n in range(options.max) for depth in range(MAX_TABLE_DEPTH)
        )

    def open(self, context: DraftContext) -> NgramDrafter:
        """See `DrafterSource.open`."""
        return NgramDrafter(self._options, context)

    def clear(self) -> None:
        """See `DrafterSource.clear`."""


class NgramDrafter:
    """Prompt lookup for one request.

    A proposal costs one dictionary look-up per length and a copy; a committed token costs one entry per length.
    """

    def __init__(self, options: NgramOptions, context: DraftContext) -> None:
        self._options = options
        self._end_ids = context.end_ids
        self._lengths = range(options.max, options.min - 1, -1)
        self._token_ids: list[int] = []
        # n-gram -> position of the token that followed its latest occurrence
        self._next_position: dict[tuple[int, ...], int] = {}
        self._append(context.prompt_token_ids)

    def propose(self, budget: Budget) -> Proposal:
        """Proposes a chain of what followed the longest match; nothing without one."""
        n, start = self._match()
        if not n:
            return NOTHING
        guess = self._continuation(start, min(self._options.k, budget.max_nodes))
        first_cell = (n - 1) * MAX_TABLE_DEPTH
        cells = tuple(first_cell + min(depth, MAX_TABLE_DEPTH - 1) for depth in range(len(guess)))
        return Proposal(Draft.chain(tuple(guess), "ngram"), cells)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Indexes the new tokens."""
        self._append(token_ids)

    def observe(self, draft: Draft, rows: ForwardOutput) -> None:
        """Not asked for."""

    def close(self) -> None:
        """Nothing outlives the request."""

    def _append(self, token_ids: Sequence[int]) -> None:
        ids = self._token_ids
        index = self._next_position
        for token_id in token_ids:
            end = len(ids)
            for n in self._lengths:
                if n <= end:
                    index[tuple(ids[end - n :])] = end
            ids.append(token_id)

    def _match(self) -> tuple[int, int]:
        """Longest match of the text's end: its length and where its continuation starts; (0, 0) without one."""
        ids = self._token_ids
        for n in self._lengths:
            if n < len(ids):
                position = self._next_position.get(tuple(ids[-n:]))
                if position is not None:
                    return n, position
        return 0, 0

    def _continuation(self, start: int, num_tokens: int) -> list[int]:
        """Up to num_tokens tokens from `start` on, running into themselves; the first end id is the last one."""
        ids = self._token_ids
        length = len(ids)
        out: list[int] = []
        for position in range(start, start + num_tokens):
            token_id = ids[position] if position < length else out[position - length]
            out.append(token_id)
            if token_id in self._end_ids:
                break
        return out
