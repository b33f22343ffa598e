"""A client for OpenAI-compatible servers that costs little: it shares the machine with the server it measures.

Events are told apart by a pattern in their bytes. Only those that hold counts, and errors, are parsed as JSON.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp

from forerun.errors import ConfigError, one_line

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DEFAULT_TIMEOUT_S = 600.0

# Inside a JSON string a quote has a backslash before it, so none of these can match in an answer's own text.
_TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content)":\s*"(?!")')
_COUNTS = re.compile(rb'"(?:usage|timings|metrics)":\s*\{')
_ERROR = re.compile(rb'^(?:error:|data:\s*\{"(?:error|object":\s*"error)")')


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go.

    Attributes:
        url: the server's address, without a path.
        model: the name that requests give; None asks the server for its first.
        api_key: sent as a bearer token.
        timeout_s: seconds that one answer may take.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, encoded before anything is timed.

    Attributes:
        path: CHAT or COMPLETIONS.
        payload: the JSON body.
        is_stream: whether the answer is streamed.
        arrival_s: seconds after the start when it is sent, for arrivals that don't wait for answers.
    """

    path: str
    payload: bytes
    is_stream: bool
    arrival_s: float = 0.0


@dataclass(slots=True)
class Answer:
    """What became of one request. Times are seconds of `time.perf_counter`.

    Attributes:
        sent_s: when it was sent.
        end_s: when its last byte was there, or it failed.
        chunk_s: when each chunk with text was there; of an answer that is not streamed, nothing.
        num_tokens, num_prompt_tokens: of the server's usage.
        num_drafted, num_accepted: draft tokens, where the server says so.
        error: what kind of failure it was; None for a whole answer.
        detail: what the server said about it.
    """

    sent_s: float = 0.0
    end_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    error: str | None = None
    detail: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether all of the answer came."""
        return self.error is None

    @property
    def latency_s(self) -> float:
        """From sending it to its end."""
        return self.end_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        """From sending it to the first text; None where nothing was streamed."""
        return self.chunk_s[0] - self.sent_s if self.chunk_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Between chunks."""
        return [after - before for before, after in zip(self.chunk_s, self.chunk_s[1:], strict=False)]

    @property
    def token_s(self) -> float | None:
        """Seconds per token after the first, over the whole answer; None where it can't be known."""
        if len(self.chunk_s) < 2 or self.num_tokens < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_tokens - 1)


class EventSplitter:
    """Cuts a byte stream into server-sent events, wherever the network cut it.

    >>> splitter = EventSplitter()
    >>> splitter.feed(b"data: a\\n"), splitter.feed(b"\\ndata: b\\r\\n\\r\\nda")
    ([], [b'data: a', b'data: b'])
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are complete now, lines divided by newlines, comments left out."""
        buffer, held = self._rest + data, b""
        if b"\r" in buffer:
            if buffer.endswith(b"\r"):  # perhaps half a line end
                buffer, held = buffer[:-1], b"\r"
            buffer = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, rest = buffer.split(b"\n\n")
        self._rest = rest + held
        stripped = (event.strip(b"\n") for event in events)
        return [event for event in stripped if event and not event.startswith(b":")]


class Client:
    """Sends requests to one server. Use as `async with`.

    Raises:
        ConfigError: by `async with`, when the server can't be reached or has no model.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.model = target.model or ""
        headers = {"Content-Type": "application/json"}
        if target.api_key:
            headers["Authorization"] = f"Bearer {target.api_key}"
        self._session = aiohttp.ClientSession(
            target.url.rstrip("/"),
            headers=headers,
            # A connection for each request: servers close old ones when they like, some after every stream without a
            # word, and a request that meets that would count as lost.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=target.timeout_s),
            auto_decompress=False,
        )

    async def __aenter__(self) -> Self:
        try:
            if not self.model:
                self.model = await self._first_model()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._session.close()

    async def _first_model(self) -> str:
        try:
            async with self._session.get("/v1/models") as response:
                body = await response.json(content_type=None)
                return str(body["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConfigError(f"no server answers at {self.target.url}: {one_line(error)}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{self.target.url}/v1/models lists no model; name one with --model") from error

    async def answer(self, ask: Ask, into: Answer | None = None) -> Answer:
        """Sends one request and reads its answer to the end. A failure is part of the answer, never raised.

        Args:
            ask: the request.
            into: is filled as the answer comes, for those who watch it; None makes one.
        """
        answer = into or Answer()
        answer.sent_s = time.perf_counter()
        try:
            async with self._session.post(ask.path, data=ask.payload) as response:
                if response.status != 200:
                    _fail(answer, f"status {response.status}", _message(await response.read()))
                elif ask.is_stream:
                    await _read_stream(response, answer)
                else:
                    _take_counts(answer, await response.read())
        except TimeoutError:
            _fail(answer, "timeout")
        except aiohttp.ClientConnectorError as error:
            _fail(answer, "no connection", one_line(error))
        except (aiohttp.ClientError, OSError) as error:
            _fail(answer, "connection lost", one_line(error))
        answer.end_s = time.perf_counter()
        if answer.is_ok and not answer.num_tokens:
            _fail(answer, "no usage", "the answer does not say how many tokens it has")
        return answer

    async def metrics(self) -> str:
        """The text at /metrics; empty where there is none."""
        try:
            async with self._session.get("/metrics") as response:
                return await response.text() if response.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError, OSError):
            return ""


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    splitter = EventSplitter()
    is_done = False
    async for data in response.content.iter_any():
        now = time.perf_counter()
        for event in splitter.feed(data):
            if _TEXT.search(event):
                answer.chunk_s.append(now)
            if _COUNTS.search(event):
                _take_counts(answer, event.partition(b":")[2])
            elif event.endswith(b"[DONE]"):
                is_done = True
            elif _ERROR.match(event):
                _fail(answer, "error in the stream", _message(event.partition(b":")[2]))
    if answer.is_ok and not is_done:
        _fail(answer, "stream cut", "the stream ended before [DONE]")


def _fail(answer: Answer, kind: str, detail: str = "") -> None:
    answer.error, answer.detail = kind, detail


def _take_counts(answer: Answer, body: bytes) -> None:
    """Counts from a whole answer or from an event that has some; what it doesn't have stays as it was."""
    try:
        value = json.loads(body)
        usage = value.get("usage") or {}
        answer.num_tokens = int(usage.get("completion_tokens") or answer.num_tokens)
        answer.num_prompt_tokens = int(usage.get("prompt_tokens") or answer.num_prompt_tokens)
        for place in (value, *(value.get("choices") or [])):
            _take_draft_counts(answer, place)
    except (ValueError, TypeError, AttributeError):
        _fail(answer, "bad JSON", one_line(body[:200]))


def _take_draft_counts(answer: Answer, place: Mapping[str, Any]) -> None:
    """Drafted and accepted tokens, as vLLM's metrics or llama.cpp's timings have them."""
    spec = (place.get("metrics") or {}).get("speculative_decoding") or {}
    timings = place.get("timings") or {}
    answer.num_drafted = int(spec.get("num_draft_tokens") or timings.get("draft_n") or answer.num_drafted)
    answer.num_accepted = int(
        spec.get("num_accepted_draft_tokens") or timings.get("draft_n_accepted") or answer.num_accepted
    )


def _message(body: bytes) -> str:
    """What an error body says."""
    try:
        error = json.loads(body)["error"]
        return one_line(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return one_line(body[:200].decode("utf-8", "replace"))
