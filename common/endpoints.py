"""Where the server is that a connection must go to: at the address in the URL, at the master that Sentinel names, or at the cluster
node that has the stream's slot. All keys of a ticket stream lie in one slot, so one plain connection is enough in every mode.

========================================================================  =====================================================
``redis://`` ``rediss://`` ``unix://``                                    that server
``redis+sentinel://[user:password@]host:port[,host:port]/service[/db]``   the master of ``service``; asked anew at every connect.
                                                                          ``?sentinel_password=...`` if the sentinels want one
``redis+cluster://[user:password@]host:port[,host:port]``                 the node of the stream's slot; asked anew at every connect
========================================================================  =====================================================
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry
from redis.sentinel import Sentinel

from common.errors import StartRefused
from common.keys import Keys

SENTINEL, CLUSTER = "redis+sentinel", "redis+cluster"
#: Longest wait for one sentinel, or one node, to say where the server is: one that is gone must not use up the time of a lease.
_ASK_TIMEOUT_S = 1.0
SCHEMES = ("redis", "rediss", "unix", SENTINEL, CLUSTER)


def near(url: str, stream: str) -> str:
    """The URL, with the stream noted in it where the mode needs to know (a cluster).

    Raises StartRefused when the keys of a stream of that name cannot lie in one slot.
    """
    parts = urlsplit(url)
    if parts.scheme != CLUSTER:
        return url
    if key_slot(stream.encode()) != key_slot(Keys(stream, "").prefix.encode()):
        raise StartRefused(f"USHER_TICKET_STREAM: in a cluster a name with a '}}' must have a hash tag, as in orders{{1}} (it is {stream!r})")
    return urlunsplit(parts._replace(fragment=quote(stream, safe="")))


def in_reach(url: str, key: bytes) -> bool:
    """Whether a connection to where the URL leads can read ``key``: in a cluster, one in the slot of the stream that ``near`` has noted."""
    parts = urlsplit(url)
    return parts.scheme != CLUSTER or key_slot(key) == key_slot(unquote(parts.fragment).encode())


def is_fixed(url: str) -> bool:
    """Whether the URL always means the same address."""
    return urlsplit(url).scheme not in (SENTINEL, CLUSTER)


def check(url: str) -> None:
    """Raise ValueError when a URL with a mode of its own cannot be read; nobody is asked."""
    parts = urlsplit(url)
    if parts.scheme in (SENTINEL, CLUSTER):
        _hosts(parts)
    if parts.scheme == SENTINEL:
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
        return pool.make_connection()
    parts = urlsplit(url)
    host, port = _sentinel_master(parts, timeout_s) if parts.scheme == SENTINEL else _slot_owner(parts, options)
    database = _service(parts)[1] if parts.scheme == SENTINEL else 0
    return redis.Connection(host=host, port=port, db=database, **_credentials(parts), **options)


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


def _sentinel_master(parts: Any, timeout_s: float) -> tuple[str, int]:
    service, _ = _service(parts)
    wait_s = min(timeout_s, _ASK_TIMEOUT_S)
    # Without `retry` redis-py asks each sentinel that is down ten times over, which takes 4 s if it refuses at once.
    options: dict[str, Any] = {"socket_timeout": wait_s, "socket_connect_timeout": wait_s, "retry": Retry(NoBackoff(), 0)}
    password = parse_qs(parts.query).get("sentinel_password")
    sentinel = Sentinel(_hosts(parts), sentinel_kwargs={**options, **({"password": password[0]} if password else {})})
    try:
        host, port = sentinel.discover_master(service)
        return host, port
    finally:
        for client in sentinel.sentinels:
            client.close()


def _slot_owner(parts: Any, options: dict[str, Any]) -> tuple[str, int]:
    slot = key_slot(unquote(parts.fragment).encode())
    wait_s = min(options["socket_timeout"], _ASK_TIMEOUT_S)
    options = {**options, "socket_timeout": wait_s, "socket_connect_timeout": wait_s}
    trouble: Exception | None = None
    for host, port in _hosts(parts):
        seed = redis.Connection(host=host, port=port, **_credentials(parts), **options)
        try:
            seed.send_command("CLUSTER", "SLOTS")
            for first, last, owner, *_ in seed.read_response():
                if first <= slot <= last:
                    return (bytes(owner[0]).decode() or host), int(owner[1])
            trouble = redis.ConnectionError(f"no node of the cluster has slot {slot}")
        except redis.RedisError as failed:
            trouble = failed
        finally:
            seed.disconnect()
    raise trouble or redis.ConnectionError("no cluster node is named")
