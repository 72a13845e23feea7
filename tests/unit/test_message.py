"""Which entries become messages, and what a handler gets to see of one."""

from __future__ import annotations

import pytest

from usher.common.base.clock import now_s
from usher.common.base.errors import MessageUndecodable
from usher.common.protocol.attempts import NEVER, Attempts
from usher.common.protocol.message import LONGEST_TICKET, as_mapping, check_ticket, first_value
from usher.consumer.handlers.message import Message, OwnLease, message_type
from usher.consumer.lifecycle.journal import Journal

FLAT = [b"ticket_id", b"42", b"text", "h\u00e9".encode(), b"uid", b"order-7", b"body", b'{"a": 1}']


def message(flat: list[bytes] | None, lease: OwnLease | None = None, known: Attempts = NEVER) -> Message:
    return Message("t\u00fc".encode(), b"5-1", 9, flat, lease or OwnLease(10.0, now_s()), known)


class TestTicket:
    @pytest.mark.parametrize(
        "ticket", [b"42", b"0", b" ", b"two words", b"a\nb", "\u2603".encode(), b"x" * LONGEST_TICKET]
    )
    def test_a_ticket_id_that_can_be_used_stays_as_it_is(self, ticket: bytes) -> None:
        assert check_ticket(ticket) == ticket

    @pytest.mark.parametrize(
        ("ticket", "reason"),
        [
            (None, "no_ticket_id"),
            (b"", "empty_ticket_id"),
            (b"x" * (LONGEST_TICKET + 1), "ticket_id_too_long"),
            (b"\xff" * (LONGEST_TICKET + 1), "ticket_id_too_long"),
            (b"caf\xe9", "ticket_id_not_utf8"),
            ("\ud800".encode("utf-8", "surrogatepass"), "ticket_id_not_utf8"),
        ],
    )
    def test_one_that_cannot_is_refused_with_its_reason(self, ticket: bytes | None, reason: str) -> None:
        with pytest.raises(MessageUndecodable) as refused:
            check_ticket(ticket)
        assert refused.value.reason == reason

    def test_it_knows_its_stream(self) -> None:
        message = message_type("orders", is_gathered=False)(
            b"42", b"5-1", 9, [b"usher_from", b"1-1 0 s"], OwnLease(10.0, now_s())
        )
        assert (message.source, message.source_id, message.uid, message.scoped_ticket_id) == (
            "orders",
            "5-1",
            "5-1",
            "42",
        )
        assert message.fields == {"usher_from": "1-1 0 s"}, "a field like any other where nothing is gathered"

    def test_a_gathered_one_without_its_body_still_has_a_ticket(self) -> None:
        message = message_type("usher:{g}", is_gathered=True)(b"s/42", b"5-1", 9, None, OwnLease(10.0, now_s()))
        assert (message.ticket_id, message.source, message.source_id, message.fields) == (
            "s/42",
            "usher:{g}",
            "5-1",
            {},
        )


class TestFields:
    def test_of_a_field_that_comes_twice_the_first_counts_as_in_the_scripts(self) -> None:
        flat = [b"a", b"1", b"b", b"2", b"a", b"3"]
        assert first_value(flat, b"a") == b"1"
        assert as_mapping(flat) == {"a": "1", "b": "2"}

    def test_bytes_that_are_not_utf8_survive(self) -> None:
        ((name, value),) = as_mapping([b"\xff", b"caf\xe9"]).items()
        assert name.encode("utf-8", "surrogateescape") == b"\xff"
        assert value.encode("utf-8", "surrogateescape") == b"caf\xe9"


class TestMessage:
    def test_a_handler_sees_text_ids_and_the_body_as_it_was_sent(self) -> None:
        seen = message(FLAT)
        assert (seen.ticket_id, seen.id, seen.uid, seen.fence, seen.attempt) == ("t\u00fc", "5-1", "order-7", 9, 0)
        assert seen.fields == {"ticket_id": "42", "text": "h\u00e9", "uid": "order-7", "body": '{"a": 1}'}
        assert seen.body == b'{"a": 1}'
        assert seen.json() == {"a": 1}
        assert not seen.body_is_gone

    @pytest.mark.parametrize("flat", [[b"uid", b""], [b"uid", b"", b"uid", b"second"]])
    def test_an_empty_uid_is_none(self, flat: list[bytes]) -> None:
        """Two messages with it are two: a sink must not take the second one for a repeat."""
        assert message([b"ticket_id", b"42", *flat]).uid == "5-1"
        gathered = message_type("usher:{g}", is_gathered=True)
        assert gathered(b"s/42", b"5-1", 9, [b"usher_from", b"1-1 2 s", *flat], OwnLease(10.0, now_s())).uid == "s/1-1"

    def test_attempts_of_former_owners_count(self) -> None:
        seen = message(FLAT, known=Attempts(3, 1, 2, 1))
        assert (seen.attempt, seen.failures, seen.known, seen.plain) == (3, 1, Attempts(3, 1, 2, 1), False)
        seen.survived()
        assert (seen.known, seen.plain) == (Attempts(3, 1), True)

    def test_it_is_in_hand_while_the_journal_has_it(self) -> None:
        seen, journal = message(FLAT), Journal(None, "", "c1:1", 1)
        assert not seen.in_hand
        journal.started(seen, 1)
        assert (seen.in_hand, seen.facts()) == (True, {"ticket": "t\u00fc", "id": "5-1", "fence": 9, "attempt": 0})
        journal.ended(seen)
        assert not seen.in_hand


class TestOwnLease:
    def test_handlers_start_only_in_the_first_nine_tenths_and_the_ticket_is_ours_to_the_end(self) -> None:
        fresh = OwnLease(1000.0, now_s())
        late = OwnLease(1000.0, now_s() - 950.0)
        over = OwnLease(1000.0, now_s() - 1001.0)
        assert [(lease.may_start(), lease.holds()) for lease in (fresh, late, over)] == [
            (True, True),
            (False, True),
            (False, False),
        ]

    def test_it_counts_from_before_the_renewal_was_sent(self) -> None:
        lease = OwnLease(1000.0, now_s() - 1001.0)
        lease.renewed(now_s() - 950.0)
        assert (lease.may_start(), lease.holds()) == (False, True)
        lease.renewed(now_s())
        assert lease.may_start()

    def test_a_lost_lease_ends_at_once_for_every_message(self) -> None:
        lease = OwnLease(1000.0, now_s())
        held = message(FLAT, lease)
        assert held.still_mine()
        lease.end()
        assert not held.still_mine()
        assert not lease.may_start()
