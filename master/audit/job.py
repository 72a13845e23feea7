"""Run one audit: read, judge, look again, report.

The order of reading is what makes it hold on a running system (``usher.master.audit``): everything that moved in
between is a suspect, and the second look asks for each of those at one moment (``snapshot``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from usher.common.protocol.keys import Keys
from usher.common.redis.endpoints import near
from usher.master.audit import batches, findings, snapshot
from usher.master.audit.batches import BulkReader, schema_of
from usher.master.audit.engine import Engine, Found, SparkEngine, few, refusing
from usher.master.audit.findings import CHECKS, AuditFinding, Example
from usher.master.audit.report import AuditReport
from usher.master.audit.settings import AuditChoices, AuditThresholds
from usher.master.audit.snapshot import DECLARED, FACTS, AuditedStream, GroupMember, unproven

_NAMES = schema_of("stream name")
_LIMITS = schema_of("", "owner_idle_ms parked_ms deliveries attempts half_us")
#: What a proof carries of a ticket: nothing, in an audit.
CARRIED = schema_of("stream ticket consumer id", "fence nth begun_nth ended_us end_least")
CARRIED_CLOCKS = schema_of("stream consumer", "above_us below_us least_us most_us")


def limits_table(limits: AuditThresholds) -> pa.Table:
    return few(_LIMITS, [limits._asdict() | {"half_us": limits.clocks_ms * 500}])


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
        self._known: dict[str, dict[str, Any]] = {}

    def run(self) -> AuditReport:
        """Raises StartRefused when it cannot be completed."""
        started_ns = time.time_ns()
        with refusing("the audit was not finished, so it proves nothing"), readers_of(self._plan) as self._readers:
            before = self._leave_out_odd_ones()
            now = self._first_look(before) if before else {}
            return self._report(started_ns, now, self._second_look())

    def _suspect(self, check: str, stream: str, count: int, examples: Sequence[Example]) -> None:
        before, known = self.suspects.get((check, stream), (0, []))
        self.suspects[check, stream] = before + count, [*known, *examples]

    def _leave_out_odd_ones(self) -> dict[str, AuditedStream]:
        facts = {}
        for stream, (link, keys) in list(self._readers.items()):
            told = snapshot.foreign_keys(link, keys)
            try:
                if not told:
                    facts[stream] = snapshot.stream_facts(link, keys, self._plan.run_log_length)
            except snapshot.KeyForeign as odd:
                told = [str(odd)]
            if told:
                self._suspect("key_foreign", stream, len(told), [Example(stream, detail=one) for one in told])
                del self._readers[stream]
        return facts

    # ---- first look ----------------------------------------------------------------------------------------------

    def _first_look(self, before: dict[str, AuditedStream]) -> dict[str, AuditedStream]:
        engine, limits = self._engine, self._plan.thresholds
        # Without a run log nothing is proven of what is over, so only the pending entries are read.
        everything = any(one.has_runs for one in before.values())
        members = self._read(before, everything)
        now, rows = {}, []
        for stream, (link, keys) in self._readers.items():
            now[stream] = snapshot.stream_facts(link, keys, self._plan.run_log_length)
            drop_ms = snapshot.last_drop_ms(link, keys)
            rows.append(now[stream].row(before[stream], entries_read=everything, drop_ms=drop_ms))
        engine.arrow("facts", few(FACTS, rows))
        engine.arrow("declared", few(DECLARED, (row for one in now.values() for row in one.declared_rows())))
        engine.arrow("carried", CARRIED.empty_table())
        engine.arrow("carried_clocks", CARRIED_CLOCKS.empty_table())
        engine.arrow("limits", limits_table(limits))
        judged = list(snapshot.judge_members(members, limits))
        for check, count, example in judged:
            self._suspect(check, example.stream, count, [example])
        dead = [one for check, _, one in judged if check in ("owner_dead", "stranger_owns")]
        engine.arrow("dead", few(_NAMES, ({"stream": one.stream, "name": one.owner} for one in dead)))
        strange = (one for one in members if not one.is_named and one.name not in findings.RESERVED)
        engine.arrow("strangers", few(_NAMES, ({"stream": one.stream, "name": one.name} for one in strange)))
        for one in now.values():
            if one.cut_unread:
                told = next((loss.describe() for loss in one.declared if loss.kind == "unread_cut"), "")
                self._suspect("cut_unread", one.stream, one.cut_unread, [Example(one.stream, detail=told)])
        engine.derive(
            *("known", "clocks", "timed", "doubtful", "suspects", "late", "twice"),
            *("ids", "odd", "indexed"),
        )
        self._read_again()
        for (check, stream), (count, examples) in engine.found(CHECKS).items():
            self._suspect(check, stream, count, examples)
        self._figures = {(figure, stream): value for figure, stream, value in engine.rows(findings.text("figures"))}
        names = ("stream", "handled_ms", "ahead_ms", "floor_ms")
        self._known = {
            row[0]: dict(zip(names, row, strict=True)) for row in engine.rows(f"SELECT {', '.join(names)} FROM known")
        }
        return now

    def _read(self, before: dict[str, AuditedStream], everything: bool) -> list[GroupMember]:
        """Read Redis in the order in which nothing that moves is told wrongly. Returns the members of the groups."""
        # Of little data this process reads Redis for Spark, too: starting its Python workers costs more.
        apart = isinstance(self._engine, SparkEngine) and not self._engine.small
        began_s = time.monotonic()
        if apart:
            self._by_workers("entries", "redis_pending", entries="all" if everything else "pending")
        else:
            field = self._plan.field
            self._by_us(
                "entries",
                batches.PENDING,
                lambda link, keys: batches.pending(link, keys, field(keys.stream), everything),
            )
        self._reading_s = time.monotonic() - began_s
        members = self._members()
        self._by_us("tickets", batches.TICKETS, batches.tickets)
        self._by_us("attempts", batches.ATTEMPTS, batches.attempts)
        self._by_us("inboxes", batches.INBOXES, batches.inboxes)
        if apart:
            self._by_workers("runs", "redis_runs")
        else:
            self._by_us("runs", batches.RUNS, lambda link, keys: batches.runs(link, keys.stream, keys.runs))
        self._by_us("letters", batches.LETTERS, batches.letters)
        return members

    def _by_us(self, name: str, schema: pa.Schema, read: Reading) -> None:
        read_redis(self._engine, self._readers, self._folder / f"{name}.parquet", schema, read)

    def _by_workers(self, name: str, source: str, **options: str) -> None:
        assert isinstance(self._engine, SparkEngine)
        given = {"url": self._plan.redis_url, "stream": ",".join(self._readers), "group": self._plan.group}
        self._engine.read(name, source, given | {"ticket_field": self._plan.ticket_field} | options)

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

    # ---- second look ---------------------------------------------------------------------------------------------

    def _second_look(self) -> list[AuditFinding]:
        found, limits = self.suspects, self._plan.thresholds
        if found:
            time.sleep(findings.SETTLE_S)
        members = self._members() if any(name in findings.OF_MEMBERS for name, _ in found) else []
        again = {
            (check, one.stream, one.owner): (count, one)
            for check, count, one in snapshot.judge_members(members, limits)
        }
        held = []
        for (name, stream), (count, examples) in found.items():
            suspects = count
            if name in findings.OF_MEMBERS:
                still = [again[name, stream, one.owner] for one in examples if (name, stream, one.owner) in again]
                count, examples = sum(number for number, _ in still), [one for _, one in still]
            elif name in snapshot.LOOKED_AGAIN:
                examples = self._confirmed(name, stream, examples)
                # Every example holds: then count all suspects, of which there are too many to ask for each.
                count = suspects if len(examples) == findings.LOOKED_AT else len(examples)
            held.append(AuditFinding(CHECKS[name], stream, count, suspects, tuple(examples)))
        return [dataclasses.replace(one, examples=one.examples[: findings.SHOWN]) for one in held if one.count]

    def _confirmed(self, name: str, stream: str, examples: Sequence[Example]) -> list[Example]:
        link, keys = self._readers[stream]
        held = set(snapshot.still_there(link, keys, name, examples, self._plan.thresholds))
        if name == "parked_too_long":
            back, holds_tenants = snapshot.held_back(link, keys, [one for one in examples if one in held])
            held -= back
            if held and holds_tenants:
                self._open.append(
                    f"{stream}: {len(held):,} entries wait for long; live rules hold tenants back, whose they may be"
                    " (parked_too_long)"
                )
                held.clear()
        return [one for one in examples if one in held]

    def _members(self) -> list[GroupMember]:
        return [one for reader, keys in self._readers.values() for one in snapshot.members(reader, keys)]

    # ---- report --------------------------------------------------------------------------------------------------

    def _report(
        self, started_ns: int, streams: Mapping[str, AuditedStream], found: Sequence[AuditFinding]
    ) -> AuditReport:
        sentences, facts = list(self._open), streams.values()
        for stream, one in streams.items():
            sentences += unproven(one, self._known[stream], self._figures)
        sentences += [
            f"{one.stream}: of {one.suspects:,} suspects of {one.check.name} the first {findings.LOOKED_AT:,} were"
            " looked at again"
            for one in found
            if one.suspects > findings.LOOKED_AT and one.check.name in snapshot.LOOKED_AGAIN
        ]
        figures = {
            "entries": sum(one.length for one in facts),
            **{name: value for (name, stream), value in self._figures.items() if not stream},
            "dead_letters": sum(one.dead_letters for one in facts),
            "reading_seconds": round(self._reading_s, 3),
            "engine": self._engine.name,
        }
        return AuditReport.of(self._plan, started_ns, found, sentences, figures=figures)
