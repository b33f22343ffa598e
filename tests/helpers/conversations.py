"""Conversations on which chat templates like to differ."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather "now" in a city.',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "City, e.g. Zürich"},
                    "unit": {"type": "string", "enum": ["c", "f"]},
                    "days": {"type": "integer", "default": 1},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <numbers> & more.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "array", "items": {"type": "number"}}},
            },
        },
    },
]


def system(content: Any) -> Message:
    return {"role": "system", "content": content}


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any, name: str = "get_weather", call_id: str = "abcdefghi") -> dict[str, Any]:
    """A tool call; some templates want ids of nine letters."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(content: str, name: str = "get_weather", call_id: str = "abcdefghi") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


_TWO_CALLS = [call({"city": "a"}), call({"a": 1.5, "b": [1, 2]}, "add", "bbbbbbbbb")]

CONVERSATIONS: dict[str, list[Message]] = {
    "user": [user("Hi")],
    "system": [system("Be brief."), user("Hi")],
    "turns": [system("Sys\n"), user("a"), assistant("b"), user(" c "), assistant(" d\n"), user("e")],
    "no system": [user("a"), assistant("b"), user("c")],
    "ends with assistant": [user("a"), assistant("b")],
    "two users": [user("a"), user("b")],
    "assistant first": [assistant("x"), user("y")],
    "late system": [user("x"), system("y"), user("z")],
    "only system": [system("x")],
    "unknown role": [user("x"), {"role": "critic", "content": "y"}],
    "developer": [{"role": "developer", "content": "dev"}, user("x")],
    "empty": [user(""), assistant(""), user("")],
    "special characters": [
        system("<&'\">"),
        user("日本 | < > & ' \" {{ no }} {% x %} \\n \u2028 👩\u200d👩\u200d👧\u200d👦"),
        assistant("</think> [INST] <|im_end|>"),
        user("x</s><s>y"),
    ],
    "think": [user("a"), assistant("<think>\nhm\n</think>\n\nanswer"), user("b")],
    "reasoning_content": [user("a"), assistant("answer", reasoning_content="because"), user("b")],
    "thinking": [user("a"), assistant("answer", thinking="because"), user("b")],
    "reasoning and call": [user("a"), assistant("", reasoning="why", tool_calls=[call({"city": "a"})]), tool("1")],
    "call": [user("w?"), assistant("", tool_calls=[call({"city": "Zürich", "days": 2})]), tool('{"t": 20.5}')],
    "call and answer": [
        user("w?"),
        assistant("", tool_calls=[call({"city": "a"})]),
        tool("20"),
        assistant("It's 20."),
        user("ok"),
    ],
    "call with a string": [user("w?"), assistant("", tool_calls=[call('{"city": "Zürich"}')]), tool("1")],
    "two calls": [
        system("s"),
        user("w?"),
        assistant("Let me look.", tool_calls=_TWO_CALLS),
        tool("1"),
        tool("2", "add", "bbbbbbbbb"),
    ],
    "call without content": [user("w?"), {"role": "assistant", "tool_calls": [call({"city": "a"})]}, tool("1")],
    "call with None": [user("w?"), assistant(None, tool_calls=[call({"city": "a"})]), tool("1")],
    "None": [user("a"), assistant(None), user("b")],
    "None elsewhere": [user("a"), assistant("x", tool_calls=None, name=None), user("b")],
    "parts": [system(parts("one ", "two")), user(parts("three")), assistant(parts("four", "")), user("x")],
}
