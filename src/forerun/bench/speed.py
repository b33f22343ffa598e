"""Tokens per second of plain and speculative decoding, side by side on the same requests."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from forerun.engine.completion import Completion
from forerun.engine.llm import LLM
from forerun.types import SamplingParams

# One request that repeats most of what it was given, which lookup likes, and one that does not.
WORKLOADS = {
    "copy": "Correct the spelling of this text and repeat it:\n\n"
    "The harbour office opens at seven, but the boats have usually left by then. Marta unlocks the door, sets the "
    "kettle on the small stove and reads the notes that the night watch has left on the desk. A ferry was late because "
    "of fog. Two crates of oranges were put ashore by mistake and must go back with the noon boat.",
    "open": "Explain in a few paragraphs how a lighthouse works and why each one has its own rhythm.",
}


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One workload.

    Attributes:
        workload: its name in `WORKLOADS`.
        plain_tok_per_s: median decode speed without speculation.
        spec_tok_per_s: with it.
        tau: tokens per target pass with it.
        acceptance_rate: accepted over drafted tokens; 0 when nothing was drafted.
        is_equal: both wrote the same token ids.
    """

    workload: str
    plain_tok_per_s: float
    spec_tok_per_s: float
    tau: float
    acceptance_rate: float
    is_equal: bool


def compare_speed(llm: LLM, spec: str, max_tokens: int, repeats: int) -> list[SpeedRow]:
    """Greedy decoding of every workload, arms interleaved, end of text ignored so that lengths are equal."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    rows = []
    for name, prompt in WORKLOADS.items():
        messages = [{"role": "user", "content": prompt}]
        runs: dict[str, list[Completion]] = {"off": [], spec: []}
        for _ in range(repeats):
            for arm, completions in runs.items():
                speculator = llm.speculator(arm)
                if speculator is not None:
                    speculator.clear()  # or the answer of the round before would be the draft
                completions.append(llm.chat(messages, params, speculation=arm))
        rows.append(_row(name, runs["off"], runs[spec]))
    return rows


def _row(name: str, plain: list[Completion], spec: list[Completion]) -> SpeedRow:
    stats = spec[0].stats
    return SpeedRow(
        workload=name,
        plain_tok_per_s=median(run.stats.decode_tok_per_s for run in plain),
        spec_tok_per_s=median(run.stats.decode_tok_per_s for run in spec),
        tau=(stats.completion_tokens - 1) / stats.target_passes if stats.target_passes else 0.0,
        acceptance_rate=stats.accepted_tokens / stats.drafted_tokens if stats.drafted_tokens else 0.0,
        is_equal=all(run.token_ids == plain[0].token_ids for run in (*plain, *spec)),
    )
