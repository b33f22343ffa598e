"""`scripts/bench serve`: its arms, their checks, and what it makes of rounds. No peer is needed."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="servers are asked with aiohttp: pip install 'forerun[bench]'")

from benchmarks.measure import Measured
from benchmarks.serve import LLAMA_SPECS, Plan, _numbers, _peer_names, _turn
from benchmarks.serve_arms import Checks, ServerArm, check_arm, forerun_arms, llama_arm, questions, vllm_arms
from benchmarks.serve_report import ServeResult, levels_markdown, levels_rows, long_rows
from benchmarks.vllm_env import wanted_requirements
from benchmarks.wire import WorkerError
from forerun.bench.serve_client import Answer
from forerun.bench.serve_figures import Level, Limits
from tests.helpers.scripted_http import Asked, Reply, events, scripted_server, text_chunk, usage_chunk


def arm(is_speculative: bool = False) -> ServerArm:
    return ServerArm("the server", "GGUF", is_speculative, lambda port, num_clients: [sys.executable])


def check(the_arm: ServerArm, reply: Callable[[Asked], Reply]) -> int:
    async def main() -> int:
        async with scripted_server(reply) as server:
            return await check_arm(the_arm, server.url)

    return asyncio.run(main())


class Running:
    """A server that must be asked nothing while it is paused."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.is_paused = True

    @property
    def address(self) -> str:
        assert not self.is_paused
        return self._address

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False


def whole(num_tokens: int = 64, **more: Any) -> Reply:
    return Reply([events(text_chunk("a"), usage_chunk(num_tokens, **more), "[DONE]")])


def test_a_server_must_draft_if_and_only_if_its_name_says_so() -> None:
    timings = {"timings": {"draft_n": 9, "draft_n_accepted": 4}}
    assert check(arm(), lambda asked: whole(num_prompt_tokens=17)) == 17
    check(arm(is_speculative=True), lambda asked: whole(**timings))
    with pytest.raises(WorkerError, match="drafted 0 tokens"):
        check(arm(is_speculative=True), lambda asked: whole())
    with pytest.raises(WorkerError, match="drafted 9 tokens"):
        check(arm(), lambda asked: whole(**timings))


def test_servers_must_read_the_same_tokens() -> None:
    checks = Checks()
    checks.compare("a", 17)
    checks.compare("b", 17)
    with pytest.raises(WorkerError, match="'c': 18"):
        checks.compare("c", 18)


def test_drafts_are_also_counted_by_metrics() -> None:
    count = {"now": 5.0}

    def reply(asked: Asked) -> Reply:
        if asked.path == "/metrics":
            line = 'vllm:spec_decode_num_draft_tokens_total{model_name="m",engine="0"} '
            return Reply([f"# HELP x\n{line}{count['now']}\nvllm:other_total 7\n".encode()])
        count["now"] += 30
        return whole()

    check(arm(is_speculative=True), reply)
    with pytest.raises(WorkerError, match="drafted 30 tokens"):
        check(arm(), reply)


def test_a_server_that_answers_otherwise_is_not_measured() -> None:
    with pytest.raises(WorkerError, match="was asked for 64 tokens and gave 12 tokens"):
        check(arm(), lambda asked: whole(12))
    with pytest.raises(WorkerError, match="gave status 500"):
        check(arm(), lambda asked: Reply([b"{}"], status=500) if asked.body else Reply([b""]))


def test_commands() -> None:
    llama = llama_arm(Path("/l/llama-server"), Path("/m.gguf"), 2, "off", ("--spec-type", "ngram-mod"), "GGUF")
    assert (llama.name, llama.is_speculative) == ("llama-server, ngram-mod", True)
    names = [llama_arm(Path("/l"), Path("/m"), 2, "on", spec, "GGUF").name for spec in ((), LLAMA_SPECS[1])]
    assert names == ["llama-server, off", "llama-server, ngram-simple n=3 m=5"]
    assert llama.is_per_level
    command = llama.command(99, 4)
    assert command[:3] == ["/l/llama-server", "--model", "/m.gguf"]
    for option, value in (("--parallel", "4"), ("--ctx-size", "16384"), ("--threads", "2"), ("--flash-attn", "off")):
        assert command[command.index(option) + 1] == value
    off, auto = forerun_arms(Path("/m.gguf"), "GGUF", 2, 16)
    assert (off.name, auto.name) == ("forerun, off", "forerun, auto")
    assert [of.command(1, 1)[of.command(1, 1).index("--spec") + 1] for of in (off, auto)] == ["off", "auto"]
    plain, ngram = vllm_arms(Path("/v/bin/python"), Path("/folder"), 2, 16, [0, 1])
    assert plain.command(7, 1)[0] == "/v/bin/python"
    assert "--speculative-config" not in plain.command(7, 1)
    assert json.loads(ngram.command(7, 1)[-1])["method"] == "ngram"
    assert plain.env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"


