"""What the ratio rules share: the arithmetic of a rejection, and the draw that follows it.

They keep the law of the tokens, not the stream of plain decoding, so a draw may be any exact one: it is a race over the
weights that are left, with RESIDUAL noise. Coins come from COIN noise. Both are keyed by the length before the step and
so are fresh in every step.

The arithmetic is generic: with laws and rows of `fractions.Fraction` the same code computes exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.errors import EngineFault
from forerun.sampling.distribution import Law, Race, RowSampler
from forerun.sampling.noise import Stream
from forerun.types import Draft, Float64Array

# float64 sums of a normalised row are off by some 1e-16; a row that was normalised in float32 is off by 1e-8 and more,
# and isn't what its node was drawn from.
_ROW_TOLERANCE = 1e-9


def row_law(draft: Draft, node: int) -> Law | None:
    """The law that a node's token was drawn from, by its own row; None for a fixed node.

    Raises:
        EngineFault: the row isn't normalised.
    """
    q_V = draft.q_rows[node]
    if q_V is None:
        return None
    total = mass(q_V)
    if not abs(total - 1) <= _ROW_TOLERANCE:
        raise EngineFault(f"the q row of draft node {node} sums to {total}, but must be normalised in float64")
    return Law(None, q_V, total)


def sibling_law(draft: Draft, siblings: Sequence[int]) -> Law:
    """The one law that siblings were drawn from, in order, and that all of them carry.

    Raises:
        EngineFault: they carry different laws, one is fixed, or the row isn't normalised.
    """
    law = row_law(draft, siblings[0])
    if law is None or any(draft.q_rows[node] is not law.weights for node in siblings):
        raise EngineFault(f"draft nodes {list(siblings)} are siblings, but don't carry the one law they are drawn from")
    return law


def drafted_prob(q: Law | None, token_id: int) -> float:
    """The probability with which a node's token was drawn; 1 for a fixed node, whose q is None.

    Raises:
        EngineFault: it is 0, so the token can't have been drawn from that law.
    """
    if q is None:
        return 1  # an integer, so that dividing a fraction by it stays exact
    if not q.weight(token_id) > 0:
        raise EngineFault(f"a draft node of token {token_id} was drawn with q = 0, so its q row is not its own")
    return q.prob(token_id)


def acceptance(p: float, q: float) -> float:
    """min(1, p / q)."""
    return min(1, p / q)


def owed(p: Law, q: Law | None, token_id: int, kept: float = 1) -> Law:
    """(kept p - q)+, where q None is all mass on token_id. The total is its mass, which may be 0."""
    weights = p.weights / p.total
    if kept != 1:
        weights *= kept
    if q is None:
        return without(Law(p.token_ids, weights, kept), token_id)
    q_of_kept = q.weights if p.token_ids is None else q.weights[p.token_ids]
    weights -= q_of_kept if q.total == 1 else q_of_kept / q.total
    np.maximum(weights, 0, out=weights)
    return Law(p.token_ids, weights, mass(weights))


def residual(p: Law, q: Law | None, token_id: int, kept: float = 1) -> Law:
    """`owed` as a law. It has no mass only when p and q differ by rounding alone; then it is p itself."""
    left = owed(p, q, token_id, kept)
    return left if left.total > 0 else p


def without(law: Law, token_id: int) -> Law:
    """The weights of a law but for one id, with their own total, which may be 0."""
    weights = law.weights.copy()
    at = law.index(token_id)
    if at is not None:
        weights[at] = 0
    return Law(law.token_ids, weights, mass(weights))


def mass(weights: Float64Array) -> float:
    """The sum of some weights. Its last bits may depend on the machine, so no rule that promises paths may use it."""
    total: float = weights.sum(keepdims=True).item()
    return total


def last_draw(law: Law, sampler: RowSampler, key: int, pos: int, committed_len: int) -> Race:
    """A draw that isn't tested: the token at index pos of the request's whole token sequence."""
    return sampler.sample(law, key, pos, Stream.RESIDUAL, committed_len)
