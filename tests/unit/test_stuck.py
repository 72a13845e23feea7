"""Which tickets are said to be stuck, and which alarms that makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from usher.common.protocol.attempts import Attempts
from usher.common.protocol.last_error import LastError
from usher.common.protocol.mishaps import Mishaps
from usher.common.protocol.owner_words import HALTED, RETURNED
from usher.master.policy.board.plans import Parked
from usher.master.policy.explain.alarms import alarms
from usher.master.policy.explain.stuck import STUCK_MS, Head, StuckContext, behind, oldest, stuck_rows
from usher.master.policy.rules import Rule, RuleAction, Rulebook, Target

_NOW = 1_000_000_000
_SEEN = StuckContext({}, {"c1:1": "live", "c2:1": "draining", "c3:1": "revoked"}, {}, {})


def head(
    ticket: bytes = b"T", owner: bytes = b"c1:1", handed_ms: int = 0, sent_ms: int = _NOW - 60_000, size: int = 1
) -> Head:
    return Head(ticket, owner, handed_ms * 1024, b"%d-0" % sent_ms, size)


def rows(*heads: Head, seen: StuckContext = _SEEN, most: int = 50) -> list[dict[str, Any]]:
    return stuck_rows(heads, seen, _NOW, most)


def test_what_has_just_been_handed_over_is_not_stuck_however_old_it_is() -> None:
    assert rows(head(handed_ms=_NOW - 100)) == []
    [row] = rows(head(handed_ms=_NOW - STUCK_MS))
    assert (row["state"], row["consumer"], row["since_ms"]) == ("handed_over", "c1", _NOW - STUCK_MS)


def test_a_ticket_whose_head_was_seen_to_move_is_not_stuck() -> None:
    moves = head()
    assert rows(moves, seen=_SEEN._replace(moved_ms={moves.id: _NOW - 100})) == []


def test_an_id_from_the_future_is_no_time_since_when_something_stands() -> None:
    """A producer may count microseconds, and the clock of Redis may have gone back: what is stuck is told all the
    same."""
    [row] = rows(head(handed_ms=_NOW - 60_000, sent_ms=1000 * _NOW))
    assert (row["state"], row["since_ms"]) == ("handed_over", _NOW - 60_000)
    waits = head(owner=b"", sent_ms=1000 * _NOW)
    assert rows(waits) == [], "nobody knows since when"
    [row] = rows(waits, seen=_SEEN._replace(moved_ms={waits.id: _NOW - 60_000}))
    assert (row["state"], row["since_ms"]) == ("waiting", _NOW - 60_000)


def test_a_message_that_failed_is_told_at_once() -> None:
    fails = head(sent_ms=_NOW - 10)
    [row] = rows(fails, seen=_SEEN._replace(attempts={fails.id: Attempts(3, 2, 1)}))
    assert (row["state"], row["attempts"], row["why"]) == ("retrying", 3, "failed 3x; retrying")
    fails = head(handed_ms=_NOW - 10)
    known = {"attempts": {fails.id: Attempts(3, 3)}, "errors": {fails.id: LastError("x", since_ms=_NOW - 40_000)}}
    assert rows(fails, seen=_SEEN._replace(**known))[0]["since_ms"] == _NOW - 40_000, "its first failure"
    [row] = rows(fails, seen=_SEEN._replace(attempts={fails.id: Attempts(3)}))
    assert (row["state"], row["put_off"], row["why"]) == ("retrying", True, "asked to be called again later")
    [row] = rows(fails, seen=_SEEN._replace(attempts={fails.id: Attempts(1, losses=1)}))
    assert (row["put_off"], row["why"], row["owners_lost"]) == (False, "its consumer was lost with it; retrying", 0)
    [row] = rows(
        head(owner=b"c9:1"), seen=_SEEN._replace(attempts={fails.id: Attempts(3, 2, 1), head().id: Attempts(3, 3)})
    )
    assert (row["state"], row["why"]) == ("recovering", "its consumer is lost; it is being taken back"), (
        "it tries nothing any more"
    )


def test_a_ticket_that_is_no_utf_8_hides_no_other() -> None:
    assert [row["ticket_id"] for row in rows(head(b"T\xff"), head(b"U"))] == ["T\ufffd", "U"]


def test_what_a_rule_parks_is_told_with_the_rule() -> None:
    rule = Rule(Target.PATTERN, "T*", RuleAction.PAUSE, who="alice", reason="stop", id="r1")
    [row] = rows(head(owner=b""), seen=_SEEN._replace(rules=Rulebook([rule])))
    assert (row["state"], row["why"]) == ("paused", "paused by alice: stop (rule r1, pattern T*)")
    [row] = rows(head(), seen=_SEEN._replace(rules=Rulebook([rule])))
    assert row["state"] == "handed_over", "what its owner has goes on"
    slow = Rulebook([replace(rule, action=RuleAction.SLOW, rate_per_second=2.0)])
    [row] = rows(head(owner=b""), seen=_SEEN._replace(rules=slow))
    assert (row["state"], row["why"]) == (
        "waiting",
        "waits: no consumer has it; slowed to 2/s by alice: stop (rule r1, pattern T*)",
    )


def test_the_oldest_come_first_with_all_that_wait_behind() -> None:
    first, second = head(b"A", sent_ms=_NOW - 90_000, size=3), head(b"B", sent_ms=_NOW - 100_000)
    told = rows(first, second, seen=_SEEN._replace(parked={b"A": Parked(10, True)}))
    assert [(row["ticket_id"], row["behind"], row["behind_is_exact"]) for row in told] == [
        ("B", 0, False),
        ("A", 12, True),
    ]
    assert [row["ticket_id"] for row in rows(first, second, most=1)] == ["B"]
    assert oldest([first, second], 1) == [second]


@pytest.mark.parametrize(
    ("owner", "size", "parked", "expected"),
    [
        (b"c1:1", 3, 10, 12),  # what its owner has is not under ``master``
        (HALTED, 3, 0, 2),  # of what was not looked at the record still tells
        (HALTED, 3, 2, 2),  # those of the record behind the head
        (HALTED, 3, 4, 4),  # and what came after it was halted
        (RETURNED, 3, 3, 2),  # nobody has the head either
        (RETURNED, 3, 0, 2),
        (RETURNED, 3, 5, 4),
        (b"", 3, 0, 2),
        (b"", 1, 7, 6),
    ],
)
def test_nobody_behind_is_counted_twice(owner: bytes, size: int, parked: int, expected: int) -> None:
    assert behind(head(owner=owner, size=size), parked) == expected


def snapshot(**more: Any) -> dict[str, Any]:
    consumers = {"live": 2, "paused": 0, "draining": 0, "revoked": 0, "lost": 0} | more.pop("consumers", {})
    calm = {
        "time_ms": _NOW,
        "leader_url": "http://m",
        "halted": 0,
        "lag": 0,
        "lag_is_exact": True,
        "oldest_ms": None,
        "dead_letters": 0,
    }
    calm |= {"write_trouble": None, "mishaps": Mishaps()._asdict()}
    return calm | {"broad_rules": [], "stuck": [], "stuck_most": 50, "consumers": consumers} | more


def told(**more: Any) -> list[tuple[str, str]]:
    return [(alarm.level, alarm.text) for alarm in alarms(snapshot(**more))]


def stuck(**more: Any) -> dict[str, Any]:
    row = {
        "state": "handed_over",
        "since_ms": _NOW - 10_000,
        "attempts": 0,
        "put_off": False,
        "owners_lost": 0,
        "head": "12-0",
        "consumer": "c3",
        "behind": 4,
        "behind_is_exact": True,
    }
    return row | {"shown": "INC-7", "href": "/tickets/INC-7"} | more


def test_each_trouble_has_its_sentence_and_the_worst_comes_first() -> None:
    assert told(consumers={"live": 0}, leader_url=None)[0] == ("bad", "No master leads: nothing is handed over")
    assert told(consumers={"live": 0})[0] == ("bad", "No consumer is live: nothing is handled")
    for state in ("draining", "paused"):
        assert told(consumers={"live": 0, state: 1}) == [
            ("bad", "No consumer is live: those that drain or are paused take nothing more")
        ]
    assert told(consumers={"lost": 1}, halted=2) == [
        ("bad", "2 tickets halted by a dead letter: redrive or drop it"),
        ("warn", "1 consumer lost; their messages are being taken back"),
    ]
    assert told(lag=5000, oldest_ms=_NOW - 90_000) == [("warn", "The consumers are behind: 5,000 messages are unread")]


@pytest.mark.parametrize(
    ("lag", "oldest_ms", "is_behind"),
    [(1000, 60_000, True), (999, 90_000, False), (5000, 59_999, False), (5000, None, False)],
)
def test_consumers_are_behind_when_much_is_unread_and_has_been_for_long(
    lag: int, oldest_ms: int | None, is_behind: bool
) -> None:
    [(level, text)] = told(lag=lag, oldest_ms=None if oldest_ms is None else _NOW - oldest_ms)
    assert (level, text.startswith("The consumers are behind")) == (("warn", True) if is_behind else ("ok", False))


def test_of_more_than_are_looked_at_it_is_said_that_there_may_be_more() -> None:
    for state, says in (
        ("handed_over", "2 tickets or more are stuck"),
        ("paused", "2 paused tickets or more with messages"),
    ):
        assert told(stuck=[stuck(state=state)] * 2, stuck_most=2)[0][1].startswith(says)
        assert "or more" not in told(stuck=[stuck(state=state)] * 2, stuck_most=3)[0][1]


def test_a_rule_for_all_tickets_is_not_forgotten() -> None:
    assert told(broad_rules=["paused by alice (rule r1, everything)"]) == [
        ("warn", "All tickets are paused by alice (rule r1, everything)")
    ]


def test_a_redis_that_refuses_writes_comes_first_because_the_rest_follows_from_it() -> None:
    trouble = {"text": "Redis refuses writes", "is_certain": True}
    assert told(write_trouble=trouble, leader_url=None)[0] == ("bad", "Redis refuses writes")
    assert told(write_trouble=trouble) == [("bad", "Redis refuses writes")]
    assert told(write_trouble=trouble | {"is_certain": False}) == [("warn", "Redis refuses writes")]
    assert told(write_trouble=trouble | {"is_certain": False}, leader_url=None)[0] == ("bad", "Redis refuses writes"), (
        "that nobody leads proves it"
    )


def test_owners_that_are_lost_one_after_another_with_one_message_are_told() -> None:
    assert [level for level, _ in told(stuck=[stuck(owners_lost=1)])] == ["warn"]
    assert (
        "bad",
        "The last 3 owners of INC-7 were lost while they had 12-0: its handler may end or freeze its process",
    ) in (told(stuck=[stuck(), stuck(owners_lost=3)]))


def test_a_handler_may_take_its_time_before_somebody_has_to_act() -> None:
    assert told(stuck=[stuck()]) == [("warn", "1 ticket is stuck or retrying; the oldest: INC-7 on c3, 4 behind")]
    assert told(stuck=[stuck(since_ms=_NOW - 60_000)])[0][0] == "bad"
    paused = stuck(state="paused", since_ms=_NOW - 900_000, attempts=5)
    waits = ("warn", "1 paused ticket with messages that wait; the oldest: INC-7")
    assert told(stuck=[paused]) == [waits], "an operator did that"
    assert told(stuck=[paused, stuck()]) == [
        ("warn", "1 ticket is stuck or retrying; the oldest: INC-7 on c3, 4 behind"),
        waits,
    ]
    assert told(stuck=[stuck(since_ms=_NOW - 900_000, attempts=9, put_off=True)])[0][0] == "warn", (
        "its handler did that"
    )
    level, text = told(stuck=[stuck(attempts=3), stuck()])[0]
    assert (level, text) == (
        "bad",
        "2 tickets are stuck or retrying; the oldest: INC-7 on c3, 3 attempts, 4 behind",
    )


@pytest.mark.parametrize(("ago_s", "is_told"), [(60, True), (86_399, True), (86_500, False)])
def test_what_somebody_did_to_the_stream_by_hand_is_told_for_a_day(ago_s: int, is_told: bool) -> None:
    at = _NOW // 1000 - ago_s
    cut = told(mishaps=Mishaps(1001, at)._asdict())
    assert (cut == [("bad", "Cut from the stream before they were read, and lost: 1,001 messages")]) == is_told
    assert is_told or cut[0][0] == "ok"
