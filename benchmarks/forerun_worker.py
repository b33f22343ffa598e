"""The forerun arm: times whole target passes, and the engine around them: its start, its memory, its Python.

Run by forerun's own interpreter; talks JSON lines (`wire.py`). A timing of a pass covers what the engine does per step
up to the logits: building the batch, the pass, and the argmax that comes with it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import wire
from forerun import _native
from forerun.bench.rows import run_batch
from forerun.engine.llm import DEFAULT_CHUNK, LLM
from forerun.kv.pages import num_pages_for
from forerun.models.loader import load_model
from forerun.ops import create_executor
from forerun.ops.base import Executor, ExecutorConfig, KvType
from forerun.ops.native import chosen_isa
from forerun.types import PAGE_TOKENS, Int32Array, SamplingParams, StepRecord

FIRST_TOKEN_ID = 1000  # an ordinary word in any vocabulary; the timing does not depend on which
TOKEN_ID_SPAN = 997
# Tokens that the engine reserves KV for: few, so that an answer fills most of it and no unused KV hides other memory.
ENGINE_LEN = 2 * DEFAULT_CHUNK
MEMORY_TOKENS = 64
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # starts the peak of resident memory anew
COPY_PROMPT = (
    "Repeat these lines exactly:\n\n"
    "The first train leaves at six and the last one returns at nine.\n"
    "The second train leaves at seven and the last one returns at ten.\n"
    "The third train leaves at eight and the last one returns at eleven."
)


class Forerun:
    """One loaded model with room for one sequence, bare (`load`) or as the whole engine (`start_engine`)."""

    llm: LLM
    executor: Executor
    num_slots: int
    loaded_bytes: int
    context: int  # tokens of the usual prompt that are in the cache

    def load(
        self, file: str, num_threads: int, n_ctx: int, backend: str = "native", kv: KvType = "f16"
    ) -> dict[str, Any]:
        """Binds the file to a backend; a prompt runs in the engine's own chunks."""
        start_s = time.perf_counter()
        self.executor, context_length, all_weight_bytes = _bind(Path(file), num_threads, n_ctx, backend, kv)
        load_s = time.perf_counter() - start_s
        self.num_slots = n_ctx
        self.context = 0
        self.loaded_bytes = _status_bytes("VmRSS")
        return {
            "load_s": load_s,
            "weight_bytes": self.executor.weight_bytes,
            "all_weight_bytes": all_weight_bytes,
            "kv_bytes_per_token": self.executor.kv_bytes // (num_pages_for(n_ctx) * PAGE_TOKENS),
            "context_length": context_length,
            "isa": chosen_isa() if backend == "native" else None,
            "chunk": DEFAULT_CHUNK,
        }

    def prefill(self, num_tokens: int, repeats: int) -> dict[str, Any]:
        """Seconds for a prompt of num_tokens from an empty cache, logits of its last row.

        `memory_bytes` is the most memory that was resident meanwhile beyond what was after loading.
        """
        _CLEAR_REFS.write_text(_RESET_PEAK)
        seconds = []
        for _ in range(repeats):
            start_s = time.perf_counter()
            self._run(_token_ids(0, num_tokens))
            seconds.append(time.perf_counter() - start_s)
        return {"seconds": seconds, "memory_bytes": _status_bytes("VmHWM") - self.loaded_bytes}

    def steps(self, num_rows: int, context: int, repeats: int, warm_up: int) -> dict[str, Any]:
        """Seconds for passes of num_rows rows of one sequence at the given context, logits of every row."""
        if self.context < context:  # which token is at a position never differs
            self._run(_token_ids(0, context))
        token_ids = _token_ids(context, context + num_rows)
        seconds = []
        for _ in range(warm_up + repeats):
            start_s = time.perf_counter()
            self.executor.forward(run_batch(token_ids, context, num_rows, self.num_slots))
            seconds.append(time.perf_counter() - start_s)
        return {"seconds": seconds[warm_up:]}

    def logits(self, token_ids: list[int], path: str) -> dict[str, Any]:
        """Writes the logits [N, V] float32 of all positions of a text of N tokens, from an empty cache."""
        self.context = 0
        rows = []
        for start in range(0, len(token_ids), DEFAULT_CHUNK):
            chunk = np.array(token_ids[start : start + DEFAULT_CHUNK], np.int32)
            batch = run_batch(chunk, start, len(chunk), self.num_slots)
            rows.append(self.executor.forward(batch).logits.copy())
        np.save(path, np.concatenate(rows))
        return {}

    def stream(self, num_threads: int, num_bytes: int) -> dict[str, Any]:
        """Gigabytes per second that so many threads read from a buffer of num_bytes."""
        return {"gb_per_s": _native.stream_read_gb_per_s(num_threads, num_bytes)}

    def start_engine(self, file: str, num_threads: int, max_model_len: int | None = ENGINE_LEN) -> dict[str, Any]:
        """Makes the engine ready for requests, as a user does; says what it holds.

        `peak_bytes` counts the mapped file too, which the system takes back whenever it needs room.
        """
        self.llm = LLM(file, threads=num_threads, max_model_len=max_model_len)
        return {
            "kv_bytes": self.llm.target.kv_bytes,
            "loaded_bytes": _status_bytes("VmRSS"),
            "peak_bytes": _status_bytes("VmHWM"),
        }

    def python_cost(self, spec: str, max_tokens: int) -> dict[str, Any]:
        """Milliseconds of each decode step of the engine outside the target's pass, with and without drafts."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        milliseconds = {}
        for speculation in ("off", spec):
            records: list[StepRecord] = []
            for _ in self.llm.stream(COPY_PROMPT, params, speculation=speculation, on_step=records.append):
                pass
            timings = [record.timings for record in records if record.kind == "decode"]
            milliseconds[speculation] = [1e3 * (times.total_s - times.forward_s) for times in timings]
        return {"milliseconds": milliseconds}

    def answered_memory(self, spec: str) -> dict[str, Any]:
        """Memory that is resident after a prompt that fills a pass, and a drafted answer."""
        params = SamplingParams(max_tokens=MEMORY_TOKENS, ignore_eos=True)
        self.llm.generate([_token_ids(0, DEFAULT_CHUNK).tolist()], params, speculation=spec)
        return {"answered_bytes": _status_bytes("VmRSS")}

    def prompt_token_ids(self, texts: list[str]) -> dict[str, Any]:
        """The texts as questions, through the chat template where the model has one; and the ids that end an answer."""
        llm = self.llm
        ids = [
            llm.encode_messages([{"role": "user", "content": text}])
            if llm.has_chat_template
            else list(llm.encode(text))
            for text in texts
        ]
        return {"token_ids": ids, "eos_ids": sorted(llm.limits.eos_ids)}

    def answer(self, token_ids: list[int], max_tokens: int, eos_ids: list[int], spec: str) -> dict[str, Any]:
        """Continues a prompt greedily until an end-of-text id, which is counted, or max_tokens."""
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(eos_ids))
        (completion,) = self.llm.generate([token_ids], params, speculation=spec)
        stats = completion.stats
        return {"token_ids": completion.token_ids, "decode_s": stats.decode_s, "passes": stats.target_passes}

    def forget(self, spec: str) -> dict[str, Any]:
        """Drops what requests with this speculation have left for later ones."""
        speculator = self.llm.speculator(spec)
        if speculator is not None:
            speculator.clear()
        return {}

    def _run(self, token_ids: Int32Array) -> None:
        """A prompt in the engine's chunks; logits are wanted after its last token only."""
        for start in range(0, len(token_ids), DEFAULT_CHUNK):
            rows = token_ids[start : start + DEFAULT_CHUNK]
            is_last = start + len(rows) == len(token_ids)
            self.executor.forward(run_batch(rows, start, int(is_last), self.num_slots))
        self.context = len(token_ids)


