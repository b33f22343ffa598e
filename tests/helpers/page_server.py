"""A server with nothing behind it: it serves the chat page and answers as a script says, in the dialect of the API."""

from __future__ import annotations

import json
import mimetypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

MODEL = {"id": "tiny", "object": "model", "created": 0, "owned_by": "forerun"}
SEED = 2**53 - 1  # the largest that a server draws

Tokens = list[list[tuple[str, bool]]]  # by chunk: text and whether it is an accepted draft token


@dataclass(slots=True)
class Script:
    """What the server answers, and what it was asked.

    Attributes:
        chunks: the answer, chunk by chunk.
        drafters: those that the server has.
        error: answered instead: status and message.
        late_error: ends the stream after the chunks.
        is_cut: the stream just ends after the chunks.
        api_key: the only one that is let in; None lets everybody in.
        hold: after the first chunk, waits until it is set.
        bodies: requests as they came.
        gone: set once a client has left in the middle of an answer.
    """

    chunks: Tokens
    drafters: tuple[str, ...] = ("ngram", "suffix")
    error: tuple[int, str] | None = None
    late_error: str | None = None
    is_cut: bool = False
    api_key: str | None = None
    hold: threading.Event | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serve_page(script: Script) -> Iterator[str]:
    """The address of a server that follows the script."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(script))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        if script.hold:
            script.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()


def events(script: Script) -> Iterator[str]:
    """The stream's events, without its last one."""
    shared = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "tiny"}

    def event(delta: dict[str, Any], finish: str | None = None, **more: Any) -> str:
        extra = more.pop("choice", {})
        choice = {"index": 0, "delta": delta, "finish_reason": finish, **extra}
        return json.dumps({**shared, "choices": [choice], **more})

    yield event({"role": "assistant", "content": ""})
    for tokens in script.chunks:
        text = "".join(part for part, _ in tokens)
        yield event({"content": text}, choice={"draft": tokens})
    if script.is_cut:
        return
    if script.late_error:
        yield json.dumps({"error": {"message": script.late_error, "type": "server_error", "code": "internal_error"}})
        return
    num_tokens = sum(map(len, script.chunks))
    num_accepted = sum(is_draft for tokens in script.chunks for _, is_draft in tokens)
    yield event({}, "stop")
    metrics = {
        "time_to_first_token_ms": 41.0,
        "tokens_per_second": 61.6,
        "speculative_decoding": {"num_accepted_draft_tokens": num_accepted, "num_draft_tokens": 40},
    }
    usage = {"prompt_tokens": 7, "completion_tokens": num_tokens, "total_tokens": 7 + num_tokens}
    yield json.dumps({**shared, "choices": [], "usage": usage, "metrics": metrics, "seed": SEED})


def _handler(script: Script) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            facts = {
                "/v1/models": {"object": "list", "data": [MODEL]},
                "/server_info": {"speculation": {"drafters": script.drafters}},
            }
            if self.path in facts:
                if self._allowed():
                    self._json(200, facts[self.path])
                return
            name = self.path.lstrip("/") or "index.html"
            file = resources.files("forerun").joinpath("serve", "page", name)
            if "/" in name or not file.is_file():
                self._json(404, {"error": {"message": f"there is no {self.path}"}})
                return
            kind = {"js": "text/javascript"}.get(name.rpartition(".")[2]) or mimetypes.guess_type(name)[0]
            self._bytes(200, str(kind), file.read_bytes())

        def do_POST(self) -> None:
            script.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if not self._allowed():
                return
            if script.error:
                status, message = script.error
                self._json(status, {"error": {"message": message, "type": "invalid_request_error"}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                for number, data in enumerate(events(script)):
                    self._event(data)
                    if number == 1 and script.hold:
                        self._wait(script.hold)
                if not script.late_error and not script.is_cut:
                    self._event("[DONE]")
            except OSError:
                script.gone.set()

        def _wait(self, hold: threading.Event) -> None:
            """Comments keep the line alive, and show when nobody listens any more."""
            while not hold.wait(0.05):
                self.wfile.write(b": keep-alive\n\n")
                self.wfile.flush()

        def _event(self, data: str) -> None:
            self.wfile.write(f"data: {data}\n\n".encode())
            self.wfile.flush()

        def _allowed(self) -> bool:
            is_allowed = script.api_key is None or self.headers["Authorization"] == f"Bearer {script.api_key}"
            if not is_allowed:
                self._json(401, {"error": {"message": "wrong key", "type": "authentication_error"}})
            return is_allowed

        def _json(self, status: int, value: dict[str, Any]) -> None:
            self._bytes(status, "application/json", json.dumps(value).encode())

        def _bytes(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
