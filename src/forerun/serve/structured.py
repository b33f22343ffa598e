"""What a request says of the form of its answer: a constraint on the text, or tools that the answer may call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from forerun.errors import RequestError
from forerun.models.structured import Structured
from forerun.models.tool_calls import ToolCallStream
from forerun.models.tools import ToolFormat, call_grammar, read_tool_choice, read_tools
from forerun.serve.problems import Problem
from forerun.serve.schema import ChatRequest, GenerationFields, Message, ResponseFormat, StructuredOutputs, Tool

if TYPE_CHECKING:
    from forerun.engine.llm import LLM

# A field that asks for a constraint, and what makes the constraint of it.
Asked = tuple[str, Callable[[], Structured]]

_JSON_SCHEMA = "response_format.json_schema"


@dataclass(frozen=True, slots=True)
class Offer:
    """Tools that an answer may call.

    Attributes:
        tools: as the chat template reads them.
        form: how the model writes calls.
        names: of the tools.
    """

    tools: Sequence[Mapping[str, Any]]
    form: ToolFormat
    names: frozenset[str]

    def reader(self) -> ToolCallStream:
        """Finds the calls in one answer."""
        return ToolCallStream(self.form.syntax, self.names)


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer must look like.

    Attributes:
        structured: the constraint on the text; None leaves it free.
        param: the request's field that asks for it.
        offer: tools that it may call; None where there are none.
    """

    structured: Structured | None = None
    param: str = ""
    offer: Offer | None = None


def read_form(request: GenerationFields, llm: LLM) -> Form:
    """Settles what a request says of the form of its answer. Nothing is compiled yet.

    Raises:
        Problem: it is malformed, contradicts itself, or asks for tools of a model that knows none; names the field.
    """
    form = _read_constraint(request)
    if not isinstance(request, ChatRequest):
        return form
    with_tools = _read_tools(request, llm)
    if with_tools.offer is not None and form.structured is not None:
        name = form.param.split(".")[0]
        message = f"{name} and tools are given, but a call has a form of its own; leave out one of them"
        raise Problem(400, f"{message}, or send tool_choice 'none'", name)
    return form if with_tools.offer is None else with_tools


def check_calls(messages: Sequence[Message], llm: LLM) -> None:
    """Refuses calls in a conversation that the model's template would leave out.

    Raises:
        Problem: names the message.
    """
    for index, message in enumerate(messages):
        if message.tool_calls and llm.tool_format is None:
            param = f"messages[{index}].tool_calls"
            raise Problem(400, f"{param} is given, but this model's chat template knows no tools", param)


def _read_constraint(request: GenerationFields) -> Form:
    asked = [*_of_format(request.response_format), *_of_outputs(request.structured_outputs)]
    if request.grammar is not None:
        asked.append(("grammar", partial(Structured.lark, request.grammar)))
    if not asked:
        return Form()
    if len(asked) > 1:
        names = [param.split(".")[0] for param, _ in asked]
        raise Problem(400, f"{' and '.join(names)} are given, but an answer has one form; send one of them", names[1])
    [(param, make)] = asked
    try:
        return Form(make(), param)
    except RequestError as error:
        raise Problem.of(error, {"grammar": param}) from error


def _of_format(wanted: ResponseFormat | None) -> Iterator[Asked]:
    if wanted is None:
        return
    schema = wanted.json_schema
    if wanted.type != "json_schema" and schema is not None:
        message = f"{_JSON_SCHEMA} is given, but response_format.type is '{wanted.type}', not 'json_schema'"
        raise Problem(400, message, _JSON_SCHEMA)
    if wanted.type == "json_object":
        yield "response_format", Structured.json_object
    elif wanted.type == "json_schema":
        if schema is None:
            raise Problem(400, f"{_JSON_SCHEMA} is missing", _JSON_SCHEMA, "missing_field")
        is_lenient = schema.strict is False
        yield f"{_JSON_SCHEMA}.schema", partial(Structured.json_schema, schema.schema_, lenient=is_lenient)


def _of_outputs(wanted: StructuredOutputs | None) -> Iterator[Asked]:
    if wanted is None:
        return
    given: dict[str, Callable[[], Structured] | None] = {
        "json": None if wanted.json_ is None else partial(Structured.json_schema, wanted.json_),
        "regex": None if wanted.regex is None else partial(Structured.regex, wanted.regex),
        "choice": None if wanted.choice is None else partial(Structured.choice, wanted.choice),
        "grammar": None if wanted.grammar is None else partial(Structured.lark, wanted.grammar),
        "json_object": Structured.json_object if wanted.json_object else None,
    }
    asked = [(f"structured_outputs.{name}", make) for name, make in given.items() if make is not None]
    if len(asked) != 1:
        found = " and ".join(name for name, make in given.items() if make is not None) or "none"
        message = f"structured_outputs has {found}, but must have exactly one of: {', '.join(given)}"
        raise Problem(400, message, "structured_outputs")
    yield from asked


def _read_tools(request: ChatRequest, llm: LLM) -> Form:
    given, named = request.tools or (), request.tool_choice
    printed = [_printed(tool) for tool in given]
    try:
        tools = read_tools(printed)
        choice = read_tool_choice(named if named is None or isinstance(named, str) else named.model_dump(), tools)
        if choice.mode == "none":
            return Form()
        form = llm.tool_format
        if form is None:
            message = "tools is given, but this model's chat template knows no tools; leave it out"
            raise Problem(400, f"{message}, or constrain the answer with response_format", "tools")
        parallel = request.parallel_tool_calls is not False
        strict = frozenset(tool.function.name for tool in given if tool.function.strict)
        structured = call_grammar(form, tools, choice, parallel=parallel, strict=strict)
    except RequestError as error:
        raise Problem.of(error, {"grammar": "tools"}) from error
    return Form(structured, "tools", Offer(printed, form, frozenset(tool.name for tool in tools)))


def _printed(tool: Tool) -> dict[str, Any]:
    """A tool as templates print it."""
    function = tool.function
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {"type": tool.type, "function": {name: value for name, value in fields.items() if value is not None}}
