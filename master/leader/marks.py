"""Mark reader: tells the tenants and priorities of the entries that the leader looks at."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from usher.common.base.log import event
from usher.common.protocol.marks import NO_FIELDS, Mark, MarkFields
from usher.master.leader.peeked import PeekedEntry

log = logging.getLogger(__name__)


class MarkReader:
    """Reader of the marks of entries (``common/protocol/marks.py``)."""

    def __init__(self, fields: MarkFields) -> None:
        self._fields = fields
        self.fields = fields.names
        self.tells_tenants = bool(fields.tenant)
        self.unreadable = 0  # priorities, since the start of the process

    def read(self, found: Iterable[PeekedEntry]) -> Sequence[Mark]:
        """Return the marks of the entries; nothing when nobody asked for any. Priorities that cannot be read count as
        the least, and are told."""
        if self._fields.is_empty:
            return ()
        read = self._fields.read
        marks = [read(one.id, one.ticket or b"", one.tenant, one.priority) for one in found]
        unreadable = [mark for mark in marks if not mark.is_readable]
        if unreadable:
            self.unreadable += len(unreadable)
            first = unreadable[0]
            event(
                log,
                "priority_unreadable",
                level=logging.WARNING,
                count=len(unreadable),
                first=first.id,
                ticket=first.ticket,
                why="not a number from 0 to 9: it counts as 0",
            )
        return marks


#: Reader for those who need no marks.
NO_MARKS = MarkReader(NO_FIELDS)
