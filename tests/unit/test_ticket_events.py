"""What followers are told, from entries and records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from usher.common.protocol.run_log import CRASHED, encode
from usher.consumer.policy.outcome import Finished
from usher.master.insight.live import (
    ENTRIES,
    RUNS,
    changes,
    events_of,
    followed_row,
    parse_position,
)
from usher.master.policy.rules import Rule, RuleAction, Target

_T = b"T1"
_DONE = Finished(_T, b"5-1", 7, 2, 100, 3_000_200)


def names(events: object) -> list[str]:
    return [event.name for event in events]  # type: ignore[attr-defined]


def seen(value: bytes | None) -> dict[str, Any]:
    return followed_row(_T, value, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "1-1",
        "1-1_2-2",
        "1-1_2-2_3-3_4-4",
        "1-1_2-2_x",
        "1-1_2-2_3-3\n",
        "1-1_2-2_3-" + "1" * 21,
        "1-1_18446744073709551616-0_3-3",
    ],
)
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_position(text)


def test_fields_that_are_too_large_are_left_out() -> None:
    [event] = events_of(ENTRIES, b"5-1", [b"ticket_id", _T, b"body", b"x" * 100_000], b"ticket_id", (_T,))
    assert "fields" not in event.data


def test_an_execution_that_ended_with_its_process_is_told_with_the_time_when_that_was_noted() -> None:
    done = _DONE._replace(end_us=0)  # nobody knows
    [event] = events_of(RUNS, b"1700000000000-9", [b"batch", encode("c1:3", [done], [CRASHED])], b"ticket_id", (_T,))
    assert (event.name, event.data["outcome"], event.data["time_ms"]) == ("attempt", CRASHED, 1_700_000_000_000)


@pytest.mark.parametrize("ticket", ["plain", 'a"b\\c', "ä\n\x01", "日本"])
@pytest.mark.parametrize("others", [0, 3, 50])
def test_a_ticket_is_found_in_a_record_whatever_it_is_called(ticket: str, others: int) -> None:
    done = _DONE._replace(ticket=ticket.encode())
    wanted = [ticket.encode(), *(b"other %d" % number for number in range(others))]
    record = encode("c1:3", [_DONE, done])
    assert [event.ticket for event in events_of(RUNS, b"9-9", [b"batch", record], b"ticket_id", wanted)] == [
        ticket.encode()
    ]


def test_what_changes_between_two_looks() -> None:
    nothing, first, more, done = seen(None), seen(b"c1:3 7 5-1"), seen(b"c1:3 7 5-1 6-1"), seen(b"c1:3 7 6-1")
    [handed, state] = changes(_T, nothing, first)
    assert handed.data == {
        "ticket_id": "T1",
        "owner": "c1:3",
        "consumer_name": "c1",
        "fence": 7,
        "message_ids": ["5-1"],
    }
    assert state.data["state"] == "handed_over"
    [handed] = changes(_T, first, more)
    assert handed.data["message_ids"] == ["6-1"]
    assert list(changes(_T, more, done)) == []  # the run log tells
    [handed] = changes(_T, more, seen(b"c2:4 8 5-1 6-1"))
    assert (handed.data["owner"], handed.data["message_ids"]) == ("c2:4", ["5-1", "6-1"])
    [handed] = changes(_T, more, seen(b"c1:3 8 5-1 6-1"))
    assert (handed.data["fence"], handed.data["message_ids"]) == (8, ["5-1", "6-1"]), (
        "the same consumer may get it anew"
    )
    assert names(changes(_T, done, nothing)) == ["state"]
    assert names(changes(_T, first, seen(b"returned 7 5-1"))) == ["state"]
    assert list(changes(_T, first, first)) == []


def test_what_a_rule_holds_and_nobody_has_is_paused_and_not_idle() -> None:
    rule = Rule(Target.TICKET, "T1", RuleAction.PAUSE, reason="stock is being counted", who="alice")
    row = followed_row(_T, None, rule)
    assert row["state"] == "paused"
    assert row["rule"].startswith("paused by alice: stock is being counted (rule ")
    assert followed_row(_T, b"returned 7 5-1", rule)["state"] == "paused"
    busy = followed_row(_T, b"c1:3 7 5-1", rule)
    assert busy["state"] == "handed_over", "what a consumer has goes on"
    slow = replace(rule, action=RuleAction.SLOW, rate_per_second=2.0)
    assert [followed_row(_T, None, one)["state"] for one in (None, slow)] == ["idle", "idle"]
    assert names(changes(_T, seen(b"c1:3 7 5-1"), busy)) == ["state"], "a rule that comes is told"
