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
from typing import Literal

from forerun.drafters.base import DraftContext
from forerun.errors import ConfigError
from forerun.types import MAX_DRAFT_NODES, Draft

MAX_K = MAX_DRAFT_NODES - 1  # a pass of 64 rows holds the last token too
MAX_NGRAM = 16  # longer matches are no better a sign, and each length costs one index entry per token

# A row more costs a target pass about 0.07 of the time of one row on the processors this is built for, and a pass
# emits about two tokens where lookup works: a node pays where it is kept more often than 0.07 * 2, about one in seven.
BREAK_EVEN = 0.15

# Chance that the next token continues a match, by the number of tokens that have matched so far; the last one serves
# all longer matches. Starting values only: five observations weigh as much.
PRIOR_RATES = (0.35, 0.55, 0.70, 0.80)
PRIOR_WEIGHT = 5.0
DECAY = 0.99  # an observation counts half after about 70 more of its kind
MAX_TABLE_DEPTH = 8  # deeper nodes share the entry of this depth


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """Settings of prompt lookup, `ngram:k=8,min=1,max=4,policy=adaptive` in a speculation spec.

    Attributes:
        k: nodes per step at most, 0 to 63; 0 is off.
        min, max: lengths of the n-grams that are looked up, 1 <= min <= max <= 16.
        policy: `adaptive` cuts a proposal where its next node is kept too rarely to pay; `fixed` always proposes k.

    Raises:
        ConfigError: a value is out of range; the message names the range.
    """

    k: int = 8
    min: int = 1
    max: int = 4
    policy: Literal["adaptive", "fixed"] = "adaptive"

    def __post_init__(self) -> None:
        if not 0 <= self.k <= MAX_K:
            raise ConfigError(f"ngram: k is {self.k}, but must be between 0 (off) and {MAX_K}")
        if not 1 <= self.max <= MAX_NGRAM:
            raise ConfigError(f"ngram: max is {self.max}, but must be between 1 and {MAX_NGRAM}")
        if not 1 <= self.min <= self.max:
            raise ConfigError(f"ngram: min is {self.min}, but must be between 1 and max, which is {self.max}")
        if self.policy not in ("adaptive", "fixed"):
            raise ConfigError(f"ngram: policy is {self.policy!r}, but must be adaptive or fixed")

    @property
    def is_off(self) -> bool:
        """Whether nothing would ever be proposed."""
        return self.k == 0

    def create(self, context: DraftContext) -> NgramDrafter:
        """A drafter for one request."""
        return NgramDrafter(self, context)


class AcceptanceTable:
    """How often a proposal's node was right given that its parents were, by match length and depth.

    Each cell is a decayed count of trials and successes on top of PRIOR_WEIGHT trials at the prior's rate, where a node
    at depth d of an n-gram match has matched n + d - 1 tokens.

    >>> table = AcceptanceTable(4)
    >>> round(table.rate(1, 1), 2), round(table.rate(1, 2), 2), round(table.rate(4, 8), 2)
    (0.35, 0.55, 0.8)
    """

    def __init__(self, max_ngram: int) -> None:
        last = len(PRIOR_RATES) - 1
        self._priors = [
            [PRIOR_RATES[min(n + depth, last)] for depth in range(MAX_TABLE_DEPTH)] for n in range(max_ngram)
        ]
        self._trials = [[0.0] * MAX_TABLE_DEPTH for _ in range(max_ngram)]
        self._successes = [[0.0] * MAX_TABLE_DEPTH for _ in range(max_ngram)]

    def rate(self, n: int, depth: int) -> float:
        """Estimated rate; n and depth count from 1."""
        column = min(depth, MAX_TABLE_DEPTH) - 1
        prior = self._priors[n - 1][column]
        return (PRIOR_WEIGHT * prior + self._successes[n - 1][column]) / (PRIOR_WEIGHT + self._trials[n - 1][column])

    def record(self, n: int, depth: int, is_right: bool) -> None:
        """Takes in one observation."""
        column = min(depth, MAX_TABLE_DEPTH) - 1
        self._trials[n - 1][column] = DECAY * self._trials[n - 1][column] + 1.0
        self._successes[n - 1][column] = DECAY * self._successes[n - 1][column] + is_right

    def depth_that_pays(self, n: int, max_depth: int) -> int:
        """Depth of the last node whose chance of being kept, the product of the rates, is at least BREAK_EVEN."""
        survival = 1.0
        for depth in range(1, max_depth + 1):
            survival *= self.rate(n, depth)
            if survival < BREAK_EVEN:
                return depth - 1
        return max_depth


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
        self._table = AcceptanceTable(options.max)
        # What the last proposal would have been without a cut, and its match length: emitted tokens score all of it,
        # so a length that isn't drafted any more can still earn its way back.
        self._guess: list[int] = []
        self._guess_length = 0
        self._append(context.prompt_token_ids)

    def propose(self, max_nodes: int) -> Draft:
        """Proposes a chain of what followed the longest match; empty without one."""
        n, start = self._match()
        self._guess_length = n
        self._guess = self._continuation(start, self._options.k) if n else []
        depth = min(len(self._guess), max_nodes)
        if self._options.policy == "adaptive" and depth:
            depth = self._table.depth_that_pays(n, depth)
        return Draft.chain(tuple(self._guess[:depth]), "ngram")

    def advance(self, token_ids: Sequence[int]) -> None:
        """Scores the last proposal against what was emitted and indexes the new tokens."""
        for depth, (guess, token_id) in enumerate(zip(self._guess, token_ids, strict=False), start=1):
            self._table.record(self._guess_length, depth, guess == token_id)
            if guess != token_id:
                break
        self._guess = []
        self._append(token_ids)

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
