"""A leader without Redis, which turns as the dispatcher does, in the world of ``redis_model.py``.

``Leader`` drives the real Board and the real Recoverer. Stateful tests and scenarios play with both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.redis_model import RedisModel
from usher.common.protocol.registration import name_of
from usher.master.leader.entries import NewEntries, PeekedEntry, Rejected
from usher.master.membership.registry import RegisteredConsumer
from usher.master.policy.board.board import Board
from usher.master.policy.board.plans import NOTHING, HandOverPlan
from usher.master.recovery.repairs import Recoverer


class Leader:
    """What the dispatcher does in its turns, with the pending list and the index of a model."""

    board_class: Callable[[int], Board] = Board

    def __init__(self, redis: RedisModel, window: int) -> None:
        self.redis = redis
        self.board = self.board_class(window)
        self.recoverer = Recoverer()
        self.rejected: list[Rejected] = []
        self.heard = len(redis.changed)
        self.now_s = 0.0

    @classmethod
    def adopt(cls, redis: RedisModel, window: int) -> Leader:
        """A new epoch, as ``usher.master.recovery.takeover`` begins it."""
        redis.begin()
        leader = cls(redis, window)
        leader.board.learn_time(redis.clock_ms, leader.now_s)
        leader.look_at(redis.roster())
        board, dead = leader.board, set()
        for ticket, record in list(redis.index.items()):
            ids = redis.unfinished(ticket) if ":" in record.owner else list(record.ids)
            if not ids:
                board.over.add(ticket)
                continue
            owner = board.set_record(ticket, record.owner.encode(), record.fence, ids, leader.now_s)
            if owner is not None:
                dead.add(owner)
        living = set(board.consumers) - dead
        dead |= {name for name in redis.pending.values() if ":" in name and name not in living}
        for incarnation in sorted(dead):
            leader.recoverer.add(incarnation)
        while leader.recovers:
            leader.recoverer.turn(board, redis, [])  # type: ignore[arg-type]
        board.take_in(redis.read_parked())
        return leader

    def look_at(self, roster: dict[str, RegisteredConsumer]) -> None:
        """What a roster says, which may be of a former moment."""
        for incarnation, member in roster.items():
            known = self.board.consumers.get(incarnation)
            if (
                member.alive
                and not self.recoverer.has(incarnation)
                and (known is None or known.accepts != member.accepts)
            ):
                self.board.join(
                    incarnation,
                    name_of(incarnation),
                    member.registration.slots,
                    member.registration.capacity,
                    member.accepts,
                )
        for incarnation in list(self.board.consumers):
            if incarnation not in roster or not roster[incarnation].alive:
                self.lose(incarnation)

    def lose(self, incarnation: str) -> None:
        if not self.recoverer.has(incarnation) and incarnation in self.board.consumers:
            self.board.mark_lost(incarnation)
            self.recoverer.add(incarnation)

    @property
    def recovers(self) -> bool:
        """Whether somebody is being recovered."""
        return self.recoverer.is_busy

    def recover(self) -> None:
        """One page."""
        self.recoverer.turn(self.board, self.redis, self.rejected)  # type: ignore[arg-type]

    def turn(self) -> None:
        """All of a turn."""
        self.look_at(self.redis.roster())
        self.recover()
        self.hear()
        self.read_records(list(self.board.unsure))
        self.hand_over()
        self.read()
        self.recall()

    def recall(self) -> None:
        """Ask tickets back for consumers that have nothing to do."""
        for incarnation, tickets in self.board.recalls(self.now_s):
            self.redis.recall(incarnation, self.board.held(tickets))

    @property
    def has_news(self) -> bool:
        return self.heard < len(self.redis.changed)

    def hear(self) -> None:
        """What the stream of changed tickets says."""
        self.board.doubt(self.redis.changed[self.heard :])
        self.heard = len(self.redis.changed)

    def read_records(self, names: Iterable[bytes]) -> None:
        """Memory follows the index."""
        self.board.learn_time(self.redis.clock_ms, self.now_s)
        for name in names:
            record = self.redis.index.get(name)
            if record is None:
                self.board.clear_record(name)
                continue
            if self.board.is_of(name, record.owner.encode()):
                continue
            to_recover = self.board.set_record(name, record.owner.encode(), record.fence, list(record.ids), self.now_s)
            if to_recover is not None:
                self.recoverer.add(to_recover)

    def reconcile(self, quiet_s: float = 0.0) -> None:
        """Compare all tickets that nobody reported on for a while."""
        for owner, names in self.board.quiet_since(self.now_s - quiet_s + 1e-9).items():
            if owner:
                there, found = self.redis.pending, self.board.looked_at(names, self.now_s)
                self.board.free(
                    owner, [(name, [one for one in ids if one not in there]) for name, ids in found], self.now_s
                )
            else:
                self.read_records(names)

    def hand_over(self, limit: int = 1000) -> HandOverPlan | None:
        """One plan, carried out."""
        plan = self.board.plan(limit, self.now_s)
        index = self.board.outdated(self.now_s)
        if plan is None or self.confirm(plan, self.redis.hand_over(plan, heard=self.heard, index=index), index):
            return plan
        self.board.withdraw(plan)
        self.hear()
        return None

    def confirm(self, plan: HandOverPlan, fence: int | None, index: Iterable[bytes] = ()) -> bool:
        """Follow a turn. Return whether the plan was carried out."""
        if fence is not None:
            self.board.over.difference_update(index)
            self.board.confirm(plan, fence)
        return fence is not None

    def arrive(self, entry_id: bytes, ticket: bytes) -> None:
        """A new entry, which is parked before it is planned."""
        self.redis.add(entry_id, ticket)
        self.read(limit=0)

    def see(self, limit: int) -> tuple[NewEntries, HandOverPlan | None, Callable[[], None]]:
        """New entries come to the board, and are planned. Returns what makes that undone, too."""
        news = self.redis.read(1000)
        new = [(entry[0], entry[1] or b"") for entry in news.found]
        assert not self.board.arrive(new)
        plan = self.board.plan(limit, self.now_s)

        def undo() -> None:
            if plan is not None:
                self.board.withdraw(plan)
            self.board.forget(new)

        return news, plan, undo

    def read(self, limit: int = 1000, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Take new entries by the hand-over of a plan. False: they were not taken, for something happened
        ``meanwhile``."""
        news, plan, undo = self.see(limit)
        meanwhile()
        index = self.board.outdated(self.now_s)
        if self.confirm(plan or NOTHING, self.redis.hand_over(plan or NOTHING, news, self.heard, index), index):
            return True
        undo()
        self.hear()
        return False

    def take_in(self, strays: Iterable[PeekedEntry]) -> None:
        """What the sweep found."""
        self.board.take_in([(entry.id, entry.ticket) for entry in strays if entry.ticket is not None])
