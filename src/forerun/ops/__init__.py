"""The operation set and its backends. A backend is imported when it is chosen, so the native one needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forerun.errors import ConfigError
from forerun.ops.base import Executor, ExecutorConfig, Ops

__all__ = ["BACKENDS", "ExecutorConfig", "create_executor"]

BACKENDS = ("native", "torch")


def create_executor(backend: str, config: ExecutorConfig, build: Callable[[Ops[Any]], Any]) -> Executor:
    """Binds a model to a backend.

    Args:
        backend: `native` or `torch`.
        config: sizes, KV storage, threads and device.
        build: writes the forward pass in `Ops` calls and returns the handle that `logits` gave it.

    Raises:
        ConfigError: the backend or the device is unknown or missing here.
    """
    if backend == "native":
        if config.device != "cpu":
            raise ConfigError(f"the native backend runs on cpu, not on {config.device}; choose backend torch for a GPU")
        from forerun.ops.native import NativeExecutor

        return NativeExecutor(config, build)
    if backend == "torch":
        try:
            from forerun.ops.torch import TorchExecutor
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ConfigError("backend torch needs PyTorch; install it with: pip install 'forerun[torch]'") from error
        return TorchExecutor(config, build)
    raise ConfigError(f"backend {backend!r} is unknown; the backends are {', '.join(BACKENDS)}")
