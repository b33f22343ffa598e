"""Token recycling: proposes what the target lately thought likely after a token. Needs no model.

A target pass gives more than the tokens that are emitted: each of its rows, those of rejected nodes too, ranks all
tokens that may follow the row's own. A table keeps the latest such ranking per token id, cut to a few places, and a
draft is a tree over it (Luo et al., arXiv 2408.08696, section 3):

    table    root token: a b c      a: d e      b: f g
    draft    a (rank 0), a d (ranks 0, 0), b (rank 1), ...    best first, by the acceptance seen so far

How often a node is right depends on its rank, and as much on where its parent's ranking comes from: whether the same
token stood before the parent then, and whether the same request saw it. The table remembers both, and a node's cell is
(both, depth, rank). Beside these the parent's own rank tells nothing, and depth little.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from forerun.drafters.base import NOTHING, Budget, DraftContext, DraftTarget, Policy, Proposal, UnsampledOptions
from forerun.errors import ConfigError
from forerun.sampling.distribution import RowSampler
from forerun.types import MAX_DRAFT_NODES, Draft, ForwardOutput, Int32Array

MAX_K = MAX_DRAFT_NODES - 1  # a pass of 64 rows holds the last token too
MAX_WIDTH = 8
MAX_DEPTH = 8
MAX_TABLES = 8  # one per salt, the latest ones stay; 2 MB each with a vocabulary of 49,152 and width 8

# Columns of a table.
BEFORE = 0  # the token before this one when its ranking was seen
REQUEST = 1  # number of the request that saw it
SUCCESSORS = 2  # this and the next ones: the ranking, likeliest first
UNKNOWN = -1

NUM_DEPTHS = 3  # deeper nodes share the cells of the last one
# Chance that a node is right, given that its parent is, by its parent's ranking and its own rank. Starting values only,
# until acceptance has been seen: means of greedy decoding and temperature 0.8 over 20 chats with the demo model.
PRIOR_RATES = (
    (0.62, 0.11, 0.05, 0.02, 0.02, 0.01, 0.01, 0.01),  # of this request, after the same token
    (0.29, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.02),  # of this request, after another one
    (0.20, 0.11, 0.05, 0.03, 0.02, 0.01, 0.01, 0.01),  # of an earlier request, after the same token
    (0.09, 0.04, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01),  # of an earlier request, after another one
)


@dataclass(frozen=True, slots=True)
class RecyclingOptions(UnsampledOptions):
    """Settings of token recycling, `recycling:k=8,width=8,depth=4,policy=adaptive` in a speculation spec.

    Attributes:
        k: nodes per step at most, 0 to 63; 0 is off.
        width: successors that are kept per token, and so children of a node at most, 1 to 8.
        depth: of the tree at most, 1 to 8.
        policy: `adaptive` verifies the nodes that pay; `fixed` always the k proposed.

    Raises:
        ConfigError: a value is out of range; the message names the range.
    """

    name: ClassVar[str] = "recycling"
    summary: ClassVar[str] = "the likeliest successors that each token last had"
    needs: ClassVar[str] = "nothing"

    k: int = 8
    width: int = 8
    depth: int = 4
    policy: Policy = "adaptive"

    def __post_init__(self) -> None:
        if not 0 <= self.k <= MAX_K:
            raise ConfigError(f"recycling: k is {self.k}, but must be between 0 (off) and {MAX_K}")
        if not 1 <= self.width <= MAX_WIDTH:
            raise ConfigError(f"recycling: width is {self.width}, but must be between 1 and {MAX_WIDTH}")
        if not 1 <= self.depth <= MAX_DEPTH:
            raise ConfigError(f"recycling: depth is {self.depth}, but must be between 1 and {MAX_DEPTH}")
        if self.policy not in ("adaptive", "fixed"):
            raise ConfigError(f"recycling: policy is {self.policy!r}, but must be adaptive or fixed")

    def bind(self, target: DraftTarget) -> RecyclingSource:
        """The drafter for any target."""
        return RecyclingSource(self, target.sampler, target.vocab_size)


class RecyclingSource:
    """Token recycling. The requests of one salt share a table, so what one has learned speeds up the next.

    With a table of another salt, or after `clear`, a request proposes as if there had been no other.
    """

    name = "recycling"
    reads_rows = True
    is_free = True

    def __init__(self, options: RecyclingOptions, sampler: RowSampler, vocab_size: int) -> None:
        self._options = options
        self._sampler = sampler
        self._vocab_size = vocab_size
        self.policy = options.policy
        self.priors = tuple(rate for rates in PRIOR_RATES for _ in range(NUM_DEPTHS) for rate in rates)
        self._tables: OrderedDict[str, _Table] = OrderedDict()

    def open(self, context: DraftContext) -> RecyclingDrafter:
        """See `DrafterSource.open`."""
        table = self._tables.pop(context.partition, None) or _Table(self._vocab_size, self._options.width)
        self._tables[context.partition] = table
        if len(self._tables) > MAX_TABLES:
            self._tables.popitem(last=False)
        return RecyclingDrafter(self._options, self._sampler, table, context)

    def clear(self) -> None:
        """See `DrafterSource.clear`."""
        self._tables.clear()

    @property
    def memory_bytes(self) -> int:
        """See `DrafterSource.memory_bytes`."""
        return sum(table.rows_VC.nbytes for table in self._tables.values())


class _Table:
    """The latest ranking seen after each token id.

    Attributes:
        rows_VC: [V, SUCCESSORS + width] int32, by column as named above; UNKNOWN where nothing was seen.
        num_requests: requests that were opened with it.
    """

    def __init__(self, vocab_size: int, width: int) -> None:
        self.rows_VC: Int32Array = np.full((vocab_size, SUCCESSORS + min(width, vocab_size)), UNKNOWN, np.int32)
        self.num_requests = 0


class RecyclingDrafter:
    """Token recycling for one request."""

    def __init__(self, options: RecyclingOptions, sampler: RowSampler, table: _Table, context: DraftContext) -> None:
        self._options = options
        self._sampler = sampler
        self._rows_VC = table.rows_VC
        table.num_requests += 1
        self._request = table.num_requests
        self._end_ids = context.end_ids
        *_, self._before_id, self._last_id = (UNKNOWN, *context.prompt_token_ids)

    def propose(self, budget: Budget) -> Proposal:
        """Proposes the tree's k likeliest nodes, as far as rankings are known."""
        num_nodes = min(self._options.k, budget.max_nodes)
        token_ids: list[int] = []
        parents: list[int] = []
        cells: list[int] = []
        frontier = _Frontier(budget.rate)
        frontier.push(self._siblings(-1, 0, 1.0, self._before_id, self._last_id), 0)
        while len(token_ids) < num_nodes and (best := frontier.pop()) is not None:
            survival, siblings, rank = best
            node, token_id = len(token_ids), siblings.row[SUCCESSORS + rank]
            token_ids.append(token_id)
            parents.append(siblings.parent)
            cells.append(siblings.first_cell + rank)
            frontier.push(siblings, rank + 1)
            if siblings.depth + 1 < self._options.depth and token_id not in self._end_ids:
                children = self._siblings(node, siblings.depth + 1, survival, siblings.parent_id, token_id)
                frontier.push(children, 0)
        if not token_ids:
            return NOTHING
        origins = ("recycling",) * len(token_ids)
        return Proposal(Draft(tuple(token_ids), tuple(parents), origins, (None,) * len(token_ids)), tuple(cells))

    def advance(self, token_ids: Sequence[int]) -> None:
        """Remembers the last two tokens."""
        *_, self._before_id, self._last_id = (self._last_id, *token_ids)

    def observe(self, draft: Draft, rows: ForwardOutput) -> None:
        """Keeps the ranking of every row; of two rows with one token the later one's."""
        row_ids = (self._last_id, *draft.token_ids)
        seen = np.empty((len(row_ids), self._rows_VC.shape[1]), np.int32)
        seen[:, BEFORE] = [self._before_id, *(row_ids[parent + 1] for parent in draft.parents)]
        seen[:, REQUEST] = self._request
        width = seen.shape[1] - SUCCESSORS
        for row, logits_V in enumerate(rows.logits):
            seen[row, SUCCESSORS:] = self._sampler.top_ids(logits_V, width)
        self._rows_VC[list(row_ids)] = seen

    def close(self) -> None:
        """What was learned stays, for requests of the same salt."""

    def _siblings(self, parent: int, depth: int, survival: float, before_id: int, parent_id: int) -> _Siblings:
        """The children that a node may have, or the root if parent is -1."""
        row: list[int] = self._rows_VC[parent_id].tolist()
        kind = 2 * (row[REQUEST] != self._request) + (row[BEFORE] != before_id)
        first_cell = (kind * NUM_DEPTHS + min(depth, NUM_DEPTHS - 1)) * MAX_WIDTH
        return _Siblings(parent, parent_id, depth, survival, first_cell, row)


