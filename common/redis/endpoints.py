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
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
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
#: Options of redis-py that a URL of a fixed address may have, besides those of TLS.
_IN_A_URL = ("db", "username", "password")
#: What leads to a server, of the options of a redis-py client; and those of TLS, which begin with ``ssl_``.
_OF_A_CLIENT = ("host", "port", "path", "db", "username", "password", "credential_provider")
_OVER_TLS = {"rediss+sentinel": SENTINEL, "rediss+cluster": CLUSTER}


Place = tuple[str, int]
#: Gets the index of a sentinel, and the master that it is about to replace; None: ask it where the master is.
Hear = Callable[[int, Place | None], None]


class _Told(NamedTuple):
    """The last answer: ``at``, the index of the host that gave it and is asked first; ``place``, the server's address,
    None when it was not there; ``epoch``, the failover that made it the master, as Sentinel counts."""

    at: int = 0
    place: Place | None = None
    epoch: int = 0


#: By URL, so that a silent host costs its timeout once, not at every connect. In a cluster each stream has a URL of its
#: own; forgetting costs little.
_last_told: dict[str, _Told] = {}
_MOST_URLS = 10_000
#: By URL: a master that is about to be replaced, and until when nobody connects to it. A failover that comes to nothing
#: costs that long.
_leaving: dict[str, tuple[Place, float]] = {}
_LEAVING_S = 5.0


def mode(url: str) -> str:
    """Return the scheme of the URL without its TLS.

    >>> mode("rediss+cluster://host:6379"), mode("redis+sentinel://host:26379/usher"), mode("unix:///tmp/s")
    ('redis+cluster', 'redis+sentinel', 'unix')
    """
    scheme = urlsplit(url).scheme
    return _OVER_TLS.get(scheme, scheme)


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
    return mode(url) != CLUSTER or key_slot(key) == key_slot(unquote(urlsplit(url).fragment).encode())


def is_fixed(url: str) -> bool:
    return mode(url) not in (SENTINEL, CLUSTER)


def check(url: str) -> None:
    """Raise ValueError for a URL of which a part would not be what it says: a mode of its own that cannot be parsed, or
    what redis-py takes over, or leaves out, in silence. Sends nothing."""
    parts = urlsplit(url)
    _check_options(parts)
    if not is_fixed(url):
        _hosts(parts)
        tls = _tls(parts)
        if tls is not None:
            _made(lambda: redis.SSLConnection(**tls))
        elif ignored := [name for name in parse_qs(parts.query) if name.startswith("ssl_")]:
            raise ValueError(f"without TLS it has no option {ignored[0]}: over TLS it begins with rediss")
    if mode(url) == SENTINEL:
        _service(parts)


def _check_options(parts: Any) -> None:
    """Raise ValueError for an option that the program must set itself: in a URL it would win (with decode_responses
    replies would be text, with retry_on_timeout a command might happen twice). TLS options are checked where they are
    used."""
    mine = {SENTINEL: (_SENTINEL_PASSWORD,), CLUSTER: ()}.get(_OVER_TLS.get(parts.scheme, parts.scheme), _IN_A_URL)
    behind = ("" if parts.scheme == "unix" else parts.path) + parts.query.partition("=")[0] + parts.fragment
    if "@" in behind:  # no message shows what stands there
        raise ValueError("a password with a ?, a / or a # must have it as %3F, %2F or %23")
    options = parse_qs(parts.query, keep_blank_values=True)
    for name, values in options.items():
        if name not in mine and not name.startswith("ssl_"):
            raise ValueError(
                f"it has no option {name}: there are {', '.join((*mine, 'those of TLS (ssl_ca_certs ...)'))}"
            )
        if len(values) > 1:
            raise ValueError(f"it has the option {name} twice")
    if mine is not _IN_A_URL:
        return
    if parts.fragment:
        raise ValueError("it must not have a #")
    database = "" if parts.scheme == "unix" else unquote(parts.path).strip("/")
    if database and not (database.isascii() and database.isdecimal()):
        raise ValueError("its path must be the number of a database, as in redis://host:6379/0")
    if database and "db" in options:
        raise ValueError("it has a database in its path and in the option db")


