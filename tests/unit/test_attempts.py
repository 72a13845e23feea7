"""Attempts: the format, who is a suspect, and what is charged."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from usher.common.protocol.attempts import NEVER, Attempts, decode, encode
from usher.consumer.policy.quarantine import Left, is_suspect, is_used_up, suspects

counts = st.integers(0, 10**9 - 1)


@given(counts, counts, counts, counts)
def test_what_is_written_is_read(starts: int, failures: int, crashes: int, losses: int) -> None:
    attempts = Attempts(starts, failures, crashes, losses)
    assert decode(encode(attempts)) == attempts


@pytest.mark.parametrize(
    "value", [b"", b" ", b"-1", b"1 2", b"1 2 3", b"1 2 3 4 5", b"1 2 3 x", b"\xff", b" 1 2 3 4", b"9999999999"]
)
def test_what_cannot_be_read_stops_nobody(value: bytes) -> None:
    assert decode(value) is NEVER


def test_a_plain_number_of_a_plain_reader_is_that_many_failures() -> None:
    assert decode(b"4") == Attempts(4, 4, 0, 0)


def test_only_a_message_that_nothing_went_wrong_with_asked_to_be_called_later() -> None:
    assert Attempts(1).put_off
    assert not any(
        known.put_off for known in (NEVER, Attempts(2, failures=1), Attempts(2, crashes=1), Attempts(2, losses=1))
    )


def left(number: int, before: Attempts, *, is_blamed: bool = False) -> Left:
    return Left(b"T%d" % number, b"%d-1" % number, 7, before, 1, is_blamed)


def noted(*these: Left, is_explained: bool = False) -> dict[bytes, Attempts]:
    return {one.stream_id: attempts for one, attempts in suspects(these, is_explained)}


class TestSuspects:
    @pytest.mark.parametrize("company", [(), (left(2, Attempts(3, 2)),)], ids=["by itself", "in company"])
    def test_the_end_of_the_consumer_charges_nobody_also_who_ran_by_itself(self, company: tuple[Left, ...]) -> None:
        """Its handler may have returned a moment before."""
        assert noted(left(1, Attempts(3, 2)), *company)[b"1-1"] == Attempts(3, 2, 1)

    def test_of_an_end_that_is_explained_those_are_suspects_who_are_blamed(self) -> None:
        assert noted(left(1, Attempts(2, 1), is_blamed=True), left(2, Attempts(1)), is_explained=True) == {
            b"1-1": Attempts(2, 1, 1)
        }
        assert noted(left(1, Attempts(2, 1, 1)), is_explained=True) == {}

    def test_an_end_from_outside_is_a_loss_and_makes_a_suspect_only_the_third_time(self) -> None:
        known = Attempts(1)
        for losses in (1, 2, 3):
            assert not is_suspect(known)
            [(_, known)] = suspects([left(1, known)], is_explained=False, is_from_outside=True)
            assert known == Attempts(1, losses=losses)
        assert is_suspect(known)

    def test_who_ran_in_a_child_has_no_part_in_an_end_of_its_consumer_alone(self) -> None:
        apart, here = left(1, Attempts(2, 0, 1))._replace(is_apart=True), left(2, Attempts(1))
        assert [known.crashes for _, known in suspects([apart, here], False, by_itself=True)] == [1, 1]
        assert noted(apart, here)[b"1-1"] == Attempts(2, 0, 2), "memory may have ended both"

    def test_cut_off_in_a_drain_and_killed_it_is_neither(self) -> None:
        assert suspects([left(1, Attempts(1))], is_explained=True, is_from_outside=True) == []


@given(st.integers(1, 8), st.integers(0, 8), st.integers(0, 8))
def test_a_killer_is_given_up_after_max_attempts_whatever_it_did_before(
    max_attempts: int, raises: int, laters: int
) -> None:
    """``raises`` failures and ``laters`` requests to be called later, and from then on every start ends the process:
    the first time its consumer, then a child. The first end proves nothing, so who has only one attempt left when it
    comes to that gets one more."""
    raises = min(raises, max_attempts - 1)
    known, crashes = Attempts(raises + laters, raises), 0
    while not is_used_up(known, max_attempts):
        start = known._replace(starts=known.starts + 1)
        if is_suspect(known):
            known = start.blamed()._replace(crashes=known.crashes + 1)
        else:
            known = noted(left(1, start))[b"1-1"]
        crashes += 1
        assert crashes <= 10
    assert crashes == max(max_attempts - raises, 2)


@given(st.lists(st.sampled_from(("raises", "later", "interrupted", "in doubt", "dies")), max_size=40))
def test_no_more_is_charged_than_has_ended_badly(ends: list[str]) -> None:
    """Whatever mixes: a start that asked to be called later is free, and each crash is charged once at most."""
    known, bad = NEVER, 0
    for end in ends:
        start, bad = known._replace(starts=known.starts + 1), bad + (end != "later")
        if end in ("raises", "later"):
            known = start._replace(failures=known.failures + (end == "raises"), crashes=0)
        elif end == "dies" and is_suspect(known):
            known = start.blamed()._replace(crashes=known.crashes + 1)
            assert known.failures > start.failures
        else:
            known = start._replace(crashes=known.crashes + 1)
        assert known.failures <= bad


@given(st.integers(1, 8))
def test_who_takes_its_consumer_along_from_a_child_too_is_given_up_in_the_end(max_attempts: int) -> None:
    """The kernel ends a whole container, for example, so nobody sees what it was."""
    known, ends = Attempts(), 0
    while not is_used_up(known, max_attempts):
        known = noted(left(1, known._replace(starts=known.starts + 1)))[b"1-1"]
        ends += 1
    assert (ends, known.failures) == (max_attempts + 2, 0)
