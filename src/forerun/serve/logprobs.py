"""Log-probabilities in the two shapes that OpenAI's API has for them. Every number is finite (F038)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forerun.models.detokenizer import Detokenizer
from forerun.serve.replies import ChatLogprob, PromptLogprobs, TextLogprobs, TopLogprob

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer
    from forerun.types import TokenLogprob

LEAST = -9999.0  # stands for everything below it: JSON has no minus infinity


def chat_logprob(tokenizer: Tokenizer, entry: TokenLogprob) -> ChatLogprob:
    """One token of a chat; a token that ended the answer has its name."""
    top = [TopLogprob(*_token(tokenizer, token_id, logprob)) for token_id, logprob in entry.top]
    return ChatLogprob(*_token(tokenizer, entry.token_id, entry.logprob), top)


def empty_text_logprobs() -> TextLogprobs:
    """Lists without an entry."""
    return TextLogprobs([], [], [], [])


def add_text_logprob(to: TextLogprobs, tokenizer: Tokenizer, entry: TokenLogprob, offset: int) -> None:
    """One token of a completion.

    Args:
        to: grows by one.
        tokenizer: knows the tokens' bytes.
        entry: the token.
        offset: where in the choice's text it begins.
    """
    top: dict[str, float] = {}
    for token_id, logprob in entry.top:
        # Of two tokens with one spelling the likelier counts, and it comes first.
        top.setdefault(text_token(tokenizer, token_id), max(logprob, LEAST))
    to.tokens.append(text_token(tokenizer, entry.token_id))
    to.token_logprobs.append(max(entry.logprob, LEAST))
    to.top_logprobs.append(top)
    to.text_offset.append(offset)


def add_prompt(
    to: TextLogprobs, tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]
) -> None:
    """All tokens of an echoed prompt; nothing is known of the first."""
    for (token_id, piece_start), entry in zip(_starts(tokenizer, token_ids), entries, strict=True):
        if entry is not None:
            add_text_logprob(to, tokenizer, entry, piece_start)
            continue
        to.tokens.append(text_token(tokenizer, token_id))
        to.token_logprobs.append(None)
        to.top_logprobs.append(None)
        to.text_offset.append(piece_start)


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None]) -> PromptLogprobs:
    """`prompt_logprobs`: per token of the prompt an object by token id, null for the first."""
    return [None if entry is None else _by_id(tokenizer, entry) for entry in entries]


def text_token(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as completions spell it: bytes that are no text of their own are written out."""
    data = _token_bytes(tokenizer, token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _by_id(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, dict[str, Any]]:
    pairs = ((entry.token_id, entry.logprob), *entry.top)
    return {
        str(token_id): {"logprob": max(logprob, LEAST), "decoded_token": text_token(tokenizer, token_id)}
        for token_id, logprob in pairs
    }


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
    data = _token_bytes(tokenizer, token_id)
    return data.decode("utf-8", "replace"), max(logprob, LEAST), list(data)


def _token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    # Rows that pad a model's vocabulary mean nothing.
    return tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""


def _starts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Each token and where its text begins."""
    detokenizer = Detokenizer(tokenizer, continues=False)
    starts, length = [], 0
    for token_id in token_ids:
        starts.append((token_id, length))
        if token_id < tokenizer.vocab_size:
            length += len(detokenizer.push_token(token_id))
    return starts
