"""What the commands share: groups of options, and how a group becomes flags.

A group is a frozen dataclass whose fields are annotated as typer options. `with_groups` turns a command that takes
such groups into the flat signature typer wants, so every option is written down once however many commands take it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from forerun.errors import RequestError
from forerun.ops.base import KvType
from forerun.types import SamplingParams, VerifyRule

if TYPE_CHECKING:
    from forerun.engine.llm import LLM

_SAMPLING = "Sampling"
_SPECULATION = "Speculation"
_ENGINE = "Engine"
_OUTPUT = "Output"


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The law of each token and when the output ends; see `types.SamplingParams` for what each field means."""

    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.", rich_help_panel=_SAMPLING)] = 256
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)] = 0.0
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 is off.", rich_help_panel=_SAMPLING)] = 0
    top_p: Annotated[
        float, typer.Option(help="Keep the most likely tokens up to this mass; 1 is off.", rich_help_panel=_SAMPLING)
    ] = 1.0
    min_p: Annotated[
        float,
        typer.Option(help="Keep tokens with at least this share of the top one; 0 is off.", rich_help_panel=_SAMPLING),
    ] = 0.0
    repetition_penalty: Annotated[
        float, typer.Option(help="Of tokens in prompt or output; 1 is off.", rich_help_panel=_SAMPLING)
    ] = 1.0
    presence_penalty: Annotated[
        float, typer.Option(help="Once per token in the output; 0 is off.", rich_help_panel=_SAMPLING)
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option(help="Per occurrence in the output; 0 is off.", rich_help_panel=_SAMPLING)
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=BIAS", help="Added to one token's logit; may be repeated.", rich_help_panel=_SAMPLING),
    ] = None
    min_tokens: Annotated[
        int, typer.Option(help="No end of text before this many tokens.", rich_help_panel=_SAMPLING)
    ] = 0
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not end at the model's end of text.", rich_help_panel=_SAMPLING)
    ] = False
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text; may be repeated.", rich_help_panel=_SAMPLING),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(help="0 to 2**64 - 1; drawn and reported when not given.", rich_help_panel=_SAMPLING),
    ] = None
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Log-probabilities with N alternatives; --json shows them.", rich_help_panel=_SAMPLING
        ),
    ] = None

    def params(self) -> SamplingParams:
        """The request these options ask for. Raises RequestError when a value is out of range."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=parse_logit_bias(self.logit_bias or []),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop=tuple(self.stop or ()),
            seed=self.seed,
            logprobs=self.logprobs,
        )


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Who drafts and how drafts are verified."""

    spec: Annotated[
        str,
        typer.Option(
            metavar="SPEC",
            help="off, auto (keeps the guesses that pay), or NAME[:key=value,...], for instance ngram:k=8.",
            rich_help_panel=_SPECULATION,
        ),
    ] = "auto"
    verify: Annotated[
        VerifyRule,
        typer.Option(
            help="coupled: the very tokens of plain decoding, seeds and all. The others keep their law only.",
            rich_help_panel=_SPECULATION,
        ),
    ] = "coupled"


@dataclass(frozen=True, slots=True)
class WeightOptions:
    """How weights are read and how many threads work on them."""

    quant: Annotated[
        Literal["auto", "f32", "bf16", "q8", "q4"],
        typer.Option(help="Weights; auto keeps what the file holds.", rich_help_panel=_ENGINE),
    ] = "auto"
    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: the physical cores it may use.", rich_help_panel=_ENGINE)
    ] = None


@dataclass(frozen=True, slots=True)
class LoadOptions(WeightOptions):
    """How a model is loaded."""

    kv: Annotated[KvType, typer.Option(help="Type of the cached keys and values.", rich_help_panel=_ENGINE)] = "f16"


@dataclass(frozen=True, slots=True)
class EngineOptions(LoadOptions):
    """How the model is loaded and run."""

    backend: Annotated[Literal["native", "torch"], typer.Option(help="What computes.", rich_help_panel=_ENGINE)] = (
        "native"
    )
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="cuda needs the torch backend.", rich_help_panel=_ENGINE)
    ] = "cpu"
    chunk: Annotated[int, typer.Option(min=1, help="Most prompt tokens per target pass.", rich_help_panel=_ENGINE)] = (
        256
    )
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens of prompt and output; default: the model's context, at most 8192.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Keep keys and values for texts that begin like earlier ones.",
            rich_help_panel=_ENGINE,
        ),
    ] = True

    def load(self, model: str | Path, **further: Any) -> LLM:
        """The model under these options; `further` are more arguments of `LLM`.

        Raises:
            ConfigError: an option is out of range.
            LoadError: a file can't be read.
        """
        from forerun.engine.llm import LLM

        return LLM(
            model,
            backend=self.backend,
            device=self.device,
            quant=self.quant,
            kv=self.kv,
            threads=self.threads,
            chunk=self.chunk,
            max_model_len=self.max_model_len,
            prefix_cache=self.prefix_cache,
            **further,
        )


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What is written besides the text."""

    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write one JSON line per step.", rich_help_panel=_OUTPUT),
    ] = None
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.", rich_help_panel=_OUTPUT)
    ] = False


def parse_logit_bias(entries: list[str]) -> dict[int, float]:
    """Reads entries like `50=-1.5`. Raises RequestError when one is not ID=BIAS."""
    biases: dict[int, float] = {}
    for entry in entries:
        token_id, _, bias = entry.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise RequestError(
                f"logit_bias {entry!r} is not ID=BIAS, a token id and a number such as 50=-1.5", "logit_bias"
            ) from None
    return biases


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command with each parameter that is an option group replaced by the group's fields.

    The command is called with the groups it declares, built from the flat values.
    """
    groups: dict[str, type[Any]] = {}
    flat: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint) and isinstance(hint, type):
            groups[parameter.name] = hint
            field_hints = get_type_hints(hint, include_extras=True)
            flat += [
                inspect.Parameter(
                    f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=field_hints[f.name]
                )
                for f in fields(hint)
            ]
        else:
            flat.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint))

    def call(**values: Any) -> None:
        built = {name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        command(**values, **built)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return call


def with_environment(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose options can also be set in the environment: `--max-queue` of `serve` as FORERUN_SERVE_MAX_QUEUE
    or FORERUN_MAX_QUEUE.

    Args:
        command: from `with_groups`; its signature is changed.
    """
    flat = []
    for parameter in inspect.signature(command).parameters.values():
        kind, *details = get_args(parameter.annotation)
        options = [copy(detail) for detail in details]
        for option in options:
            if isinstance(option, OptionInfo):
                name = parameter.name.upper()
                option.envvar = [f"FORERUN_{command.__name__.upper()}_{name}", f"FORERUN_{name}"]
                option.show_envvar = False  # the name says it
        flat.append(parameter.replace(annotation=Annotated[kind, *options]))
    command.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return command
