"""`usher send --after` and `--at`, `usher delayed`, and where delayed messages are counted."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from tests.commands import usher
from tests.integration.delays import send_due, sent
from tests.integration.factories import World
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.sources import SourceSelection
from usher.common.redis.client import Link
from usher.common.runtime.settings import CommonSettings
from usher.master.insight.stats import StreamStatsReader
from usher.master.operations.action_log import ActionLog
from usher.master.verbs.view import View

KEYS = Keys("ticket_stream", "g")
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(redis_url: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command on the test's Redis: exit code, and what it said."""

    def told(*words: str) -> tuple[int, str]:
        with mock.patch.dict(os.environ, USHER_REDIS_URL=redis_url, USHER_GROUP="g", COLUMNS="200"):
            code = usher(*words)
        said = capsys.readouterr()
        return code, said.out + said.err

    return told


def _document(run: Run, *words: str) -> dict[str, Any]:
    code, said = run(*words, "--json")
    assert code == 0, said
    found: dict[str, Any] = json.loads(said)
    return found


def _put_in_order(link: Link) -> World:
    """As the leader does it."""
    world = World(link)
    world.elect().due_delayed(100)
    return world


def test_a_message_for_later_is_delayed(run: Run, link: Link) -> None:
    before_ms = time.time_ns() // 1_000_000
    code, said = run("send", "--ticket", "42", "text=hello", "--after", "10m")
    assert (code, "1 sent to the delayed messages of ticket_stream" in said) == (0, True)
    [[_, flat]] = link.call("XRANGE", LogKeys("ticket_stream").delayed, "-", "+")
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    assert (fields[b"ticket_id"], fields[b"text"]) == (b"42", b"hello")
    assert 600_000 <= int(fields[b"due_ms"]) - before_ms < 660_000
    assert link.call("EXISTS", "ticket_stream") == 0


def test_a_moment_may_be_given_and_repeats_are_recognised(run: Run, link: Link) -> None:
    for repeated in (0, 1):
        seen = _document(
            run, "send", "--ticket", "42", "uid=order-7", "--at", "2096-01-01T00:00:00+00:00", "--dedup", "3600"
        )
        assert (seen["due_ms"], seen["sent"], seen["repeated"]) == (3_976_214_400_000, 1 - repeated, repeated)
    assert link.call("XLEN", LogKeys("ticket_stream").delayed) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--after", "soon"), "write e.g. 90m"),
        (("--at", "soon"), "write e.g. 2026-11-21T10:00"),
        (("--after", "5m", "--at", "2096-01-01T00:00"), "give one of them"),
        (("--ticket", ""), "--ticket is empty"),
        (("--after", "99999999d"), "too late"),  # it would be sent at once: no time has so many digits
    ],
)
def test_what_is_no_time_is_refused(run: Run, link: Link, words: tuple[str, ...], told: str) -> None:
    code, said = run("send", "--ticket", "42", *words)
    assert (code, told in said) == (2, True), said
    assert link.call("DBSIZE") == 0


def test_those_that_wait_are_listed_the_earliest_first(run: Run, link: Link) -> None:
    run("send", "--ticket", "late", "text=b\x1bc", "--after", "2h")
    run("send", "--ticket", "early", "text=a", "--after", "10m")
    assert "2 messages more, which no leader has looked at yet" in run("delayed", "list")[1]
    _put_in_order(link)
    code, said = run("delayed", "list")
    assert (code, "\x1b" in said, "2 of 2" in said) == (0, False, True)
    lines = said.splitlines()
    assert [line.split()[-2] for line in lines if "text=" in line] == ["early", "late"]
    assert "9 min" in next(line for line in lines if "early" in line)
    seen = _document(run, "delayed", "list", "--ticket", "late")
    assert (seen["waiting"], [row["ticket_id"] for row in seen["messages"]]) == (2, ["late"])
    assert len(_document(run, "delayed", "list", "--limit", "1")["messages"]) == 1
    assert "none" in run("delayed", "list", "--ticket", "nobody")[1]


def test_messages_are_dropped_by_id_or_by_ticket_and_the_action_log_says_so(run: Run, link: Link) -> None:
    for ticket in ("A", "A", "B", "C"):
        run("send", "--ticket", ticket, "text=x", "--after", "1h")
    _put_in_order(link)
    rows = _document(run, "delayed", "list")["messages"]
    [of_c] = [row["id"] for row in rows if row["ticket_id"] == "C"]
    code, said = run("delayed", "drop", of_c, "1-1", "--yes", "--reason", "not wanted")
    assert code == 1
    assert said.splitlines()[-2:] == [
        "1 dropped: thrown away",
        "1 gone: left alone: not waiting any more, because it was sent or dropped before",
    ]
    assert _document(run, "delayed", "drop", "--all", "--ticket", "A", "--yes")["outcomes"] == {"dropped": 2}
    assert [row["ticket_id"] for row in _document(run, "delayed", "list")["messages"]] == ["B"]
    lines, _ = ActionLog(link, KEYS).page(None, 10)
    assert [(line["what"], line["on"], line["why"], line["outcome"]) for line in lines] == [
        ("drop_delayed", f"2 delayed messages, from {rows[0]['id']}: ticket A", "", "dropped 2"),
        ("drop_delayed", f"2 delayed messages, from {of_c}", "not wanted", "dropped 1, gone 1"),
    ]
    assert run("delayed", "drop", "--all", "--ticket", "nobody", "--yes") == (
        0,
        "no delayed message matches: ticket nobody\n",
    )


