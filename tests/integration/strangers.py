"""What somebody does behind everybody's back to the entries of a stage: for the machine that lets anything happen."""

from __future__ import annotations

from tests.hands import MASTER
from tests.integration.actors import Stage
from tests.integration.factories import LEASE_MS
from tests.integration.ledger import STRANGER, Ledger


class Strangers:
    """Actions of one argument, which chooses among what is there. What they do is noted in the ledger."""

    stage: Stage
    ledger: Ledger

    def delete_body(self, some: int) -> None:
        pending = [row[0] for row in self.stage.world.pending_rows()]
        if pending:
            entry_id = pending[some % len(pending)]
            self.stage.link.call("XDEL", self.stage.keys.stream, entry_id)
            self.ledger.bodiless.add(entry_id)

    def delete_unread(self, some: int) -> None:
        """What the group was not given yet, though a master may have seen it."""
        delivered = self.stage.world.stream.last_delivered()
        unread = [entry[0] for entry in self.stage.link.call("XRANGE", self.stage.keys.stream, b"(" + delivered, "+")]
        if unread:
            entry_id = unread[some % len(unread)]
            self.stage.link.call("XDEL", self.stage.keys.stream, entry_id)
            self.ledger.bodiless.add(entry_id)
            self.ledger.unread.add(entry_id)

    def stranger_reads(self, some: int) -> None:
        """Somebody else is in the group, and is given what a master may have seen."""
        link, keys = self.stage.link, self.stage.keys
        reply = link.call(
            "XREADGROUP", "GROUP", keys.group, STRANGER, "COUNT", 1 + some % 2, "STREAMS", keys.stream, ">"
        )
        for entry_id, _ in reply[0][1] if reply else ():
            self.stage.world.make_idle(STRANGER, 10 * LEASE_MS, entry_id)
            self.ledger.strange.add(self.ledger.ticket_of.get(entry_id))

    def long_silence(self, some: int) -> None:
        """Nobody has touched anything for a while. What has no body stays as it is: from 7.0 on our own XCLAIM would be
        its end."""
        for owner, ids in self.stage.world.pending().items():
            if there := [entry_id for entry_id in ids if entry_id not in self.ledger.bodiless]:
                self.stage.world.make_idle(owner, 10 * LEASE_MS, *there)

    def stranger_takes_parked(self, some: int) -> None:
        parked = [
            entry_id for entry_id in self.stage.world.pending().get(MASTER, []) if entry_id not in self.ledger.bodiless
        ]
        if parked:
            entry_id = parked[some % len(parked)]
            self.stage.world.make_idle(STRANGER, 10 * LEASE_MS, entry_id)
            self.ledger.strange.add(self.ledger.ticket_of.get(entry_id))
