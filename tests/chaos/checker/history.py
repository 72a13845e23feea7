"""A history: the records of one run, indexed for the rules."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
#: The end of what has no end.
NEVER = 1 << 62


@dataclass
class Execution:
    """One start of a handler. It lasted from ``start`` to ``end``: its finish, or the death of its process."""

    x: str
    uid: str
    ticket: str
    tok: int | None
    who: str
    mid: str
    start: int
    finish: int | None = None
    ok: bool = False
    end: int = NEVER
    owner: str = ""  # who has the ticket: the process itself, or one that it works for


def position(mid: str) -> tuple[int, int]:
    """A stream id as numbers.

    >>> position("5-10") > position("5-9")
    True
    """
    milliseconds, _, sequence = mid.partition("-")
    return int(milliseconds), int(sequence or 0)


class History:
    """Records by kind, and what follows from them."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.by_kind: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            self.by_kind[record["k"]].append(record)

    @classmethod
    def read(cls, text: str) -> History:
        """From JSON lines. The last line may be cut off: its writer was killed."""
        lines = text.split("\n")
        records = []
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                records.append(json.loads(line))
            except ValueError:
                if number < len(lines) - 1:
                    raise ValueError(f"line {number} of the history cannot be read: {line[:80]!r}") from None
        return cls(records)

    def of(self, kind: str) -> list[Record]:
        return self.by_kind.get(kind, [])

    @functools.cached_property
    def terms(self) -> Record:
        """What holds in this run, with the defaults of a run without anything special."""
        said = {name: value for record in self.of("terms") for name, value in record.items()}
        return {"strict": False, "tokens": True, "max_attempts": 5, "drain_ns": NEVER, "must": []} | said

    @functools.cached_property
    def final(self) -> Record:
        return self.of("final")[-1] if self.of("final") else {}

    @functools.cached_property
    def sends(self) -> dict[str, Record]:
        """By uid; of several sends of one uid the surest answer counts (ok, then info)."""
        order = {"ok": 0, "info": 1, "fail": 2}
        found: dict[str, Record] = {}
        for record in self.of("send"):
            known = found.get(record["uid"])
            if known is None or order[record["r"]] < order[known["r"]]:
                found[record["uid"]] = record
        return found

    @functools.cached_property
    def positions(self) -> dict[str, tuple[int, int]]:
        """Stream position of the first copy of each uid."""
        found: dict[str, tuple[int, int]] = {}
        for record in self.of("stream"):
            at = position(record["mid"])
            if record["uid"] not in found or at < found[record["uid"]]:
                found[record["uid"]] = at
        return found

    @functools.cached_property
    def arrivals(self) -> dict[str, int]:
        """When the tail saw the first copy of each uid."""
        found: dict[str, int] = {}
        for record in self.of("stream"):
            found[record["uid"]] = min(record["t"], found.get(record["uid"], NEVER))
        return found

    @functools.cached_property
    def deaths(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for record in self.of("die"):
            found[record["who"]] = min(record["t"], found.get(record["who"], NEVER))
        return found

    @functools.cached_property
    def executions(self) -> list[Execution]:
        """In the order of their start."""
        found: dict[str, Execution] = {}
        for r in self.of("start"):
            found[r["x"]] = run = Execution(r["x"], r["uid"], r["ticket"], r["tok"], r["who"], r.get("mid", ""), r["t"])
            run.owner = r.get("owner", r["who"])
        for r in self.of("finish"):
            execution = found.get(r["x"])
            if execution is not None:
                execution.finish, execution.ok = r["t"], bool(r["ok"])
        for execution in found.values():
            died = self.deaths.get(execution.who, NEVER)
            execution.end = execution.finish if execution.finish is not None else max(execution.start, died)
        return sorted(found.values(), key=lambda e: (e.start, e.x))

    @functools.cached_property
    def by_ticket(self) -> dict[str, list[Execution]]:
        found: dict[str, list[Execution]] = defaultdict(list)
        for execution in self.executions:
            found[execution.ticket].append(execution)
        return found

    @functools.cached_property
    def starts_of(self) -> dict[str, list[Execution]]:
        """Executions by uid."""
        found: dict[str, list[Execution]] = defaultdict(list)
        for execution in self.executions:
            found[execution.uid].append(execution)
        return found

    @functools.cached_property
    def commits(self) -> list[Record]:
        """In commit order."""
        return sorted(self.of("commit"), key=lambda record: record["n"])

    @functools.cached_property
    def commits_of(self) -> dict[str, list[Record]]:
        """In commit order, by ticket."""
        found: dict[str, list[Record]] = defaultdict(list)
        for record in self.commits:
            found[record["ticket"]].append(record)
        return found

    @functools.cached_property
    def uids_of(self) -> dict[str, list[str]]:
        """Messages in the stream by ticket, in the order of their first copies."""
        found: dict[str, list[str]] = defaultdict(list)
        for uid, _ in sorted(self.positions.items(), key=lambda item: item[1]):
            if uid in self.sends:
                found[self.sends[uid]["ticket"]].append(uid)
        return found

    @functools.cached_property
    def overlaps(self) -> list[tuple[Execution, Execution]]:
        """Pairs of executions of one ticket that ran at the same time, the earlier start first."""
        found = []
        for runs in self.by_ticket.values():
            active: list[Execution] = []
            for late in runs:
                active = [early for early in active if early.end > late.start]
                found += [(early, late) for early in active]
                active.append(late)
        return found

    @functools.cached_property
    def committed(self) -> set[str]:
        return {record["uid"] for record in self.commits}

    @functools.cached_property
    def dead(self) -> dict[str, Record]:
        """Dead letters by uid."""
        return {record["uid"]: record for record in self.of("dlq")}

    @functools.cached_property
    def excused(self) -> set[str]:
        """Messages that an injected loss or deletion took."""
        return {uid for kind in ("lost", "deleted") for record in self.of(kind) for uid in record["uids"]}

    @functools.cached_property
    def _pauses(self) -> dict[str, list[tuple[int, int]]]:
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for r in self.of("stall") + [r for r in self.of("fault") if r["kind"] in ("pause", "lease_deleted")]:
            found[r["who"]].append((r["t0"], r["t1"]))
        return found

    def frozen(self, who: str, since: int, until: int) -> bool:
        """Whether the process was stopped, not scheduled, or robbed of its lease without knowing, at some moment
        between the two."""
        return any(t0 <= until and t1 >= since for t0, t1 in self._pauses.get(who, ()))
