"""Exact output laws by enumeration: the rules' own code runs on fractions, with ideal noise instead of a generator.

Noise is addressed as the product addresses it. One address always holds the same coin or the same race, so a rule that
uses an address twice gets the correlations which that causes, and the enumerated law shows the bias.
"""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from forerun.sampling.distribution import Law, Race
from forerun.sampling.noise import Stream
from forerun.types import Draft, Verdict

T = TypeVar("T", bound=Hashable)
Tokens = tuple[int, ...]
Row = tuple[Fraction, ...]
Model = Callable[[Tokens], Row]
Drafter = Callable[["Oracle", Tokens], Draft]
Rule = Callable[..., Verdict]


class Oracle:
    """Stands in for a `RowSampler`: each random decision follows a script, then takes its first possible outcome."""

    def __init__(self, script: tuple[int, ...] = ()) -> None:
        self.prob = Fraction(1)
        self.alternatives: list[tuple[int, ...]] = []
        self._script = script
        self._path: tuple[int, ...] = ()
        self._coins: dict[Hashable, Coin] = {}
        self._races: dict[Hashable, list[tuple[Row, int]]] = {}

    def choose(self, probs: Sequence[Fraction]) -> int:
        """The index of an outcome; the other possible ones become alternative scripts."""
        depth = len(self._path)
        possible = [i for i, prob in enumerate(probs) if prob > 0]
        if depth < len(self._script):
            outcome = self._script[depth]
        else:
            outcome = possible[0]
            self.alternatives += [(*self._path, other) for other in possible[1:]]
        self._path = (*self._path, outcome)
        self.prob *= probs[outcome]
        return outcome

    def coin(self, key: int, node: int, committed_len: int) -> Coin:
        return self._coins.setdefault((node, committed_len), Coin(self))

    def sample(self, law: Law, key: int, pos: int, stream: Stream = Stream.SHARED, committed_len: int = 0) -> Race:
        runs = self._races.setdefault((stream, pos, committed_len), [])
        p = normalised(law)
        if not runs:
            winner = self.choose(p)
        else:
            assert len(runs) == 1, "the joint law of three races with one noise isn't implemented"
            earlier, earlier_winner = runs[0]
            size = max(len(p), len(earlier))
            p, earlier = padded(p, size), padded(earlier, size)
            joint = [both_win(earlier, earlier_winner, p, j) for j in range(size)]
            winner = self.choose([prob / earlier[earlier_winner] for prob in joint])
        runs.append((p, winner))
        return Race(winner, None)

    def draw(
        self, law: Law, key: int, pos: int, count: int, stream: Stream = Stream.SHARED, committed_len: int = 0
    ) -> Tokens:
        """Several ids of one race; no other race may share its noise, but for a single id's."""
        if count == 1:
            return (self.sample(law, key, pos, stream, committed_len).token_id,)
        p = normalised(law)
        assert self._races.setdefault((stream, pos, committed_len), [(p, -1)] * 2) == [(p, -1)] * 2
        drawn: list[int] = []
        while len(drawn) < count and (left := sum(prob for i, prob in enumerate(p) if i not in drawn)):
            drawn.append(self.choose([Fraction(0) if i in drawn else prob / left for i, prob in enumerate(p)]))
        return tuple(drawn)

    def score(self, law: Law, key: int, pos: int, token_id: int) -> None:
        return None


