"""The target drafts for itself with some of its layers: self-speculative decoding.

Leaving out layers in the middle is Zhang et al. 2023 (arXiv 2309.08168, "Draft & Verify"); stopping after the first
ones is early exit (Elhoushi et al. 2024, arXiv 2404.16710, "LayerSkip"). Either way the target's own final norm and LM
head follow. There is nothing beside the target's weights and cache: a layer finds the keys and values that the whole
model left for the committed tokens, and adds its own for the last token and the guesses, one slot per pass.

    [0, committed_len - 1)                      the target's own
    [committed_len - 1, committed_len - 1 + n)  the drafter's, of its layers alone, after n passes; the target's pass
                                                over the draft writes them anew, or they are garbage


How often such drafts are right depends on the model: those trained for it (LayerSkip checkpoints) are, others rarely.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import ClassVar

import numpy as np

from forerun.batch import Batch
from forerun.drafters.base import Budget, DraftContext, DraftTarget, Policy, Proposal, TargetSlots
from forerun.drafters.chain import CHAIN_PRIORS, ChainDrafting, ChainOptions, ChainSettings, Sample
from forerun.errors import ConfigError, EngineFault
from forerun.ops.base import Executor
from forerun.types import Draft, Float32Array, ForwardOutput

HALF = "half"
_LAYERS = re.compile(r"half|[0-9]{1,6}|[0-9]{1,6}-[0-9]{1,6}(\.[0-9]{1,6}-[0-9]{1,6})*")
_ROW_0 = np.zeros(1, np.int32)


@dataclass(frozen=True, slots=True)
class SelfOptions(ChainOptions):
    """Settings of self-speculative decoding, `self:layers=12,k=4,width=1,sample=law,policy=adaptive` in a spec.

    Attributes:
        layers: a number N for the first N layers, ranges `FIRST-LAST` joined with dots for these, numbered from 0
            (`0-9.20-29` leaves out ten in the middle of thirty), or `half` for the first half.
        k: length of the chain at most, 0 to 63; 0 is off.
        width: nodes at each depth, 1 to 4: the chain's own and its siblings.
        sample: `law` draws from the request's law, `argmax` takes the likeliest tokens.
        policy: `adaptive` drafts while it pays, `fixed` always k deep.

    Raises:
        ConfigError: a value is out of range; the message names the range.
    """

    name: ClassVar[str] = "self"
    summary: ClassVar[str] = "what some of the target's own layers would write"
    needs: ClassVar[str] = "nothing"

    layers: str = HALF
    k: int = 4
    width: int = 1
    sample: Sample = "law"
    policy: Policy = "adaptive"

    def __post_init__(self) -> None:
        if not _LAYERS.fullmatch(self.layers):
            raise ConfigError(
                f"self: layers is {self.layers!r}, but must be how many of the first layers run, ranges of layers "
                f"such as 0-9.20-29, or {HALF}"
            )
        self.chain.check(self.name)

    def bind(self, target: DraftTarget) -> SelfSource:
        """Binds the chosen layers as a variant of the target.

        Raises:
            ConfigError: the target has no such layers.
        """
        if target.model is None:
            raise ConfigError("self: this target can't run some of its layers by themselves")
        layers = choose_layers(self.layers, target.model.config.num_layers)
        return SelfSource(self.chain, target.model.with_layers(layers), target)


def choose_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """The layers that a setting names, ascending.

    Args:
        text: as `SelfOptions.layers`.
        num_layers: of the target.

    Raises:
        ConfigError: the target has no such layers, or they are named twice or out of order.

    >>> choose_layers("half", 5), choose_layers("2", 5), choose_layers("0-1.4-4", 5)
    ((0, 1, 2), (0, 1), (0, 1, 4))
    """
    if text == HALF:
        return tuple(range((num_layers + 1) // 2))
    if "-" not in text:
        if not 1 <= int(text) <= num_layers:
            raise ConfigError(f"self: layers is {text}, but must be between 1 and {num_layers}, all this target has")
        return tuple(range(int(text)))
    ranges = [tuple(map(int, part.split("-"))) for part in text.split(".")]
    if any(first > last for first, last in ranges) or any(a[1] >= b[0] for a, b in pairwise(ranges)):
        raise ConfigError(f"self: layers is {text}, but must name each layer once and in ascending order")
    if ranges[-1][1] >= num_layers:
        raise ConfigError(f"self: layers is {text}, but the layers of this target are 0 to {num_layers - 1}")
    return tuple(chain.from_iterable(range(first, last + 1) for first, last in ranges))


class SelfSource:
    """Some layers of a target that draft for it. Requests share nothing.

    Args:
        settings: how they draft.
        executor: the target with these layers alone, over its own weights and cache.
        target: what is drafted for.
    """

    name = SelfOptions.name
    reads_rows = False
    is_free = False
    priors = CHAIN_PRIORS
    memory_bytes = 0

    def __init__(self, settings: ChainSettings, executor: Executor, target: DraftTarget) -> None:
        self.settings = settings
        self.policy = settings.policy
        self.executor = executor
        self.sampler = target.sampler
        self.vocab_size = target.vocab_size

    def open(self, context: DraftContext) -> SelfDrafter:
        """See `DrafterSource.open`.

        Raises:
            EngineFault: the request has no place in the target's cache.
        """
        if context.slots is None:
            raise EngineFault("drafter self was opened for a request that has no slots in the target's cache")
        return SelfDrafter(self, context, context.slots)

    def clear(self) -> None:
        """See `DrafterSource.clear`."""


class SelfDrafter:
    """Layers of the target at work on one request; see `Drafter`, and `ChainModel` for what writes its chains."""

    def __init__(self, source: SelfSource, context: DraftContext, slots: TargetSlots) -> None:
        self._executor = source.executor
        self._slots = slots
        self._drafting = ChainDrafting(self, source.settings, source.sampler, source.vocab_size, source.name, context)
        self._last_id = context.prompt_token_ids[-1]  # of the committed tokens and the guesses behind them
        self._num_guesses = 0

    def propose(self, budget: Budget) -> Proposal:
        """Draws a chain node by node, as long as the next one is expected to pay and the cache has pages for it.

        Raises:
            EngineFault: the target's cache does not hold all committed tokens but the last.
        """
        if self._slots.cached_len != self._drafting.committed_len - 1:
            raise EngineFault(
                f"drafter self has {self._drafting.committed_len} committed tokens, of which the target's cache must "
                f"hold all but the last, but it holds {self._slots.cached_len}"
            )
        return self._drafting.propose(budget)

    def advance(self, token_ids: Sequence[int]) -> None:
        """See `Drafter.advance`. What the guesses left in the cache is the target's to overwrite."""
        self._drafting.advance(token_ids)
        self._last_id = token_ids[-1]
        self._num_guesses = 0

    def observe(self, draft: Draft, rows: ForwardOutput) -> None:
        """Not asked for."""

    def close(self) -> None:
        """See `Drafter.close`."""

    def has_room(self, num_guesses: int, num_nodes: int) -> bool:
        """Whether the nodes fit behind the committed tokens, which is one slot more than drafting them takes."""
        return self._slots.try_reserve(self._drafting.committed_len + num_nodes)

    def is_step(self) -> bool:
        """Always: the target's cache never lags behind."""
        return True

    def run(self) -> Float32Array:
        """See `ChainModel.run`. A pass over the last token, in the slot that it would have."""
        slot = self._drafting.committed_len - 1 + self._num_guesses
        batch = Batch.chain(np.array([self._last_id], np.int32), slot, self._slots.page_table, _ROW_0)
        rows = self._executor.forward(batch)
        logits_V: Float32Array = rows.logits[0]
        return logits_V

    def extend(self, token_id: int) -> None:
        """See `ChainModel.extend`."""
        self._last_id = token_id
        self._num_guesses += 1
