"""Messages that were cut from the stream before anybody read them (XADD with MAXLEN, XTRIM, XDEL): each is counted
once, and told. Redis counts what is added from 7 on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from tests.integration.actors import MasterActor, Stage, Trouble
from tests.integration.conftest import SYSTEM_SERVER
from tests.integration.gathered import Gathered
from usher.common.doctor.collector import collect
from usher.common.doctor.judgements import DoctorSeverity
from usher.common.protocol.mishaps import MISHAPS, parse_mishaps
from usher.common.redis.client import Link
from usher.common.redis.embedded import SERVER_VARIABLE
from usher.common.redis.replies import pairs
from usher.common.runtime.settings import CommonSettings
from usher.master.cli.commands import look
from usher.master.insight.status import StatusReader

T = b"T"
_FIRST = "embedded" if os.environ.get(SERVER_VARIABLE) else "shipped"
pytestmark = pytest.mark.parametrize("any_redis_url", [_FIRST, *(["system"] if SYSTEM_SERVER else [])], indirect=True)


@pytest.fixture
def stage(any_redis_url: str) -> Iterator[Stage]:
    with Stage(any_redis_url) as made:
        if b"lag" not in made.link.call("XINFO", "GROUPS", made.keys.stream)[0]:
            pytest.skip("this Redis does not count what is added")
        yield made


def _cut_so_far(stage: Stage) -> int:
    return parse_mishaps(stage.link.call("HMGET", stage.keys.counters, *MISHAPS))["unread_cut"]


def _send(stage: Stage, count: int) -> list[bytes]:
    return [stage.send(T)[0] for _ in range(count)]


def _begun(stage: Stage, **settings: int) -> MasterActor:
    """A leader whose group has been at the end of the stream once, so that Redis knows how much it has read."""
    m, a = stage.leader(reconcile_s=0.0, **settings), stage.consumer("a")
    _send(stage, 3)
    stage.finish(m, [a])
    a.begin_drain()
    m.settle()
    return m


def _look(m: MasterActor) -> None:
    """The next turn saves the position, and looks."""
    m.dispatcher._position_saver._saved_s = -1e9
    m.turn()


def _trim(stage: Stage, left: int) -> None:
    stage.link.call("XTRIM", stage.keys.stream, "MAXLEN", left)


@pytest.mark.parametrize("left", [0, 1, 7])
def test_what_is_cut_while_nobody_reads_is_told_with_its_number_once(
    stage: Stage, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    m = _begun(stage)
    _send(stage, 20)
    _trim(stage, left)
    _look(m)
    _look(m)
    assert _cut_so_far(stage) == 20 - left
    told = [record for record in caplog.records if record.getMessage() == "unread_entries_cut"]
    assert [(record.__dict__["facts"]["count"], record.levelno) for record in told] == [(20 - left, logging.ERROR)]
    b = stage.consumer("b")
    more = _send(stage, 2)
    stage.finish(m, [b])
    assert stage.history.by(b.incarnation)[-2:] == more
    assert _cut_so_far(stage) == 20 - left


@pytest.mark.parametrize("before", [0, 10])
def test_what_is_cut_before_the_group_has_read_anything_is_counted(stage: Stage, before: int) -> None:
    """The first consumer has not come yet, and Redis counts from the first read only unless it is told."""
    stage.link.call("DEL", stage.keys.stream)
    _send(stage, before)
    _trim(stage, 4)
    m = stage.leader(reconcile_s=0.0)
    _send(stage, 10)
    _trim(stage, 5)
    _look(m)
    b = stage.consumer("b")
    stage.finish(m, [b])
    assert (_cut_so_far(stage), len(stage.history.starts)) == (min(before, 4) + 5, 5)


def test_every_cut_counts_what_it_took(stage: Stage) -> None:
    m = _begun(stage)
    for round_ in range(1, 4):
        _send(stage, 10)
        _trim(stage, 4)
        _look(m)
        assert _cut_so_far(stage) == (6 if round_ == 1 else 6 + 10 * (round_ - 1))


def test_what_is_cut_between_two_hand_overs_is_counted_by_the_second(stage: Stage) -> None:
    """The leader has not looked since: the script that takes what is left counts what is missing before it."""
    m, b = _begun(stage), stage.consumer("b")
    m.settle()
    m.dispatcher._position_saver._saved_s = 1e12
    m.dispatcher._cursor._notifier = None
    _send(stage, 10)
    _trim(stage, 4)
    stage.finish(m, [b])
    assert _cut_so_far(stage) == 6


def test_what_was_read_may_be_cut(stage: Stage) -> None:
    m, b = _begun(stage), stage.consumer("b")
    _send(stage, 10)
    stage.finish(m, [b])
    _trim(stage, 0)
    m.settle()
    _send(stage, 3)
    stage.finish(m, [b])
    assert _cut_so_far(stage) == 0


def test_a_group_that_begins_in_a_stream_that_was_trimmed_before_counts_nothing(stage: Stage) -> None:
    stage.link.call("XGROUP", "DESTROY", stage.keys.stream, stage.keys.group)
    _send(stage, 10)
    _trim(stage, 4)
    m, a = stage.leader(reconcile_s=0.0), stage.consumer("a")
    stage.finish(m, [a])
    assert (_cut_so_far(stage), len(stage.history.starts)) == (0, 4)


def test_doctor_and_status_tell_of_it_also_without_a_leader(stage: Stage) -> None:
    m = _begun(stage)
    m.crash()
    stage.end_lead()
    _send(stage, 20)
    _trim(stage, 5)

    def found() -> dict[str, tuple[DoctorSeverity, str]]:
        told = collect(stage.link, stage.keys, 10_000).stream or ()
        return {finding.check: (finding.severity, finding.seen) for finding in told}

    told = (DoctorSeverity.BAD, "15 were cut before they were read")
    assert found()["unread entries"] == told
    _look(stage.leader("m2", reconcile_s=0.0))
    assert found()["unread entries"] == told
    reader = StatusReader(stage.link, stage.keys)
    assert reader.overview()["mishaps"]["unread_cut"] == 15


def test_what_is_cut_from_a_source_before_it_was_gathered_is_told_once(any_redis_url: str) -> None:
    link = Link(any_redis_url, "test:sources")
    world = Gathered(link)
    world.send("a", "1-1", "2-1")
    world.gather("a")
    if b"lag" not in link.call("XINFO", "GROUPS", "a")[0]:
        pytest.skip("this Redis does not count what is added")
    world.send("a", *(f"{at}-1" for at in range(3, 13)))
    link.call("XTRIM", "a", "MAXLEN", 4)
    assert [(one.moved, one.words) for one in world.gather("a")] == [(4, "unread 6")]
    world.send("a", "13-1")
    link.call("XTRIM", "a", "MAXLEN", 0)
    assert [one.words for one in world.gather("a", "a") if one.words] == ["unread 1"]
    assert parse_mishaps(link.call("HMGET", world.keys.counters, *MISHAPS))["unread_cut"] == 7
    link.close()


@pytest.mark.parametrize("backlog", [3, 2500])
def test_what_is_deleted_unread_is_told_while_older_ones_remain(stage: Stage, backlog: int) -> None:
    m = _begun(stage)
    ids = _send(stage, backlog)
    stage.link.call("XDEL", stage.keys.stream, *ids[:2])
    told = 2 if backlog == 3 else 1
    _look(m)
    _look(m)
    assert _cut_so_far(stage) == told
    b = stage.consumer("b")
    if backlog == 3:
        stage.finish(m, [b])
        stage.link.call("XDEL", stage.keys.stream, *_send(stage, 2)[:1])
        stage.finish(m, [b])
        assert _cut_so_far(stage) == 3


@pytest.mark.parametrize("way", ["XTRIM", "XDEL"])
def test_what_was_lost_is_not_told_as_done(stage: Stage, way: str) -> None:
    m, reader = _begun(stage), StatusReader(stage.link, stage.keys)
    assert look(reader, None, CommonSettings())["done"] == 3
    ids = _send(stage, 10)
    if way == "XTRIM":
        _trim(stage, 4)
    else:
        stage.link.call("XDEL", stage.keys.stream, *ids[:6])
    _look(m)
    assert look(reader, None, CommonSettings())["done"] == 3
    b = stage.consumer("b")
    stage.finish(m, [b])
    m.settle()
    assert look(reader, None, CommonSettings())["done"] == 7


@pytest.mark.parametrize("what", ["runs", "undecodable", "behind a full window"])
def test_what_is_deleted_after_the_doorbell_told_of_it_is_counted_once_or_runs(stage: Stage, what: str) -> None:
    m, a = stage.leader(window=1), stage.consumer("a")
    _send(stage, 1)
    stage.finish(m, [a])
    if what == "behind a full window":
        _send(stage, 1)
        m.settle()
        a.read()
        assert a.start()
    told = stage.world.add(b"500-1", "text", "no ticket") if what == "undecodable" else _send(stage, 1)[0]
    m.listen()
    stage.link.call("XDEL", stage.keys.stream, told)
    m.turn()
    stage.send(b"U", b"900-1")
    stage.finish(m, [a])
    assert _cut_so_far(stage) == (told not in stage.history.ids(T))


def test_how_much_was_read_is_right_after_a_reply_that_is_lost(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    _send(stage, 1)
    stage.finish(m, [a])
    stage.link.call("XDEL", stage.keys.stream, *_send(stage, 1))
    _send(stage, 2)
    m.listen()
    m.link.troubles = {"hand_over": Trouble.REPLY_LOST}
    m.turn()
    stage.finish(m, [a])
    _send(stage, 1)
    stage.finish(m, [a])
    assert pairs(stage.link.call("XINFO", "GROUPS", stage.keys.stream)[0])[b"lag"] == 0
