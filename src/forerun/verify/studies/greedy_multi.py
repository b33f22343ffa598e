"""`greedy_multi`: the likeliest children and one sampled from the rest (Hu et al., ICLR 2025).

The children of a node are H, the m - 1 likeliest ids of q, as fixed nodes, and one drawn from q' = norm(q without H).

    if u < min(1, p(c) / q'(c)): keep c and go on below it
    y ~ norm((p - q')+); if y is in H: keep that node and go on below it, else emit y and stop

(c, y) is the ratio test with draft law q', so the token has law p; H only decides whether its row is known already.
Accepted: p(H) + sum over the others of min(p, q'). Without a sampled child, y ~ p.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.errors import EngineFault
from forerun.sampling.distribution import Law, RowSampler
from forerun.types import Draft, NodeTest, Verdict
from forerun.verify.ratio import acceptance, drafted_prob, last_draw, residual, row_law
from forerun.verify.rule import LawAt, Rule, children_by_parent, next_kind


def verify(draft: Draft, law_at: LawAt, sampler: RowSampler, key: int, committed_len: int) -> Verdict:
    """Walks the tree from the root; see `verify.rule.Verify`.

    A test's score is the coin of a sampled node, None for a fixed one.

    Raises:
        EngineFault: a node has two sampled children, or one whose law gives a fixed sibling a chance; or as in
            `verify.ratio`.
    """
    RULE.check(draft)
    children = children_by_parent(draft)
    accepted: list[int] = []
    tests: list[NodeTest] = []
    node = -1
    while True:
        law, siblings = law_at(node), children.get(node, ())
        left, kept = law, None
        sampled = _sampled_child(draft, siblings)
        if sampled is not None:
            token_id, q = draft.token_ids[sampled], row_law(draft, sampled)
            u = sampler.coin(key, sampled, committed_len)
            is_kept = u < acceptance(law.prob(token_id), drafted_prob(q, token_id))
            tests.append(NodeTest(sampled, is_kept, law.prob(token_id), draft.drafted_prob(sampled), u))
            kept = sampled if is_kept else None
            left = residual(law, q, token_id)
        if kept is None:
            race = last_draw(left, sampler, key, committed_len + len(accepted), committed_len)
            likeliest = [child for child in siblings if child != sampled]
            kept = next((child for child in likeliest if draft.token_ids[child] == race.token_id), None)
            tests += [_fixed_test(draft, child, child == kept, law) for child in likeliest]
        if kept is None:
            kind = next_kind(draft, reached_leaf=not siblings)
            return Verdict(tuple(accepted), race.token_id, kind, law.prob(race.token_id), None, tuple(tests))
        accepted.append(kept)
        node = kept


def _sampled_child(draft: Draft, siblings: Sequence[int]) -> int | None:
    """The one sampled node among siblings, None without one."""
    sampled = [(child, q_V) for child in siblings if (q_V := draft.q_rows[child]) is not None]
    if not sampled:
        return None
    child, q_V = sampled[0]
    if len(sampled) > 1 or any(q_V.item(draft.token_ids[other]) > 0 for other in siblings if other != child):
        raise EngineFault(f"of draft nodes {list(siblings)} one may be sampled, from a law without the others")
    return child


def _fixed_test(draft: Draft, node: int, is_kept: bool, law: Law) -> NodeTest:
    return NodeTest(node, is_kept, law.prob(draft.token_ids[node]), 1.0, None)


RULE = Rule(
    name="greedy_multi",
    verify=verify,
    accepts_trees=True,
    accepts_mixed=True,
    replacements=frozenset((False,)),
)
