"""Whose turn it is among the sources."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from usher.common.protocol.sources import SHARDS
from usher.master.policy.fair_queue import Rounds, Turn, TurnOutcome, TurnResult

ALL = frozenset(range(SHARDS))


def told(outcome: TurnOutcome, moved: int = 0) -> TurnResult:
    return TurnResult(outcome, moved, "")


def rounds(*sources: bytes, batch: int = 1000) -> Rounds:
    made = Rounds(batch)
    made.hold(ALL)
    made.found(sources)
    return made


def taken(of: Rounds) -> Turn:
    turn = of.take()
    assert turn is not None
    return turn


def test_a_flood_has_its_turn_behind_everybody_who_has_news() -> None:
    names = [b"s%d" % number for number in range(200)]
    of = rounds(b"flood")
    of.answered(taken(of), [told(TurnOutcome.MORE, 500)])
    of.changed(names)
    seen: list[bytes] = []
    while b"flood" not in seen[1:]:
        turn = taken(of)
        seen += turn.sources
        of.answered(
            turn, [told(TurnOutcome.MORE if name == b"flood" else TurnOutcome.OVER, 1) for name in turn.sources]
        )
    assert set(names) <= set(seen)


def test_the_more_wait_the_less_each_gets_but_never_too_little() -> None:
    def quantum(count: int) -> int:
        of = rounds()
        of.changed(b"s%d" % number for number in range(count))
        return taken(of).quantum

    assert [quantum(count) for count in (1, 10, 50, 1000)] == [500, 100, 20, 8]


def test_who_found_the_work_stream_full_is_the_next_one() -> None:
    of = rounds()
    of.changed([b"a", b"b", b"c"])
    turn = taken(of)
    of.changed([b"d"])
    of.answered(turn, [told(TurnOutcome.MORE, 9), told(TurnOutcome.FULL), told(TurnOutcome.FULL)])
    assert taken(of).sources == (b"b", b"c", b"d", b"a")


def test_a_call_of_which_nobody_knows_is_made_again_first() -> None:
    of = rounds()
    of.changed([b"a", b"b"])
    turn = taken(of)
    of.changed([b"c", b"b"])
    of.again(turn)
    assert taken(of).sources == (b"a", b"c", b"b")


def test_a_change_during_the_turn_is_not_forgotten() -> None:
    of = rounds(b"a")
    turn = taken(of)
    of.changed([b"a"])
    of.answered(turn, [told(TurnOutcome.GONE)])
    assert taken(of).sources == (b"a",), "it was made again while Redis said that it is gone"


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("changed"), st.sets(st.integers(0, 99), max_size=40)),
            st.tuples(st.just("sweep"), st.just(frozenset())),
            st.tuples(st.just("turn"), st.sets(st.integers(0, 99))),
            st.tuples(st.just("again"), st.just(frozenset())),
        ),
        max_size=30,
    )
)
def test_whatever_happens_every_change_gets_a_turn_that_begins_after_it(steps: list[tuple[str, set[int]]]) -> None:
    of = rounds()
    open_changes: set[bytes] = set()
    for kind, numbers in steps:
        names = [b"s%d" % number for number in numbers]
        if kind == "changed":
            of.changed(names)
            open_changes.update(names)
        elif kind == "sweep":
            of.sweep()
        elif (turn := of.take()) is not None:
            if kind == "again":
                of.again(turn)
                continue
            assert len(set(turn.sources)) == len(turn.sources) <= 64
            more = {name for name in turn.sources if name in names}
            open_changes.difference_update(set(turn.sources) - more)
            open_changes.update(more)
            of.answered(turn, [told(TurnOutcome.MORE if name in more else TurnOutcome.OVER) for name in turn.sources])
    while (turn := of.take()) is not None:
        open_changes.difference_update(turn.sources)
        of.answered(turn, [told(TurnOutcome.OVER)] * len(turn.sources))
    assert not open_changes


def test_what_a_sweep_finds_is_told_unless_somebody_says_it_meanwhile() -> None:
    of = rounds(b"a", b"b", b"c")
    assert of.answered(taken(of), [told(TurnOutcome.OVER, 1)] * 3) == [], "they were looked at for a reason"
    of.sweep()
    of.changed([b"c"])
    turn = taken(of)
    of.changed([b"b"])
    assert of.answered(turn, [told(TurnOutcome.OVER, 1)] * 3) == [b"a"]
    of.answered(taken(of), [told(TurnOutcome.OVER)])
    of.look_at_all()
    assert of.answered(taken(of), [told(TurnOutcome.OVER, 1)] * 3) == []
