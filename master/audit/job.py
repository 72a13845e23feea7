"""Run one audit: read, judge, look again, report.

The order of reading is what makes it hold on a running system: facts of each stream, pending list (with the entries,
window by window), index, attempts, then the run log, then dead letters. An entry that was over before the pending list
was read is in the run log by then; everything that moved in between is a suspect, and the second look asks for each of
those at one moment (``snapshot``).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from usher.common.base.errors import RedisTrouble, StartRefused
from usher.common.base.extras import how_to_install
from usher.common.base.log import redacted
from usher.common.protocol.keys import Keys
from usher.common.protocol.marks import NO_FIELDS, MarkFields
from usher.common.protocol.sources import is_work_stream
from usher.common.redis.client import CommandRefused, Link
from usher.common.redis.endpoints import near
from usher.master.audit.checks import links, pending_proof, run_proof
from usher.master.audit.checks.clocks import bounds, offsets, wrong_clocks
from usher.master.audit.checks.facts import AuditedStream, maybe_damaged, maybe_dropped, unproven
from usher.master.audit.checks.findings import (
    CHECKS,
    RECORD_RUNS,
    AuditFinding,
    AuditThresholds,
    Example,
)
from usher.master.audit.checks.letters import DeadLetterFrames, last_drop_ms, letters_in
from usher.master.audit.checks.members import GroupMember, judge_members
from usher.master.audit.checks.suspects import LOOKED_AT, SHOWN, Suspects, fold
from usher.master.audit.engine import EngineFailed, name_of, on_disk, use
from usher.master.audit.output.report import AuditReport, run_name
from usher.master.audit.read import snapshot
from usher.master.audit.read.bulk import BulkReader, Interrupted
from usher.master.audit.read.session import fit
from usher.master.audit.settings import AuditSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Checks of ``judge_members``, which the second look repeats as a whole.
_OF_MEMBERS = ("owner_dead", "stranger_owns", "consumer_leaked", "key_leaked", "lease_orphan", "unregistered")
#: Facts of the past, in a log that does not change: they need no second look.
_OF_THE_LOG = (
    "key_foreign",
    "overlap",
    "owners_overlap",
    "out_of_order",
    "fence_shared",
    "fence_fell",
    "times_impossible",
    "run_unreadable",
    "effect_twice",
    "repeat_declared",
    "stale_counted",
    "effect_missing",
    "dead_and_done",
    "cut_unread",
    "clock_wrong",
    "letters_twice",
    "letter_missing",
    "ticket_differs",
    "unread_and_run",
    "attempts_wrong",
    "failed_often",
)


@dataclass(frozen=True)
class AuditPlan:
    """The plan of an audit. ``ticket_field``: of streams that are no work stream; ``settle_s``: wait before the second
    look, so that messages in progress can end; ``run_log_length``: as the consumers have it, to know on old Redis
    whether the log was capped. ``sink_url``: the SQL database of the sink ``sink``, or "" to leave effects alone;
    ``marks``: what tells the tenant of a message."""

    url: str
    streams: tuple[str, ...]
    group: str
    ticket_field: str
    limits: AuditThresholds
    settle_s: float
    run_log_length: int
    sink_url: str = ""
    sink: str = "default"
    marks: MarkFields = NO_FIELDS

    def keys(self, stream: str) -> Keys:
        return Keys(stream, self.group)


def plan_of(settings: AuditSettings, url: str) -> AuditPlan:
    """Return the plan by these settings."""
    return AuditPlan(
        url,
        settings.streams,
        settings.group,
        settings.ticket_field,
        settings.limits,
        settings.audit_settle_seconds,
        settings.run_log_length,
        settings.audit_sink_url,
        settings.audit_sink_name,
        settings.marks,
    )


class AuditRun:
    """An audit: ``AuditRun(spark, plan).run()``. Raises StartRefused when it cannot be completed: nothing is reported
    then."""

    def __init__(self, spark: SparkSession, plan: AuditPlan, progress: Callable[[str], None] = lambda _: None) -> None:
        self._spark = spark
        self._plan = plan
        self._progress = progress
        self._suspects = Suspects()
        self._links = {stream: Link(near(plan.url, stream), "usher:audit", timeout_s=30.0) for stream in plan.streams}
        self._kept: list[DataFrame] = []
        self.pending = pending_proof.PendingFigures()
        self.runs = run_proof.RunFigures()
        self._reading_s = 0.0
        self._open: list[str] = []  # what could not be proven

    def run(self) -> AuditReport:
        try:
            with use(self._spark):
                return self._run()
        except (RedisTrouble, CommandRefused, Interrupted, EngineFailed) as trouble:
            raise StartRefused(f"the audit was not finished, so it proves nothing: {trouble}") from trouble
        finally:
            for frame in self._kept:
                frame.unpersist()
            for link in self._links.values():
                link.close()

    def _run(self) -> AuditReport:
        started_ns = time.time_ns()
        facts = self._leave_out_odd_ones()
        fit(self._spark, sum(max(one.length, one.pending) + one.run_records * RECORD_RUNS for one in facts))
        if facts:
            self._first_look(facts)
        self._progress("looking at the suspects again")
        found = self._second_look()
        facts = [self._floor_now(one) for one in facts]
        return self._report(started_ns, facts, found)

    def _facts(self) -> list[AuditedStream]:
        cap = self._plan.run_log_length
        return [snapshot.stream_facts(link, self._plan.keys(stream), cap) for stream, link in self._links.items()]

    def _leave_out_odd_ones(self) -> list[AuditedStream]:
        """Leave out streams of which a key cannot be read, with a finding, and return the facts of the others."""
        facts = []
        for stream, link in list(self._links.items()):
            keys = self._plan.keys(stream)
            told = snapshot.foreign_keys(link, keys)
            try:
                facts += [] if told else [snapshot.stream_facts(link, keys, self._plan.run_log_length)]
            except snapshot.KeyForeign as odd:
                told = [str(odd)]
            if told:
                self._suspects.add("key_foreign", stream, len(told), [Example(stream, detail=one) for one in told])
                self._links.pop(stream).close()
        return facts

    # ---- first look ----------------------------------------------------------------------------------------------

    def _first_look(self, facts: Sequence[AuditedStream]) -> None:
        plan, suspects = self._plan, self._suspects
        self._progress("reading the pending lists")
        can_prove_losses = any(one.run_first is not None for one in facts)
        pending = self._keep(
            self._read("redis_pending", entries="all" if can_prove_losses else "pending").drop("group")
        )
        # The time until every entry is read, on disk, and counted; it includes the start of the Python workers.
        began_s = time.monotonic()
        self.pending = pending_proof.count_pending(pending)
        self._reading_s = time.monotonic() - began_s
        members = self._members()
        self._open += [
            f"{stream}: this user of Redis may not SCAN, so inboxes without an owner were not looked for (key_leaked)"
            for stream, link in self._links.items()
            if not snapshot.may_scan(link)
        ]
        dead = []
        for check, count, example in judge_members(members, plan.limits):
            suspects.add(check, example.stream, count, [example])
            dead += [(example.stream, example.owner)] if check in ("owner_dead", "stranger_owns") else []
        for one in facts:
            if one.cut_unread:
                told = next((loss.describe() for loss in one.declared if loss.kind == "unread_cut"), "")
                suspects.add("cut_unread", one.stream, one.cut_unread, [Example(one.stream, detail=told)])
        self._progress("comparing pending lists and indexes")
        index = self._keep(self._read("redis_tickets"))
        looks = [pending_proof.check_entries(pending, dead, plan.limits), *pending_proof.check_records(index, facts)]
        strangers = [one.name for one in members if not one.is_named]
        if (differing := pending_proof.check_index(pending, index, strangers)) is not None:
            looks.append(differing)
        if self.pending.longest_parked_ms > plan.limits.parked_ms:
            looks.append(pending_proof.check_parked(pending, index, plan.limits))
        if any(link.call("EXISTS", plan.keys(stream).attempts) for stream, link in self._links.items()):
            looks.append(pending_proof.check_attempts(self._read("redis_attempts"), pending, plan.limits))
        pending_proof.collect(looks, suspects)
        inboxes = self._check_inboxes(index)
        pending_proof.check_tickets(pending, self.pending, suspects)
        if can_prove_losses:
            self._progress("proving the run log")
            self._prove_runs(pending, index, inboxes, facts)

    def _check_inboxes(self, index: DataFrame) -> DataFrame:
        inboxes = self._keep(self._read("redis_inboxes"))
        if inboxes.count():
            pending_proof.collect(pending_proof.check_inboxes(inboxes, index, self._facts()), self._suspects)
        return inboxes

    def _prove_runs(
        self, pending: DataFrame, index: DataFrame, inboxes: DataFrame, facts: Sequence[AuditedStream]
    ) -> None:
        runs = self._keep(self._read("redis_runs"))
        self.runs = run_proof.count_runs(runs, self._suspects)
        facts = [self._floor_now(one) for one in facts]
        known = self._keep(offsets(bounds(runs), self._plan.limits.clocks_ms * 1000))
        starts = links.check_starts(runs, facts, self.runs.damaged_ms, self._plan.limits.attempts)
        of_links = [*links.check_fences(runs, index), *links.check_ids(runs, pending, facts)]
        of_links.append(links.check_told(runs, inboxes, pending, index, facts))
        pending_proof.collect([wrong_clocks(known), *of_links, *starts], self._suspects)
        run_proof.check_runs(runs, self._dead_letters(facts), facts, known, self.runs, self._suspects)
        for stream, first in self.pending.first_pending.items():
            self.runs.first_known[stream] = min(first, self.runs.first_known.get(stream, first))
        letters = DeadLetterFrames(self._dead_letters(facts), lambda: self._read("redis_stream"), self._last_drops_ms)
        run_proof.check_losses(pending, runs, letters, facts, self.runs, self._suspects)
        if self._plan.sink_url:
            self._prove_effects(runs)

    def _prove_effects(self, runs: DataFrame) -> None:
        """Compare the run log with the sink, after the run log was read: its successes were stored before."""
        try:
            from usher.master.audit.checks import effects
        except ImportError as missing:
            raise StartRefused(f"USHER_AUDIT_SINK_URL needs SQLAlchemy: {how_to_install('sql')}") from missing
        self._progress("looking for effects in the sink")
        plan = self._plan
        told = effects.check_stored(
            runs,
            self._read("redis_stream"),
            plan.sink_url,
            plan.sink,
            plan.limits.clocks_ms,
            self._suspects,
            gathered=[stream for stream in plan.streams if is_work_stream(stream, plan.group)],
        )
        self._open += [told] if told else []

    def _floor_now(self, facts: AuditedStream) -> AuditedStream:
        """Return the facts with the present beginnings of run log and stream: they may have been cut while they were
        read."""
        now = snapshot.stream_facts(self._links[facts.stream], facts.keys, self._plan.run_log_length)
        told = dataclasses.replace(
            facts,
            run_first=now.run_first or facts.run_first,
            run_capped=now.run_capped,
            first=now.first,
            delivered=now.delivered,
            max_deleted=now.max_deleted,
        )
        return told.ahead_of(self.runs.ahead_ms.get(facts.stream, 0))

    def _dead_letters(self, facts: Sequence[AuditedStream]) -> DataFrame | None:
        frames = []
        for one in facts:
            if self._links[one.stream].call("XLEN", one.keys.dead):
                frames.append(letters_in(self._read("redis_stream", stream=one.stream, key=one.keys.dead)))
        return None if not frames else frames[0] if len(frames) == 1 else _union(frames)

    def _last_drops_ms(self) -> dict[str, int]:
        return {stream: last_drop_ms(link, self._plan.keys(stream)) for stream, link in self._links.items()}

    # ---- second look ---------------------------------------------------------------------------------------------

    def _second_look(self) -> list[AuditFinding]:
        if self._suspects.counts:
            time.sleep(self._plan.settle_s)
        again = {
            (check, one.stream, one.owner): (count, one)
            for check, count, one in judge_members(self._members_if_needed(), self._plan.limits)
        }
        held: dict[tuple[str, str], tuple[int, Sequence[Example]]] = {}
        for (name, stream), suspects in self._suspects.counts.items():
            examples = self._suspects.named[name, stream]
            if name in _OF_MEMBERS:
                still = [again[name, stream, one.owner] for one in examples if (name, stream, one.owner) in again]
                count, examples = sum(number for number, _ in still), [one for _, one in still]
            elif name in _OF_THE_LOG:
                count = suspects
            else:
                examples = self._confirmed(name, stream, examples[:LOOKED_AT])
                # Every example holds: then count all suspects, of which there are too many to ask for each.
                count = suspects if len(examples) == LOOKED_AT else len(examples)
            held[name, stream] = count, examples
        return [
            AuditFinding(CHECKS[name], stream, count, self._suspects.counts[name, stream], tuple(examples[:SHOWN]))
            for (name, stream), (count, examples) in fold(held).items()
            if count
        ]

    def _confirmed(self, name: str, stream: str, examples: Sequence[Example]) -> list[Example]:
        link, keys, limits = self._links[stream], self._plan.keys(stream), self._plan.limits
        held = {
            one for one, look in snapshot.looks(link, keys, examples) if snapshot.still_holds(name, one, look, limits)
        }
        if name == "parked_too_long":
            back, is_known = snapshot.held_back(link, keys, [one for one in examples if one in held], self._plan.marks)
            held -= back
            if held and not is_known:
                self._open.append(
                    f"{stream}: live rules hold tenants back, and which tickets are theirs is not known here"
                    " (USHER_TENANT_FIELD), so what waits for long may be theirs (parked_too_long)"
                )
        return [one for one in examples if one in held]

    # ---- reading -------------------------------------------------------------------------------------------------

    def _read(self, source: str, **options: str) -> DataFrame:
        plan = self._plan
        given = {
            "url": plan.url,
            "stream": ",".join(self._links),
            "group": plan.group,
            "ticket_field": plan.ticket_field,
            **options,
        }
        return self._spark.read.format(source).options(**given).load()

    def _keep(self, frame: DataFrame) -> DataFrame:
        self._kept.append(on_disk(frame))
        return frame

    def _members(self) -> list[GroupMember]:
        found = []
        for stream in self._links:
            with BulkReader(near(self._plan.url, stream)) as reader:
                found += snapshot.members(reader, self._plan.keys(stream))
        return found

    def _members_if_needed(self) -> list[GroupMember]:
        return self._members() if any(name in _OF_MEMBERS for name, _ in self._suspects.counts) else []

    # ---- report --------------------------------------------------------------------------------------------------

    def _report(self, started_ns: int, facts: Sequence[AuditedStream], found: list[AuditFinding]) -> AuditReport:
        runs, pending = self.runs, self.pending
        sentences: list[str] = list(self._open)
        for one in facts:
            sentences += unproven(
                one,
                runs.first_known.get(one.stream),
                runs.skipped_order.get(one.stream, 0),
                runs.before_known.get(one.stream, 0),
            )
            if one.stream in runs.maybe_damaged:
                sentences.append(maybe_damaged(one.stream, runs.maybe_damaged[one.stream]))
            if one.stream in runs.maybe_dropped:
                sentences.append(maybe_dropped(one.stream, runs.maybe_dropped[one.stream]))
        sentences += [
            f"{stream}: of {suspects:,} suspects of {name} the first {LOOKED_AT:,} were looked at again"
            for (name, stream), suspects in self._suspects.counts.items()
            if suspects > LOOKED_AT and name not in (*_OF_THE_LOG, *_OF_MEMBERS)
        ]
        seconds = round((time.time_ns() - started_ns) / 1e9, 3)
        started_ms = started_ns // 1_000_000
        return AuditReport(
            run_name(started_ms),
            started_ms,
            seconds,
            redacted(self._plan.url),
            self._plan.streams,
            self._plan.group,
            tuple(found),
            tuple(sentences),
            _figures(facts, pending, runs)
            | {"reading_seconds": round(self._reading_s, 3), "engine": name_of(self._spark)},
            _plots(pending, runs),
        )


def _union(frames: Sequence[DataFrame]) -> DataFrame:
    whole = frames[0]
    for frame in frames[1:]:
        whole = whole.unionByName(frame)
    return whole


def _figures(
    facts: Sequence[AuditedStream], pending: pending_proof.PendingFigures, runs: run_proof.RunFigures
) -> dict[str, Any]:
    return {
        "entries": sum(one.length for one in facts),
        "pending": pending.pending,
        "settled": pending.settled,
        "tickets_pending": pending.tickets,
        "oldest_age_ms": pending.oldest_age_ms,
        "dead_letters": sum(one.dead_letters for one in facts),
        "executions": runs.executions,
        "unsuccessful": runs.unsuccessful,
        "crashed": runs.crashed,
        "repeated": runs.repeated,
        "succeeded_again": runs.succeeded_again,
        "execution_p50_ms": runs.p50_ms,
        "execution_p99_ms": runs.p99_ms,
        "slowest_recovery_ms": runs.slowest_recovery_ms,
        "run_records": sum(one.run_records for one in facts),
    }


def _plots(pending: pending_proof.PendingFigures, runs: run_proof.RunFigures) -> Mapping[str, Any]:
    return {
        "ages": pending.ages,
        "owners": pending.owners,
        "tickets": pending.top_tickets,
        "recoveries": runs.recoveries,
    }
