"""Text to token ids and back, built from the vocabulary inside a GGUF file.

Knows byte-level BPE. How a text is split before the merges is not in the file, only its name
(`tokenizer.ggml.pre`); a name that isn't in `PRE_RULES` is refused, because a near miss changes the ids without
any error. Control tokens are kept out of the BPE vocabulary, so that no text can become one by accident.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from forerun.errors import LoadError, RequestError

# Values of tokenizer.ggml.token_type, as the GGUF specification numbers them.
_TYPE_UNKNOWN, _TYPE_CONTROL, _TYPE_USER_DEFINED, _TYPE_UNUSED = 2, 3, 4, 5

# Control tokens after which a model has nothing more to say. Files often name only one of theirs as eos.
_END_NAMES = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"}
)

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreRule:
    """How one family treats a text before the merges.

    Attributes:
        build: makes the pre-tokenizer.
        is_nfc: the text is composed (Unicode NFC) first.
        ignore_merges: a split that is a whole token is that token, whatever the merges say.
        adds_bos: a begin token is added unless the file says otherwise.
    """

    build: Callable[[], pre_tokenizers.PreTokenizer]
    is_nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _pattern(regex: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(regex), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


PRE_RULES: dict[str, PreRule] = {
    "gpt-2": PreRule(_gpt2),
    "smollm": PreRule(_digits_then_gpt2),
    "starcoder": PreRule(_digits_then_gpt2),
    "refact": PreRule(_digits_then_gpt2),
    "qwen2": PreRule(_pattern(_QWEN2_SPLIT), is_nfc=True),
    "llama-bpe": PreRule(_pattern(_LLAMA3_SPLIT), ignore_merges=True, adds_bos=True),
}


def _byte_alphabet() -> dict[str, int]:
    """The visible character that stands for each byte in a byte-level vocabulary (GPT-2's alphabet)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_alphabet()


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
        special_ids: control tokens; no user text ever becomes one, and `decode` leaves them out.
        special_tokens: their texts and ids.
    """

    def __init__(self, bpe: tokenizers.Tokenizer, tokens: Sequence[str], special_ids: frozenset[int]) -> None:
        self._bpe = bpe
        self._tokens = tokens
        self._bytes: list[bytes | None] = [None] * len(tokens)
        self.vocab_size = len(tokens)
        self.special_ids = special_ids
        # An empty name can't be found in a text.
        self.special_tokens = {tokens[i]: i for i in sorted(special_ids, reverse=True) if tokens[i]}
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self.bos_id: int | None = None
        self.adds_bos = False
        self.eos_ids: tuple[int, ...] = ()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds the tokenizer a GGUF file describes.

        Args:
            metadata: the file's `tokenizer.ggml.*` keys.
        Raises:
            LoadError: a key is missing or malformed, or the kind of vocabulary is not supported; names the key.
        """
        kind = _get(metadata, "tokenizer.ggml.model", str)
        if kind != "gpt2":
            raise LoadError(f"tokenizer.ggml.model is {kind!r}, but only 'gpt2' (byte-level BPE) is supported")
        rule = _pre_rule(metadata)
        tokens = _get_list(metadata, "tokenizer.ggml.tokens", str)
        types = _get_list(metadata, "tokenizer.ggml.token_type", int)
        if len(types) != len(tokens):
            raise LoadError(
                f"tokenizer.ggml.token_type has {len(types)} entries, but tokenizer.ggml.tokens has {len(tokens)}"
            )
        bos_id = _token_id(metadata, "bos", len(tokens))
        own_ends = [_token_id(metadata, name, len(tokens)) for name in ("eos", "eot", "eom")]
        # Some files mark their begin and end tokens as ordinary ones.
        special = {i for i, kind_id in enumerate(types) if kind_id in (_TYPE_CONTROL, _TYPE_UNKNOWN)}
        special |= {i for i in (bos_id, *own_ends) if i is not None}
        tokenizer = cls(_build_bpe(metadata, rule, tokens, types, special), tokens, frozenset(special))
        tokenizer.bos_id = bos_id
        adds_bos = metadata.get("tokenizer.ggml.add_bos_token", rule.adds_bos)
        tokenizer.adds_bos = bool(adds_bos) and bos_id is not None
        known_ends = sorted(i for i in special if tokens[i] in _END_NAMES)
        tokenizer.eos_ids = tuple(dict.fromkeys([i for i in own_ends if i is not None] + known_ends))
        return tokenizer

    def encode(self, text: str, *, allow_special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text; nothing is stripped, and no space is added.
            allow_special: the names of control tokens become those tokens. Off for whatever a user wrote (F049).
            add_bos: put the begin token first unless the ids already start with it; None does as the model wants.
        Raises:
            RequestError: the text is not valid Unicode, or a begin token is asked of a model that has none.
        """
        check_text(text)
        ids: list[int] = []
        for token_id, segment in self.split_special(text) if allow_special else [(None, text)]:
            if token_id is None:
                ids += self._bpe.encode(segment, add_special_tokens=False).ids
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
            (id, name) for a control token and (None, text) for what lies between; never an empty text.
        """
        end = 0
        for match in self._special_pattern.finditer(text) if self._special_pattern else ():
            if match.start() > end:
                yield None, text[end : match.start()]
            yield self.special_tokens[match.group()], match.group()
            end = match.end()
        if end < len(text):
            yield None, text[end:]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            RequestError: an id is outside the vocabulary.
        """
        kept = (i for i in ids if not (skip_special and i in self.special_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, possibly part of a character; a control token's are its name.

        Raises:
            RequestError: the id is outside the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id {token_id} is outside the vocabulary (0 to {self.vocab_size - 1})")
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._bytes_of(self._tokens[token_id])
        return known

    def token_text(self, token_id: int) -> str:
        """The token's entry in the vocabulary: a control token's name, an ordinary token's byte alphabet."""
        return self._tokens[token_id]

    @staticmethod
    def _bytes_of(token: str) -> bytes:
        try:
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        except KeyError:  # outside the byte alphabet: an added token, which is its own text
            return token.encode("utf-8", "replace")


def _build_bpe(
    metadata: Mapping[str, Any], rule: PreRule, tokens: list[str], types: list[int], special: set[int]
) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens) if i not in special and types[i] != _TYPE_UNUSED}
    merges: list[tuple[str, str]] = []
    for merge in _get_list(metadata, "tokenizer.ggml.merges", str):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    try:
        bpe = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=rule.ignore_merges))
    except Exception as error:  # the library raises plain Exception; what it says names the merge
        raise LoadError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    bpe.pre_tokenizer = rule.build()
    if rule.is_nfc:
        bpe.normalizer = normalizers.NFC()
    user_defined = [tokens[i] for i, kind in enumerate(types) if kind == _TYPE_USER_DEFINED and i not in special]
    bpe.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in user_defined])
    return bpe


def _pre_rule(metadata: Mapping[str, Any]) -> PreRule:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in PRE_RULES:
        found = "is missing" if name is None else f"is {name!r}"
        raise LoadError(
            f"tokenizer.ggml.pre {found}, but must be one of {', '.join(sorted(PRE_RULES))}: "
            "another rule would give other token ids"
        )
    return PRE_RULES[name]


def _get(metadata: Mapping[str, Any], key: str, kind: type) -> Any:
    value = metadata.get(key)
    if not isinstance(value, kind):
        found = "is missing" if value is None else f"is of type {type(value).__name__}"
        raise LoadError(f"{key} {found}, but must be of type {kind.__name__}")
    return value


def _get_list(metadata: Mapping[str, Any], key: str, item_kind: type) -> list[Any]:
    values: list[Any] = _get(metadata, key, list)
    if not all(map(item_kind.__instancecheck__, values)):
        raise LoadError(f"{key} must hold nothing but {item_kind.__name__} values")
    return values


def _token_id(metadata: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < vocab_size:
        raise LoadError(f"{key} is {value!r}, but must be an id between 0 and {vocab_size - 1}")
    return value
