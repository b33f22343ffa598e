"""Two models' token ids: whether they mean the same, and how to go from one to the other where they don't."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from forerun.errors import ConfigError
from forerun.models.tokenizer import Tokenizer
from forerun.types import Float32Array, Int32Array


class Translation(Protocol):
    """From a target's ids to a draft model's and back."""

    def prompt(self, token_ids: Sequence[int]) -> list[int] | None:
        """The draft model's ids of a prompt; None when it can't be followed."""

    def token(self, token_id: int) -> Sequence[int] | None:
        """The draft model's ids of one more token; None when it can't be followed."""

    def row(self, logits: Float32Array) -> Float32Array:
        """A row of the draft model over the target's ids: [V] float32, -inf where it has no such token."""


class SameVocabulary:
    """One id means the same to both models; one may have more ids than the other (F056).

    Args:
        target, draft: the models' tokenizers.
        draft_name: for messages.
        vocab_size: rows of the target's output.
        draft_vocab_size: rows of the draft model's.

    Raises:
        ConfigError: an id that both have means something else, or is a control token in one model only; names the
            first and how many.
    """

    def __init__(
        self, target: Tokenizer, draft: Tokenizer, draft_name: str, vocab_size: int, draft_vocab_size: int
    ) -> None:
        self._vocab_size = vocab_size
        self._draft_vocab_size = draft_vocab_size
        shared = min(target.vocab_size, draft.vocab_size)
        different = [i for i in range(shared) if not _is_same(target, i, draft, i)]
        if different:
            first = different[0]
            raise ConfigError(
                f"draft model {draft_name} has another vocabulary: {len(different)} of {shared} ids differ, first "
                f"{first}, {target.token_text(first)!r} in the target and {draft.token_text(first)!r} in the draft "
                "model; name a draft model of the same vocabulary, or use drafter foreign"
            )

    def prompt(self, token_ids: Sequence[int]) -> list[int] | None:
        """See `Translation.prompt`."""
        return list(token_ids) if max(token_ids) < self._draft_vocab_size else None

    def token(self, token_id: int) -> Sequence[int] | None:
        """See `Translation.token`. A vocabulary's padding can't be followed by a model that lacks it."""
        return (token_id,) if token_id < self._draft_vocab_size else None

    def row(self, logits: Float32Array) -> Float32Array:
        """See `Translation.row`."""
        if len(logits) >= self._vocab_size:
            return logits[: self._vocab_size]
        return np.concatenate((logits, np.full(self._vocab_size - len(logits), -np.inf, np.float32)))


class SharedTokens:
    """The tokens that two vocabularies have in common, by what they stand for.

    The draft model's law is restricted to them; every other text it follows is spelled anew in its own tokens.

    Args:
        target, draft: the models' tokenizers.
        draft_name: for messages.
        vocab_size: rows of the target's output.

    Raises:
        ConfigError: they have no token in common.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer, draft_name: str, vocab_size: int) -> None:
        self._target = target
        self._draft = draft
        self._vocab_size = vocab_size
        ids = {(draft.token_bytes(i), i in draft.special_ids): i for i in reversed(range(draft.vocab_size))}
        pairs = [(i, ids.get((target.token_bytes(i), i in target.special_ids))) for i in range(target.vocab_size)]
        self.draft_id_of = {i: draft_id for i, draft_id in pairs if draft_id is not None and target.token_bytes(i)}
        if not self.draft_id_of:
            raise ConfigError(f"draft model {draft_name} has no token in common with the target; use method=text")
        self._target_ids: Int32Array = np.array(list(self.draft_id_of), np.int32)
        self._draft_ids: Int32Array = np.array(list(self.draft_id_of.values()), np.int32)

    def prompt(self, token_ids: Sequence[int]) -> list[int]:
        """See `Translation.prompt`: the prompt's text as the draft model spells it, control tokens by their names."""
        return respell(self._target, self._draft, token_ids)

    def token(self, token_id: int) -> Sequence[int]:
        """See `Translation.token`."""
        known = self.draft_id_of.get(token_id)
        if known is not None:
            return (known,)
        if token_id >= self._target.vocab_size:
            return ()
        text = self._target.token_bytes(token_id).decode("utf-8", "replace")
        return self._draft.encode(text, add_bos=False, continues=True)

    def row(self, logits: Float32Array) -> Float32Array:
        """See `Translation.row`."""
        out = np.full(self._vocab_size, -np.inf, np.float32)
        out[self._target_ids] = logits[self._draft_ids]
        return out


def respell(source: Tokenizer, destination: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """The ids of a whole text in another vocabulary; control tokens of one name become each other."""
    known = [i for i in token_ids if i < source.vocab_size]
    text = source.decode(known, skip_special=False)
    ids = destination.encode(text, allow_special=True)
    # A text of nothing but padding still needs something to begin with.
    return ids or [destination.bos_id if destination.bos_id is not None else 0]


def _is_same(one: Tokenizer, one_id: int, other: Tokenizer, other_id: int) -> bool:
    return one.token_bytes(one_id) == other.token_bytes(other_id) and (one_id in one.special_ids) == (
        other_id in other.special_ids
    )
