"""`bench serve`: what it sends and when, what it makes of answers, and its arithmetic."""

from __future__ import annotations

import asyncio
import doctest
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from typer.testing import CliRunner

from forerun.bench.prompts import Prompt
from forerun.bench.resample import interval
from forerun.cli.main import app
from forerun.errors import ConfigError
from tests.helpers.scripted_http import (
    Asked,
    Reply,
    ScriptedServer,
    events,
    scripted_server,
    text_chunk,
    usage_chunk,
)

pytest.importorskip("aiohttp", reason="the load generator needs aiohttp: pip install 'forerun[bench]'")

from forerun.bench import serve_client, serve_figures
from forerun.bench.serve_client import Answer, Client, EventSplitter, Target
from forerun.bench.serve_figures import Level, Limits, Spread
from forerun.bench.serve_load import (
    Style,
    Workload,
    accepts_ignore_eos,
    poisson_arrivals,
    replay_asks,
    run_closed,
    run_open,
    warm_up,
)
from forerun.bench.serve_long_prompt import long_prompt_json, long_prompt_trials
from forerun.bench.serve_overhead import Overhead
from forerun.bench.serve_process import ServerProcess
from forerun.bench.serve_report import COLUMNS, draw, rows

STYLE = Style("tiny", max_tokens=16)
WORK = Workload([Prompt(str(i), "a", f"question {i}") for i in range(3)])

Use = Callable[[Client, ScriptedServer], Awaitable[Any]]


def against(reply: Callable[[Asked], Reply], use: Use, timeout_s: float = 5.0) -> Any:
    """What `use` returns, given a client of a server that replies so."""

    async def main() -> Any:
        async with (
            scripted_server(reply) as server,
            Client(Target(server.url, timeout_s=timeout_s)) as client,
        ):
            return await use(client, server)

    return asyncio.run(main())


def answer_to(reply: Reply, style: Style = STYLE, timeout_s: float = 5.0) -> Answer:
    async def use(client: Client, server: ScriptedServer) -> Answer:
        return await client.answer(style.chat("hello"))

    answer = against(lambda asked: reply, use, timeout_s)
    assert isinstance(answer, Answer)
    return answer


WHOLE = events(
    text_chunk(""), text_chunk("one"), text_chunk("two three"), text_chunk(None, "stop"), usage_chunk(3), "[DONE]"
)


def test_a_streamed_answer_is_counted_by_its_usage() -> None:
    answer = answer_to(Reply([WHOLE]))
    assert answer.is_ok
    assert (len(answer.chunk_s), answer.num_tokens, answer.num_prompt_tokens) == (2, 3, 5)
    assert answer.sent_s <= answer.chunk_s[0] <= answer.end_s


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_events_may_be_cut_anywhere(size: int, line_end: bytes) -> None:
    stream = (b": comment\n\n" + WHOLE + b"id: 7\ndata: x\n\n").replace(b"\n", line_end)
    splitter = EventSplitter()
    found = [event for i in range(0, len(stream), size) for event in splitter.feed(stream[i : i + size])]
    found += splitter.feed(b"data: end\n\n")  # a carriage return at the very end may have been half a line end
    assert found[:-2] == WHOLE.rstrip(b"\n").split(b"\n\n")
    assert found[-2:] == [b"id: 7\ndata: x", b"data: end"]


def test_chunks_have_times_of_their_own_however_they_are_cut() -> None:
    first, second = events(text_chunk("a")), events(text_chunk("b"))
    rest = events(usage_chunk(2), "[DONE]")
    answer = answer_to(Reply([first[:9], 0.05, first[9:] + second[:4], 0.1, second[4:], 0.05, rest]))
    assert answer.ttft_s is not None
    assert answer.ttft_s >= 0.05
    [gap] = answer.gaps_s
    assert gap >= 0.1
    assert answer.token_s == pytest.approx(gap)


def test_text_that_looks_like_a_field_is_text() -> None:
    chunk = text_chunk('{"usage": {"completion_tokens": 99}, "content": "x"} data: [DONE]\n\nerror: no')
    answer = answer_to(Reply([events(chunk, usage_chunk(7), "[DONE]")]))
    assert (answer.error, answer.num_tokens, len(answer.chunk_s)) == (None, 7, 1)


def test_completions_and_thoughts_are_text_too() -> None:
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    other = {"choices": [{"text": "x"}]}
    answer = answer_to(Reply([events(thought, other, {"choices": [{"text": ""}]}, usage_chunk(2), "[DONE]")]))
    assert len(answer.chunk_s) == 2


