"""``usher.testing``: from XADD to the handler in one process, on a real Redis, without waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest

from tests.hands import HandlerUnusable, SettingsError
from usher import GiveUp, Link, Message, PartialFailure, RetryLater, batch, handler
from usher.testing import Call, Kit, message

Make = Callable[..., Kit]


def test_messages_are_handled_in_order_and_acknowledged(usher_kit: Make, usher_redis: str) -> None:
    seen: list[tuple[str, str, int]] = []

    def handle(one: Message) -> None:
        assert one.fence > 0
        seen.append((one.ticket_id, one.fields["n"], one.attempt))

    kit = usher_kit(handle)
    ids = [kit.send(ticket, n=n) for ticket, n in (("a", 1), ("b", 1), ("a", 2), ("a", 3))]
    calls = kit.run()
    assert [entry for entry in seen if entry[0] == "a"] == [("a", "1", 1), ("a", "2", 1), ("a", "3", 1)]
    assert sorted(kit.acknowledged) == ids
    assert [call.outcome for call in calls] == ["done"] * 4
    assert (kit.pending, kit.retried, kit.given_up, kit.now_s) == (set(), [], [], 0.0)
    with Link(usher_redis, "test") as link:
        group = link.call("XINFO", "GROUPS", "ticket_stream")[0]
        assert dict(zip(group[::2], group[1::2], strict=True))[b"last-delivered-id"] == ids[-1].encode()


def test_retries_pass_on_the_kits_own_clock(usher_kit: Make) -> None:
    @handler(backoff_cap_s=25)
    def handle(one: Message) -> None:
        if one.fields["n"] == "1" and one.attempt < 4:
            raise ValueError(f"attempt {one.attempt}")

    kit = usher_kit(handle, retry_seconds=10, max_attempts=5)
    first, second = kit.send("42", n=1), kit.send("42", n=2)
    began_s = time.monotonic()
    kit.run()
    assert time.monotonic() - began_s < 30  # of 55
    assert kit.retried == [
        Call("42", first, 1, "failed", 0.0, "ValueError: attempt 1", 10.0),
        Call("42", first, 2, "failed", 10.0, "ValueError: attempt 2", 20.0),
        Call("42", first, 3, "failed", 30.0, "ValueError: attempt 3", 25.0),
    ]
    assert kit.acknowledged == [first, second]
    assert kit.now_s == 55.0


def test_a_run_may_end_before_a_retry_is_due(usher_kit: Make) -> None:
    @handler(max_attempts=2)
    def handle(one: Message) -> None:
        raise RetryLater(after_s=60)

    kit = usher_kit(handle)
    first, second = kit.send("42"), kit.send("42")
    assert [call.at_s for call in kit.run(for_s=0)] == [0.0]
    assert kit.pending == {first, second}
    assert [call.at_s for call in kit.run(for_s=150)] == [60.0, 120.0]
    assert kit.now_s == 150.0
    assert {call.outcome for call in kit.calls} == {"retry_later"}
    assert kit.given_up == []


def test_what_is_given_up_is_read_from_the_dead_letters(usher_kit: Make) -> None:
    @handler(max_attempts=2, backoff_s=1)
    def handle(one: Message) -> None:
        if one.fields["kind"] == "wrong":
            raise GiveUp("no such order")
        raise KeyError("price")

    kit = usher_kit(handle)
    kit.send("1", kind="wrong")
    kit.send("2", kind="paid")
    kit.run()
    letters = {letter.ticket: (letter.reason, letter.error, letter.attempts) for letter in kit.given_up}
    assert letters == {
        b"1": ("gave_up", "GiveUp: no such order", 1),
        b"2": ("attempts_exhausted", "KeyError: 'price'", 2),
    }
    assert kit.acknowledged == []
    assert kit.pending == set()
    assert [call.outcome for call in kit.calls if call.ticket_id == "1"] == ["gave_up"]


def test_a_halted_ticket_stays_pending_and_others_go_on(usher_kit: Make) -> None:
    def handle(one: Message) -> None:
        if one.ticket_id == "1":
            raise GiveUp("wrong")

    kit = usher_kit(handle, dead_letter_policy="halt")
    halted, behind, other = kit.send("1"), kit.send("1"), kit.send("2")
    kit.run()
    assert kit.acknowledged == [other]
    assert kit.pending == {halted, behind}


def test_what_a_handler_declares_holds_here_too(usher_kit: Make) -> None:
    starts: list[tuple[str, float]] = []

    @handler(dead_letter_policy="halt", rate=0.1)
    def handle(one: Message) -> None:
        starts.append((one.fields["n"], kit.now_s))
        if one.fields["n"] == "3":
            raise GiveUp("wrong")

    kit = usher_kit(handle)
    ids = [kit.send("42", n=n) for n in range(5)]
    kit.run()
    assert starts == [("0", 0.0), ("1", 10.0), ("2", 20.0), ("3", 30.0)]
    assert kit.acknowledged == ids[:3]
    assert kit.pending == set(ids[3:])
    assert kit.retried == []


def test_async_handlers_and_batches_are_called_as_a_consumer_calls_them(usher_kit: Make) -> None:
    async def later(one: Message) -> None:
        await asyncio.sleep(0)
        if one.attempt == 1:
            raise ValueError("once")

    kit = usher_kit(later)
    one = kit.send("42", body={"total": 3})
    kit.run()
    assert (kit.acknowledged, len(kit.retried)) == ([one], 1)

    sizes: list[int] = []

    @batch(most=10, per_ticket=2)
    def many(messages: list[Message]) -> None:
        sizes.append(len(messages))
        if len(messages) > 1:
            raise PartialFailure({messages[0]: ValueError("not this one")})

    kit = usher_kit(many)
    ids = [kit.send(ticket) for ticket in "abcb"]
    kit.run()
    assert sizes[0] == 4
    assert sorted(kit.acknowledged) == ids
    assert [call.id for call in kit.retried] == ids[:1]


def test_what_cannot_be_handled_is_told(usher_kit: Make) -> None:
    with pytest.raises(HandlerUnusable, match="exactly one argument"):
        usher_kit(lambda: None)
    with pytest.raises(HandlerUnusable, match="no module 'nowhere'"):
        usher_kit("nowhere:handle")
    with pytest.raises(TypeError, match="no settings of consumers or masters: attempts"):
        usher_kit(print, attempts=3)
    with pytest.raises(SettingsError, match="USHER_MAX_ATTEMPTS"):
        usher_kit(print, max_attempts=0)


def test_what_ends_a_test_goes_through_the_handler(usher_kit: Make) -> None:
    def handle(one: Message) -> None:
        pytest.fail("seen")

    kit = usher_kit(handle)
    kit.send("42")
    with pytest.raises(pytest.fail.Exception, match="seen"):
        kit.run()


def test_a_message_is_made_for_a_unit_test() -> None:
    one = message("42", kind="paid", attempt=2, body={"total": 3}, price=1.5, raw=b"\xff")
    assert (one.ticket_id, one.attempt, one.fence, one.id, one.uid) == ("42", 2, 1, one.id, one.id)
    assert one.fields == {"ticket_id": "42", "kind": "paid", "body": '{"total":3}', "price": "1.5", "raw": "\udcff"}
    assert one.json() == {"total": 3}
    assert one.still_mine()
    assert not one.is_rehearsal
    other: Any = message("42", {"attempt": "x", "id": 7}, uid="order-7", id="5-1", fence=9, mine=False, rehearsal=True)
    assert (other.fields["attempt"], other.fields["id"], other.uid, other.id, other.fence) == (
        *("x", "7", "order-7", "5-1"),
        9,
    )
    assert not other.still_mine()
    assert other.is_rehearsal
    assert message("42", {b"a": 1, 7: 2}).fields == {"ticket_id": "42", "a": "1", "7": "2"}
    for wrong in ({None: 1}, {"ticket_id": "43"}):
        with pytest.raises((TypeError, ValueError), match="the name of a field|names the ticket"):
            message("42", wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["def", "async def", "batch"])
def test_what_a_call_sets_ends_with_it(usher_kit: Make, form: str) -> None:
    tenant: ContextVar[str] = ContextVar("tenant", default="")
    seen: list[str] = []

    def handle(one: Any) -> None:
        seen.append(tenant.get())
        tenant.set("of one message")

    async def handle_async(one: Message) -> None:
        handle(one)

    kit = usher_kit({"def": handle, "async def": handle_async, "batch": batch(most=1, wait_s=0)(handle)}[form])
    assert len([kit.send(ticket) for ticket in "aab"]) == len(kit.run())
    assert seen == [""] * 3
