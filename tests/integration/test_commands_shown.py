"""What the commands show people on a terminal of 80 columns, and what they say when there is nothing to do."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from rich.text import Text

from tests.doors import environ_of
from tests.integration.factories import World, with_user
from tests.rules import ROOT
from usher.cli import run, usher
from usher.common.cli import doctor
from usher.common.protocol.keys import Keys
from usher.common.protocol.last_error import LastError
from usher.common.protocol.last_error import encode as encode_error
from usher.master.audit import cli as audit
from usher.master.cli.commands import _event_line
from usher.master.operations.shelves import DeadLetters
from usher.master.policy.rules import Target, rule_id

_TICKET = b"a-customer-with-a-long-name-4711"
_ID = b"1795461475818-0"


def shown(world: World, *words: str, columns: str | None = "80") -> Any:
    environ = {**environ_of(world), "COLUMNS": columns}
    return CliRunner().invoke(usher, [*words], env=environ)


def letters(world: World, *tickets: bytes) -> list[str]:
    """One dead letter of each ticket, by the policy `skip`; their ids."""
    leader, a = world.elect(), world.join("a")
    for number, ticket in enumerate(tickets):
        world.owned(leader, a, ticket, b"%d-0" % (int(_ID.split(b"-")[0]) + number))
        world.give_up(a, ticket, "skip")
    return [letter_id.decode() for letter_id in world.letter_ids()]


def test_of_a_letter_its_id_its_ticket_and_its_error_win_where_there_is_no_room_for_all(world: World) -> None:
    (letter,) = letters(world, _TICKET)
    narrow = shown(world, "dead", "list").output
    assert letter in narrow.split()
    assert "gave_up: ValueError: x" in narrow, "on one line"
    assert max(map(len, narrow.splitlines())) <= 80
    assert _ID.decode() not in narrow
    wide = shown(world, "dead", "list", columns="140").output
    assert {letter, _TICKET.decode(), _ID.decode(), "skip"} <= set(wide.split())
    assert {letter, _ID.decode(), "skip"} <= set(shown(world, "dead", "list", columns=None).output.split()), (
        "who keeps the output wants all"
    )
    assert "gave_up: ValueError: x" in shown(world, "dead", "list", columns=None).output, (
        "or searches it, for words in one piece"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("tickets list --state foo", "'foo' is no state that a list can tell"),
        ("dead list --id x", "--id: 'x' is no id"),
    ],
)
def test_a_filter_that_cannot_be_is_refused_in_a_line(world: World, words: str, told: str) -> None:
    """The one was a traceback, the other an error of Redis that blamed USHER_REDIS_URL."""
    refused = shown(world, *words.split())
    assert (refused.exit_code, told in refused.stderr) == (2, True)


def test_ctrl_c_lets_a_batch_end_and_counts_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 500 that it had dropped it told 400."""

    def drop(letters: DeadLetters, ids: list[bytes], plain: Any = DeadLetters.drop) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return plain(letters, ids)

    letters(world, *(b"T%d" % number for number in range(102)))
    monkeypatch.setattr(DeadLetters, "drop", drop)
    dropped = shown(world, "dead", "drop", "--all", "--yes")
    assert (dropped.exit_code, len(world.letter_ids())) == (130, 2)
    assert "100 dropped" in dropped.output and "dropped 100" in shown(world, "actions").output


