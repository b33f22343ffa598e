"""An HTTP server whose every byte and pause is written in a test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Piece = bytes | float  # bytes to send, or seconds to wait


@dataclass(slots=True)
class Reply:
    """One response.

    Attributes:
        pieces: the body, each sent and flushed on its own; a number is a pause of so many seconds.
        status: the HTTP status.
        is_cut: the connection ends after the pieces, in the middle of the body.
    """

    pieces: Sequence[Piece]
    status: int = 200
    is_cut: bool = False


@dataclass(slots=True)
class Asked:
    """What came.

    Attributes:
        path: of the request.
        headers: by lower-case name.
        body: parsed; None for a GET.
        at_s: time of the server's loop.
    """

    path: str
    headers: dict[str, str]
    body: Any
    at_s: float


@dataclass(slots=True)
class ScriptedServer:
    """Its address, what it was asked, and how many requests were open at once, at most."""

    url: str
    asked: list[Asked] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0

    @property
    def bodies(self) -> list[Any]:
        """Of requests that had one."""
        return [asked.body for asked in self.asked if asked.body is not None]


@asynccontextmanager
async def scripted_server(reply: Callable[[Asked], Reply | Awaitable[Reply]]) -> AsyncIterator[ScriptedServer]:
    """A server on this loop; GET /v1/models has one model, everything else is up to `reply`."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while asked := await _read(reader):
                found.asked.append(asked)
                found.num_open += 1
                found.max_open = max(found.max_open, found.num_open)
                answer = models() if asked.path == "/v1/models" else reply(asked)
                await _write(writer, answer if isinstance(answer, Reply) else await answer)
                found.num_open -= 1
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    found = ScriptedServer(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield found
    finally:
        server.close()


def models() -> Reply:
    """A list of one model."""
    return Reply([json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]}).encode()])


def events(*values: Any) -> bytes:
    """Server-sent events: objects as JSON, texts as they are."""
    return b"".join(
        b"data: " + (value if isinstance(value, str) else json.dumps(value)).encode() + b"\n\n" for value in values
    )


def text_chunk(text: str | None, finish: str | None = None) -> dict[str, Any]:
    """A chunk of a streamed chat."""
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], "usage": None}


def usage_chunk(num_tokens: int, num_prompt_tokens: int = 5, **more: Any) -> dict[str, Any]:
    """The chunk with the totals."""
    return {"choices": [], "usage": {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens}, **more}


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(first.split(" ")[1], headers, json.loads(body) if body else None, asyncio.get_running_loop().time())


async def _write(writer: asyncio.StreamWriter, reply: Reply) -> None:
    writer.write(f"HTTP/1.1 {reply.status} Scripted\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    for piece in reply.pieces:
        if isinstance(piece, float):
            await asyncio.sleep(piece)
        else:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
    if reply.is_cut:
        raise ConnectionResetError
    writer.write(b"0\r\n\r\n")
    await writer.drain()
