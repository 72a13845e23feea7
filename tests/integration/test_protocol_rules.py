"""The leader's side of the rules without which order or ownership breaks: for each the counter-example that showed that
it is needed.

Every story runs as the system is, and then once without the rule: then one of its assertions must fail.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.mutants.catalogue import BY_IDLE_TIME, NO_EPOCH, NO_WATCH, READS_FIRST, RETRIES
from tests.chaos.mutants.edits import CodeEdit, LuaEdit, Replace, mutant
from tests.chaos.mutants.rules import rule
from tests.integration.actors import MasterActor, Stage, Trouble
from tests.integration.factories import FIELD, LEASE_MS, fetch
from tests.proxy import Proxy
from usher.common.base.clock import now_s
from usher.common.base.errors import ReplyUnknown
from usher.common.redis.replies import HandOver
from usher.master.dispatch.dispatcher import Dispatcher
from usher.master.dispatch.events import Report
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.policy.board.placement import Affinity
from usher.master.policy.board.plans import HandOverPlan

#: A ticket that belongs to ``b`` when ``a`` and ``b`` are there, so that it stays with ``a`` only for a reason.
T = next(ticket for ticket in (b"T%d" % n for n in range(100)) if Affinity(["a", "b"]).ranking(ticket)[0] == "b")


# ---- 1, 2: epochs ----

_SAME_EPOCH = mutant(
    "a leader in doubt drops its memory and keeps its epoch",
    Replace("usher.master.leader.elector:Lead.doubt", lambda lead, epoch: None),
)


def _late_hand_over(stage: Stage) -> tuple[MasterActor, bytes]:
    """A leader whose hand-over of the first message is on its way, to a consumer whose lease has ended meanwhile: it
    would come under ``master``."""
    m, a = stage.leader(), stage.consumer("a")
    m.look()
    [first] = stage.send(T)
    m.link.troubles["hand_over"] = Trouble.LATE
    while not m.link._late_turns:
        m.turn()
    stage.end_lease(a)
    return m, first


_SAME_EPOCH_UNWATCHED = mutant("a leader in doubt keeps its epoch, and no WATCH", *_SAME_EPOCH.edits, NO_WATCH)


@rule(NO_EPOCH, _SAME_EPOCH_UNWATCHED)
def test_a_late_command_of_a_leaders_own_earlier_epoch_changes_nothing(stage: Stage) -> None:
    m, first = _late_hand_over(stage)
    b = stage.consumer("b")
    stage.finish(m, [b])
    m.link.arrive(stage.link)
    [second] = stage.send(T)
    stage.finish(m, [b])
    stage.check_done(T, [first, second])


@rule(NO_EPOCH)
def test_a_deposed_master_whose_hand_over_comes_late_takes_nothing(stage: Stage) -> None:
    old, first = _late_hand_over(stage)
    stage.end_lead()
    new, b = stage.leader("m2"), stage.consumer("b")
    stage.finish(new, [b])
    old.link.arrive(stage.link)
    [second] = stage.send(T)
    stage.finish(new, [b])
    stage.check_done(T, [first, second])


_ELECTS_ANYWAY = mutant(
    "a new epoch is not compared with the one that it succeeds", LuaEdit("elect", "and leads(KEYS[1], ARGV[3])", "")
)


@rule(_ELECTS_ANYWAY)
def test_a_late_election_does_not_depose_a_successor(stage: Stage) -> None:
    old = stage.leader("m1")
    old.lead.doubt(old.lead.epoch or 0)
    old.elect_link.troubles["elect"] = Trouble.LATE
    with pytest.raises(ReplyUnknown):
        old.elect()
    stage.end_lead()
    new = stage.leader("m2")
    epoch = new.lead.epoch
    old.elect_link.arrive(stage.link)
    assert new.elect() == epoch


@rule(READS_FIRST)
def test_a_new_leader_takes_in_what_the_last_one_had_read_before_it_reads_itself(stage: Stage) -> None:
    """Measured without it: 2, 1."""
    a, old = stage.consumer("a"), stage.leader("m1")
    [first] = stage.send(T)
    assert old.dispatcher._steps is not None
    assert [found.id for found in fetch(old.dispatcher._steps, 10)] == [first]
    stage.end_lead()
    [second] = stage.send(T)
    stage.finish(stage.leader("m2"), [a])
    stage.check_done(T, [first, second])


_begin = Dispatcher._begin


def _begin_with_what_was(dispatcher: Any, epoch: int) -> None:
    if dispatcher.board.consumers:
        dispatcher._steps = LeaderScripts(dispatcher._link, dispatcher._keys, epoch, FIELD)
    else:
        _begin(dispatcher, epoch)


_OLD_MEMORY = mutant(
    "an epoch begins with the memory of an earlier one",
    Replace("usher.master.dispatch.dispatcher:Dispatcher._begin", _begin_with_what_was),
    Replace(
        "usher.master.dispatch.dispatcher:Dispatcher._drop_memory",
        lambda dispatcher: setattr(dispatcher, "_steps", None),
    ),
)


@rule(_OLD_MEMORY)
def test_a_master_that_leads_again_has_forgotten_what_it_knew(stage: Stage) -> None:
    a, one = stage.consumer("a"), stage.leader("m1")
    stage.end_lead()
    two = stage.leader("m2")
    [first] = stage.send(T)
    assert two.dispatcher._steps is not None
    fetch(two.dispatcher._steps, 10)
    stage.end_lead()
    [second] = stage.send(T)
    one.turn()  # fenced
    stage.finish(one, [a])
    stage.check_done(T, [first, second])


# ---- 2, 19: lost replies, on a real wire ----


class LostReply:
    """A proxy that breaks the connection instead of passing on the next reply of a step."""

    def __init__(self, master_link: Any, proxy: Proxy, step: str) -> None:
        self._awaits = False
        self.lost = 0
        self._step = step
        master_link.before = self._before
        proxy.on_reply = self._on_reply

    def _before(self, step: str) -> None:
        self._awaits = step == self._step and not self.lost

    def _on_reply(self, chunk: bytes) -> bytes | None:
        if not self._awaits or chunk.startswith(b"-NOSCRIPT"):  # to which the step is sent again in full
            return chunk
        self.lost += 1
        self._awaits = False
        return None


_NO_DOUBT = mutant(
    "a lost reply is taken for a refusal",
    CodeEdit("usher.master.dispatch.dispatcher:Dispatcher.run_once", "self._in_doubt(epoch, str(unknown))", "pass"),
    CodeEdit(
        "usher.master.dispatch.dispatcher:Dispatcher._take_new_entries",
        "except NotNow as refused:",
        "except (NotNow, ReplyUnknown) as refused:",
    ),
)


@rule(RETRIES, _NO_DOUBT)
def test_entries_that_were_taken_by_a_call_whose_reply_was_lost_are_handed_over_first(stage: Stage) -> None:
    """The lease of the consumer that was to get them has ended."""
    with Proxy(stage.url) as proxy:
        a, m = stage.consumer("a"), stage.leader(dispatch_url=proxy.url)
        m.look()
        [first] = stage.send(T)
        m.dispatcher._cursor._may_have_more = True
        m.dispatcher.run_once()  # reads it
        stage.end_lease(a)
        [second] = stage.send(T)
        lost = LostReply(m.link, proxy, "hand_over")
        m.dispatcher.run_once()
        assert stage.world.pending() == {a.name: [first]}
        b = stage.consumer("b")
        stage.finish(m, [b])
        assert lost.lost == 1
        stage.check_done(T, [first, second])


@rule(_NO_DOUBT)
def test_a_hand_over_whose_reply_was_lost_has_happened(stage: Stage) -> None:
    """Its ticket stays with the owner that it got, although the leader would now choose another."""
    with Proxy(stage.url) as proxy:
        a, m = stage.consumer("a"), stage.leader(dispatch_url=proxy.url)
        [first] = stage.send(T)
        lost = LostReply(m.link, proxy, "hand_over")
        m.turn()
        m.turn()
        b = stage.consumer("b")
        m.look()
        m.settle()
        [second] = stage.send(T)
        stage.finish(m, [b, a])
        assert lost.lost == 1
        assert stage.history.by(a.incarnation) == [first, second]
        stage.check_done(T, [first, second])


# ---- 4: what is planned is in memory ----


def _with_two_parked(stage: Stage) -> tuple[MasterActor, list[bytes]]:
    m = stage.leader(batch=2)
    ids = [*stage.send(T), *stage.send(T)]
    assert m.dispatcher._steps is not None
    m.dispatcher._rung = True
    m.dispatcher.board.take_in((found.id, found.ticket or b"") for found in fetch(m.dispatcher._steps, 2))
    stage.consumer("a")
    m.look()
    m.dispatcher._take_events()
    return m, ids


def _ids(planned: HandOverPlan | None) -> list[tuple[str, list[bytes]]]:
    return [(target.incarnation, part.ids) for target in planned.targets for part in target.parts] if planned else []


@rule(
    mutant(
        "the owner enters memory with the reply",
        CodeEdit("usher.master.policy.board.board:Board._assign", "if ticket.owner is None:", "if False:"),
    ),
    mutant(
        "the ids enter memory with the reply",
        CodeEdit("usher.master.policy.board.board:Board._assign", "running[entry_id] = None", "pass"),
    ),
)
def test_a_plan_is_in_memory_before_it_is_carried_out(stage: Stage) -> None:
    """So that what is planned while it is under way goes to the same owner, and nothing goes twice."""
    m, [first, second] = _with_two_parked(stage)
    [(owner, ids)] = _ids(m.board.plan(1, now_s()))
    assert ids == [first]
    stage.consumer("b")
    m.look()
    m.dispatcher._take_events()
    assert _ids(m.board.plan(10, now_s())) == [(owner, [second])]
    assert m.board.who_has(T, first) not in ("", "master")


_post = Dispatcher.post


def _frees_at_once(dispatcher: Any, posted: Any) -> None:
    if isinstance(posted, Report):
        posted.answer(dispatcher.board, 0.0)
    else:
        _post(dispatcher, posted)


@rule(
    mutant(
        "a report frees its ticket while a command is under way",
        Replace("usher.master.dispatch.dispatcher:Dispatcher.post", _frees_at_once),
    )
)
def test_a_report_that_is_faster_than_the_reply_of_the_hand_over_waits_for_it(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    m.look()
    epoch = m.lead.epoch
    ids = stage.send(T)

    def the_owner_is_fast(step: str) -> None:
        if step == "hand_over":
            a.work()
            for report in a.reports():
                m.dispatcher.post(report)

    m.link.after = the_owner_is_fast
    for _ in range(3):
        m.settle()
        ids += stage.send(T)
    stage.finish(m, [a])
    assert (m.failures, m.lead.epoch) == ([], epoch)
    assert not m.board.tickets
    stage.check_done(T, ids)


# ---- 5: what others change ----

_UNHEARD = mutant(
    "the leader does not watch what others change",
    Replace(
        "usher.master.leader.leader_scripts:LeaderScripts._watching",
        property(
            lambda steps: [("WATCH", steps._keys.epoch), ("GET", steps._keys.epoch), ("XREAD", "STREAMS", "-", "0")]
        ),
    ),
)


@rule(
    _UNHEARD,
    mutant(
        "a plan is carried out although others have changed its ticket",
        CodeEdit("usher.master.leader.leader_scripts:LeaderScripts._transaction", "in planned}", "in ()}"),
    ),
)
def test_what_is_given_back_while_the_next_message_is_on_its_way_goes_before_it(stage: Stage) -> None:
    _gives_back(stage, "before")
    _gives_back(stage.again(), "after")


def _gives_back(stage: Stage, when: str) -> None:
    m, a = stage.leader(), stage.consumer("a")
    ids = [*stage.send(T), *stage.send(T)]
    m.settle()
    a.read()
    fence = int(stage.world.head(T).split()[1])
    ids += stage.send(T)
    m.dispatcher._cursor._may_have_more = True
    m.dispatcher.run_once()

    def gives_back(step: str) -> None:
        if step == "hand_over":
            m.link.before = m.link.after = lambda step: None
            a.acker.recall([HandOver(T, fence, ids[:2])])
            a.flush()

    setattr(m.link, when, gives_back)
    m.dispatcher.run_once()
    stage.send(b"other")
    b = stage.consumer("b")
    stage.finish(m, [a, b])
    stage.check_done(T, ids)


# ---- 8: reports ----


def _memory_keeps_what_runs(stage: Stage, m: MasterActor) -> None:
    """Memory has what consumers have, too: no report may free a ticket too early."""
    for owner, ids in stage.world.pending().items():
        for entry_id in ids if b":" in owner else ():
            [(_, fields)] = stage.link.call("XRANGE", stage.keys.stream, entry_id, entry_id)
            assert m.board.who_has(fields[1], entry_id) == owner.decode(), f"memory has freed {entry_id!r}"


_BY_COUNT = mutant(
    "a report frees as many as it names",
    CodeEdit(
        "usher.master.policy.board.board:Board.free",
        "running.pop(entry_id, None)",
        "running.pop(next(iter(running), None), None)",
    ),
)
_BY_ANYBODY = mutant(
    "a report frees whoever sends it",
    CodeEdit(
        "usher.master.policy.board.board:Board.free",
        "self.consumers.get(incarnation)",
        "next(iter(self.consumers.values()), None)",
    ),
)


@rule(_BY_COUNT)
def test_doubled_late_lost_and_reordered_reports_free_nothing_that_runs(stage: Stage) -> None:
    m, a = stage.leader(window=2, reconcile_s=0.0), stage.consumer("a")
    ids = [entry_id for _ in range(7) for entry_id in stage.send(T)]
    told: list[Report] = []
    for step in range(9):
        m.settle(turns=2)
        _memory_keeps_what_runs(stage, m)
        a.read()
        run = a.start()
        if run is not None:
            run.succeed()
            a.flush()
        fresh = a.reports()
        told += fresh
        now = [] if step % 3 == 1 else fresh  # every third is lost
        for report in (*now, *now, *reversed(told)):  # doubled, and all that ever was once more, backwards
            m.dispatcher.post(Report(report.incarnation, report.items))
            _memory_keeps_what_runs(stage, m)
    stage.finish(m, [a])
    stage.check_done(T, ids)


@rule(_BY_ANYBODY)
def test_a_report_of_a_former_owner_frees_nothing_of_the_new_one(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    ids = stage.send(T)
    m.settle()
    stage.end_lease(a)
    b = stage.consumer("b")
    m.settle()
    m.turn(Report(a.incarnation, [(T, ids)], wants_answers=False))
    _memory_keeps_what_runs(stage, m)
    stage.finish(m, [b])
    stage.check_done(T, ids)


# ---- 12: the sweep ----


@rule(BY_IDLE_TIME)
def test_the_sweep_leaves_a_living_owner_what_it_has_however_long_it_takes(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    ids = stage.send(T)
    m.settle()
    a.read()
    run = a.start()
    stage.world.make_idle(a.name, 10 * LEASE_MS, *ids)
    m.sweep()
    m.settle()
    assert stage.world.pending() == {a.name: ids}
    assert len(stage.world.inbox(a)) == 1, "it was taken and handed over again"
    assert run is not None
    run.succeed()
    stage.finish(m, [a])
    stage.check_done(T, ids)


@rule(BY_IDLE_TIME)
def test_the_sweep_leaves_halted_what_waits_for_an_operator(stage: Stage) -> None:
    m = stage.leader()
    stage.send(T)
    assert m.dispatcher._steps is not None
    [found] = fetch(m.dispatcher._steps, 1)
    stage.world.spoil(T, b"halted 5 " + found.id)
    stage.world.make_idle("halted", 10 * LEASE_MS, found.id)
    m.sweep()
    assert stage.world.pending() == {b"halted": [found.id]}


@rule(NO_EPOCH)
def test_a_late_sweep_of_a_deposed_master_moves_nothing(stage: Stage) -> None:
    """What it would move to ``master`` nobody would know of."""
    old, a = stage.leader("m1"), stage.consumer("a")
    old.link.troubles["sweep"] = Trouble.LATE
    old.sweep()
    stage.end_lead()
    new = stage.leader("m2")
    [first] = stage.send(T)
    stage.link.call("XREADGROUP", "GROUP", stage.keys.group, "stranger", "STREAMS", stage.keys.stream, ">")
    stage.world.make_idle("stranger", 10 * LEASE_MS, first)
    old.link.arrive(stage.link)
    new.sweep()
    stage.finish(new, [a])
    stage.check_done(T, [first])


@rule(
    mutant(
        "what the sweep finds is told later",
        CodeEdit("usher.master.recovery.repairs:take_in", "board.take_in(usable)", "pass"),
    )
)
def test_what_the_sweep_finds_is_known_before_a_later_entry_of_its_ticket_is_handed_over(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    [first] = stage.send(T)
    stage.link.call("XREADGROUP", "GROUP", stage.keys.group, "stranger", "STREAMS", stage.keys.stream, ">")
    stage.world.make_idle("stranger", 10 * LEASE_MS, first)
    [second] = stage.send(T)
    m.look()
    m.sweep()
    stage.finish(m, [a])
    stage.check_done(T, [first, second])


# ---- 9: who gets messages ----


@rule(
    mutant(
        "who has registered gets messages at once",
        LuaEdit("register", "redis.call('SET', KEYS[7], '1', 'PX', ARGV[4])", ""),
    )
)
def test_who_registers_and_never_renews_gets_nothing(stage: Stage) -> None:
    """A program with a token and without rights in Redis: five of them held 1,456 of 2,000 tickets for a lease."""
    m, real = stage.leader(), stage.consumer("real")
    others = [stage.consumer(f"other-{n}", renews=False) for n in range(5)]
    m.look()
    tickets = [b"T%d" % n for n in range(40)]
    sent = {ticket: stage.send(ticket) for ticket in tickets}
    m.settle()
    assert stage.world.pending() == {real.name: [entry_id for [entry_id] in sent.values()]}
    for other in others:
        other.steps.renew(LEASE_MS)
    m.look()
    more = [stage.send(ticket) for ticket in (b"U%d" % n for n in range(40))]
    m.settle()
    assert len(stage.world.pending()) > 1, "they take part from their first renewal on"
    assert sum(map(len, stage.world.pending().values())) == len(sent) + len(more)
