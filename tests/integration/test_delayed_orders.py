"""move_delayed.lua: what operators do with delayed messages, also at the very
moment at which these are sent."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.integration.delays import FUTURE, PAST, delay, left, log_keys, now_ms, send_due, sent
from tests.integration.factories import World
from tests.integration.memory import full_memory
from tests.integration.routers import until
from tests.integration.test_delayed_service import _led, _running
from tests.proxy import Proxy
from usher.common.base.errors import RedisTrouble
from usher.common.redis.client import CommandRefused, Link
from usher.master.operations.action_log import ActionLog, By, OperatorAction, StepResult
from usher.master.operations.shelves import AT_ONCE, DelayedView

_LATER = FUTURE + 1_000_000


@pytest.fixture
def view(world: World, any_redis_url: str) -> DelayedView:
    return DelayedView(Link(any_redis_url, "test:view"), world.keys, "ticket_id")


def _words(results: Iterator[StepResult]) -> list[str]:
    return [one.word for one in results]


# ---- move, and send now ----


def test_what_is_sent_now_is_sent_in_the_order_of_the_former_times(world: World, view: DelayedView) -> None:
    leader = world.elect()
    ids = [delay(world, b"%d" % due, due).decode() for due in (FUTURE + 3, FUTURE + 1, FUTURE + 2)]
    delay(world, b"other", FUTURE)
    leader.due_delayed(10)
    assert _words(view.move(ids, None)) == ["moved"] * 3
    send_due(world, leader)
    assert sent(world) == [b"%d" % (FUTURE + 1), b"%d" % (FUTURE + 2), b"%d" % (FUTURE + 3)]
    assert left(world) == 1


def test_more_than_one_call_takes_keep_their_order_too(world: World, view: DelayedView) -> None:
    leader, count = world.elect(), AT_ONCE + 50
    ids = [delay(world, b"%d" % number, FUTURE + count - number).decode() for number in range(count)]
    leader.due_delayed(10)
    due_ms = now_ms(world) + 1
    assert Counter(_words(view.move(ids, due_ms))) == {"moved": count}
    until(lambda: now_ms(world) > due_ms + 1)
    send_due(world, leader)
    assert sent(world) == [b"%d" % number for number in reversed(range(count))]


@pytest.mark.parametrize("after", [1, AT_ONCE, AT_ONCE + 1])
def test_a_move_that_ends_half_way_and_its_repeat_keep_the_order(world: World, view: DelayedView, after: int) -> None:
    """Some come earlier than before, some later; the calls that are left are never made."""
    leader, count = world.elect(), 2 * AT_ONCE + 50
    ids = [delay(world, b"%d" % number, FUTURE + number).decode() for number in range(count)]
    leader.due_delayed(10)
    for due_ms in (FUTURE + count // 2, FUTURE + 2 * count, FUTURE - 1000):
        for most in (after, count):
            list(itertools.islice(view.move(ids, due_ms), most))
            page = view.page(None, count)
            assert [row.ticket_id for row in page.rows] == [str(number) for number in range(count)]
        assert {row.due_ms for row in page.rows} == {due_ms}


def test_a_moved_message_is_due_at_its_new_time_and_not_at_the_former_one(world: World, view: DelayedView) -> None:
    leader = world.elect()
    early = delay(world, b"A", now_ms(world) + 50).decode()
    late = delay(world, b"B", FUTURE).decode()
    leader.due_delayed(10)
    [*_, due_ms] = (now_ms(world) + 60_000,)
    assert _words(view.move([early, late], due_ms)) == ["moved", "moved"]
    until(lambda: now_ms(world) > int(early.partition("-")[0]) + 60)
    look = leader.due_delayed(10)
    assert (look.due, sent(world)) == ([], [])
    assert look.wait_ms is not None and 50_000 < look.wait_ms <= 60_000
    assert [row.due_ms for row in view.page(None, 10).rows] == [due_ms, due_ms]


def test_what_was_named_as_due_and_is_moved_then_is_not_sent(world: World, view: DelayedView) -> None:
    """The sender has looked, the operator moves, and then the sender sends: the operator was told that it is moved."""
    leader = world.elect()
    entry_id = delay(world, b"A", PAST).decode()
    due = leader.due_delayed(10).due
    assert _words(view.move([entry_id], _LATER)) == ["moved"]
    assert leader.send_delayed([(one, world.keys.stream) for one in due], 60_000) == [b""]
    assert (sent(world), left(world)) == ([], 1)
    assert [row.due_ms for row in view.page(None, 10).rows] == [_LATER]


def test_what_was_sent_meanwhile_is_told_and_not_sent_again(world: World, view: DelayedView) -> None:
    leader = world.elect()
    entry_id = delay(world, b"A", PAST).decode()
    send_due(world, leader)
    for due_ms in (None, _LATER):
        assert _words(view.move([entry_id, "1-1"], due_ms)) == ["gone", "gone"]
    assert _words(view.drop([entry_id])) == ["gone"]
    send_due(world, leader)
    assert (sent(world), left(world), world.link.call("ZCARD", log_keys(world).due)) == ([b"A"], 0, 0)


def test_an_id_that_no_delayed_message_has_had_is_unknown(world: World, view: DelayedView) -> None:
    assert _words(view.move(["5-1"], None)) == ["unknown"]
    delay(world, b"A", FUTURE)
    world.elect().due_delayed(10)
    with world.unchanged():
        assert _words(view.move(["18446744073709551615-1"], None)) == ["unknown"]
        assert _words(view.drop(["18446744073709551615-1"])) == ["unknown"]


def test_what_no_leader_has_put_in_order_is_left_alone_and_said_so(world: World, view: DelayedView) -> None:
    entry_id = delay(world, b"A", FUTURE).decode()
    with world.unchanged():
        assert _words(view.move([entry_id], None)) == ["held"]
    world.elect().due_delayed(10)
    assert _words(view.move([entry_id], None)) == ["moved"]


def test_large_ones_are_moved_a_few_at_a_call_and_all_of_them(world: World, view: DelayedView) -> None:
    ids = [delay(world, b"%d" % number, FUTURE, "body", b"x" * 5_000_000).decode() for number in range(5)]
    leader = world.elect()
    while leader.due_delayed(100).wait_ms == 0:
        pass
    assert _words(view.move(ids, None)) == ["moved"] * 5
    assert [row.ticket_id for row in view.chosen(ids)] == ["0", "1", "2", "3", "4"]


def test_a_repeat_whose_first_reply_was_lost_moves_nothing_twice(world: World, view: DelayedView) -> None:
    ids = [delay(world, b"A", FUTURE + number).decode() for number in range(3)]
    world.elect().due_delayed(10)
    assert _words(view.move(ids, _LATER)) == ["moved"] * 3
    with world.unchanged():
        assert _words(view.move(ids, _LATER)) == ["moved"] * 3
    assert _words(view.drop(ids[:2])) == ["dropped"] * 2
    assert _words(view.drop(ids)) == ["gone", "gone", "dropped"]


def test_a_full_memory_lets_move_and_drop(world: World, view: DelayedView) -> None:
    ids = [delay(world, b"A", FUTURE).decode(), delay(world, b"B", FUTURE).decode()]
    world.elect().due_delayed(10)
    with full_memory(world.link):
        assert _words(view.move(ids, FUTURE + 5000)) == ["moved", "moved"]
        assert _words(view.drop(ids[:1])) == ["dropped"]
    assert [row.due_ms for row in view.page(None, 10).rows] == [FUTURE + 5000]


@pytest.mark.parametrize("key", ["delayed", "due", "due_until"])
def test_a_key_of_another_type_is_refused_before_anything_has_changed(
    world: World, view: DelayedView, key: str
) -> None:
    entry_id = delay(world, b"A", FUTURE).decode()
    world.elect().due_delayed(10)
    world.link.call("DEL", getattr(log_keys(world), key))
    world.link.call("HSET", getattr(log_keys(world), key), "a", "b")
    with world.unchanged():
        for results in (view.move([entry_id], None), view.drop([entry_id])):
            with pytest.raises(CommandRefused, match="WRONGTYPE"):
                list(results)


# ---- beside the sender ----


def test_beside_the_sender_each_is_sent_once_and_what_is_told_is_true(
    any_redis_url: str, world: World, view: DelayedView
) -> None:
    """A thousand that get due one after the other, while an operator sends some now, moves some and drops some."""
    leader, start_ms = world.elect(), now_ms(world) + 150
    due_ms = [FUTURE if number in (993, 997) else start_ms + number // 5 for number in range(1000)]  # two to be moved
    ids = [delay(world, b"%d" % number, due).decode() for number, due in enumerate(due_ms)]
    told: dict[str, str] = {}

    def operate(what: str, some: list[str]) -> None:
        own = DelayedView(Link(any_redis_url, "test:operator"), world.keys, "ticket_id")
        for at in range(0, len(some), 10):
            ids = some[at : at + 10]
            done = own.drop(ids) if what == "drop" else own.move(ids, _LATER if what == "move" else None)
            told.update({one.id.decode(): one.word for one in done})

    with _running(any_redis_url, world, _led(leader)):
        until(lambda: left(world) < 990)  # some are too late
        operators = [
            threading.Thread(target=operate, args=(what, ids[number::4][::-1]))
            for number, what in enumerate(("send", "move", "drop"))
        ]
        for one in operators:
            one.start()
        for one in operators:
            one.join()
        moved = sum(told[one] == "moved" for one in ids[1::4])
        until(lambda: left(world) == moved)
    came = Counter(sent(world))
    assert set(came.values()) == {1}, "none is doubled"
    for number, entry_id in enumerate(ids):
        kind, word = number % 4, told.get(entry_id, "")
        is_sent = kind in (0, 3) or word == "gone"
        assert (b"%d" % number in came) == is_sent, (number, word)
    assert {told[one] for one in ids[1::4]} == {"moved", "gone"}, "some were too late, and some were not"


def test_replies_that_get_lost_neither_lose_nor_double_what_is_sent_now(
    any_redis_url: str, world: World, view: DelayedView
) -> None:
    leader, replies = world.elect(), itertools.count()
    ids = [delay(world, b"%d" % number, FUTURE + number).decode() for number in range(60)]
    lost = 0
    with (
        Proxy(any_redis_url, lambda chunk: chunk if next(replies) % 17 else None) as proxy,
        _running(any_redis_url, world, _led(leader)),
    ):
        until(lambda: world.link.call("ZCARD", log_keys(world).due) == 60)
        own = DelayedView(Link(proxy.url, "test:operator"), world.keys, "ticket_id")
        for at in range(0, 60, 5):
            for _ in range(10):
                try:
                    words = _words(own.move(ids[at : at + 5], None))
                except RedisTrouble:
                    lost += 1
                    continue
                assert set(words) <= {"moved", "gone"}
                break
        ActionLog(world.link, world.keys).note(OperatorAction(By("otto", "http"), "send_delayed_now", "60"), "moved")
        until(lambda: left(world) == 0)
    assert Counter(sent(world)) == {b"%d" % number: 1 for number in range(60)}
    assert lost, "no reply was lost"


def test_the_leader_hears_at_once_of_what_is_to_be_sent_now(
    any_redis_url: str, world: World, view: DelayedView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the line in the action log: else it would look in a minute."""
    monkeypatch.setattr("usher.master.operations.delayed_sender._BLOCK_S", 60.0)
    entry_id = delay(world, b"A", FUTURE).decode()
    with _running(any_redis_url, world, _led(world.elect())):
        until(lambda: b"cmd=xread" in world.link.call("CLIENT", "LIST"))
        assert _words(view.move([entry_id], None)) == ["moved"]
        ActionLog(world.link, world.keys).note(OperatorAction(By("otto", "http"), "send_delayed_now", "it"), "moved 1")
        until(lambda: sent(world) == [b"A"])
        for ticket in (b"B", b"C"):  # and of what comes as before
            delay(world, ticket, PAST)
            until(lambda: left(world) == 0)


