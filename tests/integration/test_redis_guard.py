"""guard.lua through RedisGuard: the commands of an effect once per uid, never under an old fence, and what is refused
changes nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from tests.integration.factories import with_user
from tests.proxy import Proxy
from tests.sinks import Mark
from usher.common.base.errors import GiveUp
from usher.common.redis.client import CommandRefused, Link
from usher.consumer.sinks.outcomes import SinkMisused, SinkNotNow, StaleFence
from usher.consumer.sinks.redis_guard import Outcome, RedisGuard


@pytest.fixture
def redis(any_redis_url: str) -> Iterator[Link]:
    made = Link(any_redis_url, "test")
    yield made
    made.close()


@pytest.fixture
def guard(any_redis_url: str, redis: Link) -> Iterator[RedisGuard]:
    made = RedisGuard(any_redis_url)
    yield made
    made.close()


def test_all_commands_of_an_effect_are_applied_once(guard: RedisGuard, redis: Link) -> None:
    for number in range(3):
        done = guard.apply(
            Mark("T", "a", 5 + number), ("INCRBY", "total:{T}", 7), ("RPUSH", "log:{T}", b"\x00\xff", "x y")
        )
        assert done.outcome is (Outcome.DUPLICATE if number else Outcome.APPLIED)
        assert done.replies == ([] if number else [7, 2])
    assert guard.apply(Mark("T", "b", 7), ("INCRBY", "total:{T}", 1)).replies == [8]
    assert redis.call("LRANGE", "log:{T}", 0, -1) == [b"\x00\xff", b"x y"]


def test_an_old_fence_changes_nothing(guard: RedisGuard, redis: Link) -> None:
    guard.apply(Mark("T", "a", 10), ("SET", "state:{T}", "new"))
    before = redis.call("DUMP", "usher:guard:default:T:uids")
    for uid in ("a", "b"):
        with pytest.raises(StaleFence):
            guard.apply(Mark("T", uid, 9), ("SET", "state:{T}", "old"))
    assert redis.call("GET", "state:{T}") == b"new"
    assert redis.call("DUMP", "usher:guard:default:T:uids") == before
    guard.apply(Mark("other", "b", 9), ("SET", "state:{other}", "old"))


def test_messages_without_a_ticket_are_applied_once_each_in_whatever_order_they_end(
    guard: RedisGuard, redis: Link
) -> None:
    done = [
        guard.apply(Mark("", uid, fence), ("INCR", "n")).outcome
        for uid, fence in (("b", 9), ("a", 5), ("b", 5), ("a", 9))
    ]
    assert done == [Outcome.APPLIED, Outcome.APPLIED, Outcome.DUPLICATE, Outcome.DUPLICATE]
    assert redis.call("GET", "n") == b"2"


@pytest.mark.parametrize("half", [False, True])
def test_a_repeat_under_a_higher_fence_refuses_the_lower_one_from_then_on(
    guard: RedisGuard, redis: Link, half: bool
) -> None:
    """The ticket has moved on with it: whoever ran it before is a zombie."""
    commands = [("INCR", "n:{T}"), ("RPUSH", "n:{T}", 1)] if half else [("INCR", "n:{T}")]
    for fence in (9, 10):
        with pytest.raises(GiveUp) if half else contextlib.nullcontext():
            guard.apply(Mark("T", "a", fence), *commands)
    with pytest.raises(StaleFence):
        guard.apply(Mark("T", "b", 9), ("INCR", "n:{T}"))
    assert redis.call("GET", "n:{T}") == b"1"
    assert 0 < redis.call("PTTL", "usher:guard:default:T:fence") <= 7 * 86_400_000


@pytest.mark.parametrize(("lower", "higher"), [(9, 10), (2**53, 2**53 + 1), (2**63 - 2, 2**63 - 1)])
def test_fences_are_compared_as_whole_numbers(guard: RedisGuard, lower: int, higher: int) -> None:
    guard.apply(Mark("T", "a", lower), ("INCR", "n:{T}"))
    guard.apply(Mark("T", "b", higher), ("INCR", "n:{T}"))
    guard.apply(Mark("T", "c", higher), ("INCR", "n:{T}"))
    with pytest.raises(StaleFence):
        guard.apply(Mark("T", "d", lower), ("INCR", "n:{T}"))


def test_a_first_command_that_is_refused_leaves_nothing_and_may_be_tried_again(guard: RedisGuard, redis: Link) -> None:
    redis.call("SET", "total:{T}", "no number")
    for _ in range(2):
        with pytest.raises(CommandRefused, match="not an integer"):
            guard.apply(Mark("T", "a", 1), ("INCRBY", "total:{T}", 7), ("SET", "other:{T}", 1))
    assert redis.call("KEYS", "*") == [b"total:{T}"]
    redis.call("SET", "total:{T}", 1)
    assert guard.apply(Mark("T", "a", 1), ("INCRBY", "total:{T}", 7)).replies == [8]


def test_half_an_effect_is_said_and_never_added_to(guard: RedisGuard, redis: Link) -> None:
    redis.call("SET", "log:{T}", "no list")
    for _ in range(2):
        with pytest.raises(GiveUp, match="in part"):
            guard.apply(Mark("T", "a", 1), ("INCRBY", "total:{T}", 7), ("RPUSH", "log:{T}", 1))
    assert redis.call("GET", "total:{T}") == b"7"


def test_a_command_that_is_too_long_is_refused_before_anything_is_done(guard: RedisGuard, redis: Link) -> None:
    for _ in range(2):
        with pytest.raises(SinkMisused, match="at most 7,000 words"):
            guard.apply(Mark("T", "a", 1), ("INCR", "n:{T}"), ("RPUSH", "log:{T}", *range(7000)))
    assert redis.call("GET", "n:{T}") is None
    assert guard.apply(Mark("T", "a", 1), ("INCR", "n:{T}"), ("RPUSH", "log:{T}", *range(6998))).replies == [1, 6998]


def test_bytes_that_are_no_text_are_stored_as_they_came(guard: RedisGuard, redis: Link) -> None:
    """A message's fields have them as surrogates."""
    for key in (b"k\xff", "k\udcff"):
        assert guard.apply(Mark("T", f"{key!r}", 1), ("APPEND", key, "\udcfe")).outcome is Outcome.APPLIED
    assert guard.apply(Mark("T", "c", 1), ("APPEND", b"k\xff", b"\xfd"), keys=["k\udcff"]).replies == [3]
    assert redis.call("GET", b"k\xff") == b"\xfe\xfe\xfd"