def make_connection(url: str, name: str, timeout_s: float, at: Place | None = None) -> Any:
    """Return a connection (not yet open, no retries, bytes) to where the URL leads now; ``at``: to this node of a
    cluster.

    Raises redis.RedisError when no host can tell where that is, ValueError when the URL cannot be parsed.
    """
    options = _options(name, timeout_s)
    if is_fixed(url):
        pool = redis.ConnectionPool.from_url(url, **options)
        if issubclass(pool.connection_class, redis.UnixDomainSocketConnection):
            pool.connection_kwargs.pop("socket_keepalive", None)
        return _made(pool.make_connection)
    parts, at_sentinels = urlsplit(url), mode(url) == SENTINEL
    tls = _tls(parts)
    options |= _credentials(parts) | (tls or {})
    kind = redis.Connection if tls is None else redis.SSLConnection
    if at_sentinels:
        client = partial(_sentinel_client, parts, timeout_s, tls)
        ask = partial(_sentinel_master, parts, client)
        hear = partial(_hear, url, lambda one: ask(*_hosts(parts)[one])._replace(at=one))
        listen(url, [partial(client, *host) for host in _hosts(parts)], _service(parts)[0], hear)
    else:
        ask = partial(_slot_owner, parts, kind, options)
    host, port = at or _ask_sentinels(url, parts, ask)
    return kind(host=host, port=port, db=_service(parts)[1] if at_sentinels else 0, **options)


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


def connection_beside(client: Any, name: str, timeout_s: float) -> tuple[str, Any]:
    """Return a connection as ``make_connection`` does, to where a redis-py client of the application leads (sync or
    asyncio, one server), with its credentials and its TLS; and a URL for messages.

    Raises TypeError for anything else: a cluster and sentinels are found by a URL.
    """
    pool = getattr(client, "connection_pool", None)
    kind = getattr(pool, "connection_class", None)
    if not isinstance(kind, type) or hasattr(pool, "service_name"):
        raise TypeError(
            f"a {type(client).__name__} is no redis-py client of one server: give its URL (redis://, redis+sentinel://,"
            " redis+cluster://) or a Link"
        )
    given = getattr(pool, "connection_kwargs", {})
    options = {key: given[key] for key in given if key in _OF_A_CLIENT or key.startswith("ssl_")}
    options |= _options(name, timeout_s)
    made: Any = redis.Connection
    if "path" in options:
        del options["socket_keepalive"]
        url, made = f"unix://{options['path']}", redis.UnixDomainSocketConnection
    elif any(base.__name__ == redis.SSLConnection.__name__ for base in kind.__mro__):  # or its twin for asyncio
        url, made = f"rediss://{options['host']}:{options['port']}", redis.SSLConnection
    else:
        url = f"redis://{options['host']}:{options['port']}"
    return url, made(**options)


def gives_slot_to(url: str, node: Any, place: Place) -> bool:
    """Return True if the node at the other end of ``node``, an open connection, says that the slot of the URL's stream
    is at ``place`` now. Raises redis.RedisError."""
    return _owner_by(urlsplit(url), node) == place


def misled(url: str, connection: Any) -> None:
    """Note that the server is not where ``connection`` leads. The host that said so may be cut off from the others for
    good, so all links of this process ask another host first from now on. Several links may report the same."""
    told = _last_told.get(url)
    if told is not None and told.place == (connection.host, connection.port):
        _last_told[url] = told._replace(at=told.at + 1, place=None)


def has_moved(url: str, connection: Any) -> bool:
    """Return True if another link of this process was given another address since, or the sentinels are about to give
    one."""
    told = _last_told.get(url)
    if told is None:  # the URL of one server, which may have no port
        return False
    here = connection.host, connection.port
    return told.place not in (None, here) or _is_leaving(url, here)