def test_an_action_log_that_cannot_be_read_keeps_nobody_from_sending(any_redis_url: str, world: World) -> None:
    world.link.call("SET", world.keys.actions, "spoilt")
    with _running(any_redis_url, world, _led(world.elect())) as service:
        delay(world, b"A", PAST)
        until(lambda: sent(world) == [b"A"])
        until(lambda: b"cmd=xread" in world.link.call("CLIENT", "LIST"))
        delay(world, b"B", PAST)
        until(lambda: sent(world) == [b"A", b"B"])
        assert service.trouble is None


# ---- the list ----


def test_pages_have_all_that_wait_the_earliest_first_and_each_once(world: World, view: DelayedView) -> None:
    """Also of one time, in the order of their ids, and when those behind which a page begins have gone."""
    for number in range(1, 25):
        world.link.call("XADD", log_keys(world).delayed, f"5-{number}", "due_ms", FUTURE, "ticket_id", f"same {number}")
    ids = [delay(world, b"%d" % due, due).decode() for due in (FUTURE + 9, FUTURE - 9)]
    world.elect().due_delayed(100)
    seen, cursor = [], None
    while True:
        page = view.page(cursor, 5)
        seen += [row.ticket_id for row in page.rows]
        if page.cursor is None:
            break
        if cursor is None:
            assert _words(view.drop([page.rows[-1].id, ids[1]])) == ["dropped", "dropped"]
        cursor = page.cursor
    assert seen == [f"{FUTURE - 9}", *(f"same {number}" for number in range(1, 25)), f"{FUTURE + 9}"]


