"""Losses: a leader writes down what it finds to be lost, or to come again, and it is told where people look."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from tests.integration.actors import Stage
from tests.integration.group_loss import T, destroy_group, half_done, leader, settle
from usher.common.doctor.collector import collect
from usher.common.protocol.keys import Keys
from usher.common.protocol.mishaps import DeclaredLoss, losses_command, parse_losses
from usher.common.protocol.stream_id import ZERO, before, rank
from usher.common.redis.client import Link
from usher.common.redis.replies import TicketStream, redis_ms
from usher.common.runtime.settings import CommonSettings, load
from usher.master.cli.commands import drawn, look
from usher.master.insight.status import StatusReader
from usher.master.leader.leader_scripts import LossBook


def _declared(stage: Stage) -> list[DeclaredLoss]:
    return parse_losses(*stage.link.pipeline([losses_command(stage.keys, 100)]))


def _counts(stage: Stage) -> bool:
    return b"lag" in stage.link.call("XINFO", "GROUPS", stage.keys.stream)[0]


def test_a_lost_group_is_declared_with_the_ids_that_may_run_again(stage: Stage) -> None:
    m = leader(stage)
    a, ids = half_done(stage, m)
    assert _declared(stage) == []
    destroy_group(stage)
    settle(m)
    [loss] = _declared(stage)
    assert (loss.kind, loss.lost, loss.messages) == ("group_lost", None, 0)
    assert loss.repeats is not None and rank(loss.repeats[0]) <= rank(ids[0]) and loss.repeats[1] == ids[-1]
    assert redis_ms(stage.link) - loss.ms < 60_000
    stage.finish(m, [a])
    assert len(_declared(stage)) == 1
    first = "may run again: between"
    seen = look(StatusReader(stage.link, stage.keys), None, load(CommonSettings, {"USHER_STATE_DIR": "/nowhere"}))
    assert first in seen["last_loss"]["text"] and drawn(seen)
    found = collect(stage.link, stage.keys, 10_000).stream or ()
    told = [one for one in found if one.check == "declared loss"]
    assert len(told) == 1 and first in told[0].seen and told[0].severity.value == "warn"


def test_a_group_that_is_made_for_the_first_time_is_no_loss(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    stage.send(T)
    stage.finish(m, [a])
    assert _declared(stage) == []


@pytest.mark.parametrize("takes_over", [False, True])
def test_what_a_group_that_was_set_back_is_given_again_is_declared_once(stage: Stage, takes_over: bool) -> None:
    """By hand, or because Redis lost its last moments: the leader that notices may have led before, too."""
    m, a = stage.leader(batch=2), stage.consumer("a")
    ids = [stage.send(T)[0] for _ in range(8)]
    stage.finish(m, [a])
    stage.link.call("XGROUP", "SETID", stage.keys.stream, stage.keys.group, ids[2])
    if takes_over:
        m.dispatcher._in_doubt(m.dispatcher._lead.epoch, "the connection was lost")
        settle(m)
    m.dispatcher._cursor._may_have_more = True
    more = stage.send(T)
    stage.finish(m, [a])
    [loss] = _declared(stage)
    assert (loss.kind, loss.lost) == ("set_back", None)
    assert (
        loss.repeats is not None and loss.repeats[1] == ids[7] and rank(ids[2]) < rank(loss.repeats[0]) <= rank(ids[3])
    )
    assert stage.history.ids(T)[-1] == more[0]


def test_a_leader_that_outlives_a_rollback_declares_it_however_late_it_is_elected_again(stage: Stage) -> None:
    """Redis lost its last moments, the saved position too; the dispatcher looks at that before the election."""
    m, a = stage.leader(batch=2), stage.consumer("a")
    ids = [stage.send(T)[0] for _ in range(4)]
    stage.finish(m, [a])
    m.dispatcher._position_saver._saved_s = -1e9
    m.turn()
    older = stage.link.call("HGETALL", stage.keys.position)
    ids += [stage.send(T)[0] for _ in range(4)]
    stage.finish(m, [a])
    m.dispatcher._position_saver._saved_s = -1e9
    m.turn()
    stage.link.call("XGROUP", "SETID", stage.keys.stream, stage.keys.group, ids[3])
    stage.link.call("HSET", stage.keys.position, *older)
    m.dispatcher._in_doubt(m.dispatcher._lead.epoch, "the connection was lost")
    m.dispatcher.run_once()
    settle(m)
    m.dispatcher._cursor._may_have_more = True
    stage.finish(m, [a])
    [loss] = _declared(stage)
    assert (loss.kind, loss.lost) == ("set_back", None)
    assert loss.repeats is not None and rank(loss.repeats[0]) <= rank(ids[4]) and loss.repeats[1] == ids[7]


def test_who_dies_when_it_has_made_the_group_again_has_declared_that(stage: Stage) -> None:
    m = leader(stage)
    half_done(stage, m)
    destroy_group(stage)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TicketStream, "create_group", Mock(side_effect=SystemExit))
        with pytest.raises(SystemExit):
            settle(m)
    assert [loss.kind for loss in _declared(stage)] == ["group_lost"]


def test_unread_entries_that_were_cut_are_declared_with_the_gap(stage: Stage) -> None:
    m, a = stage.leader(reconcile_s=0.0), stage.consumer("a")
    ids = [stage.send(T)[0] for _ in range(3)]
    stage.finish(m, [a])
    if not _counts(stage):
        pytest.skip("this Redis does not count what is added")
    a.begin_drain()
    m.settle()
    later = [stage.send(T)[0] for _ in range(10)]
    stage.link.call("XTRIM", stage.keys.stream, "MAXLEN", 4)
    m.dispatcher._position_saver._saved_s = -1e9
    m.turn()
    [loss] = _declared(stage)
    assert (loss.kind, loss.messages, loss.repeats) == ("unread_cut", 6, None)
    assert loss.lost is not None and rank(ids[-1]) < rank(loss.lost[0]) <= rank(later[0])
    assert loss.lost[1] == before(later[6])


def test_full_memory_refuses_the_note_and_stops_nothing(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    keys = Keys("s", "g")
    book = LossBook(link, keys)
    link.call("CONFIG", "SET", "maxmemory", 1)
    try:
        book.cut(3, source="a")
    finally:
        link.call("CONFIG", "SET", "maxmemory", 0)
    assert "loss_not_recorded" in caplog.text and "unread_entries_cut" in caplog.text
    book.cut(0)
    assert link.call("EXISTS", keys.losses) == 0
    book.cut(3, ZERO, source="a")
    [loss] = parse_losses(link.call(*losses_command(keys, 5)))
    assert loss.describe() == "3 messages: cut from the stream before they were read (of a)"


def test_memory_of_nothing_declares_nothing(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    stage.send(T)
    stage.finish(m, [a])
    m.crash()
    stage.end_lead()
    settle(stage.leader("m2"))
    assert _declared(stage) == []


def test_a_leader_with_nothing_to_do_looks_up_in_time_to_save_where_it_is(stage: Stage) -> None:
    leader, _ = stage.leader(), stage.consumer("a")
    stage.send(b"T")
    leader.settle()
    assert leader.dispatcher._idle_s() <= 1.0
