"""Streams with everything wrong that the audit looks for, each thing once, and beside it what looks alike and is
allowed."""

from __future__ import annotations

import random
import time
from typing import Any

import orjson

from usher.common.protocol.keys import Keys
from usher.common.redis.client import Link
from usher.master.audit.findings import FENCES_PER_MS
from usher.master.audit.settings import AuditThresholds
from usher.master.policy.rules import Rule, RuleAction, Target, dump, rule_id

GROUP = "g"
PENDING, RUNS, CAPPED = "pending-side", "runs-side", "capped"
STREAMS = (PENDING, RUNS, CAPPED)
RANDOM = "random"
_HOUR_MS = 3_600_000
#: So wide that a slow machine makes no finding of what is well.
LIMITS = AuditThresholds(
    owner_idle_ms=_HOUR_MS, parked_ms=_HOUR_MS, deliveries=20, attempts=5, clocks_ms=1000, reaped_ms=50
)
#: Cap of the run log: the one of ``CAPPED`` has as many records.
CAP = 40
_S = 1_000_000

#: check -> (stream, what it is about): what the audit must find, and nothing else.
EXPECTED: dict[str, set[tuple[str, str]]] = {
    "pending_without_index": {(PENDING, "2-1")},
    "index_without_pending": {(PENDING, "3-1")},
    "owners_differ": {(PENDING, "4-1")},
    "ticket_owned_twice": {(PENDING, "twice")},
    "index_unreadable": {(PENDING, "unreadable")},
    "owner_dead": {(PENDING, "d1:3")},
    "stranger_owns": {(PENDING, "stranger")},
    "idle_too_long": {(PENDING, "9-1")},
    "parked_too_long": {(PENDING, "10-1")},
    "body_gone": {(PENDING, "12-1")},
    "delivered_often": {(PENDING, "13-1")},
    "attempts_many": {(PENDING, "14-1")},
    "attempts_leaked": {(PENDING, "15-1")},
    "consumer_leaked": {(PENDING, "gone:9")},
    "key_leaked": {(PENDING, "nobody:4")},
    "overlap": {(RUNS, "4-1")},
    "owners_overlap": {(RUNS, "7-1"), (RUNS, "45-1")},
    "out_of_order": {(RUNS, "8-1"), (RUNS, "31-1")},
    "fence_shared": {(RUNS, "14-1")},
    "fence_fell": {(RUNS, "16-1")},
    "times_impossible": {(RUNS, "17-1")},
    "clock_wrong": {(RUNS, "c3:3"), (RUNS, "c4:4")},
    "run_unreadable": {(RUNS, "1-1")},
    "overtaken": {(RUNS, "33-1")},
    "lost": {(RUNS, "18-1")},
    "cut_unread": {(PENDING, "")},
    "effect_twice": {(RUNS, "23-1"), (RUNS, "26-1"), (RUNS, "37-1")},
    "repeat_declared": {(RUNS, "24-1")},
    "stale_counted": {(RUNS, "38-1"), (RUNS, "39-1"), (RUNS, "41-1")},
    "dead_and_done": {(RUNS, "19-1")},
}


