"""`python -m benchmarks.replay_drafts`: what drafters without a model save, replayed on answers that were made once.

What comes out doesn't depend on what is drafted, so a recorded answer says of every proposal what would have become of
it. The model answers questions of Spec-Bench plainly, greedily and with a seed; each spec then goes through the
recorded answers with the controller that serves, one request after another, so that what requests share fills up as it
would. Time is not measured: steps take what a stated curve says. Use `forerun bench spec` for what a machine gains.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.command import option_parser, pin, save
from benchmarks.markdown import markdown_table, provenance_table
from benchmarks.measure import round_to
from benchmarks.provenance import sha256_of
from forerun import LLM, SamplingParams
from forerun.bench.prompts import Prompt, pick, spec_bench
from forerun.bench.provenance import provenance
from forerun.cli.progress import resolve
from forerun.control.controller import Ask, Controller, StepLoad, StepTimes
from forerun.control.cost import MAX_ROWS, CostCurve, StepCosts
from forerun.control.planner import NO_PLAN, Plan, Planner
from forerun.control.speculator import Speculator
from forerun.drafters.base import DraftContext
from forerun.drafters.spec import Speculation
from forerun.engine.run import MAX_STEP_NODES
from forerun.errors import ForerunError
from forerun.types import Draft

LAWS: dict[str, dict[str, Any]] = {"greedy": {}, "temperature 0.8, seed 7": {"temperature": 0.8, "seed": 7}}
ALL = "all"
# A pass of one row is the unit of time. Eight rows cost 1.35 of it, and each one beyond 0.15 more.
CURVE = CostCurve((1, 8, 64), (1.0, 1.35, 9.75), 0, 0.0, 0.0)
SPECS = ("ngram", "suffix:shared=off", "suffix", "suffix:tree=off")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request and what came out of it, at most max_tokens tokens."""

    category: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    end_ids: frozenset[int]
    params: SamplingParams
    max_tokens: int


@dataclass(slots=True)
class Tally:
    """Sums over replayed requests: decoded tokens, passes, their rows, and their time in plain passes."""

    tokens: int = 0
    passes: int = 0
    rows: int = 0
    time: float = 0.0

    def add(self, other: Tally) -> None:
        """Takes in another's sums."""
        self.tokens += other.tokens
        self.passes += other.passes
        self.rows += other.rows
        self.time += other.time

    def to_json(self) -> dict[str, Any]:
        """Plain values: the sums, tokens per pass, rows per token and the speed-up by the curve."""
        return {
            **asdict(self),
            "tau": round_to(self.tokens / self.passes),
            "rows_per_token": round_to(self.rows / self.tokens),
            "speed_up": round_to(self.tokens / self.time),
        }


def record(
    llm: LLM, prompts: Sequence[Prompt], law: dict[str, Any], max_tokens: int, console: Console
) -> list[Recorded]:
    """Answers the questions plainly."""
    params = SamplingParams(max_tokens=max_tokens, **law)
    recorded = []
    for prompt in track(prompts, "answering", console=console, transient=True):
        completion = llm.chat([{"role": "user", "content": prompt.text}], params)
        recorded.append(
            Recorded(
                prompt.category,
                tuple(completion.prompt_token_ids),
                completion.token_ids,
                llm.limits.eos_ids,
                params,
                max_tokens,
            )
        )
    return recorded


def replay(speculator: Speculator, recorded: Iterable[Recorded]) -> dict[str, Tally]:
    """Serves recorded requests one after the other, in steps that cost what the curve says.

    Returns:
        Sums by category, `ALL` first.
    """
    controller = Controller(lambda: StepCosts(CURVE), MAX_ROWS, MAX_ROWS)
    tallies = {ALL: Tally()}
    for request in recorded:
        if len(request.token_ids) < 2:
            continue  # the first token comes with the prompt
        tally = _replay_one(speculator, controller, request)
        tallies[ALL].add(tally)
        tallies.setdefault(request.category, Tally()).add(tally)
    return tallies


def _replay_one(speculator: Speculator, controller: Controller, request: Recorded) -> Tally:
    planner = speculator.open(
        DraftContext(
            prompt_token_ids=request.prompt_token_ids,
            end_ids=request.end_ids,
            params=request.params,
            noise_key=0,
            stream="shared",
            max_len=len(request.prompt_token_ids) + request.max_tokens,
        )
    )
    tally = Tally()
    try:
        planner.advance(NO_PLAN, request.token_ids[:1])
        num_emitted = 1
        while num_emitted < len(request.token_ids):
            num_emitted += _step(controller, planner, request, num_emitted, tally)
    finally:
        planner.close()
    return tally


