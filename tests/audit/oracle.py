"""The audit once more: plain Python, one process, whole replies in memory, and no code of the Spark job. What it finds
on a small system is what the job must find.

It looks once and asks nobody a second time: only for systems that stand still.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from usher.common.protocol.keys import Keys
from usher.common.protocol.stream_id import rank
from usher.common.redis.client import Link
from usher.common.redis.replies import pairs
from usher.master.audit.findings import AuditThresholds

Finding = tuple[str, str, str]  # (check, stream, entry id or ticket or owner)
_ENDED = ("done", "gave_up")


class Run(NamedTuple):
    noted_ms: int
    ticket: str
    id: str
    fence: int
    start: int
    end: int
    consumer: str
    outcome: str

    @property
    def ended(self) -> int:
        return max(self.end, self.start)

    @property
    def place(self) -> int:
        return rank(self.id.encode())


def _noted_by_turns(late: Run, run: Run) -> bool:
    """Return whether one owner did the two one after the other by its clock, and noted them the other way round: then
    its clock was set back."""
    is_own = run.fence == late.fence and run.outcome == late.outcome == "done"
    return is_own and run.end <= late.start and run.noted_ms > late.noted_ms


def look(link: Link, streams: list[str], group: str, limits: AuditThresholds, cap: int) -> set[Finding]:
    """Every finding, by what it is about."""
    found: set[Finding] = set()
    for stream in streams:
        found |= {(check, stream, about) for check, about in _Oracle(link, Keys(stream, group), limits, cap).findings()}
    return found


class _Oracle:
    def __init__(self, link: Link, keys: Keys, limits: AuditThresholds, cap: int) -> None:
        self._link, self._keys, self._limits, self._cap = link, keys, limits, cap
        self._entries = {i.decode(): pairs(fields) for i, fields in link.call("XRANGE", keys.stream, "-", "+")}
        self._pending = {
            i.decode(): (o.decode(), idle, n)
            for i, o, idle, n in link.call("XPENDING", keys.stream, keys.group, "-", "+", 1_000_000)
        }
        self._index = {
            ticket.decode(): value.decode() for ticket, value in pairs(link.call("HGETALL", keys.tickets)).items()
        }
        self._leases = {
            name: bool(link.call("EXISTS", keys.lease(name)))
            for name in {owner for owner, _, _ in self._pending.values()}
        }
        self._held_back = [
            json.loads(stored.split(b" ", 2)[2])["value"] for stored in pairs(link.call("HGETALL", keys.rules)).values()
        ]
        self._repeats = [
            (rank(at) >> 64, *map(rank, pairs(fields)[b"repeats"].split(b" ")))
            for at, fields in link.call("XRANGE", keys.losses, "-", "+")
        ]
        self._letters = [
            (pairs(fields).get(b"usher-id", b"").decode(), rank(at) >> 64)
            for at, fields in link.call("XRANGE", keys.dead, "-", "+")
        ]
        self._bad_records: list[str] = []
        self._records = 0
        self._runs = list(self._read_runs())

    def findings(self) -> Iterator[tuple[str, str]]:
        yield from self._of_entries()
        yield from self._of_tickets()
        yield from self._of_members()
        yield from self._of_attempts()
        yield from (("run_unreadable", record) for record in self._bad_records)
        by_consumer: dict[str, list[Run]] = defaultdict(list)
        for run in self._runs:
            by_consumer[run.consumer].append(run)
        self._clocks = {name: self._clock(runs) for name, runs in by_consumer.items()}
        yield from (("clock_wrong", name) for name, (_, _, is_wrong) in self._clocks.items() if is_wrong)
        by_ticket: dict[str, list[Run]] = defaultdict(list)
        for run in self._runs:
            by_ticket[run.ticket].append(run)
        for ticket, runs in by_ticket.items():
            if ticket:
                yield from self._of_order(sorted(runs, key=lambda run: (run.fence, run.start, run.ended, run.place)))
        yield from self._of_losses()
        counters = pairs(self._link.call("HGETALL", self._keys.counters))
        if int(counters.get(b"unread_cut", 0)) and time.time() - int(counters[b"unread_cut_s"]) < 86_400:
            yield "cut_unread", ""
        yield from self._of_effects()

    def _ticket(self, entry_id: str) -> str:
        return self._entries.get(entry_id, {}).get(b"ticket_id", b"").decode()

    def _indexed(self) -> dict[str, tuple[str, str]]:
        """Id -> (owner, ticket) of all readable records."""
        found = {}
        for ticket, record in self._index.items():
            owner, *rest = record.split()
            if len(rest) > 1:
                found |= dict.fromkeys(rest[1:], (owner, ticket))
        return found

    def _of_entries(self) -> Iterator[tuple[str, str]]:
        indexed = self._indexed()
        yield from (("index_unreadable", ticket) for ticket, record in self._index.items() if len(record.split()) < 3)
        yield from (("index_without_pending", entry_id) for entry_id in indexed.keys() - self._pending.keys())
        for entry_id, (owner, idle, deliveries) in self._pending.items():
            recorded = indexed.get(entry_id, ("", ""))[0]
            runs = ":" in owner
            if entry_id not in self._entries:
                yield "body_gone", entry_id
            elif runs and not recorded:
                yield "pending_without_index", entry_id
            if recorded:
                allowed = {"returned": {"master"}, "halted": {"halted", "master"}}.get(recorded, {recorded})
                if owner not in allowed and self._ticket(entry_id) not in self._owned_twice():
                    yield "owners_differ", entry_id
            if runs and self._leases[owner] and idle > self._limits.owner_idle_ms:
                yield "idle_too_long", entry_id
            is_parked = owner == "master" and self._ticket(entry_id) not in {*self._index, *self._held_back}
            if is_parked and idle > self._limits.parked_ms:
                yield "parked_too_long", entry_id
            if deliveries > self._limits.deliveries:
                yield "delivered_often", entry_id

    def _owned_twice(self) -> set[str]:
        owners: dict[str, set[str]] = defaultdict(set)
        for entry_id, (owner, _, _) in self._pending.items():
            if ":" in owner and self._ticket(entry_id):
                owners[self._ticket(entry_id)].add(owner)
        return {ticket for ticket, who in owners.items() if len(who) > 1}

    def _of_tickets(self) -> Iterator[tuple[str, str]]:
        yield from (("ticket_owned_twice", ticket) for ticket in self._owned_twice())

    def _of_members(self) -> Iterator[tuple[str, str]]:
        held: dict[str, list[int]] = defaultdict(list)
        for _, (owner, idle, _) in sorted(self._pending.items(), key=lambda item: rank(item[0].encode())):
            held[owner].append(idle)
        names = set()
        for row in map(pairs, self._link.call("XINFO", "CONSUMERS", self._keys.stream, self._keys.group)):
            name = row[b"name"].decode()
            names.add(name)
            if name in ("master", "halted") or self._link.call("EXISTS", self._keys.lease(name)):
                continue
            if ":" not in name:
                if held[name]:
                    yield "stranger_owns", name
            elif held[name] and held[name][0] > self._limits.owner_idle_ms:
                yield "owner_dead", name
            elif not held[name] and row[b"idle"] > self._limits.reaped_ms:
                yield "consumer_leaked", name
        for key in self._link.call("KEYS", "*:inbox:*"):
            if (
                key.decode().startswith(self._keys.inbox(""))
                and key.decode().removeprefix(self._keys.inbox("")) not in names
            ):
                yield "key_leaked", key.decode().removeprefix(self._keys.inbox(""))

    def _of_attempts(self) -> Iterator[tuple[str, str]]:
        for entry_id, count in pairs(self._link.call("HGETALL", self._keys.attempts)).items():
            if entry_id.decode() not in self._pending:
                yield "attempts_leaked", entry_id.decode()
            elif int(count) > self._limits.attempts:
                yield "attempts_many", entry_id.decode()

    def _read_runs(self) -> Iterator[Run]:
        records = self._link.call("XRANGE", self._keys.runs, "-", "+")
        self._records = len(records)
        self._floor_ms = -1 if len(records) < self._cap else rank(records[0][0]) >> 64
        for record, fields in records:
            try:
                told = json.loads(fields[1])
                outcomes = told.get("outcomes") or ["done"] * len(told["ids"])
                consumers = [told["consumer"]] * len(told["ids"])
                noted = [rank(record) >> 64] * len(told["ids"])
                columns = (
                    noted,
                    told["tickets"],
                    told["ids"],
                    told["fences"],
                    told["start_us"],
                    told["end_us"],
                    consumers,
                    outcomes,
                )
                yield from itertools.starmap(Run, zip(*columns, strict=True))
            except (ValueError, KeyError):
                self._bad_records.append(record.decode())

    def _of_order(self, runs: list[Run]) -> Iterator[tuple[str, str]]:
        """Every pair of one ticket, in the order of (fence, start): slow and plain."""
        for n, late in enumerate(runs):
            earlier = runs[:n]
            if late.end and late.end < late.start:
                yield "times_impossible", late.id
            own = [run for run in earlier if run.fence == late.fence]
            former = [run for run in earlier if run.fence < late.fence and run.consumer == late.consumer]
            at_once = [run for run in own if (run.start, run.ended) != (late.start, late.ended)]
            if any(run.ended > late.start for run in at_once + former):
                yield "overlap", late.id
            if own and own[-1].consumer != late.consumer:
                yield "fence_shared", late.id
            lower = [run for run in earlier if run.fence < late.fence]
            latest_us = late.start - self._clocks[late.consumer][0]
            if any(run.start - self._clocks[run.consumer][1] > latest_us for run in lower):
                yield "fence_fell", late.id
            elif any(
                run.consumer != late.consumer and run.ended - self._clocks[run.consumer][1] > latest_us for run in lower
            ):
                yield "owners_overlap", late.id
        judged = set()
        for n, late in enumerate(runs):
            if late.id not in judged and (ahead := self._ahead(late, runs[:n])) and not self._had_ended(late, runs):
                judged.add(late.id)
                if late.place >> 64 > self._floor_ms:
                    by_clock = all(_noted_by_turns(late, run) for run in (*ahead, *self._ahead(late, runs[n + 1 :])))
                    yield "times_impossible" if by_clock else "out_of_order", late.id

    def _ahead(self, late: Run, others: list[Run]) -> list[Run]:
        """Later messages that had begun, for all that is known: a former owner's failures may not be."""
        known = [run for run in others if run.fence == late.fence and run.start <= late.start]
        known += [run for run in others if run.fence < late.fence and run.outcome == "done"]
        return [run for run in known if run.place > late.place]

    def _had_ended(self, late: Run, runs: list[Run]) -> bool:
        ends = [(run.fence, run.start) for run in runs if run.id == late.id and run.outcome in _ENDED]
        ends += [((ms + 1) * 1024, 0) for entry_id, ms in self._letters if entry_id == late.id]
        return any(end < (late.fence, late.start) for end in ends)

    def _clock(self, runs: list[Run]) -> tuple[int, int, bool]:
        """Least and most of what a consumer's clock is ahead of Redis', and whether it is wrong: bounds in whole
        milliseconds, of which each is true of one moment. If they contradict one another the clock was set: then by
        whole halves of the tolerance."""
        half = self._limits.clocks_ms * 500
        starts = [run.start - run.fence // 1024 * 1000 for run in runs if run.fence // 1024 <= run.noted_ms]
        ends = [run.end - (run.noted_ms + 1) * 1000 for run in runs if run.end]
        most = math.ceil(min(starts) / 1000) * 1000 if starts else 1 << 61
        least = math.floor(max(ends) / 1000) * 1000 if ends else -(1 << 61)
        is_wrong = least > half or most < -half
        if least > most and 10 * (least - most) < half:  # it drifted
            return most - (least - most), least + (least - most), is_wrong
        if least > most:
            return math.floor(min(starts) / half) * half - half, math.ceil(max(ends) / half) * half + half, is_wrong
        if least > half:
            return least, min(most, least + 2 * half), True
        if most < -half:
            return max(least, most - 2 * half), most, True
        return max(least, -half), min(most, half), False

    def _of_effects(self) -> Iterator[tuple[str, str]]:
        """Look at every pair of executions of a ticket."""
        by_ticket: dict[str, list[Run]] = defaultdict(list)
        for run in self._runs:
            by_ticket[run.ticket].append(run)
        for runs in by_ticket.values():
            yield from self._of_effects_of(runs)

    def _of_effects_of(self, runs: list[Run]) -> Iterator[tuple[str, str]]:
        done = [run for run in runs if run.outcome == "done"]
        for other in done:
            formers = [
                one
                for one in done
                if one.id == other.id
                and (one.fence, one.start, one.noted_ms) < (other.fence, other.start, other.noted_ms)
                and (one.fence == other.fence or one.noted_ms < other.noted_ms)
            ]
            if formers:
                yield (
                    "repeat_declared" if all(self._is_declared(one, other) for one in formers) else "effect_twice",
                    other.id,
                )
        for one, other in itertools.product(done, runs):
            was_handed = one.id == other.id and other.fence // 1024 < one.noted_ms
            was_noted = one.ticket and other.noted_ms < one.noted_ms
            again = any(run.id == one.id and run.fence > one.fence for run in done)
            if one.fence < other.fence and (was_handed or was_noted) and not again:
                yield "stale_counted", one.id

    def _is_declared(self, one: Run, other: Run) -> bool:
        begun_ms = min(one.noted_ms, one.fence / 1024)
        return any(first <= one.place <= last and begun_ms <= ms <= other.noted_ms for ms, first, last in self._repeats)

    def _of_losses(self) -> Iterator[tuple[str, str]]:
        letters = {entry_id for entry_id, _ in self._letters}
        yield from (("dead_and_done", run.id) for run in self._runs if run.outcome == "done" and run.id in letters)
        if not self._records:
            return
        over = {run.id for run in self._runs if run.outcome in _ENDED} | letters
        known = min((rank(i.encode()) for i in {*(run.id for run in self._runs), *self._pending}), default=1 << 200)
        group = next(
            row
            for row in map(pairs, self._link.call("XINFO", "GROUPS", self._keys.stream))
            if row[b"name"] == self._keys.group.encode()
        )
        for entry_id in self._entries:
            place = rank(entry_id.encode())
            read = place <= rank(group[b"last-delivered-id"])
            if (
                read
                and place >> 64 > known >> 64
                and place >> 64 > self._floor_ms
                and entry_id not in over
                and entry_id not in self._pending
            ):
                yield "lost", entry_id
            ticket = self._ticket(entry_id)
            behind = any(
                run.ticket == ticket and run.outcome == "done" and rank(run.id.encode()) > place for run in self._runs
            )
            if (
                entry_id in self._pending
                and ticket
                and behind
                and entry_id not in over
                and place >> 64 > self._floor_ms
            ):
                yield "overtaken", entry_id
