"""Prove history from the archive, run by run: each run archives what is new and judges that, with what its tickets
carry from before.

::

    <archive>/stream-<name>/proof/group=<group>/
        _commits/<n>.json   proven behind `after` up to `last`, and the facts
        carry/<n>-part-*    what later executions of the tickets of n are compared with (``checks/carry``); those since
                            the last one that holds all tickets are, together, the carry
        clocks/<n>-part-*   how far the clocks of consumers may be off
        open/<n>-part-*     entries that were not over at the last run, and whether those without a ticket id ``ran``
        found/<n>-part-*    all findings of this history, so far

A commit (``archive/commits``) is there as a whole or not at all, and begins where the one before it ends; the archive
does not change. So a run that was killed is done again with the same rows, and the chain of commits is the proof that
nothing lies between two runs. A ticket that shows anything is judged with its whole history, as an audit of everything
would; what is found there takes the place of what was found in it before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from usher.common.base.errors import RedisTrouble, StartRefused
from usher.common.protocol.stream_id import ZERO, rank
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.endpoints import near
from usher.master.audit.archive.archive import Archive
from usher.master.audit.archive.commits import Commit, spark_place
from usher.master.audit.archive.standing import ProvenSpan, data_sets, note, note_history, seen, told_until
from usher.master.audit.checks import carry, run_proof
from usher.master.audit.checks.clocks import better_known, bounds, offsets, on_redis_clock, tightest, wrong_clocks
from usher.master.audit.checks.facts import AuditedStream, maybe_damaged, maybe_dropped, unproven
from usher.master.audit.checks.findings import CHECKS, ENDED, AuditFinding, Example
from usher.master.audit.checks.letters import DeadLetterFrames, last_drop_ms, letters_in
from usher.master.audit.checks.pending_proof import collect
from usher.master.audit.checks.suspects import LOOKED_AT, SHOWN, Suspects
from usher.master.audit.engine import EngineFailed, F, on_disk, use
from usher.master.audit.job import AuditPlan
from usher.master.audit.read import columns, snapshot
from usher.master.audit.read.bulk import Interrupted
from usher.master.audit.read.session import FEW_VALUES, fit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Commits whose carries are read together before they are made one.
_DELTAS = 32
#: The last spans that are shown.
_SPANS = 50
_RUNS = columns.ddl(columns.RUNS)
_BOUNDS = "stream string, consumer string, above_us bigint, below_us bigint"
_OPEN = "stream string, id string, ms bigint, seq bigint, ticket string, ran boolean"
#: Of what a run leaves for the next one.
_FORM = 2
_OF_ENTRIES = (
    *("lost", "overtaken", "dead_and_done", "dead_and_pending"),
    *("letters_twice", "letter_missing", "ticket_differs", "unread_and_run", "clock_wrong", "run_unreadable"),
)
#: The checks that a proof makes.
PROVES = (
    *("overlap", "owners_overlap", "out_of_order", "fence_shared", "fence_fell", "times_impossible"),
    *("effect_twice", "repeat_declared", "stale_counted", *_OF_ENTRIES),
)
_EXAMPLE = ("stream", "id", "ticket", "owner", "detail")
_FOUND = pa.schema([*((name, pa.string()) for name in ("check", *_EXAMPLE)), ("run", pa.int64())])


@dataclass(frozen=True)
class Proven:
    """A run's proof of one stream: everything recorded from ``since_ms`` to ``until_ms``, by Redis' clock, is judged.

    ``executions`` are new, ``total`` are those of the span. ``fresh`` (findings) and ``unproven`` (sentences) are those
    that nobody was told of before, ``holes`` of the sentences say where a span ended; ``standing`` findings there are
    in all. ``spans``: this one, behind the last ones before it.
    """

    stream: str
    since_ms: int | None
    until_ms: int
    run: int
    executions: int
    total: int
    spans: tuple[ProvenSpan, ...]
    fresh: tuple[AuditFinding, ...]
    standing: int
    unproven: tuple[str, ...]
    holes: int

    def sentence(self) -> str:
        """Return the span of the proof, in words."""
        if self.since_ms is None:
            return f"{self.stream}: no execution is archived yet, so nothing is proven"
        since, until = (
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(ms / 1000)) for ms in (self.since_ms, self.until_ms)
        )
        return (
            f"{self.stream}: proven from {since} to {until} (UTC) without a gap; executions: {self.total:,}, of them"
            f" new: {self.executions:,}; findings in all: {self.standing:,}"
        )


@dataclass
class _Span:
    """The history without a gap that ends now. ``first``: its first commit of the run log; ``executions`` are in it;
    ``carried``: of the runs before, None without any. ``cut``: before it something is missing; ``cut_now``: it began
    with the new executions. ``since_ms``: of its first record, None without any. ``fresh``: what the new executions add
    to ``carried``. ``before``: what is missing before it; ``ended``: the spans before it; ``run``: the proof's run in
    which it began."""

    first: int
    since_ms: int | None
    cut: bool
    carried: DataFrame | None
    executions: int = 0
    cut_now: bool = False
    fresh: DataFrame | None = None
    before: str = ""
    ended: tuple[ProvenSpan, ...] = ()
    run: int = 1

    def spans(self, until_ms: int) -> tuple[ProvenSpan, ...]:
        """Return the last spans of the history, this one up to ``until_ms``."""
        if self.since_ms is None:
            return self.ended
        return (*self.ended, ProvenSpan(self.since_ms, until_ms, self.executions, self.before))[-_SPANS:]


class Proof:
    """The proof of one stream: ``Proof(spark, plan, stream, folder).run()``; the caller holds the lock of the archive's
    ``folder``. Raises StartRefused when it cannot be completed: then nothing is committed."""

    def __init__(
        self,
        spark: SparkSession,
        plan: AuditPlan,
        stream: str,
        folder: Path,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._spark, self._plan, self._folder, self._progress = spark, plan, folder, progress
        self._keys = plan.keys(stream)
        self._entries, self._runs, self._proofs = data_sets(folder, self._keys)
        self._tables = {"runs": self._runs, "entries": self._entries}
        self._url = near(plan.url, stream)
        self._link = Link(self._url, "usher:audit", timeout_s=30.0)
        self._suspects = Suspects()
        self._kept: list[DataFrame] = []
        self._judged_again: DataFrame | None = None
        self._judged_alone: DataFrame | None = None
        self._before: Commit | None = None
        self._untold: list[tuple[int, bool, str]] = []  # (run, is it a hole, sentence)
        self._clock_tolerance_us = plan.limits.clocks_ms * 1000

    def run(self, *, again: bool = False) -> Proven:
        """Archive what is new, and prove it; ``again``: prove all that is archived, and commit nothing."""
        try:
            with use(self._spark):
                return self._run(again)
        except (RedisTrouble, CommandRefused, Interrupted, EngineFailed, OSError) as trouble:
            raise StartRefused(f"the proof was not finished; run it again: {trouble}") from trouble
        finally:
            for frame in self._kept:
                frame.unpersist()
            self._link.close()

    def _run(self, again: bool) -> Proven:
        keys, plan = self._keys, self._plan
        before_reading = seen(self._link, keys)
        facts = snapshot.stream_facts(self._link, keys, plan.run_log_length)
        # Pending entries before the run log: what was over by then is in it.
        pending = self._keep(self._read("redis_pending").select("stream", "id", "ms", "consumer"))
        first_pending = pending.agg(F.min("ms")).collect()[0][0]
        last = None if again else self._last_proof()
        Archive(self._spark, self._url, keys, plan.ticket_field, self._folder).add(self._progress)
        self._progress(f"proving {keys.stream}")
        self._open_archive(last)
        figures = run_proof.RunFigures()
        span = self._prove_runs(facts, figures)
        known = self._before.facts if self._before else {}
        ahead_ms = max(figures.ahead_ms.get(keys.stream, 0), known.get("ahead_ms", 0))
        firsts = [first_pending, figures.first_known.get(keys.stream), known.get("first_known")]
        handled = [one for one in firsts if one is not None]
        figures.first_known = {keys.stream: min(handled)} if handled else {}
        read_now = snapshot.stream_facts(self._link, keys, plan.run_log_length).delivered
        # What was open at the last run, or came after it, ended after it: only a new hole can hide that.
        floor = replace(_floor(facts, span).ahead_of(ahead_ms), delivered=read_now, run_capped=span.cut_now)
        left, unjudged = self._prove_entries(span, floor, pending, figures)
        number = self._before.number + 1 if self._before else 1
        told = told_until(self._proofs) if self._before else 0
        self._untold = [(run, hole, text) for run, hole, text in known.get("untold", []) if run > told]
        self._untold += [(number, *one) for one in self._unproven(floor, figures, unjudged)]
        fresh, standing = self._fresh(number, told, span.run)
        made = Proven(
            keys.stream,
            span.since_ms,
            facts.time_ms,
            number,
            figures.executions,
            span.executions,
            span.spans(facts.time_ms),
            fresh,
            len(standing),
            tuple(dict.fromkeys(text for _, _, text in self._untold)),
            sum(hole for _, hole, _ in self._untold),
        )
        if not again:
            noted = {
                "first": span.first,
                "since_ms": span.since_ms,
                "cut": span.cut,
                "first_known": figures.first_known.get(keys.stream),
                "ahead_ms": ahead_ms,
                "executions": made.total,
                "until_ms": made.until_ms,
                "seen": before_reading,
                "untold": self._untold,
                "before": span.before,
                "ended": span.ended,
                "run": span.run,
                "clock_tolerance_us": self._clock_tolerance_us,
                "form": _FORM,
            }
            self._commit(span, left, standing, noted)
            note_history(self._link, keys, made.spans, made.unproven)
        return made

    def _last_proof(self) -> Commit | None:
        """Return the last commit, None before the first. Raises StartRefused when the archive is older than it."""
        last = self._proofs.recover()
        if last is not None and last.facts.get("form") != _FORM:
            self._proofs.set_aside(f"until-{last.number}")
            self._progress(f"another version proved {self._keys.stream}: all that is archived is proven again")
            last = None
        for name, data in self._tables.items():
            number, end = last.facts[name] if last else (0, ZERO.decode())
            if number and data.end_of(number) != end:
                raise StartRefused(
                    f"the archive's {name} are older than what was proven of them (commit {number}, up to {end}): they"
                    f" were restored from a copy. Put back a newer copy of {data.folder}, or move {self._proofs.folder}"
                    " away: then all that is archived is proven again"
                )
        return last

    def _open_archive(self, before: Commit | None) -> None:
        """Find what is new in the archive since the commit ``before``; without it all is."""
        self._before = before
        self._new_runs, self._new_entries = (
            data.chain(before.facts[name][0] if before else 0) for name, data in self._tables.items()
        )
        fit(self._spark, sum(one.rows for one in [*self._new_runs, *self._new_entries]))
        open_before = self._frame(self._files_before("open/"), _OPEN)
        came = self._frame(self._entries.files(self._new_entries), columns.ddl(columns.STREAM))
        came = came.withColumn("ran", F.lit(False))
        self._not_over = open_before.unionByName(came.select(*open_before.columns))
        self._bounds = self._frame(self._files_before("clocks/"), _BOUNDS)
        self._letters = self._read_letters()

    def _files_before(self, under: str) -> list[Path]:
        return self._proofs.files([self._before] if self._before else [], under)

    # ---- executions ----------------------------------------------------------------------------------------------

    def _prove_runs(self, facts: AuditedStream, figures: run_proof.RunFigures) -> _Span:
        """Judge the new executions, one part between two gaps after another. Returns the last part's span."""
        span = _Span(1, None, False, None)
        if self._before is not None:
            known = self._before.facts
            span = _Span(
                known["first"],
                known["since_ms"],
                known["cut"],
                self._carried(self._before),
                known["executions"],
                before=known.get("before", ""),
                ended=tuple(ProvenSpan(*one) for one in known.get("ended", [])),
                run=known["run"],
            )
        for part in _parts(self._new_runs):
            rows = self._keep(self._frame(self._runs.files(part), _RUNS))
            counted = run_proof.count_runs(rows, self._suspects)
            began_ms = rows.agg(F.min("record_ms")).collect()[0][0]
            if part[0].gap:
                former = span.spans(int(part[0].after.partition("-")[0]))
                run = self._before.number + 1 if self._before else 1
                known = {"before": part[0].gap, "ended": former, "run": run}
                span = _Span(part[0].number, began_ms, True, None, cut_now=True, **known)
            span.executions += counted.executions
            span.since_ms = began_ms if span.since_ms is None else span.since_ms
            floor = _floor(facts, span).ahead_of(counted.ahead_ms.get(facts.stream, 0))
            clocks, better = self._clocks(rows)
            fresh = carry.carry_of(on_redis_clock(rows, clocks))
            if span.carried is None:
                run_proof.check_runs(rows, self._letters, [floor], clocks, counted, self._suspects)
                span.carried = fresh
            else:
                again = self._follow(rows, part, span, floor, counted, clocks, better)
                if again is not None and not better.isEmpty():
                    fresh = fresh.unionByName(carry.carry_of(on_redis_clock(again, clocks)))
                span.carried = span.carried.unionByName(fresh)
            span.fresh = fresh
            figures.add(counted)
        return span

    def _follow(
        self,
        rows: DataFrame,
        part: Sequence[Commit],
        span: _Span,
        floor: AuditedStream,
        figures: run_proof.RunFigures,
        clocks: DataFrame,
        better: DataFrame,
    ) -> DataFrame | None:
        """Judge executions with what their tickets carry; where that shows anything, or clocks are ``better`` known
        than when the ticket was judged, with all of the ticket. Returns all executions of such tickets."""
        assert span.carried is not None
        self._kept.append(doubts := run_proof.doubts(rows, clocks, span.carried))
        followed = run_proof.follow(doubts, carry.merged(span.carried, doubts))
        shown = followed.filter(F.greatest(*run_proof.FLAGS)).select("stream", "ticket")
        known = self._runs.chain(span.first - 1)[: part[-1].number - span.first + 1]
        history = self._frame(self._runs.files(known), _RUNS)
        if not better.isEmpty():
            theirs = carry.with_order(history).join(F.broadcast(better), ["stream", "consumer"], "left_semi")
            shown = shown.unionByName(theirs.select("stream", "ticket"))
        tickets = self._keep(shown.distinct())
        repeated = self._repeated(rows) if figures.unkeyed else None
        if repeated is None and tickets.isEmpty():
            return None
        few = [row.ticket for row in tickets.select("ticket").limit(FEW_VALUES + 1).collect()]
        if len(few) <= FEW_VALUES:  # files without them are not read
            again = history.filter(F.col("ticket").isin(few))
        else:
            again = history.join(tickets, ["stream", "ticket"], "left_semi")
        if repeated is not None:
            again = again.unionByName(history.filter("ticket = ''").join(repeated, ["stream", "id"], "left_semi"))
        self._judged_again, self._judged_alone = tickets, repeated
        figures.unkeyed = int(repeated is not None)
        run_proof.check_runs(self._keep(again), self._letters, [floor], clocks, figures, self._suspects)
        return again

    def _repeated(self, rows: DataFrame) -> DataFrame | None:
        """Return messages without a ticket id, each a ticket of its own, that did not run for the first time."""
        alone = rows.filter((F.col("ticket") == "") & F.col("id").isNotNull()).select("stream", "id")
        twice = alone.groupBy("stream", "id").count().filter("count > 1").select("stream", "id")
        over = alone.join(self._not_over.filter("NOT ran"), ["stream", "id"], "left_anti")
        found = self._keep(twice.unionByName(over).distinct())
        return None if found.isEmpty() else found

    # ---- entries -------------------------------------------------------------------------------------------------

    def _prove_entries(
        self, span: _Span, floor: AuditedStream, pending: DataFrame, figures: run_proof.RunFigures
    ) -> tuple[DataFrame, int]:
        """Judge the entries that are not over by the new executions: whether they are pending, unread, a dead letter,
        or lost. Returns those that are still open, and how many are over and from before a hole."""
        runs = self._frame(self._runs.files(self._new_runs), _RUNS)
        ended = runs.filter(F.col("outcome").isin(*ENDED)).select("stream", "id")
        owners = pending.select("stream", "id", "consumer")
        at_all = self._keep(self._not_over.join(owners, ["stream", "id"], "left"))
        left = at_all.join(ended, ["stream", "id"], "left_anti")
        is_read = F.struct("ms", "seq") <= _place(floor.last_delivered)
        held = left.filter(F.col("consumer").isNotNull())
        letters = DeadLetterFrames(self._letters, self._behind_open_entries, self._drops)
        run_proof.check_losses(
            at_all.filter(is_read).withColumn("in_stream", F.lit(True)),
            self._with_runs_of_letters(runs),
            letters,
            [floor],
            figures,
            self._suspects,
            None if span.carried is None else carry.done_ahead(span.carried, held),
        )
        moved = self._confirm()
        waits = F.col("consumer").isNotNull() | ~is_read | F.col("id").isin(moved)
        now = runs.filter("ticket = ''").select("stream", "id").distinct().withColumn("now", F.lit(True))
        has_run = F.col("ran") | F.coalesce("now", F.lit(False))
        is_open = left.filter(waits).join(now, ["stream", "id"], "left").withColumn("ran", has_run)
        is_open = self._keep(is_open.select(*self._not_over.columns))
        unjudged = left.filter(~waits & (F.col("ms") <= floor.floor_ms)).count() if span.cut_now else 0
        return is_open, unjudged

    def _behind_open_entries(self) -> DataFrame:
        """Return the archived entries from the first one on that was not over."""
        first = self._not_over.agg(F.min(F.struct("ms", "seq")).alias("first")).collect()[0].first
        since = 0 if first is None else (first.ms << 64) + first.seq
        commits = [one for one in self._entries.chain() if rank(one.last.encode()) >= since]
        return self._frame(self._entries.files(commits), columns.ddl(columns.STREAM))

    def _with_runs_of_letters(self, runs: DataFrame) -> DataFrame:
        """Add the former executions of dead letters that were over before this run: none of them may be done."""
        before = self._before
        if before is None or self._letters is None:
            return runs
        is_new = F.split("letter", "-")[0].cast("bigint") >= before.facts["until_ms"]
        letters = self._letters.filter(is_new).select("stream", "id")
        over = self._keep(letters.join(self._not_over, ["stream", "id"], "left_anti"))
        if over.isEmpty():
            return runs
        former = self._runs.chain()[: before.facts["runs"][0]]
        return runs.unionByName(self._frame(self._runs.files(former), _RUNS).join(over, ["stream", "id"], "left_semi"))

    def _confirm(self) -> list[str]:
        """Look again at entries that seem lost or overtaken. Returns the ids of those that only moved."""
        moved = []
        for name in ("lost", "overtaken", "dead_and_pending"):
            place = (name, self._keys.stream)
            suspects = self._suspects.named.pop(place, [])[:LOOKED_AT]
            looks = list(snapshot.looks(self._link, self._keys, suspects))
            limits = self._plan.limits
            held = [
                one
                for one, look in looks
                # What is lost may be trimmed meanwhile: it was in the archive.
                if (look.owner is None if name == "lost" else snapshot.still_holds(name, one, look, limits))
            ]
            moved += [one.id for one, look in looks if name == "lost" and look.owner is not None]
            if held:
                self._suspects.named[place] = held
            count = self._suspects.counts.pop(place, 0)
            if held:
                self._suspects.counts[place] = count if len(held) == LOOKED_AT else len(held)
        return moved

    # ---- findings ------------------------------------------------------------------------------------------------

    def _fresh(self, number: int, told: int, began: int) -> tuple[tuple[AuditFinding, ...], list[dict[str, Any]]]:
        """Return the findings that nobody was ``told`` of, and all that stand after run ``number``. Tickets were judged
        again with what is known since run ``began``: what stood before that, stands."""
        old = [row for file in self._files_before("found/") for row in pq.read_table(file).to_pylist()]
        judged = {(row["ticket"], "") for row in _among(self._judged_again, "ticket", old)}
        judged |= {("", row["id"]) for row in _among(self._judged_alone, "id", old)}
        was_before = (row["check"] in _OF_ENTRIES or row["run"] < began for row in old)
        kept = (row for row, stays in zip(old, was_before, strict=True) if stays or _judged_as(row) not in judged)
        standing = {_about(row): row for row in kept}
        first_run = {_about(row): row["run"] for row in old}
        unnamed = dict[str, int]()
        for (check, _), examples in self._suspects.named.items():
            unnamed[check] = self._suspects.counts[check, self._keys.stream] - len(examples)
            for one in examples:
                row = {"check": check, **{name: getattr(one, name) for name in _EXAMPLE}}
                standing[_about(row)] = row | {"run": first_run.get(_about(row), number)}
        by_check: dict[str, list[Example]] = {}
        for row in standing.values():
            if row["run"] > told:
                by_check.setdefault(row["check"], []).append(Example(**{name: row[name] for name in _EXAMPLE}))
        found = []
        for check, examples in by_check.items():
            count = len(examples) + unnamed.get(check, 0)
            found.append(AuditFinding(CHECKS[check], self._keys.stream, count, count, tuple(examples[:SHOWN])))
        return tuple(found), list(standing.values())

    def _unproven(
        self, floor: AuditedStream, figures: run_proof.RunFigures, unjudged: int
    ) -> Iterator[tuple[bool, str]]:
        """Yield (is it a hole, sentence) for what this run could not prove."""
        stream, known = floor.stream, figures.first_known.get(floor.stream)
        for one in self._new_runs:
            if one.gap:
                more = f", so entries added before it are not judged, of which {unjudged:,} are over"
                yield True, f"{stream}: {one.gap}{more}"
        yield from ((True, f"{stream}: {one.gap}") for one in self._new_entries if one.gap)
        # What was cut is told as a gap; entries are judged in the archive, trimmed or not.
        told = replace(floor, first=ZERO, run_capped=False)
        skipped, before_known = figures.skipped_order.get(stream, 0), figures.before_known.get(stream, 0)
        yield from ((False, text) for text in unproven(told, known, skipped, before_known))
        if stream in figures.maybe_damaged:
            yield False, maybe_damaged(stream, figures.maybe_damaged[stream])
        if stream in figures.maybe_dropped:
            yield False, maybe_dropped(stream, figures.maybe_dropped[stream])

    # ---- commit --------------------------------------------------------------------------------------------------

    def _commit(
        self, span: _Span, left: DataFrame, standing: Sequence[Mapping[str, Any]], facts: dict[str, Any]
    ) -> None:
        before = self._before
        number = before.number + 1 if before else 1
        staging = self._proofs.staging(number)
        rows = sum(one.rows for one in self._new_runs)
        facts["whole"] = before.facts["whole"] if before else number
        if before is None or span.first != before.facts["first"] or number - before.facts["whole"] >= _DELTAS:
            facts["whole"] = number
            if span.carried is not None:
                carry.merged(span.carried).write.parquet(spark_place(staging / "carry"))
        elif span.fresh is not None:
            span.fresh.write.parquet(spark_place(staging / "carry"))
        self._bounds.coalesce(1).write.parquet(spark_place(staging / "clocks"))
        left.coalesce(1).write.parquet(spark_place(staging / "open"))
        (staging / "found").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(list(standing), schema=_FOUND), staging / "found" / "part-0.parquet")
        after = before.last if before else ZERO.decode()
        for name, new in (("runs", self._new_runs), ("entries", self._new_entries)):
            former = before.facts[name] if before else (0, ZERO.decode())
            facts[name] = (new[-1].number, new[-1].last) if new else former
        made = self._proofs.commit(Commit(number, self._keys.stream, after, facts["runs"][1], rows, facts=facts))
        note(self._link, self._keys, made.facts["since_ms"], made.facts["until_ms"])
        self._prune(made)

    def _carries(self, last: Commit) -> list[Path]:
        return self._proofs.files(self._proofs.chain(last.facts["whole"] - 1), "carry/")

    def _carried(self, last: Commit) -> DataFrame:
        files = self._carries(last)
        return self._spark.read.parquet(*map(spark_place, files)) if files else self._no_carry()

    def _no_carry(self) -> DataFrame:
        return carry.carry_of(on_redis_clock(self._frame([], _RUNS), offsets(self._bounds, 0)))

    def _clocks(self, rows: DataFrame) -> tuple[DataFrame, DataFrame]:
        """Return the offsets of clocks, by all that is known of them, and those of which more is known now."""
        tolerance_us = self._clock_tolerance_us
        then_us = self._before.facts["clock_tolerance_us"] if self._before else tolerance_us
        before = offsets(self._bounds, then_us)
        self._bounds = self._keep(tightest(self._bounds.unionByName(bounds(rows))))
        known = self._keep(offsets(self._bounds, tolerance_us))
        collect([wrong_clocks(known)], self._suspects)
        return known, self._keep(better_known(known, before))

    def _prune(self, last: Commit) -> None:
        """Delete what no later run reads."""
        kept = {*self._carries(last), *self._proofs.files([last])}
        for file in self._proofs.folder.glob("[a-z]*/*.parquet"):
            if file not in kept:
                file.unlink()

    # ---- reading -------------------------------------------------------------------------------------------------

    def _frame(self, files: Sequence[Path], schema: str) -> DataFrame:
        if not files:
            return self._spark.createDataFrame([], schema)
        return self._spark.read.schema(schema).parquet(*map(spark_place, files))

    def _read(self, source: str, **options: str) -> DataFrame:
        plan, keys = self._plan, self._keys
        given = {"url": plan.url, "stream": keys.stream, "group": keys.group, "ticket_field": plan.ticket_field}
        return self._spark.read.format(source).options(**given, **options).load()

    def _read_letters(self) -> DataFrame | None:
        if not self._link.call("XLEN", self._keys.dead):
            return None
        return letters_in(self._read("redis_stream", key=self._keys.dead))

    def _drops(self) -> dict[str, int]:
        return {self._keys.stream: last_drop_ms(self._link, self._keys)}

    def _keep(self, frame: DataFrame) -> DataFrame:
        self._kept.append(on_disk(frame))
        return frame


def _among(judged: DataFrame | None, name: str, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return those of ``judged`` that rows tell of."""
    if judged is None or not rows:
        return []
    named = judged.sparkSession.createDataFrame([(one,) for one in {row[name] for row in rows}], f"{name} string")
    return judged.join(named, name, "left_semi").collect()


def _floor(facts: AuditedStream, span: _Span) -> AuditedStream:
    first = None if span.since_ms is None else b"%d-0" % span.since_ms
    return replace(facts, run_first=first, run_capped=span.cut)


def _parts(commits: Iterable[Commit]) -> Iterator[list[Commit]]:
    """Yield commits of the run log that follow one another without a gap."""
    part: list[Commit] = []
    for one in commits:
        if one.gap and part:
            yield part
            part = []
        part.append(one)
    if part:
        yield part


def _place(stream_id: bytes) -> Any:
    ms, seq = (min(part, 2**63 - 1) for part in divmod(rank(stream_id), 1 << 64))
    return F.struct(F.lit(ms).cast("bigint").alias("ms"), F.lit(seq).cast("bigint").alias("seq"))


def _judged_as(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["ticket"], "" if row["ticket"] else row["id"]


def _about(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return row["check"], row["stream"], row["id"] or row["owner"], row["ticket"]
