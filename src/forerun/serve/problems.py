"""What a caller is told when something is wrong: one shape for every status, OpenAI's.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

from typing import Any

import msgspec

from forerun.errors import ForerunError, RequestError, one_line

RETRY_AFTER_S = 1
_MAX_MESSAGE, _MAX_PARAM = 600, 200  # characters

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
_CODES = {
    400: "invalid_value",
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
    429: "queue_full",
    500: "internal_error",
    503: "unavailable",
}


class Problem(Exception):
    """A refusal or a failure, as the caller sees it.

    Args:
        status: the HTTP status.
        message: one sentence that names what was wrong and what would be right.
        param: JSON path of the field at fault.
        code: what programs look at; None takes the status's own.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        # Both may quote what the caller sent: a key of a megabyte, or half a character, which no answer can carry.
        self.status, self.message = status, one_line(message, _MAX_MESSAGE)
        self.param = None if param is None else one_line(param, _MAX_PARAM)
        self.code = code or _CODES.get(status, "invalid_request")

    @staticmethod
    def of(error: ForerunError, names: dict[str, str] | None = None) -> Problem:
        """What an error of the engine is to the caller.

        Args:
            error: a RequestError is the caller's mistake, anything else ours.
            names: the request's names of fields that the engine calls otherwise.
        """
        if not isinstance(error, RequestError):
            return Problem(500, f"the engine failed on this request, and goes on with others: {error}")
        param = (names or {}).get(error.param or "", error.param)
        is_too_long = error.param == "prompt" and "context limit" in str(error)
        return Problem(400, str(error), param, "context_length_exceeded" if is_too_long else None)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the response says besides the body's kind."""
        if self.status in (429, 503):
            return [(b"retry-after", str(RETRY_AFTER_S).encode())]
        return [(b"www-authenticate", b"Bearer")] if self.status == 401 else []

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        """The JSON text."""
        return msgspec.json.encode(self.body())
