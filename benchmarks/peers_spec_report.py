"""What a comparison of whole answers with OpenVINO says: tables, Markdown and plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Self

from rich.table import Table

from benchmarks.markdown import markdown_table, provenance_table
from benchmarks.measure import Measured, round_to
from benchmarks.spec_bench_equality import first_difference
from forerun.bench.spec import ALL, Tally

PLAIN, AUTO = "forerun", "forerun auto"
OPENVINO, OPENVINO_LOOKUP = "OpenVINO", "OpenVINO prompt lookup"
LLAMA_CPP = "llama.cpp"
# Whose answers are compared with whose. Only forerun promises that the first pair is equal.
PAIRS = ((AUTO, PLAIN), (OPENVINO_LOOKUP, OPENVINO), (OPENVINO, PLAIN))
Section = tuple[tuple[str, ...], list[tuple[str, ...]]]  # header and rows of a table


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        token_ids: every token, an end-of-text id that ended it included.
        decode_s: seconds from its first token to its last.
        passes: of the target, without those over the prompt.
    """

    token_ids: tuple[int, ...]
    decode_s: float
    passes: int

    @classmethod
    def of(cls, answered: Mapping[str, Any]) -> Self:
        """From a worker's answer to `answer`."""
        return cls(tuple(answered["token_ids"]), float(answered["decode_s"]), int(answered["passes"]))

    @property
    def num_decoded(self) -> int:
        """Tokens after the first, which is the prompt's."""
        return len(self.token_ids) - 1


@dataclass(frozen=True, slots=True)
class SpecResult:
    """Everything that was measured. Set by `peers_spec.compare`.

    Attributes:
        categories, names: of each prompt.
        answers: by arm, one for each prompt.
        measured: who used the CPUs meanwhile.
        max_tokens: per answer.
        num_threads: of every arm.
        openvino_info: versions, and the settings chosen.
        llama_cpp_info: what llama.cpp says about itself; None where it took no part.
    """

    categories: tuple[str, ...]
    names: tuple[str, ...]
    answers: Mapping[str, tuple[Answer, ...]]
    measured: Measured
    max_tokens: int
    num_threads: int
    openvino_info: Mapping[str, Any]
    llama_cpp_info: dict[str, Any] | None

    def rates(self, arm: str, category: str = ALL) -> Tally:
        """The sums of one arm over a category's prompts."""
        pairs = zip(self.categories, self.answers[arm], strict=True)
        chosen = [answer for name, answer in pairs if category in (ALL, name)]
        return Tally(
            tokens=sum(answer.num_decoded for answer in chosen),
            decode_s=sum(answer.decode_s for answer in chosen),
            passes=sum(answer.passes for answer in chosen),
        )

    def shared_tokens(self, arm: str, other: str) -> list[int]:
        """By prompt, how many tokens both answers have in common from their beginning."""
        return [
            first_difference(left.token_ids, right.token_ids)
            for left, right in zip(self.answers[arm], self.answers[other], strict=True)
        ]

    def num_equal(self, arm: str, other: str) -> int:
        """How many answers are the same tokens."""
        pairs = zip(self.answers[arm], self.answers[other], strict=True)
        return sum(left.token_ids == right.token_ids for left, right in pairs)

    @property
    def is_exact(self) -> bool:
        """Whether forerun's drafts changed none of its answers."""
        return self.num_equal(AUTO, PLAIN) == len(self.names)

    @property
    def ratio(self) -> float:
        """Tokens per second of `forerun --spec auto` over OpenVINO's prompt lookup."""
        peer = self.rates(OPENVINO_LOOKUP).tok_per_s
        return self.rates(AUTO).tok_per_s / peer if peer else 0.0


def ratio_line(result: SpecResult) -> str:
    """What it comes to."""
    return f"forerun auto over OpenVINO prompt lookup, tokens per second: {result.ratio:.2f}"


