"""Lookahead: the target guesses ahead at many places at once, and its guesses become n-grams to try. Needs no model.

Jacobi decoding guesses the next tokens all at once and lets the target correct them in parallel, again and again; its
trajectories are full of n-grams that the text will need, only not where they were guessed. Lookahead decoding (Fu et
al., arXiv 2402.02057, section 3) collects them. A window has w columns of n - 1 tokens. Column i guesses the tokens
from place i on after the root, each one in a later pass than the one before it. Here the window is part of the draft
tree, so that a pass computes it beside everything else:

    root -- b0 -- c0 -- d0         level 0 of all columns is a chain; the root is column 0's own
      \\      \\     \\     \\
       a1     b1    c1    d1       the rest of a column hangs below it, so that a row sees level 0 up to its column
         \\      \\     \\     \\     and then its column alone
          a2    b2    c2    d2 -> d3

After the pass the target's choice after a column's last token is that column's next one. With the column it makes an
n-gram for the pool, keyed by its first token; the column drops its oldest token, as the text moves on by one. Where the
text moves on by more, the columns that it has overtaken go to the end, as guesses like any other. Up to g n-grams of
the pool that begin with the last token are branches under the root: they are what is hoped to be accepted.

A window's nodes themselves are rarely right, and a choice of nodes that pay would leave them out. Then no n-gram would
ever be found, which is why the policy is `fixed` here: the window is the price of the branches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from forerun.drafters.base import NOTHING, Budget, DraftContext, DraftTarget, Policy, Proposal
from forerun.errors import ConfigError
from forerun.types import MAX_DRAFT_NODES, Draft, DraftTraits, ForwardOutput, NoiseStream

MAX_NODES = MAX_DRAFT_NODES - 1  # a pass of 64 rows holds the last token too
MAX_POOL_KEYS = 4096  # first tokens whose n-grams are kept, the latest ones

MAX_TABLE_DEPTH = 4  # deeper nodes share the cell of this depth
# Chance that a node is right, given that its parent is, by depth. Starting values only, until acceptance has been seen.
WINDOW_RATES = (0.03, 0.15, 0.20, 0.20)
BRANCH_RATES = (0.25, 0.50, 0.70, 0.70)
WINDOW_CELL, BRANCH_CELL = 0, len(WINDOW_RATES)  # of depth 0
_ABSENT = -2  # no node of a draft


@dataclass(frozen=True, slots=True)
class LookaheadOptions:
    """Settings of lookahead, `lookahead:w=5,n=3,g=3,policy=fixed` in a speculation spec.

    A step drafts up to (w + g) (n - 1) - 1 nodes, which must be at most 63; fewer where paths coincide.

    Attributes:
        w: columns of the window; 0 is off.
        n: length of the n-grams, at least 2.
        g: n-grams that are tried per step, at least 1.
        policy: `fixed` verifies window and branches whole. `adaptive` leaves out what doesn't pay; that is the window
            wherever a row has its price, and without it nothing is found.

    Raises:
        ConfigError: a value is out of range; the message names the range.
    """

    name: ClassVar[str] = "lookahead"
    summary: ClassVar[str] = "n-grams from its own parallel guesses, refined step by step"
    needs: ClassVar[str] = "nothing"

    w: int = 5
    n: int = 3
    g: int = 3
    policy: Policy = "fixed"

    def __post_init__(self) -> None:
        for name, value, least in (("w", self.w, 0), ("n", self.n, 2), ("g", self.g, 1)):
            if value < least:
                raise ConfigError(f"lookahead: {name} is {value}, but must be at least {least}")
        if self.num_nodes > MAX_NODES:
            raise ConfigError(
                f"lookahead: w={self.w}, n={self.n}, g={self.g} make (w + g) (n - 1) - 1 = {self.num_nodes} nodes, "
                f"but must make at most {MAX_NODES}"
            )
        if self.policy not in ("adaptive", "fixed"):
            raise ConfigError(f"lookahead: policy is {self.policy!r}, but must be adaptive or fixed")

    @property
    def num_nodes(self) -> int:
        """Nodes of a step at most."""
        return (self.w + self.g) * (self.n - 1) - 1

    @property
    def is_off(self) -> bool:
        """Whether nothing would ever be proposed."""
        return self.w == 0

    def traits(self, stream: NoiseStream) -> DraftTraits:
        """Nothing is sampled."""
        return DraftTraits()

    def bind(self, target: DraftTarget) -> LookaheadSource:
        """The drafter for any target."""
        return LookaheadSource(self)


class LookaheadSource:
    """Lookahead; requests share nothing. A node's cell is (window or branch, depth)."""

    name = "lookahead"
    reads_rows = True
    is_free = True
    memory_bytes = 0
    priors: tuple[float, ...] = WINDOW_RATES + BRANCH_RATES

    def __init__(self, options: LookaheadOptions) -> None:
        self._options = options
        self.policy = options.policy

    def open(self, context: DraftContext) -> LookaheadDrafter:
        """See `DrafterSource.open`."""
        return LookaheadDrafter(self._options, context)

    def clear(self) -> None:
        """See `DrafterSource.clear`."""


