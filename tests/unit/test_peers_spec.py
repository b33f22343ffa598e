"""What `scripts/bench peers --with openvino` counts, compares, orders and keeps; the peer itself isn't needed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import environment, openvino_env, vllm_env
from benchmarks.arms import Crew
from benchmarks.environment import InstallError, ensure_environment, run_logged
from benchmarks.measure import Measured
from benchmarks.peers import at_least_one, peer_names
from benchmarks.peers_spec import Settings, compare
from benchmarks.peers_spec_report import (
    AUTO,
    LLAMA_CPP,
    OPENVINO,
    OPENVINO_LOOKUP,
    PLAIN,
    Answer,
    SpecResult,
    ratio_line,
    spec_json,
    spec_markdown,
    spec_tables,
)
from benchmarks.wire import WorkerError
from forerun.bench.prompts import Prompt

QUIET = Console(quiet=True)


def result(answers: dict[str, list[Answer]], other_cpu_share: float = 0.0) -> SpecResult:
    return SpecResult(
        categories=("qa", "rag", "qa"),
        names=("1", "2", "3"),
        answers={name: tuple(rows) for name, rows in answers.items()},
        measured=Measured({}, 0.0, other_cpu_share),
        max_tokens=5,
        num_threads=2,
        openvino_info={"attention": "SDPA", "lookup": {"num_assistant_tokens": 5, "max_ngram_size": 3}},
        llama_cpp_info=None,
    )


def four_arms() -> dict[str, list[Answer]]:
    ids = [(1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (7,)]
    return {
        PLAIN: [Answer(row, 2.0 * (len(row) > 1), len(row) - 1) for row in ids],
        AUTO: [Answer(ids[0], 0.5, 2), Answer(ids[1], 0.5, 1), Answer(ids[2], 0.0, 0)],
        OPENVINO: [Answer((1, 2, 9, 4, 5), 4.0, 4), Answer((1, 2, 3), 4.0, 2), Answer((8, 8), 2.0, 1)],
        OPENVINO_LOOKUP: [Answer((1, 2, 9, 4, 5), 2.0, 2), Answer((1, 2, 4), 1.0, 2), Answer((8, 8), 1.0, 1)],
    }


def test_rates_are_decode_tokens_over_decode_seconds_and_passes() -> None:
    measured = result(four_arms())
    plain, auto = measured.rates(PLAIN), measured.rates(AUTO)
    assert (plain.tokens, plain.tok_per_s, plain.tokens_per_pass) == (8, 2.0, 1.0)
    assert (auto.tokens, auto.tok_per_s) == (8, 8.0)
    assert auto.tokens_per_pass == pytest.approx(8 / 3)
    assert measured.rates(OPENVINO_LOOKUP).tok_per_s == pytest.approx(7 / 4)
    assert measured.rates(AUTO, "rag").tokens_per_pass == 4.0
    assert measured.rates(AUTO, "qa").tok_per_s == 8.0
    assert measured.ratio == pytest.approx(8 / (7 / 4))
    assert ratio_line(measured).endswith("4.57")


def test_answers_are_compared_token_by_token() -> None:
    measured = result(four_arms())
    assert measured.is_exact
    assert measured.num_equal(OPENVINO_LOOKUP, OPENVINO) == 2
    assert measured.shared_tokens(OPENVINO, PLAIN) == [2, 3, 0]
    arms = four_arms()
    arms[AUTO][1] = Answer((1, 2, 3, 4, 6), 0.5, 1)
    assert not result(arms).is_exact


def test_the_document_and_the_json_line_hold_every_figure() -> None:
    measured = result(four_arms())
    text = spec_markdown(measured, {"model": "m.gguf", "command": "run it", "openvino": "2026"})
    assert "| forerun auto | 8 | 2.67 | 8.0 | 11.43 |" in text
    assert "| OpenVINO prompt lookup | 7 | 1.40 | 1.8 | 2.50 |" in text
    assert "| qa (2) | 2.0 | 8.0 | 0.8 | 1.7 |" in text
    assert "| OpenVINO gives the tokens of forerun | 0 of 3 answers; 2 tokens on average before they part |" in text
    assert "forerun auto over OpenVINO prompt lookup, tokens per second: 4.57." in text
    assert "| openvino | 2026 |" in text
    document = spec_json(measured)
    assert document["auto_over_openvino_lookup"] == 4.5714
    assert document["arms"][OPENVINO]["all"] == {
        "tok_per_s": 0.7, "tokens_per_pass": 1.0, "num_tokens": 7, "decode_s": 10.0, "passes": 7
    }  # fmt: skip
    assert document["equal_answers"] == {
        "forerun auto = forerun": 3, "OpenVINO prompt lookup = OpenVINO": 2, "OpenVINO = forerun": 0,
    }  # fmt: skip
    assert document["quiet"]
    assert not spec_json(result(four_arms(), other_cpu_share=0.2))["quiet"]
    assert len(spec_tables(measured)) == 3


def test_answers_of_one_token_decode_nothing() -> None:
    nothing = {name: [Answer((3,), 0.0, 0)] * 3 for name in four_arms()}
    assert result(nothing).rates(OPENVINO).tok_per_s == 0.0
    assert result(nothing).ratio == 0.0
    assert "| OpenVINO | 0 | 0.00 | 0.0 |  |" in spec_markdown(result(nothing), {"model": "m", "command": "c"})


def test_numbers_are_at_least_one() -> None:
    assert at_least_one("3") == 3
    for text in ("0", "-1", "x"):
        with pytest.raises(ValueError, match=text):
            at_least_one(text)


def test_peers_are_named_with_commas() -> None:
    assert peer_names("llama") == ("llama",)
    assert peer_names("openvino, llama,openvino") == ("openvino", "llama")
    for text in ("", "llama,vllm"):
        with pytest.raises(argparse.ArgumentTypeError, match="llama, openvino"):
            peer_names(text)


class FakeWorker:
    """Answers with the prompt's ids, slower under one attention than under the other."""

    def __init__(self, name: str, log: list[tuple[str, str]], first_id: int) -> None:
        self.name = name
        self._log = log
        self._first_id = first_id
        self.is_closed = False

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        self._log.append((self.name, op))
        if op == "prompt_token_ids":
            ids = [[ord(letter) for letter in text] for text in arguments["texts"]]
            return {"token_ids": ids, "eos_ids": [0, 2]}
        if op == "answer":
            assert arguments["eos_ids"] == [0, 2]
            seconds = 2.0 if self.name.endswith("attention PA") else 1.0
            ids = [self._first_id, *arguments["token_ids"]][: arguments["max_tokens"]]
            self._log[-1] = (self.name, arguments.get("spec", ""))
            return {"token_ids": ids, "decode_s": seconds, "passes": len(ids) - 1}
        return {"version": "1", "runtime": "2"}

    def cpu_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        self.is_closed = True


