"""What benchmarks/spec_bench_equality.py chooses, compares and counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.spec_bench_equality import (
    ALL,
    LAWS,
    Comparison,
    Question,
    chosen,
    first_difference,
    read_questions,
    summary,
)
from forerun import Completion, ConfigError
from forerun.engine.completion import Stats

GREEDY, SAMPLED = LAWS


def questions(**sizes: int) -> list[Question]:
    names = [(name, number) for name, size in sizes.items() for number in range(size)]
    return [Question(index, name, f"{name} {number}") for index, (name, number) in enumerate(names)]


def completion(*token_ids: int, accepted: int = 0, passes: int = 4, decode_s: float = 2.0) -> Completion:
    stats = Stats(3, 0, len(token_ids), passes, accepted + 1, accepted, 0.5, decode_s)
    return Completion((1, 2, 3), token_ids, str(token_ids), "length", 7, None, stats)


def test_questions_are_spread_over_categories_and_within_them() -> None:
    everything = questions(long=80, short=10, tiny=1)
    picked = chosen(everything, 10)
    assert [question.text for question in picked] == [
        "long 0", "long 16", "long 32", "long 48", "long 64", "short 0", "short 2", "short 5", "short 7", "tiny 0",
    ]  # fmt: skip
    assert chosen(everything, 91) == everything
    assert [question.category for question in chosen(everything, 2)] == ["long", "short"]
    for number in (0, 92):
        with pytest.raises(ConfigError, match="must be between 1 and 91"):
            chosen(everything, number)


def test_a_file_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    rows = [{"question_id": 81, "category": "writing", "turns": ["first", "second"]}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert read_questions(path) == [Question(81, "writing", "first")]
    path.write_text('{"question_id": 81, "category": "writing", "turns": []}\n')
    with pytest.raises(ConfigError, match=r"questions\.jsonl, line 1"):
        read_questions(path)


def test_answers_that_differ_are_found_and_placed() -> None:
    assert first_difference((1, 2, 3), (1, 2, 3, 4)) == 3
    assert first_difference((1, 2, 3), (1, 5, 3)) == 1
    comparison = Comparison()
    question = Question(9, "qa", "")
    comparison.add(GREEDY, question, completion(1, 2, 3), completion(1, 2, 3, accepted=1, passes=1))
    assert summary(comparison)["equal"]
    comparison.add(SAMPLED, question, completion(1, 2, 3), completion(1, 2, 4))
    assert not summary(comparison)["equal"]
    assert summary(comparison)["different"] == [{"law": SAMPLED, "question_id": 9, "token": 2}]


def test_sums_and_rates() -> None:
    comparison = Comparison()
    for category in ("qa", "rag", "qa"):
        plain, fast = completion(*range(9), passes=8), completion(*range(9), accepted=4, decode_s=0.5)
        comparison.add(GREEDY, Question(1, category, ""), plain, fast)
    laws = summary(comparison)["laws"]
    assert list(laws[GREEDY]) == ["qa", "rag", ALL]
    assert laws[GREEDY]["qa"] == {
        "questions": 2, "tokens": 18, "passes": 8, "tau": 2.0, "drafted": 10, "accepted": 8,
        "plain_tok_per_s": 4.0, "speculative_tok_per_s": 16.0,
    }  # fmt: skip
    assert laws[GREEDY][ALL]["questions"] == 3
    assert laws[SAMPLED] == {ALL: dict.fromkeys(laws[GREEDY][ALL], 0)}
