"""`python -m benchmarks.spec_bench_equality --prompts FILE`: Spec-Bench with speculation off and on gives one output.

Spec-Bench (Xia et al. 2024, arXiv 2401.07851) has 480 questions in 13 categories; its question file is not part of this
repository. Each chosen question's first turn goes through the chat template and is answered twice by the same model in
this process, plainly and with speculation, greedily and with a seed. Token ids, text and finish reason must be equal;
the tables say what speculation did beside that. Who goes first changes from question to question.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.command import option_parser, pin, save, show
from benchmarks.markdown import markdown_table, provenance_table
from benchmarks.measure import round_to
from benchmarks.provenance import kernel_flags, sha256_of
from forerun import LLM, Completion, SamplingParams
from forerun.bench.provenance import provenance
from forerun.cli.progress import resolve
from forerun.drafters.spec import OFF, Speculation
from forerun.errors import ConfigError, ForerunError

LAWS: dict[str, dict[str, Any]] = {"greedy": {}, "temperature 0.8, seed 7": {"temperature": 0.8, "seed": 7}}
ALL = "all"
_HEADER = (
    "category", "questions", "tokens", "passes", "tau", "drafted", "accepted", "plain tok/s", "speculative tok/s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """One question of the file; later turns are left out, since they need an answer to the first."""

    question_id: int
    category: str
    text: str


@dataclass(slots=True)
class Tally:
    """Sums over the questions of one category under one law.

    Attributes:
        questions: how many.
        tokens: emitted tokens, the same both ways.
        passes: target passes after the prompt's, with speculation.
        drafted, accepted: nodes.
        plain_s, speculative_s: decode time of all tokens but each answer's first.
    """

    questions: int = 0
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    plain_s: float = 0.0
    speculative_s: float = 0.0

    def add(self, plain: Completion, speculative: Completion) -> None:
        """Takes in one question's two answers."""
        self.questions += 1
        self.tokens += speculative.stats.completion_tokens
        self.passes += speculative.stats.target_passes
        self.drafted += speculative.stats.drafted_tokens
        self.accepted += speculative.stats.accepted_tokens
        self.plain_s += plain.stats.decode_s
        self.speculative_s += speculative.stats.decode_s

    def to_json(self) -> dict[str, Any]:
        """Plain values: the sums, tokens per pass and tokens per second; 0 where nothing was decoded."""
        decoded = self.tokens - self.questions

        def rate(per: float) -> float:
            return round_to(decoded / per) if per else 0.0

        return {
            "questions": self.questions,
            "tokens": self.tokens,
            "passes": self.passes,
            "tau": rate(self.passes),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "plain_tok_per_s": rate(self.plain_s),
            "speculative_tok_per_s": rate(self.speculative_s),
        }


@dataclass(slots=True)
class Comparison:
    """What the runs gave.

    Attributes:
        tallies: by law, then by category; `ALL` is their sum.
        different: law, question and position of the first token that differs, where an answer does.
    """

    tallies: dict[str, dict[str, Tally]] = field(default_factory=lambda: {law: {ALL: Tally()} for law in LAWS})
    different: list[dict[str, Any]] = field(default_factory=list)

    def add(self, law: str, question: Question, plain: Completion, speculative: Completion) -> None:
        """Compares and counts one question's two answers."""
        by_category = self.tallies[law]
        for category in (question.category, ALL):
            by_category.setdefault(category, Tally()).add(plain, speculative)
        if outputs(plain) != outputs(speculative):
            at = first_difference(plain.token_ids, speculative.token_ids)
            self.different.append({"law": law, "question_id": question.question_id, "token": at})


def outputs(completion: Completion) -> tuple[Any, ...]:
    """What must be equal."""
    return completion.token_ids, completion.text, completion.finish_reason


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length where one continues the other."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def main() -> int:
    """Runs the comparison; the last line on standard output is one JSON document. Exit code 1 when answers differ."""
    arguments = _parser().parse_args()
    console = Console(stderr=True)
    try:
        questions = chosen(read_questions(arguments.prompts), arguments.num_prompts)
        speculation = Speculation.parse(arguments.spec)
        model_path = resolve(arguments.model)
        cpus = pin(arguments.threads)
        llm = LLM(model_path, threads=arguments.threads)
        comparison = compare(llm, questions, speculation, arguments.max_tokens, console)
    except (ForerunError, OSError) as error:
        console.print(f"spec_bench_equality: {error}", style="red", markup=False, highlight=False)
        return 1
    document = {
        **summary(comparison),
        "speculation": str(speculation),
        "max_tokens": arguments.max_tokens,
        "question_ids": [question.question_id for question in questions],
        "provenance": _provenance(arguments, model_path, cpus),
    }
    save(f"spec_bench_equality-{model_path.stem}", document, _markdown(document))
    show(*(_table(law, document) for law in LAWS))
    print(_verdict_line(document))
    print(json.dumps(document))
    return 0 if document["equal"] else 1


def read_questions(path: Path) -> list[Question]:
    """All questions of a Spec-Bench file: JSON lines with question_id, category and turns.

    Raises:
        ConfigError: a line is something else.
        OSError: the file can't be read.
    """
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            question = Question(int(row["question_id"]), str(row["category"]), str(row["turns"][0]))
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{path.name}, line {number} must be an object with question_id, category and turns"
            ) from error
        questions.append(question)
    return questions


