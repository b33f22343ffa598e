import random
from collections.abc import Sequence

import pytest

from forerun.errors import ConfigError, EngineFault, RequestError
from forerun.kv.pages import PageManager, PrefixDigests, num_pages_for
from forerun.types import PAGE_TOKENS


def test_pages_are_handed_out_and_taken_back() -> None:
    pages = PageManager(4)
    pages.open(7)
    assert pages.extend(7, 1) == [0]
    assert pages.extend(7, PAGE_TOKENS) == []
    assert pages.extend(7, 2 * PAGE_TOKENS + 1) == [1, 2]
    assert pages.page_table(7) == (0, 1, 2)
    assert pages.num_free == 1
    pages.free(7)
    assert pages.num_free == 4
    pages.open(8)
    assert pages.extend(8, 1) == [0]  # the lowest id comes first again


@pytest.mark.parametrize(("num_slots", "num_pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (33, 3)])
def test_num_pages_for(num_slots: int, num_pages: int) -> None:
    assert num_pages_for(num_slots) == num_pages


def test_two_sequences_share_no_page() -> None:
    pages = PageManager(4)
    pages.open(1)
    pages.open(2)
    first = pages.extend(1, 20)
    second = pages.extend(2, 20)
    assert not set(first) & set(second)
    pages.check_integrity()


def test_a_full_cache_refuses_and_keeps_its_state() -> None:
    pages = PageManager(2)
    pages.open(1)
    pages.extend(1, 16)
    with pytest.raises(RequestError, match="1 of its 2 pages are free"):
        pages.extend(1, 49)
    assert pages.page_table(1) == (0,)
    pages.check_integrity()


def test_misuse_is_a_fault() -> None:
    pages = PageManager(2)
    pages.open(1)
    with pytest.raises(EngineFault, match="has pages already"):
        pages.open(1)
    pages.free(1)
    with pytest.raises(EngineFault, match="never opened or is freed"):
        pages.free(1)
    with pytest.raises(EngineFault, match="never opened or is freed"):
        pages.extend(1, 1)
    with pytest.raises(ConfigError, match="at least 1"):
        PageManager(0)


def test_check_integrity_sees_lost_doubled_and_foreign_pages() -> None:
    for damage, message in (
        (lambda p: p._free.pop(), "page 0 is in 0 places"),
        (lambda p: p._free.append(1), "page 1 is in 2 places"),
        (lambda p: p._free.append(9), "page 9 is outside"),
        (lambda p: p._num_users.__setitem__(2, 1), "page 2 counts 1 users, but has 0"),
        (lambda p: p._idle.__setitem__(p._free.pop(), None), "an idle page is not published"),
        (lambda p: p._prefix_of.__setitem__(0, b"x"), "pages and prefixes don't match"),
        (lambda p: p._tables.update({1: [0, 0]}) or p._free.pop(), "lists a page twice"),
    ):
        pages = PageManager(3)
        damage(pages)
        with pytest.raises(EngineFault, match=message):
            pages.check_integrity()


def text(*page_ids: int, rest: int = 1) -> list[int]:
    """A page of each id, then some of another."""
    return [token_id for token_id in page_ids for _ in range(PAGE_TOKENS)] + [99] * rest


def digests(token_ids: Sequence[int], num_tokens: int | None = None, salt: str = "") -> Sequence[bytes]:
    return PrefixDigests(salt).of(token_ids, len(token_ids) if num_tokens is None else num_tokens)


def open_text(pages: PageManager, sequence_id: int, token_ids: Sequence[int]) -> int:
    """Opens a sequence, whose last token must be run; slots that were known."""
    return pages.open(sequence_id, digests(token_ids, len(token_ids) - 1))


def serve(pages: PageManager, sequence_id: int, token_ids: list[int]) -> tuple[int, tuple[int, ...]]:
    """A request from beginning to end: slots that were known, and its pages."""
    known = open_text(pages, sequence_id, token_ids)
    pages.extend(sequence_id, len(token_ids))
    table = pages.page_table(sequence_id)
    pages.publish(sequence_id, digests(token_ids))
    pages.free(sequence_id)
    pages.check_integrity()
    return known, table


def test_a_text_that_begins_like_another_starts_with_its_pages() -> None:
    pages = PageManager(8)
    assert serve(pages, 1, text(1, 2, 3)) == (0, (0, 1, 2, 3))
    assert (pages.num_free, pages.num_kept) == (8, 3)
    assert serve(pages, 2, text(1, 2, 3)) == (48, (0, 1, 2, 3))
    assert serve(pages, 3, text(1, 2, 4)) == (32, (0, 1, 3, 4))
    assert serve(pages, 4, text(2, 2, 3))[0] == 0  # what a page holds depends on all before it
    assert serve(pages, 5, text(1, 2, 3, rest=0))[0] == 32  # the last token must be run
    assert serve(pages, 6, [1] * (PAGE_TOKENS - 1)) == (0, serve(pages, 7, [1])[1])


def test_sequences_that_run_share_pages_and_each_counts() -> None:
    pages = PageManager(6)
    serve(pages, 1, text(1, 2))
    assert open_text(pages, 2, text(1, 2)) == open_text(pages, 3, text(1, 2, 3)) == 32
    pages.check_integrity()
    assert pages.page_table(2) == pages.page_table(3) == (0, 1)
    assert (pages.num_free, pages.num_kept) == (4, 0)
    pages.free(2)
    pages.check_integrity()
    assert (pages.num_free, pages.num_kept) == (4, 0)
    pages.free(3)
    assert (pages.num_free, pages.num_kept) == (6, 2)


def test_the_least_recently_used_text_goes_first_and_its_last_page_before_others() -> None:
    pages = PageManager(7)
    serve(pages, 1, text(1, 2))
    serve(pages, 2, text(3, 4))
    serve(pages, 3, text(1, 2))  # used again
    pages.open(4)
    pages.extend(4, 4 * PAGE_TOKENS)
    assert (pages.num_free, pages.num_kept) == (3, 3)
    assert open_text(pages, 5, text(3, 4)) == PAGE_TOKENS
    pages.extend(5, 2 * PAGE_TOKENS)
    assert open_text(pages, 6, text(1, 2)) == PAGE_TOKENS
    pages.check_integrity()
    with pytest.raises(RequestError, match="0 of its 7 pages are free"):
        pages.extend(6, 2 * PAGE_TOKENS)
    pages.check_integrity()


def test_what_two_have_computed_is_kept_once() -> None:
    pages = PageManager(6)
    for sequence_id in (1, 2):
        assert open_text(pages, sequence_id, text(1, 2)) == 0
        pages.extend(sequence_id, 3 * PAGE_TOKENS)
    for sequence_id in (1, 2):
        pages.publish(sequence_id, digests(text(1, 2)))
    for sequence_id in (1, 2):
        pages.free(sequence_id)
    pages.check_integrity()
    assert (pages.num_free, pages.num_kept) == (6, 2)


def test_forgetting_keeps_nothing_and_harms_nobody() -> None:
    pages = PageManager(6)
    serve(pages, 1, text(1, 2))
    assert open_text(pages, 2, text(1, 2)) == open_text(pages, 3, text(1, 2)) == 32
    pages.forget()
    pages.check_integrity()
    assert pages.page_table(2) == pages.page_table(3) == (0, 1)
    assert open_text(pages, 4, text(1, 2)) == 0
    for sequence_id in (2, 3, 4):
        pages.free(sequence_id)
    pages.check_integrity()
    assert (pages.num_free, pages.num_kept) == (6, 0)


def test_a_manager_that_keeps_nothing_knows_nothing() -> None:
    pages = PageManager(6, keeps_prefixes=False)
    assert [serve(pages, i, text(1, 2))[0] for i in range(3)] == [0, 0, 0]
    assert pages.num_kept == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_find_what_a_dictionary_of_prefixes_finds(seed: int) -> None:
    """Each page is filled with its text's tokens, as a cache would be; what is reused must hold the right ones."""
    rng = random.Random(seed)
    num_pages = rng.choice([6, 20])
    pages = PageManager(num_pages)
    content: list[tuple[int, ...]] = [()] * num_pages
    running: dict[int, list[int]] = {}
    num_known = num_refused = 0
    for number in range(1500):
        if running and (rng.random() < 0.5 or len(running) == 4):
            sequence_id = rng.choice(list(running))
            token_ids = running.pop(sequence_id)
            num_cached = rng.randrange(len(token_ids) + 1)
            for i, page in enumerate(pages.page_table(sequence_id)):
                if (i + 1) * PAGE_TOKENS <= num_cached:
                    # Another request may have filled it before: with the same.
                    assert content[page] in ((), tuple(token_ids[: (i + 1) * PAGE_TOKENS]))
                    content[page] = tuple(token_ids[: (i + 1) * PAGE_TOKENS])
            pages.publish(sequence_id, digests(token_ids, num_cached))
            pages.free(sequence_id)
        else:
            token_ids = text(*(rng.randrange(2) for _ in range(rng.randrange(5))), rest=rng.randrange(1, 20))
            known = open_text(pages, number, token_ids)
            for i, page in enumerate(pages.page_table(number)):
                assert content[page] == tuple(token_ids[: (i + 1) * PAGE_TOKENS])
            num_known += known
            try:
                for page in pages.extend(number, len(token_ids)):
                    content[page] = ()
                running[number] = token_ids
            except RequestError:
                num_refused += 1
                pages.free(number)
        if rng.random() < 0.01:
            pages.forget()
        pages.check_integrity()
    assert num_known > 1000
    assert num_refused > 10 or num_pages == 20


def test_digests_name_whole_prefixes_and_salts_share_nothing() -> None:
    long = text(1, 2, 3)
    whole = digests(long)
    assert len(whole) == len(set(whole)) == 3
    assert digests(long, 2 * PAGE_TOKENS + 5) == whole[:2]
    growing = PrefixDigests()
    assert [list(growing.of(long[:n], n)) for n in (20, 40, len(long))] == [list(whole[:n]) for n in (1, 2, 3)]
    assert digests(text(2, 2, 3))[1:] != whole[1:]
    assert not set(whole) & set(digests(long, salt="a"))
    assert digests(long, salt="a") == digests(long, salt="a") != digests(long, salt="b")


def test_known_pages_are_counted_up_to_the_first_that_is_not() -> None:
    pages = PageManager(6)
    serve(pages, 1, text(1, 2))
    assert pages.num_known(digests(text(1, 2, 3))) == 2
    assert pages.num_known(digests(text(2, 2))) == 0
    assert pages.num_used == 0
