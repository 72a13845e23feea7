"""The demo handler's records, and the judge of a run: a pure function of these and of the sent messages.

The handler knows nothing of leases, fences or acknowledgements and does not report: it writes a line when it starts and
a line when it ends, to a file of its own process. Neither it nor ``judge`` looks at Usher's own state, so the verdict
cannot be fooled by the system that it judges.

A line is one ``write`` to a file opened with O_APPEND: once it returned, the line is with the kernel and survives
``kill -9`` of the process. Nothing is buffered, because a buffer is exactly what a killed process loses.

============================================  =======================================
``S serial id fence attempt ns ticket``       execution ``serial`` of this process starts
``E serial ns``                               it has ended
============================================  =======================================

``ns`` is CLOCK_MONOTONIC, which all processes of a machine share. The file's name is ``<consumer>.<pid>.records``.
The judge counts, per ticket, with its executions in the order of their start:

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

import functools
import itertools
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from usher.common.base.log import event

if TYPE_CHECKING:
    from usher.consumer.handlers.message import Message

SUFFIX = ".records"

#: Environment of the demo's consumers; `usher demo` sets it.
FOLDER_VARIABLE = "USHER_DEMO_FOLDER"
WORK_VARIABLE = "USHER_DEMO_WORK_MS"


@dataclass(slots=True)
class Execution:
    """An execution of the handler on a message. Times in nanoseconds of CLOCK_MONOTONIC; ``end_ns`` None: it has not
    ended."""

    consumer: str
    pid: int
    stream_id: str
    ticket: str
    fence: int
    attempt: int
    start_ns: int
    end_ns: int | None = None


_serials = itertools.count()  # next() on it is one step of the interpreter


@functools.cache
def _file_of(pid: int) -> int:
    """Open the file of this process. A forked child has its parent's serials, and a file of its own."""
    path = Path(os.environ[FOLDER_VARIABLE]) / f"{os.environ['USHER_CONSUMER_NAME']}.{pid}{SUFFIX}"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def started(message: Message) -> int:
    """Write down that the message starts; return the serial of its execution."""
    start_ns, serial = time.monotonic_ns(), next(_serials)
    ticket = message.ticket_id.encode("unicode_escape").decode("ascii")
    line = f"S {serial} {message.id} {message.fence} {message.attempt} {start_ns} {ticket}\n"
    os.write(_file_of(os.getpid()), line.encode("ascii"))
    return serial


def record(message: Message) -> None:
    """Write down that the message starts, work for a moment, write down that it ended."""
    serial = started(message)
    time.sleep(float(os.environ.get(WORK_VARIABLE, "1")) / 1000)
    os.write(_file_of(os.getpid()), f"E {serial} {time.monotonic_ns()}\n".encode("ascii"))


def executions(folder: Path) -> list[Execution]:
    """Read the executions of all processes so far. A line that is not whole is still being written."""
    found: list[Execution] = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        consumer, _, pid = path.name.removesuffix(SUFFIX).rpartition(".")
        own: dict[str, Execution] = {}
        for line in path.read_text("ascii").split("\n")[:-1]:
            kind, serial, rest = line.split(" ", 2)
            if kind == "E":
                own[serial].end_ns = int(rest)
                continue
            stream_id, fence, attempt, start_ns, ticket = rest.split(" ", 4)
            known = ticket.encode("ascii").decode("unicode_escape")
            own[serial] = Execution(consumer, int(pid), stream_id, known, int(fence), int(attempt), int(start_ns))
        found += own.values()
    return found


