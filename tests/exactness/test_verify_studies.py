"""The rules that are not offered are exact too; what they accept is what their papers say."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest

from forerun.errors import EngineFault
from forerun.sampling.distribution import Law
from forerun.sampling.drafting import draft_from_own
from forerun.types import Draft
from forerun.verify import RULES
from forerun.verify.studies import greedy_multi, kseq, rrs
from tests.exactness.exact_drafters import branching, drafter_model, only_zeros, sampled_tree, tree_model, tree_of
from tests.exactness.rational import (
    Drafter,
    Model,
    Oracle,
    Tokens,
    as_array,
    exact_law,
    law_of_steps,
    mean_accepted,
    plain_law,
    random_model,
)

NUM_POSITIONS = 300
STUDIES = {"rrs": rrs.verify, "greedy_multi": greedy_multi.verify, "kseq": kseq.verify}


def own_laws(models: list[Model], vocab_size: int) -> Drafter:
    """One child per model, each drawn from its own law or, now and then, a token that the prefix alone says."""

    def propose(oracle: Oracle, prefix: Tokens) -> Draft:
        rng = random.Random(f"own {prefix}")
        nodes: list[tuple[int, int, object]] = []
        for node, model in enumerate(models):
            if rng.random() < 0.3:
                nodes.append((-1, rng.randrange(vocab_size), None))
            else:
                drawn = draft_from_own(oracle, exact_law(model(prefix)), 0, len(prefix), node)
                nodes.append((-1, drawn[0], as_array(model(prefix))))
        return tree_of(nodes, with_replacement=True)

    return propose


def likeliest_and_sampled(model: Model, num_children: int, depth: int) -> Drafter:
    """Per node the likeliest tokens, and one drawn from what the model gives the others, if that is anything."""

    def propose(oracle: Oracle, prefix: Tokens) -> Draft:
        nodes: list[tuple[int, int, object]] = []
        queue = [(-1, prefix)]
        while queue:
            parent, path = queue.pop(0)
            if len(path) - len(prefix) == depth:
                continue
            q = model(path)
            likeliest = sorted(range(len(q)), key=lambda token_id: (-q[token_id], token_id))[: num_children - 1]
            rest = tuple(Fraction(0) if token_id in likeliest else p for token_id, p in enumerate(q))
            children: list[tuple[int, int, object]] = [(parent, token_id, None) for token_id in likeliest]
            if sum(rest):
                rest = tuple(p / sum(rest) for p in rest)
                node = len(nodes) + len(children)
                drawn = draft_from_own(oracle, exact_law(rest), 0, len(prefix), node)
                children.append((parent, drawn[0], as_array(rest)))
            for child in children:
                queue.append((len(nodes), (*path, child[1])))
                nodes.append(child)
        return tree_of(nodes)

    return propose


def drafter_for(rule: str, model: Model, num_children: int, depth: int) -> Drafter:
    if rule == "greedy_multi":
        return likeliest_and_sampled(model, num_children, depth)
    return sampled_tree(model, branching(*(num_children,) * depth), with_replacement=True)


@pytest.fixture
def short_bisection(monkeypatch: pytest.MonkeyPatch) -> None:
    """k-SEQ is exact for any factor above the root, and fractions stay small for one that is near it."""
    monkeypatch.setattr(kseq, "NUM_HALVINGS", 8)


@pytest.mark.parametrize("rule", STUDIES)
def test_law_of_single_positions_equals_the_target(rule: str, short_bisection: None) -> None:
    vocab_size = 4 if rule == "greedy_multi" else 3
    for seed in range(15 if rule == "kseq" else 50):
        target = random_model(seed, vocab_size)
        for model in (drafter_model(seed, vocab_size), only_zeros(target, vocab_size)):
            drafter = drafter_for(rule, model, 3, 1)
            assert law_of_steps(STUDIES[rule], target, drafter, 1, 2) == plain_law(target, 2)


@pytest.mark.parametrize("rule", STUDIES)
def test_law_of_two_levels_equals_the_target(rule: str, short_bisection: None) -> None:
    for seed in range(1 if rule == "kseq" else 3):
        target = random_model(seed, 3)
        drafter = drafter_for(rule, tree_model(seed), 2, 2)
        assert law_of_steps(STUDIES[rule], target, drafter, 1, 3) == plain_law(target, 3)


@pytest.mark.parametrize("rule", STUDIES)
def test_law_of_consecutive_steps_equals_the_target(rule: str, short_bisection: None) -> None:
    for seed in range(2):
        target, drafter = random_model(seed, 3), drafter_for(rule, tree_model(seed), 2, 1)
        assert law_of_steps(STUDIES[rule], target, drafter, 2, 3) == plain_law(target, 3)


def test_rrs_mixes_drafters_that_draw_independently() -> None:
    for seed in range(12):
        target = random_model(seed, 3)
        models = [random_model(seed + 1000 * (i + 1), 3) for i in range(3)]
        assert law_of_steps(rrs.verify, target, own_laws(models, 3), 1, 2) == plain_law(target, 2)


def test_greedy_multi_accepts_what_the_paper_says() -> None:
    """p(H) + the overlap of p and q' elsewhere (Hu et al.)."""
    for seed in range(40):
        target, model = random_model(seed, 4), drafter_model(seed, 4)
        p, q = target(()), model(())
        likeliest = sorted(range(4), key=lambda token_id: (-q[token_id], token_id))[:2]
        left = 1 - sum(q[i] for i in likeliest)
        rest = sum(min(p[i], q[i] / left) for i in range(4) if i not in likeliest) if left else 0
        accepted = mean_accepted(greedy_multi.verify, target, likeliest_and_sampled(model, 3, 1))
        assert accepted == sum(p[i] for i in likeliest) + rest


