"""Tests that run in an event loop of their own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

TIMEOUT_S = 20.0


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a coroutine function to its end, at most for a while."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(*args, **kwargs), TIMEOUT_S)

        asyncio.run(bounded())

    return run


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Waits for a condition."""
    for _ in range(int(timeout_s / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never became true")
