"""The float64 rules decide as the exact ones: the same code on fractions, for the same coins and the same draws."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from forerun.sampling.distribution import Law, Race
from forerun.types import Draft, Verdict
from forerun.verify import RULES
from forerun.verify.studies import greedy_multi, kseq, rrs
from tests.exactness.exact_drafters import branching, drafter_model, only_zeros, random_branching, sampled_tree
from tests.exactness.rational import Model, Oracle, Tokens, exact_law, random_model, verdict_of
from tests.exactness.test_verify_studies import likeliest_and_sampled

NUM_CASES = 400
VOCAB_SIZE = 5


class Replay:
    """A sampler whose coins are given, and whose draws invert the law's distribution function at a given value.

    The values are fractions for exact laws and their float64 roundings for others.
    """

    def __init__(self, seed: int, number: Callable[[Fraction], Any]) -> None:
        self._seed = seed
        self._number = number
        self.drawn_from: list[Law] = []

    def coin(self, key: int, node: int, committed_len: int) -> Any:
        return self._value("coin", node)

    def sample(self, law: Law, key: int, pos: int, *_: object) -> Race:
        self.drawn_from.append(law)
        token_ids = range(len(law.weights)) if law.token_ids is None else law.token_ids.tolist()
        goal = self._value("draw", pos) * law.total
        sums = list(accumulate(law.weights.tolist()))
        return Race(token_ids[next(i for i, reached in enumerate(sums) if reached > goal)], None)

    def score(self, *_: object) -> None:
        return None

    def _value(self, *address: object) -> Any:
        # A prime denominator that no law has: no value is a border.
        return self._number(Fraction(random.Random(f"{self._seed} {address}").randrange(1, 99991), 99991))


def in_float64(draft: Draft) -> Draft:
    """The draft with float64 rows; siblings still carry one array."""
    rows = {id(row): row.astype(np.float64) for row in draft.q_rows if row is not None}
    return replace(draft, q_rows=tuple(None if row is None else rows[id(row)] for row in draft.q_rows))


def float_law(law: Law) -> Law:
    return Law(law.token_ids, law.weights.astype(np.float64), float(law.total))


def random_draft(rule: str, model: Model, seed: int) -> Draft:
    """A draft that the rule is exact for, drawn by an oracle that follows a random script."""
    script = tuple(random.Random(f"{seed} script {i}").randrange(VOCAB_SIZE) for i in range(40))
    shape = random_branching(seed, 3, 3)
    if rule in ("token", "block"):
        drafter = sampled_tree(model, branching(1, 1, 1, 1))
    elif rule == "greedy_multi":
        drafter = likeliest_and_sampled(model, 3, 2)
    else:
        drafter = sampled_tree(model, shape, with_replacement=rule in ("rrs", "kseq"))
    return drafter(AnyOutcome(script), ())


class AnyOutcome(Oracle):
    """An oracle whose choices are any possible ones."""

    def choose(self, probs: Any) -> int:
        possible = [i for i, prob in enumerate(probs) if prob > 0]
        self._path = (*self._path, 0)
        return possible[self._script[len(self._path) % len(self._script)] % len(possible)]


def both_verdicts(verify: Callable[..., Verdict], target: Model, draft: Draft, seed: int) -> list[tuple[Verdict, Law]]:
    exact = Replay(seed, lambda value: value)
    rounded = Replay(seed, float)

    def in_floats(draft: Draft, law_at: Callable[[int], Law], *rest: Any) -> Verdict:
        return verify(in_float64(draft), lambda node: float_law(law_at(node)), *rest)

    return [
        (verdict_of(verify, exact, target, draft), exact.drawn_from[-1]),  # type: ignore[arg-type]
        (verdict_of(in_floats, rounded, target, draft), rounded.drawn_from[-1]),  # type: ignore[arg-type]
    ]


STUDIES = {"rrs": rrs.verify, "greedy_multi": greedy_multi.verify, "kseq": kseq.verify}
VERIFY = {name: rule.verify for name, rule in RULES.items() if name != "coupled"} | STUDIES


@pytest.mark.parametrize("rule", VERIFY)
def test_float64_decides_as_fractions_do(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kseq, "NUM_HALVINGS", 8)
    num_cases = 60 if rule == "kseq" else NUM_CASES
    lengths = set()
    for seed in range(num_cases):
        target = random_model(seed, VOCAB_SIZE)
        model = only_zeros(target, VOCAB_SIZE) if seed % 7 == 0 else drafter_model(seed, VOCAB_SIZE)
        draft = random_draft(rule, target if seed % 11 == 0 else model, seed)
        (exact, exact_left), (rounded, left) = both_verdicts(VERIFY[rule], target, draft, seed)
        assert rounded.accepted == exact.accepted
        assert rounded.next_token_id == exact.next_token_id
        assert [(test.node, test.accepted) for test in rounded.tests] == [
            (test.node, test.accepted) for test in exact.tests
        ]
        for got, want in zip(rounded.tests, exact.tests, strict=True):
            assert (got.p, got.q) == pytest.approx((float(want.p), float(want.q)), abs=1e-15)
        want_V = exact_left.dense(VOCAB_SIZE).astype(np.float64)
        assert left.dense(VOCAB_SIZE) == pytest.approx(want_V, abs=1e-12)
        lengths.add(len(exact.accepted))
    assert len(lengths) >= 3


def test_the_comparison_sees_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same harness with other coins for one of the two."""
    value = Replay._value
    monkeypatch.setattr(
        Replay, "_value", lambda self, *at: value(self, *at) if self._number is not float else 1 - value(self, *at)
    )
    with pytest.raises(AssertionError):
        test_float64_decides_as_fractions_do("block", monkeypatch)


def test_exact_laws_are_not_changed_by_a_rule() -> None:
    """Laws are the caller's: a rule must not write into them."""
    seen: Tokens = ()
    for seed in range(20):
        target = random_model(seed, VOCAB_SIZE)
        draft = random_draft("traversal", drafter_model(seed, VOCAB_SIZE), seed)
        rows = [row.copy() for row in draft.q_rows if row is not None]
        before = [exact_law(target(prefix)).weights.copy() for prefix in (seen, (0,), (1,))]
        both_verdicts(RULES["traversal"].verify, target, draft, seed)
        after = [exact_law(target(prefix)).weights for prefix in (seen, (0,), (1,))]
        assert all((a == b).all() for a, b in zip(before, after, strict=True))
        assert all((a == b).all() for a, b in zip(rows, (r for r in draft.q_rows if r is not None), strict=True))
