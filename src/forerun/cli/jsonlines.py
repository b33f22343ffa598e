"""JSON that any reader takes: one line per object, and never NaN or Infinity, which JSON does not have."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any

from forerun.engine.completion import Completion
from forerun.errors import ConfigError
from forerun.types import StepRecord, TokenLogprob


def dumps(value: Any) -> str:
    """One line of valid JSON; a number that is not finite becomes null, for -inf is a legal log-probability."""
    return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _logprob_object(entry: TokenLogprob) -> dict[str, Any]:
    """One emitted token's log-probabilities as a plain dictionary."""
    return {
        "token_id": entry.token_id,
        "logprob": entry.logprob,
        "top": [{"token_id": token_id, "logprob": logprob} for token_id, logprob in entry.top],
    }


def completion_object(completion: Completion) -> dict[str, Any]:
    """What --json prints of an answer."""
    stats = completion.stats
    return {
        "token_ids": completion.token_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "logprobs": None if completion.logprobs is None else [_logprob_object(entry) for entry in completion.logprobs],
        "stats": {
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "completion_tokens": stats.completion_tokens,
            "target_passes": stats.target_passes,
            "drafted_tokens": stats.drafted_tokens,
            "accepted_tokens": stats.accepted_tokens,
            "prefill_s": stats.prefill_s,
            "decode_s": stats.decode_s,
            "decode_tok_per_s": stats.decode_tok_per_s,
        },
    }


class TraceFile:
    """Step records as JSON lines, each complete on disk before the next step. Without a path it does nothing.

    Raises:
        ConfigError: the file can't be written; raised at once, before a model is loaded.
    """

    def __init__(self, path: Path | None) -> None:
        try:
            self._file = path.open("w", encoding="utf-8", buffering=1) if path else None
        except OSError as error:
            raise ConfigError(f"the trace file {path} can't be written: {error.strerror}") from error

    def write(self, record: StepRecord) -> None:
        """Appends one record."""
        if self._file:
            self._file.write(dumps(record.to_json()) + "\n")

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._file:
            self._file.close()