def test_letters_are_counted_by_kind_and_those_of_a_kind_are_listed(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    for ticket, policy in ((b"S1", "skip"), (b"S2", "skip"), (b"H", "halt")):
        world.owned(leader, a, ticket)
        world.give_up(a, ticket, policy)
    skipped, halted = kinds = json.loads(shown(world, "dead", "kinds", "--json").output)["kinds"]
    assert [(kind["count"], kind["policy"]) for kind in kinds] == [(2, "skip"), (1, "halt")]
    assert {skipped["id"], halted["id"]} <= set(shown(world, "dead", "kinds", columns=None).output.split())
    listed = json.loads(shown(world, "dead", "list", "--kind", skipped["id"], "--json").output)
    assert [letter["ticket_id"] for letter in listed["dead_letters"]] == ["S1", "S2"]
    shown(world, "dead", "drop", "--all", "--kind", skipped["id"], "--yes")
    assert json.loads(shown(world, "dead", "kinds", "--json").output)["kinds"] == [halted]


def test_an_output_that_is_not_utf8_is_no_traceback(world: World) -> None:
    """A ticket id that it cannot say ended the command."""
    letters(world, "Käse-☃".encode())
    environ = {"PATH": os.environ["PATH"], **environ_of(world), "COLUMNS": "200", "PYTHONIOENCODING": "ascii"}
    for words in (["dead", "list"], ["dead", "list", "--json"]):
        done = subprocess.run(
            [sys.executable, ROOT / "usher" / "__main__.py", *words], env=environ, capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert b"se-" in done.stdout
        assert done.stderr == b""


def test_tickets_are_listed_with_what_they_are_doing(world: World) -> None:
    """In the words of explain, as far as one look for all of them tells."""
    leader, a, gone = world.elect(), world.join("a"), world.join("gone")
    for ticket, owner in ((b"runs", a), (b"tried-again", a), (b"orphan", gone)):
        (entry_id,) = world.owned(leader, owner, ticket)
        if ticket == b"tried-again":
            world.link.call("HSET", world.keys.attempts, entry_id, "1 1 0 0")
    world.end_lease(gone)
    world.parked(leader, b"blocked")
    world.parked(leader, b"held")
    world.parked(leader, b"held")
    assert shown(world, "pause", "held", "--why", "stock is being counted").exit_code == 0
    wanted = {
        "runs": "handed",
        "tried-again": "retrying",
        "orphan": "recovering",
        "blocked": "waiting",
        "held": "paused",
    }
    listed = shown(world, "tickets", "list").output
    assert {line.split()[0]: line.split()[1] for line in listed.splitlines()[2:7]} == wanted
    assert re.search(r"held is paused by \w+: stock is being counted \(rule", listed)
    rows = json.loads(shown(world, "tickets", "list", "--json").output)["tickets"]
    assert {row["ticket_id"]: (row["state"], len(row["message_ids"])) for row in rows}["held"] == ("paused", 2)
    status = shown(world, "status", "--once").output
    assert all(re.search(rf"^{ticket} +{state} ", status, re.MULTILINE) for ticket, state in wanted.items()), status
    for limit, more in (("4", True), ("5", False)):
        document = json.loads(shown(world, "tickets", "list", "--limit", limit, "--json").output)
        assert (len(document["tickets"]), document["more"]) == (int(limit), more)


def test_what_fails_is_listed_by_its_error_and_in_groups(world: World) -> None:
    leader, a, b = world.elect(), world.join("a"), world.join("b")
    for number, (owner, error) in enumerate(((a, "KeyError"), (b, "KeyError"), (a, "Timeout"))):
        (entry_id,) = world.owned(leader, owner, b"T%d" % number)
        noted = encode_error(LastError(f"{error}: x", error, "shop/orders.py:41", number + 1, number + 1, 5, 1), "")
        world.link.call("HSET", world.keys.attempts, entry_id, b"%d %d 0 0" % (number + 1, number + 1))
        world.link.call("HSET", world.keys.errors, entry_id, noted.head)
    world.owned(leader, a, b"well")

    def listed(*flags: str) -> list[str]:
        rows = json.loads(shown(world, "tickets", "list", *flags, "--json").output)["tickets"]
        return [row["ticket_id"] for row in rows]

    assert listed("--error", "KeyError") == ["T0", "T1"]
    assert listed("--error", "keyerror in shop/orders.py:41", "--sort", "attempts") == ["T1", "T0"]
    assert listed("--state", "halted,retrying", "--consumer", "a", "--sort", "attempts") == ["T2", "T0"]
    assert "KeyError in shop/orders.py:41" in shown(world, "tickets", "list", columns=None).output
    stuck = shown(world, "stuck", columns=None).output
    assert re.search(
        r"^2 tickets retrying: KeyError in shop/orders\.py:41, since .*, in all 2 messages wait$", stuck, re.M
    )
    assert "usher tickets retry --state retrying --error 'KeyError in shop/orders.py:41'" in stuck
    assert "usher tickets list --state retrying --error 'Timeout in shop/orders.py:41'" in stuck


def test_where_nothing_is_stuck_what_was_given_up_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("usher.master.cli.commands._BETWEEN_S", 0.0)
    assert shown(world, "stuck").output == "no consumer is live: nothing more is handled (`usher consumers list`)\n"
    world.join("z")
    assert shown(world, "stuck").output == "nothing is stuck\n"
    letters(world, _TICKET, b"other")
    assert shown(world, "stuck").output == "nothing is stuck; given up: 2 dead letters (`usher dead list`)\n"


def test_tickets_that_may_be_missing_are_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a ticket of which much is parked, and where the index gives more at once than was asked for."""

    def listed(limit: str) -> tuple[list[str], bool, str]:
        document = json.loads(shown(world, "tickets", "list", "--limit", limit, "--json").output)
        tickets, told = (
            [row["ticket_id"] for row in document["tickets"]],
            shown(world, "tickets", "list", "--limit", limit),
        )
        return tickets, document["more"], told.output

    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, b"x")
    parked = [*world.parked(leader, b"much"), *world.parked(leader, b"much"), *world.parked(leader, b"hidden")]
    monkeypatch.setattr("usher.master.insight.status._PARKED", 1)
    world.owned(leader, a, b"y")
    assert listed("9")[:2] == (["x", "much", "hidden", "y"], False)
    assert listed("2")[:2] == (["x", "much"], True)
    world.link.call("XACK", world.keys.stream, world.keys.group, *parked)
    assert (len(listed("1")[0]), listed("1")[1], "--limit shows more" in listed("1")[2]) == (1, True, True)
    assert not listed("2")[1]


def test_where_the_group_is_not_there_the_group_is_blamed_and_not_redis(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (letter,) = letters(world, b"T")
    for name, value in (("REDIS_URL", world.link.url), ("TICKET_STREAM", world.keys.stream), ("GROUP", "nope")):
        monkeypatch.setenv(f"USHER_{name}", value)
    world.link.call(
        "XADD",
        Keys(world.keys.stream, "nope").dead,
        letter,
        *world.link.call("XRANGE", world.keys.dead, letter, letter)[0][1],
    )
    assert run(["dead", "redrive", letter, "--yes"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        f"usher: USHER_GROUP: stream {world.keys.stream} has no group nope. The master that leads makes it"
    )
    assert "USHER_REDIS_URL" not in told
    assert "(group nope: not there; the master that leads makes it)" in " ".join(
        shown(world, "status", "--once", "--group", "nope").output.split()
    )


@pytest.mark.parametrize("what", ["show", "redrive", "drop"])
@pytest.mark.parametrize("text", ["99999999999999999999-0", "1", "1-x", "\uff11-0"])
def test_what_is_no_id_of_a_letter_is_refused_in_one_line(world: World, what: str, text: str) -> None:
    refused = shown(world, "dead", what, text)
    assert (refused.exit_code, type(refused.exception)) == (2, SystemExit)
    assert "is not the id of a letter" in refused.output


@pytest.mark.parametrize("words", [("pause", "42"), ("dead", "redrive", "--all", "--yes")])
def test_what_the_user_of_the_url_may_not_do_is_told_in_one_line(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    world.link.call("XADD", world.keys.dead, "*", "usher-id", "5-1", "usher-fields", "1", "a", "b")
    world.link.call(
        "ACL", "SETUSER", "looks", "on", ">pw", "~*", "+@read", "+@connection", "+info", "+eval", "+evalsha", "+xgroup"
    )
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
    assert "Invalid value for '--rate': 'nan' is not a number" in refused.output


def test_ids_of_messages_incarnations_and_rules_stay_whole(world: World) -> None:
    world.join("a-consumer")
    world.owned(world.elect(), world.join("another-one"), _TICKET, _ID)
    rule = rule_id(Target.TICKET, _TICKET.decode())
    assert (
        shown(
            world, "pause", _TICKET.decode(), "--reason", "the customer asked us to wait until the new warehouse opens"
        ).exit_code
        == 0
    )
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
    assert (other.exit_code, other.output) == (
        0,
        "no dead letter matches: ticket a\\x1bb, reason nope, older than 2 h\n",
    )
    assert [one.decode() for one in world.letter_ids()] == [letter]


@pytest.mark.parametrize("what", ["redrive", "drop"])
def test_one_letter_is_one_letter(world: World, what: str) -> None:
    one, *_ = letters(world, b"A", b"B", b"C")
    assert shown(world, "dead", what, one, "--yes").output.startswith(f"1 dead letter to {what}\n")
    assert shown(world, "dead", what, "--all", "--yes").output.startswith(f"2 dead letters to {what}\n")


def test_whoever_lifts_a_rule_says_why_to_the_action_log_only(world: World) -> None:
    """Whoever asks what a ticket waits for is told of the rules that hold, so what is said at a lift is not told
    there."""
    for words in (("resume",), ("rules", "lift")):
        assert "Why, for the action log.\n" in shown(world, *words, "--help").output
    assert shown(world, "pause", "T", "--reason", "opens on Monday").exit_code == 0
    assert "opens on Monday" in shown(world, "tickets", "explain", "T").output
    assert shown(world, "resume", "T", "--reason", "open now").exit_code == 0
    assert "open now" not in shown(world, "tickets", "explain", "T").output
    assert "open now" in shown(world, "actions").output
    assert "none" in shown(world, "rules").output


@pytest.mark.parametrize("ticket", [b"\\[/x]", b"\\[red]", b"[/x]", b"gift:id:key:7", b"a\\"])
def test_tickets_are_shown_as_they_are_called(world: World, ticket: bytes) -> None:
    """No markup, also behind a backslash, and no emoji: whoever copies a name must get that ticket."""
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, ticket)
    world.give_up(a, ticket, "skip")
    world.owned(leader, a, ticket)
    letter = world.letter_ids()[0].decode()
    for words in (
        ("dead", "list"),
        ("dead", "show", letter),
        ("tickets", "list"),
        ("status", "--once"),
    ):
        ended = shown(world, *words)
        assert (ended.exit_code, ended.exception) == (0, None), words
        assert ticket.decode() in ended.output.split(), (words, ended.output)


@pytest.mark.parametrize("ms", [0, 1_700_000_000_000_000, 2**64 - 1])
def test_what_happens_to_messages_with_ids_that_somebody_chose_is_told_all_the_same(ms: int) -> None:
    """An id need not be a time: a producer may count microseconds, or begin at 1."""
    line = _event_line("entry", {"ticket_id": "T", "time_ms": ms, "message_id": f"{ms}-0"})
    assert line.endswith(f"entry        message_id={ms}-0")


@pytest.mark.parametrize("text", ["\\[/x]", "\\[red]x", "[/x]", "a\\"])
@pytest.mark.parametrize("safe", [audit._safe, doctor._safe])
def test_what_audit_and_doctor_say_of_names_is_no_markup(safe: Callable[[str], str], text: str) -> None:
    assert Text.from_markup(f"[red]{safe(text)}[/]", emoji=False).plain == text
