"""Faults that another program made: keys, records and numbers that are none of Usher's."""

from __future__ import annotations

import json

from tests.audit.faults import DONE, fault
from tests.audit.seeding import LIMITS, Seeder
from usher.common.redis.client import Link


@fault(run_unreadable="200-1")
def a_damaged_record(s: Seeder, link: Link) -> None:
    """Entries that a damaged record may name are not told as lost."""
    link.call("DEL", s.keys.runs)
    s.ran("c1:1", ("1-1", "a", 5, 100, 150), record="50-1")
    link.call("XADD", s.keys.runs, "200-1", "batch", "{")


@fault(run_unreadable=" ".join(f"18446744073709551614-{n}" for n in range(4)))
def numbers_beyond_all_bounds(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    odd = (("end_us", -(2**70)), ("start_us", 2**63 - 1), ("fences", 2**63), ("attempts", 2**70))
    for n, (name, value) in enumerate(odd):
        columns = {"ids": ["5-1"], "tickets": ["a"], "fences": [5], "attempts": [1], "start_us": [500], "end_us": [550]}
        record = json.dumps({"consumer": "c1:1", **columns, name: [value]})
        link.call("XADD", s.keys.runs, f"18446744073709551614-{n}", "batch", record)


@fault(key_foreign="")
def a_key_of_another_type(s: Seeder, link: Link) -> None:
    link.call("SET", s.keys.attempts, "what")


@fault(key_foreign="")
def losses_of_another_type(s: Seeder, link: Link) -> None:
    link.call("SET", s.keys.losses, "what")


@fault(key_foreign="")
def counters_of_another_program(s: Seeder, link: Link) -> None:
    link.call("HSET", s.keys.counters, "unread_cut", "what")


@fault(key_foreign="")
def a_declared_loss_of_another_program(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE, ("5-1", "a", 5, 600, 650))
    link.call("XADD", s.keys.losses, "*", "kind", "group_lost", "repeats", "what what")


@fault(letters_twice="what")
def letters_of_another_program(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    for name in ("what", "what", "99999999999999999999-1", b"\xff", ""):
        link.call("XADD", s.keys.dead, "*", "usher-id", name, "usher-reason", "what")


@fault(attempts_leaked="what")
def attempts_of_another_program(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    link.call("HSET", s.keys.attempts, "what", "what")


@fault()
def rules_of_another_program(s: Seeder, link: Link) -> None:
    """A rule that cannot be read holds everything back, as the page tells."""
    s.ran("c1:1", DONE)
    s.add(("8-1", "z"))
    s.read()
    s.own("master", "8-1", idle_ms=2 * LIMITS.parked_ms)
    link.call("HSET", s.keys.rules, "what", "what")


@fault()
def a_registration_of_another_program(s: Seeder, link: Link) -> None:
    """The page and the doctor tell of it."""
    s.ran("c1:1", DONE)
    link.call("HSET", s.keys.consumers, b"\xff", b"\xff")
    link.call("HSET", s.keys.counters, "generation", "what")


@fault()
def an_inbox_of_another_program(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    s.tell("c1:1", "z", "what what")
    link.call("XADD", s.keys.inbox("c1:1"), "*", "fence", "what", "x", "")


@fault(never_told="6-1")
def an_inbox_of_another_type(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    link.call("DEL", s.keys.inbox("c1:1"))
    link.call("SET", s.keys.inbox("c1:1"), "what")
