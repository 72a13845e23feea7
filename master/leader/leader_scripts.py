"""The leader's atomic steps, typed: one method per script of ``common/lua`` that carries an epoch.

Every method raises Fenced when the leader key no longer holds our epoch, and what ``Link.call`` raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from usher.common.base.errors import Fenced, NotNow, ReplyUnknown, UsherError
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.marks import Mark
from usher.common.protocol.message import LONGEST_TICKET
from usher.common.protocol.stream_id import GroupPosition
from usher.common.redis.replies import Entry, pack_bodies, parse_own, separator
from usher.common.redis.scripts import ScriptRunner, ids_argument, sizes_argument
from usher.common.runtime.histograms import LONG_US, DurationHistogram
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
    digest_of,
)
from usher.master.leader.losses import LossBook
from usher.master.policy.board.plans import HandOverPlan, HandOverReply, TargetReply, TicketPlan

#: Messages per batch whose waiting time is measured, so that a batch of a thousand costs no more than one of ten.
_SAMPLED = 16


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
        self.recoveries = DurationHistogram(LONG_US)
        #: Called with the plan that was handed over and the time at which the call began (nanoseconds since the epoch):
        #: for tracing, if it is on.
        self.on_handed_over: Callable[[HandOverPlan, int], None] | None = None

    def hand_over(self, plan: HandOverPlan, reply: HandOverReply, began_ns: int) -> None:
        now_ns = time.time_ns()
        parts = [
            part
            for target, answer in zip(plan.targets, reply.targets, strict=True)
            if answer.state == "OK"
            for part in target.parts
        ]
        self.handed_over += sum(len(part.ids) for part in parts)
        self.batches += 1
        self.calls.add([(now_ns - began_ns) // 1000])
        step = len(parts) // _SAMPLED + 1
        self.waits.add([now_ns // 1000 - 1000 * int(part.ids[0].partition(b"-")[0]) for part in parts[::step]])
        if self.on_handed_over is not None:
            self.on_handed_over(plan, began_ns)

    def recovered(self, seconds: float) -> None:
        """Count a lost consumer whose entries are back, this many seconds after its loss was noticed."""
        self.recoveries.add([int(seconds * 1_000_000)])


class RulesMoved(UsherError):
    """The live rules have changed since the leader read them: nothing was done under the old ones."""


class NotificationMismatch(UsherError):
    """The entries that a notification brought are not, or no longer, the next ones: nothing was done with them."""


class ParkedPage(NamedTuple):
    """A page of the entries pending under ``master``. ``last`` is None after the end."""

    last: bytes | None
    found: list[PeekedEntry]
    gone: list[bytes]


class TakenPage(NamedTuple):
    """A page of entries taken back from a dead incarnation. ``alive`` means that nothing was taken: its lease still
    runs."""

    alive: bool
    size: int
    found: list[PeekedEntry]
    gone: list[bytes]


class Freed(NamedTuple):
    """The end of a recovery: tickets that other consumers own, and (id, ticket) of entries that were under ``master``
    unseen, or are there again (``restored``): nobody had them pending."""

    others: list[bytes]
    parked: list[tuple[bytes, bytes]]
    restored: tuple[bytes, ...] = ()


class PositionLook(NamedTuple):
    """The group's position as it was saved; how many entries were cut unread since the last look; and how many are
    pending for each name of the group."""

    position: GroupPosition
    cut: int
    pending: dict[bytes, int]


class Swept(NamedTuple):
    """The result of one call of the idle sweep: strays with their former owners."""

    cursor: bytes
    strays: list[tuple[PeekedEntry, bytes]]
    gone: list[bytes]


class Rejoined(NamedTuple):
    """Entries that did not go back to an owner: ``over`` stay under ``master``; ``done`` were done before and are
    acknowledged."""

    over: list[bytes]
    done: list[bytes]


class Due(NamedTuple):
    """A delayed message that is due: its member of ``LogKeys.due``, and the name of its target stream as the message
    gives it."""

    member: bytes
    named: bytes


class DueLook(NamedTuple):
    """Delayed messages that are due. ``until``: the last id of ``LogKeys.delayed`` that was put in order. ``wait_ms``:
    until the next is due, if nothing new comes; None: none waits. ``unreadable``: id of those that became dead letters,
    and why."""

    until: bytes
    wait_ms: int | None
    due: list[Due]
    unreadable: list[tuple[bytes, bytes]]


def _found(flat: Sequence[Any], step: int = 2) -> list[PeekedEntry]:
    return [
        PeekedEntry(entry_id, *ticket) if type(ticket) is list else PEEKED((entry_id, ticket, 0, b"", b""))
        for entry_id, ticket in zip(flat[::step], flat[1::step], strict=True)
    ]


def _take_arguments(new: NewEntries, planned: Sequence[Sequence[bytes]]) -> tuple[bytes | str, ...]:
    if not new.found:
        return new.position, b"", b"[]", b"[]", ""
    ids = list(map(itemgetter(0), new.found))
    seen, taken = set(ids), set(chain.from_iterable(planned))
    unplanned, parked = (
        ([], []) if seen == taken else ([entry_id for entry_id in ids if entry_id not in taken], list(taken - seen))
    )
    return new.position, ids[-1], ids_argument((unplanned,)), ids_argument((parked,)), new.digest


def _blobs(plan: HandOverPlan, bodies: Mapping[bytes, list[bytes]]) -> list[bytes]:
    targets = enumerate(plan.targets) if bodies else ()
    owners = {one: number for number, target in targets for part in target.parts for one in part.ids}
    found: list[list[tuple[bytes, ...]]] = [[] for _ in plan.targets]
    for entry_id, fields in bodies.items():
        if (number := owners.get(entry_id)) is not None:
            found[number].append((entry_id, *fields))
    return list(map(pack_bodies, found))


class LeaderScripts:
    """The scripts of one leader in one epoch."""

    def __init__(
        self,
        scripts: ScriptRunner,
        keys: Keys,
        epoch: int,
        ticket_field: str,
        longest_message: int = 0,
        counts: LeaderCounters | None = None,
        marks: MarkReader = NO_MARKS,
    ) -> None:
        self._scripts = scripts
        self._keys = keys
        tenant_field, priority_field = marks.fields
        self._parse_arguments = (ticket_field, LONGEST_TICKET, longest_message, tenant_field, priority_field)
        self._parser = EntryParser(ticket_field.encode(), longest_message, tenant_field, priority_field)
        self.marks = marks
        self._counts = counts or LeaderCounters()
        self.epoch = epoch
        self.losses = LossBook(scripts.link, keys)
        self.rules_version = b""  # the rules that plans were made under
        self._is_guarded, self._connection = False, 0  # the connection watches the epoch, which was seen to be ours

    def check(self) -> None:
        self.reject(())  # every script checks that first; without entries this one does nothing else

    def begin(self, *, is_new: bool = False) -> None:
        """Begin the epoch: no turn of another leader counts any more, and what was read and not taken comes again.
        ``is_new``: the group was made just now. Raises GroupMissing."""
        keys = self._keys
        groups = LogKeys(keys.stream).groups
        script_keys = (keys.stream, keys.leader, keys.epoch, keys.taken, groups, keys.counters)
        self._run("begin", script_keys, ("1" if is_new else "",))
        self._scripts.load("hand_over")
        # A former epoch of ours watches over this connection, too, and `begin` has changed the key.
        self._watch(self._scripts.link.all_of([("UNWATCH",), *self._watching]))

    @property
    def _watching(self) -> list[tuple[str, str]]:
        """The commands that go with each transaction, behind it. The WATCH is the connection's, so a turn counts only
        on the one that it was sent over; and it must be there before we look at the epoch."""
        return [("WATCH", self._keys.epoch), ("GET", self._keys.epoch)]

    def _watch(self, replies: Sequence[Any]) -> None:
        self._is_guarded = False
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        if replies[-1] != str(self.epoch).encode():
            raise Fenced(f"another master leads {self._keys.stream} (our epoch was {self.epoch})")
        self._is_guarded, self._connection = True, self._scripts.link.connections

    def turn(
        self, plan: HandOverPlan, new: NewEntries, count: int
    ) -> tuple[HandOverReply | NotNow | RulesMoved | NotificationMismatch, NewEntries]:
        """Carry out a plan, which takes all of the ``new`` entries, and read up to ``count`` entries more, in one
        transaction. What was read is in nobody's list before a later turn takes it, or a new epoch is given it again.

        Return the reply, or why the plan was refused, and what was read: then ``new`` is still to be taken. Raises
        Fenced, GroupMissing, and what ``Link.call`` raises: nothing happened, or it is not known what did.
        """
        if not self._is_guarded:
            self._watch(self._scripts.link.all_of([("UNWATCH",), *self._watching]))
        keys = self._keys
        script_keys, args = self._hand_over_arguments(plan, new)
        group, stream = (keys.group, "master"), keys.stream
        read = ("XREADGROUP", "GROUP", *group, "COUNT", count, "NOACK", "STREAMS", stream, ">")
        began_ns = time.time_ns()
        self._is_guarded = False
        answer, replies = self._scripts.run_then(
            self._connection, "hand_over", script_keys, (keys.group, str(self.epoch), *args), (read,), self._watching
        )
        try:
            self._watch(replies[-2:])
        except NotNow as refused:  # the transaction has happened, and this must not look as if it had not
            raise ReplyUnknown(f"whether the epoch is ours: {refused}") from refused
        if answer is None:  # the epoch was another one, and is ours now: no order of events leads here
            raise ReplyUnknown("a turn was refused in our own epoch")
        told = replies[0]
        if isinstance(told, Exception):
            raise answer if isinstance(answer, Exception) else ReplyUnknown(f"handed over, and not read on: {told}")
        entries = parse_own(told)
        found = self._parser.parse(new.position, entries, len(entries) < count)
        try:
            return self._hand_over_reply(plan, new, answer, began_ns), found
        except (NotNow, RulesMoved, NotificationMismatch) as refused:
            return refused, found

    def notified(self, position: bytes, entries: Sequence[Entry], count: int) -> NewEntries:
        """Parse up to ``count`` of the entries that a notification brought over another connection. All are above
        ``position``."""
        taken = entries[:count]
        return self._parser.parse(position, taken, len(taken) == len(entries), digest_of(taken))

    def read_parked(self, after: bytes | None, count: int) -> ParkedPage:
        keys = self._keys
        start = b"-" if after is None else b"(" + after
        _, last, found, gone = self._run(
            "read_parked", (keys.stream, keys.leader, keys.dead), (start, count, *self._parse_arguments)
        )
        return ParkedPage(last or None, _found(found), gone)

    def tenants_of(self, entries: Sequence[tuple[bytes, bytes]]) -> Sequence[Mark]:
        """Read the marks of entries, (id, ticket), that consumers have, as far as they tell the tenant."""
        name, ids = self.marks.fields[0], [entry_id for entry_id, _ in entries]
        values = self._scripts.run("read_field", (self._keys.stream,), (name, *ids)) if name else [b""] * len(ids)
        found = [
            PeekedEntry(entry_id, ticket, 0, (value or b"")[:LONGEST_MARK])
            for (entry_id, ticket), value in zip(entries, values, strict=True)
        ]
        return self.marks.read(found)

    def reject(self, entries: Iterable[Rejected]) -> int:
        """Make dead letters of these entries. Return how many of them, from the first one, are over now: not all where
        bodies are large."""
        keys = self._keys
        args = [part for entry in entries for part in entry]
        return int(self._run("reject", (keys.stream, keys.leader, keys.dead), args)[1])

    def hand_over(self, plan: HandOverPlan, new: NewEntries = NO_NEW_ENTRIES) -> HandOverReply:
        """Carry out a plan; the reply says what was refused. All of the ``new`` entries are taken: those that get no
        owner are pending under ``master`` then. Raises RulesMoved and NotificationMismatch."""
        script_keys, args = self._hand_over_arguments(plan, new)
        began_ns = time.time_ns()
        return self._hand_over_reply(plan, new, self._run("hand_over", script_keys, args), began_ns)

    def _hand_over_arguments(self, plan: HandOverPlan, new: NewEntries) -> tuple[list[str], tuple[Any, ...]]:
        keys = self._keys
        script_keys = [keys.stream, keys.leader, keys.tickets, keys.counters, keys.dead, keys.taken]
        parts: list[TicketPlan] = []
        targets: list[Any] = []
        for target, blob in zip(plan.targets, _blobs(plan, new.bodies), strict=True):
            script_keys += (keys.lease(target.incarnation), keys.inbox(target.incarnation))
            unowned = [part for part in target.parts if not part.believed]
            others = [part for part in target.parts if part.believed]
            targets += (target.incarnation, len(unowned), len(others), *(part.believed for part in others), blob)
            parts += unowned
            parts += others
        tickets, ids = [part.ticket for part in parts], [part.ids for part in parts]
        return script_keys, (
            plan.lowest,
            plan.highest,
            self.rules_version,
            separator(tickets),
            ids_argument(ids),
            sizes_argument(ids),
            *_take_arguments(new, ids),
            *tickets,
            *targets,
        )

    def _hand_over_reply(self, plan: HandOverPlan, new: NewEntries, answer: Any, began_ns: int) -> HandOverReply:
        if isinstance(answer, Exception):
            raise answer
        state, detail, *replies = self._unfenced(answer)
        if state == b"RULES":
            raise RulesMoved
        if state == b"MOVED":
            where = f"the group was at {new.position.decode()}, and is at {detail.decode()}"
            raise NotificationMismatch(where if detail != new.position else "other entries follow")
        cut, missing, newest, *targets_told = replies
        answers = tuple(TargetReply(told[0].decode(), *told[1:]) for told in targets_told)
        reply = HandOverReply(int(detail or 0), answers, cut, tuple(missing), newest)  # detail: the fence of the call
        if plan.targets:
            self._counts.hand_over(plan, reply, began_ns)
        return reply

    def recall(self, incarnation: str, tickets: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
        """Ask an incarnation to give tickets, (ticket, fence), back of which it has started nothing. Return those that
        are not its own under this fence; all, if its lease is not live."""
        keys = self._keys
        script_keys = (keys.leader, keys.tickets, keys.lease(incarnation), keys.inbox(incarnation))
        between = separator([ticket for ticket, _ in tickets])
        args = (incarnation, between, *chain.from_iterable(tickets))
        return list(self._run("recall", script_keys, args)[1])

    def take_back(self, incarnation: str, count: int) -> TakenPage:
        """Bring one page of a dead incarnation's entries to ``master``."""
        keys = self._keys
        script_keys = (
            keys.stream,
            keys.leader,
            keys.lease(incarnation),
            keys.tickets,
            keys.dead,
            keys.attempts,
            keys.noted(incarnation),
            keys.inbox(incarnation),
        )
        reply = self._run("take_back", script_keys, (incarnation, count, *self._parse_arguments))
        if reply[0] == b"ALIVE":
            return TakenPage(True, 0, [], [])
        _, size, found, gone = reply
        return TakenPage(False, size, _found(found), gone)

    def free_tickets(self, incarnation: str, tickets: Sequence[bytes]) -> Freed | None:
        """Free the records of a dead incarnation's tickets. Return None when it still has entries."""
        keys = self._keys
        script_keys = (keys.stream, keys.leader, keys.lease(incarnation), keys.tickets, keys.dead, keys.counters)
        freed, left = Freed([], []), list(tickets)
        while True:
            state, *reply = self._run("free_tickets", script_keys, (incarnation, *left))
            if state != b"OK":
                if len(left) < len(tickets):
                    raise ReplyUnknown(f"{incarnation} was handed something by another client: {state.decode()}")
                return None
            others, parked, looked_at, restored = reply
            freed.others.extend(others)
            freed.parked.extend((found.id, found.ticket or b"") for found in _found(parked))
            freed = freed._replace(restored=(*freed.restored, *restored))
            del left[:looked_at]
            if not left:
                return freed

    def restore(self, entries: Iterable[tuple[bytes, Sequence[bytes]]]) -> list[bytes]:
        """Claim again what nobody has pending of these tickets, according to the index and to memory, which has these
        ids under ``master``. Return the ids. Raises GroupMissing."""
        keys = self._keys
        args = [part for ticket, ids in entries for part in (ticket, b" ".join(ids))]
        return list(self._run("restore", (keys.stream, keys.leader, keys.tickets, keys.counters), args)[1])

    def sweep(self, known: Sequence[str], min_idle_ms: int, cursor: bytes, count: int, highest: bytes = b"") -> Swept:
        """Take one step of the idle sweep; entries owned by ``known`` incarnations with a living lease are left
        alone, and those above ``highest``."""
        keys = self._keys
        script_keys = [keys.stream, keys.leader, keys.dead, keys.tickets, keys.taken, *map(keys.lease, known)]
        args = (min_idle_ms, cursor, count, *self._parse_arguments, highest, *known)
        _, cursor, flat, gone = self._run("sweep", script_keys, args)
        return Swept(cursor, list(zip(_found(flat, 3), flat[2::3], strict=True)), gone)

    def save_position(self, takeable: int = 0) -> PositionLook:
        """Save the group's position, and how many messages another consumer could take now, and look whether anything
        is amiss. Raises GroupMissing."""
        keys = self._keys
        _, delivered, oldest, cut, pending = self._run(
            "save_position",
            (keys.stream, keys.leader, keys.position, LogKeys(keys.stream).groups, keys.counters, keys.taken),
            (takeable,),
        )
        by_name = {name: int(count) for name, count in pending}
        return PositionLook(GroupPosition(delivered, oldest or None), cut, by_name)

    def note_repeats(self, until: bytes | None) -> None:
        """Note that the group is given entries up to ``until`` a second time (a higher note stays); None: it is past
        them."""
        self._unfenced(
            self._scripts.run("note_repeats", (self._keys.leader, self._keys.position), (str(self.epoch), until or b""))
        )

    def note_chart(self, place: str, point: bytes) -> None:
        keys = (self._keys.leader, self._keys.charts)
        self._unfenced(self._scripts.run("note_chart", keys, (str(self.epoch), place, point)))

    def rejoin(self, entries: Iterable[tuple[bytes, bytes]]) -> Rejoined:
        """Give entries, as (ticket, id), that came as new although the group was given them before, back to their
        owners, if they are in processing."""
        keys = self._keys
        rejoined, left = Rejoined([], []), [part for entry in entries for part in entry]
        while left:
            _, over, done, looked_at = self._run("rejoin", (keys.stream, keys.leader, keys.tickets), left)
            rejoined.over.extend(over)
            rejoined.done.extend(done)
            del left[: 2 * looked_at]
        return rejoined

    def due_delayed(self, most: int) -> DueLook:
        """Put delayed messages in the order of their times. Return up to ``most`` that are due."""
        log = LogKeys(self._keys.stream)
        script_keys = (log.delayed, log.due, log.due_until, self._keys.leader, self._keys.dead)
        _, until, wait_ms, told, *flat = self._unfenced(
            self._scripts.run("due_delayed", script_keys, (str(self.epoch), most, self._parse_arguments[0]))
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
        _, *told = self._unfenced(self._scripts.run("send_delayed", script_keys, (str(self.epoch), again_ms, *args)))
        return [one[0].decode(errors="replace") if isinstance(one, list) else one for one in told]

    def revoke(self, incarnation: str) -> bool:
        script_keys = (self._keys.leader, self._keys.lease(incarnation), self._keys.changed)
        reply = self._scripts.run("revoke", script_keys, (str(self.epoch), incarnation))
        return bool(self._unfenced(reply) == b"OK")

    def reap(self, incarnation: str, name: str, stored: bytes) -> bool:
        keys = self._keys
        script_keys = (
            keys.stream,
            keys.leader,
            keys.lease(incarnation),
            keys.inbox(incarnation),
            keys.consumers,
            keys.noted(incarnation),
            keys.unproven(incarnation),
        )
        return bool(self._run("reap", script_keys, (incarnation, name, stored)) == b"OK")

    def forget_attempts(self, noted: str, cursor: bytes, count: int) -> tuple[bytes, list[bytes]]:
        """Forget the attempts, or the errors, of messages that are over, one page of the hash ``noted`` from
        ``cursor``. Return the next cursor and the fields that were deleted. Raises GroupMissing."""
        keys = self._keys
        _, following, gone = self._run(
            "forget_attempts", (keys.stream, keys.leader, noted, keys.taken), (cursor, count)
        )
        return following, list(gone)

    def _run(self, step: str, keys: Sequence[str], args: Iterable[Any]) -> Any:
        return self._unfenced(self._scripts.run(step, keys, (self._keys.group, str(self.epoch), *args)))

    def _unfenced(self, reply: Any) -> Any:
        if (reply[0] if isinstance(reply, list) else reply) == b"FENCED":
            raise Fenced(f"another master leads {self._keys.stream} (our epoch was {self.epoch})")
        return reply
