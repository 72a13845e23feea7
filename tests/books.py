"""A book of starts for runners that are tested without Redis and without a journal."""

from __future__ import annotations

from usher.consumer.handlers.message import Message


class Book:
    """What a ``StartBook`` does, written down nowhere."""

    def started(self, message: Message, start_us: int) -> None: ...

    def ended(self, message: Message) -> None: ...
