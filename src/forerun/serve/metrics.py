"""Prometheus metrics under the prefix `forerun:`.

Counts are of what clients got: rejected draft tokens and what follows a stop are never counted as generated. Tokens of
one step reach the client together, so all but the first of them have an inter-token latency of zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forerun.engine.completion import Completion, StreamEvent
from forerun.serve.meter import Meter

if TYPE_CHECKING:
    from forerun.engine.jobs import EngineLoad

PREFIX = "forerun:"
_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)
_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
_LIMITS = (1, 16, 64, 256, 1024, 4096, 16384, 65536)


class Metrics:
    """All series of one server, in a registry of its own.

    Args:
        model_name: label of every series.
        drafters: names of the loaded drafters, so that their series exist before the first draft.
        alias: `vllm` repeats every series under that engine's prefix, with its label `engine`.

    Attributes:
        read_load: gives what the engine is busy with; None before there is one.
        iteration_tokens: tokens per engine step.
    """

    def __init__(self, model_name: str, drafters: Sequence[str] = (), alias: str = "none") -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.read_load: Callable[[], EngineLoad] | None = None
        self._model_name, self._alias = model_name, alias
        self._speculator = "+".join(drafters) or "none"
        self._drafts = self._counter("spec_decode_num_drafts", "Verify steps that had a draft.", "drafter")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Tokens proposed.", "drafter")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Proposed tokens accepted.", "drafter")
        self._per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Tokens accepted at a draft position.", "drafter", "position"
        )
        self._stop_loss = self._counter("spec_decode_stop_loss", "How often drafting was switched off.", "drafter")
        self._finished = self._counter("request_success", "Jobs by how they ended.", "finished_reason")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens.").labels(model_name)
        self._tokens = self._counter("generation_tokens", "Tokens delivered.").labels(model_name)
        self._cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.").labels(model_name)
        self._cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the cache.").labels(model_name)
        self._cuts = self._counter("slow_clients_cut", "Clients cut because they did not read.").labels(model_name)
        self.iteration_tokens = self._histogram("iteration_tokens_total", "Tokens per engine step.", _TOKENS)
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _LATENCY_S)
        self._itl = self._histogram("inter_token_latency_seconds", "Between tokens as delivered.", _LATENCY_S)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", _LATENCY_S
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY_S)
        self._queue = self._histogram("request_queue_time_seconds", "Waiting for the engine.", _LATENCY_S)
        self._prefill = self._histogram("request_prefill_time_seconds", "Over the prompt.", _LATENCY_S)
        self._decode = self._histogram("request_decode_time_seconds", "After the first token.", _LATENCY_S)
        self._inference = self._histogram("request_inference_time_seconds", "In the engine.", _LATENCY_S)
        self._params_n = self._histogram("request_params_n", "Choices asked for.", _COUNTS)
        self._params_max_tokens = self._histogram("request_params_max_tokens", "Tokens allowed.", _LIMITS)
        for drafter in drafters:
            for counter in (self._drafts, self._draft_tokens, self._accepted):
                counter.labels(model_name, drafter)
        self._stop_loss.labels(model_name, self._speculator)
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(model_name, reason)
        self._is_drafting = bool(drafters)
        self._positions: dict[tuple[str, int], Counter] = {}
        self._by_drafter: dict[str, tuple[Counter, Counter, Counter]] = {}
        self.registry.register(_Gauges(self))

    def observe(self, event: StreamEvent, meter: Meter, now: float, *, is_delivered: bool = True) -> None:
        """Takes in one event of one job; its tokens count as generated if the client gets them."""
        before = meter.last_token_s
        num_tokens = len(event.tokens)
        num_accepted = meter.note(event, now)
        if is_delivered:
            self._tokens.inc(num_tokens)
        if before is None:
            self._ttft.observe(now - meter.submitted_s)
        else:
            self._itl.observe(now - before)
        for _ in range(num_tokens - 1):
            self._itl.observe(0.0)
        if event.record.draft.num_nodes:
            self._observe_draft(event, num_accepted)
        self._observe_decision(event, meter)
        if event.completion is not None:
            self._observe_completion(event.completion, meter)

    def count_finished(self, reason: str) -> None:
        """Counts a job that ended: stop, length, abort or error."""
        self._finished.labels(self._model_name, reason).inc()

    def count_cut(self) -> None:
        """Counts a client that was cut because it didn't read."""
        self._cuts.inc()

    def count_request(self, num_choices: int, max_tokens: int | None) -> None:
        """Counts what a request asked for."""
        self._params_n.observe(num_choices)
        if max_tokens is not None:
            self._params_max_tokens.observe(max_tokens)

    def text(self) -> str:
        """All series in the text format."""
        text = generate_latest(self.registry).decode()
        if self._alias == "vllm":
            alias = text.replace(PREFIX, "vllm:")
            text += re.sub(r"(?m)^([^#{]*\{)", r'\1engine="0",', alias)
        return text

    @property
    def totals(self) -> dict[str, float]:
        """What the log line is made of: counters by name, without their labels."""
        names = {"num_drafts", "num_draft_tokens", "num_accepted_tokens"}
        totals: dict[str, float] = dict.fromkeys(names, 0.0)
        for short, counter in (
            ("num_drafts", self._drafts),
            ("num_draft_tokens", self._draft_tokens),
            ("num_accepted_tokens", self._accepted),
        ):
            totals[short] = sum(sample.value for metric in counter.collect() for sample in metric.samples)
        return totals | {"prompt_tokens": _value(self._prompt_tokens), "generation_tokens": _value(self._tokens)}

    @property
    def accepted_by_position(self) -> list[float]:
        """Accepted tokens at each draft position, over all drafters."""
        counts: list[float] = []
        for (_, position), counter in self._positions.items():
            counts += [0.0] * (position + 1 - len(counts))
            counts[position] += _value(counter)
        return counts

    def _observe_draft(self, event: StreamEvent, num_accepted: int) -> None:
        draft, accepted = event.record.draft, event.record.verdict.accepted[:num_accepted]
        origins = draft.origins
        for drafter in set(origins):
            drafts, tokens, kept = self._of(drafter)
            drafts.inc()
            tokens.inc(origins.count(drafter))
            if accepted:
                kept.inc(sum(origins[node] == drafter for node in accepted))
        for position, node in enumerate(accepted):
            key = (origins[node], position)
            counter = self._positions.get(key)
            if counter is None:
                counter = self._per_position.labels(self._model_name, origins[node], str(position))
                self._positions[key] = counter
            counter.inc()

    def _of(self, drafter: str) -> tuple[Counter, Counter, Counter]:
        known = self._by_drafter.get(drafter)
        if known is None:
            drafts, tokens, accepted = (
                counter.labels(self._model_name, drafter)
                for counter in (self._drafts, self._draft_tokens, self._accepted)
            )
            known = self._by_drafter[drafter] = (drafts, tokens, accepted)
        return known

    def _observe_decision(self, event: StreamEvent, meter: Meter) -> None:
        decision = event.record.decision
        if decision is None:
            return
        is_resting = decision.reason == "resting"
        if is_resting and not meter.is_resting:
            self._stop_loss.labels(self._model_name, self._speculator).inc()
        meter.is_resting = is_resting
        self._is_drafting = not is_resting

    def _observe_completion(self, completion: Completion, meter: Meter) -> None:
        stats = completion.stats
        self.count_finished(completion.finish_reason)
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._cache_queries.inc(stats.prompt_tokens)
        self._cache_hits.inc(stats.cached_tokens)
        ttft_s, decode_s = meter.time_to_first_token_s, meter.decode_s
        self._e2e.observe(ttft_s + decode_s)
        self._queue.observe(stats.queue_s)
        self._prefill.observe(stats.prefill_s)
        self._decode.observe(decode_s)
        self._inference.observe(stats.prefill_s + decode_s)
        if stats.completion_tokens > 1:
            self._tpot.observe(decode_s / (stats.completion_tokens - 1))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(PREFIX + name, text, ("model_name",), buckets=buckets, registry=self.registry)
        child: Histogram = histogram.labels(self._model_name)
        return child

    def families(self) -> Iterator[Metric]:
        """The series that are read from the engine when somebody asks."""
        load = self.read_load() if self.read_load is not None else None
        num_pages = load.num_pages if load else 0
        usage = load.num_used_pages / num_pages if load and num_pages else 0.0
        running = load.num_running if load else 0
        gauges = (
            ("num_requests_running", "Jobs the engine runs.", running),
            ("num_requests_waiting", "Jobs that wait for the engine.", load.num_waiting if load else 0),
            ("kv_cache_usage_perc", "Share of the KV cache that running jobs use, 0 to 1.", usage),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=("model_name",))
            gauge.add_metric((self._model_name,), value)
            yield gauge
        active = GaugeMetricFamily(
            PREFIX + "spec_decode_active", "Whether drafting is on.", labels=("model_name", "drafter")
        )
        active.add_metric((self._model_name, self._speculator), float(self._is_drafting))
        yield active
        preempted = CounterMetricFamily(PREFIX + "num_preemptions", "Jobs set back.", labels=("model_name",))
        preempted.add_metric((self._model_name,), load.num_preemptions if load else 0)
        yield preempted


class _Gauges(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.families()


def _value(counter: Counter) -> float:
    return next(sample.value for metric in counter.collect() for sample in metric.samples)
