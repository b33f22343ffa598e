"""`coupled`: target and drafter share the noise (Daliri, Musco, Suresh, arXiv 2408.07978).

At each walked node the target draws its own token, exactly as plain decoding would; a child is accepted iff it is that
token. So the draft decides how far the rows are known already, never which token is emitted: any drafter, shape or
pruning is exact, and the output equals plain decoding with the same seed token by token. A greedy law draws its argmax.

    pos = committed_len, node = root
    repeat: y = sample(law(node), pos); emit y; if y is a child of node: node = that child, pos += 1; else stop
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.sampling.distribution import RowSampler
from forerun.types import Draft, NodeTest, Verdict
from forerun.verify.rule import ANY_PRUNING, ANY_STREAM, ArgmaxLaws, LawAt, Rule, children_by_parent, next_kind


def verify(draft: Draft, law_at: LawAt, sampler: RowSampler, key: int, committed_len: int) -> Verdict:
    """Walks the draft along the target's own draws; see `verify.rule.Verify`.

    All children of a walked node count as tested. A test's score is the race score of its token, None where p is 0 or
    the law keeps a single id (greedy).
    """
    if isinstance(law_at, ArgmaxLaws):
        return _verify_argmax(draft, law_at.ids)
    children = children_by_parent(draft)
    accepted: list[int] = []
    tests: list[NodeTest] = []
    node = -1
    while True:
        pos = committed_len + len(accepted)
        law = law_at(node)
        race = sampler.sample(law, key, pos)
        candidates = children.get(node, ())
        node = -1
        for child in candidates:
            token_id = draft.token_ids[child]
            is_drawn = token_id == race.token_id
            is_kept = is_drawn and node < 0  # siblings that were drawn with replacement may be equal
            score = race.score if is_drawn else sampler.score(law, key, pos, token_id)
            tests.append(NodeTest(child, is_kept, law.prob(token_id), draft.drafted_prob(child), score))
            if is_kept:
                node = child
        if node < 0:
            kind = next_kind(draft, reached_leaf=not candidates)
            next_p = law.prob(race.token_id)
            return Verdict(tuple(accepted), race.token_id, kind, next_p, race.score, tuple(tests))
        accepted.append(node)


def _verify_argmax(draft: Draft, argmax_ids: Sequence[int]) -> Verdict:
    """The same where each law keeps one id: nothing is drawn, and only that id has a p, which is 1.

    It runs right after a pass that has left nothing else in the processor's caches, where each law and each race would
    be waited for.
    """
    token_ids = draft.token_ids
    children = None if draft.is_chain else children_by_parent(draft)
    accepted: list[int] = []
    tests: list[NodeTest] = []
    node = -1
    while True:
        next_id = argmax_ids[1 + node]
        if children is not None:
            candidates = children.get(node, ())
        else:
            candidates = (node + 1,) if node + 1 < len(token_ids) else ()
        node = -1
        for child in candidates:
            is_next = token_ids[child] == next_id
            is_kept = is_next and node < 0
            tests.append(NodeTest(child, is_kept, 1.0 if is_next else 0.0, draft.drafted_prob(child), None))
            if is_kept:
                node = child
        if node < 0:
            kind = next_kind(draft, reached_leaf=not candidates)
            return Verdict(tuple(accepted), next_id, kind, 1.0, None, tuple(tests))
        accepted.append(node)


RULE = Rule(
    name="coupled",
    verify=verify,
    is_path_exact=True,
    accepts_trees=True,
    accepts_mixed=True,
    streams=ANY_STREAM,
    prunings=ANY_PRUNING,
)
