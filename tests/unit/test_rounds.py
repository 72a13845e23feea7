"""Whose turn it is among the sources."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from usher.common.protocol.sources import SHARDS, shard_of
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


def test_a_flood_of_news_does_not_keep_others_from_being_looked_at() -> None:
    quiet = [b"q%d" % number for number in range(100)]
    of = rounds(*quiet)
    of.changed([b"s%d" % number for number in range(200)])
    sources = taken(of).sources
    assert (len(sources), len(set(sources) & set(quiet))) == (64, 8)
    assert len(taken(rounds(*quiet)).sources) == 64, "all of a call is theirs when there are no news"


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


def test_a_stream_that_is_gone_is_forgotten_unless_it_is_listed() -> None:
    of = rounds(b"a", b"b")
    of.answered(taken(of), [told(TurnOutcome.GONE)] * 2, frozenset([b"b"]))
    assert of.known == 1
    of.sweep()
    assert taken(of).sources == (b"b",)


def test_what_was_doubted_is_forgotten_unless_it_was_heard_of_or_is_ours_or_listed() -> None:
    of = rounds(b"a", b"b", b"c", b"d", b"e")
    of.hold(frozenset([shard_of(b"a")]))
    of.doubt(frozenset([b"e"]))
    of.found([b"c"])
    of.changed([b"d"])
    of.forget_doubted()
    assert of.known == 4
    assert of.found([b"b"]) == 1, "it had been forgotten"


def test_what_becomes_ours_while_it_is_doubted_is_not_forgotten() -> None:
    of = rounds(b"a", b"b")
    of.hold(frozenset())
    of.doubt(frozenset())
    of.hold(frozenset([shard_of(b"a")]))
    of.forget_doubted()
    assert taken(of).sources == (b"a",)
    of.hold(frozenset())
    of.doubt(frozenset())
    of.hold(ALL)
    of.answered(taken(of), [told(TurnOutcome.GONE)])
    of.forget_doubted()
    assert of.known == 0


def test_only_our_shards_have_turns_and_a_shard_that_comes_back_is_looked_at() -> None:
    of = rounds(b"a", b"b")
    of.answered(taken(of), [told(TurnOutcome.OVER)] * 2)
    assert shard_of(b"a") != shard_of(b"b")
    of.hold(ALL - {shard_of(b"a")})
    of.changed([b"a", b"b"])
    turn = taken(of)
    assert turn.sources == (b"b",) and of.mine == [b"b"]
    of.answered(turn, [told(TurnOutcome.OVER)])
    assert of.hold(ALL)
    assert not of.hold(ALL), "none of them is new"
    assert taken(of).sources == (b"a",)


def test_a_key_that_a_pattern_meets_and_that_is_no_stream_is_forgotten_and_no_trouble() -> None:
    of = rounds(b"text", b"listed")
    of.answered(taken(of), [told(TurnOutcome.NOT_A_STREAM)] * 2, frozenset([b"listed"]))
    assert (of.known, list(of.troubles)) == (1, [b"listed"])
    of.sweep()
    assert taken(of).sources == (b"listed",)
    of.changed([b"text"])
    of.answered(taken(of), [told(TurnOutcome.OVER, 1)])
    assert of.known == 2, "it became a stream"


def test_troubles_are_told_by_source_until_they_are_over() -> None:
    of = rounds(b"a", b"b")
    of.answered(taken(of), [told(TurnOutcome.AHEAD), told(TurnOutcome.OVER)])
    assert of.troubles == {b"a": told(TurnOutcome.AHEAD)}
    of.changed([b"a"])
    of.answered(taken(of), [told(TurnOutcome.OVER, 1)])
    assert of.troubles == {}
    of.changed([b"a"])
    of.answered(taken(of), [told(TurnOutcome.AHEAD)])
    of.hold(frozenset())
    assert of.troubles == {}, "it is another master's to tell"


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


def swept(*sources: bytes) -> Rounds:
    """They were all looked at, and wait for the next look that nobody had a reason for."""
    of = rounds(*sources)
    of.answered(taken(of), [told(TurnOutcome.OVER)] * len(sources))
    of.sweep()
    return of


def test_what_a_sweep_found_is_told_once_however_many_turns_it_takes() -> None:
    of = swept(b"a")
    assert of.answered(taken(of), [told(TurnOutcome.MORE, 500)]) == [b"a"]
    assert of.answered(taken(of), [told(TurnOutcome.OVER, 1)]) == []


def test_a_sweep_that_comes_before_the_former_one_is_over_still_finds_what_nobody_said() -> None:
    of = swept(b"a", b"b")
    of.sweep()
    assert of.answered(taken(of), [told(TurnOutcome.OVER, 1)] * 2) == [b"a", b"b"]


def test_what_a_sweep_was_to_look_at_has_a_reason_once_the_connection_is_a_new_one() -> None:
    of = swept(b"a", b"b")
    of.look_at_all()
    assert of.answered(taken(of), [told(TurnOutcome.OVER, 1)] * 2) == []


def test_what_a_sweep_was_to_look_at_has_a_reason_once_its_reply_was_lost() -> None:
    of = swept(b"a", b"b")
    of.again(taken(of))
    assert of.answered(taken(of), [told(TurnOutcome.OVER, 1)] * 2) == []


def test_what_may_have_more_to_cut_is_told_once_and_what_is_quiet_never_again() -> None:
    of = rounds(b"a", b"b", b"c")
    assert sorted(of.grown()) == [b"a", b"b", b"c"], "new to us"
    of.answered(taken(of), [told(TurnOutcome.OVER, 5), told(TurnOutcome.OVER), told(TurnOutcome.FULL)])
    assert (of.grown(), of.grown()) == ([b"a"], [])
    of.again(taken(of))
    assert of.grown() == [b"c"], "nobody knows what was moved"
    of.look_at_all()
    of.sweep()
    of.answered(taken(of), [told(TurnOutcome.OVER)] * 3)
    assert of.grown() == []


def test_only_what_is_known_and_ours_has_more_to_cut_and_all_of_a_shard_that_was_taken_over() -> None:
    of = rounds(b"a", b"b", b"c")
    of.answered(taken(of), [told(TurnOutcome.GONE), told(TurnOutcome.OVER, 1), told(TurnOutcome.OVER)])
    assert not of.holds(b"a") and of._grown == {b"b", b"c"}, (
        "names of what is gone would be kept for ever where nobody cuts"
    )
    of.hold(ALL - {shard_of(b"b")})
    assert (of.holds(b"b"), of.grown()) == (False, [b"c"])
    of.hold(ALL)
    assert (of.holds(b"b"), of.grown()) == (True, [b"b"])
    of.hold(frozenset())
    of.doubt(frozenset())
    of.forget_doubted()
    assert of._grown == set()
