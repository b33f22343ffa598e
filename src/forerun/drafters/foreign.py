"""A smaller model of another vocabulary writes ahead.

`method=tokens` restricts its law to the tokens that both vocabularies have and draws among them, token by token; what
the target emits is spelled in its tokens. (Timor et al. 2025, arXiv 2502.05202, token-level intersection.)

`method=text` lets it write in its own tokens and spells the text in the target's. Those are fixed proposals, so they
are exact whatever they say (the same paper, string-level exact match).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from forerun.drafters.base import NOTHING, Budget, DraftContext, DrafterSource, DraftTarget, Policy, Proposal
from forerun.drafters.chain import MAX_K, NUM_DEPTHS, PRIOR_BY_DEPTH, ChainSettings
from forerun.drafters.draft_model import MAX_STEP_ROWS, DraftModelSource, bind_draft_model
from forerun.drafters.model_sequence import ModelSequence
from forerun.drafters.vocabulary import SharedTokens, respell
from forerun.errors import ConfigError
from forerun.kv.pages import PageManager
from forerun.models.bound import BoundModel
from forerun.models.tokenizer import Tokenizer
from forerun.types import Draft, DraftTraits, ForwardOutput, NoiseStream

Method = Literal["tokens", "text"]
# The text's end is spelled anew with each step, from so many of the target's tokens back: what came later may change
# how it is cut into tokens.
TAIL_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ForeignOptions:
    """Settings of a draft model of another vocabulary, `foreign:model=NAME,k=4,method=tokens,policy=adaptive`.

    Attributes:
        model: a GGUF file, a Hugging Face folder or a known name.
        k: tokens it writes at most, 0 to 63; 0 is off.
        method: `tokens` or `text`.
        policy: `adaptive` drafts while it pays, `fixed` always k deep.

    Raises:
        ConfigError: a value is out of range; the message names the range.
    """

    name: ClassVar[str] = "foreign"
    summary: ClassVar[str] = "what a smaller model of another vocabulary writes"
    needs: ClassVar[str] = "a second model"

    model: str
    k: int = 4
    method: Method = "tokens"
    policy: Policy = "adaptive"

    def __post_init__(self) -> None:
        if not 0 <= self.k <= MAX_K:
            raise ConfigError(f"foreign: k is {self.k}, but must be between 0 (off) and {MAX_K}")
        if self.method not in ("tokens", "text"):
            raise ConfigError(f"foreign: method is {self.method!r}, but must be tokens or text")
        if self.policy not in ("adaptive", "fixed"):
            raise ConfigError(f"foreign: policy is {self.policy!r}, but must be adaptive or fixed")

    @property
    def is_off(self) -> bool:
        """Whether nothing would ever be proposed."""
        return self.k == 0

    def traits(self, stream: NoiseStream) -> DraftTraits:
        """See `DrafterOptions.traits`."""
        if self.method == "text" or stream == "shared":
            return DraftTraits()
        return DraftTraits(True, stream=stream, pruning="prefix_only")

    def bind(self, target: DraftTarget) -> DrafterSource:
        """Loads the model.

        Raises:
            ConfigError: the vocabularies have no token in common, or the model can't be had.
            LoadError: the model can't be read.
        """
        model = bind_draft_model(self.model, target)
        if self.method == "text":
            return TextSource(self, model, target)
        translation = SharedTokens(target.tokenizer, model.tokenizer, self.model, target.vocab_size)
        return DraftModelSource(ChainSettings(self.k, 1, "law", self.policy), model, translation, target, self.name)


class TextSource:
    """A draft model that is read as text. A node's cell is its depth."""

    name = ForeignOptions.name
    reads_rows = False
    is_free = False
    priors = (PRIOR_BY_DEPTH,) * NUM_DEPTHS

    def __init__(self, options: ForeignOptions, model: BoundModel, target: DraftTarget) -> None:
        self.k = options.k
        self.policy = options.policy
        self.model = model
        self.tokenizer: Tokenizer = target.tokenizer
        self.chunk = target.settings.max_rows
        self.pages = PageManager(model.num_pages)
        self._num_opened = 0

    def open(self, context: DraftContext) -> TextDrafter:
        """See `DrafterSource.open`."""
        self._num_opened += 1
        return TextDrafter(self, ModelSequence(self.model, self.pages, self._num_opened, self.chunk), context)

    def clear(self) -> None:
        """See `DrafterSource.clear`."""

    @property
    def memory_bytes(self) -> int:
        """See `DrafterSource.memory_bytes`."""
        return self.model.executor.weight_bytes + self.model.executor.kv_bytes


