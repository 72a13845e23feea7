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

``StreamerProgram`` puts it together, with its lease and, if it is asked for, a web interface: health and metrics. The
work does not depend on that.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

from prometheus_client.core import Metric

from usher.common.base.clock import now_s
from usher.common.base.errors import NotNow, RedisTrouble, ReplyUnknown, SqlBusy, SqlTrouble, StartRefused
from usher.common.base.log import ERROR, WARNING, event
from usher.common.http import app as web
from usher.common.http.auth import Doorman
from usher.common.http.credentials import Credentials
from usher.common.http.serve import Liveness
from usher.common.observability.metrics import Metrics, counters, gauges, service_metrics
from usher.common.outbox.rows import BATCH_BYTES, FIELDS, Refusal, encode
from usher.common.outbox.store import OutboxStore
from usher.common.protocol.keys import LogKeys
from usher.common.redis.client import SAME_MEMORY, CommandRefused, Link
from usher.common.runtime.service import LONGEST_PAUSE_S, Health, Service, judge, stalled
from usher.common.runtime.settings import is_loopback
from usher.master.leader.elector import Elector, Lead
from usher.master.settings import StreamerSettings

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


class _Sent(NamedTuple):
    """Rows (id, uid) whose entries Redis has confirmed, the epoch, and the connection: WAIT speaks only of what was
    sent over its own connection, and behind another one may be another Redis."""

    rows: list[tuple[int, str]]
    epoch: int
    connection: int