def _is_leaving(url: str, place: Place | None) -> bool:
    former, until_s = _leaving.get(url, (None, 0.0))
    return former is not None and former == place and now_s() < until_s


def _hear(url: str, ask: Callable[[int], _Told], at: int, leaving: Place | None) -> None:
    """Take what a sentinel has published. Only a later failover counts: a sentinel that is cut off knows an earlier
    one."""
    last = _last_told.get(url, _Told())
    if leaving is not None:
        if last.place == leaving:
            _leaving[url] = leaving, now_s() + _LEAVING_S
    elif (told := ask(at)).epoch > last.epoch and last.place is not None:
        _noted(url, told)


def _ask_sentinels(url: str, parts: Any, ask: Callable[[str, int], _Told]) -> tuple[str, int]:
    """Return the first answer of the URL's hosts that is not older than the last failover we know of: a host that is
    cut off gives an older answer, and the replaced master may accept all commands. If all are older (the sentinels were
    set up anew), return the first. Raises the error of the last host if none answers."""
    hosts, first = _hosts(parts), _last_told.get(url, _Told()).at
    trouble: redis.RedisError | None = None
    former: _Told | None = None
    for at in range(first, first + len(hosts)):
        try:
            told = ask(*hosts[at % len(hosts)])._replace(at=at)
        except redis.RedisError as failed:
            trouble = failed
            continue
        if told.epoch >= _last_told.get(url, _Told()).epoch:
            return _noted(url, told)
        former = former or told
    if former is not None:
        return _noted(url, former)
    assert trouble is not None  # a URL has one host at least
    raise trouble


def _noted(url: str, told: _Told) -> tuple[str, int]:
    if _is_leaving(url, told.place):
        raise redis.ConnectionError("a failover has begun, and what the replaced master takes would be lost")
    if len(_last_told) >= _MOST_URLS and url not in _last_told:
        _last_told.clear()
    _last_told[url] = told
    assert told.place is not None
    return told.place


def _made(make: Callable[[], Any]) -> Any:
    """Return what ``make`` returns: a connection, not open yet. Raises ValueError if the URL has an option that it does
    not know."""
    try:
        return make()
    except TypeError as wrong:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(wrong))
        raise ValueError(
            f"an option of it cannot be used: {wrong}" if unknown is None else f"it has no option {unknown[1]}"
        ) from None


def _tls(parts: Any) -> dict[str, Any] | None:
    if parts.scheme not in _OVER_TLS:
        return None
    query = urlencode({name: values[0] for name, values in parse_qs(parts.query).items() if name != _SENTINEL_PASSWORD})
    read: dict[str, Any] = parse_url(f"rediss://host?{query}")
    return {name: value for name, value in read.items() if name not in ("host", "connection_class")}


def _hosts(parts: Any) -> list[tuple[str, int]]:
    found = []
    for part in parts.netloc.rpartition("@")[2].split(","):
        host, colon, port = part.rpartition(":")
        if not colon or not port.isdecimal():
            raise ValueError(f"{part!r} must be host:port")
        found.append((host.strip("[]"), int(port)))
    return found


def _credentials(parts: Any) -> dict[str, Any]:
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    given = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in given.items() if value}


def _service(parts: Any) -> tuple[str, int]:
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("the service is missing: redis+sentinel://host:port/SERVICE")
    if database and not database.isdecimal():
        raise ValueError(f"the database must be a number, not {database!r}: redis+sentinel://host:port/SERVICE/0")
    return service, int(database or 0)


def _sentinel_client(parts: Any, timeout_s: float, tls: dict[str, Any] | None, host: str, port: int) -> Any:
    password = parse_qs(parts.query).get(_SENTINEL_PASSWORD, [None])[0]
    return redis.Redis(
        host=host,
        port=port,
        password=password,
        socket_timeout=min(timeout_s, _ASK_TIMEOUT_S),
        socket_connect_timeout=min(timeout_s, _ASK_TIMEOUT_S),
        socket_keepalive=True,
        # Without it redis-py asks a sentinel that is down ten times, which takes 4 s even if it refuses at once.
        retry=Retry(NoBackoff(), 0),
        ssl=tls is not None,
        **(tls or {}),
    )


