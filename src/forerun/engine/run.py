"""A request on its way through the engine, and what it has counted."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from forerun.control.planner import Planner
from forerun.drafters.base import DraftContext
from forerun.engine.completion import Completion, Stats
from forerun.engine.jobs import Job
from forerun.engine.output import Output
from forerun.engine.request import Request
from forerun.engine.sequence import Sequence
from forerun.models.grammar import GrammarState
from forerun.sampling.history import History
from forerun.types import MAX_DRAFT_NODES, StepRecord, TokenLogprob
from forerun.verify import drafting_stream

MAX_STEP_NODES = MAX_DRAFT_NODES - 1  # with the last token's, 64 rows


@dataclass(slots=True)
class Tally:
    """Counts of a running request; see `Stats`."""

    submitted_s: float = field(default_factory=time.perf_counter)
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    target_passes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class Run:
    """A request while it waits or runs.

    Attributes:
        run_id: its name; of equal priority the lower came first.
        job: what was asked for.
        sequence: tokens and KV slots.
        history: the committed tokens as penalties count them.
        output: stop handling and text.
        prompt_logprobs: of the prompt's tokens but the first, as far as they are known; None unless asked for.
        planner: its drafters; None for plain decoding, and until it runs.
        grammar: how far the output is in the request's grammar; None without one, and until it runs.
        num_steps: steps that gave it tokens.
        tally: counts.
    """

    run_id: int
    job: Job
    sequence: Sequence
    history: History
    output: Output
    prompt_logprobs: list[TokenLogprob] | None
    planner: Planner | None = None
    grammar: GrammarState | None = None
    has_started: bool = False
    num_steps: int = 0
    tally: Tally = field(default_factory=Tally)

    @property
    def request(self) -> Request:
        """What was asked for."""
        return self.job.request

    @property
    def rank(self) -> tuple[int, int]:
        """Lower ones go first."""
        return (self.job.priority, self.run_id)

    @property
    def is_decoding(self) -> bool:
        """Whether all but its last token is in the cache, and the prompt's logits were read."""
        return self.num_steps > 0 and self.sequence.cached_len == self.sequence.committed_len - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be read."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.sequence.num_prompt_tokens - 1

    @property
    def max_nodes(self) -> int:
        """Nodes that its next step may have: no longer than what may still be emitted before the token after them."""
        most = min(self.sequence.remaining_len - 1, MAX_STEP_NODES)
        return most if self.job.k is None else min(most, self.job.k)

    def start(self) -> None:
        """Called when it gets pages for the first time: opens its grammar and its drafters.

        Raises:
            RequestError: a drafter can't do what the request asks for.
        """
        self.has_started = True
        self.tally.queue_s = time.perf_counter() - self.tally.submitted_s
        request, job = self.request, self.job
        if request.grammar is not None:
            self.grammar = request.grammar.open()
        # The prompt gives the first token, and a step that may emit one only drafts nothing.
        if job.speculator is None or job.k == 0 or request.max_len - len(request.prompt_token_ids) < 3:
            return
        context = DraftContext(
            prompt_token_ids=request.prompt_token_ids,
            end_ids=request.end_ids,
            params=request.params,
            noise_key=request.noise_key,
            stream=drafting_stream(request.rule),
            max_len=request.max_len,
            prediction=request.prediction,
            salt=request.salt,
            slots=self.sequence,
            grammar=self.grammar,
        )
        self.planner = job.speculator.open(context, job.method)

    def close(self) -> None:
        """Gives everything back; may be called again."""
        planner, self.planner, self.grammar = self.planner, None, None
        try:
            if planner is not None:
                planner.close()
        finally:
            if self.sequence.is_open:
                self.sequence.close()

    def count(self, record: StepRecord, num_accepted: int) -> None:
        """Counts a step that gave it tokens."""
        tally = self.tally
        if self.num_steps == 0:
            tally.prefill_s = time.perf_counter() - tally.submitted_s - tally.queue_s
        else:
            tally.decode_s += record.timings.total_s
            tally.target_passes += 1
            tally.drafted_tokens += record.draft.num_nodes
            tally.accepted_tokens += num_accepted
        self.num_steps += 1

    def completion(self) -> Completion:
        """The result of a request that has ended."""
        sequence, output, tally = self.sequence, self.output, self.tally
        assert output.finish_reason is not None
        prompt_logprobs = None if self.prompt_logprobs is None else (None, *self.prompt_logprobs)
        return Completion(
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens :]),
            text=output.text,
            finish_reason=output.finish_reason,
            seed=self.request.seed,
            logprobs=output.logprobs,
            prompt_logprobs=prompt_logprobs,
            stats=Stats(
                prompt_tokens=sequence.num_prompt_tokens,
                cached_tokens=sequence.num_reused_tokens or 0,
                completion_tokens=sequence.num_output_tokens,
                target_passes=tally.target_passes,
                drafted_tokens=tally.drafted_tokens,
                accepted_tokens=tally.accepted_tokens,
                queue_s=tally.queue_s,
                prefill_s=tally.prefill_s,
                decode_s=tally.decode_s,
                num_preemptions=tally.num_preemptions,
            ),
        )
