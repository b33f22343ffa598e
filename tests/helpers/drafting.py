"""A drafter on its own: a request it may know, and a budget that lets it propose what it likes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.drafters.base import Budget, DraftContext, Drafter, DraftTarget, Proposal
from forerun.models.bound import BindSettings
from forerun.sampling.reference import ReferenceSampler
from forerun.types import Draft, SamplingParams


def context(prompt: Sequence[int], end_ids: Sequence[int] = (), **fields: Any) -> DraftContext:
    """A request as a drafter sees it."""
    settings: dict[str, Any] = {"params": SamplingParams(), "noise_key": 1, "stream": "shared", "max_len": 4096}
    return DraftContext(tuple(prompt), frozenset(end_ids), **{**settings, **fields})


def target(vocab_size: int) -> DraftTarget:
    """A target for drafters that look at nothing but its vocabulary and its rows."""
    settings = BindSettings("native", "cpu", "auto", "f16", threads=1, max_rows=64)
    return DraftTarget(None, ReferenceSampler(vocab_size), None, vocab_size, 64, settings)  # type: ignore[arg-type]


def propose(drafter: Drafter, max_nodes: int, min_survival: float = 0.0, rate: float = 0.5) -> Proposal:
    """What it proposes where every node of it is thought to be right as often; its shape is checked."""
    proposal = drafter.propose(Budget(max_nodes, (min_survival,) * max_nodes, lambda cell: rate))
    proposal.draft.check_integrity()
    assert proposal.draft.num_nodes == len(proposal.cells) <= max_nodes
    return proposal


def depths(draft: Draft) -> list[int]:
    """Depth of each node; the root's children have depth 1."""
    out: list[int] = []
    for parent in draft.parents:
        out.append(1 if parent < 0 else out[parent] + 1)
    return out
