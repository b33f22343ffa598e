"""Every error forerun raises on purpose.

ForerunError
├── ConfigError    wrong at start-up: an unknown option, an illegal combination, a missing tool
├── LoadError      a file is truncated, malformed or unsupported; names the file and the tensor or key
├── RequestError   the caller's mistake in one request; `param` names the field
└── EngineFault    a broken promise of our own; ends the request, never the engine

A message is one sentence that names what was wrong and what would be right.
The command line prints it without a traceback, so what files and other libraries put into it goes through `shown` or
`one_line`: nothing in it can move a cursor, and nothing makes it a page long.
"""

from __future__ import annotations


class ForerunError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(ForerunError):
    """The engine can't be set up as asked."""


class LoadError(ForerunError):
    """A model file can't be read as it is."""


class RequestError(ForerunError):
    """One request can't be served as asked.

    Args:
        message: what was wrong and what would be right.
        param: the request field at fault, or None when it is the request as a whole.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineFault(ForerunError):
    """An internal invariant does not hold."""


def as_fault(error: Exception, what: str) -> ForerunError:
    """An error raised on purpose as it is, any other as a fault of ours."""
    return error if isinstance(error, ForerunError) else EngineFault(f"{what}: {error!r}")


def shown(value: object, limit: int = 80) -> str:
    r"""A value from a file as a message shows it: on one line, printable, in short.

    >>> print(shown("a\x1b[2J"), shown([1, 2, 3]), shown(10**40), sep="; ")
    'a\x1b[2J'; a list of 3; a huge number
    """
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    # An integer may have more digits than Python is willing to write.
    return "a huge number" if isinstance(value, int) and abs(value) > 10**30 else repr(value)[:limit]


def one_line(text: object, limit: int = 300) -> str:
    r"""What somebody else's code said, for a message of ours: on one line, printable, cut where it gets long.

    >>> print(one_line("bad\n  token \x00"))
    bad token \x00
    """
    words = " ".join(str(text).split())
    cut = words if len(words) <= limit else f"{words[: limit - 3]}..."
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in cut)
