"""Puts a real Redis into the states that the protocol knows, and reads them back.

A ``World`` is one ticket stream with its group. Everything in it is done by the real scripts, through the same typed
steps that the two programs use; only what somebody else does behind their back (deleting a body, spoiling a record) is
a bare command.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from usher.common.base.clock import now_s
from usher.common.protocol.keys import HALTED, MASTER, Keys
from usher.common.protocol.registration import NO_LOCK, Registration
from usher.common.protocol.ticket_states import is_given_back
from usher.common.redis.client import Link
from usher.common.redis.replies import (
    HandOver,
    InboxRecord,
    TicketRecord,
    TicketStream,
    pairs,
    parse_inbox,
    parse_record,
)
from usher.consumer.lifecycle.owner_scripts import Buried, GiveBack, Letter, OwnerScripts
from usher.master.leader.entries import NO_NEW_ENTRIES, NewEntries, PeekedEntry
from usher.master.leader.leader_scripts import KeptBodies, LeaderScripts
from usher.master.membership.registry import Membership
from usher.master.policy.board.plans import NOBODY, NOTHING, HandOverPlan, TargetPlan, TicketPlan

LEASE_MS = 60_000
FIELD = "ticket_id"
#: Ticket ids that a careless script would trip over: separators, Lua patterns, hash tags, our own words, the shapes of
#: other values.
NASTY_TICKETS = (
    b"two words",
    b" ",
    b"{brace}",
    b"nul\0in it",
    b"new\nline",
    b"carriage\r\nreturn",
    b"100%",
    b"%S+ - [",
    b"^(%S+) (%d+) (.*)$",
    b"a:1 5 1-1",
    b"master",
    b"halted",
    b"returned",
    b"-",
    b"+",
    b"*",
    b"1-1",
    "Stra\N{LATIN SMALL LETTER SHARP S}e \N{SNOWMAN}".encode(),
    b"x" * 256,
)
#: In stream order; sorted as text they would come out differently, and each is the beginning of another.
TRICKY_IDS = (
    b"1-1",
    b"1-2",
    b"1-10",
    b"1-11",
    b"10-1",
    b"99-9",
    b"99-10",
    b"999-10",
    b"1000-1",
    b"18446744073709551-18446744073709551",
)


@dataclass(frozen=True)
class Owner:
    """An incarnation and its steps."""

    registration: Registration
    steps: OwnerScripts

    @property
    def incarnation(self) -> str:
        return self.registration.incarnation

    @property
    def name(self) -> bytes:
        return self.registration.incarnation.encode()


class State(NamedTuple):
    """Return what Redis has of the protocol, without what does not matter to it: of the index what is not over."""

    pending: dict[bytes, list[bytes]]
    index: dict[bytes, bytes]
    dead: list[dict[bytes, bytes]]

    def letters(self) -> list[tuple[bytes, bytes, bytes]]:
        """(id, ticket, reason) of every dead letter."""
        return [(letter[b"usher-id"], letter[b"usher-ticket"], letter[b"usher-reason"]) for letter in self.dead]


class World:
    """One ticket stream under one group, in an empty Redis."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.keys = Keys("ticket_stream", "g")
        self.scripts = link
        self.stream = TicketStream(link, self.keys)
        self.make_group()
        self.members = Membership(link, self.keys, LEASE_MS)
        #: Why pending list and index are apart at the end of the test, if they are meant to be.
        self.apart_because = ""
        version = next(
            line for line in link.call("INFO", "server").decode().splitlines() if line.startswith("redis_version:")
        )
        #: Redis >= 7 drops an entry without a body from the pending list when somebody claims it.
        self.claiming_drops_the_bodiless = int(version.partition(":")[2].partition(".")[0]) >= 7
        self._next_ms = 1

    def make_group(self) -> None:
        self.link.call("XGROUP", "CREATE", self.keys.stream, self.keys.group, "0", "MKSTREAM")

    # ---- masters -------------------------------------------------------------------------------------------------------------

    def elect(self, url: str = "http://one", succeed: str = "") -> LeaderScripts:
        """Make ``url`` the leader; its steps."""
        answer, epoch = self.scripts.run("elect", (self.keys.leader, self.keys.counters), (url, LEASE_MS, succeed))
        assert answer == b"ELECTED", epoch
        return LeaderScripts(self.scripts, self.keys, int(epoch), FIELD)

    # ---- consumers -----------------------------------------------------------------------------------------------------------

    def join(self, name: str = "a", lock: str = NO_LOCK, renews: bool = True) -> Owner:
        """Register an incarnation of ``name``; it has a lease, and renews it as a consumer does at once."""
        asked = Registration(name, uuid.uuid4().hex, "http://127.0.0.1:1/api/health", 8, 10_000, lock)
        registered = self.members.register(asked)
        assert registered.created
        owner = self.owner(registered.registration)
        if renews:
            owner.steps.renew(LEASE_MS)
        return owner

    def owner(self, registration: Registration) -> Owner:
        # On a connection of its own: it watches its lease there, as the leader its epoch.
        link = Link(self.link.url, registration.incarnation)
        return Owner(registration, OwnerScripts(link, self.keys, registration))

    def end_lease(self, owner: Owner) -> None:
        """Its lease has ended."""
        assert self.link.call("DEL", self.keys.lease(owner.incarnation)) == 1

    def refuse(self, leader: LeaderScripts, owner: Owner, state: str) -> None:
        """Have a turn tell ``state`` of this owner: LOST, DRAINING or REVOKED."""
        if state == "LOST":
            self.end_lease(owner)
        elif state == "DRAINING":
            owner.steps.drain(LEASE_MS)
        else:
            leader.revoke(owner.incarnation)

    def lease(self, owner: Owner) -> bytes | None:
        value: bytes | None = self.link.call("GET", self.keys.lease(owner.incarnation))
        return value

    # ---- entries -------------------------------------------------------------------------------------------------------------

    def send(self, ticket: bytes, *ids: bytes) -> list[bytes]:
        """Add entries of ``ticket`` under these ids, or one under the next free id."""
        made = []
        for entry_id in ids or (b"%d-1" % self._next_ms,):
            made.append(self.add(entry_id, FIELD, ticket, "body", b"body of " + entry_id))
        return made

    def add(self, entry_id: bytes, *fields: bytes | str) -> bytes:
        """Add an entry as any producer may."""
        added: bytes = self.link.call("XADD", self.keys.stream, entry_id, *fields)
        self._next_ms = max(self._next_ms, int(added.partition(b"-")[0]) + 1)
        return added

    def send_many(self, tickets: Sequence[bytes]) -> list[bytes]:
        """One entry of each of ``tickets``, in this order; for thousands of them."""
        start = self._next_ms
        self._next_ms += len(tickets)
        commands = [
            ("XADD", self.keys.stream, b"%d-1" % (start + n), FIELD, ticket) for n, ticket in enumerate(tickets)
        ]
        return list(self.link.pipeline(commands))

    def delete(self, *ids: bytes) -> None:
        """Delete bodies; what is pending stays pending."""
        assert self.link.call("XDEL", self.keys.stream, *ids) == len(ids)

    def parked(self, leader: LeaderScripts, ticket: bytes, *ids: bytes) -> list[bytes]:
        """Entries of ``ticket`` that are pending under ``master``."""
        sent = self.send(ticket, *ids)
        assert [found.id for found in fetch(leader, len(sent))] == sent
        return sent

    def owned(self, leader: LeaderScripts, owner: Owner, ticket: bytes, *ids: bytes) -> list[bytes]:
        """Entries of ``ticket`` that were handed over to ``owner``."""
        sent = self.parked(leader, ticket, *ids)
        hand_over(leader, plan(owner, {ticket: sent}, {ticket: self.head(ticket)}))
        return sent

    def give_up(
        self, owner: Owner, ticket: bytes, policy: str, entry_id: bytes = b"", error: str = "ValueError: x"
    ) -> Buried:
        """Give up on a message of a ticket (the first that its owner has), as a consumer does that may do so."""
        record = self.record(ticket)
        assert record is not None
        letter = Letter(
            ticket, entry_id or record.ids[0], "gave_up", error, 3, 1, 2, record.fence, "ValueError", "at x", policy
        )
        return bury(owner.steps, letter)

    def give_back(
        self, owner: Owner, parts: Mapping[bytes, Sequence[bytes]], after_ms: int | None = None
    ) -> list[bytes]:
        """Have an owner give tickets back, under the fences that the index has, as often as bodies ask for it. Those that
        were not given back."""
        due_s = None if after_ms is None else now_s() + after_ms / 1000
        records = {ticket: self.stream.record_of(ticket) for ticket in parts}
        asked = [
            GiveBack(ticket, record.fence if (record := records[ticket]) else 0, ids, due_s)
            for ticket, ids in parts.items()
        ]
        answers: list[bool] = []
        while len(answers) < len(asked):
            answers += owner.steps.give_back(asked[len(answers) :])
        return [one.ticket for one, answer in zip(asked, answers, strict=True) if not answer]

    def letter_ids(self) -> list[bytes]:
        """Ids of all dead letters."""
        return [letter_id for letter_id, _ in self.link.call("XRANGE", self.keys.dead, "-", "+")]

    def head(self, ticket: bytes) -> bytes:
        """The head of a ticket's record as a leader that knows everything believes it."""
        record = self.record(ticket)
        return b"%s %d" % (record.owner, record.fence) if record else NOBODY

    def record(self, ticket: bytes) -> TicketRecord | None:
        """The record of a ticket, with what is not over."""
        return self.stream.in_processing(self.stream.record_of(ticket))

    def spoil(self, ticket: bytes, value: bytes) -> None:
        """Somebody writes into the index."""
        self.link.call("HSET", self.keys.tickets, ticket, value)

    def make_idle(self, owner: bytes | str, idle_ms: int, *ids: bytes) -> None:
        """As if nobody had touched these entries of ``owner`` for a while. An unknown owner comes into being by
        this."""
        assert self.link.call(
            "XCLAIM", self.keys.stream, self.keys.group, owner, 0, *ids, "IDLE", idle_ms, "JUSTID"
        ) == list(ids)

    def make_idle_if_there(self, owner: str, idle_ms: int, *ids: bytes) -> None:
        """The same where some of the bodies may be gone: Redis >= 7 drops those instead."""
        self.link.call("XCLAIM", self.keys.stream, self.keys.group, owner, 0, *ids, "IDLE", idle_ms, "JUSTID")

    # ---- reading back --------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        index = {}
        for ticket, value in pairs(self.link.call("HGETALL", self.keys.tickets)).items():
            try:
                record = self.stream.in_processing(parse_record(value))
            except ValueError:
                index[ticket] = value
            else:
                if record is not None:
                    index[ticket] = b"%s %d %s" % (record.owner, record.fence, b" ".join(record.ids))
        return State(self.pending(), index, self.dead())

    def pending(self) -> dict[bytes, list[bytes]]:
        """The pending list: ids in stream order, by owner."""
        by_owner: dict[bytes, list[bytes]] = {}
        for entry_id, owner, _, _ in self.pending_rows():
            by_owner.setdefault(owner, []).append(entry_id)
        return by_owner

    def pending_rows(self) -> list[Any]:
        """[id, owner, idle in ms, delivery count] of everything pending."""
        return list(self.link.call("XPENDING", self.keys.stream, self.keys.group, "-", "+", 1_000_000))

    def deliveries(self) -> dict[bytes, int]:
        """Delivery counts by id."""
        return {entry_id: count for entry_id, _, _, count in self.pending_rows()}

    def inbox(self, owner: Owner) -> list[HandOver]:
        """All hand-overs in its inbox, of all records, in order."""
        return [part for record in self.inbox_records(owner.incarnation) for part in record.parts]

    def inbox_records(self, incarnation: str) -> list[InboxRecord]:
        """The records of an inbox, with the bodies that they bring."""
        return list(parse_inbox(self.link.call("XREAD", "STREAMS", self.keys.inbox(incarnation), "0")))

    def dead(self) -> list[dict[bytes, bytes]]:
        """The dead letters, each as a mapping."""
        return [pairs(fields) for _, fields in self.link.call("XRANGE", self.keys.dead, "-", "+")]

    def everything(self) -> dict[bytes, Any]:
        """All that is in Redis but for idle times and what is left of leases: to show that nothing happened."""
        seen = {}
        for key in sorted(self.link.call("KEYS", "*")):
            kind = self.link.call("TYPE", key)
            has_end = self.link.call("PTTL", key) > 0
            seen[key] = (kind, has_end, self._content(kind, key))
        return seen

    def _content(self, kind: bytes, key: bytes) -> Any:
        if kind == b"hash":
            return pairs(self.link.call("HGETALL", key))
        if kind == b"stream":
            groups = [pairs(group) for group in self.link.call("XINFO", "GROUPS", key)]
            rows = [self.link.call("XPENDING", key, group[b"name"], "-", "+", 1_000_000) for group in groups]
            pending = [[(entry_id, owner, count) for entry_id, owner, _, count in page] for page in rows]
            return self.link.call("XRANGE", key, "-", "+"), [group[b"last-delivered-id"] for group in groups], pending
        ways = {b"list": ("LRANGE", key, 0, -1), b"zset": ("ZRANGE", key, 0, -1, "WITHSCORES")}
        return self.link.call(*ways.get(kind, ("GET", key)))

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """What is done inside leaves no trace."""
        before = self.everything()
        yield
        assert self.everything() == before

    # ---- the promise ---------------------------------------------------------------------------------------------------------

    def broken(self) -> list[str]:
        """How pending list and index differ: a record names all that its owner has of a ticket, and maybe what is over;
        that of a ticket that was given back, or is halted, names what is under ``master`` or ``halted``. What is taken
        back from a dead owner may still stand in its record."""
        in_index: dict[bytes, bytes] = {}
        found = []
        for ticket, value in pairs(self.link.call("HGETALL", self.keys.tickets)).items():
            try:
                record = parse_record(value)
            except ValueError:
                found.append(f"the record of {ticket!r} cannot be read: {value!r}")
                continue
            if not record.ids:
                found.append(f"{ticket!r} has a record without ids")
            for entry_id in record.ids:
                if entry_id in in_index:
                    found.append(f"{entry_id!r} is in two records")
                in_index[entry_id] = (
                    MASTER
                    if is_given_back(record.owner) or (record.owner == HALTED and entry_id != record.ids[0])
                    else record.owner
                )
        in_list = {entry_id: owner for owner, ids in self.pending().items() for entry_id in ids}
        for entry_id in in_index.keys() | in_list.keys():
            owner, listed = in_index.get(entry_id), in_list.get(entry_id)
            if owner == listed or (owner is None and listed in (MASTER, HALTED)):
                continue
            is_of_owner = owner is not None and b":" in owner
            if is_of_owner and (listed is None or (listed == MASTER and not self._lives(owner))):
                continue
            found.append(f"{entry_id!r}: the index says {owner!r}, the pending list {listed!r}")
        return found

    def _lives(self, owner: bytes) -> bool:
        return bool(self.link.call("EXISTS", self.keys.lease(owner.decode())))


