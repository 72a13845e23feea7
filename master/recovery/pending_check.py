"""Pending check: notices that somebody took entries out of the pending list by hand, and claims them again.

It has no thread: the dispatcher gives it turns. Two counts that Redis keeps anyway say when to look closer: with the
position, once a second (``learn``). What memory has under ``master`` is looked at by its ids then; what consumers have,
and what is halted, by the index, ticket by ticket, as these become quiet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from usher.master.leader.leader_scripts import LeaderScripts
from usher.master.policy.board.board import Board
from usher.master.policy.board.tickets import Standing
from usher.master.policy.pending_loss import missing

#: Ids looked at by one script call, and in one turn.
_PAGE, _TURN = 500, 5000
#: Tickets that go on looked at by one script call; the index may name a window of messages of each.
_RESUMED = 20


class PendingCheck:
    """Check of one epoch. ``suspects``: entries of consumers, or halted ones, may be missing from the pending list."""

    def __init__(self, every_s: float) -> None:
        """Make a check that counts the halted tickets every ``every_s`` seconds: there may be many others."""
        self._every_s = every_s
        self._halted = 0
        self._count_s = 0.0
        self._names: deque[bytes] = deque()
        self._known_missing = 0  # after a look: those that could not be claimed again, for their bodies are gone
        self.suspects = False

    def learn(self, board: Board, pending: Mapping[bytes, int], now_s: float) -> None:
        """Compare the board with the numbers of pending entries, which are of this moment."""
        if now_s >= self._count_s:
            self._count_s = now_s + self._every_s
            self._halted = sum(
                one.standing is Standing.HALTED and bool(one.waits_for) for one in board.tickets.values()
            )
        in_flight = {name: consumer.in_flight for name, consumer in board.consumers.items()}
        found = missing(
            board.parked,
            self._halted,
            in_flight,
            {name.decode(errors="replace"): count for name, count in pending.items()},
        )
        self.suspects = found.elsewhere
        if self._names:
            return
        if found.under_master > self._known_missing:
            self._names.extend(name for name, ticket in board.tickets.items() if ticket.parked)
        self._known_missing = found.under_master

    def turn(self, board: Board, steps: LeaderScripts) -> bool:
        """Look at some of the ids that should be under ``master``. Return whether more are to be looked at."""
        looked = 0
        while self._names and looked < _TURN:
            looked += 1 + self.restore(board, (self._names[0],), steps)
            self._names.popleft()  # last: a call that Redis refuses for now is repeated
        return bool(self._names)

    def restore(self, board: Board, names: Sequence[bytes], steps: LeaderScripts) -> int:
        """Claim again what is missing of these tickets' ids under ``master``. Return how many ids were looked at."""
        looked = 0
        for name in names:
            ids = list(board.tickets[name].parked) if name in board.tickets else []
            for at in range(0, len(ids), _PAGE):
                restored = steps.restore([(name, ids[at : at + _PAGE])])
                self._known_missing = max(0, self._known_missing - len(restored))
                steps.losses.restored(restored)
            looked += len(ids)
        return looked

    def look_at(self, names: Sequence[bytes], steps: LeaderScripts) -> None:
        """Look at what the index says of these quiet tickets, if anything may be missing. Most turns have none."""
        if names and self.suspects:
            steps.losses.restored(steps.restore([(name, ()) for name in names]))

    def look_at_resumed(self, names: Sequence[bytes], steps: LeaderScripts) -> None:
        """Look at what the index says of tickets that go on, and of which memory did not keep all: while they waited,
        no count would have told that something of it was taken out."""
        for at in range(0, len(names), _RESUMED):
            steps.losses.restored(steps.restore([(name, ()) for name in names[at : at + _RESUMED]]))
