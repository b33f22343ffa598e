"""Merging proposals and choosing nodes, against trying every set of nodes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from forerun.control.acceptance import AcceptanceTable, RequestRates
from forerun.control.candidates import Candidates, choose_nodes
from forerun.control.cost import CostCurve, StepCosts

# Token ids, parents, and each node's acceptance given its parent's.
Nodes = tuple[Sequence[int], Sequence[int], Sequence[float]]
Path = tuple[int, ...]


def merged(*proposals: Nodes, fixed: int = -1) -> Candidates:
    """The candidates of some proposals, of which one may be fixed."""
    candidates = Candidates()
    for i, (token_ids, parents, rates) in enumerate(proposals):
        own = RequestRates(AcceptanceTable(rates))
        candidates.merge(token_ids, parents, range(len(token_ids)), i == fixed, own)
    return candidates


def paths(token_ids: Sequence[int], parents: Sequence[int]) -> list[Path]:
    """Each node's tokens from the root."""
    out: list[Path] = []
    for token_id, parent in zip(token_ids, parents, strict=True):
        out.append((*(out[parent] if parent >= 0 else ()), token_id))
    return out


def costs_of(seconds: Sequence[float]) -> StepCosts:
    """Costs of 1, 2, ... rows, and no overhead worth mentioning."""
    return StepCosts(CostCurve(tuple(range(1, len(seconds) + 1)), tuple(1e3 * s for s in seconds), 0, 0.0, 0.0))


def choose(
    candidates: Candidates, max_nodes: int, takes_paying: bool, costs: StepCosts | None, price: float
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int, float]:
    """The choice for a single request."""
    [choice] = choose_nodes([candidates], [max_nodes], takes_paying, costs, 1, 1, 0.0, 64, price)
    return choice


def chosen(candidates: Candidates, seconds: Sequence[float], price: float) -> int:
    return len(choose(candidates, len(seconds) - 1, True, costs_of(seconds), 1e-3 * price)[0])


def everything(candidates: Candidates) -> dict[Path, int]:
    """The path of every node, and the proposal whose it is."""
    token_ids, parents, owners, *_ = choose(candidates, 64, True, costs_of([1.0] * 64), 0.0)
    return dict(zip(paths(token_ids, parents), owners, strict=True))


def random_nodes(rng: random.Random, num_nodes: int) -> Nodes:
    token_ids: list[int] = []
    parents: list[int] = []
    while len(token_ids) < num_nodes:
        parent, token_id = rng.randrange(-1, len(token_ids)), rng.randrange(4)
        if (parent, token_id) not in zip(parents, token_ids, strict=True):
            token_ids.append(token_id)
            parents.append(parent)
    return token_ids, parents, [rng.uniform(0.01, 0.99) for _ in token_ids]


@pytest.mark.parametrize("seed", range(30))
def test_merging_is_the_union_of_paths_and_each_node_is_whose_is_surer(seed: int) -> None:
    rng = random.Random(seed)
    proposals = [random_nodes(rng, rng.randrange(8)) for _ in range(2)]
    of = [dict(zip(paths(token_ids, parents), rates, strict=True)) for token_ids, parents, rates in proposals]
    owners = everything(merged(*proposals))
    assert set(owners) == of[0].keys() | of[1].keys()
    for path, owner in owners.items():
        assert of[owner][path] == max(rates[path] for rates in of if path in rates)


def test_a_node_belongs_to_who_is_surer() -> None:
    candidates = merged(([5, 6], [-1, 0], [0.3, 0.5]), ([5, 7], [-1, 0], [0.6, 0.2]))
    assert everything(candidates) == {(5,): 1, (5, 6): 0, (5, 7): 1}


def test_siblings_never_have_more_than_one_together() -> None:
    def tokens(*nodes: Nodes) -> float:
        return choose(merged(*nodes), 64, True, costs_of([1.0] * 64), 0.0)[-1]

    assert tokens(([1, 2, 3], [-1, -1, -1], [0.9, 0.9, 0.2])) == pytest.approx(2.0)
    assert tokens(([1, 2, 3, 9], [-1, -1, -1, 0], [0.9, 0.9, 0.2, 0.5])) == pytest.approx(2.0 + 0.9 / 2.0 * 0.5)
    assert tokens(([1, 2], [-1, -1], [0.5, 0.2])) == pytest.approx(1.7)


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_is_the_best_tree_there_is(seed: int) -> None:
    """For costs that depend on the number of rows alone, no set of nodes that is a tree is worth more."""
    rng = random.Random(seed)
    token_ids, parents, rates = random_nodes(rng, rng.randrange(1, 9))
    n = len(token_ids)
    totals = [sum(r for r, p in zip(rates, parents, strict=True) if p == parent) for parent in range(-1, n)]
    survivals: list[float] = []
    for rate, parent in zip(rates, parents, strict=True):
        survivals.append((survivals[parent] if parent >= 0 else 1.0) * rate / max(1.0, totals[1 + parent]))
    seconds = [1.0, *itertools.accumulate((rng.choice([0.0, 0.05, 0.3, 0.6]) for _ in range(n)), initial=1.0)][1:]
    price = rng.uniform(0.2, 2.0)

    def value(nodes: Sequence[int]) -> float:
        return sum(survivals[node] for node in nodes) - price * seconds[len(nodes)]

    best = max(
        value(nodes)
        for size in range(n + 1)
        for nodes in itertools.combinations(range(n), size)
        if all(parents[node] in (-1, *nodes) for node in nodes)
    )
    choice = choose(merged((token_ids, parents, rates)), n, True, costs_of(seconds), 1e-3 * price)
    assert value(choice[3]) == pytest.approx(best, abs=1e-6)
    assert choice[-1] == pytest.approx(1.0 + sum(survivals[node] for node in choice[3]))
    assert paths(*choice[:2]) == [paths(token_ids, parents)[node] for node in choice[3]]


def test_a_dip_in_the_cost_is_found_behind_a_hill() -> None:
    chain = ([1, 2, 3, 4], [-1, 0, 1, 2], [0.5, 0.99, 0.99, 0.99])
    assert chosen(merged(chain), [1.0, 2.0, 2.0, 2.0, 2.0], 1.0) == 4
    assert chosen(merged(([1, 2], [-1, 0], [0.5, 0.8])), [1.0, 2.0, 2.0], 1.0) == 0


def test_fixed_nodes_come_first_and_stay() -> None:
    both = (([1, 2], [-1, -1], [0.9, 0.05]), ([3, 4], [-1, 0], [0.01, 0.01]))
    token_ids, parents, owners, nodes, num_nodes, num_fixed, _ = choose(
        merged(*both, fixed=1), 8, True, costs_of([1.0, 9.0, 99.0, 999.0, 9999.0]), 1e-3
    )
    assert (token_ids, parents, owners, nodes) == ((3, 4), (-1, 0), (1, 1), (0, 1))
    assert (num_nodes, num_fixed) == (4, 2)
    assert chosen(merged(*both, fixed=1), [1.0] * 5, 1.0) == 4
    # Without costs, or where no other is wanted, they are all there is; and never more than there may be.
    assert choose(merged(*both, fixed=1), 8, True, None, 0.0)[0] == (3, 4)
    assert choose(merged(*both, fixed=1), 8, False, costs_of([1.0] * 5), 1e-3)[0] == (3, 4)
    assert choose(merged(*both, fixed=1), 1, True, costs_of([1.0] * 5), 1e-3)[0] == (3,)
