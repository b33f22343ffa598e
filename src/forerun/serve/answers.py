"""From the engine's events to answers, whole or in chunks. Knows no sockets.

The chunks of a choice, joined, are its whole answer: text, log-probabilities and ids. Tokens that bring no text yet,
because half a character, a possible stop string or a possible call is held back, travel with the next chunk.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from forerun.engine.completion import Completion, EmittedToken
from forerun.serve.asks import Ask
from forerun.serve.choices import ChoiceBuilder
from forerun.serve.logprobs import prompt_logprobs
from forerun.serve.meter import Meter, request_metrics, timings
from forerun.serve.problems import Problem
from forerun.serve.replies import ChatChunkChoice, Choice, CompletionDetails, Delta, PromptDetails, Reply, Usage

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Identity:
    """What every answer of a server says.

    Attributes:
        model: its name.
        fingerprint: names the build and the model file; a seed's promise holds within it.
    """

    model: str
    fingerprint: str


encode = msgspec.json.Encoder().encode


def event(data: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(data) + b"\n\n"


class Answer:
    """The answer to one request.

    Args:
        ask: the request.
        answer_id: its id.
        identity: the server's.
        tokenizer: the model's.
        meters: per choice, what is measured.
        prediction_token_ids: of the text that the caller expects.

    Attributes:
        num_unfinished: choices that go on.
    """

    def __init__(
        self,
        ask: Ask,
        answer_id: str,
        identity: Identity,
        tokenizer: Tokenizer,
        meters: Sequence[Meter],
        prediction_token_ids: Sequence[int] = (),
    ) -> None:
        self._ask = ask
        self._meters = meters
        self._id, self._identity, self._created = answer_id, identity, int(time.time())
        self._tokenizer = tokenizer
        self._prediction = prediction_token_ids
        self._completions: list[Completion | None] = [None] * ask.num_jobs
        self._builders = [ChoiceBuilder(ask, index, tokenizer) for index in range(ask.num_jobs)]
        self.num_unfinished = ask.num_jobs

    @property
    def completions(self) -> list[Completion]:
        """Those of the choices that have finished."""
        return [completion for completion in self._completions if completion is not None]

    def take(self, index: int, tokens: Sequence[EmittedToken], completion: Completion | None) -> None:
        """Adds tokens to a choice, and its end."""
        self._builders[index].take(tokens, completion)
        if completion is not None:
            self._completions[index] = completion
            self.num_unfinished -= 1

    def first(self) -> bytes:
        """The events before any token: the roles of a chat."""
        if not self._ask.is_chat:
            return b""
        # A call has no text, not an empty one; where there may be calls it is not known yet.
        role = Delta("assistant", "" if self._ask.form.offer is None else None)
        roles = [self._chunk(ChatChunkChoice(i, role)) for i in range(self._ask.num_jobs)]
        return b"".join(map(event, roles))

    def step(self, index: int) -> bytes:
        """The events of what a choice has to say by now."""
        return b"".join(map(event, self._chunks(index)))

    def last(self) -> bytes:
        """The events after everything: the totals if they are asked for."""
        totals = b""
        if self._ask.has_usage:
            reply = self._reply([])
            reply.usage = self._usage()
            totals = event(reply)
        return totals + b"data: [DONE]\n\n"

    def failed(self, problem: Problem) -> bytes:
        """The event that ends a stream in which something went wrong."""
        return b"data: " + problem.encoded() + b"\n\n"

    def whole(self) -> bytes:
        """The whole answer; every choice has finished."""
        return encode(self._whole())

    def _chunks(self, index: int) -> list[Reply]:
        builder = self._builders[index]
        replies = list(map(self._chunk, builder.shares()))
        if self._completions[index] is not None:
            replies.append(self._with_reports(self._chunk(builder.last_share()), index))
        return replies

    def _whole(self) -> Reply:
        reply = self._reply([])
        for index, builder in enumerate(self._builders):
            reply.choices.append(builder.whole())
            self._with_reports(reply, index)
        reply.usage = self._usage()
        return reply

    def _reply(self, choices: list[Choice]) -> Reply:
        ask = self._ask
        kind = ("chat.completion.chunk" if ask.is_stream else "chat.completion") if ask.is_chat else "text_completion"
        return Reply(self._id, kind, self._created, self._identity.model, self._identity.fingerprint, choices)

    def _chunk(self, choice: Choice) -> Reply:
        reply = self._reply([choice])
        if self._ask.has_usage:
            reply.usage = None
        return reply

    def _with_reports(self, reply: Reply, index: int) -> Reply:
        """Adds what is known at the end of a choice: for the only one to the answer, else to the choice."""
        ask, completion = self._ask, self._completions[index]
        assert completion is not None
        choice = reply.choices[-1]
        # With several choices the request's own seed gives all of them again.
        seed = completion.seed if ask.params.seed is None else ask.params.seed
        reply.seed = None if completion.seed is None else seed
        place = reply if ask.num_jobs == 1 else choice
        place.timings = timings(completion)
        if ask.drafting.report != "none":
            place.metrics = request_metrics(completion, self._meters[index], ask.drafting.report)
        owner = reply if ask.is_chat else choice
        if ask.has_token_ids:
            owner.prompt_token_ids = list(completion.prompt_token_ids)
        if ask.reports_prompt:
            owner.prompt_logprobs = prompt_logprobs(self._tokenizer, completion.prompt_logprobs or ())
        return reply

    def _usage(self) -> Usage:
        """Totals: each prompt once, each choice's tokens."""
        ask, done = self._ask, self.completions
        firsts = done[:: ask.num_choices]
        num_prompt = sum(completion.stats.prompt_tokens for completion in firsts)
        num_output = 0 if ask.is_score else sum(completion.stats.completion_tokens for completion in done)
        num_truncated = sum(prompt.num_truncated for prompt in ask.prompts)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptDetails(
                cached_tokens=sum(completion.stats.cached_tokens for completion in firsts),
                truncated_tokens=num_truncated or UNSET,
            ),
            completion_tokens_details=CompletionDetails(
                accepted_prediction_tokens=sum(meter.num_predicted_accepted for meter in self._meters),
                rejected_prediction_tokens=sum(self._num_rejected(completion) for completion in done),
            ),
        )

    def _num_rejected(self, completion: Completion) -> int:
        """Tokens of the prediction that did not appear in a choice."""
        missing = collections.Counter(self._prediction)
        missing.subtract(completion.token_ids)
        return sum(count for count in missing.values() if count > 0) if self._prediction else 0