class _Siblings(NamedTuple):
    """The children that a node may have.

    Attributes:
        parent: the node, -1 for the root.
        parent_id: its token.
        depth: of the children; the root's have 0.
        survival: probability that the parent is emitted.
        first_cell: cell of the likeliest child; the others' follow.
        row: of the table.
    """

    parent: int
    parent_id: int
    depth: int
    survival: float
    first_cell: int
    row: list[int]


class _Frontier:
    """The nodes that may come next, likeliest first; of siblings the first that is missing."""

    def __init__(self, rate: Callable[[int], float]) -> None:
        self._rate = rate
        self._heap: list[tuple[float, int, _Siblings, int]] = []
        self._num_pushed = 0

    def push(self, siblings: _Siblings, rank: int) -> None:
        """Adds a sibling, if the ranking has it."""
        place = SUCCESSORS + rank
        if place < len(siblings.row) and siblings.row[place] != UNKNOWN:
            survival = siblings.survival * self._rate(siblings.first_cell + rank)
            # The number decides between equals, so that the order is one of creation.
            heapq.heappush(self._heap, (-survival, self._num_pushed, siblings, rank))
            self._num_pushed += 1

    def pop(self) -> tuple[float, _Siblings, int] | None:
        """Survival, siblings and rank of the likeliest node; None when there is no node left."""
        if not self._heap:
            return None
        negated, _, siblings, rank = heapq.heappop(self._heap)
        return -negated, siblings, rank
