"""A doorbell that hears when a test says so."""

from __future__ import annotations

from usher.common.redis.client import Link
from usher.common.redis.replies import read_command
from usher.master.dispatch.stream_notifier import Notification, StreamNotifier


class Ear(StreamNotifier):
    """What it heard waits for the next turn, however much happens before. If it heard nothing, the stream is looked at
    in every turn."""

    def __init__(self, url: str, name: str, stream: str) -> None:
        super().__init__(Link(url, name), stream)

    def listen(self, after: bytes, run: str | None = None) -> None:
        """``run``: of a server that is not this one."""
        answer = self._link.call(*read_command(self._stream, after, 1, 1))
        run = self._link.server_run if run is None else run
        self._notification = Notification(after, *answer[0][1][0], run) if answer else None

    def poll(self) -> Notification:
        return super().poll() or Notification()

    def arm(self, after: bytes) -> None:
        """Nobody asks."""
