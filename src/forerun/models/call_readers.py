"""Readers of one tool call's JSON while a model writes it, so that its arguments are passed on letter by letter.

They read what came so far and say how much of a text is theirs; they don't check that the arguments are valid JSON.
"""

from __future__ import annotations

import json
from typing import Literal

ARGUMENT_KEYS = ("arguments", "parameters")
SPACE = " \t\r\n"


class _ValueReader:
    """Follows one JSON value character by character, as far as its end must be found."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = self._is_escaped = False
        self.is_done = False

    def push(self, char: str) -> bool:
        """Whether the character belongs to the value; a number ends before the one that doesn't."""
        if self._is_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_string = False
                self.is_done = self._depth == 0
        elif char == '"':
            self._is_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            if self._depth == 0:
                self.is_done = True
                return False
            self._depth -= 1
            self.is_done = self._depth == 0
        elif self._depth == 0 and (char == "," or char in SPACE):
            self.is_done = True
            return False
        return True


class ArgumentsReader:
    """Arguments that stand alone, after a name."""

    def __init__(self, name: str) -> None:
        self.name: str | None = name
        self.is_broken = False
        self._value = _ValueReader()
        self._fresh = ""

    @property
    def is_done(self) -> bool:
        """All of them are there."""
        return self._value.is_done

    def push(self, text: str) -> int:
        """Reads up to their end; how many characters they are."""
        for at, char in enumerate(text):
            if self._value.is_done:
                return at
            self._value.push(char)
            self._fresh += char
        return len(text)

    def take_arguments(self) -> str:
        """What has come of them since the last time."""
        fresh, self._fresh = self._fresh, ""
        return fresh


class ObjectReader:
    """An object with a name and arguments, in any order and beside other keys.

    Attributes:
        name: None until it is known.
        is_done: the object is complete.
        is_broken: it is no such object.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = self.is_broken = False
        self._expects: Literal["brace", "key", "colon", "value", "comma"] = "brace"
        self._key = ""
        self._text = ""  # of the key or the value in the making
        self._value = _ValueReader()
        self._has_arguments = False
        self._fresh = ""

    def push(self, text: str) -> int:
        """Reads up to the end of the object; how many characters were read."""
        for at, char in enumerate(text):
            if self.is_done or self.is_broken:
                return at
            self._push(char)
        return len(text)

    def take_arguments(self) -> str:
        """What has come of the arguments since the last time; `{}` for a whole call without any."""
        if self.is_done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        fresh, self._fresh = self._fresh, ""
        return fresh

    def _push(self, char: str) -> None:
        if self._text:
            self._push_inside(char)
        elif char in SPACE:
            pass
        elif self._expects == "brace":
            self._expects = "key"
        elif self._expects in ("key", "comma") and char == "}":
            self.is_done = True
        elif self._expects == "comma" and char == ",":
            self._expects = "key"
        elif self._expects == "colon" and char == ":":
            self._expects = "value"
        elif self._expects == "value" or (self._expects == "key" and char == '"'):
            self._value = _ValueReader()
            self._push_inside(char)
        else:
            self.is_broken = True

    def _push_inside(self, char: str) -> None:
        """A character of a key or of a value."""
        is_inside = self._value.push(char)
        if is_inside:
            self._text += char
            if self._is_streamed:
                self._fresh += char
                self._has_arguments = True
        if self._value.is_done:
            self._end_value()
            if not is_inside:
                self._push(char)

    @property
    def _is_streamed(self) -> bool:
        return self._expects == "value" and self._key in ARGUMENT_KEYS and self._text.startswith("{")

    def _end_value(self) -> None:
        text, self._text = self._text, ""
        if self._expects == "value" and self._key in ARGUMENT_KEYS and text.startswith("{"):
            self._expects = "comma"
            return
        try:
            value = json.loads(text)
        except ValueError:
            self.is_broken = True
            return
        if self._expects == "key":
            self._key, self._expects = value, "colon"
            return
        self._expects = "comma"
        if self._key == "name":
            self.name = value if isinstance(value, str) and value else None
            self.is_broken = self.name is None
        elif self._key in ARGUMENT_KEYS and value is not None:
            # Some models write the object as a string of JSON.
            self._fresh = value if isinstance(value, str) else text
            self._has_arguments = True
