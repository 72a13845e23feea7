"""Which messages are rehearsed in which order, and what is said of them. Pure."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from usher.common.protocol.attempts import Attempts
from usher.consumer.isolation.values import DONE, LATER, RAISED, CallResult, Piece, calls_of_handler
from usher.deploy.rehearsal.selection import (
    WAITING,
    Before,
    Candidate,
    Rehearsed,
    exit_code,
    in_order,
    of_letter,
    redrive_command,
    unfit_of,
)
from usher.master.policy.letters import parse_letter


def letter(
    letter_id: bytes, message_id: bytes, reason: bytes = b"gave_up", policy: bytes = b"skip", ticket: bytes = b"42"
) -> Candidate:
    head = [
        b"usher-id",
        message_id,
        b"usher-ticket",
        ticket,
        b"usher-reason",
        reason,
        b"usher-error",
        b"E: x",
        b"usher-policy",
        policy,
    ]
    return of_letter(parse_letter(letter_id, head), b"42")


def entry(message_id: bytes) -> Candidate:
    return Candidate(message_id, b"42", Before(WAITING, "not read yet"))


def test_the_order_is_that_of_the_stream_and_a_letter_stands_for_its_entry() -> None:
    given = [entry(b"9-1"), letter(b"50-0", b"10-1"), entry(b"10-1"), entry(b"10-2"), letter(b"9-9", b"")]
    for candidates in itertools.permutations(given):
        assert [one.id for one in in_order(candidates)] == ["9-1", "9-9", "50-0", "10-2"]
    assert [one.id for one in in_order(given, 2)] == ["50-0", "10-2"]


def test_a_letter_tells_why_and_which_ones_no_handler_gets() -> None:
    assert letter(b"1-1", b"1-0", policy=b"park").before.text() == "gave up: E: x (halted)"
    assert letter(b"1-1", b"1-0", reason=b"no_ticket_id").unfit == "no handler is ever given it (no_ticket_id)"
    assert letter(b"1-1", b"1-0", ticket=b"\xfe").unfit == "no handler is ever given it (ticket_id_not_utf8)"
    assert (unfit_of(b"42"), unfit_of(None), unfit_of(b"")) == (
        "",
        "no handler is ever given it (no_ticket_id)",
        "no handler is ever given it (empty_ticket_id)",
    )


def test_only_letters_that_are_taken_are_redriven_with_the_flags_that_found_them() -> None:
    well, badly = CallResult(DONE), CallResult(RAISED, "E: x")
    done = [
        Rehearsed(letter(b"1-1", b"1-0"), well),
        Rehearsed(letter(b"2-1", b"2-0"), badly),
        Rehearsed(entry(b"3-0"), well),
    ]
    assert redrive_command(done, {"group": "a b", "redis_url": None}) == "usher dead redrive 1-1 --group 'a b'"
    assert redrive_command(done[1:], {}) is None
    assert (exit_code(done[::2]), exit_code(done), exit_code([Rehearsed(entry(b"3-0"), replace(well, how=LATER))])) == (
        0,
        1,
        1,
    )


def test_documents_keep_every_byte_of_the_message_and_show_it() -> None:
    flat = (b"ticket_id", bytes(range(256)))
    piece = letter(b"1-1", b"1-0").piece(flat)
    assert Piece.of(piece.document()) == piece
    document = Rehearsed(
        Candidate(b"1-0", b"\xff1-0", Before(WAITING), known=Attempts(2, 1)), CallResult(DONE)
    ).document()
    assert (document["ticket_id"], document["letter_id"], document["attempt"], document["taken"]) == ("", None, 3, True)


def test_a_row_tells_what_it_is_and_how_it_went_before_and_now() -> None:
    failed = Rehearsed(letter(b"1-1", b"1-0"), CallResult(RAISED, "E: " + "y" * 1000))
    kind, *told = failed.row()
    assert (kind, *told[:3]) == ("letter", "1-1", "42", "gave up: E: x")
    assert sum(map(len, told)) < 300, "a row, and not a page"
    assert Rehearsed(entry(b"3-0"), CallResult(DONE)).row()[:4] == ("message", "3-0", "42", "not read yet")


@pytest.mark.parametrize(
    "dump", ["", "Fatal Python error: Aborted", 'Thread 1:\n  File "/u/consumer/rehearsal.py", line 9 in main']
)
def test_a_dump_in_which_the_handler_is_not_found_is_kept_whole(dump: str) -> None:
    assert calls_of_handler(dump) == dump
