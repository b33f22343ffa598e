"""What is measured about one job on its way through the server, and the objects that answers report it in."""

from __future__ import annotations

import time

from msgspec import UNSET

from forerun.engine.completion import Completion, StreamEvent
from forerun.serve.replies import RequestMetrics, SpecMetrics, Timings
from forerun.serve.settings import ReportLevel


class Meter:
    """Times and counts of one job, by a monotonic clock.

    Attributes:
        submitted_s: when the engine got it.
        first_token_s: when its first token came; None before.
        last_token_s: when its latest tokens came; None before.
        accepted: per step after the prompt's, draft tokens that were accepted and emitted.
        drafted: per such step, draft tokens that were verified.
        num_predicted_accepted: accepted tokens that the request's `prediction` proposed.
        is_resting: the controller had stopped asking for drafts in the latest step.
    """

    __slots__ = (
        "accepted",
        "drafted",
        "first_token_s",
        "is_resting",
        "last_token_s",
        "num_predicted_accepted",
        "submitted_s",
    )

    def __init__(self) -> None:
        self.submitted_s = time.perf_counter()
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.accepted: list[int] = []
        self.drafted: list[int] = []
        self.num_predicted_accepted = 0
        self.is_resting = False

    def note(self, event: StreamEvent, now: float) -> int:
        """Takes in one event; returns how many of its tokens were draft nodes."""
        record = event.record
        num_accepted = min(len(record.verdict.accepted), len(event.tokens))
        if self.first_token_s is None:
            self.first_token_s = now
        else:
            self.accepted.append(num_accepted)
            self.drafted.append(record.draft.num_nodes)
            if num_accepted and "prediction" in record.draft.origins:
                origins = record.draft.origins
                kept = record.verdict.accepted[:num_accepted]
                self.num_predicted_accepted += sum(origins[node] == "prediction" for node in kept)
        self.last_token_s = now
        return num_accepted

    @property
    def time_to_first_token_s(self) -> float:
        """From submission to the first token; 0 before it."""
        return 0.0 if self.first_token_s is None else self.first_token_s - self.submitted_s

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return 0.0 if self.first_token_s is None else (self.last_token_s or 0.0) - self.first_token_s


def timings(completion: Completion) -> Timings:
    """The `timings` object of one choice."""
    stats = completion.stats
    num_prompt = stats.prompt_tokens - stats.cached_tokens
    prompt_ms, predicted_ms = 1e3 * stats.prefill_s, 1e3 * stats.decode_s
    num_decoded = stats.completion_tokens - 1  # the first token is the prompt's last pass's
    return Timings(
        cache_n=stats.cached_tokens,
        prompt_n=num_prompt,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=prompt_ms / max(num_prompt, 1),
        prompt_per_second=num_prompt / stats.prefill_s if stats.prefill_s > 0 else 0.0,
        predicted_n=stats.completion_tokens,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=predicted_ms / num_decoded if num_decoded > 0 else 0.0,
        predicted_per_second=num_decoded / stats.decode_s if stats.decode_s > 0 else 0.0,
        draft_n=stats.drafted_tokens,
        draft_n_accepted=stats.accepted_tokens,
    )


def request_metrics(completion: Completion, meter: Meter, level: ReportLevel) -> RequestMetrics:
    """The `metrics` object of one choice; with `steps` it has a number for every step."""
    accepted, drafted = meter.accepted, meter.drafted
    num_steps, num_accepted, num_drafted = len(accepted), sum(accepted), sum(drafted)
    histogram = [0] * (max(drafted, default=0) + 1)
    for count in accepted:
        histogram[count] += 1
    num_later = completion.stats.completion_tokens - 1
    decode_s = meter.decode_s
    return RequestMetrics(
        time_to_first_token_ms=1e3 * meter.time_to_first_token_s,
        generation_time_ms=1e3 * decode_s,
        queue_time_ms=1e3 * completion.stats.queue_s,
        mean_itl_ms=1e3 * decode_s / num_later if num_later > 0 else None,
        tokens_per_second=num_later / decode_s if num_later > 0 and decode_s > 0 else None,
        speculative_decoding=SpecMetrics(
            mean_acceptance_length=1 + num_accepted / num_steps if num_steps else None,
            draft_acceptance_rate=num_accepted / num_drafted if num_drafted else None,
            acceptance_histogram=histogram,
            num_spec_steps=num_steps,
            num_accepted_draft_tokens=num_accepted,
            num_draft_tokens=num_drafted,
            num_spec_tokens=max(drafted, default=0),
            per_step_accepted=accepted if level == "steps" else UNSET,
            per_step_drafted=drafted if level == "steps" else UNSET,
        ),
    )
