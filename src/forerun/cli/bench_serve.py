"""`forerun bench serve`: what a server delivers to many clients, its own or anybody's."""

from __future__ import annotations

import asyncio
import json as json_module
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.display import note
from forerun.cli.jsonlines import dumps
from forerun.cli.options import LoadOptions
from forerun.cli.progress import ProgressBar, resolve
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.bench.serve_client import Client
    from forerun.bench.serve_figures import Level, Limits
    from forerun.bench.serve_load import Style, Workload

_SERVER, _WORK, _REPORT = "Server", "Work", "Report"
DEFAULT_CLIENTS = "1,2,4,8,16"
DEFAULT_TIMEOUT_S = 600.0
MIN_REQUESTS, REQUESTS_PER_CLIENT = 16, 4
LONG_PROMPT_STREAM_TOKENS = 2048
BUSY_CLIENT = 0.1  # of a processor: from here on, the client may be what was measured


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Who is measured."""

    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A running server; without it MODEL is served here.", rich_help_panel=_SERVER),
    ] = None
    model_name: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="As requests name it; default: the server's first.",
                     rich_help_panel=_SERVER),
    ] = None  # fmt: skip
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.", rich_help_panel=_SERVER)] = None
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds that an answer may take.", rich_help_panel=_SERVER)
    ] = DEFAULT_TIMEOUT_S
    spec: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="Speculation of the server that is started here.", rich_help_panel=_SERVER),
    ] = None


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """What it is asked."""

    clients: Annotated[
        str,
        typer.Option(metavar="N,N,...", help="So many at once, each waiting for its answer.", rich_help_panel=_WORK),
    ] = DEFAULT_CLIENTS
    rate: Annotated[
        str | None,
        typer.Option(metavar="R,R,...", help="Poisson arrivals per second instead of clients.", rich_help_panel=_WORK),
    ] = None
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines with arrival_s and prompt or messages.", rich_help_panel=_WORK),
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines with turns or prompt, not Spec-Bench.", rich_help_panel=_WORK),
    ] = None
    random: Annotated[
        int, typer.Option(metavar="N", min=0, help="Prompts of N random token ids.", rich_help_panel=_WORK)
    ] = 0
    requests: Annotated[
        int | None, typer.Option(min=1, help="Per level; default: 4 a client, at least 16.", rich_help_panel=_WORK)
    ] = None
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.", rich_help_panel=_WORK)] = 128
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="All answers as long, where the server can.",
            rich_help_panel=_WORK,
        ),
    ] = True
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.", rich_help_panel=_WORK)] = 0.0
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, ids and answers.", rich_help_panel=_WORK)] = 0
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Streamed answers.", rich_help_panel=_WORK)] = (
        True
    )
    extra: Annotated[
        str | None, typer.Option(metavar="JSON", help="Further fields of every request.", rich_help_panel=_WORK)
    ] = None


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What is measured besides, and where it goes."""

    slo_ttft_ms: Annotated[
        float | None, typer.Option(min=0.0, help="A good answer begins within it.", rich_help_panel=_REPORT)
    ] = None
    slo_itl_ms: Annotated[
        float | None,
        typer.Option(min=0.0, help="A good answer takes no more per token after its first.", rich_help_panel=_REPORT),
    ] = None
    overhead: Annotated[
        bool, typer.Option("--overhead", help="Only: HTTP beside the bare engine, one client.", rich_help_panel=_REPORT)
    ] = False
    long_prompt: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Only: gaps of 4 streams when a prompt of N tokens arrives.",
                     rich_help_panel=_REPORT),
    ] = 0  # fmt: skip
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a JSON file and a picture there.", rich_help_panel=_REPORT)
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print the JSON object alone.", rich_help_panel=_REPORT)] = False

    def limits(self) -> Limits:
        """What counts as good."""
        from forerun.bench.serve_figures import Limits

        in_s = [value if value is None else value / 1000.0 for value in (self.slo_ttft_ms, self.slo_itl_ms)]
        return Limits(*in_s)


