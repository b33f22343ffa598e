"""`coupled`: target and drafter share the noise (Daliri, Musco, Suresh, arXiv 2408.07978).

At each walked node the target draws its own token, exactly as plain decoding would; a child is accepted iff it is that
token. So the draft decides how far the rows are known already, never which token is emitted: any drafter, shape or
pruning is exact, and the output equals plain decoding with the same seed token by token. A greedy law draws its argmax.

    pos = committed_len, node = root
    repeat: y = sample(law(node), pos); emit y; if y is a child of node: node = that child, pos += 1; else stop
"""

from __future__ import annotations

from forerun.sampling.distribution import RowSampler
from forerun.types import Draft, NextKind, NodeTest, Verdict
from forerun.verify.rule import LawAt, Rule


def verify(draft: Draft, law_at: LawAt, sampler: RowSampler, key: int, committed_len: int) -> Verdict:
    """Walks the draft along the target's own draws; see `verify.rule.Verify`.

    All children of a walked node count as tested. A test's score is the race score of its token, None where p is 0 or
    the law keeps a single id (greedy).
    """
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
            score = race.score if is_drawn else sampler.score(law, key, pos, token_id)
            q_V = draft.q_rows[child]
            q = 1.0 if q_V is None else q_V.item(token_id)
            tests.append(NodeTest(child, is_drawn, law.prob(token_id), q, score))
            if is_drawn:
                node = child
        if node < 0:
            kind = next_kind(draft, reached_leaf=not candidates)
            next_p = law.prob(race.token_id)
            return Verdict(tuple(accepted), race.token_id, kind, next_p, race.score, tuple(tests))
        accepted.append(node)


def children_by_parent(draft: Draft) -> dict[int, list[int]]:
    """The children of each inner node in draw order; -1 is the root."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(draft.parents):
        children.setdefault(parent, []).append(node)
    return children


def next_kind(draft: Draft, reached_leaf: bool) -> NextKind:
    """What the token after the accepted path is called."""
    if draft.num_nodes == 0:
        return "plain"
    return "bonus" if reached_leaf else "correction"


RULE = Rule(
    name="coupled",
    verify=verify,
    accepts_trees=True,
    sampled_streams=frozenset(("shared", "draft")),
    is_path_exact=True,
)