def test_rrsw_accepts_more_than_rrs() -> None:
    for seed in range(8):
        target, model = random_model(seed, 3), drafter_model(seed, 3)
        with_replacement = sampled_tree(model, branching(2), with_replacement=True)
        without = mean_accepted(RULES["rrsw"].verify, target, sampled_tree(model, branching(2)))
        assert without >= mean_accepted(rrs.verify, target, with_replacement)


def test_kseq_accepts_what_the_paper_says(short_bisection: None) -> None:
    """1 - (1 - beta)^k (Sun et al.)."""
    for seed in range(12):
        target, model = random_model(seed, 3), drafter_model(seed, 3)
        p, q = target(()), model(())
        rho, _ = kseq.division(exact_law(p), exact_law(q), 2)
        beta = sum(min(b, a / rho) for a, b in zip(p, q, strict=True))
        accepted = mean_accepted(kseq.verify, target, sampled_tree(model, branching(2), with_replacement=True))
        assert accepted == 1 - (1 - beta) ** 2


@pytest.mark.parametrize("num_children", [1, 2, 3, 8])
def test_kseq_divides_so_that_nothing_negative_is_owed(num_children: int) -> None:
    """In float64, on rows with zeros, equal rows and rows that have nothing in common."""
    rng = np.random.default_rng(num_children)
    for case in range(NUM_POSITIONS):
        p = rng.random(6) ** 3 * (rng.random(6) > 0.3) + (np.arange(6) == case % 6)
        q = p.copy() if case % 7 == 0 else rng.random(6) ** 3 * (rng.random(6) > 0.3) + (np.arange(6) == case % 5)
        p, q = p / p.sum(), q / q.sum()
        rho, left = kseq.division(Law(None, p * 2, 2.0), Law(None, q, 1.0), num_children)
        beta = np.minimum(q, p / rho).sum()
        taken = np.minimum(q, p / rho) * ((1 - (1 - beta) ** num_children) / beta if beta else 0)
        assert (taken <= p + 1e-12).all()
        assert 1 <= rho <= num_children
        assert 1 - (1 - beta) ** num_children >= np.minimum(p, q).sum() - 1e-12  # no fewer than one child
        owed = 1 - taken.sum()
        assert taken + owed * left.dense(6) == pytest.approx(p, abs=1e-12)


def test_studies_refuse_what_they_are_not_exact_for() -> None:
    q_V = np.array((0.5, 0.5, 0.0))
    tree = {"parents": (-1, -1), "origins": ("m", "m"), "stream": "draft", "pruning": "prefix_only"}
    distinct = Draft(token_ids=(0, 1), q_rows=(q_V, q_V), **tree)  # type: ignore[arg-type]
    equal = Draft(token_ids=(0, 0), q_rows=(q_V, q_V), with_replacement=True, **tree)  # type: ignore[arg-type]
    two_laws = Draft(token_ids=(0, 1), q_rows=(q_V, q_V.copy()), with_replacement=True, **tree)  # type: ignore[arg-type]
    not_left_out = Draft(token_ids=(0, 1), q_rows=(None, q_V), **tree)  # type: ignore[arg-type]
    for verify, draft, reason in (
        (rrs.verify, distinct, "rule rrs is exact for siblings drawn with replacement only"),
        (kseq.verify, distinct, "rule kseq is exact for siblings drawn with replacement only"),
        (greedy_multi.verify, equal, "rule greedy_multi is exact for siblings drawn without replacement only"),
        (kseq.verify, two_laws, "don't carry the one law"),
        (greedy_multi.verify, distinct, "one may be sampled"),
        (greedy_multi.verify, not_left_out, "one may be sampled, from a law without the others"),
    ):
        with pytest.raises(EngineFault, match=reason):
            verify(draft, lambda _: exact_law((Fraction(1, 2), Fraction(1, 2), Fraction(0))), Oracle(), 0, 0)


def test_no_request_can_name_a_study() -> None:
    assert not set(STUDIES) & set(RULES)
