"""Metrics and logs: what is counted, and that it adds up."""

from __future__ import annotations

import json
import logging
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forerun.models.structured import Structured
from forerun.serve.logs import _JsonFormatter, _TextFormatter, drafting_line, throughput_line
from forerun.serve.metrics import Metrics
from forerun.serve.warmup import warm_up
from tests.helpers.asgi import call
from tests.helpers.asynchronous import asynchronous
from tests.helpers.fake_worker import FakeServer, say, say_forever, with_settings
from tests.helpers.toy_vocab import TOY

PATH = "/v1/completions"
NAMES = (
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "iteration_tokens_total_sum",
    "time_to_first_token_seconds_sum",
    "inter_token_latency_seconds_sum",
    "request_time_per_output_token_seconds_sum",
    "e2e_request_latency_seconds_sum",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_inference_time_seconds_sum",
    "request_params_n_sum",
    "request_params_max_tokens_sum",
    "spec_decode_stop_loss_total",
    "spec_decode_active",
)


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    """The sum of a name's series that have these labels."""
    wanted = set(labels.items())
    return sum(v for (n, have), v in samples(text).items() if n == name and wanted <= have)


@asynchronous
async def test_counts_are_of_what_clients_got() -> None:
    num_tokens = len(TOY.encode("abcdefghij")) + 1
    async with FakeServer(say("abcdefghij", 4)) as server:
        for body in ({}, {"stream": True}, {"n": 2}, {"echo": True, "logprobs": 0, "max_tokens": 0}):
            assert (await call(server.app, PATH, {"prompt": "hi", **body})).status == 200
        assert (await call(server.app, PATH, {"prompt": "hi", "seed": -1})).status == 400
        text = (await call(server.app, "/metrics")).body.decode()
    assert value(text, "forerun:generation_tokens_total") == 4 * num_tokens
    assert value(text, "forerun:prompt_tokens_total") == 5 * len(TOY.encode("hi"))
    assert value(text, "forerun:request_success_total", finished_reason="stop") == 4
    assert value(text, "forerun:request_success_total", finished_reason="length") == 1
    assert value(text, "forerun:time_to_first_token_seconds_count") == 5
    assert value(text, "forerun:inter_token_latency_seconds_count") == 4 * (num_tokens - 1)
    assert value(text, "forerun:request_params_n_sum") == 5
    accepted = value(text, "forerun:spec_decode_num_accepted_tokens_total")
    assert accepted == value(text, "forerun:spec_decode_num_accepted_tokens_per_pos_total")
    assert accepted <= value(text, "forerun:spec_decode_num_draft_tokens_total")
    first = value(text, "forerun:spec_decode_num_accepted_tokens_per_pos_total", position="0")
    assert first == value(text, "forerun:spec_decode_num_drafts_total")


@asynchronous
async def test_what_was_accepted_and_then_cut_is_not_counted() -> None:
    async with FakeServer(say("abcdefghijklmnop", 4)) as server:
        reply = (await call(server.app, PATH, {"prompt": "hi", "max_tokens": 6})).json()
        text = server.hub.metrics.text()
    num_accepted = reply["timings"]["draft_n_accepted"]
    assert num_accepted == 2
    assert value(text, "forerun:spec_decode_num_accepted_tokens_total") == num_accepted
    assert value(text, "forerun:spec_decode_num_accepted_tokens_per_pos_total") == num_accepted


def test_all_names_are_there_before_the_first_request() -> None:
    text = Metrics("toy", ("suffix", "prediction")).text()
    names = {name for name, _ in samples(text)}
    assert {f"forerun:{name}" for name in NAMES} <= names
    assert not any(name.endswith("_created") for name in names)


def test_an_alias_repeats_every_series() -> None:
    text = Metrics('odd "name"', ("suffix",), "vllm").text()
    ours = {(n, labels) for n, labels in samples(text) if n.startswith("forerun:")}
    theirs = {(n, labels) for n, labels in samples(text) if n.startswith("vllm:")}
    assert theirs == {("vllm:" + n.removeprefix("forerun:"), labels | {("engine", "0")}) for n, labels in ours}
    assert all(("model_name", 'odd "name"') in labels for _, labels in ours)


@asynchronous
async def test_metrics_have_their_content_type() -> None:
    async with FakeServer(settings=with_settings(metrics_alias="vllm")) as server:
        reply = await call(server.app, "/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b"vllm:num_requests_running" in reply.body


@asynchronous
async def test_lines_that_people_grep_for() -> None:
    async with FakeServer() as server:
        change = {
            "num_drafts": 10.0,
            "num_draft_tokens": 40.0,
            "num_accepted_tokens": 22.0,
            "prompt_tokens": 50.0,
            "generation_tokens": 33.0,
        }
        line = drafting_line(change, [9.0, 7.0, 6.0], 10.0)
        assert line == (
            "SpecDecoding metrics: Mean acceptance length: 3.20, Accepted throughput: 2.20 tokens/s, "
            "Drafted throughput: 4.00 tokens/s, Accepted: 22 tokens, Drafted: 40 tokens, "
            "Per-position acceptance rate: 0.900, 0.700, 0.600, Avg Draft acceptance rate: 55.0%"
        )
        assert "Generation throughput: 3.3 tokens/s" in throughput_line(change, 10.0, server.hub)


@asynchronous
async def test_a_request_is_one_line_with_its_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forerun.serve")
    async with FakeServer(say("abcdefghij", 4)) as server:
        await call(server.app, PATH, {"prompt": "secret"}, x_request_id="mine")
    (record,) = caplog.records
    line = _TextFormatter(has_colour=False).format(record)
    assert "[mine]" in line
    assert re.search(r"draft acceptance = 1\.00000 \( +\d+ accepted / +\d+ generated\), mean len = \d\.\d\d", line)
    entry = json.loads(_JsonFormatter().format(record))
    assert entry["request_id"] == "mine"
    assert entry["completion_tokens"] == len(TOY.encode("abcdefghij")) + 1
    assert "secret" not in line + json.dumps(entry)
    assert "abcdefghij" not in line + json.dumps(entry)


@asynchronous
async def test_a_refusal_is_one_line_without_the_prompt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forerun.serve")
    async with FakeServer() as server:
        await call(server.app, PATH, {"prompt": {"my": "secret"}}, x_request_id="mine")
        await call(server.app, PATH, {"prompt": ["a", "secret", 5]})
    assert caplog.records[0].getMessage() == "POST /v1/completions 400 invalid_value at prompt"
    assert caplog.records[0].request_id == "mine"  # type: ignore[attr-defined]
    assert "secret" not in caplog.text


def test_a_log_line_is_one_line() -> None:
    record = logging.LogRecord("x", logging.WARNING, "", 0, "a\nb \ud83d \x1b[2J", (), None)
    text, entry = _TextFormatter(has_colour=False).format(record), _JsonFormatter().format(record)
    assert "\n" not in text
    assert "\x1b" not in text
    assert json.loads(entry)["message"] == "a\nb \ud83d \x1b[2J"
    (text + entry).encode()


@asynchronous
async def test_F062_the_server_asks_itself_first_and_counts_none_of_it() -> None:
    async with FakeServer(say_forever("ab")) as server:
        await warm_up(server.served, server.llm)
        asked = [job.request for job in server.worker.jobs]
        assert [request.params.is_greedy for request in asked] == [True, False]
        assert server.llm.knows_grammar(Structured.json_object())
        page = (await call(server.app, "/metrics")).body.decode()
        assert 'generation_tokens_total{model_name="toy"} 0.0' in page
