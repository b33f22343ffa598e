"""Measurements on a tiny random model: what they count, and that they see a difference that is there."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import forerun
from forerun.bench.fidelity import compare, measure_fidelity, text_token_ids
from forerun.bench.kernels import matrix_groups, time_group
from forerun.bench.provenance import _checkout, provenance
from forerun.bench.rows import bind, run_batch
from forerun.bench.speed import WORKLOADS, compare_speed
from forerun.bench.steps import step_seconds
from forerun.bench.timing import median_seconds
from forerun.cli import main
from forerun.cli.info import describe
from forerun.engine.llm import LLM
from forerun.errors import RequestError
from forerun.models.loader import load_model
from tests.helpers.gguf_files import write_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    return write_tiny_llama(folder / "tiny.gguf", fmt="q4_1", head_fmt="q8_0", context_length=2048)


def test_matrices_are_grouped_by_shape_and_format(tiny: Path) -> None:
    groups = matrix_groups(load_model(tiny))
    told = {(group.name, group.weights[0].shape, group.weights[0].format, len(group.weights)) for group in groups}
    assert told == {
        ("token_embd", (320, 64), "q8_0", 1),
        ("attn_q/attn_output", (64, 64), "q4_1", 4),
        ("attn_k/attn_v", (32, 64), "q4_1", 4),
        ("ffn_gate/ffn_up", (128, 64), "q4_1", 4),
        ("ffn_down", (64, 128), "q4_1", 2),
    }


def test_a_group_is_timed_for_every_number_of_rows(tiny: Path) -> None:
    model = load_model(tiny)
    timing = time_group(matrix_groups(model)[0], model, (1, 5, 16), repeats=2, num_threads=1)
    assert set(timing.seconds) == {1, 5, 16}
    assert all(seconds > 0 for seconds in timing.seconds.values())
    assert timing.to_json()["bytes"] == 320 * 64 // 32 * 34


def test_median_ignores_an_outlier_and_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 10.0, 11.0, 20.0, 99.0])
    runs: list[str] = []
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert median_seconds({"a": lambda: runs.append("a")}, repeats=3) == {"a": 1.0}
    assert runs == ["a"] * 4


def test_a_model_equals_itself_and_not_its_quantised_form(tiny: Path) -> None:
    same = measure_fidelity(tiny, "f32", "f32", 1)
    assert (same.kl, same.top1_agreement) == (0.0, 1.0)
    assert same.perplexity == same.reference_perplexity
    assert same.num_tokens > 300

    worse = write_tiny_llama(tiny.with_name("f32.gguf"), fmt="f32", context_length=2048)
    quantised = measure_fidelity(worse, "q4", "f16", 1)
    assert 1e-6 < quantised.kl < 1.0
    assert quantised.top1_agreement < 1.0


def test_fidelity_is_the_definition_of_kl(tiny: Path) -> None:
    """Against a plain sum over the vocabulary, on a text that needs more than one pass."""
    served, reference = load_model(tiny), load_model(tiny, "f32")
    tokens = text_token_ids(served, 40)
    told = compare(bind(served, 40, 32, "f16", 1), bind(reference, 40, 32, "f32", 1), tokens)

    laws = []
    for model, kv_type in ((served, "f16"), (reference, "f32")):
        executor = bind(model, 40, 64, kv_type, 1)
        logits = executor.forward(run_batch(np.array(tokens, np.int32), 0, 40, 40)).logits[:39].astype(np.float64)
        laws.append(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True))
    q, p = laws
    assert told.kl == pytest.approx(np.mean(np.sum(p * np.log(p / q), axis=1)), rel=1e-9)
    assert told.perplexity == pytest.approx(np.exp(-np.mean(np.log(q[np.arange(39), tokens[1:]]))), rel=1e-9)
    assert told.num_tokens == 39


def test_steps_follow_a_context_that_fits(tiny: Path) -> None:
    model = load_model(tiny)
    seconds = step_seconds(model, 70, (1, 4), repeats=2, kv_type="f16", num_threads=1)
    assert set(seconds) == {1, 4}
    with pytest.raises(RequestError, match="context is 2045"):
        step_seconds(model, 2045, (1, 4), repeats=2, kv_type="f16", num_threads=1)


def test_speed_compares_the_same_tokens(tiny: Path) -> None:
    rows = compare_speed(LLM(tiny, threads=1), "ngram:k=4", max_tokens=24, repeats=1)
    assert [row.workload for row in rows] == list(WORKLOADS)
    assert all(row.is_equal for row in rows)
    assert all(row.tau >= 1 and row.plain_tok_per_s > 0 for row in rows)


def test_info_counts_what_a_token_costs(tiny: Path) -> None:
    model = load_model(tiny)
    told = describe(model, "f32")
    assert told.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert told.tensors_by_format == {"q4_1": 14, "f32": 5, "q8_0": 1}
    assert told.quantisation == "q4_1"
    assert told.bytes_per_token == told.weight_bytes
    assert told.arithmetic_intensity == pytest.approx(2 * told.parameters / told.weight_bytes)

    untied = describe(load_model(write_tiny_llama(tiny.with_name("untied.gguf"), tied=False)), "f16")
    assert untied.bytes_per_token == untied.weight_bytes - 320 * 64 * 4


def test_provenance_knows_the_checkout_that_it_was_installed_from(tmp_path: Path) -> None:
    root, package = Path(__file__).parents[2], Path(forerun.__file__).parent
    assert _checkout(package) == root
    assert _checkout(root / "src" / "forerun") == root
    copy = Path(shutil.copytree(package, tmp_path / "forerun", ignore=shutil.ignore_patterns("*.so")))
    assert _checkout(copy) == root
    (copy / "types.py").write_text("changed = True\n")
    assert _checkout(copy) is None


def test_provenance_names_the_file_and_the_machine(tiny: Path) -> None:
    told = provenance(tiny)
    assert (told["model"], told["model_bytes"]) == ("tiny.gguf", tiny.stat().st_size)
    assert told["cpus"] >= 1
    assert told["cpu"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["kernels", "--repeats", "1"],
        ["decode", "--repeats", "1", "--runs", "1", "--max-tokens", "8", "--context", "16"],
    ],
)
def test_bench_ends_with_one_json_line(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr("forerun.bench.timing.stream_bytes_per_s", lambda num_threads: 1e9)
    monkeypatch.setattr(sys, "argv", ["forerun", "bench", arguments[0], str(tiny), *arguments[1:], "--threads", "1"])
    with pytest.raises(SystemExit) as ended:
        main.run()
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    told = json.loads(out.splitlines()[-1])
    assert told["bench"] == arguments[0]
    assert told["provenance"]["model"] == "tiny.gguf"


def test_bench_decode_needs_a_drafter(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["forerun", "bench", "decode", str(tiny), "--spec", "ngram:k=0"])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 2
    assert "must name a drafter" in capsys.readouterr().err
