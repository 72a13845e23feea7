"""Streamer: rows of the outbox become entries of the ticket stream, batch by batch, by one streamer at a time.

::

    batch   SQL, one snapshot: the first rows by id
    emit    Redis, one script: are we still the one who streams? then all entries, in this order
    kept    Redis, if asked for: WAIT, WAITAOF
    remove  SQL: exactly the rows of the batch, by primary key and uid

Any of these steps may fail, and the rows are then still there. What Redis has confirmed is remembered until it is
removed; after a restart or a failover of Redis, or a lost answer (and a new epoch), it is sent again, with its uid.

Order: the rows of a ticket become visible in the order of their ids (common/outbox). A batch is sent again before
anything behind it. After a lost answer it is sent in smaller ones: where Redis takes longer for a batch than we wait,
sending the same one again would be in vain, and one more copy.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import NamedTuple

from usher.common.base.clock import now_s
from usher.common.base.errors import NotNow, RedisTrouble, ReplyUnknown, SqlBusy, SqlTrouble
from usher.common.base.log import event
from usher.common.outbox.rows import FIELDS, Refusal, encode, is_all
from usher.common.outbox.store import OutboxStore
from usher.common.protocol.keys import LogKeys
from usher.common.redis.client import SAME_MEMORY, CommandRefused, Link
from usher.common.redis.scripts import ScriptRunner
from usher.common.runtime.service import LONGEST_PAUSE_S, Service
from usher.master.leader.elector import Lead

log = logging.getLogger(__name__)

_STANDBY_S = 1.0
#: Waits between looks at an empty outbox: the shortest, the part of the time without rows, and after slow looks.
_LOOK_S, _PART, _SLOW_S = 0.005, 1 / 20, 0.5
#: Seconds between counts of halted tickets.
_COUNT_S = 10.0
#: Longest wait of one call of WAIT or WAITAOF, which is repeated until it succeeds.
_DURABLE_MS = 500
#: Longest time from a failed turn to the end of the next one, if others use the database: the pause, and the wait for a
#: row. A lease may be shorter.
_NEXT_TRY_S = LONGEST_PAUSE_S + 1.0


class Pace(NamedTuple):
    """Pace of a streamer. ``batch``: most rows per batch, which is one script call. ``poll_s``: longest wait between
    looks at an empty outbox. ``lease_s``: a standby takes over this long after the streamer died. ``replicas``,
    ``on_disk``: what to wait for before rows are removed. ``halts``: a refused row halts its ticket."""

    batch: int = 1000
    poll_s: float = 0.2
    lease_s: float = 5.0
    replicas: int = 0
    on_disk: bool = False
    halts: bool = False


class _Sent(NamedTuple):
    """Rows (id, uid) whose entries Redis has confirmed, the epoch, and the connection: WAIT speaks only of what was
    sent over its own connection, and behind another one may be another Redis."""

    rows: list[tuple[int, str]]
    epoch: int
    connection: int


class Streamer(Service):
    """Service that streams while it leads. ``lead`` is held by an Elector on the streamers' keys."""

    name = "stream"

    def __init__(
        self, link: Link, keys: LogKeys, lead: Lead, outbox: OutboxStore, ticket_field: str, pace: Pace
    ) -> None:
        super().__init__()
        self._link = link
        self._scripts = ScriptRunner(link)
        self._keys = keys
        self._lead = lead
        self._outbox = outbox
        self._fields = (ticket_field, *FIELDS)
        self._pace = pace
        self._most = pace.batch
        self._sent: _Sent | None = None
        self._found_s, self._was_empty = now_s(), False  # when a look last found rows, and whether the last one did not
        self._not_durable_logged = False
        self.sent = self.refused = 0  # rows
        self.halted = 0  # tickets that wait for a refused row
        self._count_at_s = 0.0
        #: When a look last found no more than it sent; now, for a streamer that stands by.
        self.caught_up_s = now_s()
        #: When a turn last ended that did not fail, or failed only in Redis or because others use the database. The
        #: lease is held for a working way to the database; a standby has no better one in those cases, and would send
        #: the batch once more.
        self.worked_s = now_s()
        self._trouble_s: float | None = None  # since when nothing could be streamed, as logged

    def run_once(self) -> float:
        try:
            wait_s = self._turn()
        except (RedisTrouble, SqlTrouble) as problem:
            self._trouble_s = self._trouble_s or now_s()
            if isinstance(problem, (RedisTrouble, SqlBusy)):
                self.worked_s = now_s() + _NEXT_TRY_S
            raise
        self.worked_s = now_s()
        # A standby's turns prove nothing.
        if self._trouble_s is not None and self._lead.epoch is not None and self._sent is None:
            event(log, "streamer_recovered", after_s=round(now_s() - self._trouble_s, 1))
            self._trouble_s = None
        return wait_s

    def _turn(self) -> float:
        if self._sent is not None and self._is_still_there(self._sent):
            self._finish(self._sent)
            return 0.0
        epoch = self._lead.epoch
        if epoch is None:
            if not self._lead.is_ours:  # a streamer that doubts its epoch still has rows to send
                self.caught_up_s = now_s()
            return _STANDBY_S
        looked_s = now_s()
        if looked_s >= self._count_at_s:
            self.halted, self._count_at_s = self._outbox.halted(), looked_s + _COUNT_S
        most = self._most
        rows = [] if self._was_empty and self._outbox.is_empty() else self._outbox.batch(most)
        batch = encode(rows, self._pace.halts)
        self._was_empty = not batch.names and not batch.refused
        if self._was_empty:
            now = self.caught_up_s = now_s()
            wait_s = min(self._pace.poll_s, max(_LOOK_S, _PART * (now - self._found_s)))
            # A look is slow where many rows wait for refused ones, or PostgreSQL keeps those that were removed.
            took_s = now - looked_s
            return wait_s if took_s < _SLOW_S / 20 else max(wait_s, min(_SLOW_S, 9 * took_s))
        self._found_s = looked_s
        if batch.names:
            if not self.emit(epoch, batch.values):
                return 0.0
            self._most = min(self._most + self._most // 8 + 1, self._pace.batch)
            self._sent = _Sent(batch.names, epoch, self._link.connections)
        if batch.refused:  # after the others of their batch: if this fails, it holds up no other row
            self._set_aside(batch.refused)
        if self._sent is not None:
            self._finish(self._sent)
        if self._sent is None and is_all(rows, most):
            self.caught_up_s = looked_s
        return 0.0

    def emit(self, epoch: int, values: list[bytes]) -> bool:
        """Add the entries of a batch. Return False when another streamer leads. Raises what ``Link.call`` raises."""
        try:
            return self._add(epoch, values)
        except ReplyUnknown:
            self._lead.doubt(epoch)
            self._most = max(1, len(values) // len(self._fields) // 2)
            raise

    def _add(self, epoch: int, values: list[bytes]) -> bool:
        reply = self._scripts.run(
            "emit", (self._keys.stream, self._keys.leader), (str(epoch), len(self._fields), *self._fields, *values)
        )
        if reply == b"FENCED":
            event(log, "leader_fenced", epoch=epoch)
            self._lead.lost(epoch)
        return bool(reply != b"FENCED")

    def _set_aside(self, refused: list[Refusal]) -> None:
        self._outbox.set_aside(refused)
        self.refused += len(refused)
        self._count_at_s = 0.0
        for row_id, reason, halts in refused:
            event(log, "outbox_row_refused", level=logging.ERROR, row=row_id, reason=reason, halts_its_ticket=halts)

    def _is_still_there(self, sent: _Sent) -> bool:
        """Return whether the rows sent in an earlier turn are still in Redis: the same Redis has been there all the
        time, takes writes, and knows our epoch.

        Otherwise their fate is unknown (a Redis that restarts, or is made a replica, may lose its last moments), and
        they are sent again.
        """
        with self._sent_again_after(RedisTrouble):
            is_there = self._add(sent.epoch, []) and self._link.connections == sent.connection
        if not is_there:
            self._sent = None
        return is_there

    def _finish(self, sent: _Sent) -> None:
        if self._is_durable(sent):
            self._outbox.remove(sent.rows)
            self._sent = None
            self.sent += len(sent.rows)

    def _is_durable(self, sent: _Sent) -> bool:
        replicas = self._pace.replicas
        if not replicas and not self._pace.on_disk:
            return True
        with self._sent_again_after(RedisTrouble, CommandRefused):
            if self._pace.on_disk:
                on_disk, copies = self._link.call("WAITAOF", 1, replicas, _DURABLE_MS, block_s=_DURABLE_MS / 1000)
            else:
                on_disk, copies = 1, self._link.call("WAIT", replicas, _DURABLE_MS, block_s=_DURABLE_MS / 1000)
        durable = bool(on_disk) and copies >= replicas
        if not durable and not self._not_durable_logged:
            event(
                log,
                "replication_not_confirmed",
                level=logging.WARNING,
                rows=len(sent.rows),
                replicas=copies,
                on_disk=bool(on_disk),
            )
        self._not_durable_logged = not durable
        return durable

    @contextlib.contextmanager
    def _sent_again_after(self, *trouble: type[Exception]) -> Iterator[None]:
        """Count the sent rows as not sent after trouble that may have cost Redis its memory."""
        try:
            yield
        except trouble as problem:
            if isinstance(problem, CommandRefused):
                if "replica" not in str(problem):
                    # for example, its append-only file was switched off: this is reported until it is mended, and
                    # nothing is sent meanwhile
                    raise
                problem = NotNow("READONLY", f"this Redis has become a replica: {problem}")
            if not isinstance(problem, NotNow) or problem.kind not in SAME_MEMORY:
                self._sent = None
            raise problem

    def on_end(self) -> None:
        self._link.close()
        self._outbox.close()
