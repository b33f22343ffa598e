"""What a comparison with llama.cpp says: bars, tables, Markdown and the JSON line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.markdown import markdown_table, provenance_table
from benchmarks.measure import Measured, Summary, round_to

OWN, PEER, PEER_Q4_0 = "forerun", "llama.cpp", "llama.cpp Q4_0"
_MIB = 1 << 20
MAX_RESIDENT_MB = 200.0  # beyond weights and keys and values: Python, tokenizer, activations

Section = tuple[tuple[str, ...], list[tuple[str, ...]]]  # header and rows of a table


@dataclass(frozen=True, slots=True)
class PeersResult:
    """Everything that was measured. Set by `peers.compare`.

    Attributes:
        model: the file's name without its suffix.
        measured: by ("steps", arm, rows) seconds, ("prefill", arm, tokens) seconds, ("stream", name) GB/s.
        own_info, llama_cpp_info: what both say about the loaded file.
        flash_attention: the settings chosen for llama.cpp, by arm and then for steps and prefill.
        python_ms: per speculation setting, milliseconds outside the target's pass of each decode step.
        memory_bytes: by prompt length, resident memory beyond the loaded model and its reserved KV storage.
        engine_info: of the whole engine, `kv_bytes` and what is resident: `loaded_bytes`, `answered_bytes` after a
            prompt and an answer, `peak_bytes` at most while loading.
        start_s: seconds from no process to an engine that is ready, imports and tokenizer included.
        num_rows: row counts of the steps.
        context: tokens in the cache before a step.
        num_threads: of every arm.
    """

    model: str
    measured: Measured
    own_info: Mapping[str, Any]
    llama_cpp_info: dict[str, Any]
    flash_attention: Mapping[str, Mapping[str, str]]
    python_ms: Mapping[str, list[float]]
    memory_bytes: Mapping[int, int]
    engine_info: Mapping[str, int]
    start_s: float
    num_rows: tuple[int, ...]
    context: int
    num_threads: int

    def step_ms(self, arm: str, num_rows: int) -> Summary:
        """Milliseconds of one pass."""
        return self.measured.summary(("steps", arm, num_rows)).scaled(1e3)

    def prefill_tok_per_s(self, arm: str, num_tokens: int) -> Summary:
        """Tokens per second of a prompt."""
        return self.measured.summary(("prefill", arm, num_tokens)).inverted(num_tokens)

    def arms(self, what: str) -> list[str]:
        """Arms that have results of a kind, in order of measurement."""
        return list(dict.fromkeys(key[1] for key in self.measured.values if key[0] == what))

    def lengths(self, arm: str) -> list[int]:
        """Prompt lengths that an arm was measured at."""
        return [key[2] for key in self.measured.values if key[:2] == ("prefill", arm)]

    @property
    def is_quiet(self) -> bool:
        """Whether other processes left the CPUs alone. llama.cpp loses far more than forerun when they don't."""
        return self.measured.is_quiet

    @property
    def python_ms_per_step(self) -> float:
        """Median of the dearer of plain and speculative steps."""
        return max(median(values) for values in self.python_ms.values())

    @property
    def resident_mb_beyond(self) -> float:
        """Megabytes that the engine holds after an answer, beyond weights and reserved keys and values."""
        held = int(self.own_info["all_weight_bytes"]) + self.engine_info["kv_bytes"]
        return (self.engine_info["answered_bytes"] - held) / 1e6

    @property
    def read_gb_per_s(self) -> float:
        """Weights over the time of a one-row step."""
        return float(self.own_info["weight_bytes"]) / self.measured.summary(("steps", OWN, 1)).median / 1e9


@dataclass(frozen=True, slots=True)
class Bar:
    """One goal.

    Attributes:
        what: in words.
        value: what was measured.
        limit: the goal.
        is_upper: the value must not exceed the limit; otherwise it must reach it.
    """

    what: str
    value: float
    limit: float
    is_upper: bool

    @property
    def is_met(self) -> bool:
        """Whether the goal is reached."""
        return self.value <= self.limit if self.is_upper else self.value >= self.limit

    def line(self, is_quiet: bool = True) -> str:
        """One line for people; a run that others disturbed says nothing about a goal."""
        verdict = ("met" if self.is_met else "MISSED") if is_quiet else "void"
        relation = "at most" if self.is_upper else "at least"
        return f"{verdict:6}  {self.what}: {self.value:.3f}, goal {relation} {self.limit:.2f}"