def test_a_search_that_takes_too_long_says_where_it_goes_on(world: World, view: DelayedView) -> None:
    for number in range(450):
        delay(world, b"%d" % number, FUTURE + number)
    world.elect().due_delayed(10)
    page, looks = view.page(None, 10, "449", within_s=-1.0), 1
    while page.cursor is not None:
        assert page.rows == []
        page, looks = view.page(page.cursor, 10, "449", within_s=-1.0), looks + 1
    assert ([row.ticket_id for row in page.rows], looks) == (["449"], 3)


@pytest.mark.parametrize("cursor", ["", "x", "5", "5_5", "-1_5-5", "1e5_5-5", "5_5-5\n", "nan_5-5"])
def test_what_is_no_cursor_is_refused(world: World, view: DelayedView, cursor: str) -> None:
    with pytest.raises(ValueError, match="cursor"):
        view.page(cursor, 10)


def test_what_is_sent_between_two_looks_at_a_page_hides_nothing(world: World, view: DelayedView) -> None:
    ids = [delay(world, b"%d" % number, FUTURE + number).decode() for number in range(60)]
    world.elect().due_delayed(100)
    cursor, real = view.page(None, 20).cursor, view._link.all_of

    def later(commands):  # type: ignore[no-untyped-def]
        answers = real(commands)
        if commands[0][0] == "ZSCORE":
            assert set(_words(DelayedView(world.link, world.keys, "ticket_id").drop(ids[:10]))) == {"dropped"}
        return answers

    view._link.all_of = later  # type: ignore[method-assign]
    assert [row.ticket_id for row in view.page(cursor, 20).rows] == [str(number) for number in range(20, 40)]
