"""What the overview says of a stream's speed and age, from what was counted."""

from __future__ import annotations

import pytest

from usher.master.insight.stats import Sample, rates

#: As Redis counts from 7.0 on; nothing of the stream was cut off yet.
_BEGAN = Sample(10_000, entries=5000, lag=1000, pending=100, read=4000)


def test_what_came_and_what_was_done_is_told_per_second() -> None:
    assert rates([_BEGAN, Sample(12_000, 5600, 1200, 50, 4400)]) == (300.0, 225.0)


def test_before_redis_7_it_is_told_of_what_is_there() -> None:
    began = _BEGAN._replace(read=None)
    assert rates([began, began._replace(time_ms=12_000, entries=5600, lag=1200, pending=50)]) == (300.0, 225.0)
    assert rates([began, began._replace(time_ms=12_000, entries=20, lag=10)]) == (None, None), "it was cut"


def test_where_the_lag_is_not_known_it_is_still_told_what_comes() -> None:
    began = _BEGAN._replace(read=None, lag=None)
    assert rates([began, began._replace(time_ms=12_000, entries=5600)]) == (300.0, None)
    began = _BEGAN._replace(lag=None)
    assert rates([began, began._replace(time_ms=12_000, entries=5600, pending=50, read=4400)]) == (300.0, 225.0)


@pytest.mark.parametrize("unknown", [{"read": None}, {"lag": None}, {"read": None, "lag": None}])
def test_a_count_of_all_and_one_of_what_is_there_are_not_compared(unknown: dict[str, None]) -> None:
    """Redis forgets how much was read when an entry is deleted that was not read yet, and learns it again at the end of
    the stream. Of a stream that was cut, the difference would be millions of messages that nobody sent."""
    counted = Sample(10_000, 1000, 10, 0, 9_000_000)
    one, other = counted._replace(**unknown), counted._replace(time_ms=12_000)
    assert rates([one, other]) == rates([other, one]) == (None, None)
