"""What running streams feel when a long prompt arrives: gaps between their chunks, before it and while it is read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.bench.serve_client import Answer, Ask, Client
from forerun.bench.serve_figures import Spread, rounded
from forerun.bench.serve_load import Style, Workload
from forerun.errors import ConfigError

NUM_STREAMS = 4
QUIET_S = 3.0
LONG_SEED = 3000
_WARM_CHUNKS = 8  # of every stream before anything counts, so that no prompt of theirs is being read
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class LongPromptTrial:
    """One arrival.

    Attributes:
        quiet_gaps_s: between chunks of any stream that lie before the arrival.
        busy_gaps_s: those that the reading of the prompt overlaps.
        ttft_s: what the long prompt itself waited for its first token.
        num_prompt_tokens: its length, as the server counts it.
    """

    quiet_gaps_s: tuple[float, ...]
    busy_gaps_s: tuple[float, ...]
    ttft_s: float
    num_prompt_tokens: int


async def long_prompt_trial(client: Client, streams: Sequence[Ask], long: Ask, quiet_s: float) -> LongPromptTrial:
    """Starts the streams, waits, sends the long prompt, and ends the streams when its first token is there.

    Args:
        client: of the server.
        streams: requests with answers long enough to go on all the while.
        long: the long prompt, streamed.
        quiet_s: seconds that count before it.

    Raises:
        ConfigError: a stream ended too early, or a request failed.
    """
    answers = [Answer() for _ in streams]
    tasks = [asyncio.create_task(client.answer(ask, answer)) for ask, answer in zip(streams, answers, strict=True)]
    try:
        while not all(len(answer.chunk_s) > _WARM_CHUNKS for answer in answers):
            _check_running(tasks, answers)
            await asyncio.sleep(_POLL_S)
        quiet_start_s = time.perf_counter()
        await asyncio.sleep(quiet_s)
        _check_running(tasks, answers)
        asked = await client.answer(long)
        if not asked.is_ok or not asked.chunk_s:
            raise ConfigError(f"the long prompt was not answered: {asked.error or 'no text'} {asked.detail}".rstrip())
        await asyncio.sleep(quiet_s / 4)  # the chunks that waited for it must have come
        _check_running(tasks, answers)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    first_s = asked.chunk_s[0]
    pairs = [pair for answer in answers for pair in zip(answer.chunk_s, answer.chunk_s[1:], strict=False)]
    return LongPromptTrial(
        tuple(end - start for start, end in pairs if quiet_start_s <= start and end <= asked.sent_s),
        tuple(end - start for start, end in pairs if end > asked.sent_s and start < first_s),
        first_s - asked.sent_s,
        asked.num_prompt_tokens,
    )


def _check_running(tasks: Sequence[asyncio.Task[Answer]], answers: Sequence[Answer]) -> None:
    for task, answer in zip(tasks, answers, strict=True):
        if task.done():
            reason = answer.error or "its answer was complete; let it write more tokens"
            raise ConfigError(f"a stream ended before the long prompt was answered: {reason} {answer.detail}".rstrip())


def long_prompt_json(trials: Sequence[LongPromptTrial]) -> dict[str, Any]:
    """Plain values of all trials together."""
    quiet = Spread.of([gap for trial in trials for gap in trial.quiet_gaps_s], 1000.0)
    busy = Spread.of([gap for trial in trials for gap in trial.busy_gaps_s], 1000.0)
    return {
        "num_trials": len(trials),
        "num_prompt_tokens": trials[0].num_prompt_tokens,
        "quiet_gap_ms": quiet.to_json() if quiet else None,
        "busy_gap_ms": busy.to_json() if busy else None,
        "busy_gap_max_ms": rounded(1000 * max((gap for trial in trials for gap in trial.busy_gaps_s), default=0.0)),
        "long_ttft_ms": [rounded(1000 * trial.ttft_s) for trial in trials],
    }


async def long_prompt_trials(
    client: Client,
    style: Style,
    questions: Workload,
    num_prompt_tokens: int,
    num_trials: int,
    num_streams: int = NUM_STREAMS,
    quiet_s: float = QUIET_S,
    first: int = 0,
) -> list[LongPromptTrial]:
    """Trials with other questions and another prompt each, so that no cache knows them.

    Args:
        client: of the server.
        style: of the streams; their answers must be long enough, so end-of-text tokens should be ignored.
        questions: what the streams answer.
        num_prompt_tokens: of the long prompt, which is of random ids.
        num_trials: at least 1.
        num_streams: running streams.
        quiet_s: seconds that count before the long prompt.
        first: number of the first trial; trials of other numbers share no text.
    """
    long = Workload(num_random_tokens=num_prompt_tokens, seed=LONG_SEED)
    trials = []
    for number in range(first, first + num_trials):
        streams = questions.asks(style, num_streams, number * num_streams)
        [ask] = long.asks(replace(style, max_tokens=1), 1, number)
        trials.append(await long_prompt_trial(client, streams, ask, quiet_s))
    return trials