def bury(steps: OwnerScripts, letter: Letter) -> Buried:
    [answer] = steps.dead_letters([letter])
    if isinstance(answer, Exception):
        raise answer
    return answer


def _begin(leader: LeaderScripts) -> None:
    if leader._link.call("GET", leader._keys.epoch) != b"%d" % leader.epoch:
        leader.begin()


def read(leader: LeaderScripts, count: int = 100) -> NewEntries:
    """Up to ``count`` new entries, as a turn without a plan reads them: nobody has them before a hand-over takes them."""
    _begin(leader)
    position = TicketStream(leader._link, leader._keys).last_delivered()
    return replace(turn(leader, NOTHING, NewEntries(position, [], True), count)[1], position=position)


def hand_over(leader: LeaderScripts, planned: HandOverPlan, news: NewEntries = NO_NEW_ENTRIES) -> int:
    """A turn that reads nothing."""
    _begin(leader)
    return turn(leader, planned, news)[0]


def turn(leader: LeaderScripts, planned: HandOverPlan, news: NewEntries, count: int = 0) -> tuple[int, NewEntries]:
    """A turn of a leader that knows what others have changed, and what the owners of tickets have of them."""
    stream = TicketStream(leader._link, leader._keys)
    going_on = [part for target in planned.targets for part in target.parts if not part.changes_owner]
    records = {one.ticket: stream.record_of(one.ticket) for one in going_on}
    held = {ticket: there.ids for ticket, one in records.items() if (there := stream.in_processing(one)) is not None}
    targets = [
        target._replace(parts=[part._replace(held=part.held or held.get(part.ticket, ())) for part in target.parts])
        for target in planned.targets
    ]
    planned = planned._replace(targets=targets)
    while True:
        leader.changed.clear()
        if (answer := leader.turn(planned, news, count)) is not None:
            return answer


