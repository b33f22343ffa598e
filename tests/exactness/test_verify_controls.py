"""What must fail: each known way to lose exactness turns the enumerated law red, so that a green one says something."""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from forerun.errors import EngineFault
from forerun.sampling.distribution import Law
from forerun.sampling.noise import Stream
from forerun.types import Draft
from forerun.verify import RULES, block, coupled, ratio, rounds, rrsw, traversal
from tests.exactness.exact_drafters import (
    argmax_chain,
    branching,
    drafter_model,
    sampled_chain,
    sampled_tree,
    tree_model,
    tree_of,
)
from tests.exactness.rational import (
    Drafter,
    Model,
    Oracle,
    Row,
    Tokens,
    as_array,
    law_of_steps,
    plain_law,
    random_model,
)

RATIO_RULES = ["token", "block", "rrsw", "traversal"]
TREE_RULES = ["rrsw", "traversal"]
MODULES = [ratio, rounds, block, rrsw, traversal]


def differs_from_target(
    rule: str, drafter_of: Callable[[int], Drafter], num_steps: int = 1, length: int = 3, num_models: int = 4
) -> bool:
    """Whether the harness finds any of a few models wrong."""
    return any(
        law_of_steps(RULES[rule].verify, target, drafter_of(seed), num_steps, length) != plain_law(target, length)  # type: ignore[index]
        for seed in range(num_models)
        for target in [random_model(seed, 3)]
    )


def chain_of_two(seed: int) -> Drafter:
    return sampled_chain(drafter_model(seed, 3), 2)


def tree_of_two(seed: int) -> Drafter:
    return sampled_tree(tree_model(seed), branching(2, 1))


def usual_drafter(rule: str) -> Callable[[int], Drafter]:
    return tree_of_two if rule in TREE_RULES else chain_of_two


