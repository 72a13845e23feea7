"""ConsumerHttpClient: asks consumers over HTTP. The one place from which a master sends a request to a URL that somebody else has
registered.

Such a URL is looked at before each question, its name is looked up once and that address is asked, without redirects,
proxies or credentials; time and bytes of an answer are bounded, however it trickles in.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import urllib3
from urllib3.util import parse_url

from usher.common.base.clock import now_s
from usher.common.http.tls import ClientTls
from usher.master.membership.health_url import HealthHosts, UnfitUrl

#: How often it is looked at whether a question takes too long in all.
_LOOK_S = 0.5
_AT_ONCE = 16
#: Consumers to which a connection is kept; and seconds, at least, after the last question. Each start of a consumer is
#: another port: without an end there would be a descriptor for every incarnation that ever answered.
_MOST_KEPT, _KEPT_S = 5000, 60.0


class RequestBounds(NamedTuple):
    """Of a question: seconds to connect, for each piece of the answer, and in all; and bytes that are looked at. The
    rest is never read."""

    connect_s: float
    read_s: float
    whole_s: float
    most_bytes: int


class ConsumerAnswer(NamedTuple):
    """``status`` 0: none came. ``unfit``: why the URL may not be asked, or ""."""

    status: int = 0
    body: bytes = b""
    unfit: str = ""


class ConsumerHttpClient:
    """May be used by many threads. ``ca``: authorities of the consumers' certificates, where they are not those of the
    system."""

    def __init__(self, hosts: HealthHosts, bounds: RequestBounds, ca: Path | None = None) -> None:
        self._hosts = hosts
        self._bounds = bounds
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ask")
        self._asking = _Asking(ca)

    def ask(self, health_urls: Mapping[str, str], end: str = "", instead: str = "") -> dict[str, ConsumerAnswer]:
        """What each of these health URLs answers, side by side; ``instead`` is asked in place of the ``end`` of
        each."""
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
        except (urllib3.exceptions.HTTPError, OSError, ValueError):
            return ConsumerAnswer()
        finally:
            self._asking.answered()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._asking.clear()


class _PendingRequest:
    """One that is under way."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock  # its own: urllib3 takes it from the connection where that is not to be kept
        self.since_s = now_s()
        self.is_cut = False


class _Asking(urllib3.PoolManager):
    """Asks an address, and checks the certificate for the name in the Host header. ``cut_late`` ends what takes too
    long in all: the limits of urllib3 are for each piece of an answer, and a server may send one byte at a time. It
    knows no proxy: the address that was registered is the one that is asked."""

    def __init__(self, ca: Path | None) -> None:
        self._under_way: dict[int, _PendingRequest] = {}  # by thread
        self._tls = ClientTls(ca)
        self._looked_s = now_s()
        super().__init__(_MOST_KEPT, maxsize=_AT_ONCE, retries=False)
        self.pools.dispose_func = lambda pool: (
            pool.close()
        )  # by itself a pool closes when it is collected: late, after a question that failed
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
        """What is answered there; nothing where it was cut: headers that end early are whole ones to urllib3. Raises
        HTTPError, OSError."""
        at = parse_url(url)
        name = re.sub(r":[0-9]+$", "", host).strip("[]")
        tls = {"server_hostname": name, "assert_hostname": name} if at.scheme == "https" else {}
        with self.pools.lock:
            pool: Any = self.connection_from_host(at.host, at.port, at.scheme, tls)
            pool.asked_s = now_s()  # it is not forgotten under our hands
        asked = {"headers": {"Host": host}, "timeout": timeout, "redirect": False, "preload_content": False}
        try:
            response = pool.urlopen("GET", at.request_uri, **asked)
        except urllib3.exceptions.ProtocolError:  # a kept connection may be closed at the moment at which it is used
            if self._is_cut():
                raise
            response = pool.urlopen("GET", at.request_uri, **asked)
        try:
            answer = ConsumerAnswer(
                response.status, response.read(most_bytes, decode_content=False)
            )  # as it came: what is packed is not unpacked
            return ConsumerAnswer() if self._is_cut() else answer
        finally:
            response.close()  # unless all of it was read: then the connection is kept

    def _is_cut(self) -> bool:
        question = self._under_way.get(threading.get_ident())
        return question is not None and question.is_cut

    def answered(self) -> None:
        """This thread's question is over."""
        self._under_way.pop(threading.get_ident(), None)

    def cut_late(self, whole_s: float) -> None:
        """Break the connections of questions that are older than ``whole_s``; their readers then find them closed."""
        for question in list(self._under_way.values()):
            if now_s() - question.since_s > whole_s:
                question.is_cut = True
                try:
                    question.sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it is closed already

    def forget_unasked(self) -> None:
        """Close the connections to those that are not asked any more."""
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
