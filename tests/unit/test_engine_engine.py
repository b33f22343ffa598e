"""Records, counts, streams and what a failing or abandoned request leaves behind: nothing."""

from typing import Any

import pytest

from forerun.batch import Batch
from forerun.drafters.base import Budget, DraftContext, Proposal
from forerun.engine.jobs import Job
from forerun.engine.request import prepare
from forerun.errors import EngineFault, RequestError
from forerun.types import Draft, ForwardOutput, SamplingParams
from tests.helpers.engines import Answer, FakeEngine, QuietDrafter, Scripted, decode_naively, right, wrong_from

PROMPT = [3, 4, 5, 6, 3, 4, 5]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(chunk=4)


def truth() -> list[int]:
    return [*decode_naively(PROMPT, PARAMS, 0).token_ids, *range(1, 30)]


def works(engine: FakeEngine) -> bool:
    return Answer.of(engine.run(PROMPT, PARAMS)) == decode_naively(PROMPT, PARAMS, 0)


def test_records_tell_what_happened(engine: FakeEngine) -> None:
    events = engine.events(PROMPT, PARAMS, Scripted(truth(), wrong_from(4, 2)))
    first, second, *_ = [event.record for event in events]
    assert (first.step, first.kind, first.committed_len, first.num_rows) == (0, "prefill", 7, 3)
    assert first.verdict.next_kind == "plain"
    assert (second.step, second.kind, second.committed_len, second.num_rows) == (1, "decode", 8, 5)
    assert second.verdict.accepted == (0, 1)
    assert second.verdict.next_kind == "correction"
    assert [event.record.step for event in events] == list(range(len(events)))
    position = len(PROMPT)
    for event in events:
        assert event.record.committed_len == position
        assert event.record.emitted == event.token_ids
        assert event.record.timings.total_s >= event.record.timings.forward_s > 0
        position += len(event.tokens)


def test_events_mark_accepted_draft_tokens(engine: FakeEngine) -> None:
    events = engine.events(PROMPT, PARAMS, Scripted(truth(), wrong_from(4, 2)))
    assert events[0].is_draft == (False,)
    assert events[1].is_draft == (True, True, False)
    assert [event.completion is not None for event in events] == [False] * (len(events) - 1) + [True]
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    completion = events[-1].completion
    assert completion is not None
    assert "".join(event.text for event in events) == completion.text


def test_stats_count_what_they_say(engine: FakeEngine) -> None:
    stats = engine.run(PROMPT, PARAMS).stats
    assert (stats.prompt_tokens, stats.completion_tokens, stats.target_passes) == (7, 20, 19)
    assert (stats.drafted_tokens, stats.accepted_tokens) == (0, 0)
    assert stats.decode_tok_per_s == 19 / stats.decode_s
    stats = engine.run(PROMPT, PARAMS, Scripted(truth(), wrong_from(4, 2))).stats
    # One token with the prompt, then three per pass, of which two were drafted. The sixth of these passes has room
    # for three nodes, and the seventh for none.
    assert (stats.completion_tokens, stats.target_passes) == (20, 7)
    assert (stats.drafted_tokens, stats.accepted_tokens) == (23, 12)
    stats = engine.run(PROMPT, SamplingParams(max_tokens=1)).stats
    assert (stats.target_passes, stats.decode_s, stats.decode_tok_per_s) == (0, 0.0, 0.0)


def test_the_prompt_runs_in_pieces_and_wants_one_row_of_logits(engine: FakeEngine) -> None:
    engine.run(PROMPT, PARAMS)
    assert [len(batch.token_ids) for batch in engine.target.passes[:3]] == [4, 3, 1]
    assert [len(batch.logit_rows) for batch in engine.target.passes[:3]] == [0, 1, 1]


def test_an_abandoned_stream_gives_its_pages_back(engine: FakeEngine) -> None:
    stream = engine.engine.run(Job(prepare(PROMPT, PARAMS, "coupled", engine.limits)))
    assert engine.pages.num_free == engine.pages.num_pages  # nothing happens before the first event
    next(stream)
    assert engine.pages.num_free < engine.pages.num_pages
    stream.close()
    assert engine.pages.num_free == engine.pages.num_pages
    assert works(engine)


