"""The contract of Service: abuse, failures, and what the health endpoint gets to see."""

from __future__ import annotations

import contextlib
import importlib
import logging
import pkgutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

import usher.common
import usher.consumer
import usher.master
from tests.abuse import PATIENCE_S, check_contract
from tests.integration.routers import until
from usher.common.base.clock import run_us
from usher.common.base.errors import NotNow
from usher.common.runtime.service import Service, ServiceEnded


class Idle(Service):
    name = "idle"

    def run_once(self) -> float:
        return 60.0


class Busy(Service):
    name = "busy"

    def run_once(self) -> float:
        return 0.0


class Failing(Service):
    name = "failing"

    def run_once(self) -> float:
        raise NotNow("LOADING", "Redis is loading")


class Blocked(Service):
    """Waits in something that only ``interrupt`` ends, as a blocking read does."""

    name = "blocked"

    def __init__(self) -> None:
        super().__init__()
        self._data = threading.Event()

    def run_once(self) -> float:
        self._data.wait(60)
        return 0.0

    def interrupt(self) -> None:
        self._data.set()


class StopsItself(Service):
    name = "stops-itself"

    def run_once(self) -> float:
        self.stop()
        assert self.join(PATIENCE_S)
        return 60.0


class Finished(Service):
    name = "finished"

    def run_once(self) -> float:
        raise ServiceEnded


@pytest.mark.parametrize("make", [Idle, Busy, Failing, Blocked, StopsItself, Finished])
def test_a_service_survives_the_abuse_of_its_contract(make: Callable[[], Service]) -> None:
    check_contract(make)


def test_a_service_that_has_nothing_more_to_do_ends() -> None:
    service = Finished()
    service.start()
    assert service.join(PATIENCE_S) and not service.alive


def _services_of_usher() -> Iterator[type[Service]]:
    """Every Service class of the three packages."""
    for package in (usher.common, usher.master, usher.consumer):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            with contextlib.suppress(
                ImportError
            ):  # an extra that is not installed; anything else test_architecture.py tells
                importlib.import_module(module.name)
    waiting = list(Service.__subclasses__())
    while waiting:
        cls = waiting.pop()
        waiting.extend(cls.__subclasses__())
        if cls.__module__.partition(".")[0] in ("common", "master", "consumer"):
            yield cls


@pytest.mark.parametrize("cls", sorted(_services_of_usher(), key=lambda cls: cls.__qualname__))
def test_every_service_of_usher_leaves_the_contract_to_the_base_class(cls: type[Service]) -> None:
    """Their constructors differ, so the contract is abused here with only the turn replaced; what blocks in a turn has
    tests of its own."""

    def make() -> Service:
        service = object.__new__(cls)
        Service.__init__(service)
        for hook, stand_in in (("run_once", lambda: 0.01), ("interrupt", lambda: None), ("on_end", lambda: None)):
            setattr(service, hook, stand_in)
        return service

    assert cls.run_once is not Service.run_once
    assert len(cls.name.encode()) <= 15, "Linux cuts thread names at 15 bytes"
    assert cls.stalls_after_s > 0
    check_contract(make)


def test_a_stop_that_comes_just_before_the_wake_up_is_cleared_is_not_slept_through() -> None:
    service = Idle()

    class StopsInBetween(threading.Event):
        def clear(self) -> None:
            service.stop()
            super().clear()

    service._wake = StopsInBetween()
    service.start()
    assert service.join(PATIENCE_S)
    assert service.turns == 0


def test_a_wake_up_during_a_turn_is_not_lost() -> None:
    class WokenInItsTurn(Service):
        name = "woken"

        def run_once(self) -> float:
            if self.turns == 0:
                self.wake()
            return 60.0

    service = WokenInItsTurn()
    service.start()
    try:
        until(lambda: service.turns >= 2)
    finally:
        service.stop()
    assert service.join(PATIENCE_S)


def test_a_turn_that_fails_is_trouble_until_a_turn_works_and_the_role_goes_on() -> None:
    class FailsOnce(Service):
        name = "fails-once"
        healed = threading.Event()

        def run_once(self) -> float:
            if not self.healed.is_set():
                raise NotNow("BUSY", "Redis is busy")
            return 0.01

    service = FailsOnce()
    service.start()
    try:
        until(lambda: service.trouble == "NotNow: Redis is busy")
        service.healed.set()
        until(lambda: service.trouble is None)
        assert service.alive
    finally:
        service.stop()
    assert service.join(PATIENCE_S)


def test_the_same_trouble_is_logged_once_and_an_unexpected_one_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Service):
        name = "broken"

        def run_once(self) -> float:
            raise ZeroDivisionError("a bug")

    service = Broken()
    with caplog.at_level(logging.INFO):
        service.start()
        try:
            until(lambda: service.turns >= 3)
        finally:
            service.stop()
        assert service.join(PATIENCE_S)
    records = [record for record in caplog.records if record.message == "service_retrying"]
    assert [record.levelno for record in records] == [logging.ERROR]
    assert records[0].exc_info


def test_the_last_words_are_said_once_on_the_own_thread() -> None:
    class Polite(Idle):
        ends: list[str]

        def on_end(self) -> None:
            self.ends.append(threading.current_thread().name)

    service = Polite()
    service.ends = []
    service.start()
    service.stop()
    assert service.join(PATIENCE_S)
    assert service.ends == ["idle"]


def test_join_says_that_a_thread_which_cannot_be_interrupted_still_runs() -> None:
    in_turn, released = threading.Event(), threading.Event()

    class Stubborn(Service):
        name = "stubborn"

        def run_once(self) -> float:
            in_turn.set()
            released.wait(PATIENCE_S)
            return 0.0

    service = Stubborn()
    service.start()
    try:
        assert in_turn.wait(PATIENCE_S)
        service.stop()
        assert not service.join(0.05)
    finally:
        service.stop()
        released.set()
    assert service.join(PATIENCE_S)


_WITHOUT_THREADS = """
import resource, threading
from usher.common.base.errors import StartRefused
from usher.common.runtime.service import Service

threading.stack_size(256 * 1024 * 1024)
resource.setrlimit(resource.RLIMIT_AS, (128 * 1024 * 1024, resource.RLIM_INFINITY))
service = Service()
try:
    service.start()
except StartRefused as refused:
    print(refused)
assert service.join(0) and not service.alive
"""


def test_where_the_system_gives_no_thread_it_is_said_what_limits_them() -> None:
    said = subprocess.run([sys.executable, "-c", _WITHOUT_THREADS], capture_output=True, text=True, timeout=30)
    assert said.returncode == 0, said.stderr
    for word in ("no thread for service: can't start new thread", "ulimit -u", "TasksMax=", "USHER_CONCURRENCY"):
        assert word in said.stdout


def test_who_sets_the_clock_moves_no_run_of_an_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    before_us = run_us()
    monkeypatch.setattr("time.time_ns", lambda: 0)
    assert 0 <= run_us() - before_us < 1e6
