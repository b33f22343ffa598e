"""Multi-round rejection, which `token`, `rrsw` and `rrs` are cases of: children of a node are tried one by one.

    node = root
    repeat:
        r = p(node)
        for each child c in draw order, drawn from d given that the ones before it failed:
            if u < min(1, r(c) / d(c)): keep c, node = c, go on below it
            r = norm((r - d)+)
        if none was kept: emit y ~ r and stop

A round keeps c with min(r, d) and leaves (r - d)+ to the next one, so whatever r and d are, a token's mass adds up to
r; by induction over children and depth it is p. The rules differ in d.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from forerun.sampling.distribution import Law, RowSampler
from forerun.types import Draft, NodeTest, Verdict
from forerun.verify.ratio import acceptance, drafted_prob, last_draw, residual, row_law
from forerun.verify.rule import LawAt, children_by_parent, next_kind

# (draft, siblings) -> for each of them the law it was drawn from once those before it had failed; None for a fixed one.
DraftLaws = Callable[[Draft, Sequence[int]], Iterator[Law | None]]


def verify_rounds(
    draft_laws: DraftLaws, draft: Draft, law_at: LawAt, sampler: RowSampler, key: int, committed_len: int
) -> Verdict:
    """Walks the draft from the root; see `verify.rule.Verify`. A test's score is its coin u.

    Raises:
        EngineFault: a sampled node has q = 0, so it wasn't drawn from the row that it carries, or its row isn't
            normalised.
    """
    children = children_by_parent(draft)
    accepted: list[int] = []
    tests: list[NodeTest] = []
    node = -1
    while True:
        law = left = law_at(node)
        siblings = children.get(node, ())
        for child, q in zip(siblings, draft_laws(draft, siblings), strict=False):
            token_id = draft.token_ids[child]
            u = sampler.coin(key, child, committed_len)
            is_kept = u < acceptance(left.prob(token_id), drafted_prob(q, token_id))
            tests.append(NodeTest(child, is_kept, law.prob(token_id), draft.drafted_prob(child), u))
            if is_kept:
                accepted.append(child)
                node = child
                break
            left = residual(left, q, token_id)
        else:
            race = last_draw(left, sampler, key, committed_len + len(accepted), committed_len)
            kind = next_kind(draft, reached_leaf=not siblings)
            return Verdict(tuple(accepted), race.token_id, kind, law.prob(race.token_id), None, tuple(tests))


def own_laws(draft: Draft, siblings: Sequence[int]) -> Iterator[Law | None]:
    """Each sibling was drawn from its own row, whatever the others are."""
    for node in siblings:
        yield row_law(draft, node)
