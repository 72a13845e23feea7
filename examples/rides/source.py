"""The application of the rides: its tables, its API, and its final figures."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from usher.common.outbox.database import open_engine
from usher.common.outbox.sql_files import queries
from usher.common.outbox.store import OutboxStore
from usher.common.outbox.writer import write_to_outbox
from usher.common.sql.alchemy import sa

_TABLES = (
    "CREATE TABLE rides (id INTEGER PRIMARY KEY, rider TEXT NOT NULL, distance INTEGER NOT NULL)",
    "CREATE TABLE counted_rides (consumer TEXT NOT NULL, ride_id INTEGER NOT NULL)",
)
_ROLLED_BACK = 0.1
_RIDERS = 40


class _RideFailed(Exception):
    """A fault that makes a transaction of the API roll back."""


@dataclass(frozen=True)
class Counted:
    """The count of one consumer, beside the source table. ``lost`` and ``duplicates`` are rides; ``told`` is its own
    running total."""

    name: str
    rides: int
    distance: int
    lost: int
    duplicates: int
    told: dict[str, int]


class Source:
    """The database of rides: one API and its outbox."""

    def __init__(self, url: str) -> None:
        self._store = OutboxStore(url)
        self._store.migrate()
        self._engine = open_engine(url, "--sql")
        if self._engine.dialect.name == "sqlite":
            with self._engine.connect() as connection:
                # Readers and the writer do not wait for each other.
                connection.execute(sa.text("PRAGMA journal_mode = WAL"))
        with self._engine.begin() as connection:
            for table in _TABLES:
                connection.execute(sa.text(table))
        self.rolled_back = 0

    def add_ride(self, number: int, rng: random.Random) -> bool:
        """Make one call of the API; return False when it was rolled back."""
        rider, distance = f"rider-{rng.randrange(_RIDERS)}", rng.randrange(1, 100_000)
        fails = rng.random() < _ROLLED_BACK
        try:
            with self._engine.begin() as connection:
                row = {"id": number, "rider": rider, "distance": distance}
                connection.execute(
                    sa.text("INSERT INTO rides (id, rider, distance) VALUES (:id, :rider, :distance)"), row
                )
                write_to_outbox(
                    connection,
                    ticket_id=rider,
                    action="create",
                    object="ride",
                    data={"id": number, "distance": distance},
                )
                if fails:
                    raise _RideFailed
        except _RideFailed:
            self.rolled_back += 1
            return False
        return True

    def totals(self) -> tuple[int, int]:
        """Return (rides, distance) of the source table."""
        with self._engine.connect() as connection:
            rides, distance = connection.execute(
                sa.text("SELECT count(*), coalesce(sum(distance), 0) FROM rides")
            ).one()
        return int(rides), int(distance)

    def staged(self) -> int:
        """Return the number of rows that are not sent yet."""
        return self._store.waiting()[0]

    def checkpoint(self, name: str, stream: str) -> bytes:
        """Return the last entry that a consumer has stored; b"" before its first start."""
        with self._engine.connect() as connection:
            row = connection.execute(
                sa.text(queries(self._engine.dialect.name)["checkpoint"]), {"name": name, "stream": stream}
            ).one_or_none()
        return row[0].encode() if row else b""

    def counted(self, name: str, stream: str) -> Counted:
        """Compare a consumer's count with the source table."""
        query = """
            SELECT count(counted_rides.ride_id),
                   coalesce(sum(CASE WHEN counted_rides.ride_id IS NULL THEN 0 ELSE rides.distance END), 0),
                   count(*) - count(counted_rides.ride_id),
                   count(counted_rides.ride_id) - count(DISTINCT counted_rides.ride_id)
            FROM rides LEFT JOIN counted_rides
                 ON counted_rides.ride_id = rides.id AND counted_rides.consumer = :consumer"""
        with self._engine.connect() as connection:
            rides, distance, lost, duplicates = connection.execute(sa.text(query), {"consumer": name}).one()
            strays = (
                "SELECT count(*) FROM counted_rides WHERE consumer = :consumer AND ride_id NOT IN (SELECT id FROM"
                " rides)"
            )
            state = connection.scalar(
                sa.text(queries(self._engine.dialect.name)["state"]), {"name": name, "stream": stream}
            )
            # Rolled back, and emitted all the same.
            never = int(connection.scalar(sa.text(strays), {"consumer": name}) or 0)
        return Counted(
            name, int(rides) + never, int(distance), int(lost), int(duplicates) + never, json.loads(state or "{}")
        )

    def close(self) -> None:
        self._engine.dispose()
        self._store.close()
