"""`POST /v1/responses`: OpenAI's second form of a chat. Text in, text and calls out; nothing is stored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from forerun.serve.problems import Problem
from forerun.serve.schema import (
    INT64_MAX,
    ChatRequest,
    FunctionCall,
    FunctionSpec,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedToolChoice,
    Prediction,
    ResponseFormat,
    Schema,
    Speculative,
    Tool,
    ToolCall,
    field,
    inert,
    limited,
)
from forerun.types import MAX_LOGPROBS, MAX_SEED

# What the chat's fields are called here.
NAMES = {"messages": "input", "max_tokens": "max_output_tokens"}
LOGPROBS = "message.output_text.logprobs"  # in `include`


class InputPart(Schema):
    """One part of an item's content."""

    type: Literal["input_text", "output_text"] = field(..., "Only text.", must="must be 'input_text' or 'output_text'")
    text: str = field(..., "The text.")
    annotations: list[Any] | None = inert()
    logprobs: list[Any] | None = inert()


class InputItem(Schema):
    """One message of the input, or of an earlier answer's output."""

    type: Literal["message"] | None = field(
        None, "Messages and calls.", must="must be 'message', 'function_call' or 'function_call_output'"
    )
    role: Annotated[str, Field(min_length=1, max_length=64)] = field(..., "Who says it.")
    content: str | list[InputPart] = field(
        ..., "A text or text parts.", must="must be a string or a list of text parts"
    )
    id: str | None = inert()
    status: str | None = inert()


class CallItem(Schema):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str = field(..., "As the answer had it.")
    name: str = field(..., "Of the function.")
    arguments: str = field(..., "The JSON text of an object.")
    id: str | None = inert()
    status: str | None = inert()


class CallOutputItem(Schema):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str = field(..., "Of the call.")
    output: str | list[InputPart] = field(..., "A text or text parts.", must="must be a string or a list of text parts")
    id: str | None = inert()
    status: str | None = inert()


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if kind in ("function_call", "function_call_output") else "message"


Item = Annotated[
    Annotated[InputItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")],
    Discriminator(_kind),
]


class TextFormat(Schema):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"] = field(
        ..., "What the text must be.", must="must be 'text', 'json_object' or 'json_schema'"
    )
    name: str | None = inert()
    description: str | None = inert()
    schema_: dict[str, Any] | None = field(None, "The JSON schema.", alias="schema")
    strict: bool | None = field(None, "As for chats.")


class TextOptions(Schema):
    """`text`."""

    format: TextFormat | None = field(None, "As `response_format` of chats.")
    verbosity: None = limited("must be left out: say it in a message")


class FunctionTool(FunctionSpec):
    """One entry of `tools`."""

    type: Literal["function"] = field(..., "Only functions.", must="must be 'function'")


class FunctionChoice(NamedFunction):
    """`tool_choice` by name."""

    type: Literal["function"]


class ResponsesStreamOptions(Schema):
    """`stream_options`."""

    include_obfuscation: Literal[False] | None = limited("must be false: chunks are not padded")


