"""`rrsw`: recursive rejection for trees whose siblings were drawn without replacement (RSD, arXiv 2402.14160; Sequoia,
arXiv 2402.12374).

It is multi-round rejection (`verify.rounds`) in which, given that the earlier siblings were drawn and failed, the next
one's law d is q without them, normalised. A chain is verified as by `token`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forerun.sampling.distribution import Law, RowSampler
from forerun.types import Draft, Verdict
from forerun.verify.ratio import sibling_law, without
from forerun.verify.rounds import verify_rounds
from forerun.verify.rule import LawAt, Rule


def verify(draft: Draft, law_at: LawAt, sampler: RowSampler, key: int, committed_len: int) -> Verdict:
    """Walks the tree from the root; see `verify.rounds.verify_rounds`."""
    RULE.check(draft)
    return verify_rounds(remaining_laws, draft, law_at, sampler, key, committed_len)


def remaining_laws(draft: Draft, siblings: Sequence[int]) -> Iterator[Law]:
    """Each sibling was drawn from what the ones before it left of one law."""
    if siblings:
        law = sibling_law(draft, siblings)
        for node in siblings:
            yield law
            law = without(law, draft.token_ids[node])


RULE = Rule(name="rrsw", verify=verify, accepts_trees=True, replacements=frozenset((False,)))
