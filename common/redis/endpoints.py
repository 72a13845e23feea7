"""Locate the server that a connection must go to: the address in the URL, the master that Sentinel names, or the
cluster node that has the stream's slot. All keys of a ticket stream lie in one slot, so one plain connection is enough
in every mode.

``redis://`` ``rediss://`` ``unix://``
    that server
``redis+sentinel://[user:password@]host:port[,host:port]/service[/db]``
    the master of ``service``; asked anew at every connect, and left when the sentinels say that it is replaced
    (``FailoverListener``). ``?sentinel_password=...`` if the sentinels want one
``redis+cluster://[user:password@]host:port[,host:port]``
    the node of the stream's slot; asked anew at every connect
``rediss+sentinel://...`` ``rediss+cluster://...``
    the same over TLS, to sentinels and nodes too. Options as in ``rediss://``: ``?ssl_ca_certs=/etc/ssl/own-ca.pem``
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.crc import key_slot
from redis.retry import Retry

from usher.common.base.clock import now_s
from usher.common.base.errors import StartRefused
from usher.common.protocol.keys import Keys
from usher.common.runtime.service import Service

SENTINEL, CLUSTER = "redis+sentinel", "redis+cluster"
#: Longest wait for one sentinel, or one node, to say where the server is: a dead one must not use up the time of a
#: lease.
_ASK_TIMEOUT_S = 1.0
_SENTINEL_PASSWORD = "sentinel_password"
#: What leads to a server, of the options of a redis-py client; and those of TLS, which begin with ``ssl_``.
_OF_A_CLIENT = ("host", "port", "path", "db", "username", "password", "credential_provider")
#: Nobody connects for so long to a master that is about to be replaced. A failover that comes to nothing costs that.
_LEAVING_S = 5.0

Place = tuple[str, int]


def mode(url: str) -> str:
    """Return the scheme of the URL without its TLS."""
    return urlsplit(url).scheme.replace("rediss+", "redis+")


def near(url: str, stream: str) -> str:
    """Return the URL, with the stream noted in it if the mode needs it (a cluster).

    Raises StartRefused when the keys of a stream of that name cannot lie in one slot.
    """
    parts = urlsplit(url)
    if mode(url) != CLUSTER:
        return url
    if key_slot(stream.encode()) != key_slot(Keys(stream, "").prefix.encode()):
        raise StartRefused(
            "USHER_TICKET_STREAM: in a cluster a name with a '}' must have a hash tag, as in orders{1} (it is"
            f" {stream!r})"
        )
    return urlunsplit(parts._replace(fragment=quote(stream, safe="")))


def in_reach(url: str, key: bytes) -> bool:
    """Return True if a connection of this URL can read ``key``: in a cluster, only keys in the slot of the stream that
    ``near`` has noted."""
    server = server_of(url)
    return not isinstance(server, ClusterNode) or key_slot(key) == server.slot


class Server:
    """The server of a URL, here of a fixed address. All links of a process to that URL share what it has learned."""

    is_fixed = True
    #: Options that a URL may have, besides those of TLS.
    options: ClassVar[Sequence[str]] = ("db", "username", "password")

    def __init__(self, url: str) -> None:
        """Raises ValueError for a URL of which a part would not be what it says: a mode of its own that cannot be
        parsed, or what redis-py takes over, or leaves out, in silence. Sends nothing."""
        self.url, self._parts = url, urlsplit(url)
        self._query = parse_qs(self._parts.query, keep_blank_values=True)
        self._check()

    def _check(self) -> None:
        """Raise ValueError for an option that the program must set itself: in a URL it would win (with decode_responses
        replies would be text, with retry_on_timeout a command might happen twice)."""
        its = inspect.signature(redis.SSLConnection).parameters
        parts, of_tls = self._parts, [name for name in its if name.startswith("ssl_")]
        behind = ("" if parts.scheme == "unix" else parts.path) + parts.query.partition("=")[0] + parts.fragment
        if "@" in behind:  # no message shows what stands there
            raise ValueError("a password with a ?, a / or a # must have it as %3F, %2F or %23")
        for name, values in self._query.items():
            if name not in (*self.options, *of_tls):
                known = ", ".join((*self.options, "those of TLS (ssl_ca_certs ...)"))
                raise ValueError(f"it has no option {name}: there are {known}")
            if name in of_tls and not parts.scheme.startswith("rediss"):
                raise ValueError(f"without TLS it has no option {name}: over TLS it begins with rediss")
            if len(values) > 1:
                raise ValueError(f"it has the option {name} twice")
        if not self.is_fixed:
            return
        if parts.fragment:
            raise ValueError("it must not have a #")
        database = "" if parts.scheme == "unix" else unquote(parts.path).strip("/")
        if database and not (database.isascii() and database.isdecimal()):
            raise ValueError("its path must be the number of a database, as in redis://host:6379/0")
        if database and "db" in self._query:
            raise ValueError("it has a database in its path and in the option db")

    def connection(self, name: str, timeout_s: float, at: Place | None = None) -> Any:
        """Return a connection (not yet open, no retries, bytes) to where the URL leads now; ``at``: to this node of a
        cluster. Raises redis.RedisError when no host can tell where that is."""
        pool = redis.ConnectionPool.from_url(self.url, **_options(name, timeout_s))
        if issubclass(pool.connection_class, redis.UnixDomainSocketConnection):
            pool.connection_kwargs.pop("socket_keepalive", None)
        return pool.make_connection()

    def misled(self, connection: Any) -> None:
        """Note that the server is not where ``connection`` leads. Several links may report the same."""

    def has_moved(self, connection: Any) -> bool:
        """Return True if another link of this process was given another address since, or the sentinels are about to
        give one."""
        return False


class _Told(NamedTuple):
    """The last answer: ``at``, the index of the host that gave it and is asked first; ``place``, the server's address,
    None when it was not there; ``epoch``, the failover that made it the master, as Sentinel counts."""

    at: int = 0
    place: Place | None = None
    epoch: int = 0


class _ToldServer(Server):
    """A server whose address one of several hosts tells, asked anew at every connect: a silent host costs its timeout
    once, not each time."""

    is_fixed = False
    options: ClassVar[Sequence[str]] = ()

    def __init__(self, url: str) -> None:
        super().__init__(url)
        parts = self._parts
        self.hosts = _hosts(parts)
        is_tls, user = parts.scheme.startswith("rediss"), parts.netloc.rpartition("@")[0]
        query = urlencode({name: values[0] for name, values in self._query.items() if name != _SENTINEL_PASSWORD})
        read: Mapping[str, Any] = parse_url(f"{'rediss' if is_tls else 'redis'}://{user}@host?{query}")
        self._given = {name: value for name, value in read.items() if name not in ("host", "connection_class")}
        self._tls = {name: value for name, value in self._given.items() if name.startswith("ssl_")}
        self._kind: Any = redis.SSLConnection if is_tls else redis.Connection
        self._kind(**self._given)  # so that a value that it cannot have is an error at once
        self._told = _Told()
        self._leaving: tuple[Place | None, float] = (None, 0.0)  # a master that is about to be replaced, and until when

    def ask(self, at: int, wait_s: float = _ASK_TIMEOUT_S) -> _Told:
        """Ask a host. Raises redis.RedisError."""
        raise TypeError(f"{type(self).__name__} must define ask")

    def connection(self, name: str, timeout_s: float, at: Place | None = None) -> Any:
        host, port = at or self._located(min(timeout_s, _ASK_TIMEOUT_S))
        return self._kind(host=host, port=port, **(_options(name, timeout_s) | self._given))

    def misled(self, connection: Any) -> None:
        """The host that said so may be cut off from the others for good, so all links ask another one first now."""
        told = self._told
        if told.place == (connection.host, connection.port):
            self._told = told._replace(at=told.at + 1, place=None)

    def has_moved(self, connection: Any) -> bool:
        here = connection.host, connection.port
        return self._told.place not in (None, here) or self._is_leaving(here)

    def _is_leaving(self, place: Place | None) -> bool:
        former, until_s = self._leaving
        return former is not None and former == place and now_s() < until_s

    def _located(self, wait_s: float) -> Place:
        """Return the first answer that is not older than the last failover we know of: a host that is cut off gives an
        older answer, and the replaced master may accept all commands. If all are older (the sentinels were set up
        anew), return the first. Raises the error of the last host if none answers."""
        first = self._told.at
        trouble: redis.RedisError | None = None
        former: _Told | None = None
        for at in range(first, first + len(self.hosts)):
            try:
                told = self.ask(at % len(self.hosts), wait_s)._replace(at=at)
            except redis.RedisError as failed:
                trouble = failed
                continue
            if told.epoch >= self._told.epoch:
                return self._note(told)
            former = former or told
        if former is not None:
            return self._note(former)
        assert trouble is not None  # a URL has one host at least
        raise trouble

    def _note(self, told: _Told) -> Place:
        if self._is_leaving(told.place):
            raise redis.ConnectionError("a failover has begun, and what the replaced master takes would be lost")
        self._told = told
        assert told.place is not None
        return told.place


class SentinelMaster(_ToldServer):
    options: ClassVar[Sequence[str]] = (_SENTINEL_PASSWORD,)

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.service, _, database = self._parts.path.strip("/").partition("/")
        if not self.service:
            raise ValueError("the service is missing: redis+sentinel://host:port/SERVICE")
        if database and not database.isdecimal():
            raise ValueError(f"the database must be a number, not {database!r}: redis+sentinel://host:port/SERVICE/0")
        self._given["db"] = int(database or 0)
        self._listens_in = 0  # the process that does: threads do not outlive a fork

    def connection(self, name: str, timeout_s: float, at: Place | None = None) -> Any:
        if self._listens_in != os.getpid():
            self._listens_in = os.getpid()
            for one in range(len(self.hosts)):
                # Without a thread, or at the end of the interpreter, links still find the master when a call fails.
                with contextlib.suppress(StartRefused):
                    FailoverListener(self, one).start()
        return super().connection(name, timeout_s, at)

    def client(self, at: int, wait_s: float = _ASK_TIMEOUT_S) -> Any:
        host, port = self.hosts[at]
        return redis.Redis(
            host=host,
            port=port,
            password=self._query.get(_SENTINEL_PASSWORD, [None])[0],
            socket_timeout=wait_s,
            socket_connect_timeout=wait_s,
            socket_keepalive=True,
            # Without it redis-py asks a sentinel that is down ten times, which takes 4 s even if it refuses at once.
            retry=Retry(NoBackoff(), 0),
            ssl=self._kind is redis.SSLConnection,
            **self._tls,
        )

    def ask(self, at: int, wait_s: float = _ASK_TIMEOUT_S) -> _Told:
        client = self.client(at, wait_s)
        trouble: object
        try:
            masters: Any = client.sentinel_masters()
            state = masters.get(self.service)
            if state is not None and state["is_master"] and not state["is_sdown"] and not state["is_odown"]:
                return _Told(place=(state["ip"], int(state["port"])), epoch=int(state.get("config-epoch", 0)))
            trouble = "it is unknown there" if state is None else "it is down"
        except redis.RedisError as failed:
            trouble = failed
        finally:
            client.close()
        # redis-py's own Sentinel would not say why its connections failed.
        raise redis.ConnectionError(f"no sentinel names the master of {self.service!r}: {trouble}")

    def hear(self, at: int, leaving: Place | None = None) -> None:
        """Take what a sentinel has published: the master that is about to be replaced, or (None) that another one may
        be. Only a later failover counts: a sentinel that is cut off knows an earlier one. Raises redis.RedisError."""
        last = self._told
        if leaving is not None:
            if last.place == leaving:
                self._leaving = leaving, now_s() + _LEAVING_S
        elif (told := self.ask(at)).epoch > last.epoch and last.place is not None:
            self._note(told._replace(at=at))


class ClusterNode(_ToldServer):
    """The node that has the slot of the URL's stream (``near``)."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.slot = key_slot(unquote(self._parts.fragment).encode())

    def ask(self, at: int, wait_s: float = _ASK_TIMEOUT_S) -> _Told:
        seed = super().connection("usher:slots", wait_s, self.hosts[at])
        try:
            return _Told(place=self.owner_by(seed))
        finally:
            seed.disconnect()

    def owner_by(self, node: Any) -> Place:
        """Return where the slot is, as the node at the other end of this connection says. Raises redis.RedisError."""
        node.send_command("CLUSTER", "SLOTS")
        for first, last, owner, *_ in node.read_response():
            if first <= self.slot <= last:
                # No name means the host that was asked (nil: cluster-preferred-endpoint-type unknown-endpoint).
                return bytes(owner[0] or b"").decode() or node.host, int(owner[1])
        raise redis.ConnectionError(f"no node of the cluster has slot {self.slot}")


