"""Tool calls in a model's text, however the text is cut into pieces."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from forerun.models.tool_calls import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    ToolAnswer,
    ToolCallStream,
    ToolEvent,
    ToolSyntax,
    new_call_id,
    read_tool_calls,
)
from forerun.types import FinishReason

NAMES = ("f", "get_weather")
WEATHER = '{"city": "Zürich {[\\"x\\"]}", "days": [1, 2], "deep": {"a": {"b": null}}}'

# syntax, text, content, calls as (name, arguments)
ANSWERS: dict[str, tuple[ToolSyntax, str, str | None, list[tuple[str, str]]]] = {
    "text": ("hermes", "It's 20 < 30 <tool>.\n", "It's 20 < 30 <tool>.\n", []),
    "nothing": ("hermes", "", "", []),
    "one": (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
        None,
        [("get_weather", WEATHER)],
    ),
    "text before": (
        "hermes",
        'Let me <look>.\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n',
        "Let me <look>.",
        [("f", "{}")],
    ),
    "two": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>\n{"arguments": {"b":2.5e3}, "name": "g"}\n</tool_call>',
        None,
        [("f", '{"a": 1}'), ("g", '{"b":2.5e3}')],
    ),
    "text after": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\nDone.',
        "\nDone.",
        [("f", '{"a": 1}')],
    ),
    "no close": ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}', None, [("f", '{"a": 1}')]),
    "no arguments": ("hermes", '<tool_call>\n{"name": "f"}\n</tool_call>', None, [("f", "{}")]),
    "null arguments": ("hermes", '<tool_call>\n{"name": "f", "arguments": null}\n</tool_call>', None, [("f", "{}")]),
    "arguments as text": (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": 1}"}\n</tool_call>',
        None,
        [("f", '{"a": 1}')],
    ),
    "other keys": (
        "hermes",
        '<tool_call>{"id": 7, "tags": ["name"], "name": "f", "x": {"name": "g"}, "arguments": {"a": 1}}</tool_call>',
        None,
        [("f", '{"a": 1}')],
    ),
    "no object": ("hermes", "<tool_call>\nf(1)\n</tool_call>", "<tool_call>\nf(1)\n</tool_call>", []),
    "no name": (
        "hermes",
        '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>',
        [],
    ),
    "no JSON": ("hermes", "<tool_call>{'name': 'f'}</tool_call>", "<tool_call>{'name': 'f'}</tool_call>", []),
    "the mark alone": ("hermes", "<tool_call>", "<tool_call>", []),
    "half a mark": ("hermes", "so <tool_ca", "so <tool_ca", []),
    "unknown but marked": ("hermes", '<tool_call>{"name": "nope"}</tool_call>', None, [("nope", "{}")]),
    "llama": ("llama", f'{{"name": "get_weather", "parameters": {WEATHER}}}', None, [("get_weather", WEATHER)]),
    "llama with arguments": ("llama", ' \n{"name": "f", "arguments": {"a": 1}}', None, [("f", '{"a": 1}')]),
    "llama two": (
        "llama",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 2}}',
        None,
        [("f", '{"a": 1}'), ("f", '{"a": 2}')],
    ),
    "llama tag": (
        "llama",
        '<|python_tag|>{"type": "function", "name": "other", "parameters": {"a": 1}}',
        None,
        [("other", '{"a": 1}')],
    ),
    "llama built-in": (
        "llama",
        '<|python_tag|>brave_search.call(query="a, \\"b\\" (c)", n=3)',
        None,
        [("brave_search", '{"query": "a, \\"b\\" (c)", "n": 3}')],
    ),
    "llama code": ("llama", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "llama data": ("llama", '{"name": "Zoe", "age": 3}', '{"name": "Zoe", "age": 3}', []),
    "llama text": ("llama", 'so {"name": "f", "parameters": {}}', 'so {"name": "f", "parameters": {}}', []),
    "mistral": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}, "id": "abcdefghi"}}]',
        None,
        [("get_weather", WEATHER)],
    ),
    "mistral two": (
        "mistral",
        'Hm [x]. [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "Hm [x].",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    "mistral names first": (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": [1, "]"]}[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{}',
        None,
        [("f", '{"a": [1, "]"]}'), ("get_weather", "{}")],
    ),
}


def joined(events: list[ToolEvent]) -> tuple[str, list[tuple[str, str]]]:
    content, names, arguments = "", list[str](), list[str]()
    for event in events:
        if isinstance(event, ContentDelta):
            content += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(names)
            names.append(event.name)
            arguments.append("")
        else:
            arguments[event.index] += event.text
    return content, list(zip(names, arguments, strict=True))


def streamed(syntax: ToolSyntax, pieces: list[str], reason: FinishReason = "stop") -> tuple[list[ToolEvent], str]:
    stream = ToolCallStream(syntax, NAMES)
    events = [event for piece in pieces for event in stream.push(piece)]
    rest, finish_reason = stream.finish(reason)
    return events + rest, finish_reason


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_read(name: str) -> None:
    syntax, text, content, calls = ANSWERS[name]
    answer = read_tool_calls(syntax, NAMES, text, "stop")
    assert answer.content == content
    assert [(call.name, call.arguments) for call in answer.calls] == calls
    assert answer.finish_reason == ("tool_calls" if calls else "stop")
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    assert len({call.call_id for call in answer.calls}) == len(calls)


@pytest.mark.parametrize("name", ANSWERS)
def test_pieces_change_nothing(name: str) -> None:
    syntax, text, content, calls = ANSWERS[name]
    rng = random.Random(3)
    cuts = [list(text), *([text[:at], text[at:]] for at in range(len(text)))]
    for _ in range(50):
        at = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))})
        cuts.append([text[a:b] for a, b in itertools.pairwise(at)])
    for pieces in cuts:
        events, _ = streamed(syntax, pieces)
        assert joined(events) == (content or "", calls), pieces


@pytest.mark.parametrize("name", [name for name, (_, _, _, calls) in ANSWERS.items() if calls])
def test_a_cut_call_says_length_f043(name: str) -> None:
    """Whatever was cut off: nobody may take a part of an answer for the whole."""
    syntax, text, _, _ = ANSWERS[name]
    for end in range(len(text) + 1):
        events, reason = streamed(syntax, [text[:end]], "length")
        assert reason == "length"
        joined(events)


def test_a_call_that_the_model_left_open_is_none() -> None:
    events, reason = streamed("hermes", ['<tool_call>{"name": "f", "arguments": {"a": '])
    assert (joined(events), reason) == (("", [("f", '{"a": ')]), "stop")


def test_arguments_are_streamed_as_they_come() -> None:
    stream = ToolCallStream("hermes", NAMES, lambda syntax: "id")
    assert stream.push("Ok <") == [ContentDelta("Ok")]
    assert stream.push("b> <tool_call>\n") == [ContentDelta(" <b>")]
    assert stream.push('{"name": "f", ') == [CallStart(0, "id", "f")]
    assert stream.push('"arguments": {"a"') == [ArgumentsDelta(0, '{"a"')]
    assert stream.push(": 1") == [ArgumentsDelta(0, ": 1")]
    assert stream.push("}}\n</tool") == [ArgumentsDelta(0, "}")]
    assert stream.push("_call>") == []
    assert stream.finish("stop") == ([], "tool_calls")


def test_ids_fit_the_family() -> None:
    assert len(new_call_id("mistral")) == 9
    assert new_call_id("mistral").isalnum()
    assert new_call_id("hermes").startswith("call_")
    assert new_call_id("llama") != new_call_id("llama")


def test_noise_is_content_or_calls_and_never_an_error() -> None:
    rng = random.Random(5)
    alphabet = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name": "f"', "{", "}", "[", "]"]
    alphabet += ['"', "\\", ",", ":", " ", "\n", "a", "1", '"arguments": {', '"parameters"', ";", "[ARGS]", "f"]
    for case in range(3000):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 15)))
        syntax: ToolSyntax = ("hermes", "llama", "mistral")[case % 3]  # type: ignore[assignment]
        whole = read_tool_calls(syntax, NAMES, text, "stop", lambda syntax: "id")
        events, reason = streamed(syntax, list(text))
        content, calls = joined(events)
        got = ToolAnswer(content or (None if calls else ""), whole.calls, reason)  # type: ignore[arg-type]
        assert got == whole, text
        assert calls == [(call.name, call.arguments) for call in whole.calls], text
