"""What a request may say: every field with its type, its default and what becomes of it.

A field is honoured, inert (it carries no meaning for generation) or limited to the values that mean nothing more than
its absence; anything else is refused by name. `support_table` writes the table of the documentation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from forerun.types import MAX_LOGPROBS, MAX_SEED, VerifyRule

MAX_CHOICES = 128
MAX_STOPS = 64  # each is looked for after every token
INT64_MAX = 2**63 - 1
_PROMPT = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"


class Schema(BaseModel):
    """Base of all: no other fields, no conversions, no infinite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def field(default: Any, text: str, must: str | None = None, **bounds: Any) -> Any:
    """A field that is honoured; `must` is what an error says instead of the library's words."""
    extra: dict[str, Any] = {"x-support": "honoured"} | ({"x-must": must} if must else {})
    return Field(default, description=text, json_schema_extra=extra, **bounds)


def inert(text: str = "Accepted, without effect on the answer.") -> Any:
    """A field that means nothing for the answer."""
    return Field(None, description=text, json_schema_extra={"x-support": "inert"})


def limited(why: str) -> Any:
    """A field of which only the values that ask for nothing are accepted."""
    return Field(None, description=why, json_schema_extra={"x-support": "limited", "x-must": why})


class StreamOptions(Schema):
    """`stream_options`."""

    include_usage: bool = field(False, "One more chunk with the totals, before `[DONE]`.")
    include_obfuscation: Literal[False] | None = limited("must be false: chunks are not padded")


class Speculative(Schema):
    """`speculative`: how this request is drafted. Only `rule` may change the text, never its law."""

    enabled: bool | None = field(None, "False decodes plainly, beside requests that don't.")
    method: str | None = field(None, "A drafter that the server has loaded, or `auto`.")
    k: Annotated[int, Field(ge=0)] | Literal["auto"] | None = field(
        None, "Draft tokens per step at most; 0 is off.", must="must be a whole number from 0, or 'auto'"
    )
    rule: VerifyRule | None = field(None, "The verification rule; another than `coupled` takes no seed.")
    metrics: Literal["none", "summary", "steps"] | None = field(None, "What the answer's `metrics` holds.")


class Prediction(Schema):
    """`prediction`: what the answer is expected to look like. It changes nothing but speed."""

    type: Literal["content"]
    content: str | list[TextPart] = field(..., "A text or text parts.", must="must be a string or a list of text parts")


class TextPart(Schema):
    """One part of a message's content."""

    type: Literal["text"] = field(..., "Only text.", must="must be 'text': this model reads nothing else")
    text: str


class JsonSchemaFormat(Schema):
    """`response_format.json_schema`."""

    name: str | None = inert()
    description: str | None = inert()
    schema_: dict[str, Any] = field(
        ..., "The JSON schema; a keyword that can't be enforced is refused.", alias="schema"
    )
    strict: bool | None = field(None, "False leaves out what can't be enforced instead of refusing it.")


class ResponseFormat(Schema):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"] = field(..., "`json_schema` needs the field of that name.")
    json_schema: JsonSchemaFormat | None = field(None, "What the JSON must be like.")


class StructuredOutputs(Schema):
    """`structured_outputs`: exactly one of its fields."""

    json_: dict[str, Any] | str | None = field(
        None, "A JSON schema, or its text.", must="must be an object or a JSON text", alias="json"
    )
    regex: str | None = field(None, "An expression of Rust's regex crate that matches the whole text.")
    choice: list[str] | None = field(None, "One of these texts.")
    grammar: str | None = field(None, "A Lark grammar; its rule `start` is the text.")
    json_object: bool | None = field(None, "True for any JSON object.")


class FunctionCall(Schema):
    """What an assistant called."""

    name: str = field(..., "Of the function.")
    arguments: str = field(..., "The JSON text of an object.")


class ToolCall(Schema):
    """One call in an assistant's message."""

    id: str = field(..., "As the answer had it.")
    type: Literal["function"] = field("function", "Only functions.")
    function: FunctionCall = field(..., "What was called.")


class FunctionSpec(Schema):
    """A function that the model may call."""

    name: str = field(..., "1 to 64 letters, digits, underscores and dashes.")
    description: str | None = field(None, "For the model.")
    parameters: dict[str, Any] | None = field(None, "JSON schema of the arguments; none when absent.")
    strict: bool | None = field(None, "True promises arguments by the schema, whatever `tool_choice` is.")


