"""Decides who runs in a step, with how many rows. Knows requests and pages, never a model.

Every running request whose prompt is done has a row in every step. What a step may take on top goes to prompts, in
pieces: the first in line first. Requests rank by priority, then by when they came. Who comes in gets pages for all of
its text at once; who decodes gets one when it needs one, and where there is none the lowest in rank gives its pages
back and waits again. Its tokens are kept, and what its cache held is computed again, so nothing of that shows in what
it emits.

A request whose text begins with pages that another one is just computing waits for them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from forerun.engine.run import Run
from forerun.errors import EngineFault, ForerunError, RequestError
from forerun.kv.pages import PageManager, num_pages_for

# Logits of all rows are wanted where a prompt's log-probabilities are: as many as a step's draft has.
MAX_LOGPROB_ROWS = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """What a request does in a step.

    Attributes:
        run: the request.
        end: the rows are those of its tokens [cached_len, end).
        is_decoding: it has one row, and may have a draft.
    """

    run: Run
    end: int
    is_decoding: bool

    @property
    def gives_tokens(self) -> bool:
        """Whether its last token is among the rows."""
        return self.end == self.run.sequence.committed_len


class Scheduler:
    """The requests of an engine, waiting and running.

    Args:
        pages: of the target's KV cache; anything may hold some of them.
        max_running: requests with pages at most.

    Attributes:
        running: those with pages, by rank.
        waiting: the others, by rank.
        num_preemptions: how often one had to give its pages back.
    """

    def __init__(self, pages: PageManager, max_running: int) -> None:
        self.running: list[Run] = []
        self.waiting: list[Run] = []
        self.num_preemptions = 0
        self._pages = pages
        self._max_running = max_running
        self._makers: dict[bytes, int] = {}  # who computes a page that others may begin with
        self._made_by: dict[int, tuple[bytes, ...]] = {}

    def add(self, run: Run) -> None:
        """Puts a request in line."""
        insort(self.waiting, run, key=_rank)

    def remove(self, run: Run) -> None:
        """Takes a request out, wherever it is; closing it is the caller's.

        Raises:
            EngineFault: it isn't there.
        """
        self._forget_making(run)
        for place in (self.running, self.waiting):
            if any(run is other for other in place):
                place.remove(run)
                return
        raise EngineFault(f"request {run.run_id} is not in line")

    def schedule(
        self, prompt_rows: Callable[[int, int, int], int]
    ) -> tuple[list[Turn], list[tuple[Run, ForerunError]]]:
        """The turns of a step, and the requests that can't run at all, which are out of line then.

        Args:
            prompt_rows: the most rows of prompts, by the numbers of requests that decode and that are present, and by
                the tokens that the rows see.
        """
        failed: list[tuple[Run, ForerunError]] = []
        self._reserve_last_tokens(failed)
        # Who comes in shares what the prompts before it leave over; how long its own text is matters next time.
        while self.waiting and self._num_prompt_rows() < self._budget(prompt_rows):
            if not self._admit(failed):
                break
        turns = [Turn(run, run.sequence.committed_len, True) for run in self.running if run.is_decoding]
        if len(turns) == len(self.running):
            return turns, failed
        budget = self._budget(prompt_rows)
        for run in self.running:
            if budget > 0 and not run.is_decoding:
                turns.append(_prompt_turn(run, budget))
                budget -= turns[-1].end - run.sequence.cached_len
        return turns, failed

    @property
    def num_present(self) -> int:
        """Requests in line, as many as may run together."""
        return min(len(self.running) + len(self.waiting), self._max_running)

    def end_prompt(self, run: Run) -> None:
        """Says that a request's prompt is computed."""
        self._forget_making(run)

    def check_integrity(self) -> None:
        """Raises EngineFault unless who runs has pages, nobody else has, and all are in order."""
        for run in self.running:
            if not run.sequence.is_open:
                raise EngineFault(f"request {run.run_id} runs without pages")
        for run in self.waiting:
            if run.sequence.is_open:
                raise EngineFault(f"request {run.run_id} waits with pages")
        ids = [run.run_id for run in (*self.running, *self.waiting)]
        if len(set(ids)) != len(ids):
            raise EngineFault("a request is in line twice")
        if len(self.running) > self._max_running:
            raise EngineFault(f"{len(self.running)} requests run, more than {self._max_running}")
        for place in (self.running, self.waiting):
            if any(a.rank >= b.rank for a, b in pairwise(place)):
                raise EngineFault("requests are not in order")
        if not self._made_by.keys() <= {run.run_id for run in self.running}:
            raise EngineFault("somebody computes a prompt and doesn't run")
        made = {digest: run_id for run_id, digests in self._made_by.items() for digest in digests}
        if not self._makers.items() <= made.items():
            raise EngineFault("a page is being computed by nobody")

    def _reserve_last_tokens(self, failed: list[tuple[Run, ForerunError]]) -> None:
        """Sees to it that who decodes has a slot for its last token, at the cost of those of lower rank."""
        for run in list(self.running):
            # Who gave its pages back for an earlier one is not among them any more.
            if not run.sequence.is_open or not run.is_decoding:
                continue
            while not run.sequence.try_reserve(run.sequence.committed_len):
                last = self.running[-1]
                if last is not run:
                    self._preempt(last)
                elif len(self.running) > 1:
                    self._preempt(run)
                    break
                else:
                    self._fail(run, failed, self._no_room(run))
                    break

    def _budget(self, prompt_rows: Callable[[int, int, int], int]) -> int:
        """Rows of prompts that the step may have."""
        num_decoding = sum([run.is_decoding for run in self.running])
        # What the next prompt's rows see, at least.
        context_len = next((run.sequence.cached_len for run in self.running if not run.is_decoding), 0)
        return prompt_rows(num_decoding, self.num_present, context_len)

    def _num_prompt_rows(self) -> int:
        """Rows that the prompts of running requests still lack."""
        left = [run.sequence.committed_len - run.sequence.cached_len for run in self.running if not run.is_decoding]
        return sum(left)

    def _admit(self, failed: list[tuple[Run, ForerunError]]) -> bool:
        """Lets in the first in line that may come, or finds that it never can; False where nobody may."""
        for run in list(self.waiting):
            if self._waits_for_pages(run):
                continue
            while not self._opens(run):
                last = self.running[-1] if self.running else None
                if last is None:
                    self._fail(run, failed, self._no_room(run))
                    return True
                if last.job.priority <= run.job.priority:
                    return False
                self._preempt(last)
            self.waiting.remove(run)
            insort(self.running, run, key=_rank)
            self._start(run, failed)
            return True
        return False

    def _opens(self, run: Run) -> bool:
        """Gives a request pages for all its text, if it may run and nobody who does would soon miss them."""
        if len(self.running) >= self._max_running:
            return False
        sequence = run.sequence
        sequence.open()
        # A page for whoever may need the next one.
        if sequence.try_reserve(sequence.committed_len) and self._pages.num_free >= len(self.running):
            return True
        sequence.close()
        return False

    def _start(self, run: Run, failed: list[tuple[Run, ForerunError]]) -> None:
        digests = run.sequence.digests
        made = [digest for digest in digests[self._pages.num_known(digests) :] if digest not in self._makers]
        self._makers.update(dict.fromkeys(made, run.run_id))
        self._made_by[run.run_id] = tuple(made)
        try:
            if not run.has_started:
                run.start()
        except ForerunError as error:
            self._fail(run, failed, error)

    def _waits_for_pages(self, run: Run) -> bool:
        """Whether somebody is about to compute what the request could begin with."""
        if not self._makers:
            return False
        digests = run.sequence.digests
        num_known = self._pages.num_known(digests)
        return num_known < len(digests) and digests[num_known] in self._makers

    def _preempt(self, run: Run) -> None:
        self._forget_making(run)
        self.running.remove(run)
        run.sequence.close()
        run.tally.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, run, key=_rank)

    def _fail(self, run: Run, failed: list[tuple[Run, ForerunError]], error: ForerunError) -> None:
        self.remove(run)
        failed.append((run, error))

    def _no_room(self, run: Run) -> RequestError:
        return RequestError(
            f"{run.sequence.committed_len} tokens need {num_pages_for(run.sequence.committed_len)} pages of the KV "
            f"cache, but {self._pages.num_free} of its {self._pages.num_pages} pages are free"
        )

    def _forget_making(self, run: Run) -> None:
        for digest in self._made_by.pop(run.run_id, ()):
            self._makers.pop(digest, None)


def _rank(run: Run) -> tuple[int, int]:
    return run.rank


def _prompt_turn(run: Run, budget: int) -> Turn:
    """As much of a request's prompt as the budget allows."""
    sequence = run.sequence
    num_rows = min(budget, sequence.committed_len - sequence.cached_len)
    if run.wants_prompt_logprobs:
        num_rows = min(num_rows, MAX_LOGPROB_ROWS)
    return Turn(run, sequence.cached_len + num_rows, is_decoding=False)
