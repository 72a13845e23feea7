"""Which tickets are said to be stuck, and which alarms that makes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product, starmap
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from usher.common.protocol.attempts import GIVEN_UP, NEVER, Attempts
from usher.common.protocol.keys import HALTED
from usher.common.protocol.last_error import LastError
from usher.common.protocol.mishaps import MISHAPS
from usher.common.protocol.ticket_states import RETURNED, TicketState, due_ms_of
from usher.master.policy import states
from usher.master.policy.board.plans import Parked
from usher.master.policy.explain import (
    SHOWN,
    STUCK_MS,
    Looked,
    TicketGroups,
    alarms,
    describe,
    level_of,
    since_ms,
)
from usher.master.policy.rules import Rule, RuleAction, Rulebook, Target
from usher.master.policy.states import Queue, Seen, kind_of, parse_states, ticket_state, told_alike

_NOW = 1_000_000_000


class Around(NamedTuple):
    """What else is known when tickets are looked at."""

    attempts: Mapping[bytes, Attempts]
    states: Mapping[str, str]
    moved_ms: Mapping[bytes, int]
    parked: Mapping[bytes, Parked]
    rules: Rulebook = Rulebook()
    errors: Mapping[bytes, LastError] = MappingProxyType({})
    queue: str = ""


_SEEN = Around({}, {"c1:1": "live", "c2:1": "draining", "c3:1": "revoked"}, {}, {})


def head(
    ticket: bytes = b"T", owner: bytes = b"c1:1", handed_ms: int = 0, sent_ms: int = _NOW - 60_000, size: int = 1
) -> Looked:
    ids = [b"%d-0" % (sent_ms + at) for at in range(size)]
    return Looked(ticket, b"%b %d %b" % (owner, handed_ms * 1024, b" ".join(ids)), Seen(kind_of(owner)), None)


def described(one: Looked, around: Around, now_ms: int) -> dict[str, Any]:
    rule, error = around.rules.of(one.ticket), around.errors.get(one.head)
    lease, attempts = around.states.get(one.owner.decode(), "lost"), around.attempts.get(one.head, NEVER)
    queue = around.queue if rule is None else ""
    seen = Seen(one.seen.kind, lease, attempts, due_ms_of(one.owner) or 0, rule, told_alike(error), queue)
    parked, since = around.parked.get(one.ticket, Parked()), since_ms(one, around.moved_ms.get(one.head, 0), now_ms)
    return describe(one._replace(seen=seen, error=error), since, parked, now_ms)


def rows(*heads: Looked, seen: Around = _SEEN) -> list[dict[str, Any]]:
    """The rows of those that failed, or stand still."""
    found = [described(one, seen, _NOW) for one in heads]
    return [row for row in found if row["attempts"] or _NOW - row["since_ms"] >= STUCK_MS]


def test_what_has_just_been_handed_over_is_not_stuck_however_old_it_is() -> None:
    assert rows(head(handed_ms=_NOW - 100)) == []
    [row] = rows(head(handed_ms=_NOW - STUCK_MS))
    assert (row["state"], row["consumer"], row["since_ms"]) == ("handed_over", "c1", _NOW - STUCK_MS)


def test_a_ticket_whose_head_was_seen_to_move_is_not_stuck() -> None:
    moves = head()
    assert rows(moves, seen=_SEEN._replace(moved_ms={moves.head: _NOW - 100})) == []


def test_an_id_from_the_future_is_no_time_since_when_something_stands() -> None:
    """A producer may count microseconds, and the clock of Redis may have gone back: what is stuck is told all the
    same."""
    [row] = rows(head(handed_ms=_NOW - 60_000, sent_ms=1000 * _NOW))
    assert (row["state"], row["since_ms"]) == ("handed_over", _NOW - 60_000)
    waits = head(owner=b"", sent_ms=1000 * _NOW)
    assert rows(waits) == [], "nobody knows since when"
    [row] = rows(waits, seen=_SEEN._replace(moved_ms={waits.head: _NOW - 60_000}))
    assert (row["state"], row["since_ms"]) == ("waiting", _NOW - 60_000)


def test_a_message_that_failed_is_told_at_once() -> None:
    fails = head(sent_ms=_NOW - 10)
    [row] = rows(fails, seen=_SEEN._replace(attempts={fails.head: Attempts(3, 2, 1)}))
    assert (row["state"], row["attempts"], row["why"]) == ("retrying", 3, "failed 3x; retrying")
    for known, why in ((Attempts(2, 2, 2), "failed 2x; retrying"), (Attempts(1, GIVEN_UP, 1), "given up by an op")):
        assert rows(fails, seen=_SEEN._replace(attempts={fails.head: known}))[0]["why"].startswith(why)
    fails = head(handed_ms=_NOW - 10)
    known = {"attempts": {fails.head: Attempts(3, 3)}, "errors": {fails.head: LastError("x", since_ms=_NOW - 40_000)}}
    assert rows(fails, seen=_SEEN._replace(**known))[0]["since_ms"] == _NOW - 40_000, "its first failure"
    [row] = rows(fails, seen=_SEEN._replace(attempts={fails.head: Attempts(3)}))
    assert (row["state"], row["put_off"], row["why"]) == ("retrying", True, "asked to be called again later")
    [row] = rows(fails, seen=_SEEN._replace(attempts={fails.head: Attempts(1, losses=1)}))
    assert (row["put_off"], row["why"]) == (False, "its consumer was lost with it; retrying")
    [row] = rows(
        head(owner=b"c9:1"), seen=_SEEN._replace(attempts={fails.head: Attempts(3, 2, 1), head().head: Attempts(3, 3)})
    )
    assert (row["state"], row["why"]) == ("recovering", "its consumer is lost; it is being taken back")


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
    groups = TicketGroups()
    for row in rows(first, second, seen=_SEEN._replace(parked={b"A": Parked(10, True)})):
        groups.add(row)
    [group] = groups.told()
    assert [(row["ticket_id"], row["behind"], row["behind_is_exact"]) for row in group["rows"]] == [
        ("B", 0, False),
        ("A", 12, True),
    ]


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
    assert head(owner=owner, size=size).behind(parked) == expected


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
    calm |= {"write_trouble": None, "mishaps": dict.fromkeys(MISHAPS, 0)}
    return calm | {"broad_rules": [], "stuck": [], "groups": [], "consumers": consumers} | more


def told(**more: Any) -> list[tuple[str, str]]:
    return [(alarm["level"], alarm["text"]) for alarm in alarms(snapshot(**more))]


def stuck(**more: Any) -> dict[str, Any]:
    row = {
        "state": "handed_over",
        "since_ms": _NOW - 10_000,
        "attempts": 0,
        "put_off": False,
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
        ("warn", "1 consumer lost; others get what was theirs"),
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


def test_a_rule_for_all_tickets_is_not_forgotten() -> None:
    assert told(broad_rules=["paused by alice (rule r1, everything)"]) == [
        ("warn", "All tickets are paused by alice (rule r1, everything)")
    ]


def test_a_redis_that_refuses_writes_comes_first_because_the_rest_follows_from_it() -> None:
    trouble = {"text": "Redis refuses writes", "is_certain": True}
    assert told(write_trouble=trouble, leader_url=None)[0] == ("bad", "Redis refuses writes")
    assert told(write_trouble=trouble) == [("bad", "Redis refuses writes")]
    assert told(write_trouble=trouble | {"is_certain": False}) == [("warn", "Redis refuses writes")]
    proved = told(write_trouble=trouble | {"is_certain": False}, leader_url=None)[0]
    assert proved == ("bad", "Redis refuses writes"), "that nobody leads proves it"


@pytest.mark.parametrize(
    ("state", "row", "level"),
    [
        ("handed_over", {}, "warn"),
        ("handed_over", {"since_ms": _NOW - 60_000}, "bad"),
        ("retrying", {"attempts": 3}, "bad"),
        ("retrying", {"since_ms": _NOW - 900_000, "attempts": 9, "put_off": True}, "warn"),  # its handler did that
        ("paused", {"since_ms": _NOW - 900_000, "attempts": 5}, "warn"),  # an operator did that
        *(("queued", {"since_ms": _NOW - 900_000}, "warn"), ("halted", {}, "bad")),
    ],
)
def test_a_handler_may_take_its_time_before_somebody_has_to_act(state: str, row: dict[str, Any], level: str) -> None:
    assert level_of({"state": state, "alike": False, "rows": [stuck(**row)]}, _NOW) == level
    assert level_of({"state": state, "alike": True, "rows": []}, _NOW) == "bad", "what handlers need is away"


@pytest.mark.parametrize(("ago_s", "is_told"), [(60, True), (86_399, True), (86_500, False)])
def test_what_somebody_did_to_the_stream_by_hand_is_told_for_a_day(ago_s: int, is_told: bool) -> None:
    at = _NOW // 1000 - ago_s
    cut = told(mishaps=dict(zip(MISHAPS, (1001, at), strict=True)))
    assert (cut == [("bad", "Cut from the stream before they were read, and lost: 1,001 messages")]) == is_told
    assert is_told or cut[0][0] == "ok"


# -- groups, and the table of states

_THEN = 1_790_000_100_000
_KEY_ERROR = LastError("KeyError: 'x'", "KeyError", "shop/orders.py:41", 3, 3, 3, _THEN - 50_000)


def _row(number: int, owner: bytes, error: LastError | None, behind: int = 0, attempts: Attempts | None = None) -> Any:
    one = head(b"T%d" % number, owner, 0, _THEN - 100_000 + number, 1 + behind)
    seen = Around(
        {} if attempts is None else {one.head: attempts},
        {"c3:1": "live"},
        {},
        {one.ticket: Parked(0, True)},
        errors={} if error is None else {one.head: error},
    )
    return described(one, seen, _THEN)


def test_what_is_the_same_is_one_line_with_all_that_waits() -> None:
    groups = TicketGroups()
    for number in range(40):
        groups.add(_row(number, b"halted", _KEY_ERROR, behind=4))
    groups.add(_row(50, b"c3:1", _KEY_ERROR, attempts=Attempts(1, 1)))
    groups.add(_row(51, b"halted", _KEY_ERROR._replace(at="shop/orders.py:4")))
    halted, other, retrying = groups.told()
    assert (halted["tickets"], halted["messages"], len(halted["rows"])) == (40, 200, SHOWN)
    assert re.fullmatch(
        r"40 tickets halted: KeyError in shop/orders\.py:41, since \d\d:\d\d:\d\d UTC, in all 200 messages wait",
        halted["told"],
    )
    assert other["told"].startswith("Ticket T51 halted: KeyError in shop/orders.py:4, since")
    assert retrying["told"].startswith("Ticket T50 retrying: KeyError in shop/orders.py:41")


def test_groups_are_told_of_all_that_was_looked_at_and_otherwise_as_the_least() -> None:
    groups = TicketGroups()
    for row in (_row(1, b"halted", _KEY_ERROR), *(_row(number, b"c3:1", None) for number in range(2, 42))):
        groups.add(row)
    more = groups.copied()
    more.add(_row(50, b"", None), are_all=False)
    told = [(one["state"], one["text"], one["tickets"], one["tickets_are_all"]) for one in more.told()]
    assert told == [
        ("halted", "KeyError in shop/orders.py:41", 1, True),
        ("waiting", "waits: no consumer has it", 1, False),
        ("handed_over", "on c3", 40, True),
    ]
    assert [len(one["rows"]) for one in more.told()] == [1, 1, SHOWN]
    assert more.told()[1]["told"].startswith("at least 1 ticket waiting: waits: no consumer has it, since")
    assert [one["tickets_are_all"] for one in groups.told(are_all=False)] == [False] * 2, "a copy is one"


def test_what_waits_behind_is_the_least_unless_all_that_waits_was_looked_at() -> None:
    groups = TicketGroups()
    groups.add(_row(1, b"halted", _KEY_ERROR, behind=2) | {"behind_is_exact": False})
    assert groups.told()[0]["told"].endswith("in all at least 3 messages wait")
    assert groups.told(has_all=True)[0]["told"].endswith("in all 3 messages wait")


def test_of_very_many_errors_the_further_ones_are_counted() -> None:
    groups = TicketGroups()
    for number in range(500):
        groups.add(_row(number, b"halted", _KEY_ERROR._replace(at=f"shop/orders.py:{number}")))
    merged = groups.told()
    assert sum(group["tickets"] for group in merged) == 500
    assert merged[-1]["told"].startswith("300 tickets further: further errors, more than 200 in all")


def test_an_error_that_nobody_noted_is_a_group_too() -> None:
    groups = TicketGroups()
    groups.add(_row(1, b"c3:1", None, attempts=Attempts(2, 2)))
    groups.add(_row(2, b"c3:1", None, attempts=Attempts(1, 1)))
    [group] = groups.told()
    assert (group["state"], group["text"], group["tickets"]) == ("retrying", "", 2)
    assert group["told"].startswith("2 tickets retrying: their errors are not known, since")


def test_states_that_no_list_can_tell_are_refused() -> None:
    assert parse_states("halted,retrying") == {TicketState.HALTED, TicketState.RETRYING}
    with pytest.raises(ValueError, match="'running' is no state that a list can tell"):
        parse_states("halted,running")


def test_the_docs_tell_every_state() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operate.md").read_text()
    table = "| state | the ticket |\n| --- | --- |\n"
    table += "".join(f"| {state.name} | {state.meaning} |\n" for state in states.STATES)
    assert f"\n{table}\nA message" in text, f"put this there:\n{table}"


def test_the_table_has_every_state_and_every_row_has_words() -> None:
    assert {state.name for state in states.STATES} == set(TicketState)
    kinds, rule = (
        ("", "owned", "returned", "put_off", "halted", "unreadable"),
        Rule(Target.TICKET, "T", RuleAction.PAUSE),
    )
    known, rules, texts = (Attempts(), Attempts(2, 1)), (None, rule), ("", "others")
    found = {
        ticket_state(seen): seen
        for seen in starmap(Seen, product(kinds, ("live", "lost"), known, (5_000,), rules, texts, texts))
    }
    assert set(found) == set(states.ROWS) and all(row.why(seen) for row, seen in found.items())
    assert {row.name for row in states.ROWS} == set(states.LISTED)


def test_what_waits_while_others_are_handled_is_queued_and_not_stuck() -> None:
    moves = {"leader_url": "http://m", "done_per_second": 140.0, "parked": 4_210}
    queue = Queue.of(moves, {"noisy": (3_900, 130.0), "b": (2, 10.0)})
    assert queue is not None
    assert (
        queue.text
        == "behind 4,210 waiting messages, of which 3,900 are of tenant noisy: about 30 s at 140.0 per second"
    )
    assert queue.before("b").text == "behind 2 waiting messages of its tenant: about 200 ms at 10.0 per second"
    assert queue.before("new") == queue.before("") == queue, "what is not known is not made up"
    for stands in ({"done_per_second": 0.0}, {"leader_url": None}, {"parked": 0}, {"done_per_second": None}):
        assert Queue.of(moves | stands) is None
    row = described(head(b"T", b"", 0, _THEN - 100_000), Around({}, {}, {}, {}, queue=queue.text), _THEN)
    assert (row["state"], row["why"]) == ("queued", queue.text)
    put_off = [_row(n, b"waits@%d" % (_THEN + n), None, attempts=Attempts(1)) for n in range(3)]
    put_off += [held := _row(n, b"waits@%d" % (_THEN + n), None) for n in (3, 4)]
    assert held["why"].startswith("not tried before "), "an outage holds it: it asked for nothing"
    groups = TicketGroups()
    for one in (row, row, *put_off):
        groups.add(one)
    [group, later, alike] = groups.told()
    assert group["told"].startswith("2 tickets queued: for their turn, since")
    assert later["told"].startswith("3 tickets put off: asked to be called again later, since"), "whatever their times"
    assert alike["told"].startswith("2 tickets put off: all of its tenant, or of its kind, fail alike, since")
