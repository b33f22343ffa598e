"""Requests that somebody's broken client, or somebody who means harm, might send; each from a number."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass
from typing import Any

from forerun.serve.schema import ChatRequest, CompletionRequest, Speculative

_TEXT = "/v1/completions"
_CHAT = "/v1/chat/completions"
_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, "b"]}, "c": {"$ref": "#/properties/a"}}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}}
_BASES: tuple[tuple[str, dict[str, Any]], ...] = (
    (_TEXT, {"prompt": "hi", "max_tokens": 3, "temperature": 0.5, "stop": ["x"], "seed": 1}),
    (_TEXT, {"prompt": [[5, 6], [7]], "echo": True, "logprobs": 2, "n": 2, "max_tokens": 2, "logit_bias": {"5": 1.5}}),
    (_TEXT, {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}),
    (
        _CHAT,
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None},
                {"role": "user", "content": "go"},
            ],
            "max_completion_tokens": 3,
            "logprobs": True,
            "top_logprobs": 2,
            "speculative": {"enabled": True, "method": "suffix", "k": 3, "rule": "coupled", "metrics": "steps"},
            "prediction": {"type": "content", "content": "hello"},
        },
    ),
    (
        _CHAT,
        {"messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 2, "chat_template_kwargs": {"a": 1}},
    ),
    (_TEXT, {"prompt": "hi", "structured_outputs": {"choice": ["a", "b"]}, "max_tokens": 2}),
    (_CHAT, {"messages": [{"role": "user", "content": "hi"}], "response_format": _FORMAT, "max_tokens": 2}),
    (
        _CHAT,
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "c", "content": "1"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA, "strict": True}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}],
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
        },
    ),
    ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}),
)
_NAMES = tuple({*CompletionRequest.model_fields, *ChatRequest.model_fields, *Speculative.model_fields})
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 20, 21, 255, 256, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30),
    *(0.0, -0.0, 0.5, 1e-38, 1e-8, 1e308, -1e308, 1.5, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "a",
        "\x00",
        "\ud83d",
        "\ude00\ud83d",
        "😀",
        "true",
        "NaN",
        "hi" * 400,
        "<|im_end|>",
        "{{ 1/0 }}",
        "\u202e",
    ),
    *([], [[]], [None], ["a", 1], {}, {"": ""}, {"type": "text"}, {"type": "json_object"}, {"$ref": "#"}, [0] * 300),
)
_BROKEN = (b"", b"{", b"\xff", b"null", b"[]", b'"a"', b"NaN", b'{"prompt":"a","prompt":"b"}', b"[" * 5000, b"1e999999")


@dataclass(frozen=True)
class Hostile:
    """One request."""

    path: str
    body: bytes
    headers: dict[str, str]


def hostile(number: int) -> Hostile:
    """The request of a number."""
    rng = random.Random(number)
    path, base = copy.deepcopy(rng.choice(_BASES))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        _edit(rng, base)
    body = json.dumps(base).encode()
    if rng.random() < 0.1:
        body = rng.choice(_BROKEN)
    elif rng.random() < 0.1:
        body = _scrambled(rng, body)
    headers = {}
    if rng.random() < 0.05:
        headers["content-type"] = rng.choice(("text/plain", "", "application/json; charset=latin-1", "\xff"))
    if rng.random() < 0.05:
        headers["x-request-id"] = rng.choice(("a" * 500, "a b", "\xff", "ok"))
    return Hostile(path, body, headers)


def _edit(rng: random.Random, value: Any) -> None:
    """Changes one place in a JSON value."""
    places = [(value, key) for key in value] if isinstance(value, dict) else [(value, i) for i in range(len(value))]
    deep = [item for item in (value.values() if isinstance(value, dict) else value) if isinstance(item, dict | list)]
    if deep and rng.random() < 0.5:
        _edit(rng, rng.choice(deep))
        return
    kind = rng.random()
    if isinstance(value, dict) and (kind < 0.35 or not places):
        value[rng.choice(_NAMES)] = copy.deepcopy(rng.choice(_VALUES))
    elif isinstance(value, list) and (kind < 0.2 or not places):
        value.append(copy.deepcopy(rng.choice(_VALUES)))
    elif kind < 0.45:
        _drop(rng, value)
    elif kind < 0.5 and isinstance(value, dict):
        value[rng.choice(("", "\ud83d", "a" * 3000, "Prompt", "temperatur", "__class__"))] = rng.choice(_VALUES)
    else:
        container, key = rng.choice(places)
        container[key] = copy.deepcopy(rng.choice(_VALUES))


def _drop(rng: random.Random, value: Any) -> None:
    if isinstance(value, dict):
        del value[rng.choice(list(value))]
    else:
        del value[rng.randrange(len(value))]


def _scrambled(rng: random.Random, body: bytes) -> bytes:
    """The text with some bytes changed, dropped or repeated."""
    data = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        data[at : at + rng.randint(0, 3)] = bytes(rng.randrange(256) for _ in range(rng.randint(0, 3)))
    return bytes(data)
