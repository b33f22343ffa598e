"""Conversations to prompts, with the template that a model was trained on.

A template writes control tokens as text, and so can a user (F049). Who wrote which is found by rendering twice: once
as it is, and once with a stand-in for a telling character of every control name, wherever the conversation holds
that character. If the two texts agree apart from the stand-ins, every control name that is left in the second was
written by the template.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError

from forerun.errors import LoadError, RequestError, one_line, shown
from forerun.models.template_sandbox import BoundedEnvironment, TemplateRefusal
from forerun.models.tokenizer import Tokenizer, check_text

MAX_SOURCE_CHARS = 1 << 18  # the longest known templates have an eighth of it

# Unicode's noncharacters, which are for use inside a program, then a private plane.
_STAND_INS = (range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFD))
# Characters of control names, those first that are rare in text and in the markup that templates look for in it.
_TELLING_CHARS = "|｜▁[<"

_END_MARK = "\U0010fffd"  # the last of the other private plane, which no stand-in comes from
_OWN_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"))

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

_environment = BoundedEnvironment()


@dataclass(frozen=True, slots=True)
class _Conversation:
    """What a template sees: plain lists, dicts, strings and numbers."""

    messages: list[Any]
    tools: list[Any] | None
    add_generation_prompt: bool
    extra: dict[str, Any]
    now: datetime


class ChatTemplate:
    """One model's template. Immutable; safe to share between threads.

    Args:
        source: Jinja source.
        bos_token: text of the begin token, as the template may write it.
        eos_token: text of the end token.

    Attributes:
        source: as given.

    Raises:
        LoadError: the source is not a template; says where.
    """

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise LoadError(
                f"tokenizer.chat_template has {len(source)} characters, more than the {MAX_SOURCE_CHARS} that are read"
            )
        self.source = source
        self._template = _compile(source)
        self._fixed = {"bos_token": bos_token, "eos_token": eos_token}

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
        """The file's own template; None for a model without one."""
        source = metadata.get("tokenizer.chat_template")
        if source is None:
            return None
        if not isinstance(source, str):
            raise LoadError(f"tokenizer.chat_template is of type {type(source).__name__}, but must be a string")
        return cls.for_tokenizer(source, tokenizer)

    @classmethod
    def for_tokenizer(cls, source: str, tokenizer: Tokenizer) -> ChatTemplate:
        """The template that writes this tokenizer's begin and end tokens; a LoadError as for the class."""
        bos = "" if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id)
        eos = tokenizer.token_text(tokenizer.eos_ids[0]) if tokenizer.eos_ids else ""
        return cls(source, bos, eos)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, for reading; `encode_chat` gives the ids.

        Args:
            messages: the conversation. `content` is a string or a list of text parts, which are joined as they are;
                an assistant's may be None or missing, which is the empty string. Other keys that are None count as
                missing. What an assistant thought may be called `reasoning_content`, `thinking` or `reasoning`.
                Arguments of its tool calls may be objects or their JSON texts.
            add_generation_prompt: end with the beginning of an assistant's turn.
            tools: JSON schemas, for templates that show them.
            extra: further variables, by the names that the template knows.
        Raises:
            RequestError: a message is malformed, or the template refuses it or fails; carries the template's words.
        """
        return self._run(_conversation(messages, add_generation_prompt, tools, extra or {}))

    def _run(self, conversation: _Conversation) -> str:
        variables = {
            **conversation.extra,
            "messages": conversation.messages,
            "tools": conversation.tools,
            "documents": None,  # templates that know them ask
            "add_generation_prompt": conversation.add_generation_prompt,
            **self._fixed,
        }
        num_chars = sum(map(len, _strings(conversation)))
        try:
            return _environment.run(self._template, variables, conversation.now, num_chars)
        except TemplateRefusal as error:
            raise RequestError(
                f"the model's chat template refuses the messages: {one_line(error)}", "messages"
            ) from error
        except Exception as error:  # a template is a program of its own and may raise anything
            raise RequestError(
                f"the model's chat template fails on these messages: {one_line(error)}", "messages"
            ) from error


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    extra: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> list[int]:
    """The prompt's token ids; control tokens come from the template alone (F049).

    As long as nobody spells control names, these are the ids of the rendered text. The begin token is in front
    exactly once if the template writes it or the model wants it (F048).

    A template may treat a message by what it contains. Where that concerns control names of the conversation's own,
    they stay hidden from the template, so it can't act on them.

    Args:
        tokenizer: the model's.
        template: the model's.
        messages, add_generation_prompt, tools, extra: as for `ChatTemplate.render`.
        continue_final_message: end where the last message's content does, so that the output goes on with it; without
            add_generation_prompt.

    Raises:
        RequestError: as `ChatTemplate.render`, or the last message can't be continued.
    """
    if continue_final_message:
        if add_generation_prompt:
            raise RequestError(
                "continue_final_message goes on with a turn and add_generation_prompt begins one; choose one of them",
                "continue_final_message",
            )
        messages = _with_end_mark(messages)
    conversation = _conversation(messages, add_generation_prompt, tools, extra or {})
    text = template._run(conversation)
    marks = _choose_stand_ins(tokenizer, text)
    marked = text
    if any(not marks.keys().isdisjoint(map(ord, string)) for string in _strings(conversation)):
        marked = template._run(_mapped(conversation, lambda string: string.translate(marks)))
        if marked.translate(_inverse(marks)) != text:
            # The template looks for such characters in messages. Hide whole control names only.
            marked = template._run(_mapped(conversation, lambda string: _hide_names(tokenizer, string, marks)))
    if continue_final_message:
        marked = _up_to_end_mark(marked)
    ids: list[int] = []
    for token_id, segment in tokenizer.split_special(marked):
        if token_id is None:
            ids += tokenizer.encode(segment.translate(_inverse(marks)), add_bos=False, continues=bool(ids))
        else:
            ids.append(token_id)
    return tokenizer.with_bos(ids) if tokenizer.adds_bos else ids


def _with_end_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with a mark where the last message's content ends."""
    last = messages[-1] if messages else None
    content = last.get("content") if isinstance(last, Mapping) else None
    if not isinstance(last, Mapping) or not isinstance(content, str):
        raise RequestError("continue_final_message needs a last message whose content is a string", "messages")
    if any(_END_MARK in string for string in _strings(list(messages))):
        raise RequestError(f"the messages hold the private character U+{ord(_END_MARK):X}; leave it out", "messages")
    return [*messages[:-1], {**last, "content": content + _END_MARK}]


