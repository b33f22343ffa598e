"""`rrs`: multi-round rejection of siblings drawn independently (SpecInfer, arXiv 2305.09781).

It is multi-round rejection (`verify.rounds`) in which each child's law d is the one it was drawn from, whatever the
others are: one q for all, or one per drafter, or a fixed token. Equal siblings are kept as they are, since each is a
round. They are also why `rrsw` accepts more for the same number of rows.
"""

from __future__ import annotations

from forerun.sampling.distribution import RowSampler
from forerun.types import Draft, Verdict
from forerun.verify.rounds import own_laws, verify_rounds
from forerun.verify.rule import LawAt, Rule


def verify(draft: Draft, law_at: LawAt, sampler: RowSampler, key: int, committed_len: int) -> Verdict:
    """Walks the tree from the root; see `verify.rounds.verify_rounds`."""
    RULE.check(draft)
    return verify_rounds(own_laws, draft, law_at, sampler, key, committed_len)


RULE = Rule(name="rrs", verify=verify, accepts_trees=True, accepts_mixed=True, replacements=frozenset((True,)))
