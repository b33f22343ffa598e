"""Speculation bound to a loaded model: its drafters, what is known of their acceptance, and what steps cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.control.acceptance import AcceptanceTable
from forerun.control.cost import StepCosts
from forerun.control.planner import Planner
from forerun.drafters.base import DraftContext, DrafterSource


class Speculator:
    """Who drafts for a model, over all its requests.

    Args:
        sources: the drafters, bound to the model.
        costs: gives what steps take; called when the first request needs it, because measuring takes time.
    """

    def __init__(self, sources: Sequence[DrafterSource], costs: Callable[[], StepCosts]) -> None:
        self.sources = tuple(sources)
        self._tables = tuple(AcceptanceTable(source.priors) for source in self.sources)
        self._costs = costs
        self._needs_costs = any(source.policy == "adaptive" for source in self.sources)

    def open(self, context: DraftContext) -> Planner | None:
        """The controller of one request; None where nobody would propose anything for it."""
        costs = self._costs() if self._needs_costs else None
        planner = Planner(tuple(zip(self.sources, self._tables, strict=True)), costs, context)
        return planner if planner.has_drafters else None

    def clear(self) -> None:
        """Forgets what earlier requests left behind: acceptance and whatever drafters share. Costs stay."""
        for source, table in zip(self.sources, self._tables, strict=True):
            source.clear()
            table.clear()

    @property
    def memory_bytes(self) -> int:
        """Bytes that the drafters hold for all requests together."""
        return sum(source.memory_bytes for source in self.sources)
