"""hand_over.lua: the one way out of ``master``. Who owns an entry, who owns its ticket and what the owner will run
change together or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.factories import NASTY_TICKETS, TRICKY_IDS, World, fetch, plan, plans, states
from usher.common.base.errors import Fenced
from usher.common.redis.replies import HandOver
from usher.master.leader.leader_scripts import LeaderScripts


def test_entries_record_and_inbox_change_together_under_a_new_fence(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.parked(leader, b"T", *TRICKY_IDS)
    reply = leader.hand_over(plan(a, {b"T": ids}))
    assert reply.targets == (("OK", [], [], []),)
    assert world.pending() == {a.name: ids}
    assert world.record(b"T") == (a.name, reply.fence, ids)
    assert world.inbox(a) == [HandOver(b"T", reply.fence, ids)]
    assert world.link.call("HGET", world.keys.counters, "fence") == b"%d" % reply.fence


def test_a_hand_over_is_no_delivery(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    [entry_id] = world.owned(leader, a, b"T")
    assert world.deliveries() == {entry_id: 1}


def test_all_targets_of_a_call_get_the_same_new_fence_and_later_calls_a_higher_one(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    first, second = world.parked(leader, b"T"), world.parked(leader, b"U")
    reply = leader.hand_over(plans((a, {b"T": first}), (b, {b"U": second})))
    assert states(reply) == ["OK", "OK"]
    assert world.head(b"T").endswith(b" %d" % reply.fence)
    assert world.head(b"U").endswith(b" %d" % reply.fence)
    third = world.parked(leader, b"V")
    assert leader.hand_over(plan(a, {b"V": third})).fence > reply.fence


def test_a_ticket_keeps_its_fence_while_its_owner_has_entries_of_it(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first = world.owned(leader, a, b"T")
    head, counters = world.head(b"T"), world.link.call("HGETALL", world.keys.counters)
    second = world.parked(leader, b"T")
    reply = leader.hand_over(plan(a, {b"T": second}, {b"T": head}))
    assert (reply.fence, reply.targets[0].state) == (0, "OK")
    fence = int(head.split()[1])
    assert world.record(b"T") == (a.name, fence, first + second)
    assert world.inbox(a) == [HandOver(b"T", fence, first), HandOver(b"T", fence, second)]
    assert world.link.call("HGETALL", world.keys.counters) == counters


def test_tickets_with_and_without_an_owner_go_together_in_any_order(world: World) -> None:
    """Each ticket gets its own ids under its own fence, although the script is told of those without an owner first."""
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    owned = {name: world.owned(leader, owner, name) for owner, name in ((a, b"T"), (b, b"V"), (a, b"X"))}
    believed = {name: world.head(name) for name in owned}
    more = {
        name: world.parked(leader, name) + world.parked(leader, name) for name in (b"T", b"U", b"V", b"W", b"X", b"Y")
    }
    to_a, to_b = {name: more[name] for name in (b"T", b"U", b"X")}, {name: more[name] for name in (b"V", b"Y", b"W")}
    reply = leader.hand_over(plans((a, to_a), (b, to_b), believed=believed))
    assert reply.targets == (("OK", [], [], []), ("OK", [], [], []))
    for owner, parts in ((a, to_a), (b, to_b)):
        for name, ids in parts.items():
            fence = int(believed[name].split()[1]) if name in believed else reply.fence
            assert world.record(name) == (owner.name, fence, owned.get(name, []) + ids)
            assert HandOver(name, fence, ids) in world.inbox(owner)


def test_a_lower_id_that_comes_late_is_noted_behind_what_was_handed_over(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    early, late = world.parked(leader, b"T", b"999-10", b"1000-1")
    leader.hand_over(plan(a, {b"T": [late]}))
    leader.hand_over(plan(a, {b"T": [early]}, {b"T": world.head(b"T")}))
    record = world.record(b"T")
    assert record is not None
    assert record.ids == [late, early]


def test_a_ticket_whose_acknowledgement_came_before_its_report_gets_a_new_fence_and_the_leader_is_told(
    world: World,
) -> None:
    leader, a = world.elect(), world.join("a")
    first = world.owned(leader, a, b"T")
    believed = world.head(b"T")
    a.steps.ack({b"T": first}, b"", 0)
    second = world.parked(leader, b"T")
    reply = leader.hand_over(plan(a, {b"T": second}, {b"T": believed}))
    assert reply.targets == (("OK", [], [], [b"T"]),)
    assert reply.fence > int(believed.split()[1])
    assert world.record(b"T") == (a.name, reply.fence, second)


def test_a_ticket_believed_of_another_owner_is_refused_even_when_its_record_is_gone(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    ids = world.parked(leader, b"T")
    with world.unchanged():
        reply = leader.hand_over(plan(b, {b"T": ids}, {b"T": a.name + b" 5"}))
    assert reply.targets == (("OK", [b"T"], [], []),)


def test_a_deposed_leader_hands_nothing_over(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.parked(leader, b"T")
    depose(leader)
    with world.unchanged(), pytest.raises(Fenced):
        leader.hand_over(plan(a, {b"T": ids}))


def test_the_same_call_twice_changes_nothing_the_second_time(world: World) -> None:
    """Its reply was lost. Both forms: of a ticket that nobody had, and of one that its owner goes on with."""
    leader, a = world.elect(), world.join("a")
    fresh = plan(a, {b"T": world.parked(leader, b"T")})
    leader.hand_over(fresh)
    with world.unchanged():
        assert leader.hand_over(fresh).targets == (("OK", [b"T"], [], []),)
    going_on = plan(a, {b"T": world.parked(leader, b"T")}, {b"T": world.head(b"T")})
    leader.hand_over(going_on)
    with world.unchanged():
        assert states(leader.hand_over(going_on)) == ["STRAY"]


def test_the_same_call_again_after_the_acknowledgement_hands_nothing_over(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.parked(leader, b"T")
    again = plan(a, {b"T": ids})
    leader.hand_over(again)
    a.steps.ack({b"T": ids}, b"", 0)
    inbox = world.inbox(a)
    assert leader.hand_over(again).targets == (("OK", [b"T"], [], []),)
    assert (world.pending(), world.state().index, world.inbox(a)) == ({}, {}, inbox)


@pytest.mark.parametrize("value", [b"b:1 5 1-1", b"%s 4 1-1", b"%s 55 1-1", b"returned 4 1-1", b"halted 5 1-1"])
def test_a_ticket_whose_record_is_not_what_the_plan_believes_is_refused(world: World, value: bytes) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.parked(leader, b"T")
    world.spoil(b"T", value.replace(b"%s", a.name))
    for believed in (b"", a.name + b" 5"):
        with world.unchanged():
            assert leader.hand_over(plan(a, {b"T": ids}, {b"T": believed})).targets == (("OK", [b"T"], [], []),)
    if world.broken():
        world.apart_because = "the record was written by hand"


@pytest.mark.parametrize(
    "value", [b"", b"garbage", b"a:1", b"a:1 five 1-1", b" a:1 5 1-1", b"a:1  5 1-1", b"\0 \xff", b"[1,2]", b"a:1 5"]
)
def test_a_ticket_whose_record_cannot_be_read_is_refused_and_others_go_on(world: World, value: bytes) -> None:
    leader, a = world.elect(), world.join("a")
    spoilt, good = world.parked(leader, b"T"), world.parked(leader, b"U")
    world.spoil(b"T", value)
    for believed in (b"", value, b"a:1 5"):
        reply = leader.hand_over(plan(a, {b"T": spoilt}, {b"T": believed}))
        assert reply.targets == (("OK", [b"T"], [], []),)
    assert leader.hand_over(plan(a, {b"T": spoilt, b"U": good})).targets == (("OK", [b"T"], [], []),)
    assert world.pending() == {b"master": spoilt, a.name: good}
    world.apart_because = "the record was written by hand"


def test_a_halted_ticket_is_handed_to_nobody_whatever_is_believed(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.parked(leader, b"T")
    world.spoil(b"T", b"halted 5 " + ids[0])
    for believed in (b"", b"halted 5"):
        with world.unchanged():
            assert leader.hand_over(plan(a, {b"T": ids}, {b"T": believed})).targets[0].refused == [b"T"]
    world.apart_because = "the ticket was halted by hand"


@pytest.mark.parametrize("state", ["LOST", "DRAINING", "REVOKED"])
def test_a_target_that_takes_nothing_is_refused_whole_and_the_others_get_theirs(world: World, state: str) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    world.owned(leader, a, b"T")
    head = world.head(b"T")
    more, other, theirs = world.parked(leader, b"T"), world.parked(leader, b"U"), world.parked(leader, b"V")
    world.refuse(leader, a, state)
    reply = leader.hand_over(plans((a, {b"T": more, b"U": other}), (b, {b"V": theirs}), believed={b"T": head}))
    assert [(target.state, target.refused) for target in reply.targets] == [(state, []), ("OK", [])]
    assert world.pending()[b"master"] == more + other
    assert world.pending()[b.name] == theirs
    assert world.head(b"T") == head
    assert world.record(b"U") is None
    assert len(world.inbox(a)) == 1


def test_a_lease_that_nobody_wrote_is_no_lease(world: World) -> None:
    leader = world.elect()
    ids = world.parked(leader, b"T")
    for value in ("", "LIVE", "live ", "garbage"):
        world.link.call("SET", world.keys.lease("x:1"), value)
        with world.unchanged():
            assert states(leader.hand_over(plan("x:1", {b"T": ids}))) == ["LOST"]


def test_an_id_that_another_owner_has_refuses_the_targets_whole_part(world: World) -> None:
    leader, a, b, c = world.elect(), world.join("a"), world.join("b"), world.join("c")
    taken = world.owned(leader, a, b"T")
    good, other = world.parked(leader, b"U"), world.parked(leader, b"V")
    reply = leader.hand_over(plans((b, {b"U": good, b"W": taken}), (c, {b"V": other})))
    assert states(reply) == ["STRAY", "OK"]
    assert world.pending() == {a.name: taken, b"master": good, c.name: other}
    assert world.inbox(b) == []


def test_an_id_that_a_stranger_took_is_a_stray(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first, second = world.parked(leader, b"T", b"1-1", b"2-1")
    world.make_idle("stranger", 0, second)
    with world.unchanged():
        assert states(leader.hand_over(plan(a, {b"T": [first, second]}))) == ["STRAY"]
    world.apart_because = "a stranger has something"


def test_ids_that_are_pending_for_nobody_are_over_and_the_rest_is_handed_over(world: World) -> None:
    """Never read, or never there at all: there is nothing to hand over, and nothing to be unsure about. Acknowledged
    and deleted by hand: only a letter is left of it."""
    leader, a = world.elect(), world.join("a")
    first, second, third = world.parked(leader, b"T", b"1-1", b"2-1", b"3-1")
    world.link.call("XACK", world.keys.stream, world.keys.group, second)
    world.delete(second)
    [unread] = world.send(b"T", b"4-1")
    reply = leader.hand_over(plan(a, {b"T": [first, second, third, unread, b"9-9"]}))
    assert reply.targets == (("OK", [], [second, unread, b"9-9"], []),)
    assert world.pending() == {a.name: [first, third]}
    assert world.inbox(a) == [HandOver(b"T", reply.fence, [first, third])]
    assert world.state().letters() == [(second, b"T", b"body_gone")]


@pytest.mark.parametrize("how", ["XACK", "XGROUP DELCONSUMER"])
def test_a_ticket_of_which_an_entry_was_taken_out_of_the_pending_list_waits_until_it_is_there_again(
    world: World, how: str
) -> None:
    """Else its later messages would go before it; the others' go on."""
    leader, a = world.elect(), world.join("a")
    ids = world.parked(leader, b"T", b"1-1", b"2-1", b"3-1")
    if how == "XACK":
        world.link.call("XACK", world.keys.stream, world.keys.group, ids[1])
    else:
        world.link.call("XGROUP", "DELCONSUMER", world.keys.stream, world.keys.group, "master")
    other = world.parked(leader, b"U", b"4-1")
    reply = leader.hand_over(plan(a, {b"T": ids, b"U": other}))
    assert reply.targets == (("OK", [b"T"], [], []),)
    assert reply.missing == (b"T",)
    assert world.pending()[a.name] == other
    assert leader.restore([(b"T", ids)]) == (ids if how == "XGROUP DELCONSUMER" else ids[1:2])
    assert leader.hand_over(plan(a, {b"T": ids})).missing == ()
    assert world.pending() == {a.name: [*ids, *other]}
    assert world.dead() == []


