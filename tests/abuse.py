"""The start/stop contract of ``usher.common.runtime.service.Service``, as abuse that any service can be put through."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from usher.common.runtime.service import Service

#: No step of the contract takes longer, also on a busy machine.
PATIENCE_S = 10.0


def check_contract(make: Callable[[], Service]) -> None:
    """Abuse services made by ``make``; every one of them must be able to run and to be stopped within
    ``PATIENCE_S``."""
    _stop_before_start(make())
    _start_twice(make())
    _stop_twice(make())
    for _ in range(20):
        _start_and_stop_at_once(make())
    _everybody_at_once(make())


def _stop_before_start(service: Service) -> None:
    service.stop()
    service.start()
    assert not service.alive
    assert service.join(0)


def _start_twice(service: Service) -> None:
    service.start()
    try:
        with pytest.raises(RuntimeError, match="started twice"):
            service.start()
    finally:
        service.stop()
    assert service.join(PATIENCE_S)


def _stop_twice(service: Service) -> None:
    service.start()
    service.stop()
    service.stop()
    assert service.join(PATIENCE_S)
    assert service.join(PATIENCE_S)
    service.stop()
    assert not service.alive


def _start_and_stop_at_once(service: Service) -> None:
    service.start()
    service.stop()
    assert service.join(PATIENCE_S)


def _everybody_at_once(service: Service) -> None:
    service.start()
    doings = [service.stop, service.wake, lambda: service.join(PATIENCE_S)] * 4
    threads = [threading.Thread(target=doing) for doing in doings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert service.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
