"""Sends an answer over ASGI: whole, or as server-sent events.

The loop of a stream is written out here rather than left to a framework's, because every token passes through it: one
wake-up, one encoding and one write per step, however many tokens and choices the step served.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol

from starlette.responses import Response

from forerun.engine.completion import Completion, EmittedToken
from forerun.errors import ForerunError
from forerun.serve.bodies import Receive, Scope
from forerun.serve.hub import Inbox, Part
from forerun.serve.logs import log_request
from forerun.serve.problems import Problem

Headers = list[tuple[bytes, bytes]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_KEEPALIVE = b": keep-alive\n\n"
_STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_log = logging.getLogger(__name__)


async def send_problem(send: Send, problem: Problem) -> None:
    """A whole response that says what is wrong."""
    await send_json(send, problem.status, problem.encoded(), problem.headers)


async def send_json(send: Send, status: int, body: bytes, headers: Headers | None = None) -> None:
    """A whole response."""
    length = (b"content-length", str(len(body)).encode())
    kind = (b"content-type", b"application/json")
    await send({"type": "http.response.start", "status": status, "headers": [kind, length, *(headers or [])]})
    await send({"type": "http.response.body", "body": body})


class Answering(Protocol):
    """What makes an answer of the engine's events. The chunks are bytes as they go out."""

    @property
    def num_unfinished(self) -> int:
        """Choices that go on."""

    @property
    def completions(self) -> list[Completion]:
        """Those of the choices that have finished."""

    def take(self, index: int, tokens: Sequence[EmittedToken], completion: Completion | None) -> None:
        """Adds tokens to a choice, and its end."""

    def first(self) -> bytes:
        """The events before any token."""

    def step(self, index: int) -> bytes:
        """The events of what a choice has to say by now."""

    def last(self) -> bytes:
        """The events after everything."""

    def failed(self, problem: Problem) -> bytes:
        """The event that ends a stream in which something went wrong."""

    def whole(self) -> bytes:
        """The whole answer."""


class AnswerResponse(Response):
    """Waits for the engine and sends what it says; ends the request's jobs however it is left.

    Args:
        answer: makes the answer.
        inbox: brings what the engine says.
        names: the request's names of fields that the engine calls otherwise.
    """

    def __init__(self, answer: Answering, inbox: Inbox, names: dict[str, str]) -> None:
        # Not the base's __init__: it would encode a body, and there is none yet.
        self.background = None
        self._answer, self._inbox, self._names = answer, inbox, names
        self._is_begun = False
        self._has_first = False

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
        body = answer.whole()
        length = (b"content-length", str(len(body)).encode())
        headers = [(b"content-type", b"application/json"), length]
        await self._write(send, body, more=False, headers=headers)

    async def _stream(self, send: Send) -> None:
        answer, inbox = self._answer, self._inbox
        while answer.num_unfinished:
            parts = await inbox.get()
            if inbox.is_gone:
                return
            indices, problem = self._take(parts)
            if problem is not None and not self._is_begun:
                raise problem
            data = answer.first() if parts and not self._has_first else b""
            self._has_first |= bool(parts)
            data += b"".join(map(answer.step, indices))
            if data or not parts:
                await self._write(send, data or _KEEPALIVE)
            if problem is not None:
                raise problem
        await self._write(send, answer.last(), more=False)

    def _take(self, parts: list[Part]) -> tuple[list[int], Problem | None]:
        """Hands parts to the answer; returns the choices they were for, each once, and what ended the request."""
        choices: dict[int, None] = {}
        for part in parts:
            if part.error is not None:
                return list(choices), _problem_of(part.error, self._names)
            self._answer.take(part.choice, part.tokens, part.completion)
            choices[part.choice] = None
        return list(choices), None

    async def _write(self, send: Send, data: bytes, more: bool = True, headers: Headers = _STREAM_HEADERS) -> None:
        """Writes a part of the body, and what comes before it; the clock of the hub sees how long that takes."""
        inbox = self._inbox
        inbox.sending_since_s = time.monotonic()
        if not self._is_begun:
            self._is_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})
        inbox.sending_since_s = None
        inbox.quiet_since_s = time.monotonic()

    async def _fail(self, send: Send, problem: Problem) -> None:
        """Before the first byte an error is a response of its own; later it is the last event (F032)."""
        if not self._is_begun:
            await send_problem(send, problem)
        elif self._inbox.is_stream:
            await send({"type": "http.response.body", "body": self._answer.failed(problem)})


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
