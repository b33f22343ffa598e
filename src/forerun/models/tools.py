"""Tools that a conversation offers: what a caller may send, how the model writes calls, and grammars that force one."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
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
    def has_blocks(self) -> bool:
        """Whether each call has an opening mark of its own, so that several are written one after another."""
        return self.syntax == "hermes" or self.has_names_first

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
    form: ToolFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool = False,
    strict: Collection[str] = (),
) -> Structured | None:
    """What the answer must look like for the choice to be kept; None where it may be anything.

    An answer that may call is text with calls in it, or for `llama` either of the two. Its text is free, but where a
    call begins there must be one; after the last call that `parallel` allows nothing follows.

    Args:
        form: how the model writes calls.
        tools: on offer.
        choice: of the request.
        parallel: whether several calls may follow each other; `llama` writes one in any case.
        strict: tools whose arguments keep to their schemas also in calls that nobody forces.

    Raises:
        RequestError: the schemas together are too long or nested too deeply.
    """
    if choice.mode == "none" or (choice.mode == "auto" and parallel and not strict):
        return None
    if choice.mode == "auto":
        tools = [tool if tool.name in strict else Tool(tool.name, {"type": "object"}) for tool in tools]
    if choice.mode == "named":
        tools = [tool for tool in tools if tool.name == choice.name]
        parallel = False
    start = _forced_rules if choice.forces_call else _free_rules
    return Structured.lark("\n".join((*start(form, parallel), *_call_rules(form, tools, parallel))))


def _forced_rules(form: ToolFormat, parallel: bool) -> Sequence[str]:
    """An answer that is calls alone."""
    opened = "" if form.syntax == "llama" else _mark(form, OPEN_MARKS[form.syntax])
    between = '"\\n" ' if form.syntax == "hermes" else ""
    more = f" ({between}{opened} calls)*" if parallel and form.has_blocks else ""
    return (f"start: {opened} calls{more}",)


def _free_rules(form: ToolFormat, parallel: bool) -> Sequence[str]:
    """An answer that may be text, calls, or text with calls in it."""
    if form.syntax == "llama":  # whose calls begin with nothing but their own brace
        return ("start: calls | TEXT?", r"TEXT: /[\x20\n\r\t]*[^{\x20\n\r\t](.|\n)*/")
    opened, text = OPEN_MARKS[form.syntax], r"/(.|\n)*/"
    if opened in dict(form.mark_ids):  # a token of its own, which no text can hold
        many = "*" if parallel and form.has_blocks else "?"
        end = " TEXT" if parallel and form.has_blocks else ""
        return (f"start: TEXT ({_mark(form, opened)} calls{end}){many}", f"TEXT: {text}")
    # A lexeme that ends as soon as it can: text is text until the mark is in it.
    many = "(opened calls)* TEXT" if parallel and form.has_blocks else "opened calls | TEXT"
    return (f"start: {many}", f"TEXT: {text}", f"opened[lazy]: TEXT {json.dumps(opened)}")


def _call_rules(form: ToolFormat, tools: Sequence[Tool], parallel: bool) -> Sequence[str]:
    """A rule `calls` for what follows the mark that opens: a call and the mark that closes it, or a list of calls."""
    if form.has_names_first:
        ways = [f"{json.dumps(tool.name)} {_mark(form, ARGS_MARK)} args_{i}" for i, tool in enumerate(tools)]
        return (
            f"calls: {' | '.join(ways)}",
            *[_json_rule(f"args_{i}", tool.parameters) for i, tool in enumerate(tools)],
        )
    if form.syntax == "mistral":
        several = {"type": "array", "minItems": 1, **({} if parallel else {"maxItems": 1})}
        return (_json_rule("calls", {**several, "items": _any_call(tools, "arguments", "#/items")}),)
    if form.syntax == "hermes":
        call = _json_rule("call", _any_call(tools, "arguments", "#"))
        return (f'calls: "\\n" call "\\n" {_mark(form, CLOSE_MARK)}', call)
    return (_json_rule("calls", _any_call(tools, "parameters", "#")),)


def _mark(form: ToolFormat, text: str) -> str:
    """A mark in a rule: its token where it has one, else its text."""
    ids = dict(form.mark_ids)
    return f"<[{ids[text]}]>" if text in ids else json.dumps(text)


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