def test_questions_of_rounds_and_levels_are_different_and_the_same_for_all_servers() -> None:
    asked: list[str] = []

    def reply(request: Asked) -> Reply:
        if request.body and request.body["max_tokens"] == 9:
            asked.append(request.body["messages"][0]["content"])
        return whole(9)

    async def main() -> None:
        async with scripted_server(reply) as server:
            plan = Plan((2,), 9, 2, questions())
            found: list[Level] = []
            process: Any = Running(server.url)
            turn = _turn(arm(), process, plan, 2, 0, found)
            for _ in range(plan.num_rounds):
                [rate] = await asyncio.to_thread(turn.run)
                assert rate == found[-1].tok_per_s
            assert [len(level.answers) for level in found] == [8, 8]
            assert process.is_paused
            await asyncio.to_thread(_turn(arm(), process, plan, 2, 0, []).run)

    asyncio.run(main())
    first, second, again = asked[:8], asked[8:16], asked[16:]
    assert len(set(asked)) == 16
    assert sorted(first) == sorted(again)
    assert not set(first) & set(second)


def test_a_failed_answer_fails_the_run() -> None:
    async def main() -> None:
        async with scripted_server(
            lambda asked: whole(8) if asked.body["max_tokens"] == 8 else Reply([b"{}"], status=503)
        ) as server:
            process: Any = Running(server.url)
            await asyncio.to_thread(_turn(arm(), process, Plan((1,), 9, 1, questions()), 1, 0, []).run)

    with pytest.raises(WorkerError, match="the server failed with 1 clients: status 503"):
        asyncio.run(main())


def level(num_tokens: int, seconds: float) -> Level:
    answer = Answer(0.0, 1.0, [0.1, 0.2, 0.4], num_tokens, 5)
    return Level("1 client", 1, (answer,), seconds, 0.01, Limits())


def test_results_are_medians_and_ratios_round_by_round() -> None:
    first = [level(10, seconds) for seconds in (1.0, 2.0, 4.0)]
    second = [level(10, seconds) for seconds in (0.5, 0.5, 4.0)]
    result = ServeResult(
        "m", ["a", "b"], (1,), 9, {("a", 1): first, ("b", 1): second}, {1: Measured({}, 0.01, 0.02)}, {"cpu": "c"}
    )
    assert result.summary("a", 1, "tok_per_s").median == 5.0
    assert result.summary("b", 1, "tok_per_s").median == 20.0
    assert result.ratio("b", 1).median == 2.0  # of 2, 4 and 1; the ratio of the medians would be 4
    row = levels_rows(result)[1]
    assert row[:3] == ("", "b", "20.0")
    assert row[4:6] == ("2.00", "100.0")
    document = json.loads(json.dumps(result.to_json()))
    assert document["levels"][0]["arms"]["b"]["tok_per_s_of_the_first"]["median"] == 2.0
    assert len(document["levels"][0]["arms"]["b"]["rounds"]) == 3
    assert "used at most 1.0% of a processor" in levels_markdown(result)


def test_rows_of_a_long_prompt() -> None:
    gap = {"p50": 1.0, "p95": 2.0, "p99": 3.0}
    of = {"quiet_gap_ms": gap, "busy_gap_ms": gap, "busy_gap_max_ms": 9.0, "long_ttft_ms": [5.0, 7.0, 30.0]}
    assert long_rows({"x": of}) == [("x", "1.0", "2.0", "1.0", "2.0", "9", "7")]


def test_what_a_wheel_asks_for(tmp_path: Path) -> None:
    lines = [
        "regex",
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        "torchvision",
        "x[y]>=1",
        'pandas; extra == "z"',
    ]
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as wheel:
        text = "Metadata-Version: 2.1\nName: w\n" + "".join(f"Requires-Dist: {line}\n" for line in lines)
        wheel.writestr("w-1.dist-info/METADATA", text)
    assert wanted_requirements(tmp_path / "w.whl") == ["regex", "x[y]>=1"]


def test_options() -> None:
    assert _peer_names("none") == ()
    assert _peer_names("vllm,llama") == ("vllm", "llama")
    assert _numbers("1,16") == (1, 16)
    for bad in ("x", "llama,x"):
        with pytest.raises(argparse.ArgumentTypeError):
            _peer_names(bad)
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        _numbers("0")
