"""Run one audit: read, judge, look again, report.

What moved while it was read is a suspect, and the second look asks for pending entry, index record, lease and body of
each in one script: between two scripts of Usher all of them agree (``usher.master.audit``).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from usher.common.base.errors import GroupMissing, StartRefused
from usher.common.base.log import redacted
from usher.common.protocol.attempts import decode
from usher.common.protocol.keys import Keys
from usher.common.protocol.mishaps import (
    KEPT,
    DeclaredLoss,
    losses_command,
    mishaps_command,
    parse_losses,
    parse_mishaps,
)
from usher.common.protocol.owner_words import is_given_back
from usher.common.protocol.registration import NAME, parse
from usher.common.protocol.stream_id import ZERO, is_id, rank
from usher.common.redis.client import Link
from usher.common.redis.endpoints import near
from usher.common.redis.replies import TicketStream, cut_unread, pairs, parse_record, redis_ms
from usher.common.redis.scripts import ScriptRunner
from usher.master.audit import batches, findings
from usher.master.audit.archive import said
from usher.master.audit.batches import BulkReader, facts_of, first_of, nth, schema_of
from usher.master.audit.engine import Engine, Found, SparkEngine, few, refusing
from usher.master.audit.findings import CHECKS, RESERVED, AuditFinding, Example, filled, look
from usher.master.audit.settings import AuditChoices, AuditThresholds
from usher.master.operations.action_log import KEPT as ACTIONS_KEPT
from usher.master.operations.live_rules import rulebook

_MOST = 2**63 - 1
#: The table ``facts``: a row for each stream.
FACTS = schema_of(
    "stream cut_told",
    "time_ms delivered_ms delivered_nth last_nth first_nth deleted_nth base_ms order_ms drop_ms"
    " handled_before_ms ahead_before_ms cut_unread",
)
#: The names in the groups, but for reserved ones. ``oldest_idle_ms``: of the first pending entry, or 0; ``registered``:
#: its consumer is, as this or another incarnation; ``is_ours``: an incarnation may have had that name.
MEMBERS = schema_of(
    "stream name", "pending oldest_idle_ms idle_ms", **dict.fromkeys(("lives", "registered", "is_ours"), pa.bool_())
)
DECLARED = schema_of("stream", "at_ms first_nth last_nth")
_COUNTED = ("skipped_order", "before_known", "maybe_damaged", "maybe_dropped")
_DELETED = b"max-deleted-entry-id"
_BATCH = 200
_NUMBER = re.compile(r"[0-9]{1,19}")
#: Seconds for which entries that were cut unread are a finding: nothing more can be found out about them.
_RECENT_S = 86_400
_FOREIGN = schema_of("stream detail")
#: What a proof carries of a ticket: nothing, in an audit.
CARRIED = schema_of("stream ticket consumer id", "fence nth begun_nth ended_us end_least")
CARRIED_CLOCKS = schema_of("stream consumer", "above_us below_us least_us most_us")
#: The most names of streams in a summary.
_LISTED = 100


@dataclass(frozen=True)
class AuditReport:
    """A run's report. ``unproven``: sentences about what could not be said; ``proven``: of a proof from the archive,
    what it proves of each stream; ``checks``: the names of those that were made."""

    run: str
    started_ms: int
    seconds: float
    redis: str
    streams: tuple[str, ...]
    group: str
    found: tuple[AuditFinding, ...]
    unproven: tuple[str, ...]
    figures: Mapping[str, Any]
    proven: tuple[str, ...] = ()
    checks: tuple[str, ...] = tuple(CHECKS)

    @classmethod
    def of(
        cls, plan: AuditChoices, started_ns: int, found: Sequence[AuditFinding], unproven: Sequence[str], **more: Any
    ) -> AuditReport:
        """Return the report of a run that ends now."""
        started_ms, took_s = started_ns // 1_000_000, round((time.time_ns() - started_ns) / 1e9, 3)
        run = time.strftime("%Y%m%dT%H%M%S", time.gmtime(started_ms / 1000)) + f".{started_ms % 1000:03d}Z"
        about = (run, started_ms, took_s, redacted(plan.redis_url), plan.streams, plan.group)
        worst_first = sorted(found, key=lambda one: (one.check.severity, one.check.name, one.stream))
        return cls(*about, tuple(worst_first), tuple(unproven), **more)

    @property
    def verdict(self) -> str:
        return "clean" if not self.found else min(one.check.severity for one in self.found)

    def sentence(self) -> str:
        if self.verdict == "clean":
            if not any(self.figures.get(name) for name in ("entries", "pending", "executions")):
                return "nothing found, for there is nothing: no message and no execution in any of the streams"
            return (
                "nothing found: whatever could be checked is as promised"
                if self.unproven
                else "clean: the promise held"
            )
        count, kinds = sum(one.count for one in self.found), len({one.check.name for one in self.found})
        found = "1 finding" if count == 1 else f"{count:,} findings" + (f" of {kinds} kinds" if kinds > 1 else "")
        return found + ("; the promise was broken" if self.verdict == "bad" else "")


def document(report: AuditReport) -> dict[str, Any]:
    told = {name: value for name, value in vars(report).items() if name != "found"}
    return told | {"verdict": report.verdict, "findings": [_found(report, one) for one in report.found]}


def _found(report: AuditReport, one: AuditFinding) -> dict[str, Any]:
    name, severity, section, rule, means, *_ = one.check
    keys = Keys(one.stream, report.group)
    examples = [
        each._asdict() | {"look": look(each, keys), "repair": filled(one.check.repair, each, keys)}
        for each in one.examples
    ]
    words = {"check": name, "severity": severity, "rule": rule, "means": means, "runbook": section}
    return words | {"stream": one.stream, "count": one.count, "suspects": one.suspects, "examples": examples}


def summary(report: AuditReport, stream: str) -> dict[str, Any]:
    """Return the summary that is stored in Redis for pages and metrics: small, whatever was found. What was found is of
    this stream, with the first example of each check; the figures are of the whole run."""
    found = [one for one in report.found if one.stream == stream]
    counts = {
        severity: sum(one.count for one in found if one.check.severity == severity) for severity in ("bad", "warn")
    }
    return {
        "run": report.run,
        "started_ms": report.started_ms,
        "seconds": report.seconds,
        "streams": list(report.streams[:_LISTED]),
        "verdict": replace(report, found=tuple(found)).verdict,
        "findings": {one.check.name: one.count for one in found},
        "severities": counts,
        "examples": [_found(report, replace(one, examples=one.examples[:1])) for one in found],
        "unproven": len(report.unproven),
        "unproven_said": said(report.unproven),
        **{name: report.figures.get(name) for name in ("pending", "executions", "oldest_age_ms", "tickets_pending")},
    }


class AuditedStream(NamedTuple):
    """A ticket stream, its group and its run log at one moment.

    ``has_runs``: there are records in the run log, and all after ``cut_ms``, by Redis' clock (-1: it was never cut).
    ``first``: the first entry that is still in the stream, None when it is empty. ``cut_unread``: how many entries were
    cut before they were read, within the last day or not counted yet. ``declared``: losses that masters wrote down.
    ``max_deleted``: the highest entry that was ever deleted by its id; None: not known.
    """

    keys: Keys
    time_ms: int
    length: int
    last_delivered: bytes
    has_runs: bool
    cut_ms: int
    dead_letters: int
    first: bytes | None
    cut_unread: int
    declared: tuple[DeclaredLoss, ...]
    max_deleted: bytes | None

    def row(self, before: AuditedStream, *, entries_read: bool, **more: int | None) -> dict[str, Any]:
        """Return the row of the table ``facts``. ``before``: as it was before anything was read; ``entries_read``: all
        entries that the group has read were, not only those that are pending."""
        return {
            "stream": self.keys.stream,
            "time_ms": self.time_ms,
            "delivered_ms": min(rank(self.last_delivered) >> 64, _MOST),
            "delivered_nth": nth(self.last_delivered),
            "last_nth": nth(before.last_delivered),
            "first_nth": self.first and nth(self.first),
            "deleted_nth": nth(self.max_deleted) if entries_read and self.max_deleted else None,
            **dict.fromkeys(("base_ms", "order_ms"), self.cut_ms if self.has_runs else self.time_ms),
            "cut_unread": self.cut_unread,
            "cut_told": next((": " + loss.describe() for loss in self.declared if loss.kind == "unread_cut"), ""),
            **more,
        }

    def declared_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the table ``declared``: what masters declared to come again. What was taken out of the
        pending list had not succeeded."""
        for loss in self.declared:
            if loss.repeats is not None and loss.kind != "taken_out":
                first, last = loss.repeats
                yield {"stream": self.keys.stream, "at_ms": loss.ms, "first_nth": nth(first), "last_nth": nth(last)}


