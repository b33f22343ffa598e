"""Tokens to text while they are being made.

A character may be spread over several tokens and a stop string over several characters, so text is held back until
it is certain. Tokens go in one at a time, because the token that completes a stop string is the last that counts:
a run of accepted tokens must end inside the run (F020).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass

from forerun.errors import EngineFault
from forerun.models.tokenizer import Tokenizer


class Detokenizer:
    """Turns tokens into text, whole characters only (F027).

    The pieces joined, `finish` included, equal `tokenizer.decode` of all ids, however the ids are grouped.

    Args:
        tokenizer: knows the tokens' bytes.
        skip_special: leave control tokens out.
        shown_ids: control tokens whose names stay all the same.
        continues: the tokens continue a prompt, so that a leading space is theirs (F028); as for `decode`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        shown_ids: frozenset[int] = frozenset(),
        continues: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - shown_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside = False  # a character of which the decoder has the first bytes
        self._drops_space = not continues and tokenizer.drops_space

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete; may be empty."""
        data = b"".join([self._tokenizer.token_bytes(i) for i in token_ids if i not in self._skipped])
        text = self._decoder.decode(data)
        self._is_inside = self._decoder.getstate()[0] != b""
        return self._without_space(text)

    def push_token(self, token_id: int) -> str:
        """`push` of a single token, which nearly always is ASCII and then much less work."""
        if not self._is_inside and not self._drops_space and token_id not in self._skipped:
            data = self._tokenizer.token_bytes(token_id)
            if data.isascii():
                return data.decode("ascii")
        return self.push((token_id,))

    def finish(self) -> str:
        """U+FFFD for a character that was never completed, else nothing."""
        self._is_inside = False
        return self._without_space(self._decoder.decode(b"", final=True))

    def _without_space(self, text: str) -> str:
        if not text or not self._drops_space:
            return text
        self._drops_space = False
        return text.removeprefix(" ")


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that may be shown.

    Attributes:
        text: never part of a stop string.
        is_stopped: a stop string is complete; the text before it has all been given out.
    """

    text: str
    is_stopped: bool = False


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    After every piece the match that starts earliest wins. Text is held back exactly while it is the beginning of
    some stop string (F029), so what was given out can never be part of a later match.

    >>> matcher = StopMatcher(["END"])
    >>> matcher.push("so E"), matcher.push("N"), matcher.push("DING")
    (TextPiece(text='so ', is_stopped=False), TextPiece(text='', is_stopped=False), TextPiece(text='', is_stopped=True))
    """

    def __init__(self, stop: Iterable[str] = ()) -> None:
        self.stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> TextPiece:
        """Adds text and returns what is certain."""
        if not self.stop:
            return TextPiece(text)
        pending = self._held + text
        starts = [start for start in map(pending.find, self.stop) if start >= 0]
        if starts:
            self._held = ""
            return TextPiece(pending[: min(starts)], is_stopped=True)
        cut = self._first_possible_start(pending)
        self._held = pending[cut:]
        return TextPiece(pending[:cut])

    def finish(self) -> str:
        """The held text: no more is coming, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_possible_start(self, pending: str) -> int:
        longest = max(map(len, self.stop), default=0)
        for start in range(max(0, len(pending) - longest + 1), len(pending)):
            if any(stop.startswith(pending[start:]) for stop in self.stop):
                return start
        return len(pending)


class TextStream:
    """The text of one request's output: detokenizer and stop strings in one.

    Push the tokens one by one until it `is_stopped`: that token is the last one emitted.

    Attributes:
        is_stopped: a stop string is complete; the text before it has all been given out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Iterable[str] = (),
        *,
        skip_special: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special, shown_ids=shown_ids)
        self._matcher = StopMatcher(stop)
        self._has_stops = bool(self._matcher.stop)
        self.is_stopped = False

    def push(self, token_id: int) -> str:
        """The text that this token makes certain.

        Raises:
            EngineFault: a stop string was already complete.
        """
        text = self._detokenizer.push_token(token_id)
        if not self._has_stops:
            return text
        if self.is_stopped:
            raise EngineFault("a token follows a completed stop string")
        piece = self._matcher.push(text)
        self.is_stopped = piece.is_stopped
        return piece.text

    def finish(self) -> str:
        """The rest of the text, for an output that ended without a stop string; empty after one."""
        if self.is_stopped:
            return ""
        piece = self._matcher.push(self._detokenizer.finish())
        return piece.text if piece.is_stopped else piece.text + self._matcher.finish()
