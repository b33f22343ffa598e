"""Structured output and tools over real models, through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pydantic
import pytest

from forerun.models.store import known_model, path_of
from tests.helpers.served import ServedProcess

openai = pytest.importorskip("openai")

DEMO, CODER = "demo", "qwen-coder-0.5b"
pytestmark = pytest.mark.real_model

MESSAGES: Any = [
    {
        "role": "user",
        "content": 'Here are two: {"ok": true, "kind": "small", "sizes": [1, 2]} and {"ok": false, "kind": "large", '
        '"sizes": [3, 4]}. Write another one.',
    }
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": ["small", "large"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    },
    "required": ["ok", "kind", "sizes"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
OFF, AUTO = {"speculative": {"enabled": False}}, {"speculative": {"method": "auto"}}


class Box(pydantic.BaseModel):
    """What the model is asked for."""

    model_config = pydantic.ConfigDict(extra="forbid")
    ok: bool
    kind: str = pydantic.Field(max_length=10)


def served(name: str) -> Iterator[Any]:
    if not path_of(known_model(name)).exists():
        pytest.skip(f"{name} is not in the cache; `forerun pull {name}` fetches it")
    with (
        ServedProcess(name) as process,
        openai.OpenAI(base_url=process.until_ready().url + "/v1", api_key="unused", max_retries=0) as client,
    ):
        client.process = process
        yield client


@pytest.fixture(scope="module")
def demo() -> Iterator[Any]:
    yield from served(DEMO)


@pytest.fixture(scope="module")
def coder() -> Iterator[Any]:
    yield from served(CODER)


def formats(name: str) -> dict[str, Any]:
    schema = {"name": "box", "schema": SCHEMA, "strict": True}
    return {"response_format": {"type": name, **({"json_schema": schema} if name == "json_schema" else {})}}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_F010_json_by_a_schema_is_the_same_without_speculation(demo: Any, temperature: float) -> None:
    body = {"messages": MESSAGES, "max_tokens": 120, "temperature": temperature, "seed": 5, "return_token_ids": True}
    body |= formats("json_schema") | {"logprobs": True, "n": 2}
    drafted, plain = (demo.process.post("/v1/chat/completions", body | how) for how in (AUTO, OFF))
    for one, two in zip(drafted["choices"], plain["choices"], strict=True):
        assert one["finish_reason"] == "stop"
        jsonschema.validate(json.loads(one["message"]["content"]), SCHEMA)
        for key in ("message", "token_ids", "logprobs"):
            assert one[key] == two[key]
    assert sum(choice["timings"]["draft_n_accepted"] for choice in drafted["choices"]) > 0


def test_F010_streams_of_json(demo: Any) -> None:
    fields: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 120, "temperature": 0}
    fields |= formats("json_schema")
    whole = demo.chat.completions.create(**fields).choices[0].message.content
    chunks = demo.chat.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    text = demo.completions.create(
        model="demo",
        prompt="The answer is",
        max_tokens=20,
        extra_body={"structured_outputs": {"choice": ["no", "yes"]}},
    )
    assert text.choices[0].text in ("no", "yes")
    assert text.choices[0].finish_reason == "stop"


def test_F010_a_cut_object_says_length(demo: Any) -> None:
    cut = demo.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=5, **formats("json_object"))
    assert cut.choices[0].finish_reason == "length"


def test_a_parsed_answer(demo: Any) -> None:
    fields: dict[str, Any] = {"model": "demo", "max_tokens": 100, "temperature": 0}
    box = demo.chat.completions.parse(messages=MESSAGES, response_format=Box, **fields).choices[0].message.parsed
    assert isinstance(box, Box)
    response = demo.responses.parse(model="demo", input="A box?", text_format=Box, max_output_tokens=100, temperature=0)
    assert isinstance(response.output_parsed, Box)


def test_F037_a_bad_schema_costs_nothing(demo: Any) -> None:
    plain: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    before = demo.chat.completions.create(**plain).choices[0].message.content
    for schema in ({"$ref": "#"}, {"type": "x"}, {"not": {}}, {"enum": ["x" * 7] * 20_000}):
        form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as failure:
            demo.chat.completions.create(**plain, response_format=form)
        assert failure.value.param == "response_format.json_schema.schema"
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
    for schema in (endless, {"enum": [f"{i:06d}" for i in range(10_000)]}, {"pattern": "^(a{1000}){1000}$"}):
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        choice = demo.chat.completions.create(**plain, response_format=form).choices[0]
        assert choice.finish_reason in ("stop", "length")
    assert demo.chat.completions.create(**plain).choices[0].message.content == before


def test_a_model_without_tools_says_so(demo: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="knows no tools") as failure:
        demo.chat.completions.create(model="demo", messages=WEATHER, tools=[TOOL])
    assert failure.value.param == "tools"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forced_call_is_the_same_without_speculation(coder: Any, temperature: float) -> None:
    body = {"messages": WEATHER, "tools": [TOOL], "max_tokens": 80, "temperature": temperature, "seed": 2}
    body |= {"tool_choice": "required", "parallel_tool_calls": False, "return_token_ids": True}
    replies = [coder.process.post("/v1/chat/completions", body | how) for how in (AUTO, OFF)]
    drafted, plain = (reply["choices"][0] for reply in replies)
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["finish_reason"] == plain["finish_reason"] == "tool_calls"
    (call,) = drafted["message"]["tool_calls"]
    assert drafted["message"]["content"] is None
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), TOOL["function"]["parameters"])
    assert replies[0]["timings"]["draft_n_accepted"] > 0


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_strict_call_that_nobody_forces(coder: Any, temperature: float) -> None:
    """The mark is made likely, since this model seldom writes it of itself; what follows it is left to the model."""
    (mark_id,) = coder.process.post("/tokenize", {"prompt": "<tool_call>"})["tokens"]
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    body = {"messages": WEATHER, "tools": [strict], "max_tokens": 120, "temperature": temperature, "n": 4, "seed": 1}
    body |= {"logit_bias": {mark_id: 40}, "parallel_tool_calls": False, "return_token_ids": True}
    drafted, plain = (coder.process.post("/v1/chat/completions", body | how)["choices"] for how in (AUTO, OFF))
    assert [choice["token_ids"] for choice in drafted] == [choice["token_ids"] for choice in plain]
    for choice in drafted:
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        if choice["finish_reason"] == "tool_calls":
            jsonschema.validate(json.loads(call["function"]["arguments"]), TOOL["function"]["parameters"])
    assert any(choice["finish_reason"] == "tool_calls" for choice in drafted)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_streamed_call_and_its_result(coder: Any, choice: Any) -> None:
    fields: dict[str, Any] = {"model": CODER, "messages": WEATHER, "tools": [TOOL], "tool_choice": choice}
    fields |= {"max_tokens": 80, "temperature": 0, "parallel_tool_calls": False}
    whole = coder.chat.completions.create(**fields).choices[0]
    with coder.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.finish_reason
    assert streamed.message.content == whole.message.content
    calls = [(one.function.name, one.function.arguments) for one in whole.message.tool_calls or []]
    assert [(one.function.name, one.function.arguments) for one in streamed.message.tool_calls or []] == calls
    if choice == "auto":
        return
    assert "tool_calls.function.arguments.delta" in kinds
    assert whole.finish_reason == "tool_calls"
    assert json.loads(calls[0][1])["unit"] in ("C", "F")
    result: Any = {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "18 degrees, sunny"}
    messages = [*WEATHER, whole.message.model_dump(exclude_none=True), result]
    fields |= {"messages": messages, "tool_choice": "none"}
    after = coder.chat.completions.create(**fields)
    assert "18" in after.choices[0].message.content


@pytest.mark.parametrize("is_stream", [False, True])
def test_F043_a_cut_call_says_length(coder: Any, is_stream: bool) -> None:
    fields: dict[str, Any] = {"model": CODER, "messages": WEATHER, "tools": [TOOL], "tool_choice": "required"}
    fields |= {"max_tokens": 15, "temperature": 0}
    if is_stream:
        chunks = list(coder.chat.completions.create(**fields, stream=True))
        assert chunks[-1].choices[0].finish_reason == "length"
    else:
        assert coder.chat.completions.create(**fields).choices[0].finish_reason == "length"


def test_responses_call_and_go_on(coder: Any) -> None:
    flat = {"type": "function", **TOOL["function"], "strict": True}
    fields: dict[str, Any] = {"model": CODER, "tools": [flat], "max_output_tokens": 80, "temperature": 0}
    fields |= {"tool_choice": "required", "parallel_tool_calls": False}
    question = "What is the weather in Paris?"
    whole = coder.responses.create(input=question, **fields)
    (item,) = whole.output
    assert (item.type, item.name) == ("function_call", "get_weather")
    jsonschema.validate(json.loads(item.arguments), TOOL["function"]["parameters"])
    with coder.responses.stream(input=question, **fields) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        last = stream.get_final_response()
    assert deltas == last.output[0].arguments == item.arguments
    result: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "18 degrees, sunny"}
    after = coder.responses.create(
        model=CODER,
        input=[{"role": "user", "content": question}, item.model_dump(exclude_none=True), result],
        max_output_tokens=30,
        temperature=0,
    )
    assert "18" in after.output_text