def chosen(questions: Sequence[Question], num_prompts: int) -> list[Question]:
    """So many questions: as many of each category as of the others, evenly spaced within it, in the file's order.

    A category that has fewer gives what it has; what doesn't divide goes to the categories that come first.

    Raises:
        ConfigError: there are fewer questions.
    """
    if not 1 <= num_prompts <= len(questions):
        raise ConfigError(f"--num-prompts is {num_prompts}, but must be between 1 and {len(questions)}")
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    shares = dict.fromkeys(by_category, 0)
    while (left := num_prompts - sum(shares.values())) > 0:
        with_more = [name for name in shares if shares[name] < len(by_category[name])]
        for name in with_more[:left]:
            shares[name] += 1
    picked = {
        group[i * len(group) // share] for name, group in by_category.items() for share in [shares[name]]
        for i in range(share)
    }  # fmt: skip
    return [question for question in questions if question in picked]


def compare(
    llm: LLM, questions: Sequence[Question], speculation: Speculation, max_tokens: int, console: Console
) -> Comparison:
    """Answers every question both ways under every law."""
    comparison = Comparison()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("answering", total=len(questions) * len(LAWS) * 2)

        for number, question in enumerate(questions):
            messages = [{"role": "user", "content": question.text}]
            for law, parameters in LAWS.items():
                params = SamplingParams(max_tokens=max_tokens, **parameters)
                ways = {"plain": OFF, "speculative": speculation}
                answers = {}
                for name in reversed(ways) if number % 2 else ways:
                    answers[name] = llm.chat(messages, params, speculation=ways[name])
                    progress.advance(task)
                comparison.add(law, question, **answers)
    return comparison


def summary(comparison: Comparison) -> dict[str, Any]:
    """Plain values of the report."""
    return {
        "equal": not comparison.different,
        "different": comparison.different,
        "laws": {
            law: {category: tally.to_json() for category, tally in _all_last(tallies).items()}
            for law, tallies in comparison.tallies.items()
        },
    }


def _all_last(tallies: dict[str, Tally]) -> dict[str, Tally]:
    return {category: tally for category, tally in tallies.items() if category != ALL} | {ALL: tallies[ALL]}


def _parser() -> argparse.ArgumentParser:
    parser = option_parser("spec_bench_equality")
    parser.prog = "python -m benchmarks.spec_bench_equality"
    parser.add_argument("--prompts", type=Path, required=True, help="the question file of Spec-Bench, JSON lines")
    parser.add_argument(
        "--num-prompts", type=int, default=50, help="questions, spread over the categories (default: 50)"
    )
    parser.add_argument("--spec", default="ngram:k=8", help="what to speculate with (default: ngram:k=8)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per answer (default: 128)")
    return parser


def _provenance(arguments: argparse.Namespace, model_path: Path, cpus: list[int]) -> dict[str, Any]:
    # The file's name and hash say which questions they were; where it lies on this machine is nobody's business.
    words = [arguments.prompts.name if word == str(arguments.prompts) else word for word in sys.argv[1:]]
    return {
        **provenance(model_path),
        "command": shlex.join(["python", "-m", "benchmarks.spec_bench_equality", *words]),
        "cpu_flags": kernel_flags(Path("/proc/cpuinfo").read_text()),
        "threads": arguments.threads,
        "pinned_to": cpus,
        "load_average": [round_to(value, 3) for value in os.getloadavg()],  # above the threads: others were at work
        "model_sha256": sha256_of(model_path),
        "prompts_sha256": sha256_of(arguments.prompts),
    }


def _verdict_line(document: dict[str, Any]) -> str:
    num_answers = len(document["question_ids"]) * len(LAWS)
    if document["equal"]:
        return f"equal: {num_answers} answers of {num_answers}, token by token"
    first = document["different"][0]
    return (
        f"DIFFERENT: {len(document['different'])} answers of {num_answers}, first question {first['question_id']} "
        f"({first['law']}) at token {first['token']}"
    )


def _rows(tallies: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            category,
            *(str(part[name]) for name in ("questions", "tokens", "passes")),
            f"{part['tau']:.2f}",
            str(part["drafted"]),
            str(part["accepted"]),
            f"{part['plain_tok_per_s']:.1f}",
            f"{part['speculative_tok_per_s']:.1f}",
        )
        for category, part in tallies.items()
    ]


def _table(law: str, document: dict[str, Any]) -> Table:
    table = Table(title=f"Spec-Bench, {document['speculation']}, {law}")
    for name in _HEADER:
        table.add_column(name, justify="left" if name == "category" else "right")
    for row in _rows(document["laws"][law]):
        table.add_row(*row, style="bold" if row[0] == ALL else None)
    return table


def _markdown(document: dict[str, Any]) -> str:
    where = document["provenance"]
    parts = [
        f"# Spec-Bench, speculation off and on: {where['model']}",
        f"{len(document['question_ids'])} questions of Spec-Bench, the first turn of each, at most "
        f"{document['max_tokens']} tokens; `{document['speculation']}`. tau is tokens per target pass. "
        f"Written by `{where['command']}`.",
        f"- {_verdict_line(document)}",
    ]
    for law in LAWS:
        parts += [f"## {law}", markdown_table(_HEADER, _rows(document["laws"][law]))]
    return "\n\n".join([*parts, provenance_table(where)]) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
