"""Somebody destroys the group, deletes the stream, or empties Redis under a running system: it goes on by itself and
says what that cost."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.hands import EmbeddedRedis, pairs, rank
from tests.process.crew import (
    KEYS,
    Crew,
    Producer,
    ids_in,
    out_of_order,
    out_of_order_under_a_fence,
    overlaps,
    repeated,
)
from tests.process.machine import kill_all_of, processes_of, until
from tests.topologies import figures
from usher import Link

pytestmark = pytest.mark.process

_TICKETS = 40
#: Enough to do for two consumers that much is pending, parked and unread when it happens.
_BACKLOG = 1200


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Crew, Link]]:
    """One system for all tests of this file: each leaves it idle and well, whatever was done to it."""
    with tempfile.TemporaryDirectory(prefix="usher-t-", dir="/tmp") as name:
        folder = Path(name)
        with EmbeddedRedis(folder / "redis", port=None, durable=False) as server:
            link = Link(server.url, "test")
            with Crew(folder, server.url, USHER_DEMO_WORK_MS="10", USHER_CAPACITY="200") as crew:
                crew.start(2, ["c1", "c2"])
                yield crew, link
            link.close()
        left = processes_of(folder)
        kill_all_of(folder)
        assert not left


@pytest.fixture
def crew(running: tuple[Crew, Link]) -> Crew:
    running[0].forget_the_past()
    return running[0]


@pytest.fixture
def link(running: tuple[Crew, Link]) -> Link:
    return running[1]


@dataclass(frozen=True)
class Before:
    """The group at the moment at which it was destroyed."""

    oldest_pending: str
    delivered: str


def destroy(link: Link, *command: str) -> Before:
    """Do it, and see in the same transaction what there was."""
    look = [("XPENDING", KEYS.stream, KEYS.group), ("XINFO", "GROUPS", KEYS.stream), ("GET", KEYS.taken)]
    until(lambda: link.call("XPENDING", KEYS.stream, KEYS.group)[0] > 100, 20, "much is in processing")
    pending, groups, taken, _ = link.pipeline([("MULTI",), *look, command, ("EXEC",)])[-1]
    assert pending[0] > 20, "much is in processing"
    delivered = min(pairs(groups[0])[b"last-delivered-id"], taken.partition(b" ")[0], key=rank)
    return Before(pending[1].decode(), delivered.decode())


def backlog(crew: Crew, link: Link) -> Producer:
    """Send a lot and wait until some of it is done."""
    producer = Producer(link, _TICKETS)
    producer.send(_BACKLOG, per_second=1e6)
    until(lambda: len(crew.handled()) > _BACKLOG // 6, 20, "some are handled")
    return producer


def what_was_told(crew: Crew) -> dict[str, Any]:
    """The one ``group_lost`` of the leader."""
    crew.until(lambda: crew.events("group_lost", "master"), 15, "the leader tells")
    [told] = crew.events("group_lost", "master")
    return told


def is_between(entry_id: str, told: str) -> bool:
    first, dots, last = told.partition("..")
    return bool(dots) and rank(first.encode()) <= rank(entry_id.encode()) <= rank(last.encode())


def test_a_destroyed_group_goes_on_where_it_was_and_the_repeats_are_those_that_were_told(
    crew: Crew, link: Link
) -> None:
    producer = backlog(crew, link)
    before = destroy(link, "XGROUP", "DESTROY", KEYS.stream, KEYS.group)
    began = time.monotonic()
    producer.send(200)
    told = what_was_told(crew)
    crew.wait_until_handled(producer.accepted, within_s=30)
    crew.wait_until_settled(link)
    assert told["level"] == "ERROR"
    assert told["lost"] == "nothing"
    first, _, last = told["may_repeat"].partition("..")
    assert last == before.delivered, "exactly what was ever read"
    assert rank(first.encode()) <= rank(before.oldest_pending.encode()), "the position is noted once a second"
    executions = crew.executions()
    again = repeated(executions)
    assert [entry_id for entry_id in again if not is_between(entry_id, told["may_repeat"])] == []
    assert out_of_order(executions) == []
    assert out_of_order_under_a_fence(executions) == []
    assert overlaps(executions, crew.cut_off_ns) == []
    assert len(crew.events("worker_leaves")) == 2, "all consumers begin anew, once"
    spanned = sum(is_between(entry_id, told["may_repeat"]) for entry_id in producer.accepted)
    figures(seconds=time.monotonic() - began, may_repeat=spanned, repeated=len(again))


def test_a_deleted_stream_loses_what_was_told_and_what_comes_after_is_handled(crew: Crew, link: Link) -> None:
    producer = backlog(crew, link)
    before = destroy(link, "DEL", KEYS.stream)
    began = time.monotonic()
    told = what_was_told(crew)
    told_s = time.monotonic() - began
    producer.send(200)
    after = ids_in(link)
    crew.wait_until_handled(after, within_s=30)
    crew.wait_until_settled(link)
    assert (told["level"], told["may_repeat"]) == ("ERROR", "nothing")
    first, _, last = told["lost"].partition("..")
    assert rank(last.encode()) >= rank(before.delivered.encode()), "what was read and not handed over is lost, too"
    assert rank(first.encode()) <= rank(before.oldest_pending.encode())
    executions = crew.executions()
    letters = [pairs(fields) for _, fields in link.call("XRANGE", KEYS.dead, "-", "+")]
    assert {letter[b"usher-reason"] for letter in letters} <= {b"body_gone"}
    gone = set(producer.accepted) - crew.handled()
    assert gone, "something was lost, or there was nothing to tell"
    unread = {entry_id for entry_id in gone if rank(entry_id.encode()) > rank(before.delivered.encode())}
    assert all(is_between(entry_id, told["lost"]) for entry_id in gone - unread), "all that is lost was told"
    assert not repeated(executions)
    assert out_of_order(executions) == []
    assert overlaps(executions, crew.cut_off_ns) == []
    figures(
        told_after_s=told_s,
        lost=len(gone),
        of_these_never_read=len(unread),
        dead_letters=len(letters),
        handled_after=len(after),
    )


def test_an_emptied_redis_is_filled_again_and_the_loss_is_told_from_memory(crew: Crew, link: Link) -> None:
    """Exactly if the same master leads again; a standby knows the position that was saved last, which is a second or
    two old."""
    producer = backlog(crew, link)
    leader = crew.master_at(bytes(link.call("GET", KEYS.leader)).decode().rpartition(" ")[2])
    before = destroy(link, "FLUSHALL")
    began = time.monotonic()
    producer.send(200)
    told = what_was_told(crew)
    after = ids_in(link)
    crew.wait_until_handled(after, within_s=40)
    seconds = time.monotonic() - began
    crew.wait_until_settled(link)
    is_exact = bool(crew.events("group_lost", leader))
    gone = set(producer.accepted) - crew.handled()
    unread = {entry_id for entry_id in gone if rank(entry_id.encode()) > rank(before.delivered.encode())}
    if is_exact:
        first, _, last = told["lost"].partition("..")
        assert rank(last.encode()) >= rank(before.delivered.encode())
        assert rank(first.encode()) <= rank(before.oldest_pending.encode())
        assert all(is_between(entry_id, told["lost"]) for entry_id in gone - unread)
    executions = crew.executions()
    assert out_of_order(executions) == []
    assert overlaps(executions, crew.cut_off_ns) == []
    early, all_fences = [run.fence for run in executions[: len(executions) // 4]], [run.fence for run in executions]
    assert max(early) < max(all_fences), "numbers grow on, though the last ones that were given are lost"
    figures(
        told_exactly=is_exact,
        all_handled_after_s=seconds,
        lost=len(gone),
        of_these_never_read=len(unread),
        repeated=len(repeated(executions)),
    )


def test_a_stream_that_comes_back_with_lower_ids_is_read_from_its_beginning(crew: Crew, link: Link) -> None:
    """Somebody has sent an id of the year 2286, which pins all later ids to it; the way out is to delete the stream."""
    producer = Producer(link, _TICKETS)
    link.call("XADD", KEYS.stream, "9999999999999-0", "ticket_id", "T1")
    producer.send(40)
    crew.wait_until_handled(producer.accepted, within_s=15)
    assert all(entry_id.startswith("9999999999999-") for entry_id in producer.accepted)
    crew.wait_until_settled(link)
    link.call("DEL", KEYS.stream)
    what_was_told(crew)  # the group is there again, on a stream that is empty
    producer.send(40)
    after = ids_in(link)
    assert not any(entry_id.startswith("9999999999999-") for entry_id in after)
    crew.wait_until_handled(after, within_s=15)
    crew.wait_until_settled(link)
    link.call("DEL", KEYS.stream)
    link.call("XADD", KEYS.stream, "5-1", "ticket_id", "T1")  # before anybody has looked
    crew.wait_until_handled(["5-1"], within_s=15)
