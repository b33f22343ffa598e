"""forerun: speculation that changes nothing but speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forerun.errors import ConfigError, EngineFault, ForerunError, LoadError, RequestError
from forerun.types import SamplingParams

if TYPE_CHECKING:
    from forerun.engine.completion import Completion, StreamEvent
    from forerun.engine.llm import LLM
    from forerun.models.structured import Structured

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Completion",
    "ConfigError",
    "EngineFault",
    "ForerunError",
    "LoadError",
    "RequestError",
    "SamplingParams",
    "StreamEvent",
    "Structured",
    "__version__",
]

# Imported when they are first used, so that the command line's help does not wait for an engine.
_LAZY = {
    "LLM": "forerun.engine.llm",
    "Completion": "forerun.engine.completion",
    "StreamEvent": "forerun.engine.completion",
    "Structured": "forerun.models.structured",
}


if not TYPE_CHECKING:  # or the type checker would believe in every name

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'forerun' has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
