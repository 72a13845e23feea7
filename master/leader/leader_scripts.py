"""The leader's atomic steps, typed: its turn, a transaction of plain commands, and one method per script of
``common/lua`` that carries an epoch.

Every method raises Fenced when the leader key no longer holds our epoch, and what ``Link.call`` raises.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any, NamedTuple

from usher.common.base.clock import now_s
from usher.common.base.errors import Fenced, GroupMissing, NotNow, RedisTrouble, ReplyUnknown
from usher.common.base.log import ERROR, WARNING, event
from usher.common.observability.metrics import LONG_US, DurationHistogram
from usher.common.protocol.keys import MASTER, Keys, LogKeys
from usher.common.protocol.marks import Mark
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.protocol.mishaps import DeclaredLoss, IdRange, format_id_range, gap_of, loss_command
from usher.common.protocol.stream_id import ZERO, GroupPosition, rank
from usher.common.redis.client import Arg, CommandRefused, Link, checked
from usher.common.redis.replies import (
    group_of,
    pack_entry,
    pack_part,
    pack_parts,
    read_command,
    redis_ms,
    span_of,
)
from usher.common.runtime.service import Service
from usher.master.leader.elector import Lead
from usher.master.leader.entries import (
    LONGEST_MARK,
    NO_MARKS,
    NO_NEW_ENTRIES,
    PEEKED,
    EntryParser,
    MarkReader,
    NewEntries,
    PeekedEntry,
    Rejected,
)
from usher.master.policy.board.plans import NOTHING, HandOverPlan

#: Messages per batch whose waiting time is measured, so that a batch of a thousand costs no more than one of ten.
_SAMPLED = 16
#: Most notes of others that are read at once: so many are kept (lua/includes/tell_leader.lua), give or take.
_MOST_NOTES = 10_000
#: Number of entries to read above which the size of the newest one is asked for, and of those handed over above which
#: their bodies come along at the first try only.
_MANY = 64
#: So often a turn is tried again that others have stopped by changes which do not concern it.
_TRIES = 5
#: Entries whose bodies are looked for at a time.
_BODIES = 100
_NOTHING: Mapping[bytes, bytes] = MappingProxyType({})


class LossBook:
    """Writer of the losses of one ticket stream. What it is told must have happened: it asks nobody."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    def declare(self, loss: DeclaredLoss) -> None:
        """Write a loss down, before what follows from it where that is ours to do: twice does no harm. Full memory
        refuses it: then only the log has it."""
        [reply] = self._link.pipeline([loss_command(self._keys, loss)])
        if isinstance(reply, Exception):
            event("loss_not_recorded", level=WARNING, loss=loss.describe(), why=str(reply))

    def cut(self, count: int, position: bytes | None = None, source: str = "") -> None:
        """Tell of ``count`` entries that were cut before they were read, if there are any; ``position``: behind it.
        ``source``: they were cut there, from a stream that is gathered."""
        if not count:
            return
        stream, gap = source or self._keys.stream, None
        facts: dict[str, Any] = {"stream": stream, "count": count}
        if position is not None:
            facts["behind"] = position
            with contextlib.suppress(NotNow):  # the count is what matters
                gap = gap_of(position, span_of(self._link, stream))
        why = "trimmed or deleted before they were read: MAXLEN or MINID of an XADD, XTRIM or XDEL by hand"
        event("unread_entries_cut", level=ERROR, **facts, why=why)
        self.declare(DeclaredLoss("unread_cut", lost=gap, messages=count, stream=source))

    def set_back(self, repeats: IdRange | None, lost: IdRange | None) -> None:
        """Tell of what a group was given that knows nothing of that any more."""
        why = "Redis lost its last moments (power loss, failover), or somebody set the group back"
        ids: dict[str, Any] = {"may_repeat": format_id_range(repeats), "lost": format_id_range(lost)}
        event("group_set_back", level=ERROR, stream=self._keys.stream, **ids, why=why)
        self.declare(DeclaredLoss("set_back", repeats, lost))


