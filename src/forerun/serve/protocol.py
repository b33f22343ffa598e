"""Connections: how many there may be, how long one may say nothing, and a way to cut one."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from forerun.serve.problems import Problem


def protocol_class(max_connections: int, silence_s: float) -> type[HttpToolsProtocol]:
    """A protocol with these limits.

    Args:
        max_connections: more are answered with 503 and closed.
        silence_s: a connection that has sent no request for so long is closed.
    """

    class Protocol(HttpToolsProtocol):
        """Requests find their connection as `scope["state"]["transport"]`."""

        _silence: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.app_state = {**self.app_state, "transport": transport}
            if len(self.connections) > max_connections:
                transport.write(_refusal(max_connections))
                transport.close()
                return
            self._silence = asyncio.get_running_loop().call_later(silence_s, transport.abort)

        def on_headers_complete(self) -> None:
            self._end_silence()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_silence()
            super().connection_lost(exc)

        def _end_silence(self) -> None:
            if self._silence is not None:
                self._silence.cancel()
                self._silence = None

    return Protocol


def _refusal(max_connections: int) -> bytes:
    problem = Problem(503, f"this server has its {max_connections} connections; try again in a moment")
    body = problem.encoded()
    head = [
        b"HTTP/1.1 503 Service Unavailable",
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"connection: close",
        *(name + b": " + value for name, value in problem.headers),
    ]
    return b"\r\n".join(head) + b"\r\n\r\n" + body
