"""The two services of a reading loop that talk to Redis, each over a link of its own, and the state that all its
threads share."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from usher.common.base.clock import now_s
from usher.common.base.errors import GroupMissing, RedisTrouble, ReplyUnknown
from usher.common.base.log import event
from usher.common.protocol.stream_id import ZERO, rank
from usher.common.readers.board import ReadingBoard
from usher.common.readers.reliable_stream import ReliableStream, StreamMessage
from usher.common.redis.client import CommandRefused, Link
from usher.common.runtime.service import Service

log = logging.getLogger(__name__)

#: Most messages of one call.
_AT_ONCE = 500
_SAVE_POSITION_S = 1.0
_POLL_S = 0.02


@dataclass(frozen=True)
class LoopOptions:
    batch: int = 100  # messages of one read
    block_s: float = 2.0  # longest wait for new messages
    threads: int = 8  # handlers at the same time
    queue: int = 1000  # messages held at most, running ones included
    flush_s: float = 0.005  # longest wait before finished messages are acknowledged
    max_attempts: int = 5  # failures of a message before it becomes a dead letter
    retry_s: float = 0.2  # wait before the second attempt; doubles with each further one
    retry_cap_s: float = 60.0
    idle_s: float = 60.0  # entries that were not touched for so long are taken over
    claim_every_s: float = 5.0  # pause between two searches for them
    # acknowledged entries leave the stream too (unless another group reads it); dead letters always do, if complete
    remove: bool = False
    grace_s: float = 20.0  # at a stop: time for running handlers to finish

    def __post_init__(self) -> None:
        wrong = [name for name in ("batch", "threads", "queue", "max_attempts") if getattr(self, name) < 1]
        wrong += [
            name for name in ("block_s", "flush_s", "retry_s", "retry_cap_s", "grace_s") if getattr(self, name) < 0
        ]
        wrong += [name for name in ("idle_s", "claim_every_s") if getattr(self, name) <= 0]
        if wrong:
            raise ValueError(f"LoopOptions: out of range: {', '.join(wrong)}")


@dataclass
class LoopMetrics:
    """Counts since the start; written without a lock, for people and monitoring."""

    read: int = 0
    claimed: int = 0
    done: int = 0
    failed: int = 0
    dead_letters: int = 0
    stale: int = 0  # done here, but another reader had it by then
    handler_s: float = 0.0  # sum over all handlers that returned


@dataclass
class Shared:
    options: LoopOptions
    board: ReadingBoard
    metrics: LoopMetrics = field(default_factory=LoopMetrics)
    seen: bytes = ZERO  # the highest id that this loop was given


class StreamReader(Service):
    """Reads new messages while there is room, and looks for idle ones."""

    name = "stream-read"

    def __init__(self, link: Link, stream: ReliableStream, shared: Shared) -> None:
        super().__init__()
        self._link = link
        self._stream = stream
        self._shared = shared
        self._has_group = False
        self._unsure = False  # a reply of a read was lost: something may be pending for us unseen
        self._unsure_of_claim = False  # and it may have been a dead reader's
        self._cursor = ZERO
        self._claim_s = 0.0
        self._position_s = 0.0
        self._position_is_old = False
        self.stalls_after_s = 10.0 + shared.options.block_s

    @property
    def has_claimed_unseen(self) -> bool:
        """Return True when entries that are pending for us unseen may be a dead reader's."""
        return self._unsure_of_claim or self.alive

    def run_once(self) -> float:
        try:
            return self._turn()
        except GroupMissing as missing:
            if self._has_group:
                event(log, "group_lost", level=logging.ERROR, why=str(missing))
            self._has_group = False
            return 0.0 if self._ensured() else 0.1

    def _ensured(self) -> bool:
        start = self._stream.ensure_group(self._shared.seen)
        if start is not None:
            event(log, "group_created", reads_after=start)
            self._shared.seen = start
        self._has_group = True
        return True

    def _turn(self) -> float:
        if not self._has_group:
            self._ensured()
        board, options, metrics = self._shared.board, self._shared.options, self._shared.metrics
        now = now_s()
        if now >= self._position_s:
            self._position_s = now + _SAVE_POSITION_S
            self._save_position()
        count = min(options.batch, board.room)
        if count and self._unsure:
            self._read_unseen(count)
            return 0.0
        if count and now >= self._claim_s:
            metrics.claimed += self._claim(count)
            return 0.0
        if not count:
            return _POLL_S
        wait_s = min(options.block_s, max(0.0, self._claim_s - now), self.stalls_after_s / 2)
        try:
            found = self._stream.read_new(count, max(1, int(wait_s * 1000)))
        except ReplyUnknown:
            self._unsure = True
            raise
        metrics.read += board.add(found)
        if found:
            self._shared.seen = max(self._shared.seen, found[-1].stream_id, key=rank)
        return 0.0

    def _read_unseen(self, count: int) -> None:
        found = self._stream.read_pending(count, set(self._shared.board.held_ids()))
        for message in found:
            message.is_suspect = self._unsure_of_claim
        self._shared.board.add(found)
        if len(found) < count:
            self._unsure = self._unsure_of_claim = False

    def _claim(self, count: int) -> int:
        """Take one step through idle entries; the next one comes at once while there may be more."""
        options = self._shared.options
        try:
            claimed = self._stream.claim_idle(count, int(options.idle_s * 1000), self._cursor)
        except ReplyUnknown:
            self._unsure = self._unsure_of_claim = True
            raise
        self._cursor = claimed.cursor
        if claimed.cursor == ZERO:
            self._claim_s = now_s() + options.claim_every_s
            self._stream.forget_readers(int(max(60.0, 10 * options.idle_s) * 1000))
        if claimed.gone:
            event(log, "pending_entries_deleted", level=logging.WARNING, count=len(claimed.gone), first=claimed.gone[0])
        if claimed.messages:
            suspects = sum(message.is_suspect for message in claimed.messages)
            event(log, "messages_claimed", count=len(claimed.messages), suspects=suspects)
        return self._shared.board.add(claimed.messages)

    def _save_position(self) -> None:
        try:
            self._stream.save_position()
            self._position_is_old = False
        except GroupMissing:
            raise
        except (RedisTrouble, CommandRefused) as trouble:  # for example full memory; reading goes on
            if not self._position_is_old:
                event(log, "position_not_saved", level=logging.WARNING, why=str(trouble))
            self._position_is_old = True

    def interrupt(self) -> None:
        self._link.interrupt()


