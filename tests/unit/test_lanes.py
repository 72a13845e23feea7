"""Lanes: per ticket in id order and one in flight, nothing forgotten, and nothing that was forgotten on purpose starts
again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from usher.common.protocol.stream_id import rank
from usher.common.redis.replies import HandOver
from usher.consumer.execution.lanes import Lane, Lanes


@dataclass(frozen=True)
class Entry:
    """A message, as far as lanes care."""

    stream_id: bytes
    fence: int = 1

    @property
    def number(self) -> int:
        return int(self.stream_id.partition(b"-")[0])


def entries(*numbers: int) -> list[Entry]:
    return [Entry(b"%d-0" % number) for number in numbers]


def filled(**tickets: list[Entry]) -> Lanes:
    board: Lanes = Lanes()
    for name, messages in tickets.items():
        board.add([(name.encode(), messages)])
    return board


def taken(board: Lanes) -> Lane:
    lane = board.take()
    assert lane is not None
    if lane.early:
        lane.merge_early()
    return lane


def put_off(board: Lanes, due_s: float) -> None:
    """The next lane's first message failed, and is tried again then."""
    lane = taken(board)
    board.retry(lane, lane.queue.popleft(), due_s)


def quiet_ids(board: Lanes) -> dict[bytes, list[bytes]]:
    """The queued ids of the tickets that are quiet."""
    return {ticket: ids for ticket, _, ids, _ in board.close_quiet()}


def numbers(messages: Iterable[Entry]) -> list[int]:
    return [message.number for message in messages]


class TestOrder:
    def test_tickets_are_taken_side_by_side_in_the_order_they_came(self) -> None:
        board = filled(A=entries(5), B=entries(1), C=entries(3))
        assert [taken(board).ticket for _ in range(3)] == [b"A", b"B", b"C"]
        assert board.running == 3

    def test_ids_are_compared_as_numbers(self) -> None:
        board: Lanes = Lanes()
        board.add([(b"T", [Entry(b"9-10")])])
        board.add([(b"T", [Entry(b"10-0")])])
        board.add([(b"T", [Entry(b"9-9")])])
        assert [message.stream_id for message in taken(board).queue] == [b"9-9", b"9-10", b"10-0"]


class TestRelease:
    def test_a_lane_with_more_goes_behind_the_others_and_an_empty_one_is_forgotten(self) -> None:
        board = filled(A=entries(1, 2), B=entries(3))
        lane = taken(board)
        lane.queue.popleft()
        board.release(lane)
        assert [taken(board).ticket for _ in range(2)] == [b"B", b"A"]
        lane.queue.clear()
        board.release(lane)
        assert b"A" not in board.by_ticket
        assert board.running == 1

    def test_a_retry_waits_for_its_time_with_its_whole_ticket(self) -> None:
        board = filled(T=entries(1, 2), U=entries(3))
        lane = taken(board)
        board.retry(lane, lane.queue.popleft(), 10.0)
        assert taken(board).ticket == b"U"
        assert board.wake_due(9.9) == 10.0
        assert board.take() is None
        assert board.wake_due(10.0) is None
        assert numbers(taken(board).queue) == [1, 2]

    def test_retries_are_due_in_the_order_of_their_times_and_of_their_failing(self) -> None:
        board = filled(A=entries(1), B=entries(2), C=entries(3))
        for due_s in (5.0, 3.0, 5.0):
            put_off(board, due_s)
        assert board.wake_due(4.0) == 5.0
        assert board.wake_due(6.0) is None
        assert [taken(board).ticket for _ in range(3)] == [b"B", b"A", b"C"]