def test_no_more_is_kept_than_was_asked_for(any_redis_url: str, redis: Link) -> None:
    few = RedisGuard(any_redis_url, keep_s=600, keep_most=3)
    for number in range(8):
        few.apply(Mark("T", f"u{number}", 1), ("INCR", "n:{T}"))
        time.sleep(0.002)  # the order of what is kept is that of Redis' milliseconds
    assert redis.call("ZRANGE", "usher:guard:default:T:uids", 0, -1) == [b"done:u5", b"done:u6", b"done:u7"]
    assert 0 < redis.call("PTTL", "usher:guard:default:T:uids") <= 600_000
    assert 0 < redis.call("PTTL", "usher:guard:default:T:fence") <= 600_000
    few.close()
    brief = RedisGuard(any_redis_url, "brief", keep_s=0.05)
    brief.apply(Mark("T", "a", 1), ("INCR", "m:{T}"))
    time.sleep(0.2)
    assert brief.apply(Mark("T", "a", 1), ("INCR", "m:{T}")).replies == [2], (
        "what is not known any more is applied again"
    )
    brief.close()
    with pytest.raises(SinkMisused):
        RedisGuard(any_redis_url, keep_most=0)


def test_the_effect_of_a_moment_ago_is_known_though_redis_clock_went_back(any_redis_url: str, redis: Link) -> None:
    """A failover to a server whose clock is behind; and "c" and "b" of one millisecond, which sort as text."""
    few = RedisGuard(any_redis_url, keep_most=3)
    ahead = time.time_ns() // 1_000_000 + 60_000
    redis.call("ZADD", "usher:guard:default:T:uids", ahead, "done:x", ahead + 1, "done:y", ahead + 1, "done:z")
    for number, uid in enumerate(("c", "b", "a"), 1):
        for outcome in (Outcome.APPLIED, Outcome.DUPLICATE):
            assert few.apply(Mark("T", uid, 1), ("INCR", "n:{T}")).outcome is outcome
        assert redis.call("GET", "n:{T}") == b"%d" % number
    assert redis.call("ZRANGE", "usher:guard:default:T:uids", 0, -1) == [b"done:c", b"done:b", b"done:a"]
    few.close()


