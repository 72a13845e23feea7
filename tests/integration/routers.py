"""What tests of the stream router share: a router that is stopped at the end, and waiting for what must come."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from usher.common.protocol.message import EntryView
from usher.common.redis.client import Arg, Link
from usher.common.router.router import Mode, RouterOptions, StreamRouter, Subscription

PATIENCE_S = 30.0


def until(condition: Callable[[], object]) -> None:
    """Wait for what must happen; how soon is no matter of a test."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)


@contextlib.contextmanager
def running(
    url: str, mode: Mode = Mode.CHANGE_DRIVEN, prefixes: Sequence[str] = (), **options: object
) -> Iterator[StreamRouter]:
    """A started router."""
    router = StreamRouter(url, mode=mode, prefixes=prefixes, name="test", options=RouterOptions(**options))  # type: ignore[arg-type]
    router.start()
    try:
        yield router
    finally:
        router.stop()
        assert not any(service.alive for service in router.services)


def taken(subscription: Subscription, count: int) -> list[bytes]:
    """The ids of the next ``count`` entries."""
    ids: list[bytes] = []
    while len(ids) < count:
        more = subscription.take(count - len(ids), PATIENCE_S)
        assert more, f"only {ids} came"
        ids += [entry.stream_id for entry in more]
    return ids


def nothing_comes(subscription: Subscription) -> None:
    assert subscription.take(timeout_s=0.1) == []


def add(link: Link, key: str, *ids: str) -> list[bytes]:
    replies = link.pipeline([("XADD", key, one, "f", "v") for one in ids])
    assert not any(isinstance(reply, Exception) for reply in replies), replies
    return replies


def add_many(link: Link, commands: Sequence[Sequence[Arg]]) -> None:
    for at in range(0, len(commands), 2000):
        assert not any(isinstance(reply, Exception) for reply in link.pipeline(commands[at : at + 2000]))


class Tally:
    """A callback that notes every entry of every stream."""

    def __init__(self) -> None:
        self.ids: dict[bytes, list[bytes]] = {}
        self.count = 0

    def __call__(self, subscription: Subscription, entries: Sequence[EntryView]) -> None:
        self.ids.setdefault(subscription.key, []).extend(entry.stream_id for entry in entries)
        self.count += len(entries)
