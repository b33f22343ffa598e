"""Prediction against a slow search, and what happens where the output leaves the text (F017, F018, F024)."""

import random
from collections.abc import Sequence

import pytest

from forerun.drafters.prediction import (
    FOUND_CELL,
    RUN_LENS,
    START_CELL,
    PredictionDrafter,
    PredictionOptions,
    PredictionSource,
)
from forerun.errors import ConfigError
from tests.helpers.drafting import context, propose, target

EOS = 0
TEXT = (1, 2, 3, 4, 5, 6, 7, 8)


def make(expected: Sequence[int], end_ids: Sequence[int] = (EOS,), **options: object) -> PredictionDrafter:
    source = PredictionSource(PredictionOptions(**options))  # type: ignore[arg-type]
    drafter = source.open(context([90, 91], end_ids, prediction=tuple(expected)))
    assert drafter is not None
    return drafter


def guess(drafter: PredictionDrafter, max_nodes: int = 63) -> tuple[int, ...]:
    return propose(drafter, max_nodes).draft.token_ids


def slow_prediction(expected: Sequence[int], output: Sequence[int], options: PredictionOptions) -> list[int]:
    """The same by its words, from the beginning: a pointer, and a search over all places where the text was left."""
    pointer: int | None = 0
    run_len = sure_len = 0
    for end in range(1, len(output) + 1):
        if pointer is not None and pointer < len(expected) and expected[pointer] == output[end - 1]:
            pointer, run_len = pointer + 1, run_len + 1
        else:
            pointer, run_len = None, 0
            for n in range(options.min, min(options.max, end) + 1):
                places = [
                    start + n
                    for start in range(len(expected) - n)
                    if list(expected[start : start + n]) == list(output[end - n : end])
                ]
                if places:
                    ahead = [place for place in places if place > sure_len]
                    pointer, run_len = ahead[0] if ahead else places[-1], n
        if pointer is not None and run_len >= 2:
            sure_len = pointer
    if pointer is None:
        return []
    rest = list(expected[pointer : pointer + options.k])
    return rest[: rest.index(EOS) + 1] if EOS in rest else rest


@pytest.mark.parametrize("vocab_size", [2, 4, 12])
@pytest.mark.parametrize(("k", "low", "high"), [(16, 1, 4), (1, 1, 1), (5, 2, 3), (63, 3, 16)])
def test_equals_a_slow_search(vocab_size: int, k: int, low: int, high: int) -> None:
    rng = random.Random(vocab_size * 100 + k)
    options = PredictionOptions(k=k, min=low, max=high)
    for _ in range(20):
        expected = [rng.randrange(vocab_size + 1) for _ in range(rng.randrange(1, 40))]
        drafter = make(expected, k=k, min=low, max=high)
        # The output is the text with gaps, additions and changes.
        edits = ([], [9], [rng.randrange(9)])
        edited = [new for t in expected for new in (*edits, [t, 9], *[[t]] * 6)[rng.randrange(10)]]
        output: list[int] = []
        while len(output) < len(edited) + 5:
            assert list(guess(drafter)) == slow_prediction(expected, output, options)
            new = [*edited, *[1] * 9][len(output) :][: rng.randrange(1, 4)]
            drafter.advance(new)
            output += new


def test_begins_with_the_text_and_moves_with_the_output() -> None:
    drafter = make(TEXT, k=3)
    assert guess(drafter) == (1, 2, 3)
    drafter.advance([1])
    assert guess(drafter) == (2, 3, 4)
    drafter.advance([2, 3, 4, 5])
    assert guess(drafter) == (6, 7, 8)
    drafter.advance([6, 7])
    assert guess(drafter) == (8,)
    drafter.advance([8])
    assert guess(drafter) == ()


@pytest.mark.parametrize(
    ("output", "follows"),
    [
        ([1, 2, 50], ()),  # left, and no way back yet
        ([1, 2, 50, 4], (5, 6, 7, 8)),  # a token was changed
        ([1, 2, 50, 51, 52, 3], (4, 5, 6, 7, 8)),  # tokens were added
        ([1, 2, 6], (7, 8)),  # tokens were left out
        ([60, 61, 1], (2, 3, 4, 5, 6, 7, 8)),  # it begins later
    ],
)
def test_finds_the_way_back_after_an_edit(output: list[int], follows: tuple[int, ...]) -> None:
    drafter = make(TEXT)
    drafter.advance(output)
    assert guess(drafter) == follows


