"""Starts: where a handler's start is written down before it happens. The journal for all; Redis too, for those that run alone."""

from __future__ import annotations

from common.attempts import Attempts
from common.redis_client import Link
from consumer.context import Message
from consumer.journal import Journal
from consumer.owner_steps import OwnerSteps


class StartBook:
    """``started`` and ``ended`` may be called from any thread, ``charge`` by whoever runs a message alone: there is one at a time."""

    def __init__(self, journal: Journal, link: Link, steps: OwnerSteps) -> None:
        self.started = journal.started
        self.ended = journal.ended
        self._link = link
        self._steps = steps

    def charge(self, message: Message, ahead: Attempts) -> bool:
        """Write to Redis what will be true when ``message`` has started. False: it is not ours any more. Raises what ``Link.call`` raises,
        and OwnershipLost."""
        return bool(self._steps.charge({message.stream_id: ahead}))

    def close(self) -> None:
        self._link.close()
