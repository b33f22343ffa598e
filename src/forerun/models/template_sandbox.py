"""Runs Jinja source that came with a model file, and so may be hostile, within bounds.

Jinja's immutable sandbox keeps a template away from Python. It does not stop one from spinning for ever or from
growing a text until memory ends. Here whatever a template builds is charged to a budget of its render *before* it is
built: arithmetic, concatenation, list displays, arguments of calls and filters, printed values, loop turns and the
fixed text inside them. What a call, a filter or a slice returns is charged when it is there: none makes anything much
larger than what went in. One unit is one character; what takes time without one costs more. What a template merely
looks at is free, since it was paid for when it was built. Every charge also looks at the clock, and no single operation
takes long. Compiling is bounded by the length of the source and by the number of its parts.

The options and helpers are those that chat templates are written for (Hugging Face's).
"""

from __future__ import annotations

import functools
import json
import re
import string
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

BASE_WORK = 8_000_000  # units
WORK_PER_CHAR = 32  # and this much for every character of the input, which templates copy a few times
MAX_RENDER_S = 5.0
_VALUE_UNITS = 8
_TURN_UNITS = 64
_MAX_INT_BITS = 256
_MAX_NODES = 10_000  # of a parsed template; the largest known ones have an eighth of it
_MAX_ARGUMENT = 1000  # characters of what is stripped, or of a format of times
_MAX_INDENT = 32
# For web pages; they take time or memory out of proportion, and no prompt needs them. Nor one that is left to chance.
_REMOVED_FILTERS = ("filesizeformat", "pprint", "random", "striptags", "urlencode", "urlize", "xmlattr")
_STAR_WIDTH = re.compile(r"%[^a-zA-Z%]*\*")


class TemplateRefusal(TemplateError):
    """The template called `raise_exception`: its message is meant for whoever wrote the conversation."""


class TemplateLimit(TemplateError):
    """The template passed a bound of this module."""


@dataclass(slots=True)
class _Render:
    """State of one render.

    Attributes:
        now: what `strftime_now` sees.
        work_left: units not yet used.
        deadline_s: on the monotonic clock.
    """

    now: datetime
    work_left: int
    deadline_s: float = field(default_factory=lambda: time.monotonic() + MAX_RENDER_S)


_current: ContextVar[_Render] = ContextVar("forerun_template_render")


def _spend(units: int) -> None:
    render = _current.get()
    render.work_left -= units
    if render.work_left < 0:
        raise TemplateLimit("it does more work than a prompt needs")
    if time.monotonic() > render.deadline_s:
        raise TemplateLimit(f"it runs for more than {MAX_RENDER_S:g} s")


