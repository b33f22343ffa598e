"""The conversation of `forerun chat`, without a terminal or a model in it, so that it can be tested.

/reset    forget the conversation          ctrl-c    cancel the current answer only
/exit     leave                            ctrl-d    leave
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from forerun.cli.session import Messages
from forerun.errors import RequestError

HELP = "/reset forgets the conversation, /exit or ctrl-d leaves, ctrl-c cancels an answer"


class Answer(Protocol):
    """What answers a conversation: streams the text to the user and returns it."""

    def __call__(self, messages: Messages, so_far: list[str]) -> None:
        """Appends each piece of the answer to so_far, so that a cancelled one is known as far as it was seen."""


class Conversation:
    """The messages so far.

    Args:
        system: the system message, or None.
    """

    def __init__(self, system: str | None) -> None:
        self._system = system
        self.messages: Messages = []
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system is not None else []

    def ask(self, question: str, answer: Answer) -> None:
        """One question and its answer, both of which join the history.

        A cancelled answer joins it as far as the user saw it. When nothing was answered, the question leaves too, for
        two questions in a row are no conversation that a chat template knows.

        Raises:
            RequestError: the question can't be served; the history is what it was before.
        """
        self.messages.append({"role": "user", "content": question})
        so_far: list[str] = []
        try:
            answer(list(self.messages), so_far)
        finally:
            if text := "".join(so_far):
                self.messages.append({"role": "assistant", "content": text})
            else:
                self.messages.pop()


def converse(
    conversation: Conversation, read_line: Callable[[], str], answer: Answer, say: Callable[[str], None]
) -> None:
    """Reads and answers until /exit or the end of the input.

    Args:
        conversation: the history; it is changed.
        read_line: the next line without its newline; raises EOFError at the end, KeyboardInterrupt on ctrl-c.
        answer: streams an answer.
        say: tells the user something that is no answer.
    """
    while True:
        try:
            line = read_line().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            say(HELP)
            continue
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
            say("the conversation starts anew")
        elif line.startswith("/"):
            say(f"{line.split()[0]} is no command; {HELP}")
        elif line:
            _answer(conversation, line, answer, say)


def _answer(conversation: Conversation, line: str, answer: Answer, say: Callable[[str], None]) -> None:
    try:
        conversation.ask(line, answer)
    except KeyboardInterrupt:
        say("cancelled")
    except RequestError as error:
        say(f"forerun: {error}; /reset starts anew")
