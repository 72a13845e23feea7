"""Which messages are rehearsed in which order, and what is said of them. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.rehearsal import DONE, LATER, RAISED, Ended, Piece, calls_of_handler
from master.policy.letters import parse_letter
from master.policy.rehearsals import WAITING, Before, Candidate, Rehearsed, exit_code, in_order, of_letter, redrive_command, unfit_of


def letter(letter_id: bytes, message_id: bytes, reason: bytes = b"gave_up", policy: bytes = b"skip") -> Candidate:
    head = [b"usher-id", message_id, b"usher-ticket", b"42", b"usher-reason", reason, b"usher-error", b"E: x", b"usher-policy", policy]
    return of_letter(parse_letter(letter_id, head), b"42")


def entry(message_id: bytes) -> Candidate:
    return Candidate(message_id, b"42", Before(WAITING, "not read yet"))


def test_the_order_is_that_of_the_stream_and_a_letter_stands_for_its_entry() -> None:
    found = in_order([entry(b"9-1"), letter(b"50-0", b"10-1"), entry(b"10-1"), entry(b"10-0"), letter(b"9-9", b"")])
    assert [one.id for one in found] == ["9-1", "9-9", "10-0", "50-0"]
    assert [one.id for one in in_order(found, 2)] == ["10-0", "50-0"]


def test_a_letter_tells_why_and_which_ones_no_handler_gets() -> None:
    assert letter(b"1-1", b"1-0", policy=b"park").before.text() == "gave up: E: x (halted)"
    assert letter(b"1-1", b"1-0", reason=b"no_ticket_id").unfit == "no handler is ever given it (no_ticket_id)"
    assert (unfit_of(b"42"), unfit_of(None), unfit_of(b"")) == ("", "", "no handler is ever given it (empty_ticket_id)")


def test_only_letters_that_are_taken_are_redriven_with_the_flags_that_found_them() -> None:
    well, badly = Ended(DONE), Ended(RAISED, "E: x")
    done = [Rehearsed(letter(b"1-1", b"1-0"), well), Rehearsed(letter(b"2-1", b"2-0"), badly), Rehearsed(entry(b"3-0"), well)]
    assert redrive_command(done, {"group": "a b", "redis_url": None}) == "usher dead redrive 1-1 --group 'a b'"
    assert redrive_command(done[1:], {}) is None
    assert (exit_code(done[::2]), exit_code(done), exit_code([Rehearsed(entry(b"3-0"), replace(well, how=LATER))])) == (0, 1, 1)


def test_documents_keep_every_byte_of_the_message_and_show_it() -> None:
    flat = (b"ticket_id", bytes(range(256)))
    piece = letter(b"1-1", b"1-0").piece(flat)
    assert Piece.of(piece.document()) == piece
    document = Rehearsed(Candidate(b"1-0", b"\xff1-0", Before(WAITING)), Ended(DONE)).document()
    assert (document["ticket_id"], document["letter_id"], document["taken"]) == ("", None, True)


@pytest.mark.parametrize("dump", ["", "Fatal Python error: Aborted", 'Thread 1:\n  File "/u/consumer/rehearsal.py", line 9 in main'])
def test_a_dump_in_which_the_handler_is_not_found_is_kept_whole(dump: str) -> None:
    assert calls_of_handler(dump) == dump
