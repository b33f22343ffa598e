"""`bench spec`: its prompts, its sums and intervals, and its last line."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forerun import LLM, SamplingParams
from forerun.bench.prompts import Prompt, parse_prompts, pick, spec_bench
from forerun.bench.spec import ALL, AUTO, PLAIN, Comparison, Tally, compare_arms
from forerun.bench.spec_report import to_json
from forerun.cli.bench_spec import arms_of
from forerun.cli.main import app
from forerun.drafters.spec import Speculation
from forerun.errors import ConfigError
from tests.helpers.gguf_files import write_tiny_llama

PROMPTS = [Prompt(str(i), "ab"[i % 2], f"the cat and the dog {i} and the cat") for i in range(4)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("bench") / "tiny.gguf")


def test_spec_bench_is_whole() -> None:
    counts = Counter(prompt.category for prompt in spec_bench())
    assert sum(counts.values()) == 480
    assert len(counts) == 13
    assert {counts[name] for name in ("translation", "summarization", "qa", "math_reasoning", "rag")} == {80}
    assert sorted(counts.values())[:8] == [10] * 8


def test_picking_takes_turns_and_is_evenly_spaced() -> None:
    chosen = pick(spec_bench(), 8)
    assert Counter(prompt.category for prompt in chosen) == dict.fromkeys({p.category for p in chosen}, 8)
    assert len({prompt.category for prompt in chosen[:13]}) == 13
    assert [prompt.name for prompt in pick(PROMPTS, 1)] == ["0", "1"]
    assert len(pick(PROMPTS, 99)) == 4


def test_own_prompts() -> None:
    text = '{"prompt": "one"}\n\n{"task_id": "T/1", "prompt": "two", "category": "c"}\n{"turns": ["three", "four"]}\n'
    assert parse_prompts(text, "f") == [
        Prompt("1", "prompts", "one"),
        Prompt("T/1", "c", "two"),
        Prompt("4", "prompts", "three"),
    ]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "3", "{}", '{"turns": []}', '{"turns": [1]}', '{"prompt": ""}', '{"prompt": "a", "category": 1}'],
)
def test_lines_that_are_no_prompts_are_named(line: str) -> None:
    with pytest.raises(ConfigError, match="f, line 2 must be an object with turns"):
        parse_prompts('{"prompt": "one"}\n' + line, "f")


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="f has no prompts"):
        parse_prompts("\n", "f")


def tally(tokens: int, decode_s: float) -> Tally:
    return Tally(tokens=tokens, decode_s=decode_s, passes=tokens // 2, rows=2 * tokens)


def test_speedups_are_ratios_of_sums_and_intervals_hold_them() -> None:
    plain = [tally(100, 1.0), tally(10, 0.1), tally(100, 1.0), tally(50, 0.5)]
    fast = [tally(100, 0.5), tally(10, 0.1), tally(100, 0.25), tally(50, 0.5)]
    comparison = Comparison(PROMPTS, {PLAIN: plain, AUTO: fast})
    speedup = comparison.speedup(AUTO)
    assert speedup.value == pytest.approx((260 / 1.35) / (260 / 2.6))
    assert 1.0 <= speedup.low < speedup.value < speedup.high <= 4.0
    assert comparison.speedup(AUTO, "b") == comparison.speedup(AUTO, "b")
    assert comparison.speedup(AUTO, "b").value == pytest.approx(1.0)
    assert comparison.speedup(PLAIN).low == comparison.speedup(PLAIN).high == 1.0
    assert comparison.tally(AUTO, "a").tokens_per_pass == pytest.approx(2.0)
    assert comparison.tally(AUTO).rows_per_token == pytest.approx(2.0)


def test_answers_that_are_one_token_have_no_rate_and_no_effect() -> None:
    comparison = Comparison(PROMPTS[:2], {PLAIN: [tally(0, 0.0)] * 2, AUTO: [tally(0, 0.0)] * 2})
    assert comparison.speedup(AUTO).value == 1.0
    assert to_json(comparison)["plain_tok_per_s"] == 0.0


def test_arms_answer_alike_and_are_counted(path: Path) -> None:
    llm = LLM(path, threads=1)
    arms = {AUTO: Speculation.parse("auto"), "four": Speculation.parse("ngram:k=4,policy=fixed")}
    params = SamplingParams(max_tokens=24)
    done: list[tuple[int, int]] = []
    comparison = compare_arms(
        llm, arms, PROMPTS, params, num_repeats=2, max_s=None, is_warm=True,
        progress=lambda *amounts: done.append(amounts),
    )  # fmt: skip
    assert comparison.different == []
    assert done[-1] == (4 * 3 * 3, 4 * 3 * 3)
    plain, fixed = comparison.tally(PLAIN), comparison.tally("four")
    assert plain.tokens == fixed.tokens == comparison.tally(AUTO).tokens
    assert plain.tokens_per_pass == plain.rows_per_token == 1.0
    assert plain.rows == plain.passes == plain.tokens
    assert fixed.tokens_per_pass > 1.0
    assert fixed.trials[1] >= fixed.successes[1] >= fixed.trials[2]
    # Every accepted node is a token that needed no pass of its own.
    assert sum(fixed.successes) >= fixed.tokens - fixed.passes
    assert comparison.tally("four", ALL, comparison.warm).tokens * 2 == fixed.tokens


def test_little_time_leaves_prompts_out_but_no_category(path: Path) -> None:
    comparison = compare_arms(
        LLM(path, threads=1), {AUTO: Speculation.parse("auto")}, PROMPTS, SamplingParams(max_tokens=4),
        num_repeats=2, max_s=0.0,
    )  # fmt: skip
    assert [prompt.name for prompt in comparison.prompts] == ["0", "1"]
    assert {len(tallies) for tallies in comparison.tallies.values()} == {2}


def test_a_different_answer_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(path, threads=1)
    stream = llm.stream

    def lie(prompt: Any, params: SamplingParams, *, speculation: Speculation, **keywords: Any) -> Any:
        wrong = SamplingParams(max_tokens=params.max_tokens, temperature=5.0, seed=1)
        return stream(prompt, params if speculation.is_off else wrong, speculation=speculation, **keywords)

    monkeypatch.setattr(llm, "stream", lie)
    comparison = compare_arms(
        llm, {AUTO: Speculation.parse("auto")}, PROMPTS[:1], SamplingParams(max_tokens=9), num_repeats=1, max_s=None
    )
    assert comparison.different == [(AUTO, "0")]


def test_arms_by_name() -> None:
    assert list(arms_of(["auto"])) == ["auto"]
    assert list(arms_of(["ngram:k=2 ngram", "ngram"])) == ["auto", "ngram:k=2", "ngram"]
    assert list(arms_of(["all"]))[:2] == ["auto", "ngram"]
    with pytest.raises(ConfigError, match="'off' drafts nothing"):
        arms_of(["off"])
    with pytest.raises(ConfigError, match="unknown"):
        arms_of(["eagle9"])


def test_last_line_is_one_object_with_what_was_promised(path: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": p.text, "category": p.category}) for p in PROMPTS))
    arguments = ["bench", "spec", str(path), "--drafters", "ngram:k=2", "ngram:k=3", "--prompts", str(prompts)]
    result = CliRunner().invoke(
        app, [*arguments, "--new-tokens", "8", "--repeats", "1", "--all", "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout.splitlines()[-1])
    assert data["plain_tok_per_s"] > 0
    assert data["auto_tok_per_s"] > 0
    assert set(data["categories"]) == {"a", "b"}
    for category in data["categories"].values():
        assert category["low"] <= category["speedup"] <= category["high"]
        assert category["tokens_per_pass"] >= 1.0
    assert set(data["arms"]) == {"plain", "auto", "ngram:k=2", "ngram:k=3"}
    assert data["different"] == []
    written = {file.suffix: file for file in (tmp_path / "out").iterdir()}
    assert json.loads(written[".json"].read_text()) == data
    assert written[".png"].read_bytes().startswith(b"\x89PNG")


def test_all_and_per_category_exclude_each_other(path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "spec", str(path), "--all", "--per-category", "2"])
    assert result.exit_code != 0
