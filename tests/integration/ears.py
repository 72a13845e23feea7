"""A doorbell that hears when a test says so."""

from __future__ import annotations

from usher.common.redis.client import Link
from usher.common.redis.replies import parse_own, read_command
from usher.master.dispatch.stream_notifier import StreamNotifier


class Ear(StreamNotifier):
    """What it heard waits for the next turn, however much happens before. If it heard nothing, the stream is looked at
    in every turn."""

    def __init__(self, url: str, name: str, stream: str) -> None:
        super().__init__(Link(url, name), stream)

    def listen(self, after: bytes) -> None:
        answer = self._link.call(*read_command(self._stream, after, 1, 1))
        self._notification = (after, parse_own(answer)[0].id) if answer else None

    def poll(self) -> tuple[bytes, bytes] | None:
        return super().poll() or (b"", b"")

    def arm(self, after: bytes) -> None:
        """Nobody asks."""
