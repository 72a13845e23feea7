"""Faults of executions: order, overlaps, fencing tokens, clocks, effects."""

from __future__ import annotations

from tests.audit.faults import DONE, fault
from tests.audit.seeding import LIMITS, Seeder
from usher.common.redis.client import Link
from usher.master.policy.explain import FENCES_PER_MS

#: A second by Redis' clock, as a fencing token.
_S = 1000 * FENCES_PER_MS


@fault()
def well(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE)


# ---- order -----------------------------------------------------------------------------------------------------------


@fault(out_of_order="5-1")
def begun_behind_a_later_one(s: Seeder, link: Link) -> None:
    s.add(("7-1", "a"))
    s.read()
    s.over("7-1")
    s.ran("c1:1", ("7-1", "a", 5, 500, 550), ("5-1", "a", 5, 600, 650))


@fault(out_of_order="5-1")
def begun_behind_what_a_former_owner_had_done(s: Seeder, link: Link) -> None:
    s.add(("7-1", "a"))
    s.read()
    s.over("7-1")
    s.ran("c1:1", ("7-1", "a", 5, 500, 550))
    s.ran("c2:2", ("5-1", "a", 6, 2_000_000, 2_000_050))


@fault(out_of_order="5-1")
def behind_a_later_one_and_given_up(s: Seeder, link: Link) -> None:
    s.add(("7-1", "a"))
    s.read()
    s.over("7-1")
    s.ran("c1:1", ("7-1", "a", 5, 500, 550), ("5-1", "a", 5, 600, 650, "gave_up"))
    s.letter("5-1", "a")


@fault(overtaken="6-1")
def pending_behind_what_is_done(s: Seeder, link: Link) -> None:
    s.add(("8-1", "b"))
    s.read()
    s.over("8-1")
    s.ran("c1:1", DONE, ("8-1", "b", 5, 600, 650))


@fault()
def succeeded_again_behind_a_failure(s: Seeder, link: Link) -> None:
    """Its first success was not recorded when its owner died with the next one."""
    s.add(("7-1", "a"))
    s.read()
    s.over("7-1")
    s.ran("c1:1", ("7-1", "a", 5, 600, 0, "crashed"))
    s.ran("c2:2", ("5-1", "a", 6, 2_000_000, 2_000_050), ("7-1", "a", 6, 2_000_100, 2_000_150))


# ---- overlaps --------------------------------------------------------------------------------------------------------


@fault(overlap="5-1")
def two_of_a_ticket_at_once(s: Seeder, link: Link) -> None:
    s.ran("c1:1", ("5-1", "a", 5, 349, 550))


@fault(overlap="5-1")
def two_of_a_ticket_at_once_under_two_fences(s: Seeder, link: Link) -> None:
    s.ran("c1:1", ("5-1", "a", 6, 349, 550))


@fault()
def a_batch_of_a_ticket_in_one_call(s: Seeder, link: Link) -> None:
    s.add(("7-1", "a"))
    s.read()
    s.over("7-1")
    s.ran("c1:1", DONE, ("7-1", "a", 5, 500, 550))


@fault(owners_overlap="5-1", clock_wrong="c4:4")
def an_overlap_hidden_by_a_clock(s: Seeder, link: Link) -> None:
    """By its own clock, 5 s back, c4 was over 2 s before c1 began; it ran for 3 s beside it."""
    s.ran("c1:1", ("5-1", "a", 21 * _S, 21_001_000, 21_100_000), record="21200-1")
    s.ran("c4:4", ("5-1", "a", 20 * _S, 15_001_000, 19_000_000, "failed"), record="24010-1")


@fault(owners_overlap="5-1")
def an_overlap_of_half_a_second(s: Seeder, link: Link) -> None:
    s.ran("c1:1", ("5-1", "a", 21 * _S, 21_001_000, 21_100_000), record="21101-1")
    s.ran("c4:4", ("5-1", "a", 20 * _S, 20_001_000, 21_500_000, "failed"), record="21502-1")


@fault(owners_overlap="7-1")
def an_overlap_of_two_messages(s: Seeder, link: Link) -> None:
    s.add(("7-1", "a"))
    s.read()
    s.over("7-1")
    s.ran("c1:1", ("5-1", "a", 20 * _S, 20_001_000, 23_000_000), record="23001-1")
    s.ran("c2:2", ("7-1", "a", 21 * _S, 21_001_000, 24_000_000), record="24001-1")


# ---- fencing tokens --------------------------------------------------------------------------------------------------


@fault(fence_shared="5-1")
def a_fence_of_two_owners(s: Seeder, link: Link) -> None:
    s.ran("c2:2", DONE)


@fault(fence_fell="7-1")
def a_start_under_a_lower_fence(s: Seeder, link: Link) -> None:
    s.add(("7-1", "a"))
    s.read()
    s.over("7-1")
    s.ran("c1:1", ("5-1", "a", 5, 20_000_000, 21_000_000), record="21001-1")
    s.ran("c2:2", ("7-1", "a", 6, 10_000_000, 11_000_000), record="21002-1")


@fault(stale_counted="5-1")
def a_former_owners_success_that_counted(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE, record="9000-1")
    s.ran("c2:2", ("5-1", "a", 4 * _S, 4_500_000, 4_600_000, "failed"), record="9001-1")


