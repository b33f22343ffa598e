"""Clients that leave, don't read or come in crowds, and a server that ends."""

from __future__ import annotations

import asyncio

import pytest

from forerun.serve import hub as hub_module
from forerun.serve.problems import Problem
from tests.helpers.asgi import Call, call
from tests.helpers.asynchronous import asynchronous, until
from tests.helpers.fake_worker import FakeServer, say, say_forever, with_settings

PATH = "/v1/completions"
TEXT = {"prompt": "hi"}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_begun", [False, True])
@asynchronous
async def test_F031_a_client_that_leaves_ends_its_jobs(is_stream: bool, is_begun: bool) -> None:
    async with FakeServer(say_forever(), max_model_len=10**6) as server:
        if not is_begun:
            server.worker.gate.clear()  # it waits in the queue, or for its prompt
        one = Call(server.app, PATH, TEXT | {"stream": is_stream, "n": 2})
        await until(lambda: len(server.worker.jobs) == 2)
        if is_begun and is_stream:
            await one.begun.wait()
        one.leave()
        await one.done(1.0)
        assert server.worker.cancelled == [0, 1]
        assert server.hub.num_jobs == server.hub.num_open == 0
        assert 'finished_reason="abort",model_name="toy"} 2.0' in server.hub.metrics.text()
        server.worker.gate.set()
        server.worker.script = say("hello")
        assert (await call(server.app, PATH, TEXT)).json()["choices"][0]["text"] == "hello"


@asynchronous
async def test_F072_gauges_return_to_zero() -> None:
    async with FakeServer(say_forever(), max_model_len=10**6) as server:
        calls = [Call(server.app, PATH, TEXT | {"stream": True}) for _ in range(40)]
        await until(lambda: len(server.worker.jobs) == 40)
        assert 'num_requests_running{model_name="toy"} 40.0' in server.hub.metrics.text()
        for one in calls:
            one.leave()
        await asyncio.gather(*[one.done() for one in calls])
        text = server.hub.metrics.text()
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert f'forerun:{gauge}{{model_name="toy"}} 0.0' in text


@asynchronous
async def test_F073_a_burst_is_answered_or_told_to_come_back() -> None:
    async with FakeServer(settings=with_settings(max_running=2, max_queue=18)) as server:
        server.worker.gate.clear()
        calls = [Call(server.app, PATH, TEXT) for _ in range(200)]
        await until(lambda: sum(one.task.done() for one in calls) == 180)
        assert (await call(server.app, "/health")).status == 200
        server.worker.gate.set()
        replies = [await one.done() for one in calls]
        refused = [reply for reply in replies if reply.status != 200]
        assert (len(refused), {reply.status for reply in refused}) == (180, {429})
        assert all(reply.headers["retry-after"] == "1" for reply in refused)
        assert refused[0].error["type"] == "rate_limit_error"
        assert (await call(server.app, PATH, TEXT)).status == 200


@asynchronous
async def test_more_choices_than_ever_fit_are_no_matter_of_time() -> None:
    async with FakeServer(settings=with_settings(max_running=2, max_queue=2)) as server:
        reply = await call(server.app, PATH, TEXT | {"n": 5})
        assert (reply.status, reply.error["param"]) == (400, "n")
        assert server.worker.jobs == []


@asynchronous
async def test_F074_a_stalled_reader_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "TICK_S", 0.01)
    monkeypatch.setattr(hub_module, "MAX_UNREAD_PARTS", 10**9)
    settings = with_settings(send_timeout_s=0.05)
    async with FakeServer(say_forever(), settings, max_model_len=10**7) as server:
        stalled = Call(server.app, PATH, TEXT | {"stream": True})
        stalled.gate.clear()
        await stalled.aborted.wait()
        await stalled.done()
        assert server.worker.cancelled == [0]
        assert 'forerun:slow_clients_cut_total{model_name="toy"} 1.0' in server.hub.metrics.text()