def serve(
    load: LoadOptions,
    server: ServerOptions,
    work: WorkOptions,
    report: ReportOptions,
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="What is served here; default: demo.", show_default=False)
    ] = None,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="Further options of forerun serve.")
    ] = None,
) -> None:
    """Measure a server: throughput, time to the first token, gaps between chunks, for several numbers of clients.

    The last line is a JSON object with every figure and where it comes from.
    """
    try:
        import aiohttp  # noqa: F401 - here to say what is missing before anything is started
    except ModuleNotFoundError as error:
        raise ConfigError("bench serve needs aiohttp; install it with: pip install 'forerun[bench]'") from error
    from forerun.bench.pictures import pyplot
    from forerun.bench.provenance import provenance
    from forerun.bench.serve_client import Target
    from forerun.bench.serve_process import ServerProcess, forerun_serve

    _check(load, server, work, report, model, options)
    if report.out is not None:
        pyplot()  # to say what is missing before anything is measured
    path = None if server.url else resolve(model or "demo")
    with ExitStack() as stack:
        url = server.url or ""
        if path is not None:
            command = forerun_serve(model or "demo", _serve_options(load, server, report, options))
            url = stack.enter_context(ServerProcess("forerun serve", command)).wait_until_ready()
        target = Target(url, server.model_name, server.api_key, server.timeout)
        figures, levels = asyncio.run(_measure(target, path, load, server, work, report))
    data = {"bench": "serve", "url": url, **figures, "provenance": provenance(path)}
    if report.out is not None:
        _write(report.out, data, levels, _stem(data, path))
    if not report.json:
        _print_tables(data, levels)
    print(dumps(data))
    if levels and not any(level.whole for level in levels):
        raise typer.Exit(1)


def _check(
    load: LoadOptions, server: ServerOptions, work: WorkOptions, report: ReportOptions, model: str | None,
    options: list[str] | None,
) -> None:  # fmt: skip
    """Raises ConfigError for options that exclude each other."""
    if server.url and (model or options or server.spec or load != LoadOptions()):
        raise ConfigError("with --url nothing is served here, so leave out MODEL, --spec and how a model is loaded")
    if server.url and report.overhead:
        raise ConfigError("--overhead compares a server started here with the engine, so leave out --url")
    sources = [bool(work.prompts), bool(work.random), bool(work.replay)]
    if sum(sources) > 1 or (work.replay and work.rate):
        raise ConfigError("--prompts, --random and --replay exclude each other, and --replay excludes --rate")
    if report.overhead and report.long_prompt:
        raise ConfigError("--overhead and --long-prompt are measured apart; give one of them")
    is_judged = report.slo_ttft_ms is not None or report.slo_itl_ms is not None
    if not work.stream and (is_judged or report.overhead or report.long_prompt):
        raise ConfigError("without streaming nothing is known of first tokens and gaps; leave out --no-stream")


def _serve_options(
    load: LoadOptions, server: ServerOptions, report: ReportOptions, options: list[str] | None
) -> list[str]:
    words = ["--quant", load.quant, "--kv", load.kv, "--spec", server.spec or "auto"]
    if load.threads:
        words += ["--threads", str(load.threads)]
    if server.api_key:
        words += ["--api-key", server.api_key]
    if report.overhead:
        words += ["--no-prefix-cache"]
    return [*words, *(options or [])]


