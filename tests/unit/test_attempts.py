"""Attempts: the format, whom a crash is charged to, and what a suspect may run beside."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from usher.common.protocol.attempts import NEVER, Attempts, decode, encode
from usher.consumer.policy.quarantine import Isolation, Left, charges, isolation

counts = st.integers(0, 10**9 - 1)
TOGETHER, ONE_SUSPECT, ALONE = Isolation.TOGETHER, Isolation.ONE_SUSPECT, Isolation.ALONE


@given(counts, counts, counts, counts)
def test_what_is_written_is_read(starts: int, failures: int, crashes: int, losses: int) -> None:
    attempts = Attempts(starts, failures, crashes, losses)
    assert decode(encode(attempts)) == attempts


@pytest.mark.parametrize(
    "value", [b"", b" ", b"-1", b"1 2", b"1 2 3", b"1 2 3 4 5", b"1 2 3 x", b"\xff", b" 1 2 3 4", b"9999999999"]
)
def test_what_cannot_be_read_stops_nobody(value: bytes) -> None:
    assert decode(value) is NEVER


def test_a_plain_number_of_a_former_version_is_that_many_failures() -> None:
    assert decode(b"4") == Attempts(4, 4, 0, 0)


def test_only_a_message_that_nothing_went_wrong_with_asked_to_be_called_later() -> None:
    assert Attempts(1).put_off
    assert not any(
        known.put_off for known in (NEVER, Attempts(2, failures=1), Attempts(2, crashes=1), Attempts(2, losses=1))
    )


@pytest.mark.parametrize(
    ("known", "max_attempts", "answer"),
    [
        (Attempts(), 5, TOGETHER),
        (Attempts(4, 4), 5, TOGETHER),
        (Attempts(1, 0, 1), 5, ONE_SUSPECT),
        (Attempts(3, 2, 1), 5, ONE_SUSPECT),
        (Attempts(4, 3, 1), 5, ALONE),
        (Attempts(1, 0, 1), 2, ALONE),
        (Attempts(1, 0, 1), 1, ALONE),
        (Attempts(2, 0, 2), 5, ALONE),
        (Attempts(99, 0, 1), 5, ONE_SUSPECT),  # it asked to be called later 98 times
        (Attempts(0, 0, 0, 2), 5, TOGETHER),
        (Attempts(0, 0, 0, 3), 5, ALONE),
    ],
)
def test_the_more_often_a_message_was_there_the_less_may_run_beside_it(
    known: Attempts, max_attempts: int, answer: Isolation
) -> None:
    assert isolation(known, max_attempts) is answer


def left(number: int, before: Attempts, *, is_blamed: bool = False) -> Left:
    return Left(b"T%d" % number, b"%d-1" % number, 7, before, 1, is_blamed)


def noted(*these: Left, is_explained: bool = False) -> dict[bytes, Attempts]:
    return {one.stream_id: attempts for one, attempts in charges(these, is_explained)}


class TestCharges:
    def test_of_several_all_are_suspects_and_nobody_is_charged(self) -> None:
        assert noted(left(1, Attempts(1)), left(2, Attempts(3, 2))) == {
            b"1-1": Attempts(1, 0, 1),
            b"2-1": Attempts(3, 2, 1),
        }

    def test_one_that_ran_by_itself_is_charged_with_this_start_and_the_crashes_before(self) -> None:
        assert noted(left(1, Attempts(1))) == {b"1-1": Attempts(1, 1, 1)}
        assert noted(left(1, Attempts(3, 1, 1))) == {b"1-1": Attempts(3, 3, 2)}
        assert noted(left(1, Attempts(9, 0, 0))) == {b"1-1": Attempts(9, 1, 1)}, (
            "not with starts that asked to be called later"
        )

    def test_an_end_that_is_explained_is_charged_to_those_who_are_blamed(self) -> None:
        assert noted(left(1, Attempts(2, 1), is_blamed=True), left(2, Attempts(1)), is_explained=True) == {
            b"1-1": Attempts(2, 2, 0)
        }
        assert noted(left(1, Attempts(2, 1)), is_explained=True) == {}

    def test_what_was_charged_ahead_is_as_before_when_the_end_is_explained(self) -> None:
        for before in (Attempts(3, 0, 2), Attempts(4, 1, 0, 3)):
            assert noted(left(1, before), is_explained=True) == {b"1-1": before}

    def test_where_nothing_ran_nobody_is_charged(self) -> None:
        assert noted() == {}


@given(st.integers(1, 8), st.integers(0, 8), st.integers(0, 8), st.booleans())
def test_a_killer_is_given_up_after_max_attempts_whatever_it_did_before(
    max_attempts: int, raises: int, laters: int, is_busy: bool
) -> None:
    """``raises`` failures and ``laters`` requests to be called later, and from then on every start ends the process.

    A crash in company proves nothing, so who has only one attempt left when it comes to that gets one more, alone.
    """
    raises = min(raises, max_attempts - 1)
    known = Attempts(raises + laters, raises)
    crashes = 0
    while known.failures < max_attempts:
        asked = isolation(known, max_attempts)
        start = known._replace(starts=known.starts + 1)
        if asked is ALONE:
            known = start.blamed()  # charged ahead: the journal says nothing new
        else:
            company = [left(2, Attempts(1))] if is_busy else []
            known = noted(left(1, start), *company)[b"1-1"]
        crashes += 1
        assert crashes <= 10
    expected = max(max_attempts - raises, 2 if is_busy else 1)
    assert crashes == expected if laters == 0 else crashes <= expected


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=2, max_size=8))
def test_neighbours_are_never_charged_for_a_crash(many: list[tuple[int, int]]) -> None:
    """Counts are kept: a start is not lost, a failure does not come from nothing."""
    were = [Attempts(failures + 1, failures, crashes) for failures, crashes in many]
    found = noted(*(left(n, attempts) for n, attempts in enumerate(were)))
    for n, before in enumerate(were):
        assert found[b"%d-1" % n] == before._replace(crashes=before.crashes + 1)
