"""What a consumer says of one ticket: what runs, what waits for its next attempt, and what is queued, at this
moment."""

from __future__ import annotations

from usher.common.base.clock import now_s, wall_ms
from usher.common.protocol.attempts import Attempts
from usher.consumer.execution.lanes import Lanes
from usher.consumer.execution.ticket_state import describe_ticket
from usher.consumer.handlers.message import Message, OwnLease
from usher.consumer.lifecycle.journal import Journal


def message(number: int, known: Attempts | None = None) -> Message:
    lease = OwnLease(60, now_s())
    facts = (b"T", b"%d-0" % number, 7, [], lease)
    return Message(*facts, known) if known is not None else Message(*facts)


def lanes(*messages: Message) -> Lanes:
    made = Lanes()
    made.add([(b"T", messages)])
    return made


def rows(kept: Lanes, journal: Journal | None = None, ticket: bytes = b"T") -> list[tuple[str, str, int]]:
    told = describe_ticket(ticket, "c1:1", journal or Journal(None, "", "c1:1", 2), kept, 5)
    assert (told["incarnation"], told["max_attempts"]) == ("c1:1", 5)
    return [(entry["id"], entry["state"], entry["attempt"]) for entry in told["entries"]]


def test_what_is_queued_is_told_in_order() -> None:
    assert rows(lanes(message(2, Attempts(3, 1)), message(9), message(10))) == [
        ("2-0", "queued", 3),
        ("9-0", "queued", 0),
        ("10-0", "queued", 0),
    ]
    assert rows(lanes(message(2)), ticket=b"U") == []


def test_what_runs_is_told_with_its_attempt_and_since_when() -> None:
    first, second = message(1), message(2)
    kept, journal = lanes(first, second), Journal(None, "", "c1:1", 2)
    lane = kept.next_lane(1.0)
    assert lane is not None
    lane.queue.popleft()
    first.attempt = 2
    journal.started(first, 1_000_000)
    assert rows(kept, journal) == [("1-0", "running", 2), ("2-0", "queued", 0)]
    assert describe_ticket(b"T", "c1:1", journal, kept, 5)["entries"][0]["started_ms"] == 1_000
    journal.ended(first)
    assert rows(kept, journal) == [("2-0", "queued", 0)]


def test_what_waits_for_its_next_attempt_is_told_with_the_moment() -> None:
    first, second = message(1), message(2)
    kept = lanes(first, second)
    lane = kept.next_lane(1.0)
    assert lane is not None
    lane.queue.popleft()
    kept.retry(lane, first, now_s() + 100)
    assert rows(kept) == [("1-0", "waiting", 0), ("2-0", "queued", 0)]
    due_ms = describe_ticket(b"T", "c1:1", Journal(None, "", "c1:1", 1), kept, 5)["entries"][0]["due_ms"]
    assert 90_000 < due_ms - wall_ms() <= 100_000


def test_a_suspect_is_told_as_one_that_waits_for_a_process_of_its_own_and_then_runs_in_it() -> None:
    first, journal = message(1), Journal(None, "", "c1:1", 2)
    kept = lanes(first)
    lane = kept.next_lane(1.0)
    assert lane is not None
    lane.queue.popleft()
    kept.isolate(lane, first)
    assert rows(kept) == [("1-0", "apart", 0)]
    assert kept.next_suspect(0.0) is lane
    lane.queue.popleft()
    journal.started(first, 1)
    assert rows(kept, journal) == [("1-0", "running", 0)]
    assert describe_ticket(b"T", "c1:1", journal, kept, 5)["entries"][0]["apart"] is True
