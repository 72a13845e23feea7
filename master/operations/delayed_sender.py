"""Delayed sender: adds messages that were sent for later to their streams when they are due, while this master leads.

A producer adds such a message to ``LogKeys.delayed``, with the field ``due_ms``; from there two scripts take it, one by
one, to its stream. Before that it has no place in the order of its ticket: it comes after everything sent until then. A
look that is late, lost or doubled changes nothing, so every doubt is answered by another look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from usher.common.base.clock import now_s
from usher.common.base.log import ERROR, WARNING, event
from usher.common.protocol.keys import Keys, LogKeys
from usher.common.protocol.message import UNREADABLE_DUE
from usher.common.protocol.sources import SourceSelection
from usher.common.protocol.stream_id import ZERO, from_rank, rank
from usher.common.redis.client import CommandRefused, Link
from usher.master.leader.elector import Lead
from usher.master.leader.entries import Rejected
from usher.master.leader.leader_scripts import Due, DueLook, LeaderScripts, LeaderService

#: Most messages sent by one call.
_AT_ONCE = 200
#: Seconds until a message that cannot be sent is tried again, and until we look again when Redis refuses us (a user
#: without the rights).
_AGAIN_S = 60.0
_AGAIN_MS = int(_AGAIN_S * 1000)
#: Longest wait for the next message; and after how long we look although nothing was announced: a stream that was
#: deleted and came back with lower ids wakes nobody, nor does a message that was moved by operators of another group.
_BLOCK_S, _LOOK_S = 5.0, 60.0


class DelayedMessages(LeaderService):
    """Service that sends due messages. ``sources``: the gathered streams, of which a message names its own; None: there
    is one stream. ``on_rejected`` is called with those that became dead letters."""

    name = "delayed"
    waits_on_link = True
    stalls_after_s = 2 * _AGAIN_S

    def __init__(
        self,
        link: Link,
        keys: Keys,
        lead: Lead,
        sources: SourceSelection | None = None,
        ticket_field: str = "ticket_id",
        on_rejected: Callable[[Sequence[Rejected]], None] = lambda rejected: None,
    ) -> None:
        super().__init__(link, keys, lead, ticket_field)
        self._delayed = LogKeys(keys.stream).delayed
        self._sources, self._on_rejected = sources, on_rejected
        # The last line of the action log that was seen, from which we hear that an operator may have moved a message.
        self._seen_action: bytes | None = None
        # By reason, of which there are few: how many failed since the last log line, and when that was written.
        self._unsent: dict[str, tuple[int, float]] = {}
        self.sent = 0

    def work(self, steps: LeaderScripts) -> float:
        try:
            if self._seen_action is None:
                self._seen_action = self._newest_action()
            look = steps.due_delayed(_AT_ONCE)
            if look.unreadable:
                self._tell_unreadable(look.unreadable)
            if look.due:
                self._send(steps, look.due)
            else:
                # else the trouble of the last turn is reported until this one ends, and a wait is long
                self._trouble = None  # should this turn fail too, the pause grows
                self._await(look, steps.epoch)
        except CommandRefused as refused:
            event("delayed_messages_refused", level=ERROR, why=str(refused), way_out="see `usher doctor`")
            return _AGAIN_S
        return 0.0

    def _send(self, steps: LeaderScripts, due: Sequence[Due]) -> None:
        """Send to each stream on its own: Redis refuses a script as a whole when we may not write to one of its
        streams, or when one is in another slot of a cluster."""
        told, shares = list[tuple[Due, bytes | str]](), dict[str | None, list[Due]]()
        for one in due:
            shares.setdefault(self._stream_of(one), []).append(one)
        for stream, share in shares.items():
            try:
                outcomes = steps.send_delayed([(one, stream) for one in share], _AGAIN_MS)
            except CommandRefused as refused:
                if self._sources is None:
                    raise
                # They become due again later, so that they are not the first ones for ever.
                steps.send_delayed([(one, None) for one in share], _AGAIN_MS)
                outcomes = [str(refused)] * len(share)
            told += zip(share, outcomes, strict=True)
        self.sent += sum(isinstance(new_id, bytes) and new_id != b"" for _, new_id in told)
        self._tell([(one, why) for one, why in told if isinstance(why, str)])

    def _tell_unreadable(self, told: Sequence[tuple[bytes, bytes]]) -> None:
        if gone := [one for one, why in told if not why]:
            first = from_rank(rank(gone[0]))
            event("delayed_messages_deleted", level=WARNING, count=len(gone), first=first)
        if unreadable := [(one, why) for one, why in told if why]:
            first, why = unreadable[0]
            event("messages_rejected", level=ERROR, count=len(unreadable), reason=UNREADABLE_DUE, first=first, why=why)
            self._on_rejected([Rejected(one, b"", UNREADABLE_DUE) for one, _ in unreadable])

    def _tell(self, refused: Sequence[tuple[Due, str]]) -> None:
        """Log each reason once per retry interval, with the count since the last line: a mistake is made a thousand
        times."""
        by_reason: dict[str, list[Due]] = {}
        for one, why in refused:
            by_reason.setdefault(why, []).append(one)
        for why, ones in by_reason.items():
            before, told_s = self._unsent.get(why, (0, -math.inf))
            count = before + len(ones)
            if now_s() - told_s >= _AGAIN_S / 2:
                facts: dict[str, Any] = {"count": count, "first": from_rank(rank(ones[0].member)), "why": why}
                event("delayed_messages_not_sent", level=ERROR, again_in_s=_AGAIN_S, **facts)
                count, told_s = 0, now_s()
            self._unsent[why] = (count, told_s)

    def _stream_of(self, one: Due) -> str | None:
        if self._sources is None:
            return self._keys.stream
        return one.named.decode() if one.named and self._sources.takes(one.named) else None

    def _await(self, look: DueLook, epoch: int) -> None:
        looked_s = now_s()
        until_s = looked_s + (_LOOK_S if look.wait_ms is None else min(_LOOK_S, look.wait_ms / 1000))
        while (left_s := min(_BLOCK_S, until_s - now_s())) > 0 and self._lead.epoch == epoch and not self.stopping:
            block_ms = max(1, int(left_s * 1000))
            streams: tuple[str | bytes, ...] = (self._delayed, look.until)
            if self._seen_action:
                streams = (self._delayed, self._keys.actions, look.until, self._seen_action)
            if heard := self._link.call("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", *streams, block_s=left_s):
                for stream, [[entry_id, _]] in heard:
                    self._seen_action = entry_id if stream == self._keys.actions.encode() else self._seen_action
                return
            self.made_progress()

    def _newest_action(self) -> bytes:
        """Return the id of the last line of the action log; b"": it cannot be read, and nothing is heard of it."""
        try:
            newest = self._link.call("XREVRANGE", self._keys.actions, "+", "-", "COUNT", 1)
        except CommandRefused:
            return b""
        return newest[0][0] if newest else ZERO