def _charge(value: Any) -> int:
    """Charges a value by the length of its text and returns the units; walks only as far as the budget reaches."""
    units = _VALUE_UNITS + (len(value) if isinstance(value, str) else 0)
    _spend(units)
    if isinstance(value, Mapping):
        return units + sum(_charge(key) + _charge(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return units + sum(map(_charge, value))
    return units


def _charged(value: Any) -> Any:
    _charge(value)
    return value


def _charge_result(value: Any) -> Any:
    """Charges what an operation has made; of a list the texts in it, which may be old, but no deeper."""
    if isinstance(value, (str, bytes)):
        _spend(len(value))
    elif isinstance(value, (list, tuple)):
        _spend(_VALUE_UNITS * len(value) + sum(len(item) for item in value if isinstance(item, str)))
    return value


def _concat(*parts: Any) -> str:
    """The `~` operator."""
    return "".join(str(_charged(part)) for part in parts)


_OWN_CALLS = (_spend, _charged, _charge_result, _concat)  # they charge by themselves


def _charge_call(name: str, receiver: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Charges a call before it happens.

    What goes in bounds what comes out, apart from numbers (widths, counts) and the few operations that repeat one
    argument for each part of another.
    """
    values = [*args, *kwargs.values()]
    units = _VALUE_UNITS + sum(map(_charge, values)) + sum(abs(value) for value in values if isinstance(value, int))
    repeats = 1
    if isinstance(receiver, str):
        _refuse_hidden_size(name, receiver, values)
        if name in ("indent", "expandtabs"):
            repeats += receiver.count("\n") + receiver.count("\t")
        elif name in ("translate", "wordwrap"):
            repeats += len(receiver)
        elif name == "replace" and values and isinstance(values[0], str):
            repeats += receiver.count(values[0])
        elif name in ("format", "format_map"):
            units += _format_widths(receiver)
            repeats += receiver.count("{") + receiver.count("%")
        elif name == "join" and args and isinstance(args[0], list):
            units += len(receiver) * len(args[0])
    elif name == "join" and isinstance(receiver, list):
        _charge(receiver)
        repeats += len(receiver)
    _spend(units * repeats)


def _refuse_hidden_size(name: str, text: str, values: list[Any]) -> None:
    """Operations on a text whose cost can't be told from what goes in."""
    if name in ("strip", "lstrip", "rstrip", "trim") and any(
        isinstance(value, str) and len(value) > _MAX_ARGUMENT for value in values
    ):
        raise TemplateLimit(f"it strips a choice of more than {_MAX_ARGUMENT} characters")
    if name in ("format", "format_map"):
        fields = string.Formatter().parse(text) if "{" in text else ()
        if _STAR_WIDTH.search(text) or any("{" in (field[2] or "") for field in fields):
            raise TemplateLimit("it formats with a width that is a variable")


def _format_widths(pattern: str) -> int:
    """Sum of the numbers in a format string: no field is padded to more."""
    digits = "".join(char if char.isdecimal() else " " for char in pattern).split()
    return sum(int(number) if len(number) < 9 else 10**9 for number in digits)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Filters that ask for the environment or the context get it before the value.
    value_index = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        before, value, rest = args[:value_index], args[value_index], args[value_index + 1 :]
        if name == "join":
            value = list(value)  # a generator can't be charged
        if name == "sum" and not all(isinstance(start, (int, float)) for start in (*rest[1:], kwargs.get("start", 0))):
            raise TemplateLimit("it adds up what is no number")  # each step would copy all that came before
        _charge_call(name, value, rest, kwargs)
        return _charge_result(function(*before, value, *rest, **kwargs))

    return bounded


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a prompt must not be.
    if indent is not None and not (isinstance(indent, int) and indent <= _MAX_INDENT):
        raise TemplateLimit(f"it indents by more than {_MAX_INDENT} characters")
    if separators is not None and max(map(len, separators), default=0) > _MAX_INDENT:
        raise TemplateLimit(f"it separates by more than {_MAX_INDENT} characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > _MAX_ARGUMENT:
        raise TemplateLimit(f"it formats a time by more than {_MAX_ARGUMENT} characters")
    return _current.get().now.strftime(pattern)


class _InsertCharges(NodeTransformer):
    """Puts charges into a parsed template where the environment has no hook of its own."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_charge(node, node.body)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_charge(node, node.body)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concat_parts", node.nodes, node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._charged_display(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._charged_display(node, node.items) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._charged_display(node, [pair.value for pair in node.items])

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("charge_result", [node], node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def _with_charge(self, node: nodes.Node, body: list[nodes.Node]) -> nodes.Node:
        fixed_chars = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        turn = _call("spend", [nodes.Const(_TURN_UNITS + fixed_chars, lineno=node.lineno)], node.lineno)
        body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        return node

    def _charged_display(self, node: nodes.Expr, items: list[nodes.Expr]) -> nodes.Node:
        self.generic_visit(node)
        if all(isinstance(item, nodes.Const) for item in items):
            return node
        return _call("charged", [node], node.lineno)


def _call(attribute: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    # Names that a template sets can't shadow an attribute of the environment.
    return nodes.Call(nodes.EnvironmentAttribute(attribute, lineno=lineno), args, [], None, None, lineno=lineno)


class _GenerationTag(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; a prompt only needs what is inside."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates can neither reach Python nor run away. Safe to share between threads."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    spend = staticmethod(_spend)
    charged = staticmethod(_charged)
    charge_result = staticmethod(_charge_result)
    concat_parts = staticmethod(_concat)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=_charged
        )
        filters = {**self.filters, "tojson": _tojson}
        self.filters = {
            name: _bounded_filter(name, function) for name, function in filters.items() if name not in _REMOVED_FILTERS
        }
        del self.globals["lipsum"]  # unbounded by its arguments
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def load(self, source: str) -> Template:
        """Compiles a template.

        Raises:
            jinja2.TemplateSyntaxError: the source is not Jinja.
            TemplateLimit: it has too many parts.
            Exception: whatever else Python's compiler raises.
        """
        # Compiling evaluates constant expressions, which are charged like any other.
        token = _current.set(_Render(datetime.now(), BASE_WORK))
        try:
            parsed = self.parse(source)
            num_nodes = sum(1 for _ in parsed.find_all(nodes.Node))
            if num_nodes > _MAX_NODES:
                raise TemplateLimit(f"it has {num_nodes} parts, more than {_MAX_NODES}")
            tree = _InsertCharges().visit(parsed)
            code = self.compile(tree, filename="<chat template>")
        finally:
            _current.reset(token)
        return Template.from_code(self, code, self.make_globals(None))

    def run(self, template: Template, variables: Mapping[str, Any], now: datetime, num_chars: int) -> str:
        """Renders a template of this environment.

        Args:
            template: from `load`.
            variables: what it sees.
            now: what it takes for the present time.
            num_chars: characters in the variables; they set how much work is allowed.
        Raises:
            TemplateRefusal: the template refuses the variables.
            TemplateLimit: it passed a bound.
            Exception: whatever else its expressions raise.
        """
        token = _current.set(_Render(now, BASE_WORK + WORK_PER_CHAR * num_chars))
        try:
            return template.render(variables)
        finally:
            _current.reset(token)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Charges an operation, then does it."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INT_BITS:
                raise TemplateLimit("it computes with numbers that are too long")
        elif operator == "*":
            counts = [abs(value) for value in (left, right) if isinstance(value, int)]
            _spend((_charge(left) + _charge(right)) * max(counts, default=1))
        elif operator == "%" and isinstance(left, str):
            _charge_call("format", left, (right,), {})
        else:
            _charge(left)
            _charge(right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Charges a call, does it, and charges what it returns."""
        if any(__obj is own for own in _OWN_CALLS):
            return super().call(__context, __obj, *args, **kwargs)
        # The sandbox wraps str.format; the text it works on belongs to the wrapped method.
        method = getattr(__obj, "__wrapped__", __obj)
        name = getattr(method, "__name__", "")
        receiver = getattr(method, "__self__", None)
        if name == "join" and isinstance(receiver, str) and args:
            args = (list(args[0]), *args[1:])  # a generator can't be charged
        _charge_call(name, receiver if isinstance(receiver, (str, list, tuple, dict)) else None, args, kwargs)
        return _charge_result(super().call(__context, __obj, *args, **kwargs))
