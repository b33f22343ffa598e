"""`forerun generate`: one prompt, one answer, streamed or as JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.display import TextPrinter
from forerun.cli.jsonlines import TraceFile, completion_object, dumps
from forerun.cli.options import EngineOptions, OutputOptions, SamplingOptions, SpeculationOptions
from forerun.cli.session import Messages, open_session
from forerun.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from forerun.models.structured import Structured

_STDIN = "-"


def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A GGUF file, a Hugging Face folder or a name such as demo.")
    ],
    sampling: SamplingOptions,
    speculation: SpeculationOptions,
    engine: EngineOptions,
    output: OutputOptions,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="What to answer.")] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Read the prompt from a file; - is standard input.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="The prompt is the very text to continue; no chat template.")
    ] = False,
    prediction: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A file that the answer should resemble, for --spec auto or prediction; - is standard input.",
        ),
    ] = None,
    json_schema: Annotated[
        str | None, typer.Option(metavar="FILE", help="Answer with JSON that this schema describes.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Answer with a text that this expression matches as a whole.")
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Answer with this text or another choice; may be repeated.")
    ] = None,
) -> None:
    """Answer one prompt.

    On a terminal, draft tokens that were accepted are green and underlined.
    """
    request = build_request(read_prompt(prompt, prompt_file), system, is_raw=raw)
    if prompt_file == prediction == _STDIN:
        raise RequestError("--prompt-file and --prediction can't both be standard input", "prediction")
    expected = None if prediction is None else read_file(prediction, "prediction")
    grammar = read_grammar(json_schema, regex, choice or [])
    params = sampling.params()
    with TraceFile(output.trace) as trace:
        session = open_session(model, engine, speculation, params, expected, grammar)
        if output.json:
            print(dumps(completion_object(session.complete(request, trace))), flush=True)
        else:
            session.answer(request, TextPrinter(sys.stdout), trace, [])


def build_request(text: str, system: str | None, *, is_raw: bool) -> str | Messages:
    """The text itself when raw, else the messages of one question.

    Raises:
        RequestError: a raw text comes with a system message.
    """
    if is_raw:
        if system is not None:
            raise RequestError("--system needs the chat template; leave out --system or --raw", "system")
        return text
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": text}]


def read_grammar(json_schema: str | None, regex: str | None, choice: list[str]) -> Structured | None:
    """What the answer must look like; None where it may be anything.

    Args:
        json_schema: a file.
        regex: an expression.
        choice: texts, empty without any.

    Raises:
        RequestError: several are given, or one can't be used.
        ConfigError: the file can't be read.
    """
    from forerun.models.structured import Structured

    if (json_schema is not None) + (regex is not None) + bool(choice) > 1:
        raise RequestError("give one of --json-schema, --regex and --choice", "grammar")
    if json_schema is not None:
        return Structured.json_schema(read_file(json_schema, "schema"))
    if regex is not None:
        return Structured.regex(regex)
    return Structured.choice(choice) if choice else None


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The prompt's text, from the one place that names it.

    Raises:
        RequestError: it is given twice or not at all, or is not UTF-8.
        ConfigError: the file can't be read.
    """
    if (prompt is None) == (prompt_file is None):
        raise RequestError("give either PROMPT or --prompt-file FILE", "prompt")
    if prompt is not None:
        # Bytes of an argument that are not UTF-8 reach Python as lone surrogates.
        return _decode(prompt.encode("utf-8", "surrogateescape"), "PROMPT", "prompt")
    assert prompt_file is not None
    return read_file(prompt_file, "prompt")


def read_file(path: str, param: str) -> str:
    """The text of a file; - is standard input.

    Args:
        path: of the file.
        param: what it is for.

    Raises:
        RequestError: it is not UTF-8.
        ConfigError: it can't be read.
    """
    try:
        content = sys.stdin.buffer.read() if path == _STDIN else Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"the {param} file {path} can't be read: {error.strerror}") from error
    return _decode(content, path, param)


def _decode(content: bytes, source: str, param: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{source} is not UTF-8: byte {error.start} is {content[error.start]:#04x}", param) from None
