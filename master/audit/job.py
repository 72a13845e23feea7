"""Run one audit: read, judge, look again, report.

The order of reading is what makes it hold on a running system (``usher.master.audit``): everything that moved in
between is a suspect, and the second look asks for each of those at one moment (``snapshot``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

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
from usher.master.audit.snapshot import DECLARED, FACTS, MEMBERS, AuditedStream, unproven

_FOREIGN = schema_of("stream detail")
_LIMITS = schema_of("", "owner_idle_ms parked_ms deliveries attempts half_us reaped_ms")
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
            told = snapshot.foreign_keys(link, keys)
            try:
                if not told:
                    facts[stream] = snapshot.stream_facts(link, keys, self._plan.run_log_length)
            except snapshot.KeyForeign as odd:
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
            now.append(snapshot.stream_facts(link, keys, plan.run_log_length))
            drop_ms = snapshot.last_drop_ms(link, keys)
            rows.append(now[-1].row(before[stream], entries_read=everything, drop_ms=drop_ms))
        engine.arrow("facts", few(FACTS, rows))
        engine.arrow("declared", few(DECLARED, (row for one in now for row in one.declared_rows())))
        engine.arrow("carried", CARRIED.empty_table())
        engine.arrow("carried_clocks", CARRIED_CLOCKS.empty_table())
        engine.arrow("limits", limits_table(plan.thresholds))
        engine.derive(
            *("known", "clocks", "timed", "doubtful", "suspects", "late", "twice"),
            *("ids", "odd", "indexed"),
        )
        self._read_again()
        self.suspects = engine.found(CHECKS)
        self._figures = {(figure, stream): value for figure, stream, value in engine.rows(findings.text("figures"))}
        known = {row[0]: row for row in engine.rows("SELECT stream, handled_ms, ahead_ms FROM known")}
        self._open = [text for one in now for text in unproven(one, known[one.stream], self._figures)]
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
        self._by_us("members", MEMBERS, snapshot.members)
        self._by_us("tickets", batches.TICKETS, batches.tickets)
        self._by_us("attempts", batches.ATTEMPTS, batches.attempts)
        self._by_us("inboxes", batches.INBOXES, batches.inboxes)
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

    def _second_look(self) -> list[AuditFinding]:
        found = self.suspects
        if found:
            time.sleep(findings.SETTLE_S)
        of_members = {name for name, _ in found if name in findings.OF_MEMBERS}
        if of_members:
            self._by_us("members", MEMBERS, snapshot.members)
        again = self._engine.found(of_members) if of_members else {}
        held = []
        for (name, stream), (suspects, examples) in found.items():
            count = suspects
            if name in findings.OF_MEMBERS:
                owners = {one.owner for one in examples}
                examples = [one for one in again.get((name, stream), (0, []))[1] if one.owner in owners]
                count = len(examples)
            elif name in snapshot.LOOKED_AGAIN:
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
        held = snapshot.still_there(link, keys, name, examples, self._plan.thresholds)
        if name == "parked_too_long":
            back, holds_tenants = snapshot.held_back(link, keys, held)
            held = [one for one in held if one not in back]
            if held and holds_tenants:
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
