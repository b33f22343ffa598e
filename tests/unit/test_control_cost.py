"""What passes are thought to take: the curve, its corrections, measuring and storing it."""

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.control import measure
from forerun.control.cost import DEFAULT_OVERHEAD_S, MAX_ROWS, CostCurve, StepCosts
from forerun.control.measure import load_curve, measure_curve
from forerun.kv.pages import PageManager
from tests.helpers.fake_target import FakeTarget

CURVE = CostCurve((1, 2, 4, 8), (10.0, 11.0, 13.0, 21.0), 100, 0.01, 0.001)


def test_curve_is_straight_between_sizes_and_beyond_them() -> None:
    by_rows = CURVE.by_rows()
    assert len(by_rows) == MAX_ROWS + 1
    assert by_rows[1:9] == (10.0, 11.0, 12.0, 13.0, 15.0, 17.0, 19.0, 21.0)
    assert by_rows[16] == pytest.approx(37.0)


def test_context_costs_per_token_and_per_row() -> None:
    costs = StepCosts(CURVE)
    assert costs.step_s(4, 1, 100) == pytest.approx(13.0 + DEFAULT_OVERHEAD_S)
    assert costs.step_s(4, 1, 300) == pytest.approx(13.0 + 200 * (0.01 + 4 * 0.001) + DEFAULT_OVERHEAD_S)
    # A context that is much shorter can't make a pass free.
    assert costs.step_s(1, 1, 0) >= 5.0


def test_all_sizes_at_once_are_the_single_ones() -> None:
    costs = StepCosts(CURVE)
    for i in range(50):
        costs.learn(1 + i % 5, 1, 120, i % 5 == 0, 12.0 + i % 3, 1e-3)
    for context_len in (0, 100, 2000):
        assert costs.steps_s(0, 21, 1, context_len) == pytest.approx(
            [costs.step_s(m, 1, context_len) for m in range(21)]
        )


def test_corrections_follow_the_machine_and_each_size() -> None:
    costs = StepCosts(CURVE)
    for _ in range(400):
        costs.learn(1, 1, 100, True, 20.0, 0.5)
        costs.learn(4, 1, 100, False, 39.0, 0.5)
    assert costs.step_s(1, 1, 100) == pytest.approx(20.5, rel=0.02)
    assert costs.step_s(4, 1, 100) == pytest.approx(39.5, rel=0.02)
    # A size that was not run is as much slower as the machine.
    assert costs.step_s(8, 1, 100) > 1.2 * 21.0


def test_one_page_fault_is_no_trend_but_a_lasting_slowdown_is_learned() -> None:
    costs = StepCosts(CURVE)
    costs.learn(1, 1, 100, True, 10_000.0, 0.0)
    assert costs.step_s(1, 1, 100) < 14.0
    for _ in range(300):
        costs.learn(1, 1, 100, True, 100.0, 0.0)
    assert costs.step_s(1, 1, 100) == pytest.approx(100.0, rel=0.05)


class Clock:
    """A clock that only passes move: a pass of m rows after n tokens takes 1 + 0.1 m + 0.001 n + 0.0005 m n."""

    def __init__(self, target: FakeTarget, noise: list[float]) -> None:
        self.now = 0.0
        self._forward = target.forward
        self._noise = noise

    def forward(self, batch: Any) -> Any:
        rows, context = len(batch.slots), int(batch.slots[0])
        disturbance = self._noise.pop() if self._noise else 0.0
        self.now += 1.0 + 0.1 * rows + 0.001 * context + 0.0005 * rows * context + disturbance
        return None


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> FakeTarget:
    target = FakeTarget(num_pages=80)
    clock = Clock(target, [0.0, 50.0, 0.0] * 13)  # no size is disturbed in every round
    monkeypatch.setattr(target, "forward", clock.forward)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock.now)
    return target


def test_measured_curve_is_the_truth_in_spite_of_disturbances(target: FakeTarget) -> None:
    pages = PageManager(80)
    curve = measure_curve(target, pages, 64)
    assert pages.num_free == 80
    assert curve.context_len == 256
    for rows, seconds in zip(curve.num_rows, curve.seconds, strict=True):
        assert seconds == pytest.approx(1.0 + 0.1 * rows + 0.256 + 0.128 * rows)
    assert curve.per_token_s == pytest.approx(0.001)
    assert curve.per_token_row_s == pytest.approx(0.0005)


def test_a_small_cache_is_measured_at_a_short_context(target: FakeTarget) -> None:
    curve = measure_curve(target, PageManager(5), 64)
    assert curve.context_len == 5 * 16 - 64
    assert curve.per_token_s == curve.per_token_row_s == 0.0


def test_curve_is_stored_and_read_back(target: FakeTarget, tmp_path: Path) -> None:
    pages = PageManager(80)
    first = load_curve(target, pages, 64, tmp_path / "costs", ("a", "b"))
    again = load_curve(target, pages, 64, tmp_path / "costs", ("a", "b"))
    assert again.num_rows == first.num_rows
    assert again.seconds == pytest.approx(first.seconds)
    assert (again.context_len, again.per_token_s) == (first.context_len, pytest.approx(first.per_token_s))
    assert len(list((tmp_path / "costs").iterdir())) == 1
    load_curve(target, pages, 64, tmp_path / "costs", ("a", "c"))
    assert len(list((tmp_path / "costs").iterdir())) == 2
    assert pages.num_free == 80


def test_a_machine_that_is_slower_as_a_whole_is_not_measured_again(target: FakeTarget, tmp_path: Path) -> None:
    pages = PageManager(80)
    truth = load_curve(target, pages, 64, tmp_path, ("key",))
    (path,) = tmp_path.iterdir()
    fields = json.loads(path.read_text())
    fields["seconds"] = [2.0 * seconds for seconds in fields["seconds"]]
    fields["per_token_s"] *= 2.0
    stored = json.dumps(fields)
    path.write_text(stored)
    curve = load_curve(target, pages, 64, tmp_path, ("key",))
    assert curve.seconds == pytest.approx(truth.seconds)
    assert curve.per_token_s == pytest.approx(truth.per_token_s)
    assert path.read_text() == stored


@pytest.mark.parametrize("change", ["steeper", "truncated", "no json", "negative", "unsorted"])
def test_a_stored_curve_that_does_not_hold_is_measured_again(target: FakeTarget, tmp_path: Path, change: str) -> None:
    pages = PageManager(80)
    truth = load_curve(target, pages, 64, tmp_path, ("key",))
    (path,) = tmp_path.iterdir()
    fields = json.loads(path.read_text())
    if change == "steeper":
        fields["seconds"] = [seconds * (1.0 + 0.1 * i) for i, seconds in enumerate(fields["seconds"])]
    elif change == "truncated":
        fields["seconds"] = fields["seconds"][:-1]
    elif change == "negative":
        fields["seconds"][0] = -1.0
    elif change == "unsorted":
        fields["num_rows"] = [1, *reversed(fields["num_rows"][1:])]
    path.write_text("{" if change == "no json" else json.dumps(fields))
    assert load_curve(target, pages, 64, tmp_path, ("key",)).seconds == pytest.approx(truth.seconds)


def test_a_folder_that_cannot_be_written_to_costs_a_measurement_only(target: FakeTarget, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    curve = load_curve(target, PageManager(80), 64, tmp_path / "file" / "costs", ("key",))
    assert curve.num_rows[0] == 1
