"""For each of the bugs the cheapest story that it spoils: real masters and consumers without threads, on a real
Redis."""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path

import pytest
from gunicorn.config import Config

from tests.chaos.rig.sink import Sink
from tests.integration.actors import ConsumerActor, Run, Stage, Trouble
from tests.integration.factories import LEASE_MS, hand_over, plan
from usher.common.base.errors import GiveUp, ReplyUnknown, RetryLater
from usher.common.http.serve import Pulse
from usher.consumer.lifecycle.journal import read_journal
from usher.consumer.lifecycle.process_ending import note_crash

T = b"T"


def index_and_pending_list_change_together(stage: Stage) -> None:
    """The leader dies in the middle of a hand-over; its successor must not give the ticket to somebody else as well."""
    m, a = stage.leader(), stage.consumer("a")
    ids = stage.send(T)
    m.look()
    m.link.troubles["HSET"] = Trouble.NEVER_SENT  # there is none as long as it is one step
    for _ in range(3):
        m.dispatcher.run_once()
    m.crash()
    stage.end_lead()
    a.read()
    run = a.start()
    assert run is not None
    run.succeed()
    assert stage.world.broken() == []
    stage.finish(stage.leader("m2"), [a])
    stage.check_done(T, ids)


def what_waits_is_handed_over_at_its_time(stage: Stage) -> None:
    """Its handler asked for quiet: neither an idle consumer nor a new leader shortens that, and it is not forgotten."""
    m, a = stage.leader(), stage.consumer("a")
    ids = stage.send(T)
    m.settle()
    a.read()
    run = a.start()
    assert run is not None
    run.fail(RetryLater(3600.0))
    a.flush()
    for name in ("m2", "m3"):
        m.crash()
        stage.end_lead()
        m = stage.leader(name)
        m.settle()
        if name == "m2":
            assert stage.world.pending() == {b"master": ids}
            stage.world.spoil(T, b"waits@1 %s" % b" ".join([stage.world.head(T).split()[1], *ids]))
    stage.finish(m, [a])
    assert stage.history.ids(T) == [*ids, *ids], "it asked at its first start, and was done at its second"
    assert stage.world.pending() == {}


def what_is_silent_for_too_long_is_ended(_stage: Stage) -> None:
    """Its arbiter looks; the worker that froze has said for how long it might be silent."""
    with contextlib.closing(Pulse(Config())) as pulse:
        pulse.say(0.05, "runs")
        assert pulse.last_update() > 0
        time.sleep(0.2)
        assert pulse.last_update() < 0


def the_sweep_gets_past_the_living(stage: Stage) -> None:
    """E32: more young entries of a living owner than one look reaches, and an old one of nobody behind them."""
    m, a = stage.leader(batch=2000, window=2000), stage.consumer("a", capacity=2000)
    stage.world.send_many([T] * 1200)
    m.settle()
    [stray] = stage.send(b"U")
    stage.link.call("XREADGROUP", "GROUP", stage.keys.group, "stranger", "STREAMS", stage.keys.stream, ">")
    stage.world.make_idle("stranger", 10 * LEASE_MS, stray)
    m.sweep()
    m.settle()
    assert stray in stage.world.pending()[a.name]


def fences_survive_a_redis_that_lost_its_tail(stage: Stage) -> None:
    """Power loss: Redis comes back as it was a moment before. No number may be given a second time."""
    m, a = stage.leader(), stage.consumer("a")
    [first] = stage.send(T)
    m.settle()
    a.work()
    m.turn(*a.reports())
    [second] = stage.send(T)
    keys = stage.link.call("KEYS", "*")
    saved = {key: (stage.link.call("DUMP", key), max(0, stage.link.call("PTTL", key))) for key in keys}
    m.settle()
    a.read()
    lost = a.start()
    stage.link.call("FLUSHALL")
    for key, (content, ttl) in saved.items():
        stage.link.call("RESTORE", key, ttl, content)
    stage.end_lease(a)
    b = stage.consumer("b")
    stage.end_lead()
    stage.finish(stage.leader("m2"), [b])
    assert lost is not None
    given = [(run.id, run.who, run.fence) for run in stage.history.starts]
    fences = [run.fence for run in stage.history.starts]
    assert [run.id for run in stage.history.starts] == [first, second, second]
    assert fences == sorted(set(fences)), f"a fence was given twice: {given}"


