"""What the server refuses, and in which words; every case must leave it able to answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forerun.serve.bodies import parse, parse_json
from forerun.serve.problems import Problem
from forerun.serve.schema import ChatRequest, CompletionRequest
from tests.helpers.asgi import Reply, call
from tests.helpers.asynchronous import asynchronous
from tests.helpers.fake_worker import FakeServer, with_settings
from tests.helpers.toy_vocab import TOY

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}


async def refused(body: Any, path: str = "/v1/completions", status: int = 400, **headers: str) -> dict[str, Any]:
    """The error of a request that must be refused, after which a plain one is answered."""
    async with FakeServer() as server:
        reply = await call(server.app, path, body, **headers)
        assert reply.status == status, reply.body
        error = reply.error
        after = await call(server.app, "/v1/completions", TEXT)
        assert after.json()["choices"][0]["text"] == "hello world"
    return error


async def accepted(body: Any, path: str = "/v1/completions", **settings: Any) -> Reply:
    async with FakeServer(settings=with_settings(**settings)) as server:
        reply = await call(server.app, path, body)
    assert reply.status == 200, reply.body
    return reply


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperatur": 1}, "temperatur", "did you mean 'temperature'"),
        ({"temperature": "hot"}, "temperature", "temperature is 'hot', but must be a number"),
        ({"temperature": -1}, "temperature", "between 0"),
        ({"stream": "false"}, "stream", "must be true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "without stream"),
        ({"model": 5}, "model", "must be a string"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 10**6}, "n", "less than or equal to 128"),
        ({"best_of": 3}, "best_of", "must be n, 1"),
        ({"n": 3, "best_of": 2}, "best_of", "must be n, 3"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": 10**6}, "logprobs", "less than or equal to 20"),
        ({"logprobs": True}, "logprobs", "must be a whole number"),
        ({"max_tokens": 0}, "max_tokens", "takes echo"),
        ({"max_tokens": -1}, "max_tokens", "from 0 to"),
        ({"max_tokens": 2**63}, "max_tokens", "from 0 to"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "more than max_tokens"),
        ({"stop": [1]}, "stop", "a string or a list of up to 64 strings"),
        ({"stop": ["a"] * 65}, "stop", "a string or a list of up to 64 strings"),
        ({"stop": ""}, "stop", "must not be empty"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "token id"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output", "must be false"),
        ({"suffix": "x"}, "suffix", "must be left out"),
        ({"store": True}, "store", "not stored"),
        ({"service_tier": "flex"}, "service_tier", "one tier"),
        ({"top_k": 5, "repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repeat_penalty", "contradict"),
        ({"repeat_penalty": 0}, "repeat_penalty", "between"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "leave out stream"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be"),
        ({"request_id": ""}, "request_id", "at least 1 character"),
    ],
)
@asynchronous
async def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    error = await refused(TEXT | fields)
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "bias",
    [
        *({key: 1} for key in ("331", "1000000000", "-1", "abc", "1.5", " 5", "1_0")),
        *({"5": value} for value in (1000, -1000, None, "1")),
        {str(i): 0 for i in range(2000)},
        {"5": 1, "05": 1},
        [1],
    ],
)
@asynchronous
async def test_F033_logit_bias(bias: Any) -> None:
    error = await refused(TEXT | {"logit_bias": bias})
    assert error["param"].startswith("logit_bias")


@pytest.mark.parametrize(
    "prompt", [[-1], [331], [2**63], [2**70], [], [[]], [[1, 2], [331]], [1.5], [True], [1, "a"], [[1], "a"], None, 5]
)
@asynchronous
async def test_F034_token_id_prompts(prompt: Any) -> None:
    error = await refused({"prompt": prompt})
    assert error["param"].startswith("prompt")


@asynchronous
async def test_F034_lists_of_ids_are_one_choice_each() -> None:
    reply = await accepted({"prompt": [TOY.encode("ab"), TOY.encode("cd")], "return_token_ids": True})
    assert [choice["prompt_token_ids"] for choice in reply.json()["choices"]] == [TOY.encode("ab"), TOY.encode("cd")]


@pytest.mark.parametrize("prompt", ["", [""], [], ["ok", ""]])
@asynchronous
async def test_F035_empty_prompts(prompt: Any) -> None:
    assert "must have at least one" in (await refused({"prompt": prompt}))["message"]


@asynchronous
async def test_F035_an_empty_conversation() -> None:
    assert (await refused({"messages": []}, "/v1/chat/completions"))["param"] == "messages"


@pytest.mark.parametrize("seed", [2**64, -1, -(2**63) - 1, 1.5, "7", True, 10**400])
@asynchronous
async def test_F039_seeds_out_of_range(seed: Any) -> None:
    error = await refused(TEXT | {"seed": seed})
    assert error["param"] == "seed" or "digits" in error["message"]


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
@asynchronous
async def test_F039_extremes_in_range_work(seed: int) -> None:
    assert (await accepted(TEXT | {"seed": seed, "max_tokens": 2**40})).json()["seed"] == seed


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b'{"prompt": "a"', 400),
        (b"\xff\xfe", 400),
        (b'{"prompt": "a", "prompt": "b"}', 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b'{"prompt": "a", "temperature": 1e999}', 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", 400),
        (b"[]", 400),
        (b'"text"', 400),
        (b'{"prompt": "' + b"a" * 300_000 + b'"}', 413),
    ],
)
@asynchronous
async def test_F041_broken_bodies(body: bytes, status: int) -> None:
    async with FakeServer(settings=with_settings(max_body_bytes=250_000)) as server:
        reply = await call(server.app, "/v1/completions", body)
        assert reply.status == status
        assert reply.error
        assert (await call(server.app, "/v1/completions", TEXT)).status == 200


@pytest.mark.parametrize(
    "messages", [{}, "hi", [1], [{"role": "user"}], [{"content": "hi"}], [{"role": 1, "content": ""}]]
)
@asynchronous
async def test_F041_wrong_messages(messages: Any) -> None:
    assert (await refused({"messages": messages}, "/v1/chat/completions"))["param"].startswith("messages")


@asynchronous
async def test_F041_methods_types_and_routes() -> None:
    assert (await refused(None, status=405))["code"] == "method_not_allowed"
    assert (await refused({}, "/v1/nothing", status=404))["code"] == "not_found"
    assert (await refused(TEXT, status=415, content_type="text/plain"))["code"] == "unsupported_media_type"
    assert (await refused(TEXT | {"model": "other"}, status=404))["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a\ud83d"}]}, "messages[0].content"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ude00\ud83d"}]}, "messages[0].content"),
        ("/v1/completions", {"prompt": "a", "stop": ["b", "\ud83d"]}, "stop[1]"),
        ("/v1/completions", {"prompt": "a", "model": "\ud83d"}, "model"),
        ("/v1/completions", {"prompt": "a", "\ud83d": 1}, "a key of the body"),
    ],
)
@asynchronous
async def test_F042_lone_surrogates(path: str, body: Any, param: str) -> None:
    error = await refused(json.dumps(body).encode(), path)
    assert error["param"] == param
    assert "surrogate" in error["message"]


def test_F042_whole_pairs_are_text() -> None:
    assert parse(b'{"prompt": "\\ud83d\\ude00"}', CompletionRequest).prompt == "\U0001f600"


@pytest.mark.parametrize("content", ["one two", [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]])
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@asynchronous
async def test_F044_parts_are_the_same_prompt(content: Any, role: str) -> None:
    messages = [{"role": role, "content": content}, {"role": "user", "content": "x"}]
    reply = await accepted({"messages": messages, "return_token_ids": True}, "/v1/chat/completions")
    assert reply.json()["prompt_token_ids"] == TOY.encode(f"{role}: one two\nuser: x\nassistant:")


@pytest.mark.parametrize("message", [{"content": ""}, {"content": None}, {}])
@asynchronous
async def test_F044_an_assistant_may_say_nothing(message: Any) -> None:
    messages = [{"role": "assistant", **message}, {"role": "user", "content": "x"}]
    await accepted({"messages": messages}, "/v1/chat/completions")


@asynchronous
async def test_F044_pictures_are_refused() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:"}}]
    error = await refused({"messages": [{"role": "user", "content": parts}]}, "/v1/chat/completions")
    assert error["param"] == "messages[0].content[0].type"
    assert "'image_url'" in error["message"]


@pytest.mark.parametrize(
    ("fields", "is_right"),
    [
        ({"logprobs": True}, True),
        ({"logprobs": True, "top_logprobs": 0}, True),
        ({"logprobs": True, "top_logprobs": 20}, True),
        ({"logprobs": True, "top_logprobs": 21}, False),
        ({"logprobs": True, "top_logprobs": 16384}, False),
        ({"top_logprobs": 2}, False),
        ({"logprobs": False, "top_logprobs": 2}, False),
        ({"logprobs": 1}, False),
    ],
)
@asynchronous
async def test_F045_limits_of_chat_logprobs(fields: dict[str, Any], is_right: bool) -> None:
    async with FakeServer() as server:
        assert (await call(server.app, "/v1/chat/completions", CHAT | fields)).status == (200 if is_right else 400)


@asynchronous
async def test_F047_too_long_prompts_are_refused_with_both_numbers() -> None:
    for body, path in (
        ({"prompt": [5] * 300}, "/v1/completions"),
        ({"messages": [{"role": "user", "content": "z" * 300}]}, "/v1/chat/completions"),
        ({"prompt": [5] * 300, "stream": True}, "/v1/completions"),
    ):
        error = await refused(body, path)
        assert error["code"] == "context_length_exceeded"
        assert "256" in error["message"]
        assert "has 3" in error["message"]


@asynchronous
async def test_F047_truncation_is_asked_for_and_reported() -> None:
    body = {"prompt": list(range(3, 303)), "truncate_prompt_tokens": 10, "return_token_ids": True}
    reply = (await accepted(body)).json()
    assert reply["choices"][0]["prompt_token_ids"] == list(range(293, 303))
    assert reply["usage"]["prompt_tokens"] == 10
    assert reply["usage"]["prompt_tokens_details"]["truncated_tokens"] == 290


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speculative": {"method": "eagle3"}}, "speculative.method"),
        ({"speculative": {"k": 64}}, "speculative.k"),
        ({"speculative": {"k": -1}}, "speculative.k"),
        ({"speculative": {"k": 3}, "num_draft_tokens": 4}, "num_draft_tokens"),
        ({"draft_model": "other"}, "draft_model"),
        ({"speculative": {"enabled": False, "k": 3}}, "speculative.k"),
        ({"speculative": {"enabled": False, "method": "suffix"}}, "speculative.method"),
        ({"speculative": {"rule": "token"}, "seed": 1}, "seed"),
        ({"speculative": {"rule": "lossy"}}, "speculative.rule"),
        ({"speculative": {"enabled": False}, "prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
        ({"prediction": {"type": "other", "content": "x"}}, "prediction.type"),
        ({"speculative": {"unknown": 1}}, "speculative.unknown"),
    ],
)
@asynchronous
async def test_speculation_that_contradicts_itself(fields: dict[str, Any], param: str) -> None:
    assert (await refused(TEXT | fields))["param"] == param


@pytest.mark.parametrize(
    ("fields", "method", "k"),
    [
        ({}, None, None),
        ({"speculative": {"method": "suffix", "k": 4}}, "suffix", 4),
        ({"speculative": {"method": "auto", "k": "auto"}}, None, None),
        ({"num_draft_tokens": 5, "draft_num_predict": 5}, None, 5),
        ({"draft_model": "suffix-decoding"}, "suffix", None),
    ],
)
@asynchronous
async def test_speculation_per_request(fields: dict[str, Any], method: str | None, k: int | None) -> None:
    async with FakeServer() as server:
        assert (await call(server.app, "/v1/completions", TEXT | fields)).status == 200
        assert (server.worker.jobs[0].method, server.worker.jobs[0].k) == (method, k)


@asynchronous
async def test_another_rule_reports_no_seed() -> None:
    reply = (await accepted(TEXT | {"speculative": {"rule": "token"}, "n": 2})).json()
    assert reply["seed"] is None


@asynchronous
async def test_inert_fields_are_accepted() -> None:
    inert = {"user": "u", "metadata": {"a": 1}, "safety_identifier": "s", "prompt_cache_key": "k"}
    await accepted(TEXT | inert | {"service_tier": "auto", "store": False, "best_of": 1})
    await accepted(CHAT | inert | {"modalities": ["text"], "audio": None, "functions": None}, "/v1/chat/completions")


@asynchronous
async def test_keys() -> None:
    async with FakeServer(settings=with_settings(api_keys=("one", "two"))) as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic one"}):
            reply = await call(server.app, "/v1/completions", TEXT, **headers)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
            assert "x-request-id" in reply.headers
        assert (await call(server.app, "/v1/completions", TEXT, authorization="Bearer two")).status == 200
        assert (await call(server.app, "/health")).status == 200
        assert (await call(server.app, "/v1/models")).status == 401


@asynchronous
async def test_request_ids() -> None:
    async with FakeServer() as server:
        reply = await call(server.app, "/v1/completions", TEXT, x_request_id="mine")
        assert (reply.headers["x-request-id"], reply.json()["id"]) == ("mine", "cmpl-mine")
        reply = await call(server.app, "/v1/completions", TEXT | {"request_id": "body"}, x_request_id="a b")
        assert reply.headers["x-request-id"] != "a b"
        assert reply.json()["id"] == "body"


def test_depth_of_nested_values() -> None:
    assert parse_json(b"[" * 100 + b"]" * 100)
    with pytest.raises(Problem, match="nested"):
        parse_json(b"[" * 101 + b"]" * 101)
    with pytest.raises(Problem, match="nested"):
        parse_json(b'{"a": 1, "b": ' + b"[" * 100 + b"]" * 100 + b"}")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_json_does_not_have(number: str) -> None:
    with pytest.raises(Problem, match=r"no number there|too large"):
        parse_json(b'{"metadata": {"a": %s}}' % number.encode())


def test_null_means_absent() -> None:
    fields = [name for name in ChatRequest.model_fields if name != "messages"]
    body = json.dumps(CHAT | dict.fromkeys(fields)).encode()
    assert parse(body, ChatRequest) == parse(json.dumps(CHAT).encode(), ChatRequest)