def test_where_streams_are_gathered_the_ticket_is_called_as_everywhere(
    run: Run, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USHER_TICKET_STREAM", "orders,returns")
    world = World(link)
    world.keys = Keys("usher:{g}", "g")
    for ticket in ("A", "B"):
        link.call(
            "XADD", "usher:{g}:delayed", "*", "due_ms", 4_000_000_000_000, "stream", "orders", "ticket_id", ticket
        )
    world.elect().due_delayed(10)
    [row] = _document(run, "delayed", "list", "--ticket", "orders/A")["messages"]
    assert row["ticket_id"] == "orders/A"
    assert _document(run, "delayed", "drop", "--all", "--ticket", "orders/A", "--yes")["outcomes"] == {"dropped": 1}


@pytest.mark.parametrize(
    ("streams", "name", "work"),
    [("orders,returns", "orders", "usher:{g}"), ("a{7},b{7}", "a{7}", "usher:g{7}"), ("o*", "orders", "usher:{g}")],
)
def test_for_one_of_several_streams_a_message_waits_only_where_a_master_looks(
    run: Run, link: Link, monkeypatch: pytest.MonkeyPatch, streams: str, name: str, work: str
) -> None:
    monkeypatch.setenv("USHER_TICKET_STREAM", streams)
    code, said = run("send", "--ticket", "42", "--after", "10m", "--ticket-stream", name)
    assert (code, f"--ticket-stream '{work}' and the field stream={name}" in said) == (2, True), said
    assert link.call("DBSIZE") == 0
    assert run("send", "--ticket", "42", "--after", "10m", "--ticket-stream", work, f"stream={name}")[0] == 0
    [row] = link.call("XRANGE", LogKeys(SourceSelection.parse(streams).work_stream("g")).delayed, "-", "+")
    assert {b"stream", name.encode()} < set(row[1])


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("drop", "--all", "--yes"),
        ("drop", "1-1", "--yes"),
        ("send", "1-1", "--yes"),
        ("move", "1-1", "--after", "1h", "--yes"),
    ],
)
def test_what_redis_refuses_is_said_in_one_line(run: Run, link: Link, words: tuple[str, ...]) -> None:
    """As under the users of a former version, who may not use these keys."""
    link.call("SET", LogKeys("ticket_stream").delayed, "spoilt")
    link.call("SET", LogKeys("ticket_stream").due, "spoilt")
    code, said = run("delayed", *words)
    assert (code, said.count("\n"), "WRONGTYPE" in said) == (2, 1, True), said


def test_all_are_dropped_also_those_that_no_leader_has_looked_at(run: Run, link: Link) -> None:
    run("send", "--ticket", "A", "text=x", "--after", "1h")
    _put_in_order(link)
    for ticket in ("A", "B"):
        run("send", "--ticket", ticket, "text=x", "--after", "1h")
    for words, number in ((("--ticket", "A"), 2), ((), 1)):
        assert _document(run, "delayed", "drop", "--all", *words, "--yes")["outcomes"] == {"dropped": number}
    assert link.call("XLEN", LogKeys("ticket_stream").delayed) == 0


@pytest.mark.parametrize(
    "words", [(), ("1-1", "--all"), ("--ticket", "A"), ("nonsense",), ("--all",), ("1-1", "--json")]
)
def test_nothing_is_dropped_by_mistake(run: Run, link: Link, words: tuple[str, ...]) -> None:
    run("send", "--ticket", "A", "text=x", "--after", "1h")
    _put_in_order(link)
    code, said = run("delayed", "drop", *words)
    assert code == 2, said
    assert link.call("XLEN", LogKeys("ticket_stream").delayed) == 1


def test_status_and_metrics_count_them(run: Run, link: Link) -> None:
    run("send", "--ticket", "A", "text=x", "--after", "10m")
    world = _put_in_order(link)
    seen = _document(run, "status")["delayed"]
    assert seen["messages"] == 1
    assert seen["first_ms"] > time.time_ns() // 1_000_000
    assert "the first in 9 min" in run("status", "--once")[1]
    vitals = StreamStatsReader(link, KEYS).read()
    assert (vitals["delayed"]["messages"], vitals["late_s"]) == (1, 0.0)
    link.call(
        "ZINCRBY", LogKeys("ticket_stream").due, -1_200_000, link.call("ZRANGE", LogKeys("ticket_stream").due, 0, 0)[0]
    )
    late = StreamStatsReader(link, KEYS).read()
    assert 500 < late["late_s"] < 700
    assert world.link.call("XLEN", "ticket_stream") == 0


