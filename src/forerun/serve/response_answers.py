"""The answers of `/v1/responses`, whole or as named events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from forerun.engine.completion import Completion, EmittedToken
from forerun.models.tool_calls import CallStart, ContentDelta, ToolEvent
from forerun.serve.answers import Identity
from forerun.serve.asks import Ask
from forerun.serve.logprobs import chat_logprob
from forerun.serve.meter import Meter, timings
from forerun.serve.problems import Problem
from forerun.serve.replies import ChatLogprob
from forerun.serve.responses import ResponsesRequest

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode


Event = tuple[str, dict[str, Any]]  # name and fields


class _TextItem:
    """A message of the output, as it grows.

    Args:
        name: the part of all ids that is the request's own.
        index: of the item in the output.
    """

    def __init__(self, name: str, index: int) -> None:
        self._id = f"msg_{name}" if index == 0 else f"msg_{name}_{index}"
        self._index = index
        self._status = "in_progress"
        self._pieces: list[str] = []
        self._logprobs: list[ChatLogprob] = []
        self._num_told = 0  # log-probabilities that an event has had

    def begin(self) -> list[Event]:
        """The events that announce it."""
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            ("response.output_item.added", {"output_index": self._index, "item": self._json([])}),
            ("response.content_part.added", {**self._place(), "part": empty}),
        ]

    def add(self, text: str, logprobs: Sequence[ChatLogprob]) -> list[Event]:
        """The event with more text, if there is any."""
        self._logprobs += logprobs
        if not text:
            return []
        self._pieces.append(text)
        fresh, self._num_told = self._logprobs[self._num_told :], len(self._logprobs)
        return [("response.output_text.delta", {**self._place(), "delta": text, "logprobs": fresh})]

    def end(self, status: str) -> list[Event]:
        """The events that close it."""
        self._status = status
        part = self._part()
        return [
            ("response.output_text.done", {**self._place(), "text": part["text"], "logprobs": self._logprobs}),
            ("response.content_part.done", {**self._place(), "part": part}),
            ("response.output_item.done", {"output_index": self._index, "item": self.as_json()}),
        ]

    def as_json(self) -> dict[str, Any]:
        """What it is by now."""
        return self._json([self._part()])

    def _json(self, content: list[Any]) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "status": self._status, "role": "assistant", "content": content}

    def _part(self) -> dict[str, Any]:
        text = "".join(self._pieces)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._index, "content_index": 0}


class _CallItem:
    """A call of the output, as it grows.

    Args:
        name: the part of all ids that is the request's own.
        index: of the item in the output.
        call_id: what its result will refer to.
        function: what is called.
    """

    def __init__(self, name: str, index: int, call_id: str, function: str) -> None:
        self._id, self._index, self._call_id, self._function = f"fc_{name}_{index}", index, call_id, function
        self._status = "in_progress"
        self._pieces: list[str] = []

    def begin(self) -> list[Event]:
        """The event that announces it."""
        return [("response.output_item.added", {"output_index": self._index, "item": self.as_json()})]

    def add(self, text: str) -> list[Event]:
        """The event with more of the arguments."""
        self._pieces.append(text)
        return [("response.function_call_arguments.delta", {**self._place(), "delta": text})]

    def end(self, status: str) -> list[Event]:
        """The events that close it."""
        self._status = status
        done = {**self._place(), "name": self._function, "arguments": "".join(self._pieces)}
        return [
            ("response.function_call_arguments.done", done),
            ("response.output_item.done", {"output_index": self._index, "item": self.as_json()}),
        ]

    def as_json(self) -> dict[str, Any]:
        """What it is by now."""
        return {
            "id": self._id,
            "type": "function_call",
            "status": self._status,
            "call_id": self._call_id,
            "name": self._function,
            "arguments": "".join(self._pieces),
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._index}


class ResponsesAnswer:
    """The answer to one request.

    Args:
        request: what was asked.
        ask: the same as the engine's side has it; one choice.
        name: the part of all ids that is the request's own.
        identity: the server's.
        tokenizer: the model's.
        meter: what is measured.
    """

    def __init__(
        self, request: ResponsesRequest, ask: Ask, name: str, identity: Identity, tokenizer: Tokenizer, meter: Meter
    ) -> None:
        self._request, self._ask, self._name, self._identity = request, ask, name, identity
        self._tokenizer, self._meter = tokenizer, meter
        self._created = int(time.time())
        self._offer = ask.form.offer
        self._reader = None if self._offer is None else self._offer.reader()
        self._num_events = 0
        self._completion: Completion | None = None
        self._status = "in_progress"
        self._items: list[_TextItem | _CallItem] = []
        self._pending: list[Event] = []  # events that wait to be sent
        if self._reader is None:
            self._open(_TextItem(name, 0))  # there will be one, if only an empty one

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
        text = "".join(token.text for token in tokens)
        logprobs = [chat_logprob(self._tokenizer, token.logprob) for token in tokens if token.logprob is not None]
        if self._reader is None:
            self._add_text(text, logprobs)
        else:
            self._take_events(self._reader.push(text))
        if completion is not None:
            self._end(completion)

    def first(self) -> bytes:
        """The events that announce the answer."""
        announced = self._response("in_progress", is_empty=True)
        return self._event("response.created", response=announced) + self._event(
            "response.in_progress", response=announced
        )

    def step(self, index: int) -> bytes:
        """The events of what has come."""
        events, self._pending = self._pending, []
        return b"".join(self._event(kind, **fields) for kind, fields in events)

    def last(self) -> bytes:
        """The event that closes the answer."""
        return self._event(f"response.{self._status}", response=self._response(self._status))

    def failed(self, problem: Problem) -> bytes:
        """The event that ends a stream in which something went wrong."""
        return self._event("error", **problem.body()["error"])

    def whole(self) -> bytes:
        """The whole answer."""
        return _encode(self._response(self._status))

    def _take_events(self, events: Sequence[ToolEvent]) -> None:
        assert self._offer is not None
        for event in events:
            if isinstance(event, ContentDelta):
                self._add_text(event.text, [])
            elif isinstance(event, CallStart):
                self._open(_CallItem(self._name, len(self._items), event.call_id, event.name))
            else:
                call = self._items[-1]
                assert isinstance(call, _CallItem)
                self._tell(call.add(event.text))

    def _add_text(self, text: str, logprobs: Sequence[ChatLogprob]) -> None:
        item = self._items[-1] if self._items else None
        if not isinstance(item, _TextItem):
            item = _TextItem(self._name, len(self._items))
            self._open(item)
        self._tell(item.add(text, logprobs))

    def _open(self, item: _TextItem | _CallItem) -> None:
        """Begins an item, which ends the one before."""
        self._close("completed")
        self._items.append(item)
        self._tell(item.begin())

    def _close(self, status: str) -> None:
        if self._items:
            self._tell(self._items[-1].end(status))

    def _end(self, completion: Completion) -> None:
        reason: str = completion.finish_reason
        if self._reader is not None:
            events, reason = self._reader.finish(completion.finish_reason)
            self._take_events(events)
            if not self._items:
                self._add_text("", [])
        self._completion = completion
        self._status = "incomplete" if reason == "length" else "completed"
        is_broken = isinstance(self._items[-1], _CallItem) and reason != "tool_calls"
        self._close("incomplete" if is_broken else self._status)

    def _tell(self, events: Sequence[Event]) -> None:
        if self._ask.is_stream:
            self._pending += events

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {**fields, "type": kind, "sequence_number": self._num_events}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + _encode(data) + b"\n\n"

    def _response(self, status: str, is_empty: bool = False) -> dict[str, Any]:
        request, completion = self._request, self._completion
        text_format = request.text.format if request.text else None
        response: dict[str, Any] = {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._identity.model,
            "output": [] if is_empty else [item.as_json() for item in self._items],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": None,
            "store": False,
            "system_fingerprint": self._identity.fingerprint,
            "temperature": self._ask.params.temperature,
            "text": {"format": _given(text_format) if text_format else {"type": "text"}},
            "tool_choice": _given(request.tool_choice) if request.tool_choice else "auto",
            "tools": list(map(_given, request.tools or ())),
            "top_logprobs": request.top_logprobs or 0,
            "top_p": self._ask.params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }
        if completion is not None and not is_empty:
            response |= {"seed": completion.seed, "timings": timings(completion), "usage": self._usage(completion)}
        return response

    def _usage(self, completion: Completion) -> dict[str, Any]:
        stats = completion.stats
        return {
            "input_tokens": stats.prompt_tokens,
            "input_tokens_details": {"cached_tokens": stats.cached_tokens},
            "output_tokens": stats.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": self._meter.num_predicted_accepted,
            },
            "total_tokens": stats.prompt_tokens + stats.completion_tokens,
        }


def _given(value: Any) -> Any:
    """A part of the request as it came."""
    return value if isinstance(value, str) else value.model_dump(by_alias=True, exclude_none=True)
