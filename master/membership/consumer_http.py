"""HTTP client that asks consumers: the only place from which a master sends a request to a URL that somebody else has
registered.

Such a URL is checked before each request. Its name is resolved once and that address is asked, without redirects,
proxies or credentials; time and bytes of an answer are bounded, however slowly it trickles in.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import orjson
import urllib3
from urllib3.util import parse_url

from usher.common.base.clock import now_s, wall_ms
from usher.common.http.tls import ClientTls
from usher.master.membership.health_url import HealthHosts, UnfitUrl
from usher.master.policy.explain.facts import OwnEntry, OwnerTold

#: How often requests that take too long in all are looked for.
_LOOK_S = 0.5
_AT_ONCE = 16
#: Most consumers to which a connection is kept, and for how long, at least, after the last request. Each start of a
#: consumer is another port: without an end there would be a descriptor for every incarnation that ever answered.
_MOST_KEPT, _KEPT_S = 5000, 60.0
_HEALTH, _TICKETS, _RUNNING = "/api/health", "/api/tickets/", "/api/running"
#: Characters of a name that a consumer tells.
_LONGEST = 300


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
    certificates, where they are not those of the system."""

    def __init__(self, hosts: HealthHosts, bounds: RequestBounds, ca: Path | None = None) -> None:
        self._hosts = hosts
        self._bounds = bounds
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ask")
        self._asking = _Asking(ca)

    def ask(self, health_urls: Mapping[str, str], end: str = "", instead: str = "") -> dict[str, ConsumerAnswer]:
        """Ask these health URLs (by name) side by side, and return their answers by name. ``instead`` replaces the
        ``end`` of each URL."""
        asked = {name: self._pool.submit(self._ask, url, end, instead) for name, url in health_urls.items()}
        while wait(asked.values(), timeout=_LOOK_S).not_done:
            self._asking.cut_late(self._bounds.whole_s)
        self._asking.forget_unasked()
        return {name: future.result() for name, future in asked.items()}

    def _ask(self, health_url: str, end: str, instead: str) -> ConsumerAnswer:
        bounds = self._bounds
        try:
            url, host = self._hosts.pin(health_url, _resolve)
            url = url.removesuffix(end) + instead
            return self._asking.get(
                url, host, urllib3.Timeout(connect=bounds.connect_s, read=bounds.read_s), bounds.most_bytes
            )
        except UnfitUrl as unfit:
            return ConsumerAnswer(unfit=str(unfit))
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as failed:
            return ConsumerAnswer(failed=type(failed).__name__)
        finally:
            self._asking.answered()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._asking.clear()