class Streamer(Service):
    """Service that streams while it leads. ``lead`` is held by an Elector on the streamers' keys."""

    name = "stream"
    poll_s = 0.2  # longest wait between looks at an empty outbox

    def __init__(
        self,
        link: Link,
        keys: LogKeys,
        lead: Lead,
        outbox: OutboxStore,
        settings: StreamerSettings,
        batch_rows: int = 1000,
    ) -> None:
        """Make a streamer. ``batch_rows``: most rows per batch, which is one script call."""
        super().__init__()
        self._link = link
        self._keys = keys
        self._lead = lead
        self._outbox = outbox
        self._settings = settings
        self._fields = (settings.ticket_field, *FIELDS)
        self._most = self._batch_rows = batch_rows
        self._sent: _Sent | None = None
        self._found_s = now_s()  # when a look last found rows
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

    def run_once(self) -> float:
        try:
            wait_s = self._turn()
        except (RedisTrouble, SqlTrouble) as problem:
            if isinstance(problem, (RedisTrouble, SqlBusy)):
                self.worked_s = now_s() + _NEXT_TRY_S
            raise
        self.worked_s = now_s()
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
        rows = self._outbox.batch(most)
        batch = encode(rows, self._settings.outbox_refused_policy == "halt")
        if not batch.names and not batch.refused:
            now = self.caught_up_s = now_s()
            wait_s = min(self.poll_s, max(_LOOK_S, _PART * (now - self._found_s)))
            # A look is slow where many rows wait for refused ones, or PostgreSQL keeps those that were removed.
            took_s = now - looked_s
            return wait_s if took_s < _SLOW_S / 20 else max(wait_s, min(_SLOW_S, 9 * took_s))
        self._found_s = looked_s
        if batch.names:
            if not self.emit(epoch, batch.values):
                return 0.0
            self._most = min(self._most + self._most // 8 + 1, self._batch_rows)
            self._sent = _Sent(batch.names, epoch, self._link.connections)
        if batch.refused:  # after the others of their batch: if this fails, it holds up no other row
            self._set_aside(batch.refused)
        if self._sent is not None:
            self._finish(self._sent)
        # A batch far smaller than the limits was not cut off; the database counts some bytes more than we do.
        if self._sent is None and len(rows) < most and sum(row.size for row in rows) < BATCH_BYTES // 2:
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
        reply = self._link.run(
            "emit", (self._keys.stream, self._keys.leader), (str(epoch), len(self._fields), *self._fields, *values)
        )
        if reply == b"FENCED":
            event("leader_fenced", epoch=epoch)
            self._lead.lost(epoch)
        return bool(reply != b"FENCED")

    def _set_aside(self, refused: list[Refusal]) -> None:
        self._outbox.set_aside(refused)
        self.refused += len(refused)
        self._count_at_s = 0.0
        for row_id, reason, halts in refused:
            event("outbox_row_refused", level=ERROR, row=row_id, reason=reason, halts_its_ticket=halts)

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
        replicas, to_disk = self._settings.outbox_wait_replicas, self._settings.outbox_wait_aof
        if not replicas and not to_disk:
            return True
        with self._sent_again_after(RedisTrouble, CommandRefused):
            if to_disk:
                on_disk, copies = self._link.call("WAITAOF", 1, replicas, _DURABLE_MS, block_s=_DURABLE_MS / 1000)
            else:
                on_disk, copies = 1, self._link.call("WAIT", replicas, _DURABLE_MS, block_s=_DURABLE_MS / 1000)
        durable = bool(on_disk) and copies >= replicas
        if not durable and not self._not_durable_logged:
            facts: dict[str, Any] = {"rows": len(sent.rows), "replicas": copies, "on_disk": bool(on_disk)}
            event("replication_not_confirmed", level=WARNING, **facts)
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


_JOIN_S = 5.0
#: Seconds without an answer of the database after which the program ends, for the next one to try another connection;
#: at least as many leases. The lease ends long before; a slow database must not be begun anew again and again.
_PATIENCE_S, _PATIENCE_LEASES = 15.0, 3
_ANOTHER = "an outbox of another database is streamed under this name: give each a USHER_OUTBOX_NAME of its own"


class StreamerProgram:
    """A streamer with its lease, as usher.common.http.serve runs it, too. ``streamer_class`` lets the rides demo put in
    one that makes mistakes; ``lease_s``: a standby takes over this long after the streamer died."""

    def __init__(
        self,
        settings: StreamerSettings,
        redis_url: str,
        streamer_class: type[Streamer] = Streamer,
        lease_s: float = 5.0,
        batch_rows: int = 1000,
    ) -> None:
        if not settings.outbox_url:
            raise StartRefused(
                "USHER_OUTBOX_URL is not set: name the database that has the outbox there, or with --outbox-url"
            )
        self._settings = settings
        self.lease_s = lease_s
        self._stopping = False
        store = OutboxStore(settings.outbox_url)
        link = Link(redis_url, "streamer:stream", max(1.0, lease_s))
        try:
            store.check()
            if settings.outbox_wait_aof:
                _check_waitaof(link)
        except BaseException:  # the caller gets no program that it could close
            link.close()
            store.close()
            raise
        keys = LogKeys(settings.one_stream, settings.outbox_name)
        self.lead = lead = Lead()
        self._identity = store.identity
        self._warned = False
        self.streamer = streamer_class(link, keys, lead, store, settings, batch_rows)
        elect_link = Link(redis_url, "streamer:elect", max(0.2, lease_s / 3))
        holder = f"{platform.node()}:{os.getpid()}:{store.identity}"
        self._elector = Elector(elect_link, keys, lead, holder, int(lease_s * 1000), self._works)
        lead.on_change, lead.on_doubt = self._lead_changed, self._elector.wake
        self.services: list[Service] = [self.streamer, self._elector]
        event("streamer_starting", stream=settings.one_stream, database=store.dialect)

    def start(self, *_address: object) -> None:
        for service in self.services:
            service.start()

    def stop(self) -> None:
        """Stop the work first, then give up the lease, so that another streamer goes on at once."""
        self._stopping = True
        for service in self.services:
            service.stop()
            service.join(_JOIN_S)
        event("streamer_stopped", sent=self.streamer.sent)

    @property
    def alive(self) -> bool:
        return not self._hangs and all(service.alive for service in self.services)

    @property
    def _hangs(self) -> str:
        silent_s = now_s() - (self.streamer.last_turn_s or now_s())
        is_over = silent_s > max(_PATIENCE_S, _PATIENCE_LEASES * self.lease_s)
        return f"the database has not answered for {silent_s:.0f} s" if is_over else ""

    @property
    def behind_s(self) -> float:
        """Return the seconds since a look at the outbox last found no more than was sent then; 0 for a streamer that
        stands by, or cannot know whether it leads."""
        return max(0.0, now_s() - self.streamer.caught_up_s) if self.lead.holds else 0.0

    @property
    def another_leads(self) -> bool:
        """Return whether a streamer of another database leads under our outbox' name, so that ours is never sent."""
        leader = self.lead.leader_url
        return leader is not None and leader.rpartition(":")[2] != self._identity

    @cached_property
    def app(self) -> Any:
        settings, metrics = self._settings, Metrics()
        metrics.add(lambda: streamer_metrics(self, settings.outbox_name))
        guard = Doorman(Credentials(settings.api_token, settings.tokens_file))
        hosts = () if guard.asks or not is_loopback(settings.outbox_bind) else web.own_hosts(settings.outbox_bind)
        app = web.create_app(__name__, guard, max_body=0, hosts=hosts)
        web.add_health(app, self._health, self._facts, lambda: self._stopping, lambda: self.liveness().stalled)
        web.add_metrics(app, metrics)
        return app

    def liveness(self) -> Liveness:
        """Return how long this streamer may be silent, and whether its elector stands still, or a thread has ended, or
        its database does not answer."""
        lease_s, elector = self.lease_s, self.services[-1]
        ended = ", ".join(f"{service.name} has ended" for service in self.services if not service.alive)
        return Liveness(
            max(elector.stalls_after_s, lease_s), ended or self._hangs or stalled([elector], now_s(), lease_s)
        )

    def _health(self) -> Health:
        """Return the health; a standby is healthy. A database's messages may have rows in them: they are for the log
        alone."""
        reasons = map(web.in_brief, judge(self.services, now_s()).reasons)
        return Health((*reasons, *((_ANOTHER,) if self.another_leads else ())))

    def _facts(self) -> dict[str, Any]:
        return {
            "role": "streamer",
            "name": self._settings.outbox_name,
            "stream": self._settings.one_stream,
            "streams": self.lead.holds,
            "sent": self.streamer.sent,
            "refused": self.streamer.refused,
            "behind_seconds": round(self.behind_s, 1),
        }

    def _lead_changed(self) -> None:
        self.streamer.wake()
        if self.another_leads and not self._warned:
            self._warned = True
            name, leader = self._settings.outbox_name, self.lead.leader_url
            event("outbox_name_in_use", level=ERROR, name=name, leader=leader)

    def _works(self) -> bool:
        """Return whether the streamer makes progress: only then is the lease extended, so that where its database fails
        it another streamer takes over that may reach it better. While it stops, the last batch keeps the lease."""
        if why := self._hangs:
            event("outbox_database_timeout", level=WARNING, why=why, do="this streamer ends")
        return self._stopping or (self.streamer.alive and now_s() - self.streamer.worked_s < self.lease_s)


def _check_waitaof(link: Link) -> None:
    try:
        link.call("WAITAOF", 1, 0, 1)
    except CommandRefused as refused:
        raise StartRefused(
            f"USHER_OUTBOX_WAIT_AOF: this Redis has no WAITAOF, or has its append-only file off ({refused}). Before"
            " 7.2, `appendfsync always` does the same: Redis answers when the entries are on disk"
        ) from refused


def streamer_metrics(program: StreamerProgram, outbox: str) -> Iterable[Metric]:
    """Yield the metrics of a streamer, for ``usher.common.observability.metrics.Metrics``. ``outbox``: its name."""
    streamer = program.streamer

    def told(value: float) -> dict[str, float]:
        return {outbox: value}

    text = (
        "1 for the streamer that sends. 0 for one that stands by, and when its lease has ended: it does not reach"
        " Redis, or its database fails."
    )
    yield gauges("outbox_streams", text, "outbox", told(program.lead.holds))
    yield counters("outbox_sent_rows", "Rows that became messages and left the outbox.", "outbox", told(streamer.sent))
    text = "Rows that could become no message and were set aside, with the reason, in refused_log_records."
    yield counters("outbox_refused_rows", text, "outbox", told(streamer.refused))
    text = "Tickets whose rows wait in the outbox for a refused one (USHER_OUTBOX_REFUSED_POLICY)."
    yield gauges("outbox_halted_tickets", text, "outbox", told(streamer.halted))
    text = (
        "Since the outbox was last sent to its end; an empty one is looked at five times a second. A"
        " new leader begins with 0."
    )
    yield gauges("outbox_behind_seconds", text, "outbox", told(program.behind_s))
    yield from service_metrics(program.services)
