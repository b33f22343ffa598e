"""One choice of an answer, as it grows: text, calls, log-probabilities, ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET

from forerun.engine.completion import Completion, EmittedToken
from forerun.models.tool_calls import CallStart, ContentDelta, ToolEvent
from forerun.serve.asks import Ask
from forerun.serve.logprobs import add_prompt, add_text_logprob, chat_logprob, empty_text_logprobs
from forerun.serve.replies import (
    Call,
    CallDelta,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    Delta,
    Drafts,
    Function,
    Logprobs,
    TextChoice,
    TextLogprobs,
)

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

Share = ChatChunkChoice | TextChoice


class ChoiceBuilder:
    """One choice, as it grows.

    Args:
        ask: the request.
        index: of the choice.
        tokenizer: the model's.
    """

    def __init__(self, ask: Ask, index: int, tokenizer: Tokenizer) -> None:
        self._ask, self._index, self._tokenizer = ask, index, tokenizer
        self._has_logprobs = ask.params.logprobs is not None
        self._has_drafts = ask.is_stream and ask.drafting.report == "steps"
        self._awaits_prompt = ask.has_echo
        self._offer = ask.form.offer
        self._reader = None if self._offer is None else self._offer.reader()
        self._finish_reason: str | None = None
        self._num_chars = 0
        self._held: list[EmittedToken] = []
        # What no chunk has had yet.
        self._pieces: list[str] = []
        self._calls: list[CallDelta] = []
        self._drafts: Drafts = []
        self._token_ids: list[int] = []
        self._logprobs: Logprobs | None = None

    def take(self, tokens: Sequence[EmittedToken], completion: Completion | None) -> None:
        """Adds tokens to what the next chunk says, and the end."""
        if self._awaits_prompt:
            if self._has_logprobs and completion is None:
                self._held += tokens  # the prompt's log-probabilities come first, and with the completion
                return
            tokens = (*self._held, *tokens)
            self._add_prompt(completion)
            self._awaits_prompt = False
        if not self._ask.is_score:
            for token in tokens:
                self._add(token)
        if completion is not None:
            self._end(completion)

    def shares(self) -> list[Share]:
        """What has come since the last time, as shares of chunks: text, then a share for each step of a call.

        All that belongs to tokens comes with the first one. None where there is neither text nor a call.
        """
        text, calls = "".join(self._pieces), self._calls
        self._pieces, self._calls = [], []
        deltas = [Delta(content=text)] if text else []
        deltas += [Delta(tool_calls=[call]) for call in calls]
        return [self._share(delta) for delta in deltas]

    def last_share(self) -> Share:
        """The share with the finish reason, once all others are taken."""
        return self._share(Delta(), self._finish_reason)

    def whole(self) -> ChatChoice | TextChoice:
        """The whole choice at once."""
        if self._has_logprobs and self._logprobs is None:
            self._logprobs = self._no_logprobs()
        text = "".join(self._pieces)
        share = self._share(Delta(content=text), self._finish_reason)
        if isinstance(share, TextChoice):
            return share
        calls = _whole_calls(self._calls)
        message = ChatMessage(text or None, tool_calls=calls) if calls else ChatMessage(text)
        return ChatChoice(share.index, message, share.logprobs, share.finish_reason, share.token_ids)

    def _share(self, delta: Delta, finish_reason: str | None = None) -> Share:
        logprobs, token_ids, drafts = self._logprobs, self._token_ids, self._drafts
        self._logprobs, self._token_ids, self._drafts = None, [], []
        ids = token_ids if self._ask.has_token_ids else UNSET
        pairs = drafts if self._has_drafts else UNSET
        if self._ask.is_chat:
            return ChatChunkChoice(self._index, delta, logprobs, finish_reason, ids, pairs)
        return TextChoice(self._index, delta.content or "", logprobs, finish_reason, ids, draft=pairs)

    def _add(self, token: EmittedToken) -> None:
        if token.logprob is not None:
            logprobs = self._logprobs = self._logprobs or self._no_logprobs()
            if isinstance(logprobs, ChatLogprobs):
                logprobs.content.append(chat_logprob(self._tokenizer, token.logprob))
            else:
                add_text_logprob(logprobs, self._tokenizer, token.logprob, self._num_chars)
        text = token.text if self._reader is None else self._text_of(self._reader.push(token.text))
        if text:
            self._pieces.append(text)
            self._num_chars += len(text)
        if self._ask.has_token_ids:
            self._token_ids.append(token.token_id)
        if self._has_drafts:
            self._drafts.append((text, token.is_draft))

    def _end(self, completion: Completion) -> None:
        self._finish_reason = completion.finish_reason
        if self._reader is None:
            return
        events, self._finish_reason = self._reader.finish(completion.finish_reason)
        text = self._text_of(events)
        self._pieces.append(text)
        if self._drafts:  # the last token brings what was held back before it
            before, is_draft = self._drafts[-1]
            self._drafts[-1] = (before + text, is_draft)

    def _text_of(self, events: Sequence[ToolEvent]) -> str:
        """The text among the events; the calls among them are kept."""
        assert self._offer is not None
        text = ""
        for event in events:
            if isinstance(event, ContentDelta):
                text += event.text
            elif isinstance(event, CallStart):
                self._calls.append(CallDelta(event.index, Function("", event.name), event.call_id, "function"))
            elif self._calls and self._calls[-1].id is UNSET and self._calls[-1].index == event.index:
                self._calls[-1].function.arguments += event.text
            else:
                self._calls.append(CallDelta(event.index, Function(event.text)))
        return text

    def _no_logprobs(self) -> ChatLogprobs | TextLogprobs:
        return ChatLogprobs([]) if self._ask.is_chat else empty_text_logprobs()

    def _add_prompt(self, completion: Completion | None) -> None:
        prompt = self._ask.prompt_of(self._index)
        text = prompt.text
        if text is None:
            text = self._tokenizer.decode(i for i in prompt.token_ids if i < self._tokenizer.vocab_size)
        if self._has_logprobs:
            assert completion is not None
            logprobs = self._logprobs = empty_text_logprobs()
            add_prompt(logprobs, self._tokenizer, completion.prompt_token_ids, completion.prompt_logprobs or ())
        self._pieces.append(text)
        self._num_chars = len(text)
        if self._has_drafts:
            self._drafts.append((text, False))


def _whole_calls(deltas: Sequence[CallDelta]) -> list[Call]:
    calls: list[Call] = []
    for delta in deltas:
        if delta.id is not UNSET:
            calls.append(Call(delta.id, Function("", delta.function.name)))
        calls[delta.index].function.arguments += delta.function.arguments
    return calls
