"""Reports on their way from HTTP to the board: who waits for the dispatcher, and who does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import orjson
import pytest

from tests.integration.actors import MasterActor, Stage
from usher.common.redis.client import Link
from usher.master.dispatch.events import ChangeWatch, Report
from usher.master.web import api as desk_module
from usher.master.web.api import Desk, IncarnationFenced, NotLeader

T = b"T"


@pytest.fixture
def stage(redis_url: str) -> Iterator[Stage]:
    with Stage(redis_url) as stage:
        yield stage


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def _desk(m: MasterActor) -> Desk:
    unused: Any = None
    return Desk(unused, unused, m.dispatcher, m.lead, (), lambda: None, unused)


def _waits(m: MasterActor, pool: ThreadPoolExecutor, report: Report) -> Future[list[list[str]]]:
    """It was posted, and who posted it waits."""
    posted = threading.Event()
    post = m.dispatcher.post

    def noted(report: Any) -> int:
        unread = post(report)
        posted.set()
        return unread

    m.dispatcher.post = noted  # type: ignore[method-assign]
    told = pool.submit(_desk(m).acknowledge, report)
    assert posted.wait(5)
    assert not told.done()
    m.dispatcher.post = post  # type: ignore[method-assign]
    return told


def test_nobody_waits_who_wants_no_answers_and_the_next_turn_frees(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    ids = stage.send(T)
    m.settle()
    assert _desk(m).acknowledge(Report(a.incarnation, [(T, ids)], wants_answers=False)) == []
    assert m.board.in_flight == 1, "only the dispatcher's thread touches the board"
    m.turn()
    assert m.board.in_flight == 0


def test_who_wants_answers_waits_for_them(stage: Stage, pool: ThreadPoolExecutor) -> None:
    m, a = stage.leader(), stage.consumer("a")
    ids = stage.send(T)
    m.settle()
    told = _waits(m, pool, Report(a.incarnation, [(T, [*ids, *ids, b"9-9"]), (b"U", [b"1-1"])]))
    m.turn()
    assert told.result(5) == [["ok", "gone", "gone"], ["gone"]]


@pytest.mark.parametrize("wants_answers", [True, False])
def test_an_incarnation_that_is_not_known_is_fenced_by_the_dispatcher_alone(
    stage: Stage, pool: ThreadPoolExecutor, wants_answers: bool
) -> None:
    """What another thread sees of the board is a glance: that somebody is not on it yet must end nobody."""
    m = stage.leader()
    m.settle()
    a = stage.consumer("a")
    told = _waits(m, pool, Report(a.incarnation, [(T, [b"1-1"])], wants_answers))
    m.settle()
    with pytest.raises(IncarnationFenced):
        told.result(5)
    told = _waits(m, pool, Report("b:1", [(T, [b"1-1"])], wants_answers))
    m.turn()
    with pytest.raises(IncarnationFenced):
        told.result(5)


def test_a_dispatcher_that_does_not_keep_up_is_waited_for(
    stage: Stage, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that whoever reports more and more fills no memory."""
    monkeypatch.setattr(desk_module, "_MOST_UNREAD", 3)
    m, a = stage.leader(), stage.consumer("a")
    m.settle()
    report = Report(a.incarnation, [(T, [b"1-1"])], wants_answers=False)
    assert [_desk(m).acknowledge(report) for _ in range(2)] == [[], []]
    told = _waits(m, pool, report)
    m.turn()
    assert told.result(5) == []


@pytest.mark.parametrize("wants_answers", [True, False])
def test_a_standby_says_so(stage: Stage, wants_answers: bool) -> None:
    m = stage.leader()
    m.settle()
    assert m.lead.epoch is not None
    m.lead.lost(m.lead.epoch)
    with pytest.raises(NotLeader):
        _desk(m).acknowledge(Report("a:1", [(T, [b"1-1"])], wants_answers))


def test_a_report_through_redis_frees_too_and_what_is_none_stops_nothing(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    ids = stage.send(T)
    m.settle()
    key, leads = stage.keys.reports, [False]
    changes = ChangeWatch(
        Link(stage.url, "test"), stage.keys.changed, m.dispatcher.post, reports_key=key, leads=leads.pop
    )
    changes.look(None)
    body = {"incarnation": a.incarnation, "tickets": [{"ticket_id": "T", "message_ids": [one.decode() for one in ids]}]}
    for told in (b"no JSON", b"[]", b'{"tickets": 1}', orjson.dumps(body)):
        stage.link.call("XADD", key, "*", "0", told)
    leads.append(True)
    changes.look(None)
    m.turn()
    assert m.board.in_flight == 0