def unproven(facts: AuditedStream, known: Sequence[Any], counts: Mapping[tuple[str, str], int]) -> list[str]:
    """Return what cannot be said of this stream, each in one sentence. ``known``: stream, handled_ms, ahead_ms of the
    table of that name; ``counts``: (figure, stream) -> entries."""
    (_, handled_ms, ahead_ms, *_), first, cut_ms = known, facts.first, facts.cut_ms
    gone = "its entries" if first is None else f"the entries before {first.decode()}"
    deleted = facts.max_deleted if first and facts.max_deleted and rank(facts.max_deleted) > rank(first) else b""
    since = "none ever was" if handled_ms is None else f"that was added at {handled_ms} ms"
    many = {name: counts.get((name, facts.keys.stream), 0) for name in _COUNTED}
    told = {
        "the run log is empty, so nothing can be said of past executions: order, overlaps, losses"
        " (USHER_RUN_LOG_LENGTH)": not facts.has_runs and facts.last_delivered != ZERO,
        f"records of the run log up to {cut_ms} ms were cut (its cap) or deleted (XDEL), so order, losses and repeats"
        " are proven for entries added after that only (raise USHER_RUN_LOG_LENGTH; usher audit archive)": cut_ms >= 0,
        f"ids are up to {ahead_ms:,} ms ahead of Redis' clock, so that much less is proven (a clock set back?"
        " own ids?)": ahead_ms and cut_ms >= 0,
        f"{gone} are not in it any more (trimmed or deleted); whether all of them were handled was not looked at": (
            handled_ms is not None and (first is None or handled_ms < rank(first) >> 64)
        ),
        f"entries were deleted inside it, the last one {deleted.decode()} (XDEL); whether they were handled was not"
        " looked at": deleted,
        f"{many['skipped_order']:,} executions may be repeats of ones that were cut off the run log; their order is not"
        " judged": many["skipped_order"],
        f"{many['before_known']:,} entries are not later than the first one that was handled ({since}): the group may"
        " be younger": many["before_known"],
        f"nothing says that {many['maybe_damaged']:,} entries were handled; they may be in a record of the run log that"
        " cannot be read (run_unreadable)": many["maybe_damaged"],
        f"nothing says that {many['maybe_dropped']:,} entries were handled; dead letters were dropped since they were"
        " added, or may have been before the action log begins (usher actions), and theirs may be among them": (
            many["maybe_dropped"]
        ),
    }
    return [f"{facts.keys.stream}: {text}" for text, holds in told.items() if holds]


