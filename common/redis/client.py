"""Connections to Redis: bytes in and out, no retries, and errors that say whether the command happened.

A ``Link`` is a connection used by one thread. redis-py's own client is avoided on purpose: it repeats commands by
default (one ``xadd`` left two entries, a lost XREADGROUP reply skipped a message) and reshapes replies; a Link does
neither.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import hiredis
import redis

from usher.common.base.clock import now_s
from usher.common.base.errors import (
    GroupMissing,
    NotNow,
    RedisTrouble,
    ReplyUnknown,
    ServerChanged,
    SettingsError,
    StartRefused,
)
from usher.common.base.log import redacted
from usher.common.base.text import info_lines
from usher.common.redis import scripts
from usher.common.redis.endpoints import ClusterNode, Place, server_of
from usher.common.redis.private_names import socket_of

Arg = bytes | str | int | float

#: Errors after which the server and its memory are the same as before. After any other it may be another server, or a
#: restarted one.
SAME_MEMORY = frozenset({"BUSY", "MISCONF", "OOM", "NOREPLICAS", "UNKILLABLE", "NOSCRIPT"})
#: Errors after which another server is, or may be, the right one now: a master that has lost its replicas was perhaps
#: cut off, or deposed without knowing it.
ELSEWHERE = ("READONLY", "MOVED", "ASK", "MASTERDOWN", "CLUSTERDOWN", "NOREPLICAS", "UNBLOCKED")
#: Errors that mean "refused, nothing happened, try again", by their first word, as Redis sends it.
_NOT_NOW = (*ELSEWHERE, "LOADING", "BUSY", "MISCONF", "OOM", "TRYAGAIN", "UNKILLABLE")
#: Kinds for a server that was reached and did not let us in: because of the password or user, or for another reason (a
#: database that it does not have, missing rights).
AUTH, REFUSED = "AUTH", "REFUSED"
#: A refusal at connect that passes. redis-py treats it as a failed connection, but misses the wording of a cluster's
#: node.
_FULL = "max number of clients"
#: "UNBLOCKED" alone says that somebody ended the wait, most often a failover: the server is another one's replica now.
_GROUP_GONE = ("NOGROUP ", "UNBLOCKED the stream key no longer exists")
#: What to look at when TLS fails, whose library leaves the cause to be guessed; and words of such errors.
_OVER_TLS = (
    "over TLS: does the URL begin with rediss; is the server's certificate valid, and for this host; does ssl_ca_certs"
    " in the URL name the file with its CA, and ssl_certfile and ssl_keyfile a client certificate, if it wants one?"
)
_PLAIN_WORDS = ("connection reset", "connection closed")
_TLS_WORDS = ("ssl", "connection reset", "broken pipe", "no such file", "permission denied")
#: Seconds that ``answer`` waits for the rest of a reply: TLS may make a socket readable with records of its own.
_GLANCE_S = 0.01
_LOADS_AGAIN = (
    "and this user may not send it: a master of this version loads it within moments, or at once `usher acl --load`,"
    " both as the user of masters"
)
#: Seconds after which Redis is asked again whether it knows the steps of others: a lease lasts longer than that.
_LOAD_EVERY_S = 4.0
#: Bytes of a command that leave under one timeout; and the slowest network on which a reply is awaited for as long as
#: its command takes: the system buffers megabytes that are still to leave.
_CHUNK_BYTES, _SLOWEST_BYTES_PER_S = 65_536, 500_000

#: The result of ``Link.answer`` while the reply is under way.
NOT_YET = object()


class Troubles(Counter[str]):
    """Errors of Redis by their first word, of all threads."""

    def count(self, trouble: Any) -> Any:
        with _COUNTING:
            self[trouble.kind.lower()] += 1
        return trouble


_COUNTING = threading.Lock()
troubles = Troubles()


class ScriptMissing(NotNow):
    """Redis does not know the script (after a restart, failover or SCRIPT FLUSH); its text must be sent again."""


class CommandRefused(Exception):
    """Redis answered with an error that a retry will not mend. The command did not happen."""

    kind = "refused"


def named(error: redis.RedisError) -> Exception:
    text = str(error)
    if why := text.partition("discarded because of: ")[2]:  # EXECABORT: it became so between the queueing and EXEC
        return named(redis.ResponseError(why))
    # redis-py strips the first words that it knows, of which ERR says nothing.
    word = text.split(" ", 1)[0] if error.status_code in (None, "ERR") else error.status_code
    if word == "NOSCRIPT":
        return ScriptMissing(word, text)
    # Inside a script the first word is followed by Redis' own wrapping, before 7.0 even "ERR Error running script ...
    # -OOM ...".
    if any(gone in text for gone in _GROUP_GONE):
        return GroupMissing(f"Redis: {text}")
    if word in _NOT_NOW:
        return NotNow(word, f"Redis: {word} {text.removeprefix(word).strip()}")
    if "Error running script" in text:
        for hint in ("-OOM", "'maxmemory'", "-MISCONF", "-NOREPLICAS", "-READONLY"):
            if hint in text:
                return NotNow(hint.lstrip("-") if hint.startswith("-") else "OOM", f"Redis: {text}")
    return CommandRefused(f"Redis: {text if text.startswith(word) else f'{word} {text}'}")


def describe_unreachable(url: str, failed: object) -> str:
    """Say that Redis cannot be reached: where, why, and what to look at.

    >>> describe_unreachable("redis://h", "(104, 'Connection reset by peer')").partition(" (")[2]
    "104, 'Connection reset by peer') (a server that speaks TLS is reached with rediss instead of redis)"
    """
    # redis-py words all timeouts alike, and keeps the original one as context.
    words, scheme = f"{failed} {getattr(failed, '__context__', '')}".lower(), urlsplit(url).scheme
    is_tls = scheme.startswith("rediss")
    hint = _OVER_TLS if is_tls else "a server that speaks TLS is reached with rediss instead of redis"
    is_likely = scheme != "unix" and any(word in words for word in (_TLS_WORDS if is_tls else _PLAIN_WORDS))
    return f"Redis at {redacted(url)} cannot be reached: {failed}" + f" ({hint})" * is_likely


class ServerFacts(NamedTuple):
    """A server as a new connection finds it. ``history``: its replication id, which is new after a promotion; it also
    changes for the first replica, but then there is no former id that the server was promoted from
    (``was_promoted``)."""

    place: Place | None
    run_id: str
    history: str
    was_promoted: bool

    def follows(self, former: ServerFacts) -> bool:
        return self.run_id == former.run_id and (self.history == former.history or not self.was_promoted)


class SameServer:
    """A check that connections lead to the same redis-server process as at first, and that it was never a replica
    meanwhile. Shared by all links of an incarnation.

    A server that restarted or was replaced may have lost the last moments of its history (appendfsync everysec,
    asynchronous replication) without notice: leases, fences and acknowledgements of a moment ago are then as they were
    before. So may a server that was a replica, if only for a second: it has taken over all data of another server, and
    is the same process all the while. A cluster's node that the slot was moved to has all of it, if the node that had
    it before is unchanged and says so itself.
    """

    def __init__(self, on_change: Callable[[str], None]) -> None:
        self._on_change = on_change
        self._lock = threading.Lock()
        self._known: ServerFacts | None = None

    def check(self, found: ServerFacts, has_moved_from: Callable[[ServerFacts], bool] = lambda former: False) -> None:
        """Raise ServerChanged, after a call of ``on_change``, when this is not the server of the first call, nor one
        that was given its data. ``has_moved_from`` asks the former one."""
        with self._lock:
            known = self._known
            if known is None or found.follows(known) or has_moved_from(known):
                self._known = found
                return
        changed = ServerChanged()
        self._on_change(str(changed))
        raise changed


def _reads_no_flags(refused: object) -> bool:
    """Return True if the server (6.2) takes a ``#!lua`` line for Lua that it cannot compile; it ran nothing."""
    return isinstance(refused, CommandRefused) and "compiling script" in str(refused)


