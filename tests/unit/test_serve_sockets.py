"""Over real sockets: limits of connections, clients that don't read, and the address."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from forerun.errors import ConfigError
from forerun.serve import hub as hub_module
from forerun.serve.lifecycle import address_of, bind, num_connections_allowed
from forerun.serve.protocol import protocol_class
from tests.helpers.asynchronous import asynchronous, until
from tests.helpers.fake_worker import FakeServer, say, say_forever, with_settings


@contextlib.asynccontextmanager
async def listening(fake: FakeServer, max_connections: int = 50, silence_s: float = 10.0) -> AsyncIterator[int]:
    """The fake server behind a real socket; its port."""
    async with fake:
        with bind("127.0.0.1", 0) as listener:
            http = protocol_class(max_connections, silence_s)
            config = uvicorn.Config(
                fake.app, http=http, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
            )
            server = uvicorn.Server(config)
            task = asyncio.create_task(server._serve([listener]))
            await until(lambda: server.started)
            yield listener.getsockname()[1]
            server.should_exit = True
            await task


def request(body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


@asynchronous
async def test_F073_more_connections_than_allowed_are_told_so() -> None:
    async with listening(FakeServer(), max_connections=3) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        refusal = await reader.read()
        assert refusal.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in refusal
        assert json.loads(refusal.split(b"\r\n\r\n")[1])["error"]["type"] == "service_unavailable_error"
        writer.close()
        held[0][1].close()
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request({"prompt": "hi"}))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        for _, other in [*held, (reader, writer)]:
            other.close()


@asynchronous
async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with listening(FakeServer(), silence_s=0.1) as port:
        silent, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(silent.read(), 5) == b""
        writer.close()


@asynchronous
async def test_a_request_that_takes_longer_than_the_silence_is_answered() -> None:
    fake = FakeServer(say("hello"))
    async with listening(fake, silence_s=0.1) as port:
        fake.worker.gate.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request({"prompt": "hi"}))
        await until(lambda: len(fake.worker.jobs) == 1)
        await asyncio.sleep(0.3)
        fake.worker.gate.set()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


@asynchronous
async def test_F074_a_socket_that_is_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "TICK_S", 0.02)
    monkeypatch.setattr(hub_module, "MAX_UNREAD_PARTS", 10**9)
    fake = FakeServer(say_forever("abcdefgh " * 8), with_settings(send_timeout_s=0.2), max_model_len=10**8)
    async with listening(fake) as port:
        loop = asyncio.get_running_loop()
        with socket.create_connection(("127.0.0.1", port)) as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = {"prompt": "hi", "stream": True, "logprobs": 20, "return_token_ids": True}
            await loop.run_in_executor(None, stalled.sendall, request(body))
            await until(lambda: fake.worker.cancelled == [0], 15)
            assert fake.hub.num_open == 0
            fake.worker.script = say("hello")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request({"prompt": "hi"}))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.close()


@asynchronous
async def test_F031_a_closed_socket_ends_its_jobs() -> None:
    fake = FakeServer(say_forever(), max_model_len=10**7)
    async with listening(fake) as port:
        for number, is_stream in enumerate((True, False)):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request({"prompt": "hi", "stream": is_stream}))
            await until(lambda: len(fake.worker.jobs) == number + 1)  # noqa: B023
            writer.close()
            await until(lambda: len(fake.worker.cancelled) == number + 1)  # noqa: B023


def test_F070_a_taken_port_is_named() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert address_of(first) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"port {port}"):
            bind("127.0.0.1", port)
    with bind("127.0.0.1", port):  # free again at once
        pass


@pytest.mark.parametrize("host", ["256.1.1.1", "no.such.host.invalid"])
def test_F070_an_address_of_somebody_else(host: str) -> None:
    with pytest.raises(ConfigError, match=host):
        bind(host, 0)


def test_connections_are_as_many_as_there_are_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(100, 1000)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.append(pair))
    assert num_connections_allowed(10) == 10
    assert len(limits) == 1
    assert num_connections_allowed(500) == 500
    assert num_connections_allowed(5000) == 1000 - 64
    assert limits[-1] == (1000, 1000)