def the_sink_judges_the_fence_in_its_own_transaction(stage: Stage) -> None:
    """A handler is stopped between its look at the fence and its commit; meanwhile its successor begins."""
    m, a = stage.leader(), stage.consumer("a")
    stage.send(T)
    m.settle()
    a.read()
    zombie = a.start()
    stage.end_lease(a)
    b = stage.consumer("b")
    m.settle()
    b.read()
    successor = b.start()
    assert zombie is not None
    assert successor is not None
    with tempfile.TemporaryDirectory(prefix="usher-", dir="/tmp") as folder, Sink(Path(folder)) as sink:
        asked = [
            {"uid": run.message.uid, "ticket": "T", "tok": run.message.fence, "who": who, "amount": 1}
            for run, who in ((zombie, "a"), (successor, "b"))
        ]
        assert [sink.answer({"op": "open", **each}) for each in asked] == ["ok", "ok"]
        assert [sink.answer({"op": "commit", **each}) for each in asked] == ["fenced", "ok"]


def neighbours_of_a_killer_are_not_charged(stage: Stage) -> None:
    """N3: the first message of a ticket kills its process again and again; those behind it have never been started."""
    m = stage.leader()
    ids = [entry_id for _ in range(4) for entry_id in stage.send(T)]
    for _ in range(4):
        consumer = stage.consumer("a")
        m.settle()
        consumer.read()
        consumer.start()
        stage.end_lease(consumer)
        consumer.crash()
        m.settle()
    last = stage.consumer("a")
    stage.finish(m, [last])
    assert [letter for letter in stage.world.dead() if letter[b"usher-id"] in ids[1:]] == []
    assert stage.history.ids(T)[-3:] == ids[1:]


def _begun(consumer: ConsumerActor) -> Run:
    """The next start. A suspect's lane is taken twice."""
    run = consumer.start() or consumer.start()
    assert run is not None, "nothing starts"
    return run


def who_ran_when_its_consumer_ended_keeps_its_attempts(stage: Stage) -> None:
    """It ran by itself, at its last attempt, and may have returned a moment before; then it returns for sure."""
    m = stage.leader()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.journal"
        a = stage.consumer("a", journal=path)
        [entry_id] = stage.send(T)
        stage.link.call("HSET", stage.keys.attempts, entry_id, "2 2 0 0")
        m.settle()
        a.read()
        _begun(a)
        a.crash()
        former = read_journal(path, "")
        assert former is not None
        note_crash(stage.world.scripts, stage.keys, former, 100)
    stage.end_lease(a)
    stage.finish(m, [stage.consumer("a")])
    assert stage.world.dead() == []
    assert stage.history.ids(T) == [entry_id] * 2


def what_is_noted_ahead_of_a_start_is_no_failure(stage: Stage) -> None:
    """No journal is left: the last allowed attempt succeeds, and its acknowledgement does not arrive."""
    m, a = stage.leader(), stage.consumer("a")
    [entry_id] = stage.send(T)
    stage.link.call("HSET", stage.keys.attempts, entry_id, "2 2 0 3")
    m.settle()
    a.read()
    _begun(a).succeed()
    a.crash()
    stage.end_lease(a)
    stage.finish(m, [stage.consumer("a")])
    assert stage.world.dead() == []
    assert stage.history.ids(T) == [entry_id] * 2


