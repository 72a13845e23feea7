"""Run an audit: read, judge, look again at what moved meanwhile (``usher.master.audit``), report. Or a step of the
proof of history, which archives what is new and judges that, with what its tickets carry from before. Or ``usher
report``: waits, run times, retries, dead letters and worker seconds of what was executed.

A proof's files are carry (a row per ticket: tables/carry.sql), clocks (how far they may be off), open (entries that
were not over at the last run) and found (all findings so far). A commit is there as a whole or not at all, and begins
where the one before it ends, so a killed run is done again with the same rows. What a run has found is told before it
is committed: one that is killed in between tells it again.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import click
import jinja2
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from usher.common.base.clock import wall_ms
from usher.common.base.errors import GroupMissing, StartRefused
from usher.common.base.log import redacted
from usher.common.base.text import escape_control, span
from usher.common.protocol.keys import HALTED, MASTER, Keys
from usher.common.protocol.mishaps import KEPT, MISHAPS, losses_command, parse_losses, parse_mishaps
from usher.common.protocol.registration import NAME
from usher.common.protocol.stream_id import ZERO, after, is_id, rank
from usher.common.redis.client import Link
from usher.common.redis.endpoints import near
from usher.common.redis.replies import TicketStream, cut_unread, facts_of, first_of, pairs, redis_ms
from usher.master.audit import archive, batches, findings
from usher.master.audit.archive import Commit, data_sets, locked, note, said, seen
from usher.master.audit.batches import BulkReader, nth, schema_of
from usher.master.audit.cli import session, with_link
from usher.master.audit.engine import Engine, SparkEngine, few, quoted, refusing
from usher.master.audit.findings import CHECKS, MOVING, PROVES, AuditFinding, Example, filled
from usher.master.audit.settings import AuditChoices
from usher.master.cli.shared import print_json
from usher.master.membership.registry import read_registry
from usher.master.operations.action_log import KEPT as ACTIONS_KEPT
from usher.master.operations.live_rules import rulebook

_MOST = 2**63 - 1
#: The table ``facts``: a row for each stream.
FACTS = schema_of(
    "stream cut_told",
    "time_ms delivered_ms delivered_nth last_nth first_nth deleted_nth base_ms order_ms drop_ms"
    " handled_before_ms ahead_before_ms cut_unread",
)
#: Unreserved names in the groups. ``registered``: as any incarnation; ``is_ours``: an incarnation may have had it.
MEMBERS = schema_of(
    "stream name", "pending oldest_idle_ms idle_ms", **dict.fromkeys(("lives", "registered", "is_ours"), pa.bool_())
)
DECLARED = schema_of("stream", "at_ms first_nth last_nth")
_DELETED = b"max-deleted-entry-id"
_NUMBER = re.compile(r"[0-9]{1,19}")
_RECENT_S = 86_400  # for which entries that were cut unread are a finding: nothing more can be found out about them
_FOREIGN = schema_of("stream detail")
#: What a proof carries of a ticket: nothing, in an audit.
CARRIED = schema_of("stream ticket consumer id", "fence nth begun_nth ended_us end_least")
CARRIED_CLOCKS = schema_of("stream consumer", "above_us below_us least_us most_us")
_DELTAS = 32  # commits whose carries are read together before they are made one
_OPEN = schema_of("stream id ticket", "ms seq nth")
_FOUND = schema_of(" ".join(("check", *Example._fields)))

#: Dimensions, in the order in which people ask for them, and the tables that Parquet files are made of.
DIMENSIONS = ("tenant", "handler", "ticket", "consumer")
_FILES = ("days", "hours")
_DAY_US = 86_400_000_000
_LEAST_DAYS, _FAR_DAYS = 3, 730  # days from which a trend is told, and days beyond which a forecast says nothing
_ROW = ("stream", "dim", "name", "day", "executions", "done", "failed", "retries", "letters", "worker_s")
_TIMES = ("wait_p50_ms", "wait_p95_ms", "wait_p99_ms", "run_p50_ms", "run_p95_ms", "run_p99_ms")


class AuditReport:
    """The report of a run that ends now. ``proven``: of a proof, what it proves of each stream; ``checks``: the names
    of those made."""

    def __init__(
        self,
        plan: AuditChoices,
        started_ns: int,
        found: Iterable[AuditFinding],
        unproven: Iterable[str],
        figures: Mapping[str, Any],
        proven: tuple[str, ...] = (),
        checks: tuple[str, ...] = tuple(CHECKS),
    ) -> None:
        self.started_ms, self.seconds = started_ns // 1_000_000, round((time.time_ns() - started_ns) / 1e9, 3)
        began = time.strftime("%Y%m%dT%H%M%S", time.gmtime(self.started_ms / 1000))
        self.run = f"{began}.{self.started_ms % 1000:03d}Z"
        self.redis, self.streams, self.group = redacted(plan.redis_url), plan.streams, plan.group
        self.found = tuple(sorted(found, key=lambda one: (one.check.severity, one.check.name, one.stream)))
        self.unproven, self.figures, self.proven, self.checks = tuple(unproven), figures, proven, checks

    @property
    def verdict(self) -> str:
        return "clean" if not self.found else min(one.check.severity for one in self.found)

    def sentence(self) -> str:
        if self.verdict == "clean":
            if not any(self.figures.get(name) for name in ("entries", "pending", "executions")):
                return "nothing found, for there is nothing: no message and no execution in any of the streams"
            return "nothing found: what could be checked is as promised" if self.unproven else "clean: the promise held"
        count, kinds = sum(one.count for one in self.found), len({one.check.name for one in self.found})
        found = "1 finding" if count == 1 else f"{count:,} findings" + (f" of {kinds} kinds" if kinds > 1 else "")
        return found + ("; the promise was broken" if self.verdict == "bad" else "")


def document(report: AuditReport) -> dict[str, Any]:
    told = {name: value for name, value in vars(report).items() if name != "found"}
    return told | {"verdict": report.verdict, "findings": [_found(report, one) for one in report.found]}


def _found(report: AuditReport, one: AuditFinding) -> dict[str, Any]:
    name, severity, _, section, rule, means, *_ = one.check
    keys = Keys(one.stream, report.group)
    examples = [each._asdict() | {"repair": filled(one.check.repair, each, keys)} for each in one.examples]
    words = {"check": name, "severity": severity, "rule": rule, "means": means, "runbook": section}
    return words | {"stream": one.stream, "count": one.count, "examples": examples}


def summary(report: AuditReport, stream: str) -> dict[str, Any]:
    """Return what Redis keeps for pages and metrics: findings of this stream, an example each; figures of the run."""
    found = [one for one in report.found if one.stream == stream]
    severities = {kind: sum(one.count for one in found if one.check.severity == kind) for kind in ("bad", "warn")}
    verdict = min((one.check.severity for one in found), default="clean")
    return {
        **{name: getattr(report, name) for name in ("run", "started_ms", "seconds")},
        "verdict": verdict,
        "findings": [_found(report, replace(one, examples=one.examples[:1])) for one in found],
        **{name: report.figures.get(name) for name in ("pending", "executions", "oldest_age_ms")},
        "severities": severities,
        "unproven": len(report.unproven),
        "unproven_said": said(report.unproven),
    }


def unproven(facts: Mapping[str, Any], known: Sequence[Any], counts: Mapping[tuple[str, str], int]) -> list[str]:
    """Return what cannot be said of this stream. ``known``: its row; ``counts``: (figure, stream) -> entries."""
    (stream, handled_ms, ahead_ms, *_), first, cut_ms = known, facts["first"], facts["cut_ms"]
    gone = "its entries" if first is None else f"the entries before {first.decode()}"
    deleted = facts["last_deleted"] if first and rank(facts["last_deleted"] or ZERO) > rank(first) else b""
    since = "none ever was" if handled_ms is None else f"that was added at {handled_ms} ms"
    many = defaultdict(int, {name: count for (name, of), count in counts.items() if of == stream})
    told = {
        "the run log is empty, so nothing can be said of past executions: order, overlaps, losses"
        " (USHER_RUN_LOG_LENGTH)": not facts["has_runs"] and facts["delivered_nth"] > 0,
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
    return [f"{stream}: {text}" for text, holds in told.items() if holds]


class KeyForeign(StartRefused):
    """A key of a stream that another program wrote to."""


def stream_facts(link: Link, keys: Keys, run_log_length: int) -> dict[str, Any]:
    """Return a stream's row in ``facts``, and more: how many entries and dead letters it has, whether there are records
    in the run log (``has_runs``), which is whole above ``cut_ms`` (-1: never cut), and declared losses (``declared``).
    Raises StartRefused when stream or group does not exist, KeyForeign, and what Link.call raises."""
    kinds = dict.fromkeys((keys.tickets, keys.consumers, keys.counters, keys.attempts, keys.rules), b"hash")
    kinds |= dict.fromkeys((keys.dead, keys.runs, keys.actions, keys.losses), b"stream")
    types = zip(kinds.items(), link.all_of([("TYPE", name) for name in kinds]), strict=True)
    foreign = [(name, kind, own) for (name, own), kind in types if kind not in (own, b"none")]
    if foreign:
        told = (f"{name} is a {kind.decode()}, not a {own.decode()}" for name, kind, own in foreign)
        raise KeyForeign("; ".join(told))
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
        mishaps = parse_mishaps(link.call("HMGET", keys.counters, *MISHAPS))
    except ValueError as odd:
        raise KeyForeign(f"{keys.counters} cannot be read: {odd}") from odd
    losses = parse_losses(*link.all_of([losses_command(keys, KEPT)]))
    ids = [one for loss in losses for span in (loss.repeats, loss.lost) if span for one in span]
    if not all(is_id(one.decode(errors="replace")) for one in ids):
        raise KeyForeign(f"{keys.losses} cannot be read: an id in it is none")
    # What was taken out of the pending list had not succeeded.
    repeats = [(one.ms, *one.repeats) for one in losses if one.repeats is not None and one.kind != "taken_out"]
    is_recent = time_ms // 1000 - mishaps["unread_cut_s"] < _RECENT_S
    unread = cut_unread(group, of_stream, counted) + (mishaps["unread_cut"] if is_recent else 0)
    first, first_run, deleted = first_of(of_stream), first_of(runs), runs.get(_DELETED, ZERO)
    cut = [first_run] if first_run and is_capped(runs, run_log_length) else []
    cut += [deleted] if first_run and rank(deleted) > rank(first_run) else []
    cut_ms = min(max((rank(one) >> 64 for one in cut), default=-1), _MOST)
    delivered, last_deleted = group[b"last-delivered-id"], of_stream.get(_DELETED)
    declared = [dict(zip(DECLARED.names, (keys.stream, ms, nth(a), nth(b)), strict=True)) for ms, a, b in repeats]
    return dict.fromkeys(FACTS.names) | {
        "stream": keys.stream,
        "time_ms": time_ms,
        "delivered_ms": min(rank(delivered) >> 64, _MOST),
        "delivered_nth": nth(delivered),
        "first_nth": first and nth(first),
        "deleted_nth": last_deleted and nth(last_deleted),
        **dict.fromkeys(("base_ms", "order_ms"), cut_ms if first_run else time_ms),
        "drop_ms": last_drop_ms(link, keys),
        "cut_unread": unread,
        "cut_told": next((": " + one.describe() for one in losses if one.kind == "unread_cut"), ""),
        "declared": declared,
        "length": of_stream[b"length"],
        "letters": facts_of(link, keys.dead).get(b"length", 0),
        "first": first,
        "last_deleted": last_deleted,
        "has_runs": first_run is not None,
        "cut_ms": cut_ms,
    }


def is_capped(log: Mapping[bytes, Any], cap: int) -> bool:
    """Return True when records were cut off a log: Redis counts them since 7.0; before, when it has reached its cap."""
    length = log.get(b"length", 0)
    return bool(log[b"entries-added"] > length if b"entries-added" in log else length >= cap > 0)


def members(reader: BulkReader, keys: Keys) -> Iterator[pa.RecordBatch]:
    rows = [pairs(row) for row in reader.call("XINFO", "CONSUMERS", keys.stream, keys.group)]
    rows = [row for row in rows if row[b"name"] not in (MASTER, HALTED)]
    registered = read_registry(reader, keys)
    consumers = {one.registration.name for one in registered.values()}
    generation = reader.call("HGET", keys.counters, "generation")
    last = int(generation) if generation and generation.isdigit() else 1 << 63  # a lost counter says nothing
    leases = reader.all_of([("EXISTS", keys.prefix.encode() + b"lease:" + row[b"name"]) for row in rows])
    oldest = reader.all_of([("XPENDING", keys.stream, keys.group, "-", "+", 1, row[b"name"]) for row in rows])
    found = []
    for row, lives, first in zip(rows, map(bool, leases), oldest, strict=True):
        name = row[b"name"].decode(errors="replace")
        # Who has a lease and is registered is ours, whatever a counter that was lost or set back says.
        consumer, _, number = name.rpartition(":")
        was_named = NAME.fullmatch(consumer) and _NUMBER.fullmatch(number) and int(number) <= last
        numbers = row[b"pending"], first[0][2] if first else 0, row[b"idle"]
        told = (lives, consumer in consumers, bool(was_named) or (lives and name in registered))
        found.append(dict(zip(MEMBERS.names, (keys.stream, name, *numbers, *told), strict=True)))
    yield pa.RecordBatch.from_pylist(found, MEMBERS)


def ticket_name(example: Example) -> bytes:
    """Return the ticket's field in the index: without a ticket id one of its own, under a name that is no text."""
    is_own = not example.ticket or example.ticket == "\ufffd" + example.id
    return b"\xff" + example.id.encode() if is_own else example.ticket.encode()


