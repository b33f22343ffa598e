"""The servers of a comparison: who they are, how they start, and that each does what its name says."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.wire import WorkerError
from forerun.bench.prompts import pick, spec_bench
from forerun.bench.serve_client import Answer, Client, Target
from forerun.bench.serve_load import Style, Workload
from forerun.bench.serve_process import ServerProcess, forerun_serve
from forerun.bench.speed import WORKLOADS

SLOT_TOKENS = 4096  # context of every request, the longest prompt and its answer included
VLLM_START_S = 900.0  # it compiles at its first start
VLLM_KV_GIB = 4
VLLM_NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
_CHECK_TOKENS = 64
_DRAFTED = re.compile(r"^vllm:spec_decode_num_draft_tokens_total(?:\{[^}]*\})? ([\d.e+]+)$", re.MULTILINE)

Command = Callable[[int, int], list[str]]  # given a port and how many requests run at once


@contextmanager
def turn_of(server: ServerProcess) -> Iterator[None]:
    """Only inside does the server have the processors."""
    server.resume()
    try:
        yield
    finally:
        server.pause()


@dataclass(frozen=True, slots=True)
class ServerArm:
    """One server in one setting.

    Attributes:
        name: in tables.
        weights: what it computes with, in words.
        is_speculative: whether it drafts.
        command: starts it.
        env: variables for it.
        extra: further fields of every request.
        is_per_level: started anew for each number of clients, because that is a setting of its.
        start_s: seconds that it may take to start.
    """

    name: str
    weights: str
    is_speculative: bool
    command: Command
    env: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    is_per_level: bool = False
    start_s: float = 120.0

    def start(self, num_clients: int) -> ServerProcess:
        """A process that is ready for so many clients.

        Raises:
            ConfigError: it did not start.
        """
        port = free_port()
        server = ServerProcess(self.name, self.command(port, num_clients), self.env, f"http://127.0.0.1:{port}")
        try:
            server.wait_until_ready(self.start_s)
        except BaseException:
            server.close()
            raise
        return server

    def style(self, model: str, max_tokens: int) -> Style:
        """Of its requests: streamed, greedy, as long as they may be."""
        return Style(model, max_tokens, ignore_eos=True, extra=self.extra)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def questions() -> Workload:
    """Spec-Bench, categories in turn."""
    prompts = spec_bench()
    return Workload(pick(prompts, len(prompts)))


def forerun_arms(model: Path, weights: str, num_threads: int, max_clients: int) -> list[ServerArm]:
    """forerun on a file or folder, without speculation and as it is by default."""
    tokens = str(SLOT_TOKENS * max_clients)

    def arm(spec: str) -> ServerArm:
        options = [
            "--spec", spec, "--threads", str(num_threads), "--max-running", str(max_clients),
            "--max-model-len", str(SLOT_TOKENS), "--kv-tokens", tokens,
        ]  # fmt: skip
        return ServerArm(
            name=f"{_named('forerun', weights)}, {spec}",
            weights=weights,
            is_speculative=spec != "off",
            command=lambda port, num_clients: forerun_serve(str(model), options, port),
            extra={"speculative": {"metrics": "summary"}},
        )

    return [arm("off"), arm("auto")]


def llama_arm(program: Path, model: Path, num_threads: int, flash: str, spec: Sequence[str], weights: str) -> ServerArm:
    """llama-server with as many slots as there are clients.

    Args:
        program: llama-server.
        model: the GGUF file.
        num_threads: for prompts and decoding alike.
        flash: its flash attention setting.
        spec: its options of speculation; none is off.
        weights: the file's format, in words.
    """
    fixed = [
        str(program), "--model", str(model), "--host", "127.0.0.1", "--threads", str(num_threads),
        "--threads-batch", str(num_threads), "--flash-attn", flash, "--metrics", "--no-ui", *spec,
    ]  # fmt: skip
    return ServerArm(
        name=f"{_named('llama-server', weights)}, {_in_short(spec)}",
        weights=weights,
        is_speculative=bool(spec),
        command=lambda port, num_clients: [
            *fixed, "--port", str(port), "--parallel", str(num_clients), "--ctx-size", str(SLOT_TOKENS * num_clients),
        ],
        is_per_level=True,
    )  # fmt: skip


def _named(program: str, weights: str) -> str:
    """The file's own format goes without saying."""
    return program if weights == "GGUF" else f"{program} {weights}"


