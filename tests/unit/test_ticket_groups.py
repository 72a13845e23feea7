"""Tickets in the same trouble are one group, and which tickets a list shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from usher.common.protocol.attempts import Attempts
from usher.common.protocol.last_error import LastError
from usher.common.protocol.ticket_states import TicketState
from usher.master.policy.board.plans import Parked
from usher.master.policy.explain.stuck import Head, StuckContext, describe
from usher.master.policy.explain.ticket_groups import SHOWN, TicketGroups
from usher.master.policy.ticket_filter import parse_states

_NOW = 1_790_000_100_000
_KEY_ERROR = LastError("KeyError: 'x'", "KeyError", "shop/orders.py:41", 3, 3, 3, _NOW - 50_000)


def _row(number: int, owner: bytes, error: LastError | None, behind: int = 0, attempts: Attempts | None = None) -> Any:
    head = Head(b"T%d" % number, owner, 0, b"%d-0" % (_NOW - 100_000 + number), 1 + behind)
    seen = StuckContext(
        {} if attempts is None else {head.id: attempts},
        {"c3:1": "live"},
        {},
        {head.ticket: Parked(0, True)},
        errors={} if error is None else {head.id: error},
    )
    return describe(head, seen, _NOW) | {"shown": f"T{number}"}


def test_what_is_the_same_is_one_line_with_all_that_waits() -> None:
    groups = TicketGroups()
    for number in range(40):
        groups.add(_row(number, b"halted", _KEY_ERROR, behind=4))
    groups.add(_row(50, b"c3:1", _KEY_ERROR, attempts=Attempts(1, 1)))
    groups.add(_row(51, b"halted", _KEY_ERROR._replace(at="shop/orders.py:4")))
    halted, other, retrying = groups.merged([])
    assert (halted["tickets"], halted["messages"], len(halted["rows"])) == (40, 200, SHOWN)
    assert re.fullmatch(
        r"40 tickets halted: KeyError in shop/orders\.py:41, since \d\d:\d\d:\d\d UTC, in all 200 messages wait",
        halted["told"],
    )
    assert other["told"].startswith("Ticket T51 halted: KeyError in shop/orders.py:4, since")
    assert retrying["told"].startswith("Ticket T50 retrying: KeyError in shop/orders.py:41")


def test_rows_of_counted_groups_are_not_counted_twice_and_others_get_groups_of_their_own() -> None:
    groups = TicketGroups()
    groups.add(_row(1, b"halted", _KEY_ERROR))
    fresh = [_row(1, b"halted", _KEY_ERROR), _row(2, b"c3:1", None), _row(3, b"c3:1", None), _row(4, b"", None)]
    told = [(one["state"], one["text"], one["tickets"]) for one in groups.merged(fresh)]
    assert told == [
        ("halted", "KeyError in shop/orders.py:41", 1),
        ("waiting", "waits: no consumer has it", 1),
        ("handed_over", "on c3", 2),
    ]


def test_a_group_of_which_only_what_failed_was_counted_has_all_of_its_rows() -> None:
    groups = TicketGroups()
    groups.add(_row(0, b"c3:1", None))
    [on_c3] = groups.merged([_row(number, b"c3:1", None) for number in range(40)])
    assert (on_c3["tickets"], on_c3["messages"]) == (40, 40)


def test_what_is_known_of_some_tickets_alone_is_told_as_the_least() -> None:
    counted = TicketGroups()
    counted.add(_row(1, b"halted", _KEY_ERROR))
    rows = [_row(number, b"c3:1", _KEY_ERROR, attempts=Attempts(1, 1)) for number in range(2, 6)]
    for are_all, says in ((True, "4 tickets retrying"), (False, "at least 4 tickets retrying")):
        halted, retrying = counted.merged(rows, rows_are_all=are_all)
        assert retrying["told"].startswith(says)
        assert (retrying["tickets_are_all"], halted["tickets_are_all"]) == (are_all, True)
    assert "in all at least 4 messages wait" in retrying["told"]


def test_of_very_many_errors_the_further_ones_are_counted() -> None:
    groups = TicketGroups()
    for number in range(500):
        groups.add(_row(number, b"halted", _KEY_ERROR._replace(at=f"shop/orders.py:{number}")))
    merged = groups.merged([])
    assert sum(group["tickets"] for group in merged) == 500
    assert merged[-1]["told"].startswith("300 tickets further: further errors, more than 200 in all")


def test_an_error_that_nobody_noted_is_a_group_too() -> None:
    groups = TicketGroups()
    groups.add(_row(1, b"c3:1", None, attempts=Attempts(2, 2)))
    groups.add(_row(2, b"c3:1", None, attempts=Attempts(1, 1)))
    [group] = groups.merged([])
    assert (group["state"], group["text"], group["tickets"]) == ("retrying", "", 2)
    assert group["told"].startswith("2 tickets retrying: their errors are not known, since")


def test_states_that_no_list_can_tell_are_refused() -> None:
    assert parse_states("halted,retrying") == {TicketState.HALTED, TicketState.RETRYING}
    with pytest.raises(ValueError, match="'running' is no state that a list can tell"):
        parse_states("halted,running")


def test_the_docs_tell_every_state() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operate.md").read_text()
    table, of_messages = text[text.index("| state | the ticket |") : text.index("## What fails?")].split("\nA message")
    assert _first_column(table) == set(TicketState)
    assert _first_column(of_messages) == {"over", "gone"}


def _first_column(text: str) -> set[str]:
    rows = [line.split("|")[1] for line in text.splitlines() if "|" in line]
    return {word for row in rows for word in re.findall(r"\w+", row)} - {"state"}
