"""`forerun bench`: tables for people, then one JSON line with everything and where it comes from."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.bench_serve import serve
from forerun.cli.bench_spec import spec
from forerun.cli.display import note
from forerun.cli.jsonlines import dumps
from forerun.cli.options import LoadOptions, WeightOptions, with_groups
from forerun.cli.progress import resolve
from forerun.errors import RequestError

if TYPE_CHECKING:
    from rich.table import Table

    from forerun.bench.speed import SpeedRow

app = typer.Typer(help="Measure kernels, decoding and servers.", no_args_is_help=True)

NUM_ROWS = tuple(range(1, 17))

_Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A GGUF file, a Hugging Face folder or a name such as demo.")
]
_Repeats = Annotated[int, typer.Option(min=1, help="Rounds; the median counts.")]


def kernels(load: WeightOptions, model: _Model = "demo", repeats: _Repeats = 15) -> None:
    """Time each matrix shape for 1 to 16 rows, with the memory rate and its share of a plain read."""
    from forerun.bench.kernels import matrix_groups, time_group
    from forerun.bench.provenance import provenance
    from forerun.bench.timing import stream_bytes_per_s
    from forerun.models.loader import load_model
    from forerun.ops.native import default_num_threads

    path = resolve(model)
    num_threads = load.threads or default_num_threads()
    loaded = load_model(path, load.quant)
    stream = stream_bytes_per_s(num_threads)
    timings = []
    for group in matrix_groups(loaded):
        note(f"timing {group.name} {group.weights[0].shape}")
        timings.append(time_group(group, loaded, NUM_ROWS, repeats, num_threads))
    table = _table(
        f"microseconds per matrix by rows; memory reads at {stream / 1e9:.1f} GB/s with {num_threads} threads",
        "matrix", "shape", "format", *map(str, NUM_ROWS), "GB/s", "of read",
    )  # fmt: skip
    for timing in timings:
        weight = timing.group.weights[0]
        rate = timing.bytes_per_s(1)
        table.add_row(
            f"{timing.group.name} x{len(timing.group.weights)}",
            f"{weight.shape[0]}x{weight.shape[1]}",
            weight.format,
            *(f"{timing.seconds[rows] * 1e6:.0f}" for rows in NUM_ROWS),
            f"{rate / 1e9:.1f}",
            f"{rate / stream:.0%}",
        )
    _report(
        [table],
        {
            "bench": "kernels",
            "threads": num_threads,
            "repeats": repeats,
            "stream_bytes_per_s": stream,
            "matrices": [timing.to_json() for timing in timings],
            "provenance": provenance(path),
        },
    )


def decode(
    load: LoadOptions,
    model: _Model = "demo",
    context: Annotated[int, typer.Option(min=1, help="Tokens before the timed rows.")] = 256,
    spec: Annotated[str, typer.Option(metavar="SPEC", help="What is compared with plain decoding.")] = "ngram:k=8",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 128,
    repeats: _Repeats = 15,
    runs: Annotated[int, typer.Option(min=1, help="Answers per arm; the median counts.")] = 3,
) -> None:
    """Time a whole pass for 1 to 16 rows at a context, then plain and speculative decoding."""
    from forerun.bench.provenance import provenance
    from forerun.bench.speed import compare_speed
    from forerun.bench.steps import step_seconds
    from forerun.drafters.spec import Speculation
    from forerun.engine.llm import LLM
    from forerun.models.loader import load_model
    from forerun.ops.native import default_num_threads

    if Speculation.parse(spec).is_off:
        raise RequestError(f"--spec is {spec!r}, but must name a drafter to compare with plain decoding", "spec")
    path = resolve(model)
    num_threads = load.threads or default_num_threads()
    note("timing passes")
    seconds = step_seconds(load_model(path, load.quant), context, NUM_ROWS, repeats, load.kv, num_threads)
    note("timing answers")
    llm = LLM(str(path), quant=load.quant, kv=load.kv, threads=num_threads)
    rows = compare_speed(llm, spec, max_tokens, runs)
    _report(
        [_step_table(seconds, context, num_threads), _speed_table(rows, spec)],
        {
            "bench": "decode",
            "threads": num_threads,
            "repeats": repeats,
            "runs": runs,
            "context": context,
            "step_seconds": {str(num): value for num, value in seconds.items()},
            "spec": spec,
            "max_tokens": max_tokens,
            "speed": [asdict(row) for row in rows],
            "provenance": provenance(path),
        },
    )


def _step_table(seconds: dict[int, float], context: int, num_threads: int) -> Table:
    table = _table(f"one pass at context {context}, {num_threads} threads", "rows", "ms", "V(m)", "ms per row")
    for num, value in seconds.items():
        table.add_row(str(num), f"{value * 1e3:.2f}", f"{value / seconds[1]:.2f}", f"{value * 1e3 / num:.2f}")
    return table


def _speed_table(rows: list[SpeedRow], spec: str) -> Table:
    table = _table(
        f"decoding, plain and {spec}", "text", "plain tok/s", "spec tok/s", "ratio", "tau", "accepted", "same tokens"
    )
    for row in rows:
        table.add_row(
            row.workload,
            f"{row.plain_tok_per_s:.1f}",
            f"{row.spec_tok_per_s:.1f}",
            f"{row.spec_tok_per_s / row.plain_tok_per_s:.2f}",
            f"{row.tau:.2f}",
            f"{row.acceptance_rate:.0%}",
            "yes" if row.is_equal else "NO",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _report(tables: list[Table], data: dict[str, Any]) -> None:
    from rich.console import Console

    # A table cut to 80 columns would lose numbers, so a pipe gets all of it.
    console = Console() if Console().is_terminal else Console(width=200)
    origin = data["provenance"]
    console.print(f"{origin['cpu']}, forerun {origin['forerun']} {origin['commit'] or ''}, {origin['model']}")
    for table in tables:
        console.print(table)
    print(dumps(data))


app.command("kernels")(with_groups(kernels))
app.command("decode")(with_groups(decode))
app.command("spec")(with_groups(spec))
app.command("serve")(with_groups(serve))