class Coin:
    """A uniform that isn't known yet: comparing it decides, and narrows what it can be."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._low, self._high = Fraction(0), Fraction(1)

    def __lt__(self, bound: Fraction) -> bool:
        cut = min(max(Fraction(bound), self._low), self._high)
        prob = (cut - self._low) / (self._high - self._low)
        is_below = self._oracle.choose((1 - prob, prob)) == 1
        self._low, self._high = (self._low, cut) if is_below else (cut, self._high)
        return is_below


def both_win(p: Row, i: int, r: Row, j: int) -> Fraction:
    """P(argmin E/p = i and argmin E/r = j) with the same independent Exp(1) variables E.

    For i = j: E_k >= E_i max(p_k/p_i, r_k/r_i) for all k. Else, with E_j = t E_i, p_j/p_i <= t <= r_j/r_i and
    E_k >= E_i max(p_k/p_i, t r_k/r_j); integrating over E_i leaves 1/c(t)^2 with c piecewise linear in t.
    """
    if p[i] == 0 or r[j] == 0:
        return Fraction(0)
    others = [k for k in range(len(p)) if k not in (i, j)]
    if i == j:
        return 1 / (1 + sum(max(p[k] / p[i], r[k] / r[i]) for k in others))
    low = p[j] / p[i]
    high = r[j] / r[i] if r[i] else None
    turns = sorted({(p[k] / p[i]) / (r[k] / r[j]) for k in others if r[k]})
    edges: list[Fraction | None] = [low, *(t for t in turns if t > low and (high is None or t < high)), high]
    if high is not None and high <= low:
        return Fraction(0)
    total = Fraction(0)
    for start, end in pairwise(edges):
        middle = start + 1 if end is None else (start + end) / 2
        slope, constant = Fraction(1), Fraction(1)
        for k in others:
            if p[k] / p[i] >= middle * r[k] / r[j]:
                constant += p[k] / p[i]
            else:
                slope += r[k] / r[j]
        total += 1 / (slope * (constant + slope * start))
        if end is not None:
            total -= 1 / (slope * (constant + slope * end))
    return total


def enumerate_law(run: Callable[[Oracle], T]) -> dict[T, Fraction]:
    """The exact law of what `run` returns."""
    law: dict[T, Fraction] = defaultdict(Fraction)
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        oracle = Oracle(scripts.pop())
        outcome = run(oracle)
        law[outcome] += oracle.prob
        scripts += oracle.alternatives
    return dict(law)


def random_model(seed: int, vocab_size: int, zeros: float = 0.25) -> Model:
    """A prefix-dependent law with small denominators, and zeros."""
    rows: dict[Tokens, Row] = {}

    def row(prefix: Tokens) -> Row:
        if prefix not in rows:
            rng = random.Random(f"{seed} {prefix}")
            counts = [0 if rng.random() < zeros else rng.randint(1, 6) for _ in range(vocab_size)]
            counts[rng.randrange(vocab_size)] += 1
            rows[prefix] = tuple(Fraction(count, sum(counts)) for count in counts)
        return rows[prefix]

    return row


@functools.lru_cache(maxsize=4096)
def exact_law(row: Row, scale: int = 3, is_cut: bool = False) -> Law:
    """A law whose weights aren't normalised, so that forgetting the total shows; cut, it keeps a list of ids."""
    weights = as_array(row) * scale
    if not is_cut:
        return Law(None, weights, Fraction(scale))
    kept = np.flatnonzero(weights != 0).astype(np.int32)
    return Law(kept, weights[kept], Fraction(scale))


def padded(p: Row, size: int) -> Row:
    return p + (Fraction(0),) * (size - len(p))


def as_array(row: Row) -> Any:
    return np.array(row, dtype=object)


def normalised(law: Law) -> Row:
    dense = [Fraction(0)] * (len(law.weights) if law.token_ids is None else int(law.token_ids.max()) + 1)
    token_ids = range(len(law.weights)) if law.token_ids is None else law.token_ids
    total = sum(law.weights.tolist())
    for token_id, weight in zip(token_ids, law.weights, strict=True):
        dense[token_id] = Fraction(weight) / total
    return tuple(dense)


def verdict_of(rule: Rule, oracle: Oracle, target: Model, draft: Draft, prefix: Tokens = ()) -> Verdict:
    """The verdict on a draft that continues a prefix. Some of the target's laws are cut, some aren't."""
    paths: list[Tokens] = []
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else prefix), token_id))

    def law_at(node: int) -> Law:
        path = paths[node] if node >= 0 else prefix
        return exact_law(target(path), is_cut=sum(path) % 2 == 1)

    return rule(draft, law_at, oracle, 0, len(prefix))


def one_step(oracle: Oracle, rule: Rule, target: Model, drafter: Drafter, prefix: Tokens) -> Tokens:
    """The prefix after one step of draft and verification."""
    draft = drafter(oracle, prefix)
    verdict = verdict_of(rule, oracle, target, draft, prefix)
    accepted = tuple(draft.token_ids[node] for node in verdict.accepted)
    return (*prefix, *accepted, verdict.next_token_id)


def continued(law: dict[Tokens, Fraction], target: Model, length: int) -> dict[Tokens, Fraction]:
    """The law of the first `length` tokens when outputs shorter than that go on by plain sampling."""
    out: dict[Tokens, Fraction] = defaultdict(Fraction)
    open_ = list(law.items())
    while open_:
        tokens, prob = open_.pop()
        if len(tokens) >= length:
            out[tokens[:length]] += prob
            continue
        open_ += [((*tokens, v), prob * p) for v, p in enumerate(target(tokens)) if p]
    return dict(out)


def law_of_steps(rule: Rule, target: Model, drafter: Drafter, num_steps: int, length: int) -> dict[Tokens, Fraction]:
    """The law of the first `length` tokens when steps are followed by plain sampling."""

    def run(oracle: Oracle) -> Tokens:
        tokens: Tokens = ()
        for _ in range(num_steps):
            if len(tokens) < length:
                tokens = one_step(oracle, rule, target, drafter, tokens)
        return tokens

    return continued(enumerate_law(run), target, length)


def plain_law(target: Model, length: int) -> dict[Tokens, Fraction]:
    """The law of the first `length` tokens by plain sampling."""
    return continued({(): Fraction(1)}, target, length)


def mean_accepted(rule: Rule, target: Model, drafter: Drafter) -> Fraction:
    """The mean number of accepted nodes of a first step."""
    law = enumerate_law(lambda oracle: len(verdict_of(rule, oracle, target, drafter(oracle, ())).accepted))
    return sum((num * prob for num, prob in law.items()), Fraction(0))
