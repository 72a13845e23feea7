"""Measure what strangers without a token, who hold many connections to a program, do to its health answers, and to the
leases of its consumers."""

from __future__ import annotations

import http.client
import math
import resource
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from benchmarks.rig.system import Rig
from usher.common.protocol.registration import parse
from usher.common.redis.replies import pairs
from usher.deploy.bench.rig import STREAM

_HEAD = b"POST /api/consumers/register HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 500\r\n"
#: What each kind of stranger sends at first, and then: a byte every few seconds, or nothing.
KINDS = {
    "silent": (b"", b""),
    "heads": (_HEAD + b"X-Slow: ", b"x"),
    "bodies": (_HEAD + b"\r\n{", b" "),
    "behind": (b"GET /api/health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /api/hea", b"l"),
}
#: Seconds between two bytes of a stranger, between two health questions, and for which one waits for its answer.
_TRICKLE_S, _EVERY_S, _PATIENCE_S = 2.0, 0.1, 20.0
_TOKEN = "the-token-that-strangers-do-not-have"


class Strangers(threading.Thread):
    """So many connections of one kind, each made anew as soon as it has been closed. Ended by ``stop``."""

    def __init__(self, address: tuple[str, int], kind: str, count: int) -> None:
        super().__init__(daemon=True)
        self._address, self._count = address, count
        self._first, self._more = KINDS[kind]
        self._over = threading.Event()
        self.made = 0

    def run(self) -> None:
        selector, trickle_s = selectors.DefaultSelector(), time.monotonic() + _TRICKLE_S
        for _ in range(self._count):
            self._connect(selector)
        while not self._over.is_set():
            for key, _ in selector.select(0.05):
                if not self._hears(key.fileobj):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
            while len(selector.get_map()) < self._count and not self._over.is_set():
                self._connect(selector)
            if self._more and time.monotonic() > trickle_s:
                trickle_s = time.monotonic() + _TRICKLE_S
                for key in list(selector.get_map().values()):
                    self._say(key.fileobj, self._more)
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]

    def _connect(self, selector: selectors.BaseSelector) -> None:
        try:
            made = socket.create_connection(self._address, timeout=_PATIENCE_S)
        except OSError:  # nobody accepts it
            self._over.wait(0.05)
            return
        made.setblocking(False)
        self.made += 1
        selector.register(made, selectors.EVENT_READ)
        self._say(made, self._first)

    @staticmethod
    def _say(to: Any, what: bytes) -> None:
        try:
            to.send(what)
        except OSError:
            pass  # it is found to be closed

    @staticmethod
    def _hears(of: Any) -> bool:
        try:
            return bool(of.recv(65_536))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def stop(self) -> None:
        self._over.set()
        self.join()


def ask(address: tuple[str, int], due_s: float) -> float:
    """Ask for health when it is due, and return the seconds from then to the answer; for ever when none came."""
    time.sleep(max(0.0, due_s - time.monotonic()))
    connection = http.client.HTTPConnection(*address, timeout=_PATIENCE_S)
    try:
        connection.request("GET", "/api/health/live")
        return time.monotonic() - due_s if connection.getresponse().status == 200 else math.inf
    except (OSError, http.client.HTTPException):
        return math.inf
    finally:
        connection.close()


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1]


def besiege(rig: Rig, name: str, address: tuple[str, int], kind: str, count: int, seconds: float) -> dict[str, Any]:
    """Hold so many connections of a kind for so long, and return what health questions took meanwhile, and which
    consumers were revoked or ended."""
    before = incarnations(rig)
    strangers = Strangers(address, kind, count)
    strangers.start()
    began_s, questions = time.monotonic() + 1.0, int(seconds / _EVERY_S)
    with ThreadPoolExecutor(256) as pool:
        asked = [pool.submit(ask, address, began_s + number * _EVERY_S) for number in range(questions)]
        took = [one.result() for one in asked]
    after = incarnations(rig)
    strangers.stop()
    return {
        "program": name,
        "kind": kind,
        "connections": count,
        "made": strangers.made,
        "p50_s": round(sorted(took)[questions // 2], 3),
        "p99_s": round(p99(took), 3),
        "unanswered": sum(one == math.inf for one in took),
        "revoked": len(before.items() - after.items()),
    }


def incarnations(rig: Rig) -> dict[str, str]:
    """Return the living incarnations that are not revoked, with their health URLs."""
    stored = pairs(rig.link.call("HGETALL", rig.keys.consumers))
    found = [parse(name, value) for name, value in stored.items()]
    leases = [rig.link.call("GET", rig.keys.lease(one.incarnation)) for one in found]
    return {one.incarnation: one.health_url for one, lease in zip(found, leases, strict=True) if lease == b"live"}


def strangers(counts: tuple[int, ...], kinds: tuple[str, ...], seconds: float, environ: Mapping[str, str]) -> Any:
    """Besiege a master, then one of two consumers, whose handlers run all the time."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rows = []
    with Rig(False, environ) as rig:
        rig.stream.create_group(b"0-0")
        for number in range(40):
            rig.link.call("XADD", STREAM, "*", "ticket_id", b"T%d" % number)
        own = {"USHER_API_TOKEN": _TOKEN, "USHER_DRAIN_SECONDS": "1"}
        [url] = rig.begin(1, 2, "benchmarks.programs.handlers:lasting", own)
        while len(incarnations(rig)) < 2:
            rig.check()
            time.sleep(0.1)
        for name in ("master", "consumer"):
            for kind in kinds:
                for count in counts:
                    at = urlsplit(url if name == "master" else min(incarnations(rig).values()))
                    rows.append(besiege(rig, name, (at.hostname or "", at.port or 0), kind, count, seconds))
                    while len(incarnations(rig)) < 2:
                        time.sleep(0.1)
    return rows
