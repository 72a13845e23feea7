"""hand_over.lua takes the news of a peek: each of them is its owner's or under ``master`` afterwards, and the group is
behind the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.integration.factories import NASTY_TICKETS, TRICKY_IDS, World, hear, plan, plans, read, states
from usher.common.redis.replies import HandOver, pairs, unpack_bodies
from usher.master.policy.board.plans import NOTHING


def _position(world: World) -> bytes:
    """The last id that the group was given."""
    [group] = [pairs(one) for one in world.link.call("XINFO", "GROUPS", world.keys.stream)]
    return bytes(group[b"last-delivered-id"])


# ---- what becomes of the news ----


def test_news_that_are_planned_are_their_owners_at_once(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T", *TRICKY_IDS)
    reply = leader.hand_over(plan(a, {b"T": ids}), read(leader, 100))
    assert reply.targets == (("OK", [], [], []),)
    assert world.pending() == {a.name: ids}
    assert world.record(b"T") == (a.name, reply.fence, ids)
    assert world.inbox(a) == [HandOver(b"T", reply.fence, ids)]
    assert _position(world) == ids[-1]
    assert read(leader, 100).found == []


def test_each_owner_is_told_the_bodies_of_its_news_in_id_order(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    [parked] = world.parked(leader, b"P", b"1-1")
    [first], [second] = world.send(b"T", b"2-1"), world.send(b"U", b"9-2")
    [third], _ = world.send(b"X", b"10-1"), world.send(b"V", b"11-1")
    parts = (a, {b"U": [second], b"P": [parked], b"T": [first]}), (b, {b"X": [third]})
    leader.hand_over(plans(*parts), hear(world, leader))
    [to_a], [to_b] = (world.inbox_records(owner.incarnation) for owner in (a, b))
    assert list(unpack_bodies(to_a.blob) or ()) == [first, second]
    assert unpack_bodies(to_b.blob) == {third: dict(world.link.call("XRANGE", world.keys.stream, third, third))[third]}


def test_news_that_are_taken_count_as_delivered_once_as_if_they_had_been_read(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    planned, left = world.send(b"T", b"1-1"), world.send(b"U", b"2-1")
    leader.hand_over(plan(a, {b"T": planned}), read(leader, 100))
    assert world.deliveries() == dict.fromkeys(planned + left, 1)
    assert all(idle_ms < 10_000 for _, _, idle_ms, _ in world.pending_rows())
    leader.hand_over(plan(a, {b"U": left}))
    assert world.deliveries() == dict.fromkeys(planned + left, 1)


def test_news_that_are_not_planned_are_under_master_and_are_handed_over_later(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    first, second, third, fourth = ids = [b"999-10", b"1000-1", b"1000-2", b"1001-0"]
    for ticket, entry_id in zip((b"T", b"U", b"T", b"U"), ids, strict=True):
        world.send(ticket, entry_id)
    leader.hand_over(plan(a, {b"T": [first]}), read(leader, 100))
    assert world.pending() == {a.name: [first], b"master": [second, third, fourth]}
    assert _position(world) == fourth
    leader.hand_over(plan(a, {b"U": [second, fourth], b"T": [third]}, {b"T": world.head(b"T")}))
    assert world.pending() == {a.name: ids}


@pytest.mark.parametrize("parts", [None, {}])
def test_with_a_plan_of_nothing_all_news_are_under_master(
    world: World, parts: Mapping[bytes, Sequence[bytes]] | None
) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T", *TRICKY_IDS)
    reply = leader.hand_over(NOTHING if parts is None else plan(a, parts), read(leader, 100))
    assert (reply.fence, [target.state for target in reply.targets]) == (0, [] if parts is None else ["OK"])
    assert world.pending() == {b"master": ids}
    assert (world.state().index, world.inbox(a), _position(world)) == ({}, [], ids[-1])
    assert world.link.call("HGET", world.keys.counters, "fence") is None


def test_only_what_was_seen_is_taken_what_came_since_comes_next(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T", *TRICKY_IDS)
    news = read(leader, 4)
    later = world.send(b"T", b"18446744073709551-18446744073709552")
    leader.hand_over(plan(a, {b"T": ids[:2]}), news)
    assert (world.pending(), _position(world)) == ({a.name: ids[:2], b"master": ids[2:4]}, ids[3])
    assert [found.id for found in read(leader, 100).found] == ids[4:] + later


def test_old_and_new_entries_of_a_ticket_go_together_in_order_and_its_fence_is_kept(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    owned = world.owned(leader, a, b"T", b"1-1")
    head, fence = world.head(b"T"), int(world.head(b"T").split()[1])
    parked, new = world.parked(leader, b"T", b"99-9", b"999-10"), world.send(b"T", b"1000-1", b"10000-1")
    other = world.send(b"U", b"10000-2")
    reply = leader.hand_over(plan(a, {b"T": parked + new, b"U": other}, {b"T": head}), read(leader, 100))
    assert reply.targets == (("OK", [], [], []),)
    assert world.record(b"T") == (a.name, fence, owned + parked + new)
    assert sorted(world.inbox(a)[1:]) == [HandOver(b"T", fence, parked + new), HandOver(b"U", reply.fence, other)]
    assert (world.pending(), _position(world)) == ({a.name: owned + parked + new + other}, other[-1])


def test_old_entries_alone_may_go_while_all_news_stay(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    parked, new = world.parked(leader, b"T", b"1-1", b"2-1"), world.send(b"T", b"3-1")
    leader.hand_over(plan(a, {b"T": parked})._replace(lowest=parked[0], highest=parked[-1]), read(leader, 100))
    assert (world.pending(), _position(world)) == ({a.name: parked, b"master": new}, new[-1])


def test_thousands_of_old_and_of_new_entries_go_to_two_owners_and_thousands_stay(world: World) -> None:
    """A few thousand ids are what one command takes: every list here is longer."""
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    old = world.send_many([b"T"] * 4500)
    leader.hand_over(NOTHING, read(leader, 10_000))
    names = [b"T"] * 9000 + [b"U%d" % n for n in range(4001)] + [b"V"] * 2500
    ids = world.send_many(names)
    to_a, to_b = (
        {b"T": old + ids[:9000]},
        {name: [one] for name, one in zip(names[9000:13_001], ids[9000:13_001], strict=True)},
    )
    assert states(leader.hand_over(plans((a, to_a), (b, to_b)), read(leader, 20_000))) == ["OK", "OK"]
    assert world.pending() == {a.name: to_a[b"T"], b.name: ids[9000:13_001], b"master": ids[13_001:]}
    assert ({part.ticket: part.ids for part in world.inbox(a)}, {part.ticket: part.ids for part in world.inbox(b)}) == (
        to_a,
        to_b,
    )
    assert _position(world) == ids[-1]


def test_tickets_of_any_bytes_go_in_one_call(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    parts = {name: world.send(name) for name in NASTY_TICKETS}
    leader.hand_over(plan(a, parts), read(leader, 100))
    assert {part.ticket: part.ids for part in world.inbox(a)} == parts
    assert world.state().index.keys() == parts.keys()


# ---- what is refused ----


@pytest.mark.parametrize("state", ["LOST", "DRAINING", "REVOKED"])
def test_the_news_of_a_target_that_takes_nothing_are_under_master_and_others_get_theirs(
    world: World, state: str
) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    parked = world.parked(leader, b"T", b"1-1")
    first, theirs, left = world.send(b"T", b"2-1"), world.send(b"V", b"3-1"), world.send(b"W", b"4-1")
    second = world.send(b"U", b"5-1", b"6-1")
    news = read(leader, 100)
    world.refuse(leader, a, state)
    reply = leader.hand_over(plans((a, {b"T": parked + first, b"U": second}), (b, {b"V": theirs})), news)
    assert [(target.state, target.refused) for target in reply.targets] == [(state, []), ("OK", [])]
    assert world.pending() == {b"master": parked + first + left + second, b.name: theirs}
    assert (world.inbox(a), world.state().index.keys(), _position(world)) == ([], {b"V"}, second[-1])


@pytest.mark.parametrize("state", ["LOST", "DRAINING", "REVOKED"])
def test_when_the_only_target_takes_nothing_all_news_are_under_master(world: World, state: str) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send_many([b"T%d" % (n % 7) for n in range(4100)])
    news = read(leader, 10_000)
    world.refuse(leader, a, state)
    parts = {b"T%d" % n: ids[n::7] for n in range(7)}
    assert states(leader.hand_over(plan(a, parts), news)) == [state]
    assert (world.pending(), world.state().index, _position(world)) == ({b"master": ids}, {}, ids[-1])


@pytest.mark.parametrize(
    "value", [b"b:1 5 1-1", b"%s 4 1-1", b"returned 4 1-1", b"halted 5 1-1", b"tail 5 1-1", b"garbage", b""]
)
def test_the_news_of_a_ticket_that_is_refused_are_under_master_and_others_go_on(world: World, value: bytes) -> None:
    leader, a = world.elect(), world.join("a")
    world.spoil(b"T", value.replace(b"%s", a.name))
    refused, good = world.send(b"T", b"2-1", b"4-1"), world.send(b"U", b"5-1", b"6-1")
    reply = leader.hand_over(plan(a, {b"U": good, b"T": refused}, {b"T": a.name + b" 5"}), read(leader, 100))
    assert reply.targets == (("OK", [b"T"], [], []),)
    assert (world.pending(), _position(world)) == ({b"master": refused, a.name: good}, good[-1])
    assert world.inbox(a) == [HandOver(b"U", reply.fence, good)]
    world.apart_because = "the record was written by hand" if world.broken() else ""


def test_a_returned_ticket_is_refused_the_news_alone_and_gets_them_behind_what_was_given_back(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    ids = world.owned(leader, a, b"T", b"1-1", b"2-1")
    a.steps.drain(60_000)
    world.give_back(a, {b"T": ids})
    first = world.send(b"T", b"3-1")
    reply = leader.hand_over(plan(b, {b"T": first}, {b"T": world.head(b"T")}), read(leader, 100))
    assert (reply.targets, world.pending()) == ((("OK", [b"T"], [], []),), {b"master": ids + first})
    second = world.send(b"T", b"4-1")
    reply = leader.hand_over(plan(b, {b"T": ids + first + second}, {b"T": world.head(b"T")}), read(leader, 100))
    assert (reply.targets, world.pending()) == ((("OK", [], [], []),), {b.name: ids + first + second})
    assert (world.record(b"T"), _position(world)) == ((b.name, reply.fence, ids + first + second), second[-1])


def test_an_old_id_that_is_another_owners_refuses_the_target_whole_with_its_news(world: World) -> None:
    leader, a, b, c = world.elect(), world.join("a"), world.join("b"), world.join("c")
    taken = world.owned(leader, a, b"T", b"1-1")
    parked, first, second = world.parked(leader, b"U", b"2-1"), world.send(b"U", b"3-1"), world.send(b"W", b"4-1")
    refused, theirs = world.send(b"T", b"5-1"), world.send(b"V", b"6-1")
    targets = plans((b, {b"U": parked + first, b"T": refused, b"X": taken, b"W": second}), (c, {b"V": theirs}))
    assert states(leader.hand_over(targets, read(leader, 100))) == ["STRAY", "OK"]
    assert world.pending() == {a.name: taken, b"master": parked + first + second + refused, c.name: theirs}
    assert (world.inbox(b), _position(world)) == ([], theirs[-1])


def test_a_ticket_twice_in_a_plan_is_handed_over_once_the_other_news_are_under_master(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    first, second = world.send(b"T", b"1-1", b"2-1")
    reply = leader.hand_over(plans((a, {b"T": [first]}), (b, {b"T": [second]})), read(leader, 100))
    assert [target.refused for target in reply.targets] == [[], [b"T"]]
    assert (world.pending(), _position(world)) == ({a.name: [first], b"master": [second]}, second)


# ---- what is not there any more ----


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_planned_entry_that_was_deleted_since_is_a_dead_letter_and_the_rest_is_handed_over(
    world: World, which: int
) -> None:
    leader, a = world.elect(), world.join("a")
    ids, alone = world.send(b"T", b"1-1", b"2-1", b"3-1"), world.send(b"U", b"4-1")
    news = read(leader, 100)
    world.delete(ids[which], *alone)
    reply = leader.hand_over(plan(a, {b"T": ids, b"U": alone}), news)
    left = [one for one in ids if one != ids[which]]
    assert reply.targets == (("OK", [], [ids[which], *alone], []),)
    assert (world.pending(), world.inbox(a)) == ({a.name: left}, [HandOver(b"T", reply.fence, left)])
    assert (world.state().index.keys(), _position(world)) == ({b"T"}, b"4-1")
    assert world.state().letters() == [(ids[which], b"T", b"body_gone"), (alone[0], b"U", b"body_gone")]


def test_a_deleted_entry_of_a_ticket_that_its_owner_goes_on_with_leaves_the_record_as_it_was(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    owned = world.owned(leader, a, b"T")
    record, inbox, lost = world.record(b"T"), world.inbox(a), world.send(b"T")
    news = read(leader, 100)
    world.delete(*lost)
    reply = leader.hand_over(plan(a, {b"T": lost}, {b"T": world.head(b"T")}), news)
    assert reply.targets == (("OK", [], lost, []),)
    assert (world.record(b"T"), world.inbox(a), world.pending()) == (record, inbox, {a.name: owned})
    assert (world.state().letters(), _position(world)) == ([(lost[0], b"T", b"body_gone")], lost[0])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_entry_that_is_left_and_was_deleted_since_is_pending_for_nobody(world: World, which: int) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T", b"1-1", b"2-1", b"3-1")
    news = read(leader, 100)
    world.delete(ids[which])
    leader.hand_over(NOTHING, news)
    assert world.pending() == {b"master": [one for one in ids if one != ids[which]]}
    assert (_position(world), world.dead()) == (ids[-1], [])
    assert world.link.call("HGET", world.keys.counters, "unread_cut") == b"1"
    reply = leader.hand_over(plan(a, {b"T": ids}))
    assert reply.targets == (("OK", [], [ids[which]], []),), "the leader knew it, and learns that it is over"


@pytest.mark.parametrize("how", ["deleted", "trimmed"])
def test_when_all_news_are_gone_nobody_has_them(world: World, how: str) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T", b"1-1", b"2-1")
    news = read(leader, 100)
    if how == "deleted":
        world.delete(*ids)
    else:
        world.link.call("XTRIM", world.keys.stream, "MAXLEN", 0)
    leader.hand_over(plan(a, {b"T": ids[:1]}), news)
    assert (world.pending(), world.state().index, world.inbox(a), _position(world)) == ({}, {}, [], ids[-1])
    assert [entry_id for entry_id, _, _ in world.state().letters()] == ids[:1]


def test_new_entries_are_read_and_claimed_with_the_commands_of_streams(world: World) -> None:
    """XREADGROUP and XCLAIM carry them; the group's position is never set."""
    leader, a = world.elect(), world.join("a")
    ids = world.send_many([b"T"] * 2000)
    world.link.call("CONFIG", "RESETSTAT")
    leader.hand_over(plan(a, {b"T": ids[:1000]}), read(leader, 2000))
    told = world.link.call("INFO", "commandstats")
    assert b"cmdstat_xreadgroup:calls=1," in told and b"cmdstat_xclaim:calls=" in told
    assert b"xgroup" not in told
    assert (len(world.pending()[a.name]), len(world.pending()[b"master"]), _position(world)) == (1000, 1000, ids[-1])


def test_an_entry_that_comes_again_and_is_deleted_meanwhile_does_not_let_an_unseen_one_be_skipped(
    world: World,
) -> None:
    """Redis before 7 claims what is pending although its body is gone: the count of what was claimed proves nothing."""
    leader, a = world.elect(), world.join("a")
    ids = world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.link.call("XGROUP", "SETID", world.keys.stream, world.keys.group, "0")
    news = read(leader, 100)
    world.delete(ids[1])
    later = world.send(b"U", b"3-1")
    leader.hand_over(NOTHING, news)
    assert [found.id for found in read(leader, 100).found] == later
    world.apart_because = "the entries that came again have yet to rejoin their owner"