class Seeder:
    """Writes one stream as masters and consumers would have left it."""

    def __init__(self, link: Link, stream: str) -> None:
        self._link = link
        self.keys = Keys(stream, GROUP)
        self._starts: dict[str, int] = {}  # that count, by id
        link.call("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")

    def add(self, *entries: tuple[str, str]) -> None:
        """(id, ticket) each."""
        self._link.pipeline(
            [("XADD", self.keys.stream, entry_id, "ticket_id", ticket, "number", 1) for entry_id, ticket in entries]
        )

    def read(self) -> None:
        """The master reads all."""
        self._link.call("XREADGROUP", "GROUP", GROUP, "master", "COUNT", 100_000, "STREAMS", self.keys.stream, ">")

    def own(self, owner: str, *ids: str, idle_ms: int = 0, deliveries: int = 1) -> None:
        self._link.call(
            "XCLAIM", self.keys.stream, GROUP, owner, 0, *ids, "IDLE", idle_ms, "RETRYCOUNT", deliveries, "JUSTID"
        )

    def index(self, ticket: str, record: str) -> None:
        """Write a ticket's record, and what it says into its owner's inbox."""
        self._link.call("HSET", self.keys.tickets, ticket, record)
        owner, _, told = record.partition(" ")
        if ":" in owner:
            self.tell(owner, ticket, told)

    def tell(self, owner: str, ticket: str, told: str) -> None:
        """``told``: fence and ids, of a hand-over that draws a fence of its own."""
        fields = ("fence", 1, "between", "\n", "tickets", ticket, "ids", told)
        self._link.call("XADD", self.keys.inbox(owner), "*", *fields)

    def rule(self, rule: Rule) -> None:
        self._link.call("HSET", self.keys.rules, rule_id(rule.target, rule.value), b"1 0 " + dump(rule))

    def live(self, *incarnations: str) -> None:
        for name in incarnations:
            self._link.call("SET", self.keys.lease(name), "live", "PX", 10 * _HOUR_MS)
            consumer, _, generation = name.partition(":")
            self._link.call("HSET", self.keys.consumers, consumer, f"{generation} uuid 1 1 - http://127.0.0.1:1")

    def over(self, *ids: str) -> None:
        self._link.call("XACK", self.keys.stream, GROUP, *ids)

    def ran(self, consumer: str, *runs: tuple[Any, ...], record: str = "*") -> None:
        """(id, ticket, fence, start us, end us[, outcome[, attempt]]) each, in one record."""
        columns: dict[str, Any] = {"consumer": consumer, "attempts": [self._attempt(*run) for run in runs]}
        for at, name in enumerate(("ids", "tickets", "fences", "start_us", "end_us")):
            columns[name] = [run[at] for run in runs]
        if any(len(run) > 5 for run in runs):
            columns["outcomes"] = [run[5] if len(run) > 5 else "done" for run in runs]
        self._link.call("XADD", self.keys.runs, record, "batch", orjson.dumps(columns))

    def _attempt(self, *run: Any) -> int:
        """Count a start as consumers do: what failed counts, until the message is over."""
        before = self._starts.get(run[0], 0)
        outcome, attempt = (*run[5:], *("done", before + 1)[max(0, len(run) - 5) :])
        is_counted = outcome in ("failed", "crashed", "retry_later")
        self._starts[run[0]] = attempt if is_counted else before if outcome == "stale" else 0
        return int(attempt)

    def letter(self, entry_id: str, ticket: str) -> None:
        self._link.call(
            "XADD", self.keys.dead, "*", "usher-id", entry_id, "usher-ticket", ticket, "usher-reason", "gave_up"
        )


def seed(link: Link) -> None:
    """All three streams."""
    _pending_side(link, Seeder(link, PENDING))
    _runs_side(link, Seeder(link, RUNS))
    _capped(link, Seeder(link, CAPPED))


def seed_runs(link: Link) -> None:
    """The one with a run log alone."""
    _runs_side(link, Seeder(link, RUNS))