def test_a_ticket_is_explained_by_what_is_delayed_of_it(run: Run, link: Link) -> None:
    for after in ("2h", "10m"):
        run("send", "--ticket", "42", "text=x", "--after", after)
    world = _put_in_order(link)
    seen = _document(run, "tickets", "explain", "42")
    assert (seen["state"], seen["reasons"][0]["code"]) == ("delayed", "delayed")
    assert seen["reasons"][0]["text"].startswith("2 messages of the ticket are delayed, the first is due in 9 min")
    assert "usher delayed list --ticket 42" in run("tickets", "explain", "42")[1]
    world.send(b"42", b"1-1")
    assert _document(run, "tickets", "explain", "42")["state"] == "unread", "that is what it waits for"


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_what_is_delayed_is_explained_by_the_clock_of_redis(
    run: Run, link: Link, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    run("send", "--ticket", "42", "text=x", "--after", "10m")
    world = _put_in_order(link)
    monkeypatch.setattr("usher.master.verbs.view.wall_ms", lambda: time.time_ns() // 1_000_000 + 1000 * ahead_s)
    told = View(CommonSettings(), world.link, KEYS).explain("42")
    assert told["reasons"][0]["text"].startswith("1 message of the ticket is delayed, due in 9 min")


def test_a_duration_is_counted_by_the_clock_of_redis(run: Run, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the producer's clock is an hour behind, it would be sent at once; and where it is ahead, an hour late."""
    right_ns = time.time_ns
    monkeypatch.setattr("time.time_ns", lambda: right_ns() - 3_600_000_000_000)
    run("send", "--ticket", "42", "text=x", "--after", "10m")
    assert 590_000 < _due_of(link) - right_ns() // 1_000_000 <= 600_100


def test_a_user_who_may_not_ask_redis_for_its_time_sends_for_later_all_the_same(run: Run, link: Link) -> None:
    link.call("ACL", "SETUSER", "default", "-time")
    try:
        assert run("send", "--ticket", "42", "text=x", "--after", "10m")[0] == 0
    finally:
        link.call("ACL", "SETUSER", "default", "+time")
    assert 590_000 < _due_of(link) - time.time_ns() // 1_000_000 <= 600_000


def _due_of(link: Link) -> int:
    [[_, flat]] = link.call("XRANGE", LogKeys("ticket_stream").delayed, "-", "+")
    return int(dict(zip(flat[::2], flat[1::2], strict=True))[b"due_ms"])


def test_messages_are_sent_now_and_moved_and_the_action_log_says_so(run: Run, link: Link) -> None:
    for ticket in ("A", "A", "B"):
        run("send", "--ticket", ticket, "text=x", "--after", "1h")
    world = World(link)
    leader = world.elect()
    leader.due_delayed(100)
    [first, _, of_b] = [row["id"] for row in _document(run, "delayed", "list")["messages"]]

    def done(*words: str) -> dict[str, int]:
        outcomes: dict[str, int] = _document(run, "delayed", *words, "--yes")["outcomes"]
        return outcomes

    assert done("move", of_b, "--at", "2030-01-01T00:00:00+00:00") == {"moved": 1}
    assert _document(run, "delayed", "list", "--ticket", "B")["messages"][0]["due_ms"] == 1_893_456_000_000
    code, said = run("delayed", "send", first, "99999999999999-1", "--yes", "--why", "they wait for it")
    assert code == 1
    assert said.splitlines()[-2:] == [
        "1 moved: sent at the time given, or now",
        "1 unknown: left alone: no delayed message has had this id",
    ]
    send_due(world, leader)
    assert sent(world) == [b"A"]
    assert done("send", "--all", "--ticket", "A") == {"moved": 1}
    assert done("move", "--all", "--after", "2h") == {"moved": 2}
    lines, _ = ActionLog(link, KEYS).page(None, 10)
    assert [(line["what"], line["why"], line["outcome"]) for line in lines] == [
        ("move_delayed", "", "moved 2"),
        ("send_delayed_now", "", "moved 1"),
        ("send_delayed_now", "they wait for it", "moved 1, unknown 1"),
        ("move_delayed", "", "moved 1"),
    ]
    assert lines[1]["on"].endswith(": ticket A")
    assert lines[3]["on"] == f"1 delayed message, from {of_b}, to 2030-01-01T00:00:00+00:00"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--at", "2020-01-01T00:00+00:00"), "that time is over"),
        (("--at", "2999-01-01T00:00+00:00"), "more than 10 years ahead"),
        (("--after", "0s"), "that time is over"),
        ((), "give one of --after and --at"),
        (("--after", "1h", "--at", "2030-01-01T00:00"), "give one of --after and --at"),
    ],
)
def test_a_time_to_which_nothing_can_be_moved_is_refused(
    run: Run, link: Link, words: tuple[str, ...], told: str
) -> None:
    run("send", "--ticket", "A", "text=x", "--after", "1h")
    world = _put_in_order(link)
    before = world.link.call("ZRANGE", LogKeys("ticket_stream").due, 0, -1, "WITHSCORES")
    code, said = run("delayed", "move", "--all", *words, "--yes")
    assert (code, told in said) == (2, True), said
    assert world.link.call("ZRANGE", LogKeys("ticket_stream").due, 0, -1, "WITHSCORES") == before