class LeaderCounters:
    """Counts of what a leader did, since the start of the process, over all epochs in which it led. The dispatcher's
    thread keeps them, at a few additions per batch; any thread may read them."""

    def __init__(self) -> None:
        self.adoptions = 0
        self.handed_over = 0
        self.batches = 0
        self.lost = 0
        self.recalled = 0
        self.came_back = 0
        self.calls = DurationHistogram()
        self.waits = DurationHistogram(LONG_US)
        #: From when the loss of a consumer was noticed to when its entries were back.
        self.recoveries = DurationHistogram(LONG_US)
        #: Called with the plan that was handed over and the time at which the call began (nanoseconds since the epoch):
        #: for tracing, if it is on.
        self.on_handed_over: Callable[[HandOverPlan, int], None] | None = None

    def hand_over(self, plan: HandOverPlan, began_ns: int) -> None:
        now_ns = time.time_ns()
        parts = [part for target in plan.targets for part in target.parts]
        self.handed_over += plan.size
        self.batches += 1
        self.calls.add([(now_ns - began_ns) // 1000])
        step = len(parts) // _SAMPLED + 1
        self.waits.add([now_ns // 1000 - 1000 * int(part.ids[0].partition(b"-")[0]) for part in parts[::step]])
        if self.on_handed_over is not None:
            self.on_handed_over(plan, began_ns)


class Packet(NamedTuple):
    """The commands of a hand-over. ``fence``: 0 where no ticket changes its owner. ``taken``: as it is noted then.
    ``left``: the entries that ``master`` gets, by the last command."""

    commands: list[tuple[Arg, ...]]
    fence: int
    taken: bytes
    left: list[bytes]


class KeptBodies:
    """Packed bodies of what was read and waits for a moment, to go with its first hand-over; after a few seconds, or
    some MiB, owners read them themselves. (What a producer deletes in these seconds may run all the same.)"""

    _SECONDS, _BYTES = 4.0, 32 << 20

    def __init__(self) -> None:
        self.bodies: dict[bytes, bytes] = {}
        self._size, self._until_s = 0, 0.0

    def age(self, now_s: float) -> None:
        """Let go of all, every few seconds or MiB."""
        if now_s >= self._until_s or self._size >= self._BYTES:
            self.bodies, self._size, self._until_s = {}, 0, now_s + self._SECONDS

    def add(self, bodies: Mapping[bytes, bytes], ids: Iterable[bytes]) -> None:
        for one in ids:
            if body := bodies.get(one):
                self.bodies[one] = body
                self._size += len(body)

    def drop(self, ids: Iterable[bytes]) -> None:
        for one in ids if self.bodies else ():
            self.bodies.pop(one, None)


class Page(NamedTuple):
    """A page of the entries pending under ``master``, or taken back from a dead incarnation. ``last`` is None after the
    end."""

    last: bytes | None
    found: list[PeekedEntry]
    gone: list[bytes]


class Swept(NamedTuple):
    """The result of one call of the idle sweep: strays with their former owners."""

    cursor: bytes
    strays: list[tuple[PeekedEntry, bytes]]
    gone: list[bytes]


class Due(NamedTuple):
    """A delayed message that is due: its member of ``LogKeys.due``, and the name of its target stream as the message
    gives it."""

    member: bytes
    named: bytes


class DueLook(NamedTuple):
    """Delayed messages that are due. ``until``: the last id of ``LogKeys.delayed`` that was put in order. ``wait_ms``:
    until the next is due, if nothing new comes; None: none waits. ``unreadable``: id of those that became dead letters,
    and why; b"": somebody deleted it."""

    until: bytes
    wait_ms: int | None
    due: list[Due]
    unreadable: list[tuple[bytes, bytes]]


def _found(flat: Sequence[Any], step: int = 2) -> list[PeekedEntry]:
    return [
        PeekedEntry(entry_id, *ticket) if type(ticket) is list else PEEKED((entry_id, ticket, 0, b"", b""))
        for entry_id, ticket in zip(flat[::step], flat[1::step], strict=True)
    ]


class LeaderScripts:
    """The scripts of one leader in one epoch."""

    def __init__(
        self,
        link: Link,
        keys: Keys,
        epoch: int,
        ticket_field: str,
        longest_message: int = 0,
        counts: LeaderCounters | None = None,
        marks: MarkReader = NO_MARKS,
    ) -> None:
        self._link = link
        self._keys = keys
        tenant_field, priority_field = marks.fields
        self._parse_arguments = (ticket_field, LONGEST_TICKET, longest_message, tenant_field, priority_field)
        self._parser = EntryParser(ticket_field.encode(), longest_message, tenant_field, priority_field)
        self.marks = marks
        self._counts = counts or LeaderCounters()
        self.epoch = epoch
        self.losses = LossBook(link, keys)
        # The connection watches the epoch, which was seen to be ours, and what others note in `changed`.
        self.is_guarded, self._connection = False, 0
        self.noted = ZERO  # the last of these notes that was read
        # Kind and name of what others have noted: tickets whose records they have changed, incarnations that come,
        # drain, or go, rules. Who follows that empties it.
        self.changed: set[tuple[bytes, bytes]] = set()
        self._fence, self._behind_ms = 0, 0.0  # the last one; what Redis' clock has more than ours
        self._taken = b""  # as it is noted
        self._kept = KeptBodies()
        self.highest = 0  # rank of the highest id that anybody was given, as far as it is known
        # The last position of the group of which Redis said how many entries it had been given by then, this number,
        # how many we were given since, and how many we have taken that it has not counted yet.
        self._given: tuple[bytes, int | None, int, int] = (ZERO, None, 0, 0)
        self._cuts: list[tuple[int, bytes, bytes, int]] = []  # as note_cut has them: to be counted

    def check(self) -> None:
        self.reject(())  # every script checks that first; without entries this one does nothing else

    def begin(self, *, is_new: bool = False) -> None:
        """Begin the epoch: no turn of another leader counts any more, and what was read and not taken comes again.
        ``is_new``: the group was made just now. Raises GroupMissing."""
        keys = self._keys
        groups = LogKeys(keys.stream).groups
        script_keys = (keys.stream, keys.leader, keys.epoch, keys.taken, groups, keys.counters, keys.changed)
        _, position, given, fence, self.noted = self._run("begin", script_keys, ("1" if is_new else "",))
        self._fence, self._given = int(fence), (position, None if given == b"" else int(given), 0, 0)
        self._taken, self.highest = b"%s %s" % (position, str(given).encode() if given != b"" else b""), rank(position)
        self._behind_ms = redis_ms(self._link) - 1000 * now_s()
        self.look()
        # Who may not MULTI hears of it before anything depends on it.
        self._link.transaction(self._connection, [])
        self.look()

    # ---- the turn ----------------------------------------------------------------------------------------------------

    @property
    def _watching(self) -> list[tuple[Arg, ...]]:
        """The commands that go with each transaction, behind it. The WATCH is the connection's, so a turn counts only
        on the one that it was sent over; and it must be there before we look at what the next plan rests on."""
        keys = self._keys
        notes = read_command(keys.changed, self.noted, None, _MOST_NOTES)
        return [("WATCH", keys.epoch, keys.changed), ("GET", keys.epoch), notes]

    def look(self) -> None:
        """Look at the epoch, and at what others have changed: a turn from now on happens only if nobody has changed
        more."""
        self.is_guarded = False
        self._guard(self._link.all_of([("UNWATCH",), *self._watching])[1:])

    def _guard(self, replies: list[Any]) -> set[tuple[bytes, bytes]]:
        """Take the replies to ``_watching``. Return what is new of the notes, as in ``changed``."""
        _, epoch, told = checked(replies)
        if epoch != str(self.epoch).encode():
            raise Fenced(f"another master leads {self._keys.stream} (our epoch was {self.epoch})")
        entries = told[0][1] if told else []
        if len(entries) == _MOST_NOTES:
            raise ReplyUnknown("others have changed more than is noted")
        noted = {(fields[0], fields[1]) for _, fields in entries}
        if entries:
            self.noted = entries[-1][0]
            self.changed |= noted
        self.is_guarded, self._connection = True, self._link.connections
        return noted

    def turn(
        self,
        plan: HandOverPlan,
        new: NewEntries = NO_NEW_ENTRIES,
        count: int = 0,
        index: Mapping[bytes, bytes] = _NOTHING,
    ) -> tuple[int, NewEntries] | None:
        """Read up to ``count`` entries more, and carry out a plan, which takes all of the ``new`` entries, in one
        transaction. One that was told is read with them, and the first of them if it is still there. Those of ``new``
        that are not in the plan are pending under ``master`` then. What was read is in nobody's list before a later
        turn takes it, or a new epoch is given it again. ``index``: records that are not up to date, of tickets that are
        not in the plan; empty: the ticket is over.

        Return the fence of the tickets that changed their owner, and what was read. Whose lease has ended, the roster
        tells (``ConsumerRegistry``): what one was given that has just died is taken back like all that it has.

        None: others have changed something that the plan may rest on (``changed`` and what follows it), and nothing
        happened. Raises Fenced, GroupMissing, and what ``Link.call`` raises: nothing happened, or it is not known what
        did.
        """
        if not self.is_guarded:
            self.look()
        if self.changed:
            return None
        keys, began_ns, count = self._keys, time.time_ns(), count + new.is_told
        self._kept.age(now_s())
        if new.found and rank(new.found[0][0]) <= self.highest:  # somebody has set the group back
            new, self._kept = replace(new, bodies=_NOTHING), KeptBodies()
        read = ("XREADGROUP", "GROUP", keys.group, "master", "COUNT", count, "NOACK", "STREAMS", keys.stream, ">")
        # the next ones may be as large as the newest
        asked = [("XREVRANGE", keys.stream, "+", "-", "COUNT", 1)] if count > _MANY else []
        # A note of others that does not concern the plan stops it all the same, as long as it is on its way: of many
        # entries, without their bodies it is there sooner.
        for tried in range(1 + _TRIES):
            packet = self._packet(plan, new, index, self._next_fence(), not tried or plan.size <= _MANY)
            commands = [*((read, ("XINFO", "GROUPS", keys.stream)) if count else ()), *packet.commands]
            done, told, is_concerned = self._transaction(plan, index, commands, asked)
            if done is not None or is_concerned:
                break
        if done is None:
            return None
        self._fence, self._taken = packet.fence or self._fence, packet.taken or self._taken
        self.highest = max(self.highest, rank(new.found[-1][0] if new.found else new.position or ZERO))
        if packet.left:
            self._kept.add(new.bodies, packet.left)
            if missing := len(packet.left) - len(done[len(packet.commands) + (1 if count else -1)]):
                self._cuts.append((missing, b"", new.found[-1][0], 0))
        if plan.targets:
            self._kept.drop(chain.from_iterable(part.ids for target in plan.targets for part in target.parts))
            self._counts.hand_over(plan, began_ns)
        newest, first = told[0] if told else [], new.found[0][0] if new.is_told else b""
        return packet.fence, self._was_read(done, count, newest, first) if count else NO_NEW_ENTRIES

    def _packet(
        self, plan: HandOverPlan, new: NewEntries, index: Mapping[bytes, bytes], fence: int, has_bodies: bool
    ) -> Packet:
        """Make the commands by which entries change owner, and the index and the inboxes of the new owners say so. All
        claims are with FORCE: what is new is in nobody's list yet, and what is parked nobody of ours has ended, whoever
        took it out.

        An inbox gets one record (``InboxRecord``): fence (of tickets that change their owner), and parts: of each
        ticket its name, its fence if it keeps one, and its entries. A body comes along only with what, as far as this
        leader knows, nobody was given before: who has it already must look whether it is pending still."""
        keys, commands = self._keys, list[tuple[Arg, ...]]()
        read, kept = (new.bodies.get, self._kept.bodies.get) if has_bodies else (_NOTHING.get, _NOTHING.get)
        records: dict[bytes, bytes] = {}
        planned: set[bytes] = set()
        each, has_new_owners = [], False
        for target in plan.targets:
            head = b"%s %d " % (target.incarnation.encode(), fence)
            packed = []
            for part in target.parts:
                ticket, believed, its_ids, held = part
                line = its_ids[0] if len(its_ids) == 1 else b" ".join(its_ids)
                if part.changes_owner:
                    records[ticket], its_fence, has_new_owners = head + line, b"", True
                else:
                    records[ticket] = b" ".join((believed, *held, line))
                    its_fence = believed.rpartition(b" ")[2]
                entries = [read(one) or kept(one) or pack_entry((one,)) for one in its_ids]
                packed.append(pack_part(ticket, its_fence, entries))
            ids = [one for part in target.parts for one in part.ids]
            planned.update(ids)
            each.append((target.incarnation, ids, pack_parts(packed)))
        left = [entry[0] for entry in new.found if entry[0] not in planned]
        last, given = (new.found[-1][0], new.given) if new.found else (new.position, self._given[1])
        if new.kept:
            had = set(chain.from_iterable(new.kept.values()))
            left = [one for one in left if one not in had]
        for incarnation, ids, parts in each:
            commands += [
                ("XCLAIM", keys.stream, keys.group, incarnation, 0, *ids, "FORCE", "JUSTID"),
                ("XADD", keys.inbox(incarnation), "*", "fence", fence, "parts", parts),
            ]
        over = [ticket for ticket, record in index.items() if not (record or ticket in records)]
        records = {ticket: record for ticket, record in index.items() if record} | records
        if records:
            commands.append(("HSET", keys.tickets, *chain.from_iterable(records.items())))
        if over:
            commands.append(("HDEL", keys.tickets, *over))
        if has_new_owners:
            commands.append(("HSET", keys.counters, "fence", fence))
        for name, ids in new.kept.items():
            if name:
                commands.append(("XCLAIM", keys.stream, keys.group, name, 0, *ids, "FORCE", "JUSTID"))
        if not new.found and last != self._given[0]:
            given = None
        taken = b"%s %s" % (last, b"" if given is None else b"%d" % given) if last else self._taken
        if taken != self._taken:
            commands.append(("SET", keys.taken, taken))
        if left:
            commands.append(("XCLAIM", keys.stream, keys.group, "master", 0, *left, "FORCE", "JUSTID"))
        return Packet(commands, fence if has_new_owners else 0, taken, left)

    def _next_fence(self) -> int:
        """Return a fence above all former ones. It follows Redis' clock, too: numbers.lua says why."""
        return max(self._fence + 1, int(self._behind_ms + 1000 * now_s()) * 1024)

    def _transaction(
        self,
        plan: HandOverPlan,
        index: Mapping[bytes, bytes],
        commands: Sequence[Sequence[Arg]],
        asked: Sequence[Sequence[Arg]],
    ) -> tuple[Sequence[Any] | None, Sequence[Any], bool]:
        """Return the replies to both. None for the former: nothing happened, since others have noted changes. With them
        comes whether these concern the plan, or a record in ``index``."""
        self.is_guarded = False  # also when nothing happens: then nobody has looked at the answers behind it
        done, behind = self._link.transaction(self._connection, commands, [*self._watching, *asked])
        try:
            noted = self._guard(behind[:3])
        except NotNow as refused:  # the transaction may have happened, and this must not look as if it had not
            raise ReplyUnknown(f"whether the epoch is ours: {refused}") from refused
        if done is None:
            if not noted:
                raise ReplyUnknown("a turn was refused in our own epoch, and nobody has noted a change")
            targets = {(b"consumer", target.incarnation.encode()) for target in plan.targets}
            planned = {part.ticket for target in plan.targets for part in target.parts} | index.keys()
            concerns = targets | {(b"ticket", name) for name in planned}
            return None, [], any(kind == b"rules" for kind, _ in noted) or not noted.isdisjoint(concerns)
        if missing := next((one for one in done if isinstance(one, GroupMissing)), None):
            raise missing
        if failed := next((one for one in done if isinstance(one, Exception)), None):
            # All else has happened: so an owner may not learn of what it was given. It ends, and that is taken back.
            for target in plan.targets:
                with contextlib.suppress(RedisTrouble, CommandRefused, Fenced):
                    self.revoke(target.incarnation)
            raise ReplyUnknown(f"a turn failed in part: {failed}")
        if odd := next((one for one in behind if isinstance(one, Exception)), None):
            raise ReplyUnknown(f"what a turn asks behind it: {odd}")
        return done, behind[3:], False

    def _was_read(self, replies: Sequence[Any], count: int, newest: Any, told: bytes) -> NewEntries:
        """``told``: it was taken, and if it is not the first that was read it is gone, and Redis counts it later."""
        entries = replies[0][0][1] if replies[0] else []
        facts = group_of(replies[1], self._keys.group, None) or {}
        position, given = facts[b"last-delivered-id"], facts.get(b"entries-read")
        at, before, since, gone = self._given
        gone += bool(told) and [one[0] for one in entries[:1]] != [told]
        since += len(entries)
        if given is None:
            self._given = at, before, since, gone
        else:
            left = gone if before is None else before + since + gone - given
            if left < 0:
                self._cuts.append((given - (before or 0), at, position, since + gone))
            self._given = position, given, 0, max(0, min(gone, left))
        found = self._parser.parse(position, entries, len(entries) < count, given)
        largest = sum(map(len, newest[0][1])) if newest else 0
        return found if largest <= found.largest else replace(found, largest=largest)

    @property
    def server_run(self) -> str:
        return self._link.server_run

    def told(self, position: bytes, entry: tuple[bytes, Sequence[bytes]]) -> NewEntries:
        """Return an entry, (id, fields), of which our server told, to be taken although it is yet to be read."""
        return replace(self._parser.parse(position, [entry], False), is_told=True)

    def recall(self, incarnation: str, tickets: Iterable[tuple[bytes, bytes, Sequence[bytes]]]) -> bool:
        """Ask an incarnation to give tickets back, each with its fence and all that may have been started of it. What
        it has started by now, it keeps, and does not answer. Return False if others have changed something meanwhile:
        then it was not asked. An inbox that is gone does not come into being again."""
        parts = [pack_part(ticket, fence, [pack_entry((one,)) for one in ids]) for ticket, fence, ids in tickets]
        asked = ("XADD", self._keys.inbox(incarnation), "NOMKSTREAM", "*", "recall", pack_parts(parts))
        if not self.is_guarded:
            self.look()
        return not self.changed and self._transaction(NOTHING, _NOTHING, [asked], ())[0] is not None

    def note_cuts(self) -> None:
        """Count, and tell of, entries that are gone and that turns have found missing: they were not handed over."""
        while self._cuts:
            keys, (_, after, until, _) = self._keys, self._cuts[0]
            cut = self._run("note_cut", (keys.stream, keys.leader, keys.counters), self._cuts[0])[1]
            self.losses.cut(int(cut), after or until)
            del self._cuts[0]

    # ---- scripts -----------------------------------------------------------------------------------------------------

    def read_parked(self, after: bytes | None, count: int) -> Page:
        return self.take_back("master", count, after) or Page(None, [], [])

    def tenants_of(self, entries: Sequence[tuple[bytes, bytes]]) -> Sequence[Mark]:
        """Read the marks of entries, (id, ticket), that consumers have, as far as they tell the tenant."""
        name, ids = self.marks.fields[0], [entry_id for entry_id, _ in entries]
        asked: list[Arg] = [LONGEST_MARK, "1", 1, name, *ids]
        values = self._link.run("read_fields", (self._keys.stream,), asked) if name else []
        marks = chain((value[0] if value else b"" for (value,) in values), repeat(b""))  # fewer where bodies are large
        found = [
            PeekedEntry(entry_id, ticket, 0, mark) for (entry_id, ticket), mark in zip(entries, marks, strict=False)
        ]
        return self.marks.read(found)

    def reject(self, entries: Iterable[Rejected], owner: str = MASTER.decode()) -> int:
        """Make dead letters of these entries. Return how many of them, from the first one, are over now: not all where
        bodies are large. ``owner``: a dead incarnation, of whose entries only those count that Redis has dropped."""
        keys = self._keys
        args = [owner, *chain.from_iterable(entries)]
        return int(self._run("reject", (keys.stream, keys.leader, keys.dead, keys.letters), args)[1])

    def take_back(self, name: str, count: int, after: bytes | None = None) -> Page | None:
        """Bring one page of a dead incarnation's entries to ``master``. None: its lease still runs, and nothing
        happened."""
        keys, own = self._keys, (self._keys.noted(name), self._keys.inbox(name))
        script_keys = (keys.stream, keys.leader, keys.lease(name), keys.dead, keys.attempts, *own, keys.letters)
        start = b"-" if after is None else b"(" + after
        reply = self._run("take_back", script_keys, (name, start, count, *self._parse_arguments))
        return None if reply[0] == b"ALIVE" else Page(reply[2] or None, _found(reply[3]), reply[4])

    def owners_of(self, ids: Sequence[bytes]) -> dict[bytes, bytes | None]:
        """Return for whom each of these is pending; None: for nobody."""
        asked = [("XPENDING", self._keys.stream, self._keys.group, one, one, 1) for one in ids]
        found = self._link.all_of(asked) if asked else ()
        return {one: rows[0][1] if rows else None for one, rows in zip(ids, found, strict=True)}

    def in_stream(self, ids: Sequence[bytes]) -> set[bytes]:
        """Return those of these entries that have a body."""
        there = set[bytes]()
        for at in range(0, len(ids), _BODIES):
            asked = [("XRANGE", self._keys.stream, one, one) for one in ids[at : at + _BODIES]]
            there.update(found[0][0] for found in self._link.all_of(asked) if found)
        return there

    def left_behind(self, incarnation: str, held: Iterable[tuple[bytes, Sequence[bytes]]]) -> list[tuple[bytes, bytes]]:
        """Look for what a dead incarnation, whose list is empty, had in processing, by ticket, and did not come back.
        Return (id, ticket) of what somebody has taken to ``master`` by hand: it must be known before anything later of
        the ticket is planned. What nobody has is over, or becomes a dead letter: its body is gone, and Redis >= 7 has
        dropped it at a claim (renew, sweep) while its owner lived."""
        left = [(one, ticket) for ticket, ids in held for one in ids]
        owners = self.owners_of([one for one, _ in left])
        gone = [Rejected(*entry, "body_gone") for entry in left if not owners[entry[0]]]
        while gone:
            del gone[: self.reject(gone, incarnation)]
        return [entry for entry in left if owners[entry[0]] == MASTER]

    def sweep(self, known: Sequence[str], min_idle_ms: int, cursor: bytes, count: int, highest: bytes = b"") -> Swept:
        """Take one step of the idle sweep; entries owned by ``known`` incarnations with a living lease are left
        alone, and those above ``highest``."""
        keys = self._keys
        script_keys = [keys.stream, keys.leader, keys.dead, keys.tickets, keys.taken, *map(keys.lease, known)]
        script_keys.append(keys.letters)
        args = (min_idle_ms, cursor, count, *self._parse_arguments, highest, *known)
        _, cursor, flat, gone = self._run("sweep", script_keys, args)
        return Swept(cursor, list(zip(_found(flat, 3), flat[2::3], strict=True)), gone)

    def save_position(self, takeable: int = 0) -> GroupPosition:
        """Save the group's position, and how many messages another consumer could take now, and tell of what was cut
        unread since the last time. Raises GroupMissing."""
        keys = self._keys
        _, delivered, oldest, cut = self._run(
            "save_position",
            (keys.stream, keys.leader, keys.position, LogKeys(keys.stream).groups, keys.counters, keys.taken),
            (takeable,),
        )
        self.losses.cut(cut, delivered)
        return GroupPosition(delivered, oldest or None)

    def note_chart(self, place: str, point: bytes) -> None:
        """Write a point of the charts. One that comes late, when we lead no more, does no harm: all that it goes by is
        in Redis, and it says of when it is."""
        self.check()
        self._link.call("HSET", self._keys.charts, place, point)

    def due_delayed(self, most: int) -> DueLook:
        """Put delayed messages in the order of their times. Return up to ``most`` that are due."""
        log, keys = LogKeys(self._keys.stream), self._keys
        script_keys = (log.delayed, log.due, log.due_until, keys.leader, keys.dead, keys.letters)
        _, until, wait_ms, told, *flat = self._unfenced(
            self._link.run("due_delayed", script_keys, (str(self.epoch), most, self._parse_arguments[0]))
        )
        unreadable = list(zip(told[::2], told[1::2], strict=True))
        due = list(map(Due, flat[::2], flat[1::2]))
        return DueLook(until, None if wait_ms == b"-1" else int(wait_ms), due, unreadable)

    def send_delayed(self, due: Sequence[tuple[Due, str | None]], again_ms: int) -> list[bytes | str]:
        """Add messages to their target streams; None: not one of ours. Return, for each, its new id, b"" if it no
        longer waits, or the reason, as text, why it was not sent: then it is due again in ``again_ms``."""
        log = LogKeys(self._keys.stream)
        streams = list(dict.fromkeys(stream for _, stream in due if stream is not None))
        numbers = {stream: number for number, stream in enumerate(streams, 1)}
        args = [part for one, stream in due for part in (one.member, numbers.get(stream or "", 0))]
        script_keys = (log.delayed, log.due, self._keys.leader, *streams)
        _, *told = self._unfenced(self._link.run("send_delayed", script_keys, (str(self.epoch), again_ms, *args)))
        return [one[0].decode(errors="replace") if isinstance(one, list) else one for one in told]

    def revoke(self, incarnation: str) -> bool:
        script_keys = (self._keys.lease(incarnation), self._keys.changed, self._keys.leader)
        reply = self._link.run("drain", script_keys, (incarnation, 0, str(self.epoch)))
        return bool(self._unfenced(reply) == b"OK")

    def reap(self, incarnation: str, name: str, stored: bytes) -> bool:
        keys = self._keys
        own = (keys.lease(incarnation), keys.inbox(incarnation), keys.consumers, keys.leader)
        script_keys = (keys.stream, *own, keys.noted(incarnation), keys.unproven(incarnation))
        args = (keys.group, incarnation, name, stored, str(self.epoch))
        return bool(self._unfenced(self._link.run("deregister", script_keys, args)) == b"OK")

    def forget_attempts(self, noted: str, cursor: bytes, count: int) -> tuple[bytes, list[bytes]]:
        """Forget the attempts, or the errors, of messages that are over, one page of the hash ``noted`` from
        ``cursor``. Return the next cursor and the fields that were deleted. Raises GroupMissing."""
        keys = self._keys
        _, following, gone = self._run(
            "forget_attempts", (keys.stream, keys.leader, noted, keys.taken), (cursor, count)
        )
        return following, list(gone)

    def recount_letters(self, place: bytes, count: int) -> bytes:
        """Mend the index of the dead letters from ``place``, b"" at first, as far as it is wrong; return where to go
        on, b"" at the end."""
        keys = (self._keys.dead, self._keys.leader, self._keys.letters, self._keys.recounted)
        return bytes(self._unfenced(self._link.run("recount_letters", keys, (str(self.epoch), place, count)))[1])

    def _run(self, step: str, keys: Sequence[str], args: Iterable[Any]) -> Any:
        return self._unfenced(self._link.run(step, keys, (self._keys.group, str(self.epoch), *args)))

    def _unfenced(self, reply: Any) -> Any:
        if (reply[0] if isinstance(reply, list) else reply) == b"FENCED":
            raise Fenced(f"another master leads {self._keys.stream} (our epoch was {self.epoch})")
        return reply


class LeaderService(Service):
    """Service that works while this master leads, each turn under the epoch with which it began. ``standby_s``: while
    it does not, it looks so often whether it does."""

    standby_s = 60.0

    def __init__(self, link: Link, keys: Keys, lead: Lead, ticket_field: str = "") -> None:
        super().__init__()
        self._link, self._keys, self._lead = link, keys, lead
        self._ticket_field = ticket_field

    def run_once(self) -> float:
        epoch = self._lead.epoch
        if epoch is not None:
            try:
                return self.work(LeaderScripts(self._link, self._keys, epoch, self._ticket_field))
            except Fenced:
                self._lead.lost(epoch)
        return self.stand_by()

    def work(self, steps: LeaderScripts) -> float:
        """Do one turn. Returns the seconds to wait before the next one."""
        raise TypeError(f"{type(self).__name__} must define work")

    def stand_by(self) -> float:
        """Let another master lead. Returns the seconds after which to look again who does."""
        return self.standby_s
