"""The arithmetic behind benchmarks/: a wrong quartile or a swapped arm would mislead silently."""

from __future__ import annotations

import hashlib
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.corpus import windows_text
from benchmarks.environment import peers_dir
from benchmarks.fidelity import Differing, differing, distance, joined
from benchmarks.markdown import markdown_table
from benchmarks.measure import Measured, Summary, Turn, busy_seconds, interleave
from benchmarks.peers_report import OWN, PEER, PeersResult, bars, markdown, summary_json
from benchmarks.provenance import kernel_flags, sha256_of


class IdleWorker:
    """Uses so much processor time whenever another has a turn."""

    def __init__(self, name: str, ticks_s: float = 0.0) -> None:
        self.name = name
        self._times = (number * ticks_s for number in count())

    def cpu_seconds(self) -> float:
        return next(self._times)


def test_summary_interpolates_quartiles() -> None:
    assert Summary.of([4.0, 1.0, 2.0, 3.0]) == Summary(2.5, 1.75, 3.25, 4)
    assert Summary.of([7.0]) == Summary(7.0, 7.0, 7.0, 1)


def test_differing_positions_carry_what_each_engine_thinks() -> None:
    own = np.array([[1.0, 0.0, 0.0], [2.0, 1.5, 0.0]], np.float32)
    peer = np.array([[3.0, 0.0, 0.0], [1.0, 1.25, 0.0]], np.float32)
    reference = np.array([[0.0, 9.0, 0.0], [1.0, 1.125, 0.0]], np.float32)
    assert differing(4, own, peer, reference) == [Differing(4, 1, (0, 1), (0.5, 0.25, -0.125))]
    assert differing(4, own, own, reference) == []


def test_units_keep_the_quartiles_and_rates_swap_them() -> None:
    assert Summary(2.0, 1.0, 4.0, 7).scaled(10) == Summary(20.0, 10.0, 40.0, 7)
    assert Summary(2.0, 1.0, 4.0, 7).inverted(8) == Summary(4.0, 2.0, 8.0, 7)


def test_rounds_alternate_direction_and_drop_the_warm_up() -> None:
    calls: list[str] = []
    workers: list[Any] = [IdleWorker("a"), IdleWorker("b")]

    def turn(name: str, worker: Any, rounds: int, has_warm_up: bool) -> Turn:
        values = count()  # the warm-up gives 0

        def run() -> list[float]:
            calls.append(name)
            value = float(next(values))
            return [value, value, value + 100]

        return Turn((name,), worker, run, rounds, has_warm_up)

    measured = interleave([turn("a", workers[0], 3, True), turn("b", workers[1], 2, False)])
    assert calls == ["a", "a", "b", "b", "a", "a"]
    assert measured.values == {("a",): [1.0, 2.0, 3.0], ("b",): [0.0, 1.0]}
    assert measured.idle_cpu_share == 0.0


def test_a_spinning_idle_worker_is_noticed() -> None:
    busy: Any = IdleWorker("busy", ticks_s=0.5)
    measured = interleave([Turn(("a",), busy, lambda: [1.0], 1), Turn(("b",), IdleWorker("b"), lambda: [1.0], 1)])  # type: ignore[arg-type]
    assert measured.idle_cpu_share > 1.0


def result(own_ms: dict[int, float], peer_one_row_ms: float, other_cpu_share: float = 0.0) -> PeersResult:
    values: dict[Any, list[float]] = {("steps", OWN, m): [ms / 1e3] for m, ms in own_ms.items()}
    values |= {("steps", PEER, m): [peer_one_row_ms * m / 1e3] for m in own_ms}
    values |= {("prefill", OWN, 512): [0.125], ("prefill", PEER, 512): [0.5]}
    values |= {("stream", "memory"): [40.0], ("stream", "weights"): [80.0]}
    return PeersResult(
        model="smollm2-135m-instruct-q4_1",
        measured=Measured(values, 0.0, other_cpu_share),
        own_info={"weight_bytes": 96e6, "all_weight_bytes": 98e6, "kv_bytes_per_token": 1024, "isa": "avx2"},
        llama_cpp_info={"buffers": []},
        flash_attention={PEER: {"steps": "off", "prefill": "on"}},
        python_ms={"off": [0.1, 0.1], "ngram": [0.125, 0.375]},
        memory_bytes={512: 1 << 20},
        engine_info={"kv_bytes": 2_000_000, "loaded_bytes": 0, "answered_bytes": 310_000_000, "peak_bytes": 0},
        start_s=2.0,
        num_rows=tuple(own_ms),
        context=256,
        num_threads=2,
    )


