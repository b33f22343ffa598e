"""Merging proposals and choosing nodes, against trying every set of nodes."""

import itertools
import random

import pytest

from forerun.control.candidates import Candidates, by_survival, choose_count
from forerun.drafters.base import Proposal
from forerun.types import Draft


def proposal(token_ids: list[int], parents: list[int], origin: str = "a") -> Proposal:
    n = len(token_ids)
    draft = Draft(tuple(token_ids), tuple(parents), (origin,) * n, (None,) * n)
    draft.check_integrity()
    return Proposal(draft, tuple(range(n)))


def random_proposal(rng: random.Random, origin: str, num_nodes: int) -> Proposal:
    token_ids: list[int] = []
    parents: list[int] = []
    while len(token_ids) < num_nodes:
        parent, token_id = rng.randrange(-1, len(token_ids)), rng.randrange(4)
        if (parent, token_id) not in zip(parents, token_ids, strict=True):
            token_ids.append(token_id)
            parents.append(parent)
    return proposal(token_ids, parents, origin)


def paths(draft: Draft) -> dict[tuple[int, ...], str]:
    """Each node's tokens from the root, with its origin."""
    out: list[tuple[int, ...]] = []
    for node, token_id in enumerate(draft.token_ids):
        parent = draft.parents[node]
        out.append((*(out[parent] if parent >= 0 else ()), token_id))
    return dict(zip(out, draft.origins, strict=True))


def merged(*proposals: tuple[Proposal, list[float]], is_fixed: bool = False) -> Candidates:
    candidates = Candidates()
    for item, rates in proposals:
        candidates.merge(item, is_fixed, rates.__getitem__)
    return candidates


@pytest.mark.parametrize("seed", range(30))
def test_merging_is_the_union_of_paths(seed: int) -> None:
    rng = random.Random(seed)
    one, two = random_proposal(rng, "one", rng.randrange(8)), random_proposal(rng, "two", rng.randrange(8))
    rates = [[rng.random() for _ in range(8)] for _ in range(2)]
    candidates = merged((one, rates[0]), (two, rates[1]))
    whole = candidates.draft_of(range(len(candidates.token_ids)), "shared")
    whole.check_integrity()
    assert set(paths(whole)) == set(paths(one.draft)) | set(paths(two.draft))
    for node, path in enumerate(paths(whole)):
        known = [rates[i][list(paths(p.draft)).index(path)] for i, p in enumerate((one, two)) if path in paths(p.draft)]
        assert candidates.rates[node] == max(known)


def test_a_node_belongs_to_who_is_surer() -> None:
    one, two = proposal([5, 6], [-1, 0], "one"), proposal([5, 7], [-1, 0], "two")
    candidates = merged((one, [0.3, 0.5]), (two, [0.6, 0.2]))
    assert paths(candidates.draft_of(range(3), "shared")) == {(5,): "two", (5, 6): "one", (5, 7): "two"}


def test_siblings_never_have_more_than_one_together() -> None:
    candidates = merged((proposal([1, 2, 3, 9], [-1, -1, -1, 0]), [0.9, 0.9, 0.2, 0.5]))
    survivals = candidates.survivals()
    assert sum(survivals[:3]) == pytest.approx(1.0)
    assert survivals[3] == pytest.approx(0.9 / 2.0 * 0.5)
    assert merged((proposal([1, 2], [-1, -1]), [0.5, 0.2])).survivals() == [0.5, 0.2]


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_is_the_best_tree_there_is(seed: int) -> None:
    """For costs that depend on the number of rows alone, no set of nodes that is a tree is worth more."""
    rng = random.Random(seed)
    item = random_proposal(rng, "a", rng.randrange(1, 9))
    n = item.draft.num_nodes
    candidates = merged((item, [rng.random() for _ in range(n)]))
    survivals = candidates.survivals()
    seconds = [0.0, *itertools.accumulate(rng.choice([0.0, 0.05, 0.3, 0.6]) for _ in range(n + 1))]
    price = rng.uniform(0.2, 2.0)
    order, num_fixed = by_survival(candidates, survivals)
    assert num_fixed == 0
    count = choose_count([survivals[node] for node in order], 0, seconds, price)

    def value(nodes: tuple[int, ...]) -> float:
        return sum(survivals[node] for node in nodes) - price * seconds[1 + len(nodes)]

    best = max(
        value(nodes)
        for size in range(n + 1)
        for nodes in itertools.combinations(range(n), size)
        if all(item.draft.parents[node] in (-1, *nodes) for node in nodes)
    )
    assert value(tuple(order[:count])) == pytest.approx(best)
    candidates.draft_of(order[:count], "shared").check_integrity()


def test_a_dip_in_the_cost_is_found_behind_a_hill() -> None:
    assert choose_count([0.5, 0.5, 0.5, 0.5], 0, [0.0, 1.0, 2.0, 2.0, 2.0, 2.0], 1.0) == 4
    assert choose_count([0.5, 0.4], 0, [0.0, 1.0, 2.0, 2.0], 1.0) == 0


def test_fixed_nodes_come_first_and_stay() -> None:
    candidates = merged((proposal([1, 2], [-1, -1]), [0.9, 0.8]))
    candidates.merge(proposal([3, 4], [-1, 0], "b"), True, [0.01, 0.01].__getitem__)
    survivals = candidates.survivals()
    order, num_fixed = by_survival(candidates, survivals)
    assert (order[:2], num_fixed) == ([2, 3], 2)
    ordered = [survivals[node] for node in order]
    assert choose_count(ordered, num_fixed, [0.0, 1.0, 9.0, 99.0, 999.0, 9999.0], 1.0) == 2
    assert choose_count(ordered, num_fixed, [1.0] * 6, 1.0) == 4
