"""The consumer's health endpoint under the real server."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests

from tests.doors import doorman
from tests.served import Running, until
from usher.common.base.clock import now_s
from usher.common.base.log import configure
from usher.common.http import serve as serving
from usher.common.http.serve import Liveness
from usher.common.runtime.service import Health, Service, ServiceEnded, judge
from usher.consumer.web import create_app

_CHILD = "from tests.integration.test_consumer_web import child; child()"


class Work(Service):
    """Makes progress, hangs in its second turn, or ends."""

    name = "work"
    stalls_after_s = 0.5

    def __init__(self, way: str) -> None:
        super().__init__()
        self._way = way
        self._let_go = threading.Event()

    def run_once(self) -> float:
        if self._way == "hang" and self.turns:
            self._let_go.wait()
        if self._way == "end" and self.turns:
            raise ServiceEnded
        if self._way == "fail":
            raise KeyError("no such thing")
        return 0.05

    def interrupt(self) -> None:
        self._let_go.set()


class Program:
    def __init__(self, way: str) -> None:
        self._way = way
        self._work = Work(way)
        self._stopping = False
        self._told = 0
        self._told_enough = threading.Event()
        self.app = create_app(
            doorman(), self._health, lambda: {"name": "c1", "incarnation": "c1:7"}, draining=self._draining
        )

    def _health(self) -> Health:
        return judge([self._work], now_s())

    def _draining(self) -> bool:
        self._told += self._stopping
        if self._told == 2:
            self._told_enough.set()
        return self._stopping

    def start(self, port: int, host: str) -> None:
        self._work.start()

    def liveness(self) -> Liveness:
        return Liveness(60.0)

    def stop(self) -> None:
        self._stopping = True
        if self._way == "drain":
            self._told_enough.wait(20)  # a handler runs
        self._work.stop()
        self._work.join(5)


def child() -> None:
    way = json.loads(sys.argv[1])["way"]
    configure("consumer", "info", "json")
    serving.serve(lambda: Program(way), "127.0.0.1:0", "consumer")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Running]]:
    with ExitStack() as clean_up:

        def begin(way: str) -> Running:
            running = Running(tmp_path, {"way": way}, _CHILD)
            clean_up.callback(running.kill)
            return running.wait_until_up()

        yield begin


def _health(running: Running, path: str = "/api/health") -> requests.Response:
    return running.get(path)


def test_a_consumer_that_works_is_well(start: Callable[[str], Running]) -> None:
    running = start("work")
    for path in ("/api/health", "/api/health/ready"):
        answered = _health(running, path)
        assert answered.status_code == 200
        assert answered.json() == {"status": "ok", "name": "c1", "incarnation": "c1:7"}
    assert _health(running, "/api/health/live").json() == {"status": "alive"}
    assert _health(running).headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("hang", "work made no progress for"),
        ("end", "work is not running"),
        ("fail", "work: KeyError: 'no such thing'"),
    ],
)
def test_a_consumer_whose_service_does_not_work_is_503_with_the_reason(
    start: Callable[[str], Running], way: str, reason: str
) -> None:
    running = start(way)
    until(lambda: _health(running).status_code == 503, "503", running)
    answered = _health(running).json()
    assert answered["status"] == "failing"
    assert [found for found in answered["reasons"] if found.startswith(reason)] == answered["reasons"]
    assert _health(running, "/api/health/ready").status_code == 503
    assert _health(running, "/api/health/live").status_code == 200


def test_during_a_drain_it_is_alive_and_well_but_not_ready(start: Callable[[str], Running]) -> None:
    running = start("drain")
    assert _health(running, "/api/health/ready").status_code == 200
    running.signal(signal.SIGTERM)
    until(lambda: _health(running, "/api/health/ready").status_code == 503, "not ready", running)
    assert _health(running, "/api/health/live").status_code == _health(running).status_code == 200
    assert _health(running, "/api/health/ready").json() == {"status": "draining", "name": "c1", "incarnation": "c1:7"}
    assert running.ended() == 0