@fault(stale_counted="5-1")
def a_former_owners_success_behind_what_its_successor_did(s: Seeder, link: Link) -> None:
    s.add(("7-1", "a"))
    s.read()
    s.over("7-1")
    s.ran("c2:2", ("7-1", "a", 4 * _S, 4_500_000, 4_600_000), record="9000-1")
    s.ran("c1:1", DONE, record="9001-1")


@fault(stale_counted="5-1")
def a_former_owners_success_behind_what_its_successor_failed_at(s: Seeder, link: Link) -> None:
    s.add(("7-1", "a"))
    s.read()
    s.over("7-1")
    s.ran("c2:2", ("7-1", "a", 4 * _S, 4_500_000, 4_600_000, "failed"), record="9000-1")
    s.ran("c1:1", DONE, record="9001-1")
    s.ran("c2:2", ("7-1", "a", 4 * _S, 4_700_000, 4_800_000), record="9002-1")


@fault(stale_counted="7-1")
def a_former_owners_success_without_a_ticket_that_counted(s: Seeder, link: Link) -> None:
    _one_without_a_ticket(s, link)
    s.ran("c1:1", ("7-1", "", 5, 600, 650), record="9000-1")
    s.ran("c2:2", ("7-1", "", 4 * _S, 4_500_000, 4_600_000, "failed"), record="9001-1")


def _one_without_a_ticket(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE, record="101-1")
    link.call("XADD", s.keys.stream, "7-1", "text", "no ticket")
    s.read()
    s.over("7-1")


# ---- effects ---------------------------------------------------------------------------------------------------------


@fault(effect_twice="5-1")
def an_effect_twice(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE, ("5-1", "a", 5, 600, 650))


@fault(effect_twice="5-1")
def an_effect_twice_that_redis_knew(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE, record="2000-1")
    s.ran("c2:2", ("5-1", "a", 4 * _S, 4_000_500, 4_000_600), record="9000-1")


@fault(effect_twice="7-1")
def an_effect_twice_without_a_ticket(s: Seeder, link: Link) -> None:
    _one_without_a_ticket(s, link)
    s.ran("c1:1", ("7-1", "", 5, 600, 650), record="2000-1")
    s.ran("c2:2", ("7-1", "", 4 * _S, 4_000_500, 4_000_600), record="9000-1")


@fault(repeat_declared="5-1")
def an_effect_twice_as_was_declared(s: Seeder, link: Link) -> None:
    s.ran("c1:1", DONE, record="2000-1")
    link.call("XADD", s.keys.losses, "3000-1", "kind", "group_lost", "repeats", "5-1 5-1")
    s.ran("c2:2", ("5-1", "a", 4 * _S, 4_000_500, 4_000_600), record="9000-1")


@fault()
def a_former_owners_success_behind_that_of_its_successor(s: Seeder, link: Link) -> None:
    s.ran("c2:2", ("5-1", "a", 4 * _S, 4_000_500, 4_000_600), record="9000-1")
    s.ran("c1:1", DONE, record="9001-1")


# ---- clocks ----------------------------------------------------------------------------------------------------------


@fault(clock_wrong="c3:3")
def a_clock_ahead(s: Seeder, link: Link) -> None:
    """c1, which had the ticket a second later, did not begin before it."""
    s.add(("7-1", "a"))
    s.read()
    s.over("7-1")
    s.ran("c3:3", ("5-1", "a", 10 * _S, 15_001_000, 15_002_000), record="10010-1")
    s.ran("c1:1", ("7-1", "a", 11 * _S, 11_001_000, 11_002_000), record="11010-1")


@fault(clock_wrong="c3:3")
def a_clock_back(s: Seeder, link: Link) -> None:
    s.ran("c3:3", ("5-1", "a", 10 * _S, 5_001_000, 5_002_000), record="10010-1")


@fault(clock_wrong="c3:3")
def a_clock_that_was_set_while_it_ran(s: Seeder, link: Link) -> None:
    """Right at first, and 2 s back later."""
    s.add(("7-1", "a"))
    s.read()
    s.over("7-1")
    s.ran("c3:3", ("5-1", "a", 10 * _S, 10_001_000, 10_002_000), record="10002-1")
    s.ran("c3:3", ("7-1", "a", 20 * _S, 18_001_000, 18_002_000), record="20003-1")


@fault()
def a_clock_within_the_tolerance(s: Seeder, link: Link) -> None:
    s.ran("c3:3", ("5-1", "a", 10 * _S, 9_601_000, 9_602_000), record="10010-1")


# ---- attempts --------------------------------------------------------------------------------------------------------


@fault()
def given_up_parked_and_redriven(s: Seeder, link: Link) -> None:
    """Its letter is gone, and it is counted from 1 on again, by an owner that comes after."""
    fence = 700 * FENCES_PER_MS
    failed = [("5-1", "a", 5, 500 + 2 * n, 501 + 2 * n, "failed", n + 1) for n in range(LIMITS.attempts)]
    s.ran("c1:1", *failed, record="600-1")
    again = [("5-1", "a", fence, 700_100, 700_110, "failed", 1), ("5-1", "a", fence, 700_120, 700_130, "done", 2)]
    s.ran("c1:1", *again, record="701-1")


@fault()
def called_later_again_and_again(s: Seeder, link: Link) -> None:
    """It is allowed, and so is a start of which nobody could tell: its owner's machine was lost."""
    s.ran("c1:1", *(("5-1", "a", 5, 500 + 2 * n, 501 + 2 * n, "retry_later") for n in range(20)))
    s.ran("c1:1", ("5-1", "a", 5, 540, 550))
