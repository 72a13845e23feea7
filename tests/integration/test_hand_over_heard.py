"""hand_over.lua takes news that were heard: as if they had been seen, or not at all when here something else comes
next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.factories import FIELD, TRICKY_IDS, Owner, World, fetch, hear, plan, plans, read, take
from tests.integration.memory import full_memory
from usher.common.base.errors import Fenced, NotNow
from usher.common.redis.replies import Entry, HandOver, pairs, parse_own
from usher.master.leader.entries import NewEntries, PeekedEntry
from usher.master.leader.leader_scripts import LeaderScripts, NotificationMismatch, RulesMoved
from usher.master.policy.board.plans import NOTHING

_HIGHEST = b"18446744073709551615-18446744073709551615"
_HERE = (b"1-1", b"2-1", b"3-1", b"4-1")
_TICKET = FIELD.encode()


def _position(world: World) -> bytes:
    return world.stream.last_delivered()


def _as_heard(*ids: bytes) -> list[Entry]:
    return [Entry(entry_id, [_TICKET, b"T", b"body", b"x"]) for entry_id in ids]


# ---- what becomes of the news ----


@pytest.mark.parametrize("how", ["seen", "heard"])
def test_heard_news_become_their_owners_or_masters_as_seen_ones_do(world: World, how: str) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    to_a, left, to_b = world.send(b"T", b"1-1", b"1-10"), world.send(b"V", b"2-1"), world.send(b"U", b"3-1", b"10-1")
    news = read(leader, 100) if how == "seen" else hear(world, leader)
    assert bool(news.digest) == (how == "heard")
    planned = plans((a, {b"T": to_a}), (b, {b"U": to_b}))
    reply = take(leader, planned, news) if how == "heard" else leader.hand_over(planned, news)
    assert reply.targets == (("OK", [], [], []),) * 2
    assert world.pending() == {a.name: to_a, b"master": left, b.name: to_b}
    assert (world.record(b"T"), world.record(b"U")) == ((a.name, reply.fence, to_a), (b.name, reply.fence, to_b))
    assert (world.inbox(a), world.inbox(b)) == (
        [HandOver(b"T", reply.fence, to_a)],
        [HandOver(b"U", reply.fence, to_b)],
    )
    assert (_position(world), read(leader, 100).found) == (b"10-1", [])
    assert world.deliveries() == dict.fromkeys(to_a + left + to_b, 1)
    facts = pairs(world.link.call("XINFO", "GROUPS", world.keys.stream)[0])
    assert (facts.get(b"lag", 0), facts.get(b"entries-read", 5)) == (0, 5)


def test_heard_news_without_a_plan_are_under_master_and_are_handed_over_later(
    world: World,
) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T", *TRICKY_IDS)
    take(leader, NOTHING, hear(world, leader))
    assert (world.pending(), _position(world)) == ({b"master": ids}, ids[-1])
    leader.hand_over(plan(a, {b"T": ids}))
    assert world.pending() == {a.name: ids}


def test_what_came_after_the_last_heard_does_not_matter_and_comes_next(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T", b"1-1", b"2-1")
    news = hear(world, leader)
    later = world.send(b"T", b"2-2", b"10-1")
    take(leader, plan(a, {b"T": ids}), news)
    assert (world.pending(), _position(world)) == ({a.name: ids}, ids[-1])
    assert [found.id for found in read(leader, 100).found] == later


def test_heard_news_go_together_with_what_is_parked(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    owned, parked = world.owned(leader, a, b"T", b"1-1"), world.parked(leader, b"T", b"99-9", b"999-10")
    head, others = world.head(b"T"), world.parked(leader, b"U", b"1000-0")
    new, left = world.send(b"T", b"1000-1", b"10000-1"), world.send(b"V", b"10000-2")
    reply = take(leader, plan(a, {b"T": parked + new, b"U": others}, {b"T": head}), hear(world, leader))
    assert reply.targets == (("OK", [], [], []),)
    assert world.pending() == {a.name: owned + parked + others + new, b"master": left}
    assert _position(world) == left[-1]


def test_an_entry_at_the_highest_id_is_taken(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T", b"1-1", _HIGHEST)
    news = hear(world, leader)
    assert [found.id for found in news.found] == ids
    take(leader, plan(a, {b"T": ids}), news)
    assert (world.pending(), _position(world)) == ({a.name: ids}, _HIGHEST)
    with world.unchanged(), pytest.raises(NotificationMismatch):
        take(leader, plan(a, {b"T": ids}), news)


# ---- what is refused as a whole ----


def _calls(
    world: World, leader: LeaderScripts, a: Owner, news: Callable[[], NewEntries]
) -> Iterator[Callable[[], object]]:
    """The ways to take these news: all planned, some, none, none of a target, with what is parked."""
    parked = world.parked(leader, b"P", b"0-1")
    taken = news()
    ids = [found.id for found in taken.found]
    for parts in ({b"T": ids}, {b"T": ids[:1]}, {b"T": ids[-1:]}, {}, {b"P": parked, b"T": ids[1:]}, {b"P": parked}):
        yield lambda parts=parts: leader.hand_over(plan(a, parts), taken)  # type: ignore[misc]
    yield lambda: leader.hand_over(NOTHING, taken)


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param((b"1-1", b"3-1", b"4-1"), id="one in between was not heard"),
        pytest.param((b"2-1", b"3-1", b"4-1"), id="the first was not heard"),
        pytest.param((b"4-1",), id="only the last was heard"),
        pytest.param((*_HERE, b"5-1"), id="one behind the last does not exist here"),
        pytest.param((b"1-1", b"1-2", *_HERE[1:]), id="one in between does not exist here"),
        pytest.param((b"0-2", *_HERE), id="one before the first does not exist here"),
        pytest.param((b"1-1", b"2-2", b"3-1", b"4-1"), id="as many, one in between is another"),
        pytest.param((b"1-2", b"2-1", b"3-1", b"4-1"), id="as many, the first is another"),
        pytest.param((*_HERE[:3], b"4-2"), id="as many, the last is another"),
        pytest.param((b"1-2", b"2-2", b"3-2", b"4-2"), id="as many, all are others"),
        pytest.param((b"7-1", b"8-1"), id="others, above all that is here"),
        pytest.param((b"0-2", b"0-3"), id="others, below all that is here"),
    ],
)
def test_nothing_is_taken_when_what_was_heard_is_not_what_comes_next_here(world: World, ids: Sequence[bytes]) -> None:
    leader, a = world.elect(), world.join("a")
    for call in _calls(world, leader, a, lambda: leader.notified(b"0-1", _as_heard(*ids), 100)):
        if world.link.call("XLEN", world.keys.stream) == 1:
            world.send(b"T", *_HERE)
        with world.unchanged(), pytest.raises(NotificationMismatch):
            call()
    fetch(leader, 100)


@pytest.mark.parametrize("which", range(4))
def test_nothing_is_taken_when_one_of_the_heard_was_deleted_since(world: World, which: int) -> None:
    leader, a = world.elect(), world.join("a")

    def news() -> NewEntries:
        world.send(b"T", *_HERE)
        heard = hear(world, leader)
        world.delete(_HERE[which])
        return heard

    for call in _calls(world, leader, a, news):
        with world.unchanged(), pytest.raises(NotificationMismatch):
            call()


@pytest.mark.parametrize(
    "other",
    [
        (FIELD, b"other", "body", b"body of 2-1"),
        (FIELD, b"T", "body", b"other"),
        (FIELD, b"T", "body", b"body of 2-1", b"more", b""),
        (FIELD, b"T" + b"body", "", b"body of 2-1"),
        ("body", b"body of 2-1"),
    ],
)
def test_nothing_is_taken_when_an_entry_of_that_id_is_another_one_here(
    world: World, other: Sequence[bytes | str]
) -> None:
    """Under the ticket that it has at the other server it could be run beside its own."""
    leader, a = world.elect(), world.join("a")
    first, second = world.send(b"T", b"1-1", b"2-1")
    news = hear(world, leader)
    world.link.call("DEL", world.keys.stream)
    world.make_group()
    world.send(b"T", first)
    world.add(second, *other)
    with world.unchanged(), pytest.raises(NotificationMismatch):
        leader.hand_over(plan(a, {b"T": [first, second]}), news)


@pytest.mark.parametrize("position", [b"0-0", b"0-2", b"1-1", b"2-1", b"4-1", b"9-9", _HIGHEST])
def test_nothing_is_taken_when_the_group_is_elsewhere(world: World, position: bytes) -> None:
    leader, a = world.elect(), world.join("a")

    def news() -> NewEntries:
        world.send(b"T", *_HERE)
        heard = hear(world, leader)
        world.link.call("XGROUP", "SETID", world.keys.stream, world.keys.group, position)
        return heard

    for call in _calls(world, leader, a, news):
        with (
            world.unchanged(),
            pytest.raises(NotificationMismatch, match=f"was at 0-1, and is at {position.decode()}$"),
        ):
            call()


@pytest.mark.parametrize("old", [(b"2-1",), (b"2-1", b"3-1")])
def test_what_the_plan_takes_for_parked_does_not_make_up_for_what_was_not_heard(
    world: World, old: Sequence[bytes]
) -> None:
    leader, a = world.elect(), world.join("a")
    world.send(b"T", *_HERE)
    others = [b"2-2", b"3-2"]
    for ids in (
        [one for one in _HERE if one not in old],
        [b"1-1", *others[: len(old)], *(one for one in _HERE[1:] if one not in old)],
    ):
        news = leader.notified(b"0-0", _as_heard(*ids), 100)
        for planned in ([b"1-1"], ids):
            parts = {b"O": list(old), b"T": planned}
            with world.unchanged(), pytest.raises(NotificationMismatch):
                leader.hand_over(plan(a, parts), news)


def test_a_deposed_leader_takes_nothing_that_it_heard(world: World, depose: Callable[[LeaderScripts], None]) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T", *_HERE)
    news = hear(world, leader)
    depose(leader)
    with world.unchanged(), pytest.raises(Fenced):
        leader.hand_over(plan(a, {b"T": ids}), news)


def test_a_leader_that_does_not_know_the_rules_takes_nothing_that_it_heard(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T", *_HERE)
    news = hear(world, leader)
    world.link.call("HSET", world.keys.counters, "rules", "7")
    with world.unchanged(), pytest.raises(RulesMoved):
        leader.hand_over(plan(a, {b"T": ids}), news)


def test_when_memory_is_full_heard_news_are_not_taken_and_later_they_are(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T", *_HERE)
    news = hear(world, leader)
    with full_memory(world.link), world.unchanged(), contextlib.suppress(NotNow):
        leader.hand_over(plan(a, {b"T": ids}), news)
    leader.hand_over(plan(a, {b"T": ids}), news)
    assert world.pending() == {a.name: ids}


# ---- what is heard is what is seen ----

_WORDS = st.sampled_from([_TICKET, b"T", b"", b"body", b"x" * 40]) | st.binary(max_size=12)
_ENTRIES = st.lists(st.lists(st.tuples(_WORDS, _WORDS), min_size=1, max_size=4), max_size=6)


def _expected(entry_id: bytes, fields: Sequence[tuple[bytes, bytes]], longest: int) -> PeekedEntry:
    ticket = next((value for name, value in fields if name == _TICKET), None)
    size = sum(len(name) + len(value) for name, value in fields)
    return PeekedEntry(entry_id, ticket or b"", size) if longest and size > longest else PeekedEntry(entry_id, ticket)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    entries=_ENTRIES,
    longest=st.sampled_from([0, 1, 20, 60, 200]),
    count=st.integers(1, 8),
    given_up_to=st.sampled_from([b"0-0", b"1-1", b"2-5"]),
)
def test_whatever_is_in_them_the_same_is_heard_as_seen(
    world: World, entries: list[list[tuple[bytes, bytes]]], longest: int, count: int, given_up_to: bytes
) -> None:
    world.link.call("DEL", world.keys.stream)
    world.make_group()
    for n, fields in enumerate(entries):
        world.link.call("XADD", world.keys.stream, b"%d-1" % (n + 1), *(part for pair in fields for part in pair))
    world.link.call("XGROUP", "SETID", world.keys.stream, world.keys.group, given_up_to)
    world.link.call("DEL", world.keys.leader, world.keys.taken)
    leader = LeaderScripts(world.scripts, world.keys, world.elect().epoch, FIELD, longest_message=longest)
    skipped = int(given_up_to.partition(b"-")[0])
    expected = [_expected(b"%d-1" % (n + 1), fields, longest) for n, fields in enumerate(entries)][skipped:]
    heard, some = hear(world, leader), hear(world, leader, count)
    assert (heard.position, heard.found, heard.is_all) == (given_up_to, expected, True)
    assert (some.position, some.found, some.is_all) == (given_up_to, expected[:count], len(expected) <= count)
    seen = read(leader, count)
    assert (seen.position, seen.found, seen.size, seen.bodies) == (given_up_to, some.found, some.size, some.bodies)
    assert seen.is_all == (len(expected) < count)


def test_of_what_was_heard_no_more_is_news_than_asked_for_and_that_is_taken(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    ids = world.send(b"T", *_HERE)
    entries = parse_own(world.link.call("XREAD", "STREAMS", world.keys.stream, b"0-0"))
    assert [leader.notified(b"0-0", entries, count).is_all for count in (1, 3, 4, 5)] == [False, False, True, True]
    take(leader, plan(a, {b"T": ids[:3]}), leader.notified(b"0-0", entries, 3))
    assert (world.pending(), _position(world)) == ({a.name: ids[:3]}, ids[2])
    assert (hear(world, leader).position, hear(world, leader).found) == (ids[2], [PeekedEntry(ids[3], b"T")])
