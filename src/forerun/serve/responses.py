"""`POST /v1/responses`: OpenAI's second form of a chat. Text in, text out; nothing is stored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from forerun.engine.completion import Completion, EmittedToken
from forerun.serve.answers import Identity
from forerun.serve.asks import Ask
from forerun.serve.meter import Meter, timings
from forerun.serve.problems import Problem
from forerun.serve.schema import (
    INT64_MAX,
    ChatRequest,
    Message,
    Prediction,
    Schema,
    Speculative,
    field,
    inert,
    limited,
)
from forerun.types import MAX_SEED

_encode = msgspec.json.Encoder().encode
# What the chat's fields are called here.
NAMES = {"messages": "input", "max_tokens": "max_output_tokens"}


class InputPart(Schema):
    """One part of an item's content."""

    type: Literal["input_text", "output_text"] = field(..., "Only text.", must="must be 'input_text' or 'output_text'")
    text: str = field(..., "The text.")
    annotations: list[Any] | None = inert()
    logprobs: list[Any] | None = inert()


class InputItem(Schema):
    """One message of the input, or of an earlier answer's output."""

    type: Literal["message"] | None = field(None, "Only messages.", must="must be 'message'")
    role: Annotated[str, Field(min_length=1, max_length=64)] = field(..., "Who says it.")
    content: str | list[InputPart] = field(
        ..., "A text or text parts.", must="must be a string or a list of text parts"
    )
    id: str | None = inert()
    status: str | None = inert()


class TextFormat(Schema):
    """`text.format`."""

    type: Literal["text"] = field(..., "Only text.", must="must be 'text' in this build")


class TextOptions(Schema):
    """`text`."""

    format: TextFormat | None = field(None, "Only `text`.")
    verbosity: None = limited("must be left out: say it in a message")


class ResponsesStreamOptions(Schema):
    """`stream_options`."""

    include_obfuscation: Literal[False] | None = limited("must be false: chunks are not padded")


