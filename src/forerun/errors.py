"""Every error forerun raises on purpose.

ForerunError
├── ConfigError    wrong at start-up: an unknown option, an illegal combination, a missing tool
├── LoadError      a file is truncated, malformed or unsupported; names the file and the tensor or key
├── RequestError   the caller's mistake in one request; `param` names the field
└── EngineFault    a broken promise of our own; ends the request, never the engine

A message is one sentence that names what was wrong and what would be right.
The command line prints it without a traceback.
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
