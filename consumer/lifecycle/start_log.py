"""The start log: it records a handler's start before it happens, all starts in the journal, and those of messages that
run alone in Redis too."""

from __future__ import annotations

import logging
from collections.abc import Collection

from usher.common.base.errors import OwnershipLost, RedisTrouble, ServerChanged
from usher.common.base.log import event
from usher.common.protocol.attempts import Attempts
from usher.common.redis.client import CommandRefused, Link
from usher.consumer.handlers.message import Message
from usher.consumer.lifecycle.journal import Journal
from usher.consumer.lifecycle.owner_scripts import OwnerScripts

log = logging.getLogger(__name__)


class StartLog:
    """A log of starts. ``started`` and ``ended`` may be called from any thread, ``charge`` by the thread that runs a
    message alone: there is one at a time."""

    def __init__(self, journal: Journal, link: Link, steps: OwnerScripts) -> None:
        self.started = journal.started
        self.ended = journal.ended
        self._link = link
        self._steps = steps
        self._alone: Message | None = None  # the last message that was charged ahead
        self._unsure: dict[bytes, Message] = {}  # by id: Redis may have charged it for a start that did not happen

    def charge(self, message: Message, ahead: Attempts) -> bool:
        """Write to Redis the attempts that will be true once ``message`` has started. Return False when it is not ours
        any more. Raises what ``Link.call`` raises, and OwnershipLost."""
        self._alone = self._unsure[message.stream_id] = message
        is_ours = self._steps.charge_ahead(message.stream_id, ahead)
        del self._unsure[message.stream_id]
        return is_ours

    def take_back(self, steps: OwnerScripts, ids: Collection[bytes]) -> None:
        """Take back charges that Redis may have got ahead for these messages, which this process does not start any
        more. Raises what ``Link.call`` raises."""
        unsure = (
            {entry_id: self._unsure[entry_id].known for entry_id in ids if entry_id in self._unsure}
            if self._unsure
            else {}
        )
        if not unsure:
            return
        try:
            steps.charge(unsure)
        except CommandRefused as refused:
            event(log, "attempt_not_refunded", level=logging.WARNING, messages=len(unsure), why=str(refused))
        for entry_id in unsure:
            del self._unsure[entry_id]

    def give_back(self, steps: OwnerScripts) -> None:
        """Take back the charge of the message that runs alone: this process ends by our own doing, so the message is
        not to blame. ``steps``: over a connection that no other thread uses now. Never raises: the journal settles what
        cannot be done here."""
        message = self._alone
        if message is None or not message.in_hand:
            return
        try:
            steps.charge({message.stream_id: message.known})
        except (RedisTrouble, OwnershipLost, ServerChanged, CommandRefused) as trouble:
            event(log, "attempt_not_refunded", level=logging.WARNING, **message.facts(), why=str(trouble))

    def close(self) -> None:
        self._link.close()