def seed_random(link: Link, executions: int = 3000) -> None:
    """A history in which nothing is as it should be: of few tickets, fences, owners and moments."""
    chance, s = random.Random(7), Seeder(link, RANDOM)
    ids = [f"{1000 + n // 3}-{n % 3}" for n in range(executions // 4)]
    tickets = {entry_id: chance.choice(["", *(f"t{n}" for n in range(60))]) for entry_id in ids}
    s.add(*tickets.items())
    s.read()
    s.live("c1:1", "c2:2")
    s.over(*chance.sample(ids, len(ids) * 3 // 4))
    s.own("c1:1", *chance.sample(ids, len(ids) // 8))
    for entry_id in chance.sample(ids, len(ids) // 16):
        s.index(tickets[entry_id], f"{chance.choice(['c1:1', 'c2:2', 'returned'])} 5 {entry_id}")
        s.letter(entry_id, tickets[entry_id])
    outcomes = ["done"] * 6 + ["failed", "crashed", "gave_up", "stale"]
    for at_ms in range(2000, 2000 + executions // 10):
        runs = []
        for entry_id in chance.choices(ids, k=10):
            fence, start = (at_ms - chance.randrange(400)) * FENCES_PER_MS, at_ms * 1000 - chance.randrange(200_000)
            took, outcome = chance.choice([0, 1, 500, 40_000]), chance.choice(outcomes)
            ticket = tickets[entry_id] if chance.random() < 0.98 else "other"
            runs.append((entry_id, ticket, fence, start, start + took if outcome != "crashed" else 0, outcome))
        s.ran(chance.choice(["c1:1", "c2:2", "c3:3"]), *runs, record=f"{at_ms}-1")


def _pending_side(link: Link, s: Seeder) -> None:
    names = {5: "twice", 11: "busy"}
    link.call("HSET", s.keys.counters, "unread_cut", 1, "unread_cut_s", int(time.time()))
    s.add(
        *((f"{n}-1", names.get(n, f"t{n}")) for n in range(1, 6)),
        ("5-2", "twice"),
        *((f"{n}-1", names.get(n, f"t{n}")) for n in range(6, 12)),
    )
    s.add(("11-2", "busy"), *((f"{n}-1", f"t{n}") for n in range(12, 19)))
    s.read()
    s.live("c1:1", "c2:2")
    s.own("c1:1", "1-1", "2-1", "4-1", "5-1", "11-1", "12-1", "14-1")
    s.own("c2:2", "5-2")
    s.own("d1:3", "7-1", idle_ms=2 * _HOUR_MS)
    s.own("stranger", "8-1")
    s.own("c1:1", "9-1", idle_ms=2 * _HOUR_MS)
    s.own("master", "10-1", "11-2", "18-1", idle_ms=2 * _HOUR_MS)
    s.rule(Rule(Target.TICKET, "t18", RuleAction.PAUSE))
    s.own("c1:1", "13-1", deliveries=50)
    s.own("halted", "17-1", idle_ms=2 * _HOUR_MS)
    s.over("3-1", "6-1", "15-1")
    for ticket, record in {
        "t1": "c1:1 5 1-1",
        "t3": "c1:1 5 3-1",
        "t4": "c2:2 5 4-1",
        "twice": "c1:1 5 5-1 5-2",
        "unreadable": "what",
        "t7": "d1:3 5 7-1",
        "t9": "c1:1 5 9-1",
        "busy": "c1:1 5 11-1",
        "t12": "c1:1 5 12-1",
        "t13": "c1:1 5 13-1",
        "t14": "c1:1 5 14-1",
        "t16": "returned 5 16-1",
        "t17": "halted 5 17-1",
    }.items():
        s.index(ticket, record)
    link.call("XDEL", s.keys.stream, "12-1")
    link.call("HSET", s.keys.attempts, "14-1", "9 9 0 0", "15-1", "1 1 0 0", "1-1", "2 2 0 0")
    link.call("XGROUP", "CREATECONSUMER", s.keys.stream, GROUP, "gone:9")
    link.call("XADD", s.keys.inbox("nobody:4"), "*", "t", "1 1-1")
    link.call("XADD", s.keys.inbox("c1:1"), "*", "t", "1 1-1")


# fmt: off
#: Ticket of each entry.
_TICKETS = {
    1: "ok", 2: "ok", 3: "over", 4: "over", 6: "own", 7: "own", 8: "order", 9: "order", 10: "repeat", 11: "repeat",
    12: "crash", 13: "share", 14: "share", 15: "fell", 16: "fell", 17: "time", 18: "lost", 19: "both", 20: "gave up",
    21: "failed", 22: "held", 23: "same fence", 24: "noted", 25: "behind", 26: "", 27: "unsaid", 28: "unsaid",
    29: "charged", 30: "charged", 31: "own order", 32: "own order", 33: "overtaken", 34: "overtaken", 35: "not noted",
    36: "not noted", 37: "former", 38: "refused", 39: "taken", 40: "taken", 41: "", 42: "set back", 43: "ahead",
    44: "ahead", 45: "hidden",
}
# fmt: on


def _runs_side(link: Link, s: Seeder) -> None:
    link.call("XADD", s.keys.runs, "1-1", "batch", "{")
    names = _TICKETS
    s.add(
        ("0-1", "before"),
        *((f"{n}-1", names.get(n, "call")) for n in range(1, 6)),
        ("5-2", "call"),
        *((f"{n}-1", names[n]) for n in range(6, 46)),
    )
    s.read()
    s.live("c1:1", "c2:2")
    s.own("c1:1", "22-1")
    s.index("held", "c1:1 9 22-1")
    for n, ticket in ((33, "overtaken"), (35, "not noted")):
        s.own("c1:1", f"{n}-1")
        s.index(ticket, f"c1:1 9 {n}-1")
    s.own("c1:1", "36-1")
    s.index("not noted", "c1:1 9 35-1 36-1")
    s.over("0-1", "5-2", *(f"{n}-1" for n in (*range(1, 22), *range(23, 33), 34, *range(37, 46))))
    # Fences tell when they were given (1024 to a millisecond), records when it was noted.
    s.ran(
        "c1:1",
        ("23-1", "same fence", 5, 100, 200),
        ("24-1", "noted", 5, 100, 200),
        ("26-1", "", 5, 100, 200),
        record="2000-1",
    )
    at_4_s = 4000 * 1024
    # A master has declared that these may run again, of 37-1 after it had.
    for declared, entry_id in (("8999-1", "24-1"), ("9003-1", "37-1")):
        link.call("XADD", s.keys.losses, declared, "kind", "group_lost", "repeats", f"{entry_id} {entry_id}")
    s.ran(
        "c2:2",
        ("24-1", "noted", at_4_s, 4 * _S + 500, 4 * _S + 600),
        ("25-1", "behind", at_4_s, 4 * _S + 500, 4 * _S + 600),
        ("26-1", "", at_4_s, 4 * _S + 1, 4 * _S + 2),
        record="9000-1",
    )
    s.ran(
        "c1:1",
        ("23-1", "same fence", 5, 300, 400),
        ("25-1", "behind", 5, 100, 200),
        ("37-1", "former", 5, 100, 200),
        record="9001-1",
    )
    # Its former owner's acknowledgement counted, though c2 had it since 4 s: so did that of c2.
    s.ran("c2:2", ("37-1", "former", at_4_s, 4 * _S + 500, 4 * _S + 600), record="9002-1")
    # So it did of 38-1, of which c2's was refused then, and of 41-1; and of 39-1, behind what c2 had acknowledged of
    # the ticket. 42-1 was done before c2 had it: the group was set back.
    s.ran("c2:2", ("40-1", "taken", at_4_s, 4 * _S + 500, 4 * _S + 600), record="9003-1")
    s.ran(
        "c1:1",
        ("38-1", "refused", 5, 100, 200),
        ("39-1", "taken", 5, 100, 200),
        ("41-1", "", 5, 100, 200),
        record="9004-1",
    )
    s.ran("c1:1", ("42-1", "set back", 5, 100, 200), record="9004-2")
    s.ran(
        "c2:2",
        ("38-1", "refused", at_4_s, 4 * _S + 500, 4 * _S + 600, "stale"),
        ("41-1", "", at_4_s, 4 * _S + 500, 4 * _S + 600, "failed"),
        record="9005-1",
    )
    s.ran("c2:2", ("42-1", "set back", 9500 * 1024, 9_500_500, 9_500_600, "failed"), record="9600-1")
    # The clock of c3 is 5 s ahead: c1, which had the ticket a second later, did not begin before it. That of c4 is 5 s
    # back: it still ran when c1 began, 3 s before.
    s.ran("c3:3", ("43-1", "ahead", 10_000 * 1024, 15_001_000, 15_002_000), record="10010-1")
    s.ran("c1:1", ("44-1", "ahead", 11_000 * 1024, 11_001_000, 11_002_000), record="11010-1")
    s.ran("c1:1", ("45-1", "hidden", 21_000 * 1024, 21_001_000, 21_100_000), record="21200-1")
    s.ran("c4:4", ("45-1", "hidden", 20_000 * 1024, 15_001_000, 19_000_000, "stale"), record="24010-1")
    _more_runs(link, s)


def _more_runs(link: Link, s: Seeder) -> None:
    s.ran(
        "c1:1",
        ("1-1", "ok", 5, 100, 200),
        ("2-1", "ok", 5, 200, 300),
        ("3-1", "over", 5, 100, 300),
        ("4-1", "over", 5, 200, 400),
    )
    s.ran(
        "c1:1",
        ("5-1", "call", 5, 100, 300),
        ("5-2", "call", 5, 100, 300),
        ("6-1", "own", 5, 1 * _S, 10 * _S),
        ("9-1", "order", 5, 100, 200),
    )
    s.ran("c2:2", ("7-1", "own", 6, 5 * _S, 11 * _S), ("14-1", "share", 5, 300, 400))
    s.ran("c1:1", ("8-1", "order", 5, 300, 400), ("13-1", "share", 5, 100, 200))
    s.ran("c2:2", ("10-1", "repeat", 6, 5 * _S, 6 * _S), ("11-1", "repeat", 6, 6 * _S, 7 * _S))
    s.ran("c1:1", ("10-1", "repeat", 5, 100, 200), ("11-1", "repeat", 5, 200, 300))
    s.ran(
        "c1:1",
        ("12-1", "crash", 5, 1 * _S, 0, "crashed"),
        ("15-1", "fell", 5, 20 * _S, 21 * _S),
        ("17-1", "time", 5, 500, 400),
    )
    s.ran("c2:2", ("16-1", "fell", 6, 10 * _S, 11 * _S))
    s.ran(
        "c2:2", ("12-1", "crash", 6, 4 * _S, 5 * _S), ("19-1", "both", 6, 1, 2), ("20-1", "gave up", 6, 1, 2, "gave_up")
    )
    s.ran(
        "c2:2",
        ("21-1", "failed", 6, 1, 2, "failed"),
        ("21-1", "failed", 6, 3, 4),
        ("20-9", "", 6, 1, 2),
        ("20-8", "", 6, 1, 2),
    )
    # Killed between a success and its acknowledgement, when the next one had crashed with it, or was noted as failed:
    # no disorder. Under one fence nothing is lost, so there it is.
    s.ran(
        "c1:1",
        ("28-1", "unsaid", 5, 200, 0, "crashed"),
        ("30-1", "charged", 5, 200, 300, "failed"),
        ("32-1", "own order", 5, 1, 2, "failed"),
    )
    for n, ticket in ((27, "unsaid"), (28, "unsaid"), (29, "charged"), (30, "charged")):
        s.ran("c2:2", (f"{n}-1", ticket, 6, n * _S, n * _S + 9))
    s.ran("c1:1", ("31-1", "own order", 5, 3, 4), ("32-1", "own order", 5, 5, 6))
    # 34-1 was done over the head of 33-1; 35-1 may have been done, and its owner have died with 36-1 before it could be
    # noted.
    s.ran("c1:1", ("34-1", "overtaken", 9, 5, 6), ("36-1", "not noted", 8, 5, 0, "crashed"))
    s.letter("19-1", "both")
    s.letter("20-1", "gave up")


def _capped(link: Link, s: Seeder) -> None:
    """The first records of its run log are gone: what looks out of order or lost may be what they told of."""
    s.add(("1-1", "a"), ("2-1", "a"), ("3-1", "b"))
    s.read()
    s.over("1-1", "2-1", "3-1")
    s.ran("c1:1", ("2-1", "a", 5, 100, 200), record="5-1")
    s.ran("c1:1", ("1-1", "a", 5, 300, 400), record="5-2")
    for n in range(CAP - 2):
        s.ran("c1:1", (f"1-{n + 5}", f"other{n}", 5, 1, 2), record=f"6-{n + 1}")
    del link
