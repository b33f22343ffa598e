"""The llama.cpp arm: times `llama_decode` through the ctypes API of llama-cpp-python.

Run by the peer's own interpreter; talks JSON lines (`wire.py`). A timing covers `llama_decode` and `llama_synchronize`
and nothing else: filling the batch, argmax and dropping the step's cache entries are left out, which favours the peer.
Knows nothing of forerun.
"""

from __future__ import annotations

import ctypes
import os
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

from benchmarks import wire

FLASH_ATTENTION = {
    "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
}
FIRST_TOKEN_ID = 1000  # an ordinary word in any vocabulary; the timing does not depend on which
TOKEN_ID_SPAN = 997

_log_lines: list[str] = []


@lib.llama_log_callback  # type: ignore[untyped-decorator]
def _keep_log(_level: int, text: bytes, _user_data: Any) -> None:
    _log_lines.append(text.decode("utf-8", "replace").rstrip("\n"))


class LlamaCpp:
    """One loaded model with one context."""

    def __init__(self) -> None:
        lib.llama_log_set(_keep_log, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.model: Any = None
        self.context: Any = None
        self.batch: Any = None
        self.vocab_size = 0

    def load(
        self,
        file: str,
        num_threads: int,
        n_ctx: int,
        n_batch: int,
        flash_attention: str = "auto",
    ) -> dict[str, Any]:
        """Opens the file as the library does by default: memory-mapped, repacked for the kernels of this machine."""
        self.close()
        _log_lines.clear()
        self.model = lib.llama_model_load_from_file(os.fsencode(file), lib.llama_model_default_params())
        if not self.model:
            raise RuntimeError("llama.cpp did not load the file: " + " | ".join(_log_lines[-5:]))
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = n_batch
        params.n_threads = num_threads
        params.n_threads_batch = num_threads
        params.flash_attn_type = FLASH_ATTENTION[flash_attention]
        params.no_perf = True
        self.context = lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp made no context: " + " | ".join(_log_lines[-5:]))
        self.batch = lib.llama_batch_init(n_batch, 0, 1)
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        return {
            "version": metadata.version("llama-cpp-python"),
            "system_info": lib.llama_print_system_info().decode(),
            "weight_bytes": lib.llama_model_size(self.model),
            "n_ctx_train": lib.llama_model_n_ctx_train(self.model),
            "n_ubatch": lib.llama_n_ubatch(self.context),
            "buffers": [" ".join(line.split()) for line in _log_lines if "buffer size" in line],
        }

    def prefill(self, num_tokens: int, repeats: int) -> dict[str, Any]:
        """Seconds for a prompt of num_tokens from an empty cache, logits of its last row."""
        seconds = []
        for _ in range(repeats):
            self._clear_from(0)
            elapsed = 0.0
            for start in range(0, num_tokens, self._capacity):
                end = min(start + self._capacity, num_tokens)
                self._fill(_token_ids(start, end), start, all_logits=False)
                elapsed += self._timed_decode()
            seconds.append(elapsed)
        return {"seconds": seconds}

    def steps(self, num_rows: int, context: int, repeats: int, warm_up: int) -> dict[str, Any]:
        """Seconds for passes of num_rows rows of one sequence at the given context, logits of every row."""
        self._reach(context)
        seconds = []
        for _ in range(warm_up + repeats):
            self._fill(_token_ids(context, context + num_rows), context, all_logits=True)
            seconds.append(self._timed_decode())
            self._clear_from(context)
        return {"seconds": seconds[warm_up:]}

    def logits(self, token_ids: list[int], path: str) -> dict[str, Any]:
        """Writes the logits [N, V] float32 of all positions of a text of N tokens, from an empty cache."""
        self._clear_from(0)
        self._fill(token_ids, 0, all_logits=True)
        self._timed_decode()
        pointer = lib.llama_get_logits(self.context)
        np.save(path, np.ctypeslib.as_array(pointer, (len(token_ids), self.vocab_size)))
        return {}

    def answer(self, token_ids: list[int], max_tokens: int, eos_ids: list[int]) -> dict[str, Any]:
        """Continues a prompt greedily until an end-of-text id, which is counted, or max_tokens."""
        self._clear_from(0)
        for start in range(0, len(token_ids), self._capacity):
            self._fill(token_ids[start : start + self._capacity], start, all_logits=False)
            self._timed_decode()
        answer = [self._argmax()]
        start_s = time.perf_counter()
        while len(answer) < max_tokens and answer[-1] not in eos_ids:
            self._fill(answer[-1:], len(token_ids) + len(answer) - 1, all_logits=True)
            self._timed_decode()
            answer.append(self._argmax())
        return {"token_ids": answer, "decode_s": time.perf_counter() - start_s, "passes": len(answer) - 1}

    def quantize_q4_0(self, source: str, destination: str, num_threads: int) -> dict[str, Any]:
        """Writes the file again in Q4_0 with llama.cpp's own quantiser."""
        params = lib.llama_model_quantize_default_params()
        params.nthread = num_threads
        params.ftype = lib.LLAMA_FTYPE_MOSTLY_Q4_0
        params.allow_requantize = True
        unfinished = Path(destination + ".part")
        status = lib.llama_model_quantize(os.fsencode(source), os.fsencode(unfinished), ctypes.byref(params))
        if status != 0:
            raise RuntimeError(f"llama_model_quantize returned {status}: " + " | ".join(_log_lines[-5:]))
        unfinished.replace(destination)
        return {"bytes": Path(destination).stat().st_size}

    def close(self) -> None:
        """Frees the model and what hangs on it."""
        if self.batch is not None:
            lib.llama_batch_free(self.batch)
            lib.llama_free(self.context)
            lib.llama_model_free(self.model)
        self.batch = self.context = self.model = None

    @property
    def _capacity(self) -> int:
        return int(lib.llama_n_batch(self.context))

    def _reach(self, context: int) -> None:
        """Leaves exactly `context` tokens in the cache; which token is at a position never differs."""
        if lib.llama_memory_seq_pos_max(lib.llama_get_memory(self.context), 0) + 1 < context:
            self.prefill(context, 1)
        self._clear_from(context)

    def _clear_from(self, position: int) -> None:
        if not lib.llama_memory_seq_rm(lib.llama_get_memory(self.context), 0, position, -1):
            raise RuntimeError(f"llama.cpp could not drop the cache from position {position}")

    def _fill(self, token_ids: list[int], start: int, all_logits: bool) -> None:
        batch = self.batch
        batch.n_tokens = len(token_ids)
        for row, token_id in enumerate(token_ids):
            batch.token[row] = token_id
            batch.pos[row] = start + row
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = int(all_logits or row == len(token_ids) - 1)

    def _argmax(self) -> int:
        """The likeliest token after the last row."""
        pointer = lib.llama_get_logits_ith(self.context, -1)
        return int(np.argmax(np.ctypeslib.as_array(pointer, (self.vocab_size,))))

    def _timed_decode(self) -> float:
        start_s = time.perf_counter()
        status = lib.llama_decode(self.context, self.batch)
        lib.llama_synchronize(self.context)
        elapsed = time.perf_counter() - start_s
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        return elapsed


def _token_ids(start: int, end: int) -> list[int]:
    return [FIRST_TOKEN_ID + position % TOKEN_ID_SPAN for position in range(start, end)]


if __name__ == "__main__":
    arm = LlamaCpp()
    wire.serve(
        {
            "load": arm.load,
            "prefill": arm.prefill,
            "steps": arm.steps,
            "logits": arm.logits,
            "answer": arm.answer,
            "quantize_q4_0": arm.quantize_q4_0,
        }
    )
