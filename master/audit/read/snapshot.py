"""Look at Redis in small reads: the facts of a stream, the names in its group, and the second look at every suspect.

The first look reads for seconds while traffic flows, so its findings are only suspects. The second look asks for
pending entry, index record, lease and body of one suspect in one script, at one moment: between two scripts of Usher
all of them agree, so a disagreement there is a finding, and mere movement is not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from usher.common.base.errors import GroupMissing, StartRefused
from usher.common.protocol.attempts import decode
from usher.common.protocol.keys import Keys
from usher.common.protocol.marks import MarkFields
from usher.common.protocol.mishaps import KEPT, losses_command, mishaps_command, parse_losses, parse_mishaps
from usher.common.protocol.registration import name_of, parse
from usher.common.protocol.stream_id import ZERO, is_id
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.replies import TicketStream, cut_unread, pairs, parse_record
from usher.common.redis.scripts import ScriptRunner
from usher.master.audit.checks.facts import AuditedStream, is_capped
from usher.master.audit.checks.findings import (
    HALTED_NAME,
    RESERVED,
    AuditThresholds,
    Example,
)
from usher.master.audit.checks.members import GroupMember, index_agrees, is_incarnation, was_named
from usher.master.audit.read.bulk import BulkReader, NotAllowed
from usher.master.audit.read.reading import is_ascending
from usher.master.operations.live_rules import rulebook

_GLOB = re.compile(r"([\\*?\[\]])")
_BATCH = 200
#: Seconds for which entries that were cut unread are a finding: nothing more can be found out about them.
_RECENT_S = 86_400


class KeyForeign(StartRefused):
    """A key of a stream that another program wrote to."""


def stream_facts(link: Link, keys: Keys, run_log_length: int) -> AuditedStream:
    """Read the facts of one stream. Raises StartRefused when the stream or its group does not exist, KeyForeign, and
    what Link.call raises."""
    seconds, micros = link.call("TIME")
    ticket_stream = TicketStream(link, keys)
    try:
        group = ticket_stream.group_facts()
    except GroupMissing as missing:
        raise StartRefused(
            f"USHER_TICKET_STREAM, USHER_GROUP: {missing}. There is nothing to audit: is this the Redis, the stream and"
            " the group of your masters?"
        ) from missing
    runs = _span(link, keys.runs)
    of_stream = pairs(link.call("XINFO", "STREAM", keys.stream))
    first = of_stream[b"first-entry"]
    counted = link.call("HGET", keys.counters, f"cut_at {keys.stream}")
    try:
        mishaps = parse_mishaps(link.call(*mishaps_command(keys)))
    except ValueError as odd:
        raise KeyForeign(f"{keys.counters} cannot be read: {odd}") from odd
    declared = parse_losses(*link.pipeline([losses_command(keys, KEPT)]))
    ids = [one for loss in declared for span in (loss.repeats, loss.lost) if span for one in span]
    if not all(is_id(one.decode(errors="replace")) for one in ids):
        raise KeyForeign(f"{keys.losses} cannot be read: an id in it is none")
    is_recent = int(seconds) - mishaps.unread_cut_s < _RECENT_S
    return AuditedStream(
        keys.stream,
        keys.group,
        int(seconds) * 1000 + int(micros) // 1000,
        of_stream[b"length"],
        group[b"last-delivered-id"],
        group[b"pending"],
        runs[0],
        runs[1],
        is_capped(runs[0], runs[2], run_log_length),
        _span(link, keys.dead)[0],
        first=first[0] if first else None,
        delivered=group[b"last-delivered-id"],
        declared=tuple(declared),
        max_deleted=of_stream.get(b"max-deleted-entry-id"),
        cut_unread=cut_unread(group, of_stream, counted) + (mishaps.unread_cut if is_recent else 0),
    )


def foreign_keys(link: Link, keys: Keys) -> list[str]:
    """Return a sentence for each key that is of another type than Usher's."""
    kinds = dict.fromkeys((keys.tickets, keys.consumers, keys.counters, keys.attempts, keys.rules), b"hash")
    kinds |= dict.fromkeys((keys.dead, keys.runs, keys.actions, keys.losses), b"stream")
    found = link.pipeline([("TYPE", name) for name in kinds])
    return [
        f"{name} is a {kind.decode()}, not a {own.decode()}"
        for (name, own), kind in zip(kinds.items(), found, strict=True)
        if kind not in (own, b"none")
    ]


