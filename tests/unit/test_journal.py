"""The journal: what one process wrote before it ended, another one reads."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from usher.common.base.clock import now_s
from usher.common.protocol.attempts import Attempts
from usher.common.protocol.message import LONGEST_TICKET
from usher.consumer.handlers.message import Message, OwnLease
from usher.consumer.lifecycle.journal import Former, Journal, read_journal
from usher.consumer.policy.quarantine import Left

LEASE = OwnLease(1e6, now_s())  # taken when the tests are collected; it outlives the run, however long that is
BOOT = "0bd1cb5a-boot"
ONCE = Attempts(1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "c1.journal"


def message(number: int, known: Attempts = ONCE, ticket: bytes = b"T") -> Message:
    return Message(ticket, b"%d-1" % number, 9, [], LEASE, known)


def left(number: int, before: Attempts = ONCE, ticket: bytes = b"T", *, is_blamed: bool = False) -> Left:
    return Left(ticket, b"%d-1" % number, 9, before, 77, is_blamed)


def read(path: Path) -> Former:
    former = read_journal(path, BOOT)
    assert former is not None
    return Former(former.incarnation, former.is_explained, sorted(one._replace(slot=0) for one in former.left))


def test_what_runs_is_there_and_what_has_ended_is_not(path: Path) -> None:
    journal = Journal(path, BOOT, "c1:7", 4)
    runs, ended, both = message(1, Attempts(3, 1, 2)), message(2), message(3)
    for one in (runs, ended, both):
        journal.started(one, 77)
    journal.ended(ended)
    assert read(path) == Former("c1:7", False, [left(1, Attempts(3, 1, 2)), left(3)])
    assert (runs.in_hand, ended.in_hand) == (True, False)


def test_it_is_read_after_the_process_was_killed(path: Path) -> None:
    """And by nothing but the file: the mapping is gone with its process."""
    child = os.fork()
    if child == 0:
        journal = Journal(path, BOOT, "c1:7", 4)
        journal.started(message(1), 77)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert read(path) == Former("c1:7", False, [left(1)])


def test_the_longest_names_fit_and_any_bytes_survive(path: Path) -> None:
    journal = Journal(path, BOOT, f"{'n' * 64}:{'9' * 20}", 2)
    longest = Message(
        b"x\0" * (LONGEST_TICKET // 2), b"18446744073709551615-18446744073709551615", 2**53, [], LEASE, Attempts(1)
    )
    journal.started(longest, 2**53)
    journal.started(message(1, ticket=b"\0\0"), 77)
    former = read_journal(path, BOOT)
    assert former is not None
    assert former.incarnation == f"{'n' * 64}:{'9' * 20}"
    assert {one.ticket for one in former.left} == {longest.ticket, b"\0\0"}
    assert {one.stream_id for one in former.left} == {longest.stream_id, b"1-1"}


def test_more_than_there_are_slots_for_is_not_written_down_and_hurts_nobody(path: Path) -> None:
    journal = Journal(path, BOOT, "c1:7", 1)
    first, second, third = message(1), message(2), message(3)
    journal.started(first, 77)
    journal.started(second, 77)
    journal.ended(second)
    assert read(path).left == [left(1)]
    journal.ended(first)
    journal.started(third, 77)
    assert read(path).left == [left(3)]


def test_who_is_blamed_stands_there_and_the_others_are_only_in_the_way(path: Path) -> None:
    journal = Journal(path, BOOT, "c1:7", 4)
    culprit, neighbour, ended = message(1), message(2), message(3)
    for one in (culprit, neighbour, ended):
        journal.started(one, 77)
    journal.ended(ended)
    journal.blame([culprit, ended])
    assert read(path) == Former("c1:7", True, [left(1, is_blamed=True), left(2)])
    journal.forget(culprit)
    assert read(path) == Former("c1:7", True, [left(2)])
    journal.ended(culprit)  # it came back after all
    assert read(path).left == [left(2)]


def test_an_end_that_is_explained_says_so(path: Path) -> None:
    journal = Journal(path, BOOT, "c1:7", 4)
    journal.started(message(1), 77)
    journal.explain()
    assert read(path) == Former("c1:7", True, [left(1)])


def test_the_next_incarnation_begins_anew_with_any_number_of_slots(path: Path) -> None:
    journal = Journal(path, BOOT, "c1:7", 8)
    for number in range(8):
        journal.started(message(number), 77)
    journal.explain()
    again = Journal(path, BOOT, "c1:8", 2)
    assert read(path) == Former("c1:8", False, [])
    again.started(message(5), 77)
    assert read(path).left == [left(5)]


@pytest.mark.parametrize("content", [b"", b"usher-j2", b"\0" * 5000, b"x" * 5000])
def test_what_is_no_journal_is_not_believed(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert read_journal(path, BOOT) is None


def test_a_torn_journal_gives_what_can_be_read(path: Path) -> None:
    journal = Journal(path, BOOT, "c1:7", 4)
    for number in range(4):
        journal.started(message(number), 77)
    path.write_bytes(path.read_bytes()[:-200])
    assert len(read(path).left) == 3


def test_where_no_file_can_be_had_all_else_works(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path / "no" / "folder" / "c1.journal", BOOT, "c1:7", 1)
    assert [record.getMessage() for record in caplog.records] == ["journal_unavailable"]
    one = message(1)
    journal.started(one, 77)
    assert one.in_hand
    journal.ended(one)
    journal.explain()
