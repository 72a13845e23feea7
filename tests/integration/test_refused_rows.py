"""Rows that can become no message: the writer is told of their size, and what comes after one of them may wait."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import sqlalchemy as sa

from tests.commands import usher
from tests.outboxes import STREAM, Hand, Outbox, uids
from usher.common.outbox.rows import queries
from usher.common.outbox.store import LogRecord
from usher.common.redis.client import Link

_HALTS: dict[str, Any] = {"outbox_refused_policy": "halt"}
_LARGE = 17 * 2**20


def _explained(outbox: Outbox, redis_url: str, capsys: pytest.CaptureFixture[str], ticket: str) -> dict[str, Any]:
    where = {"USHER_REDIS_URL": redis_url, "USHER_TICKET_STREAM": STREAM, "USHER_OUTBOX_URL": outbox.url}
    with mock.patch.dict(os.environ, where):
        assert usher("tickets", "explain", ticket, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def _mended(outbox: Outbox, *statements: str) -> None:
    """By hand, in one transaction, for the one refused row."""
    with outbox.engine.begin() as connection:
        row_id = connection.scalar(sa.text("SELECT min(id) FROM refused_log_records"))
        for statement in statements:
            connection.execute(sa.text(statement), {"id": row_id})


def test_a_row_that_would_be_refused_for_its_size_fails_in_the_transaction_that_writes_it(outbox: Outbox) -> None:
    outbox.stage(LogRecord("T", "a", "o", "x" * 1000))
    with pytest.raises(sa.exc.DBAPIError, match="too large to become a message: more than 16384 KiB"):
        outbox.stage(LogRecord("T", "a", "o", 1), LogRecord("T", "a", "o", "x" * _LARGE))
    assert outbox.store.waiting() == (1, 0), "nothing of that transaction"


def test_a_refused_row_halts_its_ticket_until_it_is_put_back_before_the_others(
    outbox: Outbox,
    hands: Callable[..., Hand],
    link: Link,
    redis_url: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    hand = hands(outbox, **_HALTS)
    outbox.stage(LogRecord("T", "a", "o", 1, "1"))
    outbox.stage_odd()
    outbox.stage(LogRecord("T", "a", "o", 3, "3"), LogRecord("U", "a", "o", 4, "4"))
    assert _explained(outbox, redis_url, capsys, "T")["state"] == "in_outbox"
    hand.turn()
    assert uids(link) == ["1", "4"], "what stands behind a refused row in its batch waits too"
    outbox.stage(LogRecord("T", "a", "o", 5, "5"), LogRecord("U", "a", "o", 6, "6"))
    hand.turn(2)
    assert uids(link) == ["1", "4", "6"]
    assert outbox.store.waiting() == (2, 1)
    assert hand.streamer.halted == 1
    refusals = [record.__dict__["facts"] for record in caplog.records if record.message == "outbox_row_refused"]
    assert [one["halts_its_ticket"] for one in refusals] == [True]
    told = _explained(outbox, redis_url, capsys, "T")
    assert told["state"] == "unread", "what was sent before it waits for a master"
    assert "(uid_too_long) and halts the ticket, with 2 later rows behind it" in told["sentences"][-1]
    link.call("DEL", STREAM)
    assert _explained(outbox, redis_url, capsys, "T")["state"] == "halted_in_outbox"
    assert _explained(outbox, redis_url, capsys, "U")["state"] == "idle"
    dialect = outbox.store.dialect
    _mended(
        outbox,
        "UPDATE refused_log_records SET uid = '2' WHERE id = :id",
        queries(dialect)["put_back_first"],
        "DELETE FROM refused_log_records WHERE id = :id",
    )
    hand.turn(2)
    assert uids(link) == ["2", "3", "5"]
    hand.streamer._count_at_s = 0.0
    hand.turn()
    assert hand.streamer.halted == 0


def test_a_ticket_goes_on_without_a_refused_row_that_is_deleted(
    sqlite_outbox: Outbox, hands: Callable[..., Hand], link: Link
) -> None:
    hand = hands(sqlite_outbox, **_HALTS)
    sqlite_outbox.stage_odd()
    sqlite_outbox.stage(LogRecord("T", "a", "o", 2, "2"))
    hand.turn(2)
    assert uids(link) == []
    _mended(sqlite_outbox, "DELETE FROM refused_log_records WHERE id = :id")
    hand.turn()
    assert uids(link) == ["2"]


def test_rows_without_a_usable_ticket_park_nothing(
    sqlite_outbox: Outbox, hands: Callable[..., Hand], redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with sqlite_outbox.engine.begin() as connection:
        for ticket in ("", "", "x" * 257, "x" * 257):
            statement = sa.text("INSERT INTO staged_log_records (ticket_id, action, object) VALUES (:ticket, 'a', 'o')")
            connection.execute(statement, {"ticket": ticket})
    hands(sqlite_outbox, **_HALTS).turn()
    assert sqlite_outbox.store.waiting() == (0, 4)
    assert sqlite_outbox.store.halted() == 0


def test_a_refused_row_that_parks_nothing_is_explained_and_an_outbox_that_is_away_is_no_reason_to_say_nothing(
    sqlite_outbox: Outbox, hands: Callable[..., Hand], redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sqlite_outbox.stage_odd()
    hands(sqlite_outbox).turn()
    told = _explained(sqlite_outbox, redis_url, capsys, "T")
    assert (told["state"], told["reasons"][0]["code"]) == ("idle", "refused_in_outbox")
    with sqlite_outbox.engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE consumer_uids"))
    told = _explained(sqlite_outbox, redis_url, capsys, "T")
    assert told["reasons"][0]["code"] == "outbox_not_asked"
