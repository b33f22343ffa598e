"""The arms of a comparison: worker processes with the file loaded, each in its best settings."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.environment import peers_dir
from benchmarks.measure import Turn, interleave
from benchmarks.wire import Worker

N_CTX = 8192
N_BATCH = 2048  # llama.cpp's default; it computes 512 of them at a time
FLASH_SETTINGS = ("on", "off")
STEP_WARM_UP = 2
_TRIAL_STEPS, _TRIAL_PROMPT_TOKENS, _TRIAL_ROUNDS = 10, 512, 5


class Crew:
    """Worker processes that end with the block.

    Args:
        llama_cpp_python, openvino_python: the interpreters of the peers that take part.
    """

    def __init__(self, llama_cpp_python: Path | None = None, openvino_python: Path | None = None) -> None:
        self._llama_cpp_python = llama_cpp_python
        self._openvino_python = openvino_python
        self._workers: list[Worker] = []

    @property
    def has_llama_cpp(self) -> bool:
        """Whether llama.cpp takes part."""
        return self._llama_cpp_python is not None

    def forerun(self, name: str, env: Mapping[str, str] | None = None) -> Worker:
        """A worker of this checkout."""
        return self._start(Worker(name, Path(sys.executable), "benchmarks.forerun_worker", env))

    def llama_cpp(self, name: str) -> Worker:
        """A worker of llama.cpp."""
        assert self._llama_cpp_python is not None
        return self._start(Worker(name, self._llama_cpp_python, "benchmarks.llama_cpp_worker"))

    def openvino(self, name: str) -> Worker:
        """A worker of OpenVINO."""
        assert self._openvino_python is not None
        return self._start(Worker(name, self._openvino_python, "benchmarks.openvino_worker"))

    def dismiss(self, worker: Worker) -> None:
        """Ends a worker that is no longer needed."""
        self._workers.remove(worker)
        worker.close()

    def _start(self, worker: Worker) -> Worker:
        self._workers.append(worker)
        return worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for worker in self._workers:
            worker.close()


@dataclass(frozen=True, slots=True)
class LlamaCppArm:
    """llama.cpp on one file, in the settings that are fastest for it.

    Attributes:
        steps, prefill: the worker for each; the same one when one setting is best for both.
        flash_attention: the setting chosen for each.
        info: what the peer says about itself and the file.
    """

    steps: Worker
    prefill: Worker
    flash_attention: dict[str, str]
    info: dict[str, Any]


def load_llama_cpp(crew: Crew, name: str, file: Path, num_threads: int) -> LlamaCppArm:
    """Tries both flash attention settings and keeps the faster one for steps and for prompts."""
    workers = {flash: crew.llama_cpp(f"{name}, flash attention {flash}") for flash in FLASH_SETTINGS}
    for flash, worker in workers.items():
        info = worker.ask(
            "load", file=str(file), num_threads=num_threads, n_ctx=N_CTX, n_batch=N_BATCH, flash_attention=flash
        )
    trials = {"steps": partial(step_seconds, num_rows=1, context=256, repeats=_TRIAL_STEPS)}
    trials["prefill"] = partial(prefill_seconds, num_tokens=_TRIAL_PROMPT_TOKENS, repeats=1)
    turns = [
        Turn((what, flash), worker, partial(run, worker), _TRIAL_ROUNDS)
        for what, run in trials.items()
        for flash, worker in workers.items()
    ]
    measured = interleave(turns)
    best = {what: min(workers, key=lambda flash: measured.summary((what, flash)).median) for what in trials}
    for flash in workers.keys() - best.values():
        crew.dismiss(workers[flash])
    return LlamaCppArm(workers[best["steps"]], workers[best["prefill"]], best, info)


def q4_0_file(crew: Crew, source: Path, num_threads: int) -> Path:
    """The model in Q4_0, made by llama.cpp's own quantiser and kept beside the peer."""
    made = peers_dir() / "models" / f"{source.stem}-requantised-q4_0.gguf"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        worker = crew.llama_cpp("llama.cpp quantiser")
        worker.ask("quantize_q4_0", source=str(source), destination=str(made), num_threads=num_threads)
        crew.dismiss(worker)
    return made


def step_seconds(worker: Worker, num_rows: int, context: int, repeats: int) -> list[float]:
    """Seconds of single passes of num_rows rows."""
    answer = worker.ask("steps", num_rows=num_rows, context=context, repeats=repeats, warm_up=STEP_WARM_UP)
    seconds: list[float] = answer["seconds"]
    return seconds


def prefill_seconds(worker: Worker, num_tokens: int, repeats: int) -> list[float]:
    """Seconds of whole prompts."""
    seconds: list[float] = worker.ask("prefill", num_tokens=num_tokens, repeats=repeats)["seconds"]
    return seconds