class KeyForeign(StartRefused):
    """A key of a stream that another program wrote to."""


def stream_facts(link: Link, keys: Keys, run_log_length: int) -> AuditedStream:
    """Raises StartRefused when the stream or its group does not exist, KeyForeign, and what Link.call raises."""
    time_ms = redis_ms(link)
    try:
        group = TicketStream(link, keys).group_facts()
    except GroupMissing as missing:
        raise StartRefused(
            f"USHER_TICKET_STREAM, USHER_GROUP: {missing}. There is nothing to audit: is this the Redis, the stream and"
            " the group of your masters?"
        ) from missing
    runs, of_stream = facts_of(link, keys.runs), facts_of(link, keys.stream)
    counted = link.call("HGET", keys.counters, f"cut_at {keys.stream}")
    try:
        mishaps = parse_mishaps(link.call(*mishaps_command(keys)))
    except ValueError as odd:
        raise KeyForeign(f"{keys.counters} cannot be read: {odd}") from odd
    declared = parse_losses(*link.all_of([losses_command(keys, KEPT)]))
    ids = [one for loss in declared for span in (loss.repeats, loss.lost) if span for one in span]
    if not all(is_id(one.decode(errors="replace")) for one in ids):
        raise KeyForeign(f"{keys.losses} cannot be read: an id in it is none")
    is_recent = time_ms // 1000 - mishaps.unread_cut_s < _RECENT_S
    unread = cut_unread(group, of_stream, counted) + (mishaps.unread_cut if is_recent else 0)
    first_run, deleted, letters = first_of(runs), runs.get(_DELETED, ZERO), facts_of(link, keys.dead).get(b"length", 0)
    cut = [first_run] if first_run and is_capped(runs, run_log_length) else []
    cut += [deleted] if first_run and rank(deleted) > rank(first_run) else []
    cut_ms = min(max((rank(one) >> 64 for one in cut), default=-1), _MOST)
    about = (keys, time_ms, of_stream[b"length"], group[b"last-delivered-id"], first_run is not None, cut_ms, letters)
    return AuditedStream(*about, first_of(of_stream), unread, tuple(declared), of_stream.get(_DELETED))


