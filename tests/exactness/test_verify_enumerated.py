"""Every rule's output law, computed exactly over small vocabularies, equals the target's with ==."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from forerun.errors import ConfigError
from forerun.sampling.distribution import Law
from forerun.sampling.noise import Stream
from forerun.types import Draft, NoiseStream
from forerun.verify import coupled, token
from tests.exactness.rational import (
    Model,
    Oracle,
    Tokens,
    as_array,
    both_win,
    continued,
    enumerate_law,
    exact_law,
    one_step,
    random_model,
)

Drafter = Callable[[Oracle, Tokens], Draft]


def sampled_chain(model: Model, k: int, stream: NoiseStream = "draft", declared: NoiseStream | None = None) -> Drafter:
    """k tokens drawn from a drafter's law, with the noise of `stream`."""

    def propose(oracle: Oracle, prefix: Tokens) -> Draft:
        tokens: Tokens = ()
        rows = []
        for depth in range(k):
            q = model((*prefix, *tokens))
            in_step = len(prefix) if stream == "draft" else 0
            race = oracle.sample(exact_law(q), 0, len(prefix) + depth, Stream[stream.upper()], in_step)
            tokens = (*tokens, race.token_id)
            rows.append(as_array(q))
        return Draft(tokens, tuple(range(-1, k - 1)), ("model",) * k, tuple(rows), declared or stream)

    return propose


def argmax_chain(model: Model, k: int, with_rows: bool = False) -> Drafter:
    """k most likely tokens; with_rows wrongly declares them as sampled."""

    def propose(_: Oracle, prefix: Tokens) -> Draft:
        tokens: Tokens = ()
        rows = []
        for _depth in range(k):
            q = model((*prefix, *tokens))
            tokens = (*tokens, q.index(max(q)))
            rows.append(as_array(q) if with_rows else None)
        return Draft(tokens, tuple(range(-1, k - 1)), ("model",) * k, tuple(rows), "draft")

    return propose


def lookup_chain(k: int, vocab_size: int) -> Drafter:
    """A continuation that depends on the prefix alone and ignores every probability, of a length that varies."""

    def propose(_: Oracle, prefix: Tokens) -> Draft:
        rng = random.Random(f"lookup {prefix}")
        tokens = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(0, k)))
        return Draft.chain(tokens, "ngram")

    return propose


def fixed_tree(vocab_size: int, num_nodes: int) -> Drafter:
    """A random tree of distinct siblings that depends on the prefix alone."""

    def propose(_: Oracle, prefix: Tokens) -> Draft:
        rng = random.Random(f"tree {prefix}")
        nodes: list[tuple[int, int]] = []
        for _node in range(num_nodes):
            node = (rng.randrange(-1, len(nodes)), rng.randrange(vocab_size))
            if node not in nodes:
                nodes.append(node)
        n = len(nodes)
        parents, tokens = tuple(parent for parent, _ in nodes), tuple(token for _, token in nodes)
        return Draft(tokens, parents, ("tree",) * n, (None,) * n)

    return propose


def law_of_steps(rule: Callable[..., object], target: Model, drafter: Drafter, num_steps: int, length: int):
    def run(oracle: Oracle) -> Tokens:
        tokens: Tokens = ()
        for _ in range(num_steps):
            if len(tokens) < length:
                tokens = one_step(oracle, rule, target, drafter, tokens)
        return tokens

    return continued(enumerate_law(run), target, length)


def plain_law(target: Model, length: int) -> dict[Tokens, Fraction]:
    return continued({(): Fraction(1)}, target, length)


DRAFTERS = {
    "sampled": lambda seed, k, v: sampled_chain(random_model(seed + 1000, v), k),
    "argmax": lambda seed, k, v: argmax_chain(random_model(seed + 1000, v), k),
    "lookup": lambda seed, k, v: lookup_chain(k, v),
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(("vocab_size", "num_models"), [(3, 40), (4, 12)])
def test_token_law_of_one_step_equals_the_target(kind: str, vocab_size: int, num_models: int) -> None:
    k = 3
    for seed in range(num_models):
        target = random_model(seed, vocab_size)
        drafter = DRAFTERS[kind](seed, k, vocab_size)
        assert law_of_steps(token.verify, target, drafter, 1, k + 1) == plain_law(target, k + 1)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("seed", range(4))
def test_token_law_of_consecutive_steps_equals_the_target(kind: str, seed: int) -> None:
    target = random_model(seed, 3)
    drafter = DRAFTERS[kind](seed, 2, 3)
    assert law_of_steps(token.verify, target, drafter, 2, 4) == plain_law(target, 4)


def test_token_law_with_a_drafter_that_equals_the_target() -> None:
    target = random_model(5, 4)
    assert law_of_steps(token.verify, target, sampled_chain(target, 3), 1, 4) == plain_law(target, 4)


def test_token_accepts_one_minus_total_variation() -> None:
    for seed in range(20):
        p, q = random_model(seed, 4)(()), random_model(seed + 1000, 4)(())

        def is_accepted(oracle: Oracle, p=p, q=q) -> bool:
            draft = sampled_chain(lambda _: q, 1)(oracle, ())
            return bool(token.verify(draft, lambda _: exact_law(p), oracle, 0, 0).accepted)

        tv = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
        assert enumerate_law(is_accepted).get(True, Fraction(0)) == 1 - tv


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
        law = law_of_steps(coupled.verify, target, DRAFTERS[kind](seed, 3, 3), 3, 4)
        assert law == plain_law(target, 4)


@pytest.mark.parametrize("stream", ["shared", "draft"])
def test_coupled_law_with_sampled_chains_equals_the_target(stream: NoiseStream) -> None:
    for seed in range(6):
        target, drafter = random_model(seed, 3), sampled_chain(random_model(seed + 1000, 3), 3, stream)
        assert law_of_steps(coupled.verify, target, drafter, 1, 4) == plain_law(target, 4)


def test_coupled_accepts_as_the_match_formula_says() -> None:
    for seed in range(20):
        p, q = random_model(seed, 4)(()), random_model(seed + 1000, 4)(())

        def is_accepted(oracle: Oracle, p=p, q=q) -> bool:
            draft = sampled_chain(lambda _: q, 1, "shared")(oracle, ())
            return bool(coupled.verify(draft, lambda _: exact_law(p), oracle, 0, 0).accepted)

        match = sum(1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(4)) for i in range(4) if p[i] and q[i])
        assert enumerate_law(is_accepted).get(True, Fraction(0)) == match


