"""Rows -> messages, the .sql files, and what became of a checkpoint's entry: pure."""

from __future__ import annotations

import pytest

from usher.common.outbox.log_consumer import judge_loss
from usher.common.outbox.rows import DIALECTS, LONGEST_UID, Row, encode, queries
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.protocol.stream_id import Span


def _row(**changed: object) -> Row:
    return Row(**({"id": 1, "uid": "u", "ticket_id": "T", "action": "a", "object": "o", "data": "{}"} | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"ticket_id": ""}, "empty_ticket_id"),
        ({"ticket_id": "x" * (LONGEST_TICKET + 1)}, "ticket_id_too_long"),
        ({"uid": ""}, "empty_uid"),
        ({"uid": "x" * (LONGEST_UID + 1)}, "uid_too_long"),
        ({"data": b"\xff"}, "data_not_utf8"),
        ({"data": "\udcff"}, "data_not_utf8"),
        ({"ticket_id": "\udcff"}, "ticket_id_not_utf8"),
        ({"uid": b"\xff"}, "uid_not_utf8"),
        ({"action": "\udcff"}, "action_not_utf8"),
        ({"object": b"\xff"}, "object_not_utf8"),
    ],
)
def test_a_row_that_can_become_no_message_has_a_reason_and_stops_no_other(
    changed: dict[str, object], reason: str
) -> None:
    batch = encode([_row(id=1), _row(id=2, **changed), _row(id=3)])
    assert ([row_id for row_id, _ in batch.names], batch.refused) == ([1, 3], [(2, reason, False)])
    assert len(batch.values) == 10


def test_where_a_refused_row_halts_its_ticket_what_stands_behind_it_is_left_alone() -> None:
    rows = [_row(id=1), _row(id=2, data=b"\xff"), _row(id=3), _row(id=4, ticket_id="U"), _row(id=5, uid="")]
    batch = encode(rows, halts=True)
    assert ([row_id for row_id, _ in batch.names], batch.refused) == ([1, 4], [(2, "data_not_utf8", True)])
    for ticket in ("", "x" * (LONGEST_TICKET + 1), "\udcff"):
        refused = encode([_row(id=1, ticket_id=ticket), _row(id=2, ticket_id=ticket, data=b"\xff")], halts=True).refused
        assert [(one.id, one.halts) for one in refused] == [(1, False), (2, False)], "there is nothing to keep in order"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_query_is_there_for_every_dialect(dialect: str) -> None:
    assert queries(dialect).keys() == queries("sqlite").keys()
    for name, query in queries(dialect).items():
        assert query.split()[0] in ("SELECT", "INSERT", "UPDATE", "DELETE"), name
        assert ";" not in query, name


@pytest.mark.parametrize(
    ("last_id", "span", "loss"),
    [
        (b"5-1", None, "checkpoint_above_end"),
        (b"5-10", Span(b"1-1", b"5-9"), "checkpoint_above_end"),
        (b"5-1", Span(None, b"9-1"), "checkpoint_below_start"),
        (b"5-1", Span(b"5-2", b"9-1"), "checkpoint_below_start"),
        (b"5-9", Span(b"5-10", b"9-1"), "checkpoint_below_start"),
        (b"5-1", Span(b"4-1", b"9-1"), "checkpoint_entry_gone"),
        (b"5-1", Span(None, b"5-1"), ""),
        (b"5-1", Span(b"1-1", b"5-1"), ""),
    ],
)
def test_what_became_of_a_checkpoints_entry(last_id: bytes, span: Span | None, loss: str) -> None:
    assert judge_loss(last_id, span).partition(": ")[0] == loss
