"""`scripts/bench soak`: forerun's server under full load for minutes, and whether its memory and its pages stay.

Clients ask question after question, streamed and whole, some of them leaving in the middle. Resident memory is read
every few seconds; at the end nothing may run, wait or hold a page, and a known question must have its known answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from rich.console import Console

from benchmarks.command import option_parser, pin, save
from benchmarks.markdown import markdown_table, provenance_table
from benchmarks.provenance import sha256_of
from forerun.bench.prompts import spec_bench
from forerun.bench.provenance import provenance
from forerun.bench.serve_client import Answer, Client, Target
from forerun.bench.serve_load import Style, Workload
from forerun.bench.serve_process import ServerProcess, forerun_serve
from forerun.cli.progress import resolve
from forerun.errors import ForerunError

NUM_CLIENTS = 16
SAMPLE_S = 2.0
SETTLE_S = 120.0  # memory may grow until then: caches fill
LEAVING = 0.1  # share of the requests whose client leaves
LEAVE_S = 0.4
MAX_TOKENS = (8, 64, 200)
KNOWN_QUESTION = "Name three colours."


@dataclass(slots=True)
class Soak:
    """What was seen.

    Attributes:
        samples: seconds since the start, and bytes of resident memory.
        num_answers, num_left, num_failed: requests by their end.
        num_tokens: delivered.
        load: what the server says it has to do when nobody asks anything any more.
        is_same: whether the known question had its answer again.
        failures: what requests failed of.
    """

    samples: list[tuple[float, int]] = field(default_factory=list)
    num_answers: int = 0
    num_left: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    load: dict[str, int] = field(default_factory=dict)
    is_same: bool = False
    failures: set[str] = field(default_factory=set)

    @property
    def settled_bytes(self) -> list[int]:
        """The samples after the settling, or all where none came so late."""
        return [rss for at, rss in self.samples if at >= SETTLE_S] or [rss for _, rss in self.samples]

    @property
    def growth(self) -> float:
        """The last tenth of the samples over those right after the settling, less one."""
        settled = self.settled_bytes
        part = max(1, len(settled) // 10)
        return (sum(settled[-part:]) / part) / (sum(settled[:part]) / part) - 1.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or holds a page."""
        return bool(self.load) and not any(self.load[f"num_{name}"] for name in ("running", "waiting", "used_pages"))


def main() -> int:
    """Runs, reports, and writes the result; the last line on standard output is one JSON document."""
    parser = option_parser("soak")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    try:
        model_path = resolve(arguments.model)
        pin(arguments.threads)
        soak = asyncio.run(_run(arguments, str(model_path), console))
    except ForerunError as error:
        console.print(f"soak: {error}", style="red", markup=False, highlight=False)
        return 1
    document = _document(soak, arguments, model_path)
    save(f"soak-{model_path.stem}", document, _markdown(document))
    print(json.dumps(document))
    return 0 if soak.is_idle and soak.is_same and not soak.num_failed else 1


async def _run(arguments: argparse.Namespace, model: str, console: Console) -> Soak:
    command = forerun_serve(model, ["--threads", str(arguments.threads), "--max-running", str(NUM_CLIENTS)])
    with ServerProcess("forerun", command) as server:
        address = await asyncio.to_thread(server.wait_until_ready)
        soak = Soak()
        known = await asyncio.to_thread(_known_answer, address)
        async with Client(Target(address)) as client:
            style = Style(client.model, MAX_TOKENS[0], is_stream=False)
            deadline_s = time.monotonic() + 60.0 * arguments.minutes
            watcher = asyncio.create_task(_watch(server, soak, console))
            workers = [_client(client, style, number, deadline_s, soak) for number in range(NUM_CLIENTS)]
            await asyncio.gather(*workers)
            watcher.cancel()
        soak.is_same = await asyncio.to_thread(_known_answer, address) == known
        await asyncio.sleep(1.0)
        soak.load = await asyncio.to_thread(_load_of, address)
        return soak


