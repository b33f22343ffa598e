"""Tools over HTTP: what is offered, what is called, whole and streamed, in both forms of a chat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forerun.models.tools import ToolFormat
from tests.helpers.asgi import Reply, call
from tests.helpers.asynchronous import asynchronous
from tests.helpers.fake_worker import FakeServer, say
from tests.helpers.toy_vocab import TOY

PATH, RESPONSES = "/v1/chat/completions", "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"city": {"type": ["string", "null"], "default": None}}}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "description": "the time"}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "seed": 7, "tools": [WEATHER, NOW]}
ASK: dict[str, Any] = {"input": "hi", "seed": 7, "tools": [{"type": "function", "name": "weather"}]}

ARGUMENTS = '{"city": "Zürich {[\\"x\\"]}"}'
ONE = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TWO = ONE + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
# What the model writes: content, calls, finish reason.
SAID: dict[str, tuple[str, str | None, list[tuple[str, str]], str]] = {
    "text": ("hello <tool world", "hello <tool world", [], "stop"),
    "nothing": ("", "", [], "stop"),
    "one": (ONE, None, [("weather", ARGUMENTS)], "tool_calls"),
    "two": (TWO, None, [("weather", ARGUMENTS), ("now", "{}")], "tool_calls"),
    "text before": ("Let me look.\n" + ONE, "Let me look.", [("weather", ARGUMENTS)], "tool_calls"),
    "text after": (ONE + "\nDone <tool", "\nDone <tool", [("weather", ARGUMENTS)], "tool_calls"),
    "broken": ('<tool_call>\n{"name": "now", "arguments": {"a', None, [("now", '{"a')], "stop"),
    "no call": ("<tool_call> is how one calls", "<tool_call> is how one calls", [], "stop"),
}


async def ask(server: FakeServer, body: dict[str, Any], path: str = PATH) -> Reply:
    reply = await call(server.app, path, body)
    assert reply.status == 200, reply.body
    return reply


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A streamed choice, put together as clients do it."""
    message: dict[str, Any] = {"content": None, "tool_calls": []}
    found: dict[str, Any] = {"message": message, "token_ids": [], "logprobs": []}
    for event in events:
        (choice,) = event["choices"]
        assert "finish_reason" not in found, "nothing follows the finish reason"
        delta = choice["delta"]
        if delta.get("content") and not (message["content"] is None and delta["content"] == ""):
            message["content"] = (message["content"] or "") + delta["content"]
        for part in delta.get("tool_calls", []):
            if "id" in part:
                assert set(part) == {"index", "id", "type", "function"}
                assert part["function"]["arguments"] == ""
                message["tool_calls"].append({key: value for key, value in part.items() if key != "index"})
                assert part["index"] == len(message["tool_calls"]) - 1
            else:
                assert set(part) == {"index", "function"}
                assert set(part["function"]) == {"arguments"}
                message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        found["token_ids"] += choice.get("token_ids", [])
        found["logprobs"] += choice["logprobs"]["content"] if choice["logprobs"] else []
        if choice["finish_reason"] is not None:
            found["finish_reason"] = choice["finish_reason"]
    return found


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    assert all(one["type"] == "function" for one in message.get("tool_calls", []))
    return [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", [])]


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("group", [1, 3, 200])
@pytest.mark.parametrize("is_paced", [True, False])
@asynchronous
async def test_calls_whole_and_streamed(name: str, group: int, is_paced: bool) -> None:
    text, content, calls, reason = SAID[name]
    body = CHAT | {"return_token_ids": True, "logprobs": True, "speculative": {"metrics": "steps"}}
    async with FakeServer(say(text, group), max_model_len=2000, is_paced=is_paced) as server:
        whole = (await ask(server, body)).json()
        events = (await ask(server, body | {"stream": True})).events()
    (choice,) = whole["choices"]
    assert choice["message"]["content"] == content
    assert calls_of(choice["message"]) == calls
    assert ("tool_calls" in choice["message"]) == bool(calls)
    assert choice["finish_reason"] == reason
    streamed = joined(events)
    assert (streamed["message"]["content"] or "") == (content or "")
    assert calls_of(streamed["message"]) == calls
    assert streamed["finish_reason"] == reason
    assert streamed["token_ids"] == choice["token_ids"] == [*TOY.encode(text), 2]
    assert streamed["logprobs"] == choice["logprobs"]["content"]
    assert len(streamed["logprobs"]) == whole["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    for event in events[1:]:
        (one,) = event["choices"]
        assert "".join(piece for piece, _ in one["draft"]) == one["delta"].get("content", "")
    assert sum(len(event["choices"][0].get("draft", [])) for event in events) == len(choice["token_ids"])


@asynchronous
async def test_every_call_has_its_own_id() -> None:
    async with FakeServer(say(TWO), max_model_len=2000) as server:
        replies = [(await ask(server, CHAT)).json() for _ in range(2)]
    ids = [one["id"] for reply in replies for one in reply["choices"][0]["message"]["tool_calls"]]
    assert len(set(ids)) == 4


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("limit", [5, 15, 25, 35])
@asynchronous
async def test_F043_a_cut_call_says_length(is_stream: bool, limit: int) -> None:
    async with FakeServer(say(ONE), max_model_len=2000) as server:
        reply = await ask(server, CHAT | {"max_tokens": limit, "stream": is_stream})
    if is_stream:
        assert joined(reply.events())["finish_reason"] == "length"
    else:
        assert reply.json()["choices"][0]["finish_reason"] == "length"


@asynchronous
async def test_without_tools_a_mark_is_text() -> None:
    async with FakeServer(say(ONE), max_model_len=2000) as server:
        for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
            (choice,) = (await ask(server, CHAT | fields)).json()["choices"]
            assert choice["message"] == {"content": ONE, "role": "assistant", "refusal": None}


@asynchronous
async def test_what_the_prompt_says_of_tools() -> None:
    async with FakeServer(max_model_len=2000) as server:
        for fields in ({}, {"tool_choice": "none"}, {"tools": None}):
            await ask(server, CHAT | fields)
        prompts = [TOY.decode(job.request.prompt_token_ids) for job in server.worker.jobs]
    shown = json.loads(prompts[0].split(", called as")[0])
    assert shown == [WEATHER, NOW]
    assert prompts[1] == prompts[2] == "user: hi\nassistant:"


@asynchronous
async def test_tokens_of_a_conversation_are_those_that_a_chat_reads() -> None:
    async with FakeServer(max_model_len=2000) as server:
        for fields in (
            {},
            {"tools": None},
            {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False},
        ):
            await ask(server, CHAT | fields)
            prompt_ids = server.worker.jobs[-1].request.prompt_token_ids
            body = {name: value for name, value in (CHAT | fields).items() if name in ("messages", "tools")}
            body |= {name: value for name, value in fields.items() if name == "add_generation_prompt"}
            assert (await call(server.app, "/tokenize", body)).json()["tokens"] == list(prompt_ids)
        refused = await call(server.app, "/tokenize", {"messages": CHAT["messages"], "tools": [WEATHER, WEATHER]})
        assert refused.status == 400


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
@pytest.mark.parametrize("parallel", [None, False])
@asynchronous
async def test_a_forced_call_has_a_grammar(choice: Any, parallel: bool | None) -> None:
    strict = {"type": "function", "function": NOW["function"] | {"strict": True}}
    body = CHAT | {"tools": [WEATHER, strict], "tool_choice": choice, "parallel_tool_calls": parallel}
    async with FakeServer(max_model_len=2000) as server:
        await ask(server, body)
        (job,) = server.worker.jobs
    assert job.request.grammar is not None
    source = job.request.grammar.wanted.source
    assert ('"weather"' in source) == (choice == "required")
    assert ("calls)*" in source) == (choice == "required" and parallel is None)


@asynchronous
async def test_a_promise_has_a_grammar_where_no_call_is_forced() -> None:
    """`strict`, which some clients always send, and one call at most; what promises nothing has none."""
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    async with FakeServer(say("hello"), max_model_len=2000) as server:
        for fields in ({}, {"tools": [strict, NOW]}, {"parallel_tool_calls": False}):
            assert (await ask(server, CHAT | fields)).status == 200
        free, promised, single = [job.request.grammar for job in server.worker.jobs]
    assert free is None
    assert promised is not None
    assert "(opened calls)* TEXT" in promised.wanted.source
    assert single is not None
    assert "opened calls | TEXT" in single.wanted.source


@asynchronous
async def test_control_tokens_that_mark_calls_are_shown() -> None:
    async with FakeServer(max_model_len=2000) as server:
        server.llm.tool_format = ToolFormat("hermes", False, (("<tool_call>", 1),))
        for fields in ({}, {"tool_choice": "none"}):
            await ask(server, CHAT | fields)
        assert [job.request.shown_ids for job in server.worker.jobs] == [{1}, frozenset()]


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": [1]}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "noon"},
]


@asynchronous
async def test_F043_F044_calls_in_a_conversation() -> None:
    async with FakeServer(max_model_len=2000) as server:
        await ask(server, CHAT | {"messages": HISTORY, "tools": None})
        reply = await call(server.app, "/tokenize", {"messages": HISTORY})
        (job,) = server.worker.jobs
    text = 'user: hi\nassistant: <tool_call>{"name": "now", "arguments": {"a": [1]}}\ntool: noon\nassistant:'
    assert TOY.decode(job.request.prompt_token_ids) == text
    assert tuple(reply.json()["tokens"]) == job.request.prompt_token_ids


def history(**changes: Any) -> dict[str, Any]:
    function = HISTORY[1]["tool_calls"][0]["function"] | changes
    calls = [HISTORY[1]["tool_calls"][0] | {"function": function}]
    return {"messages": [HISTORY[0], HISTORY[1] | {"tool_calls": calls}, HISTORY[2]]}


def tool(**changes: Any) -> dict[str, Any]:
    return {"tools": [NOW, {"type": "function", "function": WEATHER["function"] | changes}]}


WRONG: list[tuple[dict[str, Any], str]] = [
    (history(arguments="{"), "messages"),
    (history(arguments="[]"), "messages"),
    (history(arguments={"a": 1}), "messages[1].tool_calls[0].function.arguments"),
    (history(name=None), "messages[1].tool_calls[0].function.name"),
    ({"messages": [HISTORY[1] | {"tool_calls": {"id": "c"}}]}, "messages[0].tool_calls"),
    ({"messages": [HISTORY[1] | {"tool_calls": [{"id": "c"}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [HISTORY[1] | {"function_call": {"name": "f"}}]}, "messages[0].function_call"),
    ({"tools": "weather"}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [WEATHER] * 129}, "tools"),
    (tool(name=""), "tools"),
    (tool(name="a b"), "tools"),
    (tool(parameters=[]), "tools[1].function.parameters"),
    (tool(parameters={"type": "array"}), "tools"),
    (tool(parameters={"type": "strange"}) | {"tool_choice": "required"}, "tools"),
    (tool(parameters={"properties": {"a": {"$ref": "#/none"}}}) | {"tool_choice": "required"}, "tools"),
    (tool(parameters={"enum": ["x" * 200_000]}) | {"tool_choice": "required"}, "tools"),
    (tool(strict="yes"), "tools[1].function.strict"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "never"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": "required", "grammar": 'start: "a"'}, "grammar"),
    ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"functions": [{"name": "f"}]}, "functions"),
]


@asynchronous
async def test_F043_what_is_wrong_with_tools_is_named() -> None:
    async with FakeServer(max_model_len=2000) as server:
        for fields, param in WRONG:
            reply = await call(server.app, PATH, CHAT | fields)
            assert reply.status == 400, (fields, reply.body)
            assert (reply.error["param"] or "").startswith(param), (fields, reply.error)
        assert not server.worker.jobs
        assert (await ask(server, CHAT)).json()["choices"][0]["message"]["content"] == "hello world"


@asynchronous
async def test_a_model_without_tools_says_so() -> None:
    async with FakeServer(has_tools=False) as server:
        for fields, param in (({}, "tools"), ({"messages": HISTORY, "tools": None}, "messages[1].tool_calls")):
            error = (await call(server.app, PATH, CHAT | fields)).error
            assert error["param"] == param
            assert "knows no tools" in error["message"]
        assert (await call(server.app, "/tokenize", {"messages": HISTORY})).status == 400
        await ask(server, CHAT | {"tool_choice": "none"})
        await ask(server, CHAT | {"tools": [], "tool_choice": "auto"})


def named_events(reply: Reply) -> list[dict[str, Any]]:
    blocks = reply.body.decode().split("\n\n")[:-1]
    parsed = [json.loads(block.split("\ndata: ")[1]) for block in blocks]
    assert [block.split("\n")[0] for block in blocks] == [f"event: {event['type']}" for event in parsed]
    assert [event["sequence_number"] for event in parsed] == list(range(len(parsed)))
    return parsed


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("group", [1, 200])
@asynchronous
async def test_responses_hold_the_same_calls(name: str, group: int) -> None:
    text, content, calls, _ = SAID[name]
    async with FakeServer(say(text, group), max_model_len=2000) as server:
        whole = (await ask(server, ASK, RESPONSES)).json()
        events = named_events(await ask(server, ASK | {"stream": True}, RESPONSES))
    output = whole["output"]
    found = [(item["name"], item["arguments"]) for item in output if item["type"] == "function_call"]
    texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    assert found == calls
    assert texts == ([] if content is None else [content])
    # What the events say, put together, is the last one's answer.
    built: list[dict[str, Any]] = []
    for event in events:
        kind, index = event["type"].removeprefix("response."), event.get("output_index")
        if kind == "output_item.added":
            assert index == len(built)
            built.append({"is_open": True, "text": "", "id": event["item"]["id"]})
            assert event["item"]["status"] == "in_progress"
        elif kind in ("output_text.delta", "function_call_arguments.delta"):
            assert built[index]["is_open"]
            assert built[index]["id"] == event["item_id"]
            built[index]["text"] += event["delta"]
        elif kind in ("output_text.done", "function_call_arguments.done"):
            assert built[index]["text"] == event["text" if kind == "output_text.done" else "arguments"]
        elif kind == "output_item.done":
            built[index] |= {"is_open": False, "item": event["item"]}
    assert not any(one["is_open"] for one in built)
    assert events[-1]["type"] == "response.completed"
    assert [one["item"] for one in built] == events[-1]["response"]["output"]

    def known(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]

    assert known(events[-1]["response"]["output"]) == known(output)
    assert {item["status"] for item in output} == {"incomplete" if name == "broken" else "completed"}
    assert (whole["tools"], whole["tool_choice"]) == (ASK["tools"], "auto")


@pytest.mark.parametrize("limit", [15, 25])
@asynchronous
async def test_F043_a_cut_call_of_responses_is_incomplete(limit: int) -> None:
    async with FakeServer(say(ONE), max_model_len=2000) as server:
        whole = (await ask(server, ASK | {"max_output_tokens": limit}, RESPONSES)).json()
    assert whole["status"] == whole["output"][-1]["status"] == "incomplete"


@asynchronous
async def test_calls_in_the_input_of_responses() -> None:
    earlier: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    async with FakeServer(say("Look.\n" + ONE), max_model_len=2000) as server:
        output = (await ask(server, ASK, RESPONSES)).json()["output"]
        results = [{"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "sun"}]
        await ask(server, ASK | {"input": [*earlier, *output, *results], "tools": []}, RESPONSES)
        prompt = TOY.decode(server.worker.jobs[-1].request.prompt_token_ids)
    assert prompt == (
        f'user: hi\nassistant: Look.<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}\ntool: sun\nassistant:'
    )


@asynchronous
async def test_forms_and_scores_of_responses() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    body = {"input": "hi", "seed": 7, "text": text} | include
    async with FakeServer(say("hello world", 2), max_model_len=2000) as server:
        whole = (await ask(server, body, RESPONSES)).json()
        events = named_events(await ask(server, body | {"stream": True}, RESPONSES))
        chat = CHAT | {"tools": None, "logprobs": True, "top_logprobs": 2}
        scores = (await ask(server, chat)).json()["choices"][0]["logprobs"]["content"]
        grammar = server.worker.jobs[0].request.grammar
    assert grammar is not None
    assert json.loads(grammar.wanted.source) == schema
    assert whole["text"] == text
    (part,) = whole["output"][0]["content"]
    assert part["logprobs"] == scores
    deltas = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert deltas == scores[: len(deltas)]
    assert len(deltas) >= len(scores) - 1, "all but the end's"
    assert next(event for event in events if event["type"].endswith("text.done"))["logprobs"] == scores
