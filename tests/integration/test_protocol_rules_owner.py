"""The owner's side of the rules without which order or ownership breaks: inbox, acknowledgements, giving up, and the
drain between the two sides.

Every story runs as the system is, and then once without the rule: then one of its assertions must fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

from tests.chaos.mutants.catalogue import NO_ACK_CHECK, NO_ACK_WATCH
from tests.chaos.mutants.edits import CodeEdit, LuaEdit, Replace, mutant
from tests.chaos.mutants.rules import rule
from tests.integration.actors import ConsumerActor, Stage, Trouble
from tests.integration.factories import forget_bodies, hand_over, plan
from usher.common.base.errors import GiveUp, ReplyUnknown
from usher.common.redis.replies import parse_own, read_own_command
from usher.consumer.execution.inbox_reader import FIRST_PAGE
from usher.consumer.handlers.message import Message

T, U = b"T", b"U"


def _hand_over(stage: Stage, leader: Any, owner: ConsumerActor, ticket: bytes, *ids: bytes) -> None:
    """Entries that are under ``master`` go to ``owner``."""
    hand_over(leader, plan(owner.incarnation, {ticket: list(ids)}, {ticket: stage.world.head(ticket)}))


# ---- 6: the inbox is the authority ----


def _run_all_that_is_pending(reader: Any, block_ms: int | None) -> int:
    found = parse_own(reader._link.call(*read_own_command(reader._keys, reader._incarnation, b"0", 1000)))
    with reader._lanes.lock:
        fresh = set(reader._lanes.unknown(entry.id for entry in found))
    entries = [entry for entry in found if entry.id in fresh and entry.fields]
    reader._lanes.add(
        (entry.fields[1], [Message(entry.fields[1], entry.id, 0, entry.fields, reader._lease)])
        for entry in entries
        if entry.fields
    )
    return len(entries)


@rule(
    mutant(
        "the reader runs whatever is pending for it",
        Replace("usher.consumer.execution.inbox_reader:InboxReader.read", _run_all_that_is_pending),
    )
)
def test_what_no_inbox_record_names_is_not_run_although_it_is_pending(stage: Stage) -> None:
    leader, a = stage.world.elect(), stage.consumer("a")
    [first] = stage.world.parked(leader, T)
    [strange] = stage.world.parked(leader, U)
    stage.world.make_idle(a.name, 0, strange)  # somebody's XCLAIM
    _hand_over(stage, leader, a, T, first)
    a.work()
    assert stage.history.by(a.incarnation) == [first]
    assert stage.history.starts[0].fence > 0


@rule(
    mutant(
        "the reader reads on above the highest id it has seen",
        Replace("usher.consumer.execution.inbox_reader:InboxReader._read_on", lambda *_: {}),
        Replace("usher.consumer.execution.inbox_reader:InboxReader._over", lambda reader, missing: {*missing}),
    )
)
def test_entries_below_those_already_read_are_read_too(stage: Stage) -> None:
    """One of them was parked and released late."""
    leader, a = stage.world.elect(), stage.consumer("a")
    [low] = stage.world.parked(leader, U, b"2-1")
    [high] = stage.world.parked(leader, T, b"5-1")
    forget_bodies(leader)
    _hand_over(stage, leader, a, T, high)
    a.read()
    _hand_over(stage, leader, a, U, low)
    a.work()
    assert stage.world.dead() == []
    stage.check_done(T, [high])
    stage.check_done(U, [low])


@rule(
    mutant(
        "lanes run in the order of arrival",
        CodeEdit(
            "usher.consumer.execution.lanes:Lanes._queue", "lane.early.extend(messages)", "lane.queue.extend(messages)"
        ),
    )
)
def test_an_entry_that_comes_late_runs_before_the_higher_ones_of_its_ticket(stage: Stage) -> None:
    leader, a = stage.world.elect(), stage.consumer("a")
    ids = stage.world.parked(leader, T, b"4-1", b"5-1", b"6-1")
    _hand_over(stage, leader, a, T, ids[0], ids[2])
    a.read()
    run = a.start()
    _hand_over(stage, leader, a, T, ids[1])
    a.read()
    assert run is not None
    run.succeed()
    a.work()
    stage.check_done(T, ids)


@rule(
    mutant(
        "what was asked for counts as seen",
        CodeEdit(
            "usher.consumer.execution.inbox_reader:InboxReader._fill",
            "except GroupMissing:",
            "except Exception:\n            self._last_record = self._records[-1].id",
        ),
    )
)
def test_a_lost_reply_of_the_inbox_or_of_the_bodies_is_asked_for_again(stage: Stage) -> None:
    leader, a = stage.world.elect(), stage.consumer("a")
    ids = stage.world.parked(leader, T, *(b"%d-1" % number for number in range(1, 2 * FIRST_PAGE)))
    forget_bodies(leader)
    _hand_over(stage, leader, a, T, *ids)
    for which in (1, 2):  # that of the inbox; that of the bodies
        trips: list[str] = []

        def lose(step: str, which: int = which, trips: list[str] = trips) -> None:
            trips.append(step)
            if len(trips) == which:
                a.read_link.troubles[step] = Trouble.REPLY_LOST

        a.read_link.before = lose
        with pytest.raises(ReplyUnknown):
            a.read()
    a.read_link.before = lambda step: None
    a.work()
    stage.check_done(T, ids)


# ---- 8: acknowledgements ----


def _prefix_is_kept(stage: Stage, ids: list[bytes]) -> None:
    left = [entry_id for owned in stage.world.pending().values() for entry_id in owned]
    assert left == ids[len(ids) - len(left) :], f"acknowledged out of order: {left} of {ids} are left"


@rule(
    mutant(
        "a batch counts as written when it is sent",
        CodeEdit(
            "usher.consumer.execution.acker:Acker._acknowledge",
            "self._steps.ack(",
            "self._under_way = 0; [self._finished.popleft() for _ in batch]; self._steps.ack(",
        ),
    ),
    mutant(
        "later batches go before one that is unsure",
        CodeEdit(
            "usher.consumer.execution.acker:Acker._next_batch", "islice(self._finished, most)", "[self._finished[-1]]"
        ),
    ),
)
def test_a_batch_whose_reply_is_not_known_is_sent_again_before_later_ones(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    ids = [entry_id for _ in range(3) for entry_id in stage.send(T)]
    m.settle()
    a.read()
    a.link.after = lambda step: _prefix_is_kept(stage, ids)
    for trouble in (Trouble.LATE, Trouble.REPLY_LOST, Trouble.NEVER_SENT):
        run = a.start()
        assert run is not None
        run.succeed()
        a.link.troubles["ack"] = trouble
        with pytest.raises(ReplyUnknown):
            a.flush()
    a.flush()
    _prefix_is_kept(stage, ids)
    a.link.arrive(stage.link)
    stage.finish(m, [a])
    stage.check_done(T, ids)


@rule(NO_ACK_CHECK)
def test_a_zombies_late_acknowledgement_does_not_end_its_successors_delivery(stage: Stage) -> None:
    """The successor dies too; its message must still be there for the next one."""
    m, a = stage.leader(), stage.consumer("a")
    ids = stage.send(T)
    m.settle()
    a.read()
    zombie = a.start()
    stage.end_lease(a)
    b = stage.consumer("b")
    m.settle()
    b.read()
    assert b.start() is not None
    assert zombie is not None
    zombie.succeed()
    a.flush()
    assert stage.world.pending() == {b.name: ids}
    assert a.lost
    stage.end_lease(b)
    b.crash()
    c = stage.consumer("c")
    m.settle()
    c.work()
    assert stage.history.by(c.incarnation) == ids
    fences = [run.fence for run in stage.history.starts]
    assert fences == sorted(set(fences)), "every owner has a higher fence"


@rule(NO_ACK_CHECK, NO_ACK_WATCH)
def test_a_lease_that_has_ended_since_the_last_acknowledgement_acknowledges_nothing_more(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    _, second = [*stage.send(T), *stage.send(T)]
    m.settle()
    a.read()
    for is_over in (False, True):
        run = a.start()
        assert run is not None
        run.succeed()
        if is_over:
            stage.end_lease(a)
        a.flush()
    assert stage.world.pending() == {a.name: [second]}


@rule(NO_ACK_CHECK)
def test_an_incarnation_whose_lease_has_ended_acknowledges_nothing_also_before_it_is_recovered(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    ids = stage.send(T)
    m.settle()
    a.read()
    run = a.start()
    assert run is not None
    run.succeed()
    stage.end_lease(a)
    a.flush()
    assert stage.world.pending() == {a.name: ids}


@rule(NO_ACK_CHECK)
def test_an_acknowledgement_of_the_former_process_does_not_count_for_its_successor_of_the_same_name(
    stage: Stage,
) -> None:
    """N4: the ack of attempt 1 arrives during attempt 2 under the same name."""
    m, former = stage.leader(), stage.consumer("a", lock="boot:1:2:1")
    ids = stage.send(T)
    m.settle()
    former.read()
    run = former.start()
    assert run is not None
    run.succeed()
    successor = stage.consumer("a", lock="boot:1:2:2")  # held the same lock later: the former one is proven dead
    m.look()
    m.settle()
    assert stage.world.pending() == {successor.name: ids}
    former.flush()
    assert stage.world.pending() == {successor.name: ids}


# ---- 8: giving up ----


_GOES_ON = mutant(
    "a ticket goes on after a message was given up",
    CodeEdit(
        "usher.consumer.execution.executor:Executor.bury", "self.lanes.hold(lane)", "self.lanes.release(lane, 0, 0.0)"
    ),
)


@rule(_GOES_ON)
def test_nothing_of_a_ticket_starts_before_the_dead_letter_of_what_was_given_up_is_written(stage: Stage) -> None:
    m, a = stage.leader(), stage.consumer("a")
    first, second = [*stage.send(T), *stage.send(T)]
    m.settle()
    a.read()
    run = a.start()
    assert run is not None
    run.fail(GiveUp("it cannot be done"))
    for trouble in (Trouble.NEVER_SENT, Trouble.REPLY_LOST):
        assert a.start() is None
        a.link.troubles["dead_letter"] = trouble
        with pytest.raises(ReplyUnknown):
            a.flush()
    assert a.start() is None
    a.work()
    stage.finish(m, [a])
    stage.check_done(T, [first, second])
    assert [letter[b"usher-id"] for letter in stage.world.dead()] == [first]


@rule(_GOES_ON)
def test_when_its_owner_dies_before_the_dead_letter_is_written_the_message_runs_again_and_nothing_has_overtaken_it(
    stage: Stage,
) -> None:
    m, a = stage.leader(), stage.consumer("a")
    first, second = [*stage.send(T), *stage.send(T)]
    m.settle()
    a.read()
    run = a.start()
    assert run is not None
    run.fail(GiveUp("it cannot be done"))
    later = a.start()
    if later is not None:
        later.succeed()
    stage.end_lease(a)
    a.crash()
    b = stage.consumer("b")
    m.settle()
    b.work()
    stage.finish(m, [b])
    assert stage.history.ids(T) == [first, first, second]


# ---- 15: drain ----


def _orders(owner: int, leader: int) -> Iterator[list[bool]]:
    """All ways in which so many steps of the owner and of the leader can follow each other; True is the owner's
    turn."""
    for places in combinations(range(owner + leader), owner):
        yield [place in places for place in range(owner + leader)]


def _drains(stage: Stage, order: list[bool]) -> None:
    """``a`` drains with T running and U waiting, while new messages of both come and the leader finds out bit by
    bit."""
    m, a = stage.leader(), stage.consumer("a")
    ids = {T: [*stage.send(T), *stage.send(T)], U: [*stage.send(U)]}
    m.settle()
    a.read()
    run = a.start()
    assert run is not None
    assert run.message.ticket == T
    b = stage.consumer("b")
    left = []

    def ends() -> None:
        run.succeed()
        a.flush()

    def more() -> None:
        ids[T] += stage.send(T)
        ids[U] += stage.send(U)
        m.turn()
        m.turn()

    def looks() -> None:
        m.look()
        m.turn(*a.reports())
        b.read()

    owner = iter((a.begin_drain, a.give_back, ends, a.give_back, lambda: left.append(a.deregister())))
    leader = iter((more, looks, m.turn))
    for owners_turn in order:
        next(owner if owners_turn else leader)()
    assert left == [True], "it leaves nothing behind"
    stage.finish(m, [b])
    for ticket, expected in ids.items():
        stage.check_done(ticket, expected)


@rule(
    mutant(
        "a ticket that is given back loses its record",
        LuaEdit(
            "give_back",
            "write_record(tickets_key, ticket, word_of(after, ids), fence, ids)",
            "write_record(tickets_key, ticket, word_of(after, ids), fence, '')",
        ),
    ),
    mutant(
        "tickets are given back while they run",
        CodeEdit(
            "usher.consumer.execution.lanes:Lanes.close_quiet",
            "= {lane.ticket: None",
            "= dict.fromkeys(self.by_ticket) | {lane.ticket: None",
        ),
    ),
)
def test_a_drain_hands_everything_on_in_order_and_repeats_nothing_whatever_the_leader_knows(stage: Stage) -> None:
    for order in _orders(5, 3):
        _drains(stage, order)
        stage = stage.again()


@rule(
    mutant(
        "a lease that has ended can give back",
        LuaEdit("give_back", "if redis.call('EXISTS', KEYS[2]) == 0 then return {'LOST'} end", ""),
    )
)
def test_who_has_lost_the_lease_gives_nothing_back(stage: Stage) -> None:
    """Its entries may run elsewhere by now."""
    m, a = stage.leader(), stage.consumer("a")
    ids = stage.send(T)
    m.settle()
    a.read()
    a.begin_drain()
    stage.end_lease(a)
    b = stage.consumer("b")
    m.settle()
    b.read()
    assert b.start() is not None
    before = stage.world.state()
    a.give_back()
    assert stage.world.state() == before
    assert (before.pending, len(a.lost)) == ({b.name: ids}, 1)
