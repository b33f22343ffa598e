"""What a verdict reports, which rows a rule asks for, and which drafts it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.errors import ConfigError, EngineFault
from forerun.sampling import make_sampler
from forerun.sampling.distribution import Law, RowSampler, draft_token
from forerun.sampling.math64 import lane_sum
from forerun.sampling.noise import Stream
from forerun.types import Draft, NodeTest, Verdict
from forerun.verify import RULES, check_draft, coupled, token

KEY, COMMITTED = 11, 40
RULE_NAMES = ["coupled", "token"]


@pytest.fixture(params=["native", "numpy"])
def sampler(request: pytest.FixtureRequest) -> RowSampler:
    return make_sampler(6, request.param)


def law(*weights: float) -> Law:
    return Law(None, np.array(weights), lane_sum(np.array(weights)))


FLAT = law(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


def greedy_rows(*token_ids: int):
    """The law after node n - 1 is all on token_ids[n]."""
    return lambda node: Law.point(token_ids[node + 1])


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_greedy_chains_stop_at_the_first_difference(rule: str, sampler: RowSampler) -> None:
    verdict = RULES[rule].verify(Draft.chain((3, 1, 4), "ngram"), greedy_rows(3, 2, 5, 0), sampler, KEY, COMMITTED)
    assert (verdict.accepted, verdict.next_token_id, verdict.next_kind) == ((0,), 2, "correction")
    assert (verdict.next_p, verdict.next_score) == (1.0, None)
    assert [(test.node, test.accepted, test.p, test.q) for test in verdict.tests] == [(0, True, 1, 1), (1, False, 0, 1)]


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_a_whole_chain_earns_the_bonus(rule: str, sampler: RowSampler) -> None:
    verdict = RULES[rule].verify(Draft.chain((3, 1), "ngram"), greedy_rows(3, 1, 5), sampler, KEY, COMMITTED)
    assert (verdict.accepted, verdict.next_token_id, verdict.next_kind) == ((0, 1), 5, "bonus")


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_without_a_draft_the_step_is_plain(rule: str, sampler: RowSampler) -> None:
    verdict = RULES[rule].verify(Draft(), lambda _: FLAT, sampler, KEY, COMMITTED)
    assert (verdict.accepted, verdict.tests, verdict.next_kind) == ((), (), "plain")
    assert verdict.next_p == 1 / 6


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_only_walked_rows_are_asked_for_and_each_once(rule: str, sampler: RowSampler) -> None:
    asked: list[int] = []

    def law_at(node: int) -> Law:
        asked.append(node)
        return greedy_rows(3, 1, 5, 0)(node)

    RULES[rule].verify(Draft.chain((3, 1, 4), "ngram"), law_at, sampler, KEY, COMMITTED)
    assert asked == [-1, 0, 1]


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


def test_token_reports_its_coins(sampler: RowSampler) -> None:
    q_V = np.array((0.0, 0.1, 0.2, 0.3, 0.4, 0.0))
    token_id = draft_token(sampler, q_V, Stream.DRAFT, KEY, COMMITTED, COMMITTED)
    draft = Draft((token_id, 1), (-1, 0), ("model", "ngram"), (q_V, None), "draft")
    verdict = token.verify(draft, lambda _: FLAT, sampler, KEY, COMMITTED)
    for test in verdict.tests:
        assert test.score == sampler.coin(KEY, test.node, COMMITTED)
        assert test.accepted == (test.score < min(1, test.p / test.q))
    assert verdict.tests[0].q == q_V[token_id]
    assert verdict.next_score is None


def test_what_a_rejection_leaves_is_the_positive_part_of_the_difference() -> None:
    p = Law(np.array((1, 2, 4), np.int32), np.array((2.0, 1.0, 1.0)), 4.0)
    q_V = np.array((0.1, 0.25, 0.5, 0.15, 0.0, 0.0))
    assert token.residual(p, q_V, 2).dense(6).tolist() == [0, 0.5, 0, 0, 0.5, 0]
    assert token.residual(p, None, 2).dense(6) == pytest.approx([0, 2 / 3, 0, 0, 1 / 3, 0])
    assert token.residual(p, None, 3).dense(6).tolist() == p.dense(6).tolist()
    assert token.residual(p, p.dense(6), 2) is p  # nothing is left: only rounding can lead there


def test_token_refuses_what_it_is_not_exact_for() -> None:
    q_V = np.full(6, 1 / 6)
    tree = Draft((1, 2), (-1, -1), ("a", "a"), (None, None))
    shared = Draft((1,), (-1,), ("a",), (q_V,), "shared")
    for draft, reason in ((tree, "rule token verifies chains"), (shared, "from draft noise only, not from shared")):
        with pytest.raises(ConfigError, match=reason):
            check_draft("token", draft)
        with pytest.raises(ConfigError, match=reason):
            token.verify(draft, lambda _: FLAT, make_sampler(6), KEY, COMMITTED)
    for draft in (Draft(), Draft.chain((1, 2), "ngram"), Draft((1,), (-1,), ("a",), (q_V,), "draft")):
        check_draft("token", draft)


def test_coupled_accepts_every_draft() -> None:
    q_V = np.full(6, 1 / 6)
    for stream in ("shared", "draft"):
        check_draft("coupled", Draft((1, 2), (-1, -1), ("a", "b"), (q_V, None), stream))


def test_a_node_that_its_row_can_not_have_drawn_is_a_fault(sampler: RowSampler) -> None:
    draft = Draft((0,), (-1,), ("model",), (np.array((0.0, 1.0, 0, 0, 0, 0)),), "draft")
    with pytest.raises(EngineFault, match="token 0 was drawn with q = 0"):
        token.verify(draft, lambda _: FLAT, sampler, KEY, COMMITTED)


def test_the_registry_names_its_rules() -> None:
    assert {name: rule.name for name, rule in RULES.items()} == {"coupled": "coupled", "token": "token"}
    assert [name for name, rule in RULES.items() if rule.is_path_exact] == ["coupled"]