class StreamWriter(Service):
    """Writes the outcomes of messages, and touches the held ones. A batch is repeated until Redis has answered it."""

    name = "stream-write"

    def __init__(self, link: Link, stream: ReliableStream, shared: Shared) -> None:
        super().__init__()
        self._link = link
        self._stream = stream
        self._shared = shared
        self._done: deque[bytes] = deque()
        self._given_up: deque[tuple[StreamMessage, str, str]] = deque()
        self._charges: deque[tuple[bytes, int]] = deque()
        self._touch_s = 0.0

    def done(self, message: StreamMessage) -> None:
        self._done.append(message.stream_id)
        self.wake()

    def give_up(self, message: StreamMessage, reason: str, error: str) -> None:
        self._given_up.append((message, reason, error))
        self.wake()

    def charge(self, message: StreamMessage) -> None:
        self._charges.append((message.stream_id, message.failures))
        self.wake()

    @property
    def is_flushed(self) -> bool:
        return not (self._done or self._given_up or self._charges)

    def run_once(self) -> float:
        options, board = self._shared.options, self._shared.board
        if now_s() >= self._touch_s:
            self._touch()
        if self._done and len(self._done) < _AT_ONCE and not self.stopping:
            time.sleep(options.flush_s)
        self.flush()
        return min(1.0, max(0.0, self._touch_s - now_s())) if board.held else min(1.0, options.idle_s / 3)

    def flush(self) -> None:
        """Write all outcomes that are there now. Unanswered ones stay, and are written again: the steps answer a repeat
        with "not yours"."""
        stream, shared = self._stream, self._shared
        try:
            while self._charges:
                pairs = [self._charges[at] for at in range(min(_AT_ONCE, len(self._charges)))]
                stream.charge(dict(pairs))
                _forget(self._charges, len(pairs))
            while self._done:
                ids = [self._done[at] for at in range(min(_AT_ONCE, len(self._done)))]
                mine = stream.acknowledge(ids, shared.options.remove)
                _forget(self._done, len(ids))
                shared.metrics.done += len(mine)
                shared.metrics.stale += len(ids) - len(mine)
                shared.board.drop(ids)
            while self._given_up:
                message, reason, error = self._given_up[0]
                shared.metrics.dead_letters += len(
                    stream.move_to_dead_letters([message], reason, {message.stream_id: error})
                )
                self._given_up.popleft()
                shared.board.drop([message.stream_id])
        except GroupMissing:
            # No entry of it is pending: what comes again is judged again.
            shared.board.drop([*self._done, *(message.stream_id for message, _, _ in self._given_up)])
            for queue in (self._done, self._given_up, self._charges):
                queue.clear()
            raise

    def _touch(self) -> None:
        sent_s = now_s()
        try:
            others = self._stream.touch(self._shared.board.held_ids())
        except GroupMissing:
            others = []  # the reader makes it again; meanwhile no reader can take over
        waiting = {*self._done, *(message.stream_id for message, _, _ in self._given_up)}
        lost = [entry_id for entry_id in others if entry_id not in waiting]
        if lost:
            event(log, "messages_taken_over", level=logging.WARNING, count=len(lost), first=lost[0])
            self._shared.board.drop(lost)
        self._shared.board.touched(sent_s)
        self._touch_s = sent_s + self._shared.options.idle_s / 3


def _forget(queue: deque[Any], count: int) -> None:
    for _ in range(count):
        queue.popleft()
