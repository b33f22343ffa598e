"""What every family of vocabularies gives to the tokenizer, and how their tokens spell bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from forerun.models.tokenizer_names import NameRule

# Stands for a space in SentencePiece vocabularies.
SPACE_MARK = "\u2581"

# Control tokens after which a model has nothing more to say. Files often name only one of theirs as the end token.
END_NAMES = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|EOT|>",
        "<EOT>",
        "<eos>",
        "<end_of_turn>",
        "<turn|>",
        "<|tool_response>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
    }
)


@dataclass(frozen=True, slots=True)
class Codec:
    """One vocabulary. Immutable; safe to share between threads.

    It holds nothing of the file's metadata but the tokens: merges and scores take tens of megabytes.

    Attributes:
        tokens: the entry of every id; empty where an id means nothing.
        special_ids: control tokens. `encode` gives none of them, but for the unknown token.
        encode: ids of a text in which control names mean nothing. Its second argument says that the text continues
            one that has been encoded before it.
        token_bytes: the bytes a token stands for; a special token's are its name.
        drops_space: one leading space of a whole text is not the text's own, so decoding leaves it out.
        name_rules: by id, for special tokens that are more than their letters.
        bos_id: the begin token, or None.
        adds_bos: the model wants a begin token before every prompt.
        eos_ids: ids that end an output, the file's own first.
    """

    tokens: Sequence[str]
    special_ids: frozenset[int]
    encode: Callable[[str, bool], list[int]]
    token_bytes: Callable[[int], bytes]
    drops_space: bool = False
    name_rules: Mapping[int, NameRule] = field(default_factory=dict)
    bos_id: int | None = None
    adds_bos: bool = False
    eos_ids: tuple[int, ...] = ()


def end_ids(own: Sequence[int | None], names: Mapping[str, int]) -> tuple[int, ...]:
    """The file's own end tokens, then those of its special tokens that are known to end a turn.

    Args:
        own: ids that the file names as ends; None where it names none.
        names: its special tokens.
    """
    known = [token_id for name, token_id in names.items() if name in END_NAMES]
    if {"<|return|>", "<|call|>"} <= names.keys():
        # In this format <|end|> closes one message of several that make up an answer.
        known = [token_id for token_id in known if token_id != names.get("<|end|>")]
    return tuple(dict.fromkeys([i for i in own if i is not None] + sorted(known)))


def _byte_alphabet() -> dict[str, int]:
    """The visible character that stands for each byte in a byte-level vocabulary (GPT-2's alphabet)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_alphabet()
_BYTE_OF_NAME = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


def alphabet_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a token outside the byte alphabet is its own text."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode("utf-8", "replace")


def piece_bytes(token: str, space_mark: str = SPACE_MARK) -> bytes:
    """The bytes of a SentencePiece token: `<0x0A>` is a byte, the space mark a space, all else its own text."""
    return _BYTE_OF_NAME.get(token) or token.replace(space_mark, " ").encode("utf-8", "replace")


def byte_names() -> Sequence[str]:
    """The names of the 256 byte tokens, by byte."""
    return tuple(_BYTE_OF_NAME)