def test_streams_that_are_read_in_turns_run_together(engine: FakeEngine) -> None:
    job = Job(prepare(PROMPT, PARAMS, "coupled", engine.limits))
    streams = [engine.engine.run(job) for _ in range(3)]
    events = [
        [event for _, (_, event) in zip(range(number), stream, strict=False)] for number, stream in enumerate(streams)
    ]
    for own, stream in zip(reversed(events), reversed(streams), strict=True):
        own += [event for _, event in stream]
        assert Answer.of(own[-1].completion) == decode_naively(PROMPT, PARAMS, 0)  # type: ignore[arg-type]
    assert max(len(batch.logit_rows) for batch in engine.target.passes) > 1
    assert works(engine)


@pytest.mark.parametrize("failing_pass", [1, 2, 3, 6])
def test_a_failing_pass_breaks_its_request_only(
    engine: FakeEngine, failing_pass: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = engine.target.forward
    num_passes = 0

    def fail(batch: Batch) -> ForwardOutput:
        nonlocal num_passes
        num_passes += 1
        if num_passes == failing_pass:
            raise EngineFault("the pass failed")
        return forward(batch)

    monkeypatch.setattr(engine.target, "forward", fail)
    with pytest.raises(EngineFault, match="the pass failed"):
        engine.run(PROMPT, PARAMS)
    assert works(engine)


class Misbehaving(QuietDrafter):
    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def __call__(self, context: DraftContext) -> "Misbehaving":
        return self

    def propose(self, budget: Budget) -> Proposal:
        return Proposal(self._draft, (0,) * self._draft.num_nodes)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft.chain(tuple(range(40)), "long"), "proposed 40 nodes, more than the 18"),
        (Draft((5, 5), (-1, -1), ("twins",) * 2, (None,) * 2), "two siblings"),
        (Draft((5, 6), (1, -1), ("order",) * 2, (None,) * 2), "precedes its parent"),
    ],
)
def test_a_drafter_that_breaks_its_promises_is_a_fault(engine: FakeEngine, draft: Draft, message: str) -> None:
    with pytest.raises(EngineFault, match=message):
        engine.run(PROMPT, PARAMS, Misbehaving(draft))
    assert works(engine)


def test_f024_a_request_before_changes_nothing_about_the_next_ones_drafts(engine: FakeEngine) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    short, long = [7, 8, 7], [3, 4, 5, 6, 8, 9] * 20
    fresh = [event.record.draft for event in FakeEngine().events(short, params, "ngram:policy=fixed")]
    used = FakeEngine()
    for _ in range(2):
        used.run(long, params, "ngram:policy=fixed")
        assert [event.record.draft for event in used.events(short, params, "ngram:policy=fixed")] == fresh


def test_a_full_cache_is_refused_and_harms_nothing(engine: FakeEngine) -> None:
    engine.pages.open(99)
    engine.pages.extend(99, 16 * (engine.pages.num_pages - 1))
    long: dict[str, Any] = {"max_tokens": None, "ignore_eos": True}
    with pytest.raises(RequestError, match="pages of the KV cache"):
        list(engine.engine.run(Job(prepare(PROMPT, SamplingParams(**long), "coupled", engine.limits))))
    engine.pages.free(99)
    assert works(engine)


def test_every_step_runs_at_least_the_last_token(engine: FakeEngine) -> None:
    engine.run(PROMPT, PARAMS, Scripted(truth(), right(3)))
    decode_passes = [batch for batch in engine.target.passes if len(batch.logit_rows) == len(batch.token_ids)]
    assert [len(batch.token_ids) for batch in decode_passes] == [4, 4, 4, 4, 3]


def test_a_stream_that_is_dropped_in_the_middle_of_a_step_ends(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the garbage collector does: the thread that closes it is the one that drives the engine."""
    job = Job(prepare(PROMPT, PARAMS, "coupled", engine.limits))
    dropped, other = engine.engine.run(job), engine.engine.run(job)
    next(dropped)
    forward = engine.target.forward

    def close_and_run(batch: Batch) -> ForwardOutput:
        dropped.close()
        return forward(batch)

    monkeypatch.setattr(engine.target, "forward", close_and_run)
    *_, (_, last) = other
    assert Answer.of(last.completion) == decode_naively(PROMPT, PARAMS, 0)  # type: ignore[arg-type]
    assert not engine.engine.has_work
    engine.engine.check_integrity()