class TestForget:
    def test_what_failed_while_its_ticket_was_forgotten_is_not_tried_again_and_what_came_since_is_run(self) -> None:
        board = filled(T=entries(1, 2))
        lane = taken(board)
        failed = lane.queue.popleft()
        board.forget(b"T", 1)
        board.add([(b"T", [Entry(b"3-0", 2)])])
        board.retry(lane, failed, 10.0)
        assert board.unknown([b"1-0"]) == [b"1-0"]
        again = taken(board)
        assert numbers(again.queue) == [3]
        board.retry(again, again.queue.popleft(), 10.0)
        assert board.wake_due(10.0) is None
        assert numbers(taken(board).queue) == [3], "that failure is its own"

    @pytest.mark.parametrize("place", ["queued", "early", "running", "in a call"])
    def test_what_came_under_a_later_fence_stays(self, place: str) -> None:
        """The ticket came back before we heard that another one had had it."""
        board = filled(T=entries(5))
        lane = taken(board)
        [old], new = list(lane.queue), Entry(b"1-0" if place == "early" else b"7-0", 2)
        board.add([(b"T", [new])])
        if place in ("running", "in a call"):
            lane.queue.clear()
        board.forget(b"T", 1)
        if place == "running":
            board.retry(lane, new, 0.0)
        elif place == "in a call":
            board.requeue(lane, [old, new])
            board.release(lane)
        else:
            board.release(lane)
        board.wake_due(0.0)
        again = taken(board)
        assert [*again.queue, *again.early] == [new]
        assert board.held_ids == {new.stream_id} | ({old.stream_id} if place == "running" else set())


class TestQuiet:
    def test_tickets_that_neither_run_nor_are_held_are_quiet_with_all_their_ids_in_order(self) -> None:
        board = filled(RUNS=entries(1, 2), HELD=entries(3, 4), RETRIES=entries(5), READY=entries(8))
        taken(board)
        board.hold(taken(board))
        put_off(board, 99.0)
        board.add([(b"READY", entries(7))])
        board.add([(b"RETRIES", entries(6))])
        assert quiet_ids(board) == {b"READY": [b"7-0", b"8-0"], b"RETRIES": [b"5-0", b"6-0"]}

    def test_what_was_given_back_is_gone_and_the_rest_goes_on(self) -> None:
        board = filled(A=entries(1), B=entries(2), C=entries(3), D=entries(4))
        for due_s in (3.0, 1.0, 2.0):
            put_off(board, due_s)
        board._close({b"B": 0, b"D": 0})
        assert board.unknown([b"1-0", b"2-0", b"3-0", b"4-0"]) == [b"2-0", b"4-0"]
        assert set(board.by_ticket) == {b"A", b"C"}
        assert board.wake_due(2.5) == 3.0
        assert board.wake_due(3.5) is None
        assert [taken(board).ticket for _ in range(2)] == [b"C", b"A"]
        board.add([(b"B", entries(9))])
        assert taken(board).ticket == b"B"


def recalled(board: Lanes, ticket: bytes, *ids: int, fence: int = 1) -> bool:
    """Recall a ticket that had these ids then, and return whether it goes back."""
    part = HandOver(ticket, fence, [entry.stream_id for entry in entries(*ids)])
    return [one[:2] for one in board.close_unstarted([part])] == [(ticket, fence)]


class TestRecall:
    @pytest.mark.parametrize("state", ["runs", "held", "waits", "suspect", "ended", "unread", "other fence"])
    def test_a_ticket_that_was_started_or_is_not_here_stays(self, state: str) -> None:
        board = filled(A=entries(1, 2))
        if state == "unread":
            assert not recalled(board, b"B", 9)
            return
        if state == "other fence":
            assert not recalled(board, b"A", 1, 2, fence=2)
            assert board.take() is board.by_ticket[b"A"]
            return
        lane = taken(board)
        first = lane.queue.popleft()
        if state == "held":
            board.hold(lane)
        elif state == "waits":
            board.retry(lane, first, 5.0)
        elif state == "suspect":
            board.isolate(lane, first)
        elif state == "ended":
            board.release(lane)
        assert not recalled(board, b"A", 1, 2)
        assert board.held_ids == {b"1-0", b"2-0"}
        if state == "ended":
            board.done([b"1-0"])
            assert recalled(board, b"A", 2), "its acknowledgement is answered"


