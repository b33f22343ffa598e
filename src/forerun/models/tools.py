"""Tools that a conversation offers: what a caller may send, how the model writes calls, and grammars that force one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forerun.errors import RequestError, one_line
from forerun.models.structured import Structured, check_depth
from forerun.models.tokenizer import Tokenizer
from forerun.models.tool_calls import ARGS_MARK, CLOSE_MARK, OPEN_MARKS, ToolSyntax

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """A function that the model may call.

    Attributes:
        name: letters, digits, underscores and dashes.
        parameters: JSON schema of its arguments, an object.
    """

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, must not or must call, and what.

    Attributes:
        mode: `named` calls the tool of that name, `required` any.
        name: of the tool, None in other modes.
    """

    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None

    @property
    def forces_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.mode in ("required", "named")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls, by its template and vocabulary. Made by `tool_format`.

    Attributes:
        syntax: the family's.
        has_names_first: mistral's later form, a name before its arguments.
        mark_ids: ids of the marks that are control tokens, which have no text of their own.
    """

    syntax: ToolSyntax
    has_names_first: bool
    mark_ids: tuple[tuple[str, int], ...]

    @property
    def shown_ids(self) -> frozenset[int]:
        """Control tokens that must be part of the text for `ToolCallStream` to find the calls in it."""
        return frozenset(token_id for _, token_id in self.mark_ids)


def tool_format(template_source: str, tokenizer: Tokenizer) -> ToolFormat | None:
    """How the model writes calls; None for a model whose template knows no tools."""
    special = tokenizer.special_tokens
    syntax: ToolSyntax
    if "tools" not in template_source:
        return None
    if OPEN_MARKS["mistral"] in special and OPEN_MARKS["mistral"] in template_source:
        syntax = "mistral"
    elif OPEN_MARKS["hermes"] in template_source:
        syntax = "hermes"
    elif OPEN_MARKS["llama"] in special or '"parameters"' in template_source:
        syntax = "llama"
    else:
        return None
    marks = (OPEN_MARKS[syntax], CLOSE_MARK, ARGS_MARK)
    mark_ids = tuple((mark, special[mark]) for mark in marks if mark in special)
    return ToolFormat(syntax, syntax == "mistral" and ARGS_MARK in template_source, mark_ids)


def read_tools(tools: Sequence[Any]) -> tuple[Tool, ...]:
    """Tools as OpenAI's API has them, checked (F043).

    Raises:
        RequestError: one is malformed, or two have the same name; names the place.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise RequestError("tools must be a list of functions", "tools")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries, but may have at most {MAX_TOOLS}", "tools")
    read = tuple(_read_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools))
    names = [tool.name for tool in read]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"tools holds two functions named {twice!r}; give each its own name", "tools")
    return read


def read_tool_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """`tool_choice` as OpenAI's API has it; None is `auto` where there are tools, else `none`.

    Raises:
        RequestError: it is malformed, or names or requires what isn't there.
    """
    if choice is None:
        return ToolChoice("auto" if tools else "none")
    if choice in ("none", "auto"):
        return ToolChoice(choice if tools else "none")
    if choice == "required":
        if not tools:
            raise RequestError("tool_choice is 'required', but there are no tools", "tool_choice")
        return ToolChoice("required")
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            f"tool_choice is {one_line(repr(choice), 60)}, but must be none, auto, required or "
            '{"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    if name not in [tool.name for tool in tools]:
        raise RequestError(f"tool_choice names {one_line(repr(name), 80)}, but no tool has that name", "tool_choice")
    return ToolChoice("named", name)


def call_grammar(
    form: ToolFormat, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool = False
) -> Structured | None:
    """What the answer must look like for the choice to be kept; None where it may be anything.

    Args:
        form: how the model writes calls.
        tools: on offer.
        choice: of the request.
        parallel: whether several calls may follow each other; `llama` writes one in any case.

    Raises:
        RequestError: the schemas together are too long or nested too deeply.
    """
    if not choice.forces_call:
        return None
    if choice.mode == "named":
        tools = [tool for tool in tools if tool.name == choice.name]
        parallel = False
    ids = dict(form.mark_ids)

    def mark(text: str) -> str:
        return f"<[{ids[text]}]>" if text in ids else json.dumps(text)

    opened = mark(OPEN_MARKS[form.syntax])
    if form.has_names_first:
        calls = [_json_rule(f"args_{i}", tool.parameters) for i, tool in enumerate(tools)]
        ways = " | ".join(f"{json.dumps(tool.name)} {mark(ARGS_MARK)} args_{i}" for i, tool in enumerate(tools))
        rules = [f"start: call{'+' if parallel else ''}", f"call: {opened} ({ways})", *calls]
    elif form.syntax == "mistral":
        several = {"type": "array", "minItems": 1, **({} if parallel else {"maxItems": 1})}
        items = _any_call(tools, "arguments", "#/items")
        rules = [f"start: {opened} calls", _json_rule("calls", {**several, "items": items})]
    elif form.syntax == "hermes":
        more = ' ("\\n" block)*' if parallel else ""
        rules = [
            f"start: block{more}",
            f'block: {opened} "\\n" call "\\n" {mark(CLOSE_MARK)}',
            _json_rule("call", _any_call(tools, "arguments", "#")),
        ]
    else:
        rules = ["start: call", _json_rule("call", _any_call(tools, "parameters", "#"))]
    return Structured.lark("\n".join(rules))


def _read_tool(where: str, tool: Any) -> Tool:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} is no object, but must be a function", "tools")
    if tool.get("type") != "function":
        raise RequestError(f"{where}.type is {one_line(repr(tool.get('type')), 40)}, but must be 'function'", "tools")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function is missing or no object", "tools")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name is {one_line(repr(name), 80)}, but must be 1 to 64 letters, digits, underscores "
            "and dashes",
            "tools",
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{where}.function.description must be a text", "tools")
    parameters = function.get("parameters")
    if parameters is None:
        return Tool(name, {"type": "object", "properties": {}, "additionalProperties": False})
    if not isinstance(parameters, Mapping):
        raise RequestError(f"{where}.function.parameters is no object, but must be a JSON schema", "tools")
    if parameters.get("type", "object") != "object":
        raise RequestError(
            f"{where}.function.parameters.type is {one_line(repr(parameters['type']), 40)}, but must be 'object'",
            "tools",
        )
    check_depth(parameters, f"{where}.function.parameters", "tools")
    return Tool(name, {"type": "object", **parameters})


def _any_call(tools: Sequence[Tool], arguments_key: str, place: str) -> dict[str, Any]:
    """The schema of a call of any of the tools, as it stands at a place in a larger one."""
    if len(tools) == 1:
        return _call(tools[0], arguments_key, place)
    return {"anyOf": [_call(tool, arguments_key, f"{place}/anyOf/{i}") for i, tool in enumerate(tools)]}


def _call(tool: Tool, arguments_key: str, place: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.name},
            arguments_key: _moved(tool.parameters, f"{place}/properties/{arguments_key}"),
        },
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself still hold where it is now."""
    if isinstance(schema, Mapping):
        return {
            key: place + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for key, value in schema.items()
        }
    if isinstance(schema, list | tuple):
        return [_moved(item, place) for item in schema]
    return schema


def _json_rule(name: str, schema: Mapping[str, Any]) -> str:
    try:
        return f"{name}: %json {json.dumps(schema, ensure_ascii=False, allow_nan=False)}"
    except (TypeError, ValueError) as error:
        raise RequestError(f"a function's parameters are no JSON value: {one_line(error)}", "tools") from None
