"""The feed on a real Redis: what a follower is told of what it has missed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from tests.doors import doorman
from tests.integration.factories import FIELD, World
from tests.integration.gathered import Gathered
from tests.integration.routers import PATIENCE_S
from tests.live import lines
from usher.common.base.errors import RedisTrouble
from usher.common.http import app as web
from usher.common.http.answers import LiveStream, LiveStreams
from usher.common.http.credentials import Identity, Role
from usher.common.protocol.keys import Keys
from usher.common.protocol.run_log import encode
from usher.common.protocol.sources import SCOPED_TICKET_FIELD
from usher.common.redis.client import Link
from usher.common.redis.embedded import free_port
from usher.consumer.policy.outcome import Finished
from usher.master.insight import live as ticket_feed
from usher.master.insight.live import TicketFeed, parse_position
from usher.master.membership.consumer_http import parse_hosts
from usher.master.operations.action_log import By
from usher.master.operations.live_rules import LiveRules
from usher.master.policy.rules import Rule, RuleAction, Target, rule_id
from usher.master.web.api import routes

_T = b"T"


def _done(ms: int) -> Finished:
    """An execution of a message that was sent at ``ms``: it ended 5 ms later."""
    return Finished(_T, b"%d-1" % ms, 7, 1, 1000 * ms, 1000 * (ms + 5))


@contextlib.contextmanager
def feeding(link: Link, keys: Keys, field: str) -> Iterator[TicketFeed]:
    made = TicketFeed(Link(link.url, "feed"), keys, field, LiveStreams(10))
    made.start()
    yield made
    made.stop()
    assert made.join(PATIENCE_S)


@pytest.fixture
def feed(world: World) -> Iterator[TicketFeed]:
    with feeding(world.link, world.keys, FIELD) as made:
        yield made


def told(feed: TicketFeed, position: str, most: int) -> list[dict[str, Any]]:
    """The first ``most`` events that a follower gets which comes back with ``position``; each with its name as
    ``event``."""
    live = feed.follow("", _T, parse_position(position), with_fields=True)
    return read(live, most)


def read(live: LiveStream, most: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with contextlib.closing(lines(live)) as told_lines:
        name = b""
        for line in told_lines:
            field, _, value = line.partition(b": ")
            name = value if field == b"event" else name
            if field == b"data":
                found.append({"event": name.decode(), **orjson.loads(value)})
            if len(found) == most:
                break
    return found


def fill(world: World, count: int) -> None:
    """A message every 10 ms, and a message of another ticket; each is done 5 ms after it was sent, and acknowledged 1
    ms later."""
    commands: list[Any] = []
    for ms in range(1000, 1000 + 10 * count, 10):
        commands.append(("XADD", world.keys.stream, b"%d-1" % ms, FIELD, _T))
        commands.append(("XADD", world.keys.stream, b"%d-2" % ms, FIELD, b"other"))
        commands.append(("XADD", world.keys.runs, b"%d-0" % (ms + 6), "batch", encode("c:1", [_done(ms)])))
    world.link.pipeline(commands)


@pytest.mark.parametrize("page", [3, 500])
def test_what_was_missed_is_told_in_the_order_of_time_with_its_times(
    feed: TicketFeed, world: World, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticket_feed, "_PAGE", page)
    fill(world, 20)
    letter = [b"usher-ticket", _T, b"usher-id", b"1-1", b"usher-reason", b"gave_up"]
    world.link.call("XADD", world.keys.dead, b"1101-0", *letter)
    *found, state = told(feed, "0", 42)
    assert [(one["event"], one["time_ms"]) for one in found if one["event"] != "dead_letter"] == [
        (name, ms + later) for ms in range(1000, 1200, 10) for name, later in (("entry", 0), ("completed", 5))
    ]
    assert [one["time_ms"] for one in found] == sorted(one["time_ms"] for one in found)
    assert found[21]["event"] == "dead_letter"
    assert state["event"] == "state", "and then the state, as of now"
    assert state["time_ms"] > 1_700_000_000_000


def test_who_may_not_know_what_messages_say_is_told_all_the_rest(feed: TicketFeed, world: World) -> None:
    fill(world, 2)
    world.link.call("XADD", world.keys.stream, b"2000-0", FIELD, _T, "body", "secret")
    live = feed.follow("", _T, parse_position("0"), with_fields=False)
    found = read(live, 6)
    assert [one["event"] for one in found] == [*["entry", "completed"] * 2, "entry", "state"]
    assert not any("fields" in one for one in found)
    assert told(feed, "0", 6)[4]["fields"] == {FIELD: _T.decode(), "body": "secret"}


def test_what_messages_say_is_for_operators_and_not_for_viewers() -> None:
    told_fields = []

    class Feed:
        def follow(self, who: str, ticket: bytes, position: list[bytes] | None, with_fields: bool) -> LiveStream:
            told_fields.append(with_fields)
            return LiveStreams(1).open(who, lambda: None)

    app = web.create_app(__name__, doorman(look=Identity(Role.VIEWER, "vera"), act=Identity(Role.OPERATOR, "otto")), 0)
    app.register_blueprint(routes(SimpleNamespace(feed=Feed(), status=None), parse_hosts("127.0.0.1")))  # type: ignore[arg-type]
    for token in ("look", "act"):
        head = {"Authorization": f"Bearer {token}"}
        answered = app.test_client().get("/api/events?id=T", headers=head, buffered=False)
        assert answered.status_code == 200
        answered.close()
    assert told_fields == [False, True]


def test_who_comes_back_gets_each_once(feed: TicketFeed, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket_feed, "_PAGE", 2)
    fill(world, 6)
    found = told(feed, "1020-1_1016-0_0-0", 8)
    each = [(name, f"{ms}-1") for ms in (1030, 1040, 1050) for name in ("entry", "completed")]
    assert [(one["event"], one.get("message_id")) for one in found] == [("completed", "1020-1"), *each, ("state", None)]


def test_a_gap_is_told_once_however_much_was_missed_elsewhere(
    feed: TicketFeed, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticket_feed, "_PAGE", 2)
    fill(world, 12)
    world.link.call("XTRIM", world.keys.runs, "MAXLEN", 2)
    found = told(feed, "1000-1_1006-0_0-0", 15)
    assert [(one["source"], one["after"], one["time_ms"]) for one in found if one["event"] == "gap"] == [
        ("runs", "1006-0", 1006)
    ]
    assert [one["event"] for one in found].count("entry") == 11
    assert [one["event"] for one in found].count("completed") == 2
    assert [one["time_ms"] for one in found] == sorted(one["time_ms"] for one in found)


def test_a_stream_that_could_not_be_read_for_a_moment_is_followed_again(feed: TicketFeed, world: World) -> None:
    fill(world, 1)
    live = feed.follow("", _T, None, with_fields=True)
    with contextlib.closing(lines(live)) as told_lines:
        assert next_event(told_lines)["state"] == "idle"
        world.link.call("RENAME", world.keys.stream, "kept")
        world.link.call("SET", world.keys.stream, "no stream")
        time.sleep(3 * ticket_feed._LOOK_S)
        world.link.call("RENAME", "kept", world.keys.stream)
        world.link.call("XADD", world.keys.stream, "2000-1", FIELD, _T)
        assert next_event(told_lines)["message_id"] == "2000-1"


def test_a_stream_of_which_nothing_is_left_is_a_gap_for_who_had_not_all_of_it_and_for_nobody_else(
    feed: TicketFeed, world: World
) -> None:
    fill(world, 3)
    world.link.call("XTRIM", world.keys.stream, "MAXLEN", 0)
    assert [one["event"] for one in told(feed, "1010-2_1026-0_0-0", 1)] == ["gap"]
    assert [one["event"] for one in told(feed, "1020-2_1026-0_0-0", 1)] == ["state"]


@pytest.mark.parametrize(("cut", "gap"), [(3, []), (4, ["gap"])])
def test_a_cut_of_a_work_stream_is_a_gap_only_if_something_is_gone_that_was_not_told(
    link: Link, cut: int, gap: list[str]
) -> None:
    gathered = Gathered(link)
    gathered.send("a", *(f"{number}-1" for number in range(1, 7)), ticket="T")
    gathered.gather("a")
    ids = [entry.id for entry in gathered.entries()]
    link.call("XTRIM", gathered.keys.stream, "MINID", ids[cut])
    with feeding(link, gathered.keys, SCOPED_TICKET_FIELD.decode()) as feed:
        live = feed.follow("", b"a/T", [ids[2], b"0-0", b"0-0"], with_fields=True)
        names = [one["event"] for one in read(live, len(gap) + 6 - cut + 1)]
    assert names == [*gap, *["entry"] * (6 - cut), "state"]


def test_who_reads_slowly_gets_all_that_it_has_missed_over_one_connection(feed: TicketFeed, world: World) -> None:
    commands: list[Any] = [
        ("XADD", world.keys.stream, b"%d-1" % ms, FIELD, _T, "body", "x" * 10_000) for ms in range(1000, 1600)
    ]
    commands += [
        ("XADD", world.keys.runs, b"%d-1" % ms, "batch", encode("c:1", [_done(ms)])) for ms in range(1000, 1600)
    ]
    world.link.pipeline(commands)
    found = told(feed, "0", 2 * 600 + 1)
    assert [one["message_id"] for one in found if one["event"] == "entry"] == [f"{ms}-1" for ms in range(1000, 1600)]
    assert sorted(one["message_id"] for one in found if one["event"] == "completed") == sorted(
        f"{ms}-1" for ms in range(1000, 1600)
    )


def test_a_hand_over_that_was_not_seen_is_told_with_the_time_of_the_start(feed: TicketFeed, world: World) -> None:
    live = feed.follow("", _T, None, with_fields=True)
    with contextlib.closing(lines(live)) as told_lines:
        while b"event: state" not in next(told_lines):
            pass
        fill(world, 1)
        datas = (
            orjson.loads(line.partition(b" ")[2])
            for line in told_lines
            if line.startswith(b"data: ") and b'"fence"' in line
        )
        handed, completed = next(datas), next(datas)
    assert handed["message_ids"] == [completed["message_id"]]
    assert (handed["time_ms"], completed["time_ms"]) == (1000, 1005)


def test_who_comes_back_after_the_stream_began_anew_is_told_so_and_gets_all(feed: TicketFeed, world: World) -> None:
    fill(world, 2)
    found = told(feed, "9999-1_1016-0_0-0", 4)
    assert [(one["event"], one.get("message_id", one.get("after"))) for one in found] == [
        ("gap", "9999-1"),
        ("entry", "1000-1"),
        ("entry", "1010-1"),
        ("state", None),
    ]


def test_a_ticket_that_is_paused_is_told_so_and_when_that_ends(feed: TicketFeed, world: World) -> None:
    """Its messages are parked: the index, which has records of what is handed over, knows nothing of it."""
    world.parked(world.elect(), _T)
    rules = LiveRules(world.link, world.keys)
    rules.set(
        Rule(Target.TICKET, _T.decode(), RuleAction.PAUSE, reason="stock is being counted", who="alice"),
        By("alice", "cli", ""),
    )
    live = feed.follow("", _T, None, with_fields=True)
    told_lines = lines(live)
    assert (first := next_event(told_lines))["state"] == "paused"
    assert first["rule"].startswith("paused by alice: stock is being counted (rule ")
    rules.lift(rule_id(Target.TICKET, _T.decode()), By("alice", "cli", ""))
    last = next_event(told_lines)
    assert (last["state"], "rule" in last) == ("idle", False)
    told_lines.close()


def next_event(told_lines: Iterator[bytes]) -> dict[str, Any]:
    return next(orjson.loads(line.partition(b": ")[2]) for line in told_lines if line.startswith(b"data: "))


# -- answers that get lost

_KEYS = Keys("tickets", "usher")


def test_those_who_came_and_left_while_redis_was_away_are_not_remembered() -> None:
    """They come again every few seconds, for as long as that lasts."""
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    feed = TicketFeed(Link(nowhere, "test:feed"), _KEYS, "ticket_id", LiveStreams(10))
    with contextlib.ExitStack() as stack:
        stack.callback(feed.on_end)
        feed.follow("", b"stays", [b"1-1"] * 3, with_fields=True)
        for _ in range(5):
            feed.follow("", b"leaves", [b"1-1"] * 3, with_fields=True).response.close()
            with pytest.raises(RedisTrouble):
                feed.run_once()
        assert ([one.ticket for one in feed._followers], len(feed._came)) == ([b"stays"], 0)
