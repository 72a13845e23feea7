"""index.lua, count_letters.lua, recount_letters.lua: the dead letters are counted and found without a scan, whatever
becomes of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.doors import acting
from tests.integration.factories import Owner, World, bury
from usher.common.base.errors import NotNow
from usher.common.readers.loop import ReliableStream
from usher.consumer.lifecycle.owner_scripts import Buried, Letter
from usher.master.leader.entries import Rejected
from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.operations.action_log import By
from usher.master.operations.shelves import DeadLetters
from usher.master.policy.letters import SUDDEN_MS, LetterFilter
from usher.master.recovery.repairs import PAGE
from usher.master.verbs.verbs import LETTERS, Args, BulkJobs


@pytest.fixture
def letters(world: World) -> DeadLetters:
    return DeadLetters(world.link, world.keys)


def _give_up(world: World, a: Owner, ticket: bytes, ids: list[bytes], **facts: Any) -> None:
    told = {"error_type": "KeyError", "at": "shop.py:4", "handler": "shop:sell"} | facts
    letter = Letter(ticket, ids[0], "gave_up", "KeyError: 'x'", 1, 1, 2, **told)
    assert bury(a.steps, letter) in (Buried.OK, Buried.HALTED)


def _seen(letters: DeadLetters) -> dict[tuple[str, str], int]:
    counts = letters.counts()
    assert counts.are_all
    assert sum(group.count for group in counts.groups) == counts.letters
    return {(group.why, group.policy): group.count for group in counts.groups}


def test_each_way_that_a_letter_comes_and_goes_is_counted(world: World, letters: DeadLetters) -> None:
    leader, a, b, ids = world.elect(), world.join("a"), world.join("b"), map(b"%d-1".__mod__, itertools.count(1))
    for ticket, policy in ((b"S", "skip"), (b"H", "halt")):
        [one] = world.owned(leader, a, ticket, next(ids))
        record = world.record(ticket)
        assert record is not None
        _give_up(world, a, ticket, [one], policy=policy, fence=record.fence)
    world.parked(leader, b"", reject := next(ids))
    leader.reject([Rejected(reject, b"", "empty_ticket_id")])
    lost = world.owned(leader, b, b"L", next(ids))
    world.delete(*lost)
    world.end_lease(b)
    leader.take_back(b.incarnation, 10)
    gave_up = "gave_up: KeyError in shop.py:4"
    by_hand = {("empty_ticket_id", "skip"): 1, ("body_gone", "skip"): 1}
    assert _seen(letters) == {(gave_up, "skip"): 1, (gave_up, "halt"): 1} | by_hand
    of_h = letters.newest(LetterFilter(b"H"), None, 9, 0.0).letters
    assert [letters.redrive([one.id])[0].word for one in of_h] == ["resumed"]
    assert letters.drop([one.id for one in letters.page(LetterFilter(), None, 99).letters])
    assert _seen(letters) == {}
    assert world.link.call("EXISTS", world.keys.letters) == 0, "nothing is kept of what is gone"


def test_the_letters_of_plain_readers_are_counted(world: World, letters: DeadLetters) -> None:
    reader = ReliableStream(world.link, world.keys.stream, world.keys.group, "r")
    world.send(b"T", b"1-1", b"2-1")
    messages = reader.read_new(2, 10)
    reader.move_to_dead_letters(messages, "order 123456\n is none")
    assert _seen(letters) == {("order #  is none", "skip"): 2}, "a number of each message is no kind of its own"


def _many(world: World, tickets: list[bytes], **facts: Any) -> tuple[LeaderScripts, Owner]:
    leader, a = world.elect(), world.join("a")
    for number, ticket in enumerate(tickets, 1):
        ids = world.owned(leader, a, ticket, b"%d-1" % number)
        _give_up(world, a, ticket, ids, **{name: value % number for name, value in facts.items()})
    return leader, a


def test_kinds_without_bound_are_counted_together(world: World, letters: DeadLetters) -> None:
    _many(world, [b"T%d" % number for number in range(205)], error_type="E%d")
    counts = letters.counts()
    assert (counts.letters, counts.are_all, len(counts.groups)) == (205, True, 201)
    [others] = [group for group in counts.groups if group.id == "others"]
    assert (others.count, others.error_type) == (5, "further kinds: the index tells the first 200 apart")
    found = letters.page(LetterFilter(group="others"), None, 99).letters
    assert [one.error_type for one in found] == ["E201", "E202", "E203", "E204", "E205"]
    letters.drop([one.id for one in found])
    assert len(letters.counts().groups) == 200


def test_the_letters_of_a_ticket_a_message_and_a_kind_are_one_read_each(
    world: World, letters: DeadLetters, monkeypatch: pytest.MonkeyPatch
) -> None:
    _many(world, [b"T%d" % (number % 7) for number in range(120)])
    last, call, trips = letters.newest(LetterFilter(), None, 1, 0.0).letters[0], world.link.call, list[object]()
    monkeypatch.setattr(world.link, "call", lambda *command: (trips.append(command), call(*command))[1])
    assert len(letters.newest(LetterFilter(b"T3"), None, 50, 0.0).letters) == 17
    assert len(letters.page(LetterFilter(group=letters.counts().groups[0].id), None, 50).letters) == 50
    assert letters.parked_for([b"T3"]) == {}
    assert len(trips) == 4
    found = letters.of_message(last.message_id)
    assert found is not None
    assert found.id == last.id


def test_the_letters_of_a_ticket_come_in_their_order_and_page_by_page(world: World, letters: DeadLetters) -> None:
    _many(world, [b"T", b"U"] * 6)
    oldest = [one.id for one in letters.page(LetterFilter(b"T"), None, 99).letters]
    assert oldest == world.letter_ids()[::2]
    first = letters.page(LetterFilter(b"T"), None, 4)
    rest = letters.page(LetterFilter(b"T"), first.cursor, 4, oldest[-2])
    assert [one.id for one in (*first.letters, *rest.letters)] == oldest[:5]
    newest = letters.newest(LetterFilter(b"T"), oldest[3], 2, 0.0)
    assert [one.id for one in newest.letters] == [oldest[2], oldest[1]]
    for narrow, number in (({"before_ms": 1}, 0), ({"group": "0" * 12}, 0), ({"after_ms": 1}, 1)):
        found = letters.page(LetterFilter(id=oldest[0], **narrow), None, 9).letters
        assert len(found) == number, "the other conditions hold for a letter's own id too"


def test_a_bulk_action_on_a_kind_touches_what_the_page_counts_of_it_and_nothing_else(
    world: World, letters: DeadLetters
) -> None:
    """The button beside 147 acted on 5,600: all whose error's name and place were as these, whatever their handler."""
    leader, a = _many(world, [b"T", b"U", b"V"])
    ids = world.owned(leader, a, b"W", b"9-1")
    _give_up(world, a, b"W", ids, handler="other:sell")
    group = next(one for one in letters.counts().groups if one.handler == "other:sell")
    bulk, tools, wanted = (
        BulkJobs(),
        acting(world.link, world.keys, By("me", "http", "why")),
        LetterFilter(group=group.id),
    )
    found = LETTERS.dry_run(tools, wanted, 0)
    assert (found.preview.count, group.count) == (1, 1)
    job = bulk.begin(LETTERS.verbs["redrive"], tools, Args(), wanted, "told", found.until, 1)
    while job.state == "running":
        bulk.run_once()
    assert [(one.handler, one.count) for one in letters.counts().groups] == [("shop:sell", 3)]


