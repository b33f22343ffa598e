"""How a server starts and ends, in a process of its own."""

from __future__ import annotations

import signal
import socket
import threading
import time
import urllib.error
from typing import Any

import pytest

from forerun.models.store import known_model, path_of
from tests.helpers.served import ServedProcess

needs_demo = pytest.mark.skipif(
    not path_of(known_model("demo")).exists(),
    reason="the demo model is not in the cache; `forerun pull demo` fetches it",
)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "--spec", "ngrm"), "'ngrm' is unknown"),
        (("demo", "--no-speculation", "--spec", "auto"), "choose one way"),
        (("demo", "-md", "x.gguf", "--spec-type", "ngram"), "has no setting model"),
        (("demo", "--num-speculative-tokens", "3"), "no drafter is named"),
        (("demo", "--speculative-config", '{"metod": "ngram"}'), "did you mean 'method'"),
        (("demo", "--host", "256.0.0.1"), "can't listen on 256.0.0.1"),
        (("no-such-model",), "no-such-model"),
        (("demo", "--max-queu", "3"), "--max-queu"),
        (("demo", "--port", "70000"), "--port"),
    ],
)
def test_a_wrong_setting_ends_it_in_words(arguments: tuple[str, ...], words: str) -> None:
    with ServedProcess(*arguments) as process:
        code, log = process.end()
    assert code == 2
    assert words in log
    assert "Traceback" not in log


@pytest.mark.parametrize("name", ["FORERUN_SPEC", "FORERUN_SERVE_SPEC"])
def test_the_environment_counts_where_no_flag_does(name: str) -> None:
    with ServedProcess("demo", **{name: "ngrm"}) as process:
        assert "'ngrm' is unknown" in process.end()[1]
    with ServedProcess("demo", "--spec", "sufix", **{name: "ngrm"}) as process:
        assert "'sufix' is unknown" in process.end()[1]


def test_a_bad_value_in_the_environment_is_an_error() -> None:
    with ServedProcess("demo", FORERUN_MAX_QUEUE="many") as process:
        code, log = process.end()
    assert code == 2
    assert "--max-queue" in log


def test_F070_a_taken_port_is_told_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ServedProcess("demo", "--port", str(port)) as process:
            code, log = process.end()
    assert code == 2
    assert f"port {port}" in log
    assert "loading" not in log


@pytest.mark.real_model
@needs_demo
def test_F071_loading_answers_and_a_signal_ends_it() -> None:
    with ServedProcess("demo") as process:
        process.until_bound()
        assert process.status("/health") == 503
        process.signal(signal.SIGINT)
        code, log = process.end()
    assert code == 0, log
    assert "serving" not in log


@pytest.mark.real_model
@needs_demo
def test_F071_running_requests_end_before_the_server_does() -> None:
    """With the settings from the environment, which must count like flags."""
    replies: list[Any] = []
    with ServedProcess("demo", FORERUN_SERVED_MODEL_NAME="a", FORERUN_SERVE_DRAIN_S="20") as process:
        process.until_ready()
        body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True}
        thread = threading.Thread(target=lambda: replies.append(process.post("/v1/completions", body)))
        thread.start()
        until = time.monotonic() + 5
        while process.get("/server_info")["load"]["num_running"] == 0:
            assert time.monotonic() < until
        process.signal()
        while process.status("/health") != 503:
            assert time.monotonic() < until
        with pytest.raises(urllib.error.HTTPError) as refusal:
            process.post("/v1/completions", {"prompt": "a"})
        assert refusal.value.code == 503
        assert refusal.value.headers["retry-after"]
        refusal.value.close()
        code, log = process.end()
        thread.join()
    assert code == 0, log
    assert replies[0]["usage"]["completion_tokens"] == 100
    assert replies[0]["model"] == "a"
    assert "Traceback" not in log


@pytest.mark.real_model
@needs_demo
def test_F071_a_second_signal_ends_it_at_once() -> None:
    with ServedProcess("demo") as process:
        process.until_ready()
        body = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True}
        failures: list[Exception] = []

        def ask() -> None:
            try:
                process.post("/v1/completions", body)
            except urllib.error.HTTPError as error:
                error.close()
                failures.append(error)
            except OSError as error:
                failures.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        until = time.monotonic() + 5
        while process.get("/server_info")["load"]["num_running"] == 0:
            assert time.monotonic() < until
        process.signal()
        time.sleep(0.2)
        process.signal()
        code, log = process.end(5.0)
        thread.join()
    assert code == 0, log
    assert failures
