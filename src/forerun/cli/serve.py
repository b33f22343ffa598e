"""`forerun serve`: OpenAI's API over HTTP."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from forerun.cli.display import note
from forerun.cli.options import EngineOptions
from forerun.types import PAGE_TOKENS, VerifyRule

if TYPE_CHECKING:
    from pathlib import Path

    from forerun.engine.llm import LLM
    from forerun.serve.app import Served
    from forerun.serve.settings import ServeSettings

_SERVER, _SPECULATION, _LIMITS, _OUTPUT = "Server", "Speculation", "Limits", "Output"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server listens and what it is called."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all.", rich_help_panel=_SERVER)] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.", rich_help_panel=_SERVER)] = (
        8000
    )
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Name in requests; may be repeated. Default: MODEL.", rich_help_panel=_SERVER
        ),
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Ask for a key; may be repeated.", rich_help_panel=_SERVER),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Let this origin's pages in; may be repeated.", rich_help_panel=_SERVER),
    ] = None
    ui: Annotated[bool, typer.Option("--ui/--no-ui", help="Serve the page at /.", rich_help_panel=_SERVER)] = True


@dataclass(frozen=True, slots=True)
class ServeSpeculationOptions:
    """Who drafts, in our words and in other engines'."""

    spec: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="auto (the default), off, or NAME[:key=value,...]; requests may narrow it.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="The same as --spec off.", rich_help_panel=_SPECULATION)
    ] = False
    verify: Annotated[
        VerifyRule, typer.Option(help="coupled: the very tokens of plain decoding.", rich_help_panel=_SPECULATION)
    ] = "coupled"
    draft_model: Annotated[
        str | None,
        typer.Option(
            "--draft-model",
            "--model-draft",
            "-md",
            "--spec-model",
            metavar="MODEL",
            help="A smaller model that drafts.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None
    spec_method: Annotated[
        str | None,
        typer.Option("--spec-method", "--spec-type", metavar="NAME", help="One drafter.", rich_help_panel=_SPECULATION),
    ] = None
    spec_tokens: Annotated[
        int | None,
        typer.Option(
            "--spec-tokens",
            "--spec-draft-n-max",
            "--num-speculative-tokens",
            metavar="K",
            help="Draft tokens per step; 0 is off.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None
    speculative_config: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="The same as an object.", rich_help_panel=_SPECULATION),
    ] = None


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """What the server takes on."""

    kv_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that the KV cache holds for all requests.", rich_help_panel=_LIMITS),
    ] = None
    max_running: Annotated[int, typer.Option(min=1, help="Jobs that run at a time.", rich_help_panel=_LIMITS)] = 16
    max_queue: Annotated[
        int, typer.Option(min=0, help="Jobs that may wait; more get 429.", rich_help_panel=_LIMITS)
    ] = 512
    max_connections: Annotated[
        int, typer.Option(min=1, help="Open connections; more get 503.", rich_help_panel=_LIMITS)
    ] = 1000
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Of one request.", rich_help_panel=_LIMITS)] = 16 << 20
    receive_timeout_s: Annotated[
        float, typer.Option(min=0.1, help="A request must have arrived by then.", rich_help_panel=_LIMITS)
    ] = 60.0
    send_timeout_s: Annotated[
        float, typer.Option(min=0.1, help="A client that reads nothing for so long is cut.", rich_help_panel=_LIMITS)
    ] = 30.0
    keepalive_s: Annotated[
        float, typer.Option(min=0.1, help="Pause after which a stream gets a comment.", rich_help_panel=_LIMITS)
    ] = 15.0
    drain_s: Annotated[
        float, typer.Option(min=0.0, help="What runs may take so long after SIGTERM.", rich_help_panel=_LIMITS)
    ] = 30.0


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What the server says of itself."""

    log_json: Annotated[bool, typer.Option("--log-json", help="One object per line.", rich_help_panel=_OUTPUT)] = False
    metrics_alias: Annotated[
        Literal["none", "vllm"], typer.Option(help="Repeat the metrics under that name.", rich_help_panel=_OUTPUT)
    ] = "none"
    request_metrics: Annotated[
        Literal["none", "summary", "steps"],
        typer.Option(help="The metrics object of answers.", rich_help_panel=_OUTPUT),
    ] = "none"


def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A GGUF file, a Hugging Face folder or a name such as demo.")
    ],
    server: ServerOptions,
    speculation: ServeSpeculationOptions,
    limits: LimitOptions,
    report: ReportOptions,
    engine: EngineOptions,
) -> None:
    """Serve a model over HTTP, with OpenAI's API.

    Every option can also be set in the environment, --max-queue as FORERUN_MAX_QUEUE or FORERUN_SERVE_MAX_QUEUE.
    """
    from forerun.cli.progress import resolve
    from forerun.ops.native import chosen_isa
    from forerun.serve.answers import Identity
    from forerun.serve.identity import fingerprint
    from forerun.serve.lifecycle import address_of, bind, num_connections_allowed
    from forerun.serve.lifecycle import serve as run
    from forerun.serve.logs import configure
    from forerun.serve.settings import ServeSettings

    settings = ServeSettings(
        model_names=tuple(server.served_model_name or [model]),
        spec=_spec(speculation),
        verify=speculation.verify,
        api_keys=tuple(server.api_key or ()),
        max_running=limits.max_running,
        max_queue=limits.max_queue,
        max_connections=num_connections_allowed(limits.max_connections),
        max_body_bytes=limits.max_body_bytes,
        receive_timeout_s=limits.receive_timeout_s,
        send_timeout_s=limits.send_timeout_s,
        keepalive_s=limits.keepalive_s,
        drain_s=limits.drain_s,
        report=report.request_metrics,
        metrics_alias=report.metrics_alias,
        cors_origins=tuple(server.cors_origin or ()),
        has_page=server.ui,
    )
    listener = bind(server.host, server.port)
    with listener:
        address = address_of(listener)
        configure(is_json=report.log_json)
        say = logging.getLogger("forerun.serve").info if report.log_json else note
        say(f"forerun: {address} answers with 503 while {model} is loading")
        served = _served(settings)

        def load() -> LLM:
            path = resolve(model)
            served.identity = Identity(settings.model_names[0], fingerprint(path, chosen_isa()))
            llm = _load(path, engine, limits)
            llm.speculator(settings.spec, settings.verify)  # which may have a model of its own to load
            served.facts = _facts(path, llm, engine)
            return llm

        run(listener, served, load, lambda: say(_summary(served, address)))


def _spec(speculation: ServeSpeculationOptions) -> str:
    from forerun.drafters.spec import Speculation
    from forerun.serve.spec_flags import SpecFlags, spec_of

    spec = spec_of(
        SpecFlags(
            spec=speculation.spec,
            method=speculation.spec_method,
            model=speculation.draft_model,
            k=speculation.spec_tokens,
            config=speculation.speculative_config,
            is_off=speculation.no_speculation,
        )
    )
    Speculation.parse(spec).check_rule(speculation.verify)
    return spec


def _served(settings: ServeSettings) -> Served:
    from forerun.serve.app import Served
    from forerun.serve.drafting import loaded_drafters
    from forerun.serve.hub import Hub
    from forerun.serve.metrics import Metrics

    name = settings.model_names[0]
    metrics = Metrics(name, loaded_drafters(settings.spec), settings.metrics_alias)
    max_jobs = settings.max_running + settings.max_queue
    hub = Hub(metrics, max_jobs, settings.send_timeout_s, settings.keepalive_s)
    return Served(settings, hub)


def _load(path: Path, engine: EngineOptions, limits: LimitOptions) -> LLM:
    llm = engine.load(path, kv_tokens=limits.kv_tokens, max_running=limits.max_running)
    llm.engine.controller.measure()  # also without drafts: it bounds what prompts may add to a step
    return llm


def _facts(path: Path, llm: LLM, engine: EngineOptions) -> dict[str, Any]:
    """What `/server_info` and the start say of the loaded model."""
    return {
        "model": {
            "file": path.name,
            "architecture": llm.config.architecture,
            "file_bytes": _num_bytes(path),
            "weight_bytes_per_pass": llm.target.weight_bytes,
            "quant": engine.quant,
            "has_chat_template": llm.has_chat_template,
        },
        "backend": {
            "name": engine.backend,
            "executor": llm.target.fingerprint,
            "kv_type": engine.kv,
            "kv_tokens": llm.engine.pages.num_pages * PAGE_TOKENS,
            "kv_bytes": llm.target.kv_bytes,
        },
    }


def _num_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _summary(served: Served, address: str) -> str:
    """What a server that is ready says of itself."""
    from forerun.serve.drafting import loaded_drafters

    settings, facts, llm = served.settings, served.facts, served.llm
    assert llm is not None
    model, backend = facts["model"], facts["backend"]
    drafters = ", ".join(loaded_drafters(settings.spec)) or "nobody"
    promise = "the very tokens of plain decoding" if settings.verify == "coupled" else "the law of plain decoding"
    return (
        f"forerun: serving {', '.join(settings.model_names)} at {address}/v1\n"
        f"  model        {model['file']}, {model['architecture']}, {model['file_bytes']:,} bytes\n"
        f"  backend      {backend['executor']}\n"
        f"  KV cache     {backend['kv_tokens']:,} tokens in {backend['kv_type']}, "
        f"{llm.limits.max_model_len:,} per request, {settings.max_running} requests at a time\n"
        f"  speculation  {settings.spec}; drafting: {drafters}; rule {settings.verify} keeps {promise}\n"
        f"  sampling     temperature 1, top_p 1, no top_k, no min_p unless a request says so\n"
        f"  build        {served.identity.fingerprint}"
    )
