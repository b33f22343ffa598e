"""The command line over a scripted engine: what reaches stdout, stderr, the exit code and the engine."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from forerun.cli import main
from forerun.cli.chat_loop import Conversation, converse
from forerun.cli.display import TextPrinter
from forerun.cli.jsonlines import dumps
from forerun.cli.options import parse_logit_bias
from forerun.cli.session import closing_line
from forerun.drafters.spec import REGISTRY
from forerun.engine.completion import Completion, EmittedToken, Stats, StreamEvent
from forerun.errors import EngineFault, LoadError, RequestError
from forerun.models.structured import Structured
from forerun.types import Draft, NodeTest, StepRecord, StepTimings, TokenLogprob, Verdict, VerifyRule
from forerun.verify import RULES
from tests.helpers.model_drafter import SharedTreeOptions

STATS = Stats(
    prompt_tokens=4,
    cached_tokens=0,
    completion_tokens=3,
    target_passes=1,
    drafted_tokens=2,
    accepted_tokens=1,
    prefill_s=0.5,
    decode_s=0.25,
)
TOKENS = (EmittedToken(7, "one", False), EmittedToken(8, " two", True), EmittedToken(9, " three", False))
LOGPROBS = tuple(TokenLogprob(token.token_id, float("-inf"), ((1, float("nan")), (2, -0.5))) for token in TOKENS)
COMPLETION = Completion(
    prompt_token_ids=(1, 2, 3, 4),
    token_ids=(7, 8, 9),
    text="one two three",
    finish_reason="stop",
    seed=11,
    logprobs=LOGPROBS,
    stats=STATS,
)
RECORD = StepRecord(
    step=1,
    kind="decode",
    committed_len=5,
    num_rows=3,
    num_pass_rows=3,
    draft=Draft.chain((8, 3), "ngram"),
    rule="coupled",
    verdict=Verdict((0,), 9, "correction", float("nan"), None, (NodeTest(0, True, 0.5, 1.0, None),)),
    emitted=(8, 9),
    timings=StepTimings(0.1, 0.2, 0.3, 0.6),
)


EVERY_OPTION = """
    --max-tokens 9 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1
    --presence-penalty 0.2 --frequency-penalty 0.3 --logit-bias 5=-1.5 --logit-bias 6=2 --min-tokens 2
    --ignore-eos --seed 18446744073709551615 --logprobs 4 --spec ngram:k=4 --backend torch
    --device cuda --quant q8 --kv f32 --threads 2 --chunk 33 --max-model-len 77 --no-prefix-cache
