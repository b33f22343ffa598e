"""What a verdict reports, which rows a rule asks for, and which drafts it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forerun.errors import ConfigError, EngineFault
from forerun.sampling import make_sampler
from forerun.sampling.distribution import Law, RowSampler
from forerun.sampling.drafting import draft_from_own, draft_from_shared
from forerun.sampling.math64 import lane_sum
from forerun.types import Draft, DraftTraits, NodeTest, Verdict
from forerun.verify import RULES, check_traits, coupled, serving_rule, token, verify
from forerun.verify.ratio import owed, residual, row_law, without

KEY, COMMITTED = 11, 40
RULE_NAMES = list(RULES)
CHAIN_RULES, TREE_RULES = ["token", "block"], ["rrsw", "traversal"]
RATIO_RULES = [*CHAIN_RULES, *TREE_RULES]


@pytest.fixture(params=["native", "numpy"])
def sampler(request: pytest.FixtureRequest) -> RowSampler:
    return make_sampler(6, request.param)


def law(*weights: float) -> Law:
    return Law(None, np.array(weights), lane_sum(np.array(weights)))


FLAT = law(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


Q_V = np.array((0.0, 0.1, 0.2, 0.3, 0.4, 0.0))


def sampled(token_ids: tuple[int, ...], parents: tuple[int, ...] | None = None, **more: Any) -> Draft:
    """Nodes that say they were drawn from Q_V, as ratio rules want them; a chain unless parents are given."""
    n = len(token_ids)
    rows = (Q_V,) * n
    draft = Draft(token_ids, parents or tuple(range(-1, n - 1)), ("model",) * n, rows, "draft", "prefix_only")
    return replace(draft, **more)


def greedy_rows(*token_ids: int) -> Callable[[int], Law]:
    """The law after node n - 1 is all on token_ids[n]."""
    return lambda node: Law.point(token_ids[node + 1])


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_greedy_chains_stop_at_the_first_difference(rule: str, sampler: RowSampler) -> None:
    verdict = RULES[rule].verify(sampled((3, 1, 4)), greedy_rows(3, 2, 5, 0), sampler, KEY, COMMITTED)
    assert (verdict.accepted, verdict.next_token_id, verdict.next_kind) == ((0,), 2, "correction")
    assert (verdict.next_p, verdict.next_score) == (1.0, None)
    tests = sorted((test.node, test.accepted, test.p, test.q) for test in verdict.tests)
    assert tests == [(0, True, 1, Q_V[3]), (1, False, 0, Q_V[1])]


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_a_whole_chain_earns_the_bonus(rule: str, sampler: RowSampler) -> None:
    verdict = RULES[rule].verify(sampled((3, 1)), greedy_rows(3, 1, 5), sampler, KEY, COMMITTED)
    assert (verdict.accepted, verdict.next_token_id, verdict.next_kind) == ((0, 1), 5, "bonus")


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_without_a_draft_the_step_is_plain(rule: str, sampler: RowSampler) -> None:
    verdict = RULES[rule].verify(Draft(), lambda _: FLAT, sampler, KEY, COMMITTED)
    assert (verdict.accepted, verdict.tests, verdict.next_kind) == ((), (), "plain")
    assert verdict.next_p == 1 / 6


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_only_rows_that_matter_are_asked_for_and_each_once(rule: str, sampler: RowSampler) -> None:
    asked: list[int] = []

    def law_at(node: int) -> Law:
        asked.append(node)
        return greedy_rows(3, 1, 5, 0)(node)

    RULES[rule].verify(sampled((3, 1, 4)), law_at, sampler, KEY, COMMITTED)
    assert asked == [-1, 0, 1]


@pytest.mark.parametrize("rule", TREE_RULES)
def test_ratio_rules_walk_a_tree_when_greedy(rule: str, sampler: RowSampler) -> None:
    #        root: 4 (node 0), 2 (node 1); below node 1: 4 (node 2), 3 (node 3); below node 0: 3 (node 4)
    draft = sampled((4, 2, 4, 3, 3), (-1, -1, 1, 1, 0))
    rows = {-1: 2, 1: 3, 3: 0}
    verdict = RULES[rule].verify(draft, lambda node: Law.point(rows[node]), sampler, KEY, COMMITTED)
    assert (verdict.accepted, verdict.next_token_id, verdict.next_kind) == ((1, 3), 0, "bonus")
    tests = sorted((test.node, test.accepted) for test in verdict.tests)
    assert tests == [(0, False), (1, True), (2, False), (3, True)]


@pytest.mark.parametrize("rule", TREE_RULES)
def test_a_row_of_the_tree_that_matters_is_asked_for_once(rule: str, sampler: RowSampler) -> None:
    draft = sampled((4, 2, 4, 3, 3, 1), (-1, -1, 1, 1, 0, 4))
    for key in range(50):
        asked: list[int] = []
        verdict = RULES[rule].verify(draft, lambda node, asked=asked: asked.append(node) or FLAT, sampler, key, 3)
        assert len(set(asked)) == len(asked)
        assert asked[0] == -1
        assert set(verdict.accepted) <= set(asked)
        if rule == "rrsw":
            assert asked[1:] == list(verdict.accepted)


def test_coupled_walks_a_tree_by_token(sampler: RowSampler) -> None:
    #        root: 5 (node 0), 2 (node 1); below node 1: 4 (node 2), 3 (node 3); below node 0: 3 (node 4)
    draft = Draft((5, 2, 4, 3, 3), (-1, -1, 1, 1, 0), ("tree",) * 5, (None,) * 5)
    rows = {-1: 2, 1: 3, 3: 0}
    verdict = coupled.verify(draft, lambda node: Law.point(rows[node]), sampler, KEY, COMMITTED)
    assert (verdict.accepted, verdict.next_token_id, verdict.next_kind) == ((1, 3), 0, "bonus")
    assert [(test.node, test.accepted) for test in verdict.tests] == [(0, False), (1, True), (2, False), (3, True)]


def test_coupled_reports_the_scores_that_were_compared(sampler: RowSampler) -> None:
    row = law(0.0, 3.0, 1.0, 2.0, 4.0, 1.0)
    drawn = sampler.sample(row, KEY, COMMITTED)
    other = next(i for i in range(1, 6) if i != drawn.token_id)
    q_V = np.full(6, 1 / 6)
    draft = Draft((0, other, drawn.token_id), (-1,) * 3, ("a", "b", "c"), (None, q_V, None))
    verdict = coupled.verify(draft, lambda _: row, sampler, KEY, COMMITTED)
    impossible, rejected, accepted = verdict.tests
    assert impossible == NodeTest(0, False, 0.0, 1.0, None)
    assert rejected == NodeTest(1, False, row.prob(other), 1 / 6, sampler.score(row, KEY, COMMITTED, other))
    assert accepted == NodeTest(2, True, row.prob(drawn.token_id), 1.0, drawn.score)
    assert rejected.score > accepted.score
    after = sampler.sample(row, KEY, COMMITTED + 1)
    assert verdict == Verdict(
        (2,), after.token_id, "bonus", row.prob(after.token_id), after.score, (impossible, rejected, accepted)
    )


def test_rounds_report_the_coins_that_decided(sampler: RowSampler) -> None:
    for rule, parents in (("token", (-1, 0, 1)), ("rrsw", (-1, -1, 0))):
        verdict = RULES[rule].verify(sampled((4, 2, 3), parents), lambda _: FLAT, sampler, KEY, COMMITTED)
        for test in verdict.tests:
            assert test.score == sampler.coin(KEY, test.node, COMMITTED)
            assert test.q == Q_V[sampled((4, 2, 3)).token_ids[test.node]]
        first = verdict.tests[0]
        assert first.accepted == (first.score < min(1, first.p / first.q))
        assert verdict.next_score is None


@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_rules_that_test_backwards_report_what_was_kept_without_a_coin(rule: str, sampler: RowSampler) -> None:
    num_kept_without_a_coin = 0
    for key in range(60):
        verdict = RULES[rule].verify(sampled((4, 2, 3)), lambda _: FLAT, sampler, key, COMMITTED)
        tau = len(verdict.accepted)
        tests = {test.node: test for test in verdict.tests}
        assert sorted(tests) == [0, 1, 2]
        assert [tests[node].accepted for node in range(3)] == [node < tau for node in range(3)]
        for node in range(3):
            coin = sampler.coin(key, node, COMMITTED) if node >= tau - 1 else None
            assert tests[node].score == coin
            assert (tests[node].p, tests[node].q) == (1 / 6, Q_V[(4, 2, 3)[node]])
            num_kept_without_a_coin += coin is None
    assert num_kept_without_a_coin > 20


def test_coins_and_last_draws_are_fresh_in_every_step_and_at_every_place(sampler: RowSampler) -> None:
    used: list[tuple[object, ...]] = []

    class Recorder:
        def coin(self, key: int, node: int, committed_len: int) -> float:
            used.append(("coin", node, committed_len))
            return sampler.coin(key, node, committed_len)

        def sample(self, law: Law, key: int, *address: Any) -> Any:
            used.append(("sample", *address))
            return sampler.sample(law, key, *address)

    for rule in RATIO_RULES:
        used.clear()
        for committed_len in range(30, 50):
            parents = (-1, -1, 0) if RULES[rule].accepts_trees else None
            draft = sampled((4, 2, 3), parents)
            RULES[rule].verify(draft, lambda _: FLAT, Recorder(), KEY, committed_len)  # type: ignore[arg-type]
        assert len(set(used)) == len(used)
        assert sum(name == "sample" for name, *_ in used) == 20


# ---- the arithmetic of a rejection --------------------------------------------------------------------------------


def test_what_a_rejection_leaves_is_the_positive_part_of_the_difference() -> None:
    p = Law(np.array((1, 2, 4), np.int32), np.array((2.0, 1.0, 1.0)), 4.0)
    q = Law(None, np.array((0.1, 0.25, 0.5, 0.15, 0.0, 0.0)), 1.0)
    assert residual(p, q, 2).dense(6).tolist() == [0, 0.5, 0, 0, 0.5, 0]
    assert owed(p, q, 2).total == 0.5
    half = owed(p, q, 2, 0.75)
    assert half.weights.tolist() == [0.125, 0, 0.1875]
    assert half.total == 0.3125
    assert residual(p, None, 2).dense(6) == pytest.approx([0, 2 / 3, 0, 0, 1 / 3, 0])
    assert residual(p, None, 3).dense(6).tolist() == p.dense(6).tolist()
    assert residual(p, Law(None, p.dense(6), 1.0), 2) is p  # nothing is left: only rounding can lead there
    assert residual(Law.point(3), None, 3).only_id == 3
    assert (p.weights.tolist(), q.weights.tolist()) == ([2, 1, 1], [0.1, 0.25, 0.5, 0.15, 0, 0])


def test_a_law_that_nothing_cuts_and_one_that_keeps_ids_leave_the_same() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        weights, q_V = rng.random(9) * (rng.random(9) > 0.4), rng.random(9)
        weights[0] = 1.0
        whole = Law(None, weights, weights.sum().item())
        kept = np.flatnonzero(weights).astype(np.int32)
        cut = Law(kept, weights[kept], whole.total)
        q = Law(None, q_V, q_V.sum().item())
        left_of_whole, left_of_cut = residual(whole, q, 0, 0.7), residual(cut, q, 0, 0.7)
        assert left_of_cut.dense(9) == pytest.approx(left_of_whole.dense(9), abs=1e-15)


def test_without_a_token_the_rest_keeps_its_proportions() -> None:
    law = Law(np.array((1, 2, 4), np.int32), np.array((2.0, 1.0, 1.0)), 4.0)
    assert without(law, 1).dense(5).tolist() == [0, 0, 0.5, 0, 0.5]
    assert without(law, 3).dense(5).tolist() == law.dense(5).tolist()
    assert without(Law.point(2), 2).total == 0


# ---- what a rule is exact for -------------------------------------------------------------------------------------

TREE = sampled((1, 2), (-1, -1))
MIXED = sampled((1, 2), q_rows=(Q_V, None))
MIXED_TREE = sampled((1, 2), (-1, -1), q_rows=(Q_V, None))
SHARED = sampled((1,), stream="shared")
PRUNED = sampled((1,), pruning="any")
EQUAL = sampled((1, 1), (-1, -1), with_replacement=True)
REFUSALS = {
    "tree": (TREE, CHAIN_RULES, "verifies chains, not trees; a tree needs rule coupled, rrsw or traversal"),
    "fixed nodes": (MIXED, TREE_RULES, "verifies sampled nodes with no fixed ones among them"),
    "fixed nodes in a tree": (MIXED_TREE, RATIO_RULES, "verifies"),
    "shared noise": (SHARED, RATIO_RULES, "nodes sampled from draft noise only, not from shared"),
    "shared noise in a chain": (sampled((1, 2), stream="shared"), RATIO_RULES, "from draft noise only"),
    "pruned": (PRUNED, RATIO_RULES, "is exact for pruning prefix_only, where a node is kept or cut before it is drawn"),
    "with replacement": (EQUAL, TREE_RULES, "is exact for siblings drawn without replacement only"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_rule_refuses_what_it_is_not_exact_for(name: str, sampler: RowSampler) -> None:
    draft, rules, reason = REFUSALS[name]
    draft.check_integrity()
    for rule in RATIO_RULES:
        if rule in rules:
            with pytest.raises(EngineFault, match=f"rule {rule} .*{reason}|{reason}"):
                RULES[rule].verify(draft, lambda _: FLAT, sampler, KEY, COMMITTED)
            with pytest.raises(EngineFault, match=reason):
                verify(rule, draft, lambda _: FLAT, sampler, KEY, COMMITTED)
            with pytest.raises(ConfigError, match=reason):
                check_traits(rule, draft.traits)
        elif not draft.traits.is_tree or rule in TREE_RULES:
            check_traits(rule, draft.traits)
            verify(rule, draft, lambda _: FLAT, sampler, KEY, COMMITTED)


@pytest.mark.parametrize("name", REFUSALS)
def test_coupled_refuses_nothing(name: str, sampler: RowSampler) -> None:
    draft = REFUSALS[name][0]
    check_traits("coupled", draft.traits)
    coupled.verify(draft, lambda _: FLAT, sampler, KEY, COMMITTED)


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_drafts_of_fixed_nodes_are_served_by_coupled(rule: str, sampler: RowSampler) -> None:
    tree = Draft((1, 2, 3), (-1, -1, 0), ("any",) * 3, (None,) * 3)
    for draft in (Draft(), Draft.chain((1, 2), "ngram"), tree):
        check_traits(rule, draft.traits)
        assert serving_rule(rule, draft.traits) == "coupled"
        served, verdict = verify(rule, draft, lambda _: FLAT, sampler, KEY, COMMITTED)
        assert served == "coupled"
        assert verdict == coupled.verify(draft, lambda _: FLAT, sampler, KEY, COMMITTED)
    assert verify(rule, sampled((3, 1)), lambda _: FLAT, sampler, KEY, COMMITTED)[0] == rule


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_drafter_that_would_draw_from_shared_noise_is_refused_before_it_draws(rule: str) -> None:
    with pytest.raises(ConfigError, match=f"rule {rule} is exact for nodes sampled from draft noise only"):
        check_traits(rule, DraftTraits(has_sampled=True, stream="shared", pruning="prefix_only"))
    check_traits(rule, DraftTraits(has_sampled=True, stream="draft", pruning="prefix_only"))


def test_traits_say_what_a_draft_is() -> None:
    assert Draft().traits == DraftTraits()
    assert Draft.chain((1, 2), "ngram").traits == DraftTraits()
    assert TREE.traits == DraftTraits(True, False, True, "draft", "prefix_only")
    assert MIXED.traits == DraftTraits(True, True, False, "draft", "prefix_only")
    assert EQUAL.traits == DraftTraits(True, False, True, "draft", "prefix_only", True)
    assert SHARED.traits == DraftTraits(True, False, False, "shared", "prefix_only")


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_node_that_its_row_can_not_have_drawn_is_a_fault(rule: str, sampler: RowSampler) -> None:
    with pytest.raises(EngineFault, match="token 0 was drawn with q = 0"):
        RULES[rule].verify(sampled((0,)), lambda _: FLAT, sampler, KEY, COMMITTED)


@pytest.mark.parametrize("rule", TREE_RULES)
def test_a_second_child_of_a_law_with_one_token_is_a_fault(rule: str, sampler: RowSampler) -> None:
    row = np.array((0.0, 1.0, 0.0, 0.0, 0.0, 0.0))
    draft = sampled((1, 2), (-1, -1), q_rows=(row, row))
    with pytest.raises(EngineFault, match="token 2 was drawn with q = 0"):
        RULES[rule].verify(draft, lambda _: Law.point(2), sampler, KEY, COMMITTED)


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_row_that_is_not_normalised_in_float64_is_a_fault(rule: str, sampler: RowSampler) -> None:
    for row in (Q_V * 2, Q_V * (1 + 1e-8), np.float32(Q_V) / np.float32(3) * np.float64(3), Q_V * np.nan):
        with pytest.raises(EngineFault, match=r"draft node 0 sums to .*, but must be normalised in float64"):
            RULES[rule].verify(sampled((4,), q_rows=(row,)), lambda _: FLAT, sampler, KEY, COMMITTED)
    rounded = row_law(sampled((4,), q_rows=(Q_V * (1 + 1e-10),)), 0)
    assert rounded is not None
    assert rounded.prob(4) == pytest.approx(0.4, abs=1e-15)


@pytest.mark.parametrize("rule", TREE_RULES)
def test_siblings_that_do_not_carry_one_law_are_a_fault(rule: str, sampler: RowSampler) -> None:
    draft = sampled((1, 2), (-1, -1), q_rows=(Q_V, Q_V.copy()))
    with pytest.raises(EngineFault, match=r"nodes \[0, 1\] are siblings, but don't carry the one law"):
        RULES[rule].verify(draft, lambda _: FLAT, sampler, KEY, COMMITTED)


def test_coupled_accepts_one_of_equal_siblings(sampler: RowSampler) -> None:
    verdict = coupled.verify(EQUAL, greedy_rows(1, 2, 3), sampler, KEY, COMMITTED)
    assert (verdict.accepted, verdict.next_token_id) == ((0,), 2)
    assert [test.accepted for test in verdict.tests] == [True, False]


def test_drafts_say_what_can_not_be() -> None:
    for draft, reason in (
        (replace(TREE, token_ids=(1, 1)), "two siblings of a draft propose the same token"),
        (replace(TREE, stream="coin"), "stream 'coin' and pruning 'prefix_only'"),  # type: ignore[arg-type]
        (replace(TREE, pruning="some"), "stream 'draft' and pruning 'some'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(EngineFault, match=reason):
            draft.check_integrity()
    EQUAL.check_integrity()


def test_drafting_helpers_feed_the_rules(sampler: RowSampler) -> None:
    q = Law(None, Q_V, 1.0)
    own = draft_from_own(sampler, q, KEY, COMMITTED, 0, 3)
    assert RULES["traversal"].verify(sampled(own, (-1,) * 3), lambda _: FLAT, sampler, KEY, COMMITTED).tests
    shared = draft_from_shared(sampler, FLAT, KEY, COMMITTED, 2)
    draft = sampled(shared, (-1, -1), stream="shared", q_rows=(FLAT.dense(6),) * 2)
    assert coupled.verify(draft, lambda _: FLAT, sampler, KEY, COMMITTED).accepted == (0,)
    with pytest.raises(EngineFault, match="not from shared"):
        token.verify(
            replace(draft, token_ids=shared[:1], parents=(-1,), q_rows=draft.q_rows[:1]),
            greedy_rows(0),
            sampler,
            KEY,
            COMMITTED,
        )


def test_the_registry_names_its_rules() -> None:
    assert {name: rule.name for name, rule in RULES.items()} == {name: name for name in RULE_NAMES}
    assert RULE_NAMES == ["coupled", "token", "block", "rrsw", "traversal"]
    assert [name for name, rule in RULES.items() if rule.is_path_exact] == ["coupled"]