def foreign_keys(link: Link, keys: Keys) -> list[str]:
    kinds = dict.fromkeys((keys.tickets, keys.consumers, keys.counters, keys.attempts, keys.rules), b"hash")
    kinds |= dict.fromkeys((keys.dead, keys.runs, keys.actions, keys.losses), b"stream")
    found = link.all_of([("TYPE", name) for name in kinds])
    return [
        f"{name} is a {kind.decode()}, not a {own.decode()}"
        for (name, own), kind in zip(kinds.items(), found, strict=True)
        if kind not in (own, b"none")
    ]


def is_capped(log: Mapping[bytes, Any], cap: int) -> bool:
    """Return True when records were cut off a log. Redis counts them since 7.0; before that a log that is shorter than
    its cap has never been cut."""
    length = log.get(b"length", 0)
    return bool(log[b"entries-added"] > length if b"entries-added" in log else length >= cap > 0)


def members(reader: BulkReader, keys: Keys) -> Iterator[pa.RecordBatch]:
    rows = [pairs(row) for row in reader.call("XINFO", "CONSUMERS", keys.stream, keys.group)]
    rows = [row for row in rows if row[b"name"].decode(errors="replace") not in RESERVED]
    stored = pairs(reader.call("HGETALL", keys.consumers))
    consumers = {name.decode(errors="replace") for name in stored}
    generation = reader.call("HGET", keys.counters, "generation")
    last = int(generation) if generation and generation.isdigit() else 1 << 63  # a lost counter says nothing
    registered = set()
    for one in stored.items():
        with contextlib.suppress(ValueError):  # also of bytes that are no text
            registered.add(parse(*one).incarnation)
    for at in range(0, len(rows), _BATCH):
        part, found = rows[at : at + _BATCH], []
        leases = reader.all_of([("EXISTS", keys.prefix.encode() + b"lease:" + row[b"name"]) for row in part])
        oldest = reader.all_of([("XPENDING", keys.stream, keys.group, "-", "+", 1, row[b"name"]) for row in part])
        for row, lives, first in zip(part, map(bool, leases), oldest, strict=True):
            name = row[b"name"].decode(errors="replace")
            # Who has a lease and is registered is ours, whatever a counter that was lost or set back says.
            consumer, _, number = name.rpartition(":")
            was_named = NAME.fullmatch(consumer) and _NUMBER.fullmatch(number) and int(number) <= last
            is_ours = bool(was_named) or (lives and name in registered)
            numbers = row[b"pending"], first[0][2] if first else 0, row[b"idle"]
            found.append((keys.stream, name, *numbers, lives, consumer in consumers, is_ours))
        yield pa.RecordBatch.from_pylist([dict(zip(MEMBERS.names, one, strict=True)) for one in found], MEMBERS)


