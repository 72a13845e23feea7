"""Fair lanes: which of the ready ones is next."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from usher.common.protocol.marks import Mark
from usher.consumer.policy.fair_lanes import FairLanes
from usher.consumer.policy.lanes import LaneBoard


@dataclass(frozen=True)
class Entry:
    """A message with a priority."""

    stream_id: bytes
    priority: int = 0
    fence: int = 1


def _board(by_tenant: bool = False, **tickets: list[int]) -> LaneBoard[Entry]:
    """Lanes with messages of these priorities. A ticket's tenant is its first letter."""
    board: LaneBoard[Entry] = LaneBoard()
    board.ready = FairLanes(
        lambda ticket, message: Mark(message.stream_id, ticket, ticket[:1] if by_tenant else b"", message.priority),
        {b"c": 2.0},
    )
    for at, (ticket, priorities) in enumerate(tickets.items(), 1):
        board.add(ticket.encode(), [Entry(b"%d-%d" % (at, n), priority) for n, priority in enumerate(priorities)])
    return board


def _next(board: LaneBoard[Entry]) -> str:
    lane = board.take()
    assert lane is not None
    return lane.ticket.decode()


def test_the_most_urgent_is_next_and_equals_in_their_order() -> None:
    board = _board(a=[0], b=[3], c=[9], d=[3, 0], e=[0])
    assert [_next(board) for _ in range(5)] == ["c", "b", "d", "a", "e"]


def test_a_lane_is_as_urgent_as_its_most_urgent_message_until_that_has_run() -> None:
    board = _board(a=[0, 0], b=[0, 5, 0])
    ran = []
    for _ in range(5):
        lane = board.take()
        assert lane is not None
        ran.append((lane.ticket.decode(), lane.queue.popleft().priority))
        board.release(lane)
    assert ran == [("b", 0), ("b", 5), ("a", 0), ("b", 0), ("a", 0)]


def test_a_ready_lane_that_gets_an_urgent_message_moves_forward() -> None:
    board = _board(a=[0], b=[0], c=[0])
    board.add(b"c", [Entry(b"9-0", 9)])
    board.ready.got_more(board.lanes[b"c"])  # type: ignore[attr-defined]
    assert [_next(board) for _ in range(3)] == ["c", "a", "b"]


def test_of_eight_lanes_one_is_not_urgent() -> None:
    board = _board(**{f"calm{n}": [0] for n in range(3)}, **{f"loud{n}": [9] for n in range(20)})
    order = [_next(board) for _ in range(23)]
    assert [order.index(f"calm{n}") for n in range(3)] == [7, 15, 22]
    assert [name for name in order if name.startswith("loud")] == [f"loud{n}" for n in range(20)]


def test_a_lane_of_a_quiet_tenant_has_the_next_turn() -> None:
    board = _board(by_tenant=True, **{f"a{n}": [0] for n in range(100)})
    for _ in range(10):
        _next(board)
    board.add(b"quiet", [Entry(b"9-0")])
    assert "quiet" in [_next(board) for _ in range(2)]


def test_tenants_have_turns_however_many_lanes_each_has() -> None:
    lanes = {f"a{n}": [0] for n in range(60)} | {f"b{n}": [0] for n in range(20)} | {f"c{n}": [0] for n in range(20)}
    board = _board(by_tenant=True, **lanes)
    order = [_next(board) for _ in range(100)]
    assert Counter(name[0] for name in order[:30]) == {"a": 8, "b": 7, "c": 15}
    assert [name for name in order if name[0] == "a"] == [f"a{n}" for n in range(60)]


def test_lanes_that_are_given_back_leave_no_trace() -> None:
    board = _board(by_tenant=True, a1=[0], a2=[0], b1=[0])
    board.drop_quiet([b"a1"])
    board.add(b"a1", [Entry(b"9-0")])
    assert sorted(_next(board) for _ in range(3)) == ["a1", "a2", "b1"]
    assert (board.take(), vars(board.ready)["_places"], vars(board.ready)["_turns"]) == (None, {}, {})
