"""Sends an answer over ASGI: whole, or as server-sent events.

The loop of a stream is written out here rather than left to a framework's, because every token passes through it: one
wake-up, one encoding and one write per step, however many tokens and choices the step served.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from starlette.responses import Response

from forerun.errors import ForerunError
from forerun.serve.answers import Answer
from forerun.serve.bodies import Receive, Scope
from forerun.serve.hub import Inbox, Part
from forerun.serve.logs import log_request
from forerun.serve.problems import Problem
from forerun.serve.replies import Reply

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_KEEPALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = msgspec.json.Encoder().encode
_log = logging.getLogger(__name__)


async def send_problem(send: Send, problem: Problem) -> None:
    """A whole response that says what is wrong."""
    await send_json(send, problem.status, problem.encoded(), problem.headers)


async def send_json(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """A whole response."""
    length = (b"content-length", str(len(body)).encode())
    kind = (b"content-type", b"application/json")
    await send({"type": "http.response.start", "status": status, "headers": [kind, length, *(headers or [])]})
    await send({"type": "http.response.body", "body": body})


class AnswerResponse(Response):
    """Waits for the engine and sends what it says; ends the request's jobs however it is left.

    Args:
        answer: makes the answer.
        inbox: brings what the engine says.
        has_usage: a stream ends with the totals.
        names: the request's names of fields that the engine calls otherwise.
    """

    def __init__(self, answer: Answer, inbox: Inbox, has_usage: bool, names: dict[str, str]) -> None:
        # Not the base's __init__: it would encode a body, and there is none yet.
        self.background = None
        self._answer, self._inbox, self._has_usage, self._names = answer, inbox, has_usage, names
        self._is_begun = False
        self._has_role = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the request to its end."""
        inbox = self._inbox
        transport = scope.get("state", {}).get("transport")
        inbox.on_cut = None if transport is None else transport.abort
        watch = asyncio.ensure_future(_watch(receive, inbox))
        status = 200
        try:
            await (self._stream(send) if inbox.is_stream else self._whole(send))
        except Problem as problem:
            status = problem.status
            await self._fail(send, problem)
        finally:
            watch.cancel()
            inbox.close()
            log_request(scope, status, self._answer.completions, inbox)

    async def _whole(self, send: Send) -> None:
        answer, inbox = self._answer, self._inbox
        while answer.num_unfinished:
            _, problem = self._take(await inbox.get())
            if problem is not None:
                raise problem
            if inbox.is_gone:
                return
        body = _encode(answer.whole())
        length = (b"content-length", str(len(body)).encode())
        headers = [(b"content-type", b"application/json"), length]
        self._is_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._write(send, body, more=False)

    async def _stream(self, send: Send) -> None:
        answer, inbox = self._answer, self._inbox
        while answer.num_unfinished:
            parts = await inbox.get()
            if inbox.is_gone:
                return
            indices, problem = self._take(parts)
            if problem is not None and not self._is_begun:
                raise problem
            replies = answer.first() if parts and not self._has_role else []
            self._has_role |= bool(parts)
            for index in indices:
                replies += answer.chunks(index)
            if replies or not parts:
                await self._begin(send)
                await self._write(send, b"".join(map(_event, replies)) or _KEEPALIVE)
            if problem is not None:
                raise problem
        last = _event(answer.usage_chunk()) if self._has_usage else b""
        await self._write(send, last + _DONE, more=False)

    def _take(self, parts: list[Part]) -> tuple[list[int], Problem | None]:
        """Hands parts to the answer; returns the choices they were for, each once, and what ended the request."""
        choices: dict[int, None] = {}
        for part in parts:
            if part.error is not None:
                return list(choices), _problem_of(part.error, self._names)
            self._answer.take(part.choice, part.tokens, part.completion)
            choices[part.choice] = None
        return list(choices), None

    async def _begin(self, send: Send) -> None:
        if not self._is_begun:
            self._is_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        inbox = self._inbox
        inbox.sending_since_s = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": more})
        inbox.sending_since_s = None
        inbox.quiet_since_s = time.monotonic()

    async def _fail(self, send: Send, problem: Problem) -> None:
        """Before the first byte an error is a response of its own; later it is the last event (F032)."""
        if not self._is_begun:
            await send_problem(send, problem)
        elif self._inbox.is_stream:
            await send({"type": "http.response.body", "body": b"data: " + problem.encoded() + b"\n\n"})


def _event(reply: Reply) -> bytes:
    return b"data: " + _encode(reply) + b"\n\n"


def _problem_of(error: ForerunError, names: dict[str, str]) -> Problem:
    problem = Problem.of(error, names)
    if problem.status >= 500:
        _log.error("a request failed in the engine: %s", error)
    return problem


async def _watch(receive: Receive, inbox: Inbox) -> None:
    """Ends the request's jobs once its client has gone (F031)."""
    while (await receive())["type"] != "http.disconnect":
        pass
    inbox.leave()