class _BesideClient(Server):
    """The server that a redis-py client of the application leads to (sync or asyncio), with its credentials and TLS."""

    def __init__(self, client: Any) -> None:
        """Raises TypeError for a client of a cluster or of sentinels, which a URL finds, and for anything else."""
        pool = getattr(client, "connection_pool", None)
        kind = getattr(pool, "connection_class", None)
        if not isinstance(kind, type) or hasattr(pool, "service_name"):
            raise TypeError(
                f"a {type(client).__name__} is no redis-py client of one server: give its URL (redis://,"
                " redis+sentinel://, redis+cluster://) or a Link"
            )
        given = getattr(pool, "connection_kwargs", {})
        self._given = {key: given[key] for key in given if key in _OF_A_CLIENT or key.startswith("ssl_")}
        is_tls = any(base.__name__ == redis.SSLConnection.__name__ for base in kind.__mro__)  # or its twin for asyncio
        self._kind: Any = redis.SSLConnection if is_tls else redis.Connection
        self.url = f"redis{'s' * is_tls}://{given.get('host')}:{given.get('port')}"
        if "path" in given:
            self.url, self._kind = f"unix://{given['path']}", redis.UnixDomainSocketConnection

    def connection(self, name: str, timeout_s: float, at: Place | None = None) -> Any:
        options = _options(name, timeout_s) | self._given
        if "path" in options:
            del options["socket_keepalive"]
        return self._kind(**options)