def _known_answer(address: str) -> str:
    messages = [{"role": "user", "content": KNOWN_QUESTION}]
    body = json.dumps({"messages": messages, "max_tokens": 24, "temperature": 0}).encode()
    request = Request(f"{address}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=60.0) as reply:
        text: str = json.load(reply)["choices"][0]["message"]["content"]
        return text


async def _client(client: Client, style: Style, number: int, deadline_s: float, soak: Soak) -> None:
    """Asks until the time is over."""
    rng, work = random.Random(number), Workload(spec_bench())
    while time.monotonic() < deadline_s:
        own = replace(style, max_tokens=rng.choice(MAX_TOKENS), is_stream=rng.random() < 0.5)
        own = replace(own, temperature=rng.choice((0.0, 0.8)), seed=rng.randrange(2**32))
        [ask] = work.asks(own, 1, rng.randrange(480))
        answer = Answer()
        leaves = rng.random() < LEAVING
        try:
            await asyncio.wait_for(client.answer(ask, answer), LEAVE_S if leaves else None)
        except TimeoutError:
            soak.num_left += 1
            continue
        soak.num_answers += answer.is_ok
        soak.num_failed += not answer.is_ok
        if not answer.is_ok:
            soak.failures.add(f"{answer.error}: {answer.detail}"[:200])
        soak.num_tokens += answer.num_tokens


async def _watch(server: ServerProcess, soak: Soak, console: Console) -> None:
    began = time.monotonic()
    while True:
        at = time.monotonic() - began
        soak.samples.append((at, server.resident_bytes()))
        if len(soak.samples) % 30 == 1:
            rss = soak.samples[-1][1] / 2**20
            console.print(f"{at:4.0f} s  {rss:6.0f} MiB  {soak.num_answers} answers, {soak.num_failed} failed")
        await asyncio.sleep(SAMPLE_S)


def _load_of(address: str) -> dict[str, int]:
    with urlopen(f"{address}/server_info", timeout=10.0) as reply:
        load: dict[str, int] = json.load(reply)["load"]
        return load


def _document(soak: Soak, arguments: argparse.Namespace, model_path: Path) -> dict[str, Any]:
    settled = soak.settled_bytes
    return {
        "minutes": arguments.minutes,
        "num_clients": NUM_CLIENTS,
        "num_answers": soak.num_answers,
        "num_left": soak.num_left,
        "num_failed": soak.num_failed,
        "failures": sorted(soak.failures)[:20],
        "tok_per_s": round(soak.num_tokens / (60.0 * arguments.minutes), 1),
        "settled_mib": round(settled[0] / 2**20, 1),
        "last_mib": round(settled[-1] / 2**20, 1),
        "growth": round(soak.growth, 5),
        "is_same_answer": soak.is_same,
        "load_at_the_end": soak.load,
        "samples": [[round(at, 1), rss] for at, rss in soak.samples],
        "provenance": {
            **provenance(model_path),
            "command": shlex.join(["scripts/bench", "soak", *sys.argv[1:]]),
            "model_sha256": sha256_of(model_path),
        },
    }


def _markdown(document: dict[str, Any]) -> str:
    load, where = document["load_at_the_end"], document["provenance"]
    ends = [str(document[f"num_{name}"]) for name in ("answers", "left", "failed")]
    left_over = [str(load.get(f"num_{name}")) for name in ("running", "waiting", "used_pages")]
    shown: Sequence[tuple[str, str]] = (
        ("clients, minutes", f"{document['num_clients']}, {document['minutes']:g}"),
        ("answers, clients that left, failures", ", ".join(ends)),
        ("tokens delivered per second", f"{document['tok_per_s']:g}"),
        (f"MiB of resident memory after {SETTLE_S:g} s", f"{document['settled_mib']:g}"),
        ("MiB at the end", f"{document['last_mib']:g}"),
        ("growth between them", f"{100 * document['growth']:.2f} %"),
        ("a known question had its answer again", "yes" if document["is_same_answer"] else "no"),
        ("running, waiting, pages in use at the end", ", ".join(left_over)),
    )
    table = markdown_table(("what", "value"), shown)
    title = f"# forerun's server under load: {where['model']}"
    return f"{title}\n\nWritten by `{where['command']}`.\n\n{table}\n\n{provenance_table(where)}\n"


if __name__ == "__main__":
    sys.exit(main())
