"""A smaller model writes ahead (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

It shares the target's vocabulary, has a KV cache of its own and follows the request: tokens that were accepted stay in
its cache, wrong guesses are cut off, and what it has not seen is run before its next guess. `drafters.chain` draws the
nodes. Under `coupled` that is with the target's own noise, so both tend to draw the same token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from forerun.drafters.base import NOTHING, Budget, DraftContext, DraftTarget, Policy, Proposal
from forerun.drafters.chain import CHAIN_PRIORS, ChainDrafting, ChainOptions, ChainSettings, Sample
from forerun.drafters.model_sequence import ModelSequence
from forerun.drafters.vocabulary import SameVocabulary, Translation
from forerun.kv.pages import PageManager
from forerun.models.bound import BoundModel, bind_model, open_model
from forerun.types import Draft, Float32Array, ForwardOutput

# A pass over more tokens is catching up and says nothing about what drafting costs.
MAX_STEP_ROWS = 4


@dataclass(frozen=True, slots=True)
class DraftModelOptions(ChainOptions):
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
        self.chain.check(self.name)

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
        return DraftModelSource(self.chain, model, translation, target)


def bind_draft_model(name: str, target: DraftTarget) -> BoundModel:
    """Loads and binds a second model as the target was bound, for texts as long as both can have.

    The target's `quant` is meant for the target: a second model takes it where it applies.
    """
    loaded = open_model(name, target.settings, target.max_model_len, must_apply=False)
    return bind_model(loaded, target.settings, min(target.max_model_len, loaded.config.context_length))


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
        self.pages = PageManager(model.num_pages)
        self.priors = CHAIN_PRIORS
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


class DraftModelDrafter:
    """A draft model at work on one request; see `Drafter`, and `ChainModel` for what writes its chains."""

    def __init__(self, source: DraftModelSource, sequence: ModelSequence, context: DraftContext) -> None:
        self._translation = source.translation
        self._sequence = sequence
        self._drafting = ChainDrafting(self, source.settings, source.sampler, source.vocab_size, source.name, context)
        prompt_ids = source.translation.prompt(context.prompt_token_ids)
        self._is_lost = prompt_ids is None  # the text holds what this model can't follow
        sequence.extend(prompt_ids or ())
        self._known_len = len(sequence.token_ids)  # of the same text, in the draft model's tokens

    def propose(self, budget: Budget) -> Proposal:
        """Draws a chain node by node, as long as the next one is expected to pay."""
        return NOTHING if self._is_lost else self._drafting.propose(budget)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Keeps what was guessed right, cuts off the rest and appends what came."""
        num_right = self._drafting.advance(token_ids)
        self._sequence.truncate(self._known_len + num_right)
        for token_id in token_ids[num_right:]:
            ids = self._translation.token(token_id)
            self._is_lost |= ids is None
            self._sequence.extend(ids or ())
        self._known_len = len(self._sequence.token_ids)

    def observe(self, draft: Draft, rows: ForwardOutput) -> None:
        """Not asked for."""

    def close(self) -> None:
        """See `Drafter.close`."""
        self._sequence.close()

    def has_room(self, num_guesses: int, num_nodes: int) -> bool:
        """Whether the next guess fits; the others are there already, and where nodes are verified is not ours."""
        return self._sequence.room > 0 and self._sequence.try_reserve()

    def is_step(self) -> bool:
        """See `ChainModel.is_step`."""
        return len(self._sequence.token_ids) - self._sequence.cached_len <= MAX_STEP_ROWS

    def run(self) -> Float32Array:
        """See `ChainModel.run`."""
        return self._translation.row(self._sequence.run().logits[0])

    def extend(self, token_id: int) -> None:
        """Takes a guess as if it were emitted. Its translation is one token, or it would not have been drawn."""
        self._sequence.extend(self._translation.token(token_id) or ())
