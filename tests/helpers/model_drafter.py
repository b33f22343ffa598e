"""A drafter that samples from a law of its own, for engines over the fake target."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from forerun.drafters.base import Budget, DraftContext, DraftTarget, Proposal
from forerun.sampling.distribution import Law, RowSampler
from forerun.sampling.drafting import draft_from_own, draft_from_shared
from forerun.sampling.history import History
from forerun.sampling.reference import ReferenceSampler
from forerun.types import Draft, DraftTraits, Float64Array, NoiseStream, SamplingParams
from tests.helpers.engines import QuietDrafter, ScriptedSource
from tests.helpers.fake_target import VOCAB_SIZE, prefix_logits

_SAMPLER = ReferenceSampler(VOCAB_SIZE)


@functools.lru_cache(maxsize=100_000)
def law_after(token_ids: tuple[int, ...], temperature: float, top_k: int) -> Law:
    """The fake target's law with other parameters: what a drafter might think of it."""
    params = SamplingParams(temperature=temperature, top_k=top_k)
    return _SAMPLER.law(prefix_logits(token_ids), params, History(params, ()).along())


@dataclass
class ModelDrafter(QuietDrafter):
    """Draws children from `law_after` the committed tokens and the path, breadth first.

    Attributes:
        key: the request's noise key.
        branching: children per node, by depth.
        stream: whose noise.
        temperature, top_k: of the law that is drawn from.
        declared_temperature: of the law that the draft carries; another one is a lie that a test must find.
    """

    key: int
    branching: tuple[int, ...]
    stream: NoiseStream = "draft"
    temperature: float = 1.5
    top_k: int = 5
    declared_temperature: float | None = None
    sampler: RowSampler = _SAMPLER
    token_ids: list[int] = field(default_factory=list)

    def __call__(self, context: DraftContext) -> ModelDrafter:
        self.token_ids = list(context.prompt_token_ids)
        return self

    def propose(self, budget: Budget) -> Proposal:
        committed_len = len(self.token_ids)
        paths: list[tuple[int, ...]] = [tuple(self.token_ids)]
        nodes: list[tuple[int, int, Float64Array]] = []
        for parent, path in enumerate(paths, start=-1):
            depth = len(path) - committed_len
            # A shape that depends on nothing that was drawn: every node of a level is drawn or none is.
            if depth == len(self.branching) or self._num_nodes(depth + 1) > budget.max_nodes:
                break
            law = law_after(path, self.temperature, self.top_k)
            row = law_after(path, self.declared_temperature or self.temperature, self.top_k).dense(VOCAB_SIZE)
            for token_id in self._children(law, committed_len, len(nodes), len(path), self.branching[depth]):
                nodes.append((parent, token_id, row))
                paths.append((*path, token_id))
        parents, token_ids, rows = zip(*nodes, strict=True) if nodes else ((), (), ())
        draft = Draft(token_ids, parents, ("model",) * len(nodes), rows, self.stream, "prefix_only")
        return Proposal(draft, (0,) * len(nodes))

    def advance(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids

    def _num_nodes(self, depth: int) -> int:
        """Nodes of a whole tree down to a depth."""
        num_nodes, level = 0, 1
        for count in self.branching[:depth]:
            level *= count
            num_nodes += level
        return num_nodes

    def _children(self, law: Law, committed_len: int, node: int, pos: int, count: int) -> tuple[int, ...]:
        if self.stream == "shared":
            return draft_from_shared(self.sampler, law, self.key, pos, count)
        return draft_from_own(self.sampler, law, self.key, committed_len, node, count)


@dataclass(frozen=True)
class SharedTreeOptions:
    """The settings of a drafter of trees that knows no noise but the one that `coupled` wants."""

    name: ClassVar[str] = "model"
    is_off: ClassVar[bool] = False

    def bind(self, target: DraftTarget) -> ScriptedSource:
        raise AssertionError("a drafter was made that the rule isn't exact for")

    def traits(self, stream: NoiseStream) -> DraftTraits:
        return DraftTraits(has_sampled=True, is_tree=True, stream="shared")


@dataclass(frozen=True)
class ChainOptions(SharedTreeOptions):
    """The settings of a drafter of chains that does as it should."""

    def traits(self, stream: NoiseStream) -> DraftTraits:
        return DraftTraits(has_sampled=True, stream=stream, pruning="prefix_only")
