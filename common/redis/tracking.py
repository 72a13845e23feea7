"""Track changed keys on a RESP3 connection: Redis reports them (CLIENT TRACKING with BCAST), and answers reads.

redis-py's parser hides such messages, so hiredis reads the socket itself; redis-py opens it (address, TLS, password,
database).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import hiredis
import redis

from usher.common.base.errors import NotNow, ReplyUnknown, UsherError
from usher.common.redis.client import Arg, CommandRefused, describe_unreachable, named
from usher.common.redis.endpoints import has_moved, make_connection, misled
from usher.common.redis.private_names import socket_of

_CHUNK = 262_144
#: Kind of NotNow: the connection ended when it was asked for RESP3 or tracking. After so many in a row the question is
#: taken for the reason. They have pauses between them, so that a restarting server, or an operator who kills
#: connections, is not taken for it.
_HUNG_UP, _MOST_HUNG_UP = "HELLO", 5
#: The parser's answer when it has no whole message; None would be a reply.
_NOTHING = object()


class TrackingRefused(UsherError):
    """This server, or a proxy before it, does not report changes."""


class KeysChanged(NamedTuple):
    """A message that these keys have changed; None: any key may have (FLUSHALL)."""

    keys: list[bytes] | None


class TrackingLink:
    """A tracking connection, used by one thread. Not connected at first; every trouble disconnects it."""

    def __init__(self, url: str, name: str, timeout_s: float) -> None:
        self._url = url
        self._name = name
        self._timeout_s = timeout_s
        self._connection: Any = None
        self._socket: Any = None
        self._reader = _reader()
        self._hung_up = 0

    @property
    def connected(self) -> bool:
        return self._socket is not None

    @property
    def socket(self) -> socket.socket:
        sock: socket.socket = self._socket
        return sock

    @property
    def has_moved(self) -> bool:
        """True if another link of this process was given another address since this one connected; nothing on this
        connection would show it."""
        return self.connected and has_moved(self._url, self._connection)

    def misled(self) -> None:
        """Note that the server is not where this connection leads: the next ``connect`` asks another host. See
        endpoints.misled."""
        if self._connection is not None:
            misled(self._url, self._connection)

    def connect(self, prefixes: Sequence[bytes]) -> None:
        """Connect, and ask for changes of keys that begin with one of ``prefixes`` (none: of all keys).

        Raises NotNow when Redis cannot be reached, TrackingRefused when it cannot, or will not, report changes.
        """
        try:
            self._connect(prefixes)
            self._hung_up = 0
        except NotNow as trouble:
            self._hung_up = self._hung_up + 1 if trouble.kind == _HUNG_UP else 0
            if self._hung_up >= _MOST_HUNG_UP:
                raise TrackingRefused(str(trouble)) from trouble
            raise

    def _connect(self, prefixes: Sequence[bytes]) -> None:
        self._connection = None
        try:
            self._connection = make_connection(self._url, self._name, self._timeout_s)
            self._connection.connect()
            self._socket = socket_of(self._connection)
        except (redis.RedisError, OSError) as failed:
            self.misled()
            self.disconnect()
            raise NotNow("CONNECT", describe_unreachable(self._url, failed)) from failed
        self._reader = _reader()
        wanted = [word for prefix in prefixes for word in ("PREFIX", prefix)]
        for command in (("HELLO", 3), ("CLIENT", "TRACKING", "ON", "BCAST", *wanted)):
            try:
                self.send([command])
                reply = self._one_reply()
            except ReplyUnknown as broken:  # a server without RESP3 may close the connection instead of answering
                raise NotNow(_HUNG_UP, str(broken)) from broken
            if isinstance(reply, NotNow):
                self.disconnect()
                raise reply
            if isinstance(reply, Exception):
                self.disconnect()
                raise TrackingRefused(f"{command[0]!s} {command[1]!s}: {reply}")

    def send(self, commands: Sequence[Sequence[Arg]]) -> None:
        try:
            for packed in self._connection.pack_commands(commands):
                self._socket.sendall(packed)
        except (redis.RedisError, OSError) as failed:
            self.disconnect()
            raise ReplyUnknown(f"the connection to Redis broke while sending: {failed}") from failed

    def receive(self) -> list[Any]:
        """Return all messages that have come, in order: ``KeysChanged``, replies, and exceptions where Redis refused
        (CommandRefused, NotNow). Call it when the socket is readable. Raises ReplyUnknown."""
        messages: list[Any] = []
        try:
            while True:
                chunk = self._socket.recv(_CHUNK)
                if not chunk:
                    raise ConnectionError("Redis has closed it")
                self._reader.feed(chunk)
                # Bytes that TLS has already decrypted do not make the socket readable again.
                if len(chunk) < _CHUNK and not getattr(self._socket, "pending", int)():
                    break
            while (message := self._reader.gets()) is not _NOTHING:
                if isinstance(message, redis.RedisError):
                    trouble = named(message)
                    is_ours = isinstance(trouble, (NotNow, CommandRefused))
                    messages.append(trouble if is_ours else CommandRefused(str(trouble)))
                elif not isinstance(message, hiredis.PushNotification):
                    messages.append(message)
                elif message and message[0] == b"invalidate":
                    messages.append(KeysChanged(message[1]))
        except (OSError, hiredis.HiredisError) as failed:
            self.disconnect()
            raise ReplyUnknown(f"the connection to Redis broke: {failed}") from failed
        return messages

    def disconnect(self) -> None:
        self._socket = None
        if self._connection is not None:
            self._connection.disconnect()

    def interrupt(self) -> None:
        sock = self._socket
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it was closed meanwhile

    def _one_reply(self) -> Any:
        while True:
            for message in self.receive():
                if not isinstance(message, KeysChanged):
                    return message


def _reader() -> Any:
    return hiredis.Reader(replyError=redis.ResponseError, notEnoughData=_NOTHING)
