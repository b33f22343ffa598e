"""Random operations on the page manager against a model of plain sets, its integrity checked after each one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import EngineFault, RequestError
from forerun.kv.pages import PageManager, num_pages_for

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["open", "extend", "free"]), st.integers(0, 3), st.integers(0, 200)), max_size=60
)


@settings(max_examples=200, deadline=None)
@given(num_pages=st.integers(1, 20), operations=OPERATIONS)
def test_random_operations_keep_every_page_in_one_place(num_pages: int, operations: list[tuple[str, int, int]]) -> None:
    pages = PageManager(num_pages)
    owned: dict[int, list[int]] = {}
    for name, sequence_id, num_slots in operations:
        num_owned = sum(map(len, owned.values()))
        try:
            if name == "open":
                pages.open(sequence_id)
                assert sequence_id not in owned
                owned[sequence_id] = []
            elif name == "extend":
                added = pages.extend(sequence_id, num_slots)
                owned[sequence_id] += added
                assert num_pages_for(num_slots) <= len(owned[sequence_id])
                assert len(added) == max(0, num_pages_for(num_slots) - (len(owned[sequence_id]) - len(added)))
            else:
                pages.free(sequence_id)
                del owned[sequence_id]
        except EngineFault:
            assert (name == "open") == (sequence_id in owned)
        except RequestError:
            assert num_pages_for(num_slots) - len(owned[sequence_id]) > num_pages - num_owned
        pages.check_integrity()
        assert pages.num_free == num_pages - sum(map(len, owned.values()))
        for owner, table in owned.items():
            assert pages.page_table(owner) == tuple(table)