"""


class ScriptedLLM:
    """Answers everything with the same three tokens and remembers how it was asked."""

    made: list[ScriptedLLM] = []  # noqa: RUF012  # emptied by the fixture
    error: BaseException | None = None

    def __init__(self, model: Any, **settings: Any) -> None:
        self.model, self.settings = model, settings
        self.prompts: list[Any] = []
        self.params: Any = None
        self.requested: dict[str, Any] = {}
        ScriptedLLM.made.append(self)

    def stream(
        self, prompt: Any, params: Any, *, on_step: Callable[[StepRecord], None], **requested: Any
    ) -> Iterator[StreamEvent]:
        self.prompts.append(prompt)
        self.params, self.requested = params, requested
        yield StreamEvent(TOKENS[:1], RECORD)
        if ScriptedLLM.error is not None:
            raise ScriptedLLM.error
        on_step(RECORD)
        yield StreamEvent(TOKENS[1:], RECORD, COMPLETION)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedLLM]:
    monkeypatch.setattr("forerun.engine.llm.LLM", ScriptedLLM)
    ScriptedLLM.made, ScriptedLLM.error = [], None
    return ScriptedLLM


@pytest.fixture
def forerun(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def invoke(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["forerun", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.run()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    return invoke


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# Text and JSON


def test_off_a_terminal_stdout_is_the_text_alone(llm: Any, forerun: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert forerun("generate", "model.gguf", "hello") == 0
    out, err = capsys.readouterr()
    assert out == "one two three\n"
    assert "3 tokens in 1 target passes, 2.00 per pass, 1 of 2 draft tokens accepted, 8.0 tokens/s" in err


def test_json_is_one_line_of_valid_json_even_with_infinite_logprobs(
    llm: Any, forerun: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forerun("generate", "model.gguf", "hello", "--json", "--logprobs", "2") == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    answer = json.loads(out, parse_constant=refuse)
    assert list(answer) == ["token_ids", "text", "finish_reason", "seed", "logprobs", "stats"]
    assert answer["token_ids"] == [7, 8, 9]
    assert (answer["text"], answer["finish_reason"], answer["seed"]) == ("one two three", "stop", 11)
    assert answer["logprobs"][0] == {
        "token_id": 7,
        "logprob": None,
        "top": [{"token_id": 1, "logprob": None}, {"token_id": 2, "logprob": -0.5}],
    }
    assert answer["stats"] == {
        "prompt_tokens": 4,
        "cached_tokens": 0,
        "completion_tokens": 3,
        "target_passes": 1,
        "drafted_tokens": 2,
        "accepted_tokens": 1,
        "prefill_s": 0.5,
        "decode_s": 0.25,
        "decode_tok_per_s": 8.0,
    }


def test_dumps_keeps_one_line_and_escapes_what_is_not_ascii() -> None:
    assert dumps({"text": "a\nb\u2028é", "values": (1.5, float("inf"))}) == (
        '{"text":"a\\nb\\u2028\\u00e9","values":[1.5,null]}'
    )


def test_trace_has_one_json_line_per_step(llm: Any, forerun: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    assert forerun("generate", "model.gguf", "hello", "--trace", str(trace)) == 0
    (line,) = trace.read_text().splitlines()
    record = json.loads(line)
    assert record["step"] == 1
    assert record["next"]["p"] is None
    assert [node["accepted"] for node in record["draft"]] == [True, False]


def test_a_trace_that_cannot_be_written_fails_before_the_model_is_loaded(
    llm: Any, forerun: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert forerun("generate", "model.gguf", "hello", "--trace", str(tmp_path / "no" / "t")) == 2
    assert "can't be written" in capsys.readouterr().err
    assert llm.made == []


# What reaches the engine


def test_every_option_reaches_the_engine(llm: Any, forerun: Any) -> None:
    assert forerun("generate", "model.gguf", "hello", *EVERY_OPTION.split(), "--stop", "a b", "--stop", "c") == 0
    (made,) = llm.made
    progress = made.settings.pop("progress")
    assert callable(progress)
    assert made.settings == {
        "backend": "torch",
        "device": "cuda",
        "quant": "q8",
        "kv": "f32",
        "threads": 2,
        "chunk": 33,
        "max_model_len": 77,
        "prefix_cache": False,
    }
    params = made.params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (9, 0.5, 3, 0.9)
    assert (params.min_p, params.repetition_penalty, params.presence_penalty) == (0.1, 1.1, 0.2)
    assert (params.frequency_penalty, params.logit_bias, params.min_tokens) == (0.3, {5: -1.5, 6: 2.0}, 2)
    assert (params.ignore_eos, params.stop, params.seed, params.logprobs) == (True, ("a b", "c"), 2**64 - 1, 4)
    assert str(made.requested["speculation"]).startswith("ngram:k=4")


def test_defaults_are_greedy_and_auto(llm: Any, forerun: Any) -> None:
    assert forerun("generate", "model.gguf", "hello") == 0
    (made,) = llm.made
    assert (made.params.max_tokens, made.params.temperature, made.params.seed) == (256, 0.0, None)
    assert (str(made.requested["speculation"]), made.requested["verify"]) == ("auto", "coupled")
    assert made.settings["quant"] == "auto"


@pytest.mark.parametrize("rule", get_args(VerifyRule))
def test_every_rule_can_be_chosen(llm: Any, forerun: Any, rule: str) -> None:
    assert forerun("generate", "model.gguf", "hello", "--verify", rule) == 0
    assert llm.made[0].requested["verify"] == rule
    assert rule in RULES


def test_prompt_goes_through_the_chat_template_unless_raw(llm: Any, forerun: Any) -> None:
    assert forerun("generate", "model.gguf", "hello", "--system", "be brief") == 0
    assert forerun("generate", "model.gguf", "hello", "--raw") == 0
    chat, raw = (made.prompts[0] for made in llm.made)
    assert chat == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert raw == "hello"


def test_prompt_file_is_read_to_the_byte(llm: Any, forerun: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("naïve\r\n\n".encode())
    assert forerun("generate", "model.gguf", "--prompt-file", str(file), "--raw") == 0
    assert llm.made[0].prompts == ["naïve\r\n\n"]


def test_a_prediction_file_reaches_the_engine(llm: Any, forerun: Any, tmp_path: Path) -> None:
    file = tmp_path / "old.py"
    file.write_bytes("naïve\r\n".encode())
    for spec in ("auto", "ngram+prediction:k=32"):
        assert forerun("generate", "model.gguf", "hello", "--spec", spec, "--prediction", str(file)) == 0
        assert llm.made[-1].requested["prediction"] == "naïve\r\n"
    assert forerun("generate", "model.gguf", "hello") == 0
    assert llm.made[-1].requested["prediction"] is None


def test_what_the_answer_must_look_like_reaches_the_engine(llm: Any, forerun: Any, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    for arguments, wanted in (
        (["--json-schema", str(file)], Structured.json_schema({"type": "integer"})),
        (["--regex", "[0-9]+"], Structured.regex("[0-9]+")),
        (["--choice", "yes", "--choice", "no"], Structured.choice(["yes", "no"])),
        ([], None),
    ):
        assert forerun("generate", "model.gguf", "hello", *arguments) == 0
        assert llm.made[-1].requested["grammar"] == wanted


def test_a_form_that_cannot_be_had_is_refused_before_loading(llm: Any, forerun: Any, tmp_path: Path) -> None:
    assert forerun("generate", "model.gguf", "hello", "--regex", "a", "--choice", "b") == 2
    assert forerun("generate", "model.gguf", "hello", "--regex", "") == 2
    assert forerun("generate", "model.gguf", "hello", "--json-schema", str(tmp_path / "gone")) == 2
    assert llm.made == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("hello --spec off --prediction {file}", "is given, but speculation off has no drafter that uses it"),
        ("hello --spec ngram --prediction {file}", "has no drafter that uses it"),
        ("hello --spec auto --prediction {file}.gone", "the prediction file {file}.gone can't be read"),
        ("hello --spec auto --prediction {binary}", "{binary} is not UTF-8: byte 1 is 0xff"),
        ("--prompt-file - --spec auto --prediction -", "can't both be standard input"),
    ],
)
def test_a_prediction_that_cannot_be_used_is_refused_before_loading(
    llm: Any,
    forerun: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: Any,
    tmp_path: Path,
    arguments: str,
    said: str,
) -> None:
    names = {"file": str(tmp_path / "file"), "binary": str(tmp_path / "binary")}
    Path(names["file"]).write_text("text")
    Path(names["binary"]).write_bytes(b"a\xff")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
    assert forerun("generate", "model.gguf", *arguments.format(**names).split()) == 2
    assert said.format(**names) in capsys.readouterr().err
    assert llm.made == []


def test_f063_active_speculation_is_said_at_the_start(
    llm: Any, forerun: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is active is visible."""
    assert forerun("generate", "model.gguf", "hello", "--spec", "ngram:k=4") == 0
    assert "speculation ngram:k=4" in capsys.readouterr().err
    assert forerun("generate", "model.gguf", "hello", "--spec", "ngram:k=0") == 0
    assert "speculation off" in capsys.readouterr().err