def test_busy_time_is_that_of_our_cpus_and_leaves_idle_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 2})
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    line = "{} 100 10 20 5000 6000 1 2 3 900 900\n"  # the last two are guests, which user and nice hold already
    assert busy_seconds("".join(map(line.format, ("cpu", "cpu0", "cpu1", "cpu2")))) == pytest.approx(2 * 1.36)


def test_a_disturbed_run_does_not_count_as_quiet() -> None:
    assert result({1: 4.0}, 10.0).is_quiet
    disturbed = result({1: 4.0, 4: 6.0, 8: 9.0}, 10.0, other_cpu_share=0.2)
    assert not disturbed.is_quiet
    assert {bar["met"] for bar in summary_json(disturbed)["bars"]} == {None}
    assert {bar.line(disturbed.is_quiet)[:4] for bar in bars(disturbed)} == {"void"}


def test_goals_compare_with_one_row_of_the_peer() -> None:
    # The peer takes 10 ms for one row and 80 ms for eight: eight rows are measured against the 10.
    measured = result({1: 4.0, 4: 6.0, 8: 9.0}, 10.0)
    outcome = {bar.what: (bar.value, bar.is_met) for bar in bars(measured)}
    assert list(outcome.values()) == [
        (pytest.approx(0.4), True),
        (pytest.approx(0.6), True),
        (pytest.approx(0.9), False),
        (pytest.approx(4.0), True),
        (0.25, True),
        (2.0, False),
        (pytest.approx(210.0), False),
    ]


def test_the_json_line_names_forerun_first() -> None:
    document = summary_json(result({1: 4.0, 4: 6.0, 8: 9.0}, 10.0))
    assert document["step_ms"] == {"1": [4.0, 10.0], "4": [6.0, 40.0], "8": [9.0, 80.0]}
    assert document["prefill512_tok_per_s"] == [4096.0, 1024.0]
    assert document["stream_gb_per_s"] == 40.0
    assert document["python_ms_per_step"] == 0.25
    assert document["read_gb_per_s"] == 24.0


def test_the_document_has_every_arm_goal_and_origin() -> None:
    text = markdown(result({1: 4.0, 4: 6.0, 8: 9.0}, 10.0), {"model": "m.gguf", "command": "run it", "commit": "abc"})
    assert "| forerun | 4.00 (4.00–4.00) | 6.00 (6.00–6.00) | 9.00 (9.00–9.00) |" in text
    assert "| llama.cpp | 1024 (1024–1024) |" in text
    assert "- **missed**  8 rows over llama.cpp's one: 0.900, goal at most 0.80" in text
    assert "| commit | abc |" in text


def test_distance_is_the_kl_from_the_reference() -> None:
    reference = np.log(np.array([[0.5, 0.5], [0.75, 0.25]], np.float32))
    served = np.log(np.array([[0.75, 0.25], [0.75, 0.25]], np.float32)) + 3  # a constant changes no probability
    parts = distance(reference, served)
    # 0.5 ln(0.5 / 0.75) + 0.5 ln(0.5 / 0.25), float32 inputs
    assert parts.kl == pytest.approx([0.14384, 0.0], abs=1e-5)
    assert parts.is_same_top.tolist() == [True, True]
    assert joined([parts, parts]).mean_kl == pytest.approx(parts.mean_kl)


def test_windows_are_distinct_and_long_enough() -> None:
    windows = windows_text(16, 256)
    assert len({text[:100] for text in windows}) == 16
    assert min(map(len, windows)) >= 2048
    with pytest.raises(ValueError, match="topics are long enough"):
        windows_text(10_000, 256)


def test_kernel_flags_are_those_that_choose_kernels() -> None:
    cpuinfo = "model name\t: X\nflags\t\t: fpu avx2 sse amx_int8 avx512_vnni\nbugs\t\t: none\n"
    assert kernel_flags(cpuinfo) == ["avx2", "avx512_vnni", "amx_int8"]
    assert kernel_flags("no such line") == []


def test_sha256_is_of_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"weights" * 100_000)
    assert sha256_of(path) == hashlib.sha256(b"weights" * 100_000).hexdigest()


def test_peers_live_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FORERUN_PEERS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert peers_dir() == tmp_path / "forerun" / "peers"
    monkeypatch.setenv("FORERUN_PEERS_DIR", str(tmp_path / "elsewhere"))
    assert peers_dir() == tmp_path / "elsewhere"


def test_a_pipe_in_a_cell_does_not_split_the_table() -> None:
    assert markdown_table(("a", "b"), [("1 | 2", "3")]) == "| a | b |\n| --- | --- |\n| 1 · 2 | 3 |"
