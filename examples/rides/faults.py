"""The programs of the rides: what you would write, and the mistakes."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from usher.common.outbox.log_consumer import Record
from usher.common.sql.alchemy import sa
from usher.master.streamer.program import Streamer


class FaultNotes:
    """Faults that happened, one byte each, so that they outlive the process."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name

    def add(self) -> None:
        with self._path.open("ab") as file:
            file.write(b".")

    @property
    def count(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0


def double_sending(share: float, notes: FaultNotes, rng: random.Random) -> type[Streamer]:
    """Make a streamer that sends this share of its batches twice."""

    class DoubleSendingStreamer(Streamer):
        def emit(self, epoch: int, values: list[bytes]) -> bool:
            leads = super().emit(epoch, values)
            if leads and rng.random() < share:
                notes.add()
                leads = super().emit(epoch, values)
            return leads

    return DoubleSendingStreamer


class RolledBack(Exception):
    """A fault that makes a transaction of the API roll back."""


class RideCounter:
    """Adds up rides: into its state, and each ride into a table, in the transaction of the batch."""

    def __init__(self, name: str, crash_share: float, notes: FaultNotes, rng: random.Random) -> None:
        self._name = name
        self._crash_share = crash_share
        self._notes = notes
        self._rng = rng

    def __call__(self, records: Sequence[Record], state: dict[str, Any], sql: sa.Connection) -> None:
        rides = [record.json() for record in records]
        state["rides"] = state.get("rides", 0) + len(rides)
        state["distance"] = state.get("distance", 0) + sum(ride["distance"] for ride in rides)
        rows = [{"consumer": self._name, "ride": ride["id"]} for ride in rides]
        sql.execute(sa.text("INSERT INTO counted_rides (consumer, ride_id) VALUES (:consumer, :ride)"), rows)
        if self._rng.random() < self._crash_share:
            self._notes.add()
            os._exit(1)  # everything done, nothing committed