def count_ended(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\nE ") for path in folder.glob(f"*{SUFFIX}"))


_LONGEST_SHOWN = 60
_MOST_SHOWN = 6


def show(message: Message) -> None:
    facts: dict[str, Any] = {
        "ticket": message.ticket_id,
        "id": message.id,
        "fence": message.fence,
        "attempt": message.attempt,
    }
    for name, value in list(message.fields.items())[:_MOST_SHOWN]:
        facts[f"field_{name}"] = value if len(value) <= _LONGEST_SHOWN else value[:_LONGEST_SHOWN] + "..."
    event("message_shown", **facts)


#: Examples kept per verdict; the counts are complete.
_MOST_EXAMPLES = 10
_NEVER_NS = 1 << 63


#: Problem of a run, and its text.
_Finding = tuple[str, str]
_PROBLEMS = ("lost", "order_violations", "overlaps", "dead_letters", "unexpected")


def judge(
    sent: Sequence[tuple[str, str]],
    executions: Iterable[Execution],
    *,
    seconds: float,
    dead: Mapping[str, str] | None = None,
    killed_ns: Mapping[int, int] | None = None,
    unacknowledged: int = 0,
) -> dict[str, Any]:
    """Judge a run.

    ``sent``: (stream id, ticket) in the order of the stream. ``dead``: stream id and reason of each dead letter.
    ``killed_ns``: times of deliberate kills (CLOCK_MONOTONIC), by process id; repeats are then allowed.
    ``unacknowledged``: entries still pending at the end. Of the verdict, ``consumers`` are messages that each was the
    first to finish, and tickets of which it ran a message; ``examples`` tell the first few problems.
    """
    killed_ns, dead = killed_ns or {}, dead or {}
    place = {stream_id: index for index, (stream_id, _) in enumerate(sent)}
    found: list[_Finding] = []
    ours: list[Execution] = []
    by_ticket: dict[str, list[Execution]] = defaultdict(list)
    for run in sorted(executions, key=lambda run: (run.start_ns, run.end_ns or _NEVER_NS)):
        if run.stream_id not in place:
            found.append(("unexpected", f"{run.stream_id} was handled by {run.consumer} but never sent"))
            continue
        ours.append(run)
        ticket = sent[place[run.stream_id]][1]
        if run.ticket != ticket:
            told = f"{run.stream_id} was sent for ticket {ticket!r} and handled as {run.ticket!r}"
            found.append(("order_violations", told))
        by_ticket[ticket].append(run)
    for ticket, history in by_ticket.items():
        found += _out_of_order(ticket, history, place)
        found += _overlapping(ticket, history, killed_ns)
    found += [("dead_letters", f"{one} became a dead letter: {reason}") for one, reason in dead.items()]
    finished = {run.stream_id for run in ours if run.end_ns is not None}
    over = finished | dead.keys()
    found += [("lost", f"{one} of ticket {ticket!r} was lost") for one, ticket in sent if one not in over]
    counts, duplicates = Counter(kind for kind, _ in found), len(ours) - len({run.stream_id for run in ours})
    is_clean = not found and not unacknowledged and len(finished) == len(sent)
    return {
        "sent": len(sent),
        "handled": len(finished),
        "tickets": len({ticket for _, ticket in sent}),
        **{kind: counts[kind] for kind in _PROBLEMS},
        "duplicates": duplicates,
        "unacknowledged": unacknowledged,
        "seconds": round(seconds, 3),
        "messages_per_second": round(len(finished) / seconds, 1) if seconds > 0 else 0.0,
        "consumers": _shares(ours),
        "examples": [text for _, text in found[:_MOST_EXAMPLES]],
        "clean": is_clean and (bool(killed_ns) or not duplicates),
    }


def _out_of_order(ticket: str, history: Sequence[Execution], place: Mapping[str, int]) -> Iterator[_Finding]:
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
            yield "order_violations", f"{run.stream_id} of ticket {ticket!r} on {run.consumer} {wrong}"
        started.add(run.stream_id)
        furthest, previous = max(furthest, at), at
        highest_fence, fence_before = max(highest_fence, run.fence), run.fence


def _overlapping(ticket: str, history: Sequence[Execution], killed_ns: Mapping[int, int]) -> Iterator[_Finding]:
    busy_until, busy_with = -1, ""
    for run in history:
        if run.start_ns < busy_until:
            told = f"{run.stream_id} of ticket {ticket!r} on {run.consumer} started while {busy_with} was running"
            yield "overlaps", told
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
