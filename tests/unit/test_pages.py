import pytest

from forerun.errors import ConfigError, EngineFault, RequestError
from forerun.kv.pages import PageManager, num_pages_for
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
    ):
        pages = PageManager(3)
        damage(pages)
        with pytest.raises(EngineFault, match=message):
            pages.check_integrity()
