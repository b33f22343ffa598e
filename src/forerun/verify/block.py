"""`block`: block verification of chains (Sun et al., arXiv 2403.10444, algorithm 2).

    P[0] = 1;  P[i] = min(1, P[i-1] p[i](x[i]) / q[i](x[i])) for i = 1..k
    S[i] = sum_v (P[i] p[i+1](v) - q[i+1](v))+,  h[i] = S[i] / (S[i] + 1 - P[i]) for i < k;  h[k] = P[k]
    tau = the largest i with u[i] < h[i], or 0
    emit x[1..tau], then y ~ p[k+1] if tau = k, else y ~ norm((P[tau] p[tau+1] - q[tau+1])+)

Here p[i] and q[i] are the laws of token i after x[1..i-1], p[k+1] that of the bonus. P(tau >= i | x[1..i]) = P[i]: true
for k, and for i by the mean P[i] - S[i] of P[i+1]. So P(tau = i | x[1..i]) = S[i], and "x[1..i] kept, y next" has mass
Q(x[1..i]) (min(q, P p)(y) + (P p - q)+(y)) = Q P[i] p(y). It keeps as many tokens as any rule for chains can, and no
fewer than `token`, since a node is not lost to the bad luck of one before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.sampling.distribution import Law, RowSampler
from forerun.types import Draft, NodeTest, Verdict
from forerun.verify.ratio import acceptance, drafted_prob, last_draw, owed, row_law
from forerun.verify.rule import LawAt, Rule, next_kind


@dataclass(frozen=True, slots=True)
class _Chain:
    """A chain down to its end, or to the first node with P = 0, below which nothing can be kept.

    Attributes:
        laws: p[i] at index i - 1.
        qs: q[i] at index i - 1; None for a fixed node.
        kept: P[i] at index i.
    """

    laws: list[Law] = field(default_factory=list)
    qs: list[Law | None] = field(default_factory=list)
    kept: list[float] = field(default_factory=lambda: [1])


def verify(draft: Draft, law_at: LawAt, sampler: RowSampler, key: int, committed_len: int) -> Verdict:
    """Tests the chain's nodes from the last one that can be kept; see `verify.rule.Verify`.

    A test's score is its coin u; None for a node that was kept with one below it, and for one that can't be kept. Rows
    below a node that can't be kept are not asked for.

    Raises:
        EngineFault: the rule isn't exact for the draft, a sampled node has q = 0, or its row isn't normalised.
    """
    RULE.check(draft)
    chain = _forward(draft, law_at)
    coins: dict[int, float] = {}
    tau = sum(kept > 0 for kept in chain.kept) - 1
    left, chance = _after(chain, draft, tau)
    while tau > 0:
        coins[tau - 1] = sampler.coin(key, tau - 1, committed_len)
        if coins[tau - 1] < chance:
            break
        tau -= 1
        left, chance = _after(chain, draft, tau)
    law = chain.laws[tau] if tau < len(chain.laws) else law_at(tau - 1)
    race = last_draw(left or law, sampler, key, committed_len + tau, committed_len)
    tests = tuple(
        NodeTest(node, node < tau, p.prob(draft.token_ids[node]), draft.drafted_prob(node), coins.get(node))
        for node, p in enumerate(chain.laws)
    )
    kind = next_kind(draft, reached_leaf=tau == draft.num_nodes)
    return Verdict(tuple(range(tau)), race.token_id, kind, law.prob(race.token_id), None, tests)


def _forward(draft: Draft, law_at: LawAt) -> _Chain:
    chain = _Chain()
    for node, token_id in enumerate(draft.token_ids):
        law, q = law_at(node - 1), row_law(draft, node)
        chain.laws.append(law)
        chain.qs.append(q)
        chain.kept.append(acceptance(chain.kept[node] * law.prob(token_id), drafted_prob(q, token_id)))
        if not chain.kept[-1] > 0:
            break
    return chain


def _after(chain: _Chain, draft: Draft, tau: int) -> tuple[Law | None, float]:
    """What is owed after tau kept nodes (None: the target's own law there), and h[tau], which is 1 for tau = 0."""
    if tau == len(chain.laws):
        return None, chain.kept[tau]
    left = owed(chain.laws[tau], chain.qs[tau], draft.token_ids[tau], chain.kept[tau])
    all_ = left.total + (1 - chain.kept[tau])
    if not all_ > 0:  # P = 1 and p = q, so that only rounding leads here
        return None, 1
    return left, left.total / all_


RULE = Rule(name="block", verify=verify, accepts_mixed=True)
