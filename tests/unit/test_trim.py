"""What may be cut: never what somebody needs, and nothing at all while somebody is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from usher.common.doctor.judgements import MemoryUse
from usher.common.protocol.stream_id import ZERO, Span, from_rank, rank
from usher.master.policy.trim import (
    Cut,
    Nothing,
    Refused,
    Retention,
    RetentionFacts,
    RetentionRow,
    decide,
    readers,
)

SPAN = Span(b"10-0", b"100-0")


def _facts(**changed: Any) -> RetentionFacts:
    return RetentionFacts(**({"span": SPAN, "groups": [], "checkpoints": [], "archived": None} | changed))


def _group(delivered: bytes, oldest: bytes | None = None, name: str = "g") -> tuple[str, bytes, bytes | None]:
    return name, delivered, oldest


def _checkpoint(last_id: bytes | None, name: str = "c") -> tuple[str, bytes | None, int]:
    return name, last_id, 0


def _floor(facts: RetentionFacts, **options: Any) -> bytes:
    decision = decide(facts, **options)
    assert isinstance(decision, Cut), decision
    return decision.floor


def test_the_neediest_reader_decides_and_is_named() -> None:
    facts = _facts(
        groups=[_group(b"90-0"), _group(b"80-0", b"70-0", "h")], checkpoints=[_checkpoint(b"60-0")], archived=b"65-0"
    )
    decision = decide(facts, archived_only=True)
    assert isinstance(decision, Cut)
    assert (decision.floor, decision.because.kind, decision.because.name) == (b"60-0", "checkpoint", "c")
    assert [reader.keeps_from for reader in readers(facts, archived_only=True)] == [b"60-0", b"65-0", b"70-0", b"90-0"]
    assert [reader.kind for reader in readers(facts)] == ["checkpoint", "group", "group"]


def test_where_a_lost_group_would_begin_again_is_kept() -> None:
    groups = [_group(b"90-0"), _group(b"95-0", name="h")]
    assert _floor(_facts(groups=groups, saved=[("g", b"80-0"), ("h", b"70-0")])) == b"70-0"


def test_a_checkpoint_at_the_very_end_or_just_below_the_first_entry_is_not_lost() -> None:
    assert _floor(_facts(checkpoints=[_checkpoint(b"100-0")])) == b"100-0"
    assert isinstance(decide(_facts(checkpoints=[_checkpoint(b"9-18446744073709551615")])), Nothing)


def test_nobody_reads() -> None:
    assert isinstance(decide(_facts()), Nothing)
    assert isinstance(decide(_facts(archived=b"50-0"), archived_only=True), Nothing), "an archive alone is no reader"
    assert isinstance(decide(_facts(span=None)), Nothing)
    assert isinstance(decide(_facts(span=Span(None, b"100-0"), groups=[_group(b"100-0")])), Nothing)


def test_an_archive_counts_only_where_it_is_asked_for_and_must_be_there_then() -> None:
    groups = [_group(b"90-0")]
    assert _floor(_facts(groups=groups, archived=b"30-0")) == b"90-0", "one that was made once keeps nothing for ever"
    assert _floor(_facts(groups=groups, archived=b"101-0")) == b"90-0"
    assert _floor(_facts(groups=groups, archived=b"30-0"), archived_only=True) == b"30-0"
    assert _floor(_facts(groups=groups, archived=b"100-0"), archived_only=True) == b"90-0", "all is archived"
    assert isinstance(decide(_facts(groups=groups), archived_only=True), Nothing)


def test_what_is_wished_gives_way_to_memory_and_what_is_needed_does_not() -> None:
    """By default entries of a day are kept, and what is not archived, until half of the memory is used."""
    retention = Retention(keep_s=0.06, memory_share=0.5, heeds_archive=True)
    facts = _facts(groups=[_group(b"90-0", b"70-0")], archived=b"30-0")
    assert _floor(facts, wished=retention.wishes(facts, 100)) == b"30-0"
    assert _floor(facts, wished=retention.wishes(facts._replace(archived=None), 100)) == b"40-0"
    assert _floor(facts._replace(archived=b"101-0"), wished=retention.wishes(facts, 100)) == b"30-0"
    assert [retention.gives_way(MemoryUse(used, 100, True)) for used in (49, 50, 200)] == [False, True, True]
    assert not retention.gives_way(None)
    assert _floor(facts) == b"70-0"
    assert not Retention().gives_way(MemoryUse(99, 100, True))


def test_ids_ahead_of_the_clock_are_kept_for_their_age_and_that_is_told() -> None:
    hour = 3_600_000
    retention, ahead = Retention(keep_s=60.0), b"%d-0" % (1000 * hour)
    facts = _facts(groups=[_group(ahead)], span=Span(ahead, b"%d-1" % (1000 * hour)))
    decision = decide(facts, wished=retention.wishes(facts, 2 * hour))
    assert isinstance(decision, Nothing)
    assert "is ahead of Redis' clock" in retention.held_back(facts, decision, 2 * hour)


def test_who_keeps_entries_for_long_is_told() -> None:
    hour = 3_600_000
    retention, last = Retention(keep_s=24 * 3600.0), b"%d-0" % (40 * hour)
    span = Span(b"%d-0" % hour, last)

    def told(decision: Cut | Nothing | Refused, span: Span | None = span) -> str:
        return retention.held_back(_facts(span=span), decision, 40 * hour)

    def kept_from(hours: float) -> Cut:
        return Cut(b"1-0", RetentionRow("group", "g", b"%d-0" % (hours * hour), "has this entry pending"))

    assert told(kept_from(14)) == "group g has this entry pending (50400000-0)"
    assert told(Nothing("it", kept_from(14).because)) == "group g has this entry pending (50400000-0)"
    assert told(kept_from(15.5)) == "", "that is what retention keeps too"
    assert told(kept_from(14), Span(b"1-0", b"%d-0" % (14 * hour))) == "", "nothing lies above it: it keeps nothing"
    assert (told(Nothing("nobody reads")), told(kept_from(14), None)) == ("", "")
    assert told(Refused(("group h is gone", "and more"))) == "nothing is cut: group h is gone; and more"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"checkpoints": [_checkpoint(b"101-0")]}, "above the stream's last id"),
        ({"checkpoints": [_checkpoint(b"9-0")]}, "below the first entry"),
        ({"checkpoints": [_checkpoint(b"9-18446744073709551614")]}, "below the first entry"),
        ({"checkpoints": [_checkpoint(None)]}, "cannot be read"),
        ({"saved": [("h", b"50-0")]}, "group h is gone"),
        ({"saved": [("a b", b"50-0")]}, "`usher trim --forget-group 'a b'`"),
        ({"archived": b"101-0"}, "`usher trim --forget-archive`"),
    ],
)
def test_a_lost_reader_stops_everything(changed: dict[str, Any], told: str) -> None:
    decision = decide(_facts(groups=[_group(b"90-0")], **changed), archived_only="archived" in changed)
    assert isinstance(decision, Refused)
    assert told in " ".join(decision.problems)


_IDS = st.builds(lambda ms, seq: b"%d-%d" % (ms, seq), st.integers(1, 30), st.integers(0, 3))


@given(
    first=_IDS,
    groups=st.lists(st.tuples(_IDS, st.none() | _IDS), max_size=3),
    checkpoints=st.lists(_IDS | st.just(ZERO), max_size=3),
    archived=st.none() | _IDS,
    archived_only=st.booleans(),
    keep_ms=st.none() | st.integers(0, 40),
)
def test_a_cut_is_never_above_anybodys_need(
    first: bytes,
    groups: list[tuple[bytes, bytes | None]],
    checkpoints: list[bytes],
    archived: bytes | None,
    archived_only: bool,
    keep_ms: int | None,
) -> None:
    facts = _facts(
        span=Span(first, b"40-0"),
        groups=[_group(delivered, oldest) for delivered, oldest in groups],
        checkpoints=[_checkpoint(last_id, str(at)) for at, last_id in enumerate(checkpoints)],
        archived=archived,
    )
    wished = [] if keep_ms is None else Retention(keep_ms / 1000, heeds_archive=True).wishes(facts, 40)
    decision = decide(facts, archived_only=archived_only, wished=wished)
    if isinstance(decision, Cut):
        floor = rank(decision.floor)
        assert floor > rank(first)
        needs = [delivered for delivered, _ in groups] + [oldest for _, oldest in groups if oldest] + checkpoints
        needs += [archived] if archived and archived_only else []
        assert all(floor <= rank(need) for need in needs)
        assert floor in map(rank, [*needs, *(one.keeps_from for one in wished)])
        assert from_rank(floor) == decision.floor


@pytest.mark.parametrize(
    ("changed", "floor"),
    [
        ({"groups": [_group(b"50-0")]}, b"50-0"),
        ({"groups": [_group(b"50-0"), _group(b"50-0", name="a"), _group(b"60-0", name="h")]}, b"50-0"),
        ({"groups": [_group(b"50-0"), _group(b"60-0", b"40-0", "h")]}, b"40-0"),
        ({"groups": [_group(b"50-0", b"40-0")]}, b"40-0"),
        ({"groups": [_group(b"50-0")], "checkpoints": [_checkpoint(b"10-0")]}, None),
        ({"groups": [_group(b"50-0")], "archived": b"30-0"}, b"30-0"),
        ({"groups": [_group(b"50-0")], "archived": None}, None),
        ({"groups": [_group(b"60-0", name="h")]}, None),
        ({"groups": [_group(b"60-0", name="h")], "saved": [("g", b"40-0")]}, None),
        ({"groups": [_group(b"60-0", name="h"), _group(b"101-0")]}, None),
        ({"groups": [_group(b"100-0")]}, b"100-0"),
        ({"groups": [_group(b"50-0")], "span": None}, None),
        ({"groups": [_group(b"50-0")], "span": Span(None, b"100-0")}, None),
        ({"groups": []}, None),
        ({"groups": [_group(b"50-0"), _group(b"40-0", name="h")], "saved": [("h", b"40-0")]}, None),
    ],
)
def test_of_a_source_only_what_was_gathered_goes(changed: dict[str, Any], floor: bytes | None) -> None:
    facts = _facts(**({"archived": b"100-0", "saved": [("g", b"100-0")]} | changed))
    decision = decide(facts, archived_only=True, gathered_by="g")
    assert (decision.floor if isinstance(decision, Cut) else None) == floor
    assert not isinstance(decision, Refused)
