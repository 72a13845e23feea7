"""Faults of what is there now: pending list, index, inboxes, attempts, leases and names."""

from __future__ import annotations

import time

from tests.audit.faults import DONE, fault
from tests.audit.seeding import LIMITS, Seeder
from usher.common.redis.client import Link
from usher.master.policy.explain import FENCES_PER_MS

_LONG_MS = 2 * LIMITS.parked_ms
_HOUR_MS = 3_600_000


# ---- index -----------------------------------------------------------------------------------------------------------


@fault(pending_without_index="6-1")
def pending_and_not_indexed(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    link.call("HDEL", s.keys.tickets, "b")


@fault(pending_without_index="8-1")
def pending_and_missing_in_its_record(s: Seeder, link: Link) -> None:
    one_more_is_owned(s)


@fault(index_without_pending="5-1")
def indexed_and_over(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    s.index("a", "returned 5 5-1")


@fault()
def indexed_for_its_owner_and_over(s: Seeder, link: Link) -> None:
    """Until the leader has other work, a record names what its owner has done."""
    s.ran("c1:1", DONE)
    s.index("a", "c1:1 5 5-1")


@fault(owners_differ="6-1")
def indexed_for_another_owner(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    s.live("c2:2")
    s.index("b", "c2:2 6 6-1")


@fault(owners_differ="6-1")
def indexed_as_given_back_and_owned(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    s.index("b", "returned 5 6-1")


@fault(ticket_owned_twice="6-1", owners_differ="8-1")
def a_ticket_of_two_owners(s: Seeder, link: Link) -> None:
    s.live("c2:2")
    one_more_is_owned(s, "c2:2")
    s.index("b", "c1:1 5 6-1 8-1")


@fault(index_unreadable="b")
def a_record_that_cannot_be_read(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    link.call("HSET", s.keys.tickets, "b", "what")


@fault(indexed_twice="6-1")
def claimed_by_two_tickets(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    s.index("z", "c1:1 5 6-1")


@fault(index_unordered="6-1")
def a_record_out_of_order(s: Seeder, link: Link) -> None:
    one_more_is_owned(s)
    s.index("b", "c1:1 5 8-1 6-1")


@fault(index_unordered="6-1")
def a_record_with_an_id_twice(s: Seeder, link: Link) -> None:
    one_more_is_owned(s)
    s.index("b", "c1:1 5 6-1 8-1 8-1")


@fault(fence_low="6-1")
def a_fence_below_one_that_has_run(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    s.index("b", "c1:1 4 6-1")


@fault(fence_future="6-1")
def a_fence_of_tomorrow(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    s.index("b", f"c1:1 {int(time.time() * 1000 + 24 * _HOUR_MS) * FENCES_PER_MS} 6-1")


# ---- inboxes ---------------------------------------------------------------------------------------------------------


def one_more_is_owned(s: Seeder, owner: str = "c1:1") -> None:
    s.ran("c1:1", DONE)
    s.add(("8-1", "b"))
    s.read()
    s.own(owner, "8-1")


@fault(never_told="8-1")
def owned_and_never_told(s: Seeder, link: Link) -> None:
    one_more_is_owned(s)
    link.call("HSET", s.keys.tickets, "b", "c1:1 5 6-1 8-1")


@fault()
def told_what_it_had(s: Seeder, link: Link) -> None:
    """An inbox is trimmed later: what it names may be over, and be somebody else's by now."""
    s.live("c2:2")
    link.call("XGROUP", "CREATECONSUMER", s.keys.stream, s.keys.group, "c2:2")
    s.tell("c2:2", "b", "3 6-1")
    s.tell("c1:1", "a", "5 5-1")
    s.ran("c1:1", DONE)


@fault(done_and_pending="5-1")
def told_what_it_had_done_before_the_group_was_set_back(s: Seeder, link: Link) -> None:
    s.tell("c1:1", "a", "5 5-1")
    s.ran("c1:1", DONE)
    link.call("XCLAIM", s.keys.stream, s.keys.group, "master", 0, "5-1", "FORCE", "JUSTID")


@fault()
def told_what_it_gave_back(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    s.add(("8-1", "z"))
    s.read()
    s.tell("c1:1", "z", "9 8-1")
    s.index("z", "returned 9 8-1")


# ---- pending list ----------------------------------------------------------------------------------------------------


@fault(idle_too_long="6-1")
def not_touched_by_its_living_owner(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    s.own("c1:1", "6-1", idle_ms=_LONG_MS)


@fault(parked_too_long="8-1")
def parked_and_forgotten(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    s.add(("8-1", "z"))
    s.read()
    s.own("master", "8-1", idle_ms=_LONG_MS)


@fault()
def parked_behind_its_ticket(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    s.add(("8-1", "b"))
    s.read()
    s.own("master", "8-1", idle_ms=_LONG_MS)


@fault(body_gone="6-1")
def pending_and_deleted(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    link.call("XDEL", s.keys.stream, "6-1")


@fault(delivered_often="6-1")
def delivered_again_and_again(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    s.own("c1:1", "6-1", deliveries=LIMITS.deliveries + 1)


@fault(attempts_many="6-1")
def more_attempts_than_are_allowed(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    link.call("HSET", s.keys.attempts, "6-1", f"9 {LIMITS.attempts + 1} 0 0")


@fault(attempts_leaked="5-1")
def attempts_of_what_is_over(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    link.call("HSET", s.keys.attempts, "5-1", "1 1 0 0")


# ---- names -----------------------------------------------------------------------------------------------------------


@fault(owner_dead="d1:3")
def pending_for_the_dead(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    s.own("d1:3", "6-1", idle_ms=_LONG_MS)
    s.index("b", "d1:3 6 6-1")


@fault(consumer_leaked="gone:9")
def a_name_that_was_not_reaped(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    link.call("XGROUP", "CREATECONSUMER", s.keys.stream, s.keys.group, "gone:9")


@fault(unregistered="c7:7")
def a_consumer_that_never_registered(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)
    link.call("SET", s.keys.lease("c7:7"), "live", "PX", _HOUR_MS)
    link.call("XGROUP", "CREATECONSUMER", s.keys.stream, s.keys.group, "c7:7")


@fault(stranger_owns="worker")
def a_stranger(s: Seeder, link: Link) -> None:
    _read_by("worker", s)


@fault(stranger_owns="celery@host:worker")
def a_stranger_with_a_colon(s: Seeder, link: Link) -> None:
    _read_by("celery@host:worker", s)


@fault(stranger_owns="worker:9")
def a_stranger_with_a_generation_that_never_was(s: Seeder, link: Link) -> None:
    link.call("HSET", s.keys.counters, "generation", 1)
    _read_by("worker:9", s)


def _read_by(name: str, s: Seeder) -> None:
    s.ran("c1:1", DONE)
    s.add(("7-1", "z"))
    s.read()
    s.own(name, "7-1")
