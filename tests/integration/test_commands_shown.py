"""What the commands show people on a terminal of 80 columns, and what they say when there is nothing to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from rich.text import Text

from common.cli import run, usher
from common.commands import doctor
from master.audit import screen
from master.commands.follow import Told, _line
from master.policy.rules import Target, rule_id
from tests.integration.factories import World
from tests.integration.test_capabilities import with_user

_TICKET = b"a-customer-with-a-long-name-4711"
_ID = b"1795461475818-0"


def shown(world: World, *words: str) -> Any:
    environ = {"USHER_REDIS_URL": world.link.url, "USHER_TICKET_STREAM": world.keys.stream, "USHER_GROUP": world.keys.group, "COLUMNS": "80"}
    return CliRunner().invoke(usher, [*words], env=environ)


def letters(world: World, *tickets: bytes) -> list[str]:
    """One dead letter of each ticket, by the policy `skip`; their ids."""
    leader, a = world.elect(), world.join("a")
    for number, ticket in enumerate(tickets):
        world.owned(leader, a, ticket, b"%d-0" % (int(_ID.split(b"-")[0]) + number))
        world.give_up(a, ticket, "skip")
    return [letter_id.decode() for letter_id in world.letter_ids()]


def test_ids_of_letters_and_of_their_messages_stay_whole(world: World) -> None:
    (letter,) = letters(world, _TICKET)
    words = shown(world, "dead", "list").output.split()
    assert letter in words
    assert _ID.decode() in words


@pytest.mark.parametrize("what", ["show", "redrive", "drop"])
@pytest.mark.parametrize("text", ["99999999999999999999-0", "1", "1-x", "\uff11-0"])
def test_what_is_no_id_of_a_letter_is_refused_in_one_line(world: World, what: str, text: str) -> None:
    refused = shown(world, "dead", what, text)
    assert (refused.exit_code, type(refused.exception)) == (2, SystemExit)
    assert "is not the id of a letter" in refused.output


@pytest.mark.parametrize("words", [("pause", "42"), ("rules", "dead-letter", "42", "--yes"), ("dead", "redrive", "--all", "--yes")])
def test_what_the_user_of_the_url_may_not_do_is_told_in_one_line(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    world.link.call("XADD", world.keys.dead, "*", "usher-id", "5-1", "usher-fields", "1", "a", "b")
    world.link.call("ACL", "SETUSER", "looks", "on", ">pw", "~*", "+@read", "+@connection", "+info", "+eval", "+evalsha", "+xgroup")
    monkeypatch.setenv("USHER_REDIS_URL", with_user(world.link.url, "looks", "pw"))
    monkeypatch.setenv("USHER_TICKET_STREAM", world.keys.stream)
    monkeypatch.setenv("USHER_GROUP", world.keys.group)
    try:
        code = run(list(words))
    finally:
        world.link.call("ACL", "DELUSER", "looks")
    told = capsys.readouterr().err
    assert code == 2
    assert told.splitlines()[-1].startswith("usher: USHER_REDIS_URL: Redis: ")
    assert "Traceback" not in told


def test_a_rate_that_is_no_number_is_refused_and_makes_no_rule(world: World) -> None:
    refused = shown(world, "slow", "42", "--rate", "nan")
    assert (refused.exit_code, world.link.call("EXISTS", world.keys.rules)) == (2, 0)
    assert "Invalid value for '--rate': 'nan' is no number" in refused.output


def test_ids_of_messages_incarnations_and_rules_stay_whole(world: World) -> None:
    world.join("a-consumer")
    world.owned(world.elect(), world.join("another-one"), _TICKET, _ID)
    rule = rule_id(Target.TICKET, _TICKET.decode())
    assert shown(world, "pause", _TICKET.decode(), "--reason", "the customer asked us to wait until the new warehouse opens").exit_code == 0
    assert _ID.decode() in shown(world, "tickets", "list").output.split()
    assert rule in shown(world, "rules").output.split()
    for words in (("consumers", "list"), ("status", "--once")):
        output = shown(world, *words).output
        assert re.search(r"^another-one +live .* [0-9]+ *$", output, re.MULTILINE), output
        assert max(map(len, output.splitlines())) <= 80


@pytest.mark.parametrize("what", ["redrive", "drop"])
def test_filters_that_let_no_letter_through_are_named_and_that_is_no_failure(world: World, what: str) -> None:
    nothing = shown(world, "dead", what, "--all", "--yes")
    assert (nothing.exit_code, nothing.output) == (0, "there are no dead letters\n")
    (letter,) = letters(world, _TICKET)
    other = shown(world, "dead", what, "--all", "--reason", "nope", "--ticket", "a\x1bb", "--older-than", "2h")
    assert (other.exit_code, other.output) == (0, "no dead letter matches: ticket a\\x1bb, reason nope, older than 2 h 0 min\n")
    assert [one.decode() for one in world.letter_ids()] == [letter]


@pytest.mark.parametrize("what", ["redrive", "drop"])
def test_one_letter_is_one_letter(world: World, what: str) -> None:
    one, *_ = letters(world, b"A", b"B", b"C")
    assert shown(world, "dead", what, one, "--yes").output.startswith(f"1 dead letter to {what} ")
    assert shown(world, "dead", what, "--all", "--yes").output.startswith(f"2 dead letters to {what} ")


@pytest.mark.parametrize("what", ["list", "redrive", "drop"])
def test_a_reason_of_letters_is_told_from_the_reason_of_an_action(world: World, what: str) -> None:
    told = " ".join(shown(world, "dead", what, "--help").output.split())
    assert "--reason TEXT Only those given up for a reason that has this in it; not why you act." in told
    assert ("--why TEXT Why you do it, for the action log (in other commands this is --reason)." in told) == (what != "list")


def test_whoever_lifts_a_rule_says_why_to_the_action_log_only(world: World) -> None:
    """Whoever asks what a ticket waits for is told of the rules that hold, so what is said at a lift is not told there."""
    for words in (("resume",), ("rules", "lift")):
        assert "Why, for the action log.\n" in shown(world, *words, "--help").output
    assert shown(world, "pause", "T", "--reason", "opens on Monday").exit_code == 0
    assert "opens on Monday" in shown(world, "tickets", "explain", "T").output
    assert shown(world, "resume", "T", "--reason", "open now").exit_code == 0
    assert "open now" not in shown(world, "tickets", "explain", "T").output
    assert "open now" in shown(world, "actions").output
    assert "none" in shown(world, "rules").output


def test_of_a_ticket_of_which_nothing_is_left_nobody_knows_whether_it_ever_came(world: World) -> None:
    world.elect()
    told = " ".join(shown(world, "tickets", "explain", "nosuch").output.split())
    assert told == "nosuch: idle nothing of it is unread, parked or in processing: all that ever came is finished, or nothing ever came"


@pytest.mark.parametrize("ticket", [b"\\[/x]", b"\\[red]", b"[/x]", b"gift:id:key:7", b"a\\"])
def test_tickets_are_shown_as_they_are_called(world: World, ticket: bytes) -> None:
    """No markup, also behind a backslash, and no emoji: whoever copies a name must get that ticket."""
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, ticket)
    world.give_up(a, ticket, "skip")
    world.owned(leader, a, ticket)
    letter = world.letter_ids()[0].decode()
    for words in (("dead", "list"), ("dead", "show", letter), ("tickets", "list"), ("tickets", "show", ticket.decode()), ("status", "--once")):
        ended = shown(world, *words)
        assert (ended.exit_code, ended.exception) == (0, None), words
        assert ticket.decode() in ended.output.split(), (words, ended.output)


@pytest.mark.parametrize("ms", [0, 1_700_000_000_000_000, 2**64 - 1])
def test_what_happens_to_messages_with_ids_that_somebody_chose_is_told_all_the_same(ms: int) -> None:
    """An id need not be a time: a producer may count microseconds, or begin at 1."""
    line = _line(Told("", "entry", {"ticket_id": "T", "time_ms": ms, "message_id": f"{ms}-0"}))
    assert line.endswith(f"entry        message_id={ms}-0")


@pytest.mark.parametrize("text", ["\\[/x]", "\\[red]x", "[/x]", "a\\"])
@pytest.mark.parametrize("safe", [screen._safe, doctor._safe])
def test_what_audit_and_doctor_say_of_names_is_no_markup(safe: Callable[[str], str], text: str) -> None:
    assert Text.from_markup(f"[red]{safe(text)}[/]", emoji=False).plain == text
