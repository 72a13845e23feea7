"""HTTP client that asks consumers: the only place from which a master sends a request to a URL that somebody else has
registered.

Such a URL is checked before each request: anyone who can register could else make the master call anything (SSRF). Its
name is resolved once and that address is asked, without redirects, proxies or credentials; time and bytes of an answer
are bounded, however slowly it trickles in.

The allow-list names literal hosts and never uses flags like ``ipaddress.is_private``: ``::ffff:127.0.0.1`` is not
loopback and ``64:ff9b::7f00:1`` is global to Python 3.11. A URL is accepted only in a form that all parsers read the
same way; other forms that resolvers of C libraries understand (``127.1``, ``0x7f.0.0.1``, ``2130706433``, full-width
digits) are refused.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import orjson

from usher.common.base.clock import now_s, wall_ms
from usher.common.base.errors import SettingsError
from usher.common.base.extras import Late

if TYPE_CHECKING:
    from usher.master.policy.explain import OwnEntry, OwnerTold

facts: Any = Late("usher.master.policy.explain")

#: How often requests that take too long in all are looked for.
_LOOK_S = 0.5
_AT_ONCE = 16
_HEALTH, _TICKETS, _RUNNING = "/api/health", "/api/tickets/", "/api/running"
#: Characters of a name that a consumer tells.
_LONGEST = 300


_LONGEST_URL = 512
#: No userinfo, no fragment, no backslash, nothing outside ASCII: none of them has a place in a health URL.
_URL = re.compile(
    r"(https?)://((\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::([0-9]{1,5}))?)"
    r"((?:/[A-Za-z0-9._~!$&'()*+,;=:%/-]*)?(?:\?[A-Za-z0-9._~!$&'()*+,;=:%/?-]*)?)"
)
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(?:\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")
#: Hosts that C libraries and browsers take for an IPv4 address: the last label is a number, decimal or hexadecimal.
_ENDS_IN_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0[xX][0-9a-fA-F]*)\.?")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: Refused even when a network of the allow-list contains them.
_NEVER: tuple[Network, ...] = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("0.0.0.0/8", "::/128"),  # this host
        *("169.254.0.0/16", "fe80::/10"),  # link-local: metadata of clouds
        *("100.100.100.200/32", "192.0.0.0/24", "fd00:ec2::254/128"),  # metadata elsewhere
        *("224.0.0.0/3", "ff00::/8"),  # multicast
        *("::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16"),  # IPv4 by another way
    )
)


class UnfitUrl(ValueError):
    """A health URL that is refused; the message says why and repeats nothing of it."""


class HealthUrl(NamedTuple):
    """A health URL. ``host``: an address, or a name in lower case. ``named``: host and port as it names them. ``rest``:
    path and query."""

    is_tls: bool
    named: str
    host: Address | str
    port: int
    rest: str


@dataclass(frozen=True)
class HealthHosts:
    """The hosts that health URLs may point to: from USHER_HEALTH_HOSTS, see ``parse_hosts``."""

    networks: tuple[Network, ...]
    names: frozenset[str]
    #: Ports that are never asked: those of our own Redis.
    closed_ports: frozenset[int] = frozenset()

    def check(self, text: str) -> HealthUrl:
        url = parse_url(text)
        if url.port in self.closed_ports:
            raise UnfitUrl("must not point to the port of Redis")
        if isinstance(url.host, str):
            if url.host not in self.names:
                raise UnfitUrl("must point to a host that USHER_HEALTH_HOSTS of the master names")
        elif _never(url.host) or not any(url.host in network for network in self.networks):
            raise UnfitUrl("must point to an address that USHER_HEALTH_HOSTS of the master names")
        return url

    def pin(self, text: str, resolve: Callable[[str, int], Sequence[str]]) -> tuple[HealthUrl, str]:
        """Return the URL and the address to ask. ``resolve`` returns the addresses of a name. It is asked once, all
        addresses are checked, and the connection goes to the first, so that a name that resolves differently at a
        second look leads nowhere. Raises UnfitUrl, and what ``resolve`` raises."""
        url = self.check(text)
        if not isinstance(url.host, str):
            return url, str(url.host)
        addresses = [ipaddress.ip_address(found) for found in resolve(url.host, url.port)]
        if not addresses or any(map(_never, addresses)):
            raise UnfitUrl("must point to a host with addresses that may be asked")
        return url, str(addresses[0])


def parse_hosts(text: str, closed_ports: Iterable[int] = ()) -> HealthHosts:
    """Parse the allow-list, a comma-separated text of addresses, networks and names. Raises SettingsError that names
    every bad part."""
    networks: list[Network] = []
    names = set()
    problems = []
    for part in (part.strip().lower() for part in text.split(",") if part.strip()):
        try:
            networks.append(ipaddress.ip_network(part))
        except ValueError:
            if _NAME.fullmatch(part) and not _ENDS_IN_NUMBER.fullmatch(part):
                names.add(part)
            else:
                problems.append(
                    f"USHER_HEALTH_HOSTS: {part!r} is not an address, a network like 10.0.0.0/8, or a host name"
                )
    if problems:
        raise SettingsError(problems)
    return HealthHosts(tuple(networks), frozenset(names), frozenset(closed_ports))


def parse_url(text: str) -> HealthUrl:
    """Parse a health URL. Raises UnfitUrl for every one that could be read in two ways."""
    found = _URL.fullmatch(text) if len(text) <= _LONGEST_URL else None
    if found is None:
        raise UnfitUrl(
            f"must be a plain http:// or https:// URL of at most {_LONGEST_URL} characters: no user, no fragment, no"
            " spaces"
        )
    scheme, named, written, number, rest = found.groups()
    host, port = written.lower(), int(number or (443 if scheme == "https" else 80))
    if not 1 <= port <= 65_535:
        raise UnfitUrl("must have a port from 1 to 65535")
    address: Address | None = None
    try:
        if host.startswith("["):
            address = ipaddress.IPv6Address(host[1:-1])
        elif _ENDS_IN_NUMBER.fullmatch(host):
            address = ipaddress.IPv4Address(host)
    except ValueError:
        raise UnfitUrl("must write its address in the usual form, like 127.0.0.1 or [::1]") from None
    if address is None and not _NAME.fullmatch(host):
        raise UnfitUrl("must name its host in the usual form")
    return HealthUrl(scheme == "https", named, address or host, port, rest)


def redis_ports(redis_url: str) -> list[int]:
    return [int(port) for port in re.findall(r":([0-9]{1,5})(?=[/,?#]|$)", redis_url.rpartition("@")[2])] or [6379]


def _never(address: Address) -> bool:
    """Return whether no allow-list can open this address."""
    return any(address in network for network in _NEVER)


class RequestBounds(NamedTuple):
    """Bounds of a request: seconds to connect, for each piece of the answer, and in all; and the most bytes read. The
    rest is never read."""

    connect_s: float
    read_s: float
    whole_s: float
    most_bytes: int


#: Bounds of a question to an owner.
_ASK = RequestBounds(connect_s=0.5, read_s=1.0, whole_s=1.5, most_bytes=64 * 1024)


class ConsumerAnswer(NamedTuple):
    """Answer of a consumer. ``status``: of HTTP, 0 when none came. ``unfit``: why the URL may not be asked, or "".
    ``failed``: why none came."""

    status: int = 0
    body: bytes = b""
    unfit: str = ""
    failed: str = "no answer in time"


class ConsumerHttpClient:
    """HTTP client for consumers, safe for many threads. ``ca``: file with the authorities of the consumers'
    certificates, where they are not those of the system. Each question has a connection of its own, without a proxy: to
    the registered address, with a certificate for the registered name."""

    def __init__(self, hosts: HealthHosts, bounds: RequestBounds, ca: Path | None = None) -> None:
        self._hosts = hosts
        self._bounds = bounds
        self._ca = ca
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ask")
        self._under_way: dict[int, tuple[socket.socket, float]] = {}  # by thread: its connection, and since when

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._ca and self._ca.expanduser())
        context.hostname_checks_common_name = False
        return context

    def ask(self, health_urls: Mapping[str, str], end: str = "", instead: str = "") -> dict[str, ConsumerAnswer]:
        """Ask these health URLs (by name) side by side, and return their answers by name. ``instead`` replaces the
        ``end`` of each URL."""
        asked = {name: self._pool.submit(self._ask, url, end, instead) for name, url in health_urls.items()}
        while wait(asked.values(), timeout=_LOOK_S).not_done:
            self._cut_late()
        return {name: future.result() for name, future in asked.items()}

    def _ask(self, health_url: str, end: str, instead: str) -> ConsumerAnswer:
        try:
            url, address = self._hosts.pin(health_url, _resolve)
            return self._get(url, address, url.rest.removesuffix(end) + instead)
        except UnfitUrl as unfit:
            return ConsumerAnswer(unfit=str(unfit))
        except (HTTPException, OSError, ValueError) as failed:
            return ConsumerAnswer(failed=type(failed).__name__)
        finally:
            self._under_way.pop(threading.get_ident(), None)

    def _get(self, url: HealthUrl, address: str, path: str) -> ConsumerAnswer:
        """Ask a URL. Raises HTTPException, OSError, ValueError."""
        bounds, began_s, connection = self._bounds, now_s(), HTTPConnection(address, url.port)
        connection.sock = socket.create_connection((address, url.port), bounds.connect_s)
        with closing(connection):
            if url.is_tls:
                connection.sock = self._tls.wrap_socket(
                    connection.sock, server_hostname=str(url.host), do_handshake_on_connect=False
                )
            self._under_way[threading.get_ident()] = connection.sock, began_s
            connection.sock.settimeout(bounds.read_s)
            if isinstance(connection.sock, ssl.SSLSocket):
                connection.sock.do_handshake()
            connection.request("GET", path if path.startswith("/") else f"/{path}", headers={"Host": url.named})
            response, room = connection.getresponse(), bytearray(bounds.most_bytes)
            # Not ``read``: of a chunk of negative length it reads all. Packed data stay packed.
            answer = ConsumerAnswer(response.status, bytes(room[: response.readinto(room)]))
        # Of an answer that was cut, headers that end early look complete.
        return answer if now_s() - began_s < bounds.whole_s else ConsumerAnswer()

    def _cut_late(self) -> None:
        """Break connections that took too long in all, for a time-out is for each piece of an answer, and a server may
        send one byte at a time."""
        for connection, since_s in list(self._under_way.values()):
            if now_s() - since_s > self._bounds.whole_s:
                with suppress(OSError):  # it is closed already
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _resolve(name: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]


class OwnerQuestion(ConsumerHttpClient):
    """Question to a ticket's owner: what it does with a ticket, or what it runs; facts that are written down nowhere.
    Many threads may call it. The request goes beside the health endpoint; the answer is parsed strictly, and anything
    odd counts as no answer."""

    def __init__(self, hosts: HealthHosts, ca: Path | None = None) -> None:
        super().__init__(hosts, _ASK, ca)

    def __call__(self, health_url: str, ticket_id: str) -> OwnerTold | None:
        """Ask the owner with this health URL what it does with the ticket. Return None when it did not say, or when its
        health URL is not one that we ask."""
        # Dots are quoted too: clients and proxies remove a part of a path that is "." or "..".
        path = _TICKETS + quote(ticket_id.encode("utf-8", "surrogateescape"), safe="").replace(".", "%2E")
        return read_answer(self._body(health_url, path), wall_ms())

    def process(self, health_url: str) -> dict[str, Any] | None:
        """Ask the consumer with this health URL what its process is and runs. Return None when it did not say."""
        return read_process(self._body(health_url, _RUNNING), wall_ms())

    def _body(self, health_url: str, path: str) -> bytes:
        if not health_url.endswith(_HEALTH):
            return b""
        answer = self.ask({"owner": health_url}, end=_HEALTH, instead=path)["owner"]
        return answer.body if answer.status == 200 else b""


def read_answer(body: bytes, now_ms: int) -> OwnerTold | None:
    """Parse the answer in a body; None when it is none. Its times are moved to our clock: ``time_ms`` says when it was
    made by the other one."""
    try:
        document: dict[str, Any] = orjson.loads(body)
        ahead_ms = int(document["time_ms"]) - now_ms
        entries = tuple(_entry(entry, ahead_ms) for entry in document["entries"])
        told: OwnerTold = facts.OwnerTold(entries, int(document["max_attempts"]))
        return told
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def read_process(body: bytes, now_ms: int) -> dict[str, Any] | None:
    """Parse what a consumer tells of its process; None when it is not that. Its times are moved to our clock."""
    try:
        document: dict[str, Any] = orjson.loads(body)
        ahead_ms, memory = int(document["time_ms"]) - now_ms, document["memory_bytes"]
        running = [
            {
                "ticket_id": str(one["ticket_id"]),
                "id": str(one["id"]),
                "attempt": int(one["attempt"]),
                "started_ms": int(one["started_ms"]) - ahead_ms,
                "stack": [str(place)[:_LONGEST] for place in one["stack"]],
            }
            for one in document["running"]
        ]
        told = {name: str(document[name])[:_LONGEST] for name in ("incarnation", "host", "version", "handler", "code")}
        numbers = {"pid": int(document["pid"]), "memory_bytes": None if memory is None else int(memory)}
        return {**told, **numbers, "running": running, "runs": int(document["runs"])}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _entry(entry: dict[str, Any], ahead_ms: int) -> OwnEntry:
    started_ms, due_ms = int(entry["started_ms"] or 0), int(entry["due_ms"] or 0)
    own: OwnEntry = facts.OwnEntry(
        str(entry["id"]).encode(),
        str(entry["state"]),
        int(entry["attempt"]),
        started_ms and max(1, started_ms - ahead_ms),
        due_ms and max(1, due_ms - ahead_ms),
        bool(entry.get("apart")),
    )
    return own
