"""Orders of operators about a message that is here: they come through the inbox (lua/operations/order.lua).

An order is about the present: one that comes too late, or twice, finds nothing to do. What is to outlive this process
(that a message is given up) stands in Redis before the order is sent.
"""

from __future__ import annotations

import logging

from usher.common.base.log import event
from usher.common.protocol.attempts import GIVEN_UP
from usher.common.redis.replies import Order
from usher.consumer.execution.executor import Executor
from usher.consumer.lifecycle.journal import Journal
from usher.consumer.lifecycle.process_ending import ProcessEnding

log = logging.getLogger(__name__)


class Orders:
    """The one who carries orders out, on the reader's thread."""

    def __init__(self, executor: Executor, journal: Journal, ending: ProcessEnding) -> None:
        self._executor = executor
        self._lanes = executor.lanes
        self._journal = journal
        self._ending = ending

    def obey(self, order: Order) -> None:
        """Carry the order out, or say in the log that there is nothing to do."""
        steps = {"retry": self._retry, "give_up": self._give_up, "cancel": self._cancel}
        step = steps.get(order.what)
        is_done = step is not None and step(order)
        event(
            log,
            "order_obeyed" if is_done else "order_without_effect",
            level=logging.WARNING,
            ticket=order.ticket.decode(),
            id=order.id,
            what=order.what,
        )

    def _retry(self, order: Order) -> bool:
        return self._lanes.hasten(order.ticket, order.id)

    def _give_up(self, order: Order) -> bool:
        """Have the message become a dead letter in its turn: at once if it waits, else when its run has failed."""
        with self._lanes.locked() as board:
            is_held = order.id in board.held_ids
            queued, _, _ = board.look(order.ticket)
            for message in queued:
                if message.stream_id == order.id:
                    message.failures, message.plain = GIVEN_UP, False
            if is_held:
                board.given_up.add(order.id)
        self._lanes.hasten(order.ticket, order.id)
        return is_held

    def _cancel(self, order: Order) -> bool:
        """End what runs: its child process, or this process, in which other messages are cut off too."""
        with self._lanes.locked() as board:  # before what runs: a child that ends in between is not this process
            lane = board.lanes.get(order.ticket)
            is_apart = lane is not None and lane.apart
        runs = [one for one in self._journal.running(order.ticket) if one.stream_id == order.id]
        if not runs:
            return False
        if is_apart:
            self._executor.cancelled.add(order.id)
        else:
            self._ending.end(runs, "an operator cancelled a run", "an operator ended its run")
        return True