class FakeCrew(Crew):
    def __init__(self, peer_first_id: int = 50) -> None:
        super().__init__(None, Path("python"))
        self.log: list[tuple[str, str]] = []
        self.peer_first_id = peer_first_id

    def forerun(self, name: str, env: Any = None) -> Any:
        return self._start(FakeWorker(name, self.log, 50))  # type: ignore[arg-type]

    def openvino(self, name: str) -> Any:
        return self._start(FakeWorker(name, self.log, self.peer_first_id))  # type: ignore[arg-type]


PROMPTS = [Prompt(str(number), "qa", text) for number, text in enumerate(["abc", "de", "fgh", "i", "jk"])]
SETTINGS = Settings(num_threads=2, max_tokens=3, lookup={"num_assistant_tokens": 5, "max_ngram_size": 3})


def test_every_arm_answers_every_prompt_and_who_goes_first_changes() -> None:
    with FakeCrew() as crew:
        measured = compare(crew, Path("m.gguf"), Path("folder"), PROMPTS, SETTINGS, QUIET)
    assert measured.answers[PLAIN][1].token_ids == (50, ord("d"), ord("e"))
    assert {len(rows) for rows in measured.answers.values()} == {len(PROMPTS)}
    assert list(measured.answers) == [PLAIN, AUTO, OPENVINO, OPENVINO_LOOKUP]
    assert LLAMA_CPP not in measured.answers
    assert measured.openvino_info["attention"] == "SDPA"
    forgot = crew.log.index((PLAIN, "forget"))
    answers = crew.log[forgot + 1 :]
    plain = (f"{OPENVINO}, attention SDPA", "")
    order = [(PLAIN, "off"), (PLAIN, "auto"), plain, (OPENVINO_LOOKUP, "")]
    assert answers == [order[(start + i) % 4] for start in range(5) for i in range(4)]
    # Whatever an arm loads or learns, it did before that.
    assert {(PLAIN, "auto"), plain, (OPENVINO_LOOKUP, "")} <= set(crew.log[:forgot])