def _mended(leader: LeaderScripts) -> int:
    place, calls = b"", 0
    while (place := leader.recount_letters(place, PAGE)) or not calls:
        calls += 1
    return calls


def test_a_recount_leaves_the_index_whole_until_it_has_another(world: World, letters: DeadLetters) -> None:
    leader, a = _many(world, [b"T%d" % number for number in range(150)])
    world.link.call("ZREM", world.keys.letters, *world.link.call("ZRANGEBYLEX", world.keys.letters, "[m", "(m4")[:1])
    place, ids = leader.recount_letters(b"", 100), world.letter_ids()
    letters.drop([ids[0]])
    _give_up(world, a, b"N", world.owned(leader, a, b"N", b"900-1"))
    assert len(letters.counts().groups) == 1, "what is there is not taken away"
    assert leader.recount_letters(place, 100) == b""
    counts = letters.counts()
    assert (counts.are_all, counts.letters, counts.groups[0].count) == (True, 150, 150)
    assert letters.page(LetterFilter(b"T0"), None, 9).letters == []
    assert world.link.call("EXISTS", world.keys.recounted) == 0


@pytest.mark.parametrize("how", ["index deleted", "another type", "letters deleted", "letters trimmed", "letter added"])
def test_what_was_done_by_hand_is_told_and_a_recount_mends_it(world: World, letters: DeadLetters, how: str) -> None:
    leader, _ = _many(world, [b"T%d" % number for number in range(1200)] if how == "index deleted" else [b"T", b"U"])
    link, keys = world.link, world.keys
    {
        "index deleted": lambda: link.call("DEL", keys.letters),
        "another type": lambda: link.all_of([("DEL", keys.letters), ("SET", keys.letters, "x")]),
        "letters deleted": lambda: link.call("XDEL", keys.dead, world.letter_ids()[0]),
        "letters trimmed": lambda: link.call("XTRIM", keys.dead, "MAXLEN", 0),
        "letter added": lambda: link.call("XADD", keys.dead, "*", "a", "b"),
    }[how]()
    assert not letters.counts().are_all
    ids, newest = world.letter_ids(), LetterFilter(b"T0" if how == "index deleted" else b"U")
    assert len([*itertools.chain(*letters.all(newest, letters.last_id()))]) == (how != "letters trimmed")
    assert how != "index deleted" or letters.newest(newest, None, 1, 0.0).cursor, "not all were looked at"
    with pytest.raises(NotNow):
        letters.page(LetterFilter(group="others"), None, 1)
    _mended(leader)
    assert world.letter_ids() == ids
    counts = letters.counts()
    assert counts.are_all
    assert counts.letters == link.call("XLEN", keys.dead) == sum(group.count for group in counts.groups)
    with world.unchanged():
        assert leader.recount_letters(b"", PAGE) == b"", "what is right is left alone"


def test_an_index_that_cannot_be_written_holds_no_letter_up(world: World, letters: DeadLetters) -> None:
    world.link.call("SET", world.keys.letters, "x")
    _many(world, [b"T"])
    assert len(world.dead()) == 1
    assert letters.drop(world.letter_ids())[0].word == "dropped"


def test_many_letters_in_a_short_time_are_sudden(world: World, letters: DeadLetters) -> None:
    leader, _ = _many(world, [b"T%d" % number for number in range(30)])
    now_ms = int(world.letter_ids()[-1].partition(b"-")[0])

    def sudden(after_ms: int) -> str:
        return letters.counts(*(now_ms + after_ms - ms for ms in SUDDEN_MS)).sudden

    told = "30 messages were given up in the last 10 minutes, usual are 0; most of them: gave_up: KeyError in shop.py:4"
    assert sudden(0) == told
    assert sudden(700_000) == "", "they are long ago"
    world.link.call("XADD", world.keys.dead, f"{now_ms + 700_000}-1", "usher-id", "1-1", "usher-reason", "by hand")
    _mended(leader)
    assert sudden(700_000) == "", "one is nothing out of the usual"