class Consumer:
    """A consumer at random: every move is one that a reader, a runner or an acker makes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.board: Lanes = Lanes()
        self.now_s = 0.0
        self.added: dict[bytes, list[int]] = {}  # not yet started or started, never done
        self.running: list[tuple[Lane, Entry | None]] = []
        self.held: list[tuple[Lane, Entry]] = []
        self.unacknowledged: list[Entry] = []
        self.last_id = 100
        self.fence = 1
        self.ever: set[int] = set()
        self.forgotten: set[int] = set()  # of those that ran when their ticket was forgotten
        self.fences: dict[int, int] = {}
        self.tickets: dict[int, bytes] = {}
        self.given_back: list[tuple[bytes, int, Lane | None]] = []  # not answered yet; with the lane that waits

    def moves(self) -> list[Callable[[], None]]:
        often = [self.hand_over, self.take, self.end, self.end]
        return [
            *often,
            *often,
            *often,
            self.let_go,
            self.let_go,
            self.acknowledge,
            self.pass_time,
            self.pass_time,
            self.forget,
            self.recall,
            self.recall,
            self.answer,
            self.read_on,
        ]

    def hand_over(self) -> None:
        """New ids; sometimes lower ones than before, sometimes ids that are here already."""
        ticket = self.rng.choice([b"A", b"B", b"C", b"D"])
        self.last_id += 10
        low = self.last_id - self.rng.choice([0, 0, 0, 35])
        fresh = {b"%d-0" % number for number in {*range(low, low + self.rng.randint(1, 4)), self.last_id} - self.ever}
        known = self.rng.sample(sorted(self.board.held_ids), min(len(self.board.held_ids), 2))
        unknown = self.board.unknown([*fresh, *known])
        assert set(unknown) == fresh
        if unknown:
            messages = [Entry(entry_id, self.fence) for entry_id in sorted(unknown, key=rank)]
            self.ever.update(numbers(messages))
            self.fences.update((number, self.fence) for number in numbers(messages))
            self.added.setdefault(ticket, []).extend(numbers(messages))
            self.tickets.update((number, ticket) for number in numbers(messages))
            self.board.add([(ticket, messages)])

    def take(self) -> None:
        lane = self.board.take()
        if lane is not None:
            assert all(other is not lane and other.ticket != lane.ticket for other, _ in self.running)
            assert all(other is not lane for other, _ in self.held)
            self.running.append((lane, self.start(lane)))

    def start(self, lane: Lane) -> Entry | None:
        """The next message of a lane: always the lowest that is here."""
        if lane.early:
            lane.merge_early()
        if not lane.queue:
            return None
        lane.forgotten = False  # as the executor does: what is queued now came after that
        message = lane.queue.popleft()
        assert message.number == min(self.added[lane.ticket])
        return message

    def end(self) -> None:
        """A handler ends: done (and the lane goes on, is released, or held), or raised."""
        if not self.running:
            return
        lane, message = self.running.pop(self.rng.randrange(len(self.running)))
        if message is None:
            self.board.release(lane)
            return
        how = self.rng.choice(["goes on", "goes on", "released", "held", "retried", "put off"])
        if how == "put off":
            self.board.hold(lane)
            self.board.close_fence(lane.ticket, message.fence, message.stream_id)
            self.leaves(lane.ticket, message.fence, lane)
            return
        if how == "retried":
            if message.number in self.forgotten:
                self.added[lane.ticket].remove(message.number)
            self.board.retry(lane, message, self.now_s + self.rng.choice([0.0, 1.0, 5.0]))
            return
        self.added[lane.ticket].remove(message.number)
        if how == "held":
            self.board.hold(lane)
            self.held.append((lane, message))
            return
        self.unacknowledged.append(message)
        if how == "goes on":
            self.running.append((lane, self.start(lane)))
        else:
            self.board.release(lane)

    def let_go(self) -> None:
        if self.held:
            lane, message = self.held.pop(0)
            self.board.done([message.stream_id])
            self.board.resume(lane)

    def leaves(self, ticket: bytes, fence: int, lane: Lane | None) -> None:
        """Nothing of the ticket under this fence is to be run here, whatever the inbox names."""
        self.added[ticket] = [number for number in self.added[ticket] if self.fences[number] > fence]
        self.given_back.append((ticket, fence, lane))
        self.fence += 1
        self.board.add([(ticket, [Entry(b"%d-0" % (self.last_id + 1), fence)])])

    def recall(self) -> None:
        """Of a ticket of which nothing runs, waits, or ended unanswered: it goes back, under its fence only."""
        ticket = self.rng.choice([b"A", b"B", b"C", b"D"])
        lane, mine = self.board.by_ticket.get(ticket), self.added.get(ticket, [])
        fence = self.fences[mine[0]] if mine else self.fence
        ended = [message.number for message in self.unacknowledged if self.tickets.get(message.number) == ticket]
        is_unstarted = lane in self.board.ready and not ended and {self.fences[number] for number in mine} == {fence}
        assert not recalled(self.board, ticket, *mine, *ended, fence=fence - 1)
        assert recalled(self.board, ticket, *mine, *ended, fence=fence) == is_unstarted
        if is_unstarted:
            self.leaves(ticket, fence, None)

    def answer(self) -> None:
        """Redis has answered, for certain, that nothing under that fence is ours."""
        if self.given_back:
            ticket, fence, lane = self.given_back.pop(0)
            self.board.confirm_closed(ticket, fence)
            if lane is not None:
                self.board.resume(lane)

    def read_on(self) -> None:
        """The inbox was read to its end since."""
        self.board.forget_closed(self.board.closed_fences())

    def acknowledge(self) -> None:
        self.board.done([message.stream_id for message in self.unacknowledged])
        self.unacknowledged.clear()

    def pass_time(self) -> None:
        self.now_s += 1.0
        due_s = self.board.wake_due(self.now_s)
        assert due_s is None or due_s > self.now_s

    def forget(self) -> None:
        """Somebody else has a ticket now; what runs of it cannot be called back, but it is not started again."""
        ticket = self.rng.choice([b"A", b"B", b"C", b"D"])
        self.added[ticket] = [
            message.number for lane, message in self.running if lane.ticket == ticket and message is not None
        ]
        self.forgotten.update(self.added[ticket])
        self.board.forget(ticket, self.fence)
        self.fence += 1

    def check(self) -> None:
        """Nothing is forgotten, and every ticket with something is in just one place."""
        here = {number for left in self.added.values() for number in left}
        ended = {message.number for message in self.unacknowledged} | {message.number for _, message in self.held}
        assert {int(entry_id.partition(b"-")[0]) for entry_id in self.board.held_ids} == here | ended
        assert self.board.running == len(self.running)
        in_lanes = {
            ticket: sorted(numbers([*lane.queue, *lane.early])) for ticket, lane in self.board.by_ticket.items()
        }
        for lane, message in self.running:
            if message is not None:
                in_lanes[lane.ticket] = sorted([*in_lanes[lane.ticket], message.number])
        assert {ticket: left for ticket, left in in_lanes.items() if left} == {
            t: sorted(left) for t, left in self.added.items() if left
        }

    def finish(self) -> None:
        """Whatever is here can be done."""
        for _ in range(10_000):
            if not self.board.by_ticket and not self.board.held_ids:
                break
            for move in (self.take, self.end, self.let_go, self.acknowledge, self.pass_time, self.answer, self.read_on):
                move()
                self.check()
        assert not self.board.by_ticket
        assert not self.board.held_ids
        assert (self.board.running, self.board.take(), self.board.wake_due(1e9)) == (0, None, None)
        for move in (self.answer, self.read_on):
            for _ in range(len(self.given_back) + 1):
                move()
        assert not self.board._closed_fences


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_each_ticket_runs_in_id_order_and_nothing_is_forgotten(seed: int) -> None:
    consumer = Consumer(seed)
    for _ in range(400):
        consumer.rng.choice(consumer.moves())()
        consumer.check()
    consumer.finish()


def test_what_is_given_up_while_it_fails_does_not_wait_for_its_retry() -> None:
    board = filled(a=entries(1, 2))
    lane = taken(board)
    message = lane.queue.popleft()
    board.given_up.add(message.stream_id)
    board.retry(lane, message, 300.0)
    board.wake_due(1.0)
    assert numbers(taken(board).queue) == [1, 2]