def test_another_model_is_noticed() -> None:
    with FakeCrew(peer_first_id=51) as crew, pytest.raises(WorkerError, match="0 of 5 prompts"):
        compare(crew, Path("m.gguf"), Path("folder"), PROMPTS, SETTINGS, QUIET)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_PEERS_DIR", str(tmp_path))
    return tmp_path


def test_an_environment_is_made_once_for_each_recipe(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", lambda command, check: None)
    made: list[Path] = []

    def broken(python: Path) -> None:
        raise InstallError("no network")

    assert ensure_environment("peer", "v1", made.append) == home / "peer" / "bin" / "python"
    ensure_environment("peer", "v1", made.append)
    assert len(made) == 1
    with pytest.raises(InstallError):
        ensure_environment("peer", "v2", broken)
    ensure_environment("peer", "v2", made.append)  # what failed is not taken for made
    ensure_environment("peer", "v1", made.append)
    assert len(made) == 3


def test_a_command_that_fails_names_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run_logged(["sh", "-c", "echo [1/2] $GREETING"], "greeting", log, QUIET, env={"GREETING": "hello"})
    assert log.read_text() == "[1/2] hello\n"
    with pytest.raises(InstallError, match=f"greeting failed; see {log}"):
        run_logged(["sh", "-c", "echo no >&2; exit 3"], "greeting", log, QUIET)
    assert log.read_text() == "no\n"


def test_a_model_is_exported_once_for_each_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = home / "tiny.gguf"
    model.write_bytes(b"weights")
    runs: list[list[str]] = []

    def export(command: list[str], *_: Any, **__: Any) -> None:
        runs.append(command)
        (Path(command[-2]) / "openvino_model.xml").touch()

    monkeypatch.setattr(environment, "run_logged", export)
    folder = openvino_env.ensure_exported(model, Path("python"), QUIET)
    assert folder == environment.peers_dir() / "models" / "tiny-openvino-int4"
    assert sorted(path.name for path in folder.iterdir()) == ["exported.json", "openvino_model.xml"]
    assert openvino_env.ensure_exported(model, Path("python"), QUIET) == folder
    assert len(runs) == 1
    model.write_bytes(b"other weights")
    openvino_env.ensure_exported(model, Path("python"), QUIET)
    assert len(runs) == 2
    assert [path.name for path in folder.parent.iterdir()] == ["tiny-openvino-int4"]


def test_a_conversion_that_makes_less_than_is_needed_is_no_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = home / "tiny.gguf"
    model.write_bytes(b"weights")
    monkeypatch.setattr(environment, "run_logged", lambda *_, **__: None)
    for _ in range(2):
        with pytest.raises(environment.InstallError, match=r"converting tiny.gguf to bf16 left no tokenizer.json; see"):
            vllm_env.ensure_bf16_folder(model, Path("python"), QUIET)
