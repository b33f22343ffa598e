"""`coupled` emits the tokens of plain decoding for any draft, and its noise has the laws it should have."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from forerun.sampling import SamplerBackend, make_sampler
from forerun.sampling.distribution import Law, RowSampler
from forerun.sampling.drafting import draft_from_own, draft_from_shared
from forerun.sampling.math64 import lane_sum
from forerun.sampling.noise import Stream
from forerun.types import Draft
from forerun.verify import RULES, ArgmaxLaws, block, coupled, rounds, traversal

NUM_EMITTED = 5
Tokens = tuple[int, ...]


class RandomModel:
    """A prefix-dependent law with zeros, cut or whole, over a few ids."""

    def __init__(self, rng: np.random.Generator, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        rows = rng.random((97, self.vocab_size)) ** 3
        rows[rng.random(rows.shape) < 0.25] = 0.0
        rows[:, 0] += 1e-3 * (rows.sum(axis=1) == 0)
        self.laws = [self._law(row, cut=bool(rng.random() < 0.5)) for row in rows]
        for at in rng.integers(0, 97, 10):
            self.laws[at] = Law.point(int(rng.integers(self.vocab_size)))

    def __call__(self, prefix: Tokens) -> Law:
        return self.laws[hash(prefix) % 97]

    @staticmethod
    def _law(row: np.ndarray, cut: bool) -> Law:
        if not cut:
            return Law(None, row, lane_sum(row))
        token_ids = np.flatnonzero(row).astype(np.int32)
        return Law(token_ids, row[token_ids], lane_sum(row[token_ids]))


def plain(model: RandomModel, sampler: RowSampler, key: int) -> Tokens:
    tokens: Tokens = ()
    while len(tokens) < NUM_EMITTED:
        tokens = (*tokens, sampler.sample(model(tokens), key, len(tokens)).token_id)
    return tokens


def random_tree(
    rng: np.random.Generator, model: RandomModel, drafter: RandomModel, sampler: RowSampler, key: int, prefix: Tokens
) -> Draft:
    """Children are drawn from the target's or a drafter's law with either noise, several at once, or are any id."""
    nodes: list[tuple[int, int]] = []
    paths: list[Tokens] = []
    for _ in range(int(rng.integers(0, 4))):
        parent = int(rng.integers(-1, len(nodes)))
        path = paths[parent] if parent >= 0 else prefix
        source = rng.integers(3)
        law, count = (model if source == 1 else drafter)(path), int(rng.integers(1, 4))
        if source == 0:
            token_ids: Tokens = (int(rng.integers(model.vocab_size)),)
        elif rng.random() < 0.7:
            token_ids = draft_from_shared(sampler, law, key, len(path), count)
        else:
            token_ids = draft_from_own(sampler, law, key, len(prefix), len(nodes), count)
        for token_id in token_ids:
            if (parent, token_id) not in nodes:
                nodes.append((parent, token_id))
                paths.append((*path, token_id))
    n = len(nodes)
    draft = Draft(tuple(t for _, t in nodes), tuple(p for p, _ in nodes), ("any",) * n, (None,) * n)
    draft.check_integrity()
    return draft


def speculative(
    rng: np.random.Generator, model: RandomModel, drafter: RandomModel, sampler: RowSampler, key: int
) -> tuple[Tokens, int]:
    tokens: Tokens = ()
    num_accepted = 0
    while len(tokens) < NUM_EMITTED:
        draft = random_tree(rng, model, drafter, sampler, key, tokens)
        paths: list[Tokens] = []
        for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else tokens), token_id))
        prefix = tokens
        law_at = lambda node, prefix=prefix, paths=paths: model(paths[node] if node >= 0 else prefix)  # noqa: E731
        verdict = coupled.verify(draft, law_at, sampler, key, len(tokens))
        num_accepted += len(verdict.accepted)
        tokens = (*tokens, *(draft.token_ids[node] for node in verdict.accepted), verdict.next_token_id)
    return tokens[:NUM_EMITTED], num_accepted


def run_cases(num_cases: int, backend: str) -> int:
    rng = np.random.default_rng(20)
    num_accepted = 0
    for case in range(num_cases):
        if case % 50 == 0:
            vocab_size = int(rng.integers(2, 7))
            model, drafter = RandomModel(rng, vocab_size), RandomModel(rng, vocab_size)
            sampler = make_sampler(vocab_size, backend)
        key = int(rng.integers(0, 2**64, dtype=np.uint64))
        tokens, accepted = speculative(rng, model, drafter, sampler, key)
        assert tokens == plain(model, sampler, key), f"case {case}"
        num_accepted += accepted
    return num_accepted


@pytest.mark.parametrize("backend", ["native", "numpy"])
def test_a_greedy_verdict_is_that_of_its_laws(backend: SamplerBackend) -> None:
    """Chains and trees, some nodes with a law of their own, some siblings equal."""
    rng = np.random.default_rng(5)
    sampler = make_sampler(3, backend)
    accepted = set()
    for _ in range(2000):
        num_nodes, is_chain = int(rng.integers(0, 9)), bool(rng.integers(2))
        parents = tuple(node - 1 if is_chain else int(rng.integers(-1, node)) for node in range(num_nodes))
        token_ids = tuple(rng.integers(0, 3, num_nodes).tolist())
        q_rows = tuple(rng.dirichlet(np.ones(3)) if rng.integers(2) else None for _ in parents)
        draft = Draft(token_ids, parents, ("test",) * num_nodes, q_rows, with_replacement=True)
        ids = rng.integers(0, 3, 1 + num_nodes).tolist()
        laws = [Law.point(token_id) for token_id in ids]
        got = coupled.verify(draft, ArgmaxLaws(ids), sampler, 1, 10)
        assert got == coupled.verify(draft, lambda node, laws=laws: laws[1 + node], sampler, 1, 10)  # type: ignore[misc]
        assert [ArgmaxLaws(ids)(node).only_id for node in range(-1, num_nodes)] == ids
        accepted.add(len(got.accepted))
    assert accepted >= {0, 1, 2, 3}


def test_coupled_path_equals_plain_decoding_in_20000_cases() -> None:
    assert run_cases(20_000, "native") > 10_000  # drafts do get accepted


def test_coupled_path_equals_plain_decoding_with_the_reference_sampler() -> None:
    assert run_cases(300, "numpy") > 100


def test_a_position_that_is_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = coupled.verify
    monkeypatch.setattr(
        coupled, "verify", lambda draft, law_at, sampler, key, n: verify(draft, law_at, sampler, key, n + 1)
    )
    with pytest.raises(AssertionError, match="case"):
        run_cases(50, "native")


# ---- smoke checks of the noise, with fixed seeds ------------------------------------------------------------------

NUM_DRAWS = 40_000
P = (0.5, 0.25, 0.2, 0.05)
# Upper 1e-4 points of chi-square.
CRITICAL = {3: 21.11, 15: 44.26}


def chi_square(outcomes: Iterable[int], probs: np.ndarray) -> float:
    counts = np.bincount(np.fromiter(outcomes, np.int64), minlength=len(probs))
    expected = counts.sum() * probs
    return float(((counts - expected) ** 2 / expected).sum())


def law_of(p: Iterable[float]) -> Law:
    weights = np.array(tuple(p)) * 2.0
    return Law(None, weights, lane_sum(weights))


def test_draws_over_seeds_and_over_positions_follow_the_law() -> None:
    sampler, law = make_sampler(4), law_of(P)
    over_seeds = (sampler.sample(law, key, 17).token_id for key in range(NUM_DRAWS))
    over_positions = (sampler.sample(law, 5, pos).token_id for pos in range(NUM_DRAWS))
    assert chi_square(over_seeds, np.array(P)) < CRITICAL[3]
    assert chi_square(over_positions, np.array(P)) < CRITICAL[3]


def test_draws_at_neighbouring_positions_are_independent() -> None:
    sampler, law = make_sampler(4), law_of(P)
    pairs = (
        4 * sampler.sample(law, key, 7).token_id + sampler.sample(law, key, 8).token_id for key in range(NUM_DRAWS)
    )
    assert chi_square(pairs, np.outer(P, P).ravel()) < CRITICAL[15]


RATIO_RULES = ["token", "block", "rrsw", "traversal"]
# What is left after a rejection has several ids, so that its draw matters.
Q = (0.1, 0.2, 0.2, 0.5)


def first_tokens(rule: str, draft_stream: Stream, last_stream: Stream, num_children: int) -> Iterable[int]:
    """First tokens of a ratio rule whose draft and last draw come from the given noise."""
    sampler, p, q = make_sampler(4), law_of(P), law_of(Q)

    def last_draw(law: Law, sampler: RowSampler, key: int, pos: int, committed_len: int) -> object:
        return sampler.sample(law, key, 3, last_stream, committed_len if last_stream is Stream.RESIDUAL else 0)

    def emitted(key: int) -> int:
        if draft_stream is Stream.SHARED:
            token_ids = draft_from_shared(sampler, q, key, 3, num_children)
        else:
            token_ids = draft_from_own(sampler, q, key, 3, 0, num_children)
        n = num_children
        draft = Draft(token_ids, (-1,) * n, ("model",) * n, (q.dense(4),) * n, "draft", "prefix_only")
        verdict = RULES[rule].verify(draft, lambda _: p, sampler, key, 3)
        return token_ids[verdict.accepted[0]] if verdict.accepted else verdict.next_token_id

    with pytest.MonkeyPatch.context() as patch:
        for module in (rounds, block, traversal):
            patch.setattr(module, "last_draw", last_draw)
        yield from map(emitted, range(NUM_DRAWS // 4))


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_ratio_rules_follow_the_law(rule: str) -> None:
    for num_children in (1, 2, 3) if RULES[rule].accepts_trees else (1,):
        outcomes = first_tokens(rule, Stream.DRAFT, Stream.RESIDUAL, num_children)
        assert chi_square(outcomes, np.array(P)) < CRITICAL[3]


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_shared_noise_with_a_ratio_test_is_rejected(rule: str) -> None:
    """The negative control: the same statistic sees the bias that shared noise causes."""
    assert chi_square(first_tokens(rule, Stream.SHARED, Stream.SHARED, 1), np.array(P)) > 2 * CRITICAL[3]