class _PendingRequest:
    """A request that is under way."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock  # kept here too: urllib3 takes it from a connection that is not to be kept
        self.since_s = now_s()
        self.is_cut = False


class _Asking(urllib3.PoolManager):
    """Connection pools that ask an address, and check the certificate for the name in the Host header. ``cut_late``
    ends requests that take too long in all: the limits of urllib3 are for each piece of an answer, and a server may
    send one byte at a time. No proxy is used: the registered address is the one that is asked."""

    def __init__(self, ca: Path | None) -> None:
        self._under_way: dict[int, _PendingRequest] = {}  # by thread
        self._tls = ClientTls(ca)
        self._looked_s = now_s()
        super().__init__(_MOST_KEPT, maxsize=_AT_ONCE, retries=False)
        # A pool by itself closes when it is collected, which is late after a failed request.
        self.pools.dispose_func = lambda pool: pool.close()
        kinds = {"http": urllib3.HTTPConnectionPool, "https": urllib3.HTTPSConnectionPool}
        self.pool_classes_by_scheme = {scheme: self._noted(kind) for scheme, kind in kinds.items()}

    def _noted(self, pool: Any) -> Any:
        under_way, tls = self._under_way, self._tls

        def connect(connection: Any) -> None:
            if pool.scheme == "https":
                connection.ssl_context = tls.context()
            pool.ConnectionCls.connect(connection)

        def request(connection: Any, *args: Any, **more: Any) -> None:
            pool.ConnectionCls.request(connection, *args, **more)
            under_way[threading.get_ident()] = _PendingRequest(connection.sock)

        noted = type("_Connection", (pool.ConnectionCls,), {"connect": connect, "request": request})
        return type("_Pool", (pool,), {"ConnectionCls": noted, "asked_s": 0.0})

    def get(self, url: str, host: str, timeout: urllib3.Timeout, most_bytes: int) -> ConsumerAnswer:
        """Ask a URL and return its answer; an empty one when the request was cut: to urllib3, headers that end early
        are complete. Raises HTTPError, OSError."""
        at = parse_url(url)
        name = re.sub(r":[0-9]+$", "", host).strip("[]")
        tls = {"server_hostname": name, "assert_hostname": name} if at.scheme == "https" else {}
        with self.pools.lock:
            pool: Any = self.connection_from_host(at.host, at.port, at.scheme, tls)
            pool.asked_s = now_s()  # now it is not forgotten while we use it
        asked = {"headers": {"Host": host}, "timeout": timeout, "redirect": False, "preload_content": False}
        try:
            response = pool.urlopen("GET", at.request_uri, **asked)
        except urllib3.exceptions.ProtocolError:  # a kept connection may be closed just when it is used
            if self._is_cut():
                raise
            response = pool.urlopen("GET", at.request_uri, **asked)
        try:
            # The body is read as it came: compressed data stay compressed.
            answer = ConsumerAnswer(response.status, response.read(most_bytes, decode_content=False))
            return ConsumerAnswer() if self._is_cut() else answer
        finally:
            response.close()  # after a body that was read to its end, this keeps the connection

    def _is_cut(self) -> bool:
        question = self._under_way.get(threading.get_ident())
        return question is not None and question.is_cut

    def answered(self) -> None:
        self._under_way.pop(threading.get_ident(), None)

    def cut_late(self, whole_s: float) -> None:
        """Break the connections of requests that are older than ``whole_s`` seconds; their readers then find them
        closed."""
        for question in list(self._under_way.values()):
            if now_s() - question.since_s > whole_s:
                question.is_cut = True
                try:
                    question.sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it is closed already

    def forget_unasked(self) -> None:
        with self.pools.lock:
            if now_s() - self._looked_s < _KEPT_S:
                return
            self._looked_s = now_s()
            for key in list(self.pools.keys()):  # the pools themselves cannot be iterated
                pool: Any = self.pools[key]
                if self._looked_s - pool.asked_s >= _KEPT_S:
                    del self.pools[key]


def _resolve(name: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]


class OwnerQuestion:
    """Question to a ticket's owner: what it does with a ticket, or what it runs; facts that are written down nowhere.
    Many threads may call it. The request goes beside the health endpoint; the answer is parsed strictly, and anything
    odd counts as no answer."""

    def __init__(self, hosts: HealthHosts, ca: Path | None = None) -> None:
        self._asker = ConsumerHttpClient(hosts, _ASK, ca)

    def __call__(self, health_url: str, ticket_id: str) -> OwnerTold | None:
        """Ask the owner with this health URL what it does with the ticket. Return None when it did not say, or when its
        health URL is not one that we ask."""
        if not health_url.endswith(_HEALTH):
            return None
        # Dots are quoted too: clients and proxies remove a part of a path that is "." or "..".
        path = _TICKETS + quote(ticket_id.encode("utf-8", "surrogateescape"), safe="").replace(".", "%2E")
        answer = self._asker.ask({"owner": health_url}, end=_HEALTH, instead=path)["owner"]
        return read_answer(answer.body, wall_ms()) if answer.status == 200 else None

    def process(self, health_url: str) -> dict[str, Any] | None:
        """Ask the consumer with this health URL what its process is and runs. Return None when it did not say."""
        if not health_url.endswith(_HEALTH):
            return None
        answer = self._asker.ask({"owner": health_url}, end=_HEALTH, instead=_RUNNING)["owner"]
        return read_process(answer.body, wall_ms()) if answer.status == 200 else None

    def close(self) -> None:
        self._asker.close()


def read_answer(body: bytes, now_ms: int) -> OwnerTold | None:
    """Parse the answer in a body; None when it is none. Its times are moved to our clock: ``time_ms`` says when it was
    made by the other one."""
    try:
        document: dict[str, Any] = orjson.loads(body)
        ahead_ms = int(document["time_ms"]) - now_ms
        entries = tuple(_entry(entry, ahead_ms) for entry in document["entries"])
        return OwnerTold(entries, int(document["max_attempts"]))
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
    return OwnEntry(
        str(entry["id"]).encode(),
        str(entry["state"]),
        int(entry["attempt"]),
        started_ms and max(1, started_ms - ahead_ms),
        due_ms and max(1, due_ms - ahead_ms),
        bool(entry.get("apart")),
    )
