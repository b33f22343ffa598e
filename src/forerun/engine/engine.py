"""Runs requests on a bound model, many at once."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator

from forerun.control.controller import Controller
from forerun.control.cost import StepCosts
from forerun.engine.completion import StreamEvent
from forerun.engine.jobs import EngineLoad, Job
from forerun.engine.output import Output
from forerun.engine.run import MAX_STEP_NODES, Run
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Sequence
from forerun.engine.step import Machine, StepOutcome, run_step
from forerun.errors import ForerunError
from forerun.kv.pages import PageManager
from forerun.models.detokenizer import TextStream
from forerun.models.tokenizer import Tokenizer
from forerun.ops.base import Executor
from forerun.sampling.distribution import RowSampler
from forerun.sampling.history import History
from forerun.types import TokenLogprob

DEFAULT_MAX_RUNNING = 64

Event = StreamEvent | ForerunError


class Engine:
    """A target, its sampler and its KV pages.

    Requests that fail or are cancelled give their pages back and leave nothing behind; the others never notice.

    One thread at a time: `step`, `submit`, `cancel` and `check_integrity` are for whoever drives the engine. `run` may
    be used by several threads, as long as nobody else drives it.

    Args:
        target: computes; its KV storage is at least `pages.num_pages` pages, its largest pass at least
            `chunk` and `MAX_STEP_NODES` + 1 rows.
        sampler: makes laws and draws.
        tokenizer: gives the text.
        pages: hands out the target's KV pages.
        costs: gives what steps take; called when it is needed first, because measuring takes time.
        chunk: prompt rows per pass at most.
        max_running: requests that have pages at the same time, at most; further ones wait. No more than there are rows
            in a pass.
    """

    def __init__(
        self,
        target: Executor,
        sampler: RowSampler,
        tokenizer: Tokenizer,
        pages: PageManager,
        costs: Callable[[], StepCosts],
        chunk: int,
        max_running: int = DEFAULT_MAX_RUNNING,
    ) -> None:
        max_rows = max(chunk, MAX_STEP_NODES + 1)
        assert 1 <= max_running <= max_rows
        self.pages = pages
        self.controller = Controller(costs, chunk, max_rows)
        self._machine = Machine(target, sampler, self.controller)
        self._tokenizer = tokenizer
        self._scheduler = Scheduler(pages, max_running)
        self._run_ids = itertools.count()
        self._runs: dict[int, Run] = {}
        # Of `run`:
        self._turnstile = threading.Lock()
        self._mail: dict[int, deque[tuple[int, Event]]] = {}
        self._left: deque[int] = deque()  # requests whose streams were closed

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self._runs)

    @property
    def load(self) -> EngineLoad:
        """What there is to do."""
        scheduler, pages = self._scheduler, self.pages
        return EngineLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_pages=pages.num_pages,
            num_used_pages=pages.num_used,
            num_kept_pages=pages.num_kept,
            num_preemptions=scheduler.num_preemptions,
        )

    def submit(self, job: Job) -> int:
        """Puts a request in line; nothing is computed. Returns its name."""
        run_id = next(self._run_ids)
        run = self._runs[run_id] = self._open(run_id, job)
        self._scheduler.add(run)
        return run_id

    def step(self) -> list[tuple[int, Event]]:
        """Runs one step of everything that may run.

        Returns:
            What came of it, by request: an event, of which the last holds the completion, or what ended the request.
        """
        if not self._runs:
            return []
        turns, outcomes = self._scheduler.schedule(self.controller.prompt_rows)
        events: list[tuple[int, Event]] = [(run.run_id, self._end(run, error)) for run, error in outcomes]
        if turns:
            for run, outcome in run_step(turns, self._scheduler.num_present, self._machine):
                events.append((run.run_id, self._event(run, outcome)))
        return events

    def cancel(self, run_id: int) -> None:
        """Ends a request and frees all that it holds; one that has ended is left as it is."""
        run = self._runs.pop(run_id, None)
        if run is not None:
            self._scheduler.remove(run)
            run.close()

    def run(self, *jobs: Job) -> Generator[tuple[int, StreamEvent]]:
        """Runs requests beside those of other callers.

        Nothing happens before the first event is asked for. Closing the iterator ends the requests. Whoever asks for an
        event drives the engine until there is one for him; those of others are kept for them.

        Yields:
            The place of a request among the jobs, and what a step gave it; its last event holds the completion.

        Raises:
            RequestError: the KV cache has too few pages for one of them, whoever else is there.
            EngineFault: a promise inside the engine was broken.
        """
        mail: deque[tuple[int, Event]] = deque()
        places: dict[int, int] = {}
        try:
            with self._turnstile:
                for place, job in enumerate(jobs):
                    run_id = self.submit(job)
                    places[run_id] = place
                    self._mail[run_id] = mail
            num_left = len(jobs)
            while num_left:
                with self._turnstile:
                    while not mail:
                        self._deliver()
                    self._end_left()
                run_id, event = mail.popleft()
                if isinstance(event, ForerunError):
                    raise event
                num_left -= event.completion is not None
                yield places[run_id], event
        finally:
            # Whoever drops a stream may be anywhere, in the middle of a step too; so nobody waits here.
            self._left.extend(places)
            if self._turnstile.acquire(blocking=False):
                try:
                    self._end_left()
                finally:
                    self._turnstile.release()

    def check_integrity(self) -> None:
        """Raises EngineFault unless all bookkeeping is in order."""
        self.pages.check_integrity()
        self._scheduler.check_integrity()

    def _end_left(self) -> None:
        """Ends the requests whose streams were closed."""
        while self._left:
            run_id = self._left.popleft()
            self.cancel(run_id)
            self._mail.pop(run_id, None)

    def _deliver(self) -> None:
        self._end_left()
        for run_id, event in self.step():
            mail = self._mail.get(run_id)
            if mail is not None:
                mail.append((run_id, event))

    def _open(self, run_id: int, job: Job) -> Run:
        request = job.request
        params = request.params
        sequence = Sequence(
            run_id,
            request.prompt_token_ids,
            request.max_len,
            self.pages,
            request.salt,
            # A page that others have written has no logits to read.
            reuses_prefix=params.prompt_logprobs is None,
        )
        stream = TextStream(self._tokenizer, params.stop, shown_ids=request.shown_ids)
        output = Output(request, stream, self._tokenizer.vocab_size)
        prompt_logprobs: list[TokenLogprob] | None = None if params.prompt_logprobs is None else []
        return Run(run_id, job, sequence, History(params, request.prompt_token_ids), output, prompt_logprobs)

    def _event(self, run: Run, outcome: StepOutcome | ForerunError) -> Event:
        if isinstance(outcome, ForerunError):
            self._scheduler.remove(run)
            return self._end(run, outcome)
        run.count(outcome.record, sum([token.is_draft for token in outcome.tokens]))
        self._scheduler.end_prompt(run)
        if run.output.finish_reason is None:
            return StreamEvent(outcome.tokens, outcome.record)
        self._scheduler.remove(run)
        return self._end(run, StreamEvent(outcome.tokens, outcome.record, run.completion()))

    def _end(self, run: Run, event: Event) -> Event:
        """Closes a request that is out of line; returns its last event."""
        del self._runs[run.run_id]
        run.close()
        return event
