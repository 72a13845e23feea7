"""A reader of the log whose effects happen exactly once: effects, state and checkpoint are one SQL transaction.

::

    from usher import LogConsumer

    def handle(records, state, sql):                      # sql: SQLAlchemy connection, in the transaction
        for record in records:
            if record.object == "ride":
                state["total"] = state.get("total", 0) + record.json()["distance"]
                sql.execute(text("INSERT INTO invoices ..."), {...})

    with LogConsumer("totals", "ticket_stream", sql_url, redis_url="redis://localhost") as consumer:
        consumer.run(handle)

Any number of consumers, each with a name of its own, see every record, in the order of the stream; they take nothing
from the masters' group. Of two processes with one name one goes on; the other notices and reads on from there. The
first start of a name begins with the first entry of the stream (``start=b"+"``: after its last one). docs/outbox.md
says what a record that can never be handled does (``on_error``), and for how long a repeat is known (``remember``).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple

from usher.common.base.backoff import backoff_s
from usher.common.base.callables import check_done
from usher.common.base.clock import CHANCE
from usher.common.base.errors import RedisTrouble, SqlTrouble, StartRefused, UsherError
from usher.common.base.log import ERROR, WARNING, event
from usher.common.base.text import parse_json
from usher.common.outbox.rows import LONGEST_UID, as_json, queries
from usher.common.outbox.store import (
    OutboxMisused,
    check_dialect,
    check_schema,
    check_transactional,
    open_engine,
    sql_trouble,
)
from usher.common.protocol.keys import LogKeys
from usher.common.protocol.message import UID_FIELD, as_mapping, first_value
from usher.common.protocol.sources import FROM_FIELD
from usher.common.protocol.stream_id import ZERO, Span, after, before, rank
from usher.common.redis.client import Link
from usher.common.redis.endpoints import near
from usher.common.redis.replies import Entry, span_of
from usher.common.router.router import StreamRouter
from usher.common.runtime.fork_guard import ForkGuard
from usher.common.runtime.signals import UntilSignal
from usher.common.sql.alchemy import driver_of, sa

__all__ = ["LogConsumer", "LogLost", "Record"]

_WAIT_S = 1.0
#: Number of entries before the place of a reset that are known, should they come again.
_RECALLED = 10_000
#: Most uids in one question: a statement takes some ten thousand values.
_ASKED_AT_ONCE = 10_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
#: Redis stands still, and both sides hold the whole reply: a few entries show how large they are, and a read ends with
#: about so many bytes.
_ENOUGH_BYTES = 4 * 1024 * 1024
_FIRST_PAGE, _GROWTH = 16, 4


class LogLost(UsherError):
    """The stream after a checkpoint is not the unread rest of what its reader has read. Nothing was handled; it stays
    like this until it is reset."""

    def __init__(self, name: str, stream: str, last_id: bytes, loss: str, span: Span | None) -> None:
        self.loss, _, why = loss.partition(": ")
        first, last = (b"", b"") if span is None else (span.first or b"", span.last_generated)
        super().__init__(
            f"{self.loss}: log consumer {name} has read {stream} up to {last_id.decode()}, but {why} (first"
            f" entry {first.decode() or 'none'}, last id {last.decode() or 'none'}). Compare its state with the source"
            " and reset it: LogConsumer.reset(last_id, state)"
        )


def judge_loss(last_id: bytes, span: Span | None) -> str:
    """Return why the entry of a checkpoint is missing, as name and sentence; "" when nothing after it can be lost.
    Pure."""
    if span is None or rank(last_id) > rank(span.last_generated):
        return "checkpoint_above_end: the stream ends below it: Redis has lost its data, or this is another stream"
    if last_id == span.last_generated:
        return ""  # it never had a successor
    if span.first is None or rank(span.first) > rank(last_id):
        return "checkpoint_below_start: the stream begins above it: entries that it has not read may have been cut"
    return (
        "checkpoint_entry_gone: its entry is not in the stream: it was deleted, or Redis has lost its last moments and"
        " gone on"
    )


def _size(entries: list[Entry]) -> int:
    return sum(len(part) for entry in entries for part in entry.fields or ())


class StreamLog:
    """A stream as a log, from after an id, with a proof that nothing was lost in between; over a connection of its own,
    used by one thread.

    The entry of the id itself is read again, each time: while it is there, its successors were neither trimmed away nor
    lost with Redis' memory. That needs no second command, and `usher trim` keeps the entry of every checkpoint for it.
    A consumer that begins with the first entry is placed at the id just below it: nothing fits between the two, so
    while that entry is there nothing was lost either. Only after 0-0, of a stream that has no entry yet, there is no
    proof before the first batch.

    With a ``router`` it waits through that: log consumers of many streams in one process block no connection each, and
    wake when Redis announces a change. Entries to handle are read here all the same: a router's delivery proves no
    continuity.
    """

    def __init__(self, redis_url: str, stream: str, name: str, router: StreamRouter | None = None) -> None:
        self._link = Link(near(redis_url, stream), f"log:{name}")
        self._keys = LogKeys(stream)
        self._router = router

    def read(self, name: str, last_id: bytes, count: int) -> list[Entry]:
        """Return entries above ``last_id``, at most ``count``, fewer where they are large; at once. Raises LogLost, and
        what ``Link.call`` raises."""
        page, room = min(count, _FIRST_PAGE), _ENOUGH_BYTES
        found = entries = self._page(name, last_id, page)
        while len(found) == page:
            room -= _size(found)  # as many as it holds of entries like those of this page
            page = min(_GROWTH * page, room // (_size(found) // len(found) + 1), count - len(entries))
            if page <= 0:
                break
            behind = self._range(entries[-1].id, page + 1)
            if not behind or behind[0].id != entries[-1].id:
                break  # lost, or cut, meanwhile: the next read reports it
            found = behind[1:]
            entries = [*entries, *found]
        return entries

    def _page(self, name: str, last_id: bytes, count: int) -> list[Entry]:
        if last_id == ZERO:
            return self._range(b"-", count)
        found = self._range(last_id, count + 1)
        if found and found[0].id == last_id:
            return found[1:]
        span = span_of(self._link, self._keys.stream)
        if found and span is not None and found[0].id == span.first == after(last_id):
            return found[:count]
        if loss := judge_loss(last_id, span):
            raise LogLost(name, self._keys.stream, last_id, loss, span)
        return []  # entries that came between the two looks are read by the next one

    def _range(self, start: bytes, count: int) -> list[Entry]:
        return [Entry(*entry) for entry in self._link.call("XRANGE", self._keys.stream, start, "+", "COUNT", count)]

    def wait(self, last_id: bytes, wait_s: float) -> bool:
        """Return True when there is an entry above ``last_id``, waiting up to ``wait_s`` seconds."""
        if self._router is not None:
            subscription = self._router.subscribe(self._keys.stream, last_id, capacity=1)
            try:
                return bool(subscription.take(1, wait_s))
            finally:
                subscription.close()
        command = ("XREAD", "COUNT", 1, "BLOCK", max(1, int(wait_s * 1000)), "STREAMS", self._keys.stream, last_id)
        return self._link.call(*command, block_s=wait_s) is not None

    def place(self, wanted: bytes) -> bytes:
        """Return the highest id in the stream that is not above ``wanted`` (b"+": the end); the one just below the
        first entry when there is none, 0-0 when the stream is empty."""
        below = self._link.call("XREVRANGE", self._keys.stream, wanted, "-", "COUNT", 1)
        if below:
            return bytes(below[0][0])
        first = self._link.call("XRANGE", self._keys.stream, "-", "+", "COUNT", 1)
        return before(first[0][0]) if first else ZERO

    def back_from(self, last_id: bytes) -> Iterator[Entry]:
        """Yield the entries from ``last_id`` back to the first one."""
        while rows := self._link.call("XREVRANGE", self._keys.stream, last_id, "-", "COUNT", _FIRST_PAGE):
            yield from (Entry(*row) for row in rows)
            last_id = b"(" + rows[-1][0]

    def note(self, name: str, version: int, last_id: bytes, *, replace: bool = False) -> bool:
        """Tell trimmers that everything from ``last_id`` on is needed; return False when a later version is noted."""
        args = (name, version, last_id, "1" if replace else "")
        return bool(self._link.run("note_checkpoint", (self._keys.checkpoints,), args))

    def noted(self, name: str) -> int | None:
        value = self._link.call("HGET", self._keys.checkpoints, name)
        version = (value or b"").partition(b" ")[0]
        return int(version) if version.isdigit() else None

    def close(self) -> None:
        self._link.close()


class Record(NamedTuple):
    """An entry of the log. ``uid`` is that of its writer (a hash of it where it is longer than 256 characters, not
    UTF-8, or has a NUL), else the stream id; in a work stream it begins with the source. Missing fields are ""."""

    id: str
    uid: str
    fields: dict[str, str]

    @property
    def action(self) -> str:
        return self.fields.get("action", "")

    @property
    def object(self) -> str:
        return self.fields.get("object", "")

    @property
    def data(self) -> str:
        return self.fields.get("data", "")

    def json(self) -> Any:
        """Return ``data`` decoded. Raises ValueError, which names the record: other programs may add to the stream too,
        in their own form."""
        try:
            return parse_json(self.data)
        except ValueError as wrong:
            has = f"is no JSON ({wrong})" if "data" in self.fields else f"is not there; it has {', '.join(self.fields)}"
            raise ValueError(f"the record {self.id} is no record of an outbox: its field 'data' {has}") from wrong


#: Gets a record on its own whose handling raised an exception, and the connection of the transaction that moves the
#: checkpoint over it.
OnError = Callable[["Record", Exception, sa.Connection], object]
#: Gets the new records (at least one), the state (change it in place), and the connection whose transaction stores
#: everything.
Handle = Callable[[Sequence[Record], dict[str, Any], sa.Connection], object]


class _Checkpoint(NamedTuple):
    last_id: bytes
    version: int
    records: int


class LogConsumer(contextlib.AbstractContextManager["LogConsumer"]):
    """A reader of one stream; used by one thread.

    ``sql``: URL or SQLAlchemy engine of a database with the outbox' tables. ``batch``: most records per transaction,
    fewer where they are large. ``remember``: how many records back a repeat is recognised (None: all, in a table that
    only grows). ``router``: waits for entries of many streams over one connection.
    """

    def __init__(
        self,
        name: str,
        stream: str,
        sql: str | sa.Engine,
        *,
        redis_url: str = "",
        start: bytes = ZERO,
        batch: int = 1000,
        remember: int | None = 100_000,
        router: StreamRouter | None = None,
    ) -> None:
        self._name, self._stream = name, stream
        self._engine = open_engine(sql, "LogConsumer(sql)") if isinstance(sql, str) else sql
        self._owns_engine = isinstance(sql, str)
        check_dialect(self._engine)
        check_schema(self._engine, "LogConsumer(sql)")
        self._log = StreamLog(redis_url, stream, name, router)
        self._start, self._batch, self._remember = start, batch, remember
        self._sql = {key: sa.text(query) for key, query in queries(self._engine.dialect.name).items()}
        self._sql["known"] = self._sql["known"].bindparams(sa.bindparam("uids", expanding=True))
        self._me = {"name": name, "stream": stream}
        self._at: _Checkpoint | None = None
        self._noted = True
        self._singly = 0  # number of entries that are to be handled one by one: one of them fails

    def run(self, handle: Handle, stop: Callable[[], bool] = lambda: False, on_error: OnError | None = None) -> None:
        """Read and handle until ``stop`` returns True (asked at least every second), or Ctrl-C or SIGTERM reaches the
        main thread: the batch that is being handled is stored first; the next signal does not wait for it, and nothing
        of it is stored.

        Trouble with Redis or the database is waited out, also a statement that was ended for taking too long
        (PostgreSQL's statement_timeout); while it lasts it is logged about once a minute.

        Raises LogLost, OutboxMisused for a state that is no JSON and for an ``async def``, and whatever ``handle``
        raises.
        """
        failures = 0
        with UntilSignal() as until:
            while not (until.came or stop()):
                try:
                    self.step(handle, _WAIT_S, on_error)
                    failures = 0
                except (RedisTrouble, SqlTrouble) as trouble:
                    failures += 1
                    if failures % 60 == 1:  # a try a second
                        about: dict[str, Any] = {"name": self._name, "failures": failures, "problem": str(trouble)}
                        event("log_consumer_retrying", level=WARNING, **about)
                    time.sleep(min(1.0, backoff_s(failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S, CHANCE)))

    def step(self, handle: Handle, wait_s: float = 0.0, on_error: OnError | None = None) -> int:
        """Handle one batch, waiting up to ``wait_s`` seconds for one; return how many entries the checkpoint moved
        over.

        Raises LogLost, SqlTrouble, RedisTrouble, and what ``handle`` raises: then nothing was stored, or it is unknown
        and the next step asks.
        """
        at = self._at or self._open()
        if not self._noted:
            self._note(at)
        entries = self._log.read(self._name, at.last_id, 1 if self._singly else self._batch)
        if not entries:
            has_news = wait_s and self._log.wait(at.last_id, wait_s)
            if not has_news and self._log.noted(self._name) != at.version:
                self._at = None  # reset meanwhile, or Redis has lost the note: the next step asks SQL
            return 0
        self._at = None  # unknown until the commit has answered
        try:
            moved = self._stored(at, entries, handle)
        except (RedisTrouble, SqlTrouble, OutboxMisused):
            raise
        except Exception as error:
            if on_error is None:
                raise
            if len(entries) > 1:
                self._singly = len(entries)
                return 0
            moved = self._stored(at, entries, self._giving_up(on_error, error))
        if moved is None:
            return 0  # another process of this name was faster
        self._singly = max(0, self._singly - 1)
        self._at = moved
        self._note(moved)
        return len(entries)

    def _stored(self, at: _Checkpoint, entries: list[Entry], handle: Handle) -> _Checkpoint | None:
        with sql_trouble("storing a batch"), self._engine.begin() as sql:
            moved = self._advance(sql, at, entries[-1].id, len(entries))
            if moved is not None:
                self._apply(sql, moved, entries, handle)
                if sql.dialect.name == "mysql" and self._read(sql) != moved:
                    # Who swallows a deadlock goes on in a new transaction: what was done before it is rolled back.
                    raise SqlTrouble("the database rolled this batch back; all of it is repeated")
        return moved

    def _giving_up(self, on_error: OnError, error: Exception) -> Handle:
        def give_up(records: Sequence[Record], state: dict[str, Any], sql: sa.Connection) -> object:
            returned = on_error(records[0], error, sql)
            about: dict[str, Any] = {**self._me, "id": records[0].id, "error": f"{type(error).__name__}: {error}"}
            event("log_record_given_up", level=ERROR, **about)
            return returned

        return give_up

    def state(self) -> tuple[bytes, dict[str, Any]]:
        """Return (id of the last entry whose effects are stored, state), as SQL has them now: both of the same
        commit."""
        with sql_trouble("reading the state"), self._engine.begin() as sql:
            row = sql.execute(self._sql["checkpoint_and_state"], self._me).one_or_none()
        return (ZERO, {}) if row is None else (row[0].encode(), _decoded(row[1]))

    def reset(self, last_id: bytes, state: dict[str, Any]) -> bytes:
        """Go on after ``last_id`` with this state, as a reconciler found it right; return where it really goes on from.

        That is the highest entry in the stream that is not above ``last_id``, or the id just below the first entry.
        Until the commit, the lower of old and new is noted in Redis, so that no trimmer cuts in between, whatever
        becomes of the commit, and under a version of its own, so that an idle process asks SQL even if we end here.
        Entries that were handled before may come again: the state must not contain them.
        """
        self._at = None
        place = self._log.place(last_id)
        handled = [_record(entry).uid for entry in itertools.islice(self._log.back_from(place), _RECALLED)]
        with sql_trouble("resetting"), self._engine.begin() as sql:
            sql.execute(self._sql["hold"], self._me)
            check_transactional(driver_of(sql))
            sql.execute(self._sql["add_checkpoint"], self._me | {"last_id": ZERO.decode()})
            at = self._read(sql)
            meanwhile = self._advance(sql, at, place, 0) if at else None
            moved = self._advance(sql, meanwhile, place, 0) if meanwhile else None
            if at is None or meanwhile is None or moved is None:
                raise SqlTrouble("this log consumer is running: stop it, then reset it")
            sql.execute(self._sql["forget"], self._me | {"number": moved.records})
            self._remember_all(sql, moved, handled)  # copies of them may come after the place
            sql.execute(self._sql["store_state"], self._me | {"state": _encoded(state)})
            self._log.note(self._name, meanwhile.version, min(at.last_id, place, key=rank), replace=True)
        self._note(moved)
        return place

    def close(self) -> None:
        self._log.close()
        if self._owns_engine:
            self._engine.dispose()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _advance(self, sql: sa.Connection, at: _Checkpoint, last_id: bytes, count: int) -> _Checkpoint | None:
        """Move the checkpoint, as the first statement: it takes the row's lock, and does nothing if the checkpoint is
        no longer the one after which we read."""
        moved = {"from_id": at.last_id.decode(), "last_id": last_id.decode(), "records": count}
        values = self._me | moved | {"version": at.version}
        done: Any = sql.execute(self._sql["advance"], values)
        return _Checkpoint(last_id, at.version + 1, at.records + count) if done.rowcount == 1 else None

    def _apply(self, sql: sa.Connection, at: _Checkpoint, entries: list[Entry], handle: Handle) -> None:
        fresh = self._fresh(sql, at, [_record(entry) for entry in entries])
        if fresh:
            state = _decoded(sql.scalar(self._sql["state"], self._me))
            with ForkGuard():  # a forked child would commit, or roll back, on our connection
                returned = copy_context().run(handle, fresh, state, sql)
            # Else the checkpoint would move over unhandled records.
            check_done(returned, OutboxMisused, "it must be a plain function that does the work itself")
            sql.execute(self._sql["store_state"], self._me | {"state": _encoded(state)})

    def _fresh(self, sql: sa.Connection, at: _Checkpoint, records: list[Record]) -> list[Record]:
        """Return the records without those that were handled before, also earlier in this very batch. A stream id that
        stands for a uid is remembered too: a redriven dead letter has its former id as its uid."""
        new = self._remember_all(sql, at, [record.uid for record in records])
        if known := self._keys({record.uid for record in records} - new):
            # Of several copies the last one counts: another one may come as long after it.
            sql.execute(self._sql["recall"], [self._me | {"uid": uid, "number": at.records} for uid in known])
        if self._remember is not None:
            sql.execute(self._sql["forget"], self._me | {"number": at.records - self._remember - self._batch})
        first = {record.uid: record for record in reversed(records)}
        return [record for record in records if record.uid in new and record is first[record.uid]]

    def _remember_all(self, sql: sa.Connection, at: _Checkpoint, uids: list[str]) -> set[str]:
        keys, known = self._keys(dict.fromkeys(uids)), set[str | bytes]()
        for first in range(0, len(keys), _ASKED_AT_ONCE):
            asked = [*keys][first : first + _ASKED_AT_ONCE]
            known.update(sql.scalars(self._sql["known"], self._me | {"uids": asked}))
        if new := [key for key in keys if key not in known]:
            sql.execute(self._sql["remember"], [self._me | {"uid": key, "number": at.records} for key in new])
        return {keys[key] for key in new}

    def _keys(self, uids: Iterable[str]) -> dict[str | bytes, str]:
        """Return uids by what stands for them in SQL: bytes in MySQL, for which 'a' and 'a ' are the same text."""
        return {uid.encode() if self._engine.dialect.name == "mysql" else uid: uid for uid in uids}

    def _read(self, sql: sa.Connection) -> _Checkpoint | None:
        row = sql.execute(self._sql["checkpoint"], self._me).one_or_none()
        return None if row is None else _Checkpoint(row[0].encode(), int(row[1]), int(row[2]))

    def _open(self) -> _Checkpoint:
        """Read the checkpoint from SQL, made at the first start; note it in Redis before anything is read after it.

        The note replaces whatever Redis has, so the row is locked meanwhile: a reset that came in between would be
        undone in Redis, and the entries that it needs would be trimmed.
        """
        # Wait for Redis to answer before taking a lock; SQLite's is one for the whole database.
        self._log.noted(self._name)
        at = self._noted_as_it_is()
        if at is None:
            self._log.note(self._name, 0, ZERO, replace=True)  # from now on the entries are not trimmed
            first = self._log.place(self._start)
            with sql_trouble("making the checkpoint"), self._engine.begin() as sql:
                sql.execute(self._sql["add_checkpoint"], self._me | {"last_id": first.decode()})
            at = self._noted_as_it_is()
        assert at is not None
        self._at = at
        return at

    def _noted_as_it_is(self) -> _Checkpoint | None:
        with sql_trouble("reading the checkpoint"), self._engine.begin() as sql:
            sql.execute(self._sql["hold"], self._me)
            check_transactional(driver_of(sql))
            at = self._read(sql)
            if at is not None:
                self._note(at, replace=True)
        return at

    def _note(self, at: _Checkpoint, *, replace: bool = False) -> None:
        """Note the checkpoint in Redis, after the commit, so never ahead of SQL. If it fails, less is trimmed for a
        while."""
        self._noted = False
        try:
            self._log.note(self._name, at.version, at.last_id, replace=replace)
            self._noted = True
        except RedisTrouble:
            if replace:
                self._at = None
                raise


def stored_states(url: str, setting: str, stream: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return name, last id and state of every consumer of a stream, as SQL has them now. Raises StartRefused, naming
    ``setting``."""
    engine, found = open_engine(url, setting), []
    check_schema(engine, setting)
    with sql_trouble("reading the states"), engine.connect() as sql:
        rows = sql.execute(sa.text(queries(engine.dialect.name)["states"]), {"stream": stream}).all()
    engine.dispose()
    for named, last_id, stored in rows:
        name = named.decode() if isinstance(named, bytes) else named  # MySQL keeps bytes
        try:
            found.append((name, last_id, _decoded(stored)))
        except ValueError as odd:
            raise StartRefused(f"{setting}: the state of {name} in consumer_states is not JSON: {odd}") from odd
    return found


def _encoded(state: dict[str, Any]) -> str:
    try:
        return as_json("state", state).decode()
    except (TypeError, ValueError) as refused:
        raise OutboxMisused(f"this state cannot be stored: {refused}") from refused


def _decoded(stored: str | None) -> dict[str, Any]:
    return {} if stored is None else dict(parse_json(stored))


def _record(entry: Entry) -> Record:
    fields = entry.fields or []
    given = first_value(fields, UID_FIELD)
    origin = first_value(fields[:2], FROM_FIELD)
    if origin is not None:
        # In a work stream, name it as handlers do (consumer/handlers/message.py): producers of two sources may use one
        # uid.
        source_id, _, rest = origin.partition(b" ")
        given = rest.partition(b" ")[2] + b"/" + (given or source_id)
    given = given or entry.id
    try:
        uid = given.decode()
    except UnicodeDecodeError:
        uid = ""
    # Of a direct producer, which may use any bytes. SQL takes no NUL, and an index of PostgreSQL 2,700 bytes.
    if not uid or "\0" in uid or len(uid) > LONGEST_UID:
        uid = "sha256:" + hashlib.sha256(given).hexdigest()
    return Record(entry.id.decode(), uid, as_mapping(fields))