@dataclass(frozen=True, slots=True)
class Goals:
    """What is to be reached on one model.

    Attributes:
        steps: by number of rows, time of a step over llama.cpp's for one row.
        prompt: tokens per second of a prompt of 512 over llama.cpp's; None has no goal.
        start_s: from no process to an engine that is ready.
    """

    steps: Mapping[int, float]
    prompt: float | None
    start_s: float


# By the file's name. A large model is bound by memory, which llama.cpp reads as fast.
GOALS: Mapping[str, Goals] = {
    "smollm2-135m-instruct-q4_1": Goals({1: 0.50, 4: 0.65, 8: 0.80}, 3.0, 1.5),
    "qwen2.5-coder-0.5b-instruct-q4_k_m": Goals({1: 0.75, 4: 1.3, 8: 2.0}, None, 6.0),
    "qwen2.5-coder-1.5b-instruct-q4_k_m": Goals({1: 1.0, 4: 1.3, 8: 2.0}, None, 6.0),
}
_OTHER_GOALS = Goals({}, None, 6.0)


def bars(result: PeersResult) -> list[Bar]:
    """The goals against llama.cpp on the same file, from medians."""
    goals = GOALS.get(result.model, _OTHER_GOALS)
    one_row = result.step_ms(PEER, 1).median
    out = [
        Bar(f"{m} row{'s' if m > 1 else ''} over llama.cpp's one", result.step_ms(OWN, m).median / one_row, limit, True)
        for m, limit in goals.steps.items()
    ]
    if goals.prompt is not None:
        prefill = result.prefill_tok_per_s(OWN, 512).median / result.prefill_tok_per_s(PEER, 512).median
        out.append(Bar("prompt of 512 tokens, tokens per second over llama.cpp's", prefill, goals.prompt, False))
    return [
        *out,
        Bar("Python per step in ms", result.python_ms_per_step, 0.30, True),
        Bar("seconds from no process to an engine that is ready", result.start_s, goals.start_s, True),
        Bar("resident MB beyond weights and KV", result.resident_mb_beyond, MAX_RESIDENT_MB, True),
    ]


def summary_json(result: PeersResult) -> dict[str, Any]:
    """The result as plain values; pairs are [forerun, llama.cpp]."""
    measured = result.measured
    return {
        "step_ms": {str(m): [round_to(result.step_ms(arm, m).median) for arm in (OWN, PEER)] for m in result.num_rows},
        "prefill512_tok_per_s": [round_to(result.prefill_tok_per_s(arm, 512).median) for arm in (OWN, PEER)],
        "stream_gb_per_s": round_to(measured.summary(("stream", "memory")).median),
        "python_ms_per_step": round_to(result.python_ms_per_step),
        "bars": [
            {
                "what": bar.what,
                "value": round_to(bar.value),
                "limit": bar.limit,
                "met": bar.is_met if result.is_quiet else None,
            }
            for bar in bars(result)
        ],
        "start_s": round_to(result.start_s),
        "engine": dict(result.engine_info),
        "resident_mb_beyond": round_to(result.resident_mb_beyond),
        "context": result.context,
        "read_gb_per_s": round_to(result.read_gb_per_s),
        "stream_weights_gb_per_s": round_to(measured.summary(("stream", "weights")).median),
        "python_ms": {name: Summary.of(values).to_json() for name, values in result.python_ms.items()},
        "memory_bytes": {str(n): value for n, value in result.memory_bytes.items()},
        "steps": {
            arm: {str(m): result.step_ms(arm, m).to_json() for m in result.num_rows} for arm in result.arms("steps")
        },
        "prefill": {
            arm: {str(n): result.prefill_tok_per_s(arm, n).to_json() for n in result.lengths(arm)}
            for arm in result.arms("prefill")
        },
        "flash_attention": {arm: dict(settings) for arm, settings in result.flash_attention.items()},
        "forerun": dict(result.own_info),
        "llama_cpp_buffers": result.llama_cpp_info["buffers"],
        "idle_cpu_share": round_to(measured.idle_cpu_share, 3),
        "other_cpu_share": round_to(measured.other_cpu_share, 3),
        "quiet": result.is_quiet,
    }


def tables(result: PeersResult) -> list[Table]:
    """Steps, prompts, and what does not compare."""
    shown = []
    for title, (header, rows) in _sections(result).items():
        table = Table(*header, title=title)
        for row in rows:
            table.add_row(*row)
        shown.append(table)
    return shown


