"""The streamer's side of the outbox: read batches, remove exactly what was confirmed, set aside rows that cannot become
messages."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import orjson

from usher.common.base.errors import SqlBusy, SqlTrouble
from usher.common.outbox.database import check_schema, migrate, open_engine, sql_trouble
from usher.common.outbox.rows import BATCH_BYTES, ROW_BYTES, Refusal, RefusedRow, Row, TicketRows, queries
from usher.common.sql.alchemy import sa

#: Has a streamer wait for SQLite's one write lock for a moment only: its lease must not end meanwhile. Same as
#: lock_timeout in queries.sql; for MySQL see open_engine.
_IMPATIENT = sa.text("PRAGMA busy_timeout = 500")


class OutboxStore:
    """An outbox; used by one thread. ``setting`` is named in errors."""

    def __init__(self, url: str, setting: str = "USHER_OUTBOX_URL", row_bytes: int = ROW_BYTES) -> None:
        self._single = open_engine(url, setting, streams=True)  # a turn with a dead connection is repeated
        self._setting = setting
        self._row_bytes = row_bytes
        self._is_postgres = self._single.dialect.name == "postgresql"
        # On a connection of self._single one statement is a transaction; SQLite, which runs in this process, does not
        # need that. MySQL asks more often when a connection changes its mode, and so has single ones by default.
        self._engine = self._single
        if self._is_postgres:
            self._single = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        elif self.dialect == "mysql":
            self._engine = self._single.execution_options(isolation_level="READ COMMITTED")
        self._queries = {name: sa.text(query) for name, query in queries(self._engine.dialect.name).items()}

    @property
    def dialect(self) -> str:
        return self._engine.dialect.name

    @property
    def identity(self) -> str:
        """Return a text that tells two databases apart and reveals nothing about either."""
        url = self._engine.url
        where = (
            os.path.realpath(url.database or "")
            if self.dialect == "sqlite"
            else f"{url.host} {url.port} {url.database} {dict(url.query)}"
        )
        return hashlib.sha256(where.encode()).hexdigest()[:12]

    def check(self) -> None:
        check_schema(self._engine, self._setting)

    def migrate(self) -> bool:
        return migrate(self._engine)

    def batch(self, count: int) -> list[Row]:
        """Read the first ``count`` rows by id, as one snapshot, as under REPEATABLE READ: it is one statement. Raises
        SqlTrouble.

        A transaction around it would be two more answers of PostgreSQL to wait for, on the way of every row. From a
        database that takes no writes nothing is read: rows that cannot be removed would be sent again and again.
        """
        values = {"count": count, "bytes": BATCH_BYTES, "row_bytes": self._row_bytes}
        with sql_trouble("reading the outbox"), self._single.connect() as connection:
            if self.dialect == "sqlite" and "timeout" not in self._engine.url.query:
                connection.execute(_IMPATIENT)
            rows: list[Row] = []
            size = 0
            for *columns, read_only in connection.execute(self._queries["batch"], values):
                if read_only == "on":
                    raise SqlTrouble(
                        "the database of the outbox takes no writes, so nothing is sent: it could not be removed"
                    )
                rows.append(Row(*columns))
                size += rows[-1].size
                if size >= BATCH_BYTES:
                    break
        return rows

    def is_empty(self) -> bool:
        with sql_trouble("reading the outbox"), self._single.connect() as connection:
            return connection.scalar(self._queries["first"]) is None

    def remove(self, sent: Sequence[tuple[int, str]]) -> None:
        """Delete these rows, each by its id and uid; rows that are gone already are no error. Raises SqlTrouble.

        In PostgreSQL without a COMMIT of its own: a streamer that is cut off before it would hold the rows until the
        server misses it, in two hours.
        """
        if sent:
            with sql_trouble("removing sent rows", canceled=SqlBusy), self._single.begin() as connection:
                self._remove(connection, sent)

    def set_aside(self, refused: Sequence[Refusal]) -> None:
        """Move these rows to refused_log_records, each with its reason. Raises SqlTrouble."""
        with sql_trouble("setting rows aside", canceled=SqlBusy), self._engine.begin() as connection:
            connection.execute(self._queries["set_aside"], [one._asdict() for one in refused])
            self._remove(connection, [(one.id, None) for one in refused])

    def halted(self) -> int:
        with sql_trouble("counting the outbox"), self._single.connect() as connection:
            return int(connection.scalar(self._queries["halted"]) or 0)

    def waiting(self) -> tuple[int, int]:
        with sql_trouble("counting the outbox"), self._engine.connect() as connection:
            staged, refused = connection.execute(self._queries["waiting"]).one()
            return int(staged), int(refused)

    def of_ticket(self, ticket_id: str, most: int = 20) -> TicketRows:
        """Return what the outbox has of a ticket, up to ``most`` refused rows. Raises SqlTrouble, also where the role
        may not read them."""
        with sql_trouble("reading the outbox"), self._engine.connect() as connection:
            about = {"ticket_id": ticket_id}
            try:
                staged, first_id, since = connection.execute(self._queries["of_ticket"], about).one()
                refused = connection.execute(self._queries["refused_of_ticket"], {**about, "count": most}).all()
            except sa.exc.ProgrammingError as refusal:
                raise SqlTrouble(f"reading the outbox: {refusal.orig}") from refusal
            rows = tuple(RefusedRow(row.id, row.reason, _moment(row.refused_at), bool(row.halts)) for row in refused)
            return TicketRows(staged, first_id, _moment(since), rows)

    def close(self) -> None:
        self._engine.dispose()

    def _remove(self, connection: sa.Connection, rows: Sequence[tuple[int, str | None]]) -> None:
        ids, uids = zip(*rows, strict=True)
        values: Any = {"ids": list(ids), "uids": list(uids)}
        if self.dialect == "sqlite":
            values = [{"id": row_id} for row_id in ids]
        elif self.dialect == "mysql":
            sent = [(row_id, uid and uid.encode().hex()) for row_id, uid in rows]
            values = {"sent": orjson.dumps(sent).decode()}
        connection.execute(self._queries["remove"], values)


def _moment(value: Any) -> str:
    return str(value)[:19].replace("T", " ")
