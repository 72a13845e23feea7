"""Lanes with suspects: one at a time beside the others, or alone; and nothing is forgotten over it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.unit.test_lanes import Entry, entries, filled, numbers, taken
from usher.consumer.policy.lanes import Lane, LaneBoard
from usher.consumer.policy.quarantine import Isolation

ONE, ALONE = Isolation.ONE_SUSPECT, Isolation.ALONE


def set_apart(board: LaneBoard[Entry], isolation: Isolation) -> Lane[Entry]:
    """The next lane turns out to begin with a suspect."""
    lane = taken(board)
    board.isolate(lane, lane.queue.popleft(), isolation)
    return lane


def tickets(board: LaneBoard[Entry]) -> list[bytes]:
    """All that can be taken now, in order."""
    found = []
    while (lane := board.take()) is not None:
        found.append(lane.ticket)
    return found


class TestOneSuspect:
    def test_it_runs_beside_the_others_and_the_next_one_after_it(self) -> None:
        board = filled(A=entries(1), B=entries(2), C=entries(3))
        a, b = set_apart(board, ONE), set_apart(board, ONE)
        assert [board.look(ticket)[2] for ticket in (b"A", b"B", b"C")] == [True, True, False], (
            "people see who is apart"
        )
        assert tickets(board) == [b"C", b"A"]
        assert (a.isolation, b.isolation) == (ONE, Isolation.TOGETHER)
        a.queue.clear()
        board.release(a)
        assert taken(board) is b
        assert b.isolation is ONE
        assert numbers(b.queue) == [2]

    def test_suspects_run_in_the_order_in_which_they_were_set_apart(self) -> None:
        board = filled(A=entries(1), B=entries(2), C=entries(3))
        for _ in range(3):
            set_apart(board, ONE)
        for ticket in (b"A", b"B", b"C"):
            lane = taken(board)
            assert lane.ticket == ticket
            lane.queue.clear()
            board.release(lane)

    def test_it_leaves_by_any_way_a_lane_is_left(self) -> None:
        for leave in (
            lambda board, lane: board.release(lane),
            lambda board, lane: board.retry(lane, lane.queue.popleft(), 10.0),
            lambda board, lane: (board.hold(lane), board.resume(lane)),
            lambda board, lane: (board.forget(lane.ticket, 1), board.release(lane)),
            lambda board, lane: (board.forget(lane.ticket, 1), board.retry(lane, Entry(b"1-0"), 1.0)),
        ):
            board = filled(A=entries(1), B=entries(2))
            a, b = set_apart(board, ONE), set_apart(board, ONE)
            assert taken(board) is a
            leave(board, a)
            assert a.isolation is Isolation.TOGETHER
            assert b.isolation is ONE
            assert b.ticket in tickets(board)

    def test_while_it_is_held_no_other_suspect_runs(self) -> None:
        board = filled(A=entries(1), B=entries(2))
        set_apart(board, ONE)
        set_apart(board, ONE)
        a = taken(board)
        board.hold(a)
        assert board.take() is None


class TestAlone:
    def test_it_waits_until_nothing_runs_and_nothing_starts_meanwhile(self) -> None:
        board = filled(RUNS=entries(1), A=entries(2), B=entries(3))
        runs = taken(board)
        a = set_apart(board, ALONE)
        board.add(b"C", entries(4))
        board.admit_isolated(0.0)
        assert board.take() is None
        runs.queue.clear()
        board.release(runs)
        board.admit_isolated(0.0)
        assert taken(board) is a
        assert a.isolation is ALONE
        board.admit_isolated(0.0)
        assert board.take() is None, "it is alone"
        a.queue.clear()
        board.release(a)
        assert tickets(board) == [b"B", b"C"]

    def test_it_is_alone_until_redis_has_what_became_of_it(self) -> None:
        board = filled(A=entries(1), B=entries(2))
        a = set_apart(board, ALONE)
        assert taken(board) is a
        message = a.queue.popleft()
        board.hold(a)
        board.admit_isolated(0.0)
        assert (board.take(), board.running) == (None, 0)
        board.retry_held(a, message, 5.0)
        assert tickets(board) == [b"B"]
        assert board.wake_due(5.0) is None
        assert tickets(board) == [b"A"]

    def test_what_it_waits_for_may_never_happen_and_keeps_nobody_waiting(self) -> None:
        """Redis will not take its dead letter."""
        board = filled(A=entries(1, 2), B=entries(3))
        a = set_apart(board, ALONE)
        assert taken(board) is a
        a.queue.popleft()
        board.hold(a)
        board.end_isolation(a)
        assert tickets(board) == [b"B"], "A is still held"
        board.resume(a)
        assert tickets(board) == [b"A"]

    def test_several_are_alone_one_after_another(self) -> None:
        board = filled(A=entries(1), B=entries(2), C=entries(3))
        a = set_apart(board, ALONE)
        assert taken(board) is a
        a.queue.clear()
        board.release(a)
        b = set_apart(board, ALONE)
        assert (b.ticket, taken(board)) == (b"B", b)
        board.admit_isolated(0.0)
        assert board.take() is None
        b.queue.clear()
        board.release(b)
        assert tickets(board) == [b"C"]

    def test_a_suspect_that_needs_more_than_it_has_is_set_apart_again(self) -> None:
        board = filled(A=entries(1, 2), B=entries(3))
        set_apart(board, ONE)
        b, a = taken(board), taken(board)
        a.queue.popleft()
        board.isolate(a, a.queue.popleft(), ALONE)
        board.admit_isolated(0.0)
        assert board.take() is None, "B runs"
        board.hold(b)
        board.admit_isolated(0.0)
        assert taken(board) is a
        assert (a.isolation, numbers(a.queue)) == (ALONE, [2])


class TestPatience:
    def test_what_never_ends_does_not_stop_the_others_for_ever(self) -> None:
        board = filled(HANGS=entries(1), A=entries(2), B=entries(3), C=entries(4))
        taken(board)
        set_apart(board, ALONE)
        board.admit_isolated(100.0)
        board.admit_isolated(130.0)
        assert board.take() is None
        board.admit_isolated(131.0)
        assert tickets(board) == [b"B", b"C"]
        board.add(b"D", entries(5))
        board.admit_isolated(132.0)
        assert tickets(board) == [b"D"], "nobody wants to be alone for now"
        assert board.wake_due(131.0) == 251.0
        board.wake_due(251.0)
        assert tickets(board) == [b"A"], "and is set apart again"

    def test_it_grows_where_handlers_take_longer_and_is_as_before_once_it_was_worth_it(self) -> None:
        board = filled(RUNS=entries(1), A=entries(2))
        runs = taken(board)
        a = set_apart(board, ALONE)
        for began_s, patience_s in ((100.0, 30.0), (300.0, 60.0), (600.0, 120.0)):
            board.wake_due(began_s)
            if board.take() is a:
                board.isolate(a, a.queue.popleft(), ALONE)
            board.admit_isolated(began_s)
            board.admit_isolated(began_s + patience_s)
            assert board.wake_due(began_s + patience_s) is None, "it still waits for silence"
            board.admit_isolated(began_s + patience_s + 1)
            assert board.wake_due(began_s + patience_s + 1) == began_s + patience_s + 121, "the others have their turn"
        board.wake_due(1000.0)
        assert board.take() is a
        board.isolate(a, a.queue.popleft(), ALONE)
        board.admit_isolated(1000.0)
        board.hold(runs)
        board.admit_isolated(1100.0)
        assert taken(board) is a
        assert board._patience_s == 30.0

    def test_none_of_it_is_used_up_while_nobody_wants_to_be_alone(self) -> None:
        board = filled(RUNS=entries(1), A=entries(2))
        taken(board)
        a = taken(board)
        for now_s in (0.0, 1000.0):
            board.admit_isolated(now_s)
        board.isolate(a, a.queue.popleft(), ALONE)
        board.admit_isolated(1001.0)
        board.admit_isolated(1031.0)
        assert board.wake_due(1031.0) is None, "it still waits for silence"
        board.admit_isolated(1032.0)
        assert board.wake_due(1032.0) == 1152.0

    def test_the_wait_is_counted_anew_for_each(self) -> None:
        board = filled(RUNS=entries(1), A=entries(2), B=entries(3), C=entries(4))
        runs = taken(board)
        a = set_apart(board, ALONE)
        board.admit_isolated(100.0)
        board.hold(runs)
        board.admit_isolated(120.0)
        assert taken(board) is a
        board.admit_isolated(140.0)
        a.queue.clear()
        board.release(a)
        assert taken(board).ticket == b"B"
        assert set_apart(board, ALONE).ticket == b"C"
        board.admit_isolated(150.0)
        board.admit_isolated(180.0)
        assert board.wake_due(180.0) is None, "it still waits for silence"
        board.admit_isolated(181.0)
        assert board.wake_due(181.0) == 301.0


class TestQuiet:
    @pytest.mark.parametrize("isolation", [ONE, ALONE])
    def test_who_is_apart_is_quiet_and_can_be_given_back(self, isolation: Isolation) -> None:
        board = filled(RUNS=entries(1), A=entries(2, 3), B=entries(4))
        runs = taken(board)
        set_apart(board, isolation)
        assert board.quiet() == {b"A": [b"2-0", b"3-0"], b"B": [b"4-0"]}
        board.drop_quiet([b"A"])
        assert board.quiet() == {b"B": [b"4-0"]}
        assert tickets(board) == [b"B"], "nobody wants to be alone any more"
        board.hold(runs)

    def test_what_was_about_to_run_alone_leaves_its_place(self) -> None:
        board = filled(A=entries(1), B=entries(2), C=entries(3))
        set_apart(board, ALONE)
        board.drop_quiet([b"A"])
        assert tickets(board) == [b"B", b"C"]
        assert b"A" not in board.lanes


class Quarantine:
    """A board at random: lanes of one message each, some of them suspects of either kind."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.board: LaneBoard[Entry] = LaneBoard()
        self.kinds: dict[int, Isolation] = {}
        self.running: list[tuple[Lane[Entry], Entry, Isolation]] = []
        self.held: list[tuple[Lane[Entry], Entry]] = []
        self.done = 0
        self.now_s = 0.0

    def add(self) -> None:
        number = len(self.kinds) + 1
        self.kinds[number] = Isolation(self.rng.choice([0, 0, 0, 0, 1, 1, 2]))
        self.board.add(b"T%d" % self.rng.randrange(6), entries(number))

    def take(self) -> None:
        if not self.board.ready:
            self.board.admit_isolated(self.now_s)
        lane = self.board.take()
        if lane is None:
            return
        if lane.early:
            lane.merge_early()
        if not lane.queue:
            self.board.release(lane)
            return
        message = lane.queue.popleft()
        asked = self.kinds[message.number]
        if asked > lane.isolation:
            self.board.isolate(lane, message, asked)
            return
        self.running.append((lane, message, asked))
        kinds = [kind for _, _, kind in self.running]
        assert sum(kind is not Isolation.TOGETHER for kind in kinds) <= 1
        assert Isolation.ALONE not in kinds or len(kinds) == 1
        assert all(self.kinds[held.number] is not Isolation.ALONE for _, held in self.held), (
            "its result is not in Redis yet"
        )

    def end(self) -> None:
        if not self.running:
            return
        lane, message, kind = self.running.pop(self.rng.randrange(len(self.running)))
        if kind is Isolation.ALONE or self.rng.random() < 0.2:
            self.board.hold(lane)
            self.held.append((lane, message))
            return
        self.kinds[message.number] = Isolation.TOGETHER
        if self.rng.random() < 0.7:
            self.done += 1
            self.board.done([message.stream_id])
            self.board.release(lane)
        else:
            self.board.retry(lane, message, self.now_s + 1.0)

    def let_go(self) -> None:
        if not self.held:
            return
        lane, message = self.held.pop(0)
        self.kinds[message.number] = Isolation.TOGETHER
        if self.rng.random() < 0.5:
            self.done += 1
            self.board.done([message.stream_id])
            self.board.resume(lane)
        else:
            self.board.retry_held(lane, message, self.now_s + 1.0)

    def pass_time(self) -> None:
        self.now_s += 1.0
        self.board.wake_due(self.now_s)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_suspects_are_apart_and_all_is_done_in_the_end(seed: int) -> None:
    quarantine = Quarantine(seed)
    moves: list[Callable[[], None]] = [
        quarantine.add,
        quarantine.take,
        quarantine.take,
        quarantine.end,
        quarantine.let_go,
        quarantine.pass_time,
    ]
    for _ in range(400):
        quarantine.rng.choice(moves)()
    for _ in range(5000):
        if quarantine.done == len(quarantine.kinds):
            break
        for move in moves[1:]:
            move()
    assert quarantine.done == len(quarantine.kinds)
    assert not quarantine.board.lanes
    assert quarantine.board.ready is quarantine.board._queue
    assert quarantine.board.running == 0