async def _measure(
    target: Any, path: Path | None, load: LoadOptions, server: ServerOptions, work: WorkOptions, report: ReportOptions
) -> tuple[dict[str, Any], list[Level]]:
    """The figures as plain values, and the levels among them."""
    from forerun.bench.serve_client import Client
    from forerun.bench.serve_load import Style, Workload, accepts_ignore_eos

    workload = Workload(_questions(work), work.random, work.seed)
    async with Client(target) as client:
        style = Style(
            client.model, work.new_tokens, work.stream, False, work.temperature,
            work.seed if work.temperature else None, _extra(work.extra),
        )  # fmt: skip
        if work.ignore_eos and await accepts_ignore_eos(client, style, workload):
            style = replace(style, ignore_eos=True)
        elif work.ignore_eos:
            note("forerun: the server does not know ignore_eos, so answers end where the model ends them")
        figures: dict[str, Any] = {
            "model": client.model,
            "new_tokens": work.new_tokens,
            "ignore_eos": style.ignore_eos,
            "stream": work.stream,
            "temperature": work.temperature,
            "seed": work.seed,
            "extra": dict(style.extra),
            "prompts": _source(work),
            "slo_ttft_ms": report.slo_ttft_ms,
            "slo_itl_ms": report.slo_itl_ms,
            "spec": server.spec or ("auto" if path else None),
        }
        if report.overhead:
            assert path is not None
            return figures | {"overhead": await _overhead(client, style, workload, path, load, server, work)}, []
        if report.long_prompt:
            return figures | {"long_prompt": await _long_prompt(client, style, workload, report.long_prompt)}, []
        levels = await _levels(client, style, workload, work, report.limits())
        return figures | {"levels": [level.to_json() for level in levels]}, levels


async def _levels(client: Client, style: Style, workload: Workload, work: WorkOptions, limits: Limits) -> list[Level]:
    from forerun.bench.serve_load import poisson_arrivals, replay_asks, run_closed, run_open, warm_up

    levels: list[Level] = []
    if work.replay:
        asks = replay_asks(style, work.replay)
        await warm_up(client, style, workload, 1)
        with ProgressBar(f"replaying {len(asks)} requests") as bar:
            return [await run_open(client, asks, "replay", 0.0, limits, bar.update)]
    first = 0
    for load in _numbers(work.rate, float, "--rate") if work.rate else _numbers(work.clients, int, "--clients"):
        num_asks = work.requests or (MIN_REQUESTS if work.rate else max(MIN_REQUESTS, REQUESTS_PER_CLIENT * int(load)))
        asks = workload.asks(style, num_asks, first)
        first += num_asks
        await warm_up(client, style, workload, 1 if work.rate else int(load))
        label = f"{load:g} requests per second" if work.rate else f"clients: {load}"
        with ProgressBar(f"{label}, {num_asks} requests") as bar:
            if work.rate:
                arriving = poisson_arrivals(asks, load, work.seed)
                levels.append(await run_open(client, arriving, f"{load:g}/s", load, limits, bar.update))
            else:
                levels.append(await run_closed(client, asks, int(load), limits, bar.update))
    return levels


async def _overhead(
    client: Client, style: Style, workload: Workload, path: Path, load: LoadOptions, server: ServerOptions,
    work: WorkOptions,
) -> dict[str, Any]:  # fmt: skip
    from forerun.bench.serve_overhead import measure_overhead
    from forerun.engine.llm import LLM

    if not workload.prompts or work.temperature or work.extra:
        raise ConfigError(
            "--overhead asks questions greedily, so leave out --random, --replay, --temperature and --extra"
        )
    llm = LLM(path, quant=load.quant, kv=load.kv, threads=load.threads, prefix_cache=False)
    prompts = workload.prompts[: work.requests or MIN_REQUESTS]
    with ProgressBar(f"answering {len(prompts)} prompts by HTTP and by the engine") as bar:
        overhead = await measure_overhead(client, llm, server.spec or "auto", prompts, style, bar.update)
    return overhead.to_json()


async def _long_prompt(client: Client, style: Style, workload: Workload, num_tokens: int) -> dict[str, Any]:
    from forerun.bench.serve_load import warm_up
    from forerun.bench.serve_long_prompt import NUM_STREAMS, long_prompt_json, long_prompt_trials

    streams = replace(style, max_tokens=LONG_PROMPT_STREAM_TOKENS)
    await warm_up(client, style, workload, NUM_STREAMS)
    note(f"forerun: {NUM_STREAMS} streams, and a prompt of {num_tokens} tokens")
    return long_prompt_json(await long_prompt_trials(client, streams, workload, num_tokens, num_trials=3))


