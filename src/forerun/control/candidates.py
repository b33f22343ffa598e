"""Proposals of several drafters as one tree, and the choice of the nodes that pay.

With s(n) the probability that node n is emitted, 1 + sum s(n) tokens come out of a step. The rate rule takes the nodes
that maximise

    1 + sum of s(n) over the chosen nodes - price * seconds of a pass over them,

with `price` the tokens per second that the engine makes otherwise (Dinkelbach's form of "most tokens per second"). s
never grows along a path, so the first N nodes by s are a tree for every N, and N is found by trying all: a pass gets
dearer in steps, not evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun.drafters.base import Proposal
from forerun.types import Draft, Float64Array, NoiseStream


@dataclass(slots=True)
class Candidates:
    """A tree that grows by merging proposals: nodes of one parent and one token are one node.

    Attributes:
        token_ids, parents, origins, q_rows: as in `types.Draft`.
        rates: acceptance of each node given its parent's.
        is_fixed: whether a node must be verified whatever it costs.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    q_rows: list[Float64Array | None] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    is_fixed: list[bool] = field(default_factory=list)
    _node_of: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        """Nodes of all proposals, merged."""
        return len(self.token_ids)

    def merge(self, proposal: Proposal, is_fixed: bool, rate: Callable[[int], float]) -> None:
        """Adds a proposal; a node that is there already keeps the larger rate and whose it is."""
        draft, places = proposal.draft, [0] * len(proposal.cells)
        for node, cell in enumerate(proposal.cells):
            parent = draft.parents[node]
            key = (places[parent] if parent >= 0 else -1, draft.token_ids[node])
            known = self._node_of.get(key)
            accepted = rate(cell)
            if known is None:
                known = self._node_of[key] = len(self.token_ids)
                self.parents.append(key[0])
                self.token_ids.append(key[1])
                self.origins.append(draft.origins[node])
                self.q_rows.append(draft.q_rows[node])
                self.rates.append(accepted)
                self.is_fixed.append(is_fixed)
            else:
                self.is_fixed[known] |= is_fixed
                if accepted > self.rates[known]:
                    self.rates[known], self.origins[known] = accepted, draft.origins[node]
                    self.q_rows[known] = draft.q_rows[node]
            places[node] = known

    def survivals(self) -> list[float]:
        """Probability that each node is emitted. Siblings exclude each other, so together they have at most 1."""
        totals: dict[int, float] = {}
        for parent, rate in zip(self.parents, self.rates, strict=True):
            totals[parent] = totals.get(parent, 0.0) + rate
        out: list[float] = []
        for parent, rate in zip(self.parents, self.rates, strict=True):
            above = 1.0 if parent < 0 else out[parent]
            out.append(above * rate / max(1.0, totals[parent]))
        return out

    def draft_of(self, nodes: Sequence[int], stream: NoiseStream) -> Draft:
        """The chosen nodes as a draft; with a node its parent is among them."""
        kept = sorted(nodes)
        place = {node: i for i, node in enumerate(kept)}
        place[-1] = -1
        return Draft(
            token_ids=tuple(self.token_ids[node] for node in kept),
            parents=tuple(place[self.parents[node]] for node in kept),
            origins=tuple(self.origins[node] for node in kept),
            q_rows=tuple(self.q_rows[node] for node in kept),
            stream=stream,
        )


def by_survival(candidates: Candidates, survivals: Sequence[float]) -> tuple[list[int], int]:
    """The nodes in the order in which they are taken, fixed ones first, and the number of fixed ones.

    Every beginning of the list is a tree: a parent survives at least as often as its child and was added before it, and
    a fixed node's parent is fixed.
    """
    is_fixed = candidates.is_fixed
    order = sorted(range(len(survivals)), key=lambda node: (not is_fixed[node], -survivals[node], node))
    return order, sum(is_fixed)


def choose_count(survivals: Sequence[float], min_count: int, seconds: Sequence[float], price: float) -> int:
    """How many nodes to take by the rate rule.

    Args:
        survivals: of the nodes in the order in which they are taken.
        min_count: nodes taken in any case.
        seconds: of a step with 0, 1, ... rows; a step has one row more than nodes.
        price: tokens per second that the engine makes otherwise.

    >>> choose_count([0.9, 0.8, 0.1], 0, [0.0, 1.0, 1.1, 1.2, 1.3], 1.0)
    2
    """
    value = sum(survivals[:min_count]) - price * seconds[1 + min_count]
    best_value, best = value, min_count
    tokens = value + price * seconds[1 + min_count]
    for count in range(min_count + 1, min(len(survivals), len(seconds) - 2) + 1):
        tokens += survivals[count - 1]
        value = tokens - price * seconds[1 + count]
        if value > best_value:
            best_value, best = value, count
    return best


def least_survival(seconds: Sequence[float], price: float) -> float:
    """What the likeliest node must survive with for any draft to pay: the least that a row costs when taken by many.

    Args:
        seconds: of a step with 0, 1, ... rows.
        price: tokens per second that the engine makes otherwise.

    >>> least_survival([0.0, 1.0, 1.5, 1.5], 2.0)
    0.5
    """
    rows = range(2, len(seconds))
    return max(0.0, price * min([(seconds[m] - seconds[1]) / (m - 1) for m in rows], default=0.0))
