"""How a user says what to speculate with: `off`, `auto`, or `NAME[:key=value,...][+NAME...]`.

    auto                            what needs no second model and pays, chosen step by step
    ngram                           prompt lookup with its defaults
    ngram:k=12,policy=fixed         twelve nodes in every step
    draft:model="a+b, c.gguf"       quotes around a value that holds + , or quotes, which are doubled inside

Several drafters feed one tree. The registry is the one list of drafters: a new one is its file and a line here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from forerun.drafters.base import DrafterOptions
from forerun.drafters.draft_model import DraftModelOptions
from forerun.drafters.foreign import ForeignOptions
from forerun.drafters.grammar import GrammarOptions
from forerun.drafters.lookahead import LookaheadOptions
from forerun.drafters.ngram import NgramOptions
from forerun.drafters.prediction import PredictionOptions
from forerun.drafters.recycling import RecyclingOptions
from forerun.drafters.self_speculative import SelfOptions
from forerun.drafters.suffix import SuffixOptions
from forerun.errors import ConfigError, RequestError
from forerun.types import VerifyRule
from forerun.verify import RULES, check_traits, drafting_stream

REGISTRY: dict[str, type[DrafterOptions]] = {
    options.name: options
    for options in (
        NgramOptions,
        SuffixOptions,
        RecyclingOptions,
        LookaheadOptions,
        PredictionOptions,
        GrammarOptions,
        SelfOptions,
        DraftModelOptions,
        ForeignOptions,
    )
}

# What `auto` runs: drafters that cost next to nothing, so that having all of them loses nothing.
AUTO = "suffix+prediction+grammar"
QUOTE = '"'


@dataclass(frozen=True, slots=True)
class Speculation:
    """What to speculate with, read from a spec by `parse`.

    Attributes:
        drafters: settings of each drafter; empty when off.
        is_auto: whether the choice was left to the engine.

    >>> str(Speculation.parse("ngram:k=4"))
    'ngram:k=4,min=1,max=4,policy=adaptive'
    >>> Speculation.parse("ngram:k=0").is_off
    True
    """

    drafters: tuple[DrafterOptions, ...] = ()
    is_auto: bool = False

    @staticmethod
    def parse(spec: str) -> Speculation:
        """Reads a spec.

        Raises:
            ConfigError: an unknown name or key, a value out of range, a drafter named twice, or a quote left open.
        """
        parts = [_split(part) for part in _pieces(spec, "+")]
        names = [name for name, _ in parts]
        for alone in ("off", "auto"):
            if alone in names:
                return _read_alone(alone, parts)
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"speculation names drafter {twice} twice, but each can run once")
        drafters = tuple(_read_options(name, pairs) for name, pairs in parts)
        return Speculation(tuple(options for options in drafters if not options.is_off))

    @property
    def is_off(self) -> bool:
        """Whether every step is plain decoding."""
        return all(options.is_off for options in self.drafters)

    def check_rule(self, rule: VerifyRule) -> None:
        """Raises ConfigError with one sentence when a rule isn't exact for the drafts that there will be."""
        traits = [options.traits(drafting_stream(rule)) for options in self.drafters]
        for one in traits:
            check_traits(rule, one)
        # In a tree of several a node may be sampled by one and fixed by another, as the values that were drawn have it.
        if len(traits) > 1 and any(one.has_sampled for one in traits) and not RULES[rule].is_path_exact:
            raise ConfigError(
                f"rule {rule} is exact for the drafts of one drafter that samples, but speculation {str(self)!r} feeds "
                "its tree with several; rule coupled takes any"
            )

    def check_prediction(self) -> None:
        """Refuses a request that predicts its text where nobody would make use of it.

        Raises:
            RequestError: no drafter does.
        """
        if not any(isinstance(options, PredictionOptions) for options in self.drafters):
            raise RequestError(
                f"a prediction is given, but speculation {self} has no drafter that uses it; "
                "choose prediction or auto, or leave the prediction out",
                "prediction",
            )

    def __str__(self) -> str:
        if self.is_auto:
            return "auto"
        return "+".join(_write_options(options) for options in self.drafters) or "off"


