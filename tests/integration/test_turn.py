"""The leader's turn, with note_cut.lua: who owns an entry, who owns its ticket and what the owner will run change together, and only if
nobody has changed what the plan rests on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.integration.factories import FIELD, NASTY_TICKETS, TRICKY_IDS, World, bodies_of, hand_over, plan, plans, read
from tests.integration.memory import full_memory
from usher.common.base.clock import now_s
from usher.common.base.errors import Fenced, GroupMissing, NotNow, ReplyUnknown
from usher.common.redis.client import Link
from usher.common.redis.replies import HandOver
from usher.consumer.lifecycle.owner_scripts import GiveBack
from usher.master.leader import leader_scripts
from usher.master.leader.entries import NewEntries
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.policy.board.plans import NOTHING


def _position(world: World) -> bytes:
    return world.stream.last_delivered()


# ---- what it does ----


def test_entries_record_and_inbox_change_together_under_a_new_fence(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.parked(leader, b"T", *TRICKY_IDS)
    reply = hand_over(leader, plan(a, {b"T": ids}))
    assert world.pending() == {a.name: ids}
    assert world.record(b"T") == (a.name, reply, ids)
    assert world.inbox(a) == [HandOver(b"T", reply, ids)]
    assert world.link.call("HGET", world.keys.counters, "fence") == b"%d" % reply
    assert world.deliveries() == dict.fromkeys(ids, 1), "no delivery of its own"


def test_all_owners_of_a_turn_get_the_same_new_fence_and_later_ones_a_higher_one(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    first, second = world.parked(leader, b"T"), world.parked(leader, b"U")
    reply = hand_over(leader, plans((a, {b"T": first}), (b, {b"U": second})))
    assert {world.head(b"T"), world.head(b"U")} == {b"%b %d" % (one.name, reply) for one in (a, b)}
    third = world.parked(leader, b"V")
    assert hand_over(leader, plan(a, {b"V": third})) > reply


def test_fences_never_fall_when_redis_lost_its_tail_or_a_clock_was_set_back(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T")
    before = int(world.head(b"T").split()[1])
    world.link.call("HSET", world.keys.counters, "fence", before - 1)
    time.sleep(0.005)  # a fence is by the millisecond
    world.link.call("DEL", world.keys.leader)
    world.owned(world.elect(), a, b"U")
    assert int(world.head(b"U").split()[1]) > before
    world.link.call("HSET", world.keys.counters, "fence", 2**52)
    world.link.call("DEL", world.keys.leader)
    world.owned(world.elect(), a, b"V")
    assert int(world.head(b"V").split()[1]) == 2**52 + 1


def test_a_ticket_keeps_its_fence_and_its_record_grows_while_its_owner_has_entries_of_it(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    owned = {name: world.owned(leader, owner, name) for owner, name in ((a, b"T"), (b, b"V"), (a, b"X"))}
    believed = {name: world.head(name) for name in owned}
    more = {name: world.parked(leader, name) + world.parked(leader, name) for name in (b"T", b"U", b"V", b"W", b"X")}
    to_a, to_b = {name: more[name] for name in (b"T", b"U", b"X")}, {name: more[name] for name in (b"V", b"W")}
    reply = hand_over(leader, plans((a, to_a), (b, to_b), believed=believed))
    for owner, parts in ((a, to_a), (b, to_b)):
        for name, ids in parts.items():
            fence = int(believed[name].split()[1]) if name in believed else reply
            assert world.record(name) == (owner.name, fence, owned.get(name, []) + ids)
            assert HandOver(name, fence, ids) in world.inbox(owner)


def test_without_a_new_owner_no_fence_is_drawn(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T")
    counters, second = world.link.call("HGETALL", world.keys.counters), world.parked(leader, b"T")
    assert hand_over(leader, plan(a, {b"T": second}, {b"T": world.head(b"T")})) == 0
    assert world.link.call("HGETALL", world.keys.counters) == counters


def test_of_a_ticket_whose_acknowledgement_came_before_its_report_the_record_begins_anew(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first, believed = world.owned(leader, a, b"T"), world.head(b"T")
    a.steps.ack(first)
    second = world.parked(leader, b"T")
    hand_over(leader, plan(a, {b"T": second}, {b"T": believed}))
    assert world.record(b"T") == (a.name, int(believed.split()[1]), second)


def test_a_ticket_that_was_given_back_gets_a_new_fence(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    ids, before = world.owned(leader, a, b"T", b"1-1", b"2-1"), world.head(b"T")
    a.steps.give_back([GiveBack(b"T", int(before.split()[1]))])
    reply = hand_over(leader, plan(b, {b"T": ids}, {b"T": world.head(b"T")}))
    assert reply > int(before.split()[1])
    assert world.record(b"T") == (b.name, reply, ids)
    assert world.pending() == {b.name: ids}


def test_tickets_of_any_bytes_go_in_one_turn(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    parts = {name: world.send(name) for name in NASTY_TICKETS}
    hand_over(leader, plan(a, parts), read(leader, 100))
    assert {part.ticket: part.ids for part in world.inbox(a)} == parts
    assert world.state().index.keys() == parts.keys()
    more = {name: world.send(name) for name in NASTY_TICKETS}
    hand_over(leader, plan(a, more, {name: world.head(name) for name in parts}), read(leader, 100))
    assert {name: record.ids for name in parts if (record := world.record(name))} == {
        name: parts[name] + more[name] for name in parts
    }


def test_thousands_of_old_and_of_new_entries_go_to_two_owners_and_thousands_stay(world: World) -> None:
    """A few thousand ids are what Lua's stack takes: every list here is longer."""
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    world.owned(leader, a, b"T")
    head, before = world.head(b"T"), world.pending()[a.name]
    old = world.send_many([b"T"] * 4500)
    hand_over(leader, NOTHING, read(leader, 10_000))
    names = [b"T"] * 9000 + [b"U%d" % n for n in range(4001)] + [b"V"] * 2500
    ids = world.send_many(names)
    to_b = {name: [one] for name, one in zip(names[9000:13_001], ids[9000:13_001], strict=True)}
    targets = plans((a, {b"T": old + ids[:9000]}), (b, to_b), believed={b"T": head})
    hand_over(leader, targets, read(leader, 20_000))
    assert world.pending() == {a.name: before + old + ids[:9000], b.name: ids[9000:13_001], b"master": ids[13_001:]}
    assert {part.ticket: part.ids for part in world.inbox(b)} == to_b
    believed = {name: world.head(name) for name in to_b}
    more = dict(zip(to_b, ([one] for one in world.send_many(list(to_b))), strict=True))
    hand_over(leader, plans((b, more), believed=believed), read(leader, 20_000))
    assert {name: record.ids for name in to_b if (record := world.record(name))} == {
        name: to_b[name] + more[name] for name in to_b
    }