def a_suspect_runs_apart_from_the_others(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    [entry_id] = stage.send(T)
    stage.link.call("HSET", stage.keys.attempts, entry_id, "1 0 1 0")
    stage.send(b"U")
    m.settle()
    a.read()
    runs = [_begun(a), _begun(a)]
    assert {run.message.ticket: run.is_apart for run in runs} == {T: True, b"U": False}
    for run in runs:
        run.succeed()
    stage.finish(m, [a])


def nobody_is_forgotten_who_still_has_something(stage: Stage) -> None:
    """E6: XGROUP DELCONSUMER deletes what is pending. The janitor comes before the recovery."""
    m, a = stage.leader(), stage.consumer("a")
    ids = [*stage.send(T), *stage.send(T)]
    m.settle()
    stage.end_lease(a)
    b = stage.consumer("b")
    m.reap()
    stage.finish(m, [b])
    stage.check_done(T, ids)


def a_lost_report_costs_only_speed(stage: Stage) -> None:
    """B3: the consumer dies after the acknowledgement and before the report."""
    m, a = stage.leader(reconcile_s=0.0), stage.consumer("a")
    ids = stage.send(T)
    m.settle()
    a.work()
    a.reports()  # never posted
    stage.end_lease(a)
    a.crash()
    b = stage.consumer("b")
    m.look()
    stage.finish(m, [b])
    stage.check_done(T, ids)


def the_inbox_is_trimmed_by_what_was_read(stage: Stage) -> None:
    """Records come in just before the reader trims what it has read; the trim must not reach them."""
    leader, a = stage.world.elect(), stage.consumer("a")
    ids: list[bytes] = []

    def more(count: int) -> None:
        for _ in range(count):
            [entry_id] = stage.world.parked(leader, T)
            ids.append(entry_id)
            hand_over(leader, plan(a.incarnation, {T: [entry_id]}, {T: stage.world.head(T)}))

    for _ in range(16):  # then it trims
        more(1)
        a.read()
    a.read_link.before = lambda step: more(2) if step == "PIPELINE" and len(ids) < 18 else None
    a.read()
    assert len(ids) == 18
    a.work()
    a.work()
    stage.check_done(T, ids)


def a_group_that_is_made_again_goes_on_where_it_was(stage: Stage) -> None:
    """XGROUP DESTROY, while messages wait that nobody has read."""
    m, a = stage.leader(), stage.consumer("a")
    ids = stage.send(T)
    stage.finish(m, [a], rounds=2)
    m.dispatcher._position_saver._saved_s = 0.0
    m.turn()  # notes the position
    stage.link.call("XGROUP", "DESTROY", stage.keys.stream, stage.keys.group)
    ids += stage.send(T)
    stage.end_lease(a)  # as it does then
    a.crash()
    m.settle()
    stage.finish(m, [stage.consumer("b")])
    stage.check_done(T, ids)


def a_dead_letter_and_its_message_are_never_both_there(stage: Stage) -> None:
    """The process dies in the middle of giving up."""
    m, a = stage.leader(), stage.consumer("a")
    first, second = [*stage.send(T), *stage.send(T)]
    m.settle()
    a.read()
    run = a.start()
    assert run is not None
    run.fail(GiveUp("it cannot be done"))
    a.link.troubles = {"dead_letter": Trouble.REPLY_LOST, "ack": Trouble.NEVER_SENT}
    with pytest.raises(ReplyUnknown):
        a.flush()
    stage.end_lease(a)
    a.crash()
    b = stage.consumer("b")
    m.look()
    stage.finish(m, [b])
    stage.check_done(T, [first, second])
    assert [letter[b"usher-id"] for letter in stage.world.dead()] == [first]


def what_a_dead_consumer_had_comes_before_what_waits_behind_it(stage: Stage) -> None:
    """The window is small: later messages of the ticket are parked when its owner dies."""
    m, a = stage.leader(window=2), stage.consumer("a")
    ids = [entry_id for _ in range(4) for entry_id in stage.send(T)]
    m.settle()
    a.read()
    stage.end_lease(a)
    a.crash()
    b = stage.consumer("b")
    stage.finish(m, [b])
    stage.check_done(T, ids)


def what_waits_for_room_stays_behind_what_its_dead_owner_had(stage: Stage) -> None:
    """The owner has no room for the ticket's next message, others have; then it dies."""
    m, a = stage.leader(), stage.consumer("a", capacity=1)
    [first] = stage.send(T)
    m.settle()
    b = stage.consumer("b")
    [second] = stage.send(T)
    m.settle()
    assert stage.world.pending() == {a.name: [first], b"master": [second]}
    stage.end_lease(a)
    a.crash()
    m.look()
    m.turn()
    b.work()  # while that is recovered
    stage.finish(m, [b])
    stage.check_done(T, [first, second])