def _bind(file: Path, num_threads: int, n_ctx: int, backend: str, kv: KvType) -> tuple[Executor, int, int]:
    """The model on a backend, its context length and the bytes of all its weights.

    The mapped file is let go where the backend made its own copy.
    """
    model = load_model(file)
    config = ExecutorConfig(
        vocab_size=model.config.vocab_size,
        hidden_size=model.config.hidden_size,
        num_layers=model.config.num_layers,
        attentions=model.attentions,
        max_rows=DEFAULT_CHUNK,
        num_pages=num_pages_for(n_ctx),
        kv_type=kv,
        num_threads=num_threads,
    )
    return create_executor(backend, config, model.forward), model.config.context_length, model.weight_bytes


def token_ids_of(file: str, texts: list[str]) -> dict[str, Any]:
    """The texts in the tokens of the file's model."""
    tokenizer = load_model(Path(file)).read_tokenizer()
    return {"token_ids": [tokenizer.encode(text, add_bos=False) for text in texts]}


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def _token_ids(start: int, end: int) -> Int32Array:
    return (FIRST_TOKEN_ID + np.arange(start, end, dtype=np.int32) % TOKEN_ID_SPAN).astype(np.int32)


if __name__ == "__main__":
    arm = Forerun()
    wire.serve(
        {
            "load": arm.load,
            "prefill": arm.prefill,
            "steps": arm.steps,
            "logits": arm.logits,
            "stream": arm.stream,
            "start_engine": arm.start_engine,
            "python_cost": arm.python_cost,
            "answered_memory": arm.answered_memory,
            "token_ids": token_ids_of,
            "prompt_token_ids": arm.prompt_token_ids,
            "answer": arm.answer,
            "forget": arm.forget,
        }
    )
