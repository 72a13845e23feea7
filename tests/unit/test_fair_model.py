"""The board where tenants and priorities are configured, in any order of events: all that test_board_model.py and
test_ruled_model.py say holds there, too; and long tickets are shortened in between."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence

import pytest

from tests.boards import seeds
from tests.leader_model import Leader
from tests.unit.test_board_model import BoardMachine, Walk
from tests.unit.test_ruled_model import RuledLeader, RuledMachine
from tests.unit.test_ruled_model import RuledWalk as _RuledWalk
from usher.common.protocol.marks import Mark
from usher.master.policy.board.board import Board


class FairBoard(Board):
    """A board that learns marks with everything that comes: the same ones for the same entry."""

    def __init__(self, window: int) -> None:
        super().__init__(window, math.inf, {b"a": 3.0})
        arrive, take_in = self.arrive, self.take_in

        def learn(entry_id: bytes, name: bytes) -> None:
            chance = zlib.crc32(entry_id + name)
            self.learn([Mark(entry_id, name, (b"a", b"b", b"")[chance % 3], (0, 0, 5, 9)[chance // 3 % 4])])

        def arrives(entries: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
            known = arrive(entries)
            for entry in entries:
                learn(*entry)
            return known

        def takes_in(entries: Iterable[tuple[bytes, bytes]]) -> None:
            entries = list(entries)
            take_in(entries)
            for entry in entries:
                learn(*entry)

        self.arrive, self.take_in = arrives, takes_in


class FairLeader(Leader):
    board_class = FairBoard


class FairMachine(BoardMachine):
    leader_class = FairLeader

    def _room_is_told(self, there_is_room: bool, room: int) -> bool:
        return room > 0  # it is read ahead


class FairRuledLeader(RuledLeader):
    board_class = FairBoard


class FairRuledMachine(RuledMachine):
    leader_class = FairRuledLeader

    def _room_is_told(self, there_is_room: bool, room: int) -> bool:
        return self.board.rules.pauses_all or room > 0


class FairWalk(Walk):
    machine_class = FairMachine


class FairRuledWalk(_RuledWalk):
    machine_class = FairRuledMachine


@pytest.mark.parametrize("seed", seeds(20, 5))
def test_a_long_walk_ends_with_everything_done(seed: int) -> None:
    FairWalk(seed).go(400)


@pytest.mark.parametrize("seed", seeds(20, 5))
def test_a_long_walk_with_rules_ends_with_everything_done(seed: int) -> None:
    FairRuledWalk(seed).go(400)
