"""Between the engine's thread and the event loop.

The engine hands over everything that came of a step at once. Where a stream or the end of an answer is among it, one
call wakes the loop, which puts each event into the inbox of the HTTP request that waits for it; the rest waits until
then. All else here runs in the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from forerun.engine.completion import Completion, EmittedToken, StreamEvent
from forerun.errors import ForerunError
from forerun.serve.meter import Meter
from forerun.serve.metrics import Metrics
from forerun.serve.problems import Problem

if TYPE_CHECKING:
    from forerun.engine.jobs import EngineLoad, Job
    from forerun.engine.worker import Delivery

TICK_S = 0.5
MAX_ARRIVED = 64  # steps whose results wait until somebody needs one
MAX_UNREAD_PARTS = 4096  # steps that a client may leave unread before it is cut


class Part(NamedTuple):
    """What one step did for one job. Not the whole event: its record may hold arrays as wide as the vocabulary.

    Attributes:
        choice: the job's place in the request.
        tokens: what was emitted.
        completion: the whole result, with the last part only.
        error: why the job failed, in its last part.
    """

    choice: int
    tokens: tuple[EmittedToken, ...]
    completion: Completion | None = None
    error: ForerunError | None = None


class EngineWorker(Protocol):
    """What the hub needs of `engine.worker.Worker`."""

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""

    @property
    def load(self) -> EngineLoad:
        """What the engine is busy with."""

    def start(self) -> None:
        """Starts the thread."""

    def submit(self, job: Job) -> int:
        """Takes a job; returns its id."""

    def cancel(self, job_id: int) -> None:
        """Drops a job."""

    def stop(self) -> None:
        """Ends the thread."""


class Inbox:
    """The events of one HTTP request, which may wait for several jobs. Close it when the request ends, however it does.

    Attributes:
        meters: per job, what was measured.
        is_stream: somebody waits for every part, not for the last one of each job alone.
        problem: why the request was ended from outside; None while it goes on.
        is_score: what is generated is not delivered.
        is_gone: the client has closed the connection.
        job_ids: the engine's names of the jobs.
        on_cut: closes the connection, read or not.
        sending_since_s: when the write began that hasn't ended; None between writes.
        quiet_since_s: when something was last written.
    """

    def __init__(self, hub: Hub, num_jobs: int, is_stream: bool) -> None:
        self.meters = [Meter() for _ in range(num_jobs)]
        self.is_stream = is_stream
        self.problem: Problem | None = None
        self.is_gone = False
        self.on_cut: Callable[[], None] | None = None
        self.sending_since_s: float | None = None
        self.quiet_since_s = time.monotonic()
        self.job_ids: list[int] = []
        self._hub = hub
        self.is_score = False
        self._parts: list[Part] = []
        self._waiter: asyncio.Future[None] | None = None

    async def get(self) -> list[Part]:
        """All that has come; empty when the client has gone, or when it is time for a keep-alive.

        Raises:
            Problem: the request was ended from outside.
        """
        if not self._parts and self.problem is None and not self.is_gone:
            self._waiter = self._hub.loop.create_future()
            await self._waiter
            self._waiter = None
        if self.problem is not None:
            raise self.problem
        parts, self._parts = self._parts, []
        return parts

    def put(self, part: Part, is_last: bool) -> None:
        """Adds what a step did for a job."""
        self._parts.append(part)
        if self.is_stream and len(self._parts) > MAX_UNREAD_PARTS:
            self.cut("the client left too much unread")
        if self.is_stream or is_last:
            self.wake()

    def wake(self) -> None:
        """Lets `get` return."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def leave(self) -> None:
        """The client has gone."""
        self.is_gone = True
        self.close()
        self.wake()

    def end(self, problem: Problem) -> None:
        """Ends the request from outside."""
        if self.problem is None:
            self.problem = problem
            self.close()
            self.wake()

    def cut(self, reason: str) -> None:
        """Drops a client that doesn't read: its jobs end and the connection is closed, read or not."""
        if self.problem is None:
            self._hub.metrics.count_cut()
            self.end(Problem(503, f"the connection was closed: {reason}"))
            if self.on_cut is not None:
                self.on_cut()

    def close(self) -> None:
        """Cancels what still runs."""
        self._hub.drop(self)


