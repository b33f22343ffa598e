"""How drafters draw: the children of one node, in the order in which the draft must hold them.

`coupled` wants them from the target's own noise, so that they tend to be what the target will draw; every other rule is
exact only for children drawn from noise that nothing else reads. A drafter draws from the very law whose probabilities
it puts into the draft, `Law.dense` of what it gives here.
"""

from __future__ import annotations

from forerun.sampling.distribution import Law, RowSampler
from forerun.sampling.noise import Stream


def draft_from_shared(sampler: RowSampler, q: Law, key: int, pos: int, count: int = 1) -> tuple[int, ...]:
    """Children for `coupled`: the `count` least E / q with the noise of the position (stream `shared`).

    With q = p the first child is the target's own draw; in general a child is that draw with probability
    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), at least (1 - TV) / (1 + TV) (Daliri et al., arXiv 2408.07978).

    Args:
        sampler: either sampler.
        q: the drafter's law of the children.
        key: the request's seed.
        pos: the index that the children take in the request's whole token sequence.
        count: children at most; fewer when q has fewer ids.
    """
    return sampler.draw(q, key, pos, count)


def draft_from_own(
    sampler: RowSampler,
    q: Law,
    key: int,
    committed_len: int,
    node: int,
    count: int = 1,
    *,
    with_replacement: bool = False,
) -> tuple[int, ...]:
    """Children for the ratio rules: drawn from q with noise of their own (stream `draft`).

    Args:
        sampler: either sampler.
        q: the drafter's law of the first child.
        key: the request's noise key.
        committed_len: tokens committed before the step.
        node: the index that the first child takes in the draft; the others follow it there.
        count: children at most; without replacement fewer when q has fewer ids.
        with_replacement: draw all of them from q, so that they may be equal, instead of each from what the ones before
            it left.
    """
    if not with_replacement:
        return sampler.draw(q, key, node, count, Stream.DRAFT, committed_len)
    nodes = range(node, node + count)
    return tuple(sampler.sample(q, key, child, Stream.DRAFT, committed_len).token_id for child in nodes)