def test_draft_counts_of_both_dialects() -> None:
    spec = {"num_draft_tokens": 40, "num_accepted_draft_tokens": 22}
    timings = {"draft_n": 9, "draft_n_accepted": 4}
    for more, counts in (
        ({"metrics": {"speculative_decoding": spec}}, (40, 22)),
        ({"timings": timings}, (9, 4)),
        ({"metrics": None}, (0, 0)),
    ):
        answer = answer_to(Reply([events(text_chunk("x"), usage_chunk(3, **more), "[DONE]")]))
        assert (answer.num_drafted, answer.num_accepted) == counts
    # In a choice, and before the usage.
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "metrics": {"speculative_decoding": spec}}]}
    answer = answer_to(Reply([events(text_chunk("x"), last, usage_chunk(3), "[DONE]")]))
    assert (answer.num_drafted, answer.num_accepted, answer.num_tokens) == (40, 22, 3)


def test_an_answer_that_is_not_streamed() -> None:
    body = {"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 4, "completion_tokens": 8}}
    style = Style("tiny", max_tokens=8, is_stream=False)
    answer = answer_to(Reply([json.dumps(body).encode()]), style)
    assert (answer.is_ok, answer.num_tokens, answer.num_prompt_tokens) == (True, 8, 4)
    assert (answer.ttft_s, answer.token_s, answer.gaps_s) == (None, None, [])


REFUSAL = json.dumps({"error": {"message": "queue full", "type": "x"}}).encode()


@pytest.mark.parametrize(
    ("reply", "error", "detail"),
    [
        (Reply([REFUSAL], status=503), "status 503", "queue full"),
        (Reply([b"<html>"], status=502), "status 502", "<html>"),
        (Reply([events(text_chunk("a"), {"error": {"message": "bad"}})]), "error in the stream", "bad"),
        (Reply([events(text_chunk("a"), usage_chunk(1))]), "stream cut", "[DONE]"),
        (Reply([events(text_chunk("a"))], is_cut=True), "connection lost", ""),
        (Reply([events(text_chunk("a"), "[DONE]")]), "no usage", "how many tokens"),
        (Reply([events(text_chunk("a")), 9.0]), "timeout", ""),
    ],
)
def test_failures_have_kinds(reply: Reply, error: str, detail: str) -> None:
    answer = answer_to(reply, timeout_s=0.3 if error == "timeout" else 5.0)
    assert (answer.is_ok, answer.error) == (False, error)
    assert detail in answer.detail


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

        async def unreachable(model: str | None) -> Answer:
            async with Client(Target(url, model)) as client:
                return await client.answer(STYLE.chat("x"))

        with pytest.raises(ConfigError, match="no server answers at http"):
            asyncio.run(unreachable(None))
        assert asyncio.run(unreachable("tiny")).error == "no connection"


def test_what_is_sent() -> None:
    async def use(client: Client, server: ScriptedServer) -> list[Any]:
        style = Style(client.model, 9, True, True, 0.5, 3, {"top_p": 0.9})
        await client.answer(style.chat("hi"))
        await client.answer(Style(client.model, 9, is_stream=False).completion([1, 2]))
        return server.asked[1:]

    chat, completion = against(lambda asked: Reply([WHOLE]), use)
    assert chat.path == "/v1/chat/completions"
    assert chat.body == {
        "model": "tiny", "max_tokens": 9, "temperature": 0.5, "seed": 3, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "messages": [{"role": "user", "content": "hi"}], "top_p": 0.9,
    }  # fmt: skip
    assert completion.path == "/v1/completions"
    assert completion.body == {"model": "tiny", "max_tokens": 9, "temperature": 0.0, "prompt": [1, 2]}


def test_the_key_goes_along_and_no_connection_is_used_twice() -> None:
    async def main() -> dict[str, str]:
        async with scripted_server(lambda asked: Reply([WHOLE])) as server:
            async with Client(Target(server.url, api_key="secret")) as client:
                await client.answer(STYLE.chat("x"))
            return server.asked[-1].headers

    headers = asyncio.run(main())
    assert (headers["authorization"], headers["connection"]) == ("Bearer secret", "close")


def test_clients_wait_for_their_answers() -> None:
    async def use(client: Client, server: ScriptedServer) -> tuple[Level, int]:
        level = await run_closed(client, WORK.asks(STYLE, 9), 3, Limits())
        return level, server.max_open

    level, max_open = against(lambda asked: Reply([WHOLE[:40], 0.02, WHOLE[40:]]), use)
    assert max_open == 3
    assert (len(level.whole), level.num_tokens, level.label) == (9, 27, "3 clients")
    assert level.tok_per_s == pytest.approx(27 / level.seconds)


def test_arrivals_do_not_wait() -> None:
    async def use(client: Client, server: ScriptedServer) -> tuple[Level, list[float]]:
        asks = poisson_arrivals(WORK.asks(STYLE, 8), 100.0, seed=1)
        level = await run_open(client, asks, "100/s", 100.0, Limits())
        planned = [ask.arrival_s for ask in asks]
        came = [asked.at_s for asked in server.asked[1:]]
        assert server.max_open == 8  # none of them was answered before the last one came
        return level, [at - came[0] - plan for at, plan in zip(came, planned, strict=True)]

    level, late_s = against(lambda asked: Reply([0.5, WHOLE]), use)
    assert len(level.whole) == 8
    assert all(-0.05 < late < 0.2 for late in late_s)


def test_poisson_arrivals_are_seeded_and_have_their_rate() -> None:
    asks = WORK.asks(STYLE, 4000)
    first, again, other = (poisson_arrivals(asks, 20.0, seed) for seed in (1, 1, 2))
    times = np.array([ask.arrival_s for ask in first])
    assert times[0] == 0.0
    assert first == again
    assert first != other
    gaps = np.diff(times)
    assert gaps.min() > 0
    # 4000 exponential gaps: their mean is off by 1.6 %, one standard deviation; regular arrivals would not vary at all.
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.08)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.12)


