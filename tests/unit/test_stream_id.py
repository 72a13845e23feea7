from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from usher.common.protocol.stream_id import ZERO, after, before, from_rank, is_id, rank

_MOST = 2**64 - 1
_ids = st.tuples(st.integers(0, _MOST), st.integers(0, _MOST))


def _written(parts: tuple[int, int]) -> bytes:
    return b"%d-%d" % parts


@given(_ids, _ids)
def test_ids_sort_as_numbers_and_not_as_text(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert (rank(_written(one)) < rank(_written(other))) == (one < other)


@given(_ids)
def test_before_and_after_are_neighbours(parts: tuple[int, int]) -> None:
    here = _written(parts)
    assert rank(after(here)) == rank(here) + 1
    assert before(after(here)) == here
    assert before(here) == (ZERO if here == ZERO else from_rank(rank(here) - 1))


def test_each_part_of_an_id_is_a_number_of_64_bits() -> None:
    assert is_id("18446744073709551615-18446744073709551614") and is_id("18446744073709551614-18446744073709551615")
    assert not is_id("18446744073709551616-5")
    assert not is_id("5-18446744073709551616")
    assert not is_id("18446744073709551615-18446744073709551615"), "nothing comes after that"
