"""What a server is asked, and when: closed loops of clients that wait, open loops of arrivals that don't."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from forerun.bench.prompts import Prompt, question_of
from forerun.bench.serve_client import CHAT, COMPLETIONS, Answer, Ask, Client
from forerun.bench.serve_figures import Level, Limits
from forerun.errors import ConfigError

# Ids below are often bytes and control tokens; those above 30,000 don't exist in the smallest vocabularies.
RANDOM_IDS = (1000, 30000)
WARM_UP_TOKENS = 8
WARM_UP_PLACE = 400  # in the list of questions; Spec-Bench has 480

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Style:
    """What all requests of a run have in common.

    Attributes:
        model: the model's name.
        max_tokens: new tokens per answer, at most; a replayed request may say otherwise.
        is_stream: whether answers are streamed.
        ignore_eos: end-of-text tokens don't end an answer, so that all have the same length.
        temperature, seed: of every request; a server that doesn't know a seed at temperature 0 loses nothing.
        extra: further fields of the body.
    """

    model: str
    max_tokens: int
    is_stream: bool = True
    ignore_eos: bool = False
    temperature: float = 0.0
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def chat(self, text: str) -> Ask:
        """A question to the chat endpoint."""
        return self.ask(CHAT, {"messages": [{"role": "user", "content": text}]})

    def completion(self, prompt: str | Sequence[int]) -> Ask:
        """A text or token ids to continue."""
        return self.ask(COMPLETIONS, {"prompt": prompt if isinstance(prompt, str) else list(prompt)})

    def ask(self, path: str, fields: Mapping[str, Any], arrival_s: float = 0.0) -> Ask:
        """A request with these fields."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": self.max_tokens, "temperature": self.temperature}
        if self.seed is not None:
            body["seed"] = self.seed
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.is_stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        payload = json.dumps({**body, **fields, **self.extra}).encode()
        return Ask(path, payload, self.is_stream, arrival_s)


@dataclass(frozen=True, slots=True)
class Workload:
    """Where questions come from.

    Attributes:
        prompts: questions, in the order in which they are asked; after the last one the first follows.
        num_random_tokens: asks random token ids instead, so many of them: prompts of a known length, with nothing in
            them that a cache or a drafter could know; 0 asks the questions.
        seed: of random ids.
    """

    prompts: Sequence[Prompt] = ()
    num_random_tokens: int = 0
    seed: int = 0

    def asks(self, style: Style, num_asks: int, first: int = 0) -> list[Ask]:
        """So many requests, from a place on; two that begin at different places share nothing but the list's end."""
        places = range(first, first + num_asks)
        if self.num_random_tokens:
            return [style.completion(self._random_ids(place)) for place in places]
        return [style.chat(self.prompts[place % len(self.prompts)].text) for place in places]

    def _random_ids(self, place: int) -> list[int]:
        rng = np.random.default_rng((self.seed, place))
        return [int(token_id) for token_id in rng.integers(*RANDOM_IDS, self.num_random_tokens)]


def replay_asks(style: Style, path: Path) -> list[Ask]:
    """Recorded requests: JSON lines with `arrival_s`, a prompt file's question or `messages`, perhaps `max_tokens`.

    Raises:
        ConfigError: the file can't be read, or a line is something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the replay file {path} can't be read: {error}") from error
    asks = [
        _replayed(style, line, f"{path.name}, line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not asks:
        raise ConfigError(f"{path.name} has no requests; each line must be an object with arrival_s and prompt")
    first_s = min(ask.arrival_s for ask in asks)
    return sorted((replace(ask, arrival_s=ask.arrival_s - first_s) for ask in asks), key=lambda ask: ask.arrival_s)


def _replayed(style: Style, line: str, place: str) -> Ask:
    try:
        row = json.loads(line)
        arrival_s = float(row["arrival_s"])
        max_tokens = int(row.get("max_tokens", style.max_tokens))
        messages = row.get("messages") or [{"role": "user", "content": question_of(row)}]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(
            f"{place} must be an object with arrival_s, a number of seconds, and prompt or messages"
        ) from None
    return style.ask(CHAT, {"messages": messages, "max_tokens": max_tokens}, arrival_s)


def poisson_arrivals(asks: Iterable[Ask], rate: float, seed: int) -> list[Ask]:
    """The requests with arrival times of a Poisson process of `rate` per second; the first comes at once."""
    asks = list(asks)
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, len(asks))
    return [replace(ask, arrival_s=float(at)) for ask, at in zip(asks, np.cumsum(gaps) - gaps[:1], strict=True)]


async def run_closed(
    client: Client, asks: Sequence[Ask], num_clients: int, limits: Limits, progress: Progress = lambda done, total: None
) -> Level:
    """So many clients, each of which sends its next request when its answer is there."""
    answers: list[Answer] = []
    queue = iter(asks)
    num_done = 0

    async def one_client() -> None:
        nonlocal num_done
        for ask in queue:  # shared: whoever is free takes the next
            answer = Answer()
            answers.append(answer)
            await client.answer(ask, answer)
            num_done += 1
            progress(num_done, len(asks))

    label = f"{num_clients} client{'s' if num_clients > 1 else ''}"
    return await _timed(label, num_clients, answers, [one_client() for _ in range(num_clients)], limits)


async def run_open(
    client: Client, asks: Sequence[Ask], label: str, rate: float, limits: Limits,
    progress: Progress = lambda done, total: None,
) -> Level:  # fmt: skip
    """Requests at their arrival times, whether or not earlier ones have been answered."""
    answers = [Answer() for _ in asks]
    start_s = time.perf_counter()
    num_done = 0

    async def one_request(ask: Ask, answer: Answer) -> None:
        nonlocal num_done
        await asyncio.sleep(max(0.0, start_s + ask.arrival_s - time.perf_counter()))
        await client.answer(ask, answer)
        num_done += 1
        progress(num_done, len(asks))

    jobs = [one_request(ask, answer) for ask, answer in zip(asks, answers, strict=True)]
    return await _timed(label, rate, answers, jobs, limits)


async def _timed(label: str, load: float, answers: list[Answer], jobs: Iterable[Any], limits: Limits) -> Level:
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*jobs)
    cpu_s = time.process_time() - start_cpu_s
    seconds = time.perf_counter() - start_s
    return Level(label, load, tuple(answers), seconds, cpu_s / seconds, limits)


async def warm_up(client: Client, style: Style, workload: Workload, num_clients: int) -> None:
    """Short answers to as many clients as will be served, so that nothing is met for the first time when it counts.

    Raises:
        ConfigError: one of them failed.
    """
    asks = workload.asks(replace(style, max_tokens=WARM_UP_TOKENS), num_clients, WARM_UP_PLACE)
    level = await run_closed(client, asks, num_clients, Limits())
    failed = next((answer for answer in level.answers if not answer.is_ok), None)
    if failed:
        raise ConfigError(f"{client.target.url} did not answer: {failed.error} {failed.detail}".rstrip())


async def accepts_ignore_eos(client: Client, style: Style, workload: Workload) -> bool:
    """Whether the server takes `ignore_eos`, which not every server knows."""
    [ask] = workload.asks(replace(style, max_tokens=1, ignore_eos=True), 1, WARM_UP_PLACE)
    return (await client.answer(ask)).error not in ("status 400", "status 422")
