"""How the server behaves: everything that `forerun serve` can be told, apart from how the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forerun.types import VerifyRule

ReportLevel = Literal["none", "summary", "steps"]


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Set by the command line.

    Attributes:
        model_names: names that requests may use; answers carry the first.
        spec: who drafts, as `drafters.spec` reads it.
        verify: the verification rule of requests that name none.
        api_keys: any of them opens the API; empty leaves it open to all.
        max_running: jobs that the engine runs at a time.
        max_queue: jobs that may wait; more are refused with 429.
        max_connections: open connections; more are refused with 503.
        max_body_bytes: of one request.
        receive_timeout_s: how long a request may take to arrive.
        send_timeout_s: how long a client may take to read before it is cut.
        keepalive_s: pause after which a stream gets a comment line.
        drain_s: how long running requests may take after the first signal.
        report: what the `metrics` object of answers holds unless the request says so.
        metrics_alias: `vllm` repeats the metrics under that engine's names.
        cors_origins: origins whose pages may use the API from a browser.
        has_page: whether / serves the page.
    """

    model_names: tuple[str, ...]
    spec: str = "auto"
    verify: VerifyRule = "coupled"
    api_keys: tuple[str, ...] = ()
    max_running: int = 16
    max_queue: int = 512
    max_connections: int = 1000
    max_body_bytes: int = 16 << 20
    receive_timeout_s: float = 60.0
    send_timeout_s: float = 30.0
    keepalive_s: float = 15.0
    drain_s: float = 30.0
    report: ReportLevel = "none"
    metrics_alias: Literal["none", "vllm"] = "none"
    cors_origins: tuple[str, ...] = ()
    has_page: bool = True
