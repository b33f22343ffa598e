"""`token`: the ratio test of Leviathan et al. (arXiv 2211.17192, algorithm 1) and Chen et al. (arXiv 2302.01318).

    for each node x of the chain: keep it if u < min(1, p(x) / q(x)), else emit y ~ norm((p - q)+) and stop
    after the last one: emit y ~ p

P(x kept) = min(p, q) and P(rejected) = sum (p - q)+, so a position's law is min(p, q) + (p - q)+ = p. A fixed proposal
is a point mass: kept with p(x), and what remains is p without x. It keeps the law, not the stream, so the last draw may
be any exact one: it is a race over the weights left, with RESIDUAL noise; coins come from COIN noise. Both are keyed by
the length before the step and so are fresh in every step.

The arithmetic is generic: with laws and rows of `fractions.Fraction` the same code computes exactly.
"""

from __future__ import annotations

import numpy as np

from forerun.errors import EngineFault
from forerun.sampling import math64
from forerun.sampling.distribution import Law, Race, RowSampler
from forerun.sampling.noise import Stream
from forerun.types import Draft, Float64Array, NodeTest, Verdict
from forerun.verify.coupled import next_kind
from forerun.verify.rule import LawAt, Rule


def verify(draft: Draft, law_at: LawAt, sampler: RowSampler, key: int, committed_len: int) -> Verdict:
    """Tests the chain's nodes in order; see `verify.rule.Verify`. A test's score is its coin u.

    Raises:
        ConfigError: the draft is a tree, or has nodes sampled from SHARED noise.
        EngineFault: a sampled node has q = 0, so it wasn't drawn from the row that it carries.
    """
    RULE.check(draft)
    tests: list[NodeTest] = []
    for node, token_id in enumerate(draft.token_ids):
        law = law_at(node - 1)
        q_V = draft.q_rows[node]
        p, q = law.prob(token_id), drafted_prob(q_V, token_id)
        u = sampler.coin(key, node, committed_len)
        is_kept = u < acceptance(p, q)
        tests.append(NodeTest(node, is_kept, p, q, u))
        if not is_kept:
            race = last_draw(residual(law, q_V, token_id), sampler, key, committed_len)
            return Verdict(tuple(range(node)), race.token_id, "correction", law.prob(race.token_id), None, tuple(tests))
    law = law_at(draft.num_nodes - 1)
    race = last_draw(law, sampler, key, committed_len)
    kind = next_kind(draft, reached_leaf=True)
    return Verdict(tuple(range(draft.num_nodes)), race.token_id, kind, law.prob(race.token_id), None, tuple(tests))


def drafted_prob(q_V: Float64Array | None, token_id: int) -> float:
    """The probability with which a node's token was drawn; 1 for a fixed proposal."""
    if q_V is None:
        return 1  # an integer, so that dividing a fraction by it stays exact
    q = q_V.item(token_id)
    if not q > 0.0:
        raise EngineFault(f"a draft node of token {token_id} was drawn with q = {q}, so its q row is not its own")
    return q


def acceptance(p: float, q: float) -> float:
    """min(1, p / q)."""
    return min(1, p / q)


def residual(law: Law, q_V: Float64Array | None, token_id: int) -> Law:
    """The law owed after token_id was rejected, norm((p - q)+), with unnormalised weights.

    It has no mass only when p and q differ by rounding alone; then it is p itself.
    """
    if q_V is None:
        weights = law.weights.copy()
        at = token_id if law.token_ids is None else int(law.token_ids.searchsorted(token_id))
        if law.weight(token_id):
            weights[at] = 0
        owed = Law(law.token_ids, weights, math64.lane_sum(weights))
    else:
        weights = np.maximum(law.dense(len(q_V)) - q_V, 0)
        owed = Law(None, weights, math64.lane_sum(weights))
    return owed if owed.total else law


def last_draw(law: Law, sampler: RowSampler, key: int, committed_len: int) -> Race:
    """The one draw of a step that isn't tested."""
    return sampler.sample(law, key, 0, Stream.RESIDUAL, committed_len)


RULE = Rule(
    name="token",
    verify=verify,
    accepts_trees=False,
    sampled_streams=frozenset(("draft",)),
    is_path_exact=False,
)
