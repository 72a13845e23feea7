"""The judge of a demo run: a pure function of the sent messages and the handlers' records.

It counts, per ticket, with its executions in the order of their start:

===============  ======================================================================================================
order violation  the first start of a message after the first start of a later one; under one fence, a repeat of a
                 message older than the one that started before it (a repeat after a hand-over may begin further back:
                 at least once, in order); a start under a lower fence than an earlier one; a message under another
                 ticket's name
overlap          an execution that starts before an earlier one of its ticket ended. An execution that was cut off by a
                 kill ended then; one that simply never ended overlaps all later ones
duplicate        every execution of a message after its first one
lost             sent, never handled to its end, and not among the dead letters
unexpected       an execution of a message that was never sent
===============  ======================================================================================================
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from usher.deploy.demo.handlers import Execution

#: Examples kept per verdict; the counts are complete.
_MOST_EXAMPLES = 10
_NEVER_NS = 1 << 63


@dataclass(frozen=True)
class DemoVerdict:
    """The outcome of a demo run. ``consumers``: messages that each was the first to finish, and tickets of which it ran
    a message; ``examples`` are sentences about the first few problems."""

    sent: int
    handled: int
    tickets: int
    lost: int
    duplicates: int
    order_violations: int
    overlaps: int
    dead_letters: int
    unexpected: int
    unacknowledged: int
    seconds: float
    consumers: list[dict[str, Any]]
    repeats_allowed: bool
    examples: list[str]

    @property
    def messages_per_second(self) -> float:
        return round(self.handled / self.seconds, 1) if self.seconds > 0 else 0.0

    @property
    def clean(self) -> bool:
        """Return True when the promise held. Repeats are part of it when a consumer was killed, and only then."""
        broken = self.lost or self.order_violations or self.overlaps or self.dead_letters or self.unexpected
        is_done = not broken and not self.unacknowledged and self.handled == self.sent
        return is_done and (self.repeats_allowed or self.duplicates == 0)

    def document(self) -> dict[str, Any]:
        document = asdict(self) | {"messages_per_second": self.messages_per_second, "seconds": round(self.seconds, 3)}
        document.pop("repeats_allowed")
        return document | {"clean": self.clean}


class _Findings:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: list[str] = []

    def note(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        if len(self.examples) < _MOST_EXAMPLES:
            self.examples.append(text)


def judge(
    sent: Sequence[tuple[str, str]],
    executions: Iterable[Execution],
    *,
    seconds: float,
    dead: Mapping[str, str] | None = None,
    killed_ns: Mapping[int, int] | None = None,
    unacknowledged: int = 0,
) -> DemoVerdict:
    """Judge a run.

    ``sent``: (stream id, ticket) in the order of the stream. ``dead``: stream id and reason of each dead letter.
    ``killed_ns``: times of deliberate kills (CLOCK_MONOTONIC), by process id.
    ``unacknowledged``: entries still pending at the end.
    """
    killed_ns, dead = killed_ns or {}, dead or {}
    place = {stream_id: index for index, (stream_id, _) in enumerate(sent)}
    found = _Findings()
    ours: list[Execution] = []
    by_ticket: dict[str, list[Execution]] = defaultdict(list)
    for run in sorted(executions, key=lambda run: (run.start_ns, run.end_ns or _NEVER_NS)):
        if run.stream_id not in place:
            found.note("unexpected", f"{run.stream_id} was handled by {run.consumer} but never sent")
            continue
        ours.append(run)
        ticket = sent[place[run.stream_id]][1]
        if run.ticket != ticket:
            told = f"{run.stream_id} was sent for ticket {ticket!r} and handled as {run.ticket!r}"
            found.note("order_violations", told)
        by_ticket[ticket].append(run)
    for ticket, history in by_ticket.items():
        _judge_order(ticket, history, place, found)
        _judge_overlaps(ticket, history, killed_ns, found)
    for stream_id, reason in dead.items():
        found.note("dead_letters", f"{stream_id} became a dead letter: {reason}")
    finished = {run.stream_id for run in ours if run.end_ns is not None}
    for stream_id, ticket in sent:
        if stream_id not in finished and stream_id not in dead:
            found.note("lost", f"{stream_id} of ticket {ticket!r} was lost")
    return DemoVerdict(
        sent=len(sent),
        handled=len(finished),
        tickets=len({ticket for _, ticket in sent}),
        **{kind: found.counts[kind] for kind in ("lost", "order_violations", "overlaps", "dead_letters", "unexpected")},
        duplicates=len(ours) - len({run.stream_id for run in ours}),
        unacknowledged=unacknowledged,
        seconds=seconds,
        consumers=_shares(ours),
        repeats_allowed=bool(killed_ns),
        examples=found.examples,
    )


def _judge_order(ticket: str, history: Sequence[Execution], place: Mapping[str, int], found: _Findings) -> None:
    started: set[str] = set()
    furthest, previous, highest_fence, fence_before = -1, -1, -1, -1
    for run in history:
        at = place[run.stream_id]
        wrong = ""
        if run.stream_id not in started and at < furthest:
            wrong = "started for the first time after a later message of its ticket"
        elif run.stream_id in started and run.fence == fence_before and at < previous:
            wrong = "was repeated after a later message under the same fencing token"
        elif run.fence < highest_fence:
            wrong = f"started under fencing token {run.fence} when {highest_fence} had been there"
        if wrong:
            found.note("order_violations", f"{run.stream_id} of ticket {ticket!r} on {run.consumer} {wrong}")
        started.add(run.stream_id)
        furthest, previous = max(furthest, at), at
        highest_fence, fence_before = max(highest_fence, run.fence), run.fence


def _judge_overlaps(ticket: str, history: Sequence[Execution], killed_ns: Mapping[int, int], found: _Findings) -> None:
    busy_until, busy_with = -1, ""
    for run in history:
        if run.start_ns < busy_until:
            told = f"{run.stream_id} of ticket {ticket!r} on {run.consumer} started while {busy_with} was running"
            found.note("overlaps", told)
        end_ns = run.end_ns if run.end_ns is not None else max(killed_ns.get(run.pid, _NEVER_NS), run.start_ns)
        if end_ns > busy_until:
            busy_until, busy_with = end_ns, f"{run.stream_id} on {run.consumer}"


def _shares(runs: Iterable[Execution]) -> list[dict[str, Any]]:
    """Return the consumers' shares. A message counts for the consumer that finished it first, so that the sum is
    ``handled``."""
    tickets: dict[str, set[str]] = defaultdict(set)
    first_end: dict[str, tuple[int, str]] = {}
    for run in runs:
        tickets[run.consumer].add(run.ticket)
        if run.end_ns is not None:
            first_end[run.stream_id] = min(first_end.get(run.stream_id, (_NEVER_NS, "")), (run.end_ns, run.consumer))
    handled = Counter(consumer for _, consumer in first_end.values())
    return [{"name": name, "handled": handled[name], "tickets": len(tickets[name])} for name in sorted(tickets)]
