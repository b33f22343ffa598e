"""A model writes a chain of nodes: what drafters that run a model have in common, whichever model it is.

Nodes are drawn one by one, as long as the next one is expected to pay, from the request's own law (temperature,
filters, penalties along the chain) with the noise that the verification rule asks for. With `width` above 1 each node
of the chain has siblings, which end there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from forerun.drafters.base import NOTHING, Budget, DraftContext, Policy, Proposal
from forerun.errors import ConfigError
from forerun.sampling.distribution import Law, RowSampler, argmax_suffices
from forerun.sampling.drafting import draft_from_own, draft_from_shared
from forerun.sampling.history import History
from forerun.types import (
    MAX_DRAFT_NODES,
    Draft,
    DraftTraits,
    Float32Array,
    Float64Array,
    NoiseStream,
    SamplingParams,
)

MAX_K = MAX_DRAFT_NODES - 1
MAX_WIDTH = 4
NUM_DEPTHS = 8  # deeper nodes share the cells of this depth
# Upper ends of the bins of q, the probability that the model gave a node's token.
Q_BINS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95, 1.0)
PRIOR_BY_Q = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.85, 0.95)
PRIOR_BY_DEPTH = 0.7
# Starting acceptance of each cell: by (depth, bin of q), then by depth alone.
CHAIN_PRIORS = PRIOR_BY_Q * NUM_DEPTHS + (PRIOR_BY_DEPTH,) * NUM_DEPTHS

Sample = Literal["law", "argmax"]


@dataclass(frozen=True, slots=True)
class ChainSettings:
    """How a model drafts.

    Attributes:
        k: length of the chain at most, 0 to 63; 0 is off.
        width: nodes at each depth, 1 to 4: the chain's own and its siblings.
        sample: `law` draws from the request's law, `argmax` takes the likeliest tokens.
        policy: `adaptive` drafts while it pays, `fixed` always k deep.
    """

    k: int
    width: int
    sample: Sample
    policy: Policy

    def check(self, drafter: str) -> None:
        """Raises ConfigError for a value out of range; the message names the drafter and the range."""
        if not 0 <= self.k <= MAX_K:
            raise ConfigError(f"{drafter}: k is {self.k}, but must be between 0 (off) and {MAX_K}")
        if not 1 <= self.width <= MAX_WIDTH:
            raise ConfigError(f"{drafter}: width is {self.width}, but must be between 1 and {MAX_WIDTH}")
        if self.k * self.width > MAX_K:
            raise ConfigError(f"{drafter}: k * width is {self.k * self.width}, but must be at most {MAX_K}")
        if self.sample not in ("law", "argmax"):
            raise ConfigError(f"{drafter}: sample is {self.sample!r}, but must be law or argmax")
        if self.policy not in ("adaptive", "fixed"):
            raise ConfigError(f"{drafter}: policy is {self.policy!r}, but must be adaptive or fixed")

    def traits(self, stream: NoiseStream) -> DraftTraits:
        """See `DrafterOptions.traits`."""
        if self.sample == "argmax" or stream == "shared":
            return DraftTraits(is_tree=self.width > 1)
        return DraftTraits(True, is_tree=self.width > 1, stream=stream, pruning="prefix_only")


class ChainOptions:
    """What the options of all drafters that write chains do; their fields are those of `ChainSettings` and others."""

    __slots__ = ()
    k: int
    width: int
    sample: Sample
    policy: Policy

    @property
    def chain(self) -> ChainSettings:
        """How the model drafts."""
        return ChainSettings(self.k, self.width, self.sample, self.policy)

    @property
    def is_off(self) -> bool:
        """Whether nothing would ever be proposed."""
        return self.k == 0

    def traits(self, stream: NoiseStream) -> DraftTraits:
        """See `DrafterOptions.traits`."""
        return self.chain.traits(stream)


class ChainModel(Protocol):
    """A model that holds a request's committed tokens, and guesses behind them."""

    def has_room(self, num_guesses: int, num_nodes: int) -> bool:
        """Whether so many guesses can be run, and so many nodes verified."""

    def is_step(self) -> bool:
        """Whether the next run takes what drafting takes; one that catches up takes longer."""

    def run(self) -> Float32Array:
        """The row after the last guess, over the target's ids: [V] float32."""

    def extend(self, token_id: int) -> None:
        """Takes a guess as if it were emitted."""