def markdown(result: PeersResult, where: Mapping[str, Any]) -> str:
    """The result as a document of its own."""
    parts = [
        f"# forerun beside llama.cpp: {where['model']}",
        "Medians of interleaved rounds with their quartiles; both engines pinned to the same CPUs. A step is one pass "
        f"over m rows of one sequence, logits of every row. Written by `{where['command']}`.",
        *(f"## {title}\n\n{markdown_table(*section)}" for title, section in _sections(result).items()),
        "## goals",
        "\n".join(f"- {bar.line().replace('MISSED', '**missed**').replace('met   ', 'met')}" for bar in bars(result)),
        "## provenance",
        provenance_table(where),
    ]
    return "\n\n".join(parts) + "\n"


def _sections(result: PeersResult) -> dict[str, Section]:
    """Header and rows of each table, by title."""
    threads = f"{result.num_threads} threads"
    return {
        f"milliseconds per step at context {result.context}, {threads}": (
            ("engine", *(f"{m} row{'s' if m > 1 else ''}" for m in result.num_rows)),
            [(arm, *(_cell(result.step_ms(arm, m), 2) for m in result.num_rows)) for arm in result.arms("steps")],
        ),
        f"prompt tokens per second, {threads}": (
            ("engine", *(f"{n} tokens" for n in result.lengths(OWN))),
            [
                (
                    arm,
                    *(
                        _cell(result.prefill_tok_per_s(arm, n), 0) if n in result.lengths(arm) else ""
                        for n in result.lengths(OWN)
                    ),
                )
                for arm in result.arms("prefill")
            ],
        ),
        "machine and settings": (("what", "value"), _system_rows(result)),
    }


def _cell(summary: Summary, digits: int) -> str:
    return f"{summary.median:.{digits}f} ({summary.q1:.{digits}f}–{summary.q3:.{digits}f})"


def _system_rows(result: PeersResult) -> list[tuple[str, ...]]:
    stream, again = (result.measured.summary(("stream", name)).median for name in ("memory", "weights"))
    read = result.read_gb_per_s
    weights = float(result.own_info["weight_bytes"])
    rows: list[tuple[str, ...]] = [
        ("streaming read of 1 GiB", f"{stream:.1f} GB/s"),
        ("reading as much as the weights, again and again", f"{again:.1f} GB/s"),
        ("weights per step", f"{weights / 1e6:.1f} MB, so one row takes at least {weights / stream / 1e6:.2f} ms"),
        ("read by a one-row step", f"{read:.1f} GB/s, {100 * read / stream:.0f} % of streaming"),
        ("forerun's instruction set", str(result.own_info["isa"])),
        ("llama.cpp's weights", "; ".join(_model_buffers(result.llama_cpp_info["buffers"]))),
    ]
    rows += [
        (f"flash attention of {arm}", ", ".join(f"{setting} for {what}" for what, setting in settings.items()))
        for arm, settings in result.flash_attention.items()
    ]
    rows += [
        (f"Python per step, speculation {name}", f"{median(values):.3f} ms")
        for name, values in result.python_ms.items()
    ]
    rows += [
        (f"memory that a prompt of {n} adds to the loaded model", f"{size / _MIB:.1f} MiB")
        for n, size in result.memory_bytes.items()
    ]
    rows.append(("KV storage, reserved at load", f"{result.own_info['kv_bytes_per_token'] / 1024:.1f} KiB per token"))
    rows.append(("from no process to an engine that is ready", f"{result.start_s:.2f} s"))
    rows += _memory_rows(result)
    rows.append(("processor time of idle workers", f"{100 * result.measured.idle_cpu_share:.1f} %"))
    rows.append(("processor time of other processes", f"{100 * result.measured.other_cpu_share:.1f} %"))
    return rows


def _memory_rows(result: PeersResult) -> list[tuple[str, ...]]:
    weights, engine = int(result.own_info["all_weight_bytes"]), result.engine_info
    return [
        ("all weights, and KV of the engine's context", f"{weights / 1e6:.0f} MB, {engine['kv_bytes'] / 1e6:.0f} MB"),
        ("resident when ready", f"{engine['loaded_bytes'] / 1e6:.0f} MB"),
        ("resident after a prompt and an answer", f"{engine['answered_bytes'] / 1e6:.0f} MB"),
        ("resident at most while loading, with the mapped file", f"{engine['peak_bytes'] / 1e6:.0f} MB"),
    ]


def _model_buffers(buffers: list[str]) -> list[str]:
    """`AMX 95.34 MiB` of `load_tensors: AMX model buffer size = 95.34 MiB`."""
    return [
        line.removeprefix("load_tensors: ").replace(" model buffer size =", "") for line in buffers if "model" in line
    ]
