"""Requests to an ASGI application without a socket, one message at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    """What an application answered."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    is_complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def json(self) -> Any:
        return json.loads(self.body, parse_constant=_refuse)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error["code"], str)
        return error

    def events(self) -> list[Any]:
        """The data of a stream's events, without the last one, which must say that it is the last."""
        blocks = self.body.decode().split("\n\n")
        assert blocks[-1] == ""
        data = [block for block in blocks[:-1] if block != ": keep-alive"]
        assert all(block.startswith("data: ") and "\n" not in block for block in data)
        assert data[-1] == "data: [DONE]"
        return [json.loads(block[6:], parse_constant=_refuse) for block in data[:-1]]


def _refuse(text: str) -> Any:
    raise AssertionError(f"{text} is no JSON")


class Call:
    """One request on its way.

    Args:
        app: the application.
        path: of the request.
        body: bytes as they are, anything else as JSON; None is a GET.
    """

    def __init__(self, app: Any, path: str, body: Any = None, method: str | None = None, **headers: str) -> None:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        self.reply = Reply()
        self.gate = asyncio.Event()  # closed: the client reads nothing
        self.gate.set()
        self.begun = asyncio.Event()
        self._incoming: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        self.aborted = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method or ("GET" if body is None else "POST"),
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(k.encode(), v.encode("latin-1")) for k, v in given.items()],
            "client": ("test", 1),
            "server": ("test", 80),
            "state": {"transport": self},
        }
        self.task = asyncio.ensure_future(app(scope, self._incoming.get, self._send))

    def abort(self) -> None:
        """What a cut connection does."""
        self.aborted.set()
        self.gate.set()
        self.leave()

    def leave(self) -> None:
        """The client closes the connection."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def done(self, timeout_s: float = 10.0) -> Reply:
        """The whole answer."""
        await asyncio.wait_for(self.task, timeout_s)
        return self.reply

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await self.gate.wait()
        if message["type"] == "http.response.start":
            self.reply.status = message["status"]
            self.reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.reply.parts.append(message.get("body", b""))
            self.reply.is_complete = not message.get("more_body", False)
            self.begun.set()


async def call(app: Any, path: str, body: Any = None, method: str | None = None, **headers: str) -> Reply:
    """One request and its whole answer."""
    return await Call(app, path, body, method, **headers).done()