@dataclass(slots=True)
class _Guess:
    """A draft in the making."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    q_rows: list[Float64Array | None] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    survival: float = 1.0  # of the chain's last node
    num_steps: int = 0
    steps_s: float = 0.0


class ChainDrafting:
    """One request's chains.

    Args:
        model: what writes them.
        settings: how.
        sampler: makes laws of its rows and draws from them.
        vocab_size: of the target.
        name: of the drafter, for records.
        context: of the request.
    """

    def __init__(
        self,
        model: ChainModel,
        settings: ChainSettings,
        sampler: RowSampler,
        vocab_size: int,
        name: str,
        context: DraftContext,
    ) -> None:
        self._model = model
        self._settings = settings
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._name = name
        self._context = context
        self._params: SamplingParams = context.params
        self._takes_argmax = settings.sample == "argmax" or argmax_suffices(context.params)
        self._carries_q = not self._takes_argmax and context.stream == "draft"
        self._history = History(context.params, context.prompt_token_ids)
        self.committed_len = len(context.prompt_token_ids)  # of the request, in the target's tokens
        self._guess_ids: list[int] = []  # of the chain behind it, in the target's tokens; the model holds each of them
        self._mean_rate = PRIOR_BY_DEPTH  # acceptance of this request's nodes, as estimated when they were drawn

    def propose(self, budget: Budget) -> Proposal:
        """Draws a chain node by node, as long as the next one is expected to pay."""
        guess = _Guess()
        parent, width = -1, self._settings.width
        for depth in range(min(self._settings.k, budget.max_nodes // width)):
            if not self._model.has_room(depth, (depth + 1) * width):
                break
            if guess.survival * self._expected_rate(depth, budget) < budget.min_survivals[len(guess.token_ids)]:
                break
            children, law = self._step(guess, depth)
            self._add(guess, children, law, parent, depth, budget)
            parent = len(guess.token_ids) - len(children)
            if children[0] in self._context.end_ids:
                break
            self._model.extend(children[0])
            self._guess_ids.append(children[0])
        return self._proposal(guess)

    def advance(self, token_ids: Sequence[int]) -> int:
        """Takes in tokens that are committed now, and forgets all guesses.

        Returns:
            How many of the tokens were guessed right, from the first on.
        """
        num_right = 0
        while num_right < min(len(token_ids), len(self._guess_ids)):
            if token_ids[num_right] != self._guess_ids[num_right]:
                break
            num_right += 1
        self._guess_ids = []
        self.committed_len += len(token_ids)
        for token_id in token_ids:
            self._history.append(token_id)
        return num_right

    def _step(self, guess: _Guess, depth: int) -> tuple[tuple[int, ...], Law | None]:
        """One pass: the children of the chain's last node, and their law, None for the likeliest ones of a row."""
        is_step = self._model.is_step()
        began = time.perf_counter()
        logits_V = self._model.run()
        width = self._settings.width
        if self._takes_argmax:
            ids = tuple(self._sampler.top_ids(logits_V, width).tolist())
            law = None
        else:
            path_ids = tuple(self._guess_ids)
            law = self._sampler.law(logits_V, self._params, self._history.along(path_ids))
            ids = self._draw(law, len(guess.token_ids), self.committed_len + depth, width)
        if is_step:
            guess.num_steps += 1
            guess.steps_s += time.perf_counter() - began
        return ids, law

    def _draw(self, law: Law, node: int, pos: int, width: int) -> tuple[int, ...]:
        key = self._context.noise_key
        if self._context.stream == "shared":
            return draft_from_shared(self._sampler, law, key, pos, width)
        return draft_from_own(self._sampler, law, key, self.committed_len, node, width)

    def _add(
        self, guess: _Guess, children: tuple[int, ...], law: Law | None, parent: int, depth: int, budget: Budget
    ) -> None:
        q_V = law.dense(self._vocab_size) if law is not None and self._carries_q else None
        for token_id in children:
            guess.cells.append(_cell(depth, None if law is None or self._carries_q else law.prob(token_id)))
            guess.token_ids.append(token_id)
            guess.parents.append(parent)
            guess.q_rows.append(q_V)
        rate = budget.rate(guess.cells[-len(children)])
        guess.survival *= rate
        self._mean_rate += 0.1 * (rate - self._mean_rate)

    def _expected_rate(self, depth: int, budget: Budget) -> float:
        """Acceptance of a node that is still to be drawn. Where q is carried it depends on the depth alone."""
        return budget.rate(_cell(depth, None)) if self._carries_q or self._takes_argmax else self._mean_rate

    def _proposal(self, guess: _Guess) -> Proposal:
        if not guess.token_ids:
            return NOTHING
        draft = Draft(
            token_ids=tuple(guess.token_ids),
            parents=tuple(guess.parents),
            origins=(self._name,) * len(guess.token_ids),
            q_rows=tuple(guess.q_rows),
            stream=self._context.stream,
            pruning="prefix_only",
        )
        return Proposal(draft, tuple(guess.cells), guess.num_steps, guess.steps_s)


def _cell(depth: int, q: float | None) -> int:
    depth = min(depth, NUM_DEPTHS - 1)
    if q is None:
        return len(Q_BINS) * NUM_DEPTHS + depth
    return len(Q_BINS) * depth + next(i for i, high in enumerate(Q_BINS) if q <= high or i == len(Q_BINS) - 1)