class Tool(Schema):
    """One entry of `tools`."""

    type: Literal["function"] = field(..., "Only functions.", must="must be 'function'")
    function: FunctionSpec = field(..., "What may be called.")


class NamedFunction(Schema):
    """The function that must be called."""

    name: str = field(..., "Of one of the tools.")


class NamedToolChoice(Schema):
    """`tool_choice` by name."""

    type: Literal["function"]
    function: NamedFunction


class Message(Schema):
    """One message of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)] = field(
        ..., "Who says it, by the names that the template knows."
    )
    content: str | list[TextPart] | None = field(
        None, "A text or text parts, which are joined.", must="must be a string or a list of text parts"
    )
    name: str | None = field(None, "Passed on to the template.")
    reasoning_content: str | None = field(None, "What an assistant thought.")
    reasoning: str | None = field(None, "Another name of `reasoning_content`.")
    thinking: str | None = field(None, "Another name of `reasoning_content`.")
    tool_calls: list[ToolCall] | None = field(None, "What an assistant called, for templates that know tools.")
    tool_call_id: str | None = field(None, "Which call a tool's message answers; passed on to the template.")
    refusal: str | None = inert()
    annotations: list[Any] | None = inert()
    audio: None = limited("must be left out: this model reads text")
    function_call: None = limited("must be left out: use tool_calls")


class GenerationFields(Schema):
    """What completions and chats have in common."""

    model: str | None = field(None, "A served name; absent means the one that is served.")
    max_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = field(
        None,
        "Tokens to generate at most; default and upper end: the room that the prompt leaves.",
        must=f"must be a whole number from 0 to {INT64_MAX}",
    )
    temperature: float | None = field(None, "0 is greedy; default 1.")
    top_p: float | None = field(None, "Keep the most likely tokens up to this mass; default 1, off.")
    top_k: int | None = field(None, "Keep the k most likely tokens; 0 and -1 are off.")
    min_p: float | None = field(None, "Keep tokens with at least this share of the top one; 0 is off.")
    repetition_penalty: float | None = field(None, "Of tokens in prompt or output; 1 is off.")
    repeat_penalty: float | None = field(None, "Another name of `repetition_penalty`.")
    presence_penalty: float | None = field(None, "Once per token in the output; 0 is off.")
    frequency_penalty: float | None = field(None, "Per occurrence in the output; 0 is off.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = field(
        None,
        "Added to logits, by token id.",
        must="must map token ids to numbers from -100 to 100",
    )
    min_tokens: Annotated[int, Field(le=INT64_MAX)] | None = field(None, "No end before this many tokens.")
    ignore_eos: bool | None = field(None, "Do not end at the model's end of text.")
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = field(
        None,
        "Texts to end before; the earliest counts.",
        must=f"must be a string or a list of up to {MAX_STOPS} strings",
    )
    stop_token_ids: list[int] | None = field(None, "Further tokens that end the output.")
    include_stop_str_in_output: Literal[False] | None = limited("must be false: the text ends before a stop string")
    skip_special_tokens: Literal[True] | None = limited("must be true: control tokens are no text")
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = field(
        None,
        "0 to 2^64 - 1; choice i of a prompt uses (seed + i) mod 2^64. Drawn and reported when absent.",
        must=f"must be a whole number from 0 to {MAX_SEED}",
    )
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = field(None, "Choices per prompt; default 1.")
    stream: bool | None = field(None, "Send the answer while it is made.")
    stream_options: StreamOptions | None = field(None, "With `stream` alone.")
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = field(
        None, "Log-probabilities of the prompt's tokens, with so many alternatives; not with `stream`."
    )
    return_token_ids: bool | None = field(None, "Report the ids of prompt and output.")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = field(
        None,
        "Keep so many of the prompt's last tokens, -1 as many as leave room for one; usage says how many were cut.",
    )
    speculative: Speculative | None = field(None, "How this request is drafted; see there.")
    num_draft_tokens: Annotated[int, Field(ge=0)] | None = field(None, "Another name of `speculative.k`.")
    draft_num_predict: Annotated[int, Field(ge=0)] | None = field(None, "Another name of `speculative.k`.")
    draft_model: str | None = field(None, "Another name of `speculative.method`.")
    prediction: Prediction | None = field(None, "What the answer is expected to look like; changes nothing but speed.")
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] | None = field(None, "Lower runs first.")
    cache_salt: Annotated[str, Field(max_length=256)] | None = field(
        None, "Cached prefixes are shared within one salt only."
    )
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = field(
        None, "The answer's id; also as header `X-Request-Id`."
    )
    response_format: ResponseFormat | None = field(
        None, "`text`, `json_object` or `json_schema`: what the text must be."
    )
    structured_outputs: StructuredOutputs | None = field(
        None, "The same by one of `json`, `regex`, `choice`, `grammar` and `json_object`."
    )
    grammar: str | None = field(None, "The same by a Lark grammar.")
    user: str | None = inert()
    metadata: dict[str, Any] | None = inert()
    safety_identifier: str | None = inert()
    prompt_cache_key: str | None = inert()
    prompt_cache_retention: str | None = inert()
    store: Literal[False] | None = limited("must be false: answers are not stored")
    service_tier: Literal["auto", "default"] | None = limited("must be 'auto' or 'default': there is one tier")


class CompletionRequest(GenerationFields):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True)]
    ) = field(..., "A text, a list of texts, token ids, or a list of lists of token ids.", must=_PROMPT)
    echo: bool | None = field(None, "Begin the text with the prompt.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = field(
        None, "Log-probabilities with so many alternatives, of the prompt too with `echo`."
    )
    best_of: Annotated[int, Field(ge=1)] | None = field(None, "As many as `n`, that is: no choice among more.")
    suffix: None = limited("must be left out: text is continued, not filled in")


class ChatRequest(GenerationFields):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = field(..., "The conversation.")
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = field(
        None, "Another name of `max_tokens`.", must=f"must be a whole number from 1 to {INT64_MAX}"
    )
    logprobs: bool | None = field(None, "Log-probabilities of the tokens.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = field(
        None, "With so many alternatives; needs `logprobs`."
    )
    tools: list[Tool] | None = field(None, "Functions that the model may call, for templates that know tools.")
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = field(
        None,
        "Whether it may or must call, and which; default `auto`. `none` leaves `tools` out of the prompt.",
        must="must be 'none', 'auto', 'required' or name a function",
    )
    parallel_tool_calls: bool | None = field(None, "False: one call per answer at most. Default true.")
    chat_template_kwargs: dict[str, Any] | None = field(None, "Further variables of the chat template.")
    add_generation_prompt: bool | None = field(None, "End the prompt with the beginning of an assistant's turn.")
    continue_final_message: bool | None = field(None, "Continue the last message instead of answering it.")
    modalities: list[Literal["text"]] | None = limited("must be ['text']: this model writes text")
    audio: None = limited("must be left out: this model writes text")
    functions: None = limited("must be left out: use tools")
    function_call: None = limited("must be left out: use tool_choice")
    reasoning_effort: None = limited("must be left out: use chat_template_kwargs, as the model's template has it")
    verbosity: None = limited("must be left out: say it in a message")
    web_search_options: None = limited("must be left out: this server searches nothing")


class TokenizeRequest(Schema):
    """`POST /tokenize`: a prompt or messages, as a request would read them."""

    model: str | None = field(None, "A served name.")
    prompt: str | None = field(None, "A text.")
    messages: list[Message] | None = field(None, "A conversation instead.")
    add_special_tokens: bool | None = field(None, "Put the begin token first where the model wants one; default true.")
    tools: list[Tool] | None = field(None, "As for chats, and so are the next three.")
    chat_template_kwargs: dict[str, Any] | None = field(None, "As for chats.")
    add_generation_prompt: bool | None = field(None, "As for chats.")
    continue_final_message: bool | None = field(None, "As for chats.")
    return_token_strs: bool | None = field(None, "Report the tokens' names too.")


class DetokenizeRequest(Schema):
    """`POST /detokenize`."""

    model: str | None = field(None, "A served name.")
    tokens: list[int] = field(..., "Token ids.", must="must be a list of token ids")


for _model in (Prediction, Message, GenerationFields, CompletionRequest, ChatRequest, TokenizeRequest):
    _model.model_rebuild()


def support_table(schema: type[BaseModel], without: type[BaseModel] | None = None) -> str:
    """A schema's fields as a Markdown table.

    Args:
        schema: whose fields.
        without: a schema whose fields are left out, because another table has them.
    """
    lines = ["| field | | meaning |", "|---|---|---|"]
    for name, info in schema.model_fields.items():
        if without is not None and name in without.model_fields:
            continue
        extra = info.json_schema_extra
        kind = extra.get("x-support", "honoured") if isinstance(extra, dict) else "honoured"
        lines.append(f"| `{info.alias or name}` | {kind} | {info.description or ''} |")
    return "\n".join(lines)
