"""Text to token ids and back: one face for every family of vocabularies, from GGUF files and tokenizer.json.

Control tokens are kept out of what text can become, so that nobody writes one by accident or on purpose (F049).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from forerun.errors import LoadError, RequestError, shown
from forerun.models.tokenizer_bpe import gemma4_codec, gpt2_codec
from forerun.models.tokenizer_codec import Codec, end_ids
from forerun.models.tokenizer_gguf import PREFIX, GgufVocabulary, get, read_vocabulary
from forerun.models.tokenizer_json import json_codec
from forerun.models.tokenizer_names import NameFinder
from forerun.models.tokenizer_spm import spm_codec
from forerun.models.tokenizer_wordpiece import wordpiece_codec


@dataclass(frozen=True, slots=True)
class _Family:
    """One value of `tokenizer.ggml.model`.

    Attributes:
        build: makes the codec.
        default_ids: begin and end tokens where the file leaves them out, as llama.cpp has them.
        always_adds_bos: files that say otherwise are wrong.
    """

    build: Callable[[GgufVocabulary], Codec]
    default_ids: Mapping[str, int] = field(default_factory=dict)
    always_adds_bos: bool = False


_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "gpt2": _Family(gpt2_codec),
        "gemma4": _Family(gemma4_codec, always_adds_bos=True),
        "llama": _Family(spm_codec, {"bos": 1, "eos": 2}),
        "bert": _Family(wordpiece_codec, {"bos": 101}),
    }
)


def check_text(text: str, param: str | None = None) -> None:
    """Refuses text that UTF-8 can't carry (F042).

    Raises:
        RequestError: the text holds half of a surrogate pair; names its position, and `param` as the field.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = f"{param} holds" if param else "the text holds"
        raise RequestError(
            f"{where} a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
            "send whole Unicode characters",
            param,
        ) from None


class Tokenizer:
    """A model's vocabulary. Immutable after construction; safe to share between threads.

    Attributes:
        vocab_size: number of ids, control tokens included.
        bos_id: the begin token, or None.
        adds_bos: the model wants a begin token before every prompt.
        eos_ids: ids that end an output: the file's own end tokens first, then known end-of-turn tokens.
        special_ids: control tokens; no user text ever becomes one, and `decode` leaves them out. The unknown token is
            among them: in a vocabulary without bytes, characters that it lacks become that one.
        special_tokens: their texts and ids.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._bytes: list[bytes | None] = [None] * len(codec.tokens)
        self.vocab_size = len(codec.tokens)
        self.special_ids = codec.special_ids
        # An empty name can't be found in a text. Of two tokens with one name, the lower id counts.
        self.special_tokens = {codec.tokens[i]: i for i in sorted(self.special_ids, reverse=True) if codec.tokens[i]}
        self._finder = NameFinder(self.special_tokens, codec.name_rules)
        self.bos_id = codec.bos_id
        self.adds_bos = codec.adds_bos and codec.bos_id is not None
        self.eos_ids = codec.eos_ids

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds the tokenizer a GGUF file describes.

        Args:
            metadata: the file's metadata, of which `tokenizer.ggml.*` and `general.name` are read.
        Raises:
            LoadError: a key is missing or malformed, or the kind of vocabulary is not supported; names the key.
        """
        kind = get(metadata, PREFIX + "model", str)
        if kind not in _FAMILIES:
            raise LoadError(f"{PREFIX}model is {shown(kind)}, but must be one of {', '.join(map(repr, _FAMILIES))}")
        family = _FAMILIES[kind]
        file = read_vocabulary(metadata, family.default_ids)
        codec = family.build(file)
        names = {file.tokens[i]: i for i in sorted(codec.special_ids, reverse=True)}  # of equal names the lowest id
        adds_bos = family.always_adds_bos or file.flag("add_bos_token", codec.adds_bos)
        return cls(replace(codec, bos_id=file.bos_id, adds_bos=adds_bos, eos_ids=end_ids(file.own_ends, names)))

    @classmethod
    def from_tokenizer_json(
        cls, text: str, config: Mapping[str, Any] | None = None, *, vocab_size: int = 0
    ) -> Tokenizer:
        """Builds the tokenizer of a tokenizer.json file.

        Args:
            text: the file's content.
            config: tokenizer_config.json and generation_config.json as one mapping. Read are `bos_token`, `eos_token`,
                `pad_token`, `add_bos_token`, `additional_special_tokens`, `bos_token_id` and `eos_token_id`.
            vocab_size: rows of the model's output, where they are more than the tokens: the rest mean nothing (F056).
        Raises:
            LoadError: the file is malformed or asks for something unsupported; says what.
        """
        return cls(json_codec(text, config or {}, vocab_size))

    def encode(
        self, text: str, *, allow_special: bool = False, add_bos: bool | None = None, continues: bool = False
    ) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text; nothing is stripped. A vocabulary whose words begin with a space puts one in front.
            allow_special: the names of control tokens become those tokens. Off for whatever a user wrote (F049).
            add_bos: put the begin token first unless the ids already start with it; None does as the model wants.
            continues: tokens of the same prompt come before this text. Some vocabularies then leave out the space.
        Raises:
            RequestError: the text is not valid Unicode, or a begin token is asked of a model that has none.
        """
        check_text(text)
        ids: list[int] = []
        for token_id, segment in self.split_special(text) if allow_special else [(None, text)]:
            if token_id is None:
                ids += self._codec.encode(segment, continues or bool(ids))
            else:
                ids.append(token_id)
        return self.with_bos(ids) if (self.adds_bos if add_bos is None else add_bos) else ids

    def with_bos(self, ids: list[int]) -> list[int]:
        """The ids with exactly one begin token in front (F048)."""
        if self.bos_id is None:
            raise RequestError("this model has no begin token")
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def split_special(self, text: str) -> Iterator[tuple[int | None, str]]:
        """Cuts a text at the names of control tokens.

        Yields:
            (id, name) for a control token and (None, text) for what lies between; never an empty text. Joined, they
            are the text: whitespace that a control token takes along is part of its name.
        """
        return self._finder.cut(text)

    def decode(self, ids: Iterable[int], skip_special: bool = True, *, continues: bool = False) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: a whole text, so that the space which `encode` put in front is left out.
            skip_special: leave control tokens out.
            continues: the ids continue a text, so that a leading space is theirs (F028).
        Raises:
            RequestError: an id is outside the vocabulary.
        """
        kept = (i for i in ids if not (skip_special and i in self.special_ids))
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        return text[1:] if self.drops_space and not continues and text.startswith(" ") else text

    @property
    def drops_space(self) -> bool:
        """One space at the beginning of a whole text is the vocabulary's, not the text's."""
        return self._codec.drops_space

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, possibly part of a character; a control token's are its name.

        Raises:
            RequestError: the id is outside the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id {token_id} is outside the vocabulary (0 to {self.vocab_size - 1})")
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._codec.token_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """The token's entry in the vocabulary: a control token's name, an ordinary token's spelling there."""
        return self._codec.tokens[token_id]