class Hub:
    """Owns the worker.

    Args:
        metrics: counts what passes through.
        max_jobs: jobs that may be in the engine at a time, running or waiting.
        send_timeout_s: how long a client may take to read.
        keepalive_s: pause after which a stream is woken.
    """

    def __init__(self, metrics: Metrics, max_jobs: int, send_timeout_s: float, keepalive_s: float) -> None:
        self.metrics = metrics
        self.is_draining = False
        self.loop: asyncio.AbstractEventLoop
        self._max_jobs = max_jobs
        self._send_timeout_s = send_timeout_s
        self._keepalive_s = keepalive_s
        self._jobs: dict[int, tuple[Inbox, int]] = {}
        self._arrived: deque[tuple[float, Delivery]] = deque()  # from the engine's thread, with the time it came
        self._inboxes: set[Inbox] = set()
        self._quiet: dict[int, asyncio.Future[None]] = {}
        self._worker: EngineWorker | None = None
        self._ticker: asyncio.Task[None] | None = None

    def start(self, make_worker: Callable[[Callable[[Delivery], None]], EngineWorker]) -> None:
        """Starts the engine's thread; called in the loop.

        Args:
            make_worker: makes the worker, given what it calls with the results of a step.
        """
        self.loop = asyncio.get_running_loop()
        self._worker = make_worker(self._deliver)
        worker = self._worker
        self.metrics.read_load = lambda: worker.load
        self._worker.start()
        self._ticker = self.loop.create_task(self._tick())

    def stop(self) -> None:
        """Ends what runs, and the engine's thread."""
        self.end_all(Problem(503, "the server is shutting down"))
        if self._ticker is not None:
            self._ticker.cancel()
        if self._worker is not None:
            self._worker.stop()

    @property
    def is_alive(self) -> bool:
        """Whether the engine works."""
        return self._worker is not None and self._worker.is_alive

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._inboxes)

    @property
    def num_jobs(self) -> int:
        """Jobs in the engine, running or waiting."""
        return len(self._jobs)

    def submit(self, jobs: Sequence[Job], *, is_stream: bool, is_score: bool) -> Inbox:
        """Gives the engine all jobs of a request, or none of them.

        Raises:
            Problem: 429 when the queue is full, 503 when the engine takes no more work, 400 for a job it refuses.
        """
        worker = self._worker
        if worker is None or not worker.is_alive:
            raise Problem(503, "the engine is not running")
        if self.is_draining:
            raise Problem(503, "the server is shutting down")
        if len(jobs) > self._max_jobs:
            raise Problem(
                400, f"the request asks for {len(jobs)} choices in all, but at most {self._max_jobs} fit", "n"
            )
        if len(self._jobs) + len(jobs) > self._max_jobs:
            raise Problem(429, f"the queue is full with {len(self._jobs)} jobs; try again later")
        inbox = Inbox(self, len(jobs), is_stream)
        inbox.is_score = is_score
        self._inboxes.add(inbox)
        try:
            for index, job in enumerate(jobs):
                job_id = worker.submit(job)
                inbox.job_ids.append(job_id)
                self._jobs[job_id] = (inbox, index)
        except ForerunError as error:
            inbox.close()
            raise Problem.of(error) from error
        return inbox

    async def run_quietly(self, job: Job) -> None:
        """Runs a job of the server's own, which no metric counts.

        Raises:
            ForerunError: it failed.
        """
        assert self._worker is not None
        done: asyncio.Future[None] = self.loop.create_future()
        job_id = self._worker.submit(job)
        self._quiet[job_id] = done
        try:
            await done
        finally:
            del self._quiet[job_id]

    def drop(self, inbox: Inbox) -> None:
        """Cancels the jobs of an inbox that still run, and forgets it."""
        if inbox not in self._inboxes:
            return
        self._inboxes.discard(inbox)
        for job_id in inbox.job_ids:
            if self._jobs.pop(job_id, None) is not None and self._worker is not None:
                self._worker.cancel(job_id)
                self.metrics.count_finished("abort")

    def end_all(self, problem: Problem) -> None:
        """Ends every request with the same words."""
        for inbox in list(self._inboxes):
            inbox.end(problem)

    def _deliver(self, delivery: Delivery) -> None:
        """Called in the engine's thread, once a step. The loop is woken only where somebody waits for the tokens."""
        self._arrived.append((time.perf_counter(), delivery))
        if not self._is_urgent(delivery) and len(self._arrived) < MAX_ARRIVED:
            return
        try:
            self.loop.call_soon_threadsafe(self._dispatch_all)
        except RuntimeError:  # the loop has closed: nobody waits for anything any more
            return

    def _is_urgent(self, delivery: Delivery) -> bool:
        for job_id, item in delivery:
            place = self._jobs.get(job_id)  # None for what was just submitted, too
            if place is None or place[0].is_stream or isinstance(item, ForerunError) or item.completion is not None:
                return True
        return False

    def _dispatch_all(self) -> None:
        while self._arrived:
            self._dispatch(*self._arrived.popleft())

    def _dispatch(self, now: float, delivery: Delivery) -> None:
        num_tokens = 0
        for job_id, item in delivery:
            place = self._jobs.get(job_id)
            if place is None:
                self._dispatch_quiet(job_id, item)
                continue
            inbox, index = place
            if isinstance(item, StreamEvent):
                num_tokens += len(item.tokens)
                self.metrics.observe(item, inbox.meters[index], now, is_delivered=not inbox.is_score)
                part = Part(index, item.tokens, item.completion)
            else:
                self.metrics.count_finished("error")
                part = Part(index, (), None, item)
            is_last = part.completion is not None or part.error is not None
            if is_last:
                del self._jobs[job_id]
            inbox.put(part, is_last)
        if num_tokens:
            self.metrics.iteration_tokens.observe(num_tokens)

    def _dispatch_quiet(self, job_id: int, item: StreamEvent | ForerunError) -> None:
        done = self._quiet.get(job_id)
        if done is None or done.done():  # cancelled meanwhile
            return
        if isinstance(item, ForerunError):
            done.set_exception(item)
        elif item.completion is not None:
            done.set_result(None)

    async def _tick(self) -> None:
        """Wakes quiet streams, cuts clients that don't read, and notices an engine that has died."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for inbox in list(self._inboxes):
                since = inbox.sending_since_s
                if since is not None and now - since > self._send_timeout_s:
                    inbox.cut(f"the client did not read for {self._send_timeout_s:g} s")
                elif since is None and inbox.is_stream and now - inbox.quiet_since_s > self._keepalive_s:
                    inbox.wake()
            self._dispatch_all()
            if not self.is_alive:
                self.end_all(Problem(500, "the engine has stopped after a fault; the server needs a restart"))
