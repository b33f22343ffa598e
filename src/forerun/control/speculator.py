"""Speculation bound to a loaded model: its drafters, and what is known of their acceptance."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.control.acceptance import AcceptanceTable
from forerun.control.planner import Planner
from forerun.drafters.base import DraftContext, DrafterSource


class Speculator:
    """Who drafts for a model, over all its requests.

    Args:
        sources: the drafters, bound to the model.
    """

    def __init__(self, sources: Sequence[DrafterSource]) -> None:
        self.sources = tuple(sources)
        self._tables = tuple(AcceptanceTable(source.priors) for source in self.sources)

    def open(self, context: DraftContext, method: str | None = None) -> Planner | None:
        """Who plans the drafts of one request; None where nobody would propose anything for it.

        Args:
            context: of the request.
            method: the name of the only drafter to ask; None asks all.
        """
        lanes = zip(self.sources, self._tables, strict=True)
        planner = Planner([lane for lane in lanes if method in (None, lane[0].name)], context)
        return planner if planner.has_drafters else None

    def clear(self) -> None:
        """Forgets what earlier requests left behind: acceptance and whatever drafters share."""
        for source, table in zip(self.sources, self._tables, strict=True):
            source.clear()
            table.clear()

    @property
    def memory_bytes(self) -> int:
        """Bytes that the drafters hold for all requests together."""
        return sum(source.memory_bytes for source in self.sources)
