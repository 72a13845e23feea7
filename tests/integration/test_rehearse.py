"""``usher rehearse`` with a real Redis and real handler processes: what it says, and that it leaves no trace."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.commands import usher
from tests.integration.factories import Owner, World
from tests.integration.gathered import Gathered
from tests.process.machine import ROOT, until
from tests.sinks import rows
from usher.common.base.clock import now_s
from usher.common.base.errors import ReplyUnknown
from usher.common.protocol.run_log import encode
from usher.common.redis.client import Link
from usher.consumer.handlers.message import Message, OwnLease
from usher.consumer.isolation.process import HandlerProcess, Piece, ProcessSpec
from usher.consumer.policy.outcome import Finished
from usher.deploy.rehearsal.cli import Candidate
from usher.master.leader.leader_scripts import LeaderScripts

_SHOP = """
import asyncio, os, sqlite3, threading, time
from usher import GiveUp, RetryLater, batch, handler

opened = sqlite3.connect(":memory:")

def old(message):
    return int(message.fields["amount"])

def mended(message):
    print("saw", message.id, message.ticket_id, message.fence, message.attempt, message.source, message.is_rehearsal, message.still_mine())

@handler(deadline_s=0.3)
def does(message):
    what = message.fields["body"]
    if what == "hang":
        time.sleep(60)
    elif what == "abort":
        os.abort()
    elif what == "exit":
        os._exit(3)
    elif what == "give up":
        raise GiveUp("never")
    elif what == "later":
        raise RetryLater(30)
    elif what == "sys.exit":
        raise SystemExit("no")
    elif what == "thread":
        opened.execute("SELECT 1")
    elif what == "generator":
        return (one for one in ())
    elif what == "exit afterwards":
        threading.Timer(0.2, os._exit, (4,)).start()
    elif what == "after that":
        time.sleep(5)

def forks(message):
    if os.fork() == 0:
        if message.fields["body"] == "child raises":
            raise ValueError("in the child")
        return
    os.wait()
    if message.fields["body"] == "raises":
        raise KeyError("in the handler")

async def waits(message):
    await asyncio.sleep(0)
    mended(message)
    if message.ticket_id == "B":
        raise ValueError(b"\\xff".decode("utf-8", "surrogateescape"))

@batch(most=10, wait_s=1)
def many(messages):
    [message] = messages
    return {message: "not stored"} if message.ticket_id == "B" else None
"""


@pytest.fixture
def world(link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A stream whose commands run in a folder with shop.py."""
    made = World(link)
    (tmp_path / "shop.py").write_text(_SHOP)
    monkeypatch.chdir(tmp_path)
    for name, value in {"REDIS_URL": link.url, "GROUP": made.keys.group, "TICKET_STREAM": made.keys.stream}.items():
        monkeypatch.setenv(f"USHER_{name}", value)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return made


def buried(
    world: World, *tickets: bytes, policy: str = "skip", by: tuple[LeaderScripts, Owner] | None = None
) -> list[str]:
    """A dead letter of each; their ids."""
    leader, a = by or (world.elect(), world.join("a"))
    before = len(world.letter_ids())
    for ticket in tickets:
        world.owned(leader, a, ticket)
        world.give_up(a, ticket, policy, error="KeyError: 'amount'")
    return [one.decode() for one in world.letter_ids()[before:]]