# Failures


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--spec eagle", "eagle"),
        ("--spec ngram:k=1000", "k"),
        ("--spec ngram:k=-1", "k"),
        ("--spec ngram:min=4,max=2", "min"),
        ("--spec ngram:window=3", "window"),
        ("--top-p 1.5", "top_p is 1.5"),
        ("--temperature nan", "temperature"),
        ("--seed -1", "seed"),
        ("--logprobs 21", "logprobs"),
        ("--min-tokens 9 --max-tokens 3", "min_tokens"),
        ("--logit-bias 5", "ID=BIAS"),
        ("--raw --system x", "--system"),
        ("--prompt-file also.txt", "PROMPT"),
        ("--quant q5", "q5"),
        ("--threads 0", "threads"),
        ("--temprature 1", "--temperature"),
        ("--verify typical", "--verify"),
        ("--verify block --seed 3", "a seed goes only with rule 'coupled'"),
        ("--verify rrsw --spec model", "rule rrsw is exact for nodes sampled from draft noise only"),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_2_before_loading(
    llm: Any,
    forerun: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    named: str,
) -> None:
    """F019: refused at the start, by name."""
    monkeypatch.setitem(REGISTRY, "model", SharedTreeOptions)
    assert forerun("generate", "model.gguf", "hello", *arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("forerun: ")
    assert err.count("\n") == 1
    assert named in err
    assert llm.made == []


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RequestError("the prompt is too long", "prompt"), 2, "forerun: the prompt is too long"),
        (LoadError("x.gguf is\ntruncated"), 1, "forerun: x.gguf is truncated"),
        (EngineFault("a promise broke"), 1, "forerun: a promise broke"),
        (
            ZeroDivisionError("oops"),
            1,
            "forerun: ZeroDivisionError: oops. This is a fault of forerun; set FORERUN_DEBUG=1",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes_and_messages(
    llm: Any,
    forerun: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    said: str,
) -> None:
    monkeypatch.delenv("FORERUN_DEBUG", raising=False)
    llm.error = error
    assert forerun("generate", "model.gguf", "hello") == code
    out, err = capsys.readouterr()
    assert out == "one\n"
    last = err.splitlines()[-1]
    assert last.startswith(said) if said else "loaded in" in last
    assert "Traceback" not in err


def test_ctrl_c_before_any_command_is_quiet_too(
    forerun: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(**settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "app", interrupted)
    assert forerun("generate") == 130
    assert capsys.readouterr() == ("", "")


def test_debug_shows_the_traceback(
    llm: Any, forerun: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_DEBUG", "1")
    llm.error = ZeroDivisionError("oops")
    assert forerun("generate", "model.gguf", "hello") == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [(), ("--help",), ("generate", "--help"), ("--version",)])
def test_help_and_version_go_to_stdout(
    forerun: Any, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert forerun(*arguments) == 0
    out, err = capsys.readouterr()
    assert out
    assert err == ""


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as gone:
        result = subprocess.run(
            [sys.executable, "-c", "from forerun.cli.main import run; run()", "--help"],
            stdout=gone,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert result.stderr == b""
    assert result.returncode in (0, 1)


def test_logit_bias_reads_ids_and_numbers() -> None:
    assert parse_logit_bias(["3=1", "4=-2.5e-1"]) == {3: 1.0, 4: -0.25}
    with pytest.raises(RequestError, match="ID=BIAS"):
        parse_logit_bias(["x=1"])


# The terminal


def test_accepted_draft_tokens_are_coloured_and_underlined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    printer = TextPrinter(out)
    printer.write("plain", False)
    printer.write(" drafted\n\nmore", True)
    printer.finish()
    assert out.getvalue() == "plain\x1b[32;4m drafted\x1b[0m\n\n\x1b[32;4mmore\x1b[0m\n"


def test_no_color_keeps_the_underline_and_a_dumb_terminal_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    TextPrinter(out).write("x", True)
    assert out.getvalue() == "\x1b[4mx\x1b[0m"
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    TextPrinter(out).write("x", True)
    assert out.getvalue() == "x"


def test_a_model_cannot_send_escape_codes_to_a_terminal() -> None:
    out = Terminal()
    TextPrinter(out).write("a\x1b[2J\x07\r\tb\x9b1m\n", False)
    assert out.getvalue() == "a\ufffd[2J\ufffd\ufffd\tb\ufffd1m\n"
    plain = io.StringIO()
    TextPrinter(plain).write("a\x1b[2J", False)
    assert plain.getvalue() == "a\x1b[2J"


def test_closing_line_of_a_single_token_divides_by_nothing() -> None:
    stats = Stats(4, 0, 1, 0, 0, 0, 0.5, 0.0)
    assert closing_line(stats) == "forerun: 1 tokens in 0 target passes, - per pass, 0.0 tokens/s"


def test_closing_line_says_what_was_cached() -> None:
    stats = Stats(40, 32, 5, 4, 0, 0, 0.5, 1.0)
    assert "1.00 per pass, 32 of 40 prompt tokens were cached, 4.0 tokens/s" in closing_line(stats)


# Conversation


def _talk(
    lines: list[str | BaseException], answers: list[Any], system: str | None = None
) -> tuple[Conversation, list[str], list[Any]]:
    """Runs a conversation; an answer is its pieces, an exception among them is raised there."""
    inputs, replies, said, asked = iter(lines), iter(answers), [], []

    def read_line() -> str:
        line = next(inputs, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    def answer(messages: list[dict[str, str]], so_far: list[str]) -> None:
        asked.append([message["content"] for message in messages])
        for piece in next(replies):
            if isinstance(piece, BaseException):
                raise piece
            so_far.append(piece)

    conversation = Conversation(system)
    converse(conversation, read_line, answer, said.append)
    return conversation, said, asked


def test_history_is_kept_and_reset() -> None:
    conversation, _, asked = _talk(["a", "b", "/reset", "c"], [["A"], ["B", "!"], ["C"]], system="s")
    assert asked == [["s", "a"], ["s", "a", "A", "b"], ["s", "c"]]
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]


def test_ctrl_c_cancels_the_answer_and_keeps_what_was_seen() -> None:
    _, said, asked = _talk(["a", "b"], [["half", KeyboardInterrupt()], ["B"]])
    assert said == ["cancelled"]
    assert asked[1] == ["a", "half", "b"]


def test_a_question_without_any_answer_leaves_the_history() -> None:
    _, said, asked = _talk(["a", "long", "b"], [["A"], [RequestError("too long", "prompt")], ["B"]])
    assert asked[2] == ["a", "A", "b"]
    assert "too long" in said[0]


def test_ctrl_c_at_the_prompt_stays_and_exit_leaves() -> None:
    _, said, asked = _talk([KeyboardInterrupt(), "", "/what", "/exit", "never"], [])
    assert asked == []
    assert len(said) == 2
    assert "/what is no command" in said[1]


def test_chat_command_answers_each_line(
    llm: Any, forerun: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nagain\n"))
    assert forerun("chat", "model.gguf") == 0
    assert capsys.readouterr().out == "one two three\none two three\n"
    assert [len(messages) for messages in llm.made[0].prompts] == [1, 3]
