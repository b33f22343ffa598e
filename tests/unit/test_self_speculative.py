"""Self-speculative decoding without a model: where it runs, when it stops, and what it refuses to run on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forerun.drafters.base import DraftTarget
from forerun.drafters.self_speculative import SelfDrafter, SelfOptions, SelfSource, choose_layers
from forerun.engine.sequence import Sequence
from forerun.errors import ConfigError, EngineFault
from forerun.kv.pages import PageManager
from forerun.models.bound import BindSettings
from forerun.sampling.reference import ReferenceSampler
from forerun.types import Int32Array
from tests.helpers.drafting import context, propose
from tests.helpers.engines import FakeEngine
from tests.helpers.fake_target import VOCAB_SIZE, FakeTarget, prefix_logits

PROMPT = [3, 1, 4, 1, 5]
NUM_LAYERS = 6


class Slots:
    """As many slots as a test grants, in pages of its own order."""

    def __init__(self, cached_len: int, num_slots: int = 160) -> None:
        self.cached_len = cached_len
        self.num_slots = num_slots
        self.asked: list[int] = []

    @property
    def page_table(self) -> Int32Array:
        return np.arange(9, -1, -1, dtype=np.int32)

    def try_reserve(self, num_slots: int) -> bool:
        self.asked.append(num_slots)
        return num_slots <= self.num_slots


def bind(target: FakeTarget, **settings: Any) -> tuple[SelfSource, list[tuple[int, ...]]]:
    """A source whose layers compute what the fake target computes, and the layers that it asked for."""
    chosen: list[tuple[int, ...]] = []

    def with_layers(layers: tuple[int, ...]) -> FakeTarget:
        chosen.append(layers)
        return target

    model: Any = SimpleNamespace(config=SimpleNamespace(num_layers=NUM_LAYERS), with_layers=with_layers)
    bound = BindSettings("native", "cpu", "auto", "f16", threads=1, max_rows=64)
    sampler: Any = ReferenceSampler(VOCAB_SIZE)
    draft_target = DraftTarget(target, sampler, None, VOCAB_SIZE, 256, bound, model)  # type: ignore[arg-type]
    return SelfOptions(**settings).bind(draft_target), chosen


def open_drafter(slots: Slots, **settings: Any) -> tuple[SelfDrafter, FakeTarget]:
    """A drafter on a fake target that has seen the prompt but for its last token."""
    target = FakeTarget(10)
    source, _ = bind(target, **settings)
    for slot, token_id in enumerate(PROMPT[:-1]):
        place = int(slots.page_table[0]) * 16 + slot
        target._cache[place] = token_id, slot
    return source.open(context(PROMPT, slots=slots)), target


def continued(num_tokens: int) -> list[int]:
    """What the fake target goes on with, greedily."""
    text = list(PROMPT)
    for _ in range(num_tokens):
        text.append(int(prefix_logits(text).argmax()))
    return text[len(PROMPT) :]


def test_each_guess_is_one_pass_over_one_token_in_the_slot_it_would_have() -> None:
    slots = Slots(cached_len=4)
    drafter, target = open_drafter(slots, k=3, policy="fixed")
    proposal = propose(drafter, 12)
    assert list(proposal.draft.token_ids) == continued(3)
    assert proposal.num_steps == len(target.passes) == 3
    assert proposal.steps_s > 0.0
    for index, batch in enumerate(target.passes):
        assert batch.token_ids.tolist() == [[PROMPT[-1], *continued(2)][index]]
        assert batch.slots.tolist() == batch.positions.tolist() == [4 + index]
        assert batch.visible_len.tolist() == [5 + index]
        np.testing.assert_array_equal(batch.page_tables[0], slots.page_table)
    assert slots.asked == [6, 7, 8]  # where the target's pass will have its nodes


def test_it_goes_on_from_what_was_committed() -> None:
    slots = Slots(cached_len=4)
    drafter, target = open_drafter(slots, k=2, policy="fixed")
    propose(drafter, 12)
    target.passes.clear()
    drafter.advance([*continued(2), 9])
    slots.cached_len = 7
    propose(drafter, 12)
    assert [batch.slots.tolist() for batch in target.passes] == [[7], [8]]
    assert target.passes[0].token_ids.tolist() == [9]


@pytest.mark.parametrize(("num_slots", "width", "num_nodes"), [(5, 1, 0), (6, 1, 1), (8, 1, 3), (8, 2, 2), (9, 2, 4)])
def test_it_stops_where_the_slots_end(num_slots: int, width: int, num_nodes: int) -> None:
    drafter, target = open_drafter(Slots(4, num_slots), k=10, width=width, policy="fixed")
    assert propose(drafter, 40).draft.num_nodes == num_nodes
    assert len(target.passes) == num_nodes // width


def test_it_does_not_draft_on_a_cache_that_lags_behind() -> None:
    for cached_len in (3, 5):
        drafter, _ = open_drafter(Slots(cached_len))
        with pytest.raises(EngineFault, match="hold all but the last"):
            propose(drafter, 4)
    source, _ = bind(FakeTarget(10))
    with pytest.raises(EngineFault, match="no slots"):
        source.open(context(PROMPT))


def test_what_does_not_pay_is_not_run() -> None:
    slots = Slots(cached_len=4)
    drafter, target = open_drafter(slots)
    assert propose(drafter, 4, min_survival=0.9).draft.num_nodes == 0
    assert target.passes == []


def test_layers_are_bound_once_per_source() -> None:
    assert bind(FakeTarget(10))[1] == [(0, 1, 2)]
    assert bind(FakeTarget(10), layers="2")[1] == [(0, 1)]
    assert bind(FakeTarget(10), layers="0-1.4-5")[1] == [(0, 1, 4, 5)]
    assert choose_layers("half", 1) == (0,)
    assert choose_layers("7-7", 8) == (7,)


def test_a_target_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="can't run some of its layers"):
        FakeEngine().speculator("self")


def test_slots_are_reserved_or_not_and_never_an_error() -> None:
    pages = PageManager(3)
    sequence, other = Sequence(0, PROMPT, 40, pages), Sequence(1, PROMPT, 40, pages)
    sequence.open()
    other.open()
    assert sequence.try_reserve(16)
    assert sequence.page_table.size == 1
    assert not sequence.try_reserve(41)
    assert sequence.page_table.size == 1
    assert other.try_reserve(17)
    assert not sequence.try_reserve(17)
    assert sequence.try_reserve(16)
    other.close()
    assert sequence.try_reserve(40)
    assert sequence.page_table.size == 3
    pages.check_integrity()
