"""Who runs in a step, with how many rows, and who waits."""

from __future__ import annotations

import random

import pytest

from forerun.engine.completion import StreamEvent
from forerun.engine.jobs import Job
from forerun.engine.request import prepare
from forerun.errors import EngineFault, RequestError
from forerun.types import PAGE_TOKENS, SamplingParams
from tests.helpers.engines import FakeEngine
from tests.helpers.load import serve


def job(fake: FakeEngine, num_prompt: int, max_tokens: int = 5, first_id: int = 1, priority: int = 0) -> Job:
    prompt = [first_id] + [1 + n % 29 for n in range(num_prompt - 1)]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Job(prepare(prompt, params, "coupled", fake.limits), priority=priority)


def rows_of(fake: FakeEngine) -> list[list[int]]:
    """Rows of each sequence, by pass."""
    out = []
    for batch in fake.target.passes:
        ids = batch.seq_ids.tolist()
        out.append([ids.count(seq) for seq in sorted(set(ids))])
    return out


def finish_order(fake: FakeEngine, jobs: list[Job]) -> list[int]:
    ids = [fake.engine.submit(job) for job in jobs]
    order = []
    while fake.engine.has_work:
        for run_id, event in fake.engine.step():
            assert isinstance(event, StreamEvent)
            if event.completion is not None:
                order.append(ids.index(run_id))
        fake.engine.check_integrity()
    return order


def test_a_prompt_has_the_pass_to_itself_until_somebody_decodes() -> None:
    fake = FakeEngine(chunk=64)
    fake.engine.submit(job(fake, 100, first_id=2))
    fake.engine.step()
    fake.engine.step()
    assert rows_of(fake) == [[64], [36]]
    # Where nobody knows what steps take, 32 rows of prompts go beside those who decode.
    fake.engine.submit(job(fake, 100, first_id=3))
    for _ in range(4):
        fake.engine.step()
    assert rows_of(fake)[2:] == [[1, 32], [1, 32], [1, 32], [1, 4]]


def test_f064_a_long_prompt_makes_steps_at_most_so_much_longer() -> None:
    fake = FakeEngine(max_model_len=2048, chunk=256)
    costs = fake.engine.controller.measure()
    fake.engine.submit(job(fake, 10, max_tokens=100))
    fake.engine.step()
    fake.engine.submit(job(fake, 1500, first_id=3))
    before = len(fake.target.passes)
    while fake.engine.load.num_running < 2 or len(fake.target.passes[-1].seq_ids) > 2:
        fake.engine.step()
    plain_s = costs.step_s(1, 1, costs.context_len)
    for rows in rows_of(fake)[before:]:
        assert costs.step_s(sum(rows), len(rows), costs.context_len) <= 2.5 * plain_s


def test_several_prompts_share_a_pass_and_the_first_goes_first() -> None:
    fake = FakeEngine(chunk=64)
    for n, num_prompt in enumerate((20, 70, 5)):
        fake.engine.submit(job(fake, num_prompt, first_id=2 + n))
    fake.engine.step()
    assert rows_of(fake) == [[20, 44]]


def test_priorities_go_first_and_equal_ones_in_the_order_they_came() -> None:
    fake = FakeEngine(max_running=1)
    jobs = [job(fake, 4, first_id=2 + n, priority=priority) for n, priority in enumerate((1, 1, 0, 0, 2, 1))]
    assert finish_order(fake, jobs) == [2, 3, 0, 1, 5, 4]


def test_who_is_more_urgent_takes_the_place_of_who_runs() -> None:
    fake = FakeEngine(max_running=1)
    slow = fake.engine.submit(job(fake, 4, max_tokens=50))
    fake.engine.step()
    fast = fake.engine.submit(job(fake, 4, first_id=2, priority=-1))
    order = []
    while fake.engine.has_work:
        order += [run_id for run_id, event in fake.engine.step() if getattr(event, "completion", None)]
    assert order == [fast, slow]
    assert fake.engine.load.num_preemptions == 1


