"""Judge one look at a ticket stream as a whole: what the run log can and cannot prove. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from usher.common.protocol.keys import Keys
from usher.common.protocol.mishaps import DeclaredLoss
from usher.common.protocol.stream_id import ZERO, rank
from usher.master.audit.batches import nth

_MOST = 2**63 - 1
_NAMES = (
    "began_ms time_ms delivered_ms delivered_nth last_nth first_nth deleted_nth base_ms order_ms drop_ms"
    " handled_before_ms ahead_before_ms"
)
#: The table ``facts``: a row for each stream.
FACTS = pa.schema([("stream", pa.string()), *((name, pa.int64()) for name in _NAMES.split())])
DECLARED = pa.schema([("stream", pa.string()), *((name, pa.int64()) for name in ("at_ms", "first_nth", "last_nth"))])


@dataclass(frozen=True)
class AuditedStream:
    """A ticket stream, its group and its run log at one moment.

    ``run_first``: the first record that is still in the run log, None when it is empty; ``run_capped``: records before
    it were cut off; ``run_deleted``: the last record that was deleted by its id. ``first``: the first entry that is
    still in the stream, None when it is empty. ``cut_unread``: how many entries were cut before they were read, within
    the last day or not counted yet. ``declared``: losses that masters wrote down. ``max_deleted``: the highest entry
    that was ever deleted by its id; None: not known.
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
    run_deleted: bytes | None
    dead_letters: int
    first: bytes | None
    cut_unread: int
    declared: tuple[DeclaredLoss, ...]
    max_deleted: bytes | None

    @property
    def keys(self) -> Keys:
        return Keys(self.stream, self.group)

    @property
    def base_ms(self) -> int:
        """Return the time, by Redis' clock, since which every record is in the run log; -1: it was never cut."""
        if self.run_first is None:
            return self.time_ms
        cut = [self.run_first] if self.run_capped else []
        if self.run_deleted is not None and rank(self.run_deleted) > rank(self.run_first):
            cut.append(self.run_deleted)
        return min(max((rank(one) >> 64 for one in cut), default=-1), _MOST)

    def row(self, before: AuditedStream, *, entries_read: bool, **more: int | None) -> dict[str, Any]:
        """Return the row of the table ``facts``. ``before``: as it was before anything was read; ``entries_read``: all
        entries that the group has read were, not only those that are pending."""
        place = {
            name: None if one is None else nth(one)
            for name, one in (("first", self.first), ("deleted", self.max_deleted))
        }
        return {
            "stream": self.stream,
            "began_ms": before.time_ms,
            "time_ms": self.time_ms,
            "delivered_ms": min(rank(self.last_delivered) >> 64, _MOST),
            "delivered_nth": nth(self.last_delivered),
            "last_nth": nth(before.last_delivered),
            "first_nth": place["first"],
            "deleted_nth": place["deleted"] if entries_read else None,
            "base_ms": self.base_ms,
            "order_ms": self.base_ms,
            **more,
        }

    def declared_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the table ``declared``: what masters declared to come again. What was taken out of the
        pending list had not succeeded."""
        for loss in self.declared:
            if loss.repeats is not None and loss.kind != "taken_out":
                first, last = loss.repeats
                yield {"stream": self.stream, "at_ms": loss.ms, "first_nth": nth(first), "last_nth": nth(last)}


def unproven(facts: AuditedStream, known: Mapping[str, Any], counts: Mapping[str, float]) -> Iterator[str]:
    """Yield what cannot be said of this stream, each in one sentence. ``known``: its row of the table of that name;
    ``counts``: figure -> entries."""
    stream, handled_ms = facts.stream, known["handled_ms"]
    if facts.run_first is None and facts.last_delivered != ZERO:
        yield (
            f"{stream}: the run log is empty, so nothing can be said of past executions: order, overlaps, losses"
            " (USHER_RUN_LOG_LENGTH)"
        )
    elif facts.run_capped and facts.run_first is not None:
        yield (
            f"{stream}: the run log was capped; executions recorded before {facts.run_first.decode()} are not in it, so"
            " order, losses and repeats are proven for entries added after that only (raise USHER_RUN_LOG_LENGTH, or"
            " archive it: usher audit archive)"
        )
    if facts.run_first and facts.run_deleted and rank(facts.run_deleted) > rank(facts.run_first):
        yield (
            f"{stream}: records of the run log were deleted inside it, the last one {facts.run_deleted.decode()}"
            f" (XDEL),"
            " so order, losses and repeats are proven for entries added after that only"
        )
    if known["ahead_ms"] and facts.base_ms >= 0 and facts.run_first is not None:
        yield (
            f"{stream}: ids are up to {known['ahead_ms']:,} ms ahead of Redis' clock, so that much less is proven (a"
            " clock set back? own ids?)"
        )
    if handled_ms is not None and (facts.first is None or handled_ms < rank(facts.first) >> 64):
        gone = "its entries" if facts.first is None else f"the entries before {facts.first.decode()}"
        yield (
            f"{stream}: {gone} are not in it any more (trimmed or deleted); whether all of them were handled was not"
            " looked at"
        )
    if facts.first is not None and facts.max_deleted is not None and rank(facts.max_deleted) > rank(facts.first):
        yield (
            f"{stream}: entries were deleted inside it, the last one {facts.max_deleted.decode()} (XDEL); whether they"
            " were handled was not looked at"
        )
    yield from _counted(stream, handled_ms, counts)


def _counted(stream: str, handled_ms: int | None, counts: Mapping[str, float]) -> Iterator[str]:
    count = {
        name: f"{int(counts.get(name, 0)):,}"
        for name in ("skipped_order", "before_known", "maybe_damaged", "maybe_dropped")
    }
    if counts.get("skipped_order"):
        yield (
            f"{stream}: {count['skipped_order']} executions may be repeats of ones that were cut off the run log; their"
            " order is not judged"
        )
    if counts.get("before_known"):
        since = "none ever was" if handled_ms is None else f"that was added at {handled_ms} ms"
        yield (
            f"{stream}: {count['before_known']} entries are not later than the first one that was handled ({since}):"
            f" the"
            " group may be younger"
        )
    if counts.get("maybe_damaged"):
        yield (
            f"{stream}: nothing says that {count['maybe_damaged']} entries were handled; they may be in a record of"
            f" the run"
            " log that cannot be read (run_unreadable)"
        )
    if counts.get("maybe_dropped"):
        yield (
            f"{stream}: nothing says that {count['maybe_dropped']} entries were handled; dead letters were dropped"
            f" since"
            " they were added, or may have been before the action log begins (usher actions), and theirs may be among"
            " them"
        )
