"""`scripts/bench peers`: steps and prompts of forerun and llama.cpp on the same GGUF file, in one interleaved run.

A step is one pass over m rows of one sequence at a context of 256, logits of every row included. llama.cpp runs with
its defaults, except that flash attention is whatever is faster for it: that is tried first, for steps and for prompts
apart. Its own Q4_0 version of the file runs beside it, as the format its kernels favour.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import provenance
from benchmarks.arms import N_CTX, Crew, load_llama_cpp, prefill_seconds, q4_0_file, step_seconds
from benchmarks.command import option_parser, pin, save, show
from benchmarks.llama_cpp_env import InstallError, ensure_llama_cpp
from benchmarks.measure import Measured, Turn, interleave
from benchmarks.peers_report import (
    OWN,
    PEER,
    PEER_Q4_0,
    PeersResult,
    bars,
    markdown,
    summary_json,
    tables,
)
from benchmarks.wire import Worker, WorkerError
from forerun.cli.progress import resolve
from forerun.errors import ForerunError

NUM_ROWS = (1, 2, 4, 8, 16)
CONTEXT = 256
SHORT_PROMPTS, LONG_PROMPTS = (512, 2000), (8000,)
STEP_REPEATS, SLOW_STEP_REPEATS = 15, 3
PROMPT_REPEATS = {512: 3}  # others run once per round
LONG_ROUNDS, SLOW_ROUNDS = 2, 3
SLOW_ISAS = ("avx2", "scalar")
LARGE_FILE_BYTES = 200 << 20  # from here on neither the reference kernels nor the longest prompts run: they take hours
STREAM_BYTES = 1 << 30
SPEC = "ngram"
SPEC_TOKENS = 200
NUM_STARTS = 3
_LOG_EVERY = 20  # turns, where there is no terminal for a bar


def main() -> int:
    """Runs the comparison; the last line on standard output is one JSON document."""
    parser = option_parser("peers")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: 7)")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    try:
        model_path = resolve(arguments.model)
        llama_cpp_python = ensure_llama_cpp(console)
        cpus = pin(arguments.threads)
        with Crew(llama_cpp_python) as crew:
            result = compare(crew, model_path, arguments.threads, arguments.rounds, console)
    except (ForerunError, InstallError, WorkerError) as error:
        console.print(f"peers: {error}", style="red", markup=False, highlight=False)
        return 1
    where = provenance.collect("peers", model_path, arguments.threads, cpus, result.llama_cpp_info)
    document = {**summary_json(result), "provenance": where}
    show(*tables(result))
    for bar in bars(result):
        print(bar.line(result.is_quiet))
    if result.is_quiet:
        save(f"peers-{model_path.stem}", document, markdown(result, where))
    else:
        print(
            f"NOT SAVED: other processes took {100 * result.measured.other_cpu_share:.0f} % of the CPUs. llama.cpp's "
            "threads wait for one another by spinning, so this slows it more than forerun; repeat on a quiet machine."
        )
    print(json.dumps(document))
    return 0


def compare(crew: Crew, model_path: Path, num_threads: int, num_rounds: int, console: Console) -> PeersResult:
    """Starts every arm and measures.

    Raises:
        WorkerError: an arm failed.
    """
    console.print("Loading forerun, and trying llama.cpp's settings")
    load = {"file": str(model_path), "num_threads": num_threads}
    own = crew.forerun(OWN)
    own_info = own.ask("load", **load, n_ctx=N_CTX)
    peer = load_llama_cpp(crew, PEER, model_path, num_threads)
    q4_0 = load_llama_cpp(crew, PEER_Q4_0, q4_0_file(crew, model_path, num_threads), num_threads)
    is_large = model_path.stat().st_size >= LARGE_FILE_BYTES
    slow_isas = [isa for isa in SLOW_ISAS if isa != own_info["isa"] and not (is_large and isa == "scalar")]
    slow = {isa: crew.forerun(f"{OWN} {isa}", {"FORERUN_ISA": isa}) for isa in slow_isas}
    for worker in slow.values():
        worker.ask("load", **load, n_ctx=2 * CONTEXT)
    engine, engine_info, start_s = _timed_start(crew, load)
    python_ms = engine.ask("python_cost", spec=SPEC, max_tokens=SPEC_TOKENS)["milliseconds"]
    engine_info |= engine.ask("answered_memory", spec=SPEC)
    crew.dismiss(engine)
    # In ascending order, so that what each length adds is visible.
    all_lengths = SHORT_PROMPTS if is_large else (*SHORT_PROMPTS, *LONG_PROMPTS)
    lengths = [n for n in all_lengths if n < own_info["context_length"]]
    memory_bytes = {n: own.ask("prefill", num_tokens=n, repeats=1)["memory_bytes"] for n in lengths}

    arms = {OWN: own, PEER: peer.steps, PEER_Q4_0: q4_0.steps}
    prompt_arms = {OWN: own, PEER: peer.prefill, PEER_Q4_0: q4_0.prefill}
    turns = [
        *_step_turns(arms, STEP_REPEATS, num_rounds),
        *_step_turns({f"{OWN} {isa}": worker for isa, worker in slow.items()}, SLOW_STEP_REPEATS, SLOW_ROUNDS),
        *_prompt_turns(prompt_arms, lengths, num_rounds),
        *_stream_turns(own, own_info["weight_bytes"], num_threads, num_rounds),
    ]
    return PeersResult(
        model=model_path.stem,
        measured=_run(turns, console),
        own_info=own_info,
        llama_cpp_info=peer.info,
        flash_attention={PEER: peer.flash_attention, PEER_Q4_0: q4_0.flash_attention},
        engine_info=engine_info,
        start_s=start_s,
        python_ms=python_ms,
        memory_bytes=memory_bytes,
        num_rows=NUM_ROWS,
        context=CONTEXT,
        num_threads=num_threads,
    )


def _timed_start(crew: Crew, load: dict[str, Any]) -> tuple[Worker, dict[str, Any], float]:
    """An engine that is ready, what it says, and the median seconds from no process to there."""
    seconds: list[float] = []
    while True:
        start_s = time.perf_counter()
        worker = crew.forerun(f"{OWN}, whole engine")
        info = worker.ask("start_engine", **load)
        seconds.append(time.perf_counter() - start_s)
        if len(seconds) == NUM_STARTS:
            return worker, info, median(seconds)
        crew.dismiss(worker)


def _step_turns(arms: dict[str, Worker], repeats: int, num_rounds: int) -> Iterator[Turn]:
    for m in NUM_ROWS:
        for arm, worker in arms.items():
            run = partial(step_seconds, worker, num_rows=m, context=CONTEXT, repeats=repeats)
            yield Turn(("steps", arm, m), worker, run, num_rounds)


def _prompt_turns(arms: dict[str, Worker], lengths: list[int], num_rounds: int) -> Iterator[Turn]:
    for n in lengths:
        is_long = n in LONG_PROMPTS
        for arm, worker in arms.items():
            if arm == PEER_Q4_0 and n != SHORT_PROMPTS[0]:
                continue
            run = partial(prefill_seconds, worker, num_tokens=n, repeats=PROMPT_REPEATS.get(n, 1))
            yield Turn(("prefill", arm, n), worker, run, LONG_ROUNDS if is_long else num_rounds, not is_long)


def _stream_turns(own: Worker, weight_bytes: int, num_threads: int, num_rounds: int) -> Iterator[Turn]:
    """Reading far more than any cache holds, and reading as much as the weights are again and again."""
    for name, num_bytes in (("memory", STREAM_BYTES), ("weights", weight_bytes)):

        def run(num_bytes: int = num_bytes) -> list[float]:
            return [own.ask("stream", num_threads=num_threads, num_bytes=num_bytes)["gb_per_s"]]

        yield Turn(("stream", name), own, run, num_rounds)


def _run(turns: list[Turn], console: Console) -> Measured:
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


if __name__ == "__main__":
    raise SystemExit(main())