def test_replayed_requests(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(
        '{"arrival_s": 12.5, "prompt": "b", "max_tokens": 3}\n\n'
        '{"arrival_s": 10, "messages": [{"role": "user", "content": "a"}]}\n'
    )
    asks = replay_asks(STYLE, path)
    assert [ask.arrival_s for ask in asks] == [0.0, 2.5]
    bodies = [json.loads(ask.payload) for ask in asks]
    assert [body["messages"][0]["content"] for body in bodies] == ["a", "b"]
    assert [body["max_tokens"] for body in bodies] == [16, 3]
    for line in ("{}", '{"arrival_s": "x", "prompt": "a"}', '{"arrival_s": 1}', "[]"):
        path.write_text(line)
        with pytest.raises(ConfigError, match=r"r.jsonl, line 1 must be an object"):
            replay_asks(STYLE, path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no requests"):
        replay_asks(STYLE, path)
    with pytest.raises(ConfigError, match="can't be read"):
        replay_asks(STYLE, tmp_path / "none")


def test_questions_follow_one_another_and_random_prompts_repeat_nothing() -> None:
    texts = [json.loads(ask.payload)["messages"][0]["content"] for ask in WORK.asks(STYLE, 3, first=2)]
    assert texts == ["question 2", "question 0", "question 1"]
    random = Workload(num_random_tokens=50)
    prompts = [json.loads(ask.payload)["prompt"] for ask in random.asks(STYLE, 3)]
    assert [len(prompt) for prompt in prompts] == [50] * 3
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert prompts[1:] == [json.loads(ask.payload)["prompt"] for ask in random.asks(STYLE, 2, first=1)]


def answer(
    ttft: float = 0.1, gaps: tuple[float, ...] = (0.01, 0.03), num_tokens: int = 5, error: str | None = None
) -> Answer:
    chunks = list(np.cumsum([100.0 + ttft, *gaps]))
    return Answer(100.0, chunks[-1] + 0.5, chunks, num_tokens, 7, 4, 2, error, "why" if error else "")


def test_percentiles_are_interpolated() -> None:
    spread = Spread.of([float(value) for value in range(1, 101)])
    assert spread is not None
    assert (spread.p50, spread.p95, spread.p99, spread.mean) == pytest.approx((50.5, 95.05, 99.01, 50.5))
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0, 2.0)
    assert Spread.of([]) is None


def test_figures_of_a_level() -> None:
    answers = (
        answer(),
        answer(ttft=0.3, gaps=(0.1,), num_tokens=3),
        answer(error="status 503"),
        answer(error="timeout"),
    )
    answers += (answer(error="status 503"),)
    level = Level("2 clients", 2, answers, 4.0, 0.05, Limits(0.2, 0.02))
    data = level.to_json()
    assert (data["num_requests"], data["num_whole"], data["num_good"]) == (5, 2, 1)
    assert data["errors"] == {"status 503": 2, "timeout": 1}
    assert list(data["errors"]) == ["status 503", "timeout"]
    assert data["first_error"] == "why"
    assert (data["num_tokens"], data["tok_per_s"], data["requests_per_s"], data["goodput_per_s"]) == (8, 2.0, 0.5, 0.25)
    assert data["ttft_ms"]["p50"] == 200.0
    assert data["gap_ms"]["p50"] == pytest.approx(30.0)  # of 10, 30 and 100
    assert data["token_ms"]["mean"] == pytest.approx((10.0 + 50.0) / 2)  # 40 ms over four tokens, 100 ms over two
    assert data["tokens_per_chunk"] == 1.6
    assert (data["num_drafted"], data["num_accepted"]) == (8, 4)
    json.dumps(data)


def test_limits() -> None:
    assert Limits().allow(answer())
    assert not Limits().allow(answer(error="timeout"))
    assert Limits(ttft_s=0.1001).allow(answer())
    assert not Limits(ttft_s=0.0999).allow(answer())
    assert Limits(token_s=0.0101).allow(answer())
    assert not Limits(token_s=0.0099).allow(answer())
    assert Limits(token_s=0.001).allow(answer(gaps=(), num_tokens=1))
    assert not Limits(ttft_s=1.0).allow(Answer(num_tokens=3))  # nothing streamed, nothing known


def test_intervals_by_resampling() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0])
    found = interval(4, lambda chosen: values[chosen].mean(axis=-1))
    assert found.value == 2.5
    assert 1.0 < found.low < 2.0
    assert 3.0 < found.high < 4.0
    same = interval(3, lambda chosen: np.full(chosen.shape[:-1], 7.0))
    assert (same.value, same.low, same.high) == (7.0, 7.0, 7.0)