class SuspectSnapshot(NamedTuple):
    """The state of a suspect at one moment. ``owner`` None: not pending. ``whose`` (None: no record), ``ids`` and
    ``fence``: of its ticket's record; ``attempts``: that count; ``other_owner``: of what it is compared with."""

    owner: str | None
    idle_ms: int
    deliveries: int
    whose: str | None
    ids: tuple[str, ...]
    fence: int
    readable: bool
    lives: bool
    in_stream: bool
    attempts: int | None
    other_owner: str | None


def looks(link: Link, keys: Keys, name: str, suspects: Iterable[Example]) -> Iterator[tuple[Example, SuspectSnapshot]]:
    """Yield the second look at each suspect of a check, atomic per suspect; those of one owner together."""
    scripts = ScriptRunner(link)
    by_owner: dict[str, list[Example]] = defaultdict(list)
    for example in suspects:
        by_owner[example.owner].append(example)
    for owner, examples in by_owner.items():
        names = (keys.stream, keys.tickets, keys.lease(owner), keys.attempts)
        for at in range(0, len(examples), _BATCH):
            part = examples[at : at + _BATCH]
            others = [one.detail.partition(" ")[0] if name == "ticket_owned_twice" else ZERO for one in part]
            asked = [
                (keys.group, one.id or ZERO, ticket_name(one), other) for one, other in zip(part, others, strict=True)
            ]
            yield from zip(part, map(_look, scripts.run_each("look_again", names, asked)), strict=True)


def ticket_name(example: Example) -> bytes:
    """Return the ticket's field in the index. A message without a ticket id is a ticket of its own, under a name that
    is not text."""
    is_own = not example.ticket or example.ticket == "\ufffd" + example.id
    return b"\xff" + example.id.encode() if is_own else example.ticket.encode()


def _look(answer: Any) -> SuspectSnapshot:
    owner, idle, deliveries, stored, lease, body, attempts, other = answer
    record: Any = (None, (), 0, stored is None)
    with contextlib.suppress(ValueError):
        if stored is not None:
            whose, fence, ids = parse_record(stored)
            record = (whose.decode(), tuple(one.decode() for one in ids), fence, True)
    owner, other = (None if one is None else one.decode(errors="replace") for one in (owner, other))
    failures = None if attempts is None else decode(attempts).failures
    told = (owner, idle, deliveries, *record, bool(lease), bool(body), failures, other)
    return SuspectSnapshot._make(told)


def is_incarnation(name: str | None) -> bool:
    return name is not None and ":" in name


def _agrees(look: SuspectSnapshot) -> bool:
    if look.whose == "halted":
        return look.owner in RESERVED
    return look.owner == ("master" if is_given_back((look.whose or "").encode()) else look.whose)


def _rank(one: str) -> int:
    return rank(one.encode())