def _up_to_end_mark(text: str) -> str:
    if text.count(_END_MARK) != 1:
        raise RequestError(
            "the model's chat template does not show the last message as it is, so it can't be continued",
            "continue_final_message",
        )
    return text[: text.index(_END_MARK)]


def _choose_stand_ins(tokenizer: Tokenizer, text: str) -> dict[int, int]:
    """Maps one character of every control name to a character that the text doesn't hold."""
    telling = {next((char for char in _TELLING_CHARS if char in name), name[0]) for name in tokenizer.special_tokens}
    used = set(text)
    free = (code for code in itertools.chain(*_STAND_INS) if chr(code) not in used)
    marks = dict(zip(map(ord, sorted(telling)), free, strict=False))
    if len(marks) < len(telling):
        raise RequestError("the messages use up Unicode's private characters; leave some of them out", "messages")
    return marks


def _inverse(marks: Mapping[int, int]) -> dict[int, int]:
    return {stand_in: char for char, stand_in in marks.items()}


def _hide_names(tokenizer: Tokenizer, string: str, marks: Mapping[int, int]) -> str:
    pieces = tokenizer.split_special(string)
    return "".join(piece if token_id is None else piece.translate(marks) for token_id, piece in pieces)


def _compile(source: str) -> Template:
    try:
        return _environment.load(source)
    except Exception as error:  # what Jinja accepts, Python may not: nesting, numbers, half characters
        line = getattr(error, "lineno", None) if isinstance(error, TemplateError) else None
        where = f" in line {line}" if line else ""
        raise LoadError(f"tokenizer.chat_template is not a valid template{where}: {one_line(error)}") from error


def _conversation(
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    extra: Mapping[str, Any],
) -> _Conversation:
    if not messages:
        raise RequestError("messages is empty, but a chat needs at least one message", "messages")
    plain = [_plain_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    reserved = _OWN_VARIABLES.intersection(extra)
    if reserved:
        raise RequestError(
            f"the template's variable {min(reserved)!r} is not for requests to set", "chat_template_kwargs"
        )
    listed = None if tools is None else list(tools)
    conversation = _Conversation(plain, listed, add_generation_prompt, dict(extra), datetime.now())
    try:
        for field, param in (("messages", "messages"), ("tools", "tools"), ("extra", "chat_template_kwargs")):
            for string in _strings(getattr(conversation, field)):
                check_text(string, param)
    except RecursionError:
        raise RequestError("messages or tools are nested too deeply", "messages") from None
    return conversation


def _plain_message(name: str, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{name} is of type {type(message).__name__}, but must be an object", "messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{name}.role is {shown(role)}, but must be a name such as 'user'", "messages")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    given = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in given:
        given["tool_calls"] = _plain_calls(f"{name}.tool_calls", given["tool_calls"])
    return _with_reasoning(given | {"content": _plain_content(f"{name}.content", content)})


def _plain_calls(name: str, calls: Any) -> list[Any]:
    """Calls with arguments as objects, which templates print; a conversation has them as JSON texts (F043)."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{name} is of type {type(calls).__name__}, but must be a list of calls", "messages")
    return [_plain_call(f"{name}[{i}]", call) for i, call in enumerate(calls)]


def _plain_call(name: str, call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise RequestError(f"{name} is of type {type(call).__name__}, but must be an object", "messages")
    if "function" in call:
        return {**call, "function": _plain_call(f"{name}.function", call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(
            f"{name}.arguments is {shown(arguments)}, but must be the JSON text of an object", "messages"
        )
    return {**call, "arguments": value}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """What an assistant thought goes by several names; templates read the first or the second."""
    reasoning = next((message[name] for name in _REASONING_NAMES if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain_content(name: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        found = "is missing" if content is None else f"is of type {type(content).__name__}"
        raise RequestError(f"{name} {found}, but must be a string or a list of text parts", "messages")
    for i, part in enumerate(content):
        is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"{name}[{i}] is of type {shown(kind)}, but must be a text part with a string", "messages"
            )
    return "".join(part["text"] for part in content)


def _strings(value: Any) -> Iterator[str]:
    """Every string in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, _Conversation):
        yield from _strings(value.messages)
        yield from _strings(value.tools)
        yield from _strings(value.extra)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _mapped(conversation: _Conversation, change: Callable[[str], str]) -> _Conversation:
    """The conversation with all its strings changed, keys included: templates print a tool's schema."""

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            return {walk(key): walk(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [walk(item) for item in value]
        return value

    return replace(
        conversation,
        messages=walk(conversation.messages),
        tools=walk(conversation.tools),
        # Their keys are names of the template's own.
        extra={name: walk(value) for name, value in conversation.extra.items()},
    )