def _span(link: Link, stream: str) -> tuple[int, bytes | None, int | None]:
    """Return length, first id, and how many entries there ever were (None: Redis does not count)."""
    try:
        facts = pairs(link.call("XINFO", "STREAM", stream))
    except CommandRefused as refused:
        if "no such key" in str(refused):
            return 0, None, 0
        raise
    first = facts[b"first-entry"]
    return facts[b"length"], first[0] if first else None, facts.get(b"entries-added")


def members(reader: BulkReader, keys: Keys) -> list[GroupMember]:
    """Return every name in the group, and every inbox and lease left by a name that is not in it, if the user of
    ``reader`` may look for them."""
    rows = [pairs(row) for row in reader.ask("XINFO", "CONSUMERS", keys.stream, keys.group)]
    names = [row[b"name"].decode(errors="replace") for row in rows]
    # A registered consumer that has not been given an entry yet is not in the group.
    stored = pairs(reader.ask("HGETALL", keys.consumers))
    consumers = {name.decode(errors="replace") for name in stored}
    generation = reader.ask("HGET", keys.counters, "generation")
    last = int(generation) if generation and generation.isdigit() else 1 << 63  # a lost counter says nothing
    left = _left_over(reader, keys) - {*names, *(_incarnation(*one) for one in stored.items())}

    def member(name: str, row: dict[bytes, Any], oldest_ms: int, lives: bool, in_group: bool) -> GroupMember:
        numbers = row.get(b"pending", 0), oldest_ms, row.get(b"idle", 0)
        known = name_of(name) in consumers, was_named(name, last)
        return GroupMember(keys.stream, name, *numbers, lives, in_group, *known)

    found = []
    for at in range(0, len(rows), _BATCH):
        part = rows[at : at + _BATCH]
        questions: list[tuple[Any, ...]] = []
        for row in part:
            questions.append(("EXISTS", keys.prefix.encode() + b"lease:" + row[b"name"]))
            questions.append(("XPENDING", keys.stream, keys.group, "-", "+", 1, row[b"name"]))
        reader.send(*questions)
        for name, row in zip(names[at : at + _BATCH], part, strict=True):
            lives, oldest = bool(reader.take()), reader.take()
            found.append(member(name, row, oldest[0][2] if oldest else 0, lives, True))
    found += [member(name, {}, 0, bool(reader.ask("EXISTS", keys.lease(name))), False) for name in sorted(left)]
    return found


def _left_over(reader: BulkReader, keys: Keys) -> set[str]:
    """Return the names that have an inbox or a lease."""
    kinds = keys.inbox(""), keys.lease("")
    try:
        found = [key.decode(errors="replace") for key in reader.scan(_GLOB.sub(r"\\\1", keys.prefix) + "*")]
    except NotAllowed:  # SCAN shows every name of the database: common/redis/acl.py does not give it to auditors
        return set()
    mark = keys.unproven("").removeprefix(keys.lease(""))  # beside a lease
    names = [(key, kind) for key in found for kind in kinds if key.startswith(kind)]
    return {key.removeprefix(kind) for key, kind in names if not key.endswith(mark)}


def may_scan(link: Link) -> bool:
    """Return True when inboxes without an owner can be looked for."""
    try:
        link.call("SCAN", 0, "COUNT", 1)
    except CommandRefused as refused:
        if "NOPERM" in str(refused):
            return False
        raise
    return True


def _incarnation(name: bytes, stored: bytes) -> str:
    try:
        return parse(name, stored).incarnation
    except (ValueError, UnicodeDecodeError):
        return ""


class SuspectSnapshot(NamedTuple):
    """The state of a suspect at one moment. ``owner`` None: not pending. ``record``: (owner, ids, fence) of its ticket,
    None without. ``other_owner``: of the entry that it is compared with."""

    owner: str | None
    idle_ms: int
    deliveries: int
    record: tuple[str, tuple[str, ...], int] | None
    readable: bool
    lives: bool
    in_stream: bool
    attempts: int | None
    other_owner: str | None = None


def looks(link: Link, keys: Keys, suspects: Iterable[Example]) -> Iterator[tuple[Example, SuspectSnapshot]]:
    """Yield the second look at each suspect, atomic per suspect; those of one owner together, else in their order."""
    scripts = ScriptRunner(link)
    by_owner: dict[str, list[Example]] = defaultdict(list)
    for example in suspects:
        by_owner[example.owner].append(example)
    for owner, examples in by_owner.items():
        names = (keys.stream, keys.tickets, keys.lease(owner), keys.attempts)
        for at in range(0, len(examples), _BATCH):
            part = examples[at : at + _BATCH]
            asked = [(keys.group, one.id or ZERO, ticket_name(one), one.other_id or ZERO) for one in part]
            yield from zip(part, map(_look, scripts.run_each("look_again", names, asked)), strict=True)


