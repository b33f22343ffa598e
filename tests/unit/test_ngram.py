"""Prompt lookup against a slow search, and the cases where there is little or nothing to match (F017, F018, F024)."""

import random
from collections.abc import Sequence

import pytest

from forerun.drafters.ngram import MAX_TABLE_DEPTH, NgramDrafter, NgramOptions, NgramSource
from forerun.errors import ConfigError
from tests.helpers.drafting import context, propose

EOS = 0


def make(prompt: Sequence[int], end_ids: Sequence[int] = (EOS,), **options: object) -> NgramDrafter:
    return NgramSource(NgramOptions(**options)).open(context(prompt, end_ids))  # type: ignore[arg-type]


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
    options = NgramOptions(k=k, min=low, max=high)
    for _ in range(20):
        # Ids start at 0, so end-of-text is one of them.
        ids = [rng.randrange(vocab_size + 1) for _ in range(rng.randrange(1, 30))]
        drafter = NgramSource(options).open(context(ids, (EOS,)))
        for _ in range(6):
            assert list(propose(drafter, 63).draft.token_ids) == slow_lookup(ids, options)
            new = [rng.randrange(vocab_size + 1) for _ in range(rng.randrange(1, 4))]
            drafter.advance(new)
            ids += new


def test_draft_is_a_chain_of_fixed_proposals() -> None:
    draft = propose(make([1, 2, 3, 4, 1, 2], k=3), 8).draft
    draft.check_integrity()
    assert draft.token_ids == (3, 4, 1)
    assert draft.is_chain
    assert set(draft.origins) == {"ngram"}
    assert draft.q_rows == (None, None, None)


def test_longest_match_wins_then_the_latest() -> None:
    # "7 1 2" occurs once, "1 2" more recently: the longer one is followed.
    assert propose(make([7, 1, 2, 5, 9, 1, 2, 6, 7, 1, 2], k=1), 8).draft.token_ids == (5,)
    assert propose(make([1, 2, 5, 1, 2, 6, 3, 1, 2], k=1, max=2), 8).draft.token_ids == (6,)


@pytest.mark.parametrize("prompt", [[5], [5, 6], [1, 2, 3, 4, 5], [5, 5]])
def test_f018_prompts_shorter_than_the_ngram_or_without_a_repeat_propose_nothing(prompt: list[int]) -> None:
    assert propose(make(prompt, min=3, max=3), 8).draft.num_nodes == 0


def test_f018_a_match_without_a_continuation_proposes_nothing() -> None:
    # The only place where "5" stands is the very end.
    assert propose(make([1, 2, 3, 5]), 8).draft.num_nodes == 0


def test_f018_one_token_repeated_matches_itself() -> None:
    assert propose(make([4, 4], k=5), 8).draft.token_ids == (4,) * 5
    assert propose(make([3, 4, 3, 4, 3], k=5), 8).draft.token_ids == (4, 3, 4, 3, 4)


@pytest.mark.parametrize(("offset", "expected"), [(0, (EOS,)), (1, (4, EOS)), (2, (4, 5, EOS))])
def test_f017_proposals_end_at_the_first_end_of_text(offset: int, expected: tuple[int, ...]) -> None:
    prompt = [1, 2, 3, *range(4, 4 + offset), EOS, 7, 8, 9, 1, 2, 3]
    assert propose(make(prompt, k=8), 8).draft.token_ids == expected


def test_f017_every_end_id_counts() -> None:
    assert propose(make([1, 2, 3, 4, 5, 1, 2], end_ids=(EOS, 4)), 8).draft.token_ids == (3, 4)


def test_max_nodes_cuts() -> None:
    drafter = make([1, 2, 3, 4, 5, 1, 2], k=8)
    assert propose(drafter, 2).draft.token_ids == (3, 4)


def test_f024_two_requests_share_nothing() -> None:
    source = NgramSource(NgramOptions())
    first = source.open(context([1, 2, 3, 4, 1, 2]))
    propose(first, 8)
    first.advance([9, 9, 9])
    assert propose(source.open(context([5, 1, 2])), 8).draft.num_nodes == 0


def test_cells_tell_match_length_and_depth_and_have_priors() -> None:
    source = NgramSource(NgramOptions(k=12))
    proposal = propose(source.open(context([*range(1, 30), 1, 2])), 63)
    assert proposal.cells == tuple(MAX_TABLE_DEPTH + min(depth, MAX_TABLE_DEPTH - 1) for depth in range(12))
    assert [source.priors[cell] for cell in proposal.cells[:4]] == [0.55, 0.70, 0.80, 0.80]
    assert propose(source.open(context([5, 9, 5])), 1).cells == (0,)
    assert source.priors[0] == 0.35
    assert len(source.priors) == 4 * MAX_TABLE_DEPTH


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
        NgramOptions(**settings)  # type: ignore[arg-type]