def test_a_ticket_of_which_everything_is_over_gets_no_record_and_no_inbox(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    with_owner = world.owned(leader, a, b"U")
    inbox, record = world.inbox(a), world.record(b"U")
    reply = leader.hand_over(plan(a, {b"T": [b"7-7"], b"U": [b"8-8"]}, {b"U": world.head(b"U")}))
    assert reply.targets == (("OK", [], [b"7-7", b"8-8"], []),)
    assert world.state().index.keys() == {b"U"}
    assert (world.inbox(a), world.record(b"U")) == (inbox, record)
    assert world.pending() == {a.name: with_owner}


def test_an_entry_whose_body_is_gone_does_not_stop_the_others(world: World) -> None:
    """Before 7.0 it is handed over and the owner finds no body; from 7.0 on Redis drops it and it is a dead letter
    here."""
    leader, a = world.elect(), world.join("a")
    first, second, third = world.parked(leader, b"T", b"1-1", b"2-1", b"3-1")
    alone = world.parked(leader, b"U")
    world.delete(second, *alone)
    reply = leader.hand_over(plan(a, {b"T": [first, second, third], b"U": alone}))
    if world.claiming_drops_the_bodiless:
        assert reply.targets == (("OK", [], [second, *alone], []),)
        assert world.pending() == {a.name: [first, third]}
        assert world.inbox(a) == [HandOver(b"T", reply.fence, [first, third])]
        assert world.record(b"U") is None
        assert world.state().letters() == [(second, b"T", b"body_gone"), (alone[0], b"U", b"body_gone")]
    else:
        assert reply.targets == (("OK", [], [], []),)
        assert world.pending() == {a.name: [first, second, third, *alone]}
        assert world.dead() == []


def test_bodies_lost_of_a_ticket_that_its_owner_goes_on_with_leave_its_record_as_it_was(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T")
    record, head = world.record(b"T"), world.head(b"T")
    lost = world.parked(leader, b"T")
    world.delete(*lost)
    reply = leader.hand_over(plan(a, {b"T": lost}, {b"T": head}))
    if world.claiming_drops_the_bodiless:
        assert reply.targets == (("OK", [], lost, []),)
        assert world.record(b"T") == record
    else:
        assert reply.targets == (("OK", [], [], []),)


def _given_back(world: World, *ids: bytes) -> tuple[LeaderScripts, list[bytes]]:
    leader, a = world.elect(), world.join("a")
    owned = world.owned(leader, a, b"T", *ids)
    a.steps.drain(60_000)
    assert world.give_back(a, {b"T": owned}) == []
    return leader, owned


def test_a_returned_ticket_goes_on_with_its_lowest_entry_under_a_new_fence(world: World) -> None:
    leader, ids = _given_back(world, b"999-10", b"1000-1", b"1000-2")
    b, head = world.join("b"), world.head(b"T")
    reply = leader.hand_over(plan(b, {b"T": ids[:2]}, {b"T": head}))
    assert reply.targets == (("OK", [], [], []),)
    assert reply.fence > int(head.split()[1])
    assert world.record(b"T") == (b.name, reply.fence, ids[:2])
    assert world.pending() == {b.name: ids[:2], b"master": ids[2:]}


def test_a_returned_ticket_without_its_lowest_entry_is_refused(world: World) -> None:
    leader, ids = _given_back(world, b"999-10", b"1000-1", b"1000-2")
    later, b = world.parked(leader, b"T"), world.join("b")
    for part in (ids[1:], ids[1:] + later, later, [ids[1], ids[0]]):
        with world.unchanged():
            assert leader.hand_over(plan(b, {b"T": part}, {b"T": world.head(b"T")})).targets == (
                ("OK", [b"T"], [], []),
            )


def test_a_returned_ticket_is_refused_to_a_leader_that_does_not_know_it_yet(world: World) -> None:
    leader, ids = _given_back(world, b"1-1", b"2-1")
    b = world.join("b")
    for believed in (b"", b"a:1 5", b"returned 5", b.name + b" 5"):
        with world.unchanged():
            assert leader.hand_over(plan(b, {b"T": ids}, {b"T": believed})).targets[0].refused == [b"T"]


def test_a_returned_ticket_of_which_an_even_lower_entry_turned_up_begins_with_that(world: World) -> None:
    """A stray below what was given back: refusing it would refuse the ticket for ever."""
    leader, b = world.elect(), world.join("b")
    [stray] = world.parked(leader, b"T", b"999-10")
    world.make_idle("stranger", 100_000, stray)
    a = world.join("a")
    ids = world.owned(leader, a, b"T", b"1000-1", b"1000-2")
    a.steps.drain(60_000)
    world.give_back(a, {b"T": ids})
    leader.sweep([], 50_000, b"0-0", 100)
    assert world.pending() == {b"master": [stray, *ids]}
    reply = leader.hand_over(plan(b, {b"T": [stray]}, {b"T": world.head(b"T")}))
    assert reply.targets == (("OK", [], [], []),)
    leader.hand_over(plan(b, {b"T": ids}, {b"T": world.head(b"T")}))
    assert world.pending() == {b.name: [stray, *ids]}


@pytest.mark.parametrize(
    "how", ["acknowledged and deleted by hand", "adopted without its body", "swept without its body"]
)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_returned_ticket_goes_on_when_something_of_it_is_not_pending_any_more(
    world: World, which: int, how: str
) -> None:
    """The leader knows its ids from the record; one that cannot be handed over must not stop the ticket (or everything)
    for ever."""
    leader, ids = _given_back(world, b"1-1", b"2-1", b"3-1")
    if how == "acknowledged and deleted by hand":
        world.link.call("XACK", world.keys.stream, world.keys.group, ids[which])
        world.delete(ids[which])
    else:
        world.delete(ids[which])
        if how == "adopted without its body":
            leader.read_parked(None, 100)
        else:
            leader.sweep([], 0, b"0-0", 100)
    b = world.join("b")
    reply = leader.hand_over(plan(b, {b"T": ids}, {b"T": world.head(b"T")}))
    assert (reply.targets[0].state, reply.targets[0].refused) == ("OK", [])
    left = [entry_id for entry_id in ids if entry_id != ids[which]]
    if reply.targets[0].gone:
        assert reply.targets[0].gone == [ids[which]]
        assert world.pending() == {b.name: left}
    else:  # before 7.0 the sweep leaves what is parked alone, and the owner finds no body
        assert world.pending() == {b.name: ids}


@pytest.mark.parametrize("ticket", NASTY_TICKETS)
def test_a_ticket_is_any_bytes(world: World, ticket: bytes) -> None:
    leader, a = world.elect(), world.join("a")
    first = world.owned(leader, a, ticket)
    other = world.owned(leader, a, b"other")
    second = world.owned(leader, a, ticket)
    assert [(part.ticket, part.ids) for part in world.inbox(a)] == [
        (ticket, first),
        (b"other", other),
        (ticket, second),
    ]
    assert world.state().index.keys() == {ticket, b"other"}


def test_tickets_of_any_bytes_go_in_one_call(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    parts = {name: world.parked(leader, name) for name in NASTY_TICKETS}
    leader.hand_over(plan(a, parts))
    assert {part.ticket: part.ids for part in world.inbox(a)} == parts
    assert world.state().index.keys() == parts.keys()


def test_a_ticket_twice_in_a_plan_is_handed_over_once(world: World) -> None:
    """That would be a mistake of the planner, and two owners of one ticket."""
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    first, second = world.parked(leader, b"T", b"1-1", b"2-1")
    reply = leader.hand_over(plans((a, {b"T": [first]}), (b, {b"T": [second]})))
    assert [target.refused for target in reply.targets] == [[], [b"T"]]
    assert world.pending() == {a.name: [first], b"master": [second]}


def test_thousands_of_tickets_are_handed_over_in_one_call(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    names = [b"T%d" % n for n in range(9001)]
    ids = world.send_many(names)
    fetch(leader, 10_000)
    parts = {name: [entry_id] for name, entry_id in zip(names, ids, strict=True)}
    to_a = {name: parts[name] for name in names[:4500]}
    to_b = {name: parts[name] for name in names[4500:]}
    assert states(leader.hand_over(plans((a, to_a), (b, to_b)))) == ["OK", "OK"]
    assert world.pending() == {a.name: ids[:4500], b.name: ids[4500:]}
    assert {part.ticket: part.ids for part in world.inbox(a)} == to_a
    assert {part.ticket: part.ids for part in world.inbox(b)} == to_b


def test_thousands_of_entries_of_one_ticket_are_handed_over_in_one_call_though_some_bodies_are_gone(
    world: World,
) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send_many([b"T"] * 9001)
    fetch(leader, 10_000)
    lost = [ids[0], ids[3999], ids[4000], ids[8500], ids[9000]]
    world.delete(*lost)
    reply = leader.hand_over(plan(a, {b"T": ids}))
    left = [entry_id for entry_id in ids if entry_id not in lost] if world.claiming_drops_the_bodiless else ids
    assert world.pending() == {a.name: left}
    assert world.inbox(a) == [HandOver(b"T", reply.fence, left)]


def test_a_few_entries_are_found_among_many_that_are_parked(world: World) -> None:
    """The look at what is parked has a limit; beyond it every id is asked for."""
    leader, a = world.elect(), world.join("a")
    ids = world.send_many([b"T%d" % n for n in range(500)])
    fetch(leader, 1000)
    assert states(leader.hand_over(plan(a, {b"T499": [ids[499]], b"T0": [ids[0]]}))) == ["OK"]
    assert world.pending()[a.name] == [ids[0], ids[499]]


def test_fences_never_fall_when_redis_lost_its_tail(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"T")
    first = int(world.head(b"T").split()[1])
    world.link.call("HSET", world.keys.counters, "fence", first - 100_000)
    world.owned(leader, a, b"U")
    assert int(world.head(b"U").split()[1]) >= first


def test_an_empty_plan_changes_nothing(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    with world.unchanged():
        assert leader.hand_over(plan(a, {})).targets == (("OK", [], [], []),)
        assert leader.hand_over(plans()).targets == ()