def fetch(leader: LeaderScripts, count: int) -> list[PeekedEntry]:
    """Up to ``count`` new entries, which come under ``master``: nothing of them is handed over."""
    news = read(leader, count)
    if news.found:
        hand_over(leader, NOTHING, news)
    return [PeekedEntry(*found) for found in news.found]


def forget_bodies(leader: LeaderScripts) -> None:
    """What waits was read long ago: its owner reads the bodies itself."""
    leader._kept = KeptBodies()


def plan(
    owner: Owner | str, parts: Mapping[bytes, Sequence[bytes]], believed: Mapping[bytes, bytes] | None = None
) -> HandOverPlan:
    """A plan for one target: ``parts`` are ids by ticket, ``believed`` the heads of records (none: no record)."""
    return plans((owner, parts), believed=believed)


def plans(
    *targets: tuple[Owner | str, Mapping[bytes, Sequence[bytes]]], believed: Mapping[bytes, bytes] | None = None
) -> HandOverPlan:
    """A plan for several targets."""
    heads = believed or {}
    planned = [
        TargetPlan(
            owner.incarnation if isinstance(owner, Owner) else owner,
            [TicketPlan(ticket, heads.get(ticket, NOBODY), list(ids)) for ticket, ids in parts.items()],
        )
        for owner, parts in targets
    ]
    size = sum(len(part.ids) for target in planned for part in target.parts)
    return HandOverPlan(planned, size)


def with_user(url: str, user: str, password: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{user}:{password}@{rest.rpartition('@')[2]}"


def commands(link: Link) -> Counter[str]:
    """The commands that Redis has run so far, those in scripts included, but for the one that asks."""
    lines = link.call("INFO", "commandstats").decode().splitlines()
    stats = (line.removeprefix("cmdstat_").split(":calls=") for line in lines if line.startswith("cmdstat_"))
    return Counter({name: int(rest.split(",")[0]) for name, rest in stats if name != "info"})


def spent(link: Link, what: Callable[[], object]) -> Counter[str]:
    """The commands that ``what`` sends."""
    before = commands(link)
    what()
    return commands(link) - before


def bodies_of(records: Iterable[InboxRecord]) -> dict[bytes, list[bytes]]:
    """The bodies of what was given last with its body."""
    last = {one[0]: one[1:] for record in records for _, _, *entries in record.given for one in entries}
    return {one: flat for one, flat in last.items() if flat}
