"""Prompt lookup against a slow search, and the cases where there is little or nothing to match (F017, F018, F024)."""

import random
from collections.abc import Sequence

import pytest

from forerun.drafters.base import DraftContext
from forerun.drafters.ngram import BREAK_EVEN, AcceptanceTable, NgramDrafter, NgramOptions
from forerun.errors import ConfigError

EOS = 0


def make(prompt: Sequence[int], end_ids: Sequence[int] = (EOS,), **options: object) -> NgramDrafter:
    options = {"policy": "fixed", **options}
    return NgramOptions(**options).create(DraftContext(prompt, frozenset(end_ids)))  # type: ignore[arg-type]


def slow_lookup(ids: list[int], options: NgramOptions) -> list[int]:
    """The same by a scan: longest match, then the latest, continued as if the text were periodic."""
    for n in range(options.max, options.min - 1, -1):
        for start in range(len(ids) - n - 1, -1, -1):
            if ids[start : start + n] == ids[-n:]:
                text = list(ids)
                while len(text) < len(ids) + options.k and EOS not in text[len(ids) :]:
                    text.append(text[start + n + len(text) - len(ids)])
                return text[len(ids) :]
    return []


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 8, 50])
@pytest.mark.parametrize(("k", "low", "high"), [(1, 1, 1), (8, 1, 4), (5, 2, 3), (16, 3, 3), (63, 1, 16)])
def test_equals_a_slow_search(vocab_size: int, k: int, low: int, high: int) -> None:
    rng = random.Random(vocab_size * 1000 + k)
    options = NgramOptions(k=k, min=low, max=high, policy="fixed")
    for _ in range(20):
        # Ids start at 0, so end-of-text is one of them.
        ids = [rng.randrange(vocab_size + 1) for _ in range(rng.randrange(1, 30))]
        drafter = options.create(DraftContext(tuple(ids), frozenset({EOS})))
        for _ in range(6):
            assert list(drafter.propose(63).token_ids) == slow_lookup(ids, options)
            new = [rng.randrange(vocab_size + 1) for _ in range(rng.randrange(1, 4))]
            drafter.advance(new)
            ids += new


def test_draft_is_a_chain_of_fixed_proposals() -> None:
    draft = make([1, 2, 3, 4, 1, 2], k=3).propose(8)
    draft.check_integrity()
    assert draft.token_ids == (3, 4, 1)
    assert draft.is_chain
    assert set(draft.origins) == {"ngram"}
    assert draft.q_rows == (None, None, None)


def test_longest_match_wins_then_the_latest() -> None:
    # "7 1 2" occurs once, "1 2" more recently: the longer one is followed.
    assert make([7, 1, 2, 5, 9, 1, 2, 6, 7, 1, 2], k=1).propose(8).token_ids == (5,)
    assert make([1, 2, 5, 1, 2, 6, 3, 1, 2], k=1, max=2).propose(8).token_ids == (6,)


@pytest.mark.parametrize("prompt", [[5], [5, 6], [1, 2, 3, 4, 5], [5, 5]])
def test_f018_prompts_shorter_than_the_ngram_or_without_a_repeat_propose_nothing(prompt: list[int]) -> None:
    assert make(prompt, min=3, max=3).propose(8).num_nodes == 0


def test_f018_a_match_without_a_continuation_proposes_nothing() -> None:
    # The only place where "5" stands is the very end.
    assert make([1, 2, 3, 5]).propose(8).num_nodes == 0


def test_f018_one_token_repeated_matches_itself() -> None:
    assert make([4, 4], k=5).propose(8).token_ids == (4,) * 5
    assert make([3, 4, 3, 4, 3], k=5).propose(8).token_ids == (4, 3, 4, 3, 4)


@pytest.mark.parametrize(("offset", "expected"), [(0, (EOS,)), (1, (4, EOS)), (2, (4, 5, EOS))])
def test_f017_proposals_end_at_the_first_end_of_text(offset: int, expected: tuple[int, ...]) -> None:
    prompt = [1, 2, 3, *range(4, 4 + offset), EOS, 7, 8, 9, 1, 2, 3]
    assert make(prompt, k=8).propose(8).token_ids == expected


def test_f017_every_end_id_counts() -> None:
    assert make([1, 2, 3, 4, 5, 1, 2], end_ids=(EOS, 4)).propose(8).token_ids == (3, 4)


def test_max_nodes_cuts() -> None:
    drafter = make([1, 2, 3, 4, 5, 1, 2], k=8)
    assert drafter.propose(2).token_ids == (3, 4)


def test_f024_two_requests_share_nothing() -> None:
    options = NgramOptions()
    first = options.create(DraftContext([1, 2, 3, 4, 1, 2], frozenset()))
    first.propose(8)
    first.advance([9, 9, 9])
    second = options.create(DraftContext([5, 1, 2], frozenset()))
    assert second.propose(8).num_nodes == 0
    assert second._table.rate(2, 1) == AcceptanceTable(4).rate(2, 1)


def test_adaptive_cuts_where_survival_falls_under_break_even() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2]
    drafter = make(text, k=8, policy="adaptive")
    depth = drafter.propose(8).num_nodes
    rates = [drafter._table.rate(2, d) for d in range(1, 9)]
    survival = 1.0
    expected = 0
    for rate in rates:
        survival *= rate
        if survival < BREAK_EVEN:
            break
        expected += 1
    assert depth == expected
    assert 0 < depth < 8


def test_adaptive_stops_drafting_what_is_never_right_and_starts_again_when_it_is() -> None:
    drafter = make([1, 2, 1], k=4, max=1, policy="adaptive")
    rng = random.Random(3)
    for _ in range(60):
        drafter.propose(4)
        drafter.advance([rng.randrange(1, 9)])
    rates_before = drafter._table.rate(1, 1)
    assert drafter.propose(4).num_nodes == 0
    drafter.advance([1])
    for _ in range(80):
        drafter.propose(4)
        drafter.advance([1])  # now every guess is right, and nothing was drafted to find out
    assert drafter._table.rate(1, 1) > rates_before
    assert drafter.propose(4).num_nodes == 4


def test_adaptive_scores_whole_runs() -> None:
    drafter = make([1, 2, 3, 4, 5, 1, 2], k=4, policy="adaptive")
    prior = AcceptanceTable(4)
    drafter.propose(4)
    drafter.advance([3, 4, 9])
    table = drafter._table
    assert table.rate(2, 1) > prior.rate(2, 1)
    assert table.rate(2, 2) > prior.rate(2, 2)
    assert table.rate(2, 3) < prior.rate(2, 3)
    assert table.rate(2, 4) == prior.rate(2, 4)


def test_adaptive_scores_no_node_below_a_wrong_one() -> None:
    drafter = make([1, 2, 3, 4, 5, 1, 2], k=4, policy="adaptive")
    prior = AcceptanceTable(4)
    drafter.propose(4)
    drafter.advance([9, 4, 5])
    assert drafter._table.rate(2, 1) < prior.rate(2, 1)
    assert drafter._table.rate(2, 2) == prior.rate(2, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": -1}, "k is -1, but must be between 0"),
        ({"k": 1000}, "k is 1000, but must be between 0"),
        ({"min": 0}, "min is 0, but must be between 1 and max"),
        ({"min": 5}, "min is 5, but must be between 1 and max, which is 4"),
        ({"max": 500}, "max is 500, but must be between 1 and 16"),
        ({"max": 0}, "max is 0"),
        ({"policy": "clever"}, "must be adaptive or fixed"),
    ],
)
def test_f019_illegal_settings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NgramOptions(**options)  # type: ignore[arg-type]
