"""From a bound port to a clean exit.

bind -> answer 503 -> load and warm up -> serve -> first signal: drain -> exit 0
                                                -> second signal: exit 0 at once
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from forerun.engine.worker import Worker
from forerun.errors import ConfigError
from forerun.serve.app import Served, create_app
from forerun.serve.logs import log_periodically
from forerun.serve.problems import Problem
from forerun.serve.protocol import protocol_class
from forerun.serve.warmup import warm_up

if TYPE_CHECKING:
    from forerun.engine.llm import LLM

# The loop's thread and the engine's share the interpreter. When a pass over the weights ends, the engine waits for the
# loop to let go of it, by default up to 5 ms: half a step of a small model. A tenth of that costs little in switches.
SWITCH_INTERVAL_S = 0.0005
BACKLOG = 2048
_SPARE_DESCRIPTORS = 64  # for files and pipes of our own
_DRAIN_POLL_S = 0.05

_log = logging.getLogger("forerun.serve")


def bind(host: str, port: int) -> socket.socket:
    """The listening socket; port 0 takes any that is free.

    Raises:
        ConfigError: the address can't be had; names it.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            # A port that a killed server has left is free again at once; one that is in use stays refused.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"can't listen on {host}, port {port}: {reason}; choose another --port or --host") from error
    return listener


def address_of(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def num_connections_allowed(wanted: int) -> int:
    """How many connections the process has descriptors for, at most as many as wanted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _SPARE_DESCRIPTORS
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft - _SPARE_DESCRIPTORS))


def serve(listener: socket.socket, served: Served, load: Callable[[], LLM], announce: Callable[[], None]) -> None:
    """Serves until a signal ends it.

    Args:
        listener: from `bind`.
        served: what the routes work with; gets the model.
        load: loads the model, in a thread of its own.
        announce: called once the server is ready.

    Raises:
        ForerunError: the model can't be loaded.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    server = _Server(served, load, announce)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[listener]))
    if server.failure is not None:
        raise server.failure
    if server.is_loading:
        # The thread that loads is inside native code; nothing of it is worth waiting for.
        sys.stderr.flush()
        os._exit(0)


class _Server(uvicorn.Server):
    """A web server that loads its model while it answers, and drains before it leaves.

    Attributes:
        failure: why the model could not be loaded.
        is_loading: the thread that loads still runs.
    """

    def __init__(self, served: Served, load: Callable[[], LLM], announce: Callable[[], None]) -> None:
        settings = served.settings
        super().__init__(
            uvicorn.Config(
                create_app(served),
                http=protocol_class(settings.max_connections, settings.receive_timeout_s),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=1,
            )
        )
        self.failure: BaseException | None = None
        self.is_loading = False
        self._served, self._load, self._announce = served, load, announce
        self._num_signals = 0
        self._tasks: list[asyncio.Task[Any]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to answer, and to load."""
        await super().startup(sockets)
        self._tasks.append(asyncio.create_task(self._bring_up()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the connections, then the engine."""
        for task in self._tasks:
            task.cancel()
        await super().shutdown(sockets)
        self._served.hub.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends at once. Neither is raised again: the exit code is 0."""
        self._num_signals += 1
        if self._num_signals == 1 and not self.is_loading:
            self._served.hub.is_draining = True
            self._served.hub.loop.call_soon_threadsafe(self._start_draining, signal.Signals(sig).name)
        else:
            self.should_exit = self.force_exit = True

    def _start_draining(self, name: str) -> None:
        num_jobs = self._served.hub.num_jobs
        _log.info("%s: draining, %d jobs are left; a second signal ends at once", name, num_jobs)
        self._tasks.append(asyncio.create_task(self._drain()))

    async def _drain(self) -> None:
        hub, loop = self._served.hub, asyncio.get_running_loop()
        until = loop.time() + self._served.settings.drain_s
        while hub.num_open and loop.time() < until:
            await asyncio.sleep(_DRAIN_POLL_S)
        if hub.num_open:
            _log.warning("%d requests did not end in time", hub.num_open)
            hub.end_all(Problem(503, "the server is shutting down", code="shutting_down"))
            await asyncio.sleep(_DRAIN_POLL_S)
        self.should_exit = True

    async def _bring_up(self) -> None:
        served = self._served
        try:
            llm = await self._loaded()
            served.hub.start(lambda deliver: Worker(llm.engine, deliver))
            served.llm = llm
            await warm_up(served, llm)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # whatever it is, the command tells it
            self.failure = error
            self.should_exit = True
            return
        served.is_ready = True
        self._announce()
        await log_periodically(served.hub)

    async def _loaded(self) -> LLM:
        """The model, from a thread that doesn't keep the process alive."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[LLM] = loop.create_future()

        def run() -> None:
            llm, failure = None, None
            try:
                llm = self._load()
            except BaseException as error:
                failure = error
            _call_soon(loop, lambda: _settle(done, llm, failure))

        self.is_loading = True
        threading.Thread(target=run, name="load", daemon=True).start()
        llm = await done
        self.is_loading = False
        return llm


def _settle(done: asyncio.Future[LLM], llm: LLM | None, failure: BaseException | None) -> None:
    if done.cancelled():
        return
    if llm is not None:
        done.set_result(llm)
    elif failure is not None:
        done.set_exception(failure)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:  # the server has ended meanwhile
        return
