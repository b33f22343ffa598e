"""`/v1/responses`: the events in their order, and the same answer as a chat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forerun.errors import EngineFault
from tests.helpers.asgi import Call, Reply, call
from tests.helpers.asynchronous import asynchronous, until
from tests.helpers.fake_worker import FakeServer, say, say_forever
from tests.helpers.toy_vocab import TOY

PATH = "/v1/responses"
F = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def events(reply: Reply) -> list[dict[str, Any]]:
    blocks = reply.body.decode().split("\n\n")
    assert blocks[-1] == ""
    parsed = []
    for number, block in enumerate(blocks[:-1]):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        parsed.append(event)
    return parsed


@pytest.mark.parametrize("text", ["hello world", "", "é 😀"])
@asynchronous
async def test_a_stream_is_the_whole_answer(text: str) -> None:
    async with FakeServer(say(text, 2)) as server:
        whole = (await call(server.app, PATH, {"input": "hi", "seed": 3})).json()
        stream = events(await call(server.app, PATH, {"input": "hi", "seed": 3, "stream": True}))
    kinds = [event["type"] for event in stream]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) <= {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event["delta"] for event in stream[4:-4]) == text == stream[-4]["text"]
    (item,) = whole["output"]
    assert item["content"] == [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    last = stream[-1]["response"]
    assert last["output"][0]["content"] == item["content"]
    assert last["usage"] == whole["usage"]
    assert (whole["status"], whole["seed"], whole["usage"]["output_tokens"]) == (
        "completed",
        3,
        len(TOY.encode(text)) + 1,
    )


@asynchronous
async def test_the_input_in_all_its_forms() -> None:
    parts = [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]
    earlier = [{"type": "message", "role": "user", "content": "a"}]
    async with FakeServer() as server:
        for body in (
            {"input": "hi", "instructions": "do"},
            {"input": [{"role": "user", "content": parts}], "instructions": "do"},
            {"input": [{"role": "developer", "content": "do"}, {"role": "user", "content": "hi"}]},
        ):
            assert (await call(server.app, PATH, body)).status == 200
        answer = (await call(server.app, PATH, {"input": earlier})).json()["output"]
        again = await call(server.app, PATH, {"input": [*earlier, *answer, {"role": "user", "content": "b"}]})
        assert again.status == 200
        prompts = [job.request.prompt_token_ids for job in server.worker.jobs]
    assert set(prompts[:3]) == {tuple(TOY.encode("system: do\nuser: hi\nassistant:"))}
    assert prompts[-1] == tuple(TOY.encode("user: a\nassistant: hello world\nuser: b\nassistant:"))


@asynchronous
async def test_a_cut_answer_is_incomplete() -> None:
    async with FakeServer(say_forever()) as server:
        whole = (await call(server.app, PATH, {"input": "hi", "max_output_tokens": 3})).json()
        stream = events(await call(server.app, PATH, {"input": "hi", "max_output_tokens": 3, "stream": True}))
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert stream[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": "z" * 300}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "reasoning", "role": "a", "content": ""}]}, "input[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "tools": [F], "tool_choice": "required"}, "text.format"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools"),
        ({"tools": [F | {"strict": "yes"}]}, "tools[0].strict"),
        ({"tools": [F | {"parameters": []}]}, "tools[0].parameters"),
        ({"tools": [F, F]}, "tools"),
        ({"tools": [F], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"include": ["message.output_text.logprobs"], "tools": [F]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"instruction": "x"}, "instruction"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
@asynchronous
async def test_what_is_not_served_is_named(fields: dict[str, Any], param: str) -> None:
    async with FakeServer() as server:
        reply = await call(server.app, PATH, {"input": "hi"} | fields)
    assert reply.status == 400
    assert str(reply.error["param"]).startswith(param)


@asynchronous
async def test_a_fault_in_a_stream_is_an_event() -> None:
    async with FakeServer(say_forever(), max_model_len=10**6) as server:
        one = Call(server.app, PATH, {"input": "hi", "stream": True})
        await until(one.begun.is_set)
        server.worker.gate.clear()
        server.worker._deliver([(0, EngineFault("broken"))])
        reply = await one.done()
    last = events(reply)[-1]
    assert (last["type"], last["code"]) == ("error", "internal_error")
    assert "broken" in last["message"]