def test_overhead_is_a_ratio_of_sums() -> None:
    overhead = Overhead(
        {"stream": [2.0, 4.0], "whole": [1.0, 1.0]}, {"stream": [1.0, 3.0], "whole": [1.0, 1.0]}, 12, ["b"]
    )
    data = overhead.to_json()
    assert data["stream"]["http_over_engine"]["value"] == 1.5
    assert data["stream"]["http_over_engine"]["low"] <= 1.5 <= data["stream"]["http_over_engine"]["high"]
    assert data["whole"]["http_over_engine"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert (data["stream"]["http_tok_per_s"], data["stream"]["engine_tok_per_s"]) == (2.0, 3.0)
    assert data["different"] == ["b"]


def test_warm_up_says_when_a_server_does_not_work() -> None:
    async def use(client: Client, server: ScriptedServer) -> list[Any]:
        await warm_up(client, STYLE, WORK, 2)
        return server.bodies

    assert [body["max_tokens"] for body in against(lambda asked: Reply([WHOLE]), use)] == [8, 8]
    with pytest.raises(ConfigError, match="did not answer: status 503 queue full"):
        against(lambda asked: Reply([REFUSAL], status=503), use)


def test_ignore_eos_is_asked_for_only_where_it_is_known() -> None:
    async def use(client: Client, server: ScriptedServer) -> bool:
        return await accepts_ignore_eos(client, STYLE, WORK)

    assert against(lambda asked: Reply([WHOLE]), use) is True
    assert against(lambda asked: Reply([REFUSAL], 400 if "ignore_eos" in asked.body else 200), use) is False


def long_prompt_reply(asked: Asked) -> Reply:
    """Streams of 10 ms a chunk that pause for 200 ms when the long prompt is there, which takes as long."""
    if asked.path == "/v1/completions":
        state["is_busy"] = True
        return Reply([0.2, events({"choices": [{"text": "x"}]}, usage_chunk(1, 3000), "[DONE]")])

    class Pieces(list[Any]):
        def __iter__(self) -> Any:
            for _ in range(400):
                yield 0.2 if state.pop("is_busy", False) else 0.01
                yield events(text_chunk("a"))

    return Reply(Pieces())


state: dict[str, bool] = {}


def test_gaps_before_and_while_a_long_prompt_is_read() -> None:
    async def use(client: Client, server: ScriptedServer) -> dict[str, Any]:
        trials = await long_prompt_trials(client, STYLE, WORK, 3000, 1, num_streams=1, quiet_s=0.3)
        assert len(server.bodies[-1]["prompt"]) == 3000
        assert server.bodies[-1]["max_tokens"] == 1
        return long_prompt_json(trials)

    data = against(long_prompt_reply, use)
    assert data["num_prompt_tokens"] == 3000
    assert data["quiet_gap_ms"]["p95"] < 100
    assert data["busy_gap_max_ms"] >= 200
    assert data["long_ttft_ms"][0] >= 200


def test_streams_that_end_too_early_are_an_error() -> None:
    async def use(client: Client, server: ScriptedServer) -> Any:
        return await long_prompt_trials(client, STYLE, WORK, 30, 1)

    with pytest.raises(ConfigError, match="its answer was complete"):
        against(lambda asked: Reply([WHOLE]), use)


def test_table_and_picture(tmp_path: Path) -> None:
    levels = [
        Level("1 client", 1, (answer(),), 2.0, 0.01, Limits()),
        Level("2 clients", 2, (answer(error="timeout"),), 2.0, 0.01, Limits()),
    ]
    first, second = rows(levels)
    assert len(first) == len(second) == len(COLUMNS)
    assert first[:3] == ("1 client", "1/1", "2.5")
    assert second[-1] == "1 timeout"
    pytest.importorskip("matplotlib")
    draw({"a": levels, "b": levels[:1]}, "clients", "title", tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--url", "http://x"], "nothing is served here"),
        (["--url", "http://x", "--spec", "off"], "nothing is served here"),
        (["--url", "http://x", "--threads", "2"], "nothing is served here"),
        (["--url", "http://x", "--overhead"], "leave out --url"),
        (["--random", "5", "--prompts", "f"], "exclude each other"),
        (["--replay", "f", "--rate", "1"], "excludes --rate"),
        (["--no-stream", "--slo-ttft-ms", "5"], "leave out --no-stream"),
        (["--overhead", "--long-prompt", "5"], "give one of them"),
    ],
)
def test_options_that_exclude_each_other(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_the_command_against_a_server(tmp_path: Path) -> None:
    """From the command line to its last line, with the server in a loop of its own."""
    pytest.importorskip("matplotlib")
    loop = asyncio.new_event_loop()
    ready, stopped = threading.Event(), asyncio.Event()
    found: dict[str, ScriptedServer] = {}

    async def run() -> None:
        async with scripted_server(lambda asked: Reply([WHOLE])) as server:
            found["server"] = server
            ready.set()
            await stopped.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    ready.wait(5)
    try:
        arguments = ["bench", "serve", "--url", found["server"].url, "--clients", "1,2", "--requests", "4"]
        result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path), "--slo-ttft-ms", "5000"])
        bad = CliRunner().invoke(app, [*arguments[:4], "--clients", "0"])
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        loop.close()
    assert result.exit_code == 0, result.output
    data = json.loads(result.output.splitlines()[-1])
    assert [level["label"] for level in data["levels"]] == ["1 client", "2 clients"]
    assert [level["num_good"] for level in data["levels"]] == [4, 4]
    assert data["provenance"]["cpu"]
    assert "model_bytes" not in data["provenance"]
    assert (data["model"], data["ignore_eos"], data["prompts"]) == ("tiny", True, "Spec-Bench")
    assert {path.name for path in tmp_path.iterdir()} == {"serve-tiny.json", "serve-tiny.png"}
    assert "--clients is '0'" in str(bad.exception)