def patch_everywhere(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    """Replaces a function of `ratio` in every module that uses it."""
    for module in MODULES:
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_harness_passes_the_rules_that_the_controls_break(rule: str) -> None:
    assert not differs_from_target(rule, usual_drafter(rule))
    assert not differs_from_target(rule, chain_of_two, num_steps=2)


# ---- arithmetic ---------------------------------------------------------------------------------------------------

owed, without = ratio.owed, ratio.without

BROKEN: dict[str, tuple[object, str, object]] = {
    "max for min": (None, "acceptance", lambda p, q: max(1, p / q)),
    "ratio upside down": (None, "acceptance", lambda p, q: min(1, q / p) if p else Fraction(0)),
    "accepted with p": (None, "acceptance", lambda p, q: min(1, p)),
    "all of p is owed": (None, "owed", lambda p, q, token_id, kept=1: owed(p, q, token_id, 1) and p),
    "p without the token is owed": (None, "owed", lambda p, q, token_id, kept=1: without(p, token_id)),
    "q with its sign changed": (None, "owed", lambda p, q, token_id, kept=1: owed(q, p, token_id, 1)),
    "p not normalised in the test": (Law, "prob", lambda self, token_id: self.weight(token_id)),
    "p not normalised in what is owed": (
        None,
        "owed",
        lambda p, q, token_id, kept=1: owed(Law(p.token_ids, p.weights, Fraction(1)), q, token_id, kept),
    ),
}


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_arithmetic_is_found(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, value = BROKEN[name]
    if where is None:
        patch_everywhere(monkeypatch, attribute, value)
    else:
        monkeypatch.setattr(where, attribute, value)
    assert fails(rule)


def fails(rule: str) -> bool:
    """Whether the law is wrong, or the arithmetic so wrong that there is none."""
    try:
        return differs_from_target(rule, usual_drafter(rule))
    except (ZeroDivisionError, EngineFault, IndexError):
        return True


@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_what_is_owed_without_the_chance_to_get_there_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """(p - q)+ instead of (P p - q)+."""
    patch_everywhere(monkeypatch, "owed", lambda p, q, token_id, kept=1: owed(p, q, token_id, 1))
    assert differs_from_target(rule, usual_drafter(rule))


@pytest.mark.parametrize("rule", TREE_RULES)
def test_siblings_that_are_not_taken_out_of_the_draft_law_are_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_everywhere(monkeypatch, "without", lambda law, token_id: law)
    assert differs_from_target(rule, tree_of_two)


@pytest.mark.parametrize("rule", TREE_RULES)
def test_a_draft_law_that_is_not_normalised_again_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_everywhere(
        monkeypatch, "without", lambda law, token_id: Law(law.token_ids, without(law, token_id).weights, law.total)
    )
    assert differs_from_target(rule, tree_of_two)


# ---- noise --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_one_coin_for_two_nodes_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    toss = Oracle.coin
    monkeypatch.setattr(Oracle, "coin", lambda self, key, node, committed_len: toss(self, key, 0, committed_len))
    assert differs_from_target(rule, usual_drafter(rule), num_models=8)


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_one_coin_for_two_steps_is_found_only_over_two_steps(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    toss = Oracle.coin
    monkeypatch.setattr(Oracle, "coin", lambda self, key, node, committed_len: toss(self, key, node, 0))
    assert not differs_from_target(rule, chain_of_two)
    assert differs_from_target(rule, chain_of_two, num_steps=2)


@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_coins_of_a_position_instead_of_a_step_are_found_only_over_two_steps(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is dropped with one before it had its coin compared: the position's next coin must be another."""
    toss = Oracle.coin
    monkeypatch.setattr(Oracle, "coin", lambda self, key, node, committed_len: toss(self, key, committed_len + node, 0))
    assert not differs_from_target(rule, chain_of_two)
    assert differs_from_target(rule, chain_of_two, num_steps=2)


def test_coins_of_a_position_happen_to_suffice_for_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops at the first rejection, so a position's coin decides once. Nothing relies on it."""
    toss = Oracle.coin
    monkeypatch.setattr(Oracle, "coin", lambda self, key, node, committed_len: toss(self, key, committed_len + node, 0))
    assert not differs_from_target("token", chain_of_two, num_steps=2)


def test_draft_noise_of_a_position_instead_of_a_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Oracle.draw

    def by_position(self: Oracle, law: Law, key: int, node: int, count: int, stream: Stream, in_step: int) -> Tokens:
        return draw(self, law, key, in_step + node, count, stream, 0)

    monkeypatch.setattr(Oracle, "draw", by_position)
    assert not differs_from_target("block", chain_of_two)
    assert differs_from_target("block", chain_of_two, num_steps=2)


def two_branches_with_one_noise(seed: int) -> Drafter:
    """The children of two siblings have one position; here they are drawn with its noise instead of their own."""
    whole = tree_of_two(seed)
    draw = Oracle.draw

    def by_position(self: Oracle, law: Law, key: int, node: int, count: int, stream: Stream, in_step: int) -> Tokens:
        return draw(self, law, key, node if node < 2 else 2, count, stream, in_step)

    def propose(oracle: Oracle, prefix: Tokens) -> Draft:
        oracle.draw = functools.partial(by_position, oracle)  # type: ignore[method-assign]
        return whole(oracle, prefix)

    return propose


def test_two_branches_with_one_noise_are_found_where_leaves_are_tested_first() -> None:
    assert differs_from_target("traversal", two_branches_with_one_noise)
    assert not differs_from_target("rrsw", two_branches_with_one_noise)  # it never looks into a second branch


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_shared_noise_in_draft_and_residual_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias that makes rules refuse such drafts."""
    patch_everywhere(
        monkeypatch, "last_draw", lambda law, sampler, key, pos, committed_len: sampler.sample(law, key, pos)
    )

    def mislabelled(seed: int) -> Drafter:
        return sampled_chain(drafter_model(seed, 3), 1, "shared", declared="draft")

    assert differs_from_target(rule, mislabelled)


# ---- drafts that aren't what they say -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_f007_likeliest_tokens_declared_as_sampled_are_found(rule: str) -> None:
    """Argmax drafts accepted by the ratio rule."""
    assert differs_from_target(rule, lambda seed: argmax_chain(drafter_model(seed, 3), 2, with_rows=True))


def likeliest_children(seed: int) -> Drafter:
    """The two likeliest ids, declared as drawn without replacement."""
    model = tree_model(seed)

    def propose(_: Oracle, prefix: Tokens) -> Draft:
        q = model(prefix)
        row = as_array(q)
        likeliest = sorted(range(3), key=lambda token_id: (-q[token_id], token_id))[:2]
        return tree_of([(-1, token_id, row) for token_id in likeliest if q[token_id]])

    return propose


@pytest.mark.parametrize("rule", TREE_RULES)
def test_likeliest_children_declared_as_sampled_are_found(rule: str) -> None:
    assert differs_from_target(rule, likeliest_children)


def pruned(drafter_of: Callable[[int], Drafter], keeps: Callable[[Draft], list[int]]) -> Callable[[int], Drafter]:
    """Keeps some leaves' nodes of every draft, as their values say."""

    def of(seed: int) -> Drafter:
        whole = drafter_of(seed)

        def propose(oracle: Oracle, prefix: Tokens) -> Draft:
            draft = whole(oracle, prefix)
            kept = keeps(draft)
            place = {node: i for i, node in enumerate(kept)} | {-1: -1}
            return Draft(
                tuple(draft.token_ids[node] for node in kept),
                tuple(place[draft.parents[node]] for node in kept),
                ("model",) * len(kept),
                tuple(draft.q_rows[node] for node in kept),
                draft.stream,
                "prefix_only",
            )

        return propose

    return of


def likely_nodes(draft: Draft) -> list[int]:
    """Nodes down to the first that came out unlikely, in each branch."""
    kept: list[int] = []
    for node, parent in enumerate(draft.parents):
        if draft.drafted_prob(node) > Fraction(2, 5) and (parent < 0 or parent in kept):
            kept.append(node)
    return kept


def best_nodes(draft: Draft, budget: int = 2) -> list[int]:
    """The likeliest paths within a budget: a choice over what was drawn everywhere in the tree."""
    paths: list[Any] = []
    for node, parent in enumerate(draft.parents):
        paths.append(draft.drafted_prob(node) * (paths[parent] if parent >= 0 else 1))
    return sorted(sorted(range(draft.num_nodes), key=lambda node: (-paths[node], node))[:budget])


def by_probability(seed: int) -> Drafter:
    """Siblings sorted by q after they were drawn."""
    whole = sampled_tree(tree_model(seed), branching(2))

    def propose(oracle: Oracle, prefix: Tokens) -> Draft:
        draft = whole(oracle, prefix)
        order = sorted(range(draft.num_nodes), key=lambda node: -draft.drafted_prob(node))
        return tree_of([(-1, draft.token_ids[node], draft.q_rows[node]) for node in order])

    return propose


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_pruning_by_drawn_values_is_found(rule: str) -> None:
    assert differs_from_target(rule, pruned(usual_drafter(rule), likely_nodes))


@pytest.mark.parametrize("rule", TREE_RULES)
def test_a_budget_over_the_whole_tree_is_found(rule: str) -> None:
    assert differs_from_target(rule, pruned(tree_of_two, best_nodes))


@pytest.mark.parametrize("rule", TREE_RULES)
def test_sorted_siblings_are_found(rule: str) -> None:
    assert differs_from_target(rule, by_probability)


def test_pruning_by_drawn_values_is_harmless_under_coupled() -> None:
    def shared_chain(seed: int) -> Drafter:
        return sampled_chain(drafter_model(seed, 3), 1, "shared")

    assert not differs_from_target("coupled", pruned(shared_chain, likely_nodes))


def colder(model: Model) -> Model:
    """The law at half the temperature."""

    def row(prefix: Tokens) -> Row:
        squares = [p * p for p in model(prefix)]
        return tuple(square / sum(squares) for square in squares)

    return row


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_q_of_another_temperature_is_found(rule: str) -> None:
    def mislabelled(seed: int) -> Drafter:
        model = tree_model(seed)
        whole = sampled_tree(model, branching(2, 1) if rule in TREE_RULES else branching(1, 1))

        def propose(oracle: Oracle, prefix: Tokens) -> Draft:
            draft = whole(oracle, prefix)
            paths: list[Tokens] = []
            rows: dict[int, Any] = {}
            nodes = []
            for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
                path = paths[parent] if parent >= 0 else prefix
                paths.append((*path, token_id))
                nodes.append((parent, token_id, rows.setdefault(parent, as_array(colder(model)(path)))))
            return tree_of(nodes)

        return propose

    assert differs_from_target(rule, mislabelled)


# ---- and is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_ratio_rules_refuse_shared_noise_and_free_pruning_before_any_draw(rule: str) -> None:
    q_V = np.array([0.5, 0.5])
    for stream, pruning, reason in (
        ("shared", "prefix_only", "sampled from draft noise only, not from shared"),
        ("draft", "any", "exact for pruning prefix_only"),
    ):
        draft = Draft((0,), (-1,), ("model",), (q_V,), stream, pruning)  # type: ignore[arg-type]
        with pytest.raises(EngineFault, match=reason):
            RULES[rule].verify(draft, lambda _: Law.point(0), Oracle(), 0, 0)  # type: ignore[index, arg-type]


def test_coupled_takes_all_of_them() -> None:
    q_V = np.array([0.5, 0.5])
    draft = Draft((0, 0), (-1, -1), ("model",) * 2, (q_V, None), "shared", "any", with_replacement=True)
    assert coupled.verify(draft, lambda _: Law.point(0), Oracle(), 0, 0).accepted == (0,)  # type: ignore[arg-type]
