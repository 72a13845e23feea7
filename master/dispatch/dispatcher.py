"""Dispatcher: the one thread that owns the board. It reads new entries, plans, hands over, frees what is reported,
recovers.

One transaction hands over what was read and reads what comes next (``LeaderScripts.turn``). What was read and not
handed over is in nobody's list: should this leader end, the next one has the group given it again.

Other threads never touch the board; they post events. A reply that is not sure (a broken connection, an entry that was
not where memory had it) ends the epoch: the elector takes a new one, which refuses any late command, and everything is
read again.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from usher.common.base.clock import now_s, wall_ms
from usher.common.base.errors import Fenced, GroupMissing, NotNow, ReplyUnknown
from usher.common.base.log import DEBUG, ERROR, WARNING, event
from usher.common.protocol.keys import Keys
from usher.common.protocol.registration import name_of
from usher.common.protocol.stream_id import rank
from usher.common.redis.client import SAME_MEMORY, Link
from usher.common.redis.replies import TicketStream, read_command, record_or_none
from usher.common.runtime.service import Service
from usher.master.dispatch.events import DispatcherEvent, Report
from usher.master.dispatch.stream_cursor import IDLE_READ_S, PositionSaver, StreamCursor, TicketEntry
from usher.master.dispatch.stream_notifier import StreamNotifier
from usher.master.leader.elector import Lead
from usher.master.leader.entries import NO_NEW_ENTRIES, OVER_LIMIT, MarkReader, NewEntries, Rejected, partition_entries
from usher.master.leader.leader_scripts import LeaderCounters, LeaderScripts
from usher.master.leader.limits import LeaderLimits
from usher.master.membership.registry import RegisteredConsumer
from usher.master.operations.live_rules import read_rules
from usher.master.policy.board.board import Board
from usher.master.policy.board.plans import NOTHING, BoardFacts, HandOverPlan, Parked
from usher.master.policy.rules import Target
from usher.master.recovery.repairs import PAGE, IdleSweep, Recoverer, Takeover, unreadable

#: Most plans per turn, so that reports are freed in between.
_PLANS_PER_TURN = 4
#: Records that are not up to date wait so long for a turn that hands something over.
_RECORDS_S = 0.25
#: Seconds between two pages of quiet tickets, in which others have their turn.
_PAUSE_S = 0.02


class Dispatcher(Service):
    """Service that owns the board. All fields below ``_events`` belong to this thread."""

    name = "dispatch"

    def __init__(
        self, link: Link, keys: Keys, lead: Lead, limits: LeaderLimits, notifier: StreamNotifier | None = None
    ) -> None:
        """Make a dispatcher that waits on ``notifier``; without one it reads the stream at every turn."""
        super().__init__(notifier)
        self._link = link
        self._stream = TicketStream(link, keys)
        self._keys = keys
        self._lead = lead
        self._limits = limits
        self._notifier = notifier
        self.on_rejected: Callable[[Sequence[Rejected]], None] = lambda rejected: None
        self._events: deque[DispatcherEvent] = deque()
        self._members: dict[str, RegisteredConsumer] = {}
        self._steps: LeaderScripts | None = None
        self._connection = 0  # number of the link's connection in this epoch
        self.board = self._new_board()
        self.counts = LeaderCounters()
        self._cursor = StreamCursor(limits.batch, limits.read_ahead, notifier)
        self.marks = MarkReader(limits.marks)
        self._rejected: list[Rejected] = []  # dead letters to be written
        self._position_saver = PositionSaver(self._stream, limits.reconcile_s)
        self.closed: frozenset[str] = frozenset()  # they get no new tickets while others do: health_checker.py
        self._unwell: str | None = None  # why the last turn as leader failed; None after one that did not
        self._drop_memory()

    # ---- from other threads ------------------------------------------------------------------------------------------

    def post(self, posted: DispatcherEvent) -> int:
        """Post an event for the dispatcher's next turn. Return how many events it has not taken yet."""
        self._events.append(posted)
        self.wake()
        return len(self._events)

    @property
    def leads(self) -> bool:
        steps = self._steps
        return steps is not None and self._lead.epoch == steps.epoch

    @property
    def _led(self) -> LeaderScripts:
        """The scripts of the epoch in which this is a turn."""
        assert self._steps is not None
        return self._steps

    @property
    def trouble(self) -> str | None:
        """Return the current trouble, also between two epochs: a leader that cannot take over is not well just
        because it waits to be elected again."""
        of_notifier = self._notifier.trouble if self._notifier is not None else None
        return super().trouble or (self._unwell or of_notifier if self._lead.is_ours else None)

    def glance(self, ticket: bytes) -> BoardFacts | None:
        """Return what memory has of a ticket, while this master leads; None otherwise, and when it has nothing (and is
        not full). It may be a moment old."""
        if not self.leads:
            return None
        found = self.board.glance(ticket, now_s(), wall_ms())
        return BoardFacts("", 0, True, is_full=True) if found is None and self.is_full else found

    @property
    def is_full(self) -> bool:
        """Return whether so many entries wait that this master, which leads, reads no more."""
        return self.leads and self._cursor.is_full

    def parked_of(self, ticket: bytes) -> Parked | None:
        """Return how much of the ticket memory has parked, while this master leads; None when nothing is known. It may
        be a moment old."""
        return self.board.parked_of(ticket) if self.leads else None

    def waiting_by_tenant(self) -> Counter[bytes]:
        """Return how many messages of each tenant are unfinished, of those that memory has. It may be a moment old."""
        counts: Counter[bytes] = Counter()
        for ticket in list(self.board.tickets.values()):
            counts[ticket.tenant] += len(ticket.parked) + len(ticket.running)
        return counts

    def tenants_now(self) -> dict[str, tuple[int, int]]:
        """Return, for each tenant, how many of its messages are unfinished, and how many were handed over so far."""
        waiting = self.waiting_by_tenant()
        return {name.decode(errors="replace"): (waiting[name], one[0]) for name, one in self.board.tenants().items()}

    def tenants(self) -> dict[str, tuple[int, int, float, bool]]:
        """Return the tenants and their turns, by name: see ``FairQueue.tenants``."""
        return {name.decode(errors="replace"): told for name, told in self.board.tenants().items()}

    def window(self, incarnation: str) -> int | None:
        """Return how many messages this incarnation is given at a time; None when it is not known. It may be a moment
        old."""
        consumer = self.board.consumers.get(incarnation)
        return None if consumer is None else consumer.pace.window

    # ---- epochs ------------------------------------------------------------------------------------------------------

    def run_once(self) -> float:
        epoch = self._lead.epoch
        if epoch is None:
            self._drop_memory()
            return self._position_saver.follow()
        try:
            if self._steps is None or self._steps.epoch != epoch:
                self._begin(epoch)
            elif self._link.connections != self._connection:
                raise ReplyUnknown("the connection to Redis is not the one of this epoch")
            wait_s = self._turn()
            self._unwell = None
            return wait_s
        except Fenced:
            event("leader_fenced", level=WARNING, epoch=epoch, last_read=self._cursor.taken)
            self._drop_memory()
            self._lead.lost(epoch)
        except NotNow as refused:
            if refused.kind not in SAME_MEMORY:
                # The next server may have only part of this one's history, and memory belongs to one connection.
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
        event("leadership_uncertain", level=WARNING, epoch=epoch, why=why)
        self._drop_memory()
        self._lead.doubt(epoch)

    def _drop_memory(self) -> None:
        self._steps = None
        self._comes_again = False  # what was taken last, the group had been given before
        self._has_pending = True  # somebody has pending entries, as of the last look
        while self._events:
            posted = self._events.popleft()
            if isinstance(posted, Report):
                posted.answered.set()  # without answers: the HTTP thread says that we do not lead
        self._rejected.clear()
        limits, self._recoverer = self._limits, Recoverer(self.counts)
        self._idle_sweep = IdleSweep(limits.min_idle_ms, limits.sweep_s)
        self._quiet = deque[tuple[str, list[bytes]]]()  # pages of tickets that are yet to be compared with Redis
        self._compare_s = 0.0  # when the next of them is due
        if self.board.tickets or self.board.consumers:
            self.board = self._new_board()

    def _new_board(self) -> Board:
        return Board(self._limits.ticket_window, self._limits.work_s, self._limits.weights)

    def _begin(self, epoch: int) -> None:
        self.made_progress()  # a standby's turns are rare
        self._drop_memory()
        limits, started = self._limits, now_s()
        field, longest = limits.ticket_field, limits.longest_message
        steps = LeaderScripts(self._link, self._keys, epoch, field, longest, self.counts, self.marks)
        steps.check()
        self._connection = self._link.connections
        found = Takeover(self._link, self._keys, self._stream, steps, self._new_board(), self.made_progress)
        found.run(self._position_saver.memory)
        self.board, self._members = found.board, found.members
        begins = found.last_delivered, found.highest_pending
        self._cursor = StreamCursor(limits.batch, limits.read_ahead, self._notifier, *begins)
        steps.highest = max(steps.highest, rank(found.highest_pending))
        self._position_saver.memory = self._position_saver.memory.found(found.last_delivered)
        self._follow_rules()
        self._steps = steps  # from now on a turn may fail without another takeover
        self.counts.adoptions += 1
        event("takeover_completed", epoch=epoch, **found.facts(), seconds=now_s() - started)

    # ---- the turn ----------------------------------------------------------------------------------------------------

    def _turn(self) -> float:
        """Take every step once. Return for how many seconds there is nothing to do.

        The order of the steps keeps each ticket in order. A step that finds *older* entries comes before one that hands
        over, so that no plan gives out a newer message of a ticket while an older one is under ``master`` unseen; new
        entries, the newest of all, come last. Of unsure tickets nothing is planned before their records are read; those
        that become unsure after step 4 are read in the next turn, which then follows at once.
        """
        # 1. Events of other threads: reports free slots, rosters tell who died, rules must be read before planning.
        self._take_events()
        # 2. Older entries: those of dead incarnations.
        self._recoverer.turn(self.board, self._led, self._rejected)
        # 3. Older entries: pending ones that the idle sweep finds.
        known, has_any = list(self._members), self._has_pending or bool(self.board.in_flight)
        sweeping = self._idle_sweep.turn(
            self.board, self._led, known, now_s(), self._rejected, has_any, self._cursor.to_look_at
        )
        # 4. Records of unsure tickets: after 1, which names most of them, and before they are planned.
        self._read_records()
        # 5. Entries on the board get the free slots before new ones.
        handed = self._hand_over()
        # 6. New entries: older ones are on the board by now. If there are none, some may be asked back for consumers
        #    that have nothing to do.
        more = self._take_new_entries()
        # 7. Dead letters of entries that 2, 3 and 6 could not use: after 6, since only taken entries can be rejected.
        self._reject()
        # 8. Records of the index, if no turn wrote them; and the group's position, with what 6 took.
        if now_s() >= self.board.due_records_s() + _RECORDS_S:
            self._carry_out(NOTHING)
            self._follow_changes()
        if saved := self._position_saver.turn(self.board, self._led, self._cursor.taken):
            self._has_pending = saved.oldest_pending is not None
        # 9. Recalls, when nothing waits for the consumers. Last of what writes: full memory refuses them, and must not
        #    keep 7 and 8 from their turn.
        if not more:
            self._recall()
        found_more = more or handed or sweeping or self._rejected
        if found_more or self._recoverer.is_busy or self._events or self.board.unsure:
            return 0.0
        # 10. Ask for a notification, if 6 did not: only when nothing is left to do, so under load nobody waits for one.
        self._cursor.arm(self.board)
        return self._idle_s()

    def _idle_s(self) -> float:
        now, due_s = now_s(), self.board.next_due_s()
        slowed_s = IDLE_READ_S if due_s is None else max(0.0, due_s - now)
        waits_s = (one.wait_s(now) for one in (self._idle_sweep, self._position_saver))
        next_s = min(self._compare_s, self.board.due_records_s() + _RECORDS_S)
        return min(IDLE_READ_S / 2, slowed_s, max(0.0, next_s - now), *waits_s)

    # ---- 1: events ---------------------------------------------------------------------------------------------------

    def _take_events(self) -> None:
        for _ in range(len(self._events)):
            posted = self._events.popleft()
            if isinstance(posted, Report):
                posted.answer(self.board, now_s())
            elif isinstance(posted, bytes):
                if rank(posted) > rank(self._led.noted):
                    self._led.look()
            else:
                self._follow_roster(posted)
        if not self._led.is_guarded:
            self._led.look()
        self._follow_changes()

    def _follow_changes(self) -> None:
        """Follow what others have noted: nothing is planned of these tickets before their records have been read, nor
        for consumers that have begun to drain."""
        changed = self._led.changed
        self.board.doubt(name for kind, name in changed if kind == b"ticket")
        consumers = {name.decode(errors="replace") for kind, name in changed if kind == b"consumer"}
        if known := list(consumers & self.board.consumers.keys()):
            states = self._link.call("MGET", *map(self._keys.lease, known))
            for incarnation in (name for name, state in zip(known, states, strict=True) if state != b"live"):
                self.board.close(incarnation)
        if any(kind == b"rules" for kind, _ in changed):
            self._follow_rules()
        self._led.changed = set()  # not before: what Redis could not tell just now is followed in the next turn

    def _follow_roster(self, members: dict[str, RegisteredConsumer]) -> None:
        before, self._members = self._members, members
        drained = self.board.rules.of_consumers
        willing = {name for name, one in members.items() if one.accepts and drained.get(one.registration.name) is None}
        willing = willing - self.closed or willing
        for incarnation, member in members.items():
            known, registration = self.board.consumers.get(incarnation), member.registration
            accepts = incarnation in willing
            if member.alive and not self._recoverer.has(incarnation) and (known is None or known.accepts != accepts):
                name, slots = registration.name, registration.slots
                self.board.join(incarnation, name, slots, registration.capacity, accepts)
                facts: dict[str, Any] = {"consumer": incarnation, "state": member.state}
                event("consumer_joined" if known is None else "consumer_changed", **facts)
        gone = [name for name in self.board.consumers if name not in members or not members[name].alive]
        kept = {name: before[name] for name in gone if not self._lose(name) and name in before}
        self._members = members | kept

    def _follow_rules(self) -> None:
        """Read the rules, which may have changed. They include the consumers that an operator has drained."""
        rules = read_rules(self._link, self._keys)
        if rules.version != self.board.rules.version:
            event("rules_loaded", count=len(rules.rules), version=rules.version)
            for rule in rules.rules:
                if not rule.version:
                    why = "everything is paused until it is lifted"
                    event("rule_unreadable", level=ERROR, rule=rule.id, why=why)
                elif rule.target is Target.TENANT and not self._limits.marks.tenant:
                    why = "no tenants without USHER_TENANT_FIELD"
                    event("rule_without_effect", level=WARNING, rule=rule.id, why=why)
        self.board.follow(rules)
        self._follow_roster(self._members)

    def _lose(self, incarnation: str) -> bool:
        """Begin to recover a consumer whose lease was seen to have ended.

        Return False when it has not ended: the roster was read before the consumer came, and so it shows no lease.
        """
        if not self._recoverer.has(incarnation) and incarnation in self.board.consumers:
            questions = [("GET", self._keys.lease(incarnation)), ("HGET", self._keys.consumers, name_of(incarnation))]
            lease, registered = self._link.pipeline(questions)
            if isinstance(lease, bytes):
                return False
            if isinstance(lease, NotNow) and lease.kind not in SAME_MEMORY:
                raise lease
            left = registered is None  # after a clean drain; only the log needs this
            self.board.mark_lost(incarnation)
            tickets = len(self.board.consumers[incarnation].tickets)
            event("consumer_left" if left else "consumer_lost", consumer=incarnation, tickets=tickets)
            self.counts.lost += not left
            self._recoverer.add(incarnation, quietly=left)
        return True

    # ---- 4: records --------------------------------------------------------------------------------------------------

    def _read_records(self) -> None:
        """Read again the records of unsure tickets; when there are none, of those that nobody has reported on."""
        names = list(self.board.unsure)[:PAGE] or self._compare_quiet()
        if not names:
            return
        now = now_s()
        values, (seconds, micros) = self._link.all_of([("HMGET", self._keys.tickets, *names), ("TIME",)])
        self.board.learn_time(1000 * int(seconds) + int(micros) // 1000, now_s())
        for name, value in zip(names, values, strict=True):
            if value is None:
                self.board.clear_record(name)
                continue
            record = record_or_none(value) or unreadable(name)
            if self.board.is_of(name, record.owner):
                continue
            to_recover = self.board.set_record(name, record.owner, record.fence, record.ids, now)
            if to_recover is not None:
                self._recoverer.add(to_recover)
        if back := self.board.asked_back.take_came_back():
            self.counts.came_back += back
            event("tickets_recalled", count=back)

    def _compare_quiet(self) -> list[bytes]:
        """Ask Redis about the quiet tickets, on which nobody has reported for a while: reports and notes may have been
        lost; about all of them every few seconds, those of one consumer at a time. Return a page of those that nobody
        has, whose records are to be read. They are found at once: there may be a hundred thousand, and one that has
        moved on before its page comes is compared all the same."""
        now, every_s = now_s(), self._limits.reconcile_s
        if now < self._compare_s:
            return []
        if not self._quiet:
            for owner, names in self.board.quiet_since(now - every_s).items():
                size = len(names) if owner else PAGE
                self._quiet += [(owner, names[at : at + size]) for at in range(0, len(names), size)]
        owner, names = self._quiet.popleft() if self._quiet else ("", [])
        self._compare_s = now + (_PAUSE_S if self._quiet else every_s)
        notes = read_command(self._keys.changed, self._led.noted, None, 1)
        if not self._quiet and self._link.call(*notes):  # who wakes us when others change something has not done so
            self._led.look()
            self._follow_changes()
        if owner:
            self._settle(owner, names)
        return [] if owner else names

    def _settle(self, owner: str, names: Sequence[bytes]) -> None:
        """Free what is over of these quiet tickets of a consumer, although nobody has reported it: what is pending for
        nobody. Without a body it may be running still, for Redis has dropped its entry: its owner is asked."""
        pending, now = set(self._stream.pending_of(owner)), now_s()
        missing = {name: [one for one in ids if one not in pending] for name, ids in self.board.looked_at(names, now)}
        owners = self._led.owners_of(list(chain.from_iterable(missing.values())))
        alone = [one for one, owner in owners.items() if owner is None]
        there = self._led.in_stream(alone)
        gone, elsewhere = {*alone} - there, owners.keys() - alone
        self.board.free(owner, [(name, [one for one in ids if one in there]) for name, ids in missing.items()], now)
        if asked := self.board.held(name for name, ids in missing.items() if not gone.isdisjoint(ids)):
            self._led.recall(owner, asked)
        self.board.doubt(name for name, ids in missing.items() if not elsewhere.isdisjoint(ids))

    # ---- 5: hand-over ------------------------------------------------------------------------------------------------

    def _hand_over(self) -> int:
        """Plan and hand over until nothing is left or the turn is long enough. Return the number of entries. A plan
        that is refused as a whole has not happened, and the board forgets it."""
        handed = 0
        for _ in range(_PLANS_PER_TURN):
            self.made_progress()  # of many consumers' messages, each takes a while
            plan = self.board.plan(self._cursor.batch(self.board), now_s())
            if plan is None:
                break
            handed += plan.size if self._carry_out(plan) is not None else 0
            self._follow_changes()
            if self._events:
                break
        return handed

    def _carry_out(self, plan: HandOverPlan, new: NewEntries = NO_NEW_ENTRIES, count: int = 0) -> NewEntries | None:
        """Take ``new``, carry out a plan, and bring the index up to date. Return what was read, of up to ``count``
        entries. None: others have changed something, and nothing has happened; the board forgets the plan."""
        index = self.board.outdated(now_s())
        try:
            answer = self._led.turn(plan, new, count, index)
        except NotNow:
            self.board.withdraw(plan)
            raise
        if answer is None:
            self.board.withdraw(plan)
            return None
        fence, read = answer
        self.board.over.difference_update(index)
        self.board.confirm(plan, fence)
        return read

    # ---- 6: new entries ----------------------------------------------------------------------------------------------

    def _take_new_entries(self) -> bool:
        """Take what was read, by the plan that contains it, and read on. Return whether more can be done at once."""
        new = self._cursor.next(self.board, self._led, now_s())
        if new is None:
            return False
        unseen, kept, late, rejected = self._sort(new)
        # Once for all that comes again; and before it is taken, since we may end in between.
        comes_again = bool(late or kept)
        if comes_again and not self._comes_again:
            self._led.losses.set_back((new.found[0][0], self._cursor.given), None)
        self._comes_again = comes_again
        plan = (None if late else self.board.plan(self._cursor.batch(self.board), now_s())) or NOTHING
        count = self._cursor.count(self.board, new)
        try:
            new = replace(new, kept=kept) if kept else new
            read = self._carry_out(plan, new, count)
        except NotNow as refused:  # nothing has happened; what was read stays
            self._forget(unseen, str(refused))
            raise
        except GroupMissing:  # all else has happened, so these may come again
            self._position_saver.remember(new)
            raise
        if read is None:
            self._forget(unseen, "others have changed something")
            self._follow_changes()
            return True
        self._cursor.advance(new, read, count)
        self._position_saver.remember(new)
        self._rejected += rejected
        self.board.take_in(late)
        self._follow_changes()
        self._led.note_cuts()
        return self._cursor.may_have_more or (bool(new.found) and self.board.parked > 0)

    def _sort(
        self, new: NewEntries
    ) -> tuple[Sequence[TicketEntry], dict[str, list[bytes]], list[TicketEntry], list[Rejected]]:
        """Sort new entries by what becomes of them once the group has been given them: those that are on the board now,
        and in this plan or a later one; ``NewEntries.kept``; those that come again and that nobody has, of which some
        may belong before others of their ticket, so that nothing is handed over before these are on the board; dead
        letters."""
        usable, rejected = partition_entries(new.found)
        redelivered, unseen = self._cursor.split(usable)
        if self.board.rules.limits:
            unseen, over = self._within_limits(unseen, new)
            rejected += over
        kept, late = self._who_has([*redelivered, *self.board.arrive(unseen)])
        self.board.learn(self.marks.read(new.found))
        return unseen, kept, late, rejected

    def _within_limits(
        self, unseen: Sequence[TicketEntry], new: NewEntries
    ) -> tuple[list[TicketEntry], list[Rejected]]:
        """Part new entries at the limits of their tickets: what came first stays. Memory counts what is unfinished."""
        tenants = {mark.ticket: mark.tenant for mark in self.marks.read(new.found)}
        room, kept, over = dict[bytes, float](), list[TicketEntry](), list[Rejected]()
        for entry_id, name in unseen:
            if name not in room:
                rule, ticket = self.board.rules.limit_of(name, tenants.get(name, b"")), self.board.tickets.get(name)
                left = math.inf if rule is None or rule.ticket_limit is None else rule.ticket_limit
                room[name] = left - (0 if ticket is None else ticket.unfinished)
            room[name] -= 1
            if room[name] >= 0:
                kept.append((entry_id, name))
            else:
                over.append(Rejected(entry_id, name, OVER_LIMIT))
        return kept, over

    def _who_has(self, again: Sequence[TicketEntry]) -> tuple[dict[str, list[bytes]], list[TicketEntry]]:
        """Sort entries that come again, because somebody has set the group back, or because it was lost: those that
        somebody has, as in ``NewEntries``, and the others. Memory alone cannot tell: a late report of the first time
        may have freed them there."""
        kept: dict[str, list[bytes]] = {}
        late: list[TicketEntry] = []
        owners = self._led.owners_of([one for one, _ in again])
        for entry_id, ticket in again:
            if owners[entry_id]:
                kept.setdefault("", []).append(entry_id)
            elif name := self.board.who_has(ticket, entry_id):
                kept.setdefault(name, []).append(entry_id)
            else:
                late.append((entry_id, ticket))
        return kept, late

    def _forget(self, unseen: Sequence[TicketEntry], why: str) -> None:
        self.board.forget(unseen)
        event("new_entries_retried", level=DEBUG, why=why)

    def _recall(self) -> None:
        for incarnation, tickets in self.board.recalls(now_s()):
            asked = self.board.held(tickets)
            if self._led.recall(incarnation, asked):
                self.counts.recalled += len(asked)
            else:
                for name in tickets:
                    self.board.asked_back.forget(name)
        self._follow_changes()

    # ---- 7: dead letters ---------------------------------------------------------------------------------------------

    def _reject(self) -> None:
        """Write the dead letters that are due. They are remembered until Redis has them."""
        if self._rejected:
            over = self._rejected[: self._led.reject(self._rejected)]
            for reason, count in Counter(one.reason for one in over).items():
                event("messages_rejected", level=WARNING, count=count, reason=reason)
            self.on_rejected(over)
            del self._rejected[: len(over)]

    def on_end(self) -> None:
        self._drop_memory()
        self._link.close()
        if self._notifier is not None:
            self._notifier.close()
