"""What the server writes on stderr: a line per request, and one every ten seconds while it is busy.

Prompts and answers are never logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from forerun.engine.completion import Completion
from forerun.errors import one_line
from forerun.serve.problems import Problem

if TYPE_CHECKING:
    from forerun.serve.hub import Hub, Inbox

PERIOD_S = 10.0
_COLOURS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31m"}
_RESET = "\x1b[0m"

_log = logging.getLogger("forerun.serve")


def configure(*, is_json: bool) -> None:
    """Sends the server's log and its web server's to stderr, in one form."""
    handler = logging.StreamHandler(sys.stderr)
    has_colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    handler.setFormatter(_JsonFormatter() if is_json else _TextFormatter(has_colour=has_colour))
    for name in ("forerun", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == "forerun" else logging.WARNING)


class _TextFormatter(logging.Formatter):
    def __init__(self, *, has_colour: bool) -> None:
        super().__init__()
        self._has_colour = has_colour

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        name = getattr(record, "request_id", None)
        message = one_line(record.getMessage(), 2000)
        line = f"{moment}.{int(record.msecs):03d} {record.levelname:7} {f'[{name}] ' if name else ''}{message}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        colour = _COLOURS.get(record.levelno) if self._has_colour else None
        return f"{colour}{line}{_RESET}" if colour else line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", None) or {}
        if name := getattr(record, "request_id", None):
            entry["request_id"] = name
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)  # all of it ASCII, half characters included


def log_request(scope: MutableMapping[str, Any], status: int, done: Sequence[Completion], inbox: Inbox) -> None:
    """One line for a request that has ended."""
    if not _log.isEnabledFor(logging.INFO):
        return
    ended = "the client has gone" if inbox.is_gone else ", ".join(sorted({one.finish_reason for one in done})) or "-"
    fields = {
        "path": scope["path"],
        "status": status,
        "ended": ended,
        "prompt_tokens": sum(one.stats.prompt_tokens for one in done),
        "cached_tokens": sum(one.stats.cached_tokens for one in done),
        "completion_tokens": sum(one.stats.completion_tokens for one in done),
        "time_to_first_token_ms": round(1e3 * max(meter.time_to_first_token_s for meter in inbox.meters), 1),
        "accepted": sum(sum(meter.accepted) for meter in inbox.meters),
        "drafted": sum(sum(meter.drafted) for meter in inbox.meters),
    }
    line = (
        f"{scope['method']} {fields['path']} {status} {ended}: {fields['prompt_tokens']} prompt tokens "
        f"({fields['cached_tokens']} cached), {fields['completion_tokens']} generated, first after "
        f"{fields['time_to_first_token_ms']} ms"
    )
    num_steps = sum(len(meter.accepted) for meter in inbox.meters)
    if fields["drafted"]:
        line += (
            f"; draft acceptance = {fields['accepted'] / fields['drafted']:.5f} ({fields['accepted']:5} accepted / "
            f"{fields['drafted']:5} generated), mean len = {1 + fields['accepted'] / num_steps:.2f}"
        )
    _log.info(line, extra={"request_id": scope.get("request_id"), "fields": fields})


def log_refusal(scope: MutableMapping[str, Any], problem: Problem) -> None:
    """One line for a request that was not served. What was wrong with it may quote the prompt, so it isn't in it."""
    fields = {"path": scope["path"], "status": problem.status, "code": problem.code, "param": problem.param}
    where = f" at {problem.param}" if problem.param else ""
    line = f"{scope['method']} {scope['path']} {problem.status} {problem.code}{where}"
    _log.info(line, extra={"request_id": scope.get("request_id"), "fields": fields})


async def log_periodically(hub: Hub) -> None:
    """A line every ten seconds in which something happened."""
    before, positions_before, then = hub.metrics.totals, hub.metrics.accepted_by_position, time.monotonic()
    while True:
        await asyncio.sleep(PERIOD_S)
        after, positions, now = hub.metrics.totals, hub.metrics.accepted_by_position, time.monotonic()
        change = {name: after[name] - before[name] for name in after}
        padded = [*positions_before, *[0.0] * (len(positions) - len(positions_before))]
        kept = [b - a for a, b in zip(padded, positions, strict=True)]
        if any(change.values()) or hub.num_jobs:
            _log.info(throughput_line(change, now - then, hub))
        if change["num_draft_tokens"]:
            _log.info(drafting_line(change, kept, now - then))
        before, positions_before, then = after, positions, now


def throughput_line(change: dict[str, float], seconds: float, hub: Hub) -> str:
    """What the engine did in a while."""
    load = hub.metrics.read_load() if hub.metrics.read_load else None
    num_running, num_waiting = (load.num_running, load.num_waiting) if load else (0, 0)
    kv_use = load.num_used_pages / load.num_pages if load and load.num_pages else 0.0
    return (
        f"Prompt throughput: {change['prompt_tokens'] / seconds:.1f} tokens/s, "
        f"Generation throughput: {change['generation_tokens'] / seconds:.1f} tokens/s, "
        f"Running: {num_running} reqs, Waiting: {num_waiting} reqs, KV cache usage: {100 * kv_use:.1f}%"
    )


def drafting_line(change: dict[str, float], accepted_by_position: Sequence[float], seconds: float) -> str:
    """What speculation did in a while, in the words that dashboards look for."""
    drafts, drafted, accepted = (change[f"num_{what}"] for what in ("drafts", "draft_tokens", "accepted_tokens"))
    rates = ", ".join(f"{count / drafts:.3f}" for count in accepted_by_position if drafts)
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / max(drafts, 1):.2f}, "
        f"Accepted throughput: {accepted / seconds:.2f} tokens/s, "
        f"Drafted throughput: {drafted / seconds:.2f} tokens/s, "
        f"Accepted: {accepted:.0f} tokens, Drafted: {drafted:.0f} tokens, "
        f"Per-position acceptance rate: {rates}, Avg Draft acceptance rate: {100 * accepted / drafted:.1f}%"
    )
