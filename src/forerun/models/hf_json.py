"""JSON files of a model's folder: read with nothing believed, and typed access to the keys of one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import LoadError, one_line, shown
from forerun.models.sizes import LARGEST, MAX_POSITION, SMALLEST

_MAX_BYTES = 1 << 28  # the largest tokenizer.json files have an eighth of it


def read_text(path: Path) -> str:
    """A text file in UTF-8.

    Raises:
        LoadError: it is missing, too large or no text.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise LoadError(f"{path} has more than the {_MAX_BYTES} bytes that are read")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise LoadError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; errors as `read_text` and `parse_object`."""
    return parse_object(read_text(path), str(path))


def parse_object(text: str | bytes, what: str) -> dict[str, Any]:
    """The JSON object in a text; bytes are UTF-8.

    Raises:
        LoadError: it is no JSON, no object, or has a key twice. `what` names the text.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        data = json.loads(text, object_pairs_hook=_unique)
    except _Twice as error:
        raise LoadError(f"{what} is malformed: key {shown(error.key)} occurs twice") from None
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{what} is not valid JSON: {one_line(error)}") from error
    if not isinstance(data, dict):
        raise LoadError(f"{what} must be a JSON object")
    return data


class _Twice(Exception):
    def __init__(self, key: str) -> None:
        self.key = key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        seen: set[str] = set()
        raise _Twice(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return data


class JsonKeys:
    """Typed access to the keys of a JSON object; null is as good as absent, but where a default is not null.

    Args:
        where: the file, and the object in it, for messages.
        data: the object.
        defaults: what absent keys stand for.
    """

    def __init__(self, where: str, data: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.where = where
        self.data = data
        self.defaults = defaults

    def get(self, key: str) -> Any:
        """A value as the file has it; where the key is absent its default, or None."""
        return self.data[key] if key in self.data else self.defaults.get(key)

    def fail(self, key: str, problem: str) -> LoadError:
        """An error about a key, to raise."""
        return LoadError(f"{self.where}: key {one_line(key, 80)} {problem}")

    def size(self, key: str, *, default: int | None = None, limit: int = MAX_POSITION) -> int:
        """A whole number from 1 to limit."""
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise self.fail(key, "is missing")
        if type(value) is not int or not 1 <= value <= limit:
            raise self.fail(key, f"is {shown(value)}, but must be a whole number from 1 to {limit}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """A number above 0, within reason."""
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise self.fail(key, "is missing")
        return self.checked(key, value)

    def checked(self, key: str, value: Any) -> float:
        """A value of a key as such a number."""
        if type(value) not in (int, float) or not SMALLEST <= value <= LARGEST:
            raise self.fail(key, f"is {shown(value)}, but must be a number from {SMALLEST} to {LARGEST}")
        return float(value)

    def flag(self, key: str) -> bool:
        """A boolean; False where it is absent and has no default."""
        value = self.get(key)
        if value is not None and type(value) is not bool:
            raise self.fail(key, f"is {shown(value)}, but must be true or false")
        return bool(value)

    def text(self, key: str) -> str:
        """A string."""
        value = self.get(key)
        if not isinstance(value, str):
            raise self.fail(key, "is missing" if value is None else f"is {shown(value)}, but must be a string")
        return value

    def part(self, key: str) -> JsonKeys | None:
        """The object that a key holds; None where it is absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, f"is {shown(value)}, but must be an object")
        return JsonKeys(f"{self.where}: {one_line(key, 80)}", value, {})
