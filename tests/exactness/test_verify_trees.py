"""The output law of the rules for trees, computed exactly over small vocabularies, equals the target's with ==."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

import pytest

from forerun.types import Draft, Verdict
from forerun.verify import RULES, rrsw, traversal, verify
from tests.exactness.exact_drafters import (
    branching,
    drafter_model,
    fixed_tree,
    only_zeros,
    random_branching,
    sampled_chain,
    sampled_tree,
    tree_model,
)
from tests.exactness.rational import (
    Drafter,
    Model,
    Oracle,
    Tokens,
    enumerate_law,
    law_of_steps,
    mean_accepted,
    plain_law,
    random_model,
    verdict_of,
)

TREE_RULES = ["rrsw", "traversal"]

SHAPES = {
    "2,2": (branching(2, 2), 8),
    "3,1,1": (branching(3, 1, 1), 2),
    "1,2,1": (branching(1, 2, 1), 8),
    "2,1,2": (branching(2, 1, 2), 4),
}


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_tree_law_of_one_step_equals_the_target(shape: str, rule: str) -> None:
    children_of, num_models = SHAPES[shape]
    for seed in range(num_models):
        target, drafter = random_model(seed, 3), sampled_tree(tree_model(seed), children_of)
        assert law_of_steps(RULES[rule].verify, target, drafter, 1, 4) == plain_law(target, 4)


@pytest.mark.parametrize("rule", TREE_RULES)
def test_tree_law_with_shapes_that_depend_on_the_prefix(rule: str) -> None:
    for seed in range(12):
        target = random_model(seed, 3)
        drafter = sampled_tree(tree_model(seed), random_branching(seed, 3, 2))
        assert law_of_steps(RULES[rule].verify, target, drafter, 1, 4) == plain_law(target, 4)


@pytest.mark.parametrize("rule", TREE_RULES)
def test_tree_law_of_more_children_than_the_target_has_tokens(rule: str) -> None:
    for seed in range(12):
        target = random_model(seed, 4, zeros=0.6)
        for model in (drafter_model(seed, 4), only_zeros(target, 4)):
            drafter = sampled_tree(model, branching(4))
            assert law_of_steps(RULES[rule].verify, target, drafter, 1, 2) == plain_law(target, 2)


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("shape", [branching(2), branching(2, 1), random_branching(3, 2, 2)])
def test_tree_law_of_consecutive_steps_equals_the_target(shape: Callable[[Tokens, int], int], rule: str) -> None:
    for seed in range(2):
        target, drafter = random_model(seed, 3), sampled_tree(tree_model(seed), shape)
        assert law_of_steps(RULES[rule].verify, target, drafter, 2, 3) == plain_law(target, 3)


@pytest.mark.parametrize("rule", ["token", "block", *TREE_RULES])
def test_steps_with_and_without_sampled_nodes_follow_each_other(rule: str) -> None:
    """Drafts of fixed nodes, and no draft at all, are served by `coupled` between steps of another rule."""
    served = set()

    def walk(draft: Draft, *rest: object) -> Verdict:
        serving, verdict = verify(rule, draft, *rest)  # type: ignore[arg-type]
        served.add((draft.traits.has_sampled, serving))
        return verdict

    for seed in range(5):
        target, sampled, fixed = random_model(seed, 3), sampled_chain(drafter_model(seed, 3), 2), fixed_tree(3, 3)

        def propose(oracle: Oracle, prefix: Tokens, seed: int = seed, sampled=sampled, fixed=fixed) -> Draft:
            turn = random.Random(f"{seed} turn {prefix}").randrange(3)
            return sampled(oracle, prefix) if turn == 0 else fixed(oracle, prefix) if turn == 1 else Draft()

        assert law_of_steps(walk, target, propose, 3, 3) == plain_law(target, 3)
    assert served == {(True, rule), (False, "coupled")}


def test_traversal_is_block_and_rrsw_is_token_on_chains() -> None:
    for seed in range(10):
        target, drafter = random_model(seed, 3), sampled_chain(drafter_model(seed, 3), 3)

        def law(rule: str, target: Model = target, drafter: Drafter = drafter) -> dict[object, Fraction]:
            def outcome(oracle: Oracle) -> object:
                draft = drafter(oracle, ())
                verdict = verdict_of(RULES[rule].verify, oracle, target, draft)
                return draft.token_ids, verdict.accepted, verdict.next_token_id

            return enumerate_law(outcome)

        assert law("traversal") == law("block")
        assert law("rrsw") == law("token")


def test_traversal_accepts_more_than_rrsw() -> None:
    """By how much depends on the tree; it holds for every one of these."""
    for seed in range(4):
        target, drafter = random_model(seed, 3), sampled_tree(tree_model(seed), branching(2, 2))
        assert mean_accepted(traversal.verify, target, drafter) >= mean_accepted(rrsw.verify, target, drafter)