def last_drop_ms(link: Link, keys: Keys) -> int:
    """Return when a dead letter was last dropped, or may have been: when the cut action log begins. -1: never."""
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
    batches.write(file, schema, (batch for reader, keys in readers.values() for batch in read(reader, keys)))
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
        self.suspects: list[AuditFinding] = []
        self._open: list[str] = []  # what could not be proven

    def run(self) -> AuditReport:
        """Raises StartRefused when it cannot be completed."""
        started_ns = time.time_ns()
        with refusing("the audit was not finished, so it proves nothing"), readers_of(self._plan) as self._readers:
            streams = self._first_look()
            found = self._second_look()
        figures = {
            "entries": sum(one["length"] for one in streams),
            **{name: value for (name, stream), value in self._figures.items() if not stream},
            "dead_letters": sum(one["letters"] for one in streams),
            "reading_seconds": round(self._reading_s, 3),
            "engine": self._engine.name,
        }
        return AuditReport(self._plan, started_ns, found, self._open, figures)

    def _facts(self) -> dict[str, dict[str, Any]]:
        """Return the facts of each stream, and leave those out that another program wrote to."""
        facts, foreign = {}, []
        for stream, (link, keys) in list(self._readers.items()):
            try:
                facts[stream] = stream_facts(link, keys, self._plan.run_log_length)
            except KeyForeign as odd:
                foreign.append({"stream": stream, "detail": str(odd)})
                del self._readers[stream]
        self._engine.arrow("foreign_keys", few(_FOREIGN, foreign))
        return facts

    def _first_look(self) -> list[dict[str, Any]]:
        engine, plan = self._engine, self._plan
        before = self._facts()
        self._read()
        now = [stream_facts(link, keys, plan.run_log_length) for link, keys in self._readers.values()]
        for row in now:
            row["last_nth"] = before[row["stream"]]["delivered_nth"]
        engine.arrow("facts", few(FACTS, now))
        engine.arrow("declared", few(DECLARED, (loss for row in now for loss in row["declared"])))
        engine.arrow("carried", CARRIED.empty_table())
        engine.arrow("carried_clocks", CARRIED_CLOCKS.empty_table())
        engine.arrow("limits", pa.Table.from_pylist([plan.thresholds]))
        engine.derive(
            *("held", "known", "clocks", "timed", "doubtful", "suspects", "turns", "late", "twice"),
            *("stretches", "ids", "odd", "marked", "parts", "unlike", "apart", "untold", "indexed"),
        )
        self._read_again()
        self.suspects = engine.found(CHECKS)
        self._figures = {(figure, stream): value for figure, stream, value in engine.rows(findings.text("figures"))}
        known = {row[0]: row for row in engine.rows("SELECT stream, handled_ms, ahead_ms FROM known")}
        self._open += [text for one in now for text in unproven(one, known[one["stream"]], self._figures)]
        return now

    def _read(self) -> None:
        """Read Redis in the order in which nothing that moves is told wrongly."""
        began_s = time.monotonic()
        if not self._by_workers("entries", "redis_pending", entries="all"):
            self._by_us("entries", batches.PENDING, self._entries)
        self._reading_s = time.monotonic() - began_s
        self._by_us("members", MEMBERS, members)
        for read in (batches.tickets, batches.attempts, batches.inboxes):
            self._by_us(read.__name__, getattr(batches, read.__name__.upper()), read)
        if not self._by_workers("runs", "redis_runs"):
            self._by_us("runs", batches.RUNS, lambda link, keys: batches.runs(link, keys.stream, keys.runs))
        self._by_us("letters", batches.LETTERS, batches.letters)

    def _entries(self, reader: BulkReader, keys: Keys) -> Iterator[pa.RecordBatch]:
        return batches.pending(reader, keys, self._plan.field(keys.stream), everything=True)

    def _by_us(self, name: str, schema: pa.Schema, read: Reading) -> None:
        read_redis(self._engine, self._readers, self._folder / f"{name}.parquet", schema, read)

    def _by_workers(self, name: str, source: str, **options: str) -> bool:
        """Let Spark's workers read. False: this process is to do it, as little data costs less than to start them."""
        if not isinstance(self._engine, SparkEngine) or self._engine.small or not self._readers:
            return False
        given = {"url": self._plan.redis_url, "stream": ",".join(self._readers), "group": self._plan.group}
        self._engine.read(name, source, given | {"ticket_field": self._plan.ticket_field} | options)
        return True

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
        moving = [one for one in self.suspects if one.check.name in MOVING]
        again, held = {(one.check, one.stream): one.examples for one in self._look_again(moving)}, []
        for one in self.suspects:
            name, stream, suspects, examples = one.check.name, one.stream, one.count, one.examples
            if one in moving:
                known = {example[:4] for example in examples}
                examples = tuple(example for example in again.get((one.check, stream), ()) if example[:4] in known)
                if name == "parked_too_long":
                    examples = self._not_held_back(stream, examples)
                # Every example holds: then count all suspects, of which there are too many to ask for each.
                one = replace(one, count=suspects if len(examples) == findings.LOOKED_AT else len(examples))
                if suspects > findings.LOOKED_AT and one.count:
                    self._open.append(
                        f"{stream}: of {suspects:,} suspects of {name} the first {findings.LOOKED_AT:,} were looked at"
                        " again"
                    )
            if one.count:
                held.append(replace(one, examples=examples[: findings.SHOWN]))
        return held

    def _look_again(self, moving: Sequence[AuditFinding]) -> list[AuditFinding]:
        """Make the checks of what moves once more: of what is read of each suspect's ticket at one moment."""
        if not moving:
            return []
        time.sleep(findings.SETTLE_S)
        engine, names = self._engine, {one.check.name for one in moving}
        read: list[tuple[Iterable[pa.RecordBatch], ...]] = []
        for stream, (link, keys) in self._readers.items():
            ids: dict[bytes, set[str]] = defaultdict(set)
            suspects = [(one.check.name, each) for one in moving if one.stream == stream for each in one.examples]
            for check, one in suspects:
                ids[ticket_name(one)].add(one.id)
                if check == "ticket_owned_twice":
                    ids[ticket_name(one)].add(one.detail.partition(" ")[0])
                if check == "indexed_twice":
                    ids[one.detail.removeprefix("also in the record of ").encode()].add(one.id)
            read.append(batches.again(link, keys, ids, {one.id for check, one in suspects if check == "body_gone"}))
        for (name, schema), some in zip(batches.AGAIN.items(), zip(*read, strict=True), strict=True):
            engine.arrow(name, pa.Table.from_batches(chain.from_iterable(some), schema))
        self._by_us("members", MEMBERS, members)
        engine.derive("marked", "parts", "unlike", "apart", "indexed")
        if "never_told" in names:
            engine.derive("untold")
        if names & {"lost", "overtaken", "done_and_pending"}:
            engine.derive("odd", "again")
        return engine.found(names)

    def _not_held_back(self, stream: str, examples: Sequence[Example]) -> tuple[Example, ...]:
        link, keys = self._readers[stream]
        rules = rulebook(link.call("HGETALL", keys.rules))
        held = tuple(one for one in examples if not rules.of(ticket_name(one), b""))
        limits = rules.tenant_limits.values()
        if held and (rules.holds_tenants or any(one.rate_per_second or one.concurrency for one in limits)):
            self._open.append(
                f"{stream}: {len(held):,} entries wait for long; live rules hold tenants back, whose they may be"
                " (parked_too_long)"
            )
            return ()
        return held