@asynchronous
async def test_F074_what_is_unread_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_UNREAD_PARTS", 50)
    async with FakeServer(say_forever(), max_model_len=10**7) as server:
        stalled = Call(server.app, PATH, TEXT | {"stream": True})
        stalled.gate.clear()
        await stalled.aborted.wait()
        assert server.worker.cancelled == [0]
        await stalled.done()


@asynchronous
async def test_a_long_answer_that_nobody_streams_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_UNREAD_PARTS", 5)
    async with FakeServer(say("hello world " * 10, 1)) as server:
        assert (await call(server.app, PATH, TEXT)).json()["choices"][0]["text"] == "hello world " * 10


@asynchronous
async def test_a_quiet_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "TICK_S", 0.01)
    async with FakeServer(say("hello"), with_settings(keepalive_s=0.03)) as server:
        server.worker.gate.clear()
        one = Call(server.app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True})
        await one.begun.wait()
        assert one.reply.parts[0] == b": keep-alive\n\n"
        server.worker.gate.set()
        reply = await one.done()
        assert reply.events()[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("is_stream", [False, True])
@asynchronous
async def test_F071_what_runs_is_told_that_the_server_ends(is_stream: bool) -> None:
    async with FakeServer(say_forever(), max_model_len=10**6) as server:
        running = Call(server.app, PATH, TEXT | {"stream": is_stream})
        await until(lambda: len(server.worker.jobs) == 1)
        if is_stream:
            await running.begun.wait()
        server.hub.is_draining = True
        for path in (PATH, "/health", "/tokenize"):
            reply = await call(server.app, path, None if path == "/health" else TEXT)
            assert reply.status == 503
            assert reply.headers["retry-after"]
        assert (await call(server.app, "/metrics")).status == 200
        server.hub.end_all(Problem(503, "the server is shutting down"))
        reply = await running.done()
        assert reply.is_complete
        assert b"shutting down" in reply.body
        assert reply.status == (200 if is_stream else 503)
        assert b"[DONE]" not in reply.body


@asynchronous
async def test_an_engine_that_dies_ends_everything_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "TICK_S", 0.01)
    async with FakeServer(say_forever(), max_model_len=10**6) as server:
        server.worker.gate.clear()
        one = Call(server.app, PATH, TEXT)
        await until(lambda: len(server.worker.jobs) == 1)
        server.worker.stop()
        assert (await one.done()).status == 500
        assert (await call(server.app, "/health")).status == 503
        assert (await call(server.app, PATH, TEXT)).status == 503


@asynchronous
async def test_while_loading_everything_says_so() -> None:
    async with FakeServer() as server:
        server.served.is_ready = False
        for path in (PATH, "/v1/chat/completions", "/tokenize", "/health"):
            reply = await call(server.app, path, None if path == "/health" else TEXT)
            assert (reply.status, reply.error["code"]) == (503, "model_loading")
            assert reply.headers["retry-after"]
        assert (await call(server.app, "/server_info")).json()["status"] == "loading"


@asynchronous
async def test_a_fault_of_ours_is_a_500_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeServer() as server:
        monkeypatch.setattr(server.llm, "encode", lambda text: 1 / 0)
        reply = await call(server.app, PATH, TEXT, x_request_id="here")
        assert reply.status == 500
        assert "here" in reply.error["message"]
        assert "division" not in reply.error["message"]
        monkeypatch.undo()
        assert (await call(server.app, PATH, TEXT)).status == 200


@asynchronous
async def test_a_body_that_stalls() -> None:
    async with FakeServer(settings=with_settings(receive_timeout_s=0.05)) as server:
        one = Call(server.app, PATH, TEXT)
        await one.done()
        slow = Call(server.app, PATH, TEXT)
        message = slow._incoming.get_nowait()
        slow._incoming.put_nowait(message | {"more_body": True})
        assert (await slow.done()).status == 408


@asynchronous
async def test_a_client_that_leaves_before_its_body_is_complete() -> None:
    async with FakeServer() as server:
        one = Call(server.app, PATH, TEXT)
        one._incoming.get_nowait()
        one.leave()
        await one.done()
        assert server.worker.jobs == []
