"""Change listeners: tell a master which sources have changed, without asking each of them.

``PushListener``: Redis announces changes (CLIENT TRACKING BCAST PREFIX) over one connection, for any number of sources.
``PollListener``: for a server that cannot do that, one XREAD that waits on all sources of our shards. Both only say
where to look; nothing is read, so nothing is lost when an announcement is.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from usher.common.base.clock import now_s
from usher.common.base.errors import ReplyUnknown
from usher.common.redis.client import Arg, CommandRefused, Link
from usher.common.redis.tracking import KeysChanged, TrackingLink
from usher.common.router.desk import as_found, last_id_of

#: Longest wait of one turn.
_WAIT_S = 2.0
#: A connection on which nothing came for this long is checked with PING.
_QUIET_S = 5.0
#: How often the poll listener forgets how far it was: a stream that was deleted and made again may have lower ids.
_FORGET_S = 30.0
_PAGE = 1000


class ChangeListener(Protocol):
    """Listener for changes of sources. Used by one thread, except for ``interrupt``."""

    def listen(self) -> list[bytes] | None:
        """Wait a little for changes, and return the changed sources. None: anything may have changed. Raises NotNow,
        ReplyUnknown, TrackingRefused."""

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


class PushListener:
    """Listener to which Redis announces the keys under ``prefixes`` that change."""

    def __init__(self, link: TrackingLink, prefixes: Sequence[bytes]) -> None:
        self._link = link
        # An empty prefix means every key, and Redis is asked for every key by giving no prefix.
        self._prefixes = [prefix for prefix in prefixes if prefix]
        self._heard_s = 0.0
        self._asked = False

    def listen(self) -> list[bytes] | None:
        if self._link.has_moved:  # a replaced master of Redis sends no changes, and yet answers PING
            self._link.disconnect()
        if not self._link.connected:
            self._link.connect(self._prefixes)
            self._heard_s, self._asked = now_s(), False
            return None
        poll = select.poll()
        poll.register(self._link.socket, select.POLLIN)
        if not poll.poll(_WAIT_S * 1000):
            self._ask(now_s())
            return []
        self._heard_s, self._asked = now_s(), False
        changed: list[bytes] = []
        for message in self._link.receive():
            if isinstance(message, KeysChanged):
                if message.keys is None:
                    return None
                changed += message.keys
        return changed

    def _ask(self, now: float) -> None:
        """Check with PING that Redis is there. Raises ReplyUnknown when the last PING was not answered."""
        if now - self._heard_s < _QUIET_S:
            return
        if self._asked:
            self._link.disconnect()
            raise ReplyUnknown(f"Redis has not answered for {_QUIET_S:g} s")
        self._link.send([("PING",)])
        self._heard_s, self._asked = now, True

    def interrupt(self) -> None:
        self._link.interrupt()

    def close(self) -> None:
        self._link.disconnect()


class PollListener:
    """Listener that waits on all sources that ``mine`` returns."""

    def __init__(self, link: Link, mine: Callable[[], list[bytes]]) -> None:
        self._link = link
        self._mine = mine
        self._after: dict[bytes, bytes] = {}  # source -> its last id when it was looked at
        self._forgotten_s = now_s()
        self._over = threading.Event()

    def listen(self) -> list[bytes] | None:
        if now_s() - self._forgotten_s > _FORGET_S:
            self._forgotten_s = now_s()
            self._after.clear()
        mine = self._mine()
        fresh = [source for source in mine if source not in self._after]
        if fresh:
            try:
                self._look(fresh)
            except BaseException:
                self._after.clear()  # else those that were looked at before the failure would never be reported
                raise
            return fresh
        waited = [source for source in mine if self._after[source]]
        if not waited:
            self._over.wait(_WAIT_S)
            return []
        words: tuple[Arg, ...] = (
            "XREAD",
            "COUNT",
            1,
            "BLOCK",
            int(_WAIT_S * 1000),
            "STREAMS",
            *waited,
            *(self._after[source] for source in waited),
        )
        try:
            found = as_found(self._link.call(*words, block_s=_WAIT_S))
        except CommandRefused:  # one of them is no longer a stream, or may not be read
            self._after.clear()
            return None
        for source in found:
            del self._after[source]
        return list(found)

    def _look(self, sources: Sequence[bytes]) -> None:
        for at in range(0, len(sources), _PAGE):
            page = sources[at : at + _PAGE]
            for source, reply in zip(
                page, self._link.pipeline([("XINFO", "STREAM", source) for source in page]), strict=True
            ):
                try:
                    self._after[source] = last_id_of(reply) or b"0-0"
                except CommandRefused:
                    self._after[source] = b""

    def interrupt(self) -> None:
        self._over.set()
        self._link.interrupt()

    def close(self) -> None:
        self._link.close()