#: Check -> whether a suspect of it is a finding at the moment of the second look. The others are of records that do not
#: change: what was found once in those is a finding.
_HOLDS: dict[str, Callable[[Example, SuspectSnapshot, AuditThresholds], bool]] = {
    "pending_without_index": lambda one, look, _: (
        is_incarnation(look.owner) and look.in_stream and look.readable and one.id not in look.ids
    ),
    "index_without_pending": lambda one, look, _: (
        not look.owner and not is_incarnation(look.whose) and one.id in look.ids
    ),
    "owners_differ": lambda one, look, _: bool(look.owner) and one.id in look.ids and not _agrees(look),
    "index_unreadable": lambda one, look, _: not look.readable,
    "ticket_owned_twice": lambda one, look, _: (
        is_incarnation(look.owner) and is_incarnation(look.other_owner) and look.other_owner != look.owner
    ),
    "idle_too_long": lambda one, look, most: (
        look.owner == one.owner and look.lives and look.idle_ms > most.owner_idle_ms
    ),
    "parked_too_long": lambda _, look, most: (
        look.owner in RESERVED and look.whose is None and look.idle_ms > most.parked_ms
    ),
    "body_gone": lambda one, look, _: bool(look.owner) and not look.in_stream,
    "delivered_often": lambda one, look, most: bool(look.owner) and look.deliveries > most.deliveries,
    "attempts_many": lambda one, look, most: bool(look.owner) and (look.attempts or 0) > most.attempts,
    "attempts_leaked": lambda one, look, _: not look.owner and look.attempts is not None,
    "dead_and_pending": lambda one, look, _: look.owner not in (None, "halted"),
    "indexed_twice": lambda one, look, _: one.id in look.ids,
    "index_unordered": lambda _, look, __: is_incarnation(look.whose) and [*look.ids] != sorted({*look.ids}, key=_rank),
    "never_told": lambda one, look, _: look.lives and look.owner == one.owner == look.whose and one.id in look.ids,
    "overtaken": lambda one, look, _: bool(look.owner) and look.in_stream,
    "done_and_pending": lambda one, look, _: bool(look.owner) and look.in_stream,
    "lost": lambda one, look, _: not look.owner and look.in_stream,
    "fence_low": lambda one, look, _: look.whose is not None and look.fence < int(one.detail.rpartition(" ")[2]),
}
LOOKED_AGAIN = frozenset(_HOLDS)


def still_there(
    link: Link, keys: Keys, name: str, examples: Sequence[Example], limits: AuditThresholds
) -> list[Example]:
    """Return the suspects of the first look that are findings at the moment of a second one."""
    return [one for one, look in looks(link, keys, name, examples) if _HOLDS[name](one, look, limits)]


def last_drop_ms(link: Link, keys: Keys) -> int:
    """Return when a dead letter was last dropped; if the action log was cut and has no drop, when it begins: there may
    have been one before. -1: never."""
    end, first_ms = b"+", -1
    while True:
        rows = link.call("XREVRANGE", keys.actions, end, "-", "COUNT", 500)
        for line, flat in rows:
            first_ms = int(line.partition(b"-")[0])
            if pairs(flat).get(b"what") == b"drop":
                return first_ms
        if len(rows) < 500:
            return first_ms if is_capped(facts_of(link, keys.actions), ACTIONS_KEPT) else -1
        end = b"(" + rows[-1][0]


Reading = Callable[[BulkReader, Keys], Iterator[pa.RecordBatch]]
Readers = Mapping[str, tuple[BulkReader, Keys]]


def read_redis(engine: Engine, readers: Readers, file: Path, schema: pa.Schema, read: Reading) -> None:
    """Make a table, of the name of ``file``, of what is read of these streams."""
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for reader, keys in readers.values():
            for batch in read(reader, keys):
                writer.write_batch(batch)
    engine.files(file.stem, [file], schema)


@contextlib.contextmanager
def readers_of(plan: AuditChoices) -> Iterator[dict[str, tuple[BulkReader, Keys]]]:
    with contextlib.ExitStack() as opened:
        yield {
            stream: (opened.enter_context(BulkReader(near(plan.redis_url, stream))), plan.keys(stream))
            for stream in plan.streams
        }


