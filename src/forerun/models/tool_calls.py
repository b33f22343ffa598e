"""From a model's text to tool calls, whole or while it is being written.

Families write calls in three ways:

    hermes    <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>, one block per call
    llama     {"name": "f", "parameters": {...}} as the whole answer, several joined by ";", perhaps after
              <|python_tag|>, where a built-in tool may also be written f.call(x="y")
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], or [TOOL_CALLS]f[ARGS]{...} one after another

What a call's arguments are is passed on letter by letter, so that what is streamed joins to what the model wrote. Text
that begins like a call and turns out to be none is content.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from forerun.models.call_readers import SPACE, ArgumentsReader, ObjectReader
from forerun.types import FinishReason

ToolSyntax = Literal["hermes", "llama", "mistral"]
CallsFinishReason = Literal["stop", "length", "tool_calls"]

OPEN_MARKS: dict[ToolSyntax, str] = {"hermes": "<tool_call>", "llama": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
CLOSE_MARK = "</tool_call>"
ARGS_MARK, ID_MARK = "[ARGS]", "[CALL_ID]"

MISTRAL_ID_LEN = 9  # its templates refuse calls whose ids have another length
_ID_CHARS = string.ascii_letters + string.digits
_NAME = re.compile(r"[\w.-]+")
_BUILT_IN = re.compile(r"\s*([A-Za-z_]\w*)\.call\((.*)\)\s*", re.DOTALL)
_KEYWORD = re.compile(
    r'\s*([A-Za-z_]\w*)\s*=\s*("(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?|true|false|null)\s*(?:,|$)', re.DOTALL
)


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call whose name is known.

    Attributes:
        index: calls are counted from 0.
        call_id: drawn anew for every call.
        name: of the tool.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments, which are a JSON text."""

    index: int
    text: str


ToolEvent = ContentDelta | CallStart | ArgumentsDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call.

    Attributes:
        call_id: drawn anew for every call.
        name: of the tool.
        arguments: JSON text as the model wrote it; cut short where the answer was.
    """

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """A whole answer: its content, None where there is none beside calls, its calls, and why it ended."""

    content: str | None
    calls: tuple[ToolCall, ...]
    finish_reason: CallsFinishReason


def new_call_id(syntax: ToolSyntax) -> str:
    """A random id that the family's templates take."""
    if syntax == "mistral":
        return "".join(secrets.choice(_ID_CHARS) for _ in range(MISTRAL_ID_LEN))
    return "call_" + "".join(secrets.choice(_ID_CHARS) for _ in range(24))


def read_tool_calls(
    syntax: ToolSyntax,
    names: Collection[str],
    text: str,
    finish_reason: FinishReason,
    new_id: Callable[[ToolSyntax], str] = new_call_id,
) -> ToolAnswer:
    """A whole answer at once; arguments as for `ToolCallStream`."""
    stream = ToolCallStream(syntax, names, new_id)
    events = stream.push(text)
    rest, reason = stream.finish(finish_reason)
    content, starts, arguments = "", list[CallStart](), dict[int, str]()
    for event in (*events, *rest):
        if isinstance(event, ContentDelta):
            content += event.text
        elif isinstance(event, CallStart):
            starts.append(event)
        else:
            arguments[event.index] = arguments.get(event.index, "") + event.text
    calls = tuple(ToolCall(start.call_id, start.name, arguments.get(start.index, "")) for start in starts)
    return ToolAnswer(content or (None if calls else ""), calls, reason)


