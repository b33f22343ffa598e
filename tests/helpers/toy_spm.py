"""Small SentencePiece and WordPiece vocabularies, as a GGUF file describes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forerun.models.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
# Best first, as training leaves them: scores fall with the rank.
PIECES = ("▁t", "he", "▁a", "in", "re", "on", "▁the", "er", "▁▁", "an", "▁▁▁▁", "ing", "th", "▁th", "and", "▁and", "to")
LETTERS = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?'\"()0123456789é日本"


def spm_metadata(
    pieces: Iterable[str | tuple[str, float]] = (*PIECES, *LETTERS),
    *,
    has_bytes: bool = True,
    extra: Sequence[tuple[str, int]] = (),
    **changes: Any,
) -> dict[str, Any]:
    """`<unk>`, `<s>`, `</s>`, the bytes, the pieces, then the extra tokens with their types.

    Args:
        pieces: distinct texts, best first, or texts with scores.
        has_bytes: with a token for every byte.
        extra: (text, type).
        changes: other keys of `tokenizer.ggml`; None removes one.
    """
    scored = [piece if isinstance(piece, tuple) else (piece, -float(rank)) for rank, piece in enumerate(pieces)]
    byte_tokens = BYTE_TOKENS if has_bytes else []
    keys = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *byte_tokens, *(text for text, _ in scored), *(text for text, _ in extra)],
        "scores": [0.0] * (3 + len(byte_tokens)) + [score for _, score in scored] + [0.0] * len(extra),
        "token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * len(byte_tokens), *[NORMAL] * len(scored)]
        + [kind for _, kind in extra],
    }
    return _prefixed(keys | changes)


def spm(*args: Any, **kwargs: Any) -> Tokenizer:
    return Tokenizer.from_gguf(spm_metadata(*args, **kwargs))


WORDPIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁the", "▁un", "want", "able", "▁runn", "ing", "▁,", "▁!", "▁日"]


def wordpiece_metadata(**changes: Any) -> dict[str, Any]:
    keys = {
        "model": "bert",
        "tokens": WORDPIECES,
        "token_type": [CONTROL] * 4 + [NORMAL] * (len(WORDPIECES) - 4),
        "unknown_token_id": 1,
        "bos_token_id": 2,
    }
    return _prefixed(keys | changes)


def wordpiece(**changes: Any) -> Tokenizer:
    return Tokenizer.from_gguf(wordpiece_metadata(**changes))


def _prefixed(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
