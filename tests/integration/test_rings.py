"""Services that wait on sockets are woken by a byte: somebody who rings while the last ring is being heard must not
silence all later ones."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

from usher.common.router.reading import ChangeDrivenReader
from usher.common.router.router import StreamRouter


class RungMeanwhile:
    """An ear; while it hears a ring, another thread rings: to receive releases the interpreter."""

    def __init__(self, ear: socket.socket, ring: Callable[[], None]) -> None:
        self._ear, self._ring = ear, ring
        self.heard = 0
        self.fileno, self.close = ear.fileno, ear.close

    def recv(self, size: int) -> bytes:
        self._ring()
        self.heard += 1
        return self._ear.recv(size)


def _router(url: str) -> ChangeDrivenReader:
    reader = StreamRouter(url)._readers[0]
    assert isinstance(reader, ChangeDrivenReader)
    return reader


def test_who_rings_while_a_ring_is_heard_silences_nobody(redis_url: str) -> None:
    service = _router(redis_url)
    service.run_once()
    ear = RungMeanwhile(service._ear, service.interrupt)
    service._selector.unregister(service._ear)
    service._selector.register(ear, select.POLLIN)
    service._ear = ear  # type: ignore[assignment]
    service.interrupt()
    while not ear.heard:
        service.run_once()
    service.interrupt()
    assert select.select([ear], [], [], 0)[0], "it is not woken any more: nobody sends a byte again"
    service.run_once()
    service.on_end()
