"""Hear of changed keys: a RESP3 connection on which Redis reports them (CLIENT TRACKING with BCAST).

redis-py's parser hides such messages, so hiredis reads the socket itself; redis-py opens it (address, TLS, password,
database).
"""

from __future__ import annotations

import logging
import select
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import hiredis
import redis

from usher.common.base.clock import now_s
from usher.common.base.errors import NotNow, ReplyUnknown, UsherError
from usher.common.base.log import event
from usher.common.redis.client import describe_unreachable, named
from usher.common.redis.endpoints import has_moved, make_connection, misled
from usher.common.redis.private_names import socket_of
from usher.common.runtime.service import Service

log = logging.getLogger(__name__)

_CHUNK = 262_144
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
#: The parser's answer when it has no whole message; None would be a reply.
_NOTHING = object()


class TrackingRefused(UsherError):
    """This server, or a proxy before it, does not report changes."""


class ChangeEar(Service):
    """Service that hears which keys under ``prefixes`` (none: all keys) change. ``changed`` gets what ``listen``
    returns: it only says where to look, and nothing is lost when a report is. ``refused`` is called, once, when Redis
    cannot announce changes or does not do so reliably, and why; it has then nothing more to do. Every trouble ends the
    connection; the next turn makes another."""

    name = "watch"

    def __init__(
        self,
        url: str,
        client: str,
        prefixes: Sequence[bytes],
        changed: Callable[[list[bytes] | None], object] = lambda changed: None,
        refused: Callable[[str], object] = lambda why: None,
    ) -> None:
        super().__init__()
        self._url = url
        self._client = client
        self._changed, self._refused = changed, refused
        self.why = ""  # it is refused
        # An empty prefix means every key, and Redis is asked for every key by giving no prefix.
        self._wanted = [word for prefix in prefixes if prefix for word in (b"PREFIX", prefix)]
        self._connection: Any = None
        self._socket: socket.socket | None = None
        self._reader: Any = None
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
            self.close()
            if not self.stopping:
                self.why = str(refused)
                self._refused(self.why)
        return 0.0

    def listen(self) -> list[bytes] | None:
        """Wait a little, and return the keys that have changed; None: any may have (a new connection, FLUSHALL). Raises
        NotNow, ReplyUnknown, and TrackingRefused when Redis cannot, or will not, report changes."""
        if self._socket is not None and has_moved(self._url, self._connection):
            self.close()  # a replaced master of Redis reports nothing, and yet answers PING
        if self._socket is None:
            self._connect()
            return None
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(_WAIT_S * 1000):
            self._ask(now_s())
            return []
        self._heard_s, self._asked = now_s(), False
        changed: list[bytes] = []
        for message in self._messages(self._socket):
            if isinstance(message, hiredis.PushNotification) and message and message[0] == b"invalidate":
                if message[1] is None:
                    return None
                changed += message[1]
        return changed

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
            event(log, "change_notification_missed", level=logging.WARNING, streams=len(late))
        for key in late:
            self._unsaid.pop(key, None)
        self._lost.update(late)
        if self._lost.total() >= _MOST_UNSAID:
            raise TrackingRefused(f"{self._lost.total()} changes were not announced")

    def interrupt(self) -> None:
        if (sock := self._socket) is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it was closed meanwhile

    def close(self) -> None:
        self._socket = None
        if self._connection is not None:
            self._connection.disconnect()

    on_end = close

    def _connect(self) -> None:
        self._connection = None
        try:
            self._connection = make_connection(self._url, self._client, _TIMEOUT_S)
            self._connection.connect()
            self._socket = sock = socket_of(self._connection)
        except (redis.RedisError, OSError) as failed:
            self._hung_up = 0
            if self._connection is not None:
                misled(self._url, self._connection)
            self.close()
            raise NotNow("CONNECT", describe_unreachable(self._url, failed)) from failed
        self._reader = hiredis.Reader(replyError=redis.ResponseError, notEnoughData=_NOTHING)
        for command in (("HELLO", 3), ("CLIENT", "TRACKING", "ON", "BCAST", *self._wanted)):
            try:
                self._send(sock, command)
                replies: list[Any] = []
                while not replies:
                    replies = [one for one in self._messages(sock) if not isinstance(one, hiredis.PushNotification)]
            except ReplyUnknown as broken:  # a server without RESP3 may close the connection instead of answering
                self._hung_up += 1
                if self._hung_up >= _MOST_HUNG_UP:
                    raise TrackingRefused(str(broken)) from broken
                raise NotNow("HELLO", str(broken)) from broken
            if isinstance(replies[0], redis.RedisError):
                self.close()
                trouble = named(replies[0])
                if isinstance(trouble, NotNow):
                    raise trouble
                raise TrackingRefused(f"{command[0]} {command[1]}: {trouble}")
        self._hung_up = 0
        self._heard_s, self._asked = now_s(), False

    def _ask(self, now: float) -> None:
        """Check with PING that Redis is there. Raises ReplyUnknown when the last PING was not answered."""
        if now - self._heard_s < _QUIET_S or self._socket is None:
            return
        if self._asked:
            self.close()
            raise ReplyUnknown(f"Redis has not answered for {_QUIET_S:g} s")
        self._send(self._socket, ("PING",))
        self._heard_s, self._asked = now, True

    def _send(self, sock: socket.socket, command: Sequence[Any]) -> None:
        try:
            sock.sendall(b"".join(self._connection.pack_command(*command)))
        except OSError as failed:
            self.close()
            raise ReplyUnknown(f"the connection to Redis broke while sending: {failed}") from failed

    def _messages(self, sock: socket.socket) -> list[Any]:
        """Return all messages that have come, in order. Raises ReplyUnknown."""
        messages: list[Any] = []
        try:
            while True:
                chunk = sock.recv(_CHUNK)
                if not chunk:
                    raise ConnectionError("Redis has closed it")
                self._reader.feed(chunk)
                # Bytes that TLS has already decrypted do not make the socket readable again.
                if len(chunk) < _CHUNK and not getattr(sock, "pending", int)():
                    break
            while (message := self._reader.gets()) is not _NOTHING:
                messages.append(message)
        except (OSError, hiredis.HiredisError) as failed:
            self.close()
            raise ReplyUnknown(f"the connection to Redis broke: {failed}") from failed
        return messages
