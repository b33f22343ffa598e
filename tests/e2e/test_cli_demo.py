"""The installed command over the demo model: a real process, a real terminal, real tokens."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forerun.drafters.datastore import read_datastore
from forerun.models.store import known_model, path_of

pytestmark = pytest.mark.real_model

FORERUN = [sys.executable, "-c", "from forerun.cli.main import run; run()"]
LINES = "The first train leaves at six.\nThe second train leaves at seven.\nThe third train leaves at eight."
COPY = f"Repeat these lines exactly:\n\n{LINES}"


@pytest.fixture(scope="module")
def demo() -> str:
    """The demo model's name, once it is known to be there: no test fetches it."""
    if not path_of(known_model("demo")).is_file():
        pytest.skip("the demo model is not in the cache; fetch it with: forerun pull demo")
    return "demo"


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FORERUN, *arguments], input=stdin, capture_output=True, text=True, timeout=120, check=False)


def answer(*arguments: str) -> dict[str, Any]:
    result = run("generate", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


@pytest.mark.parametrize("law", [("--seed", "3"), ("--temperature", "0.8", "--top-p", "0.95", "--seed", "5")])
def test_speculation_changes_nothing_but_the_passes(demo: str, law: tuple[str, ...]) -> None:
    asked = (demo, COPY, "--max-tokens", "60", "--logprobs", "2", *law)
    plain, spec, auto = answer(*asked, "--spec", "off"), answer(*asked, "--spec", "ngram:k=8"), answer(*asked)
    for field in ("token_ids", "text", "finish_reason", "seed", "logprobs"):
        assert spec[field] == plain[field], field
        assert auto[field] == plain[field], field
    assert auto["stats"]["accepted_tokens"] > 0
    assert plain["stats"]["drafted_tokens"] == 0
    assert 0 < spec["stats"]["accepted_tokens"] <= spec["stats"]["drafted_tokens"]
    assert spec["stats"]["target_passes"] < plain["stats"]["target_passes"]


def test_the_seed_that_was_drawn_gives_the_answer_again(demo: str) -> None:
    first = answer(demo, "Name a colour.", "--max-tokens", "12", "--temperature", "1.2")
    again = answer(demo, "Name a colour.", "--max-tokens", "12", "--temperature", "1.2", "--seed", str(first["seed"]))
    assert again["token_ids"] == first["token_ids"]


def test_greedy_copies_the_lines(demo: str) -> None:
    result = run("generate", demo, COPY, "--max-tokens", "60", "--spec", "ngram")
    assert result.returncode == 0
    assert LINES.splitlines()[1] in result.stdout
    assert "\x1b" not in result.stdout
    assert re.search(r"\d+ tokens in \d+ target passes, [\d.]+ per pass", result.stderr)


def test_a_stop_string_is_cut(demo: str) -> None:
    result = run("generate", demo, COPY, "--max-tokens", "60", "--stop", "second train", "--spec", "ngram")
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip("\n").endswith("The ")


def test_chat_over_a_pipe_keeps_the_history(demo: str) -> None:
    result = run("chat", demo, "--max-tokens", "16", stdin="My name is Ada.\nWhat is my name?\n/exit\nnever read\n")
    assert result.returncode == 0, result.stderr
    assert "Ada" in result.stdout


def test_too_long_a_prompt_is_exit_2(demo: str) -> None:
    result = run("generate", demo, "one two three four five six seven", "--max-model-len", "4")
    assert result.returncode == 2
    assert result.stdout == ""
    assert "context limit" in result.stderr.splitlines()[-1]


def test_info_as_json(demo: str) -> None:
    result = run("info", demo, "--json")
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["architecture"], told["layers"], told["context"]) == ("llama", 30, 8192)
    assert told["tensors_by_format"]["q4_1"] == 210
    assert told["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    assert 96e6 < told["bytes_per_token"] < 98e6


def _read_until(master: int, pattern: str, seconds: float = 60.0) -> str:
    seen, deadline = b"", time.monotonic() + seconds
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.1)[0]:
            try:
                seen += os.read(master, 65536)
            except OSError:  # the other side has closed
                break
        if re.search(pattern, seen.decode("utf-8", "replace")):
            return seen.decode("utf-8", "replace")
    raise AssertionError(f"{pattern!r} never came; seen: {seen!r}")


def _heed_ctrl_c() -> None:
    """Tests that run in the background of a shell ignore ctrl-c, and what they start would too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_chat_on_a_terminal_colours_drafts_and_ctrl_c_cancels_only_the_answer(demo: str) -> None:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [*FORERUN, "chat", demo, "--spec", "ngram:k=8", "--max-tokens", "4000", "--ignore-eos"],
        stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True, close_fds=True,
        preexec_fn=_heed_ctrl_c,
    )  # fmt: skip
    os.close(slave)
    try:
        _read_until(master, "> $")
        os.write(master, COPY.replace("\n", " ").encode() + b"\n")
        assert _read_until(master, re.escape("\x1b[32;4m"))
        process.send_signal(signal.SIGINT)
        _read_until(master, "cancelled[^>]*> $")
        os.write(master, b"\x04")
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _cpu_s(*command: str) -> float:
    """Processor time of a command, which a busy machine lengthens less than the time it takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_start_up_is_quick(demo: str) -> None:
    """Import, load, one token and exit. The goal is 1.5 s, where the libraries that it needs take 0.25 s to import."""
    imports = "import numpy, tokenizers, jinja2, typer, rich.console"
    reference_s = min(_cpu_s(sys.executable, "-c", imports) for _ in range(2))
    answer = (*FORERUN, "generate", demo, "Hi", "--max-tokens", "1", "--threads", "1")
    assert min(_cpu_s(*answer) for _ in range(2)) < 6.0 * reference_s


def test_a_datastore_is_written_and_read_back(demo: str, tmp_path: Path) -> None:
    questions, path = tmp_path / "questions.jsonl", tmp_path / "new" / "store.npz"
    questions.write_text(json.dumps({"prompt": "Name a colour."}) + "\n")
    result = run("datastore", demo, "--tokens", "20", "--prompts", str(questions), "--out", str(path))
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    store = read_datastore(path, 49152)
    assert store.num_tokens >= 20
    assert store.about == {
        "model": "demo", "seed": 0, "prompts": "questions.jsonl", "num_tokens": store.num_tokens
    }  # fmt: skip
    assert f"{len(store.texts)} texts with {store.num_tokens} tokens are at {path}" in result.stderr
    blocked = run("datastore", demo, "--tokens", "1", "--prompts", str(questions), "--out", str(questions / "x.npz"))
    assert blocked.returncode == 2
    assert "can't be written" in blocked.stderr
    assert blocked.stderr.count("Traceback") == 0


def test_pull_of_what_is_there_is_quick_and_models_lists_it(demo: str) -> None:
    assert run("pull", demo).returncode == 0
    result = run("models")
    assert result.returncode == 0
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("demo "))
    assert str(path_of(known_model("demo"))) in line
