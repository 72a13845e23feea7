"""Where the server is that a connection must go to: at the address in the URL, at the master that Sentinel names, or at
the cluster node that has the stream's slot. All keys of a ticket stream lie in one slot, so one plain connection is
enough in every mode.

========================================================================  =====================================================
``redis://`` ``rediss://`` ``unix://``                                    that server
``redis+sentinel://[user:password@]host:port[,host:port]/service[/db]``   the master of ``service``; asked anew at every connect.
                                                                          ``?sentinel_password=...`` if the sentinels
                                                                          want one
``redis+cluster://[user:password@]host:port[,host:port]``                 the node of the stream's slot; asked anew at every connect
``rediss+sentinel://...`` ``rediss+cluster://...``                        the same over TLS, to sentinels and nodes too. Options as in
                                                                          ``rediss://``:
                                                                          ``?ssl_ca_certs=/etc/ssl/own-ca.pem``
========================================================================  =====================================================
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.crc import key_slot
from redis.retry import Retry

from usher.common.base.errors import StartRefused
from usher.common.protocol.keys import Keys

SENTINEL, CLUSTER = "redis+sentinel", "redis+cluster"
#: Longest wait for one sentinel, or one node, to say where the server is: one that is gone must not use up the time of
#: a lease.
_ASK_TIMEOUT_S = 1.0
_SENTINEL_PASSWORD = "sentinel_password"
_OVER_TLS = {"rediss+sentinel": SENTINEL, "rediss+cluster": CLUSTER}


class _Told(NamedTuple):
    """What was told last: by which of the hosts, which is the one that is asked first; where the server is, None when
    it was not there; and which failover made it the master, as Sentinel counts them."""

    at: int = 0
    place: tuple[str, int] | None = None
    epoch: int = 0


#: By URL. One that is silent costs its time once, not at every connect. In a cluster each stream has a URL of its own;
#: to forget costs little.
_last_told: dict[str, _Told] = {}
_MOST_URLS = 10_000


def mode(url: str) -> str:
    """The scheme of the URL, but for TLS.

    >>> mode("rediss+cluster://host:6379"), mode("redis+sentinel://host:26379/usher"), mode("unix:///tmp/s")
    ('redis+cluster', 'redis+sentinel', 'unix')
    """
    scheme = urlsplit(url).scheme
    return _OVER_TLS.get(scheme, scheme)


def near(url: str, stream: str) -> str:
    """The URL, with the stream noted in it where the mode needs to know (a cluster).

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
    """Whether a connection to where the URL leads can read ``key``: in a cluster, one in the slot of the stream that
    ``near`` has noted."""
    return mode(url) != CLUSTER or key_slot(key) == key_slot(unquote(urlsplit(url).fragment).encode())


def is_fixed(url: str) -> bool:
    """Whether the URL always means the same address."""
    return mode(url) not in (SENTINEL, CLUSTER)


def check(url: str) -> None:
    """Raise ValueError when a URL with a mode of its own cannot be read; nobody is asked."""
    parts = urlsplit(url)
    if not is_fixed(url):
        _hosts(parts)
        tls = _tls(parts)
        if tls is not None:
            _made(redis.SSLConnection, lambda: redis.SSLConnection(**tls))
        elif ignored := [name for name in parse_qs(parts.query) if name.startswith("ssl_")]:
            raise ValueError(f"without TLS it has no option {ignored[0]}: over TLS it begins with rediss")
    if mode(url) == SENTINEL:
        _service(parts)


def make_connection(url: str, name: str, timeout_s: float) -> Any:
    """A connection (not yet open, no retries, bytes) to where the URL leads now.

    Raises redis.RedisError when nobody can tell where that is, ValueError when the URL cannot be read.
    """
    options: dict[str, Any] = {
        "client_name": name,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
        "socket_read_size": 262_144,
        "protocol": 2,
        "decode_responses": False,
    }
    if is_fixed(url):
        pool = redis.ConnectionPool.from_url(url, **options)
        if issubclass(pool.connection_class, redis.UnixDomainSocketConnection):
            pool.connection_kwargs.pop("socket_keepalive", None)
        return _made(pool.connection_class, pool.make_connection)
    parts, at_sentinels = urlsplit(url), mode(url) == SENTINEL
    tls = _tls(parts)
    options |= _credentials(parts) | (tls or {})
    kind = redis.Connection if tls is None else redis.SSLConnection
    ask = (
        partial(_sentinel_master, parts, timeout_s, tls) if at_sentinels else partial(_slot_owner, parts, kind, options)
    )
    host, port = _ask_sentinels(url, parts, ask)
    return kind(host=host, port=port, db=_service(parts)[1] if at_sentinels else 0, **options)


