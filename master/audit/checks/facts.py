"""Judge one look at a ticket stream as a whole: what the run log can and cannot prove. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from usher.common.protocol.keys import Keys
from usher.common.protocol.mishaps import DeclaredLoss
from usher.common.protocol.stream_id import ZERO, rank

#: The largest number in a column; greater ones become this.
_MOST = 2**63 - 1


@dataclass(frozen=True)
class AuditedStream:
    """A ticket stream, its group and its run log at the beginning of an audit.

    ``run_first``: the first record that is still in the run log, None when it is empty; ``run_capped``: records before
    it were cut off. ``ahead_ms``: how far ids of the stream are ahead of Redis' clock, by which records are dated
    (producers that give ids themselves, a clock that was set back). ``first``: the first entry that is still in the
    stream, None when it is empty. ``cut_unread``: how many entries were cut before they were read, within the last day
    or not counted yet. ``delivered``: how far the group had read when the run log had been read. ``declared``: losses
    that masters wrote down. ``max_deleted``: the highest entry that was ever deleted by its id; None: not known.
    """

    stream: str
    group: str
    time_ms: int
    length: int
    last_delivered: bytes
    pending: int
    run_records: int
    run_first: bytes | None
    run_capped: bool
    dead_letters: int
    ahead_ms: int = 0
    first: bytes | None = None
    cut_unread: int = 0
    delivered: bytes = ZERO
    declared: tuple[DeclaredLoss, ...] = ()
    max_deleted: bytes | None = None

    @property
    def keys(self) -> Keys:
        return Keys(self.stream, self.group)

    @property
    def floor_ms(self) -> int:
        """Return the time after which every execution is in the run log, by the id of its entry: it is recorded after
        the entry is added, and the records that were cut off were made before this."""
        if self.run_first is None:
            return min(self.time_ms + self.ahead_ms, _MOST)
        return min((rank(self.run_first) >> 64) + self.ahead_ms, _MOST) if self.run_capped else -1

    def ahead_of(self, noted_ms: int) -> AuditedStream:
        """Return these facts for an entry that was recorded ``noted_ms`` before the time of its id (0: none was)."""
        return replace(self, ahead_ms=max(0, noted_ms, (rank(self.last_delivered) >> 64) - self.time_ms))


def is_capped(length: int, added: int | None, cap: int) -> bool:
    """Return True when records were cut off a run log of ``length`` records. ``added``: how many it ever had, None
    before Redis 7.0: a log that is shorter than its cap has never been cut."""
    return added > length if added is not None else length >= cap > 0


def unproven(facts: AuditedStream, known_ms: int | None, skipped_order: int, before_known: int) -> Iterator[str]:
    """Yield what cannot be said of this stream, each in one sentence.

    ``known_ms``: time of the first entry that was handled; ``before_known``: entries not later than that, of which
    nothing is known; ``skipped_order``: repeats whose first execution may have been cut off.
    """
    if facts.run_first is None and facts.last_delivered != ZERO:
        yield (
            f"{facts.stream}: the run log is empty, so nothing can be said of past executions: order, overlaps, losses"
            " (USHER_RUN_LOG_LENGTH)"
        )
    elif facts.run_capped and facts.run_first is not None:
        yield (
            f"{facts.stream}: the run log was capped; executions recorded before {facts.run_first.decode()} are not in"
            " it, so order, losses and repeats are proven for entries added after that only (raise"
            " USHER_RUN_LOG_LENGTH, or archive it: usher audit archive)"
        )
    if facts.ahead_ms and facts.run_capped:
        yield (
            f"{facts.stream}: ids are up to {facts.ahead_ms:,} ms ahead of Redis' clock, so that much less is proven (a"
            " clock set back? own ids?)"
        )
    if known_ms is not None and (facts.first is None or known_ms < rank(facts.first) >> 64):
        gone = "its entries" if facts.first is None else f"the entries before {facts.first.decode()}"
        yield (
            f"{facts.stream}: {gone} are not in it any more (trimmed or deleted); whether all of them were handled was"
            " not looked at"
        )
    if facts.first is not None and facts.max_deleted is not None and rank(facts.max_deleted) > rank(facts.first):
        yield (
            f"{facts.stream}: entries were deleted inside it, the last one {facts.max_deleted.decode()} (XDEL); whether"
            " they were handled was not looked at"
        )
    if skipped_order:
        yield (
            f"{facts.stream}: {skipped_order:,} executions may be repeats of ones that were cut off the run log; their"
            " order is not judged"
        )
    if before_known:
        since = "none ever was" if known_ms is None else f"that was added at {known_ms} ms"
        yield (
            f"{facts.stream}: {before_known:,} entries are not later than the first one that was handled ({since}): the"
            " group may be younger"
        )


def maybe_damaged(stream: str, entries: int) -> str:
    """Return what cannot be said of entries from before a record that cannot be read."""
    return (
        f"{stream}: nothing says that {entries:,} entries were handled; they may be in a record of the run log that"
        " cannot be read (run_unreadable)"
    )


def maybe_dropped(stream: str, entries: int) -> str:
    """Return what cannot be said of entries from before the last drop of dead letters."""
    return (
        f"{stream}: nothing says that {entries:,} entries were handled; dead letters were dropped since they were"
        " added, or may have been before the action log begins (usher actions), and theirs may be among them"
    )
