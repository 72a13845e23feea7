"""ack.lua, and the scripts that write dead letters: who called is told once, and by the owner alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from tests.integration.factories import World, bury, fetch, hand_over, pairs, plan
from usher import Link, Message, Producer
from usher.common.base.errors import OwnershipLost
from usher.common.protocol.keys import LogKeys
from usher.common.sending.producer import Answers
from usher.consumer.lifecycle.owner_scripts import Letter
from usher.testing import Kit

_KEY = LogKeys("ticket_stream").replies("a" * 32).encode()


def _told(world: World) -> list[dict[bytes, bytes]]:
    return [pairs(fields) for _, fields in world.link.call("XRANGE", _KEY, "-", "+")]


def test_an_answer_is_written_by_the_acknowledgement_that_counts_and_by_no_other(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    leader, a = world.elect(), world.join("a")
    first, second, third = world.owned(leader, a, b"T", b"1-1", b"2-1", b"3-1")
    world.link.call("SET", b"x", b"no stream")
    a.steps.ack((), answers=[(one, b"", b"7", b"5 1 1", b"bytes", b"\xff") for one in (b"x", _KEY)])
    for is_again in (False, True):  # its reply was lost
        answers = [(b"x", second, b"8", b"", b"json", b"1"), (_KEY, first, b"7", b"", b"json", b"{}")]
        a.steps.ack([first, second], b"ran", 100, is_again, answers)
    assert _told(world) == [{b"call": b"7", b"part": b"5 1 1", b"bytes": b"\xff"}, {b"call": b"7", b"json": b"{}"}]
    assert [one.getMessage() for one in caplog.records] == ["answer_not_written"] * 2
    assert world.pending() == {a.name: [third]}
    assert 590_000 < world.link.call("PTTL", _KEY) <= 600_000
    world.end_lease(a)
    for ids, entry_id, part in ([third], third, b""), ((), b"", b"5 1 2"):
        with world.unchanged(), pytest.raises(OwnershipLost):
            a.steps.ack(ids, answers=[(_KEY, entry_id, b"9", part, b"json", b"1")])


@pytest.mark.parametrize("policy", ["skip", "halt"])
@pytest.mark.parametrize(
    "address", [_KEY + b" 7", b"", b"ticket_stream 7", _KEY, _KEY + b" 7" + b"0" * 16, _KEY + b"g 7"]
)
def test_a_dead_letter_answers_once_at_an_address_that_is_one(world: World, policy: str, address: bytes) -> None:
    leader, a = world.elect(), world.join("a")
    world.add(b"1-1", "usher_reply", address, "ticket_id", "T")
    fetch(leader, 10)
    hand_over(leader, plan(a, {b"T": [b"1-1"]}, {b"T": world.head(b"T")}))
    for _ in range(2):
        fence = int(world.head(b"T").split()[1]) if world.record(b"T") else 0
        bury(a.steps, Letter(b"T", b"1-1", "gave_up", "GiveUp: no", 1, 1, 2, fence, "GiveUp", "", policy))
    told = {b"call": b"7", b"failed": b"gave_up", b"error": b"GiveUp: no", b"id": b"1-1"}
    assert _told(world) == ([told] if address == _KEY + b" 7" else [])
    assert world.link.call("XLEN", "ticket_stream") == 1


def test_a_reply_stream_without_rights_holds_no_acknowledgement_up(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    leader, a = world.elect(), world.join("a")
    first, second = world.owned(leader, a, b"T", b"1-1", b"2-1")
    world.link.call("ACL", "SETUSER", "default", "resetkeys", f"~{world.keys.stream}", f"~{world.keys.prefix}*")
    try:
        a.steps.ack((), answers=[(_KEY, b"", b"7", b"5 1 1", b"json", b"1")])
        a.steps.ack([first, second], b"ran", 100, False, [(_KEY, first, b"7", b"", b"json", b"{}")])
    finally:
        world.link.call("ACL", "SETUSER", "default", "allkeys")
    assert [one.getMessage() for one in caplog.records] == ["answer_not_written"] * 2
    assert world.link.call("XPENDING", world.keys.stream, world.keys.group)[0] == 0
    assert world.link.call("XLEN", world.keys.runs) == 1
    assert not _told(world)


@pytest.mark.parametrize(("size", "many", "left"), [(1 << 20, 264, 265), (4090, 67_200, 67_200)])
def test_who_leaves_many_answers_unread_gets_no_more_of_them(
    world: World, caplog: pytest.LogCaptureFixture, size: int, many: int, left: int
) -> None:
    """A caller that died with thousands of calls under way: they would fill Redis for ten minutes."""
    leader, a = world.elect(), world.join("a")
    first, second = world.owned(leader, a, b"T", b"1-1", b"2-1")
    for _ in range(24):
        world.link.pipeline([("XADD", _KEY, "*", "call", 1, "json", b"x" * size)] * (many // 24))
    a.steps.ack(
        [first, second], answers=[(_KEY, one, b"7", b"", b"json", b"1" * n) for one, n in [(first, 5000), (second, 9)]]
    )
    assert [one.getMessage() for one in caplog.records] == ["answer_not_written"]
    assert world.link.call("XLEN", _KEY) == left
    assert not world.pending()


def _asks(kit: Kit, key: str, call: int) -> str:
    told = ("XADD", "ticket_stream", "*", "usher_reply", f"{key}:replies:{'0' * 32} {call}", "ticket_id", "A")
    return bytes(kit.producer._link.call(*told)).decode()


def test_an_address_of_a_stranger_holds_nothing_up(usher_kit: Callable[..., Kit]) -> None:
    """It names no key of the stream: were it one of the script's, Redis would refuse the acknowledgements beside it."""
    kit = usher_kit(lambda message: "x")
    ids = [_asks(kit, key, 1) for key in ("foo", "{ticket_stream}", "{other}")]
    kit.run()
    assert kit.acknowledged == ids
    found = [kit.producer._link.call("EXISTS", f"{key}:replies:{'0' * 32}") for key in ("foo", "{ticket_stream}")]
    assert found == [0, 1]


