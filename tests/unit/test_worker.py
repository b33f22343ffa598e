"""An engine in a thread of its own: what reaches the caller, and what becomes of requests when it stops or breaks."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from forerun.engine.jobs import Job
from forerun.engine.request import prepare
from forerun.engine.worker import Delivery, Worker
from forerun.errors import EngineFault, ForerunError
from forerun.types import SamplingParams
from tests.helpers.engines import Answer, FakeEngine, decode_naively

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
WAIT_S = 30.0


class Caller:
    """Collects what a worker delivers."""

    def __init__(self, fake: FakeEngine) -> None:
        self.fake = fake
        self.arrived: queue.Queue[tuple[int, Any]] = queue.Queue()
        self.worker = Worker(fake.engine, self._deliver)

    def _deliver(self, events: Delivery) -> None:
        for item in events:
            self.arrived.put(item)

    def job(self, prompt: list[int], params: SamplingParams = PARAMS) -> Job:
        return Job(prepare(prompt, params, "coupled", self.fake.limits))

    def last_events(self, names: set[int]) -> dict[int, Any]:
        """What each request ended with."""
        out: dict[int, Any] = {}
        while names - out.keys():
            name, event = self.arrived.get(timeout=WAIT_S)
            assert name not in out
            if isinstance(event, ForerunError) or event.completion is not None:
                out[name] = event
        return out


@pytest.fixture
def caller() -> Any:
    caller = Caller(FakeEngine(max_running=4))
    caller.worker.start()
    yield caller
    caller.worker.stop()
    assert not caller.worker.is_alive


def test_requests_from_several_threads_get_their_answers(caller: Caller) -> None:
    names: dict[int, list[int]] = {}
    lock = threading.Lock()

    def ask(first_id: int) -> None:
        for n in range(5):
            prompt = [first_id, n + 1]
            name = caller.worker.submit(caller.job(prompt))
            with lock:
                names[name] = prompt

    threads = [threading.Thread(target=ask, args=(first_id,)) for first_id in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, event in caller.last_events(set(names)).items():
        assert Answer.of(event.completion) == decode_naively(names[name], PARAMS, 0)


def test_a_cancelled_request_has_no_further_events(caller: Caller) -> None:
    long = SamplingParams(max_tokens=None, ignore_eos=True)
    name = caller.worker.submit(caller.job([1, 2], long))
    assert caller.arrived.get(timeout=WAIT_S)[0] == name
    caller.worker.cancel(name)
    caller.worker.cancel(name)
    caller.worker.cancel(12345)
    other = caller.worker.submit(caller.job([3]))
    while True:
        got, event = caller.arrived.get(timeout=WAIT_S)
        if got == other:
            break
    while event.completion is None:
        got, event = caller.arrived.get(timeout=WAIT_S)
        assert got == other


def test_load_is_zero_when_idle(caller: Caller) -> None:
    names = {caller.worker.submit(caller.job([n + 1])) for n in range(8)}
    caller.last_events(names)
    for _ in range(1000):
        load = caller.worker.load
        if not load.num_running and not load.num_used_pages:
            break
        threading.Event().wait(0.005)
    assert (load.num_running, load.num_waiting, load.num_used_pages) == (0, 0, 0)


def test_stopping_ends_what_runs_and_refuses_what_comes() -> None:
    caller = Caller(FakeEngine())
    gate = threading.Event()
    forward = caller.fake.target.forward

    def slow(batch: Any) -> Any:
        gate.wait(WAIT_S)
        return forward(batch)

    caller.fake.target.forward = slow  # type: ignore[method-assign]
    caller.worker.start()
    names = {caller.worker.submit(caller.job([n + 1])) for n in range(3)}
    stopper = threading.Thread(target=caller.worker.stop)
    stopper.start()
    gate.set()
    stopper.join(WAIT_S)
    for event in caller.last_events(names).values():
        assert isinstance(event, EngineFault)
        assert "stopped before" in str(event)
    with pytest.raises(EngineFault, match="has stopped"):
        caller.worker.submit(caller.job([1]))
    assert caller.fake.pages.num_used == 0


def test_an_engine_that_breaks_down_tells_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller(FakeEngine())
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # it is printed for whoever looks after it

    def fail(*args: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(caller.fake.engine._scheduler, "schedule", fail)
    caller.worker.start()
    name = caller.worker.submit(caller.job([1]))
    event = caller.last_events({name})[name]
    assert isinstance(event, EngineFault)
    assert "broke down" in str(event)
    caller.worker.stop()
    assert not caller.worker.is_alive
