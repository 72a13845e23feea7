"""Hear of changed keys: a RESP3 connection on which Redis reports them (CLIENT TRACKING with BCAST).

Its connection is asked in RESP2, as every other one: what cannot speak RESP3 says so to HELLO, and is told apart from
what cannot be reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import redis

from usher.common.base.clock import now_s
from usher.common.base.errors import NotNow, ReplyUnknown, UsherError
from usher.common.base.log import WARNING, event
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.private_names import hear_changes
from usher.common.runtime.service import Service

_TIMEOUT_S = 5.0
#: Longest wait of ``listen``.
_WAIT_S = 1.0
#: A connection on which nothing came for this long is checked with PING.
_QUIET_S = 5.0
#: Connections in a row that ended at the question, after which the question is taken for the reason. They have pauses
#: between them, so that a restarting server, or an operator who kills connections, is not taken for it.
_MOST_HUNG_UP = 5
#: Seconds within which a change that somebody has found must be reported, or it counts as lost; and the number of lost
#: ones after which reports are not trusted any more.
_SAID_WITHIN_S, _MOST_UNSAID = 1.0, 3
#: Reports that one turn takes.
_MOST_NEWS = 10_000


class TrackingRefused(UsherError):
    """This server, or a proxy before it, does not report changes."""


class ChangeEar(Service):
    """Service that hears which keys under ``prefixes`` (none: all keys) change. ``changed`` gets what ``listen``
    returns: it only says where to look, and nothing is lost when a report is. ``refused`` is called, once, when Redis
    cannot announce changes or does not do so reliably, and why; it has then nothing more to do. Every trouble ends the
    connection; the next turn makes another."""

    name = "watch"
    waits_on_link = True

    def __init__(
        self,
        url: str,
        client: str,
        prefixes: Sequence[bytes],
        changed: Callable[[list[bytes] | None], object] = lambda changed: None,
        refused: Callable[[str], object] = lambda why: None,
    ) -> None:
        super().__init__()
        self._link = Link(url, client, _TIMEOUT_S)
        self._changed, self._refused = changed, refused
        self.why = ""  # it is refused
        # An empty prefix means every key, and Redis is asked for every key by giving no prefix.
        self._wanted = [word for prefix in prefixes if prefix for word in (b"PREFIX", prefix)]
        self._news: list[list[bytes] | None] = []
        self._hung_up = 0
        self._heard_s, self._asked = 0.0, False
        self._unsaid: dict[bytes, float] = {}  # key -> when a change of it was found that was not reported
        self._lost: Counter[bytes] = Counter()

    def run_once(self) -> float:
        if self.why:
            return self.stalls_after_s / 3
        try:
            changed = self.listen()
            self._changed(changed)  # before the judgement: from here on nobody takes these for unannounced
            self.judge(changed)
        except TrackingRefused as refused:
            self._link.close()
            if not self.stopping:
                self.why = str(refused)
                self._refused(self.why)
        return 0.0

    def listen(self) -> list[bytes] | None:
        """Wait a little, and return the keys that have changed; None: any may have (a new connection, FLUSHALL). Raises
        NotNow, ReplyUnknown, and TrackingRefused when Redis cannot, or will not, report changes."""
        known = self._link.connections
        connection = self._link.connected(goes_along=True)  # a replaced master answers PING, and reports nothing
        if self._link.connections != known:
            self._subscribe(connection)
            return None
        try:
            if not connection.can_read(_WAIT_S):
                self._ask(connection, now_s())
                return []
            self._heard_s, self._asked = now_s(), False
            self._news.clear()
            while len(self._news) < _MOST_NEWS and connection.can_read():
                connection.read_response(push_request=True)
        except redis.RedisError as failed:
            self._link.close()
            raise ReplyUnknown(f"the connection to Redis broke: {failed}") from failed
        changed = [key for keys in self._news for key in keys or ()]
        return None if None in self._news else changed

    def unsaid(self, keys: Iterable[bytes]) -> None:
        """Note changes that were found, and not reported so far. Any thread may call it."""
        for key in keys:
            self._unsaid.setdefault(key, now_s())

    def judge(self, changed: list[bytes] | None) -> None:
        """Judge whether changes are reported. Raises TrackingRefused when too many were not. After a new connection the
        count begins anew."""
        if changed is None:
            self._unsaid.clear()
            self._lost.clear()
            return
        for key in changed:
            self._unsaid.pop(key, None)
            # It is reported: a change that came too late, or was handled by another process, is no loss.
            self._lost.pop(key, None)
        late = [key for key, found_s in list(self._unsaid.items()) if now_s() - found_s > _SAID_WITHIN_S]
        if late:
            event("change_notification_missed", level=WARNING, streams=len(late))
        for key in late:
            self._unsaid.pop(key, None)
        self._lost.update(late)
        if self._lost.total() >= _MOST_UNSAID:
            raise TrackingRefused(f"{self._lost.total()} changes were not announced")

    def _subscribe(self, connection: Any) -> None:
        connection.protocol = 3  # of this one; the next is asked in RESP2 again
        hear_changes(connection, self._news.append)
        for command in (("HELLO", 3), ("CLIENT", "TRACKING", "ON", "BCAST", *self._wanted)):
            try:
                self._link.call(*command)
            except CommandRefused as refused:
                raise TrackingRefused(f"{command[0]} {command[1]}: {refused}") from refused
            except ReplyUnknown as broken:  # a server without RESP3 may close the connection instead of answering
                self._hung_up += 1
                if self._hung_up >= _MOST_HUNG_UP:
                    raise TrackingRefused(str(broken)) from broken
                raise NotNow("HELLO", str(broken)) from broken
            except NotNow:
                self._link.close()
                raise
        self._hung_up = 0
        self._heard_s, self._asked = now_s(), False

    def _ask(self, connection: Any, now: float) -> None:
        """Check with PING that Redis is there. Raises ReplyUnknown when the last PING was not answered."""
        if now - self._heard_s < _QUIET_S:
            return
        if self._asked:
            self._link.close()
            raise ReplyUnknown(f"Redis has not answered for {_QUIET_S:g} s")
        connection.send_command("PING")
        self._heard_s, self._asked = now, True