def test_each_owner_is_told_the_bodies_of_what_nobody_had_before(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    [parked] = world.parked(leader, b"P", b"1-1")
    [first], [second] = world.send(b"T", b"2-1"), world.send(b"U", b"9-2")
    [third], _ = world.send(b"X", b"10-1"), world.send(b"V", b"11-1")
    parts = (a, {b"U": [second], b"P": [parked], b"T": [first]}), (b, {b"X": [third]})
    hand_over(leader, plans(*parts), read(leader))
    [to_a], [to_b] = (world.inbox_records(owner.incarnation) for owner in (a, b))
    ids = (first, second, third, parked)
    body = {one: dict(world.link.call("XRANGE", world.keys.stream, one, one))[one] for one in ids}
    assert bodies_of([to_a]) == {one: body[one] for one in (first, second, parked)}
    assert bodies_of([to_b]) == {third: body[third]}


@pytest.mark.parametrize("waited_s", [0, 3])
def test_what_somebody_had_before_comes_without_its_body(world: World, waited_s: int) -> None:
    """An acknowledgement that its former owner sends again may end it: who has it must look."""
    leader, a = world.elect(), world.join("a")
    [parked], [given] = world.parked(leader, b"P", b"1-1"), world.owned(leader, a, b"T", b"2-1")
    leader._kept.age(now_s() + waited_s)
    a.steps.give_back([GiveBack(b"T", int(world.head(b"T").split()[1]))])
    hand_over(leader, plan(a, {b"T": [given], b"P": [parked]}, {b"T": world.head(b"T")}))
    assert bodies_of(world.inbox_records(a.incarnation)[-1:]).keys() == {parked}
    a.steps.give_back([GiveBack(b"P", int(world.head(b"P").split()[1]))])
    hand_over(leader, plan(a, {b"P": [parked]}, {b"P": world.head(b"P")}))
    assert bodies_of(world.inbox_records(a.incarnation)[-1:]) == {}


def test_what_has_waited_for_seconds_comes_without_its_body(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, a, late_s = world.elect(), world.join("a"), [0.0]
    monkeypatch.setattr(leader_scripts, "now_s", lambda: now_s() + late_s[0])
    parts = {ticket: world.parked(leader, ticket) for ticket in (b"P", b"Q", b"R")}
    bodies: list[int] = []
    for (ticket, ids), late_s[0] in zip(parts.items(), (1.0, 3.0, 9.0), strict=True):
        hand_over(leader, plan(a, {ticket: ids}))
        bodies.append(len(bodies_of(world.inbox_records(a.incarnation)[-1:])))
    assert bodies == [1, 1, 0]


def test_what_waits_while_the_group_is_set_back_comes_without_its_body(world: World) -> None:
    """The stream may be another, with another entry of that id."""
    leader, a = world.elect(), world.join("a")
    [parked] = world.parked(leader, b"P", b"1-1")
    world.link.call("DEL", world.keys.stream)
    world.make_group()
    world.send(b"P", b"1-1")
    hand_over(leader, NOTHING, read(leader))
    hand_over(leader, plan(a, {b"P": [parked]}))
    assert bodies_of(world.inbox_records(a.incarnation)) == {}


# ---- what it takes ----


def test_what_was_read_is_in_nobodys_list_and_comes_again_to_a_successor_until_it_is_taken(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first, second, third, fourth = ids = [b"999-10", b"1000-1", b"1000-2", b"1001-0"]
    for ticket, entry_id in zip((b"T", b"U", b"T", b"U"), ids, strict=True):
        world.send(ticket, entry_id)
    read(leader, 100)
    assert (world.pending(), _position(world)) == ({}, b"0-0")
    world.link.call("DEL", world.keys.leader)
    leader = world.elect()
    hand_over(leader, plan(a, {b"T": [first]}), read(leader, 100))
    assert world.pending() == {a.name: [first], b"master": [second, third, fourth]}
    assert (_position(world), read(leader).found) == (fourth, [])
    hand_over(leader, plan(a, {b"U": [second, fourth], b"T": [third]}, {b"T": world.head(b"T")}))
    assert world.pending() == {a.name: ids}


def test_only_what_was_read_is_taken_what_came_since_comes_next(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T", *TRICKY_IDS)
    news = read(leader, 4)
    later = world.send(b"T", b"18446744073709551-18446744073709552")
    hand_over(leader, plan(a, {b"T": ids[:2]}), news)
    assert (world.pending(), _position(world)) == ({a.name: ids[:2], b"master": ids[2:4]}, ids[3])
    assert [found[0] for found in read(leader, 100).found] == ids[4:] + later


@pytest.mark.parametrize("taken", [4, 0])
def test_how_many_entries_the_group_was_given_is_right_again_after_a_change_of_leader(world: World, taken: int) -> None:
    leader = world.elect()
    world.send(b"T", *TRICKY_IDS)
    if taken:
        hand_over(leader, NOTHING, read(leader, taken))
    for _ in range(2):  # the second leader ends before it has taken anything
        read(leader, 3)
        world.link.call("DEL", world.keys.leader)
        (leader := world.elect()).begin()
    facts = world.stream.group_facts()
    assert facts[b"last-delivered-id"] == (TRICKY_IDS[taken - 1] if taken else b"0-0")
    assert facts.get(b"lag", 10 - taken) == 10 - taken


def test_new_entries_are_read_and_claimed_with_the_commands_of_streams_alone(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send_many([b"T"] * 2000)
    leader.begin()
    world.link.call("CONFIG", "RESETSTAT")
    hand_over(leader, plan(a, {b"T": ids[:1000]}), read(leader, 2000))
    told = world.link.call("INFO", "commandstats")
    assert b"cmdstat_xreadgroup:calls=1," in told and b"cmdstat_xclaim:calls=2," in told
    assert b"eval" not in told and b"xgroup" not in told
    assert (len(world.pending()[a.name]), len(world.pending()[b"master"]), _position(world)) == (1000, 1000, ids[-1])


# ---- when nothing happens ----


def test_after_a_successor_has_begun_nothing_happens(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.parked(leader, b"T")
    news = read(leader)
    world.link.call("DEL", world.keys.leader)
    with Link(world.link.url, "test:two") as link:
        LeaderScripts(link, world.keys, world.elect("http://two").epoch, FIELD).begin()
        for _ in range(2):
            with world.unchanged(), pytest.raises(Fenced):
                leader.turn(plan(a, {b"T": ids}), news)


@pytest.mark.parametrize("when", ["before the look", "after it"])
def test_a_plan_of_a_ticket_that_others_have_changed_is_not_carried_out(world: World, when: str) -> None:
    leader, a = world.elect(), world.join("a")
    first, fence = world.owned(leader, a, b"T"), int(world.head(b"T").split()[1])
    more, other = world.send(b"T"), world.send(b"U")
    news = read(leader)
    stale = plan(a, {b"T": more, b"U": other}, {b"T": world.head(b"T")})
    a.steps.give_back([GiveBack(b"T", fence)])
    if when == "before the look":
        leader.is_guarded = False
    with world.unchanged():
        assert leader.turn(stale, news) is None
    assert leader.changed == {(b"ticket", b"T")}
    leader.changed.clear()
    hand_over(leader, plan(a, {b"T": first + more, b"U": other}, {b"T": world.head(b"T")}), news)
    assert world.pending() == {a.name: first + more + other}


def test_what_others_do_with_other_tickets_holds_up_nobody_and_is_told(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T")
    ids = world.send(b"U")
    news = read(leader)
    a.steps.give_back([GiveBack(b"T", int(world.head(b"T").split()[1]))])
    assert leader.turn(plan(a, {b"U": ids}), news) is not None
    assert leader.changed == {(b"ticket", b"T")}
    assert leader.turn(NOTHING, count=1) is None, "that must be known before the next one"


def test_rules_that_change_hold_up_every_plan_once(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"U")
    news = read(leader)
    world.link.call("XADD", world.keys.changed, "*", "rules", "1")
    with world.unchanged():
        assert leader.turn(plan(a, {b"U": ids}), news) is None
    assert leader.changed == {(b"rules", b"1")}
    leader.changed.clear()
    assert leader.turn(plan(a, {b"U": ids}), news) is not None


def test_a_consumer_that_begins_to_drain_gets_nothing_by_a_plan_that_does_not_know(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    ids = world.send(b"U")
    news = read(leader)
    a.steps.drain(60_000)
    with world.unchanged():
        assert leader.turn(plan(a, {b"U": ids}), news) is None
    assert leader.changed == {(b"consumer", a.name)}
    leader.changed.clear()
    world.join("c")
    assert leader.turn(plan(b, {b"U": ids}), news) is not None, "who comes holds up nobody"


def test_more_changes_than_are_noted_put_all_in_doubt(world: World) -> None:
    leader = world.elect()
    leader.begin()
    note = ("XADD", world.keys.changed, "MAXLEN", "~", "10000", "*", "ticket", b"T")
    world.link.pipeline([note] * 10_100)
    with pytest.raises(ReplyUnknown):
        leader.turn(NOTHING, count=1)


def test_a_turn_that_is_refused_although_nobody_noted_a_change_is_in_doubt(world: World) -> None:
    leader = world.elect()
    leader.begin()
    world.link.call("XADD", world.keys.changed, "1-1", "ticket", b"T")
    world.link.call("DEL", world.keys.changed)
    with pytest.raises(ReplyUnknown):
        leader.turn(NOTHING, count=1)


def test_when_memory_is_full_nothing_is_taken_and_later_it_is(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T", b"1-1", b"2-1")
    news = read(leader)
    with full_memory(world.link), world.unchanged(), pytest.raises(NotNow):
        leader.turn(plan(a, {b"T": ids}), news)
    hand_over(leader, plan(a, {b"T": ids}), news)
    assert world.pending() == {a.name: ids}


def test_what_others_change_while_a_turn_is_refused_is_not_forgotten(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T")
    more = world.send(b"T")
    news, stale = read(leader), plan(a, {b"T": more}, {b"T": world.head(b"T")})
    a.steps.give_back([GiveBack(b"T", int(world.head(b"T").split()[1]))])
    with full_memory(world.link), pytest.raises(NotNow):
        leader.turn(stale, news)
    with world.unchanged():
        assert leader.turn(stale, news) is None
    assert leader.changed == {(b"ticket", b"T")}


def test_a_leader_that_was_deposed_while_a_turn_was_refused_does_nothing_more(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T")
    news = read(leader)
    with Link(world.link.url, "test:two") as link:
        with full_memory(world.link):
            world.link.call("DEL", world.keys.leader)
            LeaderScripts(link, world.keys, world.elect("http://two").epoch, FIELD).begin()
            with pytest.raises(NotNow):
                leader.turn(plan(a, {b"T": ids}), news)
        with world.unchanged(), pytest.raises(Fenced):
            leader.turn(plan(a, {b"T": ids}), news)


def test_after_a_look_that_was_refused_it_looks_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T")
    news = read(leader)
    world.link.call("XADD", world.keys.changed, "*", "ticket", b"T")
    refused = NotNow("BUSY", "a script runs")
    with monkeypatch.context() as patched, pytest.raises(NotNow):
        pipeline = world.link.pipeline
        patched.setattr(world.link, "pipeline", lambda commands: [*pipeline(commands)[:2], refused, refused])
        leader.look()
    assert leader.turn(plan(a, {b"T": ids}), news) is None


@pytest.mark.parametrize("notes", [1, 5, 6])
def test_changes_of_others_that_do_not_concern_the_plan_cost_it_a_few_tries(
    world: World, monkeypatch: pytest.MonkeyPatch, notes: int
) -> None:
    """Of many, without bodies from the second on, which is there sooner; then reports and rules have their turn."""
    leader, a = world.elect(), world.join("a")
    ids = world.send_many([b"T"] * 65)
    news, pipeline, sent = read(leader), world.link.pipeline, list[int]()

    def noting(commands: Sequence[Sequence[Any]], block_s: float = 0.0) -> list[Any]:
        sent.append(len(str(commands)))
        if len(sent) <= notes:
            with Link(world.link.url, "test:noter") as link:
                link.call("XADD", world.keys.changed, "*", "ticket", b"other")
        return pipeline(commands, block_s)

    monkeypatch.setattr(world.link, "pipeline", noting)
    answer = leader.turn(plan(a, {b"T": ids}), news)
    assert (answer is not None, len(sent)) == (notes < 6, min(notes + 1, 6))
    assert sent[0] > sent[1]
    assert (world.pending(), leader.changed) == ({a.name: ids} if notes < 6 else {}, {(b"ticket", b"other")})


def test_over_another_connection_than_that_which_watches_nothing_happens(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T")
    news = read(leader)
    world.link.close()
    with world.unchanged(), pytest.raises(ReplyUnknown):
        leader.turn(plan(a, {b"T": ids}), news)


def test_a_leader_begins_also_before_the_group_is_made(world: World) -> None:
    """Else a late turn of its predecessor could read from it."""
    leader, ids = world.elect(), world.send(b"T")
    leader.begin()
    world.link.call("XGROUP", "DESTROY", world.keys.stream, world.keys.group)
    world.link.call("DEL", world.keys.leader)
    with Link(world.link.url, "test:two") as link:
        two = LeaderScripts(link, world.keys, world.elect("http://two").epoch, FIELD)
        with pytest.raises(GroupMissing):
            two.begin()
        world.make_group()
        with pytest.raises(Fenced):
            leader.turn(NOTHING, NewEntries(b"0-0", [], True), 10)
        two.begin(is_new=True)
        assert [one[0] for one in read(two).found] == ids


def test_without_the_group_it_says_so(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T")
    news = read(leader)
    world.link.call("XGROUP", "DESTROY", world.keys.stream, world.keys.group)
    with pytest.raises(GroupMissing):
        leader.turn(plan(a, {b"T": ids}), news, 1)
    world.make_group()
    world.apart_because = "what the group had is gone with it"


def test_whose_inbox_cannot_be_written_ends_and_what_it_was_given_is_taken_back(world: World) -> None:
    """It would never learn of that, and later messages of the ticket would go before it."""
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    ids = world.send(b"T")
    news = read(leader)
    world.link.call("SET", world.keys.inbox(a.incarnation), "a stranger's")
    with pytest.raises(ReplyUnknown):
        leader.turn(plan(a, {b"T": ids}), news)
    assert (world.lease(a), world.lease(b)) == (b"revoked", b"live")
    world.link.call("DEL", world.keys.lease(a.incarnation))
    assert [found.id for found in leader.take_back(a.incarnation, 10).found] == ids


# ---- leases ----


@pytest.mark.parametrize("state", ["LOST", "DRAINING", "REVOKED"])
def test_whose_lease_has_ended_or_takes_nothing_more_may_be_given_it_and_it_comes_back(
    world: World, state: str
) -> None:
    """A leader that has not heard of it gives it more: the roster tells who has died."""
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    first, second = world.parked(leader, b"T"), world.parked(leader, b"U")
    world.refuse(leader, a, state)
    hand_over(leader, plans((a, {b"T": first}), (b, {b"U": second})))
    assert world.pending() == {a.name: first, b.name: second}
    world.link.call("DEL", world.keys.lease(a.incarnation))
    assert [[one.id for one in leader.take_back(a.incarnation, 10).found] for _ in range(2)] == [first, []]
    assert not world.link.call("EXISTS", world.keys.inbox(a.incarnation))


# ---- what is not there ----


@pytest.mark.parametrize("how", ["XACK", "XGROUP DELCONSUMER", "XCLAIM"])
def test_what_was_taken_out_from_under_master_by_hand_is_handed_over_all_the_same(world: World, how: str) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.parked(leader, b"T", b"1-1", b"2-1", b"3-1")
    stream, group = world.keys.stream, world.keys.group
    if how == "XACK":
        world.link.call("XACK", stream, group, ids[1])
    elif how == "XCLAIM":
        world.link.call("XCLAIM", stream, group, "stranger", 0, ids[1])
    else:
        world.link.call("XGROUP", "DELCONSUMER", stream, group, "master")
    hand_over(leader, plan(a, {b"T": ids}))
    assert world.pending() == {a.name: ids}


@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_its_producer_deletes_after_it_was_read_is_told_by_its_owner_and_the_rest_goes_on(
    world: World, which: int
) -> None:
    """Its body may come with the inbox; then it is run."""
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T", b"1-1", b"2-1", b"3-1")
    news = read(leader)
    world.delete(ids[which])
    hand_over(leader, plan(a, {b"T": ids}), news)
    assert world.pending() == {a.name: [one for one in ids if one != ids[which]]}
    assert world.inbox(a)[0].ids == ids
    a.steps.ack(ids)
    assert world.pending() == {}


def test_what_is_deleted_before_it_is_anybodys_counts_as_cut_unread(world: World) -> None:
    leader = world.elect()
    ids = world.send(b"T", b"1-1", b"2-1", b"3-1")
    news = read(leader)
    world.delete(*ids[:2])
    hand_over(leader, NOTHING, news)
    leader.note_cuts()
    assert world.pending() == {b"master": ids[2:]}
    assert world.link.call("HGET", world.keys.counters, "unread_cut") == b"2"


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("how", ["trimmed", "deleted among others"])
def test_what_was_cut_before_it_was_read_is_counted_once(world: World, how: str, looks: bool) -> None:
    leader = world.elect()
    world.send(b"T", b"1-1")
    hand_over(leader, NOTHING, read(leader))
    ids = world.send(b"T", *(b"2-%d" % number for number in range(1, 8)))
    if how == "trimmed":
        world.link.call("XTRIM", world.keys.stream, "MINID", ids[3])
    else:
        world.delete(ids[0], ids[2], ids[4])
    if looks:
        leader.save_position()
    for _ in range(2):
        hand_over(leader, NOTHING, read(leader, 3))
        leader.note_cuts()
        leader.save_position()
    cut = world.link.call("HGET", world.keys.counters, "unread_cut")
    assert cut == (b"3" if b"entries-read" in world.stream.group_facts() else None)


def test_what_others_have_read_is_not_taken_for_cut(world: World) -> None:
    leader = world.elect()
    world.send(b"T", b"1-1")
    hand_over(leader, NOTHING, read(leader))
    world.send(b"T", b"2-1", b"3-1", b"4-1")
    group = ("GROUP", world.keys.group, "stranger")
    world.link.call("XREADGROUP", *group, "COUNT", 2, "STREAMS", world.keys.stream, ">")
    assert [one[0] for one in read(leader).found] == [b"4-1"]
    leader.note_cuts()
    assert world.link.call("HGET", world.keys.counters, "unread_cut") is None
    world.apart_because = "a stranger has something"