def _step(controller: Controller, planner: Planner, request: Recorded, num_emitted: int, tally: Tally) -> int:
    """One step after so many tokens; returns how many it emits."""
    max_nodes = min(request.max_tokens - num_emitted - 1, MAX_STEP_NODES)
    load = StepLoad(1, 0, 1, len(request.prompt_token_ids) + num_emitted)
    [plan] = controller.plan(load, [Ask(planner, max_nodes)])
    assert isinstance(plan, Plan)
    emitted = emitted_of(plan.draft, request.token_ids[num_emitted:])
    planner.advance(plan, emitted)
    num_rows = 1 + plan.draft.num_nodes
    seconds = CURVE.by_rows()[num_rows]
    controller.learn(load, [planner], [plan], [len(emitted)], StepTimes(seconds, seconds))
    tally.add(Tally(len(emitted), 1, num_rows, seconds))
    return len(emitted)


def emitted_of(draft: Draft, truth: Sequence[int]) -> tuple[int, ...]:
    """What a step emits: the nodes that `truth` agrees with, and the token after them if there is one."""
    depth_of = {-1: 0}
    for node, (parent, token_id) in enumerate(zip(draft.parents, draft.token_ids, strict=True)):
        depth = depth_of.get(parent)
        if depth is not None and depth < len(truth) and truth[depth] == token_id:
            depth_of[node] = depth + 1
    return tuple(truth[: max(depth_of.values()) + 1])


def main() -> int:
    """Records, replays and reports; the last line on standard output is one JSON document."""
    arguments = _parser().parse_args()
    console = Console(stderr=True)
    try:
        speculations = {spec: Speculation.parse(spec) for spec in arguments.spec or SPECS}
        model_path = resolve(arguments.model)
        pin(arguments.threads)
        llm = LLM(model_path, threads=arguments.threads)
        prompts = pick(spec_bench(), arguments.per_category)
        laws = {}
        for name, law in LAWS.items():
            recorded = record(llm, prompts, law, arguments.max_tokens, console)
            laws[name] = {
                spec: {
                    category: tally.to_json() for category, tally in replay(_fresh(llm, speculation), recorded).items()
                }
                for spec, speculation in speculations.items()
            }
    except ForerunError as error:
        console.print(f"replay_drafts: {error}", style="red", markup=False, highlight=False)
        return 1
    document = {
        "laws": laws,
        "curve": {"rows": CURVE.num_rows, "time": CURVE.seconds},
        "num_prompts": len(prompts),
        "max_tokens": arguments.max_tokens,
        "provenance": {
            **provenance(model_path),
            "command": shlex.join(["python", "-m", "benchmarks.replay_drafts", *sys.argv[1:]]),
            "model_sha256": sha256_of(model_path),
        },
    }
    text = _markdown(document)
    save(f"replay_drafts-{model_path.stem}", document, text)
    print(text)
    print(json.dumps(document))
    return 0


def _fresh(llm: LLM, speculation: Speculation) -> Speculator:
    """Who drafts, with nothing learned yet."""
    bound = llm.speculator(speculation)
    speculator = Speculator(bound.sources if bound is not None else ())
    speculator.clear()
    return speculator


def _parser() -> argparse.ArgumentParser:
    parser = option_parser("replay_drafts")
    parser.prog = "python -m benchmarks.replay_drafts"
    parser.add_argument("--spec", action="append", help=f"what to replay, repeatable (default: {', '.join(SPECS)})")
    parser.add_argument("--per-category", type=int, default=6, help="questions of each category (default: 6)")
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens per answer (default: 256)")
    return parser


def _markdown(document: dict[str, Any]) -> str:
    where = document["provenance"]
    parts = [
        f"# Drafters replayed: {where['model']}",
        f"{document['num_prompts']} questions of Spec-Bench, at most {document['max_tokens']} tokens each. Per "
        "category: tokens per pass / rows per token / speed-up if eight rows cost 1.35 of one row, each further one "
        f"0.15. Nothing is timed. Written by `{where['command']}`.",
    ]
    for law, by_spec in document["laws"].items():
        categories = list(next(iter(by_spec.values())))
        rows = [
            (category, *(_cell(by_category[category]) for by_category in by_spec.values())) for category in categories
        ]
        parts += [f"## {law}", markdown_table(("category", *by_spec), rows)]
    return "\n\n".join([*parts, provenance_table(where)]) + "\n"


def _cell(tally: dict[str, Any]) -> str:
    return f"{tally['tau']:.2f} / {tally['rows_per_token']:.2f} / {tally['speed_up']:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