class AuditRun:
    """An audit; what is read lies in ``folder``."""

    def __init__(self, engine: Engine, plan: AuditChoices, folder: Path) -> None:
        self._engine, self._plan, self._folder = engine, plan, folder
        self.suspects: Found = {}
        self._readers: dict[str, tuple[BulkReader, Keys]] = {}
        self._reading_s = 0.0
        self._open: list[str] = []  # what could not be proven
        self._figures: dict[tuple[str, str], int] = {}

    def run(self) -> AuditReport:
        """Raises StartRefused when it cannot be completed."""
        started_ns = time.time_ns()
        with refusing("the audit was not finished, so it proves nothing"), readers_of(self._plan) as self._readers:
            now = self._first_look()
            return self._report(started_ns, now, self._second_look())

    def _facts(self) -> dict[str, AuditedStream]:
        """Return the facts of each stream, and leave those out that another program wrote to."""
        facts, foreign = {}, []
        for stream, (link, keys) in list(self._readers.items()):
            told = foreign_keys(link, keys)
            try:
                if not told:
                    facts[stream] = stream_facts(link, keys, self._plan.run_log_length)
            except KeyForeign as odd:
                told = [str(odd)]
            if told:
                foreign += [{"stream": stream, "detail": one} for one in told]
                del self._readers[stream]
        self._engine.arrow("foreign_keys", few(_FOREIGN, foreign))
        return facts

    def _first_look(self) -> list[AuditedStream]:
        engine, plan = self._engine, self._plan
        before = self._facts()
        # Without a run log nothing is proven of what is over, so only the pending entries are read.
        everything = any(one.has_runs for one in before.values())
        self._read(everything)
        now, rows = [], []
        for stream, (link, keys) in self._readers.items():
            now.append(stream_facts(link, keys, plan.run_log_length))
            drop_ms = last_drop_ms(link, keys)
            rows.append(now[-1].row(before[stream], entries_read=everything, drop_ms=drop_ms))
        engine.arrow("facts", few(FACTS, rows))
        engine.arrow("declared", few(DECLARED, (row for one in now for row in one.declared_rows())))
        engine.arrow("carried", CARRIED.empty_table())
        engine.arrow("carried_clocks", CARRIED_CLOCKS.empty_table())
        engine.arrow("limits", pa.Table.from_pylist([plan.thresholds._asdict()]))
        engine.derive(
            *("known", "clocks", "timed", "doubtful", "suspects", "late", "twice"),
            *("ids", "odd", "unlike", "apart", "parked", "untold", "indexed"),
        )
        self._read_again()
        self.suspects = engine.found(CHECKS)
        self._figures = {(figure, stream): value for figure, stream, value in engine.rows(findings.text("figures"))}
        known = {row[0]: row for row in engine.rows("SELECT stream, handled_ms, ahead_ms FROM known")}
        self._open = [text for one in now for text in unproven(one, known[one.keys.stream], self._figures)]
        return now

    def _read(self, everything: bool) -> None:
        """Read Redis in the order in which nothing that moves is told wrongly."""
        # Of little data this process reads Redis for Spark, too: starting its Python workers costs more.
        apart = isinstance(self._engine, SparkEngine) and not self._engine.small and bool(self._readers)
        field, began_s = self._plan.field, time.monotonic()
        if apart:
            self._by_workers("entries", "redis_pending", entries="all" if everything else "pending")
        else:
            self._by_us(
                "entries",
                batches.PENDING,
                lambda link, keys: batches.pending(link, keys, field(keys.stream), everything),
            )
        self._reading_s = time.monotonic() - began_s
        self._by_us("members", MEMBERS, members)
        for read in (batches.tickets, batches.attempts, batches.inboxes):
            self._by_us(read.__name__, getattr(batches, read.__name__.upper()), read)
        if apart:
            self._by_workers("runs", "redis_runs")
        else:
            self._by_us("runs", batches.RUNS, lambda link, keys: batches.runs(link, keys.stream, keys.runs))
        self._by_us("letters", batches.LETTERS, batches.letters)

    def _by_us(self, name: str, schema: pa.Schema, read: Reading) -> None:
        read_redis(self._engine, self._readers, self._folder / f"{name}.parquet", schema, read)

    def _by_workers(self, name: str, source: str, **options: str) -> None:
        assert isinstance(self._engine, SparkEngine)
        given = {"url": self._plan.redis_url, "stream": ",".join(self._readers), "group": self._plan.group}
        given |= {"ticket_field": self._plan.ticket_field}
        self._engine.read(name, source, given | options, self._folder)

    def _read_again(self) -> None:
        """Read the stream for messages that were sent again, from the first one on of which nothing is known."""
        kinds = "kind IN ('lost', 'passed', 'no_letter')"
        first = dict(self._engine.rows(f"SELECT stream, min(ms) FROM odd WHERE {kinds} GROUP BY stream"))

        def read(reader: BulkReader, keys: Keys) -> Iterator[pa.RecordBatch]:
            name = keys.stream
            if name in first:
                since = b"%d-0" % first[name]
                yield from batches.stream(reader, name, name, self._plan.field(name), (since, b"+"))

        self._by_us("messages", batches.STREAM, read)
        self._engine.derive("again")

    def _second_look(self) -> list[AuditFinding]:
        found = self.suspects
        if found:
            time.sleep(findings.SETTLE_S)
        of_members = {name for name, _ in found if name in findings.OF_MEMBERS}
        if of_members:
            self._by_us("members", MEMBERS, members)
        again = self._engine.found(of_members) if of_members else {}
        held = []
        for (name, stream), (suspects, examples) in found.items():
            count = suspects
            if name in findings.OF_MEMBERS:
                owners = {one.owner for one in examples}
                examples = [one for one in again.get((name, stream), (0, []))[1] if one.owner in owners]
                count = len(examples)
            elif name in LOOKED_AGAIN:
                examples = self._confirmed(name, stream, examples)
                # Every example holds: then count all suspects, of which there are too many to ask for each.
                count = suspects if len(examples) == findings.LOOKED_AT else len(examples)
                if suspects > findings.LOOKED_AT and count:
                    self._open.append(
                        f"{stream}: of {suspects:,} suspects of {name} the first {findings.LOOKED_AT:,} were looked at"
                        " again"
                    )
            held.append(AuditFinding(CHECKS[name], stream, count, suspects, tuple(examples[: findings.SHOWN])))
        return [one for one in held if one.count]

    def _confirmed(self, name: str, stream: str, examples: Sequence[Example]) -> list[Example]:
        link, keys = self._readers[stream]
        held = still_there(link, keys, name, examples, self._plan.thresholds)
        if held and name == "parked_too_long":  # a live rule may hold them back
            rules = rulebook(link.call("HGETALL", keys.rules))
            held = [one for one in held if not rules.of(ticket_name(one), b"")]
            limits = rules.tenant_limits.values()
            if held and (rules.holds_tenants or any(one.rate_per_second or one.concurrency for one in limits)):
                self._open.append(
                    f"{stream}: {len(held):,} entries wait for long; live rules hold tenants back, whose they may be"
                    " (parked_too_long)"
                )
                return []
        return held

    def _report(self, started_ns: int, streams: Sequence[AuditedStream], found: Sequence[AuditFinding]) -> AuditReport:
        figures = {
            "entries": sum(one.length for one in streams),
            **{name: value for (name, stream), value in self._figures.items() if not stream},
            "dead_letters": sum(one.dead_letters for one in streams),
            "reading_seconds": round(self._reading_s, 3),
            "engine": self._engine.name,
        }
        return AuditReport.of(self._plan, started_ns, found, self._open, figures=figures)
