"""The portable mode: every reader takes the streams whose turn it is, asks for all of them with one XREAD, and puts
them back at the end of the queue. It needs only XREAD; its price is that an entry waits until its stream's turn
comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from usher.common.base.clock import now_s
from usher.common.base.errors import NotNow, RedisTrouble
from usher.common.redis.client import CommandRefused, Link
from usher.common.router.coordinator import RouterCoordinator, as_found, last_id_command
from usher.common.router.options import RouterOptions
from usher.common.router.schedule import LastIdCheck, Read
from usher.common.runtime.service import Service

#: Pause of a reader that does not block, or has nothing to read, in seconds.
_IDLE_S = 0.05


class PollingReader(Service):
    def __init__(self, name: str, link: Link, desk: RouterCoordinator, options: RouterOptions) -> None:
        super().__init__()
        self.name = name
        self._link = link
        self._desk = desk
        self._options = options
        self._connections = 0
        self._check_at_s = now_s() + options.check_seconds

    ring = Service.wake

    def run_once(self) -> float:
        # Behind another connection may be another server, with fewer entries.
        if self._link.connections != self._connections or now_s() >= self._check_at_s:
            self._connections = self._link.connections
            self._check_at_s = now_s() + self._options.check_seconds
            self._desk.check_all()
        self._place()
        reads = self._desk.take(self._options.xread_streams)
        if not reads:
            return _IDLE_S * 4
        block_ms = self._options.xread_block_millis
        command = self._desk.read_command(reads, block_ms)
        try:
            reply = self._link.call(*command, block_s=self._options.block_s)
        except CommandRefused:
            alone = self._alone(reads)
            self._checked([check for read, one in alone for check in self._desk.came_alone(read, one)])
            for _, one in alone:
                if isinstance(one, NotNow):
                    raise one from None  # a pause, then again
            return 0.0
        except BaseException:
            self._desk.failed(reads)
            raise
        found = as_found(reply)
        self._checked(self._desk.came(reads, found, announced=False))
        return _IDLE_S if block_ms is None and not found else 0.0

    def interrupt(self) -> None:
        self._link.interrupt()

    def _alone(self, reads: Sequence[Read]) -> list[tuple[Read, Any]]:
        """Read each of these streams by itself, in one request, because one of them makes the read of all fail."""
        try:
            replies = self._link.pipeline([self._desk.read_command([read]) for read in reads])
        except BaseException:
            self._desk.failed(reads)
            raise
        return list(zip(reads, replies, strict=True))

    def _checked(self, checks: Sequence[LastIdCheck]) -> None:
        if checks:
            try:
                replies = self._link.pipeline([last_id_command(check.stream) for check in checks])
            except RedisTrouble as trouble:
                self._desk.checked(checks, [trouble] * len(checks))
                raise
            self._desk.checked(checks, replies)

    def _place(self) -> None:
        asked = self._desk.take_unplaced(500)
        if not asked:
            return
        try:
            replies = self._link.pipeline([last_id_command(stream) for stream, _ in asked])
        except RedisTrouble:
            self._desk.not_placed([stream for stream, _ in asked])
            raise
        self._desk.placed(asked, replies)
