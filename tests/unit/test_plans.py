from __future__ import annotations

import pytest

from usher.master.policy.board.plans import NOBODY, TicketPlan, span


@pytest.mark.parametrize(
    ("believed", "changes"),
    [(NOBODY, True), (b"returned 7", True), (b"c1:1 7", False), (b"returned:1 7", False), (b"halted 7", False)],
)
def test_a_ticket_gets_an_owner_if_it_has_none_or_was_given_back(believed: bytes, changes: bool) -> None:
    assert TicketPlan(b"T", believed, [b"1-0"]).changes_owner is changes


def test_a_span_is_counted_in_numbers_over_all_parts() -> None:
    parts = [
        [TicketPlan(b"A", NOBODY, [b"5-2", b"10-0"])],
        [TicketPlan(b"B", NOBODY, [b"5-10"]), TicketPlan(b"C", NOBODY, [b"9-1", b"9-99"])],
    ]
    assert span(parts) == (b"5-2", b"10-0")
