"""How a user says what to speculate with: `off`, or `NAME[:key=value,...][+NAME...]`.

    ngram                           prompt lookup with its defaults
    ngram:k=12,policy=fixed         twelve nodes in every step

The registry is the one list of drafters there is: a new one is its file and a line here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

from forerun.drafters.base import DraftContext, Drafter
from forerun.drafters.ngram import NgramOptions
from forerun.errors import ConfigError


class DrafterOptions(Protocol):
    """Settings of one drafter: a frozen dataclass of int and str fields, which are the keys of its spec."""

    @property
    def is_off(self) -> bool:
        """Whether the settings say that nothing is proposed."""

    def create(self, context: DraftContext) -> Drafter:
        """A drafter for one request."""


REGISTRY: dict[str, type[NgramOptions]] = {
    "ngram": NgramOptions,
}


@dataclass(frozen=True, slots=True)
class Speculation:
    """What to speculate with, read from a spec by `parse`.

    Attributes:
        name: the drafter's name in the registry, or `off`.
        options: its settings; None when off.

    >>> str(Speculation.parse("ngram:k=4"))
    'ngram:k=4,min=1,max=4,policy=adaptive'
    >>> Speculation.parse("ngram:k=0").is_off
    True
    """

    name: str = "off"
    options: DrafterOptions | None = None

    @staticmethod
    def parse(spec: str) -> Speculation:
        """Reads a spec.

        Raises:
            ConfigError: an unknown name or key, a value out of range, or a drafter named twice.
        """
        first, *others = spec.split("+")
        if others:
            # One drafter exists, so whatever else is named is unknown (and said so) or the same one again.
            names = [_split(part)[0] for part in (first, *others)]
            raise ConfigError(f"speculation names {len(names)} drafters ({', '.join(names)}), but only one can run")
        name, pairs = _split(first)
        if name == "off":
            if pairs:
                raise ConfigError(f"speculation 'off' takes no settings, but has {pairs}")
            return OFF
        options = _read_options(name, pairs)
        return OFF if options.is_off else Speculation(name, options)

    @property
    def is_off(self) -> bool:
        """Whether every step is plain decoding."""
        return self.options is None

    def create(self, context: DraftContext) -> Drafter | None:
        """A fresh drafter for one request, or None when off."""
        return None if self.options is None else self.options.create(context)

    def __str__(self) -> str:
        if self.options is None:
            return self.name
        values = dataclasses.asdict(self.options)  # type: ignore[call-overload]
        return f"{self.name}:{','.join(f'{key}={value}' for key, value in values.items())}"


OFF = Speculation()


def _split(part: str) -> tuple[str, str]:
    """Name and settings of one part of a spec.

    Raises:
        ConfigError: the name is unknown.
    """
    name, _, pairs = part.strip().partition(":")
    if name != "off" and name not in REGISTRY:
        raise ConfigError(f"speculation {name!r} is unknown; known are: {', '.join(['off', *REGISTRY])}")
    return name, pairs


def _read_options(name: str, pairs: str) -> DrafterOptions:
    fields = {field.name: field for field in dataclasses.fields(REGISTRY[name])}
    values: dict[str, int | str] = {}
    for pair in filter(None, pairs.split(",")):
        key, equals, text = (piece.strip() for piece in pair.partition("="))
        if key not in fields:
            raise ConfigError(f"{name}: setting {key!r} is unknown; known are: {', '.join(fields)}")
        if key in values:
            raise ConfigError(f"{name}: setting {key} is given twice")
        if not equals or not text:
            raise ConfigError(f"{name}: setting {key} has no value; write {key}=VALUE")
        values[key] = _read_int(name, key, text) if isinstance(fields[key].default, int) else text
    return REGISTRY[name](**values)  # type: ignore[arg-type]


def _read_int(name: str, key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}: {key} is {text!r}, but must be a whole number") from None