def test_a_user_that_may_not_look_at_the_uids_has_no_effect_either(any_redis_url: str, redis: Link) -> None:
    """One of a former version's rights: had the effect been first, each repeat would have it again."""
    redis.call("ACL", "SETUSER", "former", "on", ">pw", "~*", "+@all", "-zrevrange")
    try:
        former = RedisGuard(with_user(any_redis_url, "former", "pw"))
        with pytest.raises(CommandRefused, match="ermission|can't run this command"):
            former.apply(Mark("T", "a", 1), ("INCR", "n:{T}"))
        former.close()
        assert redis.call("GET", "n:{T}") is None
    finally:
        redis.call("ACL", "DELUSER", "former")


def test_threads_with_repeats_and_zombies_add_up(guard: RedisGuard, redis: Link, any_redis_url: str) -> None:
    stale = []

    def run(fence: int) -> None:
        own = RedisGuard(any_redis_url)
        for number in range(60):
            try:
                own.apply(Mark("T", f"u{number}", fence), ("INCRBY", "total:{T}", number))
            except StaleFence:
                stale.append(fence)
        own.close()

    threads = [threading.Thread(target=run, args=(fence,)) for fence in (1, 2, 3, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert redis.call("GET", "total:{T}") == b"%d" % sum(range(60))


def test_a_lost_reply_is_not_now_and_the_next_try_finds_it(any_redis_url: str, redis: Link) -> None:
    with Proxy(any_redis_url) as proxy:
        far = RedisGuard(proxy.url)
        far.apply(Mark("T", "a", 1), ("INCR", "n:{T}"))
        proxy.on_reply = lambda chunk: None
        with pytest.raises(SinkNotNow):
            far.apply(Mark("T", "b", 1), ("INCR", "n:{T}"))
        proxy.on_reply = lambda chunk: chunk
        assert far.apply(Mark("T", "b", 1), ("INCR", "n:{T}")).outcome is Outcome.DUPLICATE
        far.close()
    assert redis.call("GET", "n:{T}") == b"2"


@pytest.mark.parametrize("ticket", ["a:b", "", "ä", "{x}", " "])
def test_any_ticket_has_keys_of_its_own(guard: RedisGuard, redis: Link, ticket: str) -> None:
    for other in (ticket, f"{ticket}:fence"):
        guard.apply(Mark(other, "a", 1), ("INCR", "n"))
        assert guard.apply(Mark(other, "a", 1), ("INCR", "n")).outcome is Outcome.DUPLICATE
    assert len(redis.call("KEYS", "usher:guard:*")) == (4 if ticket else 3), (
        "without a ticket there is no fence to keep"
    )
    assert redis.call("GET", "n") == b"2"


def test_a_cluster_is_refused() -> None:
    with pytest.raises(SinkMisused, match="cluster"):
        RedisGuard("redis+cluster://127.0.0.1:7000")
