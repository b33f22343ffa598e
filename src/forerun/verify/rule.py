"""What a verification rule is: a function and the drafts it is exact for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from forerun.errors import EngineFault
from forerun.sampling.distribution import Law, RowSampler
from forerun.types import Draft, DraftTraits, NextKind, NoiseStream, Pruning, Verdict

# The target's law of the token after a draft node; -1 is the root. Rules ask for the rows they need only, each once.
LawAt = Callable[[int], Law]
# (draft, law_at, sampler, key, committed_len): key is the request's seed, committed_len the number of tokens before the
# step, which is also the position that the root's children propose.
Verify = Callable[[Draft, LawAt, RowSampler, int, int], Verdict]

ANY_STREAM: Final[frozenset[NoiseStream]] = frozenset(("shared", "draft"))
ANY_PRUNING: Final[frozenset[Pruning]] = frozenset(("any", "prefix_only"))
EITHER: Final = frozenset((False, True))


class ArgmaxLaws:
    """`LawAt` of a greedy request, whose laws keep one id each.

    Args:
        ids: the id of the root and of each node.
    """

    __slots__ = ("ids",)

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids

    def __call__(self, node: int) -> Law:
        """The law after a node, -1 being the root."""
        return Law.point(self.ids[1 + node])


@dataclass(frozen=True, slots=True)
class Rule:
    """One verification rule, and what a draft with sampled nodes may be for it to be exact.

    The defaults are those of rules that compare a coin with a ratio of probabilities: what nodes were drawn from and
    why they are in the draft must have nothing to do with what decides about them.

    Attributes:
        name: as requests and operators write it.
        verify: turns laws and a draft into a verdict. Raises EngineFault for a draft that the rule isn't exact for.
        is_path_exact: whether the emitted tokens, not only their law, are those of plain seeded decoding.
        accepts_trees: whether a node may have several children.
        accepts_mixed: whether fixed nodes may stand beside sampled ones.
        streams: the noise streams that nodes may be drawn from.
        prunings: how it may have been decided which nodes there are.
        replacements: whether siblings may be drawn with (True) and without replacement.
    """

    name: str
    verify: Verify
    is_path_exact: bool = False
    accepts_trees: bool = False
    accepts_mixed: bool = False
    streams: frozenset[NoiseStream] = frozenset(("draft",))
    prunings: frozenset[Pruning] = frozenset(("prefix_only",))
    replacements: frozenset[bool] = EITHER

    def refusal(self, traits: DraftTraits) -> str | None:
        """Why the rule isn't exact for such a draft, in one sentence; None if it is."""
        if traits.is_tree and not self.accepts_trees:
            return f"rule {self.name} verifies chains, not trees; a tree needs rule coupled, rrsw or traversal"
        if traits.is_mixed and not self.accepts_mixed:
            return f"rule {self.name} verifies sampled nodes with no fixed ones among them; rule coupled takes both"
        if traits.has_sampled and traits.stream not in self.streams:
            return f"rule {self.name} is exact for nodes sampled from draft noise only, not from {traits.stream}"
        if traits.has_sampled and traits.pruning not in self.prunings:
            return (
                f"rule {self.name} is exact for pruning prefix_only, where a node is kept or cut before it is drawn, "
                f"not for {traits.pruning}; rule coupled takes any"
            )
        if traits.is_tree and traits.with_replacement not in self.replacements:
            how = "without" if traits.with_replacement else "with"
            return f"rule {self.name} is exact for siblings drawn {how} replacement only"
        return None

    def check(self, draft: Draft) -> None:
        """Raises EngineFault when the rule isn't exact for the draft."""
        reason = self.refusal(draft.traits)
        if reason is not None:
            raise EngineFault(reason)


def children_by_parent(draft: Draft) -> dict[int, Sequence[int]]:
    """The children of each inner node in draw order; -1 is the root."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(draft.parents):
        children.setdefault(parent, []).append(node)
    return {parent: tuple(nodes) for parent, nodes in children.items()}


def next_kind(draft: Draft, reached_leaf: bool) -> NextKind:
    """What the token after the accepted path is called."""
    if draft.num_nodes == 0:
        return "plain"
    return "bonus" if reached_leaf else "correction"