class LookaheadDrafter:
    """Lookahead for one request.

    The first guesses are tokens of the prompt at random, the same ones whenever the prompt is the same.
    """

    def __init__(self, options: LookaheadOptions, context: DraftContext) -> None:
        self._n = options.n
        self._end_ids = context.end_ids
        self._last_id = context.prompt_token_ids[-1]
        self._pool = _Pool(options.g)
        self._random = random.Random(0)
        # Nothing can follow an end id, so none is in the window.
        self._guess_ids = [token_id for token_id in context.prompt_token_ids if token_id not in context.end_ids]
        num_columns = options.w if self._guess_ids else 0
        self._columns = [_Column([self._guess() for _ in range(options.n - 1)]) for _ in range(num_columns)]

    def propose(self, budget: Budget) -> Proposal:
        """Proposes n-grams of the pool, and the window if there is room for all of it."""
        tree = _Tree()
        for ngram in self._pool.find(self._last_id):
            node = -1
            for token_id in ngram:
                if tree.num_nodes == budget.max_nodes:
                    break
                node = tree.add(node, token_id, BRANCH_CELL)
        num_window = len(self._columns) * (self._n - 1) - 1
        if tree.num_nodes + num_window <= budget.max_nodes:
            self._ends(lambda node, token_id: tree.add(node, token_id, WINDOW_CELL))
        return tree.proposal()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Moves on; columns that were overtaken become the last ones."""
        self._last_id = token_ids[-1]
        if self._columns:
            overtaken = (len(token_ids) - 1) % len(self._columns)
            self._columns = self._columns[overtaken:] + self._columns[:overtaken]

    def observe(self, draft: Draft, rows: ForwardOutput) -> None:
        """Gives each column of the window its next token, and the pool the n-gram that this makes."""
        node_of = {key: node for node, key in enumerate(zip(draft.parents, draft.token_ids, strict=True))}
        ends = self._ends(lambda node, token_id: node_of.get((node, token_id), _ABSENT))
        for index, (column, end) in enumerate(zip(self._columns, ends, strict=True)):
            if end == _ABSENT:
                continue  # left out of the draft
            next_id = rows.argmax.item(end + 1)
            first_id, *ngram = column.token_ids
            if column.num_computed >= len(ngram):
                self._pool.add(first_id if index else self._last_id, (*ngram, next_id))
            if next_id in self._end_ids:
                column.push(self._guess(), is_computed=False)
            else:
                column.push(next_id, is_computed=True)

    def close(self) -> None:
        """Nothing outlives the request."""

    def _guess(self) -> int:
        return self._random.choice(self._guess_ids)

    def _ends(self, step: Callable[[int, int], int]) -> list[int]:
        """The node of each column's last token, found by `step`, which leads from a node and a token to the next."""
        ends, trunk = [], -1
        for index, column in enumerate(self._columns):
            if index:
                trunk = step(trunk, column.token_ids[0])
            node = trunk
            for token_id in column.token_ids[1:]:
                node = step(node, token_id)
            ends.append(node)
        return ends


@dataclass(slots=True)
class _Column:
    """A trajectory of the window.

    Attributes:
        token_ids: n - 1 tokens, each from a later pass than the one before it. Column 0's first one is a guess of the
            root, and isn't looked at.
        num_computed: tokens at the end that the target chose; those before them were guessed at random.
    """

    token_ids: list[int]
    num_computed: int = 0

    def push(self, token_id: int, *, is_computed: bool) -> None:
        """A token more at the end, the first one goes."""
        self.token_ids = [*self.token_ids[1:], token_id]
        self.num_computed = self.num_computed + 1 if is_computed else 0


class _Pool:
    """N-grams by their first token, of each the latest few.

    Args:
        max_per_key: n-grams that are kept of one first token.
    """

    def __init__(self, max_per_key: int) -> None:
        self._max_per_key = max_per_key
        # Dictionaries as sets that remember their order.
        self._ngrams: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, first_id: int, ngram: tuple[int, ...]) -> None:
        """Adds what may follow a token; what is there already becomes the latest."""
        known = self._ngrams.pop(first_id, {})
        known.pop(ngram, None)
        known[ngram] = None
        self._ngrams[first_id] = known
        if len(known) > self._max_per_key:
            del known[next(iter(known))]
        if len(self._ngrams) > MAX_POOL_KEYS:
            del self._ngrams[next(iter(self._ngrams))]

    def find(self, first_id: int) -> Iterable[tuple[int, ...]]:
        """What may follow a token, the latest first."""
        return reversed(self._ngrams.get(first_id, {}))


class _Tree:
    """A draft that grows by paths; nodes of one parent and one token are one node, and keep their first cell."""

    def __init__(self) -> None:
        self._node_of: dict[tuple[int, int], int] = {}
        self._depths: list[int] = []
        self._cells: list[int] = []

    @property
    def num_nodes(self) -> int:
        """Nodes so far."""
        return len(self._cells)

    def add(self, parent: int, token_id: int, first_cell: int) -> int:
        """The node of a token below a node; -1 is the root. Its cell is the first one's and the depth."""
        node = self._node_of.setdefault((parent, token_id), len(self._cells))
        if node == len(self._cells):
            depth = self._depths[parent] + 1 if parent >= 0 else 0
            self._depths.append(depth)
            self._cells.append(first_cell + min(depth, MAX_TABLE_DEPTH - 1))
        return node

    def proposal(self) -> Proposal:
        """All of it."""
        if not self._cells:
            return NOTHING
        parents, token_ids = zip(*self._node_of, strict=True)
        n = len(token_ids)
        return Proposal(Draft(token_ids, parents, ("lookahead",) * n, (None,) * n), tuple(self._cells))