class ToolCallStream:
    """Splits a model's text into content and calls while it arrives, however it is cut into pieces.

    White space before a call belongs to nobody. The text must hold the marks of the syntax, also where the vocabulary
    has them as control tokens.

    Args:
        syntax: how the model writes calls.
        names: the tools on offer. A bare JSON object, which `llama` may mean as a call, is one only if it names one of
            them; marked calls are passed on whatever they name.
        new_id: draws the ids of calls.
    """

    def __init__(
        self, syntax: ToolSyntax, names: Collection[str], new_id: Callable[[ToolSyntax], str] = new_call_id
    ) -> None:
        self._syntax: ToolSyntax = syntax
        self._names = frozenset(names)
        self._new_id = new_id
        self._open_mark = OPEN_MARKS[syntax]
        self._events: list[ToolEvent] = []
        self._pending = ""  # text that nothing has been made of
        self._read: Callable[[], bool] = self._read_content  # makes something of it, False where it needs more
        self._is_fresh = True  # nothing but white space so far
        self._is_marked = False  # the call is known to be one by its mark
        self._is_list = False  # it is one of a list
        self._raw = ""  # what the call in the making has taken, as long as it may turn out to be content
        self._call: ObjectReader | ArgumentsReader | None = None
        self._is_started = False
        self._num_calls = 0
        self._has_broken = False

    def push(self, text: str) -> list[ToolEvent]:
        """What is certain once this text has come too."""
        self._pending += text
        while self._read():
            pass
        events, self._events = self._events, []
        return events

    def finish(self, finish_reason: FinishReason) -> tuple[list[ToolEvent], CallsFinishReason]:
        """What is left when no more text comes, and why the answer ended.

        The reason is `tool_calls` where the model ended the answer and every call in it is whole. A call that was cut
        by the limit stays `length`, so that nobody takes it for one (F043).
        """
        if self._call is None and self._is_marked:
            self._read_built_in()
        if self._call is not None and self._is_started:
            self._has_broken = True
        else:
            self._say(self._raw + self._pending)
        self._raw = self._pending = ""
        self._call = None
        events, self._events = self._events, []
        is_whole = self._num_calls > 0 and not self._has_broken
        return events, "tool_calls" if finish_reason == "stop" and is_whole else finish_reason

    # Each reader takes something from the pending text and returns whether another may go on.

    def _read_content(self) -> bool:
        if self._syntax == "llama" and self._is_fresh and self._pending.lstrip(SPACE).startswith("{"):
            self._begin(self._pending.index("{"), is_marked=False)
            return True
        at = self._pending.find(self._open_mark)
        if at >= 0:
            self._say(self._pending[:at].rstrip(SPACE))
            self._pending = self._pending[at:]
            self._begin(len(self._open_mark), is_marked=True)
            return True
        cut = _certain_len(self._pending, self._open_mark)
        self._say(self._pending[:cut])
        self._pending = self._pending[cut:]
        return False

    def _begin(self, mark_len: int, is_marked: bool, is_list: bool = False) -> None:
        """The next call begins after so many characters."""
        self._is_fresh = False
        self._is_marked = is_marked
        self._is_list = is_list
        self._raw = ""
        self._take(mark_len)
        self._read = self._read_start

    def _read_start(self) -> bool:
        """What follows a mark: an object, a list of them, or a name."""
        self._take_space()
        if not self._pending:
            return False
        if self._pending[0] == "{":
            self._open(ObjectReader())
        elif self._syntax == "mistral" and self._pending[0] == "[" and not self._is_list:
            self._take(1)
            self._is_list = True
        elif self._syntax == "mistral" and not self._is_list:
            self._read = self._read_name
        elif self._syntax == "llama" and self._is_marked:
            return False  # a built-in's call is read once it is whole, see `finish`
        else:
            self._give_up()
        return True

    def _read_name(self) -> bool:
        """A name that stands before its arguments."""
        at = self._pending.find("{")
        if at < 0:
            return False
        name = self._pending[:at].split(ARGS_MARK)[0].split(ID_MARK)[0].strip(SPACE)
        if not _NAME.fullmatch(name):
            self._give_up()
            return True
        self._take(at)
        self._open(ArgumentsReader(name))
        return True

    def _open(self, reader: ObjectReader | ArgumentsReader) -> None:
        self._call = reader
        self._is_started = False
        self._read = self._read_call

    def _read_call(self) -> bool:
        call = self._call
        assert call is not None
        self._take(call.push(self._pending))
        if call.name is not None and (self._is_marked or call.name in self._names):
            self._tell(call)
            self._raw = ""
        if not (call.is_done or call.is_broken):
            return False
        if not self._is_started:
            self._give_up()
            return True
        self._has_broken |= call.is_broken
        self._call = None
        self._read = self._read_after
        return True

    def _tell(self, call: ObjectReader | ArgumentsReader) -> None:
        """Passes on what is known of a call."""
        if not self._is_started:
            self._is_started = True
            self._events.append(CallStart(self._num_calls, self._new_id(self._syntax), call.name or ""))
            self._num_calls += 1
        text = call.take_arguments()
        if text:
            self._events.append(ArgumentsDelta(self._num_calls - 1, text))

    def _read_after(self) -> bool:
        """Between calls and after the last one."""
        rest = self._pending.lstrip(SPACE)
        if not rest:
            return False
        for mark in {"hermes": (CLOSE_MARK,), "mistral": (",", "]"), "llama": (";",)}[self._syntax]:
            if rest.startswith(mark):
                self._pending = rest[len(mark) :]
                if mark in (",", ";"):
                    self._begin(0, self._is_marked, self._is_list)
                return True
            if mark.startswith(rest):
                return False
        self._read = self._read_content
        return True

    def _read_built_in(self) -> None:
        """`f.call(x="y")`, once all of it is there; anything else stays text."""
        match = _BUILT_IN.fullmatch(self._pending)
        arguments = None if match is None else _keywords(match[2])
        if match is None or arguments is None:
            return
        self._events.append(CallStart(self._num_calls, self._new_id(self._syntax), match[1]))
        self._events.append(ArgumentsDelta(self._num_calls, json.dumps(arguments, ensure_ascii=False)))
        self._num_calls += 1
        self._raw = self._pending = ""

    def _give_up(self) -> None:
        """No call after all: what was taken for one is content."""
        self._say(self._raw)
        self._raw = ""
        self._call = None
        self._is_marked = False
        self._read = self._read_content

    def _say(self, text: str) -> None:
        if text and not (self._num_calls and not text.strip(SPACE)):
            self._events.append(ContentDelta(text))
        self._is_fresh = self._is_fresh and not text.strip(SPACE)

    def _take(self, length: int) -> None:
        self._raw += self._pending[:length]
        self._pending = self._pending[length:]

    def _take_space(self) -> None:
        self._take(len(self._pending) - len(self._pending.lstrip(SPACE)))


def _certain_len(text: str, mark: str) -> int:
    """Characters in front that neither begin the mark nor are white space that may stand before it."""
    cut = len(text)
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            cut = len(text) - length
            break
    return len(text[:cut].rstrip(SPACE))


def _keywords(text: str) -> dict[str, object] | None:
    """Arguments of a call in Python's notation; None for anything but names with plain values."""
    arguments: dict[str, object] = {}
    at = 0
    while at < len(text.rstrip(SPACE)):
        match = _KEYWORD.match(text, at)
        if match is None:
            return None
        try:
            arguments[match[1]] = json.loads(match[2])
        except ValueError:
            return None
        at = match.end()
    return arguments
