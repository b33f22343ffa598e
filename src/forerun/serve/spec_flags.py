"""The speculation flags of other engines, as a SPEC."""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from typing import Any

from forerun.drafters.spec import QUOTE, REGISTRY, Speculation
from forerun.errors import ConfigError, shown
from forerun.serve.drafting import DRAFTER_ALIASES

DEFAULT_SPEC = "auto"
_CONFIG_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")


@dataclass(frozen=True, slots=True)
class SpecFlags:
    """What was given on the command line; None where nothing was.

    Attributes:
        spec: a SPEC.
        method: a drafter's name, ours or another engine's.
        model: the draft model.
        k: draft tokens per step.
        config: a JSON object with the keys of another engine.
        is_off: no speculation.
    """

    spec: str | None = None
    method: str | None = None
    model: str | None = None
    k: int | None = None
    config: str | None = None
    is_off: bool = False


def spec_of(flags: SpecFlags) -> str:
    """The one SPEC that flags add up to.

    Raises:
        ConfigError: flags contradict each other or leave something open, or a value is wrong.
    """
    has_parts = any(value is not None for value in (flags.method, flags.model, flags.k))
    ways = {
        "--no-speculation": flags.is_off,
        "--spec": flags.spec is not None,
        "--speculative-config": flags.config is not None,
        "--spec-method, --draft-model or --spec-tokens": has_parts,
    }
    used = [name for name, is_used in ways.items() if is_used]
    if len(used) > 1:
        raise ConfigError(f"speculation is set by {' and by '.join(used)}; choose one way")
    if flags.is_off:
        spec = "off"
    elif flags.config is not None:
        spec = _from_config(flags.config)
    elif has_parts:
        spec = _assemble(flags.method, flags.model, flags.k, {})
    else:
        spec = flags.spec or DEFAULT_SPEC
    return str(Speculation.parse(spec))


def _from_config(text: str) -> str:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--speculative-config is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError("--speculative-config must be a JSON object")
    for key, value in config.items():
        wanted = str if key in ("method", "model") else int
        if key not in _CONFIG_KEYS:
            close = difflib.get_close_matches(key, _CONFIG_KEYS, 1)
            advice = f"; did you mean {close[0]!r}?" if close else f"; known are: {', '.join(_CONFIG_KEYS)}"
            raise ConfigError(f"--speculative-config: {shown(key)} is unknown{advice}")
        if not isinstance(value, wanted) or isinstance(value, bool):
            kind = "a string" if wanted is str else "a whole number"
            raise ConfigError(f"--speculative-config: {key} is {shown(value)}, but must be {kind}")
    settings = {
        ours: config[theirs]
        for theirs, ours in (("prompt_lookup_min", "min"), ("prompt_lookup_max", "max"))
        if theirs in config
    }
    return _assemble(config.get("method"), config.get("model"), config.get("num_speculative_tokens"), settings)


def _assemble(method: str | None, model: str | None, k: int | None, settings: dict[str, Any]) -> str:
    if method is None and model is None:
        raise ConfigError("no drafter is named; add --spec-method NAME, or --draft-model MODEL")
    name = "draft" if method is None else DRAFTER_ALIASES.get(method, method)
    if name not in REGISTRY:
        close = difflib.get_close_matches(name, [*REGISTRY, *DRAFTER_ALIASES], 1)
        advice = f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(REGISTRY)}"
        raise ConfigError(f"there is no drafter {shown(method)}; {advice}")
    fields = {field.name for field in dataclasses.fields(REGISTRY[name])}  # type: ignore[arg-type]
    given = dict(settings) if k is None else {"k": k, **settings}
    if model is not None:
        given = {"model": QUOTE + model.replace(QUOTE, QUOTE * 2) + QUOTE, **given}
    if "model" in fields and model is None:
        raise ConfigError(f"drafter {name} needs a model; add --draft-model MODEL")
    unused = [key for key in given if key not in fields]
    if unused:
        raise ConfigError(f"drafter {name} has no setting {unused[0]}")
    return f"{name}:{','.join(f'{key}={value}' for key, value in given.items())}" if given else name