class Proof:
    """The proof of one stream, for the holder of the archive's lock. ``span``: the history without a gap that ends now:
    since when, how many executions, what may be missing before it. ``executions``: new ones; ``fresh``: what was not
    found before; ``holes``: how many sentences of ``unproven`` say where a span ended. Raises StartRefused."""

    def __init__(self, engine: Engine, plan: AuditChoices, stream: str, place: Path, folder: Path) -> None:
        self._engine, self._plan, self._archive, self._folder = engine, plan, place, folder
        self._began_ms = wall_ms()
        self._keys = plan.keys(stream)
        self._entries, self._runs, self._proofs = data_sets(place, self._keys)
        self._link = BulkReader(near(plan.redis_url, stream))
        self._found: list[AuditFinding] = []
        self.span: dict[str, Any] = {"since_ms": None, "executions": 0, "before": ""}
        self._begins = False  # the span, with the new executions

    @refusing("the proof was not finished; run it again")
    def run(self, *, again: bool = False) -> None:
        """Archive what is new, and prove it; ``again``: prove all that is archived, and stage nothing."""
        with self._link:
            keys, plan = self._keys, self._plan
            before_reading, facts = seen(self._link, keys), stream_facts(self._link, keys, plan.run_log_length)
            # Pending entries before the run log: what was over by then is in it.
            self._read("pending_now", batches.PENDING, lambda link, keys: batches.pending(link, keys, None))
            self._before = None if again else self._last_proof()
            self._former = [self._before] if self._before else []
            self._was: Mapping[str, Any] = self._before.facts if self._before else {}
            archive.add(self._link.url, keys, plan.field(keys.stream), self._archive, plan.keep_days, plan.bodies)
            self._open_archive()
            self._begin_span()
            self._look(facts, stream_facts(self._link, keys, plan.run_log_length))
            unjudged = self._judge()
            self._compare_with_standing()
            sentences = {text: is_hole for is_hole, text in self._unproven(facts, unjudged)}
            self.unproven, self.holes = tuple(sentences), sum(sentences.values())
            self.number, self.until_ms = self._before.number + 1 if self._before else 1, facts["time_ms"]
            if not again:
                self._stage({"span": self.span, "until_ms": self.until_ms, "seen": before_reading})

    def sentence(self) -> str:
        stream, since_ms, before = self._keys.stream, self.span["since_ms"], self.span["before"]
        if since_ms is None:
            return f"{stream}: no execution is archived yet, so nothing is proven"
        ends = (since_ms, self.until_ms)
        since, until = (time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(ms / 1000)) for ms in ends)
        return (
            f"{stream}: proven from {since} to {until} (UTC) without a gap; executions: {self.span['executions']:,}, of"
            f" them new: {self.executions:,}; findings in all: {len(self.standing):,}"
            + (f"; not proven, what was before: {before}" if before else "")
        )

    def _last_proof(self) -> Commit | None:
        last = self._proofs.recover()
        for name, data in (("runs", self._runs), ("entries", self._entries)):
            number, end = last.facts[name] if last else (0, ZERO.decode())
            if number and (number, end) not in [(one.number, one.last) for one in data.chain()]:
                raise StartRefused(
                    f"the archive's {name} are older than what was proven of them (commit {number}, up to {end}): they"
                    f" were restored from a copy. Put back a newer copy of {data.folder}, or move {self._proofs.folder}"
                    " away: then all that is archived is proven again"
                )
        return last

    def _open_archive(self) -> None:
        engine, former_runs, former_entries = self._engine, *(self._was.get(one, [0])[0] for one in ("runs", "entries"))
        self._chain = self._runs.chain()
        self._new_runs = [one for one in self._chain if one.number > former_runs]
        self._kept_ms: int = (self._chain[0].facts if self._chain else {}).get("kept_ms", -1)
        self._new_entries = [one for one in self._entries.chain() if one.number > former_entries]
        self._archived("came", self._entries, self._new_entries, batches.STREAM)
        self._archived("runs_new", self._runs, self._new_runs, batches.RUNS)
        for name, schema in (("open", _OPEN), ("clocks", CARRIED_CLOCKS)):
            engine.files(f"carried_{name}", self._proofs.files(self._former, f"{name}/"), schema)
        engine.files("carried", self._proofs.files(self._proofs.chain(), "carry/") if self._before else [], CARRIED)
        engine.arrow("limits", pa.Table.from_pylist([self._plan.thresholds]))
        engine.view("not_over", f"SELECT * FROM carried_open UNION ALL SELECT {', '.join(_OPEN.names)} FROM came")
        self._read("letters", batches.LETTERS, batches.letters)

    def _archived(self, name: str, data: Any, commits: Sequence[Commit], schema: pa.Schema) -> None:
        self._engine.files(name, data.files(commits), schema, sum(one.rows for one in commits))

    def _read(self, name: str, schema: pa.Schema, read: Reading) -> None:
        readers = {self._keys.stream: (self._link, self._keys)}
        read_redis(self._engine, readers, self._folder / f"{name}.parquet", schema, read)

    def _begin_span(self) -> None:
        """Count the new executions. Behind a gap among them a new span begins: what was in order may be over."""
        floor, span = -1, self.span
        span |= self._was.get("span", {})
        for gap in [one for one in self._new_runs if one.gap]:
            span |= {"since_ms": None, "executions": 0, "before": gap.gap}
            self._begins, floor = True, nth(gap.after.encode())
        [(self.executions, of_span, began_ms)] = self._engine.rows(
            f"SELECT count(id), count(CASE WHEN rec > {floor} THEN id END),"
            f" min(CASE WHEN rec > {floor} THEN record_ms END)"
            f" FROM runs_new WHERE record_ms > {self._kept_ms}"
        )
        span["executions"] += of_span
        span["since_ms"] = began_ms if span["since_ms"] is None else span["since_ms"]

    def _look(self, facts: dict[str, Any], now: dict[str, Any]) -> None:
        """Make the tables of a look at new executions, and at former ones of tickets in doubt and of old dead letters.
        What was open at the last run, or came after it, ended after it: only a new hole can hide that."""
        engine, span = self._engine, self.span
        since = span["since_ms"] if span["since_ms"] is not None else -1
        row = now | {
            "last_nth": facts["delivered_nth"],
            "deleted_nth": None,  # not all entries that the group has read are looked at
            "base_ms": since if self._begins else -1,
            "order_ms": max(since if span["before"] else -1, self._kept_ms),
            "handled_before_ms": self._was.get("first_known"),
            "ahead_before_ms": self._was.get("ahead_ms"),
        }
        engine.arrow("facts", few(FACTS, [row]))
        engine.arrow("declared", few(DECLARED, facts["declared"]))
        engine.view(
            "entries",
            "SELECT n.*, p.consumer, p.idle_ms, p.deliveries, 0 AS age_ms, true AS in_stream FROM not_over n"
            " JOIN facts f ON f.stream = n.stream LEFT JOIN pending_now p ON p.stream = n.stream AND p.id = n.id"
            " WHERE n.nth <= f.delivered_nth",
        )
        engine.view("runs", "SELECT * FROM runs_new")
        engine.derive("clocks", "timed", "doubtful")
        engine.keep("carried_now", findings.text("tables/carry"))
        engine.keep("clocks_now", f"SELECT {', '.join(CARRIED_CLOCKS.names)} FROM clocks")
        over = "SELECT stream, id FROM letters ANTI JOIN not_over USING (stream, id)"
        engine.keep("letters_over", f"{over} WHERE letter_ms >= {self._was.get('until_ms', 0)}")
        asked = engine.rows("SELECT stream FROM doubtful UNION ALL SELECT stream FROM letters_over LIMIT 1")
        chain = [one for one in self._chain if asked and one not in self._new_runs]
        self._archived("former", self._runs, chain, batches.RUNS)
        engine.keep(
            "runs_former",
            "SELECT * FROM former SEMI JOIN doubtful USING (stream, ticket)"
            " UNION SELECT * FROM former SEMI JOIN letters_over USING (stream, id)",
        )
        engine.view("runs", "SELECT * FROM runs_new UNION ALL SELECT * FROM runs_former")
        engine.derive("held", "known", "clocks", "timed", "suspects", "turns", "late", "twice")
        engine.derive("stretches", "ids", "odd")

    def _judge(self) -> int:
        """Judge executions, and entries that are not over by them. Returns how many are over and from before a hole."""
        engine = self._engine
        [(first,)] = engine.rows("SELECT min(ms) FROM odd WHERE kind IN ('lost', 'passed', 'no_letter')")
        behind = [one for one in self._entries.chain() if first is not None and rank(one.last.encode()) >> 64 >= first]
        self._archived("messages", self._entries, behind, batches.STREAM)
        engine.derive("again")
        [self._known] = engine.rows("SELECT stream, handled_ms, ahead_ms, known_ms, floor_ms FROM known")
        self._counts = {(name, stream): count for name, stream, count in engine.rows(findings.text("figures"))}
        moved = self._confirm(engine.found(PROVES))
        engine.view("ended", "SELECT stream, id FROM runs_new WHERE outcome IN ('done', 'gave_up')")
        engine.keep(
            "still",
            "SELECT n.* FROM not_over n JOIN facts f ON f.stream = n.stream LEFT JOIN pending_now p ON p.stream ="
            " n.stream AND p.id = n.id WHERE p.consumer IS NOT NULL OR n.nth > f.delivered_nth"
            f" OR n.id IN ({quoted(moved)})",
        )
        engine.keep("is_open", "SELECT * FROM still ANTI JOIN ended USING (stream, id)")
        left = "SELECT count(*) FROM entries ANTI JOIN ended USING (stream, id) ANTI JOIN is_open USING (stream, id)"
        return int(engine.rows(f"{left} WHERE ms <= {self._known[4]}")[0][0]) if self._begins else 0

    def _confirm(self, found: Iterable[AuditFinding]) -> list[str]:
        """Look again at what moves, and return the entries that were taken for lost and are pending."""
        keys, moved = self._keys, list[str]()
        for one in found:
            name, held = one.check.name, one.examples
            if name in MOVING:  # whether it is trimmed by now or not: it is in the archive
                asked = [("XPENDING", keys.stream, keys.group, each.id, each.id, 1) for each in held]
                rows = zip(held, self._link.all_of(asked), strict=True)
                owners = {each.id: entry[0][1] for each, entry in rows if entry}
                moved += [each for each in owners if name == "lost"]
                held = tuple(each for each in held if (each.id in owners) is (name != "lost"))
                if name == "dead_and_pending":
                    held = tuple(each for each in held if owners[each.id] != HALTED)
            if held:
                count = one.count if len(held) == len(one.examples) else len(held)
                self._found.append(replace(one, count=count, examples=held))
        return moved

    def _compare_with_standing(self) -> None:
        """Tell what was found now and not before; what was proven stays proven."""
        found = [pq.ParquetFile(one) for one in self._proofs.files(self._former, "found/")]
        old = chain.from_iterable(one.read().to_pylist() for one in found)
        standing = {(row["check"], row["stream"], row["id"] or row["owner"], row["ticket"]): row for row in old}
        self.fresh: list[AuditFinding] = []
        for one in self._found:
            check = one.check.name
            told = {(check, each.stream, each.id or each.owner, each.ticket): each for each in one.examples}
            new = [each for about, each in told.items() if about not in standing]
            standing |= {about: {"check": check, **each._asdict()} for about, each in told.items()}
            if new:
                count, shown = one.count + len(new) - len(one.examples), tuple(new[: findings.SHOWN])
                self.fresh.append(replace(one, count=count, examples=shown))
        self.standing = list(standing.values())

    def _unproven(self, facts: dict[str, Any], unjudged: int) -> Iterator[tuple[bool, str]]:
        more = f", so entries added before it are not judged, of which {unjudged:,} are over"
        for one in [one for one in (*self._new_runs, *self._new_entries) if one.gap]:
            yield "kept_ms" not in one.facts, f"{self._keys.stream}: {one.gap}{more if one in self._new_runs else ''}"
        # What was cut is told as a gap; entries are judged in the archive, trimmed or not.
        told = facts | {"first": ZERO, "cut_ms": -1}
        yield from ((False, text) for text in unproven(told, self._known, self._counts))

    def _stage(self, facts: dict[str, Any]) -> None:
        before, engine = self._before, self._engine
        is_whole = before is None or len(self._proofs.chain()) > _DELTAS
        after = before.last if before and not is_whole else ZERO.decode()
        made = Commit(self.number, after, "", 0, first=1 if before and is_whole else None)
        moved = "(SELECT stream, ticket FROM runs_new UNION SELECT stream, ticket FROM doubtful) r"
        is_new = "" if is_whole else f" SEMI JOIN {moved} USING (stream, ticket)"
        engine.arrow("found", few(_FOUND, self.standing))
        parts = {"carry": f"SELECT {', '.join(CARRIED.names)} FROM carried_now{is_new}"}
        parts |= {"open": f"SELECT {', '.join(_OPEN.names)} FROM is_open"}
        parts |= {"clocks": "SELECT * FROM clocks_now", "found": "SELECT * FROM found"}
        for part, select in parts.items():
            engine.write(select, self._proofs.place(made, part))
        for name, new in (("runs", self._new_runs), ("entries", self._new_entries)):
            facts[name] = (new[-1].number, new[-1].last) if new else self._was.get(name, (0, ZERO.decode()))
        facts |= {"first_known": self._known[3], "ahead_ms": self._known[2]}
        facts["open_ms"] = engine.rows("SELECT min(ms) FROM is_open")[0][0]
        self._staged = replace(made, last=facts["runs"][1], facts=facts)

    @refusing("the proof was told, and not committed: the next run tells the same once more")
    def commit(self) -> None:
        """Commit what a run has found, once that is told, and note in Redis what is proven."""
        self._proofs.commit(self._staged, "carry/")
        told: list[str | int | bytes] = ["history", orjson.dumps(self.span | {"unproven": said(self.unproven)})]
        if self._before:  # the first run proves all that is archived: its duration says nothing of the next ones
            told += ["proven_took_ms", wall_ms() - self._began_ms]
        with self._link:
            note(self._link, self._keys, self.until_ms, *told)