_SERVERS: dict[str, Server] = {}


def server_of(url: str | Any) -> Server:
    """Return the one server of a URL, or that of a redis-py client. Raises ValueError, TypeError."""
    if not isinstance(url, str):
        return _BesideClient(url)
    kinds = {SENTINEL: SentinelMaster, CLUSTER: ClusterNode}
    return _SERVERS.get(url) or _SERVERS.setdefault(url, kinds.get(mode(url), Server)(url))


def _options(name: str, timeout_s: float) -> dict[str, Any]:
    return {
        "client_name": name,
        "driver_info": None,  # to look up its version takes half a millisecond, and to tell it two commands
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
        "socket_read_size": 16_384,  # times the links of a process
        "protocol": 2,
        "decode_responses": False,
    }


def _hosts(parts: Any) -> list[tuple[str, int]]:
    found = []
    for part in parts.netloc.rpartition("@")[2].split(","):
        host, colon, port = part.rpartition(":")
        if not colon or not port.isdecimal():
            raise ValueError(f"{part!r} must be host:port")
        found.append((host.strip("[]"), int(port)))
    return found


_PROMOTING = b"+failover-state-send-slaveof-noone"
_SWITCHED = b"+switch-master"
_AGAIN_S, _WAIT_S = 1.0, 30.0


