"""`traversal`: traversal verification (Weng et al., arXiv 2505.12398) of trees drawn without replacement.

Every node holds the law R that is owed after it, the law D that its next child is drawn from, and a chance a that it is
kept. At first R = p, D = q, and a = 1 for the root.

    repeat:
        node = root; while node has children: c = its first child, a(c) = min(1, a R(c) / D(c)), node = c
        if node is the root or u < a: keep the path to node, emit y ~ R and stop
        f = the node's parent, without the node from now on:
        S = sum (a(f) R(f) - D(f))+,  R(f) = norm((a(f) R(f) - D(f))+),  a(f) = S / (S + 1 - a(f))
        D(f) = norm(D(f) without the node's token)

It is the algebra of block verification at every deletion. Given f, the drawn child is kept with mass sum min(D, a R),
which is a - S; what is left, 1 - a + S, is tried again with chance S / (S + 1 - a), so f is kept with a in all. After
the failure norm((a R - D)+) is owed, and the next child's law is D without the failed one. On a chain it is `block`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.sampling.distribution import Law, RowSampler
from forerun.types import Draft, NodeTest, Verdict
from forerun.verify.ratio import acceptance, drafted_prob, last_draw, owed, sibling_law, without
from forerun.verify.rule import LawAt, Rule, children_by_parent, next_kind


@dataclass(slots=True)
class _Inner:
    """What a node with children holds.

    Attributes:
        law: p.
        left: R.
        rest: D.
        children: those that haven't failed, in draw order.
    """

    law: Law
    left: Law
    rest: Law
    children: list[int]


@dataclass(slots=True)
class _Visit:
    """A node of the path that is being walked.

    Attributes:
        node: its index, -1 for the root.
        p: the target's probability of its token.
        kept: a.
        inner: None for a leaf, and for a node with a = 0, below which nothing can be kept.
    """

    node: int
    p: float
    kept: float
    inner: _Inner | None = field(default=None)

    def test(self, draft: Draft, is_kept: bool, u: float | None) -> NodeTest:
        """The record of what became of the node."""
        return NodeTest(self.node, is_kept, self.p, draft.drafted_prob(self.node), u)


def verify(draft: Draft, law_at: LawAt, sampler: RowSampler, key: int, committed_len: int) -> Verdict:
    """Tests the tree's leaves in draw order, and a node once all its children have failed; see `verify.rule.Verify`.

    A test's score is its coin u; None for a node that was kept with one below it. A node that can't be kept is tested
    like a leaf, without what is below it.

    Raises:
        EngineFault: the rule isn't exact for the draft, a sampled node has q = 0, or its row isn't normalised.
    """
    RULE.check(draft)
    children = children_by_parent(draft)
    tests: list[NodeTest] = []
    path = [_Visit(-1, 1, 1)]
    while True:
        _descend(path, draft, law_at, children)
        at = path[-1]
        if at.node < 0:
            break
        u = sampler.coin(key, at.node, committed_len)
        is_kept = u < at.kept
        tests.append(at.test(draft, is_kept, u))
        if is_kept:
            break
        path.pop()
        _drop_first_child(path[-1], draft)
    law, left = (at.inner.law, at.inner.left) if at.inner is not None else (law_at(at.node),) * 2
    race = last_draw(left, sampler, key, committed_len + len(path) - 1, committed_len)
    tests += [visit.test(draft, True, None) for visit in path[1:-1]]
    kind = next_kind(draft, reached_leaf=at.node not in children)
    accepted = tuple(visit.node for visit in path[1:])
    return Verdict(accepted, race.token_id, kind, law.prob(race.token_id), None, tuple(tests))


def _descend(path: list[_Visit], draft: Draft, law_at: LawAt, children: dict[int, Sequence[int]]) -> None:
    """Goes on from the end of the path to the first leaf below it that can be kept, or that decides that none can."""
    while True:
        at = path[-1]
        if at.inner is None and at.kept > 0 and at.node in children:
            law, siblings = law_at(at.node), children[at.node]
            at.inner = _Inner(law, law, sibling_law(draft, siblings), list(siblings))
        if at.inner is None or not at.inner.children or not at.kept > 0:
            return
        child = at.inner.children[0]
        token_id = draft.token_ids[child]
        p, q = at.inner.left.prob(token_id), drafted_prob(at.inner.rest, token_id)
        path.append(_Visit(child, at.inner.law.prob(token_id), acceptance(at.kept * p, q)))


def _drop_first_child(at: _Visit, draft: Draft) -> None:
    """What a node holds once its first child has failed."""
    assert at.inner is not None
    token_id = draft.token_ids[at.inner.children.pop(0)]
    left = owed(at.inner.left, at.inner.rest, token_id, at.kept)
    if left.total > 0:
        at.inner.left = left
    if at.node >= 0:
        both = left.total + (1 - at.kept)
        at.kept = left.total / both if both > 0 else 1  # 0 / 0 by rounding only, where the child was kept for certain
    at.inner.rest = without(at.inner.rest, token_id)


RULE = Rule(name="traversal", verify=verify, accepts_trees=True, replacements=frozenset((False,)))
