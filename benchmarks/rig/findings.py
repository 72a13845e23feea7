"""Judge the notes of the handlers of a peer: did it lose, double, reorder or overlap messages of a ticket."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Note(NamedTuple):
    """An execution. Times are CLOCK_MONOTONIC, one for all processes of a machine."""

    ticket: int
    number: int  # in its ticket, from 1
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class BenchVerdict:
    """Counts of messages. A message is out of order when a later one of its ticket had started before it, and overlaps
    when another one of its ticket had started and not ended. Lost means nothing in a run that was cut short."""

    handled: int
    lost: int
    doubled: int
    out_of_order: int
    overlapping: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.handled / self.seconds if self.seconds else 0.0


def judge(notes: Iterable[Note], tickets: Iterable[int]) -> BenchVerdict:
    """Judge the notes. ``tickets``: that of each sent message. The clock runs from the start of the first handler to
    the end of the last one."""
    by_ticket: dict[int, list[Note]] = defaultdict(list)
    for note in notes:
        by_ticket[note.ticket].append(note)
    counts: Counter[str] = Counter()
    for run in by_ticket.values():
        counts += _look_at(sorted(run, key=lambda note: (note.start_ns, note.end_ns)))
    everything = [note for run in by_ticket.values() for note in run]
    first = min((note.start_ns for note in everything), default=0)
    last = max((note.end_ns for note in everything), default=0)
    handled = counts["handled"]
    sent = Counter(tickets)
    known = sum(
        len({note.number for note in run if 0 < note.number <= sent[ticket]}) for ticket, run in by_ticket.items()
    )
    return BenchVerdict(
        handled=handled,
        lost=sent.total() - known,
        doubled=counts["doubled"],
        out_of_order=counts["out of order"],
        overlapping=counts["overlapping"],
        seconds=(last - first) / 1e9,
    )


def _look_at(run: list[Note]) -> Counter[str]:
    """Count the faults in one ticket's executions, by their starts."""
    seen: set[int] = set()
    latest = end_ns = 0
    found: Counter[str] = Counter()
    for note in run:
        if note.start_ns < end_ns:
            found["overlapping"] += 1
        end_ns = max(end_ns, note.end_ns)
        if note.number in seen:
            found["doubled"] += 1
            continue
        seen.add(note.number)
        if note.number < latest:
            found["out of order"] += 1
        latest = max(latest, note.number)
    found["handled"] = len(seen)
    return found
