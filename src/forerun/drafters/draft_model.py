"""A smaller model writes ahead (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

It shares the target's vocabulary, has a KV cache of its own and follows the request: tokens that were accepted stay in
its cache, wrong guesses are cut off, and what it has not seen is run before its next guess. It draws from the request's
own law (temperature, filters, penalties along its guess), with the noise that the verification rule asks for. Under
`coupled` that is the target's own noise, so both tend to draw the same token.

A draft is a chain; with `width` above 1 each node of it has siblings, which end there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from forerun.drafters.base import NOTHING, Budget, DraftContext, DraftTarget, Policy, Proposal
from forerun.drafters.model_sequence import ModelSequence
from forerun.drafters.vocabulary import SameVocabulary, Translation
from forerun.errors import ConfigError
from forerun.kv.pages import PageManager, num_pages_for
from forerun.models.bound import BoundModel, bind_model, open_model
from forerun.sampling.distribution import Law, RowSampler, argmax_suffices
from forerun.sampling.drafting import draft_from_own, draft_from_shared
from forerun.sampling.history import History
from forerun.types import (
    MAX_DRAFT_NODES,
    Draft,
    DraftTraits,
    Float64Array,
    ForwardOutput,
    NoiseStream,
    SamplingParams,
)

MAX_K = MAX_DRAFT_NODES - 1
MAX_WIDTH = 4
NUM_DEPTHS = 8  # deeper nodes share the cells of this depth
# Upper ends of the bins of q, the probability that the draft model gave a node's token.
Q_BINS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95, 1.0)
PRIOR_BY_Q = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.85, 0.95)
PRIOR_BY_DEPTH = 0.7
# A pass over more tokens is catching up and says nothing about what drafting costs.
MAX_STEP_ROWS = 4

Sample = Literal["law", "argmax"]


@dataclass(frozen=True, slots=True)
class DraftModelOptions:
    """Settings of a draft model, `draft:model=NAME,k=4,width=1,sample=law,policy=adaptive` in a spec.

    Attributes:
        model: a GGUF file, a Hugging Face folder or a known name; its vocabulary is the target's.
        k: length of the chain at most, 0 to 63; 0 is off.
        width: nodes at each depth, 1 to 4: the chain's own and its siblings.
        sample: `law` draws from the request's law, `argmax` takes the likeliest tokens.
        policy: `adaptive` drafts while it pays, `fixed` always k deep.

    Raises:
        ConfigError: a value is out of range; the message names the range.
    """

    name: ClassVar[str] = "draft"
    summary: ClassVar[str] = "what a smaller model of the same vocabulary writes"
    needs: ClassVar[str] = "a second model"

    model: str
    k: int = 4
    width: int = 1
    sample: Sample = "law"
    policy: Policy = "adaptive"

    def __post_init__(self) -> None:
        if not 0 <= self.k <= MAX_K:
            raise ConfigError(f"draft: k is {self.k}, but must be between 0 (off) and {MAX_K}")
        if not 1 <= self.width <= MAX_WIDTH:
            raise ConfigError(f"draft: width is {self.width}, but must be between 1 and {MAX_WIDTH}")
        if self.k * self.width > MAX_K:
            raise ConfigError(f"draft: k * width is {self.k * self.width}, but must be at most {MAX_K}")
        if self.sample not in ("law", "argmax"):
            raise ConfigError(f"draft: sample is {self.sample!r}, but must be law or argmax")
        if self.policy not in ("adaptive", "fixed"):
            raise ConfigError(f"draft: policy is {self.policy!r}, but must be adaptive or fixed")

    @property
    def is_off(self) -> bool:
        """Whether nothing would ever be proposed."""
        return self.k == 0

    def traits(self, stream: NoiseStream) -> DraftTraits:
        """See `DrafterOptions.traits`."""
        if self.sample == "argmax" or stream == "shared":
            return DraftTraits(is_tree=self.width > 1)
        return DraftTraits(True, is_tree=self.width > 1, stream=stream, pruning="prefix_only")

    def bind(self, target: DraftTarget) -> DraftModelSource:
        """Loads the model and compares vocabularies.

        Raises:
            ConfigError: the vocabularies differ, or the model can't be had.
            LoadError: the model can't be read.
        """
        model = bind_draft_model(self.model, target)
        translation = SameVocabulary(
            target.tokenizer, model.tokenizer, self.model, target.vocab_size, model.config.vocab_size
        )
        settings = ChainSettings(self.k, self.width, self.sample, self.policy)
        return DraftModelSource(settings, model, translation, target)


def bind_draft_model(name: str, target: DraftTarget) -> BoundModel:
    """Loads and binds a second model as the target was bound, for texts as long as both can have.

    The target's `quant` is meant for the target: a second model takes it where it applies.
    """
    loaded = open_model(name, target.settings, target.max_model_len, must_apply=False)
    return bind_model(loaded, target.settings, min(target.max_model_len, loaded.config.context_length))


@dataclass(frozen=True, slots=True)
class ChainSettings:
    """How a model drafts; fields as in `DraftModelOptions`."""

    k: int
    width: int
    sample: Sample
    policy: Policy


class DraftModelSource:
    """A draft model bound to a target. Requests share its weights and its cache's pages, nothing they wrote.

    Args:
        settings: how it drafts.
        model: the draft model.
        translation: between its ids and the target's.
        target: what is drafted for.
        name: of the drafter.
    """

    reads_rows = False
    is_free = False

    def __init__(
        self,
        settings: ChainSettings,
        model: BoundModel,
        translation: Translation,
        target: DraftTarget,
        name: str = DraftModelOptions.name,
    ) -> None:
        self.name = name
        self.settings = settings
        self.policy = settings.policy
        self.model = model
        self.translation = translation
        self.sampler = target.sampler
        self.vocab_size = target.vocab_size
        self.chunk = target.settings.max_rows
        self.pages = PageManager(num_pages_for(model.max_len))
        # By (depth, bin of q), then by depth alone.
        self.priors = PRIOR_BY_Q * NUM_DEPTHS + (PRIOR_BY_DEPTH,) * NUM_DEPTHS
        self._ids = itertools.count()

    def open(self, context: DraftContext) -> DraftModelDrafter:
        """See `DrafterSource.open`."""
        sequence = ModelSequence(self.model, self.pages, next(self._ids), self.chunk)
        return DraftModelDrafter(self, sequence, context)

    def clear(self) -> None:
        """See `DrafterSource.clear`."""

    @property
    def memory_bytes(self) -> int:
        """See `DrafterSource.memory_bytes`."""
        return self.model.executor.weight_bytes + self.model.executor.kv_bytes


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


class DraftModelDrafter:
    """A draft model at work on one request; see `Drafter`."""

    def __init__(self, source: DraftModelSource, sequence: ModelSequence, context: DraftContext) -> None:
        self._source = source
        self._sampler: RowSampler = source.sampler
        self._sequence = sequence
        self._context = context
        self._params: SamplingParams = context.params
        self._takes_argmax = source.settings.sample == "argmax" or argmax_suffices(context.params)
        self._carries_q = not self._takes_argmax and context.stream == "draft"
        self._history = History(context.params, context.prompt_token_ids)
        self._committed_len = len(context.prompt_token_ids)  # of the request, in the target's tokens
        prompt_ids = source.translation.prompt(context.prompt_token_ids)
        self._is_lost = prompt_ids is None  # the text holds what this model can't follow
        sequence.extend(prompt_ids or ())
        self._known_len = len(sequence.token_ids)  # of the same text, in the draft model's tokens
        self._guess_ids: list[int] = []  # of the chain behind it, in the target's tokens; one of its own tokens each
        self._mean_rate = PRIOR_BY_DEPTH  # acceptance of this request's nodes, as estimated when they were drawn

    def propose(self, budget: Budget) -> Proposal:
        """Draws a chain node by node, as long as the next one is expected to pay."""
        settings = self._source.settings
        guess = _Guess()
        if self._is_lost:
            return NOTHING
        parent = -1
        for depth in range(min(settings.k, budget.max_nodes // settings.width, self._sequence.room)):
            if guess.survival * self._expected_rate(depth, budget) < budget.min_survivals[len(guess.token_ids)]:
                break
            children, law = self._step(guess, depth)
            self._add(guess, children, law, parent, depth, budget)
            parent = len(guess.token_ids) - len(children)
            if children[0] in self._context.end_ids:
                break
            self._extend(children[0])
        return self._proposal(guess)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Keeps what was guessed right, cuts off the rest and appends what came."""
        num_right = 0
        while num_right < min(len(token_ids), len(self._guess_ids)):
            if token_ids[num_right] != self._guess_ids[num_right]:
                break
            num_right += 1
        self._sequence.truncate(self._known_len + num_right)
        for token_id in token_ids[num_right:]:
            ids = self._source.translation.token(token_id)
            self._is_lost |= ids is None
            self._sequence.extend(ids or ())
        self._known_len = len(self._sequence.token_ids)
        self._guess_ids = []
        self._committed_len += len(token_ids)
        for token_id in token_ids:
            self._history.append(token_id)

    def observe(self, draft: Draft, rows: ForwardOutput) -> None:
        """Not asked for."""

    def close(self) -> None:
        """See `Drafter.close`."""
        self._sequence.close()

    def _step(self, guess: _Guess, depth: int) -> tuple[tuple[int, ...], Law | None]:
        """One pass: the children of the chain's last node, and their law, None for the likeliest ones of a row."""
        sequence = self._sequence
        is_step = len(sequence.token_ids) - sequence.cached_len <= MAX_STEP_ROWS
        began = time.perf_counter()
        logits_V = self._source.translation.row(sequence.run().logits[0])
        width = self._source.settings.width
        if self._takes_argmax:
            ids = tuple(self._sampler.top_ids(logits_V, width).tolist())
            law = None
        else:
            path_ids = tuple(self._guess_ids)
            law = self._sampler.law(logits_V, self._params, self._history.along(path_ids))
            ids = self._draw(law, len(guess.token_ids), self._committed_len + depth, width)
        if is_step:
            guess.num_steps += 1
            guess.steps_s += time.perf_counter() - began
        return ids, law

    def _extend(self, token_id: int) -> None:
        """Takes a guess as if it were emitted. Its translation is one token, or it would not have been drawn."""
        self._sequence.extend(self._source.translation.token(token_id) or ())
        self._guess_ids.append(token_id)

    def _draw(self, law: Law, node: int, pos: int, width: int) -> tuple[int, ...]:
        key = self._context.noise_key
        if self._context.stream == "shared":
            return draft_from_shared(self._sampler, law, key, pos, width)
        return draft_from_own(self._sampler, law, key, self._committed_len, node, width)

    def _add(
        self, guess: _Guess, children: tuple[int, ...], law: Law | None, parent: int, depth: int, budget: Budget
    ) -> None:
        q_V = law.dense(self._source.vocab_size) if law is not None and self._carries_q else None
        for token_id in children:
            guess.cells.append(self._cell(depth, None if law is None or self._carries_q else law.prob(token_id)))
            guess.token_ids.append(token_id)
            guess.parents.append(parent)
            guess.q_rows.append(q_V)
        rate = budget.rate(guess.cells[-len(children)])
        guess.survival *= rate
        self._mean_rate += 0.1 * (rate - self._mean_rate)

    def _expected_rate(self, depth: int, budget: Budget) -> float:
        """Acceptance of a node that is still to be drawn. Where q is carried it depends on the depth alone."""
        return budget.rate(self._cell(depth, None)) if self._carries_q or self._takes_argmax else self._mean_rate

    def _cell(self, depth: int, q: float | None) -> int:
        depth = min(depth, NUM_DEPTHS - 1)
        if q is None:
            return len(Q_BINS) * NUM_DEPTHS + depth
        return len(Q_BINS) * depth + next(i for i, high in enumerate(Q_BINS) if q <= high or i == len(Q_BINS) - 1)

    def _proposal(self, guess: _Guess) -> Proposal:
        if not guess.token_ids:
            return NOTHING
        draft = Draft(
            token_ids=tuple(guess.token_ids),
            parents=tuple(guess.parents),
            origins=(self._source.name,) * len(guess.token_ids),
            q_rows=tuple(guess.q_rows),
            stream=self._context.stream,
            pruning="prefix_only",
        )
        return Proposal(draft, tuple(guess.cells), guess.num_steps, guess.steps_s)
