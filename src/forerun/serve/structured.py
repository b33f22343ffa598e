"""Constraints on the text and tools: the one place where requests that ask for them are served or refused."""

from __future__ import annotations

from forerun.serve.problems import Problem
from forerun.serve.schema import ChatRequest, GenerationFields


def check_structured(request: GenerationFields) -> None:
    """Refuses what this build can't do.

    Raises:
        Problem: the request asks for a constrained text or for tools; names the field.
    """
    if request.response_format is not None and request.response_format.type != "text":
        raise _unsupported("response_format", "type 'text'")
    for name in ("structured_outputs", "grammar"):
        if getattr(request, name) is not None:
            raise _unsupported(name, "no such field")
    if isinstance(request, ChatRequest):
        _check_tools(request)


def _check_tools(request: ChatRequest) -> None:
    if request.tools and request.tool_choice != "none":
        raise _unsupported("tools", "no tools")
    if request.tool_choice not in (None, "none", "auto"):
        raise _unsupported("tool_choice", "'none' or 'auto'")
    for index, message in enumerate(request.messages):
        if message.tool_calls:
            raise _unsupported(f"messages[{index}].tool_calls", "messages without calls")


def _unsupported(param: str, instead: str) -> Problem:
    return Problem(400, f"{param} is not supported by this build; send {instead}", param, "unsupported_value")