def misled(url: str, connection: Any) -> None:
    """Where ``connection`` leads the server is not: who has told it may be cut off from the others and never know
    better, so from now on another one is asked first, by all links of this process. Several of them may come with the
    same news."""
    told = _last_told.get(url)
    if told is not None and told.place == (connection.host, connection.port):
        _last_told[url] = told._replace(at=told.at + 1, place=None)


def has_moved(url: str, connection: Any) -> bool:
    """Whether another link of this process was told another address since."""
    told = _last_told.get(url)
    return told is not None and told.place is not None and told.place != (connection.host, connection.port)


def _ask_sentinels(url: str, parts: Any, ask: Callable[[str, int], _Told]) -> tuple[str, int]:
    """The first answer of the hosts in the URL that is not of a failover before the last one that we know of: who is
    cut off tells such, and the former master may take all that is sent to it. If all are (somebody has set the
    sentinels up anew), the first. Raises what the last one raised."""
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
    if len(_last_told) >= _MOST_URLS and url not in _last_told:
        _last_told.clear()
    _last_told[url] = told
    assert told.place is not None
    return told.place


def _made(kind: Any, make: Callable[[], Any]) -> Any:
    """What ``make`` returns, a connection of ``kind`` that is not open yet. Raises ValueError where the URL has an
    option that it does not know."""
    try:
        return make()
    except TypeError as wrong:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(wrong))
        if unknown is None:
            raise ValueError(f"an option of it cannot be used: {wrong}") from None
        known = [name for base in kind.__mro__ for name in inspect.signature(base.__init__).parameters]
        close = difflib.get_close_matches(unknown[1], known, 1)
        raise ValueError(f"it has no option {unknown[1]}" + (f"; did you mean {close[0]}?" if close else "")) from None


def _tls(parts: Any) -> dict[str, Any] | None:
    """Options of TLS out of the query, read as those of ``rediss://`` are; None: without TLS."""
    if parts.scheme not in _OVER_TLS:
        return None
    query = urlencode({name: values[0] for name, values in parse_qs(parts.query).items() if name != _SENTINEL_PASSWORD})
    read: dict[str, Any] = parse_url(f"rediss://host?{query}")
    return {name: value for name, value in read.items() if name not in ("host", "connection_class")}


def _hosts(parts: Any) -> list[tuple[str, int]]:
    """host:port pairs after the credentials."""
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
    """Name and database number of ``/service[/db]``."""
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("the service is missing: redis+sentinel://host:port/SERVICE")
    if database and not database.isdecimal():
        raise ValueError(f"the database must be a number, not {database!r}: redis+sentinel://host:port/SERVICE/0")
    return service, int(database or 0)


def _sentinel_master(parts: Any, timeout_s: float, tls: dict[str, Any] | None, host: str, port: int) -> _Told:
    """The address of the master, as this sentinel says."""
    service, _ = _service(parts)
    wait_s = min(timeout_s, _ASK_TIMEOUT_S)
    # Without `retry` redis-py asks each sentinel that is down ten times over, which takes 4 s if it refuses at once.
    options: dict[str, Any] = {
        "socket_timeout": wait_s,
        "socket_connect_timeout": wait_s,
        "retry": Retry(NoBackoff(), 0),
    }
    password = parse_qs(parts.query).get(_SENTINEL_PASSWORD)
    options |= {"password": password[0] if password else None} | ({"ssl": True, **tls} if tls is not None else {})
    client = redis.Redis(host=host, port=port, **options)
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
    # redis-py's own Sentinel would tell everything about its connections, but not why they failed.
    raise redis.ConnectionError(f"no sentinel names the master of {service!r}: {trouble}")


def _slot_owner(parts: Any, kind: Any, options: dict[str, Any], host: str, port: int) -> _Told:
    """The address of the node that has the stream's slot, as this node says."""
    slot = key_slot(unquote(parts.fragment).encode())
    wait_s = min(options["socket_timeout"], _ASK_TIMEOUT_S)
    seed = kind(host=host, port=port, **{**options, "socket_timeout": wait_s, "socket_connect_timeout": wait_s})
    try:
        seed.send_command("CLUSTER", "SLOTS")
        for first, last, owner, *_ in seed.read_response():
            if first <= slot <= last:
                # Without a name: there where it was asked (nil: cluster-preferred-endpoint-type unknown-endpoint).
                return _Told(place=(bytes(owner[0] or b"").decode() or host, int(owner[1])))
        raise redis.ConnectionError(f"no node of the cluster has slot {slot}")
    finally:
        seed.disconnect()