SERVER = """
import http.server, subprocess, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
code = "sum(range(8_000_000)); print(7 * 6, flush=True); import time; time.sleep(99)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print(f"pid {child.pid} listening on http://127.0.0.1:{server.server_port} now", flush=True)
server.serve_forever()
"""


def test_a_server_process_is_waited_for_and_ends_with_all_it_started() -> None:
    with ServerProcess("the server", [sys.executable, "-c", SERVER]) as server:
        assert server.wait_until_ready(20.0).startswith("http://127.0.0.1:")
        assert server.cpu_seconds() >= 0.05  # its child's
        server.pause()
        with pytest.raises(OSError, match="timed out"):
            urlopen(f"{server.address}/health", timeout=0.3)
        server.resume()
        assert urlopen(f"{server.address}/health", timeout=5).status == 200
        server.pause()  # ends all the same
        child = int(re.findall(r"pid (\d+)", "".join(server._last_lines))[0])
        os.kill(child, 0)
    deadline_s = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]


def test_a_server_that_does_not_start_is_told_with_its_last_line() -> None:
    code = "print('loading'); print('no such model'); raise SystemExit(3)"
    with (
        ServerProcess("the server", [sys.executable, "-c", code]) as server,
        pytest.raises(ConfigError, match="the server ended with status 3: no such model"),
    ):
        server.wait_until_ready(20.0)


def test_examples_are_true() -> None:
    assert doctest.testmod(serve_client) == doctest.TestResults(failed=0, attempted=2)
    assert doctest.testmod(serve_figures) == doctest.TestResults(failed=0, attempted=1)
