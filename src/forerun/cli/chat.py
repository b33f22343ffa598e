"""`forerun chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from forerun.cli.chat_loop import HELP, Answer, Conversation, converse
from forerun.cli.display import TextPrinter, note
from forerun.cli.jsonlines import TraceFile, completion_object, dumps
from forerun.cli.options import EngineOptions, OutputOptions, SamplingOptions, SpeculationOptions
from forerun.cli.session import Messages, Session, open_session


def chat(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A GGUF file, a Hugging Face folder or a name such as demo.")
    ],
    sampling: SamplingOptions,
    speculation: SpeculationOptions,
    engine: EngineOptions,
    output: OutputOptions,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
) -> None:
    """Talk with a model.

    /reset forgets the conversation, /exit or ctrl-d leaves, ctrl-c cancels the current answer only.
    """
    params = sampling.params()
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        import readline  # noqa: F401  # gives input() line editing and history
    with TraceFile(output.trace) as trace:
        session = open_session(model, engine, speculation, params)
        if is_terminal:
            note(HELP)
        answer = _json_answer(session, trace) if output.json else _text_answer(session, trace)
        converse(Conversation(system), lambda: input("> " if is_terminal else ""), answer, note)


def _text_answer(session: Session, trace: TraceFile) -> Answer:
    printer = TextPrinter(sys.stdout)

    def answer(messages: Messages, so_far: list[str]) -> None:
        session.answer(messages, printer, trace, so_far)

    return answer


def _json_answer(session: Session, trace: TraceFile) -> Answer:
    def answer(messages: Messages, so_far: list[str]) -> None:
        completion = session.complete(messages, trace)
        so_far.append(completion.text)
        print(dumps(completion_object(completion)), flush=True)

    return answer