def spec_json(result: SpecResult) -> dict[str, Any]:
    """The result as plain values."""
    categories = list(dict.fromkeys(result.categories))
    return {
        "arms": {
            arm: {category: _rates_json(result.rates(arm, category)) for category in (ALL, *categories)}
            for arm in result.answers
        },
        "auto_over_openvino_lookup": round_to(result.ratio),
        "equal_answers": {f"{arm} = {other}": result.num_equal(arm, other) for arm, other in PAIRS},
        "shared_tokens": {f"{arm} = {other}": result.shared_tokens(arm, other) for arm, other in PAIRS},
        "prompts": list(result.names),
        "max_tokens": result.max_tokens,
        "openvino": dict(result.openvino_info),
        "idle_cpu_share": round_to(result.measured.idle_cpu_share, 3),
        "other_cpu_share": round_to(result.measured.other_cpu_share, 3),
        "quiet": result.measured.is_quiet,
    }


def spec_tables(result: SpecResult) -> list[Table]:
    """Tally, rates by category, and what does not compare."""
    shown = []
    for title, (header, rows) in _sections(result).items():
        table = Table(title=title)
        for index, name in enumerate(header):
            table.add_column(name, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        shown.append(table)
    return shown


def spec_markdown(result: SpecResult, where: Mapping[str, Any]) -> str:
    """The result as a document of its own."""
    parts = [
        f"# forerun beside OpenVINO GenAI: {where['model']}",
        f"Greedy answers of at most {result.max_tokens} tokens to {len(result.names)} questions of Spec-Bench, one "
        "run, arms taking turns by question on the same CPUs. Rates are decode tokens over decode seconds, without the "
        "prompt's time. Quantisations differ (forerun reads the GGUF file, OpenVINO its own int4 of it), so answers "
        f"and their lengths do. Written by `{where['command']}`.",
        *(f"## {title}\n\n{markdown_table(*section)}" for title, section in _sections(result).items()),
        f"{ratio_line(result)}.",
        "## provenance",
        provenance_table(where),
    ]
    return "\n\n".join(parts) + "\n"


def _sections(result: SpecResult) -> dict[str, Section]:
    """Header and rows of each table, by title."""
    arms = list(result.answers)
    return {
        f"greedy decoding, {result.num_threads} threads": (
            ("engine", "tokens", "tokens per pass", "tokens per second", "over OpenVINO"),
            [_rates_row(result, arm) for arm in arms],
        ),
        "tokens per second by category": (
            ("category", *arms),
            [
                (
                    f"{category} ({result.categories.count(category)})",
                    *(f"{result.rates(arm, category).tok_per_s:.1f}" for arm in arms),
                )
                for category in dict.fromkeys(result.categories)
            ],
        ),
        "answers and settings": (("what", "value"), _other_rows(result)),
    }


def _rates_row(result: SpecResult, arm: str) -> tuple[str, ...]:
    rates, peer = result.rates(arm), result.rates(OPENVINO).tok_per_s
    return (
        arm,
        str(rates.tokens),
        f"{rates.tokens_per_pass:.2f}",
        f"{rates.tok_per_s:.1f}",
        f"{rates.tok_per_s / peer:.2f}" if peer else "",
    )


def _other_rows(result: SpecResult) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for arm, other in PAIRS:
        equal, shared = result.num_equal(arm, other), fmean(result.shared_tokens(arm, other))
        same = f"{equal} of {len(result.names)} answers; {shared:.0f} tokens on average before they part"
        rows.append((f"{arm} gives the tokens of {other}", same))
    info = result.openvino_info
    return [
        *rows,
        ("OpenVINO's attention when plain", str(info["attention"])),
        ("OpenVINO's prompt lookup", ", ".join(f"{name} {value}" for name, value in info["lookup"].items())),
        ("processor time of idle workers", f"{100 * result.measured.idle_cpu_share:.1f} %"),
        ("processor time of other processes", f"{100 * result.measured.other_cpu_share:.1f} %"),
    ]


def _rates_json(rates: Tally) -> dict[str, Any]:
    return {
        "tok_per_s": round_to(rates.tok_per_s),
        "tokens_per_pass": round_to(rates.tokens_per_pass),
        "num_tokens": rates.tokens,
        "decode_s": round_to(rates.decode_s),
        "passes": rates.passes,
    }