OFF = Speculation()


def _pieces(text: str, separator: str) -> list[str]:
    """The text between separators that aren't quoted.

    Raises:
        ConfigError: a quote is left open.
    """
    pieces, is_quoted = [""], False
    for char in text:
        is_quoted ^= char == QUOTE
        if char == separator and not is_quoted:
            pieces.append("")
        else:
            pieces[-1] += char
    if is_quoted:
        raise ConfigError(f"speculation {text!r} leaves a quote open; a quote inside of quotes is written twice")
    return pieces


def _unquoted(text: str) -> str:
    """What a value says; quotes that aren't around all of it are a part of it."""
    is_quoted = len(text) > 1 and text[0] == text[-1] == QUOTE
    return text[1:-1].replace(QUOTE * 2, QUOTE) if is_quoted else text


def _quoted(value: object) -> str:
    """A value as `_unquoted` reads it, in quotes only where it needs them."""
    text = str(value)
    if text == text.strip() and not any(char in text for char in ("+", ",", QUOTE)):
        return text
    return QUOTE + text.replace(QUOTE, QUOTE * 2) + QUOTE


def _split(part: str) -> tuple[str, str]:
    """Name and settings of one part of a spec.

    Raises:
        ConfigError: the name is unknown.
    """
    name, _, pairs = (piece.strip() for piece in part.partition(":"))
    known = ["off", "auto", *REGISTRY]
    if name not in known:
        raise ConfigError(f"speculation {name!r} is unknown; known are: {', '.join(known)}")
    return name, pairs


def _read_alone(name: str, parts: list[tuple[str, str]]) -> Speculation:
    """`off` or `auto`, which take no settings and no company."""
    if len(parts) > 1:
        raise ConfigError(f"speculation {name!r} can't be combined with others; name the drafters that should run")
    if parts[0][1]:
        raise ConfigError(f"speculation {name!r} takes no settings, but has {parts[0][1]!r}")
    return OFF if name == "off" else dataclasses.replace(Speculation.parse(AUTO), is_auto=True)


def _read_options(name: str, pairs: str) -> DrafterOptions:
    fields = {field.name: field for field in dataclasses.fields(REGISTRY[name])}  # type: ignore[arg-type]
    values: dict[str, int | float | str] = {}
    for pair in filter(None, _pieces(pairs, ",")):
        key, equals, text = (piece.strip() for piece in pair.partition("="))
        if key not in fields:
            raise ConfigError(f"{name}: setting {key!r} is unknown; known are: {', '.join(fields)}")
        if key in values:
            raise ConfigError(f"{name}: setting {key} is given twice")
        value = _unquoted(text)
        if not equals or not value:
            raise ConfigError(f"{name}: setting {key} has no value; write {key}=VALUE")
        values[key] = _read_value(name, key, value, fields[key].default)
    for key, field in fields.items():
        if field.default is dataclasses.MISSING and key not in values:
            raise ConfigError(f"{name}: setting {key} is missing; write {name}:{key}={key.upper()}")
    return REGISTRY[name](**values)


def _read_value(name: str, key: str, text: str, default: object) -> int | float | str:
    """A value of the type that the setting's default has; what has none is a text."""
    if isinstance(default, str) or default is dataclasses.MISSING:
        return text
    read, wanted = (int, "a whole number") if isinstance(default, int) else (float, "a number")
    try:
        return read(text)
    except ValueError:
        raise ConfigError(f"{name}: {key} is {text!r}, but must be {wanted}") from None


def _write_options(options: DrafterOptions) -> str:
    values = dataclasses.asdict(options)  # type: ignore[call-overload]
    return f"{options.name}:{','.join(f'{key}={_quoted(value)}' for key, value in values.items())}"
