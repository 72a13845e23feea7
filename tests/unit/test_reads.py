"""Reads of the own pending list bring the bodies of what is wanted, and nothing that is held is delivered again without
need."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from usher.common.protocol.stream_id import rank
from usher.consumer.policy.reads import OwnRead, plan_reads

id_sets = st.sets(st.integers(1, 60), max_size=50)


def ids(numbers: Iterable[int]) -> list[bytes]:
    """Of one millisecond: no id lies between those of two numbers in a row."""
    return [b"7-%d" % number for number in numbers]


def plan(wanted: Iterable[int], held: Iterable[int], highest: int = 0) -> list[OwnRead]:
    held_ids = ids(held)
    return plan_reads(ids(wanted), lambda: held_ids, max(map(rank, [*held_ids, b"7-%d" % highest])))


def brought(reads: list[OwnRead], pending: Iterable[int]) -> list[bytes]:
    """What Redis answers, in the order of the reads."""
    in_order = sorted(ids(pending), key=rank)
    return [entry_id for read in reads for entry_id in [i for i in in_order if rank(i) > rank(read.after)][: read.most]]


def never() -> list[bytes]:
    raise AssertionError("asked for what is held without need")


def test_new_ids_above_all_old_ones_are_one_read_of_just_their_number() -> None:
    assert plan_reads([b"9-1", b"5-10", b"5-9"], never, rank(b"5-8")) == [OwnRead(b"5-8", 3)]
    assert plan_reads([b"1-0"], never, -1) == [OwnRead(b"0-18446744073709551615", 1)]


def test_lower_ids_between_held_ones_are_read_run_by_run() -> None:
    reads = plan([2, 3, 7, 20], held=[1, 5, 6, 9, 30])
    assert [read.most for read in reads] == [2, 1, 1]
    assert brought(reads, [1, 2, 3, 5, 6, 7, 9, 20, 30]) == ids([2, 3, 7, 20])


def test_very_many_runs_are_read_as_one() -> None:
    """A round trip of many commands costs more than bodies read twice."""
    wanted, held = range(1, 101, 2), range(0, 101, 2)
    reads = plan(wanted, held)
    assert len(reads) == 1
    assert set(ids(wanted)) <= set(brought(reads, range(101)))
    assert len(plan(range(1, 33, 2), range(0, 41, 2))) == 16


@given(id_sets.filter(bool), id_sets, st.integers(0, 60))
def test_whatever_is_wanted_comes_and_a_few_runs_bring_nothing_else(
    wanted: set[int], held: set[int], highest: int
) -> None:
    held -= wanted
    reads = plan(wanted, held, highest)
    came = brought(reads, wanted | held)
    assert set(ids(wanted)) <= set(came)
    assert len(came) == len(set(came))
    if len(reads) > 1:
        assert sorted(came, key=rank) == sorted(ids(wanted), key=rank)


@given(id_sets.filter(bool), id_sets, id_sets)
def test_what_is_held_and_was_acknowledged_meanwhile_does_no_harm(
    wanted: set[int], held: set[int], acknowledged: set[int]
) -> None:
    """It is not in the pending list any more; the ledger says so a moment later."""
    held -= wanted
    assert set(ids(wanted)) <= set(brought(plan(wanted, held), wanted | (held - acknowledged)))