def ticket_name(example: Example) -> bytes:
    """Return the ticket's field in the index. A message without a ticket id is a ticket of its own, under a name that
    is not text."""
    return (
        b"\xff" + example.id.encode()
        if not example.ticket or example.ticket == "\ufffd" + example.id
        else example.ticket.encode()
    )


def _look(answer: Any) -> SuspectSnapshot:
    owner, idle, deliveries, stored, lease, body, attempts, other = answer
    record, readable = None, True
    if stored is not None:
        try:
            parsed = parse_record(stored)
            record = parsed.owner.decode(), tuple(entry_id.decode() for entry_id in parsed.ids), parsed.fence
        except ValueError:
            readable = False
    counted = None if attempts is None else decode(attempts).failures
    return SuspectSnapshot(
        _name(owner), idle, deliveries, record, readable, bool(lease), bool(body), counted, _name(other)
    )


def _name(owner: bytes | None) -> str | None:
    return None if owner is None else owner.decode(errors="replace")


def held_back(link: Link, keys: Keys, parked: Sequence[Example], marks: MarkFields) -> tuple[set[Example], bool]:
    """Return the entries that a live rule holds back, for their ticket or its tenant, and whether all such rules could
    be followed. ``parked``: in the order of their ids; a ticket is of the tenant of its newest message."""
    rules = rulebook(link.call("HGETALL", keys.rules))
    limited = {name for name, rule in rules.tenant_limits.items() if rule.rate_per_second or rule.concurrency}
    values, of_tenants = [b""] * len(parked), limited or rules.holds_tenants
    if of_tenants and (field := marks.names[0]):
        found = ScriptRunner(link).run_each("read_field", (keys.stream,), [(field, one.id) for one in parked])
        values = [value or b"" for [value] in found]
    tenants = {
        one.ticket: marks.read(one.id.encode(), ticket_name(one), value, b"").tenant
        for one, value in zip(parked, values, strict=True)
    }
    back = {one for one in parked if rules.of(ticket_name(one), tenants[one.ticket]) or tenants[one.ticket] in limited}
    return back, bool(marks.tenant) or not of_tenants


def still_holds(name: str, example: Example, look: SuspectSnapshot, limits: AuditThresholds) -> bool:
    """Judge whether a suspect of the first look is a finding at the moment of the second. Pure."""
    owner, record = look.owner, look.record
    runs = owner is not None and is_incarnation(owner)
    if name == "pending_without_index":
        return runs and look.in_stream and look.readable and (record is None or example.id not in record[1])
    if name == "index_without_pending":
        return owner is None and record is not None and example.id in record[1]
    if name == "owners_differ":
        return (
            owner is not None and record is not None and example.id in record[1] and not index_agrees(owner, record[0])
        )
    if name == "index_unreadable":
        return not look.readable
    if name == "ticket_owned_twice":
        other = look.other_owner
        return runs and other is not None and is_incarnation(other) and other != owner
    if name == "idle_too_long":
        return owner == example.owner and look.lives and look.idle_ms > limits.owner_idle_ms
    if name == "parked_too_long":
        return owner in RESERVED and record is None and look.idle_ms > limits.parked_ms
    if name == "body_gone":
        return owner is not None and not look.in_stream
    if name == "delivered_often":
        return owner is not None and look.deliveries > limits.deliveries
    if name == "attempts_many":
        return owner is not None and (look.attempts or 0) > limits.attempts
    if name == "attempts_leaked":
        return owner is None and look.attempts is not None
    if name == "dead_and_pending":
        return owner is not None and owner != HALTED_NAME
    if name == "indexed_twice":
        return record is not None and example.id in record[1]
    if name == "fence_low":
        return record is not None and record[2] < example.fence
    if name == "index_unordered":
        return record is not None and is_incarnation(record[0]) and not is_ascending([*map(str.encode, record[1])])
    if name == "never_told":
        is_given = record is not None and record[0] == example.owner and example.id in record[1]
        return look.lives and owner == example.owner and is_given
    if name == "inbox_differs":
        is_given = record is not None and record[0] == example.owner and example.id in record[1]
        is_below = record is None or record[2] < example.fence
        is_there = owner is not None or not example.fence  # what was not read has no owner
        return look.lives and owner != example.owner and not is_given and is_below and is_there
    if name == "overtaken":
        return owner is not None and look.in_stream
    if name == "lost":
        return owner is None and look.in_stream
    return True