def _in_short(spec: Sequence[str]) -> str:
    """llama-server's options of speculation in a few letters: the type, then the last word of each further option."""
    pairs = zip(spec[2::2], spec[3::2], strict=True)
    return " ".join([spec[1], *(f"{option.rpartition('-')[2]}={value}" for option, value in pairs)]) if spec else "off"


def vllm_arms(python: Path, folder: Path, num_threads: int, max_clients: int, cpus: Sequence[int]) -> list[ServerArm]:
    """vLLM on a bf16 folder, without speculation and with prompt lookup."""
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus[:num_threads])),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Its tools are looked for on the path when it compiles.
        "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
    }
    fixed = [
        # Not its command line: that asks for the version of a package of another name.
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host", "127.0.0.1",
        "--dtype", "bfloat16", "--max-model-len", str(SLOT_TOKENS), "--max-num-seqs", str(max_clients),
        "--disable-uvicorn-access-log",
    ]  # fmt: skip

    def arm(spec: Mapping[str, Any] | None) -> ServerArm:
        more = ["--speculative-config", json.dumps(spec)] if spec else []
        drafter = f"ngram k={spec['num_speculative_tokens']}" if spec else "off"
        return ServerArm(
            name=f"vLLM bf16, {drafter}",
            weights="bf16",
            is_speculative=spec is not None,
            command=lambda port, num_clients: [*fixed, "--port", str(port), *more],
            env=env,
            start_s=VLLM_START_S,
        )

    return [arm(None), arm(VLLM_NGRAM)]


async def check_arm(arm: ServerArm, address: str) -> int:
    """That it answers as asked, and drafts if and only if it should, by its own counts.

    Returns:
        Tokens of the question as it reads it: servers of one model must agree.

    Raises:
        WorkerError: it doesn't.
    """
    async with Client(Target(address)) as client:
        style = arm.style(client.model, _CHECK_TOKENS)
        before = await _drafted_metric(client)
        answer: Answer = await client.answer(style.chat(WORKLOADS["copy"]))
        drafted = answer.num_drafted + await _drafted_metric(client) - before
    if not answer.is_ok or answer.num_tokens != _CHECK_TOKENS:
        what = f"{answer.error} {answer.detail}" if answer.error else f"{answer.num_tokens} tokens"
        raise WorkerError(f"{arm.name} was asked for {_CHECK_TOKENS} tokens and gave {what}")
    if arm.is_speculative != (drafted > 0):
        raise WorkerError(f"{arm.name} drafted {drafted:g} tokens of a text that it was to copy")
    return answer.num_prompt_tokens


async def _drafted_metric(client: Client) -> float:
    return sum(float(count) for count in _DRAFTED.findall(await client.metrics()))


class Checks:
    """Starts servers that do what their names say, and read the same question as the same number of tokens."""

    def __init__(self) -> None:
        self._num_prompt_tokens: dict[str, int] = {}

    def started(self, arm: ServerArm, num_clients: int) -> ServerProcess:
        """A server that has passed, paused until its turn.

        Raises:
            ConfigError: it did not start.
            WorkerError: it failed.
        """
        server = arm.start(num_clients)
        try:
            self.compare(arm.name, asyncio.run(check_arm(arm, server.address)))
            server.pause()
        except BaseException:
            server.close()
            raise
        return server

    def compare(self, name: str, num_prompt_tokens: int) -> None:
        """Raises WorkerError when another server has counted otherwise."""
        self._num_prompt_tokens[name] = num_prompt_tokens
        if len(set(self._num_prompt_tokens.values())) > 1:
            raise WorkerError(f"servers read the same question as different tokens: {self._num_prompt_tokens}")