class FailoverListener(Service):
    """Hears from a sentinel when the master is replaced, so that nobody stays with the old one.

    After a failover on purpose Sentinel demotes that one some 10 s later. Until then it answers everything, and what it
    takes is thrown away. The sentinels publish two moments of a failover: before the new master is promoted (the one
    that leads the failover does), and when the address has changed (all of them do).
    """

    name = "failovers"
    stalls_after_s = 2 * _WAIT_S

    def __init__(self, master: SentinelMaster, at: int) -> None:
        super().__init__()
        self._master, self._at = master, at

    def run_once(self) -> float:
        client = self._master.client(self._at)
        try:
            with client.pubsub(ignore_subscribe_messages=True) as heard:
                heard.subscribe(_PROMOTING, _SWITCHED)
                self._master.hear(self._at)  # something may have been missed
                while not self.stopping:
                    message = heard.get_message(timeout=_WAIT_S)
                    self.made_progress()
                    if message is not None and (
                        former := former_master(message["data"].decode(), self._master.service)
                    ):
                        self._master.hear(self._at, former if message["channel"] == _PROMOTING else None)
        except (redis.RedisError, OSError):
            pass  # it is down, or refuses us; the others are heard
        finally:
            client.close()
        return _AGAIN_S


def former_master(words: str, service: str) -> Place | None:
    """Return the address that the master ``service`` has before the event; None if it is about another master. The
    words are name, former address, new address; or those about a replica, an @, and name and address of its master.

    >>> former_master("usher 10.0.0.1 6379 10.0.0.2 6379", "usher")
    ('10.0.0.1', 6379)
    >>> former_master("slave 10.0.0.2:6379 10.0.0.2 6379 @ usher 10.0.0.1 6379", "usher")
    ('10.0.0.1', 6379)
    >>> former_master("other 10.0.0.1 6379 10.0.0.2 6379", "usher")
    """
    name, host, port = (*words.rpartition("@ ")[2].split(" "), "", "", "")[:3]
    return (host, int(port)) if name == service and port.isdecimal() else None