@pytest.mark.parametrize("early", [1, 0], ids=["some before", "none before"])
def test_callers_of_what_a_run_absorbed_get_its_result_also_of_what_it_absorbed_later(
    usher_kit: Callable[..., Kit], early: int
) -> None:
    def handle(message: Message) -> None:
        if early:
            message.absorb(early)
        message.result({"all": True})
        message.absorb()

    kit = usher_kit(handle)
    for call in range(3):
        _asks(kit, "{ticket_stream}", call)
    kit.run()
    told = kit.producer._link.call("XRANGE", f"{{ticket_stream}}:replies:{'0' * 32}", "-", "+")
    assert [pairs(fields)[b"json"] for _, fields in told] == [b'{"all":true}'] * 3


@pytest.mark.parametrize(("early", "sizes"), [(1, [4, 4, 4]), (None, [1] * 12)])
def test_what_a_run_answers_all_its_callers_is_bounded_by_bytes(
    usher_kit: Callable[..., Kit], early: int | None, sizes: list[int]
) -> None:
    """Else one acknowledgement has up to 512 MiB. A result too large for all is each one's own, by a run of its own."""
    runs: list[int] = []

    def handle(message: Message) -> None:
        taken = 1 + len(message.absorb(early))
        message.result("x" * ((1 << 20) - 2))
        runs.append(taken + len(message.absorb()))

    kit = usher_kit(handle)
    ids = [_asks(kit, "{ticket_stream}", call) for call in range(12)]
    kit.run()
    told = kit.producer._link.call("XRANGE", f"{{ticket_stream}}:replies:{'0' * 32}", "-", "+")
    assert [len(pairs(fields)[b"json"]) for _, fields in told] == [1 << 20] * 12
    assert (runs, kit.acknowledged) == (sizes, ids)


@pytest.fixture
def asking(usher_redis: str) -> Iterator[tuple[Link, Answers, bytes]]:
    """A call that waits, and its reply stream."""
    link, producer = Link(usher_redis, "test"), Producer(usher_redis)
    answers = producer.stream("A", {}, 0.5)
    yield link, answers, producer._calls[os.getpid()]._key
    producer.close()
    link.close()


def test_who_takes_long_over_a_part_is_told_the_next_one_all_the_same(asking: tuple[Link, Answers, bytes]) -> None:
    link, answers, key = asking
    for number in range(3):
        link.call("XADD", key, "*", "call", 1, "part", f"1 1 {number}", "json", number)
    link.call("XADD", key, "*", "call", 1, "json", b'"end"')
    assert [[part, time.sleep(0.7)][0] for part in answers] == [0, 1, 2]
    assert answers.result == "end"


def test_a_reply_stream_that_was_made_anew_with_lower_ids_is_read(asking: tuple[Link, Answers, bytes]) -> None:
    """It has expired, or was deleted, and the clock of Redis was set back."""
    link, answers, key = asking
    link.call("XADD", key, "9999999999999-0", "call", 1, "part", "1 1 1", "json", 1)
    assert next(answers) == 1
    link.call("DEL", key)
    link.call("XADD", key, "5-0", "call", 1, "json", 2)
    assert not list(answers)
    assert answers.result == 2