def document(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = usher("rehearse", *words, "--yes", "--json")
    told = capfd.readouterr()
    assert told.out, told.err
    found: dict[str, Any] = json.loads(told.out)
    return code, found


def how(found: dict[str, Any]) -> list[str]:
    return [one["now"]["how"] for one in found["rehearsals"]]


def test_a_letter_that_failed_is_taken_by_the_mended_handler_and_nothing_changes(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    (letter,) = buried(world, b"42")
    with world.unchanged():
        assert usher("rehearse", "shop:old", "--letter", letter, "--yes") == 1
        told = capfd.readouterr().out
        assert 'return int(message.fields["amount"])' in told, "the traceback of the new error"
        assert "consumer/isolation/child.py" not in told
        assert "0 of 1 message taken" in told
        assert "usher dead redrive" not in told
        assert usher("rehearse", "shop:mended", "--letter", letter, "--yes") == 0
        told = capfd.readouterr()
        assert told.err.startswith("saw ")
        assert told.out.splitlines()[-2:] == [
            "1 of 1 message taken; nothing was acknowledged or redriven",
            f"usher dead redrive {letter}",
        ]
    assert usher(*shlex.split(told.out.splitlines()[-1])[1:], "--yes") == 0
    assert not world.letter_ids()


def test_whatever_a_handler_does_is_told_and_the_next_message_has_its_turn(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    bodies = (
        "fine",
        "hang",
        "abort",
        "exit",
        "give up",
        "later",
        "sys.exit",
        "thread",
        "generator",
        "exit afterwards",
        "after that",
        "fine",
    )
    for number, body in enumerate(bodies):
        world.add(b"%d-0" % (number + 1), "ticket_id", "T", "body", body)
    with world.unchanged():
        code, found = document(capfd, "shop:does", "--ticket", "T")
    assert (code, [one["message_id"] for one in found["rehearsals"]]) == (
        1,
        [f"{number + 1}-0" for number in range(12)],
    )
    assert (found["messages"], found["not_tried"], found["redrive"]) == (12, 0, None)
    now = [one["now"] for one in found["rehearsals"]]
    assert how(found)[:9] == ["done", "hung", "died", "died", "gave_up", "retry_later", "raised", "raised", "raised"]
    assert how(found)[9:] == ["done", "died", "done"]
    assert (now[1]["error"], now[2]["error"], now[3]["error"]) == (
        "it did not end within 0.3 s",
        "by SIGABRT",
        "with exit code 3",
    )
    assert "shop.py" in now[1]["traceback"] and "in does" in now[1]["traceback"] and "in does" in now[2]["traceback"]
    assert (now[4]["error"], now[5]["after_s"], now[6]["error"]) == ("GiveUp: never", 30.0, "SystemExit: no")
    assert "created in a thread" in now[7]["error"], (
        "what was opened at the import is another thread's, as in a consumer"
    )
    assert now[8]["error_type"] == "HandlerUnusable"
    assert 0.3 <= now[1]["seconds"] < 5


@pytest.mark.parametrize("handler", ["waits", "many"])
def test_async_and_batch_handlers_are_called_as_a_consumer_calls_them(
    world: World, capfd: pytest.CaptureFixture[str], handler: str
) -> None:
    letters = buried(world, b"A", b"B", b"A")
    code, found = document(capfd, f"shop:{handler}", "--all")
    assert (code, how(found)) == (1, ["done", "raised", "done"])
    assert found["rehearsals"][1]["now"]["error"] == (
        "ValueError: \\udcff" if handler == "waits" else "MessageFailed: not stored"
    )
    assert found["redrive"] == f"usher dead redrive {letters[0]} {letters[2]}"


def test_all_of_a_ticket_in_order_with_what_became_of_it(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    leader, a = world.elect(), world.join("a")
    for entry_id, outcomes, into in (
        (b"1-1", (), b""),
        (b"2-1", ("failed",), b""),
        (b"3-1", None, b""),
        (b"3-2", (), b"1-1"),
    ):
        [sent] = world.owned(leader, a, b"T", entry_id)
        if outcomes is not None:
            ran = encode("a:1", [Finished(b"T", sent, 77, 1, 1, 2)], outcomes, into={sent: into} if into else {})
            world.link.call("XADD", world.keys.runs, "*", "batch", ran)
        a.steps.ack([sent])
    (letter,) = buried(world, b"T", by=(leader, a))
    world.owned(leader, a, b"T", b"100-1")
    world.link.call("HSET", world.keys.attempts, "100-1", "2 1 0 0")
    world.send(b"T", b"200-1")
    world.send(b"U", b"300-1")
    with world.unchanged():
        assert usher("rehearse", "shop:mended", "--ticket", "T", "--yes", "--json") == 0
    told = capfd.readouterr()
    found = json.loads(told.out)
    before = [(one["message_id"].partition("-")[0], one["before"]["state"]) for one in found["rehearsals"]]
    assert (found["merged"], found["rehearsals"][3]["before"]["told"]) == (1, "done, merged into the run of 1-1")
    assert before == [
        ("1", "done"),
        ("2", "ended"),
        ("3", "unknown"),
        ("3", "done"),
        ("4", "dead_letter"),
        ("100", "in_processing"),
        ("200", "waiting"),
    ]
    record = world.record(b"T")
    assert record is not None
    fences = [int(line.split()[3]) for line in told.err.splitlines()]
    assert (fences[0], fences[2], fences[5], fences[6]) == (77, 0, record.fence, 0)
    assert [line.split()[4:] for line in told.err.splitlines()][5] == ["3", "ticket_stream", "True", "True"]
    assert found["rehearsals"][4]["before"] | {"state": ""} == {
        "state": "", "seconds": None, "told": "gave up: KeyError: 'amount'", "reason": "gave_up", "error": "KeyError: 'amount'",
    }  # fmt: skip
    _, newest = document(capfd, "shop:mended", "--ticket", "T", "--last", "3")
    assert [one["letter_id"] for one in newest["rehearsals"]] == [letter, None, None]
    _, letters = document(capfd, "shop:mended", "--ticket", "T", "--error", "keyerror")
    assert [one["letter_id"] for one in letters["rehearsals"]] == [letter]


def test_what_nobody_has_or_nobody_is_given_is_not_run(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    for reason, cut in (("no_ticket_id", ()), ("too_large", ("usher-fields-cut", "1"))):
        world.link.call(
            "XADD",
            world.keys.dead,
            "*",
            "usher-id",
            "7-1",
            "usher-ticket",
            "T",
            "usher-reason",
            reason,
            *cut,
            "usher-fields",
            "1",
            "a",
            "b",
        )
        _, found = document(capfd, "shop:mended", "--reason", reason)
        assert how(found) == ["not_run"]
    world.add(b"7-1", "ticket_id", "T")
    code, found = document(capfd, "shop:mended", "--reason", "too_large")
    assert (code, how(found)) == (0, ["done"]), "the stream has the whole of it"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--letter", "5-5", "--letter", "6-6", "--message", "7-7", "--yes"),
            ["no dead letter 5-5", "no dead letter 6-6", "no entry 7-7"],
        ),
        (("--letter", "x", "--yes"), ["'x' is not an id"]),
        (("--ticket", "nobody", "--yes"), ["of ticket 'nobody' nothing is in ticket_stream"]),
        (("--all", "--yes"), ["no dead letter matches"]),
        (("--all",), ["stdin is not a terminal: pass --yes", "REAL"]),
        (("--all", "--json"), ["pass --yes too"]),
        (("--letter", "5-5", "--error", "x", "--yes"), ["do not go with them"]),
        (("--yes",), ["say which messages"]),
    ],
)
def test_where_nothing_can_be_said_the_reason_is(
    world: World, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], told: list[str]
) -> None:
    assert usher("rehearse", "shop:mended", *words) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert not [text for text in told if text not in said.err]


@pytest.mark.parametrize(
    ("handler", "told"),
    [("nocolon", "module:function"), ("shop:none", "shop has no none"), ("quits:handle", "exit code 5")],
)
def test_a_handler_that_cannot_be_had_is_told(
    world: World, capfd: pytest.CaptureFixture[str], handler: str, told: str
) -> None:
    Path("quits.py").write_text("import os\nos._exit(5)\n")
    world.send(b"T", b"1-1")
    assert usher("rehearse", handler, "--message", "1-1", "--yes") == 2
    assert told in capfd.readouterr().err


def test_of_gathered_streams_a_ticket_is_its_sources(
    world: World, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USHER_TICKET_STREAM", "s,r")
    gathered = Gathered(world.link)
    for source in ("s", "r"):
        gathered.send(source, "5-1")
    gathered.gather("s", "r")
    code = usher("rehearse", "shop:mended", "--ticket", "s/42", "--yes", "--json")
    told = capfd.readouterr()
    [one] = json.loads(told.out)["rehearsals"]
    assert (code, one["ticket_id"]) == (0, "s/42")
    assert told.err.split()[2] == "42"
    assert told.err.split()[5:] == ["s", "True", "True"]


def test_an_effect_in_a_database_is_tried_and_taken_back(
    world: World, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples import sinks as examples

    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("EXAMPLE_DATABASE", f"sqlite:///{Path.cwd()}/effects.db")
    examples.sink.cache_clear()
    try:
        examples.create()
        world.add(b"1-1", "ticket_id", "T", "amount", "5")
        world.add(b"2-1", "ticket_id", "T", "amount", "x")
        code, found = document(capfd, "examples.sinks:once", "--ticket", "T")
        assert (code, how(found)) == (1, ["done", "raised"])
        assert (examples.total("T"), rows(examples.sink().engine, "usher_uids")) == (0, 0)
        flat = [b"ticket_id", b"T", b"amount", b"5"]
        examples.once(Message(b"T", b"1-1", 9, flat, OwnLease(10.0, now_s())))
        assert (examples.total("T"), document(capfd, "examples.sinks:once", "--message", "1-1")[0]) == (5, 0)
        assert examples.total("T") == 5
    finally:
        sa.Engine.dispose(examples.sink().engine)
        examples.sink.cache_clear()


def test_a_process_that_ends_behind_its_last_message_is_told_and_the_next_one_has_another(world: World) -> None:
    pieces = [Piece(b"T", b"5-0", 0, (0, 0, 0, 0), (b"body", body)) for body in (b"exit afterwards", b"fine")]
    with HandlerProcess(ProcessSpec("shop:does", "s", False), lambda: None) as process:
        assert process.run(pieces[0]).how == "done"
        until(lambda: process._process and process._process.wait() is not None, 20, "its thread has ended it")
        assert process.run(pieces[1]).how == "done"
    assert process.notes == [
        "the handler's process ended with exit code 4 when a call was over: something that the handler began goes on"
        " behind it"
    ]


def test_a_child_that_the_handler_has_forked_answers_nothing_and_takes_no_message(world: World) -> None:
    bodies = (b"raises", b"child raises", b"raises", b"fine")
    with HandlerProcess(ProcessSpec("shop:forks", "s", False), lambda: None) as process:
        ended = [process.run(Piece(b"T", b"5-0", 0, (0, 0, 0, 0), (b"body", body))).how for body in bodies]
    assert (ended, process.notes) == (["raised", "done", "raised", "done"], [])


def test_what_is_known_is_told_when_redis_goes_away(
    world: World, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from usher.deploy.rehearsal.cli import Candidates

    world.send(b"T", b"1-1", b"2-1")
    asked = []

    def body(self: Candidates, one: Candidate) -> list[bytes]:
        asked.append(one.id)
        if len(asked) == 2 or one.id == "2-1":
            raise ReplyUnknown
        return [b"ticket_id", b"T"]

    asked.append("")  # so that the first one is read anew
    monkeypatch.setattr(Candidates, "body", body)
    code, found = document(capfd, "shop:mended", "--ticket", "T")
    assert (code, how(found), asked) == (1, ["done", "not_run"], ["", "1-1", "1-1", "2-1", "2-1"])
