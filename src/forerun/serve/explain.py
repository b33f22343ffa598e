"""What a schema found wrong, in one sentence with the field's path."""

from __future__ import annotations

import difflib
import re
import types
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from forerun.errors import shown
from forerun.serve.problems import Problem


def explain(error: ValidationError, body: dict[str, Any], schema: type[BaseModel]) -> Problem:
    """The first thing that is wrong, as a refusal.

    Args:
        error: what the schema said.
        body: what it looked at.
        schema: the body's own.
    """
    details = error.errors(include_url=False, include_context=True)
    # An unknown field beside a wrong value may follow from it, as the url of an image does from the part's type; and
    # what is wrong within an object says more than that it is no text, where it might be one.
    details.sort(key=lambda detail: (detail["type"] == "extra_forbidden", -_num_names(detail, body)))
    literal = next((d for d in details if d["type"] == "literal_error" and d["loc"][-1] == "type"), None)
    detail = literal or details[0]
    steps, value = _walk(detail["loc"], body)
    path = _path(steps)
    if detail["type"] == "extra_forbidden":
        return _unknown_field(path, steps, schema, body)
    if detail["type"] == "missing":
        path = _path([*steps, detail["loc"][-1]])
        return Problem(400, f"{path} is missing", path, "missing_field")
    hint = _hint(steps, schema) or _wanted(detail)
    return Problem(400, f"{path} is {_shown(value)}, but {hint}", path)


def _walk(loc: tuple[int | str, ...], body: Any) -> tuple[list[int | str], Any]:
    """The steps of an error's place that lead somewhere in the body; the rest name branches of the schema."""
    steps: list[int | str] = []
    value = body
    for step in loc:
        is_key = isinstance(value, dict) and step in value
        is_index = isinstance(value, list) and isinstance(step, int) and step < len(value)
        if is_key or is_index:
            value = value[step]
            steps.append(step)
    return steps, value


def _num_names(detail: Any, body: Any) -> int:
    """How deep within objects an error is."""
    steps, _ = _walk(detail["loc"], body)
    return sum(isinstance(step, str) for step in steps) + int(detail["type"] == "missing")


def _path(steps: list[int | str]) -> str:
    path = ""
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)[:80]
    return path


_WANTED = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "list_type": "must be a list",
    "model_type": "must be an object",
    "none_required": "must be left out",
    "string_type": "must be a string",
}
_WORDS = {True: "true", False: "false", None: "null"}


def _shown(value: Any) -> str:
    """A value as JSON has it, in short."""
    return _WORDS[value] if value is None or isinstance(value, bool) else shown(value)


def _wanted(detail: Any) -> str:
    if detail["type"] in _WANTED:
        return _WANTED[detail["type"]]
    message = str(detail["msg"])
    for prefix in ("Value error, ", "Assertion failed, "):
        message = message.removeprefix(prefix)
    message = re.sub(r"^(Input|String|List|Dictionary) should", "must", message)
    return message[:1].lower() + message[1:] if not message.startswith("must") else message


def _hint(steps: list[int | str], schema: type[BaseModel]) -> str | None:
    """What a field must be, where it says so itself."""
    field = _field(steps, schema)
    extra = field.json_schema_extra if field is not None else None
    hint = extra.get("x-must") if isinstance(extra, dict) else None
    return hint if isinstance(hint, str) else None


def _field(steps: list[int | str], schema: type[BaseModel]) -> Any:
    """The innermost field that a path names."""
    found = None
    model: type[BaseModel] | None = schema
    for step in steps:
        if isinstance(step, int):
            continue
        field = _fields(model).get(step) if model else None
        if field is None:
            break
        found, model = field, _model_in(field.annotation)
    return found


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    """A schema's fields by the names that bodies have for them."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The schema somewhere in a type, None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, list):
        return next(filter(None, map(_model_in, get_args(annotation))), None)
    return None


def _unknown_field(path: str, steps: list[int | str], schema: type[BaseModel], body: Any) -> Problem:
    name = str(steps[-1]) if steps else ""
    model: type[BaseModel] | None = schema
    for step in steps[:-1]:
        if isinstance(step, str) and model is not None and step in _fields(model):
            model = _model_in(_fields(model)[step].annotation)
    known = list(_fields(model)) if model else []
    close = difflib.get_close_matches(name, known, 1, 0.6)
    advice = f"; did you mean {close[0]!r}?" if close else ""
    return Problem(400, f"{shown(path)} is no field that this server knows{advice}", path, "unknown_field")
