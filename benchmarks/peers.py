"""`scripts/bench peers`: forerun beside other engines on the same GGUF file, in interleaved runs.

With llama: steps and prompts beside llama.cpp; this module. With openvino: whole greedy answers beside OpenVINO GenAI,
plainly and with drafts; `peers_spec`.

A step is one pass over m rows of one sequence at a context of 256, logits of every row included. llama.cpp runs with
its defaults, except that flash attention is whatever is faster for it: that is tried first, for steps and for prompts
apart. Its own Q4_0 version of the file runs beside it, as the format its kernels favour.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Self

from rich.console import Console

from benchmarks import llama_cpp_env, openvino_env, peers_spec, provenance
from benchmarks.arms import N_CTX, Crew, load_llama_cpp, prefill_seconds, q4_0_file, step_seconds
from benchmarks.command import interleave_shown, option_parser, pin, save, show
from benchmarks.environment import InstallError
from benchmarks.measure import Measured, Turn
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
from benchmarks.peers_spec import MAX_NGRAM_SIZE, NUM_ASSISTANT_TOKENS
from benchmarks.peers_spec_report import ratio_line, spec_json, spec_markdown, spec_tables
from benchmarks.wire import Worker, WorkerError
from forerun.bench.prompts import pick, spec_bench
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
LLAMA, OPENVINO = PEERS = ("llama", "openvino")


def main() -> int:
    """Runs the comparisons; the last line on standard output is one JSON document. Exit code 1 when one failed."""
    arguments = _parser().parse_args()
    console = Console(stderr=True)
    try:
        run = Run.prepare(arguments, console)
        document: dict[str, Any] = {}
        is_exact = True
        if run.llama_cpp_python:
            document |= _passes(run, arguments.rounds, console)
        if run.openvino_python:
            document["speculation"], is_exact = _speculation(run, arguments, console)
    except (ForerunError, InstallError, WorkerError) as error:
        console.print(f"peers: {error}", style="red", markup=False, highlight=False)
        return 1
    print(json.dumps(document))
    return 0 if is_exact else 1


@dataclass(frozen=True, slots=True)
class Run:
    """What all comparisons of a run have in common.

    Attributes:
        model_path: the GGUF file.
        num_threads: of every arm.
        cpus: what this process and all workers are pinned to.
        llama_cpp_python, openvino_python: interpreters of the peers that were asked for.
    """

    model_path: Path
    num_threads: int
    cpus: list[int]
    llama_cpp_python: Path | None
    openvino_python: Path | None

    @classmethod
    def prepare(cls, arguments: argparse.Namespace, console: Console) -> Self:
        """Finds the model, installs what is missing, and pins this process."""
        model_path = resolve(arguments.model)
        llama_cpp = llama_cpp_env.ensure_llama_cpp(console) if LLAMA in arguments.peers else None
        openvino = openvino_env.ensure_openvino(console) if OPENVINO in arguments.peers else None
        return cls(model_path, arguments.threads, pin(arguments.threads), llama_cpp, openvino)

    def provenance(self, peers: dict[str, Any]) -> dict[str, Any]:
        """Where the numbers come from."""
        return provenance.collect("peers", self.model_path, self.num_threads, self.cpus, peers)


def _parser() -> argparse.ArgumentParser:
    parser = option_parser("peers")
    parser.add_argument("--rounds", type=int, default=7, help="llama: interleaved rounds (default: 7)")
    parser.add_argument(
        "--with", dest="peers", type=peer_names, default=(LLAMA,), metavar="PEERS",
        help=f"whom to compare with, of {', '.join(PEERS)}, divided by commas (default: {LLAMA})",
    )  # fmt: skip
    parser.add_argument(
        "--per-category",
        type=at_least_one,
        default=2,
        help="openvino: Spec-Bench questions of each category (default: 2)",
    )
    parser.add_argument(
        "--new-tokens", type=at_least_one, default=256, help="openvino: tokens per answer (default: 256)"
    )
    parser.add_argument(
        "--lookup-tokens", type=at_least_one, default=NUM_ASSISTANT_TOKENS,
        help=f"openvino: its num_assistant_tokens (default: {NUM_ASSISTANT_TOKENS})",
    )  # fmt: skip
    parser.add_argument(
        "--lookup-ngram", type=at_least_one, default=MAX_NGRAM_SIZE,
        help=f"openvino: its max_ngram_size (default: {MAX_NGRAM_SIZE})",
    )  # fmt: skip
    return parser


def at_least_one(text: str) -> int:
    """A whole number from 1 on.

    Raises:
        ValueError: it is something else.
    """
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} is below 1")
    return number


def peer_names(text: str) -> tuple[str, ...]:
    """The peers that a comma-separated list names.

    Raises:
        argparse.ArgumentTypeError: it names another one, or none.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no peer; give some of: {', '.join(PEERS)}")
    return names


def _passes(run: Run, num_rounds: int, console: Console) -> dict[str, Any]:
    """Steps and prompts beside llama.cpp: measures, shows, keeps."""
    with Crew(run.llama_cpp_python) as crew:
        result = compare(crew, run.model_path, run.num_threads, num_rounds, console)
    where = run.provenance(llama_cpp_env.versions(result.llama_cpp_info))
    document = {**summary_json(result), "provenance": where}
    show(*tables(result))
    for bar in bars(result):
        print(bar.line(result.is_quiet))
    _keep(f"peers-{run.model_path.stem}", document, markdown(result, where), result.measured)
    return document


def _speculation(run: Run, arguments: argparse.Namespace, console: Console) -> tuple[dict[str, Any], bool]:
    """Whole answers beside OpenVINO: measures, shows, keeps; also says whether forerun's drafts changed nothing."""
    assert run.openvino_python is not None
    exported = openvino_env.ensure_exported(run.model_path, run.openvino_python, console)
    prompts = pick(spec_bench(), arguments.per_category)
    lookup = {"num_assistant_tokens": arguments.lookup_tokens, "max_ngram_size": arguments.lookup_ngram}
    settings = peers_spec.Settings(run.num_threads, arguments.new_tokens, lookup)
    with Crew(run.llama_cpp_python, run.openvino_python) as crew:
        result = peers_spec.compare(crew, run.model_path, exported, prompts, settings, console)
    peers = openvino_env.versions(result.openvino_info)
    if result.llama_cpp_info is not None:
        peers |= llama_cpp_env.versions(result.llama_cpp_info)
    where = run.provenance(peers)
    document = {**spec_json(result), "provenance": where}
    show(*spec_tables(result))
    print(ratio_line(result))
    if not result.is_exact:
        print("DIFFERENT: forerun auto does not give the tokens of forerun")
    _keep(f"peers_spec-{run.model_path.stem}", document, spec_markdown(result, where), result.measured)
    return document, result.is_exact


def _keep(stem: str, document: dict[str, Any], text: str, measured: Measured) -> None:
    """Writes a result, unless others disturbed it."""
    if measured.is_quiet:
        save(stem, document, text)
    else:
        print(
            f"NOT SAVED: other processes took {100 * measured.other_cpu_share:.0f} % of the CPUs. Threads of the other "
            "engines wait for one another by spinning, so this slows them more than forerun; repeat on a quiet machine."
        )


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
        measured=interleave_shown(turns, console),
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


if __name__ == "__main__":
    raise SystemExit(main())
