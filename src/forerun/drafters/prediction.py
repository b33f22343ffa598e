"""Prediction: proposes a text that the caller expects, such as a file that is to be edited. Needs no model.

A pointer runs through the expected text while the output follows it. Where the output leaves it, the longest end of the
output that occurs in the text says where to go on, of its occurrences the nearest at or after the place where the text
was left:

    expected   a b c d e f g        the pointer stands before e
    output     a b c d x            left at e: nothing is proposed until an end of the output occurs
    output     a b c d x f          f occurs: the pointer stands before g

The expected text decides what is tried, never what comes out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from forerun.drafters.base import NOTHING, Budget, DraftContext, DraftTarget, Policy, Proposal, UnsampledOptions
from forerun.errors import ConfigError
from forerun.types import MAX_DRAFT_NODES, Draft, ForwardOutput

MAX_K = MAX_DRAFT_NODES - 1  # a pass of 64 rows holds the last token too
MAX_NGRAM = 16  # longer ends are no better a sign, and each length costs one index entry per token

# So many tokens in a row make sure that the text is followed here, and not that a word happened to occur elsewhere.
SURE_LEN = 2

# Chance that the next token is the text's, by the number of tokens in a row that were; the last one serves all longer
# runs. Starting values only, until acceptance has been seen.
START_RATES = (0.50, 0.70, 0.80, 0.90, 0.95, 0.95, 0.98)  # of a run that began with the text
FOUND_RATES = (0.00, 0.25, 0.80, 0.90, 0.95, 0.95, 0.98)  # of one that began where an end of the output occurs
# First length of each class of runs but the first.
RUN_LENS = (1, 2, 3, 4, 8, 16)
START_CELL, FOUND_CELL = 0, len(START_RATES)


@dataclass(frozen=True, slots=True)
class PredictionOptions(UnsampledOptions):
    """Settings of prediction, `prediction:k=16,min=1,max=4,policy=adaptive` in a speculation spec.

    Attributes:
        k: nodes per step at most, 0 to 63; 0 is off.
        min, max: lengths of the output's end that are looked up once the text was left, 1 <= min <= max <= 16.
        policy: `adaptive` verifies the nodes that pay; `fixed` always the k proposed.

    Raises:
        ConfigError: a value is out of range; the message names the range.
    """

    name: ClassVar[str] = "prediction"
    summary: ClassVar[str] = "the text that the caller expects"
    needs: ClassVar[str] = "a prediction"

    k: int = 16
    min: int = 1
    max: int = 4
    policy: Policy = "adaptive"

    def __post_init__(self) -> None:
        if not 0 <= self.k <= MAX_K:
            raise ConfigError(f"prediction: k is {self.k}, but must be between 0 (off) and {MAX_K}")
        if not 1 <= self.max <= MAX_NGRAM:
            raise ConfigError(f"prediction: max is {self.max}, but must be between 1 and {MAX_NGRAM}")
        if not 1 <= self.min <= self.max:
            raise ConfigError(f"prediction: min is {self.min}, but must be between 1 and max, which is {self.max}")
        if self.policy not in ("adaptive", "fixed"):
            raise ConfigError(f"prediction: policy is {self.policy!r}, but must be adaptive or fixed")

    def bind(self, target: DraftTarget) -> PredictionSource:
        """The drafter for any target."""
        return PredictionSource(self)


class PredictionSource:
    """Prediction; requests share nothing. A node's cell is (how the run of right tokens began, its length).

    A request without an expected text has no drafter.
    """

    name = "prediction"
    reads_rows = False
    is_free = True
    memory_bytes = 0
    priors: tuple[float, ...] = START_RATES + FOUND_RATES

    def __init__(self, options: PredictionOptions) -> None:
        self._options = options
        self.policy = options.policy

    def open(self, context: DraftContext) -> PredictionDrafter | None:
        """See `DrafterSource.open`."""
        return PredictionDrafter(self._options, context) if context.prediction else None

    def clear(self) -> None:
        """See `DrafterSource.clear`."""


class PredictionDrafter:
    """Prediction for one request.

    A proposal costs a slice; a token outside the text costs one dictionary look-up per length.
    """

    def __init__(self, options: PredictionOptions, context: DraftContext) -> None:
        self._k = options.k
        self._end_ids = context.end_ids
        self._expected = context.prediction
        self._lengths = range(options.max, options.min - 1, -1)
        self._next_positions = _index(self._expected, self._lengths)
        self._last_ids: list[int] = []  # of the output, as many as are looked up
        self._pointer: int | None = 0  # of the token that is expected next; None where the text was left
        self._run_len = 0  # tokens in a row that were as expected
        self._first_cell = START_CELL
        self._sure_len = 0  # where the text was followed last, and that surely

    def propose(self, budget: Budget) -> Proposal:
        """Proposes what comes next in the text, where the output follows it; the first end id is the last one."""
        if self._pointer is None:
            return NOTHING
        guess: list[int] = []
        for token_id in self._expected[self._pointer : self._pointer + min(self._k, budget.max_nodes)]:
            guess.append(token_id)
            if token_id in self._end_ids:
                break
        # With its parent a node's run is as much longer as it is deep.
        cells = tuple(self._first_cell + _run_class(self._run_len + depth) for depth in range(len(guess)))
        return Proposal(Draft.chain(tuple(guess), "prediction"), cells)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Moves the pointer, or looks for the place to go on."""
        if not self._expected:
            return
        for token_id in token_ids:
            self._last_ids = [*self._last_ids, token_id][-self._lengths[0] :]
            self._follow(token_id)

    def observe(self, draft: Draft, rows: ForwardOutput) -> None:
        """Not asked for."""

    def close(self) -> None:
        """Nothing outlives the request."""

    def _follow(self, token_id: int) -> None:
        pointer = self._pointer
        if pointer is not None and self._expected[pointer : pointer + 1] == (token_id,):
            self._pointer = pointer + 1
            self._run_len += 1
        else:
            self._run_len, self._pointer = self._find()
            self._first_cell = FOUND_CELL
        if self._pointer is not None and self._run_len >= SURE_LEN:
            self._sure_len = self._pointer

    def _find(self) -> tuple[int, int | None]:
        """The longest end of the output that the text has: its length and the position after it; (0, None) if none."""
        for n in self._lengths:
            positions = self._next_positions.get(tuple(self._last_ids[-n:])) if n <= len(self._last_ids) else None
            if positions:
                at = bisect_right(positions, self._sure_len)
                return n, positions[min(at, len(positions) - 1)]
        return 0, None


def _index(token_ids: Sequence[int], lengths: range) -> dict[tuple[int, ...], list[int]]:
    """N-gram -> the positions after it that hold a token, ascending."""
    index: dict[tuple[int, ...], list[int]] = {}
    for position in range(1, len(token_ids)):
        for n in lengths:
            if n <= position:
                index.setdefault(tuple(token_ids[position - n : position]), []).append(position)
    return index


def _run_class(run_len: int) -> int:
    return bisect_right(RUN_LENS, run_len)
