"""Suffix decoding as a drafter: trees, settings, and who learns from whom (F017, F018, F019, F024, F026).

That its trees are right is in test_suffix_index.py.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from forerun.drafters.base import NOTHING
from forerun.drafters.spec import Speculation
from forerun.drafters.suffix import (
    GREEDY_RATES,
    OWN,
    OWN_DISCOUNTS,
    SAMPLED_RATES,
    SHARED,
    SHARED_DISCOUNTS,
    SHARED_RATES,
    STORED,
    STORED_DISCOUNTS,
    SuffixDrafter,
    SuffixOptions,
    SuffixSource,
    cell_of,
)
from forerun.errors import ConfigError
from forerun.types import Int32Array, SamplingParams
from tests.helpers.drafting import context, propose, target

EOS = 0


def source(**options: Any) -> SuffixSource:
    return SuffixSource(SuffixOptions(**options))


def make(prompt: Sequence[int], end_ids: Sequence[int] = (EOS,), **options: Any) -> SuffixDrafter:
    return source(**options).open(context(prompt, end_ids))


def answer(served: SuffixSource, prompt: Sequence[int], output: Sequence[int], salt: str = "") -> None:
    """A request from beginning to end."""
    drafter = served.open(context(prompt, (EOS,), salt=salt))
    for token_id in output:
        propose(drafter, 8)
        drafter.advance([token_id])
    drafter.close()


def draft_ids(served: SuffixSource, prompt: Sequence[int], salt: str = "") -> tuple[int, ...]:
    drafter = served.open(context(prompt, (EOS,), salt=salt))
    ids = propose(drafter, 63).draft.token_ids
    drafter.close()
    return ids


def test_proposes_what_followed_and_then_what_followed_that() -> None:
    draft = propose(make([1, 2, 3, 4, 1, 2], k=3, tree="off"), 8).draft
    assert draft.token_ids == (3, 4, 1)
    assert draft.is_chain
    assert set(draft.origins) == {"suffix"}
    assert draft.q_rows == (None, None, None)


def test_the_longest_match_speaks_first_and_shorter_ones_give_the_second_guess() -> None:
    # "7 1 2" was followed by 5; the newer "1 2" by 6.
    draft = propose(make([7, 1, 2, 5, 9, 1, 2, 6, 7, 1, 2], k=20), 20).draft
    roots = [token_id for token_id, parent in zip(draft.token_ids, draft.parents, strict=True) if parent < 0]
    assert roots == [5, 6]
    chain = propose(make([7, 1, 2, 5, 9, 1, 2, 6, 7, 1, 2], k=1, tree="off"), 8).draft
    assert chain.token_ids == (5,)


def test_what_came_more_often_is_likelier() -> None:
    draft = propose(make([1, 5, 1, 5, 1, 6, 1], k=2, depth=1), 8).draft
    assert draft.token_ids[0] == 5


@pytest.mark.parametrize(("max_nodes", "k"), [(1, 8), (3, 8), (8, 2), (63, 63)])
def test_never_more_nodes_than_asked_for(max_nodes: int, k: int) -> None:
    rng = random.Random(1)
    drafter = make([rng.randrange(1, 3) for _ in range(200)], k=k, min_prob=0.001)
    assert propose(drafter, max_nodes).draft.num_nodes == min(max_nodes, k)


@pytest.mark.parametrize("prompt", [[5], [5, 6], [1, 2, 3, 4, 5], [EOS]])
def test_f018_texts_that_match_nothing_propose_nothing(prompt: list[int]) -> None:
    drafter = make(prompt)
    assert propose(drafter, 8) is NOTHING
    drafter.advance([9])
    assert propose(drafter, 8) is NOTHING
    drafter.advance([])


def test_f018_one_token_repeated_matches_itself() -> None:
    assert propose(make([4, 4], k=5, min_prob=0.001), 8).draft.token_ids == (4,) * 5
    assert propose(make([3, 4, 3, 4, 3], k=5, tree="off"), 8).draft.token_ids == (4, 3, 4, 3, 4)


@pytest.mark.parametrize(("offset", "expected"), [(0, (EOS,)), (1, (4, EOS)), (2, (4, 5, EOS))])
def test_f017_proposals_end_at_the_first_end_of_text(offset: int, expected: tuple[int, ...]) -> None:
    prompt = [1, 2, 3, *range(4, 4 + offset), EOS, 7, 8, 9, 1, 2, 3]
    assert propose(make(prompt, k=8), 8).draft.token_ids == expected


def test_f017_every_end_id_counts() -> None:
    assert propose(make([1, 2, 3, 4, 5, 1, 2], end_ids=(EOS, 4)), 8).draft.token_ids == (3, 4)


def test_after_any_steps_it_drafts_as_if_the_text_had_been_there_from_the_start() -> None:
    rng = random.Random(9)
    drafter, text = make([1]), [1]
    for _ in range(60):
        new = [rng.randrange(1, 6) for _ in range(rng.randrange(1, 4))]
        propose(drafter, 8)
        drafter.advance(new)
        text += new
        assert propose(drafter, 8) == propose(make(text), 8)


def test_what_can_hardly_pay_is_not_looked_at() -> None:
    """Of two continuations seen equally often none is likely enough, if a node must survive in nearly all cases."""
    drafter = make([1, 2, 3, 1, 2, 4, 1, 2], min_prob=0.05)
    assert set(propose(drafter, 8).draft.token_ids) >= {3, 4}
    assert propose(drafter, 8, min_survival=0.95).draft.num_nodes == 0
    assert propose(make([1, 2, 3] * 20, min_prob=0.05), 8, min_survival=0.95).draft.num_nodes == 8


def test_outputs_are_learned_from_and_prompts_are_not() -> None:
    served = source(min_prob=0.001)
    answer(served, [11, 12, 13, 14, 15], [21, 22, 23, 24])
    assert draft_ids(served, [9, 22])[:2] == (23, 24)
    assert draft_ids(served, [9, 12]) == ()


def test_a_cancelled_request_leaves_what_it_has_put_out() -> None:
    served = source(min_prob=0.001)
    drafter = served.open(context([1, 2], (EOS,)))
    drafter.advance([21, 22, 23])
    assert draft_ids(served, [9, 21]) == ()
    drafter.close()
    drafter.close()
    assert draft_ids(served, [9, 21])[:2] == (22, 23)
    # Closing twice left it once: two occurrences would be trusted more than one.
    again = source()
    answer(again, [1, 2], [21, 22, 23])
    assert served.memory_bytes == again.memory_bytes


def test_f024_salts_and_requests_that_share_nothing() -> None:
    served = source(min_prob=0.001)
    answer(served, [1], [21, 22, 23], salt="alice")
    assert draft_ids(served, [9, 21], salt="alice")[:2] == (22, 23)
    for salt in ("", "bob", "alic", "alice\0"):
        assert draft_ids(served, [9, 21], salt=salt) == ()
    for salt in ("\ud800", "x" * 10_000):  # no text that could be written, and a long one
        answer(served, [1], [31, 32, 33], salt=salt)
        assert draft_ids(served, [9, 31], salt=salt)[:2] == (32, 33)
    assert served.memory_bytes < 10_000
    alone = source(shared="off")
    answer(alone, [1], [21, 22, 23])
    assert draft_ids(alone, [9, 21]) == ()
    assert alone.memory_bytes == 0


@pytest.mark.parametrize("shared", ["on", "off"])
def test_f024_drafts_hold_nothing_but_own_text_and_outputs_of_the_same_salt(shared: str) -> None:
    rng = random.Random(7)
    served = source(shared=shared, memory_mb=1, k=63, min_prob=0.001)
    # Salts have ids of their own beside common ones, so that a foreign id betrays itself.
    allowed = {salt: {100 * number + i for i in range(20)} for number, salt in enumerate(("", "a", "b"), start=1)}
    num_nodes = 0
    for _ in range(60):
        salt = rng.choice(list(allowed))
        ids = [*range(1, 8), *allowed[salt]]
        drafter = served.open(context([rng.choice(ids) for _ in range(rng.randrange(1, 30))], (EOS,), salt=salt))
        for _ in range(rng.randrange(12)):
            token_ids = propose(drafter, 63).draft.token_ids
            assert set(token_ids) <= set(ids)
            num_nodes += len(token_ids)
            drafter.advance([rng.choice(ids) for _ in range(rng.randrange(1, 4))])
        drafter.close()
    assert num_nodes > 500


def test_f024_a_request_after_others_drafts_as_on_a_fresh_source_when_nothing_is_shared() -> None:
    rng = random.Random(2)
    long, short = [rng.randrange(1, 60) for _ in range(400)], [3, 4, 5] * 6
    served = source(shared="off")
    first = draft_ids(served, short)
    answer(served, long, long[:50])
    assert draft_ids(served, short) == first
    kept = source()
    answer(kept, long, long[:50])
    kept.clear()
    assert draft_ids(kept, short) == first
    assert kept.memory_bytes == 0


def test_f026_memory_of_outputs_is_bounded_over_all_salts() -> None:
    rng = random.Random(4)
    served = source(memory_mb=1)
    most = 0
    for number in range(60):
        drafter = served.open(context([1], (EOS,), salt=f"salt {number}"))
        drafter.advance([rng.randrange(1, 500) for _ in range(400)])
        drafter.close()
        assert served.memory_bytes <= 1 << 20
        most = max(most, served.memory_bytes)
    assert most > 0.9 * (1 << 20)


def test_cells_sort_nodes_by_what_tells_how_often_they_are_right() -> None:
    assert len(source().priors) == 240
    assert all(0.0 < prior < 1.0 for prior in source().priors)
    cells = {
        cell_of(prob, match_len, place, is_sampled)
        for prob in (0.01, 0.07, 0.15, 0.3, 0.4, 0.6, 0.7, 0.85, 0.95, 1.0)
        for match_len in (1, 2, 3, 4, 9, 10, 300)
        for place in (OWN, SHARED, STORED)
        for is_sampled in (False, True)
    }
    assert cells == set(range(240))


def test_cells_of_a_draft() -> None:
    served = source(tree="off")
    answer(served, [1], [21, 22, 23])
    greedy = served.open(context([30, 31, 32, 30, 31], (EOS,)))
    # Matches grow along the path: two tokens, then three, and a single occurrence leaves the discount to shorter ones.
    assert propose(greedy, 2).cells == (cell_of(0.55, 2, OWN, False), cell_of(0.63, 3, OWN, False))
    assert served.priors[propose(greedy, 1).cells[0]] == GREEDY_RATES[5]
    sampled = served.open(context([30, 31, 32, 30, 31], (EOS,), params=SamplingParams(temperature=0.8)))
    assert propose(sampled, 1).cells == (cell_of(0.55, 2, OWN, True),)
    assert served.priors[propose(sampled, 1).cells[0]] == SAMPLED_RATES[5]
    other = served.open(context([30, 21, 22], (EOS,)))
    assert propose(other, 1).cells == (cell_of(1 - 0.87 + 0.87 * 0.05, 2, SHARED, False),)
    assert served.priors[propose(other, 1).cells[0]] == SHARED_RATES[2]


def test_a_datastore_is_looked_in_behind_the_text_and_earlier_outputs() -> None:
    stored = [np.array(text, np.int32) for text in ([1, 21, 22, 23], [5, 6, 7])]
    served = SuffixSource(SuffixOptions(tree="off"), stored)
    drafter = served.open(context([30, 21, 22], (EOS,)))
    proposal = propose(drafter, 2)
    assert proposal.draft.token_ids == (23,)
    assert proposal.cells == (cell_of(1 - 0.87 + 0.87 * 0.05, 2, STORED, False),)
    # A text's own context of equal length speaks first.
    assert draft_ids(served, [21, 22, 24, 30, 21, 22])[0] == 24
    assert draft_ids(served, [21, 22, 24, 30, 21, 22], salt="another")[0] == 24
    served.clear()
    assert draft_ids(served, [30, 21, 22]) == (23,)
    assert served.memory_bytes > source().memory_bytes == 0


def test_a_datastore_is_asked_for_only_where_it_is_used() -> None:
    asked = []

    def read() -> list[Int32Array]:
        asked.append(True)
        return [np.array([1, 21, 22, 23], np.int32)]

    bound_to = dataclasses.replace(target(100), datastore=read)
    off = SuffixOptions(datastore="off").bind(bound_to)
    assert draft_ids(off, [30, 21, 22]) == ()
    assert not asked
    assert draft_ids(SuffixOptions().bind(bound_to), [30, 21, 22]) == (23,)
    assert asked


def test_tables_of_discounts_and_rates_fit_together() -> None:
    for steps in (OWN_DISCOUNTS, SHARED_DISCOUNTS, STORED_DISCOUNTS):
        assert sorted(length for length, _ in steps) == [length for length, _ in steps]
        assert sorted((discount for _, discount in steps), reverse=True) == [discount for _, discount in steps]
    for rates in (GREEDY_RATES, SAMPLED_RATES, SHARED_RATES):
        assert sorted(rates) == list(rates)


def test_spec_reads_and_writes_it() -> None:
    speculation = Speculation.parse("suffix:k=12,min_prob=0.1,tree=off,shared=off,policy=fixed")
    assert speculation.drafters == (SuffixOptions(k=12, min_prob=0.1, tree="off", shared="off", policy="fixed"),)
    assert Speculation.parse(str(speculation)) == speculation
    assert Speculation.parse("suffix:k=0").is_off
    assert len(Speculation.parse("suffix+ngram").drafters) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": -1}, "k is -1, but must be between 0"),
        ({"k": 64}, "k is 64"),
        ({"min_prob": 0.0}, "min_prob is 0.0, but must be between 0.001 and 1"),
        ({"min_prob": 1.5}, "min_prob is 1.5"),
        ({"min_prob": float("nan")}, "min_prob is nan"),
        ({"tree": "maybe"}, "tree is 'maybe', but must be on or off"),
        ({"shared": "yes"}, "shared is 'yes', but must be on or off"),
        ({"depth": 0}, "depth is 0, but must be between 1 and 256"),
        ({"depth": 257}, "depth is 257"),
        ({"memory_mb": 0}, "memory_mb is 0, but must be between 1 and 65536"),
        ({"memory_mb": 65537}, "memory_mb is 65537"),
        ({"policy": "clever"}, "adaptive or fixed"),
    ],
)
def test_f019_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SuffixOptions(**settings)