def _questions(work: WorkOptions) -> list[Any]:
    from forerun.bench.prompts import pick, read_prompts, spec_bench

    if work.prompts:
        return read_prompts(work.prompts)
    questions = spec_bench()
    return pick(questions, len(questions))  # categories take turns, so that every level has some of each


def _source(work: WorkOptions) -> str:
    if work.random:
        return f"{work.random} random ids"
    file = work.prompts or work.replay
    return file.name if file else "Spec-Bench"


def _extra(text: str | None) -> dict[str, Any]:
    try:
        value = json_module.loads(text) if text else {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f'--extra is {text!r}, but must be a JSON object such as {{"top_p": 0.9}}')
    return value


def _numbers(text: str, kind: Callable[[str], Any], name: str) -> list[Any]:
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) <= 0:
        raise ConfigError(f"{name} is {text!r}, but must be numbers above 0 divided by commas")
    return values


def _short_name(data: dict[str, Any]) -> str:
    """Of the model: without folders, since some servers name it by its path."""
    return str(data["model"]).rpartition("/")[2]


def _stem(data: dict[str, Any], path: Path | None) -> str:
    kind = "overhead" if "overhead" in data else "long-prompt" if "long_prompt" in data else "serve"
    name = path.stem if path else _short_name(data)
    return f"{kind}-{name}" + (f"-{data['spec'].replace(':', '-')}" if data["spec"] else "")


def _write(folder: Path, data: dict[str, Any], levels: list[Level], stem: str) -> None:
    from forerun.bench.serve_report import draw

    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(dumps(data) + "\n")
    if levels:
        unit = "requests per second" if levels[0].label.endswith("/s") else "clients"
        draw({_short_name(data): levels}, unit, _title(data), folder / f"{stem}.png")
    note(f"forerun: wrote {folder / stem}.json" + (" and .png" if levels else ""))


def _title(data: dict[str, Any]) -> str:
    origin = data["provenance"]
    law = f"temperature {data['temperature']:g}" if data["temperature"] else "greedy"
    who = f"speculation {data['spec']}" if data["spec"] else data["url"]
    return f"{_short_name(data)}, {who}, {data['prompts']}, {data['new_tokens']} tokens, {law}, {origin['cpu']}"


def _print_tables(data: dict[str, Any], levels: list[Level]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from forerun.bench.serve_report import COLUMNS, rows

    console = Console() if Console().is_terminal else Console(width=200)
    console.print(_title(data))
    table = Table(box=box.SIMPLE)
    columns, cells = (COLUMNS, rows(levels)) if levels else _other_table(data)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    console.print(table)
    busy = max((level.cpu_share for level in levels), default=0.0)
    if busy > BUSY_CLIENT:
        note(f"forerun: the client itself took up to {busy:.0%} of a processor")


def _other_table(data: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    if "overhead" in data:
        columns = ("answers", "HTTP / engine", "low", "high", "HTTP tok/s", "engine tok/s")
        kinds = [(kind, data["overhead"][kind]) for kind in ("stream", "whole")]
        return columns, [
            (kind, *(f"{of['http_over_engine'][name]:.3f}" for name in ("value", "low", "high")),
             f"{of['http_tok_per_s']:.1f}", f"{of['engine_tok_per_s']:.1f}")
            for kind, of in kinds
        ]  # fmt: skip
    found = data["long_prompt"]
    gaps = [(name, found[f"{key}_gap_ms"]) for name, key in (("before it", "quiet"), ("while it is read", "busy"))]
    return ("gaps between chunks", "p50 ms", "p95 ms", "p99 ms"), [
        (name, *(f"{gap[p]:.1f}" if gap else "-" for p in ("p50", "p95", "p99"))) for name, gap in gaps
    ]
