"""Runs requests on a bound model, one at a time."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from forerun.control.planner import Planner
from forerun.control.speculator import Speculator
from forerun.drafters.base import DraftContext
from forerun.engine.completion import Completion, Stats, StreamEvent
from forerun.engine.output import Output
from forerun.engine.request import Request
from forerun.engine.sequence import Sequence
from forerun.engine.step import Run, StepOutcome, decode_step, prefill_step
from forerun.errors import RequestError
from forerun.kv.pages import PageManager
from forerun.models.detokenizer import TextStream
from forerun.models.tokenizer import Tokenizer
from forerun.ops.base import Executor
from forerun.sampling.distribution import RowSampler
from forerun.sampling.history import History
from forerun.types import FinishReason
from forerun.verify import drafting_stream


class Engine:
    """A target, its sampler and its KV pages.

    A request that fails or is dropped in the middle gives its pages back and leaves nothing behind.

    Args:
        target: computes; its KV storage is at least `pages.num_pages` pages, its largest pass at least
            `chunk` and `MAX_STEP_NODES` + 1 rows.
        sampler: makes laws and draws.
        tokenizer: gives the text.
        pages: hands out the target's KV pages.
        chunk: prompt rows per pass at most.
    """

    def __init__(
        self, target: Executor, sampler: RowSampler, tokenizer: Tokenizer, pages: PageManager, chunk: int
    ) -> None:
        self.pages = pages
        self._target = target
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._chunk = chunk
        self._sequence_ids = itertools.count()
        self._running = threading.Lock()

    def run(self, request: Request, speculator: Speculator | None = None) -> Generator[StreamEvent]:
        """Runs one request; each step is one event, and the last event holds the completion.

        Nothing happens before the first event is asked for. Closing the iterator ends the request.

        Args:
            request: what to run.
            speculator: who drafts; None decodes plainly.

        Raises:
            RequestError: another request is running, or the KV cache has too few free pages.
            EngineFault: a promise inside the engine was broken.
        """
        with (
            self._one_at_a_time(),
            self._open(request) as sequence,
            self._plan(request, sequence, speculator) as planner,
        ):
            yield from self._steps(request, sequence, planner)

    def _start(self, request: Request, sequence: Sequence, planner: Planner | None) -> Run:
        stream = TextStream(self._tokenizer, request.params.stop)
        return Run(
            request=request,
            target=self._target,
            sampler=self._sampler,
            sequence=sequence,
            history=History(request.params, request.prompt_token_ids),
            output=Output(request, stream, self._tokenizer.vocab_size),
            planner=planner,
        )

    def _steps(self, request: Request, sequence: Sequence, planner: Planner | None) -> Iterator[StreamEvent]:
        began = time.perf_counter()
        run = self._start(request, sequence, planner)
        outcome = prefill_step(run, self._chunk)
        tally = _Tally(prefill_s=time.perf_counter() - began)
        step = 0
        while run.output.finish_reason is None:
            yield StreamEvent(outcome.tokens, outcome.record)
            step += 1
            outcome = decode_step(run, step)
            tally.add(outcome)
        yield StreamEvent(outcome.tokens, outcome.record, _completion(run, run.output.finish_reason, tally))

    @contextmanager
    def _plan(self, request: Request, sequence: Sequence, speculator: Speculator | None) -> Iterator[Planner | None]:
        # The prompt gives the first token, and a step that may emit one only drafts nothing.
        if speculator is None or request.max_len - len(request.prompt_token_ids) < 3:
            yield None
            return
        planner = speculator.open(
            DraftContext(
                prompt_token_ids=request.prompt_token_ids,
                end_ids=request.end_ids,
                params=request.params,
                noise_key=request.noise_key,
                stream=drafting_stream(request.rule),
                max_len=request.max_len,
                prediction=request.prediction,
                slots=sequence,
            )
        )
        try:
            yield planner
        finally:
            if planner is not None:
                planner.close()

    @contextmanager
    def _open(self, request: Request) -> Iterator[Sequence]:
        sequence = Sequence(next(self._sequence_ids), request.prompt_token_ids, request.max_len, self.pages)
        try:
            yield sequence
        finally:
            sequence.close()

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        # Waiting would hang a caller who holds a half-read stream in the same thread.
        if not self._running.acquire(blocking=False):
            raise RequestError("this model is running another request; finish it or close its stream first")
        try:
            yield
        finally:
            self._running.release()


@dataclass(slots=True)
class _Tally:
    """Counts of a running request; see `Stats`."""

    prefill_s: float
    decode_s: float = 0.0
    target_passes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def add(self, outcome: StepOutcome) -> None:
        """Counts one decode step."""
        self.decode_s += outcome.record.timings.total_s
        self.target_passes += 1
        self.drafted_tokens += outcome.record.draft.num_nodes
        self.accepted_tokens += sum(token.is_draft for token in outcome.tokens)


def _completion(run: Run, finish_reason: FinishReason, tally: _Tally) -> Completion:
    sequence = run.sequence
    return Completion(
        prompt_token_ids=run.request.prompt_token_ids,
        token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens :]),
        text=run.output.text,
        finish_reason=finish_reason,
        seed=run.request.seed,
        logprobs=run.output.logprobs,
        stats=Stats(
            prompt_tokens=sequence.num_prompt_tokens,
            cached_tokens=sequence.num_reused_tokens,
            completion_tokens=sequence.num_output_tokens,
            target_passes=tally.target_passes,
            drafted_tokens=tally.drafted_tokens,
            accepted_tokens=tally.accepted_tokens,
            prefill_s=tally.prefill_s,
            decode_s=tally.decode_s,
        ),
    )