def _sentinel_master(parts: Any, make: Callable[[str, int], Any], host: str, port: int) -> _Told:
    service, _ = _service(parts)
    client = make(host, port)
    trouble: object
    try:
        masters: Any = client.sentinel_masters()
        state = masters.get(service)
        if state is not None and state["is_master"] and not state["is_sdown"] and not state["is_odown"]:
            return _Told(place=(state["ip"], int(state["port"])), epoch=int(state.get("config-epoch", 0)))
        trouble = "it is unknown there" if state is None else "it is down"
    except redis.RedisError as failed:
        trouble = failed
    finally:
        client.close()
    # redis-py's own Sentinel would not say why its connections failed.
    raise redis.ConnectionError(f"no sentinel names the master of {service!r}: {trouble}")


def _slot_owner(parts: Any, kind: Any, options: dict[str, Any], host: str, port: int) -> _Told:
    wait_s = min(options["socket_timeout"], _ASK_TIMEOUT_S)
    seed = kind(host=host, port=port, **{**options, "socket_timeout": wait_s, "socket_connect_timeout": wait_s})
    try:
        return _Told(place=_owner_by(parts, seed))
    finally:
        seed.disconnect()


def _owner_by(parts: Any, node: Any) -> Place:
    slot = key_slot(unquote(parts.fragment).encode())
    node.send_command("CLUSTER", "SLOTS")
    for first, last, owner, *_ in node.read_response():
        if first <= slot <= last:
            # No name means the host that was asked (nil: cluster-preferred-endpoint-type unknown-endpoint).
            return bytes(owner[0] or b"").decode() or node.host, int(owner[1])
    raise redis.ConnectionError(f"no node of the cluster has slot {slot}")


_PROMOTING = b"+failover-state-send-slaveof-noone"
_SWITCHED = b"+switch-master"
_AGAIN_S, _WAIT_S = 1.0, 30.0

#: The process that listens for a URL: threads do not outlive a fork.
_listening: dict[str, int] = {}


def listen(url: str, clients: Sequence[Callable[[], Any]], service: str, hear: Hear) -> None:
    """Begin to listen at all sentinels of ``url``, once per process, until the process ends. ``clients`` make a client
    for each; ``hear`` may raise redis.RedisError."""
    if _listening.get(url) == os.getpid():
        return
    _listening[url] = os.getpid()
    for at, make in enumerate(clients):
        # Without a thread, or at the end of the interpreter, links still find the master when a call fails.
        with contextlib.suppress(StartRefused):
            FailoverListener(at, make, service, hear).start()


class FailoverListener(Service):
    """Hears from a sentinel when the master is replaced, so that nobody stays with the old one.

    After a failover on purpose Sentinel demotes that one some 10 s later. Until then it answers everything, and what it
    takes is thrown away. The sentinels publish two moments of a failover: before the new master is promoted (the one
    that leads the failover does), and when the address has changed (all of them do).
    """

    name = "failovers"
    stalls_after_s = 2 * _WAIT_S

    def __init__(self, at: int, make: Callable[[], Any], service: str, hear: Hear) -> None:
        super().__init__()
        self._at = at
        self._make = make
        self._service = service
        self._hear = hear

    def run_once(self) -> float:
        client = self._make()
        try:
            with client.pubsub(ignore_subscribe_messages=True) as heard:
                heard.subscribe(_PROMOTING, _SWITCHED)
                self._hear(self._at, None)  # something may have been missed
                while not self.stopping:
                    message = heard.get_message(timeout=_WAIT_S)
                    self.made_progress()
                    if message is not None and (former := former_master(message["data"].decode(), self._service)):
                        self._hear(self._at, former if message["channel"] == _PROMOTING else None)
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
