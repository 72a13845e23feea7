"""Trim decisions: what may be cut off the beginning of a stream, and why. Pure: facts in, a named decision out.

An entry goes only when nobody needs it: no group (neither unread nor pending, nor what it would read again if it were
lost now), no log consumer (its checkpoint's own entry is kept, as the proof that nothing behind it was cut), and, if so
asked, only archived entries. A reader that is lost stops everything until somebody has looked: a group is made again by
its readers, a checkpoint is reset, or it is forgotten. What is young, or not archived yet, is kept beside that as a
wish: it gives way when Redis has little memory left.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from usher.common.base.text import span
from usher.common.doctor.judgements import MemoryUse
from usher.common.protocol.stream_id import ZERO, Span, milliseconds, rank

#: What is kept for a reader so much longer than is wished is told.
_LONG_MS = 3_600_000


class RetentionFacts(NamedTuple):
    """A stream and all its readers. ``groups``: name, the last id that it was given, and the lowest one that is
    pending. ``checkpoints``: of log consumers, name, id (None: the note cannot be read), and when it was noted.
    ``archived`` None: there is no archive. ``saved``: the lowest id that a group would read again if it were lost now,
    of all groups whose readers save it, including groups that are gone."""

    span: Span | None
    groups: Sequence[tuple[str, bytes, bytes | None]]
    checkpoints: Sequence[tuple[str, bytes | None, int]]
    archived: bytes | None
    saved: Sequence[tuple[str, bytes]] = ()


class RetentionRow(NamedTuple):
    """A line of the table: a reader, the lowest id that is kept for it, and why."""

    kind: str
    name: str
    keeps_from: bytes
    why: str


class Cut(NamedTuple):
    """Decision to cut everything below ``floor``; ``because``: the reader for which the rest is kept."""

    floor: bytes
    because: RetentionRow

    @property
    def why(self) -> str:
        return f"{self.because.kind} {self.because.name} {self.because.why}"


class Nothing(NamedTuple):
    """Decision that nothing may go, and that this is fine; ``because`` of this reader, if there is one."""

    why: str
    because: RetentionRow | None = None


class Refused(NamedTuple):
    """Decision that nothing is cut because a reader is lost; a person must look."""

    problems: tuple[str, ...]

    @property
    def why(self) -> str:
        return "; ".join(self.problems)


def readers(facts: RetentionFacts, *, archived_only: bool = False) -> list[RetentionRow]:
    """Return the readers that the stream is kept for, the neediest first; with ``archived_only`` the archive too."""
    found = [_group(*group) for group in facts.groups]
    found += [_checkpoint(name, last_id, facts.span) for name, last_id, _ in facts.checkpoints if last_id is not None]
    found += [RetentionRow("saved position", *one, "would begin here again if it were lost") for one in facts.saved]
    if archived_only and facts.archived is not None:
        found.append(RetentionRow("archive", "archived", facts.archived, "is archived up to here"))
    return sorted(found, key=lambda reader: rank(reader.keeps_from))


def young(now_ms: int, keep_s: float) -> RetentionRow:
    keeps_ms = int(keep_s * 1000)
    return RetentionRow("age", span(keeps_ms), b"%d-0" % max(0, now_ms - keeps_ms), "is not over yet")


@dataclass(frozen=True)
class Retention:
    """Retention of what no reader needs, until ``memory_share`` of Redis' memory is used: the last ``keep_s`` seconds,
    and what is not archived where an archive is kept (``heeds_archive``). ``archived_only``: it
    cuts only archived entries, whatever the memory."""

    keep_s: float = 0.0
    memory_share: float = 1.0
    archived_only: bool = False
    heeds_archive: bool = False

    def gives_way(self, memory: MemoryUse | None) -> bool:
        """Return whether so much memory is used (None: not known) that only what is needed is kept."""
        return memory is not None and memory.share >= self.memory_share

    def wishes(self, facts: RetentionFacts, now_ms: int) -> list[RetentionRow]:
        found = [young(now_ms, self.keep_s)] if self.keep_s else []
        if self.heeds_archive and facts.archived is not None:
            found.append(RetentionRow("archive", "archived", facts.archived, "is archived up to here"))
        return found

    def held_back(self, facts: RetentionFacts, decision: Cut | Nothing | Refused, now_ms: int) -> str:
        """Return who keeps entries for an hour longer than is wished; "" when nobody does."""
        if isinstance(decision, Refused):
            return f"nothing is cut: {decision.why}"
        row = decision.because
        if row is None or facts.span is None or rank(row.keeps_from) >= rank(facts.span.last_generated):
            return ""  # at the end: it keeps nothing
        if row.kind == "age" and facts.span.first is not None and milliseconds(facts.span.first) > now_ms + _LONG_MS:
            return f"its first id, {facts.span.first.decode()}, is ahead of Redis' clock, so its age is unknown"
        is_long = milliseconds(row.keeps_from) < now_ms - int(self.keep_s * 1000) - _LONG_MS
        return f"{row.kind} {row.name} {row.why} ({row.keeps_from.decode()})" if is_long else ""


def decide(
    facts: RetentionFacts, *, archived_only: bool = False, wished: Sequence[RetentionRow] = (), gathered_by: str = ""
) -> Cut | Nothing | Refused:
    """Decide what may be cut. ``archived_only``: cut only archived entries, so nothing without an archive. ``wished``:
    what is kept beside what readers need. ``gathered_by``: the gather group of a source, of which only gathered entries
    are cut: so nothing before the group has gathered under this name, nor while it is ahead of the stream, when it is
    not certain that anything below it was gathered."""
    if gathered_by:
        # A copied or renamed stream brings its groups along, but neither saved positions nor what log consumers noted.
        is_saved = gathered_by in [name for name, _ in facts.saved]
        gathered = next((delivered for name, delivered, _ in facts.groups if name == gathered_by and is_saved), None)
        if gathered is None or (facts.span is not None and rank(gathered) > rank(facts.span.last_generated)):
            return Nothing("it is not gathered")
    if facts.span is None or facts.span.first is None:
        return Nothing("the stream is empty")
    problems = _lost(facts, facts.span, archived_only)
    if problems:
        return Refused(tuple(problems))
    needy = readers(facts, archived_only=archived_only)
    if not any(reader.kind != "archive" for reader in needy):
        return Nothing("nobody reads this stream: no group and no checkpoint says what is needed")
    if archived_only and facts.archived is None:
        return Nothing("nothing is archived yet, and only what is archived may go")
    neediest = min([*wished, *needy], key=lambda reader: rank(reader.keeps_from))
    if rank(neediest.keeps_from) <= rank(facts.span.first):
        why = f"{neediest.kind} {neediest.name} {neediest.why} ({neediest.keeps_from.decode()}), and nothing lies below"
        return Nothing(f"everything is younger than {neediest.name}" if neediest.kind == "age" else why, neediest)
    return Cut(neediest.keeps_from, neediest)


def _group(name: str, delivered: bytes, oldest: bytes | None) -> RetentionRow:
    if oldest is not None and rank(oldest) <= rank(delivered):
        return RetentionRow("group", name, oldest, "has this entry pending")
    return RetentionRow("group", name, delivered, f"has read {'nothing yet' if delivered == ZERO else 'up to here'}")


def _checkpoint(name: str, last_id: bytes, span: Span | None) -> RetentionRow:
    begins = last_id == ZERO or (span is not None and span.first is not None and rank(last_id) < rank(span.first))
    return RetentionRow(
        "checkpoint", name, last_id, "has read nothing yet" if begins else "has stored effects up to here"
    )


def _lost(facts: RetentionFacts, span: Span, archived_only: bool) -> list[str]:
    there = {name for name, _, _ in facts.groups}
    problems = [
        f"group {name} is gone, and would read again from {keeps_from.decode()}: start its readers (a master), which"
        f" make it again, and look for `group_lost`, or `usher trim --forget-group {shlex.quote(name)}` if it no longer"
        " exists"
        for name, keeps_from in facts.saved
        if name not in there
    ]
    for name, last_id, _ in facts.checkpoints:
        forget = f"`usher trim --forget {shlex.quote(name)}`"
        if last_id is None:
            problems.append(f"checkpoint {name}: what is noted cannot be read; start this log consumer, or {forget}")
            continue
        if rank(last_id) > rank(span.last_generated):
            why = f"above the stream's last id {span.last_generated.decode()}: the stream was lost or made anew"
        # A checkpoint just below the first entry has missed nothing.
        elif last_id != ZERO and span.first is not None and rank(last_id) + 1 < rank(span.first):
            why = f"below the first entry {span.first.decode()}: somebody else has cut what it had not read"
        else:
            continue
        at = f"checkpoint {name} is at {last_id.decode()}, {why}"
        problems.append(f"{at}; reset this log consumer, or {forget} if it no longer exists")
    if archived_only and facts.archived is not None and rank(facts.archived) > rank(span.last_generated):
        last = span.last_generated.decode()
        problems.append(
            f"the archive is at {facts.archived.decode()}, above the stream's last id {last}: it is of another stream;"
            " archive this one into another folder, or `usher trim --forget-archive`"
        )
    return problems
