"""An engine in a thread of its own, for callers in other threads, such as an event loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from forerun.engine.engine import Engine, Event
from forerun.engine.jobs import EngineLoad, Job
from forerun.errors import EngineFault, ForerunError

Delivery = list[tuple[int, Event]]


class Worker:
    """Drives an engine; nobody else may meanwhile.

    Args:
        engine: what it drives.
        deliver: called in the engine's thread after each step with all that came of it, by request. A request's last
            event holds its completion or is an error; one that was cancelled has no further events.
    """

    def __init__(self, engine: Engine, deliver: Callable[[Delivery], None]) -> None:
        self._engine = engine
        self._deliver = deliver
        self._wake = threading.Condition()
        self._orders: deque[tuple[int, Job | None]] = deque()  # None cancels
        self._names: dict[int, int] = {}  # a caller's name of a request -> the engine's
        self._callers: dict[int, int] = {}  # the other way round
        self._num_submitted = 0
        self._is_stopping = False
        self._load = engine.load
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether it runs; False once it has stopped or broken down."""
        return self._thread.is_alive()

    @property
    def load(self) -> EngineLoad:
        """What the engine had to do after its last step, with what was submitted since; from any thread."""
        return self._load

    def start(self) -> None:
        """Starts the thread; call it once."""
        self._thread.start()

    def submit(self, job: Job) -> int:
        """Hands in a request, from any thread. Returns the name under which its events come.

        Raises:
            EngineFault: the engine has stopped.
        """
        with self._wake:
            if self._is_stopping or not self._thread.is_alive():
                raise EngineFault("the engine has stopped")
            name = self._num_submitted
            self._num_submitted += 1
            self._orders.append((name, job))
            self._wake.notify()
        return name

    def cancel(self, name: int) -> None:
        """Ends a request, from any thread; one that has ended is left as it is."""
        with self._wake:
            self._orders.append((name, None))
            self._wake.notify()

    def stop(self) -> None:
        """Ends the thread after the step that is running, and waits for that. What still runs gets an EngineFault."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        fault: ForerunError = EngineFault("the engine was stopped before the request was done")
        try:
            while self._take_orders():
                self._tell(self._engine.step())
        except Exception as error:
            fault = EngineFault(f"the engine broke down: {error!r}")
            raise
        finally:
            with self._wake:
                self._is_stopping = True
                lost = [*self._names, *[name for name, job in self._orders if job is not None]]
                self._orders.clear()
            for run_id in self._callers:
                self._engine.cancel(run_id)
            if lost:
                self._deliver([(name, fault) for name in lost])

    def _take_orders(self) -> bool:
        """Does what callers asked for, and waits where there is nothing to do; False when it is time to stop."""
        with self._wake:
            while not self._orders and not self._engine.has_work and not self._is_stopping:
                self._load = self._engine.load
                self._wake.wait()
            if self._is_stopping:
                return False
            orders, self._orders = self._orders, deque()
        for name, job in orders:
            if job is not None:
                run_id = self._engine.submit(job)
                self._names[name], self._callers[run_id] = run_id, name
            elif (known := self._names.pop(name, None)) is not None:
                del self._callers[known]
                self._engine.cancel(known)
        self._load = self._engine.load
        return True

    def _tell(self, events: Delivery) -> None:
        """Hands over what a step gave, under its callers' names."""
        out: Delivery = []
        for run_id, event in events:
            name = self._callers[run_id]
            out.append((name, event))
            if isinstance(event, ForerunError) or event.completion is not None:
                del self._callers[run_id], self._names[name]
        self._load = self._engine.load
        if out:
            self._deliver(out)
