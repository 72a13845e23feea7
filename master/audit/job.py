"""Run one audit: read, judge, look again, report.

The order of reading is what makes it hold on a running system (``usher.master.audit``): everything that moved in
between is a suspect, and the second look asks for each of those at one moment (``snapshot``).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from usher.common.base.errors import RedisTrouble, StartRefused
from usher.common.base.extras import how_to_install
from usher.common.base.log import redacted
from usher.common.protocol.keys import Keys
from usher.common.protocol.sources import is_work_stream
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.endpoints import near
from usher.master.audit import batches, findings, snapshot
from usher.master.audit.batches import BulkReader, Interrupted
from usher.master.audit.engine import Engine, EngineFailed, Found, SparkEngine, few
from usher.master.audit.findings import CHECKS, AuditFinding, Example
from usher.master.audit.report import AuditReport, run_name
from usher.master.audit.settings import AuditChoices, AuditThresholds
from usher.master.audit.snapshot import DECLARED, FACTS, AuditedStream, GroupMember, unproven

_EFFECTS = pa.schema([("key_ticket", pa.string()), ("key_uid", pa.string())])
_PAGE = 10_000
_NAMES = pa.schema([("stream", pa.string()), ("name", pa.string())])
_LIMITS = pa.schema(
    [(name, pa.int64()) for name in ("owner_idle_ms", "parked_ms", "deliveries", "attempts", "half_us")]
)
#: What a proof carries of a ticket: nothing, in an audit.
CARRIED = pa.schema(
    [(name, pa.string()) for name in ("stream", "ticket", "consumer", "id")]
    + [(name, pa.int64()) for name in ("fence", "nth", "begun_nth", "ended_us", "end_least")]
)
CARRIED_CLOCKS = pa.schema(
    [*((name, pa.string()) for name in ("stream", "consumer")), ("above_us", pa.int64()), ("below_us", pa.int64())]
)


def limits_table(limits: AuditThresholds) -> pa.Table:
    return few(_LIMITS, [limits._asdict() | {"half_us": limits.clocks_ms * 500}])


Reading = Callable[[BulkReader, Keys], Iterator[pa.RecordBatch]]


def read_redis(
    engine: Engine, plan: AuditChoices, streams: Sequence[str], file: Path, schema: pa.Schema, read: Reading
) -> None:
    """Make a table, of the name of ``file``, of what is read of these streams."""
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for stream in streams:
            with BulkReader(near(plan.redis_url, stream)) as reader:
                for batch in read(reader, plan.keys(stream)):
                    writer.write_batch(batch)
    engine.files(file.stem, [file], schema)


class AuditRun:
    """An audit; what is read lies in ``folder``. Raises StartRefused when it cannot be completed."""

    def __init__(
        self, engine: Engine, plan: AuditChoices, folder: Path, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        self._engine, self._plan, self._folder, self._progress = engine, plan, folder, progress
        self.suspects: Found = {}
        self._links = {one: Link(near(plan.redis_url, one), "usher:audit", timeout_s=30.0) for one in plan.streams}
        self._reading_s = 0.0
        self._open: list[str] = []  # what could not be proven
        self._figures: list[tuple[Any, ...]] = []
        self._known: dict[str, dict[str, Any]] = {}

    def run(self) -> AuditReport:
        try:
            return self._run()
        except (RedisTrouble, CommandRefused, Interrupted, EngineFailed) as trouble:
            raise StartRefused(f"the audit was not finished, so it proves nothing: {trouble}") from trouble
        finally:
            for link in self._links.values():
                link.close()

    def _suspect(self, check: str, stream: str, count: int, examples: Sequence[Example]) -> None:
        before, known = self.suspects.get((check, stream), (0, []))
        self.suspects[check, stream] = before + count, [*known, *examples]

    def _run(self) -> AuditReport:
        started_ns = time.time_ns()
        before = self._leave_out_odd_ones()
        now = self._first_look(before) if before else {}
        self._progress("looking at the suspects again")
        found = self._second_look()
        return self._report(started_ns, before, now, found)

    def _facts(self, stream: str) -> AuditedStream:
        return snapshot.stream_facts(self._links[stream], self._plan.keys(stream), self._plan.run_log_length)

    def _leave_out_odd_ones(self) -> dict[str, AuditedStream]:
        facts = {}
        for stream, link in list(self._links.items()):
            told = snapshot.foreign_keys(link, self._plan.keys(stream))
            try:
                if not told:
                    facts[stream] = self._facts(stream)
            except snapshot.KeyForeign as odd:
                told = [str(odd)]
            if told:
                self._suspect("key_foreign", stream, len(told), [Example(stream, detail=one) for one in told])
                self._links.pop(stream).close()
        return facts

    # ---- first look ----------------------------------------------------------------------------------------------

    def _first_look(self, before: dict[str, AuditedStream]) -> dict[str, AuditedStream]:
        engine, limits = self._engine, self._plan.thresholds
        # Without a run log nothing is proven of what is over, so only the pending entries are read.
        everything = any(one.run_first is not None for one in before.values())
        members = self._read(before, everything)
        now = {stream: self._facts(stream) for stream in before}
        rows = [
            one.row(
                before[stream], entries_read=everything, drop_ms=snapshot.last_drop_ms(self._links[stream], one.keys)
            )
            for stream, one in now.items()
        ]
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
        self._progress("judging")
        engine.derive(
            "known", "clocks", "timed", "doubtful", "suspects", "late", "twice", "repeats", "ids", "odd", "indexed"
        )
        self._read_again()
        checks = [name for name in CHECKS if name != "effect_missing"]
        if self._plan.audit_sink_url:
            checks += self._effects()
        for (check, stream), (count, examples) in engine.found(checks).items():
            self._suspect(check, stream, count, examples)
        self._count()
        return now

    def _count(self) -> None:
        engine = self._engine
        self._figures = engine.rows(findings.text("figures"))
        names = ("stream", "handled_ms", "ahead_ms", "floor_ms")
        self._known = {
            row[0]: dict(zip(names, row, strict=True)) for row in engine.rows(f"SELECT {', '.join(names)} FROM known")
        }

    def _read(self, before: dict[str, AuditedStream], everything: bool) -> list[GroupMember]:
        """Read Redis in the order in which nothing that moves is told wrongly. Returns the members of the groups."""
        self._progress("reading the pending lists")
        # Of little data this process reads Redis for Spark, too: starting its Python workers costs more.
        apart = isinstance(self._engine, SparkEngine) and self._engine.hold is None
        began_s = time.monotonic()
        if apart:
            self._by_workers("entries", "redis_pending", entries="all" if everything else "pending")
        else:
            plan = self._plan

            def read(reader: BulkReader, keys: Keys) -> Iterator[pa.RecordBatch]:
                url, field = near(plan.redis_url, keys.stream), plan.field(keys.stream)
                return batches.all_pending(reader, url, keys, field, everything)

            self._by_us("entries", batches.PENDING, read)
        self._reading_s = time.monotonic() - began_s
        members = self._members()
        self._open += [
            f"{stream}: this user of Redis may not SCAN, so inboxes without an owner were not looked for (key_leaked)"
            for stream, link in self._links.items()
            if not snapshot.may_scan(link)
        ]
        self._by_us("tickets", batches.TICKETS, batches.tickets)
        self._by_us("attempts", batches.ATTEMPTS, batches.attempts)
        self._by_us("inboxes", batches.INBOXES, batches.inboxes)
        self._progress("reading the run log")
        if apart:
            self._by_workers("runs", "redis_runs")
        else:
            self._by_us("runs", batches.RUNS, lambda one, keys: batches.runs(one, keys.stream, keys.runs, (b"-", b"+")))
        self._by_us("letters", batches.LETTERS, batches.letters)
        return members

    def _by_us(self, name: str, schema: pa.Schema, read: Reading) -> None:
        read_redis(self._engine, self._plan, [*self._links], self._folder / f"{name}.parquet", schema, read)

    def _by_workers(self, name: str, source: str, **options: str) -> None:
        assert isinstance(self._engine, SparkEngine)
        given = {"url": self._plan.redis_url, "stream": ",".join(self._links), "group": self._plan.group}
        self._engine.read(name, source, given | {"ticket_field": self._plan.ticket_field} | options)

    def _read_again(self) -> None:
        """Read the stream for messages that were sent again, from the first one on of which nothing is known; and all
        of it, where effects are looked for."""
        kinds = "kind IN ('lost', 'passed', 'no_letter')"
        first = dict(self._engine.rows(f"SELECT stream, min(ms) FROM odd WHERE {kinds} GROUP BY stream"))
        whole = bool(self._plan.audit_sink_url)

        def read(reader: BulkReader, keys: Keys) -> Iterator[pa.RecordBatch]:
            if whole or keys.stream in first:
                since = b"-" if whole else b"%d-0" % first[keys.stream]
                yield from batches.stream(
                    reader, keys.stream, keys.stream, self._plan.field(keys.stream), (since, b"+")
                )

        self._by_us("messages", batches.STREAM, read)
        works = ", ".join(
            "'" + one.replace("'", "''") + "'" for one in self._links if is_work_stream(one, self._plan.group)
        )
        self._engine.view("sent", findings.table("sent").replace("{gathered}", f"stream IN ({works or 'NULL'})"))
        self._engine.derive("again")

    def _effects(self) -> list[str]:
        """Read the effects that a SQL sink has stored, after the run log: its successes were stored before."""
        self._progress("looking for effects in the sink")
        told = read_effects(
            self._engine, self._plan.audit_sink_url, self._plan.sink, self._plan.thresholds.clocks_ms, self._folder
        )
        self._open += [told] if told else []
        return [] if told else ["effect_missing"]

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
            elif name not in findings.NO_SECOND_LOOK:
                examples = self._confirmed(name, stream, examples)
                # Every example holds: then count all suspects, of which there are too many to ask for each.
                count = suspects if len(examples) == findings.LOOKED_AT else len(examples)
            held.append(AuditFinding(CHECKS[name], stream, count, suspects, tuple(examples)))
        return [dataclasses.replace(one, examples=one.examples[: findings.SHOWN]) for one in findings.fold(held)]

    def _confirmed(self, name: str, stream: str, examples: Sequence[Example]) -> list[Example]:
        link, keys = self._links[stream], self._plan.keys(stream)
        held = set(snapshot.still_there(link, keys, name, examples, self._plan.thresholds))
        if name == "parked_too_long":
            back, is_known = snapshot.held_back(link, keys, [one for one in examples if one in held], self._plan.marks)
            held -= back
            if held and not is_known:
                self._open.append(
                    f"{stream}: live rules hold tenants back, and which tickets are theirs is not known here"
                    " (USHER_TENANT_FIELD), so what waits for long may be theirs (parked_too_long)"
                )
        return [one for one in examples if one in held]

    def _members(self) -> list[GroupMember]:
        found = []
        for stream in self._links:
            with BulkReader(near(self._plan.redis_url, stream)) as reader:
                found += snapshot.members(reader, self._plan.keys(stream))
        return found

    # ---- report --------------------------------------------------------------------------------------------------

    def _report(
        self,
        started_ns: int,
        before: dict[str, AuditedStream],
        now: dict[str, AuditedStream],
        found: Sequence[AuditFinding],
    ) -> AuditReport:
        sentences = list(self._open)
        for stream, one in now.items():
            counts = {name: value for name, of, _, value in self._figures if of == stream}
            sentences += unproven(one, self._known[stream], counts)
        sentences += [
            f"{one.stream}: of {one.suspects:,} suspects of {one.check.name} the first {findings.LOOKED_AT:,} were"
            " looked at again"
            for one in found
            if one.suspects > findings.LOOKED_AT
            and one.check.name not in findings.NO_SECOND_LOOK
            and one.check.name not in findings.OF_MEMBERS
        ]
        started_ms, plots = started_ns // 1_000_000, self._plots()
        return AuditReport(
            run_name(started_ms),
            started_ms,
            round((time.time_ns() - started_ns) / 1e9, 3),
            redacted(self._plan.redis_url),
            self._plan.streams,
            self._plan.group,
            tuple(found),
            tuple(sentences),
            self._totals(list(before.values()), plots),
            plots,
        )

    def _totals(self, facts: Sequence[AuditedStream], plots: Mapping[str, Any]) -> dict[str, Any]:
        of = {name: int(value or 0) for name, _, label, value in self._figures if not label}
        return {
            "entries": sum(one.length for one in facts),
            "pending": sum(count for _, _, count in plots["owners"]),
            **{name: of.get(name, 0) for name in ("tickets_pending", "oldest_age_ms", "executions")},
            "dead_letters": sum(one.dead_letters for one in facts),
            "run_records": sum(one.run_records for one in facts),
            "reading_seconds": round(self._reading_s, 3),
            "engine": self._engine.name,
        }

    def _plots(self) -> dict[str, Any]:
        rows: dict[str, list[tuple[str, str, int]]] = {"owner": [], "ticket": [], "age": []}
        for name, stream, label, value in self._figures:
            if name in rows:
                rows[name].append((stream, label, int(value)))
        most = {name: sorted(rows[name], key=lambda row: (-row[2], row[:2])) for name in ("owner", "ticket")}
        ages = {label: value for _, label, value in rows["age"]}
        return {
            "owners": most["owner"],
            "tickets": most["ticket"],
            "ages": [ages.get(str(n), 0) for n in range(7)],
        }


def read_effects(engine: Engine, url: str, sink: str, tolerance_ms: int, folder: Path) -> str:
    """Make the tables ``effects`` and ``sink``. Returns what cannot be said, as a sentence, or "". Raises StartRefused.

    The sink's table holds a row per ticket and uid, so no effect can be there twice; the possible fault is a missing
    one. Every handler of the streams must use the sink: one that does not has no rows. A message's uid is in its entry,
    so trimmed entries are not judged; nor are those older than the oldest row, which the sink may have pruned.
    """
    try:
        import sqlalchemy as sa
    except ImportError as missing:
        raise StartRefused(f"USHER_AUDIT_SINK_URL needs SQLAlchemy: {how_to_install('sql')}") from missing
    uids = sa.table("usher_uids", sa.column("sink"), sa.column("ticket"), sa.column("uid"), sa.column("at_s"))
    oldest = sa.select(sa.func.min(uids.c.at_s)).where(uids.c.sink == sink)
    file = folder / "effects.parquet"
    try:
        database = sa.create_engine(url)
    except (sa.exc.ArgumentError, ModuleNotFoundError) as wrong:
        raise StartRefused(f"USHER_AUDIT_SINK_URL cannot be used: {wrong}") from wrong
    try:
        with (
            database.connect().execution_options(stream_results=True) as sql,
            pq.ParquetWriter(file, _EFFECTS) as writer,
        ):
            if sql.scalar(oldest) is None:
                return (
                    f"the sink {sink} has stored nothing, so nothing can be said of effects (USHER_AUDIT_SINK_URL,"
                    " --sink)"
                )
            stored = sql.execute(sa.select(uids.c.ticket, uids.c.uid).where(uids.c.sink == sink))
            for rows in stored.partitions(_PAGE):
                columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=_EFFECTS))
            kept_from_s = sql.scalar(oldest)  # after the reading: rows may have been pruned meanwhile
    except sa.exc.SQLAlchemyError as failed:
        raise StartRefused(f"USHER_AUDIT_SINK_URL: {str(failed).splitlines()[0]}") from failed
    finally:
        database.dispose()
    engine.files("effects", [file], _EFFECTS)
    floor_ms = 1 << 62 if kept_from_s is None else (int(kept_from_s) + 1) * 1000 + tolerance_ms
    engine.arrow("sink", few(pa.schema([("floor_ms", pa.int64())]), [{"floor_ms": floor_ms}]))
    return ""
