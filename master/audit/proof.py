"""Prove history from the archive, run by run: each run archives what is new and judges that, with what its tickets
carry from before.

::

    <archive>/stream-<name>/proof/group=<group>/
        _commits.json       proven behind `after` up to `last`, and the facts
        carry/<n>-part-0    a row per ticket: what later executions of it are compared with (tables/carry.sql)
        clocks/<n>-part-0   how far the clocks of consumers may be off
        open/<n>-part-0     entries that were not over at the last run
        found/<n>-part-0    all findings of this history, so far

A commit (``commits``) is there as a whole or not at all, and begins where the one before it ends; the archive does not
change. So a run that was killed is done again with the same rows, and the chain of commits is the proof that nothing
lies between two runs. What a run has found is told before it is committed: one that is killed in between tells it
again. A ticket in which anything may be wrong is judged with its whole history, as an audit of everything would.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from usher.common.base.clock import wall_ms
from usher.common.base.errors import StartRefused
from usher.common.protocol.stream_id import ZERO, rank
from usher.common.redis.endpoints import near
from usher.master.audit import archive, batches, findings, job
from usher.master.audit.archive import Commit, data_sets, note, said, seen
from usher.master.audit.batches import BulkReader, nth, schema_of
from usher.master.audit.engine import Engine, few, quoted, refusing
from usher.master.audit.findings import CHECKS, OF_ENTRIES, OF_RUNS, AuditFinding, Example
from usher.master.audit.job import CARRIED, CARRIED_CLOCKS, AuditedStream
from usher.master.audit.settings import AuditChoices

#: Commits whose carries are read together before they are made one.
_DELTAS = 32
_OPEN = schema_of("stream id ticket", "ms seq nth")
_FOUND = schema_of(" ".join(("check", *Example._fields)))
#: The checks that a proof makes.
PROVES = (*OF_RUNS, *OF_ENTRIES)
#: Of executions, judged with the whole history of a ticket.
_OF_TICKETS = tuple(name for name in OF_RUNS if name not in ("clock_wrong", "run_unreadable"))


class Proven(NamedTuple):
    """A run's proof of one stream: all that was recorded from ``since_ms`` to ``until_ms``, by Redis' clock.
    ``executions`` are new, ``total`` of the span, before which ``before`` may be missing; ``fresh`` was not found
    before; ``holes`` of the sentences ``unproven`` say where a span ended; ``standing``: findings in all."""

    stream: str
    since_ms: int | None
    until_ms: int
    before: str
    run: int
    total: int
    executions: int
    fresh: tuple[AuditFinding, ...]
    standing: int
    unproven: tuple[str, ...]
    holes: int

    def sentence(self) -> str:
        if self.since_ms is None:
            return f"{self.stream}: no execution is archived yet, so nothing is proven"
        since, until = (
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(ms / 1000)) for ms in (self.since_ms, self.until_ms)
        )
        return (
            f"{self.stream}: proven from {since} to {until} (UTC) without a gap; executions: {self.total:,}, of them"
            f" new: {self.executions:,}; findings in all: {self.standing:,}"
            + (f"; not proven, what was before: {self.before}" if self.before else "")
        )


class Proof:
    """The proof of one stream; the caller holds the lock of the archive in ``place``; ``folder`` is for what is read.
    Raises StartRefused when it cannot be completed: then nothing is committed."""

    def __init__(self, engine: Engine, plan: AuditChoices, stream: str, place: Path, folder: Path) -> None:
        self._engine, self._plan, self._archive, self._folder = engine, plan, place, folder
        self._began_ms = wall_ms()
        self._keys = plan.keys(stream)
        self._entries, self._runs, self._proofs = data_sets(place, self._keys)
        self._link = BulkReader(near(plan.redis_url, stream))
        self._found: list[tuple[str, int, list[Example]]] = []  # (check, count, the first of them)
        self._before: Commit | None = None
        self._was: Mapping[str, Any] = {}  # the facts of that commit
        # The history without a gap that ends now: its first record's time, None without any, and what may be missing
        # before it.
        self._span: dict[str, Any] = {"since_ms": None, "executions": 0, "before": ""}
        self._begins = False  # the span, with the new executions

    @refusing("the proof was not finished; run it again")
    def run(self, *, again: bool = False) -> Proven:
        """Archive what is new, and prove it; ``again``: prove all that is archived, and stage nothing."""
        with self._link:
            keys, plan = self._keys, self._plan
            before_reading, facts = seen(self._link, keys), self._facts()
            # Pending entries before the run log: what was over by then is in it.
            self._read("pending_now", batches.PENDING, lambda link, keys: batches.pending(link, keys, None))
            self._before = None if again else self._last_proof()
            self._was = self._before.facts if self._before else {}
            archive.add(self._link.url, keys, plan.field(keys.stream), self._archive, plan.keep_days, plan.bodies)
            self._open_archive()
            executions = self._prove_runs(facts)
            unjudged, span = self._prove_entries(facts, self._facts()), self._span
            fresh, standing = self._fresh()
            sentences = {text: is_hole for is_hole, text in self._unproven(facts, unjudged)}
            number = self._before.number + 1 if self._before else 1
            about = (keys.stream, span["since_ms"], facts.time_ms, span["before"], number, span["executions"])
            told = (executions, fresh, len(standing), tuple(sentences), sum(sentences.values()))
            self._made = Proven(*about, *told)
            if not again:
                self._stage(standing, {"span": span, "until_ms": facts.time_ms, "seen": before_reading})
            return self._made

    def _facts(self) -> AuditedStream:
        return job.stream_facts(self._link, self._keys, self._plan.run_log_length)

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
        engine, [former_runs, former_entries] = (
            self._engine,
            [self._was.get(one, [0])[0] for one in ("runs", "entries")],
        )
        self._chain = self._runs.chain()
        self._new_runs = [one for one in self._chain if one.number > former_runs]
        self._kept_ms: int = (self._chain[0].facts if self._chain else {}).get("kept_ms", -1)
        self._new_entries = [one for one in self._entries.chain() if one.number > former_entries]
        self._archived("came", self._entries, self._new_entries, batches.STREAM)
        self._archived("runs_new", self._runs, self._new_runs, batches.RUNS)
        for name, schema in (("open", _OPEN), ("clocks", CARRIED_CLOCKS)):
            engine.files(f"carried_{name}", self._files_before(f"{name}/"), schema)
        engine.files("carried", self._proofs.files(self._proofs.chain(), "carry/") if self._before else [], CARRIED)
        engine.arrow("limits", pa.Table.from_pylist([self._plan.thresholds._asdict()]))
        engine.keep("not_over", f"SELECT * FROM carried_open UNION ALL SELECT {', '.join(_OPEN.names)} FROM came")
        self._read("letters", batches.LETTERS, batches.letters)

    def _archived(self, name: str, data: Any, commits: Sequence[Commit], schema: pa.Schema) -> None:
        self._engine.files(name, data.files(commits), schema, sum(one.rows for one in commits))

    def _files_before(self, under: str) -> list[Path]:
        return self._proofs.files([self._before] if self._before else [], under)

    def _read(self, name: str, schema: pa.Schema, read: job.Reading) -> None:
        readers = {self._keys.stream: (self._link, self._keys)}
        job.read_redis(self._engine, readers, self._folder / f"{name}.parquet", schema, read)

    def _prove_runs(self, facts: AuditedStream) -> int:
        """Judge the new executions, and return how many there are. A gap among them begins a new span: what is behind
        it is compared with what was before it, but what is in order may have been over in between. A ticket in doubt is
        judged with all its history."""
        engine, floor, span = self._engine, -1, self._span
        span |= self._was.get("span", {})
        for gap in [one for one in self._new_runs if one.gap]:
            span |= {"since_ms": None, "executions": 0, "before": gap.gap}
            self._begins, floor = True, nth(gap.after.encode())
        [(executions, of_span, began_ms)] = engine.rows(
            f"SELECT count(id), count(CASE WHEN rec > {floor} THEN id END),"
            f" min(CASE WHEN rec > {floor} THEN record_ms END)"
            f" FROM runs_new WHERE record_ms > {self._kept_ms}"
        )
        span["executions"] += of_span
        span["since_ms"] = began_ms if span["since_ms"] is None else span["since_ms"]
        self._look("runs_new", facts, facts)
        engine.derive("doubtful")
        found = engine.found(["clock_wrong", "run_unreadable"])
        engine.keep("carried_now", findings.text("tables/carry"))
        engine.keep("clocks_now", f"SELECT {', '.join(CARRIED_CLOCKS.names)} FROM clocks")
        if engine.rows("SELECT * FROM doubtful LIMIT 1"):
            self._archived("history", self._runs, self._chain, batches.RUNS)
            engine.keep("judged", "SELECT * FROM history SEMI JOIN doubtful USING (stream, ticket)")
            engine.view("runs", "SELECT * FROM judged")
            engine.view("carried_clocks", "SELECT * FROM clocks_now")
            engine.derive("clocks", "timed", "suspects", "late", "twice")
            found |= engine.found(_OF_TICKETS)
        self._found = [(check, *one) for (check, _), one in found.items()]
        return int(executions)

    def _look(self, runs: str, facts: AuditedStream, now: AuditedStream) -> None:
        """Make the tables of a look at these executions. What was open at the last run, or came after it, ended after
        it: only a new hole can hide that."""
        engine, span = self._engine, self._span
        since = span["since_ms"] if span["since_ms"] is not None else -1
        row = now.row(
            facts,
            entries_read=False,
            base_ms=since if self._begins else -1,
            order_ms=max(since if span["before"] else -1, self._kept_ms),
            drop_ms=job.last_drop_ms(self._link, self._keys),
            handled_before_ms=self._was.get("first_known"),
            ahead_before_ms=self._was.get("ahead_ms"),
        )
        engine.arrow("facts", few(job.FACTS, [row]))
        engine.arrow("declared", few(job.DECLARED, facts.declared_rows()))
        engine.view("runs", f"SELECT * FROM {runs}")
        engine.view(
            "entries",
            "SELECT n.*, p.consumer, p.idle_ms, p.deliveries, 0 AS age_ms, true AS in_stream FROM not_over n"
            " JOIN facts f ON f.stream = n.stream LEFT JOIN pending_now p ON p.stream = n.stream AND p.id = n.id"
            " WHERE n.nth <= f.delivered_nth",
        )
        engine.derive("known", "clocks", "timed")

    def _prove_entries(self, facts: AuditedStream, now: AuditedStream) -> int:
        """Judge the entries that are not over by the new executions: whether they are pending, unread, a dead letter,
        or lost. Returns how many are over and from before a hole."""
        engine = self._engine
        self._with_runs_of_letters()
        self._look("all_and_letters", facts, now)
        engine.derive("ids", "odd")
        [(first,)] = engine.rows("SELECT min(ms) FROM odd WHERE kind IN ('lost', 'passed', 'no_letter')")
        behind = [one for one in self._entries.chain() if first is not None and rank(one.last.encode()) >> 64 >= first]
        self._archived("messages", self._entries, behind, batches.STREAM)
        engine.derive("again")
        [self._known] = engine.rows("SELECT stream, handled_ms, ahead_ms, known_ms, floor_ms FROM known")
        counted = [one for one in findings.text("figures").split("\nUNION ALL") if " FROM odd " in one]
        self._counts = {(name, stream): count for name, stream, count in engine.rows("\nUNION ALL".join(counted))}
        moved = self._confirm(engine.found(OF_ENTRIES))
        engine.view("ended", "SELECT stream, id FROM runs_new WHERE outcome IN ('done', 'gave_up')")
        engine.keep(
            "is_open",
            "SELECT n.* FROM not_over n JOIN facts f ON f.stream = n.stream LEFT JOIN pending_now p ON p.stream ="
            " n.stream AND p.id = n.id ANTI JOIN ended e ON e.stream = n.stream AND e.id = n.id WHERE p.consumer IS NOT"
            f" NULL OR n.nth > f.delivered_nth OR n.id IN ({quoted(moved)})",
        )
        left = "SELECT count(*) FROM entries ANTI JOIN ended USING (stream, id) ANTI JOIN is_open USING (stream, id)"
        return int(engine.rows(f"{left} WHERE ms <= {self._known[4]}")[0][0]) if self._begins else 0

    def _with_runs_of_letters(self) -> None:
        """Add the former executions of dead letters that were over before this run: none of them may be done."""
        engine = self._engine
        engine.arrow("former", batches.RUNS.empty_table())
        if self._before is not None:
            over = "SELECT stream, id FROM letters ANTI JOIN not_over USING (stream, id)"
            engine.keep("letters_over", f"{over} WHERE letter_ms >= {self._was['until_ms']}")
            if engine.rows("SELECT * FROM letters_over LIMIT 1"):
                chain = [one for one in self._chain if one not in self._new_runs]
                self._archived("all_former", self._runs, chain, batches.RUNS)
                engine.keep("former", "SELECT * FROM all_former SEMI JOIN letters_over USING (stream, id)")
        engine.view("all_and_letters", "SELECT * FROM runs_new UNION ALL SELECT * FROM former")

    def _confirm(self, found: Mapping[tuple[str, str], tuple[int, list[Example]]]) -> list[str]:
        """Look again at what moves, and return the entries that were taken for lost and are pending."""
        moved, keys, limits = [], self._keys, self._plan.thresholds
        for (name, _), (count, examples) in found.items():
            held = examples
            if name == "lost":  # what is may be trimmed meanwhile: it was in the archive
                looks = list(job.looks(self._link, keys, name, examples))
                held = [one for one, look in looks if look.owner is None]
                moved = [one.id for one, look in looks if look.owner is not None]
            elif name in ("overtaken", "dead_and_pending"):
                held = job.still_there(self._link, keys, name, examples, limits)
            if held:
                self._found.append((name, count if len(held) == len(examples) else len(held), held))
        return moved

    def _fresh(self) -> tuple[tuple[AuditFinding, ...], list[dict[str, Any]]]:
        """Return what was found now and not before, and all that stands: what was proven stays proven."""
        old = [row for file in self._files_before("found/") for row in pq.ParquetFile(file).read().to_pylist()]
        standing = {(row["check"], row["stream"], row["id"] or row["owner"], row["ticket"]): row for row in old}
        fresh = []
        for check, count, examples in self._found:
            told = {(check, one.stream, one.id or one.owner, one.ticket): one for one in examples}
            new = [one for about, one in told.items() if about not in standing]
            standing |= {about: {"check": check, **one._asdict()} for about, one in told.items()}
            if new:
                count += len(new) - len(examples)
                fresh.append(AuditFinding(CHECKS[check], self._keys.stream, count, count, tuple(new[: findings.SHOWN])))
        return tuple(fresh), list(standing.values())

    def _unproven(self, facts: AuditedStream, unjudged: int) -> Iterator[tuple[bool, str]]:
        more = f", so entries added before it are not judged, of which {unjudged:,} are over"
        for one in [one for one in (*self._new_runs, *self._new_entries) if one.gap]:
            yield "kept_ms" not in one.facts, f"{facts.keys.stream}: {one.gap}{more if one in self._new_runs else ''}"
        # What was cut is told as a gap; entries are judged in the archive, trimmed or not.
        told = facts._replace(first=ZERO, cut_ms=-1)
        yield from ((False, text) for text in job.unproven(told, self._known, self._counts))

    def _stage(self, standing: Sequence[Mapping[str, Any]], facts: dict[str, Any]) -> None:
        before, made, engine = self._before, Commit(1, ZERO.decode(), "", 0), self._engine
        is_whole = before is None or len(self._proofs.chain()) > _DELTAS
        if before is not None:
            made = replace(made, number=before.number + 1)
            made = replace(made, first=1) if is_whole else replace(made, after=before.last)
        moved = "(SELECT stream, ticket FROM runs_new UNION SELECT stream, ticket FROM doubtful) r"
        is_new = "" if is_whole else f" SEMI JOIN {moved} USING (stream, ticket)"
        engine.arrow("found", few(_FOUND, standing))
        parts = {"carry": f"SELECT {', '.join(CARRIED.names)} FROM carried_now{is_new}"}
        parts |= {"open": f"SELECT {', '.join(_OPEN.names)} FROM is_open"}
        parts |= {"clocks": "SELECT * FROM clocks_now", "found": "SELECT * FROM found"}
        for part, select in parts.items():
            engine.write(select, self._proofs.place(made, part))
        for name, new in (("runs", self._new_runs), ("entries", self._new_entries)):
            facts[name] = (new[-1].number, new[-1].last) if new else self._was.get(name, (0, ZERO.decode()))
        facts |= {"first_known": self._known[3], "ahead_ms": self._known[2]}
        facts["open_ms"] = engine.rows("SELECT min(ms) FROM is_open")[0][0]
        self._staged = replace(made, last=facts["runs"][1], rows=sum(one.rows for one in self._new_runs), facts=facts)

    @refusing("the proof was told, and not committed: the next run tells the same once more")
    def commit(self) -> None:
        """Commit what a run has found, once that is told, and note in Redis what is proven."""
        made = self._made
        self._proofs.commit(self._staged, "carry/")
        told: list[str | int | bytes] = ["history", orjson.dumps(self._span | {"unproven": said(made.unproven)})]
        if self._before:  # the first run proves all that is archived: its duration says nothing of the next ones
            told += ["proven_took_ms", wall_ms() - self._began_ms]
        with self._link:
            note(self._link, self._keys, made.since_ms, made.until_ms, *told)
