"""Lanes with suspects: they wait apart from the others, nobody waits for them, and nothing is forgotten over it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.unit.test_lanes import Entry, entries, filled, numbers, quiet_ids, taken
from usher.consumer.policy.lanes import Lane, LaneBoard


def set_apart(board: LaneBoard[Entry]) -> Lane[Entry]:
    """The next lane turns out to begin with a suspect."""
    lane = taken(board)
    board.isolate(lane, lane.queue.popleft())
    return lane


def tickets(board: LaneBoard[Entry]) -> list[bytes]:
    """All that can be taken now, in order."""
    found = []
    while (lane := board.take()) is not None:
        found.append(lane.ticket)
    return found


def test_a_suspect_keeps_nobody_waiting_and_waits_for_nobody() -> None:
    board = filled(RUNS=entries(1), A=entries(2), B=entries(3))
    taken(board)
    a = set_apart(board)
    assert board.take_suspect() is a
    assert (board.running, board.running_apart, numbers(a.queue)) == (1, 1, [2])
    assert tickets(board) == [b"B"]
    assert board.take_suspect() is None


def test_suspects_run_in_the_order_in_which_they_were_set_apart() -> None:
    board = filled(A=entries(1), B=entries(2), C=entries(3))
    lanes = [set_apart(board) for _ in range(3)]
    assert [board.look(ticket)[2] for ticket in (b"A", b"B", b"C")] == [True] * 3, "people see who is apart"
    assert [board.take_suspect() for _ in range(3)] == lanes
    assert not board.has_suspects


@pytest.mark.parametrize(
    "leave",
    [
        lambda board, lane: board.release(lane),
        lambda board, lane: board.retry(lane, lane.queue.popleft(), 10.0),
        lambda board, lane: (board.hold(lane), board.resume(lane)),
        lambda board, lane: (board.forget(lane.ticket, 1), board.release(lane)),
        lambda board, lane: (board.forget(lane.ticket, 1), board.retry(lane, Entry(b"1-0"), 1.0)),
        lambda board, lane: board.isolate(lane, lane.queue.popleft()),
    ],
)
def test_it_leaves_by_any_way_a_lane_is_left(leave: Callable[[LaneBoard[Entry], Lane[Entry]], object]) -> None:
    board = filled(A=entries(1))
    a = set_apart(board)
    assert board.take_suspect() is a
    assert a.apart
    leave(board, a)
    assert not a.apart
    assert (board.running, board.running_apart) == (0, 0)


def test_what_comes_after_it_runs_as_ever() -> None:
    board = filled(A=entries(1, 2))
    a = set_apart(board)
    assert board.take_suspect() is a
    a.queue.popleft()
    board.release(a)
    assert taken(board) is a
    assert (numbers(a.queue), board.running) == ([2], 1)


def test_who_waits_apart_is_quiet_and_can_be_given_back_and_who_runs_is_not() -> None:
    board = filled(A=entries(1), B=entries(2, 3), C=entries(4))
    set_apart(board), set_apart(board)
    board.take_suspect()
    assert quiet_ids(board) == {b"B": [b"2-0", b"3-0"], b"C": [b"4-0"]}
    board.drop_quiet([b"B"])
    assert quiet_ids(board) == {b"C": [b"4-0"]}
    assert board.take_suspect() is None
    assert b"B" not in board.lanes


class Quarantine:
    """A board at random: lanes of one message each, some of them suspects."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.board: LaneBoard[Entry] = LaneBoard()
        self.suspects: dict[int, bool] = {}
        self.running: list[tuple[Lane[Entry], Entry]] = []
        self.held: list[Lane[Entry]] = []
        self.done = 0
        self.now_s = 0.0

    def add(self) -> None:
        number = len(self.suspects) + 1
        self.suspects[number] = self.rng.random() < 0.3
        self.board.add(b"T%d" % self.rng.randrange(6), entries(number))

    def take(self) -> None:
        lane = self.board.take()
        if lane is None:
            return
        if (message := self._first(lane)) is not None:
            if self.suspects[message.number]:
                self.board.isolate(lane, message)
            else:
                self.running.append((lane, message))

    def take_suspect(self) -> None:
        lane = self.board.take_suspect()
        if lane is not None and (message := self._first(lane)) is not None:
            self.running.append((lane, message))

    def _first(self, lane: Lane[Entry]) -> Entry | None:
        if lane.early:
            lane.merge_early()
        if not lane.queue:
            self.board.release(lane)
            return None
        return lane.queue.popleft()

    def end(self) -> None:
        if not self.running:
            return
        lane, message = self.running.pop(self.rng.randrange(len(self.running)))
        self.suspects[message.number] = self.rng.random() < 0.1
        if self.rng.random() < 0.3:
            self.board.retry(lane, message, self.now_s + 1.0)
            return
        self.done += 1
        self.board.done([message.stream_id])
        if self.rng.random() < 0.2:
            self.board.hold(lane)
            self.held.append(lane)
        else:
            self.board.release(lane)

    def let_go(self) -> None:
        if self.held:
            self.board.resume(self.held.pop(0))

    def pass_time(self) -> None:
        self.now_s += 1.0
        self.board.wake_due(self.now_s)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_all_is_done_in_the_end(seed: int) -> None:
    quarantine = Quarantine(seed)
    moves: list[Callable[[], None]] = [
        quarantine.add,
        quarantine.take,
        quarantine.take,
        quarantine.take_suspect,
        quarantine.end,
        quarantine.let_go,
        quarantine.pass_time,
    ]
    for _ in range(400):
        quarantine.rng.choice(moves)()
        apart = sum(lane.apart for lane, _ in quarantine.running)
        assert quarantine.board.running_apart == apart
        assert quarantine.board.running == len(quarantine.running) - apart
    for _ in range(5000):
        if quarantine.done == len(quarantine.suspects) and not quarantine.held:
            break
        for move in moves[1:]:
            move()
    assert quarantine.done == len(quarantine.suspects)
    assert not quarantine.board.lanes
    assert (quarantine.board.running, quarantine.board.running_apart) == (0, 0)
