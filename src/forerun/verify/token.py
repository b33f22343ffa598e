"""`token`: the ratio test of Leviathan et al. (arXiv 2211.17192, algorithm 1) and Chen et al. (arXiv 2302.01318).

    for each node x of the chain: keep it if u < min(1, p(x) / q(x)), else emit y ~ norm((p - q)+) and stop
    after the last one: emit y ~ p

P(x kept) = min(p, q) and P(rejected) = sum (p - q)+, so a position's law is min(p, q) + (p - q)+ = p. A fixed node is
a point mass: kept with p(x), and what remains is p without x. Expected tokens: 1 + sum_i prod_{j <= i} (1 - TV_j).
"""

from __future__ import annotations

from forerun.sampling.distribution import RowSampler
from forerun.types import Draft, Verdict
from forerun.verify.rounds import own_laws, verify_rounds
from forerun.verify.rule import LawAt, Rule


def verify(draft: Draft, law_at: LawAt, sampler: RowSampler, key: int, committed_len: int) -> Verdict:
    """Tests the chain's nodes in order; see `verify.rounds.verify_rounds`."""
    RULE.check(draft)
    return verify_rounds(own_laws, draft, law_at, sampler, key, committed_len)


RULE = Rule(name="token", verify=verify, accepts_mixed=True)
