"""What the server adds: the same prompts by HTTP and by the engine in this process, one at a time, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forerun.bench.prompts import Prompt
from forerun.bench.resample import Interval, interval
from forerun.bench.serve_client import Client
from forerun.bench.serve_load import Style
from forerun.engine.llm import LLM
from forerun.errors import ConfigError
from forerun.types import Float64Array, SamplingParams

STREAM, WHOLE = KINDS = ("stream", "whole")


@dataclass(slots=True)
class Overhead:
    """What was measured.

    Attributes:
        http_s, engine_s: by kind, seconds of each prompt's answer.
        num_tokens: of all answers of one arm.
        different: names of prompts whose answers had another number of tokens through HTTP.
    """

    http_s: dict[str, list[float]]
    engine_s: dict[str, list[float]]
    num_tokens: int
    different: list[str]

    def ratio(self, kind: str) -> Interval:
        """Seconds through HTTP over seconds in the engine, with its interval by resampling prompts."""
        http, engine = np.array(self.http_s[kind]), np.array(self.engine_s[kind])
        return interval(len(http), lambda chosen: _ratio(http[chosen], engine[chosen]))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            kind: {
                "http_over_engine": self.ratio(kind).to_json(),
                "http_tok_per_s": float(f"{self.num_tokens / sum(self.http_s[kind]):.5g}"),
                "engine_tok_per_s": float(f"{self.num_tokens / sum(self.engine_s[kind]):.5g}"),
            }
            for kind in KINDS
        } | {"num_prompts": len(self.http_s[WHOLE]), "different": self.different}


def _ratio(http_s: Float64Array, engine_s: Float64Array) -> Float64Array:
    return np.asarray(http_s.sum(axis=-1) / engine_s.sum(axis=-1))


async def measure_overhead(
    client: Client,
    llm: LLM,
    spec: str,
    prompts: Sequence[Prompt],
    style: Style,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Overhead:
    """Answers every prompt four times: streamed and whole, by the server and by the engine; who goes first changes.

    Args:
        client: of a server of the same model with the same settings.
        llm: the engine in this process. Neither may keep prefixes, or who comes second would have less to do.
        spec: who drafts in the engine; the server's own default should be the same.
        prompts: the questions; the first one is asked before anything is timed, too.
        style: of the requests; greedy.

    Raises:
        ConfigError: the server failed on a request.
    """
    params = SamplingParams(max_tokens=style.max_tokens, ignore_eos=style.ignore_eos)
    result = Overhead({kind: [] for kind in KINDS}, {kind: [] for kind in KINDS}, 0, [])
    for number, prompt in enumerate([prompts[0], *prompts]):
        counts = set()
        arms = [(kind, is_http) for is_http in (True, False) for kind in KINDS]
        for kind, is_http in arms[number % 4 :] + arms[: number % 4]:
            if is_http:
                seconds, num_tokens = await _by_http(client, _styled(style, kind), prompt.text)
            else:
                seconds, num_tokens = _by_engine(llm, spec, kind, params, prompt.text)
            counts.add(num_tokens)
            if number > 0:
                (result.http_s if is_http else result.engine_s)[kind].append(seconds)
        if number > 0:
            result.num_tokens += num_tokens
            result.different += [prompt.name] if len(counts) > 1 else []
            progress(number, len(prompts))
    return result


def _styled(style: Style, kind: str) -> Style:
    return replace(style, is_stream=kind == STREAM)


async def _by_http(client: Client, style: Style, text: str) -> tuple[float, int]:
    answer = await client.answer(style.chat(text))
    if not answer.is_ok:
        raise ConfigError(f"the server failed on a request: {answer.error} {answer.detail}".rstrip())
    return answer.latency_s, answer.num_tokens


def _by_engine(llm: LLM, spec: str, kind: str, params: SamplingParams, text: str) -> tuple[float, int]:
    messages = [{"role": "user", "content": text}]
    start_s = time.perf_counter()
    if kind == STREAM:
        *_, last = llm.stream(messages, params, speculation=spec)
        completion = last.completion
        assert completion is not None
    else:
        completion = llm.chat(messages, params, speculation=spec)
    return time.perf_counter() - start_s, completion.stats.completion_tokens
