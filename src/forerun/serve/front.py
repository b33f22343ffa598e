"""The outermost layer: request ids, keys, and what happens when a handler fails. Plain ASGI, one call per message."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from collections.abc import MutableMapping, Sequence
from typing import Any

from starlette.types import ASGIApp

from forerun.serve.bodies import ClientGone, Receive, Scope
from forerun.serve.problems import Problem
from forerun.serve.respond import Send, send_problem

# Open to everybody: what load balancers, dashboards and browsers ask for without a key. A page's own files are no API.
_OPEN_PATHS = frozenset({"/health", "/metrics"})
_GUARDED = ("/v1/", "/tokenize", "/detokenize", "/version", "/server_info", "/openapi.json")
_SAFE_ID = re.compile(rb"[!-~]{1,128}")

_log = logging.getLogger("forerun.serve")


class Front:
    """Wraps the application.

    Args:
        app: the routes.
        api_keys: any of them opens the API; empty leaves it open.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _SAFE_ID.fullmatch(given) else secrets.token_hex(12).encode()
        scope["request_id"] = request_id.decode()
        is_begun = False

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            if not self._is_allowed(scope, headers):
                raise Problem(401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")
            await self._app(scope, receive, send_with_id)
        except Problem as problem:
            if not is_begun:
                await send_problem(send_with_id, problem)
        except ClientGone:
            return
        except Exception:
            _log.exception("a request failed", extra={"request_id": scope["request_id"]})
            if not is_begun:
                message = f"this server failed on the request; its log has the details under {scope['request_id']}"
                await send_problem(send_with_id, Problem(500, message))

    def _is_allowed(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        path = scope["path"]
        if not self._keys or path in _OPEN_PATHS or not path.startswith(_GUARDED) or scope["method"] == "OPTIONS":
            return True
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)
