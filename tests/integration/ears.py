"""A doorbell that hears when a test says so."""

from __future__ import annotations

from usher.common.redis.client import Link
from usher.common.redis.replies import parse_own, read_command
from usher.master.dispatch.stream_notifier import Notification, StreamNotifier


class Ear(StreamNotifier):
    """What it heard waits for the next turn, however much happens before. If it heard nothing, the stream is looked at
    in every turn."""

    def __init__(self, url: str, name: str, stream: str) -> None:
        super().__init__(Link(url, name), stream)
        self.most = 0

    def listen(self, after: bytes, is_much: bool = False) -> None:
        """``is_much``: more than it tells of."""
        answer = self._link.call(*read_command(self._stream, after, 1, 32))
        self._notification = Notification(after, [] if is_much else parse_own(answer)) if answer else None

    def poll(self) -> Notification | None:
        return super().poll() or Notification(b"", [])

    def arm(self, after: bytes, most: int) -> None:
        self.most = most