def test_longest_end_wins_then_the_nearest_ahead_then_the_nearest_behind() -> None:
    text = (7, 1, 20, 9, 7, 1, 21, 9, 7, 1, 22, 9, 2, 1, 23)
    drafter = make(text, k=1)
    drafter.advance([7, 1, 20, 50, 7, 1])  # both 7 1 21 and 7 1 22 lie ahead, 7 1 20 behind
    assert guess(drafter) == (21,)
    drafter = make(text, k=1)
    drafter.advance([7, 1, 20, 50, 2, 1])  # only 2 1 has the whole end
    assert guess(drafter) == (23,)
    drafter.advance([51, 9])  # ahead of 2 1 there is none, so the last one behind
    assert guess(drafter) == (2,)


def test_a_single_token_elsewhere_does_not_move_the_place_where_the_text_was_left() -> None:
    text = (1, 2, 3, 4, 30, 6, 7, 3, 8, 30, 9)
    drafter = make(text, k=1)
    drafter.advance([1, 2, 50, 8])  # 8 happens to occur far ahead
    assert guess(drafter) == (30,)
    drafter.advance([3])  # that was not it: the nearest 3 after the place where the text was left
    assert guess(drafter) == (4,)


def test_min_refuses_shorter_ends() -> None:
    drafter = make(TEXT, min=2)
    drafter.advance([1, 50, 3])
    assert guess(drafter) == ()
    drafter.advance([4])
    assert guess(drafter) == (5, 6, 7, 8)


def test_draft_is_a_chain_of_fixed_proposals() -> None:
    draft = propose(make(TEXT, k=3), 63).draft
    assert draft.is_chain
    assert draft.origins == ("prediction",) * 3
    assert draft.q_rows == (None,) * 3


def test_max_nodes_cuts() -> None:
    assert guess(make(TEXT), max_nodes=2) == (1, 2)


def test_f017_proposals_end_at_the_first_end_id() -> None:
    assert guess(make([1, 2, EOS, 3, 4])) == (1, 2, EOS)
    assert guess(make([1, 2, 3, 4], end_ids=(EOS, 2))) == (1, 2)


def test_f018_nothing_expected_proposes_nothing() -> None:
    assert PredictionSource(PredictionOptions()).open(context([1])) is None
    drafter = make([5])
    drafter.advance([6])
    assert guess(drafter) == ()
    drafter.advance([5])  # nothing comes after it
    assert guess(drafter) == ()


def test_f024_two_requests_share_nothing() -> None:
    source = PredictionSource(PredictionOptions())
    first, second = (source.open(context([1], prediction=TEXT)) for _ in range(2))
    assert first is not None
    assert second is not None
    first.advance([1, 2])
    assert guess(second) == TEXT
    assert source.memory_bytes == 0


def test_cells_tell_how_a_run_began_and_its_length() -> None:
    drafter = make(range(1, 40), k=20)
    classes = (0, 1, 2, 3, 4, 4, 4, 4, *(5,) * 8, *(6,) * 4)
    assert propose(drafter, 63).cells == tuple(START_CELL + one for one in classes)
    drafter.advance([1, 2])
    assert propose(drafter, 5).cells == tuple(START_CELL + one for one in classes[2:7])
    drafter.advance([50, 4])
    assert propose(drafter, 5).cells == tuple(FOUND_CELL + one for one in classes[1:6])
    drafter.advance([5, 6])
    assert propose(drafter, 5).cells == tuple(FOUND_CELL + one for one in classes[3:8])
    drafter = make(range(1, 40))
    drafter.advance([4])  # an end of one token, though more might be looked up
    assert propose(drafter, 2).cells == (FOUND_CELL + 1, FOUND_CELL + 2)
    assert len(PredictionSource.priors) == 2 * (len(RUN_LENS) + 1)


def test_binds_to_any_target() -> None:
    source = PredictionOptions(policy="fixed").bind(target(50))
    assert (source.name, source.policy, source.reads_rows, source.is_free) == ("prediction", "fixed", False, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": -1}, "k is -1, but must be between 0"),
        ({"k": 64}, "k is 64"),
        ({"min": 0}, "min is 0, but must be between 1 and max"),
        ({"min": 5}, "min is 5"),
        ({"max": 17}, "max is 17, but must be between 1 and 16"),
        ({"policy": "clever"}, "adaptive or fixed"),
    ],
)
def test_f019_settings_out_of_range_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PredictionOptions(**settings)  # type: ignore[arg-type]
