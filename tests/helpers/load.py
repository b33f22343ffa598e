"""Many requests at once on one engine, with arrivals and cancellations at random times, and what each gave."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun.engine.completion import Completion, StreamEvent
from forerun.engine.engine import Engine
from forerun.engine.jobs import Job
from forerun.errors import ForerunError


@dataclass
class Served:
    """What became of a request.

    Attributes:
        events: what it gave.
        error: what ended it; None where nothing did.
        is_cancelled: whether its caller ended it.
    """

    events: list[StreamEvent] = field(default_factory=list)
    error: ForerunError | None = None
    is_cancelled: bool = False

    @property
    def completion(self) -> Completion | None:
        return self.events[-1].completion if self.events else None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for event in self.events for token_id in event.token_ids)


def serve(
    engine: Engine,
    jobs: Sequence[Job],
    rng: random.Random,
    *,
    arrival: float = 0.3,
    cancelled: float = 0.0,
    check: Callable[[], None] | None = None,
) -> list[Served]:
    """Serves jobs that come in at random steps.

    Args:
        engine: idle.
        jobs: in the order in which they come.
        rng: decides when.
        arrival: probability that one comes before a step.
        cancelled: probability that a request is cancelled at some time.
        check: called after every step.
    """
    served = [Served() for _ in jobs]
    places: dict[int, int] = {}
    to_come = list(range(len(jobs)))
    while to_come or engine.has_work:
        while to_come and (rng.random() < arrival or not engine.has_work):
            place = to_come.pop(0)
            places[engine.submit(jobs[place])] = place
        for run_id, event in engine.step():
            mine = served[places[run_id]]
            assert not mine.is_cancelled
            assert mine.error is None
            if isinstance(event, ForerunError):
                mine.error = event
            else:
                mine.events.append(event)
        if rng.random() < cancelled:
            run_id, place = rng.choice(list(places.items()))
            mine = served[place]
            if mine.completion is None and mine.error is None:
                mine.is_cancelled = True
            engine.cancel(run_id)
        if check is not None:
            check()
    return served
