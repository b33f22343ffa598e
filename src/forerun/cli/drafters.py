"""`forerun drafters`: who can draft, what each needs and, on a model, what each costs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.jsonlines import dumps

if TYPE_CHECKING:
    from forerun.drafters.base import DrafterOptions


def drafters(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Measure what each costs on this model.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the drafters: what they propose, need and cost, and their settings with defaults."""
    from forerun.drafters.spec import REGISTRY

    rows = [_describe(name, options) for name, options in REGISTRY.items()]
    if model is not None:
        _measure(model, rows)
    if json:
        print(dumps(rows))
        return
    _print_table(rows, has_costs=model is not None)


def _describe(name: str, options: type[DrafterOptions]) -> dict[str, Any]:
    fields = dataclasses.fields(options)  # type: ignore[arg-type]
    settings = {f.name: None if f.default is dataclasses.MISSING else f.default for f in fields}
    return {"name": name, "summary": options.summary, "needs": options.needs, "settings": settings, "cost": None}


def _measure(model: str, rows: list[dict[str, Any]]) -> None:
    """Adds what each drafter that runs with its defaults costs."""
    from forerun.bench.drafters import measure_drafter
    from forerun.cli.progress import resolve
    from forerun.drafters.spec import REGISTRY
    from forerun.engine.llm import LLM

    llm = LLM(resolve(model))
    for row in rows:
        if None not in row["settings"].values():
            row["cost"] = dataclasses.asdict(measure_drafter(llm, REGISTRY[row["name"]]()))


def _print_table(rows: list[dict[str, Any]], *, has_costs: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for column in ("drafter", "proposes", "needs", "settings"):
        table.add_column(column, overflow="fold")
    for column in ("propose", "take in a token", "shared memory") if has_costs else ():
        table.add_column(column, justify="right")
    for row in rows:
        settings = ",".join(f"{key}={'...' if value is None else value}" for key, value in row["settings"].items())
        cells = [row["name"], row["summary"], row["needs"], settings]
        if has_costs:
            cost = row["cost"]
            cells += ["-"] * 3 if cost is None else [
                f"{cost['propose_s'] * 1e6:.0f} us",
                f"{cost['advance_s'] * 1e6:.0f} us",
                f"{cost['memory_bytes'] / 1e6:.1f} MB",
            ]  # fmt: skip
        table.add_row(*cells)
    console = Console() if Console().is_terminal else Console(width=200)
    console.print(table)
