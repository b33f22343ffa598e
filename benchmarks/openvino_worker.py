"""The OpenVINO GenAI arm: answers prompts of token ids greedily, plainly or with prompt lookup.

Run by the peer's own interpreter; talks JSON lines (`wire.py`). Times are the library's own: when each pass gave its
tokens, so that Python and the wire cost it nothing. Knows nothing of forerun.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai as lib

from benchmarks import wire


class OpenVino:
    """One pipeline."""

    pipeline: Any
    lookup: dict[str, int]

    def load(self, folder: str, num_threads: int, attention: str, lookup: dict[str, int] | None) -> dict[str, Any]:
        """Compiles an exported model with the library's defaults for the CPU.

        Args:
            folder: with openvino_model.xml.
            num_threads: threads to compute with.
            attention: the library's ATTENTION_BACKEND, `PA` or `SDPA`.
            lookup: `num_assistant_tokens` and `max_ngram_size` of prompt lookup; None decodes plainly.
        """
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": num_threads, "ATTENTION_BACKEND": attention}
        if lookup is not None:
            options["prompt_lookup"] = True
        self.lookup = lookup or {}
        self.pipeline = lib.LLMPipeline(folder, "CPU", **options)
        return {"version": lib.get_version(), "runtime": openvino.get_version()}

    def answer(self, token_ids: list[int], max_tokens: int, eos_ids: list[int]) -> dict[str, Any]:
        """Continues a prompt greedily until an end-of-text id, which is counted, or max_tokens."""
        config = lib.GenerationConfig()
        config.do_sample = False
        config.max_new_tokens = max_tokens
        config.eos_token_id = eos_ids[0]
        config.stop_token_ids = set(eos_ids)
        for name, value in self.lookup.items():
            setattr(config, name, value)
        prompt = np.array([token_ids], np.int64)
        inputs = lib.TokenizedInputs(openvino.Tensor(prompt), openvino.Tensor(np.ones_like(prompt)))
        result = self.pipeline.generate(inputs, config)
        if result.perf_metrics.get_num_input_tokens() != len(token_ids):
            raise RuntimeError(f"OpenVINO read {result.perf_metrics.get_num_input_tokens()} tokens of {len(token_ids)}")
        times_ms = list(result.perf_metrics.raw_metrics.m_new_token_times)  # one for each pass, the prompt's included
        return {
            "token_ids": list(result.tokens[0]),
            "decode_s": (times_ms[-1] - times_ms[0]) / 1e3,
            "passes": len(times_ms) - 1,
        }


if __name__ == "__main__":
    arm = OpenVino()
    wire.serve({"load": arm.load, "answer": arm.answer})
