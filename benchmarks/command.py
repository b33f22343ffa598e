"""What the benchmarks of this folder share as commands: options, pinning, files of results."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.measure import Measured, Turn, interleave
from benchmarks.wire import ROOT

_LOG_EVERY = 20  # turns, where there is no terminal for a bar
_FILE_WIDTH = 120  # columns when standard output is no terminal


def option_parser(name: str) -> argparse.ArgumentParser:
    """The options that the benchmarks of this folder share."""
    parser = argparse.ArgumentParser(prog=f"scripts/bench {name}")
    parser.add_argument("--model", default="demo", help="a GGUF file or a known model's name (default: demo)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every arm (default: 2)")
    return parser


def pin(num_threads: int) -> list[int]:
    """Puts this process and all workers it starts from now on on the first num_threads CPUs."""
    cpus = sorted(os.sched_getaffinity(0))[:num_threads]
    os.sched_setaffinity(0, cpus)
    return cpus


def interleave_shown(turns: list[Turn], console: Console) -> Measured:
    """`interleave`, with its progress on the console."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    total = sum(turn.num_rounds + turn.has_warm_up for turn in turns)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=total)

        def on_turn(turn: Turn) -> None:
            progress.advance(task)
            done = int(progress.tasks[task].completed)
            if not console.is_terminal and done % _LOG_EVERY == 0:
                console.print(f"{done} of {total} turns measured")

        return interleave(turns, on_turn)


def save(stem: str, document: dict[str, Any], text: str) -> None:
    """Writes both forms of a result into benchmarks/results."""
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    (results / f"{stem}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (results / f"{stem}.md").write_text(text, encoding="utf-8")


def show(*tables: Table) -> None:
    """Tables on standard output."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    console.print(*tables)