def test_joint_law_of_two_races_has_both_marginals() -> None:
    for seed in range(30):
        p, r = random_model(seed, 4)(()), random_model(seed + 1000, 4)(())
        joint = [[both_win(p, i, r, j) for j in range(4)] for i in range(4)]
        assert [sum(row) for row in joint] == list(p)
        assert [sum(column) for column in zip(*joint, strict=True)] == list(r)


# ---- what must fail -----------------------------------------------------------------------------------------------


def differs_from_target(drafter_of: Callable[[int], Drafter], rule=token.verify, num_steps: int = 1) -> bool:
    """Whether the harness finds any of a few models wrong."""
    return any(
        law_of_steps(rule, random_model(seed, 3), drafter_of(seed), num_steps, 3) != plain_law(random_model(seed, 3), 3)
        for seed in range(4)
    )


def chain_of_two(seed: int) -> Drafter:
    return sampled_chain(random_model(seed + 1000, 3), 2)


def test_harness_passes_the_rule_that_the_controls_break() -> None:
    assert not differs_from_target(chain_of_two)
    assert not differs_from_target(chain_of_two, num_steps=2)


BROKEN = {
    "max for min": (token, "acceptance", lambda p, q: max(1, p / q)),
    "ratio upside down": (token, "acceptance", lambda p, q: min(1, q / p) if p else Fraction(0)),
    "residual from p": (token, "residual", lambda law, q_V, token_id: law),
    "residual without the token": (token, "residual", lambda law, q_V, token_id: without(law, token_id)),
    "p not normalised in the test": (Law, "prob", lambda self, token_id: self.weight(token_id)),
    "p not normalised in the residual": (Law, "dense", lambda self, vocab_size: self.weights),
}


def without(law: Law, token_id: int) -> Law:
    weights = law.weights.copy()
    weights[token_id] = 0
    return Law(None, weights, sum(weights)) if weights.any() else law


@pytest.mark.parametrize("name", BROKEN)
def test_broken_arithmetic_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[name])
    assert differs_from_target(chain_of_two)


def test_one_coin_for_two_nodes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    toss = Oracle.coin
    monkeypatch.setattr(Oracle, "coin", lambda self, key, node, committed_len: toss(self, key, 0, committed_len))
    assert differs_from_target(chain_of_two)


def test_one_coin_for_two_steps_is_found_only_over_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    toss = Oracle.coin
    monkeypatch.setattr(Oracle, "coin", lambda self, key, node, committed_len: toss(self, key, node, 0))
    assert not differs_from_target(chain_of_two)
    assert differs_from_target(chain_of_two, num_steps=2)


def test_likeliest_tokens_declared_as_sampled_are_found() -> None:
    """F007: argmax drafts accepted by the ratio rule."""
    assert differs_from_target(lambda seed: argmax_chain(random_model(seed + 1000, 3), 2, with_rows=True))


def test_shared_noise_in_draft_and_residual_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias that makes `check_draft` refuse such drafts."""
    monkeypatch.setattr(
        token, "last_draw", lambda law, sampler, key, committed_len: sampler.sample(law, key, committed_len)
    )

    def mislabelled(seed: int) -> Drafter:
        return sampled_chain(random_model(seed + 1000, 3), 1, "shared", declared="draft")

    assert differs_from_target(mislabelled)


def test_pruning_by_drawn_value_is_found_under_token_and_harmless_under_coupled() -> None:
    def pruned(stream: NoiseStream) -> Callable[[int], Drafter]:
        def drafter_of(seed: int) -> Drafter:
            whole = sampled_chain(random_model(seed + 1000, 3), 1, stream)

            def propose(oracle: Oracle, prefix: Tokens) -> Draft:
                draft = whole(oracle, prefix)
                q_V = draft.q_rows[0]
                return draft if q_V[draft.token_ids[0]] > Fraction(2, 5) else Draft()

            return propose

        return drafter_of

    assert differs_from_target(pruned("draft"))
    assert not differs_from_target(pruned("shared"), rule=coupled.verify)


def test_token_refuses_shared_noise_before_any_draw() -> None:
    draft = Draft((0,), (-1,), ("model",), (np.array([0.5, 0.5]),), "shared")
    with pytest.raises(ConfigError, match="sampled from draft noise only, not from shared"):
        token.verify(draft, lambda _: Law.point(0), Oracle(), 0, 0)
