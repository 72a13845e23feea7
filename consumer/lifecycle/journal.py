"""The journal: a list of the handlers that run in this process, in a file that outlives it.

It records a start before a crash can happen: a few bytes are written into a mapped file, just before the handler is
called. The kernel keeps the page whatever becomes of the process (after a power cut the file is not believed), so no
call to Redis and no fsync is needed, and a start costs less than a microsecond. The successor under the same name, on
the same machine, reads it.

The file lies beside the name lock and belongs to the process that holds the lock. A header names its boot and
incarnation, and says whether the process knew why it would end; then come slots of a fixed size, one per handler that
may run at a time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from usher.common.base.log import WARNING, event
from usher.common.protocol.attempts import Attempts
from usher.common.protocol.message import LONGEST_TICKET
from usher.consumer.handlers.message import Message
from usher.consumer.policy.quarantine import Left

_MAGIC = b"usher-j2"
#: magic, origin (boot, stream and group), incarnation, is_explained
_HEADER = struct.Struct("<8s64s96sB")
_EXPLAINED = _HEADER.size - 1
#: fence, start in microseconds, starts, failures, crashes, losses, id, length of the ticket, ticket, state
_SLOT = struct.Struct(f"<qqIIII41sH{LONGEST_TICKET}sB")
_STATE = _SLOT.size - 1  # last, so that it is written after the rest
_FREE, _RUNNING, _BLAMED, APART = 0, 1, 2, 3
_ID = re.compile(rb"[0-9]{1,20}-[0-9]{1,20}")
#: The slot of a start that found no free one.
_NOWHERE = 0


class Former(NamedTuple):
    """The content of the journal of a process that has ended. ``is_from_outside``: somebody else has ended it;
    ``by_itself``: its arbiter lives on, and the kernel has ended nothing for want of memory."""

    incarnation: str
    is_explained: bool
    left: list[Left]
    is_from_outside: bool = False
    by_itself: bool = False


class Journal:
    """The journal of one incarnation. ``started`` and ``ended`` may be called from any thread; each is one write."""

    def __init__(self, path: Path | None, origin: str, incarnation: str, slots: int, spare: int = 0) -> None:
        """Start an empty journal at ``path``. With None, or a file that cannot be made, it is kept in memory only: no
        process will read it, and all else is the same. ``spare``: further slots, for what runs absorb."""
        size = _HEADER.size + (slots + spare) * _SLOT.size
        self._slots = slots
        self._path = path
        self._map = _mapped(path, size)
        _HEADER.pack_into(self._map, 0, _MAGIC, origin.encode(), incarnation.encode(), 0)
        self._free = list(range(_HEADER.size, size, _SLOT.size))
        self._pack = _SLOT.pack_into

    def started(self, message: Message, start_us: int, state: int = _RUNNING) -> None:
        """Record a start: the handler is called next, in a child process if ``state`` is APART."""
        try:
            slot = self._free.pop()
        except IndexError:  # more handlers at once than slots
            return
        message.slot = slot
        ticket, known = message.ticket, (message.attempt, message.failures, message.crashes, message.losses)
        self._pack(self._map, slot, message.fence, start_us, *known, message.stream_id, len(ticket), ticket, state)

    def has_spare(self) -> bool:
        return len(self._free) > self._slots

    def ended(self, message: Message) -> None:
        slot = message.slot
        if slot:
            message.slot = _NOWHERE
            self._map[slot + _STATE] = _FREE
            self._free.append(slot)

    def running(self, ticket: bytes | None = None) -> list[Left]:
        """Return the starts of a ticket's messages, or of all, whose handlers run. A glance: one that starts or ends at
        this moment may be missing."""
        return [left for left in _all_left(self._map) if ticket in (None, left.ticket)]

    def blame(self, starts: Iterable[Message | Left]) -> None:
        """Note that this process is about to end because of these starts, and of no other."""
        for one in starts:
            if self._has(one):
                self._map[one.slot + _STATE] = _BLAMED
                if not self._has(one):  # it ended at this moment, and another message may have its slot
                    self._map[one.slot + _STATE] = _RUNNING
        self.explain()

    def forget(self, start: Message | Left) -> None:
        """Clear the record of a start that is in Redis. Its slot is not used again: its handler may still run."""
        if self._has(start):
            self._map[start.slot + _STATE] = _FREE

    def _has(self, start: Message | Left) -> bool:
        there = _left(self._map, start.slot) if start.slot else None
        return there is not None and there.stream_id == start.stream_id

    def explain(self) -> None:
        """Note that this process is about to end and knows why: the messages that run are not to blame, except for
        those that are blamed."""
        self._map[_EXPLAINED] = 1

    def remove(self) -> None:
        """Remove the file: nothing runs any more, and nothing will. Many names never come back, and each would leave a
        file."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


def _mapped(path: Path | None, size: int) -> mmap.mmap:
    if path is not None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.ftruncate(descriptor, 0)
                # Reserved now: a write to a page for which the disk has no room would end the process.
                os.posix_fallocate(descriptor, 0, size)
                return mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as problem:
            event("journal_unavailable", level=WARNING, path=str(path), why=str(problem))
    return mmap.mmap(-1, size)


def _left(content: bytes | mmap.mmap, at: int) -> Left | None:
    if content[at + _STATE] == _FREE:
        return None
    fence, start_us, starts, failures, crashes, losses, padded, length, ticket, state = _SLOT.unpack_from(content, at)
    entry_id = padded.rstrip(b"\0")
    if state == _FREE or not _ID.fullmatch(entry_id):
        return None
    known = Attempts(starts, failures, crashes, losses)
    return Left(ticket[:length], entry_id, fence, known, start_us, state == _BLAMED, at, state == APART)


def _all_left(content: bytes | mmap.mmap) -> list[Left]:
    slots = range(_HEADER.size, len(content) - _SLOT.size + 1, _SLOT.size)
    return [left for at in slots if (left := _left(content, at)) is not None]


def read_journal(path: Path, origin: str) -> Former | None:
    """Return what the last holder of the name left, if it had the same ``origin``; None when it left nothing that can
    be believed.

    Call it only while holding the name lock: then the writer has ended.
    """
    try:
        content = path.read_bytes()
        magic, its_origin, incarnation, is_explained = _HEADER.unpack_from(content)
    except (OSError, struct.error):
        return None
    name = incarnation.rstrip(b"\0")
    if magic != _MAGIC or its_origin.rstrip(b"\0") != origin.encode() or not name:
        return None
    with contextlib.suppress(UnicodeDecodeError):
        return Former(name.decode(), bool(is_explained), _all_left(content))
    return None
