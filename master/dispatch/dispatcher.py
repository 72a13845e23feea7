"""Dispatcher: the one thread that owns the board. It looks at new entries, plans, hands over, frees what is reported,
recovers.

New entries are taken from the stream by the hand-over of the plan that they are in; until then they are only seen, and
nothing has happened.

Others never touch the board; they post to the mailbox. A reply that is not sure (a broken connection, an entry that was
not where memory had it) ends the epoch: the elector takes a new one, which refuses any late command, and everything is
read again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from usher.common.base.clock import now_s, wall_ms
from usher.common.base.errors import Fenced, NotNow, ReplyUnknown
from usher.common.base.log import event
from usher.common.protocol.keys import Keys
from usher.common.protocol.registration import name_of
from usher.common.redis.client import SAME_MEMORY, Link
from usher.common.redis.replies import TicketStream, parse_record
from usher.common.redis.scripts import ScriptRunner
from usher.common.runtime.service import Service
from usher.master.dispatch.events import ChangedElsewhere, Posted, Report
from usher.master.dispatch.halted_tickets import Halts
from usher.master.dispatch.rules import RuleWork
from usher.master.dispatch.stream_cursor import IDLE_READ_S, Reader
from usher.master.dispatch.stream_notifier import Doorbell
from usher.master.leader.counters import LeaderCounters
from usher.master.leader.elector import Lead
from usher.master.leader.leader_scripts import GroupMoved, LeaderScripts, Rejected, RulesMoved, StaleNotification
from usher.master.leader.limits import LeaderLimits
from usher.master.leader.peeked import NO_NEWS, News
from usher.master.leader.validation import sort_out
from usher.master.membership.registry import RegisteredConsumer
from usher.master.policy.board.board import Board
from usher.master.policy.board.plans import NOTHING, HandOverPlan, HandOverReply
from usher.master.policy.explain.facts import BoardFacts
from usher.master.policy.explain.stuck import Parked
from usher.master.policy.group_loss import Memory
from usher.master.recovery.idle_sweep import IdleSweep
from usher.master.recovery.reconciler import PAGE, Reconciler
from usher.master.recovery.recoverer import Recoverer
from usher.master.recovery.takeover import rejoin, sort_again, take_over

log = logging.getLogger(__name__)

#: hand_over calls per turn, so that reports are freed in between.
_PLANS_PER_TURN = 4
#: How often the group's position is noted outside of the group: at most so much comes again when the group is lost.
_SAVE_POSITION_S = 1.0


class Dispatcher(Service):
    """Owner of the board. All of its fields below the mailbox belong to its thread."""

    name = "dispatch"

    def __init__(
        self, link: Link, keys: Keys, lead: Lead, limits: LeaderLimits, doorbell: Doorbell | None = None
    ) -> None:
        """Without a ``doorbell`` the stream is read at every turn."""
        super().__init__(doorbell)
        self._link = link
        self._scripts = ScriptRunner(link)
        self._stream = TicketStream(link, keys)
        self._keys = keys
        self._lead = lead
        self._limits = limits
        self._doorbell = doorbell
        self.on_rejected: Callable[[Sequence[Rejected]], None] = lambda rejected: None
        self._mailbox: deque[Posted] = deque()
        self._members: dict[str, RegisteredConsumer] = {}
        self._steps: LeaderScripts | None = None
        self._connection = 0  # of the link, in this epoch
        self.board = Board(limits.ticket_window)
        self.counts = LeaderCounters()
        self._recoverer = Recoverer(self.counts)
        self._halts = Halts()
        self._rule_work = RuleWork(link, keys)
        self._idle_sweep = IdleSweep(limits.min_idle_ms, limits.sweep_s)
        self._reader = Reader(limits, doorbell)
        self._unsure: set[bytes] = set()
        self._rules_due = False  # they may have changed, and were not read since
        self._rejected: list[Rejected] = []
        self._quiet = Reconciler(limits.reconcile_s)
        self._memory = Memory()  # of the group, for the day it is lost
        self._position_open = False  # the last saved position had something pending
        self._position_s = 0.0
        self._unwell: str | None = None  # why the last turn as leader failed; None after one that did not

    # ---- from other threads --------------------------------------------------------------------------------------------------

    def post(self, posted: Posted) -> int:
        """Give the dispatcher something to look at in its next turn. Returns how much it has not looked at."""
        self._mailbox.append(posted)
        self.wake()
        return len(self._mailbox)

    @property
    def leads(self) -> bool:
        """Whether this master leads and has adopted."""
        steps = self._steps
        return steps is not None and self._lead.epoch == steps.epoch

    @property
    def trouble(self) -> str | None:
        """Also between two epochs: a leader that cannot adopt is not well just because it waits to be elected again."""
        bell = self._doorbell.trouble if self._doorbell is not None else None
        return super().trouble or (self._unwell or bell if self._lead.is_ours else None)

    def glance(self, ticket: bytes) -> BoardFacts | None:
        """What memory has of a ticket, while this master leads; None: nothing. A glance from outside: it may be a
        moment old."""
        return self.board.glance(ticket, now_s(), wall_ms()) if self.leads else None

    def parked_of(self, ticket: bytes) -> Parked | None:
        """How much of it memory has parked, while this master leads; None: nothing is known. A glance too."""
        return self.board.parked_of(ticket) if self.leads else None

    # ---- the turn ------------------------------------------------------------------------------------------------------------

    def run_once(self) -> float:
        epoch = self._lead.epoch
        if epoch is None:
            self._drop_memory()
            self._remember_position()
            return 1.0
        try:
            if self._steps is None or self._steps.epoch != epoch:
                self._begin(epoch)
            elif self._link.connections != self._connection:
                raise ReplyUnknown("the connection to Redis is not the one of this epoch")
            wait_s = self._turn()
            self._unwell = None
            return wait_s
        except Fenced:
            event(log, "fenced", level=logging.WARNING, epoch=epoch, last_read=self._reader.last_read)
            self._drop_memory()
            self._lead.lost(epoch)
        except NotNow as refused:
            if refused.kind not in SAME_MEMORY:
                # The next server may have a part of this one's history only; memory is of one connection.
                self._in_doubt(epoch, str(refused))
            raise
        except ReplyUnknown as unknown:
            self._in_doubt(epoch, str(unknown))
        except Exception as problem:
            self._unwell = f"{type(problem).__name__}: {problem}"
            self._in_doubt(epoch, f"{type(problem).__name__} in a turn")
            raise
        return 0.0

    def _in_doubt(self, epoch: int, why: str) -> None:
        event(log, "in_doubt", level=logging.WARNING, epoch=epoch, why=why)
        self._drop_memory()
        self._lead.doubt(epoch)

    def _drop_memory(self) -> None:
        self._steps = None
        while self._mailbox:
            posted = self._mailbox.popleft()
            if isinstance(posted, Report):
                posted.answered.set()  # without answers: the HTTP thread says that we do not lead
        self._unsure.clear()
        self._rejected.clear()
        self._recoverer = Recoverer(self.counts)
        self._idle_sweep = IdleSweep(self._limits.min_idle_ms, self._limits.sweep_s)
        if self.board.tickets or self.board.consumers:
            self.board = Board(self._limits.ticket_window)

    def _remember_position(self) -> None:
        """A standby knows what the leader saved last, should that be lost together with all the rest of Redis' data."""
        saved = self._stream.saved_position()
        if saved is not None and saved != self._memory.noted:
            self._memory = Memory(saved)

    def _begin(self, epoch: int) -> None:
        self._drop_memory()
        limits, started = self._limits, now_s()
        steps = LeaderScripts(
            self._scripts, self._keys, epoch, limits.ticket_field, limits.longest_message, limits.spread, self.counts
        )
        steps.check()
        self._connection = self._link.connections
        adopted = take_over(
            self._link, self._keys, self._stream, steps, limits.ticket_window, self._memory, self.made_progress
        )
        self.board, self._members = adopted.board, adopted.members
        self._reader.begin(adopted.last_delivered, adopted.repeats_until, adopted.highest_pending)
        self._memory = self._memory.found(adopted.last_delivered)
        self._steps = steps
        self.counts.adoptions += 1
        self._follow_rules()
        self._quiet.begin(now_s())
        event(log, "adopted", epoch=epoch, **adopted.facts(), seconds=now_s() - started)

    def _turn(self) -> float:
        assert self._steps is not None
        self._read_mailbox()
        self._recoverer.turn(self.board, self._steps, self._rejected)
        self._unsure.update(self._recoverer.take_unsure())
        sweeping = self._idle_sweep.turn(self.board, self._steps, list(self._members), now_s(), self._rejected)
        self._read_records()
        reopening = self._halts.turn(self.board, self._steps, self._unsure)
        handed = self._hand_over()
        ruling = self._rule_work.turn(self.board, self._steps, self._unsure, self.on_rejected, self._follow_rules)
        if self.board.parked >= self._limits.parked:
            self.board.unload()
        more = self._read_new()
        self._reject()
        self._save_position()
        found_more = more or handed or ruling or sweeping or reopening
        if found_more or self._recoverer.is_busy or self._mailbox or self._unsure or self._rules_due:
            return 0.0
        self._reader.arm(self.board)
        due_s = self.board.next_due_s()
        slowed_s = IDLE_READ_S if due_s is None else max(0.0, due_s - now_s())
        return min(IDLE_READ_S / 2, self._quiet.wait_s(now_s()), self._idle_sweep.wait_s(now_s()), slowed_s)

    # ---- its parts -----------------------------------------------------------------------------------------------------------

    def _read_mailbox(self) -> None:
        for _ in range(len(self._mailbox)):
            posted = self._mailbox.popleft()
            if isinstance(posted, Report):
                posted.answer(self.board)
            elif isinstance(posted, ChangedElsewhere):
                self._unsure.update(posted.tickets)
                self._rules_due |= posted.rules
            else:
                self._follow_roster(posted)
        if self._rules_due:
            self._follow_rules()

    def _follow_roster(self, members: dict[str, RegisteredConsumer]) -> None:
        """A new roster: consumers that came, changed, or are gone."""
        before, self._members = self._members, members
        for incarnation, member in members.items():
            known, registration = self.board.consumers.get(incarnation), member.registration
            accepts = member.accepts and self.board.rules.of_consumer(registration.name) is None
            if member.alive and not self._recoverer.has(incarnation) and (known is None or known.accepts != accepts):
                self.board.join(incarnation, registration.name, registration.slots, registration.capacity, accepts)
                event(
                    log,
                    "consumer_joined" if known is None else "consumer_changed",
                    consumer=incarnation,
                    state=member.state,
                )
        gone = [name for name in self.board.consumers if name not in members or not members[name].alive]
        kept = {name: before[name] for name in gone if not self._lose(name) and name in before}
        self._members = members | kept

    def _follow_rules(self) -> None:
        """The rules may have changed: read them. Consumers that an operator has drained are a part of them."""
        assert self._steps is not None
        self._rules_due = True  # until it has worked: word of them comes once
        self._rule_work.read(self.board, self._steps)
        self._follow_roster(self._members)
        self._rules_due = False

    def _lose(self, incarnation: str) -> bool:
        """Somebody saw that its lease has ended. False: it has not ended; the roster was read before the consumer came,
        and so it shows no lease."""
        if not self._recoverer.has(incarnation) and incarnation in self.board.consumers:
            lease, registered = self._link.pipeline(
                [("GET", self._keys.lease(incarnation)), ("HGET", self._keys.consumers, name_of(incarnation))]
            )
            if isinstance(lease, bytes):
                return False
            if isinstance(lease, NotNow) and lease.kind not in SAME_MEMORY:
                raise lease
            left = registered is None  # after a clean drain; this is only to tell it
            self.board.lose(incarnation)
            event(
                log,
                "consumer_left" if left else "consumer_lost",
                consumer=incarnation,
                tickets=len(self.board.consumers[incarnation].tickets),
            )
            self.counts.lost += not left
            self._recoverer.add(incarnation, quietly=left)
        return True

    def _reject(self) -> None:
        """Write the dead letters that are due. They are remembered until Redis has them."""
        assert self._steps is not None
        if self._rejected:
            event(
                log,
                "messages_rejected",
                level=logging.WARNING,
                count=len(self._rejected),
                reason=self._rejected[0].reason,
            )
            self._steps.reject(self._rejected)
            self.on_rejected(self._rejected)
            self._rejected.clear()

    def _read_records(self) -> None:
        """Read again the records of tickets that were refused, and from time to time of those that nobody reported on;
        then also whether the rules are those that we know."""
        assert self._steps is not None
        now = now_s()
        names = list(self._unsure)[:PAGE]
        if not names:
            names, was_all = self._quiet.page(self.board, now)
            self._rules_due |= was_all and self._rule_work.has_moved(self._steps)
        if not names:
            return
        for name, value in zip(names, self._link.call("HMGET", self._keys.tickets, *names), strict=True):
            self._unsure.discard(name)
            if value is None:
                self.board.clear_record(name)
                continue
            try:
                record = parse_record(value)
            except ValueError:
                event(log, "record_unreadable", level=logging.ERROR, ticket=name)
                self.board.halt(name, now)
                continue
            to_recover = self.board.set_record(name, record.owner, record.fence, record.ids, now)
            if to_recover is not None:
                self._recoverer.add(to_recover)

    def _hand_over(self) -> int:
        """Plan and hand over until nothing is left or the turn is long enough. Returns the number of entries."""
        handed = 0
        for _ in range(_PLANS_PER_TURN):
            plan = self.board.plan(self._limits.batch, now_s())
            if plan is None:
                break
            try:
                reply = self._carry_out(plan)
            except RulesMoved:
                self._follow_rules()
                continue
            handed += plan.size
            self._learn(plan, reply)
            if self._mailbox:
                break
        return handed

    def _carry_out(self, plan: HandOverPlan, news: News = NO_NEWS) -> HandOverReply:
        """Have a plan done. What was refused as a whole is as if it had not been planned, and raised."""
        assert self._steps is not None
        try:
            return self._steps.hand_over(
                plan, news, partial(self._reader.arm_ahead, self.board, news) if news.found else None
            )
        except (NotNow, RulesMoved, GroupMoved):
            self.board.withdraw(plan)
            raise

    def _learn(self, plan: HandOverPlan, reply: HandOverReply) -> None:
        """What became of a plan."""
        verdict = self.board.confirm(plan, reply)
        over = [entry_id for answer in reply.targets for entry_id in answer.gone]
        if over:
            event(
                log,
                "entries_over",
                level=logging.WARNING,
                count=len(over),
                ids=b" ".join(over[:50]),
                why="gone, or not pending: see Lost group",
            )
        self._unsure.update(verdict.unsure)
        if verdict.doubt:
            raise ReplyUnknown("an entry was not pending under master: memory and the pending list differ")
        for incarnation in verdict.lost:
            self._lose(incarnation)

    def _save_position(self) -> None:
        """Note how far the group is, once a second while it moves."""
        assert self._steps is not None
        now = now_s()
        is_open = bool(self.board.in_flight or self.board.parked)
        noted = self._memory.noted
        moved = noted is None or noted.delivered != self._reader.last_read or is_open or self._position_open
        if moved and now - self._position_s >= _SAVE_POSITION_S:
            self._memory = Memory(self._steps.save_position())
            self._position_open, self._position_s = is_open, now

    def _read_new(self) -> bool:
        """Look at new entries, plan, and take them from the stream by the hand-over of that plan. Returns whether more
        is to be done at once."""
        assert self._steps is not None
        news = self._reader.look(self.board, self._steps, now_s())
        if news is None:
            return False
        if news.found:
            usable, rejected = sort_out(news.found, self._steps.spread)
            repeats, again, new = self._reader.split(usable)
            held, late = sort_again(again, self.board, self._stream)
            known = [*((ticket, entry_id) for entry_id, ticket in repeats), *held]
            known += [(ticket, entry_id) for entry_id, ticket in new if not self.board.arrive(entry_id, ticket)]
            # If some were known already, nothing is handed over before it is clear who has them: they may belong before
            # others of their ticket.
            plan = (self.board.plan(self._limits.batch, now_s()) if not known and not again else None) or NOTHING
            try:
                reply = self._carry_out(plan, news)
            except (NotNow, RulesMoved, GroupMoved) as refused:
                self.board.forget(new)
                self._reader.again(isinstance(refused, StaleNotification))
                self._rules_due |= isinstance(refused, RulesMoved)
                if isinstance(refused, NotNow):
                    raise
                event(
                    log,
                    "news_not_taken",
                    why="the group has moved" if isinstance(refused, GroupMoved) else "the rules have changed",
                )
                return True
            self._reader.took(news)
            self._memory = self._memory.read(news.found[0].id, news.found[-1].id)
            self._rejected += rejected
            self._learn(plan, reply)
            self.board.take_in(late)
            self._unsure.update(ticket for ticket, _ in held)
            if known:
                self._rejoin(known)
        if self._reader.is_past_repeats(news):
            self._steps.note_repeats(None)
            self._reader.repeats_until = None
        return bool(news.found) and (not news.is_all or self.board.parked > 0)

    def _rejoin(self, known: list[tuple[bytes, bytes]]) -> None:
        assert self._steps is not None
        try:
            rejoin(known, self.board, self._steps)
        except NotNow as refused:
            # They were read and are on no board: only reading everything again finds them.
            raise ReplyUnknown(f"entries could not rejoin their owners: {refused}") from refused

    def on_end(self) -> None:
        self._drop_memory()
        self._link.close()
        if self._doorbell is not None:
            self._doorbell.close()
