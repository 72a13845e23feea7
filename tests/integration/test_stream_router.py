"""The stream router on real servers, in both modes: positions, sharing, slow subscribers, and every kind of bad
input."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import REGISTRY

from tests.integration.conftest import SYSTEM_SERVER
from tests.integration.routers import PATIENCE_S, Tally, add, add_many, nothing_comes, running, taken, until
from tests.proxy import Proxy
from usher.common.base.errors import RedisTrouble, UsherError
from usher.common.redis.client import Link
from usher.common.router.router import NOW, End, Mode, RouterOptions, StreamRouter, SubscriptionEnded

_NOWHERE = "redis://127.0.0.1:1/0"
#: With so many streams, the slow passes come to none of them while a test runs.
_SELDOM, _MANY = RouterOptions(sweep_seconds=1e6, check_seconds=1e6), [f"other:{number}" for number in range(200)]


#: Announcements are what differs between servers; plain reads are the same everywhere.
_WHERE = [
    (Mode.CHANGE_DRIVEN, "embedded"),
    (Mode.PORTABLE, "embedded"),
    *([(Mode.CHANGE_DRIVEN, "system")] if SYSTEM_SERVER else []),
]


@pytest.fixture(params=_WHERE, ids=lambda where: f"{where[0].value} {where[1]}")
def where(request: pytest.FixtureRequest, server_urls: Callable[[str], str]) -> tuple[Mode, str]:
    """A mode, and the URL of an empty Redis."""
    mode, server = request.param
    url = server_urls(server)
    with Link(url, "test:flush") as link:
        link.call("FLUSHALL")
    return mode, url


@pytest.fixture
def mode(where: tuple[Mode, str]) -> Mode:
    return where[0]


@pytest.fixture
def url(where: tuple[Mode, str]) -> str:
    return where[1]


@pytest.fixture
def router(url: str, mode: Mode) -> Iterator[StreamRouter]:
    with running(url, mode, check_seconds=0.5, sweep_seconds=30.0) as started:
        yield started


@pytest.fixture
def link(url: str) -> Iterator[Link]:
    connection = Link(url, "test")
    yield connection
    connection.close()


def test_from_the_beginning_from_an_id_and_from_now(router: StreamRouter, link: Link) -> None:
    add(link, "s", "1-1", "2-1", "3-1")
    everything, later, new = router.subscribe("s"), router.subscribe("s", "1-1"), router.subscribe(b"s", NOW)
    add(link, "s", "4-1")
    assert taken(everything, 4) == [b"1-1", b"2-1", b"3-1", b"4-1"]
    assert taken(later, 3) == [b"2-1", b"3-1", b"4-1"]
    assert taken(new, 1) == [b"4-1"]
    for subscription in (everything, later, new):
        nothing_comes(subscription)


def test_entries_have_their_fields_and_come_by_iteration_until_the_subscription_is_closed(
    router: StreamRouter, link: Link
) -> None:
    subscription = router.subscribe("s")
    later = threading.Timer(0.05, add, (link, "s", "1-1", "2-1"))
    later.start()
    seen = []
    for entry in subscription:
        seen.append((entry.id, entry.fields))
        if len(seen) == 2:
            subscription.close()
            subscription.close()
    later.join()  # the entries may come before the replies, and the link ends with the test
    assert seen == [("1-1", {"f": "v"}), ("2-1", {"f": "v"})]
    assert subscription.end is End.CLOSED
    until(lambda: router.metrics()["streams"] == 0)


def test_what_a_router_does_is_in_the_metrics_of_its_program(router: StreamRouter, link: Link) -> None:
    def shown(name: str) -> float | None:
        return REGISTRY.get_sample_value(f"usher_router_{name}", {"router": "test"})

    gc.collect()  # earlier ones of this name
    before = shown("entries_total") or 0
    subscription = router.subscribe("s")
    add(link, "s", "1-1", "2-1")
    taken(subscription, 2)
    assert (shown("entries_total"), shown("streams")) == (before + 2, 1)
    subscription.close()
    until(lambda: shown("streams") == 0)
    assert REGISTRY.get_sample_value("usher_service_threads_down", {"service": "router"}) is not None


def test_a_subscriber_that_waits_gets_everything_and_nobody_waits_for_it(router: StreamRouter, link: Link) -> None:
    ids = add(link, "s", *(f"{number}-1" for number in range(1, 101)))
    slow, quick = router.subscribe("s", capacity=20), router.subscribe("s")
    assert taken(quick, 100) == ids
    assert taken(slow, 100) == ids
    assert slow.resets == 0


def test_a_callback_that_fails_ends_its_own_subscription_only(router: StreamRouter, link: Link) -> None:
    def fail(_subscription: object, _entries: object) -> None:
        raise ValueError("no")

    failing, other = router.subscribe("s", on_entries=fail), router.subscribe("s")
    add(link, "s", "1-1")
    assert taken(other, 1) == [b"1-1"]
    until(lambda: failing.end is End.CALLBACK_FAILED)
    assert "ValueError" in failing.detail


def test_a_callback_gets_entries_in_order_however_many_readers_there_are(redis_url: str) -> None:
    """One that is slow holds up its reader, with what came in the same read behind it; another reader must not get
    ahead of that."""
    begun, go_on, calls, link = threading.Event(), threading.Event(), Tally(), Link(redis_url, "test")

    def slow(_subscription: object, _entries: object) -> None:
        begun.set()
        go_on.wait(PATIENCE_S)

    add_many(link, [("XADD", "slow", "1-1", "f", "v"), ("XADD", "s", "1-1", "f", "v")])
    router = StreamRouter(redis_url, mode=Mode.PORTABLE, options=RouterOptions(worker_count=2))
    router.subscribe("slow", on_entries=slow)
    router.subscribe("s", on_entries=calls)
    router.start()
    try:
        assert begun.wait(PATIENCE_S)
        add(link, "s", "2-1")
        other = router.subscribe("other")
        add(link, "other", "1-1")
        assert taken(other, 1) == [b"1-1"], "the other reader is at work"
        nothing_comes(other)
        assert calls.count == 0
        go_on.set()
        until(lambda: calls.count == 2)
    finally:
        router.stop()
        link.close()
    assert calls.ids == {b"s": [b"1-1", b"2-1"]}


def test_a_key_that_is_not_a_stream_ends_its_subscription_and_no_other(router: StreamRouter, link: Link) -> None:
    link.call("SET", "text", "x")
    others = router.subscribe_all([f"s{number}" for number in range(20)])
    wrong, wrong_now = router.subscribe("text"), router.subscribe("text", NOW)
    for subscription in (wrong, wrong_now):
        with pytest.raises(SubscriptionEnded, match="not a stream"):
            subscription.take(timeout_s=PATIENCE_S)
        assert subscription.end is End.NOT_A_STREAM
    for number, other in enumerate(others):
        add(link, f"s{number}", "1-1")
        assert taken(other, 1) == [b"1-1"]


def test_a_stream_deleted_while_subscribed_goes_on_when_it_is_made_again_with_any_ids(
    router: StreamRouter, link: Link
) -> None:
    subscription = router.subscribe("s")
    for ids, resets in ((("5-1", "6-1"), 0), (("1-1", "2-1"), 1), (("7-1",), 1)):
        add(link, "s", *ids)
        assert taken(subscription, len(ids)) == [one.encode() for one in ids]
        link.call("DEL", "s")
        assert subscription.resets >= resets
    nothing_comes(subscription)


def test_an_id_from_the_future_is_one_of_an_earlier_stream_of_that_name(router: StreamRouter, link: Link) -> None:
    add(link, "s", "1-1")
    subscription = router.subscribe("s", "99999999999999-0")
    assert taken(subscription, 1) == [b"1-1"]
    add(link, "s", "2-1")
    assert taken(subscription, 1) == [b"2-1"]
    assert subscription.resets == 1


def test_an_id_from_the_future_is_found_out_though_another_subscription_finds_entries(
    url: str, mode: Mode, link: Link
) -> None:
    """Else it is not before ``check_seconds``, in which the ids may pass the position, and nobody would know of what
    was below it."""
    router = StreamRouter(url, mode=mode, options=_SELDOM)
    add(link, "s", "1-1", "2-1")
    stale, other = router.subscribe("s", "50-0"), router.subscribe("s")
    router.subscribe_all(_MANY)
    router.start()
    try:
        assert taken(other, 2) == [b"1-1", b"2-1"]
        add(link, "s", "3-1")
        assert taken(other, 1) == [b"3-1"]
        assert taken(stale, 3) == [b"1-1", b"2-1", b"3-1"]
        assert (stale.resets, other.resets) == (1, 0)
    finally:
        router.stop()


def test_a_lost_end_of_a_stream_is_found_out_though_a_slow_subscription_finds_entries(
    url: str, mode: Mode, link: Link
) -> None:
    """A failover that has lost data, during which the slow one gets room again."""
    with Proxy(url) as proxy, running(proxy.url, mode, **vars(_SELDOM)) as router:
        add(link, "s", "1-1", "2-1", "9-1")
        quick = router.subscribe("s")
        slow = router.subscribe("s", capacity=2)
        router.subscribe_all(_MANY)
        assert taken(quick, 3) == [b"1-1", b"2-1", b"9-1"]
        until(lambda: slow.held)
        proxy.lead_to(_NOWHERE)
        proxy.break_all()
        link.call("DEL", "s")
        add(link, "s", "1-1", "2-1", "3-2")
        assert taken(slow, 2) == [b"1-1", b"2-1"]
        proxy.lead_to(url)
        assert taken(slow, 1) == [b"3-2"]
        assert taken(quick, 3) == [b"1-1", b"2-1", b"3-2"]
        assert (quick.resets, slow.resets) == (1, 0)


def test_a_key_that_may_not_be_read_ends_its_subscription(url: str, link: Link, mode: Mode) -> None:
    link.call("ACL", "SETUSER", "limited", "reset", "on", ">pw", "~s*", "+@all")
    scheme, _, rest = url.partition("://")
    try:
        with running(f"{scheme}://limited:pw@{rest.rpartition('@')[2]}", mode) as router:
            good, bad = router.subscribe("s"), router.subscribe("other")
            until(lambda: bad.end is End.REFUSED)
            add(link, "s", "1-1")
            assert taken(good, 1) == [b"1-1"]
    finally:
        link.call("ACL", "DELUSER", "limited")


@pytest.mark.parametrize(
    "wrong", ["", "x", "1-", "-1", "1-1-1", "18446744073709551616-0", "1-18446744073709551616", "$", "+"]
)
def test_what_is_no_id_is_refused_at_once(wrong: str) -> None:
    with pytest.raises(ValueError, match="id"):
        StreamRouter(_NOWHERE).subscribe("s", wrong)


def test_what_cannot_be_subscribed_to_is_refused_at_once() -> None:
    router = StreamRouter(_NOWHERE, prefixes=["tickets:"])
    with pytest.raises(ValueError, match="prefixes"):
        router.subscribe("other")
    with pytest.raises(ValueError, match="capacity"):
        router.subscribe("tickets:1", capacity=0)
    with pytest.raises(ValueError, match="prefix"):
        StreamRouter(_NOWHERE, prefixes=["a", "ab"])
    router.stop()
    with pytest.raises(UsherError, match="stopped"):
        router.subscribe("tickets:1")


def test_what_now_is_cannot_be_known_without_redis() -> None:
    router = StreamRouter(_NOWHERE)
    router.start()
    try:
        with pytest.raises(RedisTrouble, match="where these streams end"):
            router.subscribe_all(["s"], NOW, timeout_s=0.3)
        assert router.metrics()["streams"] == 0, "nobody has a subscription that could be closed"
    finally:
        router.stop()


def test_stopping_ends_every_subscription_and_wakes_who_waits(router: StreamRouter) -> None:
    subscription = router.subscribe("s")
    threading.Timer(0.1, router.stop).start()
    assert list(subscription) == []
    assert subscription.end is End.ROUTER_STOPPED
    router.stop()


def test_only_changes_under_the_prefixes_are_announced(redis_url: str) -> None:
    link = Link(redis_url, "test")
    with running(redis_url, Mode.CHANGE_DRIVEN, prefixes=["a:", "b:"]) as router:
        subscription = router.subscribe("a:1", NOW)
        number = 0
        while not (before := router.metrics()["announced"]):  # until it hears of changes
            number += 1
            add(link, "a:1", f"1-{number}")
            assert taken(subscription, 1) == [b"1-%d" % number]
        for other in range(1, 100):
            add(link, "c:1", f"1-{other}")
        add(link, "a:1", "2-1")
        assert taken(subscription, 1) == [b"2-1"]
        until(lambda: router.metrics()["announced"] > before)
        assert router.metrics()["announced"] <= number + 1 < 100
    link.close()


def test_an_idle_subscription_is_less_than_a_kibibyte(url: str, mode: Mode) -> None:
    """Key, position, and its place in the book; the figure of the bench is that of the process."""
    count = 5000
    keys = [b"tenant:%06d:tickets" % number for number in range(count)]
    with running(url, mode) as router:
        router.subscribe("warm-up")
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            subscriptions = router.subscribe_all(keys, on_entries=Tally())
            until(lambda: router.metrics()["empty_reads"] >= 1)
            each = (tracemalloc.get_traced_memory()[0] - before) / count
        finally:
            tracemalloc.stop()
        assert each < 1024, each
        assert len(subscriptions) == count


def test_a_callback_of_which_a_call_runs_nothing_is_refused() -> None:
    async def waits(subscription: object, entries: object) -> None: ...

    router = StreamRouter(_NOWHERE)
    with pytest.raises(TypeError, match="on_entries is `async def`"):
        router.subscribe("tickets:42", on_entries=waits)  # type: ignore[arg-type]
    router.stop()
