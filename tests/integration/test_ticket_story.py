"""What is still known of a ticket, found backwards in the streams."""

from __future__ import annotations

import pytest

from tests.integration.factories import World
from usher.common.protocol.run_log import encode
from usher.consumer.policy.outcome import Finished
from usher.master.insight import status as ticket_story
from usher.master.insight.status import StatusReader, TicketHistory

T = b'T "1" *[x]'


@pytest.fixture
def story(world: World) -> TicketHistory:
    return TicketHistory(world.link, world.keys, "ticket_id")


def log(world: World, consumer: str, *executions: Finished, outcomes: tuple[str, ...] = ()) -> None:
    world.link.call("XADD", world.keys.runs, "*", "batch", encode(consumer, executions, outcomes))


def test_entries_executions_hand_overs_and_letters_are_one_story_newest_first(
    world: World, story: TicketHistory
) -> None:
    leader, a = world.elect(), world.join("a")
    world.owned(leader, a, T, b"5000-1", b"6000-1")
    of_t, of_u = Finished(T, b"5000-1", 7000 * 1024, 1, 7_100_000, 7_200_000), Finished(b"U", b"1-1", 1, 1, 1, 2)
    log(world, "a:1", of_t, of_u, outcomes=("failed", "done"))
    log(world, "a:1", Finished(T, b"5000-1", 7000 * 1024, 2, 8_000_000, 8_500_000))
    log(world, "b:1", Finished(T, b"6000-1", 9000 * 1024, 1, 9_100_000, 0), outcomes=("crashed",))
    told = story.timeline(T.decode())
    assert [(one["event"], one["ms"]) for one in told["events"]] == [
        ("ran", 9100), ("handed", 9000), ("ran", 8500), ("ran", 7200), ("handed", 7000), ("sent", 6000), ("sent", 5000),
    ]  # fmt: skip
    assert told["back"] is None
    crashed, _, done, failed = told["events"][:4]
    assert (crashed["outcome"], crashed["took_ms"]) == ("crashed", None)
    assert (done["took_ms"], failed["outcome"]) == (500, "failed")
    assert [(one["ticket_id"], one["took_ms"]) for one in story.finished("", "")[0]] == [
        (T.decode(), 500),
        ("U", 0.001),
    ]
    assert [one["ticket_id"] for one in story.finished("U", "")[0]] == ["U"] and not story.finished("", "m:other")[0]
    world.give_up(a, T, "skip")
    assert story.timeline(T.decode())["events"][0]["event"] == "dead_letter"
    log(world, "a:1", Finished(T, b"5000-1", 7000 * 1024, 3, 9_200_000, 9_300_000), outcomes=("failed",))
    assert [one["outcome"] for one in story.finished(T.decode(), "")[0]] == ["gave_up", "done"], "of the last attempt"
    for odd in (("x", "usher-attempts", "1"), ("7-1", "usher-history", '["c",1,"x","y","z","failed",3]')):  # by hand
        world.link.call("XADD", world.keys.dead, "*", "usher-ticket", T, "usher-id", *odd)
    assert [one["event"] for one in story.timeline(T.decode())["events"]].count("dead_letter") == 3


def test_who_has_the_ticket_now_is_told_before_anything_has_ended(world: World, story: TicketHistory) -> None:
    world.send(T, b"5000-1")
    held = ("a:1", 7000 * 1024)
    assert [(one["event"], one["ms"]) for one in story.timeline(T.decode(), held=held)["events"]] == [
        ("handed", 7000),
        ("sent", 5000),
    ]
    log(world, "a:1", Finished(T, b"5000-1", 7000 * 1024, 1, 7_100_000, 7_200_000))
    assert [one["event"] for one in story.timeline(T.decode(), held=held)["events"]] == ["ran", "handed", "sent"]


def test_what_is_known_to_be_unfinished_is_told_however_old_it_is(
    world: World, story: TicketHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticket_story, "_FIRST_S", 0.0)
    monkeypatch.setattr(ticket_story, "_PIECE_S", 0.0)
    monkeypatch.setattr(ticket_story, "_ENTRIES_AT_ONCE", 2)
    [old] = world.send(T, b"5-1")
    world.send_many([b"U"] * 5)
    first = story.timeline(T.decode(), None, [old.decode()])
    assert [one["message_id"] for one in first["events"]] == ["5-1"]
    assert story.timeline(T.decode(), first["back"], [old.decode()])["events"] == []


def test_a_long_story_comes_in_pieces_that_are_all_of_it(
    world: World, story: TicketHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticket_story, "_FIRST_S", 0.0)
    monkeypatch.setattr(ticket_story, "_PIECE_S", 0.0)
    monkeypatch.setattr(ticket_story, "_ENTRIES_AT_ONCE", 7)
    monkeypatch.setattr(ticket_story, "_RUNS_AT_ONCE", 3)
    sent = world.send_many([T, b"U"] * 10)
    for number in range(8):
        log(world, "a:1", Finished(T, sent[0], 5, number + 1, 1, 2), outcomes=("failed",))
    found, back, pieces = [], None, 0
    while True:
        told = story.timeline(T.decode(), back)
        found += told["events"]
        pieces, back = pieces + 1, told["back"]
        if back is None:
            break
    assert pieces == 3
    assert sorted(one["message_id"] for one in found if one["event"] == "sent") == sorted(
        one.decode() for one in sent[::2]
    )
    assert sorted(one["attempt"] for one in found if one["event"] == "ran") == list(range(1, 9))


@pytest.mark.parametrize("back", ["", "x", "_", "5-1_5-1", "(5_(5", "(x-1_end", "(5-1_(5-1_(5-1", "(5-1)_(5-1"])
def test_a_place_that_no_piece_gave_is_refused(story: TicketHistory, back: str) -> None:
    with pytest.raises(ValueError, match="not a position"):
        story.timeline("T", back)


def test_tickets_are_found_by_a_part_of_their_id_that_is_no_pattern(world: World) -> None:
    leader, a = world.elect(), world.join("a")
    for ticket in (T, b"T", b"a*b", b"aXb", b"a?b[c]"):
        world.owned(leader, a, ticket)

    def found(text: str) -> set[bytes]:
        page = StatusReader(world.link, world.keys).tickets("0", 100, text)
        assert page["cursor"] is None
        assert all(row["state"] == "handed_over" for row in page["tickets"])
        return {row["ticket_id"].encode() for row in page["tickets"]}

    assert found("T") == {T, b"T"}
    assert found("a*b") == {b"a*b"}
    assert found("?b[c") == {b"a?b[c]"}
    assert found("*[x]") == {T}
    assert found("nothing") == set()


def test_of_many_tickets_about_as_many_are_found_as_were_asked_for_and_the_rest_from_there_on(world: World) -> None:
    world.apart_because = "the index is made up"
    every = {b"T%d" % number: b"a:1 1 %d-1" % number for number in range(2000)}
    world.link.pipeline([("HSET", world.keys.tickets, ticket, record) for ticket, record in every.items()])
    found: dict[str, list[str]] = {}
    cursor: str | None = "0"
    while cursor is not None:
        some, cursor = StatusReader(world.link, world.keys).tickets(cursor, 100, "T").values()
        assert len(some) < 300
        found |= {row["ticket_id"]: row["message_ids"] for row in some}
    assert found == {f"T{number}": [f"{number}-1"] for number in range(2000)}