def forecast(busiest: Mapping[str, float], slots: int, today: date) -> tuple[str, date | None]:
    """Return, by least squares, how the busiest hour of a day grows, in words, and when it fills all slots (None: not
    within two years, or nobody knows). ``busiest``: day -> handlers that ran on average in its busiest hour. Days
    without executions count as none.

    >>> forecast({"2026-01-01": 1.0, "2026-01-02": 2.0, "2026-01-03": 3.0}, 8, date(2026, 1, 3))[1]
    datetime.date(2026, 1, 8)
    >>> forecast({"2026-01-01": 9.0, "2026-01-02": 9.0, "2026-01-03": 9.0}, 8, date(2026, 1, 3))[1]
    datetime.date(2026, 1, 3)
    """
    days = sorted(map(date.fromisoformat, busiest))
    if not days or (count := (days[-1] - days[0]).days + 1) < _LEAST_DAYS:
        return f"No forecast yet: it takes {_LEAST_DAYS} days, and there are {len(days)}.", None
    levels = [busiest.get(str(days[0] + timedelta(n)), 0.0) for n in range(count)]
    growth, level = statistics.linear_regression(range(count), levels)
    a_day = growth / (statistics.fmean(levels) or 1.0)
    moved = f"grew by {a_day:.1%}" if a_day >= 0 else f"shrank by {-a_day:.1%}"
    trend = f"Over {count} days the busiest hour {moved} a day."
    if not slots:
        return f"{trend} No consumer lives, so how much they could do is not known.", None
    now = level + growth * (today - days[0]).days
    left = 0.0 if now >= slots else (slots - now) / growth if growth > 0 else float(_FAR_DAYS + 1)
    full_on = today + timedelta(days=round(left)) if left <= _FAR_DAYS else None
    when = "last for two years" if full_on is None else f"are all busy by {full_on}"
    return f"{trend} At this rate the {slots} slots of the consumers that live now {when}.", full_on