class TextDrafter:
    """A draft model's text at work on one request; see `Drafter`. It writes its likeliest token each time."""

    def __init__(self, source: TextSource, sequence: ModelSequence, context: DraftContext) -> None:
        self._source = source
        self._sequence = sequence
        self._end_ids = context.end_ids
        self._token_ids = list(context.prompt_token_ids)
        sequence.extend(respell(source.tokenizer, source.model.tokenizer, self._token_ids))
        # The text up to the stable target token is spelled by the first stable ids of the sequence.
        self._stable_tokens, self._stable_ids = len(self._token_ids), len(sequence.token_ids)
        self._known_ids = len(sequence.token_ids)

    def propose(self, budget: Budget) -> Proposal:
        """Lets the model write on and spells that in the target's tokens."""
        num_steps, steps_s, survival = 0, 0.0, 1.0
        written: list[int] = []
        for depth in range(min(self._source.k, budget.max_nodes, self._sequence.room)):
            survival *= budget.rate(min(depth, NUM_DEPTHS - 1))
            if survival < budget.min_survivals[depth] or not self._sequence.try_reserve():
                break
            is_step = len(self._sequence.token_ids) - self._sequence.cached_len <= MAX_STEP_ROWS
            began = time.perf_counter()
            token_id = self._sequence.run().argmax.item(0)
            if is_step:
                num_steps += 1
                steps_s += time.perf_counter() - began
            if token_id in self._source.model.tokenizer.eos_ids:
                break
            written.append(token_id)
            self._sequence.extend((token_id,))
        ids = self._spell(written)[: budget.max_nodes]
        if not ids:
            return Proposal(NOTHING.draft, (), num_steps, steps_s)
        cells = tuple(min(depth, NUM_DEPTHS - 1) for depth in range(len(ids)))
        return Proposal(Draft.chain(tuple(ids), self._source.name), cells, num_steps, steps_s)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Spells the text's end anew and keeps what the cache holds of it."""
        self._token_ids += token_ids
        start = self._stable_tokens
        tail = self._text(self._token_ids[start:])
        ids = self._source.model.tokenizer.encode(tail, allow_special=True, add_bos=False, continues=True)
        sequence = self._sequence
        old = sequence.token_ids[self._stable_ids :]
        num_same = next((i for i, (a, b) in enumerate(zip(old, ids, strict=False)) if a != b), min(len(old), len(ids)))
        sequence.truncate(self._stable_ids + num_same)
        sequence.extend(ids[num_same:])
        self._known_ids = len(sequence.token_ids)
        if len(self._token_ids) - start > 2 * TAIL_TOKENS:
            self._settle()

    def observe(self, draft: Draft, rows: ForwardOutput) -> None:
        """Not asked for."""

    def close(self) -> None:
        """See `Drafter.close`."""
        self._sequence.close()

    def _settle(self) -> None:
        """Moves the stable point on, to where both spellings end at the same character."""
        draft_tokenizer = self._source.model.tokenizer
        settled = self._text(self._token_ids[self._stable_tokens : -TAIL_TOKENS]).encode()
        num_bytes = num_ids = 0
        while num_bytes < len(settled) and self._stable_ids + num_ids < self._known_ids:
            num_bytes += len(draft_tokenizer.token_bytes(self._sequence.token_ids[self._stable_ids + num_ids]))
            num_ids += 1
        if num_bytes == len(settled):
            self._stable_tokens = len(self._token_ids) - TAIL_TOKENS
            self._stable_ids += num_ids

    def _spell(self, written: list[int]) -> list[int]:
        """What was written in the target's tokens, up to the first end token; whole characters only."""
        data = b"".join(self._source.model.tokenizer.token_bytes(i) for i in written)
        text = data.decode("utf-8", "ignore")
        if not text:
            return []
        ids = self._source.tokenizer.encode(text, add_bos=False, continues=True)
        end = next((i + 1 for i, token_id in enumerate(ids) if token_id in self._end_ids), len(ids))
        return ids[:end]

    def _text(self, token_ids: Sequence[int]) -> str:
        tokenizer = self._source.tokenizer
        known = [i for i in token_ids if i < tokenizer.vocab_size]
        return tokenizer.decode(known, skip_special=False, continues=True)
