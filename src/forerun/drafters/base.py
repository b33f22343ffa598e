"""What a drafter is.

A drafter lives as long as one request: it is made from the prompt, hears of every token the request emits, and is
dropped with it. What it learns therefore cannot reach another request. It never sees logits or verdicts: the tokens
that were emitted say which proposals were right, drafted or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from forerun.types import Draft


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may know of its request. Set by the engine.

    Attributes:
        prompt_token_ids: the prompt, not empty.
        end_ids: ids that end the output, so that nothing can follow them.
    """

    prompt_token_ids: Sequence[int]
    end_ids: frozenset[int]


class Drafter(Protocol):
    """Proposes tokens for one request."""

    def propose(self, max_nodes: int) -> Draft:
        """Proposes what may follow the committed tokens.

        Args:
            max_nodes: nodes at most; at least 1.

        Returns:
            A tree of at most max_nodes nodes, empty when there is nothing to propose.
        """

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes in tokens that are committed now; called once per step, also where nothing was proposed."""


DrafterFactory = Callable[[DraftContext], Drafter]