def checked(replies: list[Any]) -> list[Any]:
    """Return the replies of a pipeline. Raises the first error among them."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


class Link:
    """A connection used by one thread, which also runs the steps of ``common/lua``. It reconnects by itself at the next
    call after a break.

    ``timeout_s``: the longest standstill while a command leaves and until its reply is there; a large command may take
    its time over a slow network (``_SLOWEST_BYTES_PER_S``), and a blocking one adds its own block time. ``connections``
    counts the connects: facts learned over one connection are only as good as that connection. ``same_server`` checks
    every new connection before anything else is sent. ``lasted_s``: seconds from the first reply of the last pipeline
    to the last one.
    """

    def __init__(self, url: Any, name: str, timeout_s: float = 5.0, same_server: SameServer | None = None) -> None:
        """Make a link to a URL, or to where a redis-py client of the application leads. Raises what ``server_of``
        raises."""
        self._server = server_of(url)
        self.url = self._server.url
        self._name = name
        self._timeout_s = timeout_s
        self._same_server = same_server
        self._elsewhere = False
        self._open = False
        self._process = 0  # id of the process that opened it
        self._leaves_s = 0.0  # for so long a large command may be on its way
        self._owed = 0  # replies under way; an aborted call leaves some, and then the next call reconnects
        self.connections = 0
        self._run = (0, "")  # number of a connection, and the run id of its server
        self.lasted_s = 0.0
        self._reads_flags = True  # of scripts, until the server refuses them
        self._digests: dict[str, str] = {}
        # The connection over which steps were loaded for others, and when Redis is asked whether it still knows them.
        self._loaded_over: int | None = None
        self._next_load_s = 0.0
        # Made now, so that what it cannot have is an error at once.
        self._connection: Any = self._server.connection(name, timeout_s) if self._server.is_fixed else None

    def call(self, *command: Arg, block_s: float = 0.0) -> Any:
        """Send one command and return its bare reply.

        Raises NotNow (did not happen), ReplyUnknown (may have happened), GroupMissing, CommandRefused.
        """
        connection = self.connected()
        self._send(connection, hiredis.pack_command(command))
        return self._receive(block_s)

    def pipeline(self, commands: Sequence[Sequence[Arg]], block_s: float = 0.0) -> list[Any]:
        """Send several commands at once. The list of replies holds an exception for each error answer. ``block_s``: how
        long one of them may block."""
        if not commands:
            return []
        connection = self.connected()
        packed = [hiredis.pack_command(tuple(command)) for command in commands]  # redis-py would look at each argument
        self._send(connection, b"".join(packed), len(commands))
        replies: list[Any] = []
        first_s = 0.0
        for _ in commands:
            try:
                replies.append(self._receive(block_s))
            except ReplyUnknown:
                raise
            except (NotNow, GroupMissing, CommandRefused) as refused:
                replies.append(refused)
            first_s = first_s or now_s()
        self.lasted_s = now_s() - first_s
        return replies

    def transaction(
        self, connection: int, commands: Sequence[Sequence[Arg]], after: Sequence[Sequence[Arg]] = ()
    ) -> tuple[list[Any] | None, list[Any]]:
        """Send commands as one MULTI/EXEC, and others behind it, at once. Return the replies of both, with an exception
        for each error answer; None for the former: a watched key had changed, and nothing happened. A WATCH is the
        connection's: ``connection`` is the number (``connections``) of the one that it was sent over. Raises the errors
        of ``call``, and ReplyUnknown if that one is gone; if Redis refused a command, none of them happened."""
        self.connected()
        if self.connections != connection:
            raise troubles.count(ReplyUnknown("the connection to Redis is not the one that watches"))
        replies = self.pipeline([("MULTI",), *commands, ("EXEC",), *after])
        *queued, done = replies[: len(commands) + 2]
        if commands and isinstance(queued[0], Exception):  # so each was a command by itself
            raise troubles.count(ReplyUnknown(f"MULTI: {queued[0]}"))
        checked([*queued, done])
        if done is not None:
            done = [troubles.count(named(one)) if isinstance(one, redis.RedisError) else one for one in done]
        return done, replies[len(commands) + 2 :]

    def all_of(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """Send several commands at once; raise the first error among the replies."""
        return checked(self.pipeline(commands))

    def run(self, name: str, keys: Sequence[str | bytes], args: Sequence[Arg]) -> Any:
        """Run step ``name`` once. Raises the errors of ``call``.

        Sending the text after NOSCRIPT is no repetition: Redis did not run anything.
        """
        arguments = (len(keys), *keys, *args)
        try:
            return self.call("EVALSHA", self.digest(name), *arguments)
        except ScriptMissing as missing:
            return self._run_text(name, arguments, missing)

    def run_each(self, name: str, keys: Sequence[str | bytes], each: Sequence[Sequence[Arg]]) -> list[Any]:
        return checked(self.try_each(name, [(keys, args) for args in each]))

    def try_each(self, name: str, each: Sequence[tuple[Sequence[str | bytes], Sequence[Arg]]]) -> list[Any]:
        """Run step ``name`` with each of these keys and arguments, in two round trips. The answer of a run that did not
        happen, or whose outcome is unknown, is the exception that ``run`` raises."""
        if not each:
            return []
        try:
            first = self.run(name, *each[0])  # from now on Redis knows the script
        except CommandRefused as refused:  # only this run: the others may be fine
            first = refused
        except RedisTrouble as trouble:
            not_sent = NotNow("CONNECT", f"not sent, because an earlier command failed: {trouble}")
            return [trouble, *[not_sent] * (len(each) - 1)]
        digest = self.digest(name)
        commands = [("EVALSHA", digest, len(keys), *keys, *args) for keys, args in each[1:]]
        try:
            return [first, *self.pipeline(commands)]
        except RedisTrouble as trouble:  # the first run has happened, and the caller must hear of it
            return [first, *[trouble] * (len(each) - 1)]

    def digest(self, name: str) -> str:
        """Return the digest by which Redis knows step ``name``. The text is made again when Redis asks for it."""
        if (digest := self._digests.get(name)) is None:
            digest = hashlib.sha1(self._text(name).encode(), usedforsecurity=False).hexdigest()
            self._digests[name] = digest
        return digest

    def load_for_others(self, names: Iterable[str]) -> list[str]:
        """Load steps for users that may run loaded ones only, as far as Redis does not know them. It is asked now and
        then: somebody may have flushed them, or an earlier load was refused. Return why Redis refused to. Raises
        RedisTrouble."""
        if now_s() < self._next_load_s and self._loaded_over == self.connections:
            return []
        names = [*names]
        known: Sequence[Any] = [0] * len(names)
        with contextlib.suppress(CommandRefused):
            known = self.call("SCRIPT", "EXISTS", *map(self.digest, names))
        missing = [name for name, is_known in zip(names, known, strict=True) if not is_known]
        answers = self.pipeline([("SCRIPT", "LOAD", self._text(name)) for name in missing])
        self._loaded_over, self._next_load_s = self.connections, now_s() + _LOAD_EVERY_S
        # Redis 6.2 knows no user that is kept from sending scripts alone.
        return [str(one) for one in answers if isinstance(one, Exception) and not _reads_no_flags(one)]

    def _text(self, name: str) -> str:
        """Return step ``name`` as this server understands it, as far as that is known."""
        return scripts.with_memory_flag(scripts.source(name)) if self._reads_flags else scripts.source(name)

    def _run_text(self, name: str, arguments: Sequence[Arg], missing: ScriptMissing) -> Any:
        self._loaded_over = None
        try:
            return self.call("EVAL", self._text(name), *arguments)
        except CommandRefused as refused:
            if "NOPERM" in str(refused) and "'eval'" in str(refused):  # EVAL itself, not a command of the script
                raise ScriptMissing(missing.kind, f"Redis does not know step {name}, {_LOADS_AGAIN}") from refused
            if not self._reads_flags or not _reads_no_flags(refused):
                raise
        self._reads_flags = False
        self._digests.clear()
        return self.call("EVAL", self._text(name), *arguments)

    def ask(self, *command: Arg) -> None:
        """Send one command; ``answer`` fetches its reply, and nothing else may be sent before that. Raises NotNow,
        ReplyUnknown."""
        connection = self.connected()
        self._send(connection, hiredis.pack_command(command))

    def answer(self) -> Any:
        """Return the reply to ``ask``, or NOT_YET while it is incomplete. Raises the errors of ``call``."""
        return self._receive(0.0, is_glance=True)

    @property
    def socket(self) -> socket.socket:
        """The socket, which becomes readable when the reply to ``ask`` comes."""
        sock: socket.socket = socket_of(self._connection)
        return sock

    @property
    def server_run(self) -> str:
        """The run id of the server, asked once for each connection; empty where Redis does not tell. Raises the errors
        of ``call``."""
        self.connected()
        if self._run[0] != self.connections:
            [told] = self.pipeline([("INFO", "server")])
            run_id = "" if isinstance(told, Exception) else info_lines(told).get("run_id", "")
            self._run = (self.connections, run_id)
        return self._run[1]

    @property
    def is_waiting(self) -> bool:
        """True while a reply is under way. Read from another thread, it may be outdated."""
        return self._owed > 0

    def interrupt(self) -> None:
        """End a blocked call from another thread; the call raises ReplyUnknown."""
        connection = self._connection
        if connection is not None and (sock := socket_of(connection)) is not None:
            with contextlib.suppress(OSError):  # it was closed meanwhile, which is the aim
                sock.shutdown(socket.SHUT_RDWR)

    def connected(self, goes_along: bool = False) -> Any:
        """Return the connection, made anew where need be. The links of a process must not lead to two servers: where
        another one is the right one now, an error tells this link's owner that its knowledge is of the former one, but
        for an owner that ``goes_along``. Raises NotNow."""
        try:
            if self._open and not self._elsewhere and not self._owed and self._process == os.getpid():
                if not self._server.has_moved(self._connection):
                    return self._connection
                if not goes_along:
                    self.close()
                    raise NotNow("CONNECT", f"Redis at {redacted(self.url)} is another server now")
            # Drop the old connection: replies on it are not for us. A forked child would get its parent's replies, also
            # those to the parent's handshake.
            self.close()
            if self._connection is None:
                self._connection = self._server.connection(self._name, self._timeout_s)
            self._connection.connect()
            if self._same_server is not None:
                with contextlib.suppress(redis.exceptions.NoPermissionError):  # `usher doctor` says so
                    self._same_server.check(self._facts(self._connection), self._has_moved_from)
            self._open, self._process = True, os.getpid()
            self.connections += 1
            return self._connection
        except ServerChanged:
            self.close()
            raise
        except (redis.RedisError, OSError, NotNow) as failed:
            self._misled()  # the address of a replaced master may be that of another server by now
            self.close()
            raise troubles.count(self._refusal(failed)) from (None if isinstance(failed, NotNow) else failed)

    def _refusal(self, failed: Exception) -> NotNow:
        """Return why there is no connection."""
        if isinstance(failed, redis.AuthenticationError):
            return NotNow(AUTH, f"Redis at {redacted(self.url)} refuses the password or user: {failed}")
        trouble = named(failed) if isinstance(failed, redis.ResponseError) else failed
        if isinstance(trouble, NotNow):
            return trouble
        if trouble is failed:
            return NotNow("CONNECT", describe_unreachable(self.url, failed))
        return NotNow("CONNECT" if _FULL in str(failed) else REFUSED, str(trouble))

    def _facts(self, connection: Any) -> ServerFacts:
        """Ask a server about itself. Raises NotNow for a replica: whose data it will have as a master is unknown."""
        told = []
        for section in ("server", "replication"):
            connection.send_command("INFO", section, check_health=False)
            told.append(info_lines(connection.read_response()))
        server, replication = told
        if replication.get("role") == "slave":
            raise NotNow("READONLY", "Redis: this is a replica")
        return ServerFacts(
            None if self._server.is_fixed else (connection.host, connection.port),
            server.get("run_id", ""),
            replication.get("master_replid", ""),
            bool(replication.get("master_replid2", "").strip("0")),
        )

    def _has_moved_from(self, former: ServerFacts) -> bool:
        """Return True if ``former`` is as it was, and has given the slot to the node of this connection. In doubt,
        False."""
        if not isinstance(self._server, ClusterNode) or former.place is None:
            return False
        node = self._server.connection(self._name, self._timeout_s, former.place)
        try:
            node.connect()
            here = (self._connection.host, self._connection.port)
            return self._facts(node).follows(former) and self._server.owner_by(node) == here
        except (redis.RedisError, OSError, NotNow):
            return False
        finally:
            node.disconnect()

    def _misled(self) -> None:
        if self._connection is not None:
            self._server.misled(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The next call reconnects, to wherever the server is then."""
        self._elsewhere = self._open = False
        self._owed = 0
        if self._connection is not None:
            self._connection.disconnect()
            self._connection = None

    def _send(self, connection: Any, packed: bytes, replies: int = 1) -> None:
        self._owed = replies
        size, self._leaves_s = len(packed), 0.0
        parts: list[Any] = [packed]
        if size > _CHUNK_BYTES:
            self._leaves_s, whole = size / _SLOWEST_BYTES_PER_S, memoryview(packed)
            parts = [whole[at : at + _CHUNK_BYTES] for at in range(0, size, _CHUNK_BYTES)]
        try:
            connection.send_packed_command(parts, check_health=False)
        except (redis.RedisError, OSError) as failed:
            self.close()
            raise troubles.count(ReplyUnknown(f"the connection to Redis broke while sending: {failed}")) from failed

    def _receive(self, block_s: float, is_glance: bool = False) -> Any:
        longer_s = block_s + self._leaves_s
        wait = {"timeout": _GLANCE_S} if is_glance else {"timeout": self._timeout_s + longer_s} if longer_s else {}
        try:
            # redis-py treats LOADING as a broken connection and would close it, although replies of a pipeline are
            # still under way.
            reply = self._connection.read_response(disconnect_on_error=False, **wait)
            self._owed -= 1
            return reply
        except (redis.ResponseError, redis.exceptions.BusyLoadingError) as refused:
            self._owed -= 1
            trouble = named(refused)
            if isinstance(trouble, NotNow) and trouble.kind in ELSEWHERE:
                self._elsewhere = True  # not closed here: replies of a pipeline may still be under way
                self._misled()
            raise troubles.count(trouble) from None
        except (redis.RedisError, OSError) as failed:
            if is_glance and isinstance(failed, redis.TimeoutError):  # the part of the reply that has come is kept
                return NOT_YET
            self.close()
            raise troubles.count(ReplyUnknown(f"the connection to Redis broke before the reply: {failed}")) from failed


