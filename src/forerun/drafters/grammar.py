"""Grammar: proposes what a request's grammar forces, such as the keys of a JSON object. Needs no model.

Where only one text can follow, its tokens are the only ones that the grammar allows, so the target accepts them as soon
as it has seen them: the letters of a long key cost one pass together instead of one each. Where there is a choice it is
silent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from forerun.drafters.base import NOTHING, Budget, DraftContext, DraftTarget, Policy, Proposal, UnsampledOptions
from forerun.errors import ConfigError
from forerun.models.grammar import GrammarState
from forerun.types import MAX_DRAFT_NODES, Draft, ForwardOutput

MAX_K = MAX_DRAFT_NODES - 1  # a pass of 64 rows holds the last token too

# Chance of a forced token by its depth; the last one serves all deeper ones. It is 1, unless the letters that are
# forced turn out to be cut into other tokens once more of them are known.
RATES = (0.99, 0.98, 0.97)


@dataclass(frozen=True, slots=True)
class GrammarOptions(UnsampledOptions):
    """Settings of the grammar drafter, `grammar:k=32,policy=adaptive` in a speculation spec.

    Attributes:
        k: nodes per step at most, 0 to 63; 0 is off.
        policy: `adaptive` verifies the nodes that pay; `fixed` always the k proposed.

    Raises:
        ConfigError: a value is out of range; the message names the range.
    """

    name: ClassVar[str] = "grammar"
    summary: ClassVar[str] = "what the request's grammar forces"
    needs: ClassVar[str] = "a grammar"

    k: int = 32
    policy: Policy = "adaptive"

    def __post_init__(self) -> None:
        if not 0 <= self.k <= MAX_K:
            raise ConfigError(f"grammar: k is {self.k}, but must be between 0 (off) and {MAX_K}")
        if self.policy not in ("adaptive", "fixed"):
            raise ConfigError(f"grammar: policy is {self.policy!r}, but must be adaptive or fixed")

    def bind(self, target: DraftTarget) -> GrammarSource:
        """The drafter for any target."""
        return GrammarSource(self)


class GrammarSource:
    """Grammar; requests share nothing. A node's cell is its depth. A request without a grammar has no drafter."""

    name = "grammar"
    reads_rows = False
    is_free = True
    memory_bytes = 0
    priors: tuple[float, ...] = RATES

    def __init__(self, options: GrammarOptions) -> None:
        self._options = options
        self.policy = options.policy

    def open(self, context: DraftContext) -> GrammarDrafter | None:
        """See `DrafterSource.open`."""
        if context.grammar is None:
            return None
        return GrammarDrafter(self._options.k, context.grammar, context.end_ids)

    def clear(self) -> None:
        """See `DrafterSource.clear`."""


class GrammarDrafter:
    """Grammar for one request. The engine advances the grammar; this only asks it."""

    def __init__(self, k: int, grammar: GrammarState, end_ids: frozenset[int]) -> None:
        self._k = k
        self._grammar = grammar
        self._end_ids = end_ids

    def propose(self, budget: Budget) -> Proposal:
        """Proposes the forced tokens; the first end id is the last one."""
        forced: list[int] = []
        for token_id in self._grammar.forced_ids()[: min(self._k, budget.max_nodes)]:
            forced.append(token_id)
            if token_id in self._end_ids:
                break
        if not forced:
            return NOTHING
        cells = tuple(min(depth, len(RATES) - 1) for depth in range(len(forced)))
        return Proposal(Draft.chain(tuple(forced), "grammar"), cells)

    def advance(self, token_ids: Sequence[int]) -> None:
        """The engine advances the grammar itself."""

    def observe(self, draft: Draft, rows: ForwardOutput) -> None:
        """Not asked for."""

    def close(self) -> None:
        """Nothing outlives the request."""
