"""Prompts to measure with: Spec-Bench, which comes with forerun, or the user's own.

Spec-Bench (Xia et al. 2024, arXiv 2401.07851, Apache-2.0) has 480 questions: 80 each of translation, summarisation,
question answering, mathematical reasoning and retrieval-augmented generation, and 80 of MT-bench in eight kinds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError

UNNAMED_CATEGORY = "prompts"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question.

    Attributes:
        name: says which one it is.
        category: prompts of a category are reported together.
        text: what is asked; of a conversation the first turn, since later ones need an answer to it.
    """

    name: str
    category: str
    text: str


def spec_bench() -> list[Prompt]:
    """All questions of Spec-Bench."""
    text = resources.files("forerun.bench").joinpath("spec_bench.jsonl").read_text(encoding="utf-8")
    return parse_prompts(text, "spec_bench.jsonl")


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file.

    Raises:
        ConfigError: the file can't be read, or a line is no prompt.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompt file {path} can't be read: {error}") from error
    return parse_prompts(text, path.name)


def parse_prompts(text: str, source: str) -> list[Prompt]:
    """Prompts from JSON lines: objects with `turns`, a list of texts, or `prompt`, a text, and perhaps a `category`.

    Args:
        text: the lines.
        source: where they come from, for messages.

    Raises:
        ConfigError: a line is something else, or there are none.
    """
    prompts = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            prompts.append(_parse(line, f"{source}, line {number}", str(number)))
    if not prompts:
        raise ConfigError(f"{source} has no prompts; each line must be an object with turns or prompt")
    return prompts


def question_of(row: Any) -> Any:
    """The question of a line's object: the first of its `turns`, or its `prompt`.

    Raises:
        LookupError, TypeError: it has neither.
    """
    return row["turns"][0] if "turns" in row else row["prompt"]


def _parse(line: str, place: str, default_name: str) -> Prompt:
    try:
        row = json.loads(line)
        text = question_of(row)
        name = row.get("question_id", row.get("task_id", default_name))
        category = row.get("category", UNNAMED_CATEGORY)
    except (ValueError, LookupError, TypeError, AttributeError):
        text = category = name = None
    if not (isinstance(text, str) and text and isinstance(category, str)):
        raise ConfigError(f"{place} must be an object with turns, a list of texts, or prompt, a text")
    return Prompt(str(name), category, text)


def pick(prompts: Sequence[Prompt], per_category: int) -> list[Prompt]:
    """At most so many prompts of each category, evenly spaced within it; the categories take turns."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    rows = []
    for group in by_category.values():
        count = min(per_category, len(group))
        rows.append([group[i * len(group) // count] for i in range(count)])
    return [row[i] for i in range(max(map(len, rows))) for row in rows if i < len(row)]
