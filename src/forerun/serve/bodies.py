"""Request bodies: from bytes to a checked schema object, or to one clear refusal.

JSON is read strictly. What readers disagree about is refused rather than guessed: keys that come twice, numbers that
aren't finite, halves of surrogate pairs (F041, F042).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from forerun.serve.explain import explain
from forerun.serve.problems import Problem

MAX_DEPTH = 100  # nested lists and objects
MAX_DIGITS = 25  # of a whole number; 64 bits have 20

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
SchemaT = TypeVar("SchemaT", bound=BaseModel)


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises:
        Problem: 413 for more than max_bytes, 415 for another content type than JSON, 408 for a body that stalls.
        ClientGone: the connection ended.
    """
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise Problem(415, f"the content type is {kind.decode('latin-1')!r:.80}, but must be 'application/json'")
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        return await asyncio.wait_for(_collect(receive, max_bytes), timeout_s)
    except TimeoutError:
        raise Problem(408, f"the body did not arrive within {timeout_s:g} s") from None


async def _collect(receive: Receive, max_bytes: int) -> bytes:
    parts, num_bytes = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(max_bytes: int) -> Problem:
    return Problem(413, f"the body is larger than the {max_bytes} bytes that this server takes")


def parse(body: bytes, schema: type[SchemaT]) -> SchemaT:
    """The body as a schema's object.

    Raises:
        Problem: it is no JSON object, or the schema refuses it; names the field.
    """
    value = parse_json(body)
    if not isinstance(value, dict):
        raise Problem(400, "the body must be a JSON object", code="invalid_json")
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise explain(error, value, schema) from None


def parse_json(body: bytes) -> Any:
    """Any JSON value, read strictly.

    Raises:
        Problem: 400.
    """
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_not_finite,
            parse_float=_number,
            parse_int=_whole_number,
        )
        if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
            raise RecursionError
    except UnicodeDecodeError as error:
        raise Problem(400, f"the body is not UTF-8: byte {error.start} is wrong", code="invalid_json") from None
    except RecursionError:
        raise Problem(400, f"the body is nested more than {MAX_DEPTH} deep", code="invalid_json") from None
    except json.JSONDecodeError as error:
        what = f"{error.msg} at line {error.lineno}, column {error.colno}" if body.strip() else "it is empty"
        raise Problem(400, f"the body is not valid JSON: {what}", code="invalid_json") from None
    if _SURROGATE.search(body):
        _check_unicode(value, "")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Problem(400, f"the body has the key {twice!r:.80} twice in one object", twice, "invalid_json")
    return value


def _not_finite(text: str) -> Any:
    raise Problem(400, f"the body is not valid JSON: {text} is no number there", code="invalid_json")


def _number(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise Problem(400, f"the body holds the number {text:.40}, which is too large", code="invalid_json")
    return value


def _whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise Problem(400, f"the body holds a whole number of {len(text)} digits", code="invalid_json")
    return int(text)


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = (
            [
                item
                for container in level
                for item in (container.values() if isinstance(container, dict) else container)
                if isinstance(item, dict | list)
            ]
            if isinstance(level[0], dict | list)
            else []
        )
        if depth > MAX_DEPTH:
            break
    return depth


def _check_unicode(value: Any, path: str) -> None:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            message = (
                f"{path} holds half of a surrogate pair (U+{ord(value[error.start]):04X}) at character {error.start}"
            )
            raise Problem(400, f"{message}; send whole Unicode characters", path) from None
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_unicode(key, f"a key of {path}" if path else "a key of the body")
            _check_unicode(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_unicode(item, f"{path}[{index}]")