def test_requests_that_begin_alike_compute_the_beginning_once() -> None:
    fake = FakeEngine(chunk=48)
    jobs = [job(fake, 90, max_tokens=2) for _ in range(4)]
    finish_order(fake, jobs)
    prompt_rows = sum(count for rows in rows_of(fake) for count in rows if count > 1)
    assert prompt_rows == 90 + 3 * (90 - 5 * PAGE_TOKENS)


def test_who_waits_for_a_beginning_holds_up_nobody() -> None:
    fake = FakeEngine(512, chunk=60)
    first, same, other = (fake.engine.submit(job(fake, n, first_id=i)) for n, i in ((200, 1), (200, 1), (5, 7)))
    while fake.engine.load.num_running < 2:
        fake.engine.step()
    assert {run.run_id for run in fake.engine._scheduler.running} == {first, other}
    fake.engine.step()
    assert same in {run.run_id for run in fake.engine._scheduler.running}


def test_who_waits_for_a_beginning_survives_its_maker() -> None:
    fake = FakeEngine(chunk=16)
    maker = fake.engine.submit(job(fake, 200))
    fake.engine.step()
    fake.engine.submit(job(fake, 200))
    fake.engine.step()
    fake.engine.cancel(maker)
    fake.engine.check_integrity()
    results = [event for _ in range(30) for _, event in fake.engine.step()]
    assert sum(isinstance(event, StreamEvent) and event.completion is not None for event in results) == 1
    assert not fake.engine.has_work


def test_a_request_that_no_page_is_left_for_is_refused_when_nobody_runs() -> None:
    fake = FakeEngine()
    fake.pages.open(99)
    fake.pages.extend(99, 16 * (fake.pages.num_pages - 2))
    long = fake.engine.submit(job(fake, 100))
    short = fake.engine.submit(job(fake, 10))
    results = [(run_id, event) for _ in range(10) for run_id, event in fake.engine.step()]
    [(_, error)] = [(run_id, event) for run_id, event in results if run_id == long]
    assert isinstance(error, RequestError)
    assert "100 tokens need 7 pages of the KV cache, but 2 of its 16 pages are free" in str(error)
    assert any(run_id == short and event.completion for run_id, event in results if isinstance(event, StreamEvent))
    assert not fake.engine.has_work


def test_one_that_outgrows_all_pages_there_are_is_refused_alone() -> None:
    fake = FakeEngine()
    fake.pages.open(99)
    fake.pages.extend(99, 16 * (fake.pages.num_pages - 2))
    fake.engine.submit(job(fake, 10, max_tokens=100))
    results = [event for _ in range(60) for _, event in fake.engine.step()]
    assert isinstance(results[-1], RequestError)
    assert sum(len(event.tokens) for event in results if isinstance(event, StreamEvent)) == 2 * PAGE_TOKENS - 10 + 1
    assert fake.pages.num_used == fake.pages.num_pages - 2


def test_drafts_give_way_where_pages_are_short() -> None:
    """The last pages go to tokens, not to guesses; nobody is preempted for a guess."""
    fake = FakeEngine()
    fake.pages.open(99)
    fake.pages.extend(99, 16 * (fake.pages.num_pages - 1))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    request = prepare([1, 2, 1, 2, 1, 2, 1, 2], params, "coupled", fake.limits)
    events = [event for _, event in fake.engine.run(Job(request, fake.speculator("ngram:k=30,policy=fixed")))]
    assert sum(len(event.tokens) for event in events) == 8


def test_no_more_run_than_may() -> None:
    fake = FakeEngine(max_running=3)
    jobs = [job(fake, 4, first_id=2 + n) for n in range(9)]
    serve(fake.engine, jobs, random.Random(1), arrival=1.0, check=fake.engine.check_integrity)
    assert max(len(rows) for rows in rows_of(fake)) == 3


def test_what_is_not_in_line_can_not_be_taken_out() -> None:
    fake = FakeEngine()
    run_id = fake.engine.submit(job(fake, 4))
    run = fake.engine._runs[run_id]
    fake.engine.cancel(run_id)
    fake.engine.cancel(run_id)
    with pytest.raises(EngineFault, match="not in line"):
        fake.engine._scheduler.remove(run)
