"""What an output may be asked to look like, checked before any grammar is made of it.

| kind          | source                      | the output is |
|---------------|-----------------------------|---------------|
| `json_object` | none                        | any JSON object |
| `json_schema` | a schema, as JSON text      | JSON that the schema describes |
| `regex`       | an expression               | a text that it matches from its first to its last character |
| `choice`      | a list of texts, as JSON    | one of them |
| `lark`        | a grammar in Lark's notation | a text that its rule `start` describes |

JSON Schema is llguidance's: a keyword or format that it can't enforce is refused, never left out, unless `lenient` asks
for that. A keyword that JSON Schema doesn't know is a remark, as the standard has it. Properties come in the schema's
order; letters are written as they are, and only control characters as \\u escapes; white space between tokens is at
most `MAX_SPACE` characters at a time, so that an output can't go on with nothing else. Expressions are those of Rust's
regex crate, without look-around.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from forerun.errors import RequestError, one_line
from forerun.models.tokenizer import check_text

Kind = Literal["json_object", "json_schema", "regex", "choice", "lark"]

MAX_SOURCE_CHARS = 1 << 17
MAX_DEPTH = 64  # of a schema
# References of a schema, rules of a grammar: what reads a chain of them calls itself once for each, and some 2,500 are
# more than a stack holds.
MAX_LINKS = 500
MAX_MODULUS = 1 << 16  # the least common multiple of all `multipleOf`, as whole numbers; each remainder is a state
MAX_SPACE = 64

_OPTIONS_KEY = "x-guidance"
# A lexeme's options that say how to sample, which the request's parameters do, or what to cut off the output.
_SAMPLING_OPTION = re.compile(r"\[[^\]\"/]*\b(temperature|max_tokens|stop)\b")


@dataclass(frozen=True, slots=True)
class Structured:
    """What an output must look like. Made by the functions of the same names, which check what they are given.

    Attributes:
        kind: what `source` is.
        source: see the module; the same text is the same grammar.
        compact: no white space between JSON tokens.
        lenient: leave out what can't be enforced of a schema.
        one_of_is_any_of: take `oneOf` for `anyOf`, also where two branches may hold at once.
    """

    kind: Kind
    source: str = ""
    compact: bool = False
    lenient: bool = False
    one_of_is_any_of: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise RequestError(f"kind is {self.kind!r}, but must be one of: {', '.join(get_args(Kind))}", "grammar")
        if len(self.source) > MAX_SOURCE_CHARS:
            raise RequestError(
                f"the {_NAMES[self.kind]} has {len(self.source)} characters, but may have at most {MAX_SOURCE_CHARS}",
                "grammar",
            )
        check_text(self.source, "grammar")

    @staticmethod
    def json_object(*, compact: bool = False) -> Structured:
        """Any JSON object."""
        return Structured("json_object", compact=compact)

    @staticmethod
    def json_schema(
        schema: Mapping[str, Any] | str,
        *,
        compact: bool = False,
        lenient: bool = False,
        one_of_is_any_of: bool = False,
    ) -> Structured:
        """JSON that a schema describes, given as an object or as JSON text.

        Raises:
            RequestError: it isn't a JSON object, is too long or is nested too deeply.
        """
        value = _parsed(schema) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping):
            raise RequestError(
                f'the JSON schema is {one_line(repr(value), 40)}, but must be an object such as {{"type": "object"}}',
                "grammar",
            )
        if _OPTIONS_KEY in value:
            raise RequestError(
                f"the JSON schema has a key {_OPTIONS_KEY}; options are given beside the schema, as compact, lenient "
                "and one_of_is_any_of",
                "grammar",
            )
        check_depth(value, "the JSON schema")
        _check_schema(value)
        try:
            source = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RequestError(f"the JSON schema is no JSON value: {one_line(error)}", "grammar") from None
        return Structured("json_schema", source, compact, lenient, one_of_is_any_of)

    @staticmethod
    def regex(pattern: str) -> Structured:
        """A text that an expression matches as a whole."""
        if not isinstance(pattern, str) or not pattern:
            raise RequestError(f"the expression is {pattern!r:.40}, but must be a text that is not empty", "grammar")
        return Structured("regex", pattern)

    @staticmethod
    def choice(texts: Sequence[str]) -> Structured:
        """One of several texts."""
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
            raise RequestError(f"the choice is {texts!r:.40}, but must be a list of at least one text", "grammar")
        wrong = next((text for text in texts if not isinstance(text, str) or not text), None)
        if wrong is not None or "" in texts:
            raise RequestError(f"the choice holds {wrong!r:.40}, but must hold texts that are not empty", "grammar")
        return Structured("choice", json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False))

    @staticmethod
    def lark(grammar: str) -> Structured:
        """A text that a grammar's rule `start` describes.

        Raises:
            RequestError: it is empty, has too many rules, or sets options that belong to the request.
        """
        if not isinstance(grammar, str) or not grammar.strip():
            raise RequestError(f"the grammar is {grammar!r:.40}, but must be a text that is not empty", "grammar")
        num_rules = sum(":" in line for line in grammar.splitlines())
        if num_rules > MAX_LINKS:
            raise RequestError(f"the grammar has {num_rules} rules, but may have at most {MAX_LINKS}", "grammar")
        for start in re.finditer("%json", grammar):
            _check_inline(grammar[start.end() :])
        option = _SAMPLING_OPTION.search(grammar)
        if option:
            raise RequestError(
                f"the grammar sets {option[1]}, but that is a parameter of the request; leave it out", "grammar"
            )
        return Structured("lark", grammar)

    def to_llguidance(self, *, forces: bool = True) -> str:
        """The grammar as llguidance reads it.

        Args:
            forces: where one text alone can follow, allow its usual tokens only.
        """
        # With this line in front, nothing but a grammar can be read into the text.
        options = "%llguidance " + json.dumps({} if forces else {"no_forcing": True})
        return f"{options}\n{self._rules()}"

    def _rules(self) -> str:
        if self.kind == "lark":
            return self.source
        if self.kind == "regex":
            return f"start: TEXT\nTEXT: {_slashed(self.source)}"
        if self.kind == "choice":
            # In capitals, so that it is one expression and not a rule with a branch for each text.
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(self.source))
            return f"start: TEXT\nTEXT: {texts}"
        schema = {"type": "object"} if self.kind == "json_object" else json.loads(self.source)
        options: dict[str, Any] = {
            "whitespace_flexible": not self.compact,
            "lenient": self.lenient,
            "coerce_one_of": self.one_of_is_any_of or self.lenient,
        }
        if not self.compact:
            options["whitespace_pattern"] = rf"[\x20\x0A\x0D\x09]{{1,{MAX_SPACE}}}"
        return "start: %json " + json.dumps({**schema, _OPTIONS_KEY: options}, ensure_ascii=False)

    @property
    def title(self) -> str:
        """What messages call it."""
        return _NAMES[self.kind]


_NAMES: dict[Kind, str] = {
    "json_object": "JSON object",
    "json_schema": "JSON schema",
    "regex": "expression",
    "choice": "choice",
    "lark": "grammar",
}


def check_depth(value: Any, name: str, param: str = "grammar") -> None:
    """Raises RequestError for a JSON value that is nested more than `MAX_DEPTH` deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, Mapping | list | tuple)
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        if not level:
            return
    raise RequestError(f"{name} is nested more than {MAX_DEPTH} deep", param)


