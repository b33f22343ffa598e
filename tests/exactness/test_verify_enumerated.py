"""Every offered rule's output law, computed exactly over small vocabularies, equals the target's with ==."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest

from forerun.types import NoiseStream
from forerun.verify import RULES, coupled
from tests.exactness.exact_drafters import (
    argmax_chain,
    confident,
    drafter_model,
    fixed_tree,
    greedy,
    lookup_chain,
    lookup_then_sampled,
    only_zeros,
    random_branching,
    sampled_chain,
    sampled_tree,
)
from tests.exactness.rational import (
    Drafter,
    Model,
    Oracle,
    both_win,
    enumerate_law,
    law_of_steps,
    mean_accepted,
    plain_law,
    random_model,
    verdict_of,
)

CHAIN_RULES = ["token", "block"]
TREE_RULES = ["rrsw", "traversal"]


CHAINS: dict[str, Callable[[int, int, int], Drafter]] = {
    "sampled": lambda seed, k, v: sampled_chain(drafter_model(seed, v), k),
    "prefix-dependent length": lambda seed, k, v: sampled_tree(drafter_model(seed, v), random_branching(seed, k, 1)),
    "row-dependent length": lambda seed, k, v: sampled_tree(drafter_model(seed, v), confident(drafter_model(seed, v))),
    "argmax": lambda seed, k, v: argmax_chain(drafter_model(seed, v), k),
    "lookup": lambda seed, k, v: lookup_chain(k, v),
    "lookup and sampled": lambda seed, k, v: lookup_then_sampled(drafter_model(seed, v), k, v),
    "impossible": lambda seed, k, v: sampled_chain(only_zeros(random_model(seed, v), v), k),
}


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize(("vocab_size", "num_models"), [(3, 40), (4, 12)])
def test_chain_law_of_one_step_equals_the_target(kind: str, vocab_size: int, num_models: int, rule: str) -> None:
    k = 3
    for seed in range(num_models):
        target, drafter = random_model(seed, vocab_size), CHAINS[kind](seed, k, vocab_size)
        assert law_of_steps(RULES[rule].verify, target, drafter, 1, k + 1) == plain_law(target, k + 1)


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize("kind", CHAINS)
def test_chain_law_of_consecutive_steps_equals_the_target(kind: str, rule: str) -> None:
    for seed in range(3):
        target, drafter = random_model(seed, 3), CHAINS[kind](seed, 2, 3)
        assert law_of_steps(RULES[rule].verify, target, drafter, 2, 4) == plain_law(target, 4)


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_chain_law_with_a_drafter_that_equals_the_target(rule: str) -> None:
    for seed in range(4):
        target = random_model(seed, 4)
        drafter = sampled_chain(target, 3)

        def accepts_all(oracle: Oracle, target: Model = target, drafter: Drafter = drafter) -> bool:
            return len(verdict_of(RULES[rule].verify, oracle, target, drafter(oracle, ())).accepted) == 3

        assert law_of_steps(RULES[rule].verify, target, drafter, 1, 4) == plain_law(target, 4)
        assert enumerate_law(accepts_all) == {True: 1}


@pytest.mark.parametrize("rule", [*CHAIN_RULES, *TREE_RULES])
def test_greedy_laws_give_the_greedy_tokens(rule: str) -> None:
    for seed in range(10):
        target = greedy(random_model(seed, 3))
        for drafter in (sampled_chain(drafter_model(seed, 3), 2), sampled_chain(target, 2)):
            assert law_of_steps(RULES[rule].verify, target, drafter, 2, 4) == plain_law(target, 4)


# ---- how much is accepted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [*CHAIN_RULES, *TREE_RULES])
def test_one_node_is_accepted_with_one_minus_total_variation(rule: str) -> None:
    for seed in range(20):
        target, drafter = random_model(seed, 4), drafter_model(seed, 4)
        tv = sum(abs(a - b) for a, b in zip(target(()), drafter(()), strict=True)) / 2
        assert mean_accepted(RULES[rule].verify, target, sampled_chain(drafter, 1)) == 1 - tv


def test_block_keeps_a_node_with_the_chance_that_the_paper_gives() -> None:
    """E tau = sum_i E P[i]; it is never less than what `token` keeps."""
    num_better = 0
    for seed in range(8):
        target, model = random_model(seed, 3), drafter_model(seed, 3)
        expected = Fraction(0)
        for length in (1, 2, 3):
            for tokens in product(range(3), repeat=length):
                drawn, kept = Fraction(1), Fraction(1)
                for i, token_id in enumerate(tokens):
                    q = model(tokens[:i])[token_id]
                    drawn *= q
                    kept = min(Fraction(1), kept * target(tokens[:i])[token_id] / q) if q else Fraction(0)
                expected += drawn * kept
        block, token = (
            mean_accepted(RULES[name].verify, target, sampled_chain(model, 3)) for name in ("block", "token")
        )
        assert block == expected
        assert block >= token
        num_better += block > token
    assert num_better >= 4


# ---- coupled ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_nodes", [2, 5, 8])
def test_coupled_law_with_fixed_trees_equals_the_target(num_nodes: int) -> None:
    for seed in range(4):
        target = random_model(seed, 3)
        law = law_of_steps(coupled.verify, target, fixed_tree(3, num_nodes), 3, 4)
        assert law == plain_law(target, 4)


@pytest.mark.parametrize("kind", ["argmax", "lookup"])
def test_coupled_law_with_fixed_chains_equals_the_target(kind: str) -> None:
    for seed in range(4):
        target = random_model(seed, 3)
        law = law_of_steps(coupled.verify, target, CHAINS[kind](seed, 3, 3), 3, 4)
        assert law == plain_law(target, 4)


@pytest.mark.parametrize("stream", ["shared", "draft"])
def test_coupled_law_with_sampled_chains_equals_the_target(stream: NoiseStream) -> None:
    for seed in range(6):
        target, drafter = random_model(seed, 3), sampled_chain(drafter_model(seed, 3), 3, stream)
        assert law_of_steps(coupled.verify, target, drafter, 1, 4) == plain_law(target, 4)


def test_coupled_accepts_as_the_match_formula_says() -> None:
    for seed in range(20):
        target, model = random_model(seed, 4), drafter_model(seed, 4)
        p, q = target(()), model(())
        match = sum(1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(4)) for i in range(4) if p[i] and q[i])
        assert mean_accepted(coupled.verify, target, sampled_chain(model, 1, "shared")) == match


def test_joint_law_of_two_races_has_both_marginals() -> None:
    for seed in range(30):
        p, r = random_model(seed, 4)(()), drafter_model(seed, 4)(())
        joint = [[both_win(p, i, r, j) for j in range(4)] for i in range(4)]
        assert [sum(row) for row in joint] == list(p)
        assert [sum(column) for column in zip(*joint, strict=True)] == list(r)
