"""The database of the rides: its tables, its API, and its final figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flask import Flask, Response, jsonify, request

from usher.common.outbox.rows import queries
from usher.common.outbox.store import OutboxStore, open_engine, write_to_outbox
from usher.common.sql.alchemy import sa

_TABLES = (
    "CREATE TABLE IF NOT EXISTS rides (id VARCHAR(64) PRIMARY KEY, rider TEXT NOT NULL, distance INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS counted_rides (consumer TEXT NOT NULL, ride_id VARCHAR(64) NOT NULL)",
)
#: One statement sees one moment, also while consumers count.
_COUNTED = """
    SELECT (SELECT count(*) FROM rides),
           (SELECT count(*) FROM rides WHERE id NOT IN (SELECT ride_id FROM counted_rides WHERE consumer = :name)),
           count(*), count(*) - count(DISTINCT counted.ride_id) + count(*) - count(rides.id),
           coalesce(sum(rides.distance), 0), ({state})
    FROM counted_rides AS counted LEFT JOIN rides ON rides.id = counted.ride_id WHERE counted.consumer = :name"""


@dataclass(frozen=True)
class Counted:
    """The count of one consumer, reconciled with the source table. ``lost``: rides that it has not counted (yet);
    ``duplicates``: those that it counted twice, or that were rolled back; ``told``: its own running total."""

    name: str
    told: dict[str, int]
    sent: int
    lost: int
    rides: int
    duplicates: int
    distance: int

    @property
    def wrong(self) -> bool:
        """Return True for what may never be, however far the consumer has come."""
        told = (self.told.get("rides", 0), self.told.get("distance", 0))
        return self.duplicates > 0 or self.lost + self.rides != self.sent or told != (self.rides, self.distance)


class Source:
    """The database of rides."""

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

    def add_ride(self, ride: dict[str, Any], fault: Callable[[], None]) -> dict[str, Any]:
        """Add a ride and its outbox row, in one transaction; return the ride that has its id, which may be there
        already."""
        try:
            with self._engine.begin() as connection:
                insert = "INSERT INTO rides (id, rider, distance) VALUES (:id, :rider, :distance)"
                connection.execute(sa.text(insert), ride)
                data = {"id": ride["id"], "distance": ride["distance"]}
                write_to_outbox(connection, ticket_id=ride["rider"], action="create", object="ride", data=data)
                fault()
            return ride
        except sa.exc.IntegrityError:
            with self._engine.connect() as connection:
                found = connection.execute(sa.text("SELECT id, rider, distance FROM rides WHERE id = :id"), ride)
                return dict(found.mappings().one())

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
        """Reconcile a consumer's count with the source table."""
        query = _COUNTED.format(state=queries(self._engine.dialect.name)["state"])
        with self._engine.connect() as connection:
            *counts, state = connection.execute(sa.text(query), {"name": name, "stream": stream}).one()
        return Counted(name, json.loads(state or "{}"), *map(int, counts))

    def close(self) -> None:
        self._engine.dispose()
        self._store.close()


def create_app(source: Source | str, fault: Callable[[], None] = lambda: None) -> Flask:
    """Make the API. ``POST /rides`` may be sent again: rides with one ``Idempotency-Key`` are one ride, and answered
    alike. ``flask --app "examples.rides.source:create_app('sqlite:///rides.db')" run`` serves it."""
    app, rides = Flask("rides"), Source(source) if isinstance(source, str) else source

    @app.post("/rides")
    def add() -> tuple[Response, int]:
        key, asked = request.headers.get("Idempotency-Key", ""), request.get_json(silent=True) or {}
        kinds = {name: type(value) for name, value in asked.items()} if isinstance(asked, dict) else {}
        if kinds != {"rider": str, "distance": int} or not (0 < len(key) <= 64 and asked["distance"] > 0):
            return jsonify(problem="give an Idempotency-Key (1 to 64 characters), and as JSON rider and distance"), 400
        ride = {"id": key, **asked}
        there = rides.add_ride(ride, fault)
        return (jsonify(there), 201) if there == ride else (jsonify(problem="this key has another ride"), 422)

    return app