class ResponsesRequest(Schema):
    """`POST /v1/responses`."""

    model: str | None = field(None, "A served name; absent means the one that is served.")
    input: str | list[Item] = field(
        ..., "A text, or messages, calls and what they returned.", must="must be a string or a list of messages"
    )
    instructions: str | None = field(None, "A system message in front.")
    max_output_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = field(None, "Tokens to generate at most.")
    temperature: float | None = field(None, "0 is greedy; default 1.")
    top_p: float | None = field(None, "Keep the most likely tokens up to this mass; default 1, off.")
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = field(None, "As for chats.")
    stream: bool | None = field(None, "Send the answer while it is made, as named events.")
    stream_options: ResponsesStreamOptions | None = field(None, "With `stream` alone.")
    text: TextOptions | None = field(None, "The format of the answer.")
    tools: list[FunctionTool] | None = field(None, "Functions, as for chats.")
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = field(
        None, "As for chats.", must="must be 'none', 'auto', 'required' or name a function"
    )
    parallel_tool_calls: bool | None = field(None, "As for chats.")
    include: list[Literal["message.output_text.logprobs"]] | None = field(
        None, f"Only `{LOGPROBS}`; not with tools.", must=f"must be empty or ['{LOGPROBS}']"
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = field(
        None, "Log-probabilities with so many alternatives; needs `include`."
    )
    speculative: Speculative | None = field(None, "As for chats.")
    prediction: Prediction | None = field(None, "As for chats.")
    cache_salt: Annotated[str, Field(max_length=256)] | None = field(None, "As for chats.")
    user: str | None = inert()
    metadata: dict[str, Any] | None = inert()
    safety_identifier: str | None = inert()
    prompt_cache_key: str | None = inert()
    prompt_cache_retention: str | None = inert()
    store: Literal[False] | None = limited("must be false: answers are not stored")
    service_tier: Literal["auto", "default"] | None = limited("must be 'auto' or 'default': there is one tier")
    truncation: Literal["disabled"] | None = limited("must be 'disabled': a prompt that is too long is refused")
    background: Literal[False] | None = limited("must be false: answers are not stored")
    reasoning: None = limited("must be left out")
    previous_response_id: None = limited("must be left out: answers are not stored; send the messages themselves")
    conversation: None = limited("must be left out: conversations are not stored; send the messages themselves")
    max_tool_calls: None = limited("must be left out")
    prompt: None = limited("must be left out: prompts are not stored")


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """The chat that a request asks for.

    Raises:
        Problem: there is nothing to answer, or fields contradict each other.
    """
    if request.stream_options is not None and not request.stream:
        raise Problem(400, "stream_options is given without stream; send both or neither", "stream_options")
    if request.top_logprobs is not None and not request.include:
        raise Problem(400, f"top_logprobs is given, but include is not ['{LOGPROBS}']; send both", "top_logprobs")
    if request.include and request.tools and request.tool_choice != "none":
        message = "include asks for log-probabilities, which only texts have here; leave out tools"
        raise Problem(400, f"{message}, or use /v1/chat/completions", "include")
    items = [InputItem(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    if not items:
        raise Problem(400, "input is empty, but must have at least one message", "input")
    messages = _messages(items)
    if request.instructions is not None:
        messages.insert(0, Message(role="system", content=request.instructions))
    choice = request.tool_choice
    return ChatRequest(
        model=request.model,
        messages=messages,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stream=request.stream,
        response_format=_format(request.text.format) if request.text and request.text.format else None,
        tools=None if request.tools is None else list(map(_tool, request.tools)),
        tool_choice=NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
        if isinstance(choice, FunctionChoice)
        else choice,
        parallel_tool_calls=request.parallel_tool_calls,
        logprobs=bool(request.include),
        top_logprobs=request.top_logprobs,
        speculative=request.speculative,
        prediction=request.prediction,
        cache_salt=request.cache_salt,
    )


def response_param(param: str) -> str:
    """What a chat's field is called here."""
    param = re.sub(r"^messages\[.*", "input", param)
    param = re.sub(r"^response_format(\.json_schema)?", "text.format", param)
    param = re.sub(r"^(tools\[\d+\]|tool_choice)\.function", r"\1", param)
    return NAMES.get(param, param)


def _messages(items: Sequence[InputItem | CallItem | CallOutputItem]) -> list[Message]:
    """Items as messages. An answer's text and calls, which follow each other, are one message."""
    messages: list[Message] = []
    for item in items:
        if isinstance(item, InputItem):
            messages.append(Message(role=item.role, content=_text(item.content)))
        elif isinstance(item, CallOutputItem):
            messages.append(Message(role="tool", content=_text(item.output), tool_call_id=item.call_id))
        else:
            call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
            if not messages or messages[-1].role != "assistant":
                messages.append(Message(role="assistant"))
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
    return messages


def _text(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _format(form: TextFormat) -> ResponseFormat:
    if form.type != "json_schema":
        if form.schema_ is not None:
            message = f"text.format.schema is given, but text.format.type is '{form.type}', not 'json_schema'"
            raise Problem(400, message, "text.format.schema")
        return ResponseFormat(type=form.type)
    if form.schema_ is None:
        raise Problem(400, "text.format.schema is missing", "text.format.schema", "missing_field")
    schema = JsonSchemaFormat.model_validate({"schema": form.schema_, "strict": form.strict})
    return ResponseFormat(type=form.type, json_schema=schema)


def _tool(tool: FunctionTool) -> Tool:
    spec = FunctionSpec(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    return Tool(type="function", function=spec)
