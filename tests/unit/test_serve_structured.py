"""Constraints on the text over HTTP: each reaches the engine as a grammar, or is refused by the field that asks."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from forerun.models.structured import Structured
from tests.helpers.asgi import call
from tests.helpers.asynchronous import asynchronous
from tests.helpers.fake_worker import FakeServer, with_settings

PATHS = ("/v1/chat/completions", "/v1/completions")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "seed": 7},
    "/v1/completions": {"prompt": "hi", "seed": 7},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
ODD = {"type": "object", "dependentSchemas": {"a": {"minProperties": 1}}}  # can't be enforced
LARK = 'start: "the " /[a-z]+/'


def json_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema} | fields}}


ASKED: list[tuple[dict[str, Any], Structured | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": None, "grammar": None}, None),
    ({"response_format": {"type": "json_object"}}, Structured.json_object()),
    (json_schema(SCHEMA), Structured.json_schema(SCHEMA)),
    (json_schema(SCHEMA, strict=True, description="what"), Structured.json_schema(SCHEMA)),
    (json_schema(ODD, strict=False), Structured.json_schema(ODD, lenient=True)),
    ({"structured_outputs": {"json": SCHEMA}}, Structured.json_schema(SCHEMA)),
    ({"structured_outputs": {"json": '{"type": "integer"}'}}, Structured.json_schema({"type": "integer"})),
    ({"structured_outputs": {"regex": "a+b", "json_object": False}}, Structured.regex("a+b")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, Structured.choice(["yes", "no"])),
    ({"structured_outputs": {"grammar": LARK}}, Structured.lark(LARK)),
    ({"structured_outputs": {"json_object": True}}, Structured.json_object()),
    ({"grammar": LARK}, Structured.lark(LARK)),
    ({"grammar": LARK, "response_format": {"type": "text"}}, Structured.lark(LARK)),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "wanted"), ASKED)
@asynchronous
async def test_F010_a_constraint_reaches_the_engine(
    path: str, fields: dict[str, Any], wanted: Structured | None
) -> None:
    async with FakeServer() as server:
        reply = await call(server.app, path, BODIES[path] | fields | {"n": 2})
        assert reply.status == 200, reply.body
        grammars = [job.request.grammar for job in server.worker.jobs]
    assert [grammar and grammar.wanted for grammar in grammars] == [wanted, wanted]
    assert grammars[0] is grammars[1]


DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"properties": {"a": DEEP}}
PATH_OF_SCHEMA = "response_format.json_schema.schema"

WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {}}, "response_format.type", "missing"),
    ({"response_format": "json"}, "response_format", "must be an object"),
    ({"response_format": {"type": "json"}}, "response_format.type", "must be"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, PATH_OF_SCHEMA, "missing"),
    (json_schema({"type": "object"}, schma={}), "response_format.json_schema.schma", "did you mean 'schema'"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema", "not"),
    *[(json_schema(bad), PATH_OF_SCHEMA, "must be an object") for bad in ("", [], False, True, None, 5)],
    (json_schema({"not": {}}), PATH_OF_SCHEMA, "can't be used"),
    (json_schema({"type": "strange"}), PATH_OF_SCHEMA, "can't be used"),
    (json_schema({"$ref": "#/$defs/none"}), PATH_OF_SCHEMA, "can't be used"),
    (json_schema({"$ref": "#"}), PATH_OF_SCHEMA, "describes no text"),
    (json_schema({"$ref": "https://example.org/schema"}), PATH_OF_SCHEMA, "can't be used"),
    (json_schema({"type": "string", "pattern": "("}), PATH_OF_SCHEMA, "can't be used"),
    (json_schema({"enum": []}), PATH_OF_SCHEMA, ""),
    (json_schema(ODD), PATH_OF_SCHEMA, "can't be used"),
    (json_schema(ODD, strict=True), PATH_OF_SCHEMA, "can't be used"),
    (json_schema(DEEP), "", "nested more than"),
    (json_schema({"enum": [f"{i:07d}" for i in range(20_000)]}), PATH_OF_SCHEMA, "at most 131072"),
    (json_schema({"multipleOf": 70001}), PATH_OF_SCHEMA, "multipleOf"),
    (json_schema({"x-guidance": {}}), PATH_OF_SCHEMA, "x-guidance"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "must be an object or a JSON text"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "no JSON text"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "can't be used"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "not empty"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
    ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice[1]", "must be a string"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "not empty"),
    ({"structured_outputs": {"choise": ["a"]}}, "structured_outputs.choise", "did you mean 'choice'"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "did you mean 'json'"),
    ({"grammar": ""}, "grammar", "not empty"),
    ({"grammar": "root ::= 'a'"}, "grammar", "can't be used"),
    ({"grammar": {"a": 1}}, "grammar", "must be a string"),
    ({"grammar": LARK, "response_format": {"type": "json_object"}}, "grammar", "response_format and grammar"),
    ({"grammar": LARK, "structured_outputs": {"regex": "a"}}, "grammar", "one form"),
    ({"grammar": LARK, "ignore_eos": True}, "ignore_eos", "leave out one"),
]


@pytest.mark.parametrize("path", PATHS)
@asynchronous
async def test_F037_a_bad_constraint_is_refused_by_name(path: str) -> None:
    async with FakeServer() as server:
        for fields, param, words in WRONG:
            reply = await call(server.app, path, BODIES[path] | fields)
            assert reply.status == 400, (fields, reply.body)
            assert (reply.error["param"] or "").startswith(param), (fields, reply.error)
            assert words in reply.error["message"], (fields, reply.error)
        assert not server.worker.jobs
        plain = (await call(server.app, path, BODIES[path])).json()["choices"][0]
        assert (plain["text"] if "text" in plain else plain["message"]["content"]) == "hello world"


@asynchronous
async def test_a_grammar_compiles_beside_the_loop() -> None:
    body = BODIES["/v1/completions"] | {"structured_outputs": {"regex": "a+b"}}
    async with FakeServer() as server:
        for _ in range(2):
            assert (await call(server.app, "/v1/completions", body)).status == 200
        (thread,) = server.llm.compiling_threads
    assert thread is not threading.current_thread()


@asynchronous
async def test_others_are_served_while_a_grammar_compiles() -> None:
    async with FakeServer() as server:
        may_end = threading.Event()
        compile_grammar = server.llm.compile_grammar

        def slow(wanted: Structured) -> Any:
            assert may_end.wait(10)
            return compile_grammar(wanted)

        server.llm.compile_grammar = slow
        first = asyncio.ensure_future(
            call(server.app, "/v1/completions", BODIES["/v1/completions"] | {"grammar": LARK})
        )
        plain = await call(server.app, "/v1/completions", BODIES["/v1/completions"])
        assert plain.json()["choices"][0]["text"] == "hello world"
        assert not first.done()
        may_end.set()
        assert (await first).status == 200


@asynchronous
async def test_a_scored_text_has_no_form_to_keep() -> None:
    body = {"prompt": "hi", "max_tokens": 0, "echo": True, "logprobs": 1, "grammar": LARK}
    async with FakeServer() as server:
        reply = await call(server.app, "/v1/completions", body)
    assert reply.json()["choices"][0]["text"] == "hi"


async def drafts(path: str, fields: dict[str, Any], **settings: Any) -> list[tuple[str, list[Any] | None]]:
    """Per chunk of a stream: its text and its pairs."""
    async with FakeServer(settings=with_settings(**settings)) as server:
        events = (await call(server.app, path, BODIES[path] | {"stream": True} | fields)).events()
    choices = [event["choices"][0] for event in events]
    texts = [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]
    return [(text, choice.get("draft")) for text, choice in zip(texts, choices, strict=True)]


@pytest.mark.parametrize("path", PATHS)
@asynchronous
async def test_steps_in_a_stream_tell_drafted_tokens(path: str) -> None:
    chunks = await drafts(path, {"speculative": {"metrics": "steps"}})
    if path == PATHS[0]:
        assert chunks.pop(0) == ("", None)  # the role
    pairs = [pair for _, some in chunks for pair in some or []]
    assert all("".join(piece for piece, _ in some or []) == text for text, some in chunks)
    assert "".join(piece for piece, _ in pairs) == "hello world"
    # The script's groups of three are a draft of two and one token more, but for the prompt's step.
    assert [is_draft for _, is_draft in pairs] == [3 <= i < len(pairs) - 1 and i % 3 != 2 for i in range(len(pairs))]
    for fields in ({}, {"speculative": {"metrics": "summary"}}):
        assert all(some is None for _, some in await drafts(path, fields))
    assert any(some for _, some in await drafts(path, {}, report="steps"))


@asynchronous
async def test_an_echoed_prompt_is_no_draft() -> None:
    fields = {"echo": True, "speculative": {"metrics": "steps"}}
    chunks = await drafts("/v1/completions", fields)
    assert chunks[0][1] is not None
    assert chunks[0][1][0] == ["hi", False]
    assert all("".join(piece for piece, _ in some or []) == text for text, some in chunks)


@asynchronous
async def test_a_whole_answer_has_no_drafts() -> None:
    async with FakeServer() as server:
        body = BODIES["/v1/completions"] | {"speculative": {"metrics": "steps"}}
        choice = (await call(server.app, "/v1/completions", body)).json()["choices"][0]
    assert "draft" not in choice