class SharedLink(Link):
    """A link that many threads may use, one command or pipeline at a time; for nothing that blocks."""

    def __init__(self, url: str, name: str, timeout_s: float = 5.0) -> None:
        super().__init__(url, name, timeout_s)
        self._lock = threading.RLock()

    def call(self, *command: Arg, block_s: float = 0.0) -> Any:
        with self._turn():
            return super().call(*command, block_s=block_s)

    def pipeline(self, commands: Sequence[Sequence[Arg]], block_s: float = 0.0) -> list[Any]:
        with self._turn():
            return super().pipeline(commands, block_s)

    def close(self) -> None:
        with self._lock:
            super().close()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait no longer than Redis may take: behind one that hangs, threads of the server would gather."""
        if not self._lock.acquire(timeout=self._timeout_s):
            raise NotNow("BUSY", f"other threads have waited for Redis for {self._timeout_s:g} s")
        try:
            yield
        finally:
            self._lock.release()


def check_reachable(url: str) -> None:
    """Raise StartRefused, naming the setting, unless Redis answers, accepts us, and is new enough."""
    try:
        with Link(url, "usher:check", timeout_s=3.0) as link:
            server = info_lines(link.call("INFO", "server"))
    except (ValueError, redis.RedisError) as wrong:
        raise SettingsError([f"USHER_REDIS_URL cannot be read: {wrong}"]) from None
    except NotNow as trouble:
        if trouble.kind == "LOADING":
            return  # the server is there and will answer; the loops wait for it
        raise StartRefused(f"USHER_REDIS_URL: {trouble}") from trouble
    except (ReplyUnknown, CommandRefused) as trouble:
        what = " does not answer like a Redis server" if isinstance(trouble, ReplyUnknown) else ""
        raise StartRefused(f"USHER_REDIS_URL: {redacted(url)}{what}: {trouble}") from trouble
    version = server.get("redis_version", "0")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < (6, 2):
        raise StartRefused(f"USHER_REDIS_URL: Redis {version} is too old; Usher needs 6.2.14 or later (XAUTOCLAIM)")