def _parsed(text: str) -> Any:
    if len(text) > MAX_SOURCE_CHARS:
        raise RequestError(
            f"the JSON schema has {len(text)} characters, but may have at most {MAX_SOURCE_CHARS}", "grammar"
        )
    try:
        return json.loads(text)
    except RecursionError:
        raise RequestError(f"the JSON schema is nested more than {MAX_DEPTH} deep", "grammar") from None
    except ValueError as error:
        raise RequestError(f"the JSON schema is no JSON text: {one_line(error)}", "grammar") from None


def _check_schema(schema: Mapping[str, Any]) -> None:
    """Refuses what would take too long, or more stack than there is."""
    pairs = list(_pairs(schema))
    num_refs = sum(key == "$ref" for key, _ in pairs)
    if num_refs > MAX_LINKS:
        raise RequestError(f"the JSON schema has {num_refs} references, but may have at most {MAX_LINKS}", "grammar")
    divisors = [value for key, value in pairs if key == "multipleOf" and _is_number(value)]
    try:
        exact = [Fraction(str(value)) for value in divisors if value]
        scale = math.lcm(*(divisor.denominator for divisor in exact))
        modulus = math.lcm(*(int(divisor * scale) for divisor in exact))
    except (ValueError, OverflowError):
        modulus = MAX_MODULUS + 1
    if modulus > MAX_MODULUS:
        shown = ", ".join(one_line(repr(value), 20) for value in divisors[:3])
        raise RequestError(
            f"the JSON schema's multipleOf ({shown}) has too many remainders to keep apart; the least common multiple "
            f"of all may be at most {MAX_MODULUS} in units of the last digit",
            "grammar",
        )


def _check_inline(text: str) -> None:
    """The same for a schema that a grammar holds; what is none is left to whoever reads the grammar."""
    try:
        schema, _ = json.JSONDecoder().raw_decode(text.lstrip())
    except RecursionError:
        raise RequestError(f"a JSON schema in the grammar is nested more than {MAX_DEPTH} deep", "grammar") from None
    except ValueError:
        return
    check_depth(schema, "a JSON schema in the grammar")
    _check_schema(schema)


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key of a JSON value with what it has."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key, inner
            yield from _pairs(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _pairs(inner)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _slashed(pattern: str) -> str:
    return "/" + re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL) + "/"
