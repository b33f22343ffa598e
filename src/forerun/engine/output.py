"""Where a request's output ends, and its text up to there.

Tokens are looked at one by one, whoever proposed them: what ends the output ends it in the middle of an accepted run
too, and nothing after it is emitted, counted or decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.engine.completion import EmittedToken
from forerun.engine.request import Request
from forerun.models.detokenizer import TextStream
from forerun.types import FinishReason, TokenLogprob


class Output:
    """The output of one request.

    Args:
        request: says which ids end it.
        stream: its text and stop strings.
        num_text_ids: ids from here on have no text: rows that pad a model's vocabulary.

    Attributes:
        finish_reason: None while it goes on.
    """

    def __init__(self, request: Request, stream: TextStream, num_text_ids: int) -> None:
        self.finish_reason: FinishReason | None = None
        self._end_ids = request.end_ids
        self._stream = stream
        self._num_text_ids = num_text_ids
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] | None = None if request.params.logprobs is None else []

    @property
    def text(self) -> str:
        """The text so far, without what is held back."""
        return "".join(self._pieces)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """One entry per emitted token; None unless asked for."""
        return None if self._logprobs is None else tuple(self._logprobs)

    def emit(
        self, token_ids: Sequence[int], num_accepted: int, room: int, logprob_of: Callable[[int, int], TokenLogprob]
    ) -> tuple[EmittedToken, ...]:
        """Takes in a step's tokens up to the one that ends the output.

        Args:
            token_ids: the accepted path and the next token.
            num_accepted: how many of them were draft nodes.
            room: tokens that may still be emitted, at least 1.
            logprob_of: the log-probability of the token at an index of token_ids; called only if asked for.

        Returns:
            The emitted tokens, at least one.
        """
        stream = self._stream
        emitted: list[EmittedToken] = []
        for index, token_id in enumerate(token_ids):
            text = ""
            if token_id in self._end_ids:
                self.finish_reason = "stop"
            elif token_id < self._num_text_ids:
                text = stream.push(token_id)
                if stream.is_stopped:
                    self.finish_reason = "stop"
            if self.finish_reason is None and index + 1 == room:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                text += stream.finish()
            logprob = None
            if self._logprobs is not None:
                logprob = logprob_of(index, token_id)
                self._logprobs.append(logprob)
            self._pieces.append(text)
            emitted.append(EmittedToken(token_id, text, index < num_accepted, logprob))
            if self.finish_reason is not None:
                break
        return tuple(emitted)