def measure(engine: Engine, settings: AuditChoices, archive: Path, folder: Path, since_us: int) -> None:
    """Make the tables ``days`` and ``hours`` of what was executed since then: of the archive, and of the run log."""
    files: list[Path] = []
    rows, floors = 0, {}
    for stream in settings.streams:
        _, runs, _ = data_sets(archive, settings.keys(stream))
        if (last := runs.recover()) is None:
            continue
        floors[stream] = last.last.encode()
        recent = [one for one in runs.chain() if one.day >= since_us // _DAY_US]
        files, rows = files + runs.files(recent), rows + sum(one.rows for one in recent)
    engine.files("archived", files, batches.RUNS, rows if files else None)

    def read(reader: Any, keys: Any) -> Any:
        since = after(floors[keys.stream]) if keys.stream in floors else b"-"
        return batches.runs(reader, keys.stream, keys.runs, (since, b"+"))

    with readers_of(settings) as readers:
        read_redis(engine, readers, folder / "logged.parquet", batches.RUNS, read)
        read_redis(engine, readers, folder / "letters.parquet", batches.LETTERS, batches.letters)
    engine.view("runs", "SELECT * FROM archived UNION ALL SELECT * FROM logged")
    engine.view("events", findings.text("tables/events").replace("{since_us}", str(since_us)))
    engine.view("worked", findings.text("tables/worked"))
    engine.derive("measured", "spread", *_FILES)


def workload(engine: Engine, slots: Mapping[str, int], top: int, today: date) -> dict[str, Any]:
    """Return what page and --json tell: of each stream totals, days, and the first names by worker seconds."""
    names = (*_ROW, *_TIMES, "busiest")
    wanted = f"""SELECT d.{", d.".join(names[:-1])}, coalesce(h.busiest, 0) FROM (
        SELECT *, row_number() OVER (PARTITION BY stream, day, dim ORDER BY worker_s DESC, executions DESC, name) AS nth
          FROM days) d LEFT JOIN (SELECT stream, substr(hour, 1, 10) AS day, max(busy) AS busiest FROM hours
                                   GROUP BY stream, substr(hour, 1, 10)) h ON h.stream = d.stream AND h.day = d.day
         WHERE dim = 'all' OR (d.day = '' AND nth <= {top}) ORDER BY d.stream, dim, d.day, nth"""
    rows, told = [dict(zip(names, row, strict=True)) for row in engine.rows(wanted)], []
    for stream in slots:
        of = {
            dim: [one for one in rows if (one["stream"], one["dim"]) == (stream, dim)] for dim in ("all", *DIMENSIONS)
        }
        whole, days = ([one for one in of["all"] if bool(one["day"]) is is_day] for is_day in (False, True))
        busiest = {one["day"]: one["busiest"] for one in days if one["executions"]}
        expected, full_on = forecast(busiest, slots[stream], today)
        found = {"stream": stream, "total": next(iter(whole), None), "days": days, "slots": slots[stream]}
        named = {dim: [one for one in of[dim] if one["name"]] for dim in DIMENSIONS}
        told.append(found | {"top": named, "forecast": expected, "full_on": full_on})
    return {"streams": told}


def report(settings: AuditChoices, days: int, top: int, as_json: bool) -> None:
    """Make page and tables of the last days, and print what they tell. Raises StartRefused."""
    now_s, place, page = time.time(), settings.archive, settings.folder / "report.html"
    since_us = (int(now_s * 1e6) // _DAY_US - days + 1) * _DAY_US
    about = f"{days} days up to {time.strftime('%Y-%m-%d %H:%M', time.gmtime(now_s))} UTC"
    done = refusing("the report was not made")
    with done, locked(place), session(settings, settings.redis_url, place) as (engine, folder):
        measure(engine, settings, place, folder, since_us)
        lives = (with_link(settings, one, read_registry) for one in settings.streams)
        slots = [sum(one.registration.slots for one in found.values() if one.alive) for found in lives]
        (settings.folder / "report").mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in _FILES:
            engine.write(f"SELECT * FROM {name}", folder / name)
            (folder / name).replace(settings.folder / "report" / f"{name}.parquet")
        told = workload(engine, dict(zip(settings.streams, slots, strict=True)), top, date.today())
        told_ms = {"days": days, "at_ms": int(now_s * 1000)}
        heads = {one["stream"]: orjson.dumps(told_ms | (one["total"] or {})) for one in told["streams"]}
        for one in heads:
            with_link(settings, one, lambda link, keys: link.call("HSET", keys.archived, "report", heads[keys.stream]))
        environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
        environment.filters |= {"ms": span, "number": lambda one: f"{one:,.0f}" if one >= 1000 else f"{one:.3g}"}
        template = environment.from_string((findings.FILES / "workload.html").read_text(encoding="utf-8"))
        (folder / page.name).write_text(template.render(told=told, about=about, dims=DIMENSIONS), encoding="utf-8")
        (folder / page.name).replace(page)
    if as_json:
        print_json(told | {"page": str(page), "tables": str(settings.folder / "report")})
        return
    for stream in told["streams"]:
        told_of = "nothing was executed"
        if sums := stream["total"]:
            hours = f"{sums['worker_s'] / 3600:,.1f} worker hours"
            told_of = f"{sums['executions']:,} executions, {hours}. {stream['forecast']}"
        click.echo(f"{escape_control(stream['stream'])}, {about}: {told_of}")
    click.echo(f"By tenant, handler, ticket and consumer, with plots: {page}")