class ResponsesRequest(Schema):
    """`POST /v1/responses`."""

    model: str | None = field(None, "A served name; absent means the one that is served.")
    input: str | list[InputItem] = field(..., "A text or messages.", must="must be a string or a list of messages")
    instructions: str | None = field(None, "A system message in front.")
    max_output_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = field(None, "Tokens to generate at most.")
    temperature: float | None = field(None, "0 is greedy; default 1.")
    top_p: float | None = field(None, "Keep the most likely tokens up to this mass; default 1, off.")
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = field(None, "As for chats.")
    stream: bool | None = field(None, "Send the answer while it is made, as named events.")
    stream_options: ResponsesStreamOptions | None = field(None, "With `stream` alone.")
    text: TextOptions | None = field(None, "The format of the answer.")
    speculative: Speculative | None = field(None, "As for chats.")
    prediction: Prediction | None = field(None, "As for chats.")
    cache_salt: Annotated[str, Field(max_length=256)] | None = field(None, "As for chats.")
    user: str | None = inert()
    metadata: dict[str, Any] | None = inert()
    safety_identifier: str | None = inert()
    prompt_cache_key: str | None = inert()
    prompt_cache_retention: str | None = inert()
    parallel_tool_calls: bool | None = inert()
    store: Literal[False] | None = limited("must be false: answers are not stored")
    service_tier: Literal["auto", "default"] | None = limited("must be 'auto' or 'default': there is one tier")
    truncation: Literal["disabled"] | None = limited("must be 'disabled': a prompt that is too long is refused")
    background: Literal[False] | None = limited("must be false: answers are not stored")
    tools: Annotated[list[None], Field(max_length=0)] | None = limited("must be empty in this build")
    tool_choice: Literal["none", "auto"] | None = limited("must be 'none' or 'auto' in this build")
    include: Annotated[list[None], Field(max_length=0)] | None = limited("must be empty")
    reasoning: None = limited("must be left out")
    top_logprobs: None = limited("must be left out: /v1/chat/completions has log-probabilities")
    previous_response_id: None = limited("must be left out: answers are not stored; send the messages themselves")
    conversation: None = limited("must be left out: conversations are not stored; send the messages themselves")
    max_tool_calls: None = limited("must be left out")
    prompt: None = limited("must be left out: prompts are not stored")


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """The chat that a request asks for.

    Raises:
        Problem: there is nothing to answer.
    """
    if request.stream_options is not None and not request.stream:
        raise Problem(400, "stream_options is given without stream; send both or neither", "stream_options")
    items = [InputItem(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    if not items:
        raise Problem(400, "input is empty, but must have at least one message", "input")
    messages = [Message(role=item.role, content=_text(item)) for item in items]
    if request.instructions is not None:
        messages.insert(0, Message(role="system", content=request.instructions))
    return ChatRequest(
        model=request.model,
        messages=messages,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stream=request.stream,
        speculative=request.speculative,
        prediction=request.prediction,
        cache_salt=request.cache_salt,
    )


def _text(item: InputItem) -> str:
    content = item.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ResponsesAnswer:
    """The answer to one request, whole or as named events.

    Args:
        request: what was asked.
        ask: the same as the engine's side has it; one choice.
        name: the part of all ids that is the request's own.
        identity: the server's.
        meter: what is measured.
    """

    def __init__(self, request: ResponsesRequest, ask: Ask, name: str, identity: Identity, meter: Meter) -> None:
        self._request, self._ask, self._name, self._identity = request, ask, name, identity
        self._meter = meter
        self._created = int(time.time())
        self._pieces: list[str] = []
        self._num_sent = 0
        self._num_events = 0
        self._completion: Completion | None = None

    @property
    def num_unfinished(self) -> int:
        """1 until the answer is complete."""
        return int(self._completion is None)

    @property
    def completions(self) -> list[Completion]:
        """The completion, once there is one."""
        return [] if self._completion is None else [self._completion]

    def take(self, index: int, tokens: Sequence[EmittedToken], completion: Completion | None) -> None:
        """Adds tokens, and the end."""
        self._pieces += [token.text for token in tokens if token.text]
        self._completion = completion

    def first(self) -> bytes:
        """The events that announce the answer."""
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return (
            self._event("response.created", response=self._response("in_progress"))
            + self._event("response.in_progress", response=self._response("in_progress"))
            + self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
            + self._event("response.content_part.added", **self._place(), part=part)
        )

    def step(self, index: int) -> bytes:
        """The event with the text that has come."""
        text = "".join(self._pieces[self._num_sent :])
        self._num_sent = len(self._pieces)
        if not text:
            return b""
        return self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def last(self) -> bytes:
        """The events that close the answer."""
        status, part = self._status, self._part()
        return (
            self._event("response.output_text.done", **self._place(), text=part["text"], logprobs=[])
            + self._event("response.content_part.done", **self._place(), part=part)
            + self._event("response.output_item.done", output_index=0, item=self._item(status, [part]))
            + self._event(f"response.{status}", response=self._response(status))
        )

    def failed(self, problem: Problem) -> bytes:
        """The event that ends a stream in which something went wrong."""
        return self._event("error", **problem.body()["error"])

    def whole(self) -> bytes:
        """The whole answer."""
        return _encode(self._response(self._status))

    @property
    def _status(self) -> str:
        assert self._completion is not None
        return "incomplete" if self._completion.finish_reason == "length" else "completed"

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {**fields, "type": kind, "sequence_number": self._num_events}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + _encode(data) + b"\n\n"

    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._name}", "output_index": 0, "content_index": 0}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": "".join(self._pieces), "annotations": [], "logprobs": []}

    def _item(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._name}",
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _response(self, status: str) -> dict[str, Any]:
        request, completion = self._request, self._completion
        is_cut = status == "incomplete"
        response: dict[str, Any] = {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._identity.model,
            "output": [] if completion is None else [self._item(status, [self._part()])],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": None,
            "store": False,
            "system_fingerprint": self._identity.fingerprint,
            "temperature": self._ask.params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": self._ask.params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }
        if completion is not None:
            stats = completion.stats
            response["seed"] = completion.seed
            response["timings"] = timings(completion)
            response["usage"] = {
                "input_tokens": stats.prompt_tokens,
                "input_tokens_details": {"cached_tokens": stats.cached_tokens},
                "output_tokens": stats.completion_tokens,
                "output_tokens_details": {
                    "reasoning_tokens": 0,
                    "accepted_prediction_tokens": self._meter.num_predicted_accepted,
                },
                "total_tokens": stats.prompt_tokens + stats.completion_tokens,
            }
        return response
