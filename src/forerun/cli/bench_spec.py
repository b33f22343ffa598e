"""`forerun bench spec`: drafters beside plain decoding on real prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.display import note
from forerun.cli.jsonlines import dumps
from forerun.cli.options import LoadOptions
from forerun.cli.progress import ProgressBar, resolve
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.bench.prompts import Prompt
    from forerun.drafters.spec import Speculation

DEFAULT_PER_CATEGORY = 8
DEFAULT_MAX_S = 18 * 60.0  # of the 20 minutes that the default may take; loading and reporting need some too
NUM_REPEATS = 3


def spec(
    load: LoadOptions,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A GGUF file, a Hugging Face folder or a name such as demo.")
    ] = "demo",
    more: Annotated[list[str] | None, typer.Argument(metavar="[SPEC]...", help="Further drafters.")] = None,
    drafters: Annotated[
        list[str] | None,
        typer.Option(metavar="all|auto|SPEC", help="What is compared with plain decoding and auto; may be repeated."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of every answer.")] = 0,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON lines with turns or prompt; default: Spec-Bench.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens per answer.")] = 256,
    per_category: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each category; default: 8, fewer where time is short.")
    ] = None,
    all_prompts: Annotated[bool, typer.Option("--all", help="All prompts, however long it takes.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds.")] = NUM_REPEATS,
    warm: Annotated[
        bool, typer.Option("--warm", help="One more round that keeps what requests share, reported apart.")
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a JSON file and a picture there.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the JSON object alone.")] = False,
) -> None:
    """Compare drafters with plain decoding on Spec-Bench or your own prompts.

    The last line is a JSON object with every figure and where it comes from.
    """
    from forerun.bench.pictures import pyplot
    from forerun.bench.prompts import pick, read_prompts, spec_bench
    from forerun.bench.provenance import provenance
    from forerun.bench.spec import compare_arms
    from forerun.bench.spec_report import draw, to_json
    from forerun.engine.llm import LLM
    from forerun.types import SamplingParams

    if all_prompts and per_category is not None:
        raise ConfigError("--all and --per-category exclude each other; give one of them")
    if out is not None:
        pyplot()  # to say what is missing before anything is measured
    arms = arms_of([*(drafters or ["auto"]), *(more or [])])
    params = SamplingParams(max_tokens=new_tokens, temperature=temperature, seed=seed)
    chosen: list[Prompt] = read_prompts(prompts) if prompts else spec_bench()
    if not all_prompts:
        chosen = pick(chosen, per_category or DEFAULT_PER_CATEGORY)
    path = resolve(model)
    llm = LLM(path, quant=load.quant, kv=load.kv, threads=load.threads)
    with ProgressBar(f"answering {len(chosen)} prompts {repeats} times with {len(arms) + 1} arms") as bar:
        comparison = compare_arms(
            llm,
            arms,
            chosen,
            params,
            num_repeats=repeats,
            max_s=None if all_prompts or per_category else DEFAULT_MAX_S,
            is_warm=warm,
            progress=bar.update,
        )
    data: dict[str, Any] = {
        "bench": "spec",
        **to_json(comparison),
        "temperature": temperature,
        "seed": seed,
        "new_tokens": new_tokens,
        "prompts": prompts.name if prompts else "Spec-Bench",
        "specs": {name: str(speculation) for name, speculation in arms.items()},
        "provenance": provenance(path),
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        stem = f"spec-{path.stem}-t{temperature:g}" + (f"-{prompts.stem}" if prompts else "")
        draw(comparison, _title(data), out / f"{stem}.png")
        (out / f"{stem}.json").write_text(dumps(data) + "\n")
        note(f"forerun: wrote {out / stem}.json and .png")
    if not json:
        _print_table(comparison, data)
    print(dumps(data))
    if comparison.different:
        arm, name = comparison.different[0]
        note(f"forerun: {len(comparison.different)} answers differ from plain decoding's, first {arm} on prompt {name}")
        raise typer.Exit(1)


def arms_of(words: list[str]) -> dict[str, Speculation]:
    """Arms by name, `auto` first: the specs as they were written, `all` standing for every drafter with its defaults.

    Raises:
        ConfigError: a spec is wrong or says `off`.
    """
    from forerun.drafters.spec import REGISTRY, Speculation

    names = ["auto"]
    for word in (part for given in words for part in given.split()):
        names += [name for name, options in REGISTRY.items() if _has_defaults(options)] if word == "all" else [word]
    arms = {name: Speculation.parse(name) for name in dict.fromkeys(names)}
    off = next((name for name, speculation in arms.items() if speculation.is_off), None)
    if off is not None:
        raise ConfigError(f"{off!r} drafts nothing and is measured anyhow, as plain; name drafters or all")
    return arms


def _has_defaults(options: type[Any]) -> bool:
    import dataclasses

    return all(field.default is not dataclasses.MISSING for field in dataclasses.fields(options))


def _title(data: dict[str, Any]) -> str:
    origin = data["provenance"]
    law = f"temperature {data['temperature']:g}, seed {data['seed']}" if data["temperature"] else "greedy"
    return (
        f"{origin['model']}, {data['prompts']}, {law}, {origin['cpu']}, forerun {origin['commit'] or origin['forerun']}"
    )


def _print_table(comparison: Any, data: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from forerun.bench.spec_report import COLUMNS, rows

    table = Table(title=_title(data), box=box.SIMPLE, title_justify="left")
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
    for row in rows(comparison):
        table.add_row(*row)
    console = Console() if Console().is_terminal else Console(width=200)
    console.print(table)
