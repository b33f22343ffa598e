"""`kseq`: the k-SEQ rule of SpecTr (Sun et al., arXiv 2310.15141, algorithm 2), at every node of a tree.

    beta(rho) = sum min(q, p / rho)
    rho* = the root in [1, k] of 1 - (1 - beta(rho))^k = rho beta(rho)
    for each of the k children, drawn independently from q: keep it if u < min(1, p(x) / (rho* q(x)))
    none kept: emit y ~ p - min(q, p / rho*) (1 - (1 - beta)^k) / beta

A token is kept with mass min(q, p / rho) (1 - (1 - beta)^k) / beta, which is at most p for every rho >= rho*: what is
owed is not negative. So bisection must return the upper end of its bracket. At least 1 - 1/e of what the best rule for
k independent children accepts.
"""

from __future__ import annotations

import numpy as np

from forerun.sampling.distribution import Law, RowSampler
from forerun.types import Draft, Float64Array, NodeTest, Verdict
from forerun.verify.ratio import acceptance, drafted_prob, last_draw, mass, sibling_law
from forerun.verify.rule import LawAt, Rule, children_by_parent, next_kind

NUM_HALVINGS = 52


def verify(draft: Draft, law_at: LawAt, sampler: RowSampler, key: int, committed_len: int) -> Verdict:
    """Walks the tree from the root; see `verify.rule.Verify`. A test's score is its coin u.

    Raises:
        EngineFault: siblings were drawn from different laws; or as in `verify.ratio`.
    """
    RULE.check(draft)
    children = children_by_parent(draft)
    accepted: list[int] = []
    tests: list[NodeTest] = []
    node = -1
    while True:
        law, siblings = law_at(node), children.get(node, ())
        left = law
        if siblings:
            q = sibling_law(draft, siblings)
            rho, left = division(law, q, len(siblings))
        for child in siblings:
            token_id = draft.token_ids[child]
            u = sampler.coin(key, child, committed_len)
            is_kept = u < acceptance(law.prob(token_id), rho * drafted_prob(q, token_id))
            tests.append(NodeTest(child, is_kept, law.prob(token_id), draft.drafted_prob(child), u))
            if is_kept:
                accepted.append(child)
                node = child
                break
        else:
            race = last_draw(left, sampler, key, committed_len + len(accepted), committed_len)
            kind = next_kind(draft, reached_leaf=not siblings)
            return Verdict(tuple(accepted), race.token_id, kind, law.prob(race.token_id), None, tuple(tests))


def division(law: Law, q: Law, num_children: int) -> tuple[float, Law]:
    """The factor rho that children are tested with, and the law that is owed when none is kept.

    Args:
        law: p.
        q: the law that the children were drawn from, independently.
        num_children: k.
    """
    p_V, q_V = law.dense(len(q.weights)), q.weights / q.total

    def beta(rho: float) -> float:
        return mass(np.minimum(q_V, p_V / rho))

    low = q.total / q.total  # one, of the numbers' own type
    high = low * num_children
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        if 1 - (1 - beta(middle)) ** num_children > middle * beta(middle):
            low = middle
        else:
            high = middle
    return high, _owed(law, p_V, np.minimum(q_V, p_V / high), num_children)


def _owed(law: Law, p_V: Float64Array, once_V: Float64Array, num_children: int) -> Law:
    """p minus what k children, each kept with the masses once_V if it is reached, take of it."""
    beta = mass(once_V)
    if not beta > 0:  # p and q have nothing in common
        return law
    weights = np.maximum(p_V - once_V * ((1 - (1 - beta) ** num_children) / beta), 0)
    left = Law(None, weights, mass(weights))
    return left if left.total > 0 else law


RULE = Rule(name="kseq", verify=verify, accepts_trees=True, replacements=frozenset((True,)))
